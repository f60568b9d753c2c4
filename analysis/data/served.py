"""What served the all-reduces of a server, by the kernels that ran in it.

NCCL's log tells what NCCL was asked for, a communicator's warm-up among it; who served the decode, only a trace tells.
"""

from __future__ import annotations

import polars as pl

from sweeps.results.nccl_acts import ALL_REDUCE_KERNELS, BY_NCCL, NCCL_KERNELS


def served_by(kernels: pl.DataFrame) -> pl.DataFrame:
    """`trial_id`, `served`: `nccl` if NCCL ran an all-reduce of the target's forward, else the kernel that did.

    Trials without a trace, or without an all-reduce in it, are left out.
    """
    reduces = kernels.filter((pl.col("phase") == "verify") & pl.col("kernel").str.contains(ALL_REDUCE_KERNELS))
    of_nccl = pl.col("kernel").str.contains(NCCL_KERNELS)
    most = pl.col("kernel").sort_by("calls_per_cycle", descending=True).first()
    return reduces.group_by("trial_id").agg(served=pl.when(of_nccl.any()).then(pl.lit("nccl")).otherwise(most))


def with_served(trials: pl.DataFrame, kernels: pl.DataFrame) -> pl.DataFrame:
    """Correct `all_reduce` if the trace of the same server contradicts it; add `served`.

    Args:
        trials: with `launch`; one trial of a launch is enough to have been traced.
    """
    traced = trials.join(served_by(kernels), on="trial_id", how="left").with_columns(
        served=pl.col("served").drop_nulls().first().over("launch")
    )
    traced_nccl, stated_nccl = pl.col("served") == "nccl", pl.col("all_reduce").is_in(list(BY_NCCL))
    corrected = (
        pl.when(traced_nccl & ~stated_nccl.fill_null(value=False))
        .then(pl.lit("nccl"))
        .when(~traced_nccl & stated_nccl.fill_null(value=True))
        .then(pl.lit("custom"))
        .otherwise("all_reduce")
    )
    return traced.with_columns(all_reduce=corrected)


def corrections(stated: pl.DataFrame, corrected: pl.DataFrame) -> list[str]:
    """A line for the report: how many servers the trials table is wrong about, and by which kernel that was seen."""
    joined = corrected.join(stated.select("trial_id", stated="all_reduce"), on="trial_id")
    wrong = joined.filter(pl.col("stated").is_not_null() & (pl.col("stated") != pl.col("all_reduce")))
    lines = []
    others = wrong.filter(pl.col("served") != "nccl")
    if others.height:
        kernels = ", ".join(sorted(others["served"].unique()))
        lines.append(
            f"{others['launch'].n_unique()} servers: table `trials` says NCCL did the all-reduces, but the trace shows "
            f"`{kernels}`. NCCL settings had no effect in those servers"
        )
    by_nccl = wrong.filter(pl.col("served") == "nccl")
    if by_nccl.height:
        stated_as = ", ".join(sorted(by_nccl["stated"].unique()))
        lines.append(
            f"{by_nccl['launch'].n_unique()} servers: table `trials` says {stated_as} did the all-reduces, but the "
            "trace shows NCCL. NCCL settings may have had an effect in those servers"
        )
    return lines
