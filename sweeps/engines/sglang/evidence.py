"""Joins what ranks, server info, cycles and logs say about one launch; `sweeps.engines.evidence` grades it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from sweeps.engines.all_reduce_backend import RankFacts, all_reduce_backend
from sweeps.engines.argument_evidence import grade_arguments
from sweeps.engines.base import EngineError, Evidence
from sweeps.engines.env_sources import nccl_conf_files
from sweeps.engines.evidence import grade_environment, redacted_evidence
from sweeps.engines.sglang.live_server import LiveServer
from sweeps.engines.sglang.probe_link import Handshake
from sweeps.engines.sglang.server_arguments import resolved_arguments
from sweeps.engines.sglang.state_plan import State
from sweeps.nccl.log import NcclLog, excerpt, read_nccl_log
from sweeps.results.resolved import RESOLVED
from sweeps.spec.model import Scalar
from sweeps.spec.names import SIMULATES_ACCEPTANCE
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


_OF_A_STATE = (
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "disable_custom_all_reduce",
)
"""Arguments that bind at graph capture."""


def gather_evidence(live: LiveServer, cycles: pa.Table) -> tuple[tuple[Evidence, ...], str | None]:
    """Evidence rows for the configuration that `live` serves, and what serves decode-size all-reduces, if known.

    Args:
        cycles: at least one of every rank: the state that cycles ran in is the proof of a step count.
    """
    plan, log, state = live.plan, live.boot.log(), live.holds(live.configuration)
    resolved = {name: None if value is None else str(value) for name, value in live.info.items()}
    if state is not None and not state.custom:
        resolved["disable_custom_all_reduce"] = "True"
    facts = [_facts(plan.folder, each, state) for each in live.handshakes]
    # The communicator of a set may serve a state with custom all-reduce and one without. Its log then holds the decode
    # operations of the latter, so only the arguments tell for a state with custom all-reduce.
    all_reduce = all_reduce_backend(resolved, log, facts if state is None or not state.custom else ())
    launched = {name: plan.environment.get(name, value) for name, value in plan.requested.items()}
    requested = {**launched, **dict(live.configuration.nccl_env)}
    refuse_simulation(facts, requested)
    rows = grade_environment(
        {name: value for name, value in requested.items() if name != "PYTHONPATH"},
        facts,
        num_ranks=plan.num_ranks,
        all_reduce=all_reduce,
        conf_files=nccl_conf_files(live.handshakes[0].environment),
    )
    arguments = grade_arguments(
        _requested_arguments(plan.arguments, live.configuration, resolved),
        resolved,
        in_ranks=[_held_by(cycles, each, live.configuration, state) for each in live.handshakes],
        logged=resolved_arguments(log),
    )
    if state is not None:
        arguments = tuple(_explain_switch(row, state) for row in arguments)
    return redacted_evidence((*rows, *arguments, *_niceness(live.handshakes))), all_reduce


def refuse_simulation(ranks: Sequence[RankFacts], requested: Mapping[str, str]) -> None:
    """Raise EngineError (`not_effective`) if a rank simulates acceptance and the sweep did not ask for it."""
    for name in sorted(
        {name for facts in ranks for name in facts.environment if name.startswith(SIMULATES_ACCEPTANCE)}
    ):
        if name not in requested:
            having = {facts.rank: facts.environment[name] for facts in ranks if name in facts.environment}
            raise EngineError(
                f"env.{name}: {next(iter(having.values()))} in ranks {sorted(having)}, but nobody asked for it: "
                "acceptance is simulated, and no throughput means anything",
                stage="first_request",
                kind="not_effective",
            )


def _niceness(handshakes: Sequence[Handshake]) -> Iterator[Evidence]:
    """One row for each rank that yields to whatever else its host runs."""
    for each in handshakes:
        if each.niceness:
            yield Evidence(
                rank=each.rank,
                setting="process.niceness",
                requested=None,
                seen=str(each.niceness),
                effective=str(each.niceness),
                grade="extra",
                detail="inherited from its starter; start Ray with RAY_worker_niceness=0",
            )


def _requested_arguments(
    fixed: Mapping[str, Scalar], configuration: Configuration, resolved: Mapping[str, str | None]
) -> dict[str, str]:
    """Every dimension, and whatever the launch fixes, if the server reports a value for it."""
    given = {name.replace("-", "_"): str(value) for name, value in fixed.items()}
    arguments = {name: value for name, value in given.items() if resolved.get(name) is not None and value != "auto"}
    arguments |= {name.replace("-", "_"): str(value) for name, value in configuration.args}
    if configuration.speculates:
        arguments |= {
            "speculative_num_steps": str(configuration.num_steps),
            "speculative_eagle_topk": str(configuration.eagle_topk),
            "speculative_num_draft_tokens": str(configuration.num_draft_tokens),
        }
    return arguments


def _facts(folder: Path, handshake: Handshake, state: State | None) -> RankFacts:
    """What the rank said of the process, or of the state's own communicator, while that was made."""
    if state is None or state.communicator is None:
        log = _nccl_log(folder, f"nccl.*.{handshake.pid}.log")
        return RankFacts(rank=handshake.rank, environment=handshake.environment, nccl=log)
    made = handshake.communicators[state.communicator]
    return RankFacts(
        rank=handshake.rank,
        environment={**handshake.environment, **made.environment},
        nccl=_nccl_log(folder, f"nccl-state.{state.communicator}.{handshake.pid}.log"),
    )


def _held_by(
    cycles: pa.Table, handshake: Handshake, configuration: Configuration, state: State | None
) -> dict[str, str]:
    """What the rank's last cycle ran with, and what its state was captured with."""
    held = {} if state is None else {"disable_custom_all_reduce": str(not state.custom)}
    if configuration.speculates:
        num_steps = cycles.filter(pc.equal(cycles["rank"], handshake.rank))["num_steps"].to_pylist()[-1]
        held["speculative_num_steps"] = str(num_steps)
        if state is not None:
            held["speculative_eagle_topk"] = str(state.eagle_topk)
            held["speculative_num_draft_tokens"] = str(state.num_draft_tokens)
    return held


def _nccl_log(folder: Path, pattern: str) -> NcclLog | None:
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in folder.glob(pattern)]
    return read_nccl_log("\n".join(texts)) if texts else None


def nccl_warnings(folder: Path) -> tuple[str, ...]:
    """WARN lines of NCCL's log files in a server's scratch folder, the first of each rank's process."""
    found = []
    with suppress(FileNotFoundError):
        for path in sorted((*folder.glob("nccl.*.log"), *folder.glob("nccl-state.*.log"))):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                if "NCCL WARN " in line:
                    found.append("NCCL WARN " + line.partition("NCCL WARN ")[2].strip())
                    break
    return tuple(found)


def keep_nccl_logs(folder: Path, into: Path) -> None:
    """Excerpts of NCCL's logs in a server's scratch folder, as `into`/HOST.PID.log and `into`/SET.PID.log.

    None of a server that died: its guard takes the folder, maybe while this reads.
    """
    with suppress(FileNotFoundError):
        for path in sorted((*folder.glob("nccl.*.log"), *folder.glob("nccl-state.*.log"))):
            kept = excerpt(path.read_bytes())
            into.mkdir(parents=True, exist_ok=True)
            (into / path.name.partition(".")[2]).write_bytes(kept)


def effective_settings(live: LiveServer) -> dict[str, str]:
    """The engine's own account of the configuration that it serves, for the trials table."""
    configuration, state = live.configuration, live.holds(live.configuration)
    told = _told(live)
    settings = {name: str(told[name]) for name in (*_TOLD, *RESOLVED) if told.get(name) is not None}
    settings["num_steps"] = str(configuration.num_steps)
    if configuration.speculates:
        settings["speculative_worker"] = "v2"  # the probe wraps no other: its cycles are the proof
        for name in ("eagle_topk", "num_draft_tokens"):
            own = getattr(configuration, name) if state else live.info.get(f"speculative_{name}")
            settings[name] = str(own)
    if state is not None:
        settings |= _state_settings(live, state)
    settings["server_log"] = live.log_path.name
    return settings


def _told(live: LiveServer) -> Mapping[str, object]:
    """The server's account of itself, with what its first scheduler says of its limits, and NCCL's version."""
    inner = live.info.get("internal_states")
    first = inner[0] if isinstance(inner, list) and inner and isinstance(inner[0], Mapping) else {}
    logs = (_nccl_log(live.plan.folder, f"nccl.*.{each.pid}.log") for each in live.handshakes)
    logged = next((log.version for log in logs if log is not None and log.version is not None), None)
    return {**first, **live.info, "nccl_version": logged or live.handshakes[0].nccl}


def _state_settings(live: LiveServer, state: State) -> dict[str, str]:
    """What the server holds, and what this state of it took: the slowest rank's seconds, the largest memory."""
    accounts = [each.states[state.name] for each in live.handshakes]
    held = [each for each in live.plan.states.states if live.is_held(each)] if live.plan.states else []
    settings = {
        "state": state.name,
        "states": ",".join(each.name for each in held),
        "state_s": f"{max(each.seconds for each in accounts):.2f}",
        "state_mib": f"{max(each.memory_mib for each in accounts):.0f}",
        "disable_custom_all_reduce": str(not state.custom),
    }
    made = [each.communicators[state.communicator] for each in live.handshakes if state.communicator is not None]
    if made:
        settings["communicator_s"] = f"{max(each.seconds for each in made):.2f}"
        settings["communicator_mib"] = f"{max(each.memory_mib or 0.0 for each in made):.0f}"
    return settings


def _explain_switch(row: Evidence, state: State) -> Evidence:
    """`row`, saying that its value belongs to a state of the live server."""
    if row.setting.removeprefix("args.") not in _OF_A_STATE:
        return row
    return replace(row, detail=row.detail or f"state {state.name} of a server that holds several")
