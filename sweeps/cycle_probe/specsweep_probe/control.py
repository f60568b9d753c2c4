"""Handshake and commands: a thread that sleeps in a FIFO until the engine asks for something."""

from __future__ import annotations

import json
import os
import pkgutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

from specsweep_probe.communicators import read_environment
from specsweep_probe.recorder import Recorder
from specsweep_probe.states import States
from specsweep_probe.targets import Targets

FOLDER_VARIABLE = "SPECSWEEP_PROBE_DIR"
ASKED_VARIABLE = "SPECSWEEP_PROBE_ENV"
WATCHED = ("NCCL_", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING", "SGLANG_SIMULATE_")
"""Prefixes of variables that are reported although nobody asked for them."""


def start_control(recorder: Recorder, states: States | None, targets: Targets, warning: str | None) -> None:
    """Answer commands from now on, then leave the handshake."""
    folder = Path(os.environ[FOLDER_VARIABLE])
    rank, world_size = _rank()
    commands = folder / f"commands-{rank}"
    os.mkfifo(commands)
    threading.Thread(
        target=_answer_commands,
        args=(commands, folder, rank, recorder, states),
        name="specsweep-probe",
        daemon=True,
    ).start()
    _write(folder / f"handshake-{os.getpid()}.json", _handshake(rank, world_size, targets, warning, states, recorder))


def _handshake(
    rank: int,
    world_size: int,
    targets: Targets,
    warning: str | None,
    states: States | None,
    recorder: Recorder,
) -> dict[str, Any]:
    import sglang
    import torch

    wrapped = {role: _is_wrapped(name) for role, name in targets.names().items()}
    on_gpu = recorder.clock.kind == "cuda_event"
    return {
        "pid": os.getpid(),
        "rank": rank,
        "world_size": world_size,
        "sglang": sglang.__version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "timer_kind": recorder.clock.kind,
        "wrapped": [role for role, found in wrapped.items() if found],
        "missing": [role for role, found in wrapped.items() if not found],
        "warning": warning,
        **({"states": {}, "communicators": {}} if states is None else states.account()),
        "environment": read_environment(WATCHED, _asked()),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "nccl": _nccl_version(),
        "written_s": time.monotonic(),
    }


def _nccl_version() -> str | None:
    import torch

    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _rank() -> tuple[int, int]:
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _is_wrapped(name: str) -> bool:
    try:
        return hasattr(pkgutil.resolve_name(name), "__wrapped__")
    except (ImportError, AttributeError):
        return False


def _asked() -> frozenset[str]:
    """Names of variables that the engine asked for."""
    return frozenset(os.environ.get(ASKED_VARIABLE, "").split(",")) - {""}


def _answer_commands(commands: Path, folder: Path, rank: int, recorder: Recorder, states: States | None) -> None:
    recorder.clock.bind_thread()
    # read-write: the FIFO never reports end of file when a writer leaves
    with open(os.open(commands, os.O_RDWR), encoding="utf-8") as lines:  # noqa: PTH123
        for line in lines:
            command = json.loads(line)
            _write(folder / f"answer-{rank}-{command['id']}.json", _answer(command, recorder, states))


def _answer(command: dict[str, Any], recorder: Recorder, states: States | None) -> dict[str, Any]:
    do = command["do"]
    if do == "take":
        return recorder.take()
    if do == "forget":
        recorder.forget()
        return {}
    if do == "record":
        recorder.forget()
        recorder.recording = bool(command["on"])
        return {}
    if do == "pin":
        held = [] if states is None else list(states.states)
        if states is None or command["state"] not in held:
            return {"error": f"no state {command['state']!r}; there are {', '.join(held) or 'none'}"}
        states.wanted = command["state"]
        return {}
    return {"error": f"unknown command {do!r}; there are take, forget, record, pin"}


def _write(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.rename(path)
