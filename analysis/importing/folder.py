"""Readings of foreign files as a results folder that says of itself that it was imported."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from analysis.importing.all_reduce_table import write_all_reduces
from analysis.importing.records import ForeignBlock, ForeignRun, ImportFileError, Reading
from sweeps.results.tables import ACTIVITIES, SCHEMA_VERSION, ResultsFolder, write_part
from sweeps.results.writing import replace_text

ENGINE = "imported"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
"""`started_at` is a label; foreign files do not agree on one."""
Row = dict[str, Any]


def write_folder(readings: Sequence[Reading], out: Path, *, target_tok_s: float | None = None) -> None:
    """Write a new results folder. Runs of one configuration become its launches.

    Raises ImportFileError if `out` holds something already, if it cannot be written, or if the files measure
    throughput in ways that must not be compared.
    """
    runs = [run for reading in readings for run in reading.runs]
    kinds = sorted({run.throughput for run in runs if run.blocks})
    if len(kinds) > 1:
        raise ImportFileError(
            f"--out: one folder holds one kind of throughput, got {'; '.join(kinds)}: import them apart"
        )
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ImportFileError(f"--out: {out} is there already, and not an empty folder")
        out.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = ResultsFolder(out)
        sweep_id = f"imported-{hashlib.sha256(repr(readings).encode(errors='replace')).hexdigest()[:8]}"
        _write_tables(folder, runs, sweep_id)
        write_all_reduces(out, [reading for reading in readings if reading.all_reduces])
        replace_text(folder.manifest, json.dumps(_manifest(readings, sweep_id, target_tok_s), indent=2) + "\n")
    except OSError as error:
        raise ImportFileError(f"--out: {out} cannot be written: {error.strerror or error}") from error


def configuration_label(run: ForeignRun) -> str:
    """How the run's configuration is called in tables."""
    drafting = run.drafting
    if drafting.steps is None:
        return f"draft steps not known ({run.origin})" if drafting.speculates else f"drafting not known ({run.origin})"
    if drafting.steps == 0:
        return "no speculation"
    parts = [f"steps {drafting.steps}"]
    parts += [f"top-k {drafting.eagle_topk}"] if drafting.eagle_topk else []
    parts += [f"draft tokens {drafting.num_draft_tokens}"] if drafting.num_draft_tokens else []
    return ", ".join([*parts, *([drafting.drafter] if drafting.drafter else [])])


def blocks_of(run: ForeignRun) -> tuple[ForeignBlock, ...]:
    """The blocks that a folder can hold: none of a run whose number of draft steps is not known."""
    return run.blocks if run.drafting.steps is not None else ()


def _manifest(readings: Sequence[Reading], sweep_id: str, target_tok_s: float | None) -> Row:
    files = [
        {"file": each.source, "format": each.format, "understood": each.understood, "unparsed": each.unparsed}
        for each in readings
    ]
    return {
        "sweep_id": sweep_id,
        "schema_version": SCHEMA_VERSION,
        "engine": ENGINE,
        "imported": files,
        "throughput": next((run.throughput for each in readings for run in each.runs if run.blocks), None),
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "target_tok_s": target_tok_s,
    }


def _write_tables(folder: ResultsFolder, runs: Sequence[ForeignRun], sweep_id: str) -> None:
    clock_s = 0.0
    for number, run in enumerate(runs):
        trial_id = f"{'k' if run.drafting.steps == 0 else 't'}{number:04d}"
        keys = {"sweep_id": sweep_id, "trial_id": trial_id, "attempt": 1}
        blocks = _block_rows(run, keys, clock_s)
        ended_s = clock_s + sum(row["wall_s"] for row in blocks)
        trial = _trial_row(run, keys, started_s=clock_s, ended_s=ended_s, number=number, num_blocks=len(blocks))
        tables: Mapping[str, list[Row]] = {
            "blocks": blocks,
            "events": _event_rows(run, keys, clock_s),
            "evidence": _evidence_rows(run, keys),
            "trials": [trial],
        }
        for table, rows in tables.items():
            if rows:
                write_part(folder, table, rows, trial_id=trial_id, attempt=1)
        clock_s = ended_s + 1.0


def _trial_row(run: ForeignRun, keys: Row, *, started_s: float, ended_s: float, number: int, num_blocks: int) -> Row:
    drafting = run.drafting
    identity = repr((drafting, sorted(run.settings.items()), run.model, run.throughput))
    if drafting.steps is None:
        identity += run.origin
    spent: dict[str, float] = dict.fromkeys(ACTIVITIES, 0.0)
    spent |= {**run.boot_s, "measure": ended_s - started_s}
    return {
        **keys,
        "role": "control" if drafting.steps == 0 else "candidate",
        "engine": ENGINE,
        "engine_version": run.engine_version,
        "machine": None,
        "node": "imported",
        "num_gpus": run.num_gpus,
        "acceptance": "measured",
        "status": "completed",
        "configuration_id": hashlib.sha256(identity.encode(errors="replace")).hexdigest()[:12],
        "launch_key": keys["trial_id"],
        "label": configuration_label(run),
        "relaunched": True,
        "requested": [],
        "effective": [*run.settings.items(), ("imported_from", run.origin), ("model", run.model or "not told")],
        "num_steps": drafting.steps,
        "eagle_topk": drafting.eagle_topk,
        "num_draft_tokens": drafting.num_draft_tokens,
        "drafter": drafting.drafter,
        "args": list(run.settings.items()),
        "all_reduce": run.all_reduce,
        "started_at": _EPOCH,
        "started_s": started_s,
        "start_index": number,
        "ended_s": ended_s,
        "num_blocks": num_blocks,
        **{f"{activity}_s": spent[activity] for activity in ACTIVITIES},
    }


def _block_rows(run: ForeignRun, keys: Row, clock_s: float) -> list[Row]:
    rows: list[Row] = []
    indices: Counter[int] = Counter()
    for block in blocks_of(run):
        rows.append(
            {
                **keys,
                "block_index": indices[block.concurrency],
                "concurrency": block.concurrency,
                "started_s": clock_s,
                "wall_s": block.decode_s,
                "decode_s": block.decode_s,
                "decode_tokens": block.decode_tokens,
                "tok_s": block.tok_s,
                "num_requests": block.concurrency,
                "accept_length": block.accept_length,
                "cycle_ms": block.cycle_ms,
                "verify_ms": block.verify_ms,
                "output_hash": "not known",
            }
        )
        indices[block.concurrency] += 1
        clock_s += block.decode_s
    return rows


def _event_rows(run: ForeignRun, keys: Row, clock_s: float) -> list[Row]:
    told: list[tuple[str, str | None, dict[str, float]]] = [(each.name, each.detail, {}) for each in run.events]
    if run.accept_length is not None:
        told.append(("accept_length", "bonus token included", {"tokens": run.accept_length}))
    for cycle in run.verify:
        share = {} if cycle.share is None else {"share": cycle.share}
        told.append(("verify_cycle", None, {"verify_ms": cycle.verify_ms, **share}))
    return [
        {**keys, "at_s": clock_s, "event": name, "detail": detail, "numbers": list(numbers.items())}
        for name, detail, numbers in told
    ]


def _evidence_rows(run: ForeignRun, keys: Row) -> list[Row]:
    return [
        {
            **keys,
            "rank": seen.rank,
            "setting": f"env.{seen.name}",
            "read_by_nccl": seen.value,
            "grade": "extra",
            "detail": "nothing was asked for: imported",
        }
        for seen in run.seen
    ]
