"""What a mixed sweep only timed: cycles with pinned acceptance, and the throughput that they predict."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from analysis.data.load import Results
from analysis.judge.cells import METRICS
from sweeps.results.tables import DRAFTING_COLUMNS


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One configuration with pinned trials; None where nothing tells."""

    configuration_id: str
    label: str
    trial_ids: tuple[str, ...]
    """The pinned trials."""
    cycle_ms: float | None
    """Of the pinned trials."""
    accept_length: float | None
    """Measured, in trials of the same drafter, steps, top-k and draft tokens, over all their cycles."""
    tok_s: float | None
    """Predicted: the pinned trials' throughput, with that accept length in place of theirs."""
    measured_tok_s: float | None
    """Of its own measured trials; None: it was only timed, and is not recommended."""


def predictions(results: Results) -> tuple[Prediction, ...]:
    """Every configuration of a mixed sweep with pinned trials, the highest prediction first; () of any other sweep."""
    if not results.mixed:
        return ()
    real = results.trials.filter(pl.col("acceptance") == "measured")
    found = []
    for pinned in results.trials.filter(pl.col("acceptance") == "pinned").partition_by("configuration_id"):
        row = pinned.row(0, named=True)
        alike = real.filter(pl.all_horizontal(pl.col(name).eq_missing(row[name]) for name in DRAFTING_COLUMNS))
        length, pinned_length = (_ratio(results, trials, "accept_length") for trials in (alike, pinned))
        timed = _ratio(results, pinned, "tok_s")
        told = None if timed is None or length is None or not pinned_length else timed * length / pinned_length
        found.append(
            Prediction(
                configuration_id=row["configuration_id"],
                label=row["label"],
                trial_ids=tuple(pinned["trial_id"]),
                cycle_ms=_ratio(results, pinned, "cycle_ms"),
                accept_length=length,
                tok_s=told,
                measured_tok_s=_ratio(
                    results, real.filter(pl.col("configuration_id") == row["configuration_id"]), "tok_s"
                ),
            )
        )
    return tuple(sorted(found, key=lambda each: -(each.tok_s or 0.0)))


def _ratio(results: Results, trials: pl.DataFrame, metric: str) -> float | None:
    """Sum over sum, over all blocks of these trials."""
    top, bottom = METRICS[metric]
    blocks = results.blocks.join(trials.select("trial_id"), on="trial_id", how="semi").select(
        top=top.cast(pl.Float64), bottom=bottom.cast(pl.Float64)
    )
    whole = blocks.drop_nulls()
    below = float(whole["bottom"].sum())
    return float(whole["top"].sum()) / below if below > 0 else None
