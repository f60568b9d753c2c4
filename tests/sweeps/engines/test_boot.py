from __future__ import annotations

import socket

import pytest

from sweeps.engines.base import EngineError
from sweeps.engines.boot import free_port, prove_closed


def test_a_port_that_somebody_still_holds_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        with pytest.raises(EngineError, match=f"port {port}") as raised:
            prove_closed(port)
    assert raised.value.kind == "gpu_not_clean"
    prove_closed(port)


def test_a_free_port_is_closed() -> None:
    prove_closed(free_port())
