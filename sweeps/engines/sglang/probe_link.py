"""The engine's end of the cycle probe: handshakes, commands, cycles. `specsweep_probe` has the protocol."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from sweeps.results.tables import CYCLE_COLUMNS

_POLL_S = 0.002


class ProbeError(Exception):
    """The probe is absent, does not answer, or answers with an error."""


class ProbeGoneError(ProbeError):
    """Nobody reads a rank's commands: its process has ended, or is about to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateAccount:
    """What one state took in one rank, or why it is not there."""

    seconds: float
    memory_mib: float
    error: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunicatorAccount:
    """What the communicator of one NCCL set took in one rank, or why it is not there."""

    seconds: float
    memory_mib: float | None
    error: str | None
    environment: Mapping[str, str]
    """NCCL_* by C getenv while it was made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Handshake:
    """What one rank's probe said of itself."""

    pid: int
    rank: int
    world_size: int
    sglang: str
    torch: str
    device: str
    timer_kind: str
    missing: tuple[str, ...]
    """Roles whose call is not wrapped."""
    warning: str | None
    states: Mapping[str, StateAccount]
    """Every planned state of the server; {} if it holds one alone."""
    communicators: Mapping[str, CommunicatorAccount]
    """NCCL set -> what became of its communicator in this rank."""
    environment: Mapping[str, str]
    """By C getenv: what acts on communication (`NCCL_*` among it) and what was asked for."""
    niceness: int | None = None
    """Of the rank's process; None if its probe does not tell."""
    nccl: str | None = None
    """Version of the library that torch uses; None without it."""


class ProbeLink:
    """Talks to the probes of one server through a folder. Commands are for an idle server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._last_id = 0

    def handshakes(self) -> tuple[Handshake, ...]:
        """Those left so far, by rank. Raises ProbeError for one that is torn or of another form."""
        found = [_handshake(path.name, _document(path)) for path in self.folder.glob("handshake-*.json")]
        return tuple(sorted(found, key=lambda handshake: handshake.rank))

    def take(
        self, ranks: Iterable[int], *, timeout_s: float, is_gone: Callable[[], bool]
    ) -> tuple[pa.Table, frozenset[str]]:
        """All cycles of all ranks since the last call, in `CYCLE_COLUMNS`, and the states that they ran in.

        Raises ProbeError.
        """
        answers = self.ask(ranks, {"do": "take"}, timeout_s=timeout_s, is_gone=is_gone)
        taken = [_Taken.read(rank, answer) for rank, answer in sorted(answers.items())]
        lost = sum(each.dropped for each in taken)
        if lost:
            raise ProbeError(f"{lost} cycles lost: the block has more than the probe keeps")
        states = frozenset(name for each in taken for name in each.states)
        return pa.concat_tables([each.cycles for each in taken]), states

    def ask(
        self, ranks: Iterable[int], command: Mapping[str, Any], *, timeout_s: float, is_gone: Callable[[], bool]
    ) -> dict[int, dict[str, Any]]:
        """Give every rank one command; rank -> answer once all have answered. Raises ProbeError."""
        self._last_id += 1
        ranks = tuple(ranks)
        line = json.dumps({"id": self._last_id, **command}) + "\n"
        for rank in ranks:
            self._send(rank, line)
        deadline = time.monotonic() + timeout_s
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < len(ranks):
            for rank in ranks:
                path = self.folder / f"answer-{rank}-{self._last_id}.json"
                if rank not in answers and path.exists():
                    answers[rank] = _answer(path)
            if is_gone() or time.monotonic() > deadline:
                silent = sorted(set(ranks) - set(answers))
                raise ProbeError(f"no answer to {command['do']!r} from ranks {silent} within {timeout_s:g} s")
            time.sleep(_POLL_S)
        for rank, answer in answers.items():
            if "error" in answer:
                raise ProbeError(f"rank {rank}: {answer['error']}")
        return answers

    def _send(self, rank: int, line: str) -> None:
        try:
            descriptor = os.open(self.folder / f"commands-{rank}", os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno not in (errno.ENXIO, errno.ENOENT):
                raise
            raise ProbeGoneError(f"rank {rank}: its probe does not listen") from error
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


def _answer(path: Path) -> dict[str, Any]:
    document = _document(path)
    path.unlink()
    return document


def _document(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ProbeError(f"{path.name} is torn after {len(content)} characters: {error}") from error
    if not isinstance(document, dict):
        raise ProbeError(f"{path.name}: wanted an object, got {str(document)[:60]!r}")
    return document


def _handshake(name: str, document: Mapping[str, Any]) -> Handshake:
    try:
        states = {each: StateAccount(**account) for each, account in document["states"].items()}
        made = {each: CommunicatorAccount(**account) for each, account in document["communicators"].items()}
        handshake = Handshake(
            **{field: document[field] for field in _PLAIN_FIELDS},
            missing=tuple(document["missing"]),
            states=states,
            communicators=made,
            niceness=_optional(document, "niceness", int),
            nccl=_optional(document, "nccl", str),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ProbeError(f"{name}: wanted a handshake, but {_problem(error)}") from error
    wrong = [field for field, kind in _PLAIN_FIELDS.items() if not isinstance(getattr(handshake, field), kind)]
    if wrong or not all(isinstance(value, str) for value in handshake.environment.values()):
        raise ProbeError(f"{name}: {', '.join(wrong) or 'environment'} is of another type than a handshake's")
    return handshake


T = TypeVar("T")


def _optional(document: Mapping[str, Any], field: str, kind: type[T]) -> T | None:
    value = document.get(field)
    return value if isinstance(value, kind) else None


_PLAIN_FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "pid": int,
    "rank": int,
    "world_size": int,
    "sglang": str,
    "torch": str,
    "device": str,
    "timer_kind": str,
    "warning": (str, type(None)),
    "environment": dict,
}
"""Fields of a handshake that are taken as they are, and their types."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Taken:
    """One rank's answer to `take`."""

    dropped: int
    states: tuple[str, ...]
    cycles: pa.Table

    @classmethod
    def read(cls, rank: int, answer: Mapping[str, Any]) -> _Taken:
        """Raises ProbeError for an answer of another form."""
        try:
            columns = answer["cycles"]
            count = len(columns["started_ms"])
            cycles = pa.table(
                {
                    **columns,
                    "rank": [rank] * count,
                    "cycle_index": list(range(count)),
                    "timer_kind": [answer["timer_kind"]] * count,
                },
                schema=CYCLE_COLUMNS,
            )
            empty = [field.name for field in CYCLE_COLUMNS if not field.nullable and cycles[field.name].null_count]
            if empty:
                raise ProbeError(f"rank {rank}: {', '.join(empty)} cannot be null in a cycle")
            return cls(dropped=int(answer["dropped"]), states=tuple(map(str, answer["states"])), cycles=cycles)
        except (KeyError, TypeError, ValueError, OverflowError, pa.ArrowException) as error:
            raise ProbeError(f"rank {rank}: wanted its cycles, but {_problem(error)}") from error


def _problem(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else (str(error).splitlines() or ["it is of no use"])[0]
