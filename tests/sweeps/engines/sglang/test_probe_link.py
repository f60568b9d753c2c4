"""Whatever a probe leaves in its folder is an answer or a ProbeError."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sweeps.engines.sglang.probe_link import ProbeError, ProbeLink
from tests.stub_lies import CYCLES

HANDSHAKE: dict[str, Any] = {
    "pid": 7, "rank": 0, "world_size": 1, "sglang": "0.5.21", "torch": "2", "device": "CPU", "timer_kind": "host",
    "missing": [], "warning": None, "states": {}, "communicators": {}, "environment": {"NCCL_PROTO": "LL"},
}  # fmt: skip
CYCLE: dict[str, Any] = {
    "started_ms": 1.0, "draft_ms": 0.1, "verify_ms": 0.7, "verify_forward_ms": 0.6, "extend_ms": 0.1, "gap_ms": 0.1,
    "cycle_ms": 1.0, "batch_size": 1, "num_steps": 2, "tokens": 2,
}  # fmt: skip
TAKEN: dict[str, Any] = {
    "timer_kind": "host", "dropped": 0, "states": [], "cycles": {name: [value] * 4 for name, value in CYCLE.items()},
}  # fmt: skip
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(1 << 70),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
QUIET = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100, deadline=None)


def ask(folder: Path, content: bytes) -> None:
    """One `take`, answered by `content`."""
    link = ProbeLink(folder)
    pipe = folder / "commands-0"
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDWR)
    try:
        (folder / "answer-0-1.json").write_bytes(content)
        cycles, _ = link.take([0], timeout_s=5.0, is_gone=lambda: False)
        assert cycles["rank"].to_pylist() == [0] * cycles.num_rows
    finally:
        os.close(held)


def test_a_sound_answer_is_taken(tmp_path: Path) -> None:
    ask(tmp_path, json.dumps(TAKEN).encode())


@QUIET
@given(st.sampled_from(sorted(TAKEN)) | st.sampled_from(sorted(CYCLE)), ANYTHING)
def test_no_answer_of_another_type_stops_the_engine(tmp_path: Path, field: str, value: object) -> None:
    cycles = {**TAKEN["cycles"], field: value} if field in CYCLE else TAKEN["cycles"]
    with suppress(ProbeError):
        ask(tmp_path, json.dumps({**TAKEN, "cycles": cycles, **({} if field in CYCLE else {field: value})}).encode())


@QUIET
@given(st.binary(max_size=60) | ANYTHING.map(lambda value: json.dumps(value).encode()))
def test_no_torn_or_foreign_answer_does(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ProbeError):
        ask(tmp_path, content)


@pytest.mark.parametrize("cut", range(0, 400, 37))
def test_an_answer_that_is_cut_is_torn(tmp_path: Path, cut: int) -> None:
    with pytest.raises(ProbeError, match="torn"):
        ask(tmp_path, json.dumps(TAKEN).encode()[:cut])


@pytest.mark.parametrize("lie", ["cycle_time_null", "cycle_time_text", "tokens_of_2_to_70", "columns_of_two_lengths"])
def test_cycles_that_no_table_holds_are_refused(tmp_path: Path, lie: str) -> None:
    with pytest.raises(ProbeError, match="rank 0"):
        ask(tmp_path, json.dumps({**TAKEN, "cycles": CYCLES[lie](0, TAKEN["cycles"])}).encode())


@QUIET
@given(st.sampled_from(sorted(HANDSHAKE)), ANYTHING)
def test_no_handshake_of_another_form_stops_the_engine(tmp_path: Path, field: str, value: object) -> None:
    (tmp_path / "handshake-7.json").write_text(json.dumps({**HANDSHAKE, field: value}), encoding="utf-8")
    with suppress(ProbeError):
        (found,) = ProbeLink(tmp_path).handshakes()
        assert isinstance(found.rank, int)


def test_a_handshake_without_a_field_is_named(tmp_path: Path) -> None:
    without = {name: value for name, value in HANDSHAKE.items() if name != "states"}
    (tmp_path / "handshake-7.json").write_text(json.dumps(without), encoding="utf-8")
    with pytest.raises(ProbeError, match=r"handshake-7\.json: wanted a handshake, but 'states' is missing"):
        ProbeLink(tmp_path).handshakes()
