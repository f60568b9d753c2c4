"""What NCCL says it did, from the lines of one rank's NCCL_DEBUG_FILE.

Wanted: `NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,GRAPH,TUNING,P2P,SHM` with a file per rank (`%h.%p`). NVIDIA
documents no format: the lines of 2.21 to 2.30 are read, and a line of unknown form is skipped. Kernel names do not
prove a protocol, so they are not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from sweeps.nccl.grammar import ALGORITHMS, FUNCTIONS, PROTOCOLS

EXCERPT_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """What NCCL chose for one collective and size. Printed at capture only, under CUDA graphs."""

    collective: str | None
    """`AllReduce`, ...; None before 2.24, which does not tell."""
    num_bytes: int
    algorithm: str
    """One of ALGORITHMS, or the name of a symmetric kernel."""
    protocol: str | None
    """One of PROTOCOLS; None for symmetric kernels."""
    channels: int | None

    @property
    def symmetric(self) -> bool:
        return self.protocol is None


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclLog:
    """One rank's account. Empty if the log has no such line (several are printed by rank 0 alone)."""

    version: str | None = None
    rank: int | None = None
    set_by_environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that NCCL has read and their values, conf files included."""
    invalid: Mapping[str, str] = field(default_factory=dict)
    """Variables whose value NCCL refused, and what it used instead."""
    operations: tuple[Operation, ...] = ()
    """Distinct ones, in order of appearance."""
    transports: frozenset[str] = frozenset()
    """`P2P/IPC`, `P2P/CUMEM`, `SHM/direct/direct`, `NET/Socket/0`, ... of this rank's connections."""
    num_channels: int | None = None
    """Collective channels of the last communicator."""
    enabled: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Collective -> algorithms and protocols that the settings leave on (2.24 and later, with ALGO or PROTO set)."""
    warnings: tuple[str, ...] = ()


_MESSAGE = re.compile(r"NCCL (INFO|WARN) (.*)")
_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+)")
_RANK = re.compile(r"\brank (\d+) n[rR]anks \d+")
_SET = re.compile(r"^(NCCL_\w+) set by environment to (.*)$")
_PARSED = re.compile(r"^Parsed environment variable (NCCL_\w+)=(\S+)")
_INVALID = re.compile(r"^Invalid value (\S+) for (NCCL_\w+), using default (\S+?)\.?$")
_OPERATION = re.compile(
    r"^(?:(\w+): )?(\d+) Bytes -> Algo (\w+) proto (\w+)(?: channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\})?"
)
_SYMMETRIC = re.compile(r"^(\w+) \[Symmetric\]: (\d+) Bytes -> Kernel (\w+)(?: nchannels (\d+))?")
_TRANSPORT = re.compile(r"^Channel \d+(?:/\d+)? : \d+\[\w+\] -> \d+\[\w+\](?: \[\w+\])? via (\S+(?: pointer)?)")
_CHANNELS = re.compile(r"(\d+) coll channels, ")
_MATRIX_ROW = re.compile(rf"^\s*({'|'.join(FUNCTIONS)}) \| ([\d ]+)\| ([\d ]+)$")


def read_nccl_log(text: str) -> NcclLog:
    """Parse one rank's file. Lines of several processes must not be mixed."""
    read: dict[str, str] = {}
    invalid: dict[str, str] = {}
    operations: dict[Operation, None] = {}
    transports: set[str] = set()
    enabled: dict[str, frozenset[str]] = {}
    warnings: list[str] = []
    for line in text.splitlines():
        if row := _MATRIX_ROW.match(line):
            enabled[row[1]] = _enabled(row[2], row[3])
            continue
        message = _MESSAGE.search(line)
        if message is None:
            continue
        body = message[2].strip()
        if message[1] == "WARN":
            warnings.append(body)
        if found := _SET.match(body) or _PARSED.match(body):
            read[found[1]] = found[2].strip().removesuffix(".")
        elif found := _INVALID.match(body):
            invalid[found[2]] = found[3]
        elif operation := _operation(body):
            operations[operation] = None
        elif found := _TRANSPORT.match(body):
            transports.add(found[1].removesuffix(" pointer"))
    return NcclLog(
        version=_last(_VERSION, text),
        rank=int(rank) if (rank := _last(_RANK, text)) else None,
        set_by_environment=read,
        invalid=invalid,
        operations=tuple(operations),
        transports=frozenset(transports),
        num_channels=int(channels) if (channels := _last(_CHANNELS, text)) else None,
        enabled=enabled,
        warnings=tuple(warnings),
    )


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    found: list[str] = pattern.findall(text)
    return found[-1] if found else None


def _operation(body: str) -> Operation | None:
    if found := _SYMMETRIC.match(body):
        channels = int(found[4]) if found[4] else None
        return Operation(
            collective=found[1], num_bytes=int(found[2]), algorithm=found[3], protocol=None, channels=channels
        )
    found = _OPERATION.match(body)
    if found is None:
        return None
    return Operation(
        collective=found[1],
        num_bytes=int(found[2]),
        algorithm=_as_in_settings(found[3], ALGORITHMS),
        protocol=_as_in_settings(found[4], PROTOCOLS),
        channels=int(found[6]) - int(found[5]) + 1 if found[6] else None,
    )


def _as_in_settings(word: str, names: tuple[str, ...]) -> str:
    """A name as `grammar` spells it, from how some version prints it: in capitals (`NVLS_TREE`), or as its number."""
    if word.isdigit():
        return names[int(word)] if int(word) < len(names) else word
    folded = word.replace("_", "").lower()
    return next((name for name in names if name.lower() == folded), word)


def _enabled(protocols: str, algorithms: str) -> frozenset[str]:
    """2 means enabled if NCCL thinks it safe (LL128)."""
    pairs = (*zip(PROTOCOLS, protocols.split(), strict=False), *zip(ALGORITHMS, algorithms.split(), strict=False))
    return frozenset(name for name, flag in pairs if flag != "0")


def excerpt(text: bytes) -> bytes:
    """What is kept of a rank's log: the first and the last half of EXCERPT_BYTES."""
    half = EXCERPT_BYTES // 2
    return text if len(text) <= EXCERPT_BYTES else text[:half] + b"\n[... cut ...]\n" + text[-half:]
