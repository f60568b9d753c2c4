"""Measures all communicators in one group of ranks; after a hang or a crash, the other sets in a fresh group."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ray_jobs.allreduce.ranks import GroupReport, Member, Outcome, RankPlan, run_ranks
from sweeps.nccl.log import read_nccl_log

_NO_ALGORITHM = "o algorithm/protocol available"  # of NCCL's WARN, whose case differs by version


@dataclass(frozen=True, kw_only=True, slots=True)
class CellTimes:
    """Times of one communicator at one size and mode."""

    mode: str
    tokens: int
    timer_kind: str
    samples_us: Mapping[int, Sequence[float]]
    """Round -> microseconds per all-reduce, one value per repeat."""
    is_right: bool
    """All ranks got the exact sum, before and after timing."""

    @property
    def round_us(self) -> dict[int, float]:
        """Median of each round."""
        return {number: float(np.median(samples)) for number, samples in sorted(self.samples_us.items())}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberResult:
    """What one communicator gave."""

    member: Member
    outcome: Outcome
    reason: str | None
    cells: tuple[CellTimes, ...]
    init_s: float | None = None
    """Seconds to make the communicator, reduce every size once, and capture."""
    communicator_mib: float | None = None
    """GPU memory that this took on rank 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Results of all groups, and the machine they ran on."""

    results: tuple[MemberResult, ...]
    machine: Mapping[str, Any]
    wall_s: float


def measure_members(plan: RankPlan, members: Sequence[Member], env: Mapping[str, str], folder: Path) -> Measured:
    """Time `members` in rounds.

    Ranks that hang or crash cannot be trusted. The set that they were busy with has failed; the other sets are measured
    in a fresh group. Their communicators there are new ones, so they get further copy numbers if the first ones gave
    figures, and rounds have further numbers: figures of one round are of one group.
    """
    results: list[MemberResult] = []
    machine: dict[str, Any] = {}
    pending, wall_s = list(members), 0.0
    for number in itertools.count():
        if not pending:
            break
        report = run_ranks(plan, pending, env, folder / f"group{number}", first_round=number * plan.rounds)
        wall_s += report.wall_s
        machine.update(next(report.journals[0].of("machine"), {}))
        found = _results(plan, pending, report)
        if report.ended == "done":
            results += found
            break
        culprit = None if report.blamed is None else pending[report.blamed].nccl_set
        told = [result for result in found if result.cells or result.outcome != "ok"]
        others = [result.member for result in found if result.outcome == "ok" and result.member.nccl_set != culprit]
        if culprit is None or report.survivors:
            results += [*told, *(_not_measured(member, report) for member in others)]
            break
        results += told
        pending = _renumbered(others, results)
    return Measured(results=tuple(results), machine=machine, wall_s=wall_s)


def _not_measured(member: Member, report: GroupReport) -> MemberResult:
    """A member that nothing can be said of: the ranks did not start, or they cannot be ended."""
    outcome: Outcome = "refused" if report.survivors else "hang" if report.ended == "hang" else "crash"
    return MemberResult(member=member, outcome=outcome, reason=report.reason, cells=())


def _renumbered(members: Sequence[Member], results: Sequence[MemberResult]) -> list[Member]:
    """With copy numbers that no earlier communicator has."""
    used = {(result.member.nccl_set, result.member.copy) for result in results}
    renumbered = []
    for member in members:
        copy = next(each for each in itertools.count(member.copy) if (member.nccl_set, each) not in used)
        used.add((member.nccl_set, copy))
        renumbered.append(replace(member, copy=copy, logs=member.logs.with_name(f"copy{copy}")))
    return renumbered


def _results(plan: RankPlan, members: Sequence[Member], report: GroupReport) -> list[MemberResult]:
    ready = {record["member"]: record for record in report.journals[0].of("ready")}
    failed: dict[int, str] = {}
    wrong = set()
    for journal in report.journals:
        failed.update({record["member"]: record["reason"] for record in journal.of("failed")})
        wrong |= {(record["member"], record["mode"], record["tokens"]) for record in journal.of("wrong")}
    times: dict[tuple[int, str, int], dict[int, Sequence[float]]] = {}
    kinds: dict[tuple[int, str, int], str] = {}
    for record in report.journals[0].of("cell"):
        place = record["member"], record["mode"], record["tokens"]
        times.setdefault(place, {})[record["round"]] = record["samples_us"]
        kinds[place] = record["timer_kind"]
    results = []
    for number, member in enumerate(members):
        cells = tuple(
            CellTimes(
                mode=mode, tokens=tokens, timer_kind=kinds[place], samples_us=by_round, is_right=place not in wrong
            )
            for place, by_round in times.items()
            for owner, mode, tokens in [place]
            if owner == number
        )
        outcome, reason = _outcome(plan, member, number, report, failed, cells)
        seen = ready.get(number, {})
        results.append(
            MemberResult(
                member=member,
                outcome=outcome,
                reason=reason,
                cells=cells,
                init_s=seen.get("init_s"),
                communicator_mib=seen.get("communicator_mib"),
            )
        )
    return results


def _outcome(
    plan: RankPlan,
    member: Member,
    number: int,
    report: GroupReport,
    failed: Mapping[int, str],
    cells: Sequence[CellTimes],
) -> tuple[Outcome, str | None]:
    if number in failed or number == report.blamed:
        warnings = _warnings(plan, member)
        words = failed.get(number) or report.reason or ""
        reason = f"{words}: {warnings[-1]}" if warnings else words
        if any(_NO_ALGORITHM in line for line in warnings):
            return "nccl_no_algorithm", reason
        if number in failed:
            return "nccl_refused", reason
        return ("hang" if report.ended == "hang" else "crash"), reason
    wrong = [f"{cell.mode} {cell.tokens * plan.token_bytes} B" for cell in cells if not cell.is_right]
    if wrong:
        return "wrong_output", f"sum is wrong at {', '.join(wrong)}"
    return "ok", report.reason if report.ended == "done" else None


def _warnings(plan: RankPlan, member: Member) -> list[str]:
    """NCCL's own words about this communicator, of all ranks."""
    paths = [member.logs / f"rank{rank}.log" for rank in range(plan.world_size)]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths if path.is_file()]
    return [line for text in texts for line in read_nccl_log(text).warnings]
