"""What became of every requested variable, rank by rank: seen by the process, read by NCCL, acted on.

A variable can be lost, overridden by the engine or by NCCL, unused (another kernel does the all-reduces) or set by
someone else. Each needs a different explanation in the report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from sweeps.engines.all_reduce_backend import RankFacts, decode_operations
from sweeps.engines.base import Evidence, Grade
from sweeps.engines.env_sources import OVERRIDES, ConfFile
from sweeps.nccl.catalogue import CATALOGUE
from sweeps.nccl.grammar import ELEMENTS, enabled
from sweeps.nccl.log import NcclLog, Operation
from sweeps.redaction import is_secret, reference, without_userinfo
from sweeps.results.nccl_acts import may_act

_OURS = frozenset({"NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"})
_LABELS = frozenset({"NCCL_VERSION", "NCCL_HOME", "NCCL_ROOT", "NCCL_ROOT_DIR", "NCCL_INCLUDE_DIR", "NCCL_LIB_DIR"})
"""Set by container images and builds; NCCL reads none of them."""
WATCHED = ("NCCL_", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING", "SGLANG_SIMULATE_")
"""Prefixes of variables that are reported although nobody asked for them."""
_UNKNOWN_SOURCE = "source unknown; check sitecustomize, wrapper scripts and plugins"


def grade_environment(
    requested: Mapping[str, str],
    ranks: Sequence[RankFacts],
    *,
    num_ranks: int,
    all_reduce: str | None,
    conf_files: Sequence[ConfFile] = (),
    decode_bytes: frozenset[int] = frozenset(),
) -> tuple[Evidence, ...]:
    """One row per rank and requested variable, then the `extra` ones.

    Args:
        requested: variables that the trial or its spec asks for.
        num_ranks: rows are made for ranks that never reported, too.
        all_reduce: what serves decode-size all-reduces, if known: not `nccl` makes NCCL variables `not_exercised`.
        decode_bytes: sizes of the decode's all-reduces; if empty, those between DECODE_BYTES_AT_LEAST and _AT_MOST.
    """
    reported = {facts.rank: facts for facts in ranks}
    operations = decode_operations(ranks, decode_bytes)
    rows: list[Evidence] = []
    for rank in range(num_ranks):
        facts = reported.get(rank)
        for name, value in sorted(requested.items()):
            rows.append(
                _missing_rank(rank, f"env.{name}", value)
                if facts is None
                else _grade_variable(name, value, facts, operations, all_reduce, conf_files)
            )
        if facts is not None:
            rows += _extra(requested, facts, conf_files)
    return tuple(rows)


def _missing_rank(rank: int, setting: str, value: str) -> Evidence:
    return Evidence(
        rank=rank,
        setting=setting,
        requested=value,
        seen=None,
        effective=None,
        grade="not_seen",
        detail="this rank has not reported",
    )


def _grade_variable(
    name: str,
    value: str,
    facts: RankFacts,
    operations: Sequence[Operation],
    all_reduce: str | None,
    conf_files: Sequence[ConfFile],
) -> Evidence:
    seen = facts.environment.get(name)
    log = facts.nccl if name.startswith("NCCL_") else None
    row = Evidence(
        rank=facts.rank,
        setting=f"env.{name}",
        requested=value,
        seen=seen,
        effective=None,
        grade="seen",
        read_by_nccl=log.set_by_environment.get(name) if log else None,
    )
    if seen is None:
        return replace(row, grade="not_seen", detail="getenv in the rank does not have it")
    if seen != value:
        return replace(row, effective=seen, grade="overridden", detail=_overridden_by(name, seen, conf_files))
    if not name.startswith("NCCL_"):
        return row
    if not may_act(all_reduce):
        return replace(row, grade="not_exercised", detail=f"{all_reduce} serves the decode's all-reduces, not NCCL")
    if log is None:
        return replace(row, detail="NCCL's log was not asked for")
    if name in log.invalid:
        return replace(
            row,
            effective=log.invalid[name],
            grade="overridden",
            detail=f"NCCL refused the value, used {log.invalid[name]}",
        )
    if row.read_by_nccl is None and name not in CATALOGUE:
        return replace(row, grade="not_seen", detail="the process has it, but NCCL asks for no variable of this name")
    if row.read_by_nccl is None:
        return replace(row, detail="NCCL has not read it: misspelt value, or nothing on this path asks for it")
    grade, effective, detail = _acted_on(name, value, log, operations)
    return replace(row, grade=grade, effective=effective, detail=detail)


def _overridden_by(name: str, seen: str, conf_files: Sequence[ConfFile]) -> str:
    for file in conf_files:
        if file.settings.get(name) == seen:
            return f"by {file.path} ({file.sha256[:12]})"
    for override in OVERRIDES.get(name, ()):
        if override.value == seen and not override.only_if_unset:
            return f"as by {override.when}; to allow it: {override.allow}"
    return _UNKNOWN_SOURCE


def _acted_on(name: str, value: str, log: NcclLog, operations: Sequence[Operation]) -> tuple[Grade, str, str | None]:
    """NCCL has read `name`: do its choices, transports and channels agree with it?"""
    names = ELEMENTS.get(name, ())
    left = enabled(name, value, function="AllReduce") if names else None
    if names and operations:
        used = {
            operation.algorithm if name == "NCCL_ALGO" else operation.protocol or "symmetric"
            for operation in operations
        }
        text = ",".join(sorted(used))
        if left is not None and not used <= left:
            return "overridden", text, "NCCL chose otherwise for the decode's all-reduces"
        return "effective", text, f"{len(operations)} decode-size all-reduce sizes"
    if names and (still_on := log.enabled.get("AllReduce", frozenset()) & frozenset(names)):
        text = ",".join(sorted(still_on))
        if left is not None and not still_on <= left:
            return "overridden", text, "NCCL leaves others on for all-reduces"
        return "effective", text, "left on for all-reduces; which one serves the decode was not printed"
    denied = _denied(name, value, log)
    if denied:
        return "overridden", ",".join(sorted(log.transports)) or str(log.num_channels), denied
    return "effective", _observed(name, log) or value, None


def _denied(name: str, value: str, log: NcclLog) -> str | None:
    """Why connections or channels contradict the setting; None if they do not."""
    kinds = {transport.split("/")[0] for transport in log.transports}
    cumem = {transport for transport in log.transports if transport.startswith(("P2P/CUMEM", "P2P/IPC"))}
    if name == "NCCL_P2P_LEVEL" and value == "SYS" and kinds and "P2P" not in kinds:
        return "no connection uses P2P: the driver or the topology does not let it"
    if (name, value) in (("NCCL_P2P_DISABLE", "1"), ("NCCL_P2P_LEVEL", "LOC")) and "P2P" in kinds:
        return "connections use P2P nevertheless"
    if name == "NCCL_SHM_DISABLE" and value == "1" and "SHM" in kinds:
        return "connections use shared memory nevertheless"
    if name == "NCCL_CUMEM_ENABLE" and cumem and any(("CUMEM" in each) != (value == "1") for each in cumem):
        return "P2P connections are of the other kind"
    if log.num_channels is not None and value.isdigit():
        if name in ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS") and log.num_channels > int(value):
            return f"{log.num_channels} channels"
        if name in ("NCCL_MIN_NCHANNELS", "NCCL_MIN_CTAS") and log.num_channels < int(value):
            return f"{log.num_channels} channels"
    return None


def _observed(name: str, log: NcclLog) -> str | None:
    if "NCHANNELS" in name or "CTAS" in name:
        return None if log.num_channels is None else f"{log.num_channels} channels"
    if name in ("NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_CUMEM_ENABLE"):
        return ",".join(sorted(log.transports)) or None
    return None


def _extra(requested: Mapping[str, str], facts: RankFacts, conf_files: Sequence[ConfFile]) -> Iterable[Evidence]:
    read = facts.nccl.set_by_environment if facts.nccl else {}
    present = {**read, **facts.environment}
    for name, value in sorted(present.items()):
        if name in requested or name in _OURS or name in _LABELS or not name.startswith(WATCHED):
            continue
        file = next((file for file in conf_files if file.settings.get(name) == value), None)
        default = next((each for each in OVERRIDES.get(name, ()) if each.value == value), None)
        source = f"by {default.when}" if default else _UNKNOWN_SOURCE
        yield Evidence(
            rank=facts.rank,
            setting=f"env.{name}",
            requested=None,
            seen=facts.environment.get(name),
            effective=value if name in read else None,
            grade="extra",
            detail=f"by {file.path} ({file.sha256[:12]})" if file else source,
            read_by_nccl=read.get(name),
        )


def redacted_evidence(rows: Iterable[Evidence]) -> tuple[Evidence, ...]:
    """Rows without the values of secrets, graded before; what a rank has instead of a secret is `another value`."""
    return tuple(map(_redacted, rows))


def _redacted(row: Evidence) -> Evidence:
    name = row.setting.partition(".")[2]
    wanted = row.requested

    def shown(value: str | None) -> str | None:
        if value is None or not is_secret(name):
            return None if value is None else without_userinfo(value)
        return reference(name) if value == wanted or wanted is None else "another value"

    return replace(
        row,
        requested=shown(row.requested),
        seen=shown(row.seen),
        effective=shown(row.effective),
        read_by_nccl=shown(row.read_by_nccl),
    )
