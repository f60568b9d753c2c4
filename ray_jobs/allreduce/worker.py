"""One rank of the all-reduce table: times every NCCL set in one process.

It runs by file path on the server's interpreter and needs only the standard library, torch, `cells.py` and
`nccl_library.py` beside it. `--members` is a JSON list of communicators, `{"set", "copy", "env", "logs"}`, `logs` being
the folder for NCCL's own log. Each communicator gets a copy of NCCL of its own, which is a file in `--scratch` only
until every rank has loaded it. The ranks agree after each communicator; if NCCL refuses one, they go on without it.
Then the communicators are timed in rounds: in the order of the list, then backwards, and so on.

Every rank appends JSON lines to `--out`:
    {"stage": ..., "member": ..., "step": ...}          equal steps on all ranks: the slowest rank names a hang
    {"failed": {"member", "reason"}}                    NCCL refused this communicator on this rank
    {"wrong": {"member", "mode", "tokens"}}             the sum is wrong on this rank
and rank 0:
    {"machine": ...}
    {"ready": {"member", "init_s", "communicator_mib"}}
    {"cell": {"member", "round", "mode", "tokens", "samples_us", "timer_kind"}}

What is timed: `--calls` all-reduces (bf16, sum, in place) one after the other, per repeat, divided by their number.
With CUDA both ends are events on the stream; `graph` replays one captured CUDA graph of the calls, `eager` launches
each from the host and is bound by that if NCCL is faster. On CPU (gloo) the host clock is read.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

PR_SET_PDEATHSIG = 1


def end_with_owner(owner: str) -> None:
    """Have the kernel end this process when its parent ends, or end it now if the owner ended before.

    Args:
        owner: process id and PID namespace of who starts the ranks, as `123@pid:[4026531836]`. A launcher may stand
            between, and a container has another namespace, in which the owner cannot be seen.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    pid, _, namespace = owner.partition("@")
    if namespace == str(Path("/proc/self/ns/pid").readlink()) and not Path("/proc", pid).exists():
        sys.exit("the process that started this rank has ended")


if __name__ == "__main__":  # before torch, whose import takes seconds: a rank must not outlive its owner
    end_with_owner(sys.argv[sys.argv.index("--owner") + 1])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

if TYPE_CHECKING:
    from ray_jobs.allreduce.cells import AllReduce, Cell, is_right, make_cells, time_us
    from ray_jobs.allreduce.nccl_library import NcclLibrary, NcclRefusedError, copy_library, variables
else:
    from cells import AllReduce, Cell, is_right, make_cells, time_us
    from nccl_library import NcclLibrary, NcclRefusedError, copy_library, variables

BYTES_PER_ELEMENT = 2


class Journal:
    """Appends JSON lines, each flushed: a killed rank leaves what it had."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._step = 0

    def write(self, **record: Any) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def stage(self, name: str, member: int | None = None) -> None:
        self._step += 1
        self.write(stage=name, member=member, step=self._step)


class Ranks:
    """What the ranks tell each other, through a store."""

    def __init__(self, store: dist.Store, *, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size

    def from_first(self, key: str, make: Callable[[], bytes]) -> bytes:
        """What rank 0 makes. If that is refused on rank 0, all ranks raise NcclRefusedError."""
        if self._rank == 0:
            try:
                self._store.set(key, b"+" + make())
            except NcclRefusedError as error:
                self._store.set(key, b"-" + str(error).encode())
                raise
        answer = bytes(self._store.get(key))
        if answer[:1] == b"-":
            raise NcclRefusedError(f"rank 0: {answer[1:].decode()}")
        return answer[1:]

    def all_agree(self, key: str, *, good: bool) -> bool:
        """Whether all ranks say so; waits for all."""
        self._store.set(f"{key}/{self._rank}", b"1" if good else b"0")
        answers = [bytes(self._store.get(f"{key}/{rank}")) for rank in range(self._world_size)]
        return all(answer == b"1" for answer in answers)


def main() -> None:
    """Measure as the arguments say."""
    arguments = _arguments()
    journal = Journal(arguments.out)
    store = dist.FileStore(str(arguments.store), arguments.world_size)
    store.set_timeout(timedelta(days=1))  # the owner of the ranks has the deadlines
    ranks = Ranks(store, rank=arguments.rank, world_size=arguments.world_size)
    device = _device(arguments, store)
    if arguments.rank == 0:
        journal.write(machine=_machine(device))
    sizes = {tokens: tokens * arguments.token_bytes // BYTES_PER_ELEMENT for tokens in arguments.tokens}
    buffers = {tokens: torch.zeros(size, dtype=torch.bfloat16, device=device) for tokens, size in sizes.items()}
    live: dict[int, list[Cell]] = {}
    for number, member in enumerate(json.loads(arguments.members.read_text(encoding="utf-8"))):
        cells = _set_up(number, member, buffers, ranks, journal, arguments)
        if cells is not None:
            live[number] = cells
    for round_number in range(arguments.first_round, arguments.first_round + arguments.rounds):
        for number in list(live)[:: 1 if round_number % 2 == 0 else -1]:
            journal.stage("round", number)
            for cell in live[number]:
                samples_us = time_us(cell, device, warmup=arguments.warmup, repeats=arguments.repeats)
                if arguments.rank == 0:
                    where = {"member": number, "round": round_number, "mode": cell.mode, "tokens": cell.tokens}
                    timer = "cuda_event" if device.type == "cuda" else "host"
                    journal.write(cell={**where, "samples_us": samples_us, "timer_kind": timer})
    for number, cells in live.items():
        journal.stage("check", number)
        _check(number, cells, journal, arguments)
    journal.stage("done")
    ranks.all_agree("done", good=True)
    os._exit(0)  # without closing the communicators: what was measured stands even if that would hang


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--owner", required=True, help="process id and PID namespace of who starts the ranks")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--backend", choices=("nccl", "gloo"), required=True)
    parser.add_argument("--store", type=Path, required=True, help="file through which the ranks find each other")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--members", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True, help="folder for copies of NCCL")
    parser.add_argument("--token-bytes", type=int, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", required=True)
    parser.add_argument("--modes", choices=("eager", "graph"), nargs="+", required=True)
    parser.add_argument("--calls", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True, help="untimed repeats before those of each round")
    parser.add_argument("--repeats", type=int, required=True, help="per round")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--first-round", type=int, required=True)
    return parser.parse_args()


def _device(arguments: argparse.Namespace, store: dist.Store) -> torch.device:
    if arguments.backend == "gloo":
        inner = dist.PrefixStore("gloo", store)
        dist.init_process_group("gloo", store=inner, rank=arguments.rank, world_size=arguments.world_size)
        return torch.device("cpu")
    device = torch.device("cuda", arguments.rank)
    torch.cuda.set_device(device)
    torch.cuda.set_stream(torch.cuda.Stream())
    return device


def _machine(device: torch.device) -> dict[str, Any]:
    machine: dict[str, Any] = {"torch_version": torch.__version__, "cuda_version": torch.version.cuda}
    if device.type == "cuda":
        machine["gpu_name"] = torch.cuda.get_device_name(device)
        machine["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()))
    return machine


def _set_up(
    number: int,
    member: Mapping[str, Any],
    buffers: Mapping[int, torch.Tensor],
    ranks: Ranks,
    journal: Journal,
    arguments: argparse.Namespace,
) -> list[Cell] | None:
    """Make one communicator and everything that is timed on it, under its variables. None if a rank was refused it."""
    journal.stage("set_up", number)
    copy = arguments.scratch / f"libnccl-{number}.so"
    log = {"NCCL_DEBUG_FILE": str(Path(member["logs"]) / f"rank{arguments.rank}.log")}
    free_mib, began_s = _free_mib(arguments), time.perf_counter()
    cells: list[Cell] | None = None
    try:
        with variables({**member["env"], **log}):
            connect = _connect_nccl if arguments.backend == "nccl" else _connect_gloo
            all_reduce = connect(f"communicator {number}", copy, ranks, arguments)
            cells = make_cells(all_reduce, buffers, modes=arguments.modes, calls=arguments.calls)
            _check(number, cells, journal, arguments)
    except NcclRefusedError as error:
        cells = None
        journal.write(failed={"member": number, "reason": str(error)})
    journal.stage("agree", number)
    agreed = ranks.all_agree(f"set up {number}", good=cells is not None)
    if arguments.rank == 0:
        copy.unlink(missing_ok=True)
        after_mib = _free_mib(arguments)
        used_mib = None if free_mib is None or after_mib is None else free_mib - after_mib
        init_s = time.perf_counter() - began_s
        journal.write(ready={"member": number, "init_s": init_s, "communicator_mib": used_mib})
    return cells if agreed else None


def _free_mib(arguments: argparse.Namespace) -> float | None:
    if arguments.backend != "nccl":
        return None
    free_bytes: int = torch.cuda.mem_get_info()[0]
    return free_bytes / 2**20


def _connect_nccl(name: str, copy: Path, ranks: Ranks, arguments: argparse.Namespace) -> AllReduce:

    def make_copy() -> bytes:
        copy_library(copy)
        return b""

    ranks.from_first(f"{name} copy", make_copy)
    library = NcclLibrary(copy)
    unique_id = ranks.from_first(f"{name} id", library.unique_id)
    communicator = library.communicator(unique_id, rank=arguments.rank, world_size=arguments.world_size)

    def all_reduce(buffer: torch.Tensor) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        communicator.all_reduce(buffer.data_ptr(), count=buffer.numel(), stream=stream)

    return all_reduce


def _connect_gloo(_name: str, _copy: Path, _ranks: Ranks, _arguments: argparse.Namespace) -> AllReduce:
    group = dist.new_group()
    return lambda buffer: dist.all_reduce(buffer, group=group)


def _check(number: int, cells: Sequence[Cell], journal: Journal, arguments: argparse.Namespace) -> None:
    for cell in cells:
        if not is_right(cell, rank=arguments.rank, world_size=arguments.world_size):
            journal.write(wrong={"member": number, "mode": cell.mode, "tokens": cell.tokens})


if __name__ == "__main__":
    main()
