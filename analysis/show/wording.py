"""How verdicts and settings are put into words; shared by the page and the short form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from analysis.judge.claims import Effect
from analysis.judge.phases import Communication
from analysis.judge.verify_parts import VerifyParts

if TYPE_CHECKING:
    from analysis.judge.anchors import ServerDrift
    from analysis.judge.sides import Side
    from analysis.judge.verdict import SweepVerdict

METRIC_NAMES: Mapping[str, str] = {
    "tok_s": "throughput",
    "accept_length": "accept length",
    "draft_ms": "draft time",
    "verify_ms": "verify time",
    "extend_ms": "extend time",
}
_PAYS = {
    "better": "pays",
    "worse": "does not pay",
    "equivalent": "makes no difference",
    "undecided": "may or may not pay",
    "not exercised": "was not exercised",
}


def verdict_words(effect: Effect | None) -> str:
    """`better`, `equivalent within 1 %`, ..."""
    if effect is None:
        return "undecided"
    return f"equivalent within {effect.margin:.0%}" if effect.verdict == "equivalent" else effect.verdict


def interval_heading(sides: Sequence[Side]) -> str:
    """Over a column of throughput intervals: what they do not cover is said there."""
    return "95% interval" + ("\n(spread of launches from other machines)" if blocks_only(sides) else "")


def blocks_only(sides: Sequence[Side]) -> bool:
    """Whether the intervals of single configurations do not cover differences between launches."""
    return any(side.interval_covers != "launches and blocks" for side in sides)


def percent(value: float) -> str:
    """Signed, with as many digits as matter."""
    return f"{value:+.0%}" if abs(value) >= 1 else f"{value:+.1%}" if abs(value) >= 0.1 else f"{value:+.2%}"


def nccl_answer(verdict: SweepVerdict) -> str:
    """Whether the NCCL sets matter, in one sentence; empty if the sweep had one set."""
    groups: dict[str, list[str]] = {}
    for factor in verdict.factors:
        if factor.dimension == "nccl" and factor.metric == "tok_s":
            groups.setdefault(verdict_words(factor.effect), []).append(factor.value)
    if not groups:
        return ""
    reference = next(each.reference for each in verdict.factors if each.dimension == "nccl")
    order = sorted(groups, key=lambda words: (words != "better", words != "worse", words))
    told = "; ".join(f"{words}: {', '.join(groups[words])}" for words in order)
    return f"NCCL sets against {reference}, by throughput: {told}."


def communication_bound(found: Communication) -> str:
    """The most that communication settings can win."""
    if not found.ms:
        return "No cycle has communication, so no NCCL setting can make it faster."
    phases = ", ".join(f"{phase} {us / 1000:.2f} ms" for phase, us in found.us_by_phase.items())
    told = (
        f"Communication is {found.share:.1%} of the kernel time in verify, and {found.ms:.2f} ms of a cycle of "
        f"{found.cycle_ms:.1f} ms ({phases}), by the trace of {found.label}."
    )
    if not found.by_nccl:
        return f"{told} Another kernel than NCCL's does these all-reduces, so this does not bound what NCCL can win."
    if found.most_tok_s is None:
        return f"{told} Its kernels run beside others, so this does not bound what NCCL can win."
    return (
        f"{told} Without communication, {found.tok_s:.1f} tok/s would become {found.most_tok_s:.1f} "
        f"({found.most_tok_s / found.tok_s - 1:+.1%}): NCCL settings cannot win more than that."
    )


def verify_parts_line(found: VerifyParts) -> str:
    """What makes verify longer than a decode step, and what its longest part is worth."""
    parts = ", ".join(f"{part.kind} {part.extra_ms:+.2f} ms" for part in found.parts)
    told = (
        f"Verify takes {found.verify_ms:.2f} ms, a plain decode step {found.decode_ms:.2f} ms: {parts} (shares of the "
        f"traced kernel time; {found.label})."
    )
    most = found.parts[0]
    if most.tok_s is None or most.break_even_accept_length is None:
        return told
    return (
        f"{told} If {most.kind} took no longer in verify than in a decode step, {found.tok_s:.1f} tok/s would become "
        f"{most.tok_s:.1f}, and break-even would need an accept length of {most.break_even_accept_length:.2f}."
    )


def launched_alone(verdict: SweepVerdict) -> str:
    """How far the winner's own launch is from its state; empty if it was not both."""
    held = verdict.confirmation
    if held is None:
        return ""
    low, high = held.interval
    lead = "" if held.lead_alone is None else f" Against the control it is {held.lead_alone:+.1%}."
    return (
        f" Launched by itself ({', '.join(held.trial_ids)}), it is {held.apart:+.2%} against its state in a server of "
        f"many (paired by block, 95% interval {low:+.2%} to {high:+.2%}).{lead}"
    )


def command_note(verdict: SweepVerdict) -> str:
    """What to know before running a simulated winner's command."""
    return (
        " The command is a template: replace MODEL with the path of the model." if verdict.engine == "simulated" else ""
    )


def crossover(verdict: SweepVerdict) -> str:
    """At which concurrencies speculation pays, and which one the search used."""
    groups: dict[str, list[str]] = {}
    for each in verdict.by_concurrency:
        groups.setdefault(_PAYS[each.speculation_pays.verdict], []).append(str(each.concurrency))
    words = "; ".join(f"{word} at {', '.join(numbers)}" for word, numbers in groups.items())
    pruned = sum(side.pruned for side in verdict.sides)
    left_out = f" ({pruned} pruned configurations are left out)" if pruned else ""
    return (
        f"Requests at a time: speculation {words}. The search used {verdict.concurrency}. At the other numbers the "
        f"best is the best of what the search measured{left_out}."
    )


def drift_inside(drift: ServerDrift) -> str:
    """The drift by the anchors, in one or two sentences."""
    low, high = drift.interval
    measured = (
        f"Inside {drift.num_servers} server{'' if drift.num_servers == 1 else 's'}, the target alone (step count 0) "
        f"was measured {drift.num_anchors} times"
    )
    if high - low > 1:
        return f"{measured} within {drift.spread:.2%}. The time is too short to estimate a drift."
    return (
        f"{measured}: a drift of {drift.per_hour:+.2%} an hour (95% interval {low:+.2%} to {high:+.2%}), with a spread "
        f"of {drift.spread:.2%}."
    )


def hours(gpu_seconds: float) -> str:
    """GPU hours."""
    return f"{gpu_seconds / 3600:.2f}" if gpu_seconds < 36000 else f"{gpu_seconds / 3600:.1f}"
