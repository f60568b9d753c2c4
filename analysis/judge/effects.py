"""Whether a difference is real: levels of configurations and contrasts between them, with intervals and verdicts.

Intervals are quantiles of a mixture (`analysis.judge.contrasts`); verdicts are those of `analysis.judge.claims`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from analysis.judge.cells import Cells
from analysis.judge.claims import ALPHA, MARGIN, Covers, Effect, judge, judge_by_interval, withheld
from analysis.judge.contrasts import block_variances, mixtures, weakest_launches
from analysis.judge.fitted import Fitted
from analysis.judge.priors import Array

_STANDS_ALONE = 1.645
"""Standard errors that a difference must keep if any one launch is doubted: one-sided 5 %."""
_NEVER_TWICE = "no {} server was launched twice, so the spread of launches is taken from other machines"
_SINGLE = "imported numbers, and one side was launched once: nothing is claimed without repeats"


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """What one configuration reached, at the mean of the sweep's drift and nodes."""

    value: float
    interval: tuple[float, float] | None
    """At CONFIDENCE; None with fewer than two blocks."""
    covers: Covers
    num_launches: int
    num_blocks: int


def level(fitted: Fitted, key: str, *, selected_among: int = 1) -> Level | None:
    """One configuration on its own. None if it has no cell.

    Args:
        selected_among: among how many it was chosen as the fastest by these same numbers: the lower end of its interval
            is moved out by Bonferroni.
    """
    return levels(fitted, (key,), selected_among=selected_among)[0]


def levels(fitted: Fitted, keys: Sequence[str], *, selected_among: int = 1) -> list[Level | None]:
    """Several configurations, each as `level` has it."""
    cells, posterior = fitted.cells, fitted.posterior
    shown = [key for key in keys if posterior is not None and key in cells.keys]
    if posterior is None or not shown:
        return [None] * len(keys)
    rows: Array = np.array([[float(name == key) for name in cells.keys] for key in shown])
    rows /= rows.sum(axis=1, keepdims=True)
    variances, num_blocks = block_variances(fitted, rows)
    weights = np.array([[*(float(name == key) for name in posterior.configurations), 1.0] for key in shown])
    mixed = mixtures(fitted, rows, weights, variances)
    values = np.exp(mixed.mean)
    ends = np.exp(mixed.quantiles(np.array([ALPHA / 2 / selected_among, 1 - ALPHA / 2])))
    found = {
        key: Level(
            value=float(values[place]),
            interval=(float(ends[place, 0]), float(ends[place, 1])) if num_blocks[place] >= 2 else None,
            covers=_covers_level(fitted, rows[place]),
            num_launches=_num_launches(cells, rows[place] > 0),
            num_blocks=int(num_blocks[place]),
        )
        for place, key in enumerate(shown)
    }
    return [found.get(key) for key in keys]


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
    return compare_all(fitted, (weights,), selected_among=selected_among)[0]


def compare_all(
    fitted: Fitted, contrasts: Sequence[Mapping[str, float]], *, selected_among: tuple[int, int] = (1, 1)
) -> list[Effect | None]:
    """Several contrasts, each as `compare` has it."""
    counts = dict.fromkeys(fitted.cells.keys, 0)
    for key in fitted.cells.keys:
        counts[key] += 1
    known = [place for place, weights in enumerate(contrasts) if all(counts.get(key) for key in weights)]
    found: list[Effect | None] = [None] * len(contrasts)
    if known:
        rows = np.array([[contrasts[p].get(key, 0.0) / counts[key] for key in fitted.cells.keys] for p in known])
        names = fitted.posterior.configurations if fitted.posterior is not None else ()
        weights = np.array([[*(contrasts[p].get(name, 0.0) for name in names), 0.0] for p in known])
        for place, effect in zip(known, _effects(fitted, rows, weights, selected_among), strict=True):
            found[place] = effect
    return found


def _effects(fitted: Fitted, rows: Array, weights: Array, selected_among: tuple[int, int]) -> list[Effect | None]:
    """Of (K, cells) and (K, C + 1) weights."""
    cells = fitted.cells
    variances, num_blocks = block_variances(fitted, rows)
    mixed = mixtures(fitted, rows, weights, variances)
    means = mixed.mean
    ends = np.expm1(mixed.quantiles(np.array([ALPHA / 2 / selected_among[0], 1 - ALPHA / 2 / selected_among[1]])))
    below, least, most = (mixed.below(value) for value in (0.0, float(np.log1p(-MARGIN)), float(np.log1p(MARGIN))))
    weakest = weakest_launches(fitted, rows, weights, variances, means)
    found: list[Effect | None] = []
    for place, row in enumerate(rows):
        if num_blocks[place] < 2:
            found.append(None)
            continue
        assumption, launch = _assumption(fitted, row), weakest[place]
        effect = Effect(
            metric=cells.metric,
            effect=float(np.expm1(means[place])),
            interval=(float(ends[place, 0]), float(ends[place, 1])),
            covers=_covers(fitted, assumption),
            verdict="undecided",
            reason=None,
            margin=MARGIN,
            num_launches=(_num_launches(cells, row > 0), _num_launches(cells, row < 0)),
            num_blocks=int(num_blocks[place]),
            p_difference=float(2 * min(below[place], 1 - below[place])),
            p_equivalence=float(max(least[place], 1 - most[place])),
            assumption=assumption,
            rests_on=launch[0] if launch is not None and launch[1] < _STANDS_ALONE else None,
        )
        if cells.imported and min(effect.num_launches) < 2:
            found.append(withheld(effect, _SINGLE))
        else:
            found.append(judge([effect])[0] if selected_among == (1, 1) else judge_by_interval(effect))
    return found


def _covers_level(fitted: Fitted, row: Array) -> Covers:
    return "launches and blocks" if _kinds(fitted, row) <= fitted.repeated else "blocks and launches by the prior"


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
