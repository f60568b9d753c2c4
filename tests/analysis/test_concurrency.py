"""Several concurrencies in one sweep: each judged on its own, the first one as if it stood alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from analysis.data.load import load
from analysis.judge.verdict import SweepVerdict, verdict
from analysis.show.document import document
from analysis.show.report import page
from analysis.show.short_form import print_short_form
from sweeps.results.tables import ResultsFolder, read_part, read_table, write_part
from tests.analysis.synthetic import Arm, World, interleaved, with_effect, write_sweep

PLAIN = Arm()
CHAIN = Arm(num_steps=2, accept_length=2.4, draft_ms=0.6, verify_ms=16.0, extend_ms=0.3)
LONG = Arm(num_steps=5, accept_length=3.0, draft_ms=1.2, verify_ms=17.0, extend_ms=0.3)
PHASES = ("draft_ms", "verify_ms", "verify_forward_ms", "extend_ms", "gap_ms", "cycle_ms")
SLOWER = {0: 1.0, 2: 1.5, 5: 3.0}
"""By steps: seconds of a block of eight requests, against one of one request."""


def crowd(folder: Path, *, order: Sequence[int] = (1, 8)) -> Path:
    """Give every trial blocks at eight requests beside those at one."""
    results = ResultsFolder(folder)
    steps = {row["trial_id"]: row["num_steps"] for row in read_table(results, "trials").to_pylist()}
    every = read_table(results, "blocks").to_pylist()
    for trial_id, num_steps in steps.items():
        own = [row for row in every if row["trial_id"] == trial_id]
        rows = []
        for row in own:
            seconds = row["decode_s"] * SLOWER[num_steps]
            many = {
                "decode_s": seconds,
                "wall_s": seconds,
                "decode_tokens": 8 * row["decode_tokens"],
                "tok_s": 8 * row["decode_tokens"] / seconds,
                "accept_histogram": None,
            }
            many |= {name: row[name] and row[name] * SLOWER[num_steps] for name in PHASES}
            both = {1: {"concurrency": 1}, 8: {**many, "concurrency": 8}}
            rows += [{**row, **both[each], "started_s": row["started_s"] + 2 * at} for at, each in enumerate(order)]
        write_part(results, "blocks", rows, trial_id=trial_id, attempt=1)
    return folder


def half_as_fast(row: dict[str, Any]) -> dict[str, float]:
    return {"tok_s": row["tok_s"] / 2, "decode_s": row["decode_s"] * 2, "wall_s": row["wall_s"] * 2}


@pytest.fixture
def alone(tmp_path: Path) -> SweepVerdict:
    return verdict(load(write_sweep(tmp_path / "alone", interleaved([CHAIN, LONG]), World())))


@pytest.fixture
def crowded(tmp_path: Path) -> SweepVerdict:
    return verdict(load(crowd(write_sweep(tmp_path / "r", interleaved([CHAIN, LONG]), World()))))


def test_each_concurrency_has_its_own_winner(crowded: SweepVerdict) -> None:
    one, eight = crowded.by_concurrency
    assert (one.concurrency, eight.concurrency) == (1, 8)
    assert one.best is not None
    assert eight.best is not None
    assert (one.best.configuration_id, eight.best.configuration_id) == (LONG.configuration_id, CHAIN.configuration_id)
    assert one.speculation_pays.verdict == "better"
    assert eight.speculation_pays.plain is not None
    assert eight.speculation_pays.plain.tok_s == pytest.approx(8 * PLAIN.tok_s, rel=0.02)


def test_what_the_search_decided_on_is_judged_as_if_it_stood_alone(alone: SweepVerdict, crowded: SweepVerdict) -> None:
    assert (alone.by_concurrency, alone.concurrency) == ((), 1)
    for field in fields(SweepVerdict):
        if field.name not in ("by_concurrency", "about"):
            assert getattr(crowded, field.name) == getattr(alone, field.name), field.name


def test_a_server_that_runs_fewer_requests_than_asked_for_is_warned_of(crowded: SweepVerdict, tmp_path: Path) -> None:
    assert not [line for line in crowded.warnings if "shared a cycle" in line]
    results = ResultsFolder(crowd(write_sweep(tmp_path / "few", interleaved([CHAIN, LONG]), World())))
    for row in read_table(results, "trials").to_pylist():
        blocks = read_part(results, "blocks", trial_id=row["trial_id"], attempt=1).to_pylist()
        few = [{**each, **half_as_fast(each)} if each["concurrency"] == 8 else each for each in blocks]
        write_part(results, "blocks", few, trial_id=row["trial_id"], attempt=1)
    (said,) = [line for line in load(results.root).warnings if "shared a cycle" in line]
    assert said == "8 requests at a time were asked for, but only 4.0 shared a cycle on average"


def test_the_first_block_of_a_trial_tells_what_the_search_decided_on(tmp_path: Path) -> None:
    folder = crowd(write_sweep(tmp_path / "r", interleaved([CHAIN, LONG]), World()), order=(8, 1))
    found = verdict(load(folder))
    assert found.concurrency == 8
    assert found.best is not None
    assert found.best.configuration_id == CHAIN.configuration_id
    assert [each.concurrency for each in found.by_concurrency] == [1, 8]
    assert found.break_even_reason == "break-even is computed for one request at a time; this sweep searched at 8"
    assert (found.break_even, found.step_needs) == (None, ())


def test_speculation_that_pays_for_one_request_and_not_for_many_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SLOWER, 2, 2.5)
    found = verdict(load(crowd(write_sweep(tmp_path / "r", interleaved([CHAIN, LONG, with_effect(CHAIN, 0.0)])))))
    assert [each.speculation_pays.verdict for each in found.by_concurrency] == ["better", "worse"]
    said = "speculation pays at 1; does not pay at 8. The search used 1"
    assert said in page(found)
    console = Console(width=200, record=True, file=(tmp_path / "out").open("w"))
    print_short_form(found, console)
    console.file.close()
    assert said in console.export_text()
    told = json.loads(json.dumps(document(found), allow_nan=False))["by_concurrency"]
    assert [(each["concurrency"], each["speculation_pays"]["verdict"]) for each in told] == [
        (1, "better"),
        (8, "worse"),
    ]
