"""The Parquet tables of a results folder: one explicit schema each, versioned; atomic writes; reading with upgrade.

This module is the whole contract between measuring (`sweeps`) and analysing (`analysis`). Rows are written in part
files, one per trial and attempt, so that a repeated attempt replaces its own part and nothing else. A packed recording
has one part per table instead, and is only read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.compute as pc

from sweeps.results.part_file import (
    TABLE_KEY,
    VERSION_KEY,
    DamagedPartError,
    PartRows,
    TableError,
    is_whole,
    read_part_file,
    write_part_file,
)

__all__ = [
    "ACTIVITIES",
    "CYCLE_COLUMNS",
    "DRAFTING_COLUMNS",
    "SCHEMA_VERSION",
    "TABLES",
    "Activity",
    "Damage",
    "Parts",
    "ResultsFolder",
    "TableError",
    "find_damage",
    "read_part",
    "read_parts",
    "read_table",
    "remove_part",
    "write_part",
]

SCHEMA_VERSION = 1

_KEYS = [
    pa.field("sweep_id", pa.string(), nullable=False),
    pa.field("trial_id", pa.string(), nullable=False),
    pa.field("attempt", pa.int32(), nullable=False),
]
_SETTINGS = pa.map_(pa.string(), pa.string())
Activity = Literal["launch", "weight_load", "capture", "switch", "warmup", "measure", "trace", "stop", "idle", "failed"]
ACTIVITIES: tuple[Activity, ...] = get_args(Activity)
"""Activities of held GPUs; each is a column `{activity}_s` of `trials`, wall seconds (x num_gpus = GPU seconds)."""

DRAFTING_COLUMNS = ("num_steps", "eagle_topk", "num_draft_tokens", "drafter")
"""Columns of `trials` that describe drafting. Accept length depends on nothing else. Without speculation `num_steps`
is 0 and the rest null."""

CYCLE_COLUMNS = pa.schema(
    [
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("cycle_index", pa.int64(), nullable=False),
        pa.field("started_ms", pa.float64(), nullable=False),  # engine's clock
        pa.field("draft_ms", pa.float64()),
        pa.field("verify_ms", pa.float64()),  # null without speculation
        pa.field("verify_forward_ms", pa.float64()),  # the target forward inside verify (or the plain decode step)
        pa.field("extend_ms", pa.float64()),
        pa.field("gap_ms", pa.float64()),  # cycle minus the phases
        pa.field("cycle_ms", pa.float64(), nullable=False),  # start of this cycle to start of the next
        pa.field("batch_size", pa.int32(), nullable=False),
        pa.field("num_steps", pa.int32(), nullable=False),  # the state that the cycle ran in
        pa.field("tokens", pa.int32()),  # produced, bonus token included, over the batch
        pa.field("timer_kind", pa.string(), nullable=False),  # cuda_event | host | simulated
    ]
)

_CONCURRENCY = pa.field("concurrency", pa.int32())  # requests in flight; null in rows older than the column
_BLOCK = [
    pa.field("block_index", pa.int32(), nullable=False),
    pa.field("started_s", pa.float64(), nullable=False),
    pa.field("wall_s", pa.float64(), nullable=False),
    pa.field("decode_s", pa.float64(), nullable=False),
    pa.field("decode_tokens", pa.int64(), nullable=False),
    pa.field("tok_s", pa.float64()),  # decode_tokens / decode_s; null without decode time
    pa.field("num_requests", pa.int32(), nullable=False),
    pa.field("num_cycles", pa.int64()),
    pa.field("accept_length", pa.float64()),  # sum of tokens / sum of verify cycles x batch
    pa.field("draft_ms", pa.float64()),  # means over the block's cycles, rank 0
    pa.field("verify_ms", pa.float64()),
    pa.field("verify_forward_ms", pa.float64()),
    pa.field("extend_ms", pa.float64()),
    pa.field("gap_ms", pa.float64()),
    pa.field("cycle_ms", pa.float64()),
    pa.field("accept_histogram", pa.list_(pa.int64())),  # [i]: cycles that produced i tokens (batch 1)
    pa.field("timer_kind", pa.string()),
    pa.field("output_hash", pa.string(), nullable=False),
    pa.field("sm_clock_mhz", pa.float64()),
    pa.field("power_w", pa.float64()),
    pa.field("temperature_c", pa.float64()),
    pa.field("throttle_reasons", pa.string()),
    pa.field("memory_used_bytes", pa.float64()),
    pa.field("probe_tokens", pa.int64()),  # of all cycles, rank 0
    pa.field("asked_tokens", pa.int64()),  # per request; null if a request may end earlier (ignore_eos: false)
    pa.field("foreign_pids", pa.string()),  # held memory of the trial's GPUs during the block, and are not the server's
    pa.field("suspect", pa.string()),  # `RULE: numbers` of broken rules (`plausible`); null for a sound block
    _CONCURRENCY,
]

TABLES: Mapping[str, pa.Schema] = {
    "trials": pa.schema(
        [
            *_KEYS,
            pa.field("role", pa.string(), nullable=False),  # candidate | control | incumbent
            pa.field("engine", pa.string(), nullable=False),
            pa.field("engine_version", pa.string()),
            pa.field("machine", pa.string()),
            pa.field("node", pa.string()),
            pa.field("num_gpus", pa.int32(), nullable=False),
            pa.field("acceptance", pa.string(), nullable=False),  # measured | pinned
            pa.field("status", pa.string(), nullable=False),  # completed | pruned | failed | invalid
            pa.field("stage", pa.string()),  # of a failure
            pa.field("kind", pa.string()),  # of a failure
            pa.field("reason", pa.string()),  # why pruned, failed or invalid
            pa.field("log_tail", pa.string()),
            pa.field("configuration_id", pa.string()),  # null if the suggestion is none
            pa.field("launch_key", pa.string()),
            pa.field("label", pa.string(), nullable=False),
            pa.field("relaunched", pa.bool_()),  # false: switched in place
            pa.field("requested", _SETTINGS, nullable=False),  # dimension -> value as suggested
            pa.field("effective", _SETTINGS),  # the engine's own account
            pa.field("num_steps", pa.int32()),  # effective; 0 without speculation
            pa.field("eagle_topk", pa.int32()),
            pa.field("num_draft_tokens", pa.int32()),
            pa.field("drafter", pa.string()),
            pa.field("nccl_set", pa.string()),
            pa.field("nccl_env", _SETTINGS),
            pa.field("args", _SETTINGS),  # values of the args.* dimensions
            pa.field("env", _SETTINGS),  # values of the env.* dimensions
            pa.field("all_reduce", pa.string()),
            pa.field("command", pa.list_(pa.string())),
            pa.field("environment", _SETTINGS),
            pa.field("removed_env", pa.list_(pa.string())),
            pa.field("started_at", pa.timestamp("us", tz="UTC"), nullable=False),  # a label
            pa.field("started_s", pa.float64(), nullable=False),  # engine's clock, goes on from driver to driver
            pa.field("start_index", pa.int64()),  # place in the order of starts; null in older rows and if never run
            pa.field("ended_s", pa.float64(), nullable=False),
            pa.field("num_blocks", pa.int32(), nullable=False),
            *(pa.field(f"{activity}_s", pa.float64(), nullable=False) for activity in ACTIVITIES),
        ]
    ),
    "blocks": pa.schema([*_KEYS, *_BLOCK]),
    "anchors": pa.schema(  # blocks at step count 0 inside a chain's server: never part of its configuration
        [*_KEYS, pa.field("place", pa.string(), nullable=False), *_BLOCK]  # before | after the trial's own blocks
    ),
    "requests": pa.schema(
        [
            *_KEYS,
            pa.field("block_index", pa.int32(), nullable=False),
            pa.field("prompt_id", pa.string(), nullable=False),
            pa.field("prompt_tokens", pa.int32(), nullable=False),
            pa.field("output_tokens", pa.int32(), nullable=False),
            pa.field("ttft_ms", pa.float64()),
            pa.field("latency_ms", pa.float64(), nullable=False),
            pa.field("output_hash", pa.string(), nullable=False),
            pa.field("head_hash", pa.string()),  # of the first tokens: rounding flips few, corruption most
            pa.field("cached_tokens", pa.int32()),  # of the prompt, from the server's prefix cache
            pa.field("distinct_bigrams", pa.int32()),  # different pairs of neighbouring tokens in each 128
            _CONCURRENCY,
        ]
    ),
    "cycles": pa.schema([*_KEYS, pa.field("block_index", pa.int32(), nullable=False), *CYCLE_COLUMNS, _CONCURRENCY]),
    "evidence": pa.schema(
        [
            *_KEYS,
            pa.field("rank", pa.int32(), nullable=False),
            pa.field("setting", pa.string(), nullable=False),
            pa.field("requested", pa.string()),
            pa.field("seen", pa.string()),
            pa.field("read_by_nccl", pa.string()),
            pa.field("effective", pa.string()),
            pa.field("grade", pa.string(), nullable=False),
            pa.field("detail", pa.string()),
        ]
    ),
    "kernels": pa.schema(
        [
            *_KEYS,
            pa.field("phase", pa.string(), nullable=False),
            pa.field("kind", pa.string(), nullable=False),
            pa.field("kernel", pa.string(), nullable=False),
            pa.field("us_per_cycle", pa.float64(), nullable=False),
            pa.field("calls_per_cycle", pa.float64(), nullable=False),
        ]
    ),
    "events": pa.schema(
        [
            *_KEYS,
            pa.field("at_s", pa.float64(), nullable=False),
            pa.field("event", pa.string(), nullable=False),
            pa.field("detail", pa.string()),
            pa.field("numbers", pa.map_(pa.string(), pa.float64())),
        ]
    ),
}


_TRIAL_ID = re.compile(r"[a-z][0-9]+(?:-[a-z0-9]+)*")
_NAME = re.compile(r"([kti]\d{4,})(?:-[a-z0-9]+)*-a(\d+)(?:\.|$)")
"""Trial id and attempt in the name of a part, a journal or a log."""
_UNIQUE: Mapping[str, tuple[str, ...]] = {
    "trials": (),
    "blocks": ("block_index", "concurrency"),
    "anchors": ("place", "block_index", "started_s"),
}
"""Columns that tell the rows of one attempt apart, in tables where a doubled row would count twice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """A file of a results folder that cannot be believed, as a whole or in one column."""

    file: str
    """Relative to the results folder."""
    reason: str
    column: str | None = None
    trial_id: str | None = None
    attempt: int | None = None
    costs_rows: bool = True
    """False: its rows are used all the same."""

    def __str__(self) -> str:
        return f"{self.file}: {'' if self.column is None else f'column {self.column}: '}{self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The rows of a table that can be believed, and what was left out of it."""

    rows: pa.Table
    damaged: tuple[Damage, ...]


@dataclass(frozen=True, slots=True)
class ResultsFolder:
    """Owns every file name of a results folder."""

    root: Path

    @property
    def spec(self) -> Path:
        return self.root / "spec.yaml"

    @property
    def manifest(self) -> Path:
        """`sweep_id`, `spec_fingerprint`, `schema_version`, `engine`, `created_at`, `versions`, `target_tok_s`,
        `num_configurations` (of the valid space)."""
        return self.root / "sweep.json"

    @property
    def study(self) -> Path:
        return self.root / "study.journal"

    def names_in_use(self) -> frozenset[str]:
        """Trial ids that some file of the folder bears, readable or not: none of them is given to a new trial."""
        places = [*(self.root / "tables").glob("*/*"), *(self.root / "journal").glob("*"), *self._logs.glob("*")]
        return frozenset(found[1] for path in places if (found := _NAME.match(path.name)) is not None)

    @property
    def _logs(self) -> Path:
        return self.root / "logs"

    @property
    def stop_request(self) -> Path:
        """Exists while the driver is asked to end: whoever waits for a server then gives up at once."""
        return self.root / "stop-requested"

    @property
    def tune(self) -> Path:
        return self.root / "tune"

    def part(self, table: str, trial_id: str, attempt: int) -> Path:
        return self.root / "tables" / table / f"{_file_name(trial_id, attempt)}.parquet"

    def packed(self, table: str) -> Path:
        """The only part of a table in a packed recording (`benchmarks.pack_recording`)."""
        return self.root / "tables" / table / "sweep.parquet"

    @property
    def is_packed(self) -> bool:
        """A packed recording is read, never written: parts of single trials are not found in it."""
        packed = self.packed("trials")
        return packed.is_file() and not _has_named_parts(packed.parent.glob("*.parquet"))

    def journal(self, trial_id: str, attempt: int) -> Path:
        """What Parquet does not yet hold while a trial runs."""
        return self.root / "journal" / f"{_file_name(trial_id, attempt)}.jsonl"

    def logs(self, trial_id: str, attempt: int) -> Path:
        return self._logs / _file_name(trial_id, attempt)

    def read_manifest(self) -> dict[str, Any]:
        if not self.manifest.is_file():
            raise TableError(f"{self.root}: wanted a results folder, but it has no {self.manifest.name}")
        manifest: dict[str, Any] = json.loads(self.manifest.read_text(encoding="utf-8"))
        return manifest


def _file_name(trial_id: str, attempt: int) -> str:
    """Raises TableError for what is no trial id: a journal that somebody else wrote could name a path."""
    if not isinstance(attempt, int) or not isinstance(trial_id, str) or _TRIAL_ID.fullmatch(trial_id) is None:
        raise TableError(f"wanted a trial id such as t0001 and the number of an attempt, got {trial_id!r}, {attempt!r}")
    return f"{trial_id}-a{attempt:d}"


def write_part(
    folder: ResultsFolder, table: str, rows: pa.Table | Iterable[Mapping[str, Any]], *, trial_id: str, attempt: int
) -> Path:
    """Write one part atomically (temporary name, synced, renamed); an older part of the attempt is replaced.

    Raises TableError if a row does not fit the schema, OSError if the file cannot be written.
    """
    schema = TABLES[table].with_metadata({TABLE_KEY: table, VERSION_KEY: str(SCHEMA_VERSION)})
    data = _fit(table, schema, rows)
    path = folder.part(table, trial_id, attempt)
    write_part_file(path, data)
    return path


def _fit(table: str, schema: pa.Schema, rows: pa.Table | Iterable[Mapping[str, Any]]) -> pa.Table:
    refusal = f"{table}: a row does not fit schema version {SCHEMA_VERSION}"
    try:
        if isinstance(rows, pa.Table):
            data = rows.select(schema.names).cast(schema)
        else:
            listed = list(rows)
            unknown = sorted({name for row in listed for name in row} - set(schema.names))
            if unknown:
                raise TableError(f"{refusal}: there is no column {', '.join(unknown)}")
            data = pa.Table.from_pylist(listed, schema=schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError, KeyError) as error:
        raise TableError(f"{refusal}: {error}") from error
    missing = [field.name for field in schema if not field.nullable and data[field.name].null_count]
    if missing:
        raise TableError(f"{refusal}: {', '.join(missing)} cannot be null")
    return data


def remove_part(folder: ResultsFolder, table: str, *, trial_id: str, attempt: int) -> None:
    """Remove a part that a repeated attempt has no rows for. A missing part is no error."""
    folder.part(table, trial_id, attempt).unlink(missing_ok=True)


def read_part(folder: ResultsFolder, table: str, *, trial_id: str, attempt: int) -> pa.Table:
    """One part (an empty table if there is none). Raises TableError for newer, foreign or damaged files."""
    path = folder.part(table, trial_id, attempt)
    return _read(path, table, TABLES[table].names).rows if path.is_file() else TABLES[table].empty_table()


def read_table(folder: ResultsFolder, table: str) -> pa.Table:
    """All parts of a table (an empty table if there are none). Raises TableError if any part is not whole."""
    parts = read_parts(folder, table)
    if lost := [damage for damage in parts.damaged if damage.costs_rows]:
        raise TableError(f"{folder.root / lost[0].file}: {str(lost[0]).removeprefix(f'{lost[0].file}: ')}")
    return parts.rows


def read_parts(
    folder: ResultsFolder, table: str, *, columns: Sequence[str] | None = None, sweep_id: str | None = None
) -> Parts:
    """The sound parts of a table; a damaged one costs its own rows and is named.

    Args:
        columns: those wanted besides the keys; None: all.
        sweep_id: rows of any other sweep are left out and named.

    Raises TableError for a part of a newer version.
    """
    return _read_parts(folder, table, _part_paths(folder, table), columns=columns, sweep_id=sweep_id)


def _read_parts(
    folder: ResultsFolder, table: str, paths: Sequence[Path], *, columns: Sequence[str] | None, sweep_id: str | None
) -> Parts:
    names = TABLES[table].names if columns is None else [*(key.name for key in _KEYS), *columns]
    sound: list[pa.Table] = []
    damaged: list[Damage] = []
    is_packed = not _has_named_parts(_part_paths(folder, table))
    for path in paths:
        named = _NAME.fullmatch(path.stem)
        about: dict[str, Any] = {"file": path.relative_to(folder.root).as_posix()}
        about |= {"trial_id": named[1], "attempt": int(named[2])} if named else {}
        try:
            part = _read(path, table, names)
            _check_keys(path, part.rows, about, packed=is_packed and path == folder.packed(table), sweep_id=sweep_id)
            rows = _unique(path, table, part.rows)
        except DamagedPartError as error:
            damaged.append(Damage(**about, reason=error.reason, column=error.column))
            continue
        damaged.extend(
            Damage(**about, reason="is not a column of this table", column=name, costs_rows=False)
            for name in part.extra
        )
        if rows.num_rows < part.rows.num_rows:
            reason = f"{part.rows.num_rows - rows.num_rows} rows are there twice: the first of each counts"
            damaged.append(Damage(**about, reason=reason, costs_rows=False))
        sound.append(rows)
    schema = pa.schema([TABLES[table].field(name) for name in names])
    return Parts(rows=pa.concat_tables(sound) if sound else schema.empty_table(), damaged=tuple(damaged))


def find_damage(folder: ResultsFolder, table: str) -> tuple[Damage, ...]:
    """Damaged parts of a table, without reading what whole ones hold."""
    suspects = [path for path in _part_paths(folder, table) if not is_whole(path)]
    return _read_parts(folder, table, suspects, columns=[], sweep_id=None).damaged


def _has_named_parts(paths: Iterable[Path]) -> bool:
    """Whether parts of single attempts are among the files: a packed part has none beside it."""
    return any(_NAME.fullmatch(path.stem) for path in paths)


def _part_paths(folder: ResultsFolder, table: str) -> list[Path]:
    return sorted((folder.root / "tables" / table).glob("*.parquet"))


def _read(path: Path, table: str, columns: Sequence[str]) -> PartRows:
    return read_part_file(path, table, TABLES[table], version=SCHEMA_VERSION, columns=columns)


def _check_keys(path: Path, rows: pa.Table, about: Mapping[str, Any], *, packed: bool, sweep_id: str | None) -> None:
    """Raise DamagedPartError for a part whose rows are not those that its name says."""
    if not packed and "trial_id" not in about:
        raise DamagedPartError(path, "is not the name of a part: a copy, maybe")
    if not rows.num_rows:
        raise DamagedPartError(path, "holds no rows")
    for column in () if packed else ("trial_id", "attempt"):
        found = pc.unique(rows[column]).to_pylist()
        if found != [about[column]]:
            listed = ", ".join(map(str, found[:3]))
            raise DamagedPartError(path, f"holds {listed}, but the file's name says {about[column]}", column=column)
    if sweep_id is not None and (others := set(pc.unique(rows["sweep_id"]).to_pylist()) - {sweep_id}):
        raise DamagedPartError(path, f"belongs to another sweep ({sorted(others)[0]})", column="sweep_id")


def _unique(path: Path, table: str, rows: pa.Table) -> pa.Table:
    """The rows without repetitions of an earlier one. Raises DamagedPartError if two rows of a key contradict."""
    if table not in _UNIQUE or rows.num_rows < 2:
        return rows
    names = ["trial_id", "attempt", *(name for name in _UNIQUE[table] if name in rows.column_names)]
    if len(names) < 2 + len(_UNIQUE[table]) or rows.num_rows == rows.group_by(names).aggregate([]).num_rows:
        return rows
    seen: dict[tuple[object, ...], dict[str, Any]] = {}
    kept = []
    for place, row in enumerate(rows.to_pylist()):
        key = tuple(row[name] for name in names)
        if key not in seen:
            seen[key] = row
            kept.append(place)
        elif repr(seen[key]) != repr(row):  # NaN equals itself in writing only
            raise DamagedPartError(path, f"holds two rows for {', '.join(map(str, key))} that contradict each other")
    return rows.take(kept)
