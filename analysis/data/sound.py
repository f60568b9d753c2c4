"""The tables of a results folder without what is damaged in them, and a list of what that was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import polars as pl

from sweeps.results.tables import TABLES, Damage, ResultsFolder, TableError, find_damage, read_parts

_KEYS = ["trial_id", "attempt"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SoundTables:
    """Rows that can be believed, by table, and what was left out."""

    frames: Mapping[str, pl.DataFrame]
    damaged: tuple[Damage, ...]


def read_sound(folder: ResultsFolder, tables: tuple[str, ...], *, sweep_id: str) -> SoundTables:
    """Read some tables; files of the others are checked, not read.

    Rows of trials that `trials` does not have are named; they are still in the frames. Raises TableError for a part of
    a newer version, or if no trial can be read.
    """
    parts = {table: read_parts(folder, table, sweep_id=sweep_id) for table in tables}
    frames = {table: _frame(table, part.rows) for table, part in parts.items()}
    damaged = [damage for part in parts.values() for damage in part.damaged]
    damaged += (damage for table in TABLES if table not in tables for damage in find_damage(folder, table))
    if frames["trials"].is_empty():
        wanted = folder.root / "tables" / "trials"
        why = "no trial has ended yet; wanted at least one part in" if not damaged else "no trial can be read in"
        raise TableError(f"{folder.root}: {why} {wanted}" + (f": {damaged[0]}" if damaged else ""))
    return SoundTables(frames=frames, damaged=(*damaged, *_orphans(folder, frames), *_without_blocks(folder, frames)))


def _frame(table: str, rows: object) -> pl.DataFrame:
    frame = pl.from_arrow(rows, rechunk=True)
    assert isinstance(frame, pl.DataFrame), table
    return frame


def _orphans(folder: ResultsFolder, frames: Mapping[str, pl.DataFrame]) -> Iterator[Damage]:
    """Attempts that have rows in some table and none in `trials`."""
    known = frames["trials"].select(_KEYS)
    tables: dict[tuple[str, int], list[str]] = {}
    for table, frame in frames.items():
        lost = frame.select(_KEYS).unique().join(known, on=_KEYS, how="anti").sort(_KEYS)
        for key in lost.iter_rows():
            tables.setdefault(key, []).append(table)
    for (trial_id, attempt), found in tables.items():
        yield Damage(
            file=_file(folder, found[0], trial_id, attempt),
            reason=f"has rows of {trial_id} ({', '.join(found)}), but table trials has no such trial",
            trial_id=trial_id,
            attempt=attempt,
        )


def _without_blocks(folder: ResultsFolder, frames: Mapping[str, pl.DataFrame]) -> Iterator[Damage]:
    """Attempts that measured more blocks than the table holds."""
    first = pl.col("concurrency").fill_null(1)
    at_one = frames["blocks"].group_by(*_KEYS, first).len().group_by(_KEYS).agg(there=pl.col("len").max())
    measured = frames["trials"].filter(pl.col("status").is_in(["completed", "pruned"]))
    counted = measured.join(at_one, on=_KEYS, how="left").with_columns(pl.col("there").fill_null(0))
    for row in counted.filter(pl.col("there") < pl.col("num_blocks")).iter_rows(named=True):
        yield Damage(
            file=_file(folder, "blocks", row["trial_id"], row["attempt"]),
            reason=f"has {row['there']} of the {row['num_blocks']} blocks that table trials counts",
            trial_id=row["trial_id"],
            attempt=row["attempt"],
        )


def _file(folder: ResultsFolder, table: str, trial_id: str, attempt: int) -> str:
    path = folder.packed(table) if folder.is_packed else folder.part(table, trial_id, attempt)
    return path.relative_to(folder.root).as_posix()
