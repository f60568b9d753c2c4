"""The answers of a sweep: does speculation pay, what is best, what each dimension does, what it cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from analysis.data.excluded import Excluded
from analysis.data.load import Results
from analysis.judge.about import Fact, about
from analysis.judge.anchors import ServerDrift, server_drift
from analysis.judge.break_even import BreakEven, break_even
from analysis.judge.cells import all_cells
from analysis.judge.claims import MARGIN
from analysis.judge.confirmed import Confirmation, confirmation
from analysis.judge.costs import Cost, cost
from analysis.judge.effects import level, product_interval
from analysis.judge.factors import FACTOR_METRICS, Factor, factors, observe, observe_all
from analysis.judge.fitted import Fitted
from analysis.judge.names import short_names
from analysis.judge.pays import Pays, speculation_pays
from analysis.judge.phases import Communication, Phases, communication, phases
from analysis.judge.points import Point, points, step_chain
from analysis.judge.sides import Side, fastest, sides_of
from analysis.judge.verify_parts import VerifyParts, verify_parts
from analysis.judge.what_if import StepNeed, step_needs


@dataclass(frozen=True, kw_only=True, slots=True)
class AtConcurrency:
    """The answers at one of several concurrencies; configurations are compared within it alone."""

    concurrency: int
    """Requests in flight."""
    best: Side | None
    best_reason: str
    speculation_pays: Pays


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlRun:
    """One measurement of the control."""

    trial_id: str
    node: str
    at_s: float
    """Since the node's first trial."""
    tok_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepVerdict:
    """Everything that a report says."""

    sweep_id: str
    engine: str
    machine: str | None
    about: tuple[Fact, ...]
    """Model, server, machine, prompts, date."""
    pinned: bool
    control: Side | None
    best: Side | None
    best_reason: str
    confirmation: Confirmation | None
    """The winner launched by itself against its state in a server of many; None if it was not both."""
    speculation_pays: Pays
    by_concurrency: tuple[AtConcurrency, ...]
    """Ascending; () where the sweep measured one alone. Everything else is about the one that the search decided on."""
    concurrency: int | None
    """That one; None without a block."""
    sides: tuple[Side, ...]
    """Every configuration with valid blocks, fastest first."""
    phases: tuple[Phases, ...]
    factors: tuple[Factor, ...]
    names: Mapping[str, str]
    """Configuration id -> what tells it from the others."""
    break_even: BreakEven | None
    break_even_reason: str | None
    step_needs: tuple[StepNeed, ...]
    communication: Communication | None
    verify_parts: VerifyParts | None
    """What makes verify longer than a decode step; None unless both were traced."""
    drift: float | None
    """Relative, between the highest and the lowest throughput of the drift."""
    server_drift: ServerDrift | None
    """Inside servers, by their anchors; None without."""
    control_runs: tuple[ControlRun, ...]
    """In the order of time."""
    excluded: tuple[Excluded, ...]
    warnings: tuple[str, ...]
    cost: Cost


def verdict(results: Results) -> SweepVerdict:
    """Judge a sweep. Never raises for what a sweep did not reach: it says so."""
    totals = all_cells(results)
    everything = points(results)
    observed = observe_all(everything, {metric: totals[metric] for metric in (*FACTOR_METRICS, "cycle_ms")})
    throughput = observed["tok_s"]
    sides = sides_of(results, everything, throughput)
    control = next((side for side in sides if side.role == "control"), None)
    speculative = fastest(sides, speculates=True)
    plain = fastest(sides, speculates=False)
    pays = speculation_pays(results, throughput, sides, speculative, plain)
    best, best_reason = _best(results, sides, control)
    held = None
    if best is not None:
        held = confirmation(results, throughput, best.configuration_id, control.configuration_id if control else None)
    if best is not None and held is not None and not held.confirmed:
        best_reason, best = _unconfirmed(best, held), None
    shown = {point.configuration_id: phases(point, totals) for point in everything}
    needed, needed_reason = _break_even(results, speculative, plain, observed)
    chain = [shown[point.configuration_id] for point in _chain(everything, speculative)]
    traced = [shown[side.configuration_id] for side in (speculative, plain, *sides) if side is not None]
    return SweepVerdict(
        sweep_id=results.sweep_id,
        engine=results.engine,
        machine=next(iter(results.all_trials["machine"].drop_nulls()), None),
        about=about(results),
        pinned=results.pinned,
        control=control,
        best=best,
        best_reason=best_reason,
        confirmation=held,
        speculation_pays=pays,
        by_concurrency=_by_concurrency(results),
        concurrency=next(iter(results.concurrencies), None),
        sides=sides,
        phases=tuple(shown[side.configuration_id] for side in sides),
        factors=factors(results, observed),
        names=short_names(everything),
        break_even=needed,
        break_even_reason=needed_reason,
        step_needs=step_needs(chain, baseline_tok_s=plain.tok_s, target_tok_s=results.target_tok_s)
        if plain and needed
        else (),
        communication=communication(results, traced, {point.configuration_id: point for point in everything}),
        verify_parts=verify_parts(
            results,
            next((each for each in traced if not each.speculates), None),
            [each for each in traced if each.speculates],
        ),
        drift=throughput.drift,
        server_drift=server_drift(results),
        control_runs=_control_runs(results),
        excluded=results.excluded,
        warnings=(*results.warnings, *_outliers(results, throughput)),
        cost=cost(results),
    )


def _by_concurrency(results: Results) -> tuple[AtConcurrency, ...]:
    if len(results.concurrencies) < 2:
        return ()
    found = []
    for concurrency in sorted(results.concurrencies):
        here = results.at(concurrency)
        throughput = observe(here, "tok_s")
        sides = sides_of(here, points(here), throughput)
        control = next((side for side in sides if side.role == "control"), None)
        best, best_reason = _best(here, sides, control)
        pays = speculation_pays(
            here, throughput, sides, fastest(sides, speculates=True), fastest(sides, speculates=False)
        )
        found.append(AtConcurrency(concurrency=concurrency, best=best, best_reason=best_reason, speculation_pays=pays))
    return tuple(found)


def _outliers(results: Results, throughput: Fitted) -> Iterator[str]:
    """Launches that no other launch would have predicted, by the trials that they served."""
    for launch, away in throughput.outliers.items():
        served = results.trials.filter(pl.col("launch") == launch)["trial_id"].to_list()
        faster = "faster" if away > 0 else "slower"
        yield (
            f"the launch of {', '.join(served)} is {faster} than all other launches predict (by {abs(away):.1f} "
            "standard deviations); nothing is claimed that rests on it alone"
        )


def _best(results: Results, sides: Sequence[Side], control: Side | None) -> tuple[Side | None, str]:
    if results.pinned:
        return None, "acceptance was simulated (pinned), so this sweep recommends nothing"
    top = next((side for side in sides if not side.pruned), None)
    if top is None or control is None or top is control:
        return top, "no configuration was completed" if top is None else "the fastest"
    effect = top.against_control
    if effect is None or effect.verdict == "better":
        return top, "the fastest"
    if effect.verdict == "equivalent" or abs(effect.effect) < MARGIN:
        return control, f"{top.label} measured {effect.effect:+.1%}, inside the {MARGIN:.0%} margin: keep the control"
    return top, f"the fastest, but its lead over the control is {effect.verdict}: {effect.reason}"


def _unconfirmed(best: Side, held: Confirmation) -> str:
    return (
        f"{best.label} led as a state of a server, but is not confirmed: launched by itself "
        f"({', '.join(held.trial_ids)}) it is {abs(held.apart):.1%} {'faster' if held.apart > 0 else 'slower'} than "
        f"that state{'' if held.lead_alone is None else f', {held.lead_alone:+.1%} against the control'}"
    )


def _break_even(
    results: Results, speculative: Side | None, plain: Side | None, observed: Mapping[str, Fitted]
) -> tuple[BreakEven | None, str | None]:
    if speculative is None or plain is None:
        return None, "break-even needs a configuration with speculation and one without"
    if results.concurrencies[0] > 1:
        return (
            None,
            f"break-even is computed for one request at a time; this sweep searched at {results.concurrencies[0]}",
        )
    cycle = level(observed["cycle_ms"], speculative.configuration_id)
    if cycle is None:
        return None, "no cycle was timed"
    sides = speculative.configuration_id, plain.configuration_id
    interval = product_interval(observed["cycle_ms"], observed["tok_s"], sides)
    needed = break_even(
        cycle_ms=cycle.value,
        baseline_tok_s=plain.tok_s,
        num_steps=speculative.num_steps,
        target_tok_s=results.target_tok_s,
        interval=None if interval is None else (interval[0] / 1000, interval[1] / 1000),
    )
    return needed, None


def _chain(everything: Sequence[Point], speculative: Side | None) -> list[Point]:
    like = [point for point in everything if speculative and point.configuration_id == speculative.configuration_id]
    return step_chain(everything, like[0]) if like else []


def _control_runs(results: Results) -> tuple[ControlRun, ...]:
    controls = results.trials.filter(pl.col("role") == "control").select("trial_id", "node", "at_s")
    runs = (
        results.blocks.join(controls, on="trial_id")
        .group_by("trial_id", "node", "at_s")
        .agg(tok_s=pl.col("decode_tokens").sum() / pl.col("decode_s").sum())
        .sort("at_s", "trial_id")
    )
    return tuple(ControlRun(**row) for row in runs.iter_rows(named=True))
