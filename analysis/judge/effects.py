"""Whether a difference is real: contrasts between configurations, their intervals, their verdicts.

Two sources of doubt add up in every interval:

- *launches, communicators, drift*: by the posterior of the model (`analysis.judge.mixed_model`), a mixture of normals.
- *prompts*: what the paired difference varies by over blocks, beyond the noise that the model holds already. Blocks are
  the same for every trial, so what a prompt does to both sides cancels.

Intervals are quantiles of the mixture. Equivalence is claimed by two one-sided tests (Schuirmann 1987); multiplicity is
corrected by Holm 1979. A difference is claimed only if it still shows if any single launch is off by DOUBT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.special import chdtri, ndtr, ndtri

from analysis.judge.cells import HIGHER_IS_BETTER, Array, Cells
from analysis.judge.fitted import Fitted
from analysis.judge.mixed_model import DOUBT

Verdict = Literal["better", "worse", "equivalent", "undecided", "not exercised"]
Covers = Literal["launches and blocks", "blocks and launches by the prior", "blocks"]

MARGIN = 0.01
"""A relative difference below this is of no interest: `equivalent within 1 %`."""
CONFIDENCE = 0.95
_ALPHA = 1 - CONFIDENCE
_STANDS_ALONE = 1.645
"""Standard errors that a difference must keep if any one launch is doubted: one-sided 5 %."""
_BY_CHANCE = 0.1
"""Probability with which the noise of blocks alone may look like a difference between prompts that is not there."""
_WIDE = "the interval includes both no difference and a difference beyond the margin"
_NEVER_TWICE = "no {} server was launched twice, so the spread of launches is taken from other machines"


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """What one configuration reached, at the mean of the sweep's drift and nodes."""

    value: float
    interval: tuple[float, float] | None
    """At CONFIDENCE; None with fewer than two blocks."""
    covers: Covers
    num_launches: int
    num_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mixture:
    """A normal mixture on the log scale."""

    weights: Array
    means: Array
    errors: Array

    @property
    def mean(self) -> float:
        return float(self.weights @ self.means)

    def below(self, value: float) -> float:
        """Probability of less than `value`."""
        return float(self.weights @ ndtr((value - self.means) / self.errors))

    def quantiles(self, *shares: float) -> tuple[float, ...]:
        """Newton steps from those of one normal, each kept between the ends that earlier steps have shown."""
        wanted = np.array(shares)
        low = np.full(len(shares), float((self.means - 12 * self.errors).min()))
        high = np.full(len(shares), float((self.means + 12 * self.errors).max()))
        spread = np.sqrt(self.weights @ (self.errors**2 + (self.means - self.mean) ** 2))
        at = self.mean + spread * ndtri(wanted)
        for _ in range(40):
            away = (at[:, None] - self.means) / self.errors
            missed = ndtr(away) @ self.weights - wanted
            low, high = np.where(missed < 0, at, low), np.where(missed < 0, high, at)
            density = np.exp(-0.5 * away**2) @ (self.weights / self.errors) / np.sqrt(2 * np.pi)
            step = at - missed / np.maximum(density, 1e-300)
            step = np.where((step > low) & (step < high), step, (low + high) / 2)
            if np.abs(step - at).max() < 1e-7 * spread:
                break
            at = step
        return tuple(map(float, at))


def level(fitted: Fitted, key: str, *, selected_among: int = 1) -> Level | None:
    """One configuration on its own. None if it has no cell.

    Args:
        selected_among: among how many it was chosen as the fastest by these same numbers: the lower end of its interval
            is moved out by Bonferroni.
    """
    cells, posterior = fitted.cells, fitted.posterior
    value = cells.total(key)
    if value is None or posterior is None:
        return None
    rows: Array = np.array([float(name == key) for name in cells.keys])
    rows /= rows.sum()
    block_variance, num_blocks = _block_variance(fitted, rows)
    weights = np.append([float(name == key) for name in posterior.configurations], 1.0)
    found = _mixture(fitted, weights, block_variance)
    interval = None
    if num_blocks >= 2:
        low, high = found.quantiles(_ALPHA / 2 / selected_among, 1 - _ALPHA / 2)
        interval = (float(np.exp(low)), float(np.exp(high)))
    return Level(
        value=float(np.exp(found.mean)),
        interval=interval,
        covers="launches and blocks" if _kinds(fitted, rows) <= fitted.repeated else "blocks and launches by the prior",
        num_launches=_num_launches(cells, rows > 0),
        num_blocks=num_blocks,
    )


def product_interval(first: Fitted, second: Fitted, keys: tuple[str, str]) -> tuple[float, float] | None:
    """Of the product of two levels of two metrics, as normals on the log scale; None if one of them has no interval."""
    parts = []
    for fitted, key in zip((first, second), keys, strict=True):
        found = level(fitted, key)
        if found is None or found.interval is None:
            return None
        low, high = found.interval
        parts.append((float(np.log(found.value)), float(np.log(high / low)) / 2))
    middle = sum(mean for mean, _ in parts)
    half = float(np.sqrt(sum(width**2 for _, width in parts)))
    return float(np.exp(middle - half)), float(np.exp(middle + half))


def compare(fitted: Fitted, weights: Mapping[str, float], *, selected_among: tuple[int, int] = (1, 1)) -> Effect | None:
    """A contrast of configurations: the sum of weight x log value; its verdict still without multiplicity.

    Args:
        weights: by configuration; those above 0 sum to 1, those below to -1.
        selected_among: among how many each side was chosen by these same numbers: the end of the interval that such
            a choice flatters is moved out by Bonferroni.

    Returns None if a side has no cell, or there are fewer than two common blocks.
    """
    cells = fitted.cells
    counts = {key: cells.keys.count(key) for key in weights}
    if not all(counts.values()):
        return None
    rows: Array = np.array([weights[key] / counts[key] if key in counts else 0.0 for key in cells.keys])
    block_variance, num_blocks = _block_variance(fitted, rows)
    if num_blocks < 2:
        return None
    found = _contrast(fitted, rows, weights, block_variance)
    assumption = _assumption(fitted, rows)
    low, high = found.quantiles(_ALPHA / 2 / selected_among[0], 1 - _ALPHA / 2 / selected_among[1])
    effect = Effect(
        metric=cells.metric,
        effect=float(np.expm1(found.mean)),
        interval=(float(np.expm1(low)), float(np.expm1(high))),
        covers=_covers(fitted, assumption),
        verdict="undecided",
        reason=None,
        margin=MARGIN,
        num_launches=(_num_launches(cells, rows > 0), _num_launches(cells, rows < 0)),
        num_blocks=num_blocks,
        p_difference=2 * min(found.below(0.0), 1 - found.below(0.0)),
        p_equivalence=max(found.below(float(np.log1p(-MARGIN))), 1 - found.below(float(np.log1p(MARGIN)))),
        assumption=assumption,
        rests_on=_rests_on(fitted, rows, weights, block_variance, found.mean),
    )
    if cells.imported and min(effect.num_launches) < 2:
        return withheld(effect, "imported numbers, and one side was launched once: nothing is claimed without repeats")
    return judge([effect])[0] if selected_among == (1, 1) else _judge_by_interval(effect)


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
    if equivalence is not None and equivalence < _ALPHA:
        return replace(effect, verdict="equivalent", reason=None)
    if difference < _ALPHA:
        return _claimed(effect)
    if effect.p_difference is not None and effect.p_difference < _ALPHA:
        return replace(
            effect,
            verdict="undecided",
            reason=f"significant on its own, but not after Holm's correction over {family} comparisons",
        )
    return replace(effect, verdict="undecided", reason=_wide(effect))


def _judge_by_interval(effect: Effect) -> Effect:
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


def _num_launches(cells: Cells, chosen: npt.NDArray[np.bool_]) -> int:
    return len({launch for launch, used in zip(cells.launches, chosen, strict=True) if used})


def _kinds(fitted: Fitted, rows: Array) -> frozenset[str]:
    return frozenset(kind for kind, used in zip(fitted.kinds, rows, strict=True) if used)


def _covers(fitted: Fitted, assumption: str | None) -> Covers:
    if fitted.posterior is None:
        return "blocks"
    return "blocks and launches by the prior" if assumption else "launches and blocks"


def _assumption(fitted: Fitted, rows: Array) -> str | None:
    """Which kind of server the prior alone speaks for; None if launches of every kind compared were repeated."""
    if fitted.posterior is None or _within_launches(fitted.cells, rows):
        return None
    once = sorted(_kinds(fitted, rows) - fitted.repeated)
    return _NEVER_TWICE.format(" or ".join(once)) if once else None


def _within_launches(cells: Cells, rows: Array) -> bool:
    """Whether each launch serves both sides alike, so that what it does to all of its cells cancels."""
    names = np.array(cells.launches)
    return all(abs(rows[names == launch].sum()) < 1e-9 for launch in set(cells.launches))


def _contrast(fitted: Fitted, rows: Array, weights: Mapping[str, float], block_variance: float) -> _Mixture:
    if fitted.posterior is None:
        mean = float(rows @ fitted.cells.log_values())
        return _Mixture(weights=np.ones(1), means=np.array([mean]), errors=np.array([np.sqrt(block_variance + 1e-20)]))
    whole = np.append([weights.get(name, 0.0) for name in fitted.posterior.configurations], 0.0)
    return _mixture(fitted, whole, block_variance)


def _mixture(fitted: Fitted, weights: Array, block_variance: float) -> _Mixture:
    posterior = fitted.posterior
    assert posterior is not None
    variances = np.einsum("i,gij,j->g", weights, posterior.covariances, weights)
    return _Mixture(
        weights=posterior.weights,
        means=posterior.means @ weights,
        errors=np.sqrt(np.maximum(variances, 0.0) + block_variance + 1e-20),
    )


def _rests_on(
    fitted: Fitted, rows: Array, weights: Mapping[str, float], block_variance: float, mean: float
) -> str | None:
    """The launch whose doubt leaves least of the difference, if it does not show then; None if it always shows.

    A launch that serves both sides alike is no support of either.
    """
    posterior, names = fitted.posterior, np.array(fitted.cells.launches)
    if posterior is None:
        return None
    whole = np.append([weights.get(name, 0.0) for name in posterior.configurations], 0.0)
    shown = {}
    for launch, (means, covariance) in posterior.doubting.items():
        used = names == launch
        if not rows[used].any() or abs(rows[used].sum()) < 1e-9:
            continue
        error = np.sqrt(max(float(whole @ covariance @ whole), 0.0) + block_variance + 1e-20)
        shown[launch] = float(np.sign(mean) * (means @ whole) / error)
    weakest = min(shown, key=lambda launch: shown[launch], default=None)
    return weakest if weakest is not None and shown[weakest] < _STANDS_ALONE else None


def _block_variance(fitted: Fitted, rows: Array) -> tuple[float, int]:
    """Variance of the contrast by its prompts, beyond the noise that the model holds; the number of common blocks."""
    used = np.flatnonzero(rows)
    common = ~np.isnan(fitted.influences[used]).any(axis=0)
    num_blocks = int(common.sum())
    if num_blocks < 2:
        return 0.0, num_blocks
    paired = rows[used] @ fitted.influences[used][:, common]
    held = 0.0 if fitted.posterior is None else float(rows[used] ** 2 @ fitted.noise[used])
    few = (num_blocks - 1) / (num_blocks - 3) if num_blocks > 3 else float(num_blocks)  # a t, as wide a normal
    found = float(np.var(paired, ddof=1)) / num_blocks
    beyond = found - held if found > held * float(chdtri(num_blocks - 1, _BY_CHANCE)) / (num_blocks - 1) else 0.0
    return max(0.0, beyond) * few, num_blocks
