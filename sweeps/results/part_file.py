"""One Parquet file of a table: written atomically with a checksum over its bytes, read back only if it is what it was.

Parquet has no checksum of its footer, and a flipped bit in a page can turn one number into another. Every file that is
written here therefore ends with `specsweep-crc32:HEX` among its metadata: the CRC-32 of all its bytes, taken while the
eight digits were zeros. Files without it (older ones, packed recordings) are checked for their form alone.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sweeps import SpecsweepError
from sweeps.results.writing import replace_bytes

TABLE_KEY, VERSION_KEY = "specsweep.table", "specsweep.schema_version"
_NO_SUM = b"specsweep-crc32:00000000"
_SUM = re.compile(rb"specsweep-crc32:([0-9a-f]{8})")
_UNREADABLE = (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError)
"""What Arrow raises over bytes that are no Parquet, or no longer."""


class TableError(SpecsweepError, ValueError):
    """A results folder or part file that is not what it should be."""


class DamagedPartError(TableError):
    """A part that cannot be believed. It says which file, which column if one is to blame, and what is wrong."""

    def __init__(self, path: Path, reason: str, *, column: str | None = None) -> None:
        where = "" if column is None else f"column {column}: "
        super().__init__(f"{path}: {where}{reason}")
        self.path = path
        self.reason = reason
        self.column = column


@dataclass(frozen=True, slots=True)
class PartRows:
    """What a part holds, in the columns and types of its schema."""

    rows: pa.Table
    extra: tuple[str, ...]
    """Columns that no schema knows: they are not read."""


def write_part_file(path: Path, rows: pa.Table) -> None:
    """Write under a temporary name, sync and rename; an older file of the name is replaced. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, rows.schema, compression="zstd") as writer:
        writer.write_table(rows)
        writer.add_key_value_metadata({"specsweep.checksum": _NO_SUM.decode()})
    replace_bytes(path, _with_sum(sink.getvalue().to_pybytes()))


def read_part_file(path: Path, table: str, schema: pa.Schema, *, version: int, columns: Sequence[str]) -> PartRows:
    """Read some columns of a part.

    Args:
        schema: of the table; a nullable column that the file lacks is null.
        version: the newest schema version that is understood.

    Raises DamagedPartError, or TableError for a file of a newer version.
    """
    content = _checked(path)
    try:
        file = pq.ParquetFile(pa.py_buffer(content))
        have = file.schema_arrow
        _check_kind(path, table, have, version)
        twice = {name for name in have.names if have.names.count(name) > 1}
        if twice:
            raise DamagedPartError(path, "is there twice", column=sorted(twice)[0])
        data = file.read([name for name in columns if name in have.names], use_threads=False)
        data.validate()
    except TableError:
        raise
    except _UNREADABLE as error:
        raise DamagedPartError(path, f"is no whole Parquet file ({_first_line(error)})") from error
    rows = pa.table({name: _column(path, data, schema.field(name)) for name in columns}).cast(_only(schema, columns))
    return PartRows(rows=rows, extra=tuple(name for name in have.names if name not in schema.names))


def is_whole(path: Path) -> bool:
    """Whether a file has a checksum and it fits. False also for files that are older than checksums."""
    try:
        content = _checked(path)
    except DamagedPartError:
        return False
    return _SUM.search(content) is not None


def _checked(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DamagedPartError(path, f"cannot be read ({error.strerror})") from error
    if not content:
        raise DamagedPartError(path, "is empty")
    found = [*_SUM.finditer(content)]
    if found and _sum_without(content, found[-1]) != found[-1][1]:
        raise DamagedPartError(path, "was changed after it was written (its checksum does not fit)")
    return content


def _with_sum(content: bytes) -> bytes:
    """Replace the zeros of the checksum; they stand in the footer, behind all data."""
    before, mark, after = content.rpartition(_NO_SUM)
    assert mark, "the writer left the checksum's place out"
    digits = f"{zlib.crc32(content):08x}".encode()
    return before + mark[:-8] + digits + after


def _sum_without(content: bytes, found: re.Match[bytes]) -> bytes:
    start, end = found.span(1)
    value = zlib.crc32(content[end:], zlib.crc32(b"0" * 8, zlib.crc32(memoryview(content)[:start])))
    return f"{value:08x}".encode()


def _check_kind(path: Path, table: str, have: pa.Schema, newest: int) -> None:
    metadata = have.metadata or {}
    try:
        version = int(metadata.get(VERSION_KEY.encode(), b"0"))
    except ValueError:
        version = 0
    if version > newest:
        raise TableError(f"{path}: schema version {version}, but this Specsweep reads 1 to {newest}: upgrade it")
    if version < 1:
        raise DamagedPartError(path, "is not a table of Specsweep (it has no schema version)")
    named = metadata.get(TABLE_KEY.encode(), table.encode()).decode(errors="replace")
    if named != table:
        raise DamagedPartError(path, f"is a part of table {named}, wanted {table}")


def _column(path: Path, data: pa.Table, wanted: pa.Field) -> pa.ChunkedArray:
    if wanted.name not in data.column_names:
        if not wanted.nullable:
            raise DamagedPartError(path, f"has no column {wanted.name}, and nothing can stand in for it")
        return pa.chunked_array([pa.nulls(data.num_rows, wanted.type)])
    column = data[wanted.name]
    if column.type != wanted.type:
        if not _fits(column.type, wanted.type):
            raise DamagedPartError(path, f"is {column.type}, wanted {wanted.type}", column=wanted.name)
        try:
            column = pc.cast(column, wanted.type)
        except pa.ArrowException as error:
            raise DamagedPartError(path, _first_line(error), column=wanted.name) from error
    if column.null_count and not wanted.nullable:
        raise DamagedPartError(path, f"has {column.null_count} nulls", column=wanted.name)
    return column


def _fits(have: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether one type holds the same things as another in another width: text is no number, a number no text."""
    if pa.types.is_dictionary(have):
        return _fits(have.value_type, wanted)
    if pa.types.is_integer(wanted):
        return bool(pa.types.is_integer(have))
    if pa.types.is_floating(wanted):
        return bool(pa.types.is_floating(have) or pa.types.is_integer(have))
    if pa.types.is_map(wanted):
        return pa.types.is_map(have) and all(
            _fits(one, other) for one, other in ((have.key_type, wanted.key_type), (have.item_type, wanted.item_type))
        )
    if pa.types.is_list(wanted):
        return (pa.types.is_list(have) or pa.types.is_large_list(have)) and _fits(have.value_type, wanted.value_type)
    if pa.types.is_string(wanted):
        return bool(pa.types.is_string(have) or pa.types.is_large_string(have) or pa.types.is_string_view(have))
    if pa.types.is_timestamp(wanted):
        return bool(pa.types.is_timestamp(have) and have.tz == wanted.tz)
    return bool(have == wanted)


def _only(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    return pa.schema([schema.field(name) for name in columns], metadata=schema.metadata)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
