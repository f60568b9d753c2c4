"""The rules of `sweeps.results.plausible`, applied to whatever a folder holds: recordings and foreign folders too."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import polars as pl

from sweeps.results.block_facts import facts_of_rows
from sweeps.results.plausible import suspect

_MEASURED_ONLY = frozenset({"looping", "same_answer"})
"""Rules that a spec may switch off (`checks`): what the sweep itself said of them counts."""


def judged(blocks: pl.DataFrame, trials: pl.DataFrame, requests: pl.DataFrame | None) -> pl.DataFrame:
    """`blocks` (or `anchors`) with `suspect` filled in for rows that break a rule and do not say so.

    Args:
        trials: `trial_id`, `num_steps`, `num_draft_tokens`, one row per trial.
        requests: rows of the same trials; None if none belong to the blocks.
    """
    steps = {row["trial_id"]: row for row in trials.unique("trial_id").iter_rows(named=True)}
    answers: dict[tuple[str, int, int], list[dict[str, Any]]] = defaultdict(list)
    for row in requests.iter_rows(named=True) if requests is not None else ():
        answers[row["trial_id"], row["block_index"], row["concurrency"] or 1].append(row)
    told = []
    for row in blocks.iter_rows(named=True):
        key = (row["trial_id"], row["block_index"], row["concurrency"] or 1)
        facts = facts_of_rows(
            row,
            num_steps=steps[row["trial_id"]]["num_steps"],
            num_draft_tokens=steps[row["trial_id"]]["num_draft_tokens"],
            requests=answers.get(key, ()),
        )
        told.append(row["suspect"] or suspect(facts, allowed=_MEASURED_ONLY))
    return blocks.with_columns(suspect=pl.Series("suspect", told, dtype=pl.String))
