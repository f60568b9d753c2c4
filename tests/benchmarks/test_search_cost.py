"""The short benchmark, asserted with margin: shares and ratios of simulated seconds, no time of this machine."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.landscapes import LANDSCAPES
from benchmarks.policies import Run
from benchmarks.search_cost import OURS, available, gather, lines, summarise

NAMES = ("pcie-eagle3", "h200-48", "broken-accept-nccl")
POLICIES = ("tpe+halving", OURS)
SEEDS = 3


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    *_, results = gather(NAMES, POLICIES, SEEDS)
    return summarise(NAMES, POLICIES, results)


def test_ours_is_a_small_part_of_the_grid(figures: dict[str, Any]) -> None:
    assert figures["landscapes"]["pcie-eagle3"]["grid_over_ours"] > 40
    assert figures["landscapes"]["h200-48"]["grid_over_ours"] > 6


def test_ours_beats_the_others_and_is_near_the_bound(figures: dict[str, Any]) -> None:
    assert figures["landscapes"]["pcie-eagle3"]["best_other_over_ours"] > 2
    assert figures["landscapes"]["pcie-eagle3"]["ours_over_lower_bound"] < 2.5
    broken = figures["landscapes"]["broken-accept-nccl"]
    assert broken["best_other_over_ours"] is None or broken["best_other_over_ours"] > 0.8


def test_what_is_certified_is_right(figures: dict[str, Any]) -> None:
    certificate = figures["certificate_where_assumptions_hold"]
    assert certificate["certified"] == SEEDS * 2 * 2
    assert certificate["certified_over_2_percent"] == 0.0
    assert certificate["certified_within_1_percent"] > 0.8


def test_switch_and_model_are_told_apart(figures: dict[str, Any]) -> None:
    arms = figures["landscapes"]["h200-48"]["policies"]
    for policy in POLICIES:
        assert arms["switch_in_place"][policy]["launches_median"] <= arms["relaunch"][policy]["launches_median"]


def test_policies_that_cannot_run_are_named(figures: dict[str, Any]) -> None:
    assert "tpe" in figures["not_run"]
    assert OURS in available()
    assert len(lines(figures)) == len(NAMES) + 1


def test_within_is_when_the_incumbent_comes_to_stay() -> None:
    run = Run(
        times_s=(1.0, 2.0, 3.0, 4.0),
        shortfalls=(0.0, 0.05, 0.005, 0.0),
        ended_s=5.0,
        stop_reason="",
        certified=False,
        best_pruned=False,
        decisions_ms=(),
        findings=0,
        trials=4,
        launches=4,
    )
    assert run.within_s() == 3.0
    assert run.within_s(0.001) == 4.0
    assert run.final == 0.0


@pytest.mark.parametrize("name", LANDSCAPES)
def test_landscapes_are_readable_specs(name: str) -> None:
    landscape = LANDSCAPES[name]
    assert landscape.spec.control.every == 0
    assert landscape.profile.name == landscape.machine
