"""Rows of `allreduce.parquet`: one per communicator, size and mode."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ray_jobs.allreduce.evidence import SetEvidence
from ray_jobs.allreduce.groups import CellTimes, MemberResult
from ray_jobs.allreduce.ranks import RankPlan
from sweeps.nccl.grammar import SGLANG_DEFAULTS

SCHEMA_VERSION = 2
SERVER_DEFAULTS: Mapping[str, str] = {**SGLANG_DEFAULTS, "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
"""What the server sets by itself before its ranks start (`entrypoints/engine.py` of SGLang 0.5.23)."""
ALLREDUCE = pa.schema(
    [
        pa.field("set", pa.string(), nullable=False),
        pa.field("copy", pa.int32()),  # number of the communicator among those of the set; null for a refused set
        pa.field("env", pa.map_(pa.string(), pa.string()), nullable=False),
        pa.field("backend", pa.string(), nullable=False),  # nccl | gloo
        pa.field("world_size", pa.int32(), nullable=False),
        pa.field(
            "outcome", pa.string(), nullable=False
        ),  # ok | wrong_output | hang | crash | nccl_no_algorithm | nccl_refused | refused
        pa.field("reason", pa.string()),
        pa.field("bytes", pa.int64()),  # this and the rest: null if the set gave no figures
        pa.field("tokens", pa.int32()),
        pa.field("mode", pa.string()),  # eager | graph
        pa.field("us_median", pa.float64()),
        pa.field("us_p10", pa.float64()),
        pa.field("us_p90", pa.float64()),
        pa.field("rounds", pa.list_(pa.int32())),  # numbers of the rounds; all sets are timed once in each
        pa.field("round_us", pa.list_(pa.float64())),  # median of each round
        pa.field("repeats", pa.int32()),  # of all rounds together
        pa.field("calls", pa.int32()),  # all-reduces per repeat; the figures are per all-reduce
        pa.field("timer_kind", pa.string()),  # cuda_event | host
        pa.field("init_s", pa.float64()),  # to make the communicator, reduce every size once, and capture
        pa.field("communicator_mib", pa.float64()),  # GPU memory of the communicator and its graphs, rank 0
        pa.field("algorithm", pa.string()),  # this and the next four: NCCL's own log of this communicator
        pa.field("protocol", pa.string()),
        pa.field("channels", pa.int32()),
        pa.field("transports", pa.list_(pa.string())),  # of rank 0
        pa.field("unread", pa.list_(pa.string())),  # variables of the set that NCCL did not read
        pa.field("gpu_name", pa.string()),
        pa.field("nccl_version", pa.string()),
        pa.field("torch_version", pa.string()),
    ],
    metadata={"specsweep.table": "allreduce", "specsweep.schema_version": str(SCHEMA_VERSION)},
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduceTable:
    """Rows of schema `ALLREDUCE`, and what they were measured with."""

    rows: tuple[Mapping[str, Any], ...]
    machine: Mapping[str, Any]
    removed: tuple[str, ...]
    """Inherited NCCL variables that the ranks did not get."""

    def write(self, folder: Path) -> None:
        """`allreduce.parquet` and the same as `allreduce.json`, each renamed into place when complete."""
        folder.mkdir(parents=True, exist_ok=True)
        table = pa.Table.from_pylist([{**row, "env": list(row["env"].items())} for row in self.rows], schema=ALLREDUCE)
        document = {"machine": self.machine, "removed_env": self.removed, "server_defaults": SERVER_DEFAULTS}
        temporary = folder / f"allreduce.{os.getpid()}.tmp"
        pq.write_table(table, temporary, compression="zstd")
        temporary.replace(folder / "allreduce.parquet")
        temporary.write_text(json.dumps({**document, "rows": self.rows}, indent=1) + "\n", encoding="utf-8")
        temporary.replace(folder / "allreduce.json")


def member_rows(
    head: Mapping[str, Any], plan: RankPlan, result: MemberResult, logged: SetEvidence | None
) -> list[dict[str, Any]]:
    """One row per size and mode, and one more if the communicator did not measure all of them."""
    own = {
        **head,
        "copy": result.member.copy,
        "outcome": result.outcome,
        "reason": result.reason,
        "init_s": result.init_s,
        "communicator_mib": result.communicator_mib,
    }
    rows = [{**own, **_figures(cell, plan)} for cell in result.cells]
    if result.outcome not in ("ok", "wrong_output"):
        rows.append(own)
    return [{**row, **logged.columns(row.get("bytes"))} if logged else row for row in rows]


def _figures(cell: CellTimes, plan: RankPlan) -> dict[str, Any]:
    samples_us = [sample for samples in cell.samples_us.values() for sample in samples]
    low, middle, high = np.quantile(samples_us, (0.1, 0.5, 0.9)).round(3).tolist()
    return {
        "outcome": "ok" if cell.is_right else "wrong_output",
        "bytes": cell.tokens * plan.token_bytes,
        "tokens": cell.tokens,
        "mode": cell.mode,
        "timer_kind": cell.timer_kind,
        "us_median": middle,
        "us_p10": low,
        "us_p90": high,
        "rounds": list(cell.round_us),
        "round_us": [round(us, 4) for us in cell.round_us.values()],
        "repeats": len(samples_us),
        "calls": plan.calls,
    }
