"""Parts of the tables of a results folder: atomic writes; reading with upgrade, damaged parts named.

Rows are written in part
files, one per trial and attempt, so that a repeated attempt replaces its own part and nothing else. A packed recording
has one part per table instead, and is only read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sweeps.results.folder import PART_NAME, ResultsFolder, has_named_parts
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
from sweeps.results.schemas import (
    ACTIVITIES,
    CYCLE_COLUMNS,
    DRAFTING_COLUMNS,
    KEYS,
    SCHEMA_VERSION,
    TABLES,
    Activity,
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
    names = TABLES[table].names if columns is None else [*KEYS, *columns]
    sound: list[pa.Table] = []
    damaged: list[Damage] = []
    is_packed = not has_named_parts(_part_paths(folder, table))
    for path in paths:
        named = PART_NAME.fullmatch(path.stem)
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
