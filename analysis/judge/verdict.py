"""The answers of a sweep: does speculation pay, what is best, what each dimension does, what it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import polars as pl

from analysis.data.load import Excluded, Results
from analysis.judge.anchors import ServerDrift, server_drift
from analysis.judge.break_even import BreakEven, break_even
from analysis.judge.cells import METRICS, REPEAT, cells
from analysis.judge.costs import Cost, cost
from analysis.judge.effects import MARGIN, Effect, Level, Verdict, compare, judge, level
from analysis.judge.factors import FACTOR_METRICS, Factor, Observed, Point, factors, observe, points, step_chain
from analysis.judge.names import short_names
from analysis.judge.phases import Communication, Phases, communication, phases
from analysis.judge.what_if import StepNeed, step_needs
from sweeps.redaction import shell_line


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One configuration, its throughput and how to launch it."""

    configuration_id: str
    label: str
    speculates: bool
    role: Literal["control", "candidate"]
    pruned: bool
    """Stopped early in every one of its trials: not eligible as best."""
    tok_s: float
    drift_corrected_tok_s: float
    interval: tuple[float, float] | None
    interval_covers: str
    num_launches: int
    num_blocks: int
    against_control: Effect | None
    launch_command: str
    environment: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pays:
    """The best speculative configuration against the best without speculation."""

    verdict: Verdict
    sentence: str
    effect: Effect | None
    reason: str | None
    speculative: Side | None
    plain: Side | None
    selection: str
    """How choosing the best of many is accounted for."""


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
    pinned: bool
    control: Side | None
    best: Side | None
    best_reason: str
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
    drift_per_hour: float | None
    server_drift: ServerDrift | None
    """Inside servers, by their anchors; None without."""
    control_runs: tuple[ControlRun, ...]
    """In the order of time."""
    excluded: tuple[Excluded, ...]
    warnings: tuple[str, ...]
    cost: Cost


def verdict(results: Results) -> SweepVerdict:
    """Judge a sweep. Never raises for what a sweep did not reach: it says so."""
    observed = {metric: observe(results, metric) for metric in FACTOR_METRICS}
    totals = {metric: cells(results, metric) for metric in METRICS}
    everything = points(results)
    throughput = observed["tok_s"]
    sides = _sides(results, everything, throughput)
    control = next((side for side in sides if side.role == "control"), None)
    speculative = _fastest(sides, speculates=True)
    plain = _fastest(sides, speculates=False)
    pays = _pays(results, sides, speculative, plain)
    best, best_reason = _best(results, sides, control)
    shown = {point.configuration_id: phases(point, totals) for point in everything}
    needed, needed_reason = _break_even(results, speculative, plain, shown)
    chain = [shown[point.configuration_id] for point in _chain(everything, speculative)]
    traced = (shown[side.configuration_id] for side in (speculative, plain, *sides) if side is not None)
    return SweepVerdict(
        sweep_id=results.sweep_id,
        engine=results.engine,
        machine=next(iter(results.all_trials["machine"].drop_nulls()), None),
        pinned=results.pinned,
        control=control,
        best=best,
        best_reason=best_reason,
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
        communication=next((found for each in traced if (found := communication(results, each))), None),
        drift_per_hour=throughput.spread.drift_per_hour,
        server_drift=server_drift(results),
        control_runs=_control_runs(results),
        excluded=results.excluded,
        warnings=results.warnings,
        cost=cost(results),
    )


def _by_concurrency(results: Results) -> tuple[AtConcurrency, ...]:
    if len(results.concurrencies) < 2:
        return ()
    found = []
    for concurrency in sorted(results.concurrencies):
        here = results.at(concurrency)
        sides = _sides(here, points(here), observe(here, "tok_s"))
        control = next((side for side in sides if side.role == "control"), None)
        best, best_reason = _best(here, sides, control)
        pays = _pays(here, sides, _fastest(sides, speculates=True), _fastest(sides, speculates=False))
        found.append(AtConcurrency(concurrency=concurrency, best=best, best_reason=best_reason, speculation_pays=pays))
    return tuple(found)


def _sides(results: Results, everything: Sequence[Point], throughput: Observed) -> tuple[Side, ...]:
    controls = set(results.trials.filter(pl.col("role") == "control")["configuration_id"])
    reference = next(iter(sorted(controls)), None)
    levels = {
        point.configuration_id: level(throughput.cells, point.configuration_id, throughput.spread)
        for point in everything
    }
    others = [point.configuration_id for point in everything if point.configuration_id != reference]
    against: dict[str, Effect] = {}
    if reference is not None:
        found = {key: compare(throughput.cells, {key: 1.0, reference: -1.0}, throughput.spread) for key in others}
        compared = {key: effect for key, effect in found.items() if effect is not None}
        against = dict(zip(compared, judge(list(compared.values())), strict=True))
    sides = [
        _side(results, point, reached, against.get(point.configuration_id), controls)
        for point in everything
        if (reached := levels[point.configuration_id]) is not None
    ]
    return tuple(sorted(sides, key=lambda side: -side.drift_corrected_tok_s))


def _side(results: Results, point: Point, reached: Level, against: Effect | None, controls: set[str]) -> Side:
    rows = results.trials.filter(pl.col("configuration_id") == point.configuration_id)
    newest = rows.sort("started_s").row(-1, named=True)
    environment = dict(newest["environment"] or {})
    return Side(
        configuration_id=point.configuration_id,
        label=point.label,
        speculates=point.speculates,
        role="control" if point.configuration_id in controls else "candidate",
        pruned=bool((rows["status"] == "pruned").all()),
        tok_s=reached.value,
        drift_corrected_tok_s=reached.corrected,
        interval=reached.interval,
        interval_covers=reached.covers,
        num_launches=reached.num_launches,
        num_blocks=reached.num_blocks,
        against_control=against,
        launch_command=_command(newest, environment),
        environment=environment,
    )


def _command(row: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """For a shell: variables taken out for good, variables set, every flag."""
    removed = [part for name in row["removed_env"] or () if name not in environment for part in ("-u", name)]
    settings = [f"{name}={value}" for name, value in sorted(environment.items())]
    prefix = ["env", *removed, *settings] if removed or settings else []
    return shell_line([*prefix, *(row["command"] or ())])


def _fastest(sides: Sequence[Side], *, speculates: bool) -> Side | None:
    """Of those that ran to their end; where all were pruned, of those."""
    group = sorted((side for side in sides if side.speculates == speculates), key=lambda side: side.pruned)
    return next(iter(group), None)


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


def _pays(results: Results, sides: Sequence[Side], speculative: Side | None, plain: Side | None) -> Pays:
    selection, effect, reason = "", None, None
    if results.pinned:
        reason = "acceptance was simulated (pinned)"
    elif speculative is None:
        reason = "no speculative configuration has results"
    elif plain is None:
        reason = "no configuration without speculation has results"
    else:
        effect, selection = _duel(results, sides, speculative, plain)
        reason = "too few common blocks" if effect is None else effect.reason
    word: Verdict = "undecided" if effect is None else effect.verdict
    return Pays(
        verdict=word,
        sentence=_sentence(word, effect, reason, speculative, plain),
        effect=effect,
        reason=reason,
        speculative=speculative,
        plain=plain,
        selection=selection,
    )


def _duel(results: Results, sides: Sequence[Side], speculative: Side, plain: Side) -> tuple[Effect | None, str]:
    """Best against best. Re-runs as incumbent, where there are any, are judged instead of the run that chose it."""
    split = frozenset({speculative.configuration_id, plain.configuration_id})
    seen = observe(results, "tok_s", split=split)
    keys, among, notes = [], [], []
    for side in (speculative, plain):
        rivals = sum((each.speculates, each.pruned) == (side.speculates, side.pruned) for each in sides)
        repeat = side.configuration_id + REPEAT
        again = repeat in seen.cells.keys and side.role != "control"
        keys.append(repeat if again else side.configuration_id)
        among.append(1 if again or (side.role == "control" and rivals == 1) else rivals)
        name = "best speculative" if side.speculates else "best without speculation"
        if again:
            notes.append(f"{name}: judged by its later runs only, which were not used to choose it")
        elif rivals > 1:
            notes.append(f"{name}: chosen among {rivals} by the same measurements, so its interval is widened")
        if side.pruned:
            notes.append(f"{name}: all were pruned, so it is judged on the {side.num_blocks} blocks that it ran")
    effect = compare(seen.cells, {keys[0]: 1.0, keys[1]: -1.0}, seen.spread, selected_among=(among[0], among[1]))
    return effect, "; ".join(notes)


def _sentence(
    word: Verdict, effect: Effect | None, reason: str | None, speculative: Side | None, plain: Side | None
) -> str:
    if effect is None or speculative is None or plain is None:
        return f"Whether speculation pays here is undecided: {reason}."
    low, high = effect.interval
    difference = f"{abs(effect.effect):.1%} {'faster' if effect.effect > 0 else 'slower'}"
    numbers = (
        f"the best speculative configuration ({speculative.label}) reaches {speculative.tok_s:.1f} tok/s, {difference} "
        f"than the best without speculation at {plain.tok_s:.1f} tok/s (95% interval {low:+.1%} to {high:+.1%})"
    )
    if effect.assumption and not reason:
        numbers += f"; {effect.assumption}"
    if word == "better":
        return f"Speculation pays here: {numbers}."
    if word == "worse":
        return f"Speculation does not pay here: {numbers}."
    if word == "equivalent":
        return f"Speculation makes no difference here within {effect.margin:.0%}: {numbers}."
    return f"Whether speculation pays here is undecided: {numbers}; {reason}."


def _break_even(
    results: Results, speculative: Side | None, plain: Side | None, shown: Mapping[str, Phases]
) -> tuple[BreakEven | None, str | None]:
    if speculative is None or plain is None:
        return None, "break-even needs a configuration with speculation and one without"
    if results.concurrencies[0] > 1:
        return (
            None,
            f"break-even is computed for one request at a time; this sweep searched at {results.concurrencies[0]}",
        )
    cycle = shown[speculative.configuration_id]
    if cycle.cycle_ms is None:
        return None, "no cycle was timed"
    needed = break_even(
        cycle_ms=cycle.cycle_ms,
        baseline_tok_s=plain.tok_s,
        num_steps=cycle.num_steps,
        target_tok_s=results.target_tok_s,
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
