"""Where a cycle's time goes, per configuration, and how much of it is communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from analysis.data.load import Results
from analysis.judge.cells import Cells
from analysis.judge.points import Point
from sweeps.results.nccl_acts import may_act

_DEFAULT = "default"
"""The NCCL set without a variable."""


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
    """Kernel time by profiler windows: by kind inside the target's verify (or decode step), communication by phase."""

    label: str
    by_nccl: bool
    """NCCL does the all-reduces of the traced launches, or may. False: another kernel does."""
    us_by_kind: Mapping[str, float]
    share: float
    """Of all kernel time in verify."""
    us_by_phase: Mapping[str, float]
    """Communication alone: draft and extend reduce over the GPUs, too."""
    cycle_ms: float
    tok_s: float

    @property
    def ms(self) -> float:
        """Communication of a whole cycle."""
        return sum(self.us_by_phase.values()) / 1000

    @property
    def most_tok_s(self) -> float | None:
        """Throughput if communication took no time. None if its kernels, side by side, add up to the whole cycle."""
        left_ms = self.cycle_ms - self.ms
        return self.tok_s * self.cycle_ms / left_ms if left_ms > 0 else None


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


def communication_ms(results: Results, configuration_id: str) -> float | None:
    """Communication of a whole cycle of one configuration, by its traces. None without one."""
    own = results.trials.filter(pl.col("configuration_id") == configuration_id)["trial_id"]
    kernels = results.kernels.filter(pl.col("trial_id").is_in(own.implode()))
    if kernels.is_empty():
        return None
    us = kernels.filter(pl.col("kind") == "communication")["us_per_cycle"].sum()
    return float(us) / kernels["trial_id"].n_unique() / 1000


def communication(results: Results, shown: Sequence[Phases], settings: Mapping[str, Point]) -> Communication | None:
    """Of the first of `shown` that has a trace, those first whose all-reduces NCCL does with its own choices.

    Such a trace bounds what NCCL settings can win. Without one, the trace of another NCCL set or of another kernel is
    the best there is. None if no trace covers a configuration whose cycle was timed.

    Args:
        settings: by configuration id.
    """
    if results.kernels.is_empty():
        return None
    traced = results.trials.filter(pl.col("trial_id").is_in(results.kernels["trial_id"].unique().implode()))
    by_nccl = traced.filter([may_act(each) for each in traced["all_reduce"]])
    default = [each for each in shown if settings[each.configuration_id].settings["nccl"] == _DEFAULT]
    for trials, candidates, served in ((by_nccl, default, True), (by_nccl, shown, True), (traced, shown, False)):
        for each in candidates:
            found = _communication(results, trials, each, by_nccl=served)
            if found is not None:
                return found
    return None


def _communication(results: Results, trials: pl.DataFrame, shown: Phases, *, by_nccl: bool) -> Communication | None:
    """Of one configuration, averaged over its traces among `trials`."""
    own = trials.filter(pl.col("configuration_id") == shown.configuration_id)["trial_id"]
    kernels = results.kernels.filter(pl.col("trial_id").is_in(own.implode()))
    verify = kernels.filter(pl.col("phase") == "verify")
    total = float(verify["us_per_cycle"].sum())
    if not total or shown.cycle_ms is None or shown.tok_s is None:
        return None
    traces = verify["trial_id"].n_unique()
    mean = pl.col("us_per_cycle").sum() / traces
    by_kind = dict(verify.group_by("kind").agg(mean).sort("us_per_cycle", descending=True).iter_rows())
    reduces = kernels.filter(pl.col("kind") == "communication")
    return Communication(
        label=shown.label,
        by_nccl=by_nccl,
        us_by_kind=by_kind,
        share=by_kind.get("communication", 0.0) * traces / total,
        us_by_phase=dict(reduces.group_by("phase").agg(mean).sort("us_per_cycle", descending=True).iter_rows()),
        cycle_ms=shown.cycle_ms,
        tok_s=shown.tok_s,
    )
