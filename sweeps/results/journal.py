"""What a trial has measured so far: appended and synced line by line, then turned into Parquet parts at its end.

A killed process loses the block it was in and nothing before: the next run finds the journal and writes the parts. Each
line is a JSON object, a tab, and the CRC-32 of the object's bytes; lines of older journals have no sum.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from sweeps.results.tables import CYCLE_COLUMNS, ResultsFolder, remove_part, write_part
from sweeps.results.writing import naming

Row = dict[str, Any]

DECISION_SUFFIX = "-decision"
"""Ends the name of the driver's own part of `events` for a trial; the actor writes `{trial_id}-a{attempt}`."""


@dataclass(slots=True)
class TrialRows:
    """All rows of one attempt, keys included. `trial` is as complete as the trial is."""

    trial: Row
    blocks: list[Row] = field(default_factory=list)
    anchors: list[Row] = field(default_factory=list)
    requests: list[Row] = field(default_factory=list)
    cycles: list[pa.Table] = field(default_factory=list)
    """One table of CYCLE_COLUMNS per row of `blocks`."""
    evidence: list[Row] = field(default_factory=list)
    kernels: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)

    @property
    def keys(self) -> Row:
        return {name: self.trial[name] for name in ("sweep_id", "trial_id", "attempt")}

    def write(self, folder: ResultsFolder) -> None:
        """Write every part of the attempt; the `trials` part last, as the mark that all other parts are whole."""
        trial_id, attempt = self.trial["trial_id"], self.trial["attempt"]
        tables = {
            "blocks": self.blocks,
            "anchors": self.anchors,
            "requests": self.requests,
            "cycles": self._cycles(),
            "evidence": self.evidence,
            "kernels": self.kernels,
            "events": self.events,
            "trials": [self.trial],
        }
        for table, rows in tables.items():
            if len(rows):
                write_part(folder, table, rows, trial_id=trial_id, attempt=attempt)
            else:
                remove_part(folder, table, trial_id=trial_id, attempt=attempt)

    def _cycles(self) -> pa.Table | list[Row]:
        keyed = [
            _with_constants(cycles, self.keys | {name: block.get(name) for name in ("block_index", "concurrency")})
            for block, cycles in zip(self.blocks, self.cycles, strict=True)
            if cycles.num_rows
        ]
        return pa.concat_tables(keyed) if keyed else []


class Journal:
    """The append-only file of one attempt. One JSON object per line, each synced before `append` returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        self._path = path

    def append(self, record: str, *, cycles: pa.Table | None = None, **content: object) -> None:
        """Append one record (`trial`, `evidence`, `block`, `anchors`, `kernels`, `events`) with its rows."""
        line: dict[str, object] = {"record": record, **content}
        if cycles is not None:
            line["cycles"] = _encode(cycles)
        encoded = json.dumps(line, default=_plain).encode()
        with naming(self._path), self._path.open("ab") as file:
            file.write(encoded + f"\t{zlib.crc32(encoded):08x}\n".encode())
            file.flush()
            os.fsync(file.fileno())

    def discard(self) -> None:
        """Remove: its content is in Parquet now."""
        self._path.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalContent:
    """What a journal tells."""

    rows: TrialRows | None
    """As far as the lines go that are whole; None if nothing was begun."""
    damaged_lines: tuple[int, ...]
    """Counted from 1. A torn last line is no damage: its process was killed as it wrote."""


def read_journal(path: Path) -> JournalContent:
    """Read the journal of an attempt. A damaged line costs what it held."""
    rows: TrialRows | None = None
    damaged = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            rows = _replay(rows, _parse(line))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, pa.ArrowException, OSError):
            if number < len(lines):
                damaged.append(number)
    return JournalContent(rows=rows, damaged_lines=tuple(damaged))


def _parse(line: bytes) -> Mapping[str, Any]:
    """Raises ValueError for a line that is not what was written."""
    content, tab, checksum = line.partition(b"\t")
    if tab and checksum != f"{zlib.crc32(content):08x}".encode():
        raise ValueError("the checksum does not fit")
    record: Mapping[str, Any] = json.loads(content)
    return record


def set_aside(path: Path) -> Path:
    """Rename a damaged journal, so that it is kept and not read again. Returns the new name."""
    aside = path.with_name(f"{path.name}.damaged")
    path.replace(aside)
    return aside


def left_journals(folder: ResultsFolder) -> Sequence[Path]:
    """Journals of attempts whose parts were never written."""
    return sorted((folder.root / "journal").glob("*.jsonl"))


def _replay(rows: TrialRows | None, record: Mapping[str, Any]) -> TrialRows | None:
    """Take one record. Everything that may be damaged is looked at before anything is taken."""
    is_block = record["record"] == "block"
    block, requests = (record["block"], [*record["requests"]]) if is_block else (None, [])
    cycles = _decode(record["cycles"]) if is_block else None
    others = {table: [*record.get(table, ())] for table in ("anchors", "evidence", "kernels", "events")}
    if "trial" in record:
        trial = {**record["trial"], "started_at": datetime.fromisoformat(record["trial"]["started_at"])}
        rows = rows or TrialRows(trial=trial)
        rows.trial = trial
    if rows is None:
        return None
    if block is not None:
        rows.blocks.append(block)
        rows.requests.extend(requests)
        rows.cycles.append(cycles)
    for table, more in others.items():
        getattr(rows, table).extend(more)
    return rows


def _encode(cycles: pa.Table) -> str:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, cycles.schema) as writer:
        writer.write_table(cycles)
    return base64.b64encode(sink.getvalue()).decode()


def _decode(text: str) -> pa.Table:
    return pa.ipc.open_stream(base64.b64decode(text)).read_all()


def _with_constants(cycles: pa.Table, constants: Mapping[str, object]) -> pa.Table:
    columns = {
        name: pa.nulls(cycles.num_rows) if value is None else pa.repeat(pa.scalar(value), cycles.num_rows)
        for name, value in constants.items()
    }
    return pa.table({**columns, **{name: cycles[name] for name in CYCLE_COLUMNS.names}})


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"a journal holds JSON values and times, got {type(value).__name__}")
