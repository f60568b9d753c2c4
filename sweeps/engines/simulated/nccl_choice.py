"""Which algorithm, protocol and transport NCCL uses on a profiled machine, and the time of one all-reduce.

A reduced form of NCCL's own rules (2.30, `graph/tuning.cc` and `graph/paths.cc`) at decode sizes, where channel, thread
and buffer settings are clamped and change nothing: the lists of NCCL_ALGO and NCCL_PROTO mask what may be picked, P2P
level and switches decide the transport.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from sweeps.engines.base import EngineError
from sweeps.engines.simulated.machine_profile import Algo, Match, NcclModel, PathLevel, Proto, Transport
from sweeps.nccl.grammar import NcclSetError, candidates

_LEVELS: tuple[str, ...] = get_args(PathLevel)
_DEFAULT_LEVEL = "PXB"


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclChoice:
    """What carries an all-reduce."""

    algo: Algo
    proto: Proto
    transport: Transport


def fits(when: Match, settings: Mapping[str, str]) -> bool:
    """Whether every setting of `when` has its value (`*`: any)."""
    return all(name in settings and value in ("*", settings[name]) for name, value in when.items())


def choose(model: NcclModel, settings: Mapping[str, str], *, message_bytes: int) -> NcclChoice:
    """What NCCL picks for an all-reduce: the machine's own pick where it may, else the fastest that it may.

    Raises EngineError where nothing that the machine has is left for an all-reduce or an all-gather (the engine's
    logits need one).
    """
    picked: dict[str, str] = {}
    for pick in model.picks:
        if fits(pick.when, settings):
            parts = {"algo": pick.algo, "proto": pick.proto, "transport": pick.transport}
            picked.update({name: part for name, part in parts.items() if part is not None})
    transport = _transport(model, settings, picked.get("transport"))
    table = model.latency_us[transport]
    left = _left(settings)
    pairs = [(algo, proto) for algo in table for proto in table[algo] if (algo, proto) in left["AllReduce"]]
    if not pairs or not any(algo in table for algo, _ in left["AllGather"]):
        raise EngineError(
            f"No algorithm/protocol available for function {'AllGather' if pairs else 'AllReduce'}. NCCL_ALGO was "
            f"set to {settings.get('env.NCCL_ALGO')}. NCCL_PROTO was set to {settings.get('env.NCCL_PROTO')}.",
            stage="capture",
            kind="nccl_no_algorithm",
        )

    def rank(pair: tuple[Algo, Proto]) -> tuple[bool, bool, float]:
        algo, proto = pair
        choice = NcclChoice(algo=algo, proto=proto, transport=transport)
        time_us = all_reduce_us(model, choice, message_bytes=message_bytes)
        return proto != picked.get("proto"), algo != picked.get("algo"), time_us

    algo, proto = min(pairs, key=rank)
    return NcclChoice(algo=algo, proto=proto, transport=transport)


def all_reduce_us(model: NcclModel, choice: NcclChoice, *, message_bytes: int) -> float:
    """Microseconds of one all-reduce: latency + bytes / bandwidth (1 GB/s = 1000 bytes per microsecond)."""
    latency_us = model.latency_us[choice.transport][choice.algo][choice.proto]
    return latency_us + message_bytes / (1000.0 * model.bandwidth_gbs[choice.transport][choice.proto])


def _transport(model: NcclModel, settings: Mapping[str, str], picked: str | None) -> Transport:
    level = settings.get("env.NCCL_P2P_LEVEL", _DEFAULT_LEVEL)
    if level not in _LEVELS:
        level = _DEFAULT_LEVEL  # NCCL ignores what it does not know, in silence
    reaches = picked == "P2P" or _LEVELS.index(level) >= _LEVELS.index(model.path)
    if reaches and settings.get("env.NCCL_P2P_DISABLE") != "1":
        return "P2P"
    return "NET" if settings.get("env.NCCL_SHM_DISABLE") == "1" else "SHM"


def _left(settings: Mapping[str, str]) -> dict[str, frozenset[tuple[str, str]]]:
    """(algorithm, protocol) pairs by function; LL128 only where NCCL_PROTO names it (off between PCIe GPUs)."""
    variables = {name.removeprefix("env."): value for name, value in settings.items() if name.startswith("env.NCCL_")}
    try:
        left = candidates(variables)
    except NcclSetError as error:
        raise EngineError(f"ncclInvalidUsage: {error}", stage="nccl_init", kind="invalid_config") from error
    if "NCCL_PROTO" in variables:
        return left
    return {name: frozenset(pair for pair in pairs if pair[1] != "LL128") for name, pairs in left.items()}
