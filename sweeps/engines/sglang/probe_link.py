"""The engine's end of the cycle probe: handshakes, commands, cycles. `specsweep_probe` has the protocol."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """By C getenv: NCCL_* and what was asked for."""


class ProbeLink:
    """Talks to the probes of one server through a folder. Commands are for an idle server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._last_id = 0

    def handshakes(self) -> tuple[Handshake, ...]:
        """Those left so far, by rank."""
        documents = [json.loads(path.read_text(encoding="utf-8")) for path in self.folder.glob("handshake-*.json")]
        return tuple(sorted(map(_handshake, documents), key=lambda handshake: handshake.rank))

    def take(
        self, ranks: Iterable[int], *, timeout_s: float, is_gone: Callable[[], bool]
    ) -> tuple[pa.Table, frozenset[str]]:
        """All cycles of all ranks since the last call, in `CYCLE_COLUMNS`, and the states that they ran in.

        Raises ProbeError.
        """
        answers = self.ask(ranks, {"do": "take"}, timeout_s=timeout_s, is_gone=is_gone)
        lost = sum(answer["dropped"] for answer in answers.values())
        if lost:
            raise ProbeError(f"{lost} cycles lost: the block has more than the probe keeps")
        states = frozenset(name for answer in answers.values() for name in answer["states"])
        return pa.concat_tables([_cycles(rank, answer) for rank, answer in sorted(answers.items())]), states

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
    text = path.read_text(encoding="utf-8")
    path.unlink()
    try:
        document: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise ProbeError(f"{path.name} is torn after {len(text)} characters: {error}") from error
    return document


def _handshake(document: Mapping[str, Any]) -> Handshake:
    return Handshake(
        pid=document["pid"],
        rank=document["rank"],
        world_size=document["world_size"],
        sglang=document["sglang"],
        torch=document["torch"],
        device=document["device"],
        timer_kind=document["timer_kind"],
        missing=tuple(document["missing"]),
        warning=document["warning"],
        states={name: StateAccount(**account) for name, account in document["states"].items()},
        communicators={name: CommunicatorAccount(**account) for name, account in document["communicators"].items()},
        environment=document["environment"],
    )


def _cycles(rank: int, answer: Mapping[str, Any]) -> pa.Table:
    columns = answer["cycles"]
    count = len(columns["started_ms"])
    return pa.table(
        {
            **columns,
            "rank": [rank] * count,
            "cycle_index": list(range(count)),
            "timer_kind": [answer["timer_kind"]] * count,
        },
        schema=CYCLE_COLUMNS,
    )
