"""What would have to change for speculation to pay: milliseconds to save, tokens to accept, accuracy to reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.judge.break_even import Accuracy, accept_length_for, accuracy_for
from analysis.judge.phases import Phases

_DEEPER = 3
"""Step counts shown beyond the largest one that was run."""
_STRAIGHT = 0.03
"""Share of a cycle by which a step count may miss the line, up to which the line speaks for step counts not run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """What time in one phase is worth, at today's accept length."""

    phase: str
    ms: float
    share: float
    tok_s_1ms_less: float | None
    """None where the phase is shorter than 1 ms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepNeed:
    """What a step count asks of the drafter."""

    num_steps: int
    cycle_ms: float
    estimated: bool
    """The cycle time lies on the line through the step counts that were run."""
    accept_length_today: float | None
    break_even: Accuracy
    target: Accuracy | None


def savings(today: Phases) -> tuple[Saving, ...]:
    """By phase, longest first. Throughput is tokens / cycle time: a millisecond is worth the same in every phase."""
    if today.cycle_ms is None or today.tok_s is None:
        return ()
    cycle_ms, tok_s = today.cycle_ms, today.tok_s
    named = {"verify": today.verify_ms, "draft": today.draft_ms, "extend": today.extend_ms, "gap": today.gap_ms}
    found = [
        Saving(
            phase=phase,
            ms=ms,
            share=ms / cycle_ms,
            tok_s_1ms_less=tok_s * cycle_ms / (cycle_ms - 1) if ms >= 1 else None,
        )
        for phase, ms in named.items()
        if ms is not None and 0 < ms < cycle_ms
    ]
    return tuple(sorted(found, key=lambda saving: -saving.ms))


def ms_to_break_even(today: Phases, *, baseline_tok_s: float) -> float | None:
    """Milliseconds that the cycle must lose to be as fast as no speculation; negative: what it has to spare."""
    if today.cycle_ms is None or today.tok_s is None:
        return None
    return today.cycle_ms * (1 - today.tok_s / baseline_tok_s)


def step_needs(chain: Sequence[Phases], *, baseline_tok_s: float, target_tok_s: float | None) -> tuple[StepNeed, ...]:
    """Accuracy needed by step count, each with the cycle time that such a chain takes.

    Step counts that were not run are there only if those that were lie on a line.

    Args:
        chain: configurations that differ in their step count alone, at top-k 1.
    """
    timed = {each.num_steps: each for each in chain if each.cycle_ms is not None}
    if not timed:
        return ()
    steps = sorted(timed)
    cycles = [cycle_ms for each in steps if (cycle_ms := timed[each].cycle_ms) is not None]
    further: list[int] = []
    line = _line(steps, cycles)
    if line is not None:
        further = [each for each in range(steps[0], steps[-1] + _DEEPER + 1) if each not in timed]
    needs = []
    for num_steps in sorted([*steps, *further]):
        known = timed.get(num_steps)
        cycle_ms = known.cycle_ms if known is not None else None
        if cycle_ms is None:
            assert line is not None
            cycle_ms = line[0] + line[1] * num_steps
        wanted = accept_length_for(baseline_tok_s, cycle_ms=cycle_ms)
        needs.append(
            StepNeed(
                num_steps=num_steps,
                cycle_ms=cycle_ms,
                estimated=known is None,
                accept_length_today=None if known is None else known.accept_length,
                break_even=accuracy_for(wanted, num_steps=num_steps),
                target=None
                if target_tok_s is None
                else accuracy_for(accept_length_for(target_tok_s, cycle_ms=cycle_ms), num_steps=num_steps),
            )
        )
    return tuple(needs)


def _line(steps: Sequence[int], cycles_ms: Sequence[float]) -> tuple[float, float] | None:
    """Intercept and slope (never below 0: more steps are never less work); None if the points are not on a line."""
    if len(steps) < 2:
        return None
    at, ms = np.array(steps, dtype=float), np.array(cycles_ms)
    slope, intercept = map(float, np.polyfit(at, ms, 1))
    if slope < 0:
        slope, intercept = 0.0, float(ms.mean())
    missed = np.abs(intercept + slope * at - ms) / ms
    return (intercept, slope) if float(missed.max()) <= _STRAIGHT else None
