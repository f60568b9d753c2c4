"""Joins what ranks, server info, cycles and logs say about one launch; `sweeps.engines.evidence` grades it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sweeps.engines.base import Evidence
from sweeps.engines.command import launch_environment, num_ranks, server_arguments
from sweeps.engines.env_sources import nccl_conf_files
from sweeps.engines.evidence import RankFacts, all_reduce_backend, grade_arguments, grade_environment
from sweeps.engines.sglang.probe_link import Handshake
from sweeps.engines.sglang.server_log import resolved_arguments
from sweeps.nccl.log import NcclLog, excerpt, read_nccl_log
from sweeps.spec.model import SweepSpec
from sweeps.spec.space import Configuration

_TOLD = (
    "attention_backend",
    "decode_attention_backend",
    "disable_cuda_graph",
    "disable_custom_all_reduce",
    "disable_overlap_schedule",
    "dtype",
    "enable_flashinfer_allreduce_fusion",
    "kv_cache_dtype",
    "moe_runner_backend",
    "prefill_attention_backend",
    "quantization",
    "speculative_algorithm",
    "speculative_draft_attention_backend",
    "tp_size",
)
"""What of the server's own account goes into `effective`."""


def gather_evidence(
    spec: SweepSpec,
    configuration: Configuration,
    handshakes: Sequence[Handshake],
    cycles: pa.Table,
    server_info: Mapping[str, Any],
    log: str,
    nccl_logs: Path | None = None,
) -> tuple[tuple[Evidence, ...], str | None]:
    """Evidence rows, and what serves decode-size all-reduces where known.

    Args:
        cycles: at least one of every rank: the state that cycles ran in is the proof of a step count.
        nccl_logs: folder of per-process NCCL logs (`nccl.HOST.PID.log`), where they were asked for.
    """
    resolved = {name: None if value is None else str(value) for name, value in server_info.items()}
    facts = [
        RankFacts(rank=each.rank, environment=each.environment, nccl=_nccl_log(nccl_logs, each.pid))
        for each in handshakes
    ]
    all_reduce = all_reduce_backend(resolved, log, facts)
    requested = {name: value for name, value in launch_environment(spec, configuration).items() if name != "PYTHONPATH"}
    rows = grade_environment(
        requested,
        facts,
        num_ranks=num_ranks(spec, configuration),
        all_reduce=all_reduce,
        conf_files=nccl_conf_files(handshakes[0].environment),
    )
    arguments = grade_arguments(
        _requested_arguments(spec, configuration, resolved),
        resolved,
        in_ranks=[_held_by(cycles, each, configuration) for each in handshakes],
        logged=resolved_arguments(log),
    )
    return (*rows, *arguments), all_reduce


def _requested_arguments(
    spec: SweepSpec, configuration: Configuration, resolved: Mapping[str, str | None]
) -> dict[str, str]:
    """Every dimension, and what the spec fixes of `_TOLD` where the server tells of it and was left no choice."""
    fixed = {name.replace("-", "_"): str(value) for name, value in server_arguments(spec, configuration).items()}
    arguments = {
        name: value
        for name, value in fixed.items()
        if name in _TOLD and resolved.get(name) is not None and value != "auto"
    }
    arguments |= {name.replace("-", "_"): str(value) for name, value in configuration.args}
    if configuration.speculates:
        arguments |= {
            "speculative_num_steps": str(configuration.num_steps),
            "speculative_eagle_topk": str(configuration.eagle_topk),
            "speculative_num_draft_tokens": str(configuration.num_draft_tokens),
        }
    return arguments


def _held_by(cycles: pa.Table, handshake: Handshake, configuration: Configuration) -> dict[str, str]:
    """What the rank's last cycle ran with. In a server that switches step counts, those are the whole state."""
    if not configuration.speculates:
        return {}
    num_steps = cycles.filter(pc.equal(cycles["rank"], handshake.rank))["num_steps"].to_pylist()[-1]
    held = {"speculative_num_steps": str(num_steps)}
    if handshake.step_candidates:
        held["speculative_num_draft_tokens"] = str(num_steps + 1)
    return held


def _nccl_log(folder: Path | None, pid: int) -> NcclLog | None:
    if folder is None:
        return None
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in folder.glob(f"nccl.*.{pid}.log")]
    return read_nccl_log("\n".join(texts)) if texts else None


def keep_nccl_logs(folder: Path, into: Path) -> None:
    """Excerpts of NCCL's logs in a server's scratch folder, as `into`/HOST.PID.log.

    None of a server that died: its guard takes the folder, maybe while this reads.
    """
    with suppress(FileNotFoundError):
        for path in sorted(folder.glob("nccl.*.log")):
            kept = excerpt(path.read_bytes())
            into.mkdir(parents=True, exist_ok=True)
            (into / path.name.removeprefix("nccl.")).write_bytes(kept)


def effective_settings(
    configuration: Configuration, server_info: Mapping[str, Any], server_log: str, step_candidates: tuple[int, ...]
) -> dict[str, str]:
    """The engine's own account of this configuration, for the trials table."""
    settings = {name: str(server_info[name]) for name in _TOLD if server_info.get(name) is not None}
    settings["num_steps"] = str(configuration.num_steps)
    if configuration.speculates:
        settings["speculative_worker"] = "v2"  # the probe wraps no other: its cycles are the proof
        for name in ("eagle_topk", "num_draft_tokens"):
            own = getattr(configuration, name) if step_candidates else server_info.get(f"speculative_{name}")
            settings[name] = str(own)
    if step_candidates:
        settings["step_candidates"] = ",".join(map(str, step_candidates))
    settings["server_log"] = server_log
    return settings


def explain_switch(row: Evidence, candidates: tuple[int, ...]) -> Evidence:
    """`row`, saying that its value was switched in place among `candidates`."""
    if row.setting not in ("args.speculative_num_steps", "args.speculative_num_draft_tokens"):
        return row
    return replace(row, detail=row.detail or f"in a server with states for {list(candidates)} steps, switched in place")
