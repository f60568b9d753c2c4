from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.engines.base import BlockRecord
from sweeps.engines.summary import summarise
from sweeps.results.tables import CYCLE_COLUMNS


def record(rows: list[dict[str, Any]], *, decode_s: float = 2.0) -> BlockRecord:
    base = {"started_ms": 0.0, "cycle_ms": 30.0, "batch_size": 1, "num_steps": 2, "timer_kind": "simulated", "rank": 0}
    filled = [{**base, "cycle_index": index, **row} for index, row in enumerate(rows)]
    cycles = pa.Table.from_pylist(filled, schema=CYCLE_COLUMNS)
    return BlockRecord(started_s=1.0, wall_s=3.0, decode_s=decode_s, decode_tokens=100, requests=(), cycles=cycles)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 8)), min_size=1, max_size=40))
def test_accept_length_is_a_ratio_of_sums(cycles: list[tuple[int, int]]) -> None:
    rows = [{"verify_ms": 29.0, "tokens": accepted * batch, "batch_size": batch} for accepted, batch in cycles]
    expected = sum(accepted * batch for accepted, batch in cycles) / sum(batch for _, batch in cycles)
    assert summarise(record(rows), block_index=0).accept_length == pytest.approx(expected)


def test_only_rank_0_is_summarised() -> None:
    rows = [{"verify_ms": 29.0, "tokens": 2}, {"verify_ms": 50.0, "tokens": 3, "rank": 1}]
    summary = summarise(record(rows), block_index=4)
    assert (summary.block_index, summary.num_cycles) == (4, 1)
    assert summary.verify_ms == 29.0
    assert summary.accept_histogram == (0, 0, 1)


def test_without_speculation_the_phases_are_missing_not_zero() -> None:
    summary = summarise(record([{"verify_forward_ms": 12.0, "tokens": 1}]), block_index=0)
    assert (summary.verify_ms, summary.draft_ms, summary.accept_length, summary.accept_histogram) == (None,) * 4
    assert summary.verify_forward_ms == 12.0
    assert summary.tok_s == 50.0


def test_batches_have_no_histogram() -> None:
    summary = summarise(record([{"verify_ms": 29.0, "tokens": 6, "batch_size": 4}]), block_index=0)
    assert summary.accept_histogram is None
    assert summary.accept_length == 1.5


def test_no_cycles_leave_throughput_alone() -> None:
    summary = summarise(record([]), block_index=0)
    assert (summary.num_cycles, summary.cycle_ms, summary.tok_s) == (0, None, 50.0)


def test_what_cannot_be_true_is_told_as_it_came() -> None:
    summary = summarise(record([{"verify_ms": 29.0, "tokens": 1, "batch_size": 2}]), block_index=0)
    assert summary.accept_length == 0.5
    assert summarise(record([{"verify_ms": 29.0, "tokens": -1}]), block_index=0).accept_histogram is None
    assert summarise(record([{"verify_ms": 29.0, "batch_size": 0}]), block_index=0).accept_length is None


def test_a_block_without_decode_time_has_no_throughput() -> None:
    assert summarise(record([], decode_s=0.0), block_index=0).tok_s is None
