"""Acceptance of a chain of drafts, position by position: one trial's accept histogram informs every smaller step count.

logit P(position i accepted | all before it were) = theta_i + delta_b, with a smooth prior over positions and one
difficulty per block, since all trials run the same blocks. AL_k = 1 + sum over i <= k of P(first i accepted). The
posterior is Laplace's, joint over positions and blocks. Numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sweeps.engines.summary import BlockSummary

Floats = NDArray[np.float64]

_FIRST, _FIRST_SPREAD = 0.4, 1.0
"""Mean and standard deviation of theta at the first position, in logits: 37 to 80 % accepted. Not tuned: a guess."""
_STEP, _STEP_SPREAD = -0.05, 0.4
"""Mean and standard deviation of theta's change from position to position, in logits. Not tuned: a guess."""
_DIFFICULTY_SPREAD = 0.25
"""Standard deviation of the difficulty of blocks, in logits, until they tell; it counts as much as two of them. Not
tuned: a guess."""
_LEAST_VARIANCE = 0.02
"""Added to the variance of tokens per cycle: a block of equal cycles is not exact. Not tuned: a guess."""
_NEWTON_STEPS = 12
"""At most; the iteration ends once nothing changes by 1e-6 logits."""
_SPREAD_STEPS = 2
"""Of expectation maximisation for each fit; later fits go on from there."""
_JITTER = 1e-9
"""Added to the covariance so that its Cholesky factor exists."""


@dataclass(slots=True)
class ChainModel:
    """Posterior of one drafter's chain.

    Args:
        positions: largest step count of the space.
        blocks: measured blocks of a trial.
    """

    positions: int
    blocks: int
    _spread: float = _DIFFICULTY_SPREAD
    _mean: Floats | None = None
    _factor: Floats | None = None

    def fit(self, trials: Sequence[tuple[int, Sequence[BlockSummary]]]) -> None:
        """Fit (steps, blocks) of chain trials; the prior alone if there are none."""
        for _ in range(_SPREAD_STEPS):
            self._fit(trials)
            self._learn_spread()

    def _fit(self, trials: Sequence[tuple[int, Sequence[BlockSummary]]]) -> None:
        size = self.positions + self.blocks
        precision, centre = self._prior()
        accepted, reached = self._counts(trials)
        lengths = [
            (steps, block)
            for steps, blocks in trials
            for block in blocks
            if block.accept_histogram is None and block.accept_length is not None and block.block_index < self.blocks
        ]
        state = centre.copy() if self._mean is None else self._mean.copy()
        curvature = precision
        for _ in range(_NEWTON_STEPS):
            theta, delta = state[: self.positions], state[self.positions :]
            rate = 1.0 / (1.0 + np.exp(-(theta[:, None] + delta[None, :])))
            slope, weight = accepted - reached * rate, reached * rate * (1.0 - rate)
            gradient = np.concatenate([slope.sum(axis=1), slope.sum(axis=0)]) - precision @ (state - centre)
            curvature = precision.copy()
            curvature[np.arange(size), np.arange(size)] += np.concatenate([weight.sum(axis=1), weight.sum(axis=0)])
            curvature[: self.positions, self.positions :] += weight
            curvature[self.positions :, : self.positions] += weight.T
            for steps, block in lengths:
                self._add_length(steps, block, rate, gradient, curvature)
            change = np.clip(np.linalg.solve(curvature, gradient), -1.0, 1.0)
            state = state + change
            if np.abs(change).max() < 1e-6:
                break
        self._mean = state
        self._factor = np.asarray(np.linalg.cholesky(np.linalg.inv(curvature) + _JITTER * np.eye(size)), dtype=float)

    def _learn_spread(self) -> None:
        """One step of expectation maximisation."""
        assert self._mean is not None, "spread of a chain that has not been fitted"
        assert self._factor is not None
        squares = self._mean[self.positions :] ** 2 + (self._factor[self.positions :] ** 2).sum(axis=1)
        self._spread = float(np.sqrt((squares.sum() + 2 * _DIFFICULTY_SPREAD**2) / (self.blocks + 2)))

    def draw(self, normals: Floats) -> Floats:
        """Accept length by step count, (positions, draws): [k - 1] over all blocks of a trial, tokens over cycles.

        Blocks have equally many tokens, so this is the harmonic mean over blocks.

        Args:
            normals: standard normal, (positions + blocks, draws).
        """
        assert self._mean is not None, "draws of a chain that has not been fitted"
        assert self._factor is not None
        state = self._mean[:, None] + self._factor @ normals
        logits = state[: self.positions, None, :] + state[None, self.positions :, :]
        survival = np.cumprod(1.0 / (1.0 + np.exp(-logits)), axis=0)
        by_block = 1.0 + np.cumsum(survival, axis=0)
        harmonic: Floats = 1.0 / (1.0 / by_block).mean(axis=1)
        return harmonic

    def expected(self, depth: float, block_indices: Sequence[int]) -> float:
        """Accept length of a chain over some blocks, tokens over cycles, at the posterior's mode.

        Args:
            depth: steps; it may end within one.
        """
        assert self._mean is not None, "expectation of a chain that has not been fitted"
        known = [self._mean[self.positions + index] if index < self.blocks else 0.0 for index in block_indices]
        logits = self._mean[: self.positions, None] + np.array(known)[None, :]
        survival = np.cumprod(1.0 / (1.0 + np.exp(-logits)), axis=0)
        share = np.clip(depth - np.arange(self.positions), 0.0, 1.0)
        lengths = 1.0 + (survival * share[:, None]).sum(axis=0)
        return float(len(known) / np.sum(1.0 / lengths))

    def _prior(self) -> tuple[Floats, Floats]:
        size = self.positions + self.blocks
        differences = np.eye(self.positions) - np.eye(self.positions, k=-1)
        spreads = np.array([_FIRST_SPREAD, *[_STEP_SPREAD] * (self.positions - 1)])
        precision = np.zeros((size, size))
        precision[: self.positions, : self.positions] = differences.T @ np.diag(spreads**-2) @ differences
        blocks = np.arange(self.positions, size)
        precision[blocks, blocks] = self._spread**-2
        centre = np.zeros(size)
        centre[: self.positions] = _FIRST + _STEP * np.arange(self.positions)
        return precision, centre

    def _counts(self, trials: Sequence[tuple[int, Sequence[BlockSummary]]]) -> tuple[Floats, Floats]:
        """(positions, blocks): cycles in which a position was accepted, and in which it could have been."""
        accepted = np.zeros((self.positions, self.blocks))
        reached = np.zeros_like(accepted)
        for steps, blocks in trials:
            for block in blocks:
                if block.accept_histogram is None or block.block_index >= self.blocks:
                    continue
                padded = np.zeros(steps + 2)
                histogram = np.array(block.accept_histogram[: steps + 2], dtype=float)
                padded[: histogram.size] = histogram
                at_least = padded[::-1].cumsum()[::-1]
                reached[:steps, block.block_index] += at_least[1 : steps + 1]
                accepted[:steps, block.block_index] += at_least[2 : steps + 2]
        return accepted, reached

    def _add_length(self, steps: int, block: BlockSummary, rate: Floats, gradient: Floats, curvature: Floats) -> None:
        """Gauss-Newton term of a block that has only a mean accept length (several requests at a time)."""
        assert block.accept_length is not None
        column = rate[:steps, block.block_index]
        survival = np.cumprod(column)
        tail = survival[::-1].cumsum()[::-1]
        jacobian = np.zeros(gradient.size)
        jacobian[:steps] = (1.0 - column) * tail
        jacobian[self.positions + block.block_index] = jacobian[:steps].sum()
        weight = 1.0 / length_error(block, steps) ** 2
        gradient += weight * jacobian * (block.accept_length - 1.0 - survival.sum())
        curvature += weight * np.outer(jacobian, jacobian)


def length_error(block: BlockSummary, steps: int) -> float:
    """Standard error of a block's accept length: from its histogram, or of a geometric law cut at `steps` + 1."""
    length = block.accept_length or 1.0
    if block.accept_histogram is not None and sum(block.accept_histogram) > 1:
        counts = np.array(block.accept_histogram, dtype=float)
        tokens = np.arange(counts.size)
        variance = float((counts * (tokens - length) ** 2).sum() / counts.sum())
    else:
        variance = min(length * (length - 1.0), steps**2 / 4.0)
    return float(np.sqrt((variance + _LEAST_VARIANCE) / max(1, block.num_cycles)))
