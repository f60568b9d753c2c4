"""Runs the ranks of one NCCL set as processes of their own, under a deadline: a set that hangs is a result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

WORKER = Path(__file__).with_name("worker.py")
DONE = "done"
Outcome = Literal["ok", "wrong_output", "hang", "crash", "nccl_no_algorithm", "refused"]

_POLL_S = 0.1
_KILL_S = 10.0
_NO_ALGORITHM = "o algorithm/protocol available"  # of NCCL's WARN, whose case differs by version


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlan:
    """What every rank of the table does."""

    python: Sequence[str]
    """Interpreter of the server, with any command that goes before it."""
    world_size: int
    backend: Literal["nccl", "gloo"]
    token_bytes: int
    tokens: Sequence[int]
    calls: int
    warmup: int
    repeats: int
    deadline_s: float
    """From start to the last row, interpreter start-up included."""
    grace_s: float = 5.0
    """How long the others may go on once one rank failed or all rows are there."""
    worker: Path = WORKER


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What the ranks of one set left."""

    outcome: Outcome
    reason: str | None
    rows: tuple[Mapping[str, Any], ...]
    machine: Mapping[str, Any]
    wall_s: float
    survivors: tuple[int, ...] = ()
    """Process ids that SIGKILL did not end in time: their GPUs are wedged."""


def run_ranks(plan: RankPlan, env: Mapping[str, str], folder: Path, *, log_env: str | None = None) -> RankReport:
    """Start the ranks, wait for them, kill what is left by process group, and read what they wrote.

    Args:
        plan: sizes, repeats, interpreter, deadline.
        env: the whole environment of the ranks.
        folder: gets `rankN.log` (output) and `rankN.jsonl` (records); those of an earlier run are removed.
        log_env: variable that gets each rank its own file `folder/rankN.nccl.log` (`NCCL_DEBUG_FILE`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (*folder.glob("rank*"), folder / "store"):
        stale.unlink(missing_ok=True)
    began_s = time.monotonic()
    with ExitStack() as stack:
        ranks: list[subprocess.Popen[bytes]] = []
        stack.callback(lambda: _kill(ranks))
        for rank in range(plan.world_size):
            log = stack.enter_context((folder / f"rank{rank}.log").open("wb"))
            own = {log_env: str(folder / f"rank{rank}.nccl.log")} if log_env else {}
            ranks.append(
                subprocess.Popen(
                    _command(plan, folder, rank),
                    env={**env, **own},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        late = _wait(plan, ranks, folder, ends_s=began_s + plan.deadline_s)
        codes = [process.poll() for process in ranks]
        survivors = _kill(ranks)
    return _report(plan, folder, codes, late=late, survivors=survivors, wall_s=time.monotonic() - began_s)


def _command(plan: RankPlan, folder: Path, rank: int) -> list[str]:
    options = {
        "rank": rank,
        "world-size": plan.world_size,
        "backend": plan.backend,
        "store": folder / "store",
        "out": folder / f"rank{rank}.jsonl",
        "token-bytes": plan.token_bytes,
        "calls": plan.calls,
        "warmup": plan.warmup,
        "repeats": plan.repeats,
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return [*plan.python, str(plan.worker), *flags, "--tokens", *map(str, plan.tokens)]


def _wait(plan: RankPlan, ranks: Sequence[subprocess.Popen[bytes]], folder: Path, *, ends_s: float) -> bool:
    """Until every rank ended, or one failed or all are done and a grace passed. True: the deadline came first."""
    grace_ends_s: float | None = None
    while any(process.poll() is None for process in ranks):
        now_s = time.monotonic()
        if grace_ends_s is not None and now_s >= grace_ends_s:
            return False
        if now_s >= ends_s:
            return True
        failed = any(process.poll() not in (None, 0) for process in ranks)
        if grace_ends_s is None and (failed or all(stage == DONE for stage in _stages(folder, len(ranks)))):
            grace_ends_s = now_s + plan.grace_s
        time.sleep(_POLL_S)
    return False


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


def _report(
    plan: RankPlan,
    folder: Path,
    codes: Sequence[int | None],
    *,
    late: bool,
    survivors: tuple[int, ...],
    wall_s: float,
) -> RankReport:
    records = _records(folder / "rank0.jsonl")
    rows = tuple(record["row"] for record in records if "row" in record)
    machine: Mapping[str, Any] = next((record["machine"] for record in records if "machine" in record), {})
    stages = _stages(folder, plan.world_size)
    outcome, reason = _judge(plan, folder, codes, stages, rows, late=late)
    if survivors:
        reason = f"{reason or 'measured'}; SIGKILL did not end {', '.join(map(str, survivors))}"
    return RankReport(outcome=outcome, reason=reason, rows=rows, machine=machine, wall_s=wall_s, survivors=survivors)


def _judge(
    plan: RankPlan,
    folder: Path,
    codes: Sequence[int | None],
    stages: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    *,
    late: bool,
) -> tuple[Outcome, str | None]:
    if all(stage == DONE for stage in stages):
        wrong = [f"{row['mode']} {row['bytes']} B" for row in rows if row["outcome"] != "ok"]
        if wrong:
            return "wrong_output", f"sum is wrong at {', '.join(wrong)}"
        stuck = (
            "all sizes measured, but the communicator did not close" if any(code is None for code in codes) else None
        )
        return "ok", stuck
    failed = next((rank for rank, code in enumerate(codes) if code not in (None, 0)), None)
    if failed is not None:
        tail = _last_line(folder / f"rank{failed}.log")
        text = "".join(
            (folder / f"rank{rank}.log").read_text(encoding="utf-8", errors="replace")
            for rank in range(plan.world_size)
        )
        kind: Outcome = "nccl_no_algorithm" if _NO_ALGORITHM in text else "crash"
        return kind, f"rank {failed} ended with {codes[failed]} in {stages[failed]}: {tail}"
    where = ", ".join(f"rank {rank} in {stage}" for rank, stage in enumerate(stages) if stage != DONE)
    return ("hang", f"no end after {plan.deadline_s:g} s: {where}") if late else ("crash", f"ended early: {where}")


def _stages(folder: Path, world_size: int) -> list[str]:
    """Each rank's last stage."""
    return [
        next(
            (record["stage"] for record in reversed(_records(folder / f"rank{rank}.jsonl")) if "stage" in record),
            "start",
        )
        for rank in range(world_size)
    ]


def _records(path: Path) -> list[dict[str, Any]]:
    """Complete lines only: a killed rank may leave half of one."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
