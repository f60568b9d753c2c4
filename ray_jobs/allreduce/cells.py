"""One size and mode of one communicator: capture, check of the sum, timing. Loaded by the worker; needs torch alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

AllReduce = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class Cell:
    """One size and mode of one communicator, ready to run."""

    mode: str
    tokens: int
    buffer: torch.Tensor
    once: Callable[[], object]
    """One all-reduce."""
    run: Callable[[], object]
    """What is timed: `calls` all-reduces."""
    calls: int


def make_cells(
    all_reduce: AllReduce, buffers: Mapping[int, torch.Tensor], *, modes: Sequence[str], calls: int
) -> list[Cell]:
    """Cells of every size (key of `buffers`: tokens) and mode.

    Each size is reduced once before its capture: NCCL makes its connections then, and refuses then.
    """
    cells = []
    for tokens, buffer in buffers.items():
        for mode in modes:
            once, run = _repeated(all_reduce, buffer, 1), _repeated(all_reduce, buffer, calls)
            if mode == "graph":
                once()
                once, run = _captured(once), _captured(run)
            cells.append(Cell(mode=mode, tokens=tokens, buffer=buffer, once=once, run=run, calls=calls))
    return cells


def _repeated(all_reduce: AllReduce, buffer: torch.Tensor, calls: int) -> Callable[[], object]:
    def run() -> None:
        for _ in range(calls):
            all_reduce(buffer)

    return run


def _captured(run: Callable[[], object]) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own threads may go on
        run()
    replay: Callable[[], object] = graph.replay
    return replay


def is_right(cell: Cell, *, rank: int, world_size: int) -> bool:
    """Whether one all-reduce gives the exact sum in every element (LL128 can corrupt silently if it is forced)."""
    pattern = torch.arange(cell.buffer.numel(), device=cell.buffer.device) % 7
    cell.buffer.copy_(pattern + rank)
    cell.once()
    wanted = pattern * world_size + world_size * (world_size - 1) // 2  # small integers: exact in bf16 up to 256
    return bool((cell.buffer == wanted.to(torch.bfloat16)).all().item())


def time_us(cell: Cell, device: torch.device, *, warmup: int, repeats: int) -> list[float]:
    """Microseconds per all-reduce, one value per repeat."""
    cell.buffer.zero_()  # sums of zeros stay zero
    for _ in range(warmup):
        cell.run()
    if device.type == "cpu":
        return [_host_us(cell.run) / cell.calls for _ in range(repeats)]
    pairs = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        cell.run()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1000 / cell.calls for start, end in pairs]


def _host_us(run: Callable[[], object]) -> float:
    begun_ns = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - begun_ns) / 1000
