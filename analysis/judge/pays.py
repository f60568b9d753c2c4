"""Whether speculation pays: the best speculative configuration against the best without speculation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.data.load import Results
from analysis.judge.apart import apart
from analysis.judge.claims import Effect, Verdict, withheld
from analysis.judge.effects import compare
from analysis.judge.fitted import Fitted
from analysis.judge.sides import Side


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
    """How choosing the best of many is accounted for, and what else the two sides differ in."""


def speculation_pays(
    results: Results, throughput: Fitted, sides: Sequence[Side], speculative: Side | None, plain: Side | None
) -> Pays:
    """Best against best, with the reason if nothing is said."""
    selection, effect, reason = "", None, None
    if results.pinned:
        reason = "acceptance was simulated (pinned)"
    elif speculative is None:
        reason = "no speculative configuration has results"
    elif plain is None:
        reason = "no configuration without speculation has results"
    else:
        effect, selection = _duel(throughput, sides, speculative, plain)
        others = apart(results, speculative.configuration_id, plain.configuration_id)
        selection = "; ".join(filter(None, (selection, others)))
        reason = "too few common blocks" if effect is None else effect.reason
        if effect is not None and effect.verdict in ("worse", "equivalent") and not results.search_ended:
            num_measured = sum(side.speculates for side in sides)
            reason = (
                f"the search was cut off after {num_measured} speculative configuration"
                f"{'' if num_measured == 1 else 's'}, and a faster one may be among those not measured"
            )
            effect = withheld(effect, reason)
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


def _duel(throughput: Fitted, sides: Sequence[Side], speculative: Side, plain: Side) -> tuple[Effect | None, str]:
    """Best against best. Each side was chosen by these same measurements, so its end of the interval is moved out."""
    among, notes = [], []
    for side in (speculative, plain):
        rivals = sum((each.speculates, each.pruned) == (side.speculates, side.pruned) for each in sides)
        among.append(rivals)
        name = "best speculative" if side.speculates else "best without speculation"
        if rivals > 1:
            notes.append(f"{name}: chosen among {rivals} by the same measurements, so its interval is widened")
        if side.pruned:
            notes.append(f"{name}: all were pruned, so it is judged on the {side.num_blocks} blocks that it ran")
    weights = {speculative.configuration_id: 1.0, plain.configuration_id: -1.0}
    return compare(throughput, weights, selected_among=(among[0], among[1])), "; ".join(notes)


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
