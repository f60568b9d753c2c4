"""What served the all-reduces of a server, by the kernels that ran in it.

NCCL's log tells what NCCL was asked for, a communicator's warm-up among it; who served the decode, only a trace tells.
"""

from __future__ import annotations

import polars as pl

_REDUCES = r"(?i)all_?reduce|cross_device_reduce|one_?shot|two_?shot|multimem|lamport"


def served_by(kernels: pl.DataFrame) -> pl.DataFrame:
    """`trial_id`, `served`: `nccl` where NCCL ran an all-reduce of the target's forward, else the kernel that did.

    Trials without a trace, or without an all-reduce in it, are left out.
    """
    reduces = kernels.filter((pl.col("phase") == "verify") & pl.col("kernel").str.contains(_REDUCES))
    of_nccl = pl.col("kernel").str.contains("(?i)nccl")
    most = pl.col("kernel").sort_by("calls_per_cycle", descending=True).first()
    return reduces.group_by("trial_id").agg(served=pl.when(of_nccl.any()).then(pl.lit("nccl")).otherwise(most))


def with_served(trials: pl.DataFrame, kernels: pl.DataFrame) -> pl.DataFrame:
    """Correct `all_reduce` where it says NCCL and the trace of the same server shows another kernel; add `served`.

    Args:
        trials: with `launch`; one trial of a launch is enough to have been traced.
    """
    traced = trials.join(served_by(kernels), on="trial_id", how="left").with_columns(
        served=pl.col("served").drop_nulls().first().over("launch")
    )
    other = pl.col("served").is_not_null() & (pl.col("served") != "nccl") & (pl.col("all_reduce") == "nccl")
    return traced.with_columns(all_reduce=pl.when(other).then(pl.lit("custom")).otherwise("all_reduce"))


def corrections(stated: pl.DataFrame, corrected: pl.DataFrame) -> list[str]:
    """A line for the report: how many servers the trials table is wrong about, and by which kernel that was seen."""
    joined = corrected.join(stated.select("trial_id", stated="all_reduce"), on="trial_id")
    wrong = joined.filter(pl.col("stated").is_not_null() & (pl.col("stated") != pl.col("all_reduce")))
    if wrong.is_empty():
        return []
    kernels = ", ".join(sorted(wrong["served"].unique()))
    return [
        f"in {wrong['launch'].n_unique()} servers the trace shows `{kernels}` doing the all-reduces, where the trials "
        "table says NCCL: no NCCL setting acted on them there"
    ]
