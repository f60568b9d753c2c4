"""Search policies, each a sampler and a pruner that a spec can name, driven by `SweepStudy` as in a real sweep."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import optuna
import pyarrow.parquet as pq

from benchmarks.landscapes import Landscape, Replay
from sweeps.engines.base import EngineError, KernelTime, LaunchReport
from sweeps.engines.replay.engine import ReplayEngine
from sweeps.engines.simulated.engine import SimulatedEngine
from sweeps.measure.launch_evidence import reads_none_of
from sweeps.measure.records import Outcome, PlannedTrial
from sweeps.search.cycle_model.rules import Rules
from sweeps.search.samplers import build_search
from sweeps.search.study import SweepStudy
from sweeps.spec.model import BudgetSpec, Choice, StatesSpec, SweepSpec
from sweeps.spec.space import Configuration, Space
from sweeps.spec.workload import Block, plan_blocks

_TIE = 1e-4
"""Share by which a pruned best must beat the incumbent to be lost: many NCCL sets are the same cycle."""
A_LAUNCH_EACH = StatesSpec(nccl=False, all_reduce=False, trees=False)
"""The search with a launch for every NCCL set: only steps at top-k 1 are switched in a live server."""
_NO_PRUNER = Choice(name="none")


@dataclass(frozen=True, slots=True)
class Policy:
    """A sampler with a pruner."""

    sampler: Choice
    pruner: Choice = _NO_PRUNER
    certifies: bool = False
    table: bool = False
    """Times the all-reduce of every NCCL set first, for TABLE_S each."""


TABLE_S = 10.0
"""Seconds of the GPUs per NCCL set and launch of the all-reduce table: 99 s for eleven on two H200."""
POLICIES: Mapping[str, Policy] = {
    "random": Policy(Choice(name="random")),
    "tpe": Policy(Choice(name="tpe")),
    "gp": Policy(Choice(name="gp")),
    "tpe+halving": Policy(
        Choice(name="tpe"), Choice(name="successive_halving", options={"min_resource": 2, "reduction_factor": 2})
    ),
    "tpe+wilcoxon": Policy(Choice(name="tpe"), Choice(name="wilcoxon", options={"p_threshold": 0.1})),
    "cycle_model": Policy(Choice(name="cycle_model"), Choice(name="cycle_bound"), certifies=True),
    "cycle_model+table": Policy(Choice(name="cycle_model"), Choice(name="cycle_bound"), certifies=True, table=True),
}
BUDGET_LAUNCHES = 40
"""Every policy may use the GPU seconds of so many launches with all their blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One sweep, its last control and the winner's second launch included: how far the incumbent was below the best."""

    times_s: tuple[float, ...]
    shortfalls: tuple[float, ...]
    ended_s: float
    stop_reason: str
    certified: bool
    """At the end: the last control and the second launch of the winner did not withdraw it."""
    withdrawn: int
    best_pruned: bool
    suggest_ms: tuple[float, ...]
    """CPU time of each suggestion, refits included; wall time would measure who else is on the machine."""
    prune_ms: tuple[float, ...]
    """Of each decision whether a trial goes on."""
    findings: int
    trials: int
    launches: int

    def within_s(self, share: float = 0.01) -> float:
        """Seconds until the incumbent is, and stays, within `share` of the best; inf if it never was."""
        reached = float("inf")
        for at_s, shortfall in zip(reversed(self.times_s), reversed(self.shortfalls), strict=True):
            if shortfall > share:
                break
            reached = at_s
        return reached

    @property
    def final(self) -> float:
        return self.shortfalls[-1] if self.shortfalls else 1.0


def trial_s(landscape: Landscape | Replay, configuration: Configuration, *, launched: bool = True) -> float:
    """Mean GPU seconds of a whole trial: warm-up and every block, after a launch or in a live server."""
    blocks = landscape.spec.workload.blocks + landscape.spec.workload.warmup_blocks
    return launched * landscape.launch_s(configuration) + blocks * landscape.block_s(configuration)


def oracle_s(landscape: Landscape | Replay) -> float:
    """Seconds until a sweep is right that knows the answer: the control, then the best, each to the end.

    What no policy can beat: all measure the control first, and say so of a configuration when its trial has ended.
    """
    space, values = Space(landscape.spec), landscape.truth(0)
    engine, rng = landscape.engine(landscape.spec, seed=0), np.random.default_rng(0)
    best = max(values, key=lambda member: values[member])
    workload = landscape.spec.workload
    for configuration in dict.fromkeys((space.control, best)):
        engine.close()
        engine.launch(configuration)
        for index in range(workload.warmup_blocks + workload.blocks):
            engine.block_summary(index, rng=rng)
        engine.trace(plan_blocks(workload, folder=Path())[-1])
    return engine.now_s()


def run_policy(
    landscape: Landscape | Replay,
    policy: Policy,
    *,
    seed: int,
    switch_in_place: bool,
    stop: bool = True,
    rules: Rules | None = None,
) -> Run:
    """One sweep on the virtual clock.

    Args:
        rules: special cases of the cycle model; None: all.
    """
    spec = _spec(landscape, policy, seed, switch_in_place=switch_in_place, stop=stop)
    with TemporaryDirectory() as folder:
        table = landscape.all_reduce_table(seed) if policy.table else None
        if table is None:
            return _run(landscape, spec, seed=seed, before_s=0.0, rules=rules)
        pq.write_table(table, Path(folder) / "allreduce.parquet")
        return _run(
            landscape,
            with_table(spec, Path(folder) / "allreduce.parquet"),
            seed=seed,
            before_s=TABLE_S * len(set(table["set"].to_pylist())),
            rules=rules,
        )


def with_table(spec: SweepSpec, path: Path) -> SweepSpec:
    """The same sweep with the all-reduce table as a start."""
    options = {**spec.study.sampler.options, "allreduce": str(path)}
    return replace(spec, study=replace(spec.study, sampler=replace(spec.study.sampler, options=options)))


def _run(
    landscape: Landscape | Replay, spec: SweepSpec, *, seed: int, before_s: float, rules: Rules | None = None
) -> Run:
    """One sweep that began `before_s` after the clock."""
    space = Space(spec)
    engine = landscape.engine(spec, seed=seed)
    values = landscape.truth(seed)
    best = max(values, key=lambda member: values[member])
    block = next(block for block in plan_blocks(spec.workload, folder=Path()) if not block.warmup)
    rng = np.random.default_rng((seed, 0x5EA))
    times, shortfalls, suggested = [], [], []
    decided: list[float] = []
    launches, live, best_pruned = 0, None, False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = SweepStudy(spec, space, clock=engine.now_s, build=partial(build_search, rules=rules))
        while True:
            began = time.thread_time()
            incumbent = study.incumbent  # refits the model, so that its cost is the decision's
            if incumbent is not None:
                times.append(before_s + engine.now_s())
                shortfalls.append(1.0 - values.get(incumbent, 0.0) / values[best])
            trial = study.ask()
            suggested.append(1000.0 * (time.thread_time() - began))
            if trial is None:
                break
            outcome = _measure(study, engine, trial, block, rng, live, decided)
            launches += outcome.relaunched is not False
            live = None if outcome.status == "failed" else trial.launch_key
            study.tell(trial, outcome)
            if outcome.status == "pruned" and incumbent is not None:
                own = values[trial.configuration]
                best_pruned |= own == values[best] and own > (1.0 + _TIE) * values.get(incumbent, 0.0)
    sampler = study.study.sampler
    withdrawn = sum(found.event == "certificate_withdrawn" for found in study.drain_findings())
    return Run(
        times_s=tuple(times),
        shortfalls=tuple(shortfalls),
        ended_s=before_s + engine.now_s(),
        stop_reason=study.stop_reason or "",
        certified=(study.stop_reason or "").startswith("P("),
        withdrawn=withdrawn,
        best_pruned=best_pruned,
        suggest_ms=tuple(suggested),
        prune_ms=tuple(decided),
        findings=len(getattr(sampler, "findings", ())),
        trials=len(study.observations),
        launches=launches,
    )


def _spec(landscape: Landscape | Replay, policy: Policy, seed: int, *, switch_in_place: bool, stop: bool) -> SweepSpec:
    spec = landscape.spec
    typical = list(landscape.truth(seed))[-1]
    seconds = BUDGET_LAUNCHES * trial_s(landscape, typical)
    return replace(
        spec,
        engine=replace(spec.engine, switch_in_place=switch_in_place, states=A_LAUNCH_EACH),
        control=replace(spec.control, incumbent=True),
        study=replace(
            spec.study,
            sampler=policy.sampler,
            pruner=policy.pruner,
            seed=seed,
            stop_probability=0.95 if policy.certifies and stop else None,
        ),
        budget=BudgetSpec(gpu_hours=seconds * spec.resources.gpus / 3600.0),
    )


def _measure(
    study: SweepStudy,
    engine: SimulatedEngine | ReplayEngine,
    trial: PlannedTrial,
    block: Block,
    rng: np.random.Generator,
    live: str | None,
    decided: list[float],
) -> Outcome:
    """What `Measurement` does, on block summaries drawn directly; CPU milliseconds of each report go to `decided`."""
    spent: dict[str, float] = {}
    mark = engine.now_s()

    def charge(activity: str) -> None:
        nonlocal mark
        spent[activity] = spent.get(activity, 0.0) + engine.now_s() - mark
        mark = engine.now_s()

    relaunched = True
    report: LaunchReport | None = None
    kernels: tuple[KernelTime, ...] = ()
    status = "completed"
    reason = None
    try:
        if live == trial.launch_key and (report := engine.switch(trial.configuration)) is not None:
            relaunched = False
            charge("switch")
        else:
            engine.close()
            charge("stop")
            report = engine.launch(trial.configuration, states=trial.states)
            charge("launch")
        for _ in range(study.spec.workload.warmup_blocks):
            engine.block_summary(0, rng=rng)
        charge("warmup")
        for index in range(study.spec.workload.blocks):
            summary = engine.block_summary(index, rng=rng)
            charge("measure")
            began = time.thread_time()
            decision = study.report(trial, summary, seconds=spent)
            decided.append(1000.0 * (time.thread_time() - began))
            if decision.prune:
                status, reason = "pruned", decision.reason
                break
        if status == "completed":
            kernels = engine.trace(block) or ()
            charge("trace")
    except EngineError as error:
        engine.close()
        charge("failed")
        return Outcome(
            status="failed", reason=str(error), stage=error.stage, kind=error.kind, relaunched=relaunched, seconds=spent
        )
    return Outcome(
        status=status,  # type: ignore[arg-type]
        reason=reason,
        relaunched=relaunched,
        seconds=spent,
        kernels=kernels,
        all_reduce=report.all_reduce,
        nccl_unread=reads_none_of(trial.configuration, report),
    )
