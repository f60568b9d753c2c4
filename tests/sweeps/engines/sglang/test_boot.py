from __future__ import annotations

import socket
from pathlib import Path

import pytest

from sweeps.engines.base import EngineError
from sweeps.engines.sglang.boot import free_port, prove_closed


def test_a_port_that_somebody_still_holds_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        with pytest.raises(EngineError, match=f"port {port}") as raised:
            prove_closed(port)
    assert raised.value.kind == "gpu_not_clean"
    prove_closed(port)


def test_a_free_port_is_closed() -> None:
    port = free_port()
    prove_closed(port)
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", port)) != 0


def test_a_servers_port_is_none_that_a_connection_could_be_given_meanwhile() -> None:
    first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
    assert all(20000 <= free_port() < int(first) for _ in range(50))


def test_a_taken_port_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        taken = held.getsockname()[1]
        monkeypatch.setattr("sweeps.engines.sglang.boot.random.sample", lambda ports, count: [taken])
        assert free_port() != taken
