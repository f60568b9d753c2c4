"""Search policies, each a sampler and a pruner that a spec can name, driven by `SweepStudy` as in a real sweep."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import optuna

from benchmarks.landscapes import Landscape
from sweeps.engines.base import EngineError, KernelTime
from sweeps.engines.simulated import SimulatedEngine
from sweeps.observations import Outcome, PlannedTrial
from sweeps.space import Configuration, Space
from sweeps.spec import BudgetSpec, Choice, SweepSpec
from sweeps.study import SweepStudy
from sweeps.workload import Block, plan_blocks

_TIE = 1e-4
"""Share by which a pruned best must beat the incumbent to be lost: many NCCL sets are the same cycle."""
_NO_PRUNER = Choice(name="none")


@dataclass(frozen=True, slots=True)
class Policy:
    """A sampler with a pruner."""

    sampler: Choice
    pruner: Choice = _NO_PRUNER
    certifies: bool = False


POLICIES: Mapping[str, Policy] = {
    "random": Policy(Choice(name="random")),
    "tpe": Policy(Choice(name="tpe")),
    "gp": Policy(Choice(name="gp")),
    "tpe+halving": Policy(
        Choice(name="tpe"), Choice(name="successive_halving", options={"min_resource": 2, "reduction_factor": 2})
    ),
    "tpe+wilcoxon": Policy(Choice(name="tpe"), Choice(name="wilcoxon", options={"p_threshold": 0.1})),
    "cycle_model": Policy(Choice(name="cycle_model"), Choice(name="cycle_bound"), certifies=True),
}
BUDGET_LAUNCHES = 60
"""Every policy may use the GPU seconds of so many launches with all their blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One sweep: the incumbent's shortfall against the true best, whenever it changed."""

    times_s: tuple[float, ...]
    shortfalls: tuple[float, ...]
    ended_s: float
    stop_reason: str
    certified: bool
    best_pruned: bool
    decisions_ms: tuple[float, ...]
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


def truth(landscape: Landscape, space: Space, engine: SimulatedEngine) -> dict[Configuration, float]:
    """Noise-free tok/s; configurations that the machine cannot run are left out."""
    values = {}
    for member in space.configurations():
        try:
            values[member] = engine.expected_tok_s(member, num_blocks=landscape.spec.workload.blocks)
        except EngineError:
            continue
    return values


def launch_s(landscape: Landscape, configuration: Configuration) -> float:
    """Mean GPU seconds of a warm launch with warm-up and every block."""
    boot, blocks = landscape.profile.boot, landscape.spec.workload
    drafting = boot.drafter_load_s + boot.drafter_capture_s if configuration.speculates else 0.0
    boot_s = boot.launch_s + boot.weight_load_s + boot.capture_s + boot.stop_s + boot.trace_s + drafting
    return boot_s + blocks_s(landscape, configuration) * (blocks.blocks + blocks.warmup_blocks)


def blocks_s(landscape: Landscape, configuration: Configuration) -> float:
    """Mean seconds of one block."""
    engine = SimulatedEngine(landscape.spec, profile=landscape.profile)
    forward, workload = landscape.profile.forward, landscape.spec.workload
    prefill_ms = forward.prefill_base_ms + forward.prefill_token_ms * workload.prompt_tokens
    return prefill_ms / 1000.0 + workload.output_tokens / engine.expected(configuration).tok_s


def run_policy(landscape: Landscape, policy: Policy, *, seed: int, switch_in_place: bool, stop: bool = True) -> Run:
    """One sweep on the virtual clock."""
    spec = _spec(landscape, policy, seed, switch_in_place=switch_in_place, stop=stop)
    space = Space(spec)
    engine = SimulatedEngine(spec, seed=seed, profile=landscape.profile)
    values = truth(landscape, space, engine)
    best = max(values, key=lambda member: values[member])
    block = next(block for block in plan_blocks(spec.workload, folder=Path()) if not block.warmup)
    rng = np.random.default_rng((seed, 0x5EA))
    times, shortfalls, decisions = [], [], []
    launches, live, best_pruned = 0, None, False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = SweepStudy(spec, space, clock=engine.now_s)
        while True:
            began = time.perf_counter()
            incumbent = study.incumbent  # refits the model, so that its cost is the decision's
            if incumbent is not None:
                times.append(engine.now_s())
                shortfalls.append(1.0 - values.get(incumbent, 0.0) / values[best])
            trial = study.ask()
            decisions.append(1000.0 * (time.perf_counter() - began))
            if trial is None or (
                study.stop_reason is not None and trial.role == "control" and len(study.observations) > 1
            ):
                break
            outcome = _measure(study, engine, trial, block, rng, live)
            launches += outcome.relaunched is not False
            live = None if outcome.status == "failed" else trial.launch_key
            study.tell(trial, outcome)
            if outcome.status == "pruned" and incumbent is not None:
                own = values[trial.configuration]
                best_pruned |= own == values[best] and own > (1.0 + _TIE) * values.get(incumbent, 0.0)
    sampler = study.study.sampler
    return Run(
        times_s=tuple(times),
        shortfalls=tuple(shortfalls),
        ended_s=engine.now_s(),
        stop_reason=study.stop_reason or "",
        certified=(study.stop_reason or "").startswith("P("),
        best_pruned=best_pruned,
        decisions_ms=tuple(decisions),
        findings=len(getattr(sampler, "findings", ())),
        trials=len(study.observations),
        launches=launches,
    )


def _spec(landscape: Landscape, policy: Policy, seed: int, *, switch_in_place: bool, stop: bool) -> SweepSpec:
    spec = landscape.spec
    first = Space(spec).configurations()[-1]
    seconds = BUDGET_LAUNCHES * launch_s(landscape, first)
    return replace(
        spec,
        engine=replace(spec.engine, switch_in_place=switch_in_place),
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
    engine: SimulatedEngine,
    trial: PlannedTrial,
    block: Block,
    rng: np.random.Generator,
    live: str | None,
) -> Outcome:
    """What `Measurement` does, on block summaries drawn directly."""
    spent: dict[str, float] = {}
    mark = engine.now_s()

    def charge(activity: str) -> None:
        nonlocal mark
        spent[activity] = spent.get(activity, 0.0) + engine.now_s() - mark
        mark = engine.now_s()

    relaunched = True
    kernels: tuple[KernelTime, ...] = ()
    status = "completed"
    reason = None
    try:
        if live == trial.launch_key and engine.switch(trial.served) is not None:
            relaunched = False
            charge("switch")
        else:
            engine.close()
            charge("stop")
            engine.launch(trial.served, step_candidates=trial.step_candidates)
            charge("launch")
        for _ in range(study.spec.workload.warmup_blocks):
            engine.block_summary(0, rng=rng)
        charge("warmup")
        for index in range(study.spec.workload.blocks):
            summary = engine.block_summary(index, rng=rng)
            charge("measure")
            decision = study.report(trial, summary, seconds=spent)
            if decision.prune:
                status, reason = "pruned", decision.reason
                break
        if status == "completed":
            kernels = engine.trace(block)
            charge("trace")
    except EngineError as error:
        engine.close()
        charge("failed")
        return Outcome(
            status="failed", reason=str(error), stage=error.stage, kind=error.kind, relaunched=relaunched, seconds=spent
        )
    return Outcome(status=status, reason=reason, relaunched=relaunched, seconds=spent, kernels=kernels)  # type: ignore[arg-type]
