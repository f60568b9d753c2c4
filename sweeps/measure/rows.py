"""The rows that a trial leaves in the tables: configuration, launch report, block, decision -> columns."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import pyarrow.compute as pc

from sweeps.engines.base import BlockRecord, LaunchReport
from sweeps.engines.summary import BlockSummary
from sweeps.measure.block_facts import foreign_pids, probe_tokens
from sweeps.measure.records import Decision, Finding, Outcome, PlannedTrial
from sweeps.results.journal import DECISION_SUFFIX, Row
from sweeps.results.part_file import DamagedPartError
from sweeps.results.tables import ACTIVITIES, ResultsFolder, TableError, read_part, read_parts, write_part
from sweeps.spec.model import SweepSpec
from sweeps.spec.names import DRAFTING
from sweeps.spec.space import Configuration
from sweeps.spec.workload import Block

PRUNED_EVENT = "pruned"
PROCESS_DIED = "the trial's process died"
"""Reason of a trial that could not say itself how it ended."""
_TELEMETRY_NUMBERS = ("sm_clock_mhz", "power_w", "temperature_c", "memory_used_bytes")
_FINDING_SUFFIX = "-finding"


def trial_row(trial: PlannedTrial, *, sweep_id: str, attempt: int) -> Row:
    """The columns of `trials` that are known before anything runs."""
    return {
        "sweep_id": sweep_id,
        "trial_id": trial.trial_id,
        "attempt": attempt,
        "role": trial.role,
        "configuration_id": trial.configuration.configuration_id,
        "launch_key": trial.launch_key,
        "label": trial.configuration.label,
        "requested": settings(trial.requested),
        "acceptance": trial.acceptance,
        "start_index": trial.start_index,
        **_configuration_columns(trial.configuration),
        **_empty_account(),
    }


def invalid_row(requested: Mapping[str, Any], reason: str, spec: SweepSpec, *, trial_id: str, sweep_id: str) -> Row:
    """The `trials` row of a suggestion that no server could run: no configuration, no second."""
    return {
        "sweep_id": sweep_id,
        "trial_id": trial_id,
        "attempt": 1,
        "role": "candidate",
        "label": ", ".join(f"{name} {value}" for name, value in requested.items()),
        "requested": settings(requested),
        "acceptance": spec.acceptance,
        **_empty_account(),
        **_never_ran(spec),
        "status": "invalid",
        "stage": "plan",
        "kind": "invalid_config",
        "reason": reason,
    }


def lost_row(trial: PlannedTrial, spec: SweepSpec, reason: str, *, sweep_id: str) -> Row:
    """The `trials` row of a trial whose process died before it could begin a journal."""
    return {
        **trial_row(trial, sweep_id=sweep_id, attempt=1),
        **_never_ran(spec),
        **interrupted_columns(),
        "reason": reason,
    }


def block_row(record: BlockRecord, summary: BlockSummary, block: Block, suspect: str | None) -> Row:
    """The columns of `blocks`, keys excepted. `suspect` names the rules that the block breaks."""
    kinds = record.cycles["timer_kind"].unique().to_pylist()
    hashes = "".join(request.output_hash for request in record.requests)
    throttle = record.telemetry.get("throttle_reasons")
    return {
        **{name: value for name, value in asdict(summary).items() if name != "accept_histogram"},
        "accept_histogram": None if summary.accept_histogram is None else list(summary.accept_histogram),
        "tok_s": summary.tok_s,
        "num_requests": len(record.requests),
        "concurrency": block.concurrency,
        "timer_kind": kinds[0] if len(kinds) == 1 else None,
        "output_hash": hashlib.sha256(hashes.encode()).hexdigest()[:16],
        **{name: record.telemetry.get(name) for name in _TELEMETRY_NUMBERS},
        "throttle_reasons": None if throttle is None else str(throttle),
        "probe_tokens": probe_tokens(record.cycles),
        "asked_tokens": block.output_tokens if block.ignore_eos and record.streams else None,
        "foreign_pids": foreign_pids(record),
        "suspect": suspect,
    }


def record_decision(folder: ResultsFolder, trial_id: str, decision: Decision, *, sweep_id: str, at_s: float) -> None:
    """Write the driver's decision to prune, as a part of `events` of its own: there the trial's actor finds it."""
    row = {
        "sweep_id": sweep_id,
        "trial_id": trial_id,
        "attempt": 1,
        "at_s": at_s,
        "event": PRUNED_EVENT,
        "detail": decision.reason,
        "numbers": dict(decision.numbers),
    }
    write_part(folder, "events", [row], trial_id=trial_id + DECISION_SUFFIX, attempt=1)


def record_findings(
    folder: ResultsFolder, trial_id: str, findings: Sequence[Finding], *, sweep_id: str, at_s: float
) -> None:
    """Leave what the search found out after a trial: a part of `events` of its own."""
    rows = [
        {
            "sweep_id": sweep_id,
            "trial_id": trial_id,
            "attempt": 1,
            "at_s": at_s,
            "event": finding.event,
            "detail": finding.detail,
            "numbers": dict(finding.numbers),
        }
        for finding in findings
    ]
    write_part(folder, "events", rows, trial_id=trial_id + _free_suffix(folder, trial_id), attempt=1)


def _free_suffix(folder: ResultsFolder, trial_id: str) -> str:
    """A trial may have findings of several drivers: no part replaces an earlier one."""
    suffixes = (_FINDING_SUFFIX + ("" if number == 1 else f"-{number}") for number in itertools.count(1))
    return next(each for each in suffixes if not folder.part("events", trial_id + each, 1).exists())


def prune_reason(folder: ResultsFolder, trial_id: str) -> str | None:
    """Why the driver pruned a trial; None if it did not."""
    try:
        rows = read_part(folder, "events", trial_id=trial_id + DECISION_SUFFIX, attempt=1).to_pylist()
    except DamagedPartError:
        return None  # the trial then counts as interrupted, and is measured again
    return str(rows[0]["detail"]) if rows else None


def last_outcome(folder: ResultsFolder, trial_id: str) -> Outcome:
    """How a trial ended, by the row of its last attempt. Raises TableError if it has none that can be read."""
    attempts = [
        path.stem.rpartition("-a")[2] for path in folder.part("trials", trial_id, 1).parent.glob(f"{trial_id}-a*")
    ]
    newest = max((int(attempt) for attempt in attempts if attempt.isdecimal()), default=1)
    rows = read_part(folder, "trials", trial_id=trial_id, attempt=newest).to_pylist()
    if not rows:
        raise TableError(f"{folder.root}: table trials has no row of {trial_id}")
    (row,) = rows
    return Outcome(
        status=row["status"],
        reason=row["reason"],
        stage=row["stage"],
        kind=row["kind"],
        relaunched=row["relaunched"],
        seconds={activity: row[f"{activity}_s"] for activity in ACTIVITIES},
        all_reduce=row["all_reduce"],
    )


def last_end_s(folder: ResultsFolder, node: str) -> float:
    """The time at which the rows of a node end, on its engines' clock; 0 if it has none."""
    trials = read_parts(folder, "trials", columns=["node", "ended_s"]).rows
    return float(pc.max(trials.filter(pc.equal(trials["node"], node))["ended_s"]).as_py() or 0.0)


def interrupted(reason: str, num_blocks: int) -> Outcome:
    """The outcome of a trial that was ended by neither its blocks, its pruner nor its engine."""
    return Outcome(status="failed", reason=reason, stage="measure" if num_blocks else "load", kind="interrupted")


def settings(values: Mapping[str, Any]) -> dict[str, str]:
    """Settings as the tables hold them: text; absent if None."""
    return {name: str(value) for name, value in values.items() if value is not None}


def _configuration_columns(configuration: Configuration) -> Row:
    return {
        **dict(zip(DRAFTING, configuration.drafting, strict=True)),
        "nccl_set": configuration.nccl_set,
        "nccl_env": settings(dict(configuration.nccl_env)),
        "args": settings(dict(configuration.args)),
        "env": settings(dict(configuration.env)),
    }


def report_columns(report: LaunchReport) -> Row:
    """The columns of `trials` that a launch or switch reports."""
    return {
        "engine_version": report.version,
        "machine": report.machine,
        "num_gpus": report.num_gpus,
        "effective": settings(report.effective),
        "all_reduce": report.all_reduce,
        "command": list(report.command),
        "environment": settings(report.environment),
        "removed_env": list(report.removed),
    }


def interrupted_columns() -> Row:
    """What a row says until its trial ends: a reader of a dead process's journal then sees what happened."""
    outcome = interrupted(PROCESS_DIED, 0)
    return {"status": outcome.status, "stage": outcome.stage, "kind": outcome.kind, "reason": outcome.reason}


def _empty_account() -> Row:
    return {
        "started_at": datetime.now(UTC),
        "num_blocks": 0,
        **{f"{activity}_s": 0.0 for activity in ACTIVITIES},
    }


def _never_ran(spec: SweepSpec) -> Row:
    return {
        "engine": spec.engine.kind,
        "num_gpus": spec.resources.gpus,
        "started_s": 0.0,
        "ended_s": 0.0,
    }
