"""What the package's own judgement shows of a sweep, as a flat list of claims.

This is all that the benchmark calls of `analysis`: `analysis.data.load.from_tables` makes `Results`, and
`analysis.judge.verdict.verdict` judges them. The claims are every number that the report shows with an interval, or
should: levels, differences to the control, effects of dimensions, best against best, break-even and needed accuracy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from analysis.data.load import Results
from analysis.judge.claims import Effect
from analysis.judge.pays import Pays
from analysis.judge.sides import Side
from analysis.judge.verdict import SweepVerdict, verdict

Kind = Literal["level", "best level", "against control", "effect", "pays", "break-even", "accuracy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One number."""

    kind: Kind
    metric: str
    subject: str
    """A configuration id; a value of `dimension` for an effect."""
    reference: str | None = None
    """Likewise; None for a level."""
    dimension: str | None = None
    value: float
    """Relative for differences."""
    interval: tuple[float, float] | None
    verdict: str | None = None
    concurrency: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One sweep, judged."""

    claims: tuple[Claim, ...]
    text: str
    """Everything that names trials and launches: warnings."""

    def of(self, kind: Kind, metric: str = "tok_s") -> Iterator[Claim]:
        """Claims of one kind."""
        return (claim for claim in self.claims if claim.kind == kind and claim.metric == metric)


def judge(results: Results) -> Judged:
    """Ask `analysis`."""
    found = verdict(results)
    return Judged(claims=tuple(_claims(found)), text="\n".join(found.warnings))


def _claims(found: SweepVerdict) -> Iterator[Claim]:
    control = found.control.configuration_id if found.control is not None else None
    for side in found.sides:
        yield _of_level("level", side)
        if side.against_control is not None:
            yield _of_effect("against control", side.against_control, side.configuration_id, control)
    for factor in found.factors:
        if factor.effect is not None:
            yield _of_effect("effect", factor.effect, factor.value, factor.reference, factor.dimension)
    yield from _of_answers(found.best, found.speculation_pays, 1)
    for there in found.by_concurrency:
        if there.concurrency != found.concurrency:
            yield from _of_answers(there.best, there.speculation_pays, there.concurrency)
    pays, needed = found.speculation_pays, found.break_even
    if needed is not None and pays.speculative is not None and pays.plain is not None:
        sides = pays.speculative.configuration_id, pays.plain.configuration_id
        accuracy = needed.accuracy
        yield _of_need("break-even", sides, needed.accept_length, getattr(needed, "interval", None))
        if accuracy.conditional_accuracy is not None:
            yield _of_need("accuracy", sides, accuracy.conditional_accuracy, getattr(accuracy, "interval", None))


def _of_answers(best: Side | None, pays: Pays, concurrency: int) -> Iterator[Claim]:
    if best is not None:
        yield replace(_of_level("best level", best), concurrency=concurrency)
    if pays.effect is not None and pays.speculative is not None and pays.plain is not None:
        sides = pays.speculative.configuration_id, pays.plain.configuration_id
        yield replace(_of_effect("pays", pays.effect, *sides), verdict=pays.verdict, concurrency=concurrency)


def _of_level(kind: Kind, side: Side) -> Claim:
    return Claim(kind=kind, metric="tok_s", subject=side.configuration_id, value=side.tok_s, interval=side.interval)


def _of_need(kind: Kind, sides: tuple[str, str], value: float, interval: tuple[float, float] | None) -> Claim:
    return Claim(
        kind=kind, metric="accept_length", subject=sides[0], reference=sides[1], value=value, interval=interval
    )


def _of_effect(kind: Kind, effect: Effect, subject: str, reference: str | None, dimension: str | None = None) -> Claim:
    return Claim(
        kind=kind,
        metric=effect.metric,
        subject=subject,
        reference=reference,
        dimension=dimension,
        value=effect.effect,
        interval=effect.interval,
        verdict=effect.verdict,
    )
