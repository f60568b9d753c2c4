"""The most that a running trial can still reach, against the incumbent. A pure function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sweeps.search.cycle_model.terms import Floats

_LAUNCH_SPREAD = 0.004
"""Least relative difference of cycle times between launches.

A guess between 0.1 % (founding case) and 0.55 % (two H200), see `noise.launch` in `sweeps/machines`. Half or 1.5 times
of it changes no median by more than 5 % (docs/search.md, constants)."""
_UNSETTLED = 0.01
"""Relative error of the first block after a launch, divided by the blocks seen. A guess, as flat as the one above."""
_SINGLE_BLOCK = 0.01
"""Relative error of a cycle time of which one block was seen. Not tuned: a guess."""
_BETWEEN_TRIALS = 0.01
"""Relative difference of accept length between trials of one configuration. A guess, as flat as the one above."""
_LEAST_VARIANCE = 1e-6
"""Of a log accept length, so that draws that are all equal can be divided by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draws:
    """Posterior draws of one configuration, (draws,)."""

    tok_s: Floats
    cycle_ms: Floats
    accept_length: Floats


def prune_bound(
    cycles_ms: Sequence[float],
    own: Draws,
    incumbent_tok_s: Floats,
    *,
    launch_spread: float,
    num_steps: int,
    length: tuple[float, float] | None,
    sigmas: float,
) -> dict[str, float] | None:
    """The optimistic throughput of a running trial and the incumbent's, tok/s; None without a timed block.

    Optimistic is the smaller of two: the posterior of the accept length, joined with what this trial showed, over the
    measured cycle; and steps + 1 tokens over it. Both `sigmas` standard deviations up. Everything is done in logs.

    Args:
        cycles_ms: mean cycle time of each block so far.
        incumbent_tok_s: posterior draws of the incumbent, (draws,).
        launch_spread: relative standard deviation of cycle times between launches of one configuration.
        num_steps: of the trial; 0 without speculation.
        length: log of the accept length that the trial showed, and its standard error; None without one.
    """
    cycles = np.array(cycles_ms)
    if cycles.size > 2:  # a launch's first block is slow
        cycles = cycles[1:]
    if not cycles.size:
        return None
    cycle_ms = float(cycles.mean())
    blocks = float(cycles.std(ddof=1) / cycle_ms / math.sqrt(cycles.size)) if cycles.size > 1 else _SINGLE_BLOCK
    cycle_error = math.hypot(blocks, max(_LAUNCH_SPREAD, launch_spread), _UNSETTLED / cycles.size)
    reference = np.log(incumbent_tok_s)
    relative = np.log(own.accept_length) - reference
    scale = float(np.median(np.log(own.tok_s * own.cycle_ms / own.accept_length)))
    mean, variance = float(relative.mean()), float(relative.var()) + _LEAST_VARIANCE
    if length is not None:
        value, error = length
        weight = 1.0 / (error**2 + float(reference.var()) + _BETWEEN_TRIALS**2)
        mean = (mean / variance + (value - float(reference.mean())) * weight) / (1.0 / variance + weight)
        variance = 1.0 / (1.0 / variance + weight)
    level = float(np.exp(reference).mean())
    optimistic = mean + sigmas * math.hypot(math.sqrt(variance), cycle_error) + scale - math.log(cycle_ms)
    hard = math.log(num_steps + 1.0) - math.log(level)
    hard += scale - math.log(cycle_ms) + sigmas * cycle_error
    bounded = min(optimistic, hard)
    return {
        "optimistic": level * math.exp(bounded),
        "incumbent": level,
        "accept_length_bound": level * math.exp(bounded + math.log(cycle_ms) - scale),
        "cycle_ms": cycle_ms,
    }
