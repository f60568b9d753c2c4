"""Where a cycle's time goes, per configuration, and how much of the target's verify is communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from analysis.data.load import Results
from analysis.judge.cells import Cells
from analysis.judge.factors import Point


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases:
    """Means over all cycles of a configuration, in milliseconds; None where the phase does not exist."""

    configuration_id: str
    label: str
    speculates: bool
    num_steps: int
    draft_ms: float | None
    verify_ms: float | None
    extend_ms: float | None
    gap_ms: float | None
    cycle_ms: float | None
    decode_ms: float | None
    """The plain decode step, without speculation."""
    verify_share: float | None
    accept_length: float | None
    tok_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """Kernel time by kind inside the target's verify (or decode step), from profiler windows."""

    label: str
    us_by_kind: Mapping[str, float]
    share: float
    """Of all kernel time in the phase."""
    cycle_ms: float
    tok_s: float

    @property
    def most_tok_s(self) -> float:
        """Throughput if communication cost nothing: no NCCL setting can win more."""
        return self.tok_s * self.cycle_ms / (self.cycle_ms - self.us_by_kind.get("communication", 0.0) / 1000)


def phases(point: Point, totals: Mapping[str, Cells]) -> Phases:
    """The phases of one configuration."""
    key = point.configuration_id
    means = {metric: seen.total(key) for metric, seen in totals.items()}
    verify, cycle = means["verify_ms"], means["cycle_ms"]
    return Phases(
        configuration_id=key,
        label=point.label,
        speculates=point.speculates,
        num_steps=int(point.settings["num_steps"] or 0),
        draft_ms=means["draft_ms"],
        verify_ms=verify,
        extend_ms=means["extend_ms"],
        gap_ms=means["gap_ms"],
        cycle_ms=cycle,
        decode_ms=None if point.speculates else means["verify_forward_ms"],
        verify_share=verify / cycle if verify is not None and cycle else None,
        accept_length=means["accept_length"],
        tok_s=means["tok_s"],
    )


def communication(results: Results, shown: Phases) -> Communication | None:
    """Of one configuration, averaged over its traces. None where no trace covers it or nothing was timed."""
    if results.kernels.is_empty():
        return None
    trials = results.trials.filter(pl.col("configuration_id") == shown.configuration_id)
    kernels = results.kernels.filter(
        (pl.col("phase") == "verify") & pl.col("trial_id").is_in(trials["trial_id"].to_list())
    )
    traces = kernels["trial_id"].n_unique()
    total = float(kernels["us_per_cycle"].sum())
    if not total or shown.cycle_ms is None or shown.tok_s is None:
        return None
    kinds = kernels.group_by("kind").agg(pl.col("us_per_cycle").sum() / traces).sort("us_per_cycle", descending=True)
    by_kind = dict(kinds.iter_rows())
    return Communication(
        label=shown.label,
        us_by_kind=by_kind,
        share=by_kind.get("communication", 0.0) * traces / total,
        cycle_ms=shown.cycle_ms,
        tok_s=shown.tok_s,
    )
