"""When speculation pays, in closed form: throughput = accept length / cycle time. Pure; no tables, no plots.

Accept length (AL) counts the tokens of one draft -> verify -> extend cycle, bonus token included. With `K` draft steps
in a chain and the same chance `a` that a draft token is accepted given that all before it were, the mean number of
tokens per cycle is 1 + a + a^2 + ... + a^K = (1 - a^(K+1)) / (1 - a): Leviathan et al. 2023, "Fast Inference from
Transformers via Speculative Decoding", equation 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from scipy.optimize import brentq

DEFAULT_NUM_STEPS = 16
"""Draft steps where none are given: deep enough that the chain's length hardly limits an accuracy below 0.8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """The conditional accuracy that an accept length needs, or why there is none."""

    accept_length: float
    num_steps: int
    conditional_accuracy: float | None
    reason: str | None = None
    interval: tuple[float, float] | None = None
    """Of `conditional_accuracy`, 95 %; None if an end is out of reach."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakEven:
    """What a cycle time asks of a drafter."""

    cycle_ms: float
    baseline_tok_s: float
    num_steps: int
    accept_length: float
    """AL at which speculation is as fast as no speculation."""
    accuracy: Accuracy
    """For that AL."""
    interval: tuple[float, float] | None
    """Of `accept_length`, 95 %; None if no interval of cycle and baseline was given."""
    target_tok_s: float | None
    target_accept_length: float | None
    target_accuracy: Accuracy | None


def break_even(
    *,
    cycle_ms: float,
    baseline_tok_s: float,
    num_steps: int = DEFAULT_NUM_STEPS,
    target_tok_s: float | None = None,
    interval: tuple[float, float] | None = None,
) -> BreakEven:
    """Everything about one cycle time. Raises ValueError for what is not positive and finite, or `num_steps` < 1.

    Args:
        interval: of cycle x baseline in tokens, that is of the accept length needed.
    """
    needed = accept_length_for(baseline_tok_s, cycle_ms=cycle_ms)
    target = None if target_tok_s is None else accept_length_for(target_tok_s, cycle_ms=cycle_ms)
    return BreakEven(
        cycle_ms=cycle_ms,
        baseline_tok_s=baseline_tok_s,
        num_steps=num_steps,
        accept_length=needed,
        accuracy=_with_interval(accuracy_for(needed, num_steps=num_steps), interval),
        interval=interval,
        target_tok_s=target_tok_s,
        target_accept_length=target,
        target_accuracy=None if target is None else accuracy_for(target, num_steps=num_steps),
    )


def accept_length_for(tok_s: float, *, cycle_ms: float) -> float:
    """Tokens per cycle that make `tok_s` of cycles of `cycle_ms`. Raises ValueError unless both are positive."""
    for name, value in (("tok_s", tok_s), ("cycle_ms", cycle_ms)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}: wanted a positive, finite number, got {value}")
    return tok_s * cycle_ms / 1000


def accept_length_at(conditional_accuracy: float, *, num_steps: int) -> float:
    """Tokens per cycle of a chain of `num_steps` at a constant conditional accuracy in [0, 1]: from 1 to steps + 1.

    Summed by Horner's rule: the closed form loses all digits next to 1. Raises ValueError outside the ranges.
    """
    _check_steps(num_steps)
    if not 0.0 <= conditional_accuracy <= 1.0:
        raise ValueError(f"conditional_accuracy: wanted 0 to 1, got {conditional_accuracy}")
    length = 1.0
    for _ in range(num_steps):
        length = 1.0 + conditional_accuracy * length
    return length


def accuracy_for(accept_length: float, *, num_steps: int) -> Accuracy:
    """The constant conditional accuracy at which a chain of `num_steps` reaches `accept_length`.

    None with a reason where no accuracy does; 0 where the bonus token alone is enough. Raises ValueError for
    `num_steps` below 1.
    """
    _check_steps(num_steps)
    if accept_length > num_steps + 1:
        reason = f"accept length {accept_length:.2f} is out of reach: {_plural(num_steps)} give at most {num_steps + 1}"
        return Accuracy(accept_length=accept_length, num_steps=num_steps, conditional_accuracy=None, reason=reason)
    if accept_length <= 1.0:
        accuracy = 0.0
    else:
        accuracy = float(brentq(lambda a: accept_length_at(a, num_steps=num_steps) - accept_length, 0.0, 1.0))
    return Accuracy(accept_length=accept_length, num_steps=num_steps, conditional_accuracy=accuracy)


def _with_interval(accuracy: Accuracy, interval: tuple[float, float] | None) -> Accuracy:
    if interval is None:
        return accuracy
    ends = [accuracy_for(end, num_steps=accuracy.num_steps).conditional_accuracy for end in interval]
    low, high = ends
    return accuracy if low is None or high is None else replace(accuracy, interval=(low, high))


def _check_steps(num_steps: int) -> None:
    if num_steps < 1:
        raise ValueError(f"num_steps: wanted at least 1 draft step, got {num_steps}")


def _plural(num_steps: int) -> str:
    return f"{num_steps} draft step" + ("" if num_steps == 1 else "s")
