"""What a live server says when it is asked for what it does not have, or has died meanwhile."""

from __future__ import annotations

import os
import signal
import sys
import urllib.error
from collections.abc import Iterator
from dataclasses import replace
from email.message import Message
from pathlib import Path

import pytest

from sweeps.engines.base import EngineError
from sweeps.engines.sglang.engine import SGLangEngine
from sweeps.engines.sglang.live_server import LiveServer
from sweeps.engines.sglang.state_plan import State
from sweeps.spec.model import EngineSpec, ResourceSpec, SearchSpec, SweepSpec, WorkloadSpec
from sweeps.spec.space import Space
from sweeps.spec.workload import plan_blocks

STUB = Path(__file__).parents[3] / "stub_server.py"
SPEC = SweepSpec(
    sweep="live",
    engine=EngineSpec(kind="sglang", launcher=(sys.executable, "-I", "-S", str(STUB)), model_path="stub"),
    search=SearchSpec(num_steps=(1, 2)),
    drafters={"any": "any"},
    resources=ResourceSpec(gpus=0),
)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveServer]:
    engine = SGLangEngine(SPEC, logs=tmp_path / "logs", node_folder=tmp_path / "node")
    engine.launch(Space(SPEC).configurations()[0], states=Space(SPEC).configurations())
    assert engine._live is not None
    yield engine._live
    engine.close()


def test_an_endpoint_that_the_server_refuses_is_named(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str, **_: object) -> bytes:
        raise urllib.error.HTTPError(url, 404, "Not Found", Message(), None)

    monkeypatch.setattr("sweeps.engines.sglang.live_server.ask_server", refuse)
    with pytest.raises(EngineError, match="/flush_cache: HTTP Error 404: Not Found") as refused:
        live.flush()
    assert refused.value.kind == "engine_unavailable"


def test_a_state_that_the_server_does_not_hold_is_refused_by_the_probe(live: LiveServer) -> None:
    seven = State(
        name="7x8-custom-default", num_steps=7, eagle_topk=1, num_draft_tokens=8, communicator=None, custom=True
    )
    with pytest.raises(EngineError, match="no state '7x8-custom-default'; there are 1x2-custom-default, 2x3"):
        live.pin(seven)


@pytest.mark.parametrize("call", ["flush", "forget"])
def test_a_server_that_died_between_two_blocks_is_a_crash(live: LiveServer, call: str) -> None:
    os.kill(live.handshakes[0].pid, signal.SIGKILL)
    with pytest.raises(EngineError) as gone:
        getattr(live, call)()
    assert gone.value.kind in ("crash", "killed", "host_oom")
    assert live.given_up()


def test_a_wish_to_stop_ends_every_wait(live: LiveServer) -> None:
    stopping = replace(live, is_stopping=lambda: True)
    assert stopping.given_up()
    assert not live.given_up()


def test_the_prefix_cache_is_emptied_before_a_prompt_that_it_may_hold(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted: list[str] = []
    monkeypatch.setattr(LiveServer, "post", lambda _, path, __: posted.append(path))
    first, second = plan_blocks(
        WorkloadSpec(prompt_tokens=8, output_tokens=4, blocks=2, warmup_blocks=0), folder=Path()
    )
    live.generate(first, "measure", timeout_s=60)
    live.flush_repeated(second)
    assert posted == []
    live.flush_repeated(first)
    live.flush_repeated(first)
    assert posted == ["/flush_cache"]
