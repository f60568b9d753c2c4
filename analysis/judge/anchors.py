"""Drift inside servers: the target alone (step count 0), measured again and again in the server of a chain.

Anchors of one server share its launch and everything in it, so what they differ by is drift and the noise of a block.
They are compared within their server alone: an anchor also extends the drafter, so it is no control. The one right
after a launch is left out, for a server that still warms up does not drift.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from scipy import stats

from analysis.data.load import Results
from analysis.judge.cells import METRICS

MIN_DF = 2
"""Degrees of freedom left after one level per server and the slope, below which no slope is fitted."""
_CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerDrift:
    """A log-linear drift of one metric over the time within servers."""

    num_anchors: int
    num_servers: int
    """With two anchors or more."""
    slope: float
    """Of the log value, per second."""
    variance: float
    """Of the slope."""
    df: int
    spread: float
    """Standard deviation of an anchor's log value about its server's level and the drift."""

    @property
    def per_hour(self) -> float:
        """Relative change per hour."""
        return float(np.expm1(self.slope * 3600))

    @property
    def interval(self) -> tuple[float, float]:
        """Of `per_hour`, 95 %."""
        away = stats.t.ppf((1 + _CONFIDENCE) / 2, self.df) * np.sqrt(self.variance)
        return float(np.expm1(3600 * (self.slope - away))), float(np.expm1(3600 * (self.slope + away)))


def server_drift(results: Results, metric: str = "tok_s") -> ServerDrift | None:
    """The drift that anchors show; None where a sweep has too few of them, or they lack the metric."""
    top, bottom = METRICS[metric]
    since_s = pl.col("started_s") - pl.col("at_s")
    trials = results.trials.select("trial_id", "launch", "relaunched", since_s=since_s)
    rows = (
        results.anchors.with_columns(value=top.cast(pl.Float64) / bottom.cast(pl.Float64))
        .filter(pl.col("value") > 0)
        .join(trials, on="trial_id")
        .filter((pl.col("place") == "after") | ~pl.col("relaunched"))
        .select("launch", at_s=pl.col("started_s") - pl.col("since_s"), log=pl.col("value").log())
        .filter(pl.len().over("launch") > 1)
    )
    within = rows.select("launch", *(pl.col(name) - pl.col(name).mean().over("launch") for name in ("at_s", "log")))
    num_servers = within["launch"].n_unique()
    df = within.height - num_servers - 1
    at_s, log = within["at_s"].to_numpy(), within["log"].to_numpy()
    if df < MIN_DF or not (moment := float(at_s @ at_s)):
        return None
    slope = float(at_s @ log) / moment
    residuals = log - slope * at_s
    variance = float(residuals @ residuals) / df
    return ServerDrift(
        num_anchors=within.height,
        num_servers=num_servers,
        slope=slope,
        variance=variance / moment,
        df=df,
        spread=float(np.sqrt(variance)),
    )
