"""What each special case of the search wins: the same sweeps with all rules and without one of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import optuna

from benchmarks.landscapes import LANDSCAPES, Landscape, Replay
from benchmarks.policies import POLICIES, Run, run_policy
from sweeps.search.cycle_model.rules import Rules

COMMON = (
    "founding",
    "h200-48",
    "h200-sets",
    "h200-x2-restless",
    "h200-replay",
    "h200-replay-drafting",
    "h200-replay-pinned",
    "h200-replay-nccl",
)
"""Every rule is tried here: the founding case, the H200 machines and what was recorded."""
REFUSED = "pcie-nvls-refused"
"""One NCCL set that the machine cannot start."""
MEANT_FOR: Mapping[str, tuple[str, ...]] = {
    "first_chain": ("pcie-eagle3", "turin"),
    "prefer_default_nccl": ("pcie-eagle3", "turin"),
    "untested_topk": ("broken-nccl-topk", "turin"),
    "settling": ("turin", "turin-noise-x4"),
    "gain_weight": ("turin", "turin-saturating"),
    "failure_risk": (REFUSED, "pcie-eagle3"),
    "bound": ("pcie-eagle3", "turin"),
    "paired_test": ("broken-launches", "turin"),
    "noisy_launches": ("broken-launches",),
    "equivalent_sets": ("pcie-eagle3",),
    "communication_bound": ("pcie-eagle3", "turin"),
    "all_reduce_prior": ("turin", "turin-saturating"),
    "widening": ("broken-nccl-topk", "broken-accept-nccl", "broken-verify-steps", "broken-draft-nccl"),
    "student_t": ("turin", "turin-noise-x4"),
    "shrinks": ("turin", "broken-nccl-topk"),
}
"""Landscapes that a rule was made for."""
_CONFIDENCE, _RESAMPLES = 0.99, 4000


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is kept of one run."""

    right_s: float
    """GPU seconds until right within 1 %; until the end if it never was."""
    ended_s: float
    is_right: bool
    """Within 1 % of the best at the end."""
    wrong_certificate: bool
    """Stopped as certain, and more than 1 % below the best."""
    best_pruned: bool


def landscape_of(name: str) -> Landscape | Replay:
    """By name; the one that is made for the rules alone included."""
    if name != REFUSED:
        return LANDSCAPES[name]
    pcie = LANDSCAPES["pcie-eagle3"]
    assert isinstance(pcie, Landscape)
    search = pcie.search.replace("threads,", "threads, nvls,")
    return replace(pcie, name=REFUSED, sets=pcie.sets + "  nvls: {NCCL_NVLS_ENABLE: 1}\n", search=search)


def landscapes_of(rule: str) -> tuple[str, ...]:
    """Names of the landscapes that a rule is tried on, those that it was made for first."""
    return (*MEANT_FOR[rule], *COMMON)


def run_once(job: tuple[str, str, str | None, int]) -> Sweep:
    """One sweep: landscape, policy, the rule that is off (None: all on), seed."""
    name, policy, off, seed = job
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    rules = Rules() if off is None else Rules().without(off)
    run = run_policy(landscape_of(name), POLICIES[policy], seed=seed, switch_in_place=True, rules=rules)
    return _kept(run)


def measure(rules: Sequence[str], seeds: int, *, workers: int = 1) -> dict[str, Any]:
    """Figures of each rule: rows by landscape."""
    arms = {
        (name, policy, off)
        for rule in rules
        for name in landscapes_of(rule)
        for policy in [_policy(rule)]
        for off in (None, rule)
    }
    ordered = sorted(arms, key=lambda arm: (arm[0], arm[1], arm[2] or ""))
    jobs = [(*arm, seed) for arm in ordered for seed in range(seeds)]
    sweeps = list(_spread(jobs, workers))
    found = {arm: sweeps[place * seeds : (place + 1) * seeds] for place, arm in enumerate(ordered)}
    return {
        rule: [
            _row(name, found[name, _policy(rule), None], found[name, _policy(rule), rule])
            for name in landscapes_of(rule)
        ]
        for rule in rules
    }


def lines(figures: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """For people."""
    for rule, rows in figures.items():
        yield f"without {rule}: "
        for row in rows:
            yield "  " + ", ".join(f"{name} {_shown(value)}" for name, value in row.items())


def _policy(rule: str) -> str:
    return "cycle_model+table" if rule == "all_reduce_prior" else "cycle_model"


def _spread(jobs: Iterable[tuple[str, str, str | None, int]], workers: int) -> Iterator[Sweep]:
    if workers == 1:
        yield from map(run_once, jobs)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(run_once, jobs, chunksize=5)


def _kept(run: Run) -> Sweep:
    right_s = run.within_s()
    return Sweep(
        right_s=right_s if math.isfinite(right_s) else run.ended_s,
        ended_s=run.ended_s,
        is_right=run.final <= 0.01,
        wrong_certificate=run.certified and run.final > 0.01,
        best_pruned=run.best_pruned,
    )


def _row(name: str, with_rule: Sequence[Sweep], without: Sequence[Sweep]) -> dict[str, Any]:
    """One landscape: medians with and without the rule, ratios without / with and their interval over seeds."""
    row: dict[str, Any] = {"landscape": name, "seeds": len(with_rule)}
    row["changed"] = sum(one != other for one, other in zip(with_rule, without, strict=True))
    for what in ("right_s", "ended_s"):
        one, other = (np.array([getattr(each, what) for each in arm]) for arm in (with_rule, without))
        row[f"{what}_with"], row[f"{what}_without"] = float(np.median(one)), float(np.median(other))
        row[f"{what}_ratio"] = _interval(one, other)
    for error in ("wrong_certificate", "best_pruned"):
        row[error] = [sum(getattr(each, error) for each in arm) for arm in (with_rule, without)]
    row["not_right"] = [sum(not each.is_right for each in arm) for arm in (with_rule, without)]
    return row


def _interval(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> list[float]:
    """Of median(other) / median(one): resampled over seeds, both arms with the same ones."""
    picks = np.random.default_rng(0).integers(0, one.size, (_RESAMPLES, one.size))
    ratios = np.median(other[picks], axis=1) / np.median(one[picks], axis=1)
    tail = (1.0 - _CONFIDENCE) / 2.0
    return [float(np.quantile(ratios, share)) for share in (tail, 1.0 - tail)]


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "/".join(map(_shown, value)) if isinstance(value, list) else str(value)
