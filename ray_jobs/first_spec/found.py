"""What a node and a model folder say of themselves, for the first spec of a new user."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pynvml

from sweeps.spec.document import SpecError

_MAX_LINKS = 18
"""NVLink links of a GPU that NVML counts (H100, H200, B200)."""
_INTERPRETER_TIMEOUT_S = 60.0
"""For an interpreter to start on a slow shared file system."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpus:
    """The GPUs of one node."""

    name: str
    count: int
    memory_bytes: int
    """Of the smallest."""
    nvlink: bool
    """Whether every GPU has an NVLink link up; else they talk over PCIe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFolder:
    """A checkpoint on disk, or a name on a model hub."""

    path: str
    architecture: str | None = None
    """First of `architectures` in config.json; None for a name on a hub."""
    weights_bytes: int | None = None
    """Sum of its weight files; None for a name on a hub."""

    @property
    def is_local(self) -> bool:
        return self.architecture is not None


def look_at_gpus(nvml: ModuleType | Any = pynvml) -> Gpus | None:
    """The GPUs that NVML lists; None without NVML or without GPUs. Raises SpecError for a node of mixed GPUs."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        if not handles:
            return None
        names = sorted({nvml.nvmlDeviceGetName(handle) for handle in handles})
        if len(names) > 1:
            raise SpecError(f"GPUs: wanted one model, found {', '.join(names)}: give --gpus and adapt the spec by hand")
        return Gpus(
            name=names[0],
            count=len(handles),
            memory_bytes=min(int(nvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles),
            nvlink=len(handles) > 1 and all(_has_nvlink(handle, nvml) for handle in handles),
        )
    finally:
        nvml.nvmlShutdown()


def sglang_version(python: str) -> str | None:
    """Of the SGLang that an interpreter has; None if it has none. Raises SpecError if it cannot be run."""
    ask = "from importlib import metadata as m; print(next((d.version for d in m.distributions(name='sglang')), ''))"
    try:
        answer = subprocess.run(
            [python, "-c", ask], capture_output=True, text=True, timeout=_INTERPRETER_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SpecError(f"--python: wanted a Python interpreter, but {python} cannot be run: {error}") from error
    return answer.stdout.strip() or None


def read_model(given: str) -> ModelFolder:
    """A folder with `config.json` and all of its weights; a name without a slash at its start is left to the hub.

    Raises SpecError for a folder that is incomplete, with the first missing file.
    """
    folder = Path(given).expanduser()
    if not folder.is_dir():
        if given.startswith(("/", "./", "../", "~")):
            raise SpecError(f"{given}: wanted a model folder, but it does not exist")
        return ModelFolder(path=given)
    config = _json(folder / "config.json")
    architectures = config.get("architectures")
    if not (isinstance(architectures, list) and architectures and isinstance(architectures[0], str)):
        raise SpecError(f"{folder / 'config.json'}: wanted `architectures`, a list of names, got {architectures!r}")
    return ModelFolder(path=str(folder.resolve()), architecture=architectures[0], weights_bytes=_weights_bytes(folder))


def _weights_bytes(folder: Path) -> int:
    """Of the files that the index names, or of all weight files without an index."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = _json(index).get("weight_map")
        if not isinstance(shards, Mapping):
            raise SpecError(f"{index}: wanted `weight_map`, a mapping of tensors to files, got {type(shards).__name__}")
        files = [folder / str(name) for name in sorted(set(shards.values()))]
    else:
        files = sorted((*folder.glob("*.safetensors"), *folder.glob("*.bin")))
    missing = [path for path in files if not path.exists()]
    if missing or not files:
        lacks = f"{len(missing)} of {len(files)} weight files, {missing[0].name} first" if missing else "weights"
        raise SpecError(f"{folder}: the download is incomplete: it lacks {lacks}")
    return sum(path.stat().st_size for path in files)


def _json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(f"{path.parent}: wanted a model folder, but it has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise SpecError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise SpecError(f"{path}: wanted a JSON object, got {type(content).__name__}")
    return content


def _has_nvlink(handle: Any, nvml: ModuleType | Any) -> bool:
    for link in range(_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                return True
        except nvml.NVMLError:
            return False  # this GPU has no such link
    return False
