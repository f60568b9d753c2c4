"""Times of nccl-tests as `allreduce.parquet`, which the search's cycle model can start from, marked as imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from analysis.importing.records import Reading

TOKEN_BYTES = 7168 * 2
"""One token of Kimi-K2, DeepSeek-V3 and their like in bf16: sizes of nccl-tests become tokens by it."""
_SCHEMA = pa.schema(
    [
        pa.field("set", pa.string(), nullable=False),
        pa.field("copy", pa.int32()),
        pa.field("env", pa.map_(pa.string(), pa.string()), nullable=False),
        pa.field("backend", pa.string(), nullable=False),
        pa.field("world_size", pa.int32(), nullable=False),
        pa.field("outcome", pa.string(), nullable=False),
        pa.field("reason", pa.string()),
        pa.field("bytes", pa.int64()),
        pa.field("tokens", pa.int32()),
        pa.field("mode", pa.string()),
        pa.field("us_median", pa.float64()),
    ],
    metadata={"specsweep.table": "allreduce", "specsweep.schema_version": "2", "specsweep.imported": "nccl-tests"},
)
"""Columns of the table of `specsweep allreduce` that nccl-tests has figures for."""


def write_all_reduces(out: Path, readings: Sequence[Reading]) -> None:
    """Write the table; nothing without readings.

    A single file is the set `default`; of several, each is a set by the name of its file without its end.
    """
    rows = [row for reading in readings for row in _rows(reading, alone=len(readings) == 1)]
    if rows:
        pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), out / "allreduce.parquet", compression="zstd")


def _rows(reading: Reading, *, alone: bool) -> list[dict[str, Any]]:
    return [
        {
            "set": "default" if alone else Path(reading.source).stem,
            "copy": 0,
            "env": [],
            "backend": "nccl",
            "world_size": reading.num_ranks or 1,
            "outcome": "wrong_output" if each.is_right is False else "ok",
            "reason": "imported from nccl-tests",
            "bytes": each.num_bytes,
            "tokens": max(1, min(round(each.num_bytes / TOKEN_BYTES), 2**31 - 1)),
            "mode": "eager",
            "us_median": each.us,
        }
        for each in reading.all_reduces
    ]
