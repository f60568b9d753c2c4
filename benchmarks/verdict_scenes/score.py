"""Claims against the truth: for each sweep the figures that a scene is about, and over sweeps their shares and errors.

A figure of one sweep is a share between 0 and 1 (of its claims, or whether something happened), or a width in percent.
A figure that a sweep says nothing about is left out, never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.judge.break_even import accept_length_for, accuracy_for
from benchmarks.verdict_scenes.claims import Claim, Judged, Kind
from benchmarks.verdict_scenes.sweep import Sweep
from benchmarks.verdict_scenes.truth import Configuration, Truth

MARGIN = 0.01
"""Relative difference within which two configurations count as equal."""
_EQUAL = 1e-9
"""Below this, two true numbers differ by rounding alone."""
_CLAIMED = frozenset({"better", "worse"})
_DIMENSIONS: Mapping[str, Callable[[Configuration], str]] = {
    "nccl": lambda member: member.nccl,
    "num_steps": lambda member: str(member.num_steps),
    "eagle_topk": lambda member: str(member.topk),
}
_LEVELS: tuple[tuple[Kind, str], ...] = (("level", "levels"), ("best level", "the best level"))
_NEEDS: tuple[tuple[Kind, str], ...] = (("break-even", "break-even"), ("accuracy", "needed accuracy"))
_CYCLE_METRICS = ("tok_s", "draft_ms", "verify_ms", "extend_ms")


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure over all sweeps that said something."""

    value: float
    error: float
    """Standard error; 1.5 / n if all n sweeps agree, for the 95 % bound of an event that was not seen is 3 / n."""
    num_sweeps: int


def figures_of(sweep: Sweep, judged: Judged) -> dict[str, float]:
    """Of one sweep."""
    found: dict[str, list[float]] = {}
    for name, value in _figures(sweep, judged):
        found.setdefault(name, []).append(value)
    any_of = ("false", "called", "outlier", "pays", "claims")
    return {name: max(values) if name.startswith(any_of) else float(np.mean(values)) for name, values in found.items()}


def summarise(sweeps: Sequence[Mapping[str, float]]) -> dict[str, Figure]:
    """Over sweeps, which are independent."""
    names = dict.fromkeys(name for sweep in sweeps for name in sweep)
    found = {}
    for name in names:
        values = np.array([sweep[name] for sweep in sweeps if name in sweep])
        error = float(values.std()) / len(values) ** 0.5 or 1.5 / len(values)
        found[name] = Figure(float(values.mean()), error, len(values))
    return found


def _figures(sweep: Sweep, judged: Judged) -> Iterator[tuple[str, float]]:
    measured, shift = sweep.measured(), sweep.shift
    members = {member.configuration_id: member for member in measured}
    for metric in _CYCLE_METRICS:
        for claim in judged.of("effect", metric):
            yield from _of_effect(claim, _true_effect(claim, sweep.truth, measured))
    for claim in judged.of("against control"):
        truth = sweep.truth.difference("tok_s", members[claim.subject], members[claim.reference or ""])
        yield from _of_interval("against control", claim, np.expm1(truth))
        if abs(truth) < _EQUAL:
            yield "false against the control", float(claim.verdict in _CLAIMED)
    for kind, name in _LEVELS:
        for claim in judged.of(kind):
            own = sweep.truth_at(claim.concurrency)
            truth = own.value("tok_s", members[claim.subject]) * np.exp(-shift)
            yield from _of_interval(name, claim, truth, relative_to=truth)
    for claim in judged.of("pays"):
        own = sweep.truth_at(claim.concurrency)
        truth = own.difference("tok_s", members[claim.subject], members[claim.reference or ""])
        yield from _of_pays(claim, float(np.expm1(truth)), is_unfinished=sweep.plan.stop_after is not None)
    yield from _of_needs(sweep, judged, members)
    if sweep.outlier is not None:
        yield "outlier named", float(any(name in judged.text for name in sweep.trials_of(sweep.outlier)))


def _true_effect(claim: Claim, truth: Truth, measured: Sequence[Configuration]) -> float:
    """Relative: over all pairs of measured configurations that differ in the claim's dimension alone."""
    assert claim.dimension is not None
    dimension = _DIMENSIONS[claim.dimension]
    rest = [name for name in _DIMENSIONS if name != claim.dimension]

    def key(member: Configuration) -> tuple[str, ...]:
        return tuple(_DIMENSIONS[name](member) for name in rest)

    drafts_only = claim.dimension != "nccl" or claim.metric != "tok_s"
    usable = [member for member in measured if member.speculates or not drafts_only]
    references = {key(member): member for member in usable if dimension(member) == claim.reference}
    pairs = [
        (member, references[key(member)])
        for member in usable
        if dimension(member) == claim.subject and key(member) in references
    ]
    return float(np.expm1(truth.contrast(claim.metric, pairs)))


def _of_effect(claim: Claim, truth: float) -> Iterator[tuple[str, float]]:
    name = "NCCL effects" if claim.dimension == "nccl" else "steps and top-k"
    if claim.metric != "tok_s":
        yield from _of_interval("phases", claim, truth)
        return
    yield from _of_interval(name, claim, truth)
    if abs(truth) < _EQUAL:
        yield f"false {name}", float(claim.verdict in _CLAIMED)
    elif claim.dimension == "nccl":
        yield "found", float(claim.verdict == ("better" if truth > 0 else "worse"))
        if abs(truth) > MARGIN:
            yield "called equivalent", float(claim.verdict == "equivalent")


def _of_pays(claim: Claim, truth: float, *, is_unfinished: bool) -> Iterator[tuple[str, float]]:
    yield from _of_interval("best against best", claim, truth)
    right = {"better": truth > _EQUAL, "worse": truth < -_EQUAL, "equivalent": abs(truth) <= MARGIN}
    yield "pays wrong", float(not right.get(claim.verdict or "", True))
    if is_unfinished:
        yield "pays denied", float(claim.verdict in ("worse", "equivalent"))
    if abs(truth) > MARGIN:
        yield "pays decided", float(claim.verdict in _CLAIMED)


def _of_needs(sweep: Sweep, judged: Judged, members: Mapping[str, Configuration]) -> Iterator[tuple[str, float]]:
    for kind, name in _NEEDS:
        for claim in judged.of(kind, "accept_length"):
            speculative, plain = members[claim.subject], members[claim.reference or ""]
            length = accept_length_for(
                sweep.truth.value("tok_s", plain), cycle_ms=sweep.truth.phases_ms(speculative)["cycle"]
            )
            accuracy = accuracy_for(length, num_steps=speculative.num_steps).conditional_accuracy
            truth = length if kind == "break-even" else accuracy
            if truth is not None:
                yield from _of_interval(name, claim, truth, relative_to=truth)


def _of_interval(name: str, claim: Claim, truth: float, *, relative_to: float = 1.0) -> Iterator[tuple[str, float]]:
    """Coverage and width (percent of `relative_to`); an interval that is missing covers nothing."""
    if claim.interval is None:
        yield f"{name} without interval", 1.0
        return
    low, high = claim.interval
    yield f"{name} covered", float(low <= truth <= high)
    yield f"{name} width", 100 * (high - low) / relative_to
