"""What a file of somebody else says, whatever its format. A value that a file does not hold is None, never 0."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from sweeps import SpecsweepError

MOST_UNPARSED = 0.1
"""Share of the lines of interest that may be in no known form."""
LEAST, MOST = 1e-9, 1e9
"""Bounds of rates, seconds and milliseconds: numbers beyond them are damage."""
MOST_TOKENS = 1e4
"""Of one cycle."""
MOST_AT_ONCE = 10**6
"""Requests in flight, and other counts."""
CONVENTION = "accept length counts all tokens of a cycle, bonus token included"


class ImportFileError(SpecsweepError, ValueError):
    """A file that does not hold what was looked for, or not in a known form."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignBlock:
    """One reading of throughput: a window of a server's log, or a whole run of a client."""

    concurrency: int
    """Requests in flight."""
    tok_s: float
    decode_s: float
    """Seconds that the reading covers."""
    accept_length: float | None = None
    cycle_ms: float | None = None
    verify_ms: float | None = None

    @property
    def decode_tokens(self) -> int:
        return max(1, round(self.tok_s * self.decode_s))


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyCycle:
    """One line of a patched server: `Target verify: 29.01 ms/cyc (96.9%)`."""

    verify_ms: float
    share: float | None
    """Of the cycle, 0 to 1."""
    unit_ms: float
    """Of the last digit that was printed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A variable that NCCL says it has read, in one rank."""

    rank: int
    name: str
    value: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that a log tells beside its numbers."""

    name: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafting:
    """How a server drafts. `speculates` is None if the file does not tell."""

    speculates: bool | None = None
    num_steps: int | None = None
    eagle_topk: int | None = None
    num_draft_tokens: int | None = None
    drafter: str | None = None

    @property
    def steps(self) -> int | None:
        """0 without speculation, None if the number is not known."""
        return 0 if self.speculates is False else self.num_steps if self.num_steps else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignRun:
    """One launch of a server, or one run of a client against one."""

    origin: str
    """File, and the line if the file holds several."""
    throughput: str
    """What its tok/s are: numbers of different kinds are never put into one folder."""
    drafting: Drafting = field(default_factory=Drafting)
    settings: Mapping[str, str] = field(default_factory=dict)
    """What else tells its configuration from another's."""
    blocks: tuple[ForeignBlock, ...] = ()
    accept_length: float | None = None
    """Over everything that the file knows, windows with prefill included."""
    verify: tuple[VerifyCycle, ...] = ()
    engine_version: str | None = None
    model: str | None = None
    num_gpus: int = 1
    boot_s: Mapping[str, float] = field(default_factory=dict)
    all_reduce: str | None = None
    seen: tuple[Seen, ...] = ()
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduceTime:
    """One size of an all-reduce, timed without a model."""

    num_bytes: int
    us: float
    is_right: bool | None
    """None if the run did not check."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What one file holds."""

    source: str
    format: str
    runs: tuple[ForeignRun, ...] = ()
    all_reduces: tuple[AllReduceTime, ...] = ()
    num_ranks: int | None = None
    """Of the all-reduces."""
    understood: int = 0
    """Lines (or rows) of interest that were read."""
    unparsed: int = 0
    """Lines of interest in no known form."""
    notes: tuple[str, ...] = ()


def number(value: object) -> float | None:
    """A finite number of a JSON value; None for anything else, and for numbers that nothing can be."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def positive(value: object) -> float | None:
    """As `number`, but None at 0 and below (a rate or time of 0 is not known) and beyond what any run can have."""
    found = number(value)
    return found if found is not None and LEAST <= found <= MOST else None


def length(value: object) -> float | None:
    """An accept length: None below 1 and beyond MOST_TOKENS, which no cycle gives."""
    found = number(value)
    return found if found is not None and 1.0 <= found <= MOST_TOKENS else None


def count(value: object) -> int | None:
    """A whole number from 0 up; None for anything else."""
    found = number(value)
    return int(found) if found is not None and found >= 0 and found == int(found) and found <= MOST_AT_ONCE else None


def check_share(unparsed: int, total: int, *, what: str) -> None:
    """Raise ImportFileError if too many of `total` lines are in no known form, or if there is none."""
    if not total:
        raise ImportFileError(f"no {what}")
    if unparsed > MOST_UNPARSED * total:
        raise ImportFileError(f"{unparsed} of {total} {what} are in no known form")
