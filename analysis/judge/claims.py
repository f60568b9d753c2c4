"""Claims about differences: verdicts of a family of comparisons, corrected for their number.

Equivalence is claimed by two one-sided tests (Schuirmann 1987); multiplicity is corrected by Holm 1979. A difference is
claimed only if it still shows if any single launch is off by DOUBT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from analysis.judge.cells import HIGHER_IS_BETTER
from analysis.judge.priors import DOUBT

Verdict = Literal["better", "worse", "equivalent", "undecided", "not exercised"]
Covers = Literal["launches and blocks", "blocks and launches by the prior", "blocks"]

MARGIN = 0.01
"""A relative difference below this is of no interest: `equivalent within 1 %`."""
CONFIDENCE = 0.95
ALPHA = 1 - CONFIDENCE
_WIDE = "the interval includes both no difference and a difference beyond the margin"


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """One relative difference and what may be said of it."""

    metric: str
    effect: float
    """Relative: -0.27 is 27 % lower."""
    interval: tuple[float, float]
    """At CONFIDENCE, one comparison at a time."""
    covers: Covers
    verdict: Verdict
    reason: str | None
    margin: float
    num_launches: tuple[int, int]
    """Of the two sides."""
    num_blocks: int
    p_difference: float | None
    p_equivalence: float | None
    assumption: str | None = None
    """What stands in for repeats, in words; None if launches of the kinds compared were repeated."""
    rests_on: str | None = None
    """A launch that carries the difference: if it were off by DOUBT, the difference would not show."""


def judge(effects: Sequence[Effect]) -> list[Effect]:
    """Verdicts for a family of comparisons, each kind of claim corrected by Holm over the family."""
    differences = holm([effect.p_difference for effect in effects])
    equivalences = holm([effect.p_equivalence for effect in effects])
    family = sum(p is not None for p in differences)
    return [
        effect if difference is None else _judged(effect, difference, equivalence, family)
        for effect, difference, equivalence in zip(effects, differences, equivalences, strict=True)
    ]


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjustment; None stays None and does not count."""
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    running = 0.0
    for rank, (p, index) in enumerate(order):
        running = max(running, min(1.0, p * (len(order) - rank)))
        adjusted[index] = running
    return adjusted


def not_exercised(effect: Effect, reason: str) -> Effect:
    """The same numbers, about a setting that the engine did not use while decoding."""
    return replace(effect, verdict="not exercised", reason=reason, p_difference=None, p_equivalence=None)


def withheld(effect: Effect, reason: str) -> Effect:
    """The same numbers, from which nothing may be concluded."""
    return replace(effect, verdict="undecided", reason=reason, p_difference=None, p_equivalence=None)


def _judged(effect: Effect, difference: float, equivalence: float | None, family: int) -> Effect:
    if equivalence is not None and equivalence < ALPHA:
        return replace(effect, verdict="equivalent", reason=None)
    if difference < ALPHA:
        return _claimed(effect)
    if effect.p_difference is not None and effect.p_difference < ALPHA:
        return replace(
            effect,
            verdict="undecided",
            reason=f"significant on its own, but not after Holm's correction over {family} comparisons",
        )
    return replace(effect, verdict="undecided", reason=_wide(effect))


def judge_by_interval(effect: Effect) -> Effect:
    """Verdict of one comparison, whose interval was widened for a choice."""
    low, high = effect.interval
    if effect.reason:
        return effect
    if effect.p_equivalence is not None and -effect.margin < low and high < effect.margin:
        return replace(effect, verdict="equivalent")
    if low > 0 or high < 0:
        return _claimed(effect)
    return replace(effect, reason=_wide(effect))


def _claimed(effect: Effect) -> Effect:
    """A difference, unless it rests on one launch."""
    if effect.rests_on is not None:
        reason = f"the difference rests on one launch ({effect.rests_on}), which may be off by up to {DOUBT:.0%}"
        return replace(effect, verdict="undecided", reason=reason)
    return replace(effect, verdict=_direction(effect), reason=None)


def _wide(effect: Effect) -> str:
    return f"{effect.assumption}, and {_WIDE}" if effect.assumption else _WIDE


def _direction(effect: Effect) -> Verdict:
    return "better" if (effect.effect > 0) == (effect.metric in HIGHER_IS_BETTER) else "worse"
