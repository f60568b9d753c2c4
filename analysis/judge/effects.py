"""Whether a difference is real: contrasts between configurations, their intervals, their verdicts.

Model, on the log scale: value of a cell = its configuration + drift x time (+ node) + luck of the launch + luck of the
blocks. Two sources of doubt add up in every interval:

- *launches*: the spread among launches of one configuration, after drift, both learnt from what was launched repeatedly
  (`analysis.judge.spread`).
- *blocks*: the spread over blocks of the paired difference, beyond what launches already carry. Blocks are the same for
  every trial, so what a prompt does to both sides cancels.

Degrees of freedom by Welch-Satterthwaite; t intervals; equivalence by two one-sided tests (Schuirmann 1987);
multiplicity by Holm 1979. Where nothing was launched twice, the launch part is unknown: launches are then taken to
differ by ASSUMED_LAUNCH_SPREAD, and only a difference beyond that is claimed, equivalence never.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import stats

from analysis.judge.cells import HIGHER_IS_BETTER, Array, Cells
from analysis.judge.spread import MIN_DF, Spread, covariates, replicate_noise

Verdict = Literal["better", "worse", "equivalent", "undecided", "not exercised"]
Covers = Literal["launches and blocks", "blocks and assumed launches", "blocks of one launch only"]

MARGIN = 0.01
"""A relative difference below this is of no interest: `equivalent within 1 %`."""
CONFIDENCE = 0.95
_ALPHA = 1 - CONFIDENCE
ASSUMED_LAUNCH_SPREAD = 0.08
"""Standard deviation of a launch's log value where no repeat tells it. The founding case's baseline fell from 89 to
82.2 tok/s between two sessions without a known cause: ln(89 / 82.2) = 7.9 %."""
_TAKEN = f"launches are assumed to differ by {100 * ASSUMED_LAUNCH_SPREAD:.0f} %"
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
    df: float
    num_launches: tuple[int, int]
    """Of the two sides."""
    num_blocks: int
    p_difference: float | None
    p_equivalence: float | None
    """None also where the spread among launches is assumed: then equivalence is never claimed."""
    assumption: str | None = None
    """Of `blocks and assumed launches`, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """What one configuration reached."""

    value: float
    """Sum over sum, all its launches and blocks."""
    corrected: float
    """As if it had run at the mean time of all cells: what configurations are ranked by."""
    interval: tuple[float, float] | None
    """About `value`, at CONFIDENCE; None with fewer than two blocks."""
    covers: Covers
    num_launches: int
    num_blocks: int


def level(cells: Cells, key: str, learnt: Spread) -> Level | None:
    """One configuration on its own. None where it has no cell."""
    value = cells.total(key)
    if value is None:
        return None
    rows: Array = np.array([float(name == key) / cells.keys.count(key) for name in cells.keys])
    launch_share = _launch_share(rows, cells.launches)
    block_variance, num_blocks = _block_variance(cells, rows, launch_share, carried=learnt.launch_variance)
    columns = covariates(cells)
    away = np.array([(rows - 1 / len(cells)) @ columns[name] for name in learnt.covariates])
    interval = None
    if num_blocks >= 2:
        launch_part = learnt.launch_variance * launch_share
        error, df = _combine(launch_part, learnt.df, block_variance / num_blocks, num_blocks - 1)
        low, high = _interval(0.0, error, df, (1, 1))
        interval = (value * (1 + low), value * (1 + high))
    return Level(
        value=value,
        corrected=float(value * np.exp(-away @ learnt.slopes)),
        interval=interval,
        covers="launches and blocks" if learnt.df else "blocks of one launch only",
        num_launches=_num_launches(cells, rows > 0),
        num_blocks=num_blocks,
    )


def compare(
    cells: Cells,
    weights: Mapping[str, float],
    learnt: Spread,
    *,
    launches_matter: bool = True,
    selected_among: tuple[int, int] = (1, 1),
) -> Effect | None:
    """A contrast of configurations: the sum of weight x log value; its verdict still without multiplicity.

    Args:
        cells: of the metric to compare.
        weights: by key; those above 0 sum to 1, those below to -1.
        learnt: from the same metric, or from one that stands in for it (the whole cycle for one of its phases).
        launches_matter: False for accept length, which depends on prompts and not on the launch.
        selected_among: among how many each side was chosen by these same numbers: the end of the interval that such
            a choice flatters is moved out by Bonferroni.

    Returns None where a side has no cell, or there are fewer than two common blocks.
    """
    if not all(key in cells.keys for key in weights):
        return None
    rows: Array = np.array([weights.get(key, 0.0) / cells.keys.count(key) for key in cells.keys])
    launch_share = _launch_share(rows, cells.launches)
    assumption = _assumption(cells) if launches_matter and learnt.df == 0 and launch_share > 1e-12 else None
    variance = learnt.launch_variance if launches_matter or learnt.df >= MIN_DF else 0.0
    block_variance, num_blocks = _block_variance(cells, rows, launch_share, carried=variance)
    if num_blocks < 2:
        return None
    columns = covariates(cells)
    shifts = np.array([rows @ columns[name] if name in columns else 0.0 for name in learnt.covariates])
    confounded = [name for name in learnt.inestimable if name in columns and abs(rows @ columns[name]) > 1e-9]
    estimate = float(rows @ cells.log_values() - shifts @ learnt.slopes)
    if assumption:
        variance = ASSUMED_LAUNCH_SPREAD**2
    launch_part = variance * (launch_share + float(shifts @ learnt.slopes_covariance @ shifts))
    if learnt.anchored_variance is not None:
        launch_part += learnt.anchored_variance * float(shifts[learnt.covariates.index("time")]) ** 2
    error, df = _combine(launch_part, learnt.df, block_variance / num_blocks, num_blocks - 1)
    reason = f"confounded with {', '.join(confounded)}" if confounded else None
    p_difference, p_equivalence = _p_values(estimate, error, df)
    effect = Effect(
        metric=cells.metric,
        effect=float(np.expm1(estimate)),
        interval=_interval(estimate, error, df, selected_among),
        covers="blocks and assumed launches" if assumption else "launches and blocks",
        verdict="undecided",
        reason=reason,
        margin=MARGIN,
        df=df,
        num_launches=(_num_launches(cells, rows > 0), _num_launches(cells, rows < 0)),
        num_blocks=num_blocks,
        p_difference=None if reason else p_difference,
        p_equivalence=None if reason or assumption else p_equivalence,
        assumption=assumption,
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
        return replace(effect, verdict=_direction(effect), reason=None)
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
        return replace(effect, verdict=_direction(effect))
    return replace(effect, reason=_wide(effect))


def _wide(effect: Effect) -> str:
    return f"{effect.assumption}, and {_WIDE}" if effect.assumption else _WIDE


def _assumption(cells: Cells) -> str:
    once = len(set(cells.twins)) == len(cells)
    return f"{'every configuration was launched once' if once else 'too few launches were repeated'}: {_TAKEN}"


def _direction(effect: Effect) -> Verdict:
    return "better" if (effect.effect > 0) == (effect.metric in HIGHER_IS_BETTER) else "worse"


def _launch_share(rows: Array, launches: Sequence[str]) -> float:
    """What one unit of launch variance adds to the contrast's; luck shared by both sides cancels."""
    names = np.array(launches)
    return float(sum(rows[names == launch].sum() ** 2 for launch in set(launches)))


def _num_launches(cells: Cells, chosen: npt.NDArray[np.bool_]) -> int:
    return len({launch for launch, used in zip(cells.launches, chosen, strict=True) if used})


def _block_variance(cells: Cells, rows: Array, launch_share: float, *, carried: float) -> tuple[float, int]:
    """Variance over blocks of the contrast, less the block noise that the launch variance holds; the number of blocks.

    Args:
        carried: the launch variance in use. Launches differ by the noise of their blocks too; that part would be
            counted twice, but no more of it than the launch variance is large enough to hold.
    """
    used = np.flatnonzero(rows)
    influences = cells.influences()
    common = ~np.isnan(influences[used]).any(axis=0)
    num_blocks = int(common.sum())
    if num_blocks < 2:
        return 0.0, num_blocks
    paired = rows[used] @ influences[used][:, common]
    blocks_per_cell = float(np.mean((~np.isnan(influences)).sum(axis=1)))
    noise = min(replicate_noise(influences, cells.twins), carried * blocks_per_cell)
    return max(0.0, float(np.var(paired, ddof=1)) - noise * launch_share), num_blocks


def _combine(launch_part: float, launch_df: int, block_part: float, block_df: int) -> tuple[float, float]:
    """Standard error and Welch-Satterthwaite degrees of freedom."""
    block_part += 1e-20
    total = launch_part + block_part
    spread_of_total = block_part**2 / block_df + (launch_part**2 / launch_df if launch_df else 0.0)
    return float(np.sqrt(total)), float(total**2 / spread_of_total)


def _p_values(estimate: float, error: float, df: float) -> tuple[float, float]:
    """Of no difference; and of a difference beyond the margin (the larger of the two one-sided tests)."""
    below = stats.t.sf((estimate - np.log1p(-MARGIN)) / error, df)
    above = stats.t.cdf((estimate - np.log1p(MARGIN)) / error, df)
    return float(2 * stats.t.sf(abs(estimate) / error, df)), float(max(below, above))


def _interval(estimate: float, error: float, df: float, among: tuple[int, int]) -> tuple[float, float]:
    low = estimate - error * stats.t.ppf(1 - _ALPHA / 2 / among[0], df)
    high = estimate + error * stats.t.ppf(1 - _ALPHA / 2 / among[1], df)
    return float(np.expm1(low)), float(np.expm1(high))
