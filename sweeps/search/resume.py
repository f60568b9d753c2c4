"""What an earlier run of the same sweep has measured, read back from its results folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any

from sweeps.engines.base import TRANSIENT_KINDS, KernelTime
from sweeps.engines.summary import BlockSummary
from sweeps.measure.records import PlannedTrial, kind_for_search, study_number
from sweeps.results.nccl_acts import is_unread, variables_read
from sweeps.results.tables import ACTIVITIES, Damage, ResultsFolder, read_parts
from sweeps.search.observations import Observation, Observations
from sweeps.search.schedule import is_served_alone
from sweeps.spec.space import Configuration, Space, Suggestion

_BLOCK_FIELDS = tuple(entry.name for entry in fields(BlockSummary))
_KERNEL_FIELDS = tuple(entry.name for entry in fields(KernelTime))
_MAY_BE_GONE = TRANSIENT_KINDS | {"engine_unavailable"}
"""Kinds of failure that tell of the node more than of the configuration."""
_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "trials": (
        "role",
        "status",
        "kind",
        "reason",
        "acceptance",
        "configuration_id",
        "relaunched",
        "all_reduce",
        "started_at",
        "start_index",
        "num_blocks",
        "requested",
        *(f"{activity}_s" for activity in ACTIVITIES),
    ),
    "blocks": ("concurrency", "suspect", *_BLOCK_FIELDS),
    "kernels": _KERNEL_FIELDS,
    "evidence": ("setting", "read_by_nccl"),
}
"""What is read of each table, keys excepted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedRow:
    """A suggestion that the tables hold as `invalid`: no server could run it."""

    trial_id: str
    requested: Suggestion
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Earlier:
    """What a results folder says of the drivers before this one."""

    observations: Observations
    refused: tuple[RefusedRow, ...]
    names_in_use: frozenset[str]
    """Trial ids that any file bears, readable or not."""
    damaged: tuple[Damage, ...]
    """Files that were not believed. A trial that lost its row or its blocks is measured again, under a new name."""


def read_observations(folder: ResultsFolder, space: Space) -> Observations:
    """`Earlier.observations` alone."""
    return read_earlier(folder, space).observations


def read_earlier(
    folder: ResultsFolder, space: Space, *, sweep_id: str | None = None, retry_failed: bool = False
) -> Earlier:
    """Every trial of the folder in the order of its start; suggestions that are no configuration are `refused`.

    Blocks and status are those of a trial's last attempt, seconds those of all of them.

    Args:
        sweep_id: rows of any other sweep are damage.
        retry_failed: every failed trial is to be tried again, not only one whose cause may be gone by itself.

    Raises TableError for a part of a newer version.
    """
    known = {member.configuration_id: member for member in (*space.configurations(), space.control)}
    tables = {
        table: read_parts(folder, table, columns=columns, sweep_id=sweep_id) for table, columns in _COLUMNS.items()
    }
    rows = sorted(tables["trials"].rows.to_pylist(), key=_start)
    trials = {row["trial_id"]: row for row in sorted(rows, key=lambda row: row["attempt"])}
    deciding = (None, space.spec.workload.concurrency[0])
    blocks = _by_attempt([row for row in tables["blocks"].rows.to_pylist() if row["concurrency"] in deciding])
    kernels = _by_attempt(tables["kernels"].rows.to_pylist())
    read = _read_by_nccl(tables["evidence"].rows.to_pylist())
    seconds = _seconds(rows)
    ordered = sorted(trials.values(), key=_start)
    damaged = [damage for parts in tables.values() for damage in parts.damaged]
    damaged += (_lost_blocks(row) for row in ordered if _has_lost_blocks(row, blocks))
    names_in_use = folder.names_in_use()
    seen = [
        replace(
            _observation(row, known[row["configuration_id"]], space, blocks, kernels, read),
            seconds=seconds[row["trial_id"]],
        )
        for row in ordered
        if row["configuration_id"] in known
    ]
    observations = Observations(_to_try_again(seen, every=retry_failed), names_in_use=names_in_use)
    return Earlier(
        observations=observations,
        refused=tuple(
            _refused(row, space) for row in ordered if row["status"] == "invalid" and not row["configuration_id"]
        ),
        names_in_use=names_in_use,
        damaged=tuple(damaged),
    )


def _to_try_again(observations: list[Observation], *, every: bool) -> Iterator[Observation]:
    """Failed trials that do not count are marked as interrupted: the search then tries their configurations again.

    A failure that may be gone by itself gets one further driver; with `every`, any failure.
    """
    failures = Counter(
        (seen.trial.configuration, seen.trial.role) for seen in observations if seen.kind in _MAY_BE_GONE
    )
    for seen in observations:
        again = seen.kind in _MAY_BE_GONE and failures[seen.trial.configuration, seen.trial.role] == 1
        if seen.status == "failed" and not seen.refused and (every or again):
            yield replace(seen, kind="interrupted")
        else:
            yield seen


def _start(row: Mapping[str, Any]) -> tuple[bool, int, datetime]:
    """Drivers count starts, because a wall clock may step back; rows older than the count come first."""
    index = row["start_index"]
    return index is not None, index or 0, row["started_at"]


def _has_lost_blocks(row: Mapping[str, Any], blocks: Mapping[tuple[str, int], list[dict[str, Any]]]) -> bool:
    there = len(blocks.get((row["trial_id"], row["attempt"]), ()))
    return row["status"] in ("completed", "pruned") and there < row["num_blocks"]


def _lost_blocks(row: Mapping[str, Any]) -> Damage:
    name = f"{row['trial_id']}-a{row['attempt']}"
    return Damage(
        file=f"tables/blocks/{name}.parquet",
        reason=f"has fewer blocks than the {row['num_blocks']} that tables/trials/{name}.parquet counts",
        trial_id=row["trial_id"],
        attempt=row["attempt"],
    )


def _refused(row: Mapping[str, Any], space: Space) -> RefusedRow:
    """Values of `requested` are text in the tables: the choices that are written so."""
    texts = dict(row["requested"])
    requested = {
        dimension.name: choice
        for dimension in space.dimensions
        for choice in dimension.choices
        if texts.get(dimension.name) == str(choice)
    }
    return RefusedRow(trial_id=row["trial_id"], requested=requested, reason=row["reason"] or "invalid")


def _observation(
    row: Mapping[str, Any],
    configuration: Configuration,
    space: Space,
    blocks: Mapping[tuple[str, int], list[dict[str, Any]]],
    kernels: Mapping[tuple[str, int], list[dict[str, Any]]],
    read: Mapping[tuple[str, int], frozenset[str]],
) -> Observation:
    attempt = (row["trial_id"], row["attempt"])
    lost = _has_lost_blocks(row, blocks)
    alone = is_served_alone(row["role"], space)
    trial = PlannedTrial(
        trial_id=row["trial_id"],
        role=row["role"],
        number=study_number(row["trial_id"]),
        configuration=configuration,
        requested=space.suggestion(configuration),
        launch_key=space.alone_key(configuration) if alone else space.launch_key(configuration),
        states=() if alone else space.states(configuration),
        acceptance=row["acceptance"],
        start_index=row["start_index"],
    )
    return Observation(
        trial=trial,
        status="failed" if lost or row["status"] == "invalid" else row["status"],
        blocks=tuple(
            _block(block)
            for block in sorted(blocks.get(attempt, ()), key=lambda b: b["block_index"])
            if block["suspect"] is None
        ),
        relaunched=row["relaunched"],
        kernels=tuple(
            KernelTime(**{name: kernel[name] for name in _KERNEL_FIELDS}) for kernel in kernels.get(attempt, ())
        ),
        all_reduce=row["all_reduce"],
        nccl_unread=is_unread(dict(configuration.nccl_env), read.get(attempt, frozenset())),
        reason="its blocks are lost" if lost else row["reason"],
        kind="interrupted" if lost else kind_for_search(row["kind"]),
        refused=row["status"] == "invalid",
    )


def _read_by_nccl(evidence: list[dict[str, Any]]) -> dict[tuple[str, int], frozenset[str]]:
    """Variables that NCCL read, by trial id and attempt."""
    return {
        attempt: variables_read((row["setting"], row["read_by_nccl"]) for row in rows)
        for attempt, rows in _by_attempt(evidence).items()
    }


def _seconds(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    seconds: dict[str, dict[str, float]] = {}
    for row in rows:
        spent = seconds.setdefault(row["trial_id"], dict.fromkeys(ACTIVITIES, 0.0))
        for activity in ACTIVITIES:
            spent[activity] += row[f"{activity}_s"]
    return seconds


def _block(row: Mapping[str, Any]) -> BlockSummary:
    values = {name: row[name] for name in _BLOCK_FIELDS}
    histogram = values["accept_histogram"]
    return BlockSummary(**{**values, "accept_histogram": None if histogram is None else tuple(histogram)})


def _by_attempt(rows: list[dict[str, Any]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    grouped: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        grouped.setdefault((row["trial_id"], row["attempt"]), []).append(row)
    return grouped
