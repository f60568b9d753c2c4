"""What an earlier run of the same sweep has measured, read back from its results folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from sweeps.engines.base import KernelTime
from sweeps.engines.summary import BlockSummary
from sweeps.measure.records import PlannedTrial, kind_for_search, study_number
from sweeps.results.nccl_acts import is_unread, variables_read
from sweeps.results.tables import ACTIVITIES, ResultsFolder, read_table
from sweeps.search.observations import Observation, Observations
from sweeps.search.schedule import is_served_alone
from sweeps.spec.space import Configuration, Space

_BLOCK_FIELDS = tuple(entry.name for entry in fields(BlockSummary))
_KERNEL_FIELDS = tuple(entry.name for entry in fields(KernelTime))
_TRIAL_COLUMNS = [
    "trial_id",
    "attempt",
    "role",
    "status",
    "kind",
    "reason",
    "acceptance",
    "configuration_id",
    "relaunched",
    "all_reduce",
    "started_at",
    *(f"{activity}_s" for activity in ACTIVITIES),
]


def read_observations(folder: ResultsFolder, space: Space) -> Observations:
    """Every trial of the folder in the order of its start; suggestions that are no configuration excepted.

    Blocks and status are those of a trial's last attempt, seconds those of all of them.
    """
    known = {member.configuration_id: member for member in (*space.configurations(), space.control)}
    rows = read_table(folder, "trials").select(_TRIAL_COLUMNS).sort_by("started_at").to_pylist()
    trials = {row["trial_id"]: row for row in sorted(rows, key=lambda row: row["attempt"])}
    deciding = (None, space.spec.workload.concurrency[0])
    rows_of_blocks = read_table(folder, "blocks").select(["trial_id", "attempt", "concurrency", *_BLOCK_FIELDS])
    blocks = _by_attempt([row for row in rows_of_blocks.to_pylist() if row["concurrency"] in deciding])
    kernels = _by_attempt(read_table(folder, "kernels").select(["trial_id", "attempt", *_KERNEL_FIELDS]).to_pylist())
    read = _read_by_nccl(folder)
    seconds = _seconds(rows)
    return Observations(
        replace(
            _observation(row, known[row["configuration_id"]], space, blocks, kernels, read),
            seconds=seconds[row["trial_id"]],
        )
        for row in sorted(trials.values(), key=lambda row: row["started_at"])
        if row["configuration_id"] in known
    )


def _observation(
    row: Mapping[str, Any],
    configuration: Configuration,
    space: Space,
    blocks: Mapping[tuple[str, int], list[dict[str, Any]]],
    kernels: Mapping[tuple[str, int], list[dict[str, Any]]],
    read: Mapping[tuple[str, int], frozenset[str]],
) -> Observation:
    attempt = (row["trial_id"], row["attempt"])
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
    )
    return Observation(
        trial=trial,
        status="failed" if row["status"] == "invalid" else row["status"],
        blocks=tuple(_block(block) for block in sorted(blocks.get(attempt, ()), key=lambda b: b["block_index"])),
        relaunched=row["relaunched"],
        kernels=tuple(
            KernelTime(**{name: kernel[name] for name in _KERNEL_FIELDS}) for kernel in kernels.get(attempt, ())
        ),
        all_reduce=row["all_reduce"],
        nccl_unread=is_unread(dict(configuration.nccl_env), read.get(attempt, frozenset())),
        reason=row["reason"],
        kind=kind_for_search(row["kind"]),
        refused=row["status"] == "invalid",
    )


def _read_by_nccl(folder: ResultsFolder) -> dict[tuple[str, int], frozenset[str]]:
    """Variables that NCCL read, by trial id and attempt."""
    columns = ["trial_id", "attempt", "setting", "read_by_nccl"]
    by_attempt = _by_attempt(read_table(folder, "evidence").select(columns).to_pylist())
    return {
        attempt: variables_read((row["setting"], row["read_by_nccl"]) for row in rows)
        for attempt, rows in by_attempt.items()
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
