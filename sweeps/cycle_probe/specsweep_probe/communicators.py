"""NCCL communicators with variables of their own, several in one process.

NCCL reads each variable once per loaded library, not once per process. A copy of the library under another file name is
another library to the dynamic loader, so every NCCL set gets a copy, and keeps what it read. The variables are set with
C `setenv` while the communicator is made and graphs are captured, and restored afterwards: `os.environ` would not reach
NCCL, and would be left to whatever runs next.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOG_VARIABLES = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,GRAPH,P2P,SHM,TUNING"}
"""What makes NCCL write down which variables it read and what it chose for each size."""
FAILURE_MARK = "specsweep-state-failure "
"""Begins a line of the server's log that names a communicator that did not come up, as JSON."""
_GROUPS = ("_TP", "_ATTN_TP", "_MOE_TP", "_MOE_EP", "_PP")
"""Names of SGLang's process groups in `sglang.srt.distributed.parallel_state`."""
_EXIT_STATUS = 71
"""Of a rank whose communicator did not come up in time."""


class Communicator:
    """One NCCL set in this rank: a communicator for each process group, or why there is none."""

    def __init__(self, name: str, variables: Mapping[str, str]) -> None:
        self.name = name
        self.variables = dict(variables)
        self.by_group: dict[int, Any] = {}
        """`id` of a group -> its communicator; {} if no group has one."""
        self.environment: dict[str, str] = {}
        """NCCL_* by C getenv at the moment of initialisation."""
        self.error: str | None = None
        self.seconds = 0.0
        self.memory_mib: float | None = None

    def account(self) -> dict[str, Any]:
        """What the handshake says of it."""
        return {
            "environment": self.environment,
            "error": self.error,
            "seconds": self.seconds,
            "memory_mib": self.memory_mib,
        }


class Group:
    """One of SGLang's process groups, with what it was launched with."""

    def __init__(self, coordinator: Any) -> None:
        self.coordinator = coordinator
        self.launched = coordinator.pynccl_comm
        self.launched_custom = coordinator.ca_comm

    @contextmanager
    def using(self, communicator: Communicator | None, *, custom_all_reduce: bool) -> Iterator[None]:
        """Graphs captured inside use `communicator` (None: the launched one), and SGLang's own kernel or not."""
        chosen = self.launched if communicator is None else communicator.by_group[id(self.coordinator)]
        self.coordinator.pynccl_comm = chosen
        self.coordinator.ca_comm = self.launched_custom if custom_all_reduce else None
        try:
            yield
        finally:
            self.coordinator.pynccl_comm, self.coordinator.ca_comm = self.launched, self.launched_custom


def groups() -> list[Group]:
    """The distinct groups of more than one rank that have an NCCL communicator for graphs."""
    from sglang.srt.distributed import parallel_state

    found: dict[int, Any] = {}
    for name in _GROUPS:
        coordinator = getattr(parallel_state, name, None)
        if coordinator is not None and getattr(coordinator, "pynccl_comm", None) is not None:
            found.setdefault(id(coordinator), coordinator)
    return [Group(each) for each in found.values() if each.world_size > 1]


def make(communicator: Communicator, over: list[Group], folder: Path, *, rank: int, deadline_s: float) -> None:
    """Bring `communicator` up in all ranks, inside its variables; afterwards `error` is the same in all of them.

    A rank that hangs cannot be saved: after `deadline_s` it says so in the log and ends, and the server with it.
    """
    communicator.environment = read_environment("NCCL_")
    if not over:
        return  # one rank reduces nothing: the variables are there, and nothing reads them
    began_s, free = time.monotonic(), _free_bytes()
    watchdog = threading.Timer(deadline_s, _give_up, (communicator.name, rank, deadline_s))
    watchdog.daemon = True
    watchdog.start()
    try:
        library = _copy_of_nccl(folder / f"libnccl.{communicator.name}.{rank}.so")
        # the first to load decides: SGLang's wrapper opens the same path again, and gets this library
        ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_DEEPBIND)
        for group in over:
            communicator.by_group[id(group.coordinator)] = _communicator(group.coordinator, library)
    except (OSError, RuntimeError) as error:  # NCCL's errors are RuntimeErrors in SGLang's wrapper
        communicator.error = f"{type(error).__name__}: {error}"
        _say_failure(communicator.name, rank, communicator.error)
    failed = not agree(communicator.error is None, over)
    watchdog.cancel()
    if failed:
        communicator.by_group = {}
        communicator.error = communicator.error or "it did not come up in another rank"
    communicator.seconds = time.monotonic() - began_s
    communicator.memory_mib = (free - _free_bytes()) / 2**20


def agree(fine: bool, over: list[Group]) -> bool:  # noqa: FBT001
    """Whether all ranks of all groups say so."""
    return smallest(int(fine), over) == 1


def smallest(value: int, over: list[Group]) -> int:
    """The smallest `value` that any rank has."""
    if not over:
        return value
    import torch

    for group in over:
        held = torch.tensor([value], dtype=torch.int64)
        torch.distributed.all_reduce(held, op=torch.distributed.ReduceOp.MIN, group=group.coordinator.cpu_group)
        value = int(held.item())
    return value


@contextmanager
def c_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """C `getenv` sees `variables` inside; `os.environ` never does."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    before = {name: libc.getenv(name.encode()) for name in variables}
    for name, value in variables.items():
        libc.setenv(name.encode(), value.encode(), 1)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                libc.unsetenv(name.encode())
            else:
                libc.setenv(name.encode(), value, 1)


def read_environment(prefix: str | tuple[str, ...], names: frozenset[str] = frozenset()) -> dict[str, str]:
    """Variables that begin with `prefix` (one of them), and `names`, by C getenv: what NCCL itself would read here."""
    libc = ctypes.CDLL(None)
    entries = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
    libc.getenv.restype = ctypes.c_char_p
    wanted, position = {name.encode() for name in names}, 0
    while (entry := entries[position]) is not None:
        name = entry.split(b"=", 1)[0]
        if name.decode(errors="replace").startswith(prefix):
            wanted.add(name)
        position += 1
    values = {name.decode(): libc.getenv(name) for name in sorted(wanted)}
    return {name: value.decode(errors="replace") for name, value in values.items() if value is not None}


def log_file(folder: Path, name: str) -> str:
    """Where NCCL writes the log of this communicator; `%p` is the process id."""
    return str(folder / f"nccl-state.{name}.%p.log")


def _communicator(coordinator: Any, library: Path) -> Any:
    from sglang.srt.distributed.device_communicators.pynccl import PyNcclCommunicator

    made = PyNcclCommunicator(group=coordinator.cpu_group, device=coordinator.device, library_path=str(library))
    if not made.available:
        raise RuntimeError(f"SGLang cannot use {library.name} as an NCCL library")
    return made


def _copy_of_nccl(target: Path) -> Path:
    shutil.copyfile(_loaded_nccl(), target)
    return target


def _loaded_nccl() -> Path:
    """The NCCL library that this process uses, from its memory map; our own copies have other names."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith("libnccl.so"):
            return Path(path)
    raise OSError("this process has loaded no libnccl.so")


def _free_bytes() -> int:
    import torch

    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0


def _give_up(name: str, rank: int, deadline_s: float) -> None:
    _say_failure(name, rank, f"hung: it did not come up within {deadline_s:g} s")
    os._exit(_EXIT_STATUS)


def _say_failure(name: str, rank: int, error: str) -> None:
    words = json.dumps({"communicator": name, "rank": rank, "error": error})
    sys.stderr.write(f"{FAILURE_MARK}{words}\n")
    sys.stderr.flush()
