"""The GPUs of one trial: their readings while a block runs, and proof that a stopped server left them free."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sweeps.engines.base import EngineError
from sweeps.engines.process.telemetry import GpuTelemetry, Readings

_LEFT_BYTES = 512 << 20
"""GPU memory that may differ from before the launch and still count as free: other contexts come and go."""
_POLL_S = 0.1


class TrialGpus:
    """Opened before a launch, closed after its stop. Does nothing if there is no NVML or no GPU.

    Args:
        folder: of this node; remembers what a GPU held before the server that did not let go of it. Later launches,
            of other processes too, measure against that, so that nothing is measured beside a leftover.
    """

    def __init__(self, count: int, folder: Path) -> None:
        self._folder = folder
        self._telemetry = GpuTelemetry.open(visible_gpus(count))
        now = self._telemetry.used_bytes() if self._telemetry else {}
        users = self._telemetry.users() if self._telemetry else ()
        self._strangers = frozenset(user.pid for user in users if (user.used_bytes or 0) > _LEFT_BYTES)
        """Were there before the launch, with more than a context."""
        self._served_by: set[int] | None = None
        self._used_before = {gpu: self._remembered(gpu, used) for gpu, used in now.items()}

    @contextmanager
    def window(self, own_pids: Callable[[], Collection[int]] = tuple) -> Iterator[Readings]:
        """Readings over the body, filled when it has ended; empty without NVML.

        `foreign_pids` lists compute processes that came after the first window began and are none of `own_pids`, and
        those that were there before the launch and hold more than a context; it is absent if there were none. NVML in
        a container may name pids of the host: so whoever is there when the first window begins counts as the server.
        """
        if self._telemetry is None:
            yield {}
            return
        users = {user.pid for user in self._telemetry.users()}
        if self._served_by is None:
            self._served_by = users - self._strangers
        with self._telemetry.window() as readings:
            yield readings
        users |= {user.pid for user in self._telemetry.users()}
        new = users - self._served_by - self._strangers
        if new:
            new -= set(own_pids())
            self._served_by |= users & set(own_pids())
        if foreign := sorted(new | (users & self._strangers)):
            readings["foreign_pids"] = ",".join(map(str, foreign))

    def prove_free(self, *, timeout_s: float) -> None:
        """Wait until the GPUs hold no more than before.

        Raises EngineError (`gpu_not_clean`) with what is left and who holds it.
        """
        if self._telemetry is None:
            return
        deadline = time.monotonic() + timeout_s
        while left := _more_used(self._telemetry.used_bytes(), self._used_before):
            if time.monotonic() > deadline:
                self._remember(left)
                users = sorted({user.pid for user in self._telemetry.users()})
                raise EngineError(
                    f"GPU memory still in use on {socket.gethostname()}: {left}; compute processes: {users}",
                    stage="stop",
                    kind="gpu_not_clean",
                )
            time.sleep(_POLL_S)
        for gpu in self._used_before:
            self._path(gpu).unlink(missing_ok=True)

    def close(self) -> None:
        if self._telemetry is not None:
            self._telemetry.close()
            self._telemetry = None

    def _remember(self, unclean: Iterable[str]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for gpu in unclean:
            self._path(gpu).write_text(str(self._used_before[gpu]), encoding="ascii")

    def _remembered(self, gpu: str, now: int) -> int:
        path = self._path(gpu)
        return min(now, int(path.read_text(encoding="ascii"))) if path.exists() else now

    def _path(self, gpu: str) -> Path:
        return self._folder / f"unclean-{gpu}"


def visible_gpus(count: int) -> tuple[str, ...]:
    """Ids of the trial's GPUs: those visible to this process, else the first `count`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(map(str, range(count)))
    return tuple(filter(None, visible.split(",")))


def _more_used(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, str]:
    more = {gpu: used - before.get(gpu, 0) for gpu, used in now.items()}
    return {gpu: f"{size >> 20} MiB" for gpu, size in more.items() if size > _LEFT_BYTES}
