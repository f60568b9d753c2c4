"""Least squares that knows every spread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.verdict_scenes.noise import Noise
from benchmarks.verdict_scenes.oracle import finds
from benchmarks.verdict_scenes.plan import Plan
from benchmarks.verdict_scenes.sweep import simulate
from benchmarks.verdict_scenes.truth import Gain, Truth

TWO_SETS: Any = {"num_sets": 2, "step_counts": (0, 1), "gains": (Gain("set-1", 0.02),)}


def found(noise: Noise, *, seed: int = 0, **plan: Any) -> dict[str, float]:
    truth = Truth(**TWO_SETS)
    return finds(simulate(truth, noise, Plan(again="none", **plan), np.random.default_rng(seed)), noise)


def test_the_width_is_that_of_independent_launches() -> None:
    noise = Noise(launch=0.01, block=0.02)
    mean = 0.01**2 + 0.02**2 / 12
    two_classes = 2 * mean / 2
    width = found(noise, every=None, closing=False)["oracle width"]
    assert width == pytest.approx(200 * 1.96 * two_classes**0.5, rel=1e-3), "each set once with drafts, once without"


def test_neighbouring_blocks_that_agree_tell_less() -> None:
    plain, correlated = Noise(launch=0.0, block=0.02), Noise(launch=0.0, block=0.02, autocorrelation=0.6)
    ratio = found(correlated)["oracle width"] / found(plain)["oracle width"]
    assert ratio == pytest.approx(2.0), "(1 + 0.6) / (1 - 0.6) = 4 times the variance of a mean"


def test_finds_what_can_be_found() -> None:
    assert found(Noise(launch=0.002, drift="line"))["oracle found"] == 1.0
    assert found(Noise(launch=0.20))["oracle found"] == 0.0


def test_is_no_more_often_wrong_than_it_says() -> None:
    noise, truth = Noise(launch=0.01), Truth(**{**TWO_SETS, "gains": (Gain("set-1", 1e-9),)})
    wrong = [finds(simulate(truth, noise, Plan(), np.random.default_rng(seed)), noise) for seed in range(200)]
    assert 0.01 <= np.mean([each["oracle found"] for each in wrong]) <= 0.10
