"""Waits for a starting server: crash noticed at once, one deadline per stage."""

from __future__ import annotations

import http.client
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path

from sweeps.engines.base import EngineError, Stage
from sweeps.engines.process.guard import ServerProcess
from sweeps.engines.sglang.server_log import diagnose, stage_reached, startup_timings
from sweeps.spec.model import Deadlines

_POLL_S = 0.1
_FIRST_PORT, _TRIES = 20000, 50
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Boot:
    """One start of one server, from the process to the port."""

    def __init__(
        self, server: ServerProcess, *, log_path: Path, deadlines: Deadlines, is_stopping: Callable[[], bool]
    ) -> None:
        self._server = server
        self._is_stopping = is_stopping
        self._log_path = log_path
        self._deadlines = deadlines
        self._stage: Stage = "load"
        self._stage_since_s = time.monotonic()
        self._log_bytes = -1

    def wait_for_port(self, port: int) -> None:
        """Return once a server answers on `port`. Raises EngineError if the server dies or a stage is late."""
        while not _answers(port):
            self._check()
            time.sleep(_POLL_S)

    def _check(self) -> None:
        if self._server.returncode() is not None:
            raise self.failure(self._server.returncode(), None)
        size = self._log_path.stat().st_size if self._log_path.exists() else 0
        if size != self._log_bytes:
            self._log_bytes = size
            stage = stage_reached(self.log())
            if stage != self._stage:
                self._stage, self._stage_since_s = stage, time.monotonic()
        if self._is_stopping():
            raise stopped(self._stage)
        limit_s = self._limit_s(self._stage)
        if time.monotonic() - self._stage_since_s > limit_s:
            raise self.failure(None, self._stage, f"stage {self._stage} took longer than its {limit_s:g} s")

    def _limit_s(self, stage: Stage) -> float:
        limits = self._deadlines
        known = {
            "load": limits.load,
            "nccl_init": limits.nccl_init,
            "capture": limits.capture,
            "draft_init": limits.draft_init,
        }
        return known.get(stage, limits.first_request)

    def failure(self, returncode: int | None, stage: Stage | None, late: str | None = None) -> EngineError:
        """The error that the log explains; `late` if the server lives but took too long."""
        diagnosis = diagnose(self.log(), returncode=returncode, stage=stage)
        message = f"{late}: {diagnosis.message}" if late else diagnosis.message
        return EngineError(message, stage=diagnosis.stage, kind=diagnosis.kind, log_tail=diagnosis.tail)

    def log(self) -> str:
        return self._log_path.read_text(encoding="utf-8", errors="replace") if self._log_path.exists() else ""


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
