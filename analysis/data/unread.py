"""NCCL sets that did not act: their servers are the default's again, whatever the set is called.

A misspelt variable reaches the process and NCCL reads nothing; or NCCL reads the set, and something else does the
all-reduces (it may still gather the logits, once a cycle). Such a set says nothing about NCCL, and its launches are
repeats: what they differ by from the default's is what launches differ by.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from sweeps.results.nccl_acts import is_unread, may_act, variables_read
from sweeps.results.tables import DRAFTING_COLUMNS

_SAME = (*DRAFTING_COLUMNS, "args", "env", "acceptance")


def unread_variables(trials: pl.DataFrame, evidence: pl.DataFrame) -> dict[str, tuple[str, ...]]:
    """Trial id -> the variables of its NCCL set, for trials of which NCCL, by its own logs, read none of them.

    Trials without NCCL's own account of what it read are left out: nothing is known of them.
    """
    read: dict[str, set[str]] = {}
    for trial_id, setting, value in evidence.select("trial_id", "setting", "read_by_nccl").iter_rows():
        read.setdefault(trial_id, set()).update(variables_read([(setting, value)]))
    found = {}
    for trial_id, variables in trials.select("trial_id", "nccl_env").iter_rows():
        names = tuple(name for name, _ in _settings(variables))
        if is_unread(names, read.get(trial_id, ())):
            found[trial_id] = names
    return found


def with_twins(trials: pl.DataFrame, evidence: pl.DataFrame) -> pl.DataFrame:
    """Add `twin`: the configuration that a trial repeats in fact; its own, unless its NCCL set did not act."""
    unread = unread_variables(trials, evidence)
    rows = trials.select("trial_id", "configuration_id", "nccl_env", "all_reduce", *_SAME).to_dicts()
    plain = {_others(row): row["configuration_id"] for row in rows if not _settings(row["nccl_env"])}
    idle = [row["trial_id"] in unread or not may_act(row["all_reduce"]) for row in rows]
    twins = [
        plain.get(_others(row), row["configuration_id"]) if is_idle else row["configuration_id"]
        for row, is_idle in zip(rows, idle, strict=True)
    ]
    return trials.with_columns(twin=pl.Series("twin", twins, dtype=pl.String))


def _others(row: Mapping[str, Any]) -> tuple[object, ...]:
    return tuple(_settings(row[name]) if name in ("args", "env") else row[name] for name in _SAME)


def _settings(value: Any) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(dict(value or {}).items()))
