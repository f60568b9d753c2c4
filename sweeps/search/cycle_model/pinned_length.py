"""Accept length if every server simulates it: known beforehand, whatever the drafter. No Optuna."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from sweeps.measure.records import Finding
from sweeps.search.cycle_model.terms import Floats
from sweeps.search.observations import Observation
from sweeps.spec.space import Configuration

_ERROR = 0.001
"""Relative standard error of a measured length: if the pinned one is no whole number, each cycle draws one. A guess."""


class PinnedLength:
    """`Lengths` of a sweep with `acceptance: pinned`.

    A configuration's length is what trials of the same drafting showed, else what SGLang makes of the pinned one: steps
    + 1 if that is less. A model of drafters would smooth over that kink.
    """

    def __init__(self, members: Sequence[Configuration], *, pinned: float) -> None:
        self._members = members
        self._pinned = pinned
        self._shown: dict[tuple[object, ...], float] = {}

    def fit(self, trials: list[Observation], launches: Mapping[str, int]) -> Finding | None:
        """Take the lengths of the newest trial of each drafting."""
        for seen in trials:
            if (length := _length(seen)) is not None:
                self._shown[seen.trial.configuration.drafting] = length
        return None

    def draw(self, draws: int, rng: np.random.Generator) -> Floats:
        """(configurations, draws) in tokens per cycle, every draw the same; 1 without speculation."""
        lengths = [self._shown.get(each.drafting, self._simulated(each)) for each in self._members]
        return np.repeat(np.array(lengths)[:, None], draws, axis=1)

    def adjusted(self, seen: Observation) -> tuple[float, float] | None:
        """(log of a trial's accept length, its standard error); None without any."""
        length = _length(seen)
        return None if length is None else (math.log(length), _ERROR)

    def _simulated(self, configuration: Configuration) -> float:
        return min(self._pinned, configuration.num_steps + 1.0)


def _length(seen: Observation) -> float | None:
    told = [block for block in seen.blocks if block.accept_length is not None]
    if not told or not seen.trial.configuration.speculates:
        return None
    tokens = sum((block.accept_length or 0.0) * block.num_cycles for block in told)
    return tokens / sum(block.num_cycles for block in told)
