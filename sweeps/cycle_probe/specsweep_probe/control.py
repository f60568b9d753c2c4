"""Handshake and commands: a thread that sleeps in a FIFO until the engine asks for something."""

from __future__ import annotations

import ctypes
import json
import os
import pkgutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

from specsweep_probe.recorder import Recorder
from specsweep_probe.targets import Targets

FOLDER_VARIABLE = "SPECSWEEP_PROBE_DIR"
ASKED_VARIABLE = "SPECSWEEP_PROBE_ENV"


def start_control(recorder: Recorder, scheduler: Any, targets: Targets, warning: str | None) -> None:
    """Answer commands from now on, then leave the handshake."""
    folder = Path(os.environ[FOLDER_VARIABLE])
    rank, world_size = _rank()
    candidates = _step_candidates(scheduler)
    commands = folder / f"commands-{rank}"
    os.mkfifo(commands)
    threading.Thread(
        target=_answer_commands,
        args=(commands, folder, rank, recorder, candidates),
        name="specsweep-probe",
        daemon=True,
    ).start()
    _write(
        folder / f"handshake-{os.getpid()}.json", _handshake(rank, world_size, targets, warning, candidates, recorder)
    )


def _handshake(
    rank: int,
    world_size: int,
    targets: Targets,
    warning: str | None,
    candidates: list[int],
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
        "step_candidates": candidates,
        "environment": _environment(),
        "written_s": time.monotonic(),
    }


def _rank() -> tuple[int, int]:
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _step_candidates(scheduler: Any) -> list[int]:
    """Step counts that this server can be switched to; [] where it has no adaptive states."""
    controller = getattr(getattr(scheduler, "model_worker", None), "adaptive_controller", None)
    return [] if controller is None else sorted(controller.candidate_steps)


def _is_wrapped(name: str) -> bool:
    try:
        return hasattr(pkgutil.resolve_name(name), "__wrapped__")
    except (ImportError, AttributeError):
        return False


def _environment() -> dict[str, str]:
    """NCCL_* and what the engine asked for, as C getenv sees it: what NCCL itself would read in this process."""
    libc = ctypes.CDLL(None)
    entries = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
    libc.getenv.restype = ctypes.c_char_p
    names, position = set(), 0
    while (entry := entries[position]) is not None:
        names.add(entry.split(b"=", 1)[0])
        position += 1
    asked = set(os.environ.get(ASKED_VARIABLE, "").encode().split(b",")) - {b""}
    wanted = {name for name in names if name.startswith(b"NCCL_")} | asked
    values = {name.decode(): libc.getenv(name) for name in sorted(wanted)}
    return {name: value.decode(errors="replace") for name, value in values.items() if value is not None}


def _answer_commands(commands: Path, folder: Path, rank: int, recorder: Recorder, candidates: list[int]) -> None:
    recorder.clock.bind_thread()
    # read-write: the FIFO never reports end of file when a writer leaves
    with open(os.open(commands, os.O_RDWR), encoding="utf-8") as lines:  # noqa: PTH123
        for line in lines:
            command = json.loads(line)
            _write(folder / f"answer-{rank}-{command['id']}.json", _answer(command, recorder, candidates))


def _answer(command: dict[str, Any], recorder: Recorder, candidates: list[int]) -> dict[str, Any]:
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
        num_steps = command["num_steps"]
        if num_steps not in candidates:
            return {"error": f"no runtime state for {num_steps} steps; there are {candidates}"}
        recorder.pinned_steps = num_steps
        return {}
    return {"error": f"unknown command {do!r}; there are take, forget, record, pin"}


def _write(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.rename(path)
