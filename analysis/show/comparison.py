"""Two sweeps side by side: markdown for a pull request, a document for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from analysis.judge.claims import Effect
from analysis.judge.comparison import METRICS, Comparison, Pair
from analysis.show.wording import percent, verdict_words
from sweeps.foreign_text import one_line

_HEADS = {
    "tok_s": "tok/s",
    "cycle_ms": "cycle ms",
    "draft_ms": "draft ms",
    "verify_ms": "verify ms",
    "extend_ms": "extend ms",
    "accept_length": "accept length",
}


def markdown(comparison: Comparison) -> str:
    """B against A: a headline, a table of throughputs, a table of phases, and what else is different."""
    return "\n".join(_lines(comparison)) + "\n"


def _lines(comparison: Comparison) -> Iterator[str]:
    one, two = map(_code, comparison.sweeps)
    crowd = f"{comparison.concurrency} request{'' if comparison.concurrency == 1 else 's'} at a time"
    yield f"### {two} against {one}, {crowd}"
    yield ""
    yield _headline(comparison)
    yield ""
    yield "| configuration | " + " | ".join(_HEADS[metric] for metric in METRICS) + " |"
    yield "|---|" + "---|" * len(METRICS)
    for pair in comparison.pairs:
        cells = (_cell(pair, metric) for metric in METRICS)
        yield f"| {_name(pair)} | {' | '.join(cells)} |"
    yield ""
    for column, (before, after) in comparison.changes.items():
        yield f"- {column.replace('_', ' ')}: {_code(before or 'not known')} → {_code(after or 'not known')}"
    for sweep, labels in zip((one, two), comparison.only_in, strict=True):
        if labels:
            yield f"- only in {sweep}: {', '.join(map(_code, labels[:8]))}{' and more' if len(labels) > 8 else ''}"
    reasons = dict.fromkeys(
        reason for pair in comparison.pairs if (effect := pair.effects["tok_s"]) and (reason := effect.reason)
    )
    yield from (f"- undecided: {one_line(reason)}" for reason in reasons)
    yield from (f"- {note}" for note in comparison.notes)


def _headline(comparison: Comparison) -> str:
    verdicts = [pair.verdict for pair in comparison.pairs]
    counts = {word: verdicts.count(word) for word in ("worse", "better", "equivalent", "undecided") if word in verdicts}
    told = ", ".join(f"{count} {word}" for word, count in counts.items())
    return f"**Throughput of {len(verdicts)} configuration{'' if len(verdicts) == 1 else 's'}: {told}.**"


def _name(pair: Pair) -> str:
    other = "" if pair.other_label is None else f" → {_code(pair.other_label)}"
    return _code(pair.label) + other


def _cell(pair: Pair, metric: str) -> str:
    before, after = pair.values[metric]
    effect = pair.effects[metric]
    if before is None or after is None:
        return "-"
    values = f"{before:.2f} → {after:.2f}"
    return values if effect is None else f"{values}<br>{percent(effect.effect)} {verdict_words(effect)}"


def _code(text: str) -> str:
    """Text of others as code: markdown and HTML in it stay text, and nobody is mentioned."""
    plain = one_line(text).replace("`", "'").replace("|", "\\|")
    return f"`{plain}`"


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """For programs. Missing is null; effects are of B relative to A."""
    return {
        "sweeps": list(comparison.sweeps),
        "concurrency": comparison.concurrency,
        "pairs": [
            {
                "configuration": pair.label,
                "other_configuration": pair.other_label,
                "verdict": pair.verdict,
                "metrics": {metric: _metric(pair, metric) for metric in METRICS},
            }
            for pair in comparison.pairs
        ],
        "changes": {column: list(values) for column, values in comparison.changes.items()},
        "only_in": [list(labels) for labels in comparison.only_in],
        "notes": list(comparison.notes),
    }


def _metric(pair: Pair, metric: str) -> dict[str, Any]:
    before, after = pair.values[metric]
    effect: Effect | None = pair.effects[metric]
    plain = None if effect is None else {**asdict(effect), "interval": list(effect.interval)}
    return {"before": before, "after": after, "effect": plain}
