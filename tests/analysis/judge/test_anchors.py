"""Anchors inside servers: the drift that they show, and what the rest of the analysis makes of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from analysis.data.load import load
from analysis.judge.anchors import server_drift
from analysis.judge.cells import cells
from analysis.judge.verdict import verdict
from analysis.show.report import page
from sweeps.results.tables import ResultsFolder, read_table, write_part
from tests.analysis.synthetic import FOUNDING_CONTROL, FOUNDING_EAGLE, Run, World, write_sweep

PER_HOUR = 0.02
TOKENS = 400
COLD = 0.02
RUNS = [Run(arm=FOUNDING_CONTROL, role="control"), *(Run(arm=FOUNDING_EAGLE, relaunched=n % 2 == 0) for n in range(8))]
"""Four servers of two trials each."""


def add_anchors(folder: Path, *, per_hour: float = PER_HOUR, noise: float = 0.0005, seed: int = 0) -> None:
    """An anchor after each speculating trial, a cold one after each launch; servers have their luck and slow down."""
    results, rng = ResultsFolder(folder), np.random.default_rng(seed)
    luck = 0.0
    for trial in read_table(results, "trials").sort_by("started_s").to_pylist():
        if not trial["num_steps"]:
            continue
        rows, places = [], [("after", trial["ended_s"] - 10.0, 0.0)]
        if trial["relaunched"]:
            luck = rng.normal(0.0, 0.03)
            places.append(("before", trial["started_s"] + 60.0, COLD))
        for place, at_s, cold in places:
            tok_s = 80.0 * np.exp(luck - cold - at_s / 3600 * np.log1p(per_hour) + rng.normal(0.0, noise))
            rows.append(anchor(trial, place, at_s, float(tok_s)))
        write_part(results, "anchors", rows, trial_id=trial["trial_id"], attempt=trial["attempt"])


def anchor(trial: dict[str, object], place: str, at_s: float, tok_s: float) -> dict[str, object]:
    keys = {name: trial[name] for name in ("sweep_id", "trial_id", "attempt")}
    return {
        **keys,
        "place": place,
        "block_index": 0,
        "started_s": at_s,
        "wall_s": TOKENS / tok_s,
        "decode_s": TOKENS / tok_s,
        "decode_tokens": TOKENS,
        "tok_s": tok_s,
        "num_requests": 1,
        "num_cycles": TOKENS,
        "cycle_ms": 1000.0 / tok_s,
        "output_hash": "x",
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_sweep(tmp_path / "r", RUNS, World(trial_s=1800.0, launch_sd=0.02))


def test_a_sweep_without_anchors_shows_no_drift_inside_servers(folder: Path) -> None:
    assert server_drift(load(folder)) is None
    assert verdict(load(folder)).server_drift is None


def test_neither_the_luck_of_a_launch_nor_its_warming_up_is_drift(folder: Path) -> None:
    add_anchors(folder)
    found = server_drift(load(folder))
    assert found is not None
    assert (found.num_anchors, found.num_servers) == (8, 4)
    assert found.per_hour == pytest.approx(-PER_HOUR, abs=0.004)
    low, high = found.interval
    assert low < -PER_HOUR < high
    slower = server_drift(load(folder), "cycle_ms")
    assert slower is not None
    assert slower.slope == pytest.approx(-found.slope)


def test_anchors_are_no_blocks_of_a_configuration(folder: Path) -> None:
    before = cells(load(folder), "tok_s")
    add_anchors(folder)
    after = cells(load(folder), "tok_s")
    assert after.keys == before.keys
    np.testing.assert_array_equal(after.numerators, before.numerators)


def test_anchors_of_seconds_say_nothing_of_hours(tmp_path: Path) -> None:
    runs = [Run(arm=FOUNDING_CONTROL, role="control"), Run(arm=FOUNDING_EAGLE)] * 2
    folder = write_sweep(tmp_path / "r", runs, World(trial_s=300.0))
    for trial in read_table(ResultsFolder(folder), "trials").to_pylist():
        if trial["num_steps"]:
            seen = [(1.0, 80.3), (2.0, 79.9), (3.0, 80.0), (4.0, 80.2)]
            rows = [anchor(trial, "after", trial["started_s"] + at_s, tok_s) for at_s, tok_s in seen]
            write_part(ResultsFolder(folder), "anchors", rows, trial_id=trial["trial_id"], attempt=1)
    assert "too short to estimate a drift." in page(verdict(load(folder)))


def test_the_report_says_what_the_anchors_say(folder: Path) -> None:
    add_anchors(folder)
    text = page(verdict(load(folder)))
    assert "(step count 0) was measured 8 times: a drift of -1.92% an hour (95% interval -2.04% to -1.80%)" in text
