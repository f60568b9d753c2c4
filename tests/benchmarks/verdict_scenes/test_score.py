"""Claims against the truth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.verdict_scenes.claims import Claim, Judged, judge
from benchmarks.verdict_scenes.frames import results_of
from benchmarks.verdict_scenes.noise import Noise
from benchmarks.verdict_scenes.plan import Plan
from benchmarks.verdict_scenes.scenes import Goal
from benchmarks.verdict_scenes.score import figures_of, summarise
from benchmarks.verdict_scenes.sweep import Sweep, simulate
from benchmarks.verdict_scenes.truth import Gain, Truth

TWO = Truth(gains=(Gain("set-1", 0.02),))


def sweep(truth: Truth = TWO, **noise: Any) -> Sweep:
    return simulate(truth, Noise(**noise), Plan(), np.random.default_rng(0))


def effect(value: str, verdict: str, interval: tuple[float, float] = (-0.01, 0.01), **rest: Any) -> Claim:
    facts = {"kind": "effect", "metric": "tok_s", "dimension": "nccl", "reference": "default", "value": 0.0, **rest}
    return Claim(subject=value, verdict=verdict, interval=interval, **facts)


def figures(*claims: Claim, of: Sweep | None = None, text: str = "") -> dict[str, float]:
    return figures_of(of or sweep(), Judged(claims=claims, text=text))


def test_one_false_claim_makes_a_sweep_false() -> None:
    found = figures(effect("set-2", "undecided"), effect("set-3", "worse"), effect("set-1", "equivalent"))
    assert found["false NCCL effects"] == 1.0
    assert found["called equivalent"] == 1.0
    assert found["found"] == 0.0
    assert found["NCCL effects covered"] == pytest.approx(2 / 3), "two sets without effect; 2 % lies outside"
    assert found["NCCL effects width"] == pytest.approx(2.0)


def test_a_gain_is_found_only_in_its_direction() -> None:
    assert figures(effect("set-1", "better"))["found"] == 1.0
    assert figures(effect("set-1", "worse"))["found"] == 0.0
    assert "false NCCL effects" not in figures(effect("set-1", "better")), "nothing was said of a set without effect"


@pytest.mark.parametrize(
    ("speculation", "verdict", "wrong"),
    [(0.0, "better", 1), (0.0, "equivalent", 0), (0.0, "undecided", 0), (0.3, "better", 0), (0.3, "equivalent", 1)],
)
def test_whether_pays_is_wrong(speculation: float, verdict: str, wrong: int) -> None:
    of = sweep(Truth(speculation=speculation))
    facts: Any = {"kind": "pays", "reference": "default/0/1", "dimension": None}
    assert figures(effect("default/2/1", verdict, **facts), of=of)["pays wrong"] == wrong


def test_levels_are_compared_at_the_mean_of_the_drift() -> None:
    of = sweep(drift="line", launch=0.0, block=0.0)
    level = of.truth.value("tok_s", of.configurations[0]) * np.exp(-of.shift)
    facts: Any = {"kind": "level", "reference": None, "dimension": None}
    near = effect("default/0/1", "", (level - 0.1, level + 0.1), **facts)
    assert figures(near, of=of)["levels covered"] == 1.0


def test_a_number_without_an_interval_is_counted_as_such() -> None:
    facts: Any = {"kind": "break-even", "metric": "accept_length", "reference": "default/0/1", "dimension": None}
    bare = Claim(subject="default/2/1", interval=None, value=1.9, **facts)
    assert figures(bare) == {"break-even without interval": 1.0}


def test_the_outlier_is_named_by_one_of_its_trials() -> None:
    of = sweep(outlier=0.1)
    name = of.names[int(np.flatnonzero(of.table.launches == of.outlier)[0])]
    assert figures(of=of, text=f"{name} is slow")["outlier named"] == 1.0
    assert figures(of=of, text="all is well")["outlier named"] == 0.0


def test_figures_over_sweeps_leave_out_what_was_not_said() -> None:
    found = summarise([{"found": 1.0}, {"found": 0.0, "pays wrong": 0.0}, {"found": 1.0}, {"found": 1.0}])
    assert found["found"].value == 0.75
    assert found["found"].error == pytest.approx((0.75 * 0.25 / 4) ** 0.5)
    assert found["pays wrong"].num_sweeps == 1
    assert found["pays wrong"].error > 0, "one sweep without an error does not prove that there is none"


def test_goals_say_what_was_missed() -> None:
    assert Goal(most=0.05).said(0.04, 0.01) == "met"
    assert Goal(most=0.05).said(0.06, 0.01) == "missed by less than two errors"
    assert Goal(least=0.93, most=0.97).said(0.80, 0.01) == "missed"
    assert str(Goal(least=0.93, most=0.97)) == "93 to 97 %"


def test_the_package_judges_a_quiet_sweep_right() -> None:
    truth = Truth(speculation=0.2, gains=(Gain("set-1", 0.10),))
    of = sweep(truth, launch=0.002, block=0.005)
    found = figures_of(of, judge(results_of([of])[0]))
    assert found["found"] == 1.0
    assert found["pays wrong"] == 0.0
    assert found["pays decided"] == 1.0
