"""What a reader of a sweep should be warned of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from sweeps.results.inert import is_inert
from sweeps.results.resolved import EXPECTED_TO_DIFFER, RESOLVED

_CLOCK_TOLERANCE = 0.02
_CROWDED = 0.6
"""Share of the wanted concurrency below which cycles were not shared as asked (a limit of the server, say)."""
_SHARED = ("engine", "engine_version", "machine", "num_gpus", "acceptance")


def warnings_of(
    latest: pl.DataFrame, trials: pl.DataFrame, blocks: pl.DataFrame, evidence: pl.DataFrame
) -> Iterator[str]:
    """One sentence each. `latest` has every last attempt, `trials` those that may be compared."""
    for column in _SHARED:
        values = sorted(map(str, trials[column].drop_nulls().unique()))
        if len(values) > 1:
            yield f"trials differ in {column} ({', '.join(values)}): comparisons across them are confounded"
    if "pinned" in latest["acceptance"].to_list():
        yield "acceptance is pinned (simulated by the server): cycle times are valid, throughput is not"
    yield from _inert(blocks)
    yield from _resolved_apart(trials)
    yield from _clocks_apart(trials, blocks)
    throttled = blocks.filter(~pl.col("throttle_reasons").fill_null("").is_in(["", "0", "none", "0x0"]))
    if not throttled.is_empty():
        count = throttled["trial_id"].n_unique()
        yield f"GPUs reported throttling in {throttled.height} blocks of {count} trials"
    for concurrency, reached in _crowds(blocks):
        if reached < _CROWDED * concurrency:
            yield f"{concurrency} requests at a time were asked for, but only {reached:.1f} shared a cycle on average"
    extra = sorted(evidence.filter(pl.col("grade") == "extra")["setting"].unique())
    if extra:
        yield f"set in the server, but not by the sweep: {', '.join(extra)}"


def imported_from(manifest: Mapping[str, Any]) -> Iterator[str]:
    """That the numbers are of others, and whose; nothing for a sweep of ours."""
    if not (files := manifest.get("imported")):
        return
    named = [str(each.get("file")) for each in files if isinstance(each, dict)] if isinstance(files, list) else []
    told = f"{', '.join(named[:6]) or 'files of others'}{' and more' if len(named) > 6 else ''}"
    yield (
        f"imported from {told}: no certificate covers these numbers, accept length counts the bonus token, and nothing "
        "is claimed without repeated launches"
    )


def _inert(blocks: pl.DataFrame) -> Iterator[str]:
    """Trials that a sweep measured although hardly a draft token was accepted (`checks.inert_draft: allow`)."""
    accepted = (pl.col("accept_length") - 1.0) * pl.col("num_cycles")
    counts = (
        blocks.filter(pl.col("accept_length").is_not_null() & pl.col("num_cycles").is_not_null())
        .group_by("trial_id")
        .agg(accepted=accepted.sum(), cycles=pl.col("num_cycles").sum())
        .sort("trial_id")
    )
    inert = [row["trial_id"] for row in counts.iter_rows(named=True) if is_inert(row["accepted"], row["cycles"])]
    if inert:
        more = f" and {len(inert) - 8} more" if len(inert) > 8 else ""
        yield (
            f"hardly a draft token is accepted in {', '.join(inert[:8])}{more}: "
            "cycle times hold, but throughput says nothing about speculation"
        )


def _resolved_apart(trials: pl.DataFrame) -> Iterator[str]:
    """What the servers of compared trials decided differently by themselves."""
    told: dict[str, dict[str, list[str]]] = {}
    for row in trials.iter_rows(named=True):
        swept = {name.replace("-", "_") for name in dict(row["args"] or {})}
        for name, value in dict(row["effective"] or {}).items():
            if name in RESOLVED and name not in swept and name not in EXPECTED_TO_DIFFER:
                told.setdefault(name, {}).setdefault(value, []).append(row["trial_id"])
    for name, values in sorted(told.items()):
        if len(values) > 1:
            parts = (
                f"{value[:40]} in {', '.join(ids[:3])}{' ...' if len(ids) > 3 else ''}" for value, ids in values.items()
            )
            yield f"servers resolved {name} differently ({'; '.join(parts)}): comparisons across them are confounded"


def _clocks_apart(trials: pl.DataFrame, blocks: pl.DataFrame) -> Iterator[str]:
    """Trials whose median SM clock differs from the controls', or from all other trials' if no control has one."""
    clocks = blocks.group_by("trial_id").agg(mhz=pl.col("sm_clock_mhz").median()).drop_nulls().sort("trial_id")
    controls = trials.filter(pl.col("role") == "control")["trial_id"].implode()
    of_controls = clocks.filter(pl.col("trial_id").is_in(controls))["mhz"].median()
    usual = of_controls if of_controls is not None else clocks["mhz"].median()
    if not isinstance(usual, float):
        return
    apart = clocks.filter((pl.col("mhz") / usual - 1).abs() > _CLOCK_TOLERANCE)
    if not apart.is_empty():
        listed = ", ".join(f"{trial} {mhz:.0f} MHz" for trial, mhz in apart.head(8).rows())
        more = f" and {apart.height - 8} more" if apart.height > 8 else ""
        yield (
            f"the median SM clock is more than {_CLOCK_TOLERANCE:.0%} away from the "
            f"{'control' if of_controls is not None else 'sweep'}'s {usual:.0f} MHz in {listed}{more}"
        )


def _crowds(blocks: pl.DataFrame) -> Iterator[tuple[int, float]]:
    """Each concurrency beyond 1, and the requests that shared a cycle: tok/s x seconds of a cycle / accept length."""
    shared = pl.col("tok_s") * pl.col("cycle_ms") / 1000 / pl.col("accept_length").fill_null(1.0)
    many = blocks.filter(pl.col("concurrency") > 1).group_by("concurrency").agg(reached=shared.median()).drop_nulls()
    yield from many.sort("concurrency").iter_rows()
