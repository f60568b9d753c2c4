"""The bench of verdicts, in short: few sweeps of few scenes, with the bounds that so few sweeps allow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from scipy.stats import binom

from benchmarks.record import figures_of
from benchmarks.verdict_scenes.page import kept, tables
from benchmarks.verdict_scenes.scenes import SCENES, Scene
from benchmarks.verdict_scenes.score import Figure
from benchmarks.verdicts import keep, lines, measure

BY_NAME = {scene.name: scene for scene in SCENES}
NUM_SWEEPS = 16
CHANCE = 1e-3
"""Of a miss by chance, if the true share is just at its goal."""


def most(goal: float, sweeps: int = NUM_SWEEPS) -> float:
    """Share of sweeps that is not exceeded but with CHANCE."""
    return float(binom.ppf(1 - CHANCE, sweeps, goal)) / sweeps


def measured(name: str) -> Mapping[str, Figure]:
    return measure(BY_NAME[name], NUM_SWEEPS)


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(SCENES)


def test_nothing_is_claimed_where_nothing_is() -> None:
    found = measured("null, drift 8 % (line), launches 0.5 %")
    for figure in ("false NCCL effects", "false steps and top-k", "pays wrong"):
        assert found[figure].value <= most(0.05), figure
    assert 1 - found["NCCL effects covered"].value <= most(0.07)


def test_ten_percent_are_found() -> None:
    found = measured("+10 %, launches 2 %")
    assert 1 - found["found"].value <= most(0.10)
    assert found["called equivalent"].value <= most(0.05)


def test_sweeps_of_a_scene_depend_on_its_name_and_their_number_alone() -> None:
    scene = BY_NAME["+2 %"]
    assert measure(scene, 3) == measure(scene, 3)
    assert measure(scene, 3) != measure(Scene(name="another", truth=scene.truth), 3)


@pytest.fixture
def few() -> dict[str, Figure]:
    return {
        "found": Figure(0.5, 0.02, 1000),
        "false NCCL effects": Figure(0.055, 0.004, 1000),
        "levels covered": Figure(0.95, 0.001, 1000),
        "levels width": Figure(3.25, 0.1, 1000),
        "break-even without interval": Figure(1.0, 0.0015, 1000),
    }


def test_the_page_shows_goals_errors_and_misses(few: Mapping[str, Figure]) -> None:
    shown = tables({"+2 %": {"sweeps": 1000, "core_s": 60.0, **kept(BY_NAME["+2 %"], few)}})
    (head, (row,)), (heads, (intervals,)), (_, counts) = shown.values()
    claims = dict(zip(head, row, strict=True))
    assert claims["found"] == "**50.0 ± 4.0** (at least 95 %), missed"
    assert claims["false NCCL effects (at most 5 %)"] == "5.5 ± 0.8, missed within error"
    assert claims["outlier named"] is None
    covered = dict(zip(heads, intervals, strict=True))
    assert covered["levels (93 to 97 %)"] == "95.0 ± 0.2 (width 3.25)"
    assert covered["break-even (93 to 97 %)"] == "**none in 100 %**, missed"
    assert ("levels covered", 1, 1, 0, 0) in counts


def test_lines_for_people_name_the_goal(few: Mapping[str, Figure]) -> None:
    (line,) = (line for line in lines(BY_NAME["+2 %"], few) if line.startswith("found"))
    assert line.endswith("50.00 +- 4.00 %, wanted at least 95 %: missed")


def test_a_scene_is_recorded_beside_all_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.record.RESULTS", tmp_path)
    monkeypatch.setattr("benchmarks.verdicts.RESULTS", tmp_path)
    for name, sweeps in (("heavy tails", 3), ("+2 %", 3), ("heavy tails", 5)):
        keep(BY_NAME[name], {"sweeps": sweeps})
    assert figures_of("verdicts") == {"scenes": {"heavy tails": {"sweeps": 5}, "+2 %": {"sweeps": 3}}}
