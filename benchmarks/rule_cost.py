"""What each special case of the search wins: the same sweeps with all rules and without one of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import optuna
from scipy.stats import fisher_exact

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
REFUSED = "pcie-refused"
"""Two NCCL sets that the machine cannot start."""
MEANT_FOR: Mapping[str, tuple[str, ...]] = {
    "first_chain": ("pcie-eagle3", "turin"),
    "untested_topk": ("broken-nccl-topk", "turin"),
    "unlaunched_sets": ("sparse", "slow-first-blocks", "turin"),
    "settling": ("turin", "turin-noise-x4"),
    "bound": ("pcie-eagle3", "turin"),
    "noisy_launches": ("broken-launches",),
    "equivalent_sets": ("pcie-eagle3",),
    "all_reduce_prior": ("turin", "turin-saturating"),
    "widening": ("broken-nccl-topk", "broken-accept-nccl", "broken-verify-steps", "broken-draft-nccl"),
}
"""Landscapes that a rule was made for."""
_CONFIDENCE, _RESAMPLES = 0.99, 4000
"""Of the intervals, over seeds."""
_LEAST_RATIO = 1.001
"""Of medians: less is no difference, whatever the interval."""
_LEVEL = 0.05
"""Of the test of each error."""
_ERRORS = {
    "wrong_certificate": "a wrong certificate",
    "best_pruned": "the best pruned",
    "not_right": "not right at the end",
}


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is kept of one run."""

    right_s: float
    """GPU seconds until right within 1 %; until the end if it never was."""
    ended_s: float
    wrong_certificate: bool
    """Stopped as certain, and more than 1 % below the best."""
    best_pruned: bool
    not_right: bool
    """More than 1 % below the best at the end."""


def landscape_of(name: str) -> Landscape | Replay:
    """By name; the one that is made for the rules alone included."""
    if name != REFUSED:
        return LANDSCAPES[name]
    pcie = LANDSCAPES["pcie-eagle3"]
    assert isinstance(pcie, Landscape)
    sets = """  nvls: {NCCL_ALGO: "allreduce:nvls"}
  collnet: {NCCL_ALGO: "allreduce:collnetdirect"}
"""
    search = pcie.search.replace("threads,", "threads, nvls, collnet,")
    return replace(pcie, name=REFUSED, sets=pcie.sets + sets, search=search)


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
        rule: judged(
            [
                _row(name, found[name, _policy(rule), None], found[name, _policy(rule), rule])
                for name in landscapes_of(rule)
            ]
        )
        for rule in rules
    }


def judged(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The rows of a rule with what they say: it pays if a median or an error gets worse without it."""
    reasons = [
        f"{row['landscape']}: {words} {row[f'{what}_ratio'][0]:.2f} to {row[f'{what}_ratio'][1]:.2f} times without it"
        for row in rows
        for what, words in (("right_s", "seconds until right"), ("ended_s", "seconds until the stop"))
        if row[f"{what}_ratio"][0] > _LEAST_RATIO
    ]
    reasons += [
        f"{row['landscape']}: {words} in {row[error][1]} of {row['seeds']} sweeps without it, {row[error][0]} with it"
        for row in rows
        for error, words in _ERRORS.items()
        if _p_value(row[error], row["seeds"]) < _LEVEL
    ]
    idle = ("landscape", "seeds", "changed")
    kept = [dict(row) if row["changed"] else {name: row[name] for name in idle} for row in rows]
    return {"pays": bool(reasons), "because": reasons, "rows": kept}


def _p_value(counts: Sequence[int], seeds: int) -> float:
    """Fisher's exact test that an error is more frequent without the rule; counts with it and without."""
    with_rule, without = counts
    table = [[without, seeds - without], [with_rule, seeds - with_rule]]
    return float(fisher_exact(table, alternative="greater").pvalue)


def lines(figures: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """For people."""
    for rule, found in figures.items():
        yield f"{rule} {'pays' if found['pays'] else 'does not pay'}: {'; '.join(found['because'])}"
        for row in found["rows"]:
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
        wrong_certificate=run.certified and run.final > 0.01,
        best_pruned=run.best_pruned,
        not_right=run.final > 0.01,
    )


def _row(name: str, with_rule: Sequence[Sweep], without: Sequence[Sweep]) -> dict[str, Any]:
    """One landscape: medians with and without the rule, ratios without / with and their interval over seeds."""
    row: dict[str, Any] = {"landscape": name, "seeds": len(with_rule)}
    row["changed"] = sum(one != other for one, other in zip(with_rule, without, strict=True))
    for what in ("right_s", "ended_s"):
        one, other = (np.array([getattr(each, what) for each in arm]) for arm in (with_rule, without))
        row[f"{what}_with"], row[f"{what}_without"] = float(np.median(one)), float(np.median(other))
        row[f"{what}_ratio"] = _interval(one, other)
    for error in _ERRORS:
        row[error] = [sum(getattr(each, error) for each in arm) for arm in (with_rule, without)]
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
