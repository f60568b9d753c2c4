"""What each searched dimension does to each metric: from pairs of configurations that differ in that dimension only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from analysis.data.load import Results
from analysis.data.unread import unread_variables
from analysis.judge.cells import Cells, cells
from analysis.judge.effects import Effect, compare, judge, not_exercised, withheld
from analysis.judge.fitted import Fitted, fit_cells
from sweeps.results.nccl_acts import may_act
from sweeps.results.tables import DRAFTING_COLUMNS

FACTOR_METRICS = ("tok_s", "accept_length", "draft_ms", "verify_ms", "extend_ms")
_UNSET = "unset"
_TREE = frozenset(DRAFTING_COLUMNS) - {"drafter"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One configuration that has valid blocks, dimension by dimension."""

    configuration_id: str
    label: str
    speculates: bool
    settings: Mapping[str, str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Factor:
    """One value of one dimension against the reference value, on one metric."""

    dimension: str
    value: str
    reference: str
    metric: str
    effect: Effect | None
    reason: str | None
    """Why there is no effect."""
    note: str | None
    """What else changes with the value."""
    num_pairs: int
    by_accept_length: bool = False
    """Communication only: most of a difference in throughput comes from accept length, not from the cycle."""


def observe(results: Results, metric: str) -> Fitted:
    """The cells of a metric and the model fitted to them."""
    return observe_all(points(results), {metric: cells(results, metric)})[metric]


def observe_all(everything: Sequence[Point], totals: Mapping[str, Cells]) -> dict[str, Fitted]:
    """The model fitted to the cells of each metric.

    Accept length depends on prompts, not on launches. Phases drift as throughput does (the other way): throughput has
    the controls, which have no drafts.
    """
    settings = {point.configuration_id: point.settings for point in everything}
    found: dict[str, Fitted] = {}
    for metric, each in totals.items():
        whole = found.get("tok_s") if metric.endswith("_ms") else None
        found[metric] = fit_cells(each, settings, launches_matter=metric != "accept_length", whole=whole)
    return found


def points(results: Results) -> tuple[Point, ...]:
    """Every configuration with valid blocks, in the order of its first trial."""
    first = results.trials.unique("configuration_id", keep="first", maintain_order=True)
    return tuple(_point(row) for row in first.iter_rows(named=True))


def draft_tokens_are_derived(everything: Sequence[Point]) -> bool:
    """Whether steps and top-k alone decide the number of draft tokens in this sweep."""
    drafting = [point.settings for point in everything if point.speculates]
    chains = {(each["num_steps"], each["eagle_topk"]) for each in drafting}
    return len({(each["num_steps"], each["eagle_topk"], each["num_draft_tokens"]) for each in drafting}) == len(chains)


def step_chain(everything: Sequence[Point], like: Point) -> list[Point]:
    """The chains (top-k 1) that share everything with `like` but their step count and tree."""
    rest = {name: value for name, value in like.settings.items() if name not in _TREE}
    return [
        point
        for point in everything
        if point.settings["eagle_topk"] == "1" and rest.items() <= point.settings.items() and point.speculates
    ]


def factors(results: Results, observed: Mapping[str, Fitted]) -> tuple[Factor, ...]:
    """Every dimension that varies, each further value against the reference, on each of FACTOR_METRICS.

    Verdicts are corrected by Holm over the comparisons of one metric, communication apart from everything else.
    """
    everything = points(results)
    found = [
        factor
        for dimension, reference, values in _varying(everything, _control_settings(results))
        for value in values
        for factor in _factors_of(results, observed, everything, dimension, reference, value)
    ]
    return tuple(_judged(found))


def _factors_of(
    results: Results,
    observed: Mapping[str, Fitted],
    everything: Sequence[Point],
    dimension: str,
    reference: str,
    value: str,
) -> Iterator[Factor]:
    pairs = _pairs(everything, dimension, reference, value)
    reasons: dict[str, str | None] = dict.fromkeys(point.configuration_id for point, _ in pairs)
    if _communicates(dimension):
        reasons = {key: _not_exercised(results, key) for key in reasons}
    active = [pair for pair in pairs if reasons[pair[0].configuration_id] is None]
    idle = next((reason for reason in reasons.values() if reason), None)
    notes = []
    if active and idle:
        count = len(pairs) - len(active)
        notes.append(f"{count} pair{'' if count == 1 else 's'} left out: {idle}")
        pairs, idle = active, None
    trees = {point.settings["num_draft_tokens"] for pair in pairs for point in pair}
    if dimension in ("num_steps", "eagle_topk") and len(trees) > 1:
        notes.append("the number of draft tokens changes too")
    by_chance = False
    for metric in FACTOR_METRICS:
        seen = observed[metric]
        usable = [pair for pair in pairs if all(point.configuration_id in seen.cells.keys for point in pair)]
        effect = None
        if usable:
            effect = compare(seen, _weights(usable))
        if effect is not None and metric == "tok_s" and _communicates(dimension):
            by_chance = _by_accept_length(observed, usable, effect)
        if effect is not None and idle is not None:
            effect = not_exercised(effect, idle)
        elif effect is not None and results.pinned and metric in ("tok_s", "accept_length"):
            effect = withheld(effect, "acceptance was simulated (pinned)")
        reason = None
        if effect is None:
            none = f"no two configurations with {metric} differ in {dimension} alone"
            reason = "fewer than two common blocks" if usable else none
        yield Factor(
            dimension=dimension,
            value=value,
            reference=reference,
            metric=metric,
            effect=effect,
            reason=reason,
            note="; ".join(notes) or None,
            num_pairs=len(usable),
            by_accept_length=by_chance and metric == "tok_s",
        )


def _judged(found: Sequence[Factor]) -> Iterator[Factor]:
    families: dict[tuple[str, bool], list[Effect]] = defaultdict(list)
    for factor in found:
        if factor.effect is not None:
            families[_family(factor)].append(factor.effect)
    verdicts = {family: iter(judge(effects)) for family, effects in families.items()}
    judged = [
        factor if factor.effect is None else replace(factor, effect=next(verdicts[_family(factor)])) for factor in found
    ]
    yield from (_by_cycle_only(factor) if factor.by_accept_length else factor for factor in judged)


def _family(factor: Factor) -> tuple[str, bool]:
    """Comparisons that answer one question: a metric, and whether it is about communication."""
    return factor.metric, _communicates(factor.dimension)


def _by_accept_length(observed: Mapping[str, Fitted], pairs: Sequence[tuple[Point, Point]], effect: Effect) -> bool:
    """Whether less than half of a difference in throughput is in the cycle, which does not show it by itself."""
    timed = observed.get("cycle_ms")
    if timed is None or not all(point.configuration_id in timed.cells.keys for pair in pairs for point in pair):
        return False
    cycle = compare(timed, _weights(pairs))
    if cycle is None:
        return False
    gain = -np.log1p(cycle.effect) * np.sign(effect.effect)
    shows = cycle.interval[1] < 0 if effect.effect > 0 else cycle.interval[0] > 0
    return not shows and gain < abs(np.log1p(effect.effect)) / 2


def _by_cycle_only(factor: Factor) -> Factor:
    """Communication acts on throughput through the cycle alone: accept length differs by chance."""
    if factor.effect is None or factor.effect.verdict not in ("better", "worse"):
        return factor
    reason = (
        "the difference comes from accept length; NCCL settings cannot change accept length, and the cycle does not "
        "show it, so no effect is claimed"
    )
    return replace(factor, effect=withheld(factor.effect, reason))


def _point(row: Mapping[str, Any]) -> Point:
    return Point(
        configuration_id=row["configuration_id"],
        label=row["label"],
        speculates=bool(row["num_steps"]),
        settings={
            **{name: None if row[name] is None else str(row[name]) for name in DRAFTING_COLUMNS},
            "nccl": row["nccl_set"],
            **{f"args.{name}": value for name, value in dict(row["args"] or {}).items()},
            **{f"env.{name}": value for name, value in dict(row["env"] or {}).items()},
        },
    )


def _control_settings(results: Results) -> Mapping[str, str | None]:
    controls = results.trials.filter(pl.col("role") == "control")
    return _point(controls.row(0, named=True)).settings if controls.height else {}


def _varying(
    everything: Sequence[Point], control: Mapping[str, str | None]
) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(dimension, reference value, further values): the control's value, or the smallest that speculates."""
    names = list(dict.fromkeys(name for point in everything for name in point.settings))
    for name in names:
        values = list(dict.fromkeys(_value(point, name) for point in everything if _applies(point, name)))
        if name in _TREE:
            values.sort(key=lambda value: -1 if value == _UNSET else int(value))
        if name == "num_draft_tokens" and draft_tokens_are_derived(everything):
            continue
        wanted = control.get(name) or _UNSET
        reference = wanted if wanted in values else next(iter(values), None)
        if reference is not None and len(values) > 1:
            yield name, reference, tuple(value for value in values if value != reference)


def _applies(point: Point, dimension: str) -> bool:
    """Whether a point has a value of its own; without speculation there is no drafter and no tree."""
    return point.speculates or dimension not in DRAFTING_COLUMNS


def _value(point: Point, dimension: str) -> str:
    return point.settings.get(dimension) or _UNSET


def _pairs(everything: Sequence[Point], dimension: str, reference: str, value: str) -> list[tuple[Point, Point]]:
    usable = [point for point in everything if _applies(point, dimension)]
    derived = draft_tokens_are_derived(everything)
    references: dict[tuple[object, ...], list[Point]] = defaultdict(list)
    for point in usable:
        if _value(point, dimension) == reference:
            references[_rest(point, dimension, derived=derived)].append(point)
    return [
        (point, partner)
        for point in usable
        if _value(point, dimension) == value
        for partner in references[_rest(point, dimension, derived=derived)]
    ]


def _rest(point: Point, dimension: str, *, derived: bool) -> tuple[object, ...]:
    """All other settings: equal for configurations that differ in `dimension` only."""
    free = {dimension}
    if derived or dimension == "eagle_topk" or point.settings.get("eagle_topk") == "1":
        free.add("num_draft_tokens")
    return tuple(sorted((name, value or _UNSET) for name, value in point.settings.items() if name not in free))


def _weights(pairs: Sequence[tuple[Point, Point]]) -> dict[str, float]:
    weights: dict[str, float] = defaultdict(float)
    for point, partner in pairs:
        weights[point.configuration_id] += 1 / len(pairs)
        weights[partner.configuration_id] -= 1 / len(pairs)
    return dict(weights)


def _communicates(dimension: str) -> bool:
    return dimension == "nccl" or dimension.startswith("env.NCCL_")


def _not_exercised(results: Results, configuration_id: str) -> str | None:
    """Why communication settings cannot have acted on a configuration's decoding; None if they may have."""
    trials = results.trials.filter(pl.col("configuration_id") == configuration_id)
    backends = set(trials["all_reduce"])
    if not any(map(may_act, backends)):
        return f"{', '.join(sorted(backends))} does the all-reduces of decode, not NCCL"
    unread = unread_variables(trials, results.evidence)
    if trials.height and len(unread) == trials.height:
        return f"NCCL read none of its variables ({', '.join(next(iter(unread.values())))})"
    asked = results.evidence.filter(
        pl.col("trial_id").is_in(trials["trial_id"].to_list())
        & pl.col("setting").str.starts_with("env.NCCL_")
        & pl.col("requested").is_not_null()
    )
    if asked.height and (asked["grade"] == "not_exercised").all():
        details = asked["detail"].drop_nulls().to_list()
        return str(details[0]) if details else "by the evidence of every rank, decoding did not use it"
    return None
