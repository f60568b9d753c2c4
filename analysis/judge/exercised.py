"""Whether communication settings can have acted on a configuration's decoding at all."""

from __future__ import annotations

from collections.abc import Iterable

import polars as pl

from analysis.data.load import Results
from analysis.data.unread import unread_variables
from sweeps.results.nccl_acts import may_act


def idle_reasons(results: Results) -> dict[str, str]:
    """Configuration id -> why communication settings cannot have acted on it; those on which they may have are left
    out."""
    trials = results.trials.select("trial_id", "configuration_id", "all_reduce")
    unread = unread_variables(results.trials, results.evidence)
    asked = results.evidence.filter(pl.col("setting").str.starts_with("env.NCCL_") & pl.col("requested").is_not_null())
    grades: dict[str, list[tuple[str, str | None]]] = {}
    for trial_id, grade, detail in asked.select("trial_id", "grade", "detail").iter_rows():
        grades.setdefault(trial_id, []).append((grade, detail))
    own: dict[str, list[tuple[str, str | None]]] = {}
    for trial_id, key, backend in trials.iter_rows():
        own.setdefault(key, []).append((trial_id, backend))
    found = {}
    for key, rows in own.items():
        names = [trial_id for trial_id, _ in rows]
        backends = {backend for _, backend in rows}
        evidence = [each for name in names for each in grades.get(name, ())]
        if not any(map(may_act, backends)):
            found[key] = f"{', '.join(sorted(map(str, backends)))} does the all-reduces of decode, not NCCL"
        elif all(name in unread for name in names):
            found[key] = f"NCCL read none of its variables ({', '.join(unread[names[0]])})"
        elif evidence and all(grade == "not_exercised" for grade, _ in evidence):
            found[key] = _first(detail for _, detail in evidence)
    return found


def _first(details: Iterable[str | None]) -> str:
    fallback = "by the evidence of every rank, decoding did not use it"
    return next((detail for detail in details if detail is not None), fallback)
