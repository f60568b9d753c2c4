"""What a simulated sweep sees of its truth: launches, drift, blocks, and the special troubles of some scenes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from benchmarks.verdict_scenes.truth import Array

Drift = Literal["none", "line", "step", "sine"]
HEAVY_DF = 3
"""Degrees of freedom of a t distribution with heavy tails, scaled to the standard deviation that was asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """Standard deviations and sizes are of the log of a cycle's time: 0.01 is 1 %."""

    launch: float = 0.005
    """Of launches without drafts; of all, unless `drafting_launch` says otherwise."""
    drafting_launch: float | None = None
    block: float = 0.01
    """Of a block, anew in every trial."""
    drafting_block: float | None = None
    drift: Drift = "none"
    drift_size: float = 0.08
    """From end to end of the drift over the whole sweep."""
    heavy: bool = False
    """Launches and blocks from a t distribution."""
    autocorrelation: float = 0.0
    """Of neighbouring blocks."""
    outlier: float = 0.0
    """By which one launch, not the first control's, is slower."""
    branches: float = 0.0
    """By which about half of all launches are slower."""
    warm_up: float = 0.0
    """By which the first block of a launch is slower."""
    interaction: float = 0.0
    """Of a launch's further effect on each step count."""
    communicator: float = 0.0
    """Of a communicator, in all states of one server that use it."""
    state: float = 0.0
    """Of a state of one server: its communicator together with its graphs."""
    node: float = 0.0
    """Between nodes."""

    def launch_sd(self, *, drafts: bool) -> float:
        """Of one launch."""
        return self.drafting_launch if drafts and self.drafting_launch is not None else self.launch

    def block_sd(self, *, drafts: bool) -> float:
        """Of one block."""
        return self.drafting_block if drafts and self.drafting_block is not None else self.block

    def standard(self, rng: np.random.Generator, *shape: int) -> Array:
        """Mean 0, standard deviation 1."""
        if not self.heavy:
            return rng.standard_normal(shape)
        drawn: Array = rng.standard_t(HEAVY_DF, shape) / np.sqrt(HEAVY_DF / (HEAVY_DF - 2))
        return drawn

    def blocks(self, rng: np.random.Generator, num_trials: int, num_blocks: int) -> Array:
        """(T, B) standardised noise of blocks, neighbours correlated."""
        fresh = self.standard(rng, num_trials, num_blocks)
        if self.autocorrelation:
            keep = self.autocorrelation
            for column in range(1, num_blocks):
                fresh[:, column] = keep * fresh[:, column - 1] + np.sqrt(1 - keep**2) * fresh[:, column]
        return fresh

    def drifted(self, rng: np.random.Generator, share: Array) -> Array:
        """Log slowness by share (0 to 1) of the sweep's time that has passed."""
        size = self.drift_size * rng.choice((-1.0, 1.0))
        shape: Array = np.zeros_like(share)
        if self.drift == "line":
            shape = share
        elif self.drift == "step":
            shape = (share > rng.uniform(0.2, 0.8)).astype(float)
        elif self.drift == "sine":
            shape = np.sin(2 * np.pi * (share + rng.uniform())) / 2
        return np.asarray(size * shape)
