"""Waits for a starting server: crash noticed at once, one deadline per stage."""

from __future__ import annotations

import http.client
import random
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sweeps.engines.base import EngineError, Stage
from sweeps.engines.process.guard import ServerProcess
from sweeps.engines.sglang.diagnosis import diagnose
from sweeps.engines.sglang.log_follower import LogFollower
from sweeps.engines.sglang.server_log import log_tail, startup_timings
from sweeps.spec.model import Deadlines

_POLL_S = 0.1
_MOVING_S = 30.0
"""A log that has grown within this time is one of a server at work."""
_KERNEL_COUNTERS = Path("/proc/vmstat")
_FIRST_PORT, _TRIES = 20000, 50
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Boot:
    """One start of one server, from the process to the port.

    Args:
        nccl_warnings: WARN lines that NCCL has written to files of its own so far.
    """

    def __init__(
        self,
        server: ServerProcess,
        *,
        log_path: Path,
        deadlines: Deadlines,
        is_stopping: Callable[[], bool],
        nccl_warnings: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._server = server
        self._is_stopping = is_stopping
        self._nccl_warnings = nccl_warnings
        self._deadlines = deadlines
        self._log = LogFollower(log_path)
        self._stage: Stage = "load"
        self._stage_since_s = time.monotonic()
        self._memory_kills = memory_kills()

    def wait_for_port(self, port: int) -> None:
        """Return once a server answers on `port`. Raises EngineError if the server dies or a stage is late."""
        while not _answers(port):
            self._check()
            time.sleep(_POLL_S)

    def _check(self) -> None:
        if self._server.returncode() is not None:
            raise self.failure(self._server.returncode(), None)
        if self._log.read() and self._log.stage != self._stage:
            self._stage, self._stage_since_s = self._log.stage, time.monotonic()
        if self._is_stopping():
            raise stopped(self._stage)
        name, limit_s = self._limit(self._stage)
        now_s = time.monotonic()
        if now_s - self._stage_since_s > limit_s:
            took = f"stage {self._stage} took longer than deadlines_s.{name}, {limit_s:g} s"
            if now_s - self._log.grew_s < min(_MOVING_S, limit_s / 2):
                raise EngineError(
                    f"{took}, and its log still grows: wanted a longer deadline",
                    stage=self._stage,
                    kind="late",
                    log_tail=log_tail(self.log()),
                )
            raise self.failure(None, self._stage, took)

    def _limit(self, stage: Stage) -> tuple[str, float]:
        """Name and seconds of a stage's deadline."""
        name = stage if stage in ("load", "nccl_init", "capture", "draft_init") else "first_request"
        return name, getattr(self._deadlines, name)

    def failure(self, returncode: int | None, stage: Stage | None, late: str | None = None) -> EngineError:
        """The error that the log explains; `late` if the server lives but took too long."""
        diagnosis = diagnose(
            self.log(),
            returncode=returncode,
            stage=stage,
            nccl_warnings=self._nccl_warnings(),
            host_memory_ran_out=memory_kills() > self._memory_kills,
        )
        message = f"{late}: {diagnosis.message}" if late else diagnosis.message
        return EngineError(message, stage=diagnosis.stage, kind=diagnosis.kind, log_tail=diagnosis.tail)

    def log(self) -> str:
        """The server's log so far (`LogFollower.text`)."""
        return self._log.text()


def memory_kills() -> int:
    """Processes that this host's kernel has killed for memory since it started; 0 if it does not tell."""
    try:
        lines = _KERNEL_COUNTERS.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def stopped(stage: Stage) -> EngineError:
    """The sweep was asked to end while a server was waited for."""
    return EngineError("the sweep was asked to stop", stage=stage, kind="engine_unavailable")


def free_port() -> int:
    """A TCP port that can be bound now, outside the range that the OS gives to connections.

    A server binds it a minute or more later. By then any connection of the machine may have been given a port that was
    free at first (seen on a node on which Ray and another server started meanwhile).
    """
    reserved = range(_FIRST_PORT, _first_ephemeral_port())
    for port in (*random.sample(reserved, min(_TRIES, len(reserved))), 0):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            bound: int = probe.getsockname()[1]
            return bound
    raise EngineError("no TCP port is free on this machine", stage="load", kind="engine_unavailable")


def _first_ephemeral_port() -> int:
    try:
        return int(_EPHEMERAL_PORTS.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _FIRST_PORT


def prove_closed(port: int) -> None:
    """Raises EngineError (`gpu_not_clean`) if somebody still listens on a stopped server's port."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise EngineError(
                f"port {port} of the stopped server still accepts connections", stage="stop", kind="gpu_not_clean"
            )


def _answers(port: int) -> bool:
    """Any HTTP status will do. A listener alone will not: while it starts, SGLang tries its port and lets it go."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
    try:
        connection.request("GET", "/model_info")
        connection.getresponse()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True


def boot_seconds(log: str, wall_s: float) -> dict[str, float]:
    """Seconds of a boot by activity; what the server's own account leaves over is `launch`."""
    timings = startup_timings(log)
    weight_load = (timings.weight_load_s if timings else None) or 0.0
    capture = (timings.capture_s if timings else None) or 0.0
    return {"launch": max(0.0, wall_s - weight_load - capture), "weight_load": weight_load, "capture": capture}
