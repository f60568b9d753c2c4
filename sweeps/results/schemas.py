"""The columns of every table, with unit and meaning: the whole contract between measuring and analysing.

`docs/tables.md` is written from here: `python -m sweeps.results.table_reference > docs/tables.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import pyarrow as pa

SCHEMA_VERSION = 1

Activity = Literal["launch", "weight_load", "capture", "switch", "warmup", "measure", "trace", "stop", "idle", "failed"]
ACTIVITIES: tuple[Activity, ...] = get_args(Activity)
"""Activities of held GPUs; each is a column `{activity}_s` of `trials`, wall seconds (x num_gpus = GPU seconds)."""

DRAFTING_COLUMNS = ("num_steps", "eagle_topk", "num_draft_tokens", "drafter")
"""Columns of `trials` that describe drafting. Accept length depends on nothing else. Without speculation `num_steps`
is 0 and the rest null."""

_TEXT, _BOOL = pa.string(), pa.bool_()
_INT, _LONG, _REAL = pa.int32(), pa.int64(), pa.float64()
_TEXTS = pa.list_(pa.string())
_SETTINGS = pa.map_(pa.string(), pa.string())


@dataclass(frozen=True, slots=True)
class Column:
    """One column."""

    name: str
    type: pa.DataType
    meaning: str
    unit: str = ""
    """Empty if the column has none."""
    required: bool = False
    """False: null means not known, or not there."""

    @property
    def field(self) -> pa.Field:
        return pa.field(self.name, self.type, nullable=not self.required)


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One table."""

    meaning: str
    """What a row is."""
    columns: tuple[Column, ...]

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([column.field for column in self.columns])


def _must(name: str, kind: pa.DataType, meaning: str, unit: str = "") -> Column:
    return Column(name, kind, meaning, unit, required=True)


_KEYS = (
    _must("sweep_id", _TEXT, "the sweep"),
    _must("trial_id", _TEXT, "`k...` control, `t...` candidate, `i...` incumbent"),
    _must("attempt", _INT, "1 for the first try at the trial"),
)
KEYS = tuple(column.name for column in _KEYS)
"""Columns of every table."""

_CONCURRENCY = Column("concurrency", _INT, "requests in flight; null in rows older than the column")
_BLOCK_INDEX = _must("block_index", _INT, "which prompts: equal in all trials")

CYCLE: tuple[Column, ...] = (
    _must("rank", _INT, "process of the server"),
    _must("cycle_index", _LONG, "number of the cycle in its block"),
    _must("started_ms", _REAL, "start, by the engine's clock", "ms"),
    Column("draft_ms", _REAL, "draft phase", "ms"),
    Column("verify_ms", _REAL, "target verify; null without speculation", "ms"),
    Column("verify_forward_ms", _REAL, "the target's forward inside verify, or the plain decode step", "ms"),
    Column("extend_ms", _REAL, "draft-extend phase", "ms"),
    Column("gap_ms", _REAL, "cycle less its phases", "ms"),
    _must("cycle_ms", _REAL, "start of this cycle to start of the next", "ms"),
    _must("batch_size", _INT, "requests in the cycle"),
    _must("num_steps", _INT, "draft steps of the state that the cycle ran in"),
    Column("tokens", _INT, "produced over the batch, bonus tokens included"),
    _must("timer_kind", _TEXT, "`cuda_event`, `host` or `simulated`"),
)

_BLOCK: tuple[Column, ...] = (
    _BLOCK_INDEX,
    _must("started_s", _REAL, "start, by the engine's clock", "s"),
    _must("wall_s", _REAL, "from the first request sent to the last token", "s"),
    _must("decode_s", _REAL, "union of the requests' intervals from first to last token", "s"),
    _must("decode_tokens", _LONG, "tokens after the first of each request"),
    Column("tok_s", _REAL, "decode_tokens / decode_s; null without decode time", "tok/s"),
    _must("num_requests", _INT, "requests of the block"),
    Column("num_cycles", _LONG, "cycles, rank 0"),
    Column("accept_length", _REAL, "tokens / (verify cycles x batch), bonus token included", "tokens"),
    Column("draft_ms", _REAL, "mean over the block's cycles, rank 0", "ms"),
    Column("verify_ms", _REAL, "mean over the block's cycles, rank 0", "ms"),
    Column("verify_forward_ms", _REAL, "mean over the block's cycles, rank 0", "ms"),
    Column("extend_ms", _REAL, "mean over the block's cycles, rank 0", "ms"),
    Column("gap_ms", _REAL, "mean over the block's cycles, rank 0", "ms"),
    Column("cycle_ms", _REAL, "mean over the block's cycles, rank 0", "ms"),
    Column("accept_histogram", pa.list_(pa.int64()), "[i]: cycles that produced i tokens (one request at a time)"),
    Column("timer_kind", _TEXT, "`cuda_event`, `host` or `simulated`"),
    _must("output_hash", _TEXT, "of all output tokens"),
    Column("sm_clock_mhz", _REAL, "of the slowest GPU, median over the block", "MHz"),
    Column("power_w", _REAL, "all GPUs together, medians over the block", "W"),
    Column("temperature_c", _REAL, "of the hottest GPU, median over the block", "degrees C"),
    Column("throttle_reasons", _TEXT, "why a GPU was slowed down: all reasons that occurred"),
    Column("memory_used_bytes", _REAL, "all GPUs together, medians over the block", "bytes"),
    Column("probe_tokens", _LONG, "tokens of all cycles, rank 0"),
    Column("asked_tokens", _LONG, "per request; null if a request may end earlier (`ignore_eos: false`)"),
    Column("foreign_pids", _TEXT, "processes that held memory of the trial's GPUs and are not the server's"),
    Column("suspect", _TEXT, "`RULE: numbers` of broken rules (`sweeps/results/plausible.py`); null for a sound block"),
    _CONCURRENCY,
)

TABLE_SPECS: Mapping[str, TableSpec] = {
    "trials": TableSpec(
        "one attempt at one trial, measured or not",
        (
            *_KEYS,
            _must("role", _TEXT, "`candidate`, `control` or `incumbent`"),
            _must("engine", _TEXT, "`sglang`, `simulated`, `replay` or `imported`"),
            Column("engine_version", _TEXT, "of the serving engine"),
            Column("machine", _TEXT, "simulated machine"),
            Column("node", _TEXT, "host"),
            _must("num_gpus", _INT, "GPUs held"),
            _must("acceptance", _TEXT, "`measured` or `pinned`"),
            _must("status", _TEXT, "`completed`, `pruned`, `failed` or `invalid`"),
            Column("stage", _TEXT, "of a failure"),
            Column("kind", _TEXT, "of a failure (docs/failures.md)"),
            Column("reason", _TEXT, "why pruned, failed or invalid"),
            Column("log_tail", _TEXT, "last lines of the server's log, of a failure"),
            Column("configuration_id", _TEXT, "the same in every sweep; null if the suggestion is no configuration"),
            Column("launch_key", _TEXT, "configurations with the same key can share a server"),
            _must("label", _TEXT, "the configuration in words"),
            Column("relaunched", _BOOL, "false: a live server was switched"),
            _must("requested", _SETTINGS, "dimension to value, as suggested"),
            Column("effective", _SETTINGS, "the engine's own account"),
            Column("num_steps", _INT, "draft steps, effective; 0 without speculation"),
            Column("eagle_topk", _INT, "top-k; 1 is a chain"),
            Column("num_draft_tokens", _INT, "tokens that a verify checks"),
            Column("drafter", _TEXT, "name of the drafter in the spec"),
            Column("nccl_set", _TEXT, "name of the NCCL set in the spec"),
            Column("nccl_env", _SETTINGS, "variables of the NCCL set"),
            Column("args", _SETTINGS, "values of the `args.*` dimensions"),
            Column("env", _SETTINGS, "values of the `env.*` dimensions"),
            Column("all_reduce", _TEXT, "what serves the decode's all-reduces: `nccl`, `custom`, `none`, ..."),
            Column("command", _TEXTS, "of the server, without its ports and secrets"),
            Column("environment", _SETTINGS, "variables set for the server; secrets by name alone"),
            Column("removed_env", _TEXTS, "inherited variables that were taken out"),
            _must("started_at", pa.timestamp("us", tz="UTC"), "a label: the wall clock may have been set"),
            _must("started_s", _REAL, "start, by the engine's clock; goes on from driver to driver", "s"),
            Column("start_index", _LONG, "place in the order of starts; null in older rows and if never run"),
            _must("ended_s", _REAL, "end, by the engine's clock", "s"),
            _must("num_blocks", _INT, "blocks measured"),
            *(
                _must(f"{name}_s", _REAL, f"wall seconds of held GPUs: {name.replace('_', ' ')}", "s")
                for name in ACTIVITIES
            ),
        ),
    ),
    "blocks": TableSpec("one block of one attempt: one prompt, or one wave of prompts", (*_KEYS, *_BLOCK)),
    "anchors": TableSpec(
        "one block at step count 0 inside a chain's server: never part of its configuration",
        (*_KEYS, _must("place", _TEXT, "`before` or `after` the trial's own blocks"), *_BLOCK),
    ),
    "requests": TableSpec(
        "one request of a block",
        (
            *_KEYS,
            _BLOCK_INDEX,
            _must("prompt_id", _TEXT, "the prompt"),
            _must("prompt_tokens", _INT, "tokens of the prompt"),
            _must("output_tokens", _INT, "tokens of the answer"),
            Column("ttft_ms", _REAL, "time to first token", "ms"),
            _must("latency_ms", _REAL, "from sending to the last token", "ms"),
            _must("output_hash", _TEXT, "of the output tokens"),
            Column("head_hash", _TEXT, "of the first tokens: rounding flips few, corruption most"),
            Column("cached_tokens", _INT, "of the prompt, from the server's prefix cache"),
            Column("distinct_bigrams", _INT, "different pairs of neighbouring tokens in each 128"),
            _CONCURRENCY,
        ),
    ),
    "cycles": TableSpec("one cycle of one rank", (*_KEYS, _BLOCK_INDEX, *CYCLE, _CONCURRENCY)),
    "evidence": TableSpec(
        "one requested setting in one rank, or one that nobody requested",
        (
            *_KEYS,
            _must("rank", _INT, "process of the server"),
            _must("setting", _TEXT, "`env.NAME` or `args.NAME`"),
            Column("requested", _TEXT, "null: nobody asked for it"),
            Column("seen", _TEXT, "by C getenv in the rank, or by the server's own account"),
            Column("read_by_nccl", _TEXT, "what NCCL says it read"),
            Column("effective", _TEXT, "what acts"),
            _must("grade", _TEXT, "`effective`, `seen`, `not_seen`, `overridden`, `not_exercised` or `extra`"),
            Column("detail", _TEXT, "why"),
        ),
    ),
    "kernels": TableSpec(
        "one kernel of one phase, by the profiler of rank 0",
        (
            *_KEYS,
            _must("phase", _TEXT, "`draft`, `verify`, `extend` or `other`; a plain decode step is `verify`"),
            _must("kind", _TEXT, "`attention`, `moe`, `gemm`, `communication`, `sampling` or `other`"),
            _must("kernel", _TEXT, "its name"),
            _must("us_per_cycle", _REAL, "time in a cycle", "us"),
            _must("calls_per_cycle", _REAL, "calls in a cycle"),
        ),
    ),
    "events": TableSpec(
        "something that happened beside the measurements",
        (
            *_KEYS,
            _must("at_s", _REAL, "by the engine's clock", "s"),
            _must("event", _TEXT, "its name: `search_stopped`, `gpu_not_clean`, ..."),
            Column("detail", _TEXT, "in words"),
            Column("numbers", pa.map_(pa.string(), pa.float64()), "in figures"),
        ),
    ),
}

TABLES: Mapping[str, pa.Schema] = {name: table.schema for name, table in TABLE_SPECS.items()}
CYCLE_COLUMNS = pa.schema([column.field for column in CYCLE])
