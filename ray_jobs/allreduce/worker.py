"""One rank of the all-reduce table: times one NCCL set, then exits. Runs by file path on the server's interpreter.

NCCL binds its variables per process, so `ray_jobs.allreduce_table` starts this file once per rank and set. It needs
only the standard library and torch. Every rank appends JSON lines to `--out`: `{"stage": ...}` as it gets on (so a hang
can be named), then from rank 0 one `{"machine": ...}` and one `{"row": ...}` per size and mode.

What is timed: `--calls` all-reduces (bf16, sum, in place) one after the other, per repeat, divided by their number.
With CUDA both ends are events on the stream; `graph` replays one captured CUDA graph of the calls, `eager` launches
each from the host and is bound by that where NCCL is faster. On CPU the host clock is read.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
if __name__ == "__main__":  # before torch, whose import takes seconds: a rank must not outlive its owner
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

BYTES_PER_ELEMENT = 2


class Journal:
    """Appends JSON lines, each flushed: a killed rank leaves what it had."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, **record: Any) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


def main() -> None:
    """Measure as the arguments say."""
    arguments = _arguments()
    journal = Journal(arguments.out)
    journal.write(stage="nccl_init" if arguments.backend == "nccl" else "init")
    with _process_group(arguments) as device:
        journal.write(stage="first_all_reduce")
        _check(torch.full((1024,), arguments.rank + 1.0, dtype=torch.bfloat16, device=device), _eager, arguments)
        if arguments.rank == 0:
            journal.write(machine=_machine(device))
        for tokens in arguments.tokens:
            for row in _measure(arguments, device, tokens, journal):
                if arguments.rank == 0:
                    journal.write(row=row)
        journal.write(stage="done")  # before the communicator closes: what was measured stands even if that hangs


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--backend", choices=("nccl", "gloo"), required=True)
    parser.add_argument("--store", type=Path, required=True, help="file through which the ranks find each other")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--token-bytes", type=int, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", required=True)
    parser.add_argument("--calls", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True, help="0: only run each size once, for NCCL's own log")
    return parser.parse_args()


@contextlib.contextmanager
def _process_group(arguments: argparse.Namespace) -> Iterator[torch.device]:
    options: dict[str, Any] = {}
    device = torch.device("cpu")
    if arguments.backend == "nccl":
        device = torch.device("cuda", arguments.rank)
        torch.cuda.set_device(device)
        options["device_id"] = device  # communicator is made here, not at the first call
    dist.init_process_group(
        arguments.backend,
        store=dist.FileStore(str(arguments.store), arguments.world_size),
        rank=arguments.rank,
        world_size=arguments.world_size,
        **options,
    )
    yield device
    dist.destroy_process_group()


def _machine(device: torch.device) -> dict[str, Any]:
    machine: dict[str, Any] = {"torch_version": torch.__version__, "cuda_version": torch.version.cuda}
    if device.type == "cuda":
        machine["gpu_name"] = torch.cuda.get_device_name(device)
        machine["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()))
    return machine


def _measure(
    arguments: argparse.Namespace, device: torch.device, tokens: int, journal: Journal
) -> Iterator[dict[str, Any]]:
    """Rows of one size: `eager`, and on CUDA `graph`. A wrong sum is a row with outcome `wrong_output`."""
    buffer = torch.zeros(tokens * arguments.token_bytes // BYTES_PER_ELEMENT, dtype=torch.bfloat16, device=device)
    modes = {"eager": _eager, "graph": _capture} if device.type == "cuda" else {"eager": _eager}
    for mode, prepare in modes.items():
        journal.write(stage=f"{mode} {tokens} tokens")
        right = _check(buffer, prepare, arguments)
        buffer.zero_()
        run = prepare(buffer, arguments.calls) if arguments.repeats else None
        samples_us = [] if run is None else _time_us(run, device, arguments)
        del run  # a live CUDA graph would keep the communicator from closing
        right = _check(buffer, prepare, arguments) and right
        yield {
            "bytes": tokens * arguments.token_bytes,
            "tokens": tokens,
            "mode": mode,
            "samples_us": samples_us,
            "timer_kind": "cuda_event" if device.type == "cuda" else "host",
            "outcome": "ok" if right else "wrong_output",
        }


def _eager(buffer: torch.Tensor, calls: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(calls):
            dist.all_reduce(buffer)

    return run


def _capture(buffer: torch.Tensor, calls: int) -> Callable[[], None]:
    # thread_local: NCCL's watchdog thread queries events, which a global capture would forbid
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            dist.all_reduce(buffer)
    replay: Callable[[], None] = graph.replay
    return replay


def _check(
    buffer: torch.Tensor, prepare: Callable[[torch.Tensor, int], Callable[[], None]], arguments: argparse.Namespace
) -> bool:
    """Whether one all-reduce gives the exact sum in every element (LL128 can corrupt silently where it is forced)."""
    pattern = torch.arange(buffer.numel(), device=buffer.device) % 7
    run = prepare(buffer, 1)
    buffer.copy_(pattern + arguments.rank)
    run()
    size = arguments.world_size
    wanted = pattern * size + size * (size - 1) // 2  # small integers: exact in bf16 up to 256
    return bool((buffer == wanted.to(torch.bfloat16)).all().item())


def _time_us(run: Callable[[], None], device: torch.device, arguments: argparse.Namespace) -> list[float]:
    """Microseconds per call, one value per repeat."""
    for _ in range(arguments.warmup):
        run()
    if device.type == "cpu":
        return [_host_us(run) / arguments.calls for _ in range(arguments.repeats)]
    pairs = []
    for _ in range(arguments.repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1000 / arguments.calls for start, end in pairs]


def _host_us(run: Callable[[], None]) -> float:
    begun_ns = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - begun_ns) / 1000


if __name__ == "__main__":
    main()
