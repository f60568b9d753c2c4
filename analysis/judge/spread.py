"""Drift, and the spread among launches: learnt from whatever a sweep launched more than once.

Analysis of covariance: drift (time since the node's first trial, and the node) is estimated within configurations, so
that it is never mixed up with a difference between them; what the repetitions still differ by is the launch variance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from analysis.judge.anchors import ServerDrift
from analysis.judge.cells import Array, Cells

MIN_DF = 2
"""Drift over time is fitted only where so many degrees of freedom remain for the spread around it."""
_CONTRADICTS = 3.0
"""Standard errors by which repeats and anchors may differ and still be taken to show one drift."""
_TELLING = 0.01
"""Standard error of what anchors say of the drift over the whole sweep, up to which they are asked where repeats are
too few: seconds within a server tell little of hours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Drift and the spread among launches, learnt from configurations that were launched repeatedly."""

    metric: str
    covariates: tuple[str, ...]
    """`time` and `node NAME`, those that could be estimated."""
    inestimable: tuple[str, ...]
    slopes: Array
    slopes_covariance: Array
    """Per unit of `launch_variance`."""
    launch_variance: float
    """Of a cell's log value about its configuration and drift."""
    df: int
    """Degrees of freedom of `launch_variance`; 0: unknown."""
    anchored_variance: float | None = None
    """Of the slope over time where anchors inside servers told it (then no part of `slopes_covariance`)."""

    @property
    def drift_per_hour(self) -> float | None:
        """Relative change per hour; None where it was not estimated."""
        if "time" not in self.covariates:
            return None
        return float(np.expm1(self.slopes[self.covariates.index("time")] * 3600))


def spread(cells: Cells, *, drifts: bool = True, anchored: ServerDrift | None = None) -> Spread:
    """Learn drift and launch variance from the repeated configurations among `cells`.

    Args:
        anchored: the same metric's drift inside servers: taken where repeats tell the drift less precisely, unless they
            contradict it (what drifts between servers is then something else).
    """
    own = _spread(cells, cells.log_values(), covariates(cells) if drifts else {})
    if anchored is None or not drifts:
        return own
    if "time" in own.covariates:
        place = own.covariates.index("time")
        variance = own.launch_variance * float(own.slopes_covariance[place, place])
        away = abs(float(own.slopes[place]) - anchored.slope)
        if variance <= anchored.variance or away > _CONTRADICTS * np.sqrt(variance + anchored.variance):
            return own
    elif np.sqrt(anchored.variance) * np.ptp(cells.at_s) > _TELLING:
        return own
    nodes = {name: column for name, column in covariates(cells).items() if name != "time"}
    rest = _spread(cells, cells.log_values() - anchored.slope * cells.at_s, nodes)
    return replace(
        rest,
        covariates=(*rest.covariates, "time"),
        slopes=np.append(rest.slopes, anchored.slope),
        slopes_covariance=np.pad(rest.slopes_covariance, (0, 1)),
        anchored_variance=anchored.variance,
    )


def _spread(cells: Cells, values: Array, columns: Mapping[str, Array]) -> Spread:
    repeats = sum(cells.twins.count(twin) - 1 for twin in set(cells.twins))
    within = {name: _within(column, cells.twins) for name, column in columns.items()}
    kept: list[str] = []
    for name in sorted(within, key=lambda name: name == "time"):
        trial = np.column_stack([within[each] for each in (*kept, name)])
        if np.linalg.matrix_rank(trial, tol=1e-9 * max(1.0, float(np.abs(trial).max(initial=0.0)))) < trial.shape[1]:
            continue
        if name != "time" or repeats - len(kept) - 1 >= MIN_DF:
            kept.append(name)
    design = np.column_stack([within[name] for name in kept]) if kept else np.empty((len(cells), 0))
    inverse = np.linalg.inv(design.T @ design)
    slopes = inverse @ design.T @ values
    df = repeats - len(kept)
    residuals = _within(values, cells.twins) - design @ slopes
    return Spread(
        metric=cells.metric,
        covariates=tuple(kept),
        inestimable=tuple(name for name in columns if name not in kept and name != "time"),
        slopes=slopes,
        slopes_covariance=inverse.astype(np.float64),
        launch_variance=float(residuals @ residuals / df) if df > 0 else 0.0,
        df=df,
    )


def covariates(cells: Cells) -> dict[str, Array]:
    """What may shift a cell besides its configuration: node indicators (the first node is the reference), time."""
    nodes = sorted(set(cells.nodes))
    columns = {f"node {node}": np.array([float(each == node) for each in cells.nodes]) for node in nodes[1:]}
    return {**columns, "time": cells.at_s}


def _within(column: Array, keys: Sequence[str]) -> Array:
    names = np.array(keys)
    out = column.astype(float).copy()
    for key in set(keys):
        out[names == key] -= out[names == key].mean()
    return out


def replicate_noise(influences: Array, keys: Sequence[str]) -> float:
    """Variance of a block's influence among launches of one configuration: noise that no prompt explains."""
    names = np.array(keys)
    total, df = 0.0, 0
    for key in set(keys):
        group = influences[names == key]
        group = group[:, ~np.isnan(group).any(axis=0)]
        if len(group) > 1 and group.shape[1] > 1:
            total += float(((group - group.mean(axis=0)) ** 2).sum())
            df += (len(group) - 1) * (group.shape[1] - 1)
    return total / df if df else 0.0
