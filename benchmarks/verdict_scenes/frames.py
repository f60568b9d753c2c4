"""A simulated sweep as the tables that `analysis` reads, in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from analysis.data.load import Results, from_tables
from benchmarks.verdict_scenes.plan import BLOCK_S, BOOT_S, server_of
from benchmarks.verdict_scenes.sweep import Sweep
from benchmarks.verdict_scenes.truth import BLOCK_TOKENS, DEFAULT_SET, Array, Truth
from sweeps.results.tables import ACTIVITIES, TABLES

_START = datetime(2026, 1, 1, tzinfo=UTC)
_AWAY = timedelta(hours=5)


def results_of(sweeps: Sequence[Sweep]) -> list[Results]:
    """What `analysis` makes of each sweep.

    All are loaded at once, as sweeps on nodes of their own, because the loader's cost hardly depends on their number.
    """
    tables = {
        name: pa.concat_tables([_table(name, columns(f"{number}", sweep)) for number, sweep in enumerate(sweeps)])
        for name, columns in (("trials", _trials), ("blocks", _both))
    }
    manifest = {"sweep_id": "simulated", "engine": "simulated", "target_tok_s": None}
    loaded = from_tables(tables, manifest, root=Path("simulated"))
    return [_alone(loaded, f"{number}", sweep) for number, sweep in enumerate(sweeps)]


def _alone(loaded: Results, sweep_id: str, sweep: Sweep) -> Results:
    """One of the sweeps that were loaded together."""
    own = {
        name: frame.filter(frame["sweep_id"] == sweep_id)
        for name in ("all_trials", "trials", "blocks", "all_blocks")
        for frame in [getattr(loaded, name)]
    }
    names = set(own["all_trials"]["trial_id"])
    return replace(
        loaded,
        **own,
        sweep_id=sweep_id,
        num_configurations=len(sweep.truth.configurations()),
        excluded=tuple(each for each in loaded.excluded if each.trial_id in names),
    )


def trial_ids(sweep_id: str, sweep: Sweep) -> list[str]:
    """Unique over the sweeps that are loaded together."""
    return [f"{sweep_id}-{name}" for name in sweep.names]


def _table(name: str, columns: Mapping[str, Any]) -> pa.Table:
    schema = TABLES[name]
    height = len(columns["trial_id"])
    assert set(columns) <= set(schema.names)
    arrays = [
        pa.array(columns[field.name], type=field.type) if field.name in columns else pa.nulls(height, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _trials(sweep_id: str, sweep: Sweep) -> dict[str, Any]:
    members, plan, table = sweep.configurations, sweep.plan, sweep.table
    count, started_s = len(members), table.at_s[:, 0]
    whole = sweep.num_blocks == plan.num_blocks
    statuses = [
        "failed" if bad else "completed" if end else "pruned" for bad, end in zip(sweep.failed, whole, strict=True)
    ]
    after = table.nodes >= plan.num_nodes
    nothing: list[list[tuple[str, str]]] = [[]] * count
    variables = [[] if each.nccl == DEFAULT_SET else [("NCCL_PROTO", each.nccl)] for each in members]
    return {
        "sweep_id": [sweep_id] * count,
        "trial_id": trial_ids(sweep_id, sweep),
        "attempt": np.ones(count, dtype=np.int32),
        "role": [slot.role for slot in table.slots],
        "engine": ["simulated"] * count,
        "machine": ["simulated"] * count,
        "node": _nodes(sweep_id, sweep),
        "num_gpus": np.full(count, 8, dtype=np.int32),
        "acceptance": ["measured"] * count,
        "status": statuses,
        "stage": ["load" if bad else None for bad in sweep.failed],
        "kind": ["crash" if bad else None for bad in sweep.failed],
        "configuration_id": [each.configuration_id for each in members],
        "launch_key": [server_of(plan, each) for each in members],
        "label": [each.label for each in members],
        "relaunched": table.relaunched,
        "requested": nothing,
        "num_steps": np.array([each.num_steps for each in members], dtype=np.int32),
        "eagle_topk": [each.topk if each.speculates else None for each in members],
        "num_draft_tokens": [each.draft_tokens if each.speculates else None for each in members],
        "drafter": ["eagle3" if each.speculates else None for each in members],
        "nccl_set": [each.nccl for each in members],
        "nccl_env": variables,
        "args": nothing,
        "env": nothing,
        "all_reduce": ["nccl"] * count,
        "command": [["server"]] * count,
        "environment": variables,
        "started_at": [
            _START + timedelta(seconds=at) + (_AWAY if late else timedelta())
            for at, late in zip(started_s, after, strict=True)
        ],
        "start_index": np.argsort(np.argsort(started_s)),
        "started_s": started_s,
        "ended_s": table.at_s[np.arange(count), sweep.num_blocks - 1] + BLOCK_S,
        "num_blocks": np.where(sweep.failed, 0, sweep.num_blocks).astype(np.int32),
        **{f"{activity}_s": np.zeros(count) for activity in ACTIVITIES},
        "launch_s": np.where(table.relaunched, BOOT_S, 0.0),
        "measure_s": BLOCK_S * sweep.num_blocks,
    }


def _nodes(sweep_id: str, sweep: Sweep) -> list[str]:
    """A host that takes over under the same name is seen in the labels of time alone."""
    named = sweep.table.nodes if sweep.plan.gap_is_named else np.minimum(sweep.table.nodes, sweep.plan.num_nodes - 1)
    return [f"{sweep_id}/node-{node}" for node in named]


def _both(sweep_id: str, sweep: Sweep) -> dict[str, Any]:
    """Blocks at every concurrency that was measured."""
    own = _blocks(sweep_id, sweep, sweep.truth, sweep.slowness)
    if sweep.crowded is None:
        return own
    other = _blocks(sweep_id, sweep, sweep.crowded, sweep.crowded_slowness)
    return {name: pa.concat_arrays([_array(own[name]), _array(other[name])]) for name in own}


def _array(values: Any) -> pa.Array:
    return values if isinstance(values, pa.Array) else pa.array(values)


def _blocks(sweep_id: str, sweep: Sweep, truth: Truth, slowness: Array) -> dict[str, Any]:
    ran = (np.arange(slowness.shape[1]) < sweep.num_blocks[:, None]) & ~sweep.failed[:, None]
    rows, columns = np.nonzero(ran)
    count = len(rows)
    slow = np.exp(slowness[ran])
    phases = {
        name: np.array([of[name] for of in map(truth.phases_ms, sweep.configurations)])[rows] * slow
        for name in ("draft", "verify", "extend", "cycle")
    }
    cycles = sweep.cycles[ran]
    seconds = cycles * phases["cycle"] / 1000
    drafts = np.array([each.speculates for each in sweep.configurations])[rows]
    timed = drafts & sweep.is_timed
    started_s = sweep.table.at_s[ran] + (0.0 if truth.requests == 1 else BLOCK_S / 2)
    return {
        "sweep_id": [sweep_id] * count,
        "trial_id": np.array(trial_ids(sweep_id, sweep))[rows].tolist(),
        "attempt": np.ones(count, dtype=np.int32),
        "block_index": columns.astype(np.int32),
        "started_s": started_s,
        "wall_s": seconds,
        "decode_s": seconds,
        "decode_tokens": np.full(count, truth.requests * BLOCK_TOKENS),
        "tok_s": truth.requests * BLOCK_TOKENS / seconds,
        "num_requests": np.full(count, truth.requests, dtype=np.int32),
        "num_cycles": cycles.astype(np.int64),
        "accept_length": _if(drafts, BLOCK_TOKENS / cycles),
        "draft_ms": _if(timed, phases["draft"]),
        "verify_ms": _if(timed, phases["verify"]),
        "verify_forward_ms": _if(timed | ~drafts, phases["verify"]),
        "extend_ms": _if(timed, phases["extend"]),
        "gap_ms": _if(timed | ~drafts, np.zeros(count)),
        "cycle_ms": phases["cycle"],
        "timer_kind": ["simulated"] * count,
        "output_hash": ["same"] * count,
        "concurrency": np.full(count, truth.requests, dtype=np.int32),
    }


def _if(present: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> pa.Array:
    return pa.array(values, mask=~present)
