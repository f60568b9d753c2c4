"""What the cycle model asks of a model of accept length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from sweeps.measure.records import Finding
from sweeps.search.cycle_model.terms import Floats
from sweeps.search.observations import Observation


class Lengths(Protocol):
    """Accept length of every configuration of a sweep: `LengthModel` learns it, `PinnedLength` knows it."""

    def fit(self, trials: list[Observation], launches: Mapping[str, int]) -> Finding | None:
        """Take in all trials, in the order of their start; what they contradict, if anything.

        Args:
            launches: trial id -> number of the launch that served it.
        """
        ...

    def draw(self, draws: int, rng: np.random.Generator) -> Floats:
        """Draws in tokens per cycle, (configurations, draws); 1 without speculation."""
        ...

    def adjusted(self, seen: Observation) -> tuple[float, float] | None:
        """Log of a trial's accept length as if it had run every block, and its standard error; None without any."""
        ...
