"""Launches that contradict all others: named, so that nothing is claimed that rests on them alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from analysis.judge.covariance import Covariance, inverse_of
from analysis.judge.priors import DOUBT, EVIDENCE, Array
from analysis.judge.spreads import mode, scored

_MOST = 3


def name_outliers(
    covariance: Covariance, values: Array, served: Mapping[str, npt.NDArray[np.bool_]], free: Array
) -> dict[str, float]:
    """Launch -> by how many standard deviations its cells miss what all others predict, if doubting it is worth its
    evidence.

    The model is not changed by it: which of two launches that contradict each other is the odd one, it cannot know.

    Args:
        served: launch -> its cells.
        free: the active parameters at the mode.
    """
    found: dict[str, float] = {}
    inverse = inverse_of(covariance.total(covariance.whole(free)))
    away = {name: _deviation(inverse, values, rows) for name, rows in served.items()}
    before, base = scored(covariance, values, free)[0], covariance.base
    for name in sorted(away, key=lambda name: -abs(away[name]))[:_MOST]:
        covariance.base = base + DOUBT**2 * np.outer(served[name], served[name])
        after = mode(covariance, values, free)[2]
        covariance.base = base
        if before - after < np.log(len(served)) + EVIDENCE:
            break
        found[name] = away[name]
    return found


def _deviation(inverse: Array, values: Array, rows: npt.NDArray[np.bool_]) -> float:
    """How far the mean of a launch's cells lies from what all other launches predict, in standard deviations."""
    block = np.linalg.inv(inverse[np.ix_(rows, rows)])
    residual = block @ (inverse[rows] @ values)
    mean = np.full(int(rows.sum()), 1 / rows.sum())
    return float(mean @ residual / np.sqrt(mean @ block @ mean))
