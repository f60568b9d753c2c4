"""What search policies cost until they are right: GPU seconds on the virtual clock, no Ray, simulated machines.

    python -m benchmarks.search_cost [--short] [--json] [--seeds N] [--landscapes NAME,...]

Every policy is driven by the `SweepStudy` of a real sweep, with the same blocks and budget, with switch in place and
without. The exhaustive grid is charged in full: it cannot know before its end that it is right.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import optuna

from benchmarks.landscapes import LANDSCAPES, Landscape
from benchmarks.policies import POLICIES, Run, blocks_s, launch_s, run_policy, truth
from benchmarks.record import record
from sweeps.engines.simulated import SimulatedEngine
from sweeps.space import Configuration, Space

OURS = "cycle_model"
SHORT = ("pcie-eagle3", "h200-48", "broken-accept-nccl")
TARGETS = {
    "grid_over_ours": 30.0,
    "grid_over_ours_at_48": 6.0,
    "best_other_over_ours": 3.0,
    "best_other_over_ours_where_broken": 1 / 1.2,
    "ours_over_lower_bound_founding": 3.5,
    "certified_within_1_percent": 0.95,
    "certified_over_2_percent": 0.01,
    "best_pruned": 0.01,
    "decision_ms_at_2000": 50.0,
}
_RECORD_EVERY = 5

Results = dict[tuple[str, str, bool], list[Run]]


def available() -> tuple[str, ...]:
    """Policies that can run here: the Gaussian process needs torch."""
    return tuple(name for name in POLICIES if name != "gp" or importlib.util.find_spec("torch") is not None)


def run_seed(names: Iterable[str], policies: Iterable[str], seed: int) -> dict[tuple[str, str, bool], Run]:
    """One sweep of every landscape, policy and arm."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return {
        (name, policy, switch): run_policy(LANDSCAPES[name], POLICIES[policy], seed=seed, switch_in_place=switch)
        for name in names
        for policy in policies
        for switch in (True, False)
    }


def gather(names: Sequence[str], policies: Sequence[str], seeds: int, *, workers: int = 1) -> Iterator[Results]:
    """The results so far, after each seed; a seed is one process's work."""
    results: Results = {}
    with ProcessPoolExecutor(workers) if workers > 1 else nullcontext() as pool:
        spread = pool.map if pool is not None else map
        for runs in spread(partial(run_seed, names, policies), range(seeds)):
            for key, run in runs.items():
                results.setdefault(key, []).append(run)
            yield results


def summarise(names: Iterable[str], policies: Sequence[str], results: Results) -> dict[str, Any]:
    """The figures of every landscape, and what they come to."""
    landscapes = {name: _landscape(LANDSCAPES[name], policies, results) for name in names}
    certified = [
        run
        for (name, policy, _), runs in results.items()
        if policy == OURS and LANDSCAPES[name].holds
        for run in runs
        if run.certified
    ]
    ours = [run for (_, policy, _), runs in results.items() if policy == OURS for run in runs]
    return {
        "engine": "simulated",
        "seeds": min(len(runs) for runs in results.values()),
        "not_run": [name for name in POLICIES if name not in policies],
        "landscapes": landscapes,
        "certificate_where_assumptions_hold": _certificate(certified),
        "certificate_everywhere": _certificate([run for run in ours if run.certified]),
        "best_pruned": _share(run.best_pruned for run in ours),
        "targets": TARGETS,
    }


def _landscape(landscape: Landscape, policies: Sequence[str], results: Results) -> dict[str, Any]:
    space = Space(landscape.spec)
    values = truth(landscape, space, SimulatedEngine(landscape.spec, profile=landscape.profile))
    best = max(values, key=lambda member: values[member])
    bound_s = launch_s(landscape, best) + launch_s(landscape, space.control)
    grid_s = sum(launch_s(landscape, member) for member in values)
    arms = {
        arm: {name: _policy(results[landscape.name, name, switch]) for name in policies}
        for arm, switch in (("switch_in_place", True), ("relaunch", False))
    }
    ours_s = arms["switch_in_place"][OURS]["median_s"]
    others = [arms["switch_in_place"][name]["median_s"] for name in policies if name != OURS]
    best_other_s = min((each for each in others if each is not None), default=None)
    return {
        "assumptions_hold": landscape.holds,
        "configurations": len(values),
        "best": best.label,
        "lower_bound_s": bound_s,
        "grid_relaunch_s": grid_s,
        "grid_switch_s": _grid_switch_s(landscape, space, values),
        "grid_over_ours": _ratio(grid_s, ours_s),
        "best_other_over_ours": _ratio(best_other_s, ours_s),
        "ours_over_lower_bound": _ratio(ours_s, bound_s),
        "policies": arms,
    }


def _policy(runs: Sequence[Run]) -> dict[str, Any]:
    within_s = [run.within_s() for run in runs]
    decisions = [each for run in runs for each in run.decisions_ms]
    return {
        "median_s": _quantile(within_s, 0.5),
        "p95_s": _quantile(within_s, 0.95),
        "reached": _share(map(math.isfinite, within_s)),
        "over_2_percent": _share(run.final > 0.02 for run in runs),
        "ended_median_s": statistics.median(run.ended_s for run in runs),
        "launches_median": statistics.median(run.launches for run in runs),
        "trials_median": statistics.median(run.trials for run in runs),
        "best_pruned": _share(run.best_pruned for run in runs),
        "assumption_dropped": _share(run.findings > 0 for run in runs),
        "decision_median_ms": statistics.median(decisions),
        "decision_p99_ms": sorted(decisions)[int(0.99 * (len(decisions) - 1))],
        **_certificate([run for run in runs if run.certified]),
    }


def _certificate(runs: Sequence[Run]) -> dict[str, Any]:
    return {
        "certified": len(runs),
        "certified_within_1_percent": _share(run.final <= 0.01 for run in runs),
        "certified_over_2_percent": _share(run.final > 0.02 for run in runs),
    }


def _grid_switch_s(landscape: Landscape, space: Space, values: Mapping[Configuration, float]) -> float:
    """The grid with one launch per launch key."""
    total, keys = 0.0, set()
    for member in values:
        measured_s = blocks_s(landscape, member) * (
            landscape.spec.workload.blocks + landscape.spec.workload.warmup_blocks
        )
        key = space.launch_key(member)
        total += measured_s if key in keys else launch_s(landscape, member)
        keys.add(key)
    return total


def _quantile(values: Iterable[float], share: float) -> float | None:
    """None where it is not finite: that many sweeps never got there within the budget."""
    ordered = sorted(values)
    value = ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]
    return value if math.isfinite(value) else None


def _share(flags: Iterable[bool]) -> float | None:
    listed = list(flags)
    return sum(listed) / len(listed) if listed else None


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def lines(figures: Mapping[str, Any]) -> list[str]:
    """The table for people. Seconds until right (median); `-`: most sweeps never were within the budget."""
    shown = []
    for name, entry in figures["landscapes"].items():
        row = [
            f"{policy} {'-' if numbers['median_s'] is None else round(numbers['median_s'])}"
            for policy, numbers in entry["policies"]["switch_in_place"].items()
        ]
        shown.append(
            f"{name} ({entry['configurations']}): bound {entry['lower_bound_s']:.0f}, "
            f"grid {entry['grid_relaunch_s']:.0f}, " + ", ".join(row)
        )
    shown.append(f"certificate: {figures['certificate_where_assumptions_hold']}")
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, record (not with --short)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="three landscapes, three seeds, nothing recorded")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument("--landscapes", default=None, help="names, comma-separated; absent: all")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes, one seed each at a time")
    options = parser.parse_args(arguments)
    names = SHORT if options.short else tuple(LANDSCAPES)
    if options.landscapes:
        names = tuple(options.landscapes.split(","))
    seeds, policies = options.seeds or (3 if options.short else 100), available()
    for done, results in enumerate(gather(names, policies, seeds, workers=options.workers), start=1):
        if done == seeds or done % _RECORD_EVERY == 0:
            figures = summarise(names, policies, results)
            if not options.short and not options.landscapes:
                record("search_cost", figures)
            print(f"{done} of {seeds} seeds", file=sys.stderr, flush=True)
    print(json.dumps(figures, indent=2) if options.json else "\n".join(lines(figures)))


if __name__ == "__main__":
    main()
