"""The model behind every comparison: what a cell's log value is made of, integrated over what is not known of it.

    log value of a cell = configuration + launch + communicator + drift + node + noise of its blocks

- configuration: main effects (drafting, NCCL set, further arguments) and deviations from them (set x kind of drafting,
  and the configuration's own), which shrink to zero unless the data ask for them.
- launch: shared by all cells of one server. Plain servers have a standard deviation; chain and tree servers have that
  deviation and more, because drafting adds host time. A share of it belongs to each drafting by itself.
- communicator: an NCCL set in a server that holds several sets.
- drift: a line and a random walk over the cells of a node, and steps if the data ask for them (another host or clock).

All of it is Gaussian given seven parameters (`analysis.judge.priors`). Their posterior is found by its mode and
integrated by importance sampling around it (`analysis.judge.spreads`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from analysis.judge.covariance import Cell, Covariance, inverse_of
from analysis.judge.drift import line, walk
from analysis.judge.outliers import name_outliers
from analysis.judge.priors import CENTRE, DOUBT, EVIDENCE, NAMES, PLACE, STARTS, STEP, STILL, Array
from analysis.judge.spreads import around, mode

_MOST_STEPS_OF_DRIFT = 1
"""Two steps around one launch would call its spread a drift."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Doubts:
    """What becomes of the posterior at the mode if one launch may be off by DOUBT: a change of rank one."""

    launches: tuple[str, ...]
    mean: Array
    """(C + 1,) without doubt."""
    covariance: Array
    """(C + 1, C + 1) without doubt."""
    directions: Array
    """(launches, C + 1): the mean moves along it, the covariance grows along it."""
    moves: Array
    """(launches,)"""
    growths: Array
    """(launches,)"""

    def contrasts(self, weights: Array) -> tuple[Array, Array]:
        """(K, launches) mean and variance of (K, C + 1) contrasts under the doubt of each launch."""
        along = weights @ self.directions.T
        variances = np.einsum("ki,ij,kj->k", weights, self.covariance, weights)
        return (weights @ self.mean)[:, None] + along * self.moves, variances[:, None] + along**2 * self.growths


@dataclass(frozen=True, kw_only=True, slots=True)
class Posterior:
    """A mixture of normals over the configurations and, last, over the mean of drift and nodes."""

    configurations: tuple[str, ...]
    weights: Array
    """(G,) of the components."""
    means: Array
    """(G, C + 1)"""
    covariances: Array
    """(G, C + 1, C + 1)"""
    doubts: Doubts
    outliers: Mapping[str, float]
    """Launches that the data single out -> by how many standard deviations they miss what all others predict."""
    drift: Array
    """(cells,) at the mode."""
    drift_covariance: Array
    """(cells, cells) of `drift`, at the mode."""
    parameters: Array
    """(G, 7) of the components, on their own scales: logarithms, and the logit of the share."""
    scales: Mapping[str, float]
    """Parameter -> posterior median."""


class _Model:
    """The covariance of some cells, their values, and what was taken into the model on the way."""

    def __init__(self, cells: Sequence[Cell], values: Array) -> None:
        self.launches = tuple(dict.fromkeys(cell.launch for cell in cells))
        self.served = np.array([[cell.launch == name for cell in cells] for name in self.launches])
        self.centre = float(values.mean())
        self.values = values - self.centre
        self.walk = walk(cells)
        self.stepped = np.zeros((len(cells),) * 2)
        drifting = self.walk @ self.walk.T + line(cells) if self.walk.shape[1] > 1 else np.zeros_like(self.stepped)
        self.covariance = Covariance(cells, drifting)

    def configurations(self, theta: Array, inverses: Array) -> tuple[Array, Array, Array]:
        """Means (G, C + 1), covariances, and gains (G, C + 1, n) of configurations and the mean drift and node.

        Args:
            theta: (G, 7).
            inverses: (G, n, n) of the covariance of the cells there.
        """
        covariance, size = self.covariance, len(self.covariance.names)
        own = covariance.configurations(theta)
        prior = np.zeros((len(theta), size + 1, size + 1))
        prior[:, :size, :size] = own
        squared = np.exp(2 * theta[:, PLACE["drift"]])
        still = self.stepped + covariance.nodes
        prior[:, size, size] = squared * covariance.walked.mean() + still.mean()
        cross = np.empty((len(theta), size + 1, len(self.values)))
        cross[:, :size] = own[:, :, covariance.rows]
        cross[:, size] = squared[:, None] * covariance.walked.mean(axis=0) + still.mean(axis=0)
        gains = cross @ inverses
        means: Array = gains @ self.values
        means[:, :size] += self.centre
        return means, prior - gains @ cross.transpose(0, 2, 1), gains

    def doubts(self, theta: Array, inverse: Array) -> Doubts:
        """Of every launch, if there are several; at (7,) parameters."""
        means, covariances, gains = self.configurations(theta[None], inverse[None])
        several = len(self.launches) > 1
        own = self.served[:, :].astype(float) if several else np.zeros((0, len(self.values)))
        weighed = own @ inverse
        growths = DOUBT**2 / (1 + DOUBT**2 * np.einsum("ln,ln->l", weighed, own))
        return Doubts(
            launches=self.launches if several else (),
            mean=means[0],
            covariance=covariances[0],
            directions=own @ gains[0].T,
            moves=-growths * (weighed @ self.values),
            growths=growths,
        )

    def add_step(self, inverse: Array) -> bool:
        """Give the drift a step before the cell at which it explains most. False if none is worth its evidence."""
        columns = (self.walk > 0).astype(float)
        solved = inverse @ columns
        height = STEP**2
        power = np.einsum("cj,cj->j", columns, solved)
        gain = 0.5 * height * (solved.T @ self.values) ** 2 / (1 + height * power) - 0.5 * np.log1p(height * power)
        best = int(np.argmax(gain))
        if gain[best] < np.log(len(gain)) + EVIDENCE:
            return False
        self.stepped = self.stepped + height * np.outer(columns[:, best], columns[:, best])
        self.covariance.base = self.covariance.base + self.stepped
        return True

    def drift(self, theta: Array, inverse: Array) -> tuple[Array, Array]:
        """(cells,) mean of the drift, steps included, and its covariance."""
        own = np.exp(2 * theta[PLACE["drift"]]) * self.covariance.walked + self.stepped
        return own @ (inverse @ self.values), own - own @ inverse @ own

    def surpluses(self, inverses: Array) -> Array:
        """(G,) variance of the values over what the model expects, main effects set apart; at least 1."""
        left = len(self.values) - np.einsum("ij,gji->g", self.covariance.fixed_cells, inverses)
        found: Array = np.maximum(1.0, self.values @ (inverses @ self.values).T / np.maximum(left, 1.0))
        return found


def fit(cells: Sequence[Cell], values: Array) -> Posterior:
    """The posterior of every configuration among `cells` (at least one), whose log values are `values`."""
    model = _Model(cells, values)
    covariance = model.covariance
    starts = (CENTRE + STARTS)[:, covariance.active]
    free, information, _ = min((mode(covariance, model.values, start) for start in starts), key=lambda found: found[2])
    for _ in range(_MOST_STEPS_OF_DRIFT if covariance.active[PLACE["drift"]] else 0):
        there = inverse_of(covariance.total(covariance.whole(free)))
        if not model.add_step(there):
            break
        free, information, _ = mode(covariance, model.values, free)
    middle = covariance.whole(free)
    inverse = inverse_of(covariance.total(middle))
    outliers = name_outliers(covariance, model.values, dict(zip(model.launches, model.served, strict=True)), free)
    points, weights, inverses = around(covariance, model.values, free, information)
    parameters = covariance.whole(points)
    means, covariances, _ = model.configurations(parameters, inverses)
    drift, drift_covariance = model.drift(middle, inverse)
    return Posterior(
        configurations=covariance.names,
        weights=weights,
        means=means,
        covariances=covariances,
        doubts=model.doubts(middle, inverse),
        outliers=outliers,
        drift=drift,
        drift_covariance=drift_covariance,
        parameters=parameters,
        scales=_medians(covariance.active, parameters, weights),
    )


def follow(whole: Posterior, cells: Sequence[Cell], values: Array, rows: Sequence[int]) -> Posterior:
    """The posterior of a part of the cycle, whose spreads are taken from the whole: the controls have no such part.

    Drift is taken out with its own uncertainty. A part that varies more than the whole has wider intervals by as much.

    Args:
        values: log of a time; `whole` is of throughput.
        rows: of each cell, the place of the same cell in `whole`.
    """
    model = _Model(cells, values + whole.drift[rows] - whole.drift.mean())
    odd = model.served[[name in whole.outliers for name in model.launches]].astype(float)
    model.covariance.base = model.covariance.base + whole.drift_covariance[np.ix_(rows, rows)] + DOUBT**2 * odd.T @ odd
    points = whole.parameters.copy()
    points[:, PLACE["drift"]] = STILL
    inverses = inverse_of(model.covariance.totals(points))
    means, covariances, _ = model.configurations(points, inverses)
    middle = int(np.argmax(whole.weights))
    return Posterior(
        configurations=model.covariance.names,
        weights=whole.weights,
        means=means,
        covariances=model.surpluses(inverses)[:, None, None] * covariances,
        doubts=model.doubts(points[middle], inverses[middle]),
        outliers=whole.outliers,
        drift=np.zeros(len(cells)),
        drift_covariance=np.zeros((len(cells), len(cells))),
        parameters=points,
        scales=whole.scales,
    )


def _medians(active: npt.NDArray[np.bool_], parameters: Array, weights: Array) -> dict[str, float]:
    found = {}
    for place in np.flatnonzero(active):
        order = np.argsort(parameters[:, place])
        middle = parameters[order[np.searchsorted(np.cumsum(weights[order]), 0.5)], place]
        found[NAMES[place]] = float(expit(middle) if NAMES[place] == "share" else np.exp(middle))
    return found
