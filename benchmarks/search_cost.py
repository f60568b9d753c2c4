"""What search policies cost until they are right: GPU seconds on the virtual clock, no Ray, simulated machines.

    python -m benchmarks.search_cost [--short] [--json] [--seeds N] [--landscapes NAME,... [--renew]]

Every policy is driven by the `SweepStudy` of a real sweep, with the same blocks and budget, with switch in place and
without. The exhaustive grid is charged in full: it cannot know before its end that it is right. An oracle that measures
the control and then the best is what no policy can beat. The Gaussian process
needs torch, which this environment leaves out; it takes that of another one (`--torch-site`), over fewer seeds, for it
is slow. Set OMP_NUM_THREADS=1: the matrices are small, and each process has a core of its own.
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

from benchmarks import rule_cost
from benchmarks.landscapes import LANDSCAPES, Landscape, Replay, Values
from benchmarks.policies import POLICIES, Run, oracle_s, run_policy, trial_s
from benchmarks.record import figures_of, record
from sweeps.search.cycle_model.rules import RULES
from sweeps.spec.space import Space

OURS, OURS_WITH_TABLE = "cycle_model", "cycle_model+table"
SHORT = ("pcie-eagle3", "h200-48", "broken-accept-nccl")
TARGETS = {
    "grid_over_ours": 30.0,
    "grid_over_ours_at_48": 6.0,
    "best_other_over_ours": 3.0,
    "best_other_over_ours_where_broken": 1 / 1.2,
    "ours_over_oracle_founding": 3.5,
    "certified_within_1_percent": 0.95,
    "certified_over_2_percent": 0.01,
    "best_pruned": 0.01,
    "decision_ms_at_2000": 50.0,
}
_RECORD_EVERY = 5

Results = dict[tuple[str, str, bool], list[Run]]


def not_available() -> dict[str, str]:
    """Policies that cannot run here, with the reason."""
    return {} if importlib.util.find_spec("torch") is not None else {"gp": "needs torch, which is not installed here"}


def run_seed(names: Iterable[str], seeds: Mapping[str, int], seed: int) -> dict[tuple[str, str, bool], Run]:
    """One sweep of every landscape and arm by each policy that has this seed."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return {
        (name, policy, switch): run_policy(LANDSCAPES[name], POLICIES[policy], seed=seed, switch_in_place=switch)
        for name in names
        for policy, count in seeds.items()
        for switch in (True, False)
        if seed < count
    }


def gather(names: Sequence[str], seeds: Mapping[str, int], *, workers: int = 1, site: str = "") -> Iterator[Results]:
    """The results so far, after each seed; a seed is one process's work.

    Args:
        seeds: of each policy that is to run.
        site: site-packages to take torch from.
    """
    results: Results = {}
    first = partial(run_seed, names, seeds)
    pool = ProcessPoolExecutor(workers, initializer=_take_from, initargs=(site,)) if workers > 1 else None
    with pool or nullcontext():
        spread = pool.map if pool is not None else map
        for runs in spread(first, range(max(seeds.values()))):
            for key, run in runs.items():
                results.setdefault(key, []).append(run)
            yield results


def _take_from(site: str) -> None:
    """After this environment's own packages: only what is missing comes from there."""
    if site and site not in sys.path:
        sys.path.append(site)


def summarise(
    names: Iterable[str], policies: Sequence[str], results: Results, *, earlier: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The figures of every landscape, and what they come to.

    Args:
        earlier: landscapes of a record; what other policies did there is kept.
    """
    known = {name: (earlier or {}).get(name, {}).get("policies", {}) for name in names}
    return totals({name: _landscape(LANDSCAPES[name], policies, results, known[name]) for name in known})


def totals(landscapes: Mapping[str, Any]) -> dict[str, Any]:
    """What the figures of landscapes come to, runs of both arms together.

    Args:
        landscapes: name -> figures; all with the same policies.
    """
    runs = [(entry, arm) for entry in landscapes.values() for arm in entry["policies"].values()]
    policies = tuple(runs[0][1])

    def of(policy: str, *, holding: bool = False) -> list[dict[str, Any]]:
        return [arm[policy] for entry, arm in runs if policy in arm and (entry["assumptions_hold"] or not holding)]

    left_out = {name: "was not asked for" for name in POLICIES if name not in policies} | not_available()
    return {
        "engine": "simulated, and replay",
        "seeds": {policy: min(row["seeds"] for row in of(policy)) for policy in policies},
        "not_run": left_out,
        "landscapes": landscapes,
        "certificate_where_assumptions_hold": _pooled(of(OURS, holding=True)),
        "certificate_with_table_where_assumptions_hold": _pooled(of(OURS_WITH_TABLE, holding=True)),
        "certificate_everywhere": _pooled(of(OURS)),
        "best_pruned_where_assumptions_hold": _mean(of(OURS, holding=True), "best_pruned", by="seeds"),
        "best_pruned": _mean(of(OURS), "best_pruned", by="seeds"),
        "decisions_in_the_largest_space": _decisions(landscapes),
        "targets": TARGETS,
    }


def renewed(figures: Mapping[str, Any], again: Mapping[str, Any]) -> dict[str, Any]:
    """`figures` with those landscapes replaced that were run again."""
    return totals({**figures["landscapes"], **again["landscapes"]})


def _pooled(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    shares = ("certified_within_1_percent", "certified_over_2_percent")
    return {
        "certified": sum(row["certified"] for row in rows),
        **{name: _mean(rows, name, by="certified") for name in shares},
    }


def _mean(rows: Sequence[Mapping[str, Any]], name: str, *, by: str) -> float | None:
    """Of a share, each row weighted with its number of runs; None where there are none."""
    number = sum(row[by] for row in rows)
    return sum(row[name] * row[by] for row in rows if row[by]) / number if number else None


def _landscape(
    landscape: Landscape | Replay, policies: Sequence[str], results: Results, earlier: Mapping[str, Any]
) -> dict[str, Any]:
    space, values = Space(landscape.spec), landscape.truth(0)
    best = max(values, key=lambda member: values[member])
    grid_s = sum(trial_s(landscape, member) for member in values)
    arms = {
        arm: _in_order(
            {
                **earlier.get(arm, {}),
                **{name: _policy(name, results[landscape.name, name, switch]) for name in policies},
            }
        )
        for arm, switch in (("switch_in_place", True), ("relaunch", False))
    }
    ours_s = arms["switch_in_place"][OURS]["median_s"]
    with_table_s = arms["switch_in_place"].get(OURS_WITH_TABLE, {}).get("median_s")
    run = arms["switch_in_place"]
    others = [run[name]["median_s"] for name in run if name not in (OURS, OURS_WITH_TABLE)]
    best_other_s = min((each for each in others if each is not None), default=None)
    known_s = oracle_s(landscape)
    return {
        "assumptions_hold": landscape.holds,
        "configurations": len(values),
        "best": best.label,
        "grid_relaunch_s": grid_s,
        "grid_switch_s": _grid_switch_s(landscape, space, values),
        "grid_over_ours": _ratio(grid_s, ours_s),
        "best_other_over_ours": _ratio(best_other_s, ours_s),
        "best_other_over_ours_with_table": _ratio(best_other_s, with_table_s),
        "oracle_s": known_s,
        "best_other_over_oracle": _ratio(best_other_s, known_s),
        "ours_over_oracle": _ratio(ours_s, known_s),
        "decisions": _decision_times(results[landscape.name, OURS, True]),
        "policies": arms,
    }


def _in_order(arm: Mapping[str, Any]) -> dict[str, Any]:
    return {name: arm[name] for name in POLICIES if name in arm}


def _policy(name: str, runs: Sequence[Run]) -> dict[str, Any]:
    """What the page shows of a policy: most of it of ours alone."""
    within_s = [run.within_s() for run in runs]
    figures: dict[str, Any] = {
        "median_s": _quantile(within_s, 0.5),
        "p95_s": _quantile(within_s, 0.95),
        "reached": _share(map(math.isfinite, within_s)),
        "seeds": len(runs),
    }
    if name not in (OURS, OURS_WITH_TABLE):
        return figures
    certified = [run for run in runs if run.certified]
    return {
        **figures,
        "ended_median_s": statistics.median(run.ended_s for run in runs),
        "launches_median": statistics.median(run.launches for run in runs),
        "trials_median": statistics.median(run.trials for run in runs),
        "best_pruned": _share(run.best_pruned for run in runs),
        "certified": len(certified),
        "certified_within_1_percent": _share(run.final <= 0.01 for run in certified),
        "certified_over_2_percent": _share(run.final > 0.02 for run in certified),
    }


def _decisions(landscapes: Mapping[str, Any]) -> dict[str, Any]:
    """CPU milliseconds of our decisions in the largest space."""
    largest = max(landscapes.values(), key=lambda entry: entry["configurations"])
    return {"configurations": largest["configurations"], **largest["decisions"]}


def _decision_times(runs: Sequence[Run]) -> dict[str, float | None]:
    return {
        **_times("suggest", [each for run in runs for each in run.suggest_ms]),
        **_times("prune", [each for run in runs for each in run.prune_ms]),
    }


def _times(name: str, values_ms: Sequence[float]) -> dict[str, float | None]:
    quantiles = {"median": 0.5, "p95": 0.95, "p99": 0.99}
    return {f"{name}_{quantile}_ms": _quantile(values_ms, share) for quantile, share in quantiles.items()}


def _grid_switch_s(landscape: Landscape | Replay, space: Space, values: Values) -> float:
    """The grid with one launch per launch key."""
    total, keys = 0.0, set()
    for member in values:
        key = space.launch_key(member)
        total += trial_s(landscape, member, launched=key not in keys)
        keys.add(key)
    return total


def _quantile(values: Iterable[float], share: float) -> float | None:
    """None where it is not finite: that many sweeps never got there within the budget."""
    ordered = sorted(values)
    if not ordered:
        return None
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
            f"{name} ({entry['configurations']}): oracle {entry['oracle_s']:.0f}, "
            f"grid {entry['grid_relaunch_s']:.0f}, " + ", ".join(row)
        )
    shown += [f"{name}: not run, {reason}" for name, reason in figures["not_run"].items()]
    shown.append(f"certificate: {figures['certificate_where_assumptions_hold']}")
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, record (not with --short)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="three landscapes, three seeds, nothing recorded")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument("--landscapes", default=None, help="names, comma-separated; absent: all")
    parser.add_argument("--policies", default=None, help="names, comma-separated; absent: all")
    parser.add_argument("--renew", action="store_true", help="put these landscapes and policies into the record")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes, one seed each at a time")
    parser.add_argument("--torch-site", default="", help="site-packages to take torch from, for the policy gp")
    parser.add_argument("--gp-seeds", type=int, default=10, help="seeds of the policy gp, which is slow")
    parser.add_argument("--without", default=None, help=f"rules, comma-separated, or `all`: {', '.join(RULES)}")
    options = parser.parse_args(arguments)
    if options.without:
        rules = RULES if options.without == "all" else tuple(options.without.split(","))
        figures = rule_cost.measure(rules, options.seeds or 40, workers=options.workers)
        if options.renew:
            record("search_rules", {**figures_of("search_rules"), **figures})
        print(json.dumps(figures, indent=1) if options.json else "\n".join(rule_cost.lines(figures)))
        return
    _take_from(options.torch_site)
    names = SHORT if options.short else tuple(LANDSCAPES)
    if options.landscapes:
        names = tuple(options.landscapes.split(","))
    seeds = options.seeds or (3 if options.short else 100)
    asked = options.policies.split(",") if options.policies else tuple(POLICIES)
    of_policy = {name: seeds for name in asked if name not in not_available()}
    if "gp" in of_policy:
        of_policy["gp"] = min(seeds, options.gp_seeds)
    of_policy = {name: count for name, count in of_policy.items() if count}
    earlier: Any = figures_of("search_cost")["landscapes"] if options.renew else None
    rounds = gather(names, of_policy, workers=options.workers, site=options.torch_site)
    for done, results in enumerate(rounds, start=1):
        if done == seeds or done % _RECORD_EVERY == 0:
            figures = summarise(names, tuple(of_policy), results, earlier=earlier)
            if options.renew:
                record("search_cost", renewed(figures_of("search_cost"), figures))
            elif not options.short and not options.landscapes:
                record("search_cost", figures)
            print(f"{done} of {seeds} seeds", file=sys.stderr, flush=True)
    print(json.dumps(figures, indent=2) if options.json else "\n".join(lines(figures)))


if __name__ == "__main__":
    main()
