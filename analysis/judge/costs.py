"""What a sweep cost, by activity, and what an exhaustive grid would have cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from analysis.data.load import Results, gpu_seconds

_BOOT = ("launch_s", "weight_load_s", "capture_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """GPU seconds: wall seconds x GPUs held."""

    gpu_seconds: Mapping[str, float]
    """By activity, over every attempt."""
    total: float
    exhaustive_grid: float | None
    """Every configuration once, each launched anew and run to its end; None where no launch tells its cost."""
    num_configurations: int
    counts: str
    """Whether `num_configurations` is the searched space or only what was tried."""
    by_status: Mapping[str, int]


def cost(results: Results) -> Cost:
    """Account of the whole folder."""
    spent = gpu_seconds(results)
    tried = results.all_trials["configuration_id"].drop_nulls().n_unique()
    size = results.num_configurations
    per_launch = _one_of_the_grid(results)
    configurations = tried if size is None else size
    statuses = results.all_trials.group_by("status").len().sort("status")
    return Cost(
        gpu_seconds=spent,
        total=sum(spent.values()),
        exhaustive_grid=None if per_launch is None else per_launch * configurations,
        num_configurations=configurations,
        counts="configurations tried" if size is None else "valid configurations of the spec",
        by_status=dict(statuses.iter_rows()),
    )


def _one_of_the_grid(results: Results) -> float | None:
    """GPU seconds of one configuration launched anew and run to its end: medians over what the sweep shows."""
    completed = results.all_trials.filter(pl.col("status") == "completed")
    launched = completed.filter(pl.col("relaunched"))
    if launched.is_empty():
        return None
    boot = launched.select((pl.sum_horizontal(_BOOT) * pl.col("num_gpus")).median()).item()
    rest = completed.select(((pl.col("warmup_s") + pl.col("measure_s")) * pl.col("num_gpus")).median()).item()
    stops = launched.filter(pl.col("stop_s") > 0)
    stop = stops.select((pl.col("stop_s") * pl.col("num_gpus")).median()).item() if stops.height else 0.0
    return float(boot + rest + stop)
