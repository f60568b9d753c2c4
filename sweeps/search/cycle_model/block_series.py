"""What trials tell of each factor of a cycle: its value block by block, what blocks differ by, which launch it was."""

from __future__ import annotations

import math
from itertools import chain as concatenated

import numpy as np

from sweeps.engines.summary import BlockSummary
from sweeps.search.cycle_model.terms import Factor, Floats
from sweeps.search.observations import Observation, Observations

_PRIOR_BLOCKS, _PRIOR_SPREAD = 3, 0.004
"""What is believed of blocks before any was seen: as many of this relative spread. Not tuned: a guess."""


def number_launches(observations: Observations) -> dict[str, int]:
    """Trial id -> number of the launch that served it."""
    number, launches = -1, {}
    for seen in observations:
        if seen.relaunched is not False or number < 0:
            number += 1
        launches[seen.trial.trial_id] = number
    return launches


def block_spread(series: list[Floats]) -> float:
    """Relative standard deviation of a block within its trial."""
    deviations = [values / values.mean() - 1.0 for values in series if values.size > 2]
    squares = sum(float((each**2).sum()) for each in deviations) + _PRIOR_BLOCKS * _PRIOR_SPREAD**2
    return math.sqrt(squares / (sum(each.size - 1 for each in deviations) + _PRIOR_BLOCKS))


def forward_ms(block: BlockSummary) -> float | None:
    """The target's part of a cycle: verify with speculation, a plain step without; None if no phase was timed."""
    return block.verify_ms if block.verify_ms is not None else block.verify_forward_ms


def series_of(factor: Factor, seen: Observation) -> Floats:
    """A factor's value of each block; a launch's first block is left out if there are two others."""
    values: list[float] = []
    for block in seen.blocks:
        value = {
            "forward": forward_ms(block),
            "draft": block.draft_ms,
            "rest": None if block.gap_ms is None else block.gap_ms + (block.extend_ms or 0.0),
        }[factor]
        if value is not None:
            values.append(value)
    if seen.relaunched is not False and len(values) > 2:
        values = values[1:]
    return np.array(values)


def overheads(trials: list[Observation]) -> tuple[float, float]:
    """Measured tok/s over accept length / cycle time, with and without speculation: batch size, what no phase has."""
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for seen in trials:
        for block in seen.blocks:
            if block.cycle_ms and block.tok_s is not None:
                ratio = block.tok_s * block.cycle_ms / (1000.0 * (block.accept_length or 1.0))
                ratios[seen.trial.configuration.speculates].append(ratio)
    every = list(concatenated(*ratios.values())) or [1.0]
    with_speculation, without = (float(np.median(ratios[key] or every)) for key in (True, False))
    return with_speculation, without
