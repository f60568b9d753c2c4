"""Joins what ranks, server info, cycles and logs say about one launch; `sweeps.engines.evidence` grades it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from sweeps.engines.base import Evidence
from sweeps.engines.env_sources import nccl_conf_files
from sweeps.engines.evidence import RankFacts, all_reduce_backend, grade_arguments, grade_environment
from sweeps.engines.sglang.live_server import LiveServer
from sweeps.engines.sglang.probe_link import Handshake
from sweeps.engines.sglang.server_log import resolved_arguments
from sweeps.nccl.log import NcclLog, excerpt, read_nccl_log
from sweeps.spec.model import Scalar
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


def gather_evidence(live: LiveServer, cycles: pa.Table) -> tuple[tuple[Evidence, ...], str | None]:
    """Evidence rows for the configuration that `live` serves, and what serves decode-size all-reduces, if known.

    Args:
        cycles: at least one of every rank: the state that cycles ran in is the proof of a step count.
    """
    plan, log = live.plan, live.boot.log()
    resolved = {name: None if value is None else str(value) for name, value in live.info.items()}
    facts = [
        RankFacts(rank=each.rank, environment=each.environment, nccl=_nccl_log(plan.folder, each.pid))
        for each in live.handshakes
    ]
    all_reduce = all_reduce_backend(resolved, log, facts)
    rows = grade_environment(
        {name: value for name, value in plan.requested.items() if name != "PYTHONPATH"},
        facts,
        num_ranks=plan.num_ranks,
        all_reduce=all_reduce,
        conf_files=nccl_conf_files(live.handshakes[0].environment),
    )
    arguments = grade_arguments(
        _requested_arguments(plan.arguments, live.configuration, resolved),
        resolved,
        in_ranks=[_held_by(cycles, each, live.configuration) for each in live.handshakes],
        logged=resolved_arguments(log),
    )
    if plan.step_candidates:
        arguments = tuple(_explain_switch(row, plan.step_candidates) for row in arguments)
    return (*rows, *arguments), all_reduce


def _requested_arguments(
    fixed: Mapping[str, Scalar], configuration: Configuration, resolved: Mapping[str, str | None]
) -> dict[str, str]:
    """Every dimension, and those of `_TOLD` that the launch fixes, if the server reports a value for them."""
    given = {name.replace("-", "_"): str(value) for name, value in fixed.items()}
    arguments = {
        name: value
        for name, value in given.items()
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


def _nccl_log(folder: Path, pid: int) -> NcclLog | None:
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


def effective_settings(live: LiveServer) -> dict[str, str]:
    """The engine's own account of the configuration that it serves, for the trials table."""
    configuration, candidates = live.configuration, live.plan.step_candidates
    settings = {name: str(live.info[name]) for name in _TOLD if live.info.get(name) is not None}
    settings["num_steps"] = str(configuration.num_steps)
    if configuration.speculates:
        settings["speculative_worker"] = "v2"  # the probe wraps no other: its cycles are the proof
        for name in ("eagle_topk", "num_draft_tokens"):
            own = getattr(configuration, name) if candidates else live.info.get(f"speculative_{name}")
            settings[name] = str(own)
    if candidates:
        settings["step_candidates"] = ",".join(map(str, candidates))
    settings["server_log"] = live.log_path.name
    return settings


def _explain_switch(row: Evidence, candidates: tuple[int, ...]) -> Evidence:
    """`row`, saying that its value was switched in place among `candidates`."""
    if row.setting not in ("args.speculative_num_steps", "args.speculative_num_draft_tokens"):
        return row
    return replace(row, detail=row.detail or f"in a server with states for {list(candidates)} steps, switched in place")
