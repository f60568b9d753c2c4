"""The rows of an all-reduce table by set, and whether NCCL chose for a set as it does by default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

DEFAULT_SET = "default"
DEFAULT_AGAIN = "default (again)"
"""In tables of schema 1: the default's variables in a second launch."""
ALL_REDUCES_PER_FORWARD = 122
"""Two per layer, attention and MLP, in 61 layers: Kimi-K2.5 and DeepSeek-V3 under tensor parallelism."""
SHOWN_BY_CHOICE = frozenset(
    {
        "NCCL_ALGO",
        "NCCL_PROTO",
        "NCCL_P2P_LEVEL",
        "NCCL_P2P_DISABLE",
        "NCCL_SHM_DISABLE",
        "NCCL_MIN_NCHANNELS",
        "NCCL_MAX_NCHANNELS",
        "NCCL_MIN_CTAS",
        "NCCL_MAX_CTAS",
    }
)
"""Variables that do nothing but change algorithm, protocol, channels or transport: an equal choice is an equal
communicator. Other variables (threads, buffers) may act behind an equal choice."""

Verdict = Literal["faster", "slower", "faster and slower", "same", "failed", "no default to compare with"]
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class SetVerdict:
    """One set against `default`, over all sizes of one mode."""

    name: str
    verdict: Verdict
    detail: str
    gain_us: Mapping[int, float]
    """Tokens -> microseconds that this set is faster than the default, for differences that are no noise."""

    @property
    def could_matter(self) -> bool:
        return bool(self.gain_us)


def verdict_of(gain_us: Mapping[int, float]) -> Verdict:
    """The word for gains at all sizes."""
    faster, slower = any(gain > 0 for gain in gain_us.values()), any(gain < 0 for gain in gain_us.values())
    return "faster and slower" if faster and slower else "faster" if faster else "slower" if slower else "same"


def failure_of(name: str, rows: Sequence[Row]) -> SetVerdict | None:
    """A set with any row that is not `ok` has failed."""
    bad = next((row for row in rows if row["set"] == name and row["outcome"] != "ok"), None)
    if bad is None:
        return None
    return SetVerdict(name=name, verdict="failed", detail=f"{bad['outcome']}: {bad['reason']}", gain_us={})


def names_of(rows: Sequence[Row]) -> list[str]:
    """Sets in the order of the table."""
    return list(dict.fromkeys(row["set"] for row in rows))


def mode_of(rows: Sequence[Row]) -> str:
    """`graph` if it was measured, else `eager`."""
    return "graph" if any(row.get("mode") == "graph" for row in rows) else "eager"


def seen_choice(row: Row) -> tuple[Any, ...] | None:
    """Algorithm, protocol, channels, transports; None if NCCL's log does not tell."""
    if not row.get("algorithm"):
        return None
    return row["algorithm"], row["protocol"], row["channels"], frozenset(row.get("transports") or ())


def is_shown_by_choice(row: Row) -> bool:
    """Whether an equal choice leaves nothing that the set could still change."""
    read = set(dict(row["env"])) - set(row.get("unread") or ())
    return read <= SHOWN_BY_CHOICE
