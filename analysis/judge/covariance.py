"""Covariance of a sweep's cells: fixed matrices, whose coefficients are functions of the model's parameters.

    covariance = base + sum of coefficient x matrix

`base` holds main effects, nodes and the noise of blocks. Of each pair of kinds of server there are two matrices: what
one launch's cells share, and what those of one drafting share. Their coefficients are products of two deviations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from analysis.judge.priors import CENTRE, KINDS, MAIN_EFFECT, NAMES, NODE, OTHER_EFFECT, PLACE, STILL, Array

_JITTER = 1e-10


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """What the model knows of one cell, beside its value."""

    configuration: str
    settings: Mapping[str, str]
    """Dimension -> value; `drafting` is one of them."""
    kind: str
    launch: str
    communicator: str
    node: str
    at_s: float
    variance: float
    """Of the noise of its blocks."""


class Covariance:
    """Of n cells of C configurations. G is a number of points of the parameter space."""

    def __init__(self, cells: Sequence[Cell], drift: Array) -> None:
        """Args: drift: (n, n) covariance of the drift if its parameter were 1."""
        self.names = tuple(dict.fromkeys(cell.configuration for cell in cells))
        first = {cell.configuration: cell for cell in reversed(cells)}
        designs = [first[name] for name in self.names]
        self.rows = np.array([self.names.index(cell.configuration) for cell in cells])
        self.fixed = _main_effects(designs)
        self.shrunk = _deviations(designs)
        self.fixed_cells = self.fixed[np.ix_(self.rows, self.rows)]
        self.nodes = NODE**2 * same(cell.node for cell in cells) * (len({cell.node for cell in cells}) > 1)
        noise = np.array([cell.variance for cell in cells]) + _JITTER
        self.base = self.fixed_cells + self.nodes + np.diag(noise)
        self.walked = drift
        launch = same(cell.launch for cell in cells)
        drafting = launch * same(cell.settings["drafting"] for cell in cells)
        several = _launches_of_several_sets(cells)
        own = np.array([cell.launch in several for cell in cells], dtype=float)
        squares = {
            "communicator": launch * same(cell.communicator for cell in cells) * np.outer(own, own),
            "deviation": self.shrunk[np.ix_(self.rows, self.rows)] * (len(self.names) > 1),
            "drift": drift,
        }
        kinds = np.array([KINDS.index(cell.kind) for cell in cells])
        self.pairs, self.portions, matrices = _of_launches(kinds, launch, drafting)
        self.squares = [PLACE[name] for name, matrix in squares.items() if matrix.any()]
        matrices += [matrix for matrix in squares.values() if matrix.any()]
        self.matrices: Array = np.array(matrices).reshape(len(matrices), -1)
        active = set(self.squares) | set(kinds) | ({PLACE["share"]} if (launch != drafting).any() else set())
        self.active = np.array([place in active for place in range(len(NAMES))])

    def whole(self, free: Array) -> Array:
        """(..., 7) parameters from the active ones."""
        theta = np.where(np.arange(len(NAMES)) == PLACE["share"], CENTRE, STILL) * np.ones((*free.shape[:-1], 1))
        theta[..., self.active] = free
        return theta

    def coefficients(self, theta: Array) -> Array:
        """(G, K) of the matrices, by (G, 7) parameters."""
        scale, spread = np.exp(theta), _spread(theta)
        share = expit(theta[:, PLACE["share"], None])
        portion = self.portions[:, 0] + self.portions[:, 1] * share
        launches = spread[:, self.pairs[:, 0]] * spread[:, self.pairs[:, 1]] * portion
        return np.hstack([launches, scale[:, self.squares] ** 2])

    def totals(self, theta: Array) -> Array:
        """(G, n, n) by (G, 7) parameters."""
        found: Array = self.base + (self.coefficients(theta) @ self.matrices).reshape(-1, *self.base.shape)
        return found

    def total(self, theta: Array) -> Array:
        """(n, n) by (7,) parameters."""
        found: Array = self.totals(theta[None])[0]
        return found

    def derivatives(self, theta: Array) -> Array:
        """(active, n, n) of the covariance by each active parameter, at (7,) parameters."""
        scale, spread = np.exp(theta), _spread(theta[None])[0]
        coefficients = self.coefficients(theta[None])[0]
        by_kind = np.zeros((len(NAMES), len(KINDS)))  # derivative of the log spread of a kind
        by_kind[0] = scale[0] ** 2 / spread**2
        for place in range(1, len(KINDS)):
            by_kind[place, place] = scale[place] ** 2 / spread[place] ** 2
        num = len(self.pairs)
        slopes = np.zeros((len(NAMES), len(coefficients)))
        slopes[:, :num] = (by_kind[:, self.pairs[:, 0]] + by_kind[:, self.pairs[:, 1]]) * coefficients[:num]
        share = float(expit(theta[PLACE["share"]]))
        products = spread[self.pairs[:, 0]] * spread[self.pairs[:, 1]]
        slopes[PLACE["share"], :num] = products * self.portions[:, 1] * share * (1 - share)
        slopes[self.squares, range(num, len(coefficients))] = 2 * coefficients[num:]
        found: Array = slopes[self.active] @ self.matrices
        return found.reshape(-1, *self.base.shape)

    def configurations(self, theta: Array) -> Array:
        """(G, C, C) prior covariance of configurations."""
        found: Array = self.fixed + np.exp(2 * theta[:, PLACE["deviation"], None, None]) * self.shrunk
        return found


def same(labels: Iterable[object]) -> Array:
    """(n, n): 1 if two labels are equal."""
    names = list(labels)
    codes = {name: place for place, name in enumerate(dict.fromkeys(names))}
    of_row = np.array([codes[name] for name in names])
    found: Array = (of_row[:, None] == of_row[None, :]).astype(float)
    return found


def inverse_of(matrices: Array) -> Array:
    """(..., n, n)"""
    return np.asarray(np.linalg.inv(matrices), dtype=np.float64)


def _spread(theta: Array) -> Array:
    """(G, kinds) standard deviation of launches: chains and trees have that of plain servers and more."""
    scale = np.exp(theta[:, : len(KINDS)])
    scale[:, 1:] = np.sqrt(scale[:, 1:] ** 2 + scale[:, :1] ** 2)
    return scale


def _of_launches(
    kinds: npt.NDArray[np.intp], launch: Array, drafting: Array
) -> tuple[npt.NDArray[np.intp], Array, list[Array]]:
    """Pairs of kinds (K, 2), how the share enters (K, 2: constant and slope), and the matrices."""
    pairs, portions, matrices = [], [], []
    for first in range(len(KINDS)):
        for second in range(first, len(KINDS)):
            between = np.outer(kinds == first, kinds == second)
            shared, own = launch * (between | between.T), drafting * (between | between.T)
            alike = bool((shared == own).all())
            for matrix, portion in [(shared, (1, 0))] if alike else [(shared, (0, 1)), (own, (1, -1))]:
                if matrix.any():
                    pairs.append((first, second))
                    portions.append(portion)
                    matrices.append(matrix)
    return np.array(pairs), np.array(portions, dtype=float), matrices


def _main_effects(designs: Sequence[Cell]) -> Array:
    total = np.full((len(designs), len(designs)), MAIN_EFFECT["intercept"] ** 2)
    for name in dict.fromkeys(name for each in designs for name in each.settings):
        total += MAIN_EFFECT.get(name, OTHER_EFFECT) ** 2 * same(each.settings.get(name, "") for each in designs)
    return total


def _deviations(designs: Sequence[Cell]) -> Array:
    """Of each dimension by the kind of drafting, and of the configuration by itself: each half of the variance."""
    kind = same((each.kind, each.settings["drafting"] if each.kind == "tree" else "") for each in designs)
    names = [name for name in designs[0].settings if name != "drafting"]
    crossed = [kind * same(each.settings.get(name, "") for each in designs) for name in names]
    return 0.5 * np.eye(len(designs)) + (0.5 * sum(crossed) / len(crossed) if crossed else 0.0)


def _launches_of_several_sets(cells: Sequence[Cell]) -> set[str]:
    by_launch: dict[str, set[str]] = {}
    for cell in cells:
        by_launch.setdefault(cell.launch, set()).add(cell.communicator)
    return {launch for launch, sets in by_launch.items() if len(sets) > 1}
