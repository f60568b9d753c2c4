"""Waiting for a process of a test, and for its ports."""

from __future__ import annotations

import socket
import subprocess
import time


def wait_until(holds: object, process: subprocess.Popen[bytes], *, timeout_s: float = 90.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not holds():  # type: ignore[operator]
        assert process.poll() is None, f"it ended with {process.returncode}"
        assert time.monotonic() < end_s, "it took too long"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
