"""Prints, as one JSON line, what the server's interpreter sees: GPUs, driver, CUDA, NCCL, torch, SGLang.

Runs by file path on that interpreter; needs only the standard library (torch and SGLang are reported if present).
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import subprocess
from typing import Any


def main() -> None:
    """One JSON line; null for what is not there."""
    seen: dict[str, Any] = {
        "python": platform.python_version(),
        "sglang": _version("sglang"),
        "torch": _version("torch"),
        "plugins": [found.name for found in importlib.metadata.entry_points(group="sglang.srt.plugins")],
    }
    seen.update(_torch() if seen["torch"] else {"gpus": [], "used_bytes": [], "nccl": None, "cuda": None})
    seen["driver"] = _driver()
    print(json.dumps(seen))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> dict[str, Any]:
    import torch

    usable = torch.cuda.is_available()
    memory = [torch.cuda.mem_get_info(index) for index in range(torch.cuda.device_count())] if usable else []
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if usable else None,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if usable else [],
        "used_bytes": [total - free for free, total in memory],
    }


def _driver() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return answer.stdout.splitlines()[0].strip() if answer.returncode == 0 and answer.stdout else None


if __name__ == "__main__":
    main()
