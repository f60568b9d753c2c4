"""Runs one group of ranks, one process a GPU, that times several communicators; a deadline ends a group that hangs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ray_jobs.allreduce.journal import RankJournal

WORKER = Path(__file__).with_name("worker.py")
DONE = "done"
Outcome = Literal["ok", "wrong_output", "hang", "crash", "nccl_no_algorithm", "nccl_refused", "refused"]

_POLL_S = 0.1
_KILL_S = 10.0
_SWEEP = 'cat; rm -rf -- "$1" || { sleep 1; rm -rf -- "$1"; }'
"""Ends `cat` when the pipe closes, that is when its owner removes the folder or dies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlan:
    """What every rank of the table does."""

    python: Sequence[str]
    """Interpreter of the server, with any command that goes before it."""
    world_size: int
    backend: Literal["nccl", "gloo"]
    token_bytes: int
    tokens: Sequence[int]
    modes: Sequence[Literal["eager", "graph"]] = ("graph",)
    calls: int = 20
    """All-reduces per repeat."""
    warmup: int = 5
    """Untimed repeats before those of each round."""
    repeats: int = 10
    """Per round."""
    rounds: int = 10
    deadline_s: float = 30.0
    """For one communicator to be made, or timed in one round."""
    start_s: float = 120.0
    """Until the first communicator is begun: start of the interpreters, import of torch."""
    grace_s: float = 5.0
    """How long the other ranks may go on once one rank failed, or all are done."""
    worker: Path = WORKER


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One communicator to make and time."""

    nccl_set: str
    copy: int
    """Number of this communicator among those of its set."""
    env: Mapping[str, str]
    """Variables put into the environment while the communicator is made."""
    logs: Path
    """Folder for NCCL's own log, a file per rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupReport:
    """What one group of ranks left. Members are numbered in the order they were given."""

    journals: Sequence[RankJournal]
    ended: Literal["done", "hang", "crash"]
    reason: str | None
    blamed: int | None
    """The member that the slowest, or the crashed, rank was busy with; None if it was busy with none."""
    wall_s: float
    survivors: tuple[int, ...] = ()
    """Process ids that SIGKILL did not end in time: their GPUs are wedged."""


def run_ranks(
    plan: RankPlan, members: Sequence[Member], env: Mapping[str, str], folder: Path, *, first_round: int = 0
) -> GroupReport:
    """Start the ranks, wait for them, and kill what is left by process group.

    Copies of NCCL are in a temporary folder of this node, which is removed at the end, and also if this process dies.

    Args:
        plan: sizes, rounds, interpreter, deadlines.
        members: the communicators.
        env: the whole environment of the ranks.
        folder: gets `rankN.log` (output) and `rankN.jsonl` (records); those of an earlier run are removed.
        first_round: number of the first round; the order of the members turns with each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (*folder.glob("rank*"), folder / "store"):
        stale.unlink(missing_ok=True)
    _write_members(members, folder / "members.json")
    began_s = time.monotonic()
    journals = [RankJournal(folder / f"rank{rank}.jsonl", now_s=began_s) for rank in range(plan.world_size)]
    with ExitStack() as stack:
        scratch = stack.enter_context(_scratch_folder())
        ranks: list[subprocess.Popen[bytes]] = []
        stack.callback(lambda: _kill(ranks))
        for rank in range(plan.world_size):
            log = stack.enter_context((folder / f"rank{rank}.log").open("wb"))
            command = _command(plan, folder, rank=rank, scratch=scratch, first_round=first_round)
            pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            ranks.append(subprocess.Popen(command, env=env, start_new_session=True, **pipes))
        is_late = _wait(plan, ranks, journals)
        codes = [process.poll() for process in ranks]
        survivors = _kill(ranks)
    for journal in journals:
        journal.read(time.monotonic())
    ended, reason, blamed = _judge(plan, folder, codes, journals, is_late=is_late)
    if survivors:
        reason = f"{reason or 'measured'}; SIGKILL did not end {', '.join(map(str, survivors))}"
    wall_s = time.monotonic() - began_s
    return GroupReport(journals=journals, ended=ended, reason=reason, blamed=blamed, wall_s=wall_s, survivors=survivors)


@contextlib.contextmanager
def _scratch_folder() -> Iterator[Path]:
    """A temporary folder that a small process of its own session removes, even if this process is killed."""
    folder = Path(tempfile.mkdtemp(prefix="specsweep-nccl-"))
    command = ["sh", "-c", _SWEEP, "sh", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True) as sweeper:
        assert sweeper.stdin is not None
        try:
            yield folder
        finally:
            sweeper.stdin.close()


def _write_members(members: Sequence[Member], path: Path) -> None:
    for member in members:
        member.logs.mkdir(parents=True, exist_ok=True)
        for stale in member.logs.glob("rank*.log"):
            stale.unlink()
    named = [
        {"set": member.nccl_set, "copy": member.copy, "env": dict(member.env), "logs": str(member.logs.resolve())}
        for member in members
    ]
    path.write_text(json.dumps(named, indent=1) + "\n", encoding="utf-8")


def _command(plan: RankPlan, folder: Path, *, rank: int, scratch: Path, first_round: int) -> list[str]:
    options = {
        "owner": f"{os.getpid()}@{Path('/proc/self/ns/pid').readlink()}",
        "rank": rank,
        "world-size": plan.world_size,
        "backend": plan.backend,
        "store": folder / "store",
        "out": folder / f"rank{rank}.jsonl",
        "members": folder / "members.json",
        "scratch": scratch,
        "token-bytes": plan.token_bytes,
        "calls": plan.calls,
        "warmup": plan.warmup,
        "repeats": plan.repeats,
        "rounds": plan.rounds,
        "first-round": first_round,
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    modes = ["eager"] if plan.backend == "gloo" else list(plan.modes)
    return [*plan.python, str(plan.worker), *flags, "--modes", *modes, "--tokens", *map(str, plan.tokens)]


def _wait(plan: RankPlan, ranks: Sequence[subprocess.Popen[bytes]], journals: Sequence[RankJournal]) -> bool:
    """Until every rank ended, or one failed or all are done and a grace passed. True: a deadline came first."""
    grace_ends_s: float | None = None
    while any(process.poll() is None for process in ranks):
        now_s = time.monotonic()
        for journal in journals:
            journal.read(now_s)
        if grace_ends_s is not None:
            if now_s >= grace_ends_s:
                return False
        elif any(process.poll() not in (None, 0) for process in ranks) or _all_done(journals):
            grace_ends_s = now_s + plan.grace_s
        elif (slowest := _slowest(journals)).stage.name != DONE:
            limit_s = plan.start_s if slowest.stage.step == 0 else plan.deadline_s
            if now_s - slowest.since_s > limit_s:
                return True
        time.sleep(_POLL_S)
    return False


def _all_done(journals: Sequence[RankJournal]) -> bool:
    return all(journal.stage.name == DONE for journal in journals)


def _slowest(journals: Sequence[RankJournal]) -> RankJournal:
    return min(journals, key=lambda journal: journal.stage.step)


def _kill(ranks: Sequence[subprocess.Popen[bytes]]) -> tuple[int, ...]:
    """SIGKILL each rank's process group (a rank stuck in a collective heeds nothing milder); the pids that survive."""
    live = [process for process in ranks if process.poll() is None]
    for process in live:
        os.killpg(process.pid, signal.SIGKILL)
    survivors = []
    ends_s = time.monotonic() + _KILL_S
    for process in live:
        try:
            process.wait(max(0.0, ends_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            survivors.append(process.pid)
    return tuple(survivors)


def _judge(
    plan: RankPlan,
    folder: Path,
    codes: Sequence[int | None],
    journals: Sequence[RankJournal],
    *,
    is_late: bool,
) -> tuple[Literal["done", "hang", "crash"], str | None, int | None]:
    """How the group ended, in words, and which member is to blame."""
    if _all_done(journals):
        stuck = "all rounds measured, but the ranks did not end" if any(code is None for code in codes) else None
        return "done", stuck, None
    slowest = _slowest(journals)
    places = [f"rank {rank} in {journal.stage.name}" for rank, journal in enumerate(journals)]
    where = ", ".join(
        place for place, journal in zip(places, journals, strict=True) if journal.stage.step == slowest.stage.step
    )
    if is_late:
        limit_s = plan.start_s if slowest.stage.step == 0 else plan.deadline_s
        return "hang", f"no end after {limit_s:g} s: {where}", slowest.stage.member
    failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
    if failed:
        rank = min(failed, key=lambda each: journals[each].stage.step)
        tail = _last_line(folder / f"rank{rank}.log")
        stage = journals[rank].stage
        return "crash", f"rank {rank} ended with {codes[rank]} in {stage.name}: {tail}", stage.member
    return "crash", f"ended early: {where}", slowest.stage.member


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
