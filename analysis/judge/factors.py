"""What each searched dimension does to each metric: from pairs of configurations that differ in that dimension only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from analysis.data.load import Results
from analysis.judge.cells import Cells, cells
from analysis.judge.claims import Effect, judge, not_exercised, withheld
from analysis.judge.effects import compare, compare_all
from analysis.judge.exercised import idle_reasons
from analysis.judge.fitted import Fitted, fit_cells
from analysis.judge.points import Point, control_settings, pairs_of, points, varying

FACTOR_METRICS = ("tok_s", "accept_length", "draft_ms", "verify_ms", "extend_ms")
_BY_LENGTH = (
    "the difference comes from accept length; NCCL settings cannot change accept length, and the cycle does not show "
    "it, so no effect is claimed"
)
Pairs = Sequence[tuple[Point, Point]]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    """One value of one dimension against the reference value, and the pairs that tell."""

    dimension: str
    value: str
    reference: str
    pairs: Pairs
    idle: str | None
    """Why the settings cannot have acted on any of them."""
    note: str | None

    def usable(self, seen: Fitted) -> Pairs:
        """Pairs of which both points have cells."""
        names = set(seen.cells.keys)
        return [pair for pair in self.pairs if all(point.configuration_id in names for point in pair)]


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


def factors(results: Results, observed: Mapping[str, Fitted]) -> tuple[Factor, ...]:
    """Every dimension that varies, each further value against the reference, on each of FACTOR_METRICS.

    Verdicts are corrected by Holm over the comparisons of one metric, communication apart from everything else.
    """
    questions = list(_questions(results))
    by_metric = [_of_metric(results, observed[metric], questions) for metric in FACTOR_METRICS]
    found = [factor for of_one in zip(*by_metric, strict=True) for factor in of_one]
    asked = [question for question in questions for _ in FACTOR_METRICS]
    judged = zip(_judged(found), asked, strict=True)
    return tuple(_by_cycle_only(factor, question, observed) for factor, question in judged)


def _questions(results: Results) -> Iterator[_Question]:
    everything = points(results)
    reasons = idle_reasons(results)
    for dimension, reference, values in varying(everything, control_settings(results)):
        for value in values:
            pairs, notes, idle = pairs_of(everything, dimension, reference, value), [], None
            if _communicates(dimension):
                active = [pair for pair in pairs if pair[0].configuration_id not in reasons]
                idle = next((why for pair in pairs if (why := reasons.get(pair[0].configuration_id))), None)
                if active and idle:
                    count = len(pairs) - len(active)
                    notes.append(f"{count} pair{'' if count == 1 else 's'} left out: {idle}")
                    pairs, idle = active, None
            trees = {point.settings["num_draft_tokens"] for pair in pairs for point in pair}
            if dimension in ("num_steps", "eagle_topk") and len(trees) > 1:
                notes.append("the number of draft tokens changes too")
            yield _Question(
                dimension=dimension,
                value=value,
                reference=reference,
                pairs=pairs,
                idle=idle,
                note="; ".join(notes) or None,
            )


def _of_metric(results: Results, seen: Fitted, questions: Sequence[_Question]) -> list[Factor]:
    metric = seen.cells.metric
    usable = [question.usable(seen) for question in questions]
    asked = [place for place, pairs in enumerate(usable) if pairs]
    compared = compare_all(seen, [_weights(usable[place]) for place in asked])
    effects = dict(zip(asked, compared, strict=True))
    found = []
    for place, question in enumerate(questions):
        effect, reason = effects.get(place), None
        if effect is None:
            none = f"no two configurations with {metric} differ in {question.dimension} alone"
            reason = "fewer than two common blocks" if usable[place] else none
        elif question.idle is not None:
            effect = not_exercised(effect, question.idle)
        elif results.pinned and metric in ("tok_s", "accept_length"):
            effect = withheld(effect, "acceptance was simulated (pinned)")
        found.append(
            Factor(
                dimension=question.dimension,
                value=question.value,
                reference=question.reference,
                metric=metric,
                effect=effect,
                reason=reason,
                note=question.note,
                num_pairs=len(usable[place]),
            )
        )
    return found


def _judged(found: Sequence[Factor]) -> Iterator[Factor]:
    families: dict[tuple[str, bool], list[Effect]] = defaultdict(list)
    for factor in found:
        if factor.effect is not None:
            families[_family(factor)].append(factor.effect)
    verdicts = {family: iter(judge(effects)) for family, effects in families.items()}
    for factor in found:
        yield factor if factor.effect is None else replace(factor, effect=next(verdicts[_family(factor)]))


def _family(factor: Factor) -> tuple[str, bool]:
    """Comparisons that answer one question: a metric, and whether it is about communication."""
    return factor.metric, _communicates(factor.dimension)


def _by_cycle_only(factor: Factor, question: _Question, observed: Mapping[str, Fitted]) -> Factor:
    """Communication acts on throughput through the cycle alone: accept length differs by chance."""
    effect = factor.effect
    if factor.metric != "tok_s" or effect is None or effect.verdict not in ("better", "worse"):
        return factor
    if not _communicates(factor.dimension):
        return factor
    if not _by_accept_length(observed, question.usable(observed["tok_s"]), effect):
        return factor
    return replace(factor, effect=withheld(effect, _BY_LENGTH))


def _by_accept_length(observed: Mapping[str, Fitted], pairs: Pairs, effect: Effect) -> bool:
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


def _weights(pairs: Pairs) -> dict[str, float]:
    weights: dict[str, float] = defaultdict(float)
    for point, partner in pairs:
        weights[point.configuration_id] += 1 / len(pairs)
        weights[partner.configuration_id] -= 1 / len(pairs)
    return dict(weights)


def _communicates(dimension: str) -> bool:
    return dimension == "nccl" or dimension.startswith("env.NCCL_")
