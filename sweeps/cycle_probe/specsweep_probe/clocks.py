"""Marks in time: host time on a CPU, where work is synchronous, CUDA events on the current stream otherwise."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any


class HostClock:
    """A mark is `perf_counter_ns`. Exact on a CPU, where a call returns when its work is done."""

    kind = "host"
    mark = staticmethod(time.perf_counter_ns)

    def elapsed_ms(self, start: int, end: int) -> float:
        return (end - start) / 1e6

    def is_done(self, mark: int) -> bool:
        return True

    def release(self, marks: Iterable[int]) -> None:
        pass

    def bind_thread(self) -> None:
        pass


class CudaClock:
    """A mark is a recorded CUDA event, taken from a pool; it is read when the device has passed it."""

    kind = "cuda_event"

    def __init__(self) -> None:
        import torch

        self._event = torch.cuda.Event
        self._set_device = torch.cuda.set_device
        self._device = torch.cuda.current_device()
        self._pool: list[Any] = []

    def mark(self) -> Any:
        event = self._pool.pop() if self._pool else self._event(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end)

    def is_done(self, mark: Any) -> bool:
        return mark.query()

    def release(self, marks: Iterable[Any]) -> None:
        self._pool.extend(marks)

    def bind_thread(self) -> None:
        self._set_device(self._device)


def pick_clock() -> HostClock | CudaClock:
    """The clock of this process's device."""
    import torch

    return CudaClock() if torch.cuda.is_available() and torch.cuda.is_initialized() else HostClock()
