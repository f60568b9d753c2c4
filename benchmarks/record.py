"""Where benchmarks leave their figures: `benchmarks/results/NAME.json`, with machine, versions and date."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
_VERSIONS_OF = ("ray", "optuna", "pyarrow", "numpy", "scipy")


def record(name: str, figures: Mapping[str, object]) -> Path:
    """Write one benchmark's figures; an earlier record of the name is replaced. Returns the file."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    content = {
        "benchmark": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "versions": {"python": platform.python_version(), **_versions()},
        "figures": {name: _rounded(value) for name, value in figures.items()},
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def _rounded(value: object) -> object:
    """Floats to six significant digits: more than any page shows."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


def figures_of(name: str) -> dict[str, object]:
    """What was recorded under this name."""
    content: dict[str, dict[str, object]] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content["figures"]


def _machine() -> dict[str, object]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else None,
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
    }


def _versions() -> dict[str, str]:
    installed: dict[str, str] = {}
    for each in importlib.metadata.distributions():
        installed.setdefault(each.name.lower(), each.version)  # of two on the path, Python imports the first
    return {name: installed[name] for name in _VERSIONS_OF if name in installed}
