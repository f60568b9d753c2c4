"""The model behind every comparison: what a cell's log value is made of, integrated over what is not known of it.

    log value of a cell = configuration + launch + communicator + drift + node + noise of its blocks

- configuration: main effects (drafting, NCCL set, further arguments) and deviations from them (set x kind of drafting,
  and the configuration's own), which shrink to zero unless the data ask for them.
- launch: shared by all cells of one server. Plain servers have a standard deviation; chain and tree servers have that
  deviation and more, because drafting adds host time. A share of it belongs to each drafting by itself.
- communicator: an NCCL set in a server that holds several sets.
- drift: a line and a random walk over the cells of a node, and steps if the data ask for them (another host or clock).

All of it is Gaussian given seven parameters (standard deviations, and the share). Their posterior is found by its mode
and integrated by importance sampling around it. Priors are log-normal; `_PRIORS` gives medians, widths and sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import expit
from scipy.stats import norm, qmc

Array = npt.NDArray[np.float64]

KINDS = ("plain", "chain", "tree")

_PRIORS: Mapping[str, tuple[float, float]] = {
    # name: median and width (of the logarithm; of the logit for the share). Recorded launches of one configuration
    # differ by 0.2 % (plain, two H200), 0.3 to 1 % (chains, one H200) and 10 to 12 % (chains, two H200): two widths
    # cover all of them. Such a prior counts for less than one repeated launch.
    "plain": (0.006, 1.3),
    "chain": (0.01, 1.3),
    "tree": (0.01, 1.3),
    "share": (0.5, 1.5),
    "communicator": (0.007, 0.4),  # 0.6 to 0.8 % of the cycle at full size, two H200
    "deviation": (0.003, 1.0),
    "drift": (0.0003, 0.8),  # per cell: 1 % over forty cells, if it is a line; wider, a walk takes what launches are
}
NAMES = tuple(_PRIORS)
_MEDIANS = np.array([median for median, _ in _PRIORS.values()])
_CENTRE = np.where([name == "share" for name in NAMES], 0.0, np.log(_MEDIANS))
_WIDTH = np.array([width for _, width in _PRIORS.values()])
_EFFECT = {"drafting": 1.0, "intercept": 10.0, "node": 0.1}
"""Prior standard deviation of main effects on the log scale; all others OTHER."""
_OTHER = 0.3
_STEP = 0.1
"""Prior standard deviation of a step of the drift: another host or another clock, up to some 20 %."""
_EVIDENCE = 3.0
"""Gain in log evidence, beyond the choice among all places, that a step must bring: odds of 20."""
_MOST_STEPS_OF_DRIFT = 1
"""Two steps around one launch would call its spread a drift."""
DOUBT = 0.12
"""Standard deviation by which a single launch may be off for a reason of its own. Launches of one configuration
differed by 11.5 % on two H200 (`recordings/h200_x2_nccl_v1`), and the founding case's baseline by 7.9 % without a known
cause."""
_MOST_OUTLIERS = 3
_STARTS = np.array([[0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 3.0], [0, 1.6, 1.6, 0, 0, 0, 0]])
"""From the prior's centre: as it is, with a drift of 0.6 % a cell, and with chains and trees that differ by 5 %.
Launches and drift can each explain what the other does, so the posterior may have several modes."""
_DRAWS = 32
"""Points of the integral; a guess, not tuned."""
_WIDER = 1.2
"""Of the normal that is sampled from: parameters have longer tails than the normal at their mode."""
_MOST_STEPS = 30
_CLOSE = 0.02
"""Step of a logarithm at which the mode is taken as found."""
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
    doubting: Mapping[str, tuple[Array, Array]]
    """Launch -> mean (C + 1,) and covariance if that launch may be off by DOUBT, at the mode."""
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
    """Covariances of one set of cells, as functions of the parameters."""

    def __init__(self, cells: Sequence[Cell], values: Array) -> None:
        self.cells = cells
        self.centre = float(values.mean())
        self.values = values - self.centre
        self.names = tuple(dict.fromkeys(cell.configuration for cell in cells))
        first = {cell.configuration: cell for cell in reversed(cells)}
        self.designs = [first[name] for name in self.names]
        self.rows = np.array([self.names.index(cell.configuration) for cell in cells])
        self.fixed = _main_effects(self.designs)
        self.shrunk = _deviations(self.designs)
        self.kind = np.array([KINDS.index(cell.kind) for cell in cells])
        self.same_launch = _same(cell.launch for cell in cells)
        self.same_drafting = self.same_launch * _same(cell.settings["drafting"] for cell in cells)
        several = {cell.launch for cell in cells} & _launches_of_several_sets(cells)
        own = np.array([cell.launch in several for cell in cells], dtype=float)
        self.same_communicator = self.same_launch * _same(cell.communicator for cell in cells) * np.outer(own, own)
        self.noise = np.array([cell.variance for cell in cells]) + _JITTER
        self.nodes = _EFFECT["node"] ** 2 * _same(cell.node for cell in cells) * (len({c.node for c in cells}) > 1)
        self.walk = _walk(cells)
        self.walked = self.walk @ self.walk.T + _line(cells)
        self.stepped = np.zeros_like(self.walked)
        self.outliers: dict[str, float] = {}
        self.shrunk_cells = self.shrunk[np.ix_(self.rows, self.rows)]
        self.base = self.fixed[np.ix_(self.rows, self.rows)] + self.nodes + np.diag(self.noise)
        of_kind = [(self.kind == place).astype(float) for place in range(len(KINDS))]
        self.of_kind = [each[:, None] + each[None, :] for each in of_kind]
        active = {
            **{kind: bool((self.kind == place).any()) for place, kind in enumerate(KINDS)},
            "share": bool((self.same_launch != self.same_drafting).any()),
            "communicator": bool(several),
            "deviation": len(self.names) > 1,
            "drift": self.walk.shape[1] > 1,
        }
        self.active = np.array([active[name] for name in NAMES])

    def parts(self, theta: Array) -> tuple[Array, dict[str, Array]]:
        """Covariance of the values, and its derivative by each parameter."""
        scale = np.exp(theta)
        share = float(expit(theta[3]))
        spread = np.sqrt(scale[0] ** 2 + np.where(np.arange(3) > 0, scale[:3], 0.0) ** 2)
        per_cell = spread[self.kind]
        product = np.outer(per_cell, per_cell)
        launch = product * (share * self.same_launch + (1 - share) * self.same_drafting)
        terms = {
            "communicator": scale[4] ** 2 * self.same_communicator,
            "deviation": scale[5] ** 2 * self.shrunk_cells,
            "drift": scale[6] ** 2 * self.walked,
        }
        slopes = {name: 2 * term for name, term in terms.items()}
        parts = scale[:3] ** 2 / spread**2  # of a kind's variance, what is its own
        slopes["plain"] = launch * (scale[0] ** 2 * self.each_of(1 / spread**2))
        for place, kind in enumerate(KINDS[1:], start=1):
            slopes[kind] = launch * self.of_kind[place] * parts[place]
        slopes["share"] = product * (self.same_launch - self.same_drafting) * share * (1 - share)
        return launch + sum(terms.values()) + self.stepped + self.base, slopes

    def each_of(self, by_kind: Array) -> Array:
        """(cells, cells) sum of what each of the two cells' kinds has."""
        per_cell = by_kind[self.kind]
        summed: Array = per_cell[:, None] + per_cell[None, :]
        return summed

    def mode(self, free: Array) -> tuple[Array, Array]:
        """The active parameters at the mode of the posterior, and their precision there: Fisher scoring from `free`."""
        loss, gradient, information = self._scored(free)
        for _ in range(_MOST_STEPS):
            step = np.clip(np.linalg.solve(information, -gradient), -1.5, 1.5)
            length = 1.0
            while (found := self._scored(free + length * step))[0] > loss and length > 0.05:
                length /= 2
            free, (loss, gradient, information) = free + length * step, found
            if np.abs(length * step).max() < _CLOSE:
                break
        return free, information

    def loss(self, free: Array) -> float:
        """Negative log posterior of the active parameters, less a constant."""
        theta = self.whole(free)
        total, _ = self.parts(theta)
        factor = np.linalg.cholesky(total)
        solved = np.linalg.solve(factor, self.values)
        away = ((theta - _CENTRE) / _WIDTH)[self.active]
        return float(np.log(np.diag(factor)).sum() + 0.5 * solved @ solved + 0.5 * away @ away)

    def _scored(self, free: Array) -> tuple[float, Array, Array]:
        """Negative log posterior, its gradient, and the expected information with the prior's."""
        theta = self.whole(free)
        total, slopes = self.parts(theta)
        inverse = np.linalg.inv(total)
        _, log_det = np.linalg.slogdet(total)
        solved = inverse @ self.values
        away = ((theta - _CENTRE) / _WIDTH)[self.active]
        width = _WIDTH[self.active]
        names = np.array(NAMES)[self.active]
        turned = [inverse @ slopes[name] for name in names]
        gradient = np.array(
            [0.5 * (np.trace(each) - solved @ slopes[name] @ solved) for name, each in zip(names, turned, strict=True)]
        )
        flat = np.array([each.ravel() for each in turned])
        across = np.array([each.T.ravel() for each in turned])
        information = 0.5 * flat @ across.T + np.diag(width**-2.0)
        value = 0.5 * (log_det + self.values @ solved) + 0.5 * away @ away
        return float(value), gradient + away / width, information

    def whole(self, free: Array) -> Array:
        theta: Array = _CENTRE.copy()
        theta[self.active] = free
        theta[~self.active & (np.array(NAMES) != "share")] = np.log(1e-6)
        return theta

    def posterior(self, theta: Array, *, doubted: npt.NDArray[np.bool_] | None = None) -> tuple[Array, Array]:
        """Mean and covariance of configurations and of the mean drift and node; one launch may be doubted."""
        total, _ = self.parts(theta)
        if doubted is not None:
            total = total + DOUBT**2 * np.outer(doubted, doubted)
        scale = np.exp(theta)
        own = self.fixed + scale[5] ** 2 * self.shrunk
        nuisance = scale[6] ** 2 * self.walked + self.stepped + self.nodes
        cross = np.vstack([own[:, self.rows], nuisance.mean(axis=0)[None, :]])
        prior = np.zeros((len(self.names) + 1,) * 2)
        prior[:-1, :-1], prior[-1, -1] = own, float(nuisance.mean())
        gain = np.linalg.solve(total, cross.T).T
        mean: Array = gain @ self.values
        mean[:-1] += self.centre
        return mean, prior - gain @ cross.T

    def add_step(self, theta: Array) -> bool:
        """Give the drift a step before the cell at which it explains most. False if none is worth its evidence."""
        total, _ = self.parts(theta)
        columns = (self.walk > 0).astype(float)
        solved = np.linalg.solve(total, np.column_stack([self.values, columns]))
        height = _STEP**2
        power = np.einsum("cj,cj->j", columns, solved[:, 1:])
        gain = 0.5 * height * (columns.T @ solved[:, 0]) ** 2 / (1 + height * power) - 0.5 * np.log1p(height * power)
        best = int(np.argmax(gain))
        if gain[best] < np.log(len(gain)) + _EVIDENCE:
            return False
        self.stepped = self.stepped + height * np.outer(columns[:, best], columns[:, best])
        return True

    def name_outlier(self, free: Array) -> bool:
        """Name the launch that all others predict least, if doubting it is worth its evidence. False if none is left.

        The model is not changed by it: which of two launches that contradict each other is the odd one, it cannot know.
        """
        theta = self.whole(free)
        own = {cell.launch: np.array([each.launch == cell.launch for each in self.cells]) for cell in self.cells}
        found = _deviations_of_launches(self, theta, own)
        away = {name: each for name, each in found.items() if name not in self.outliers}
        if not away:
            return False
        worst = max(away, key=lambda name: abs(away[name]))
        before, base = self.loss(free), self.base
        self.base = base + DOUBT**2 * np.outer(own[worst], own[worst])
        after = self.loss(self.mode(free)[0])
        self.base = base
        if before - after < np.log(len(own)) + _EVIDENCE:
            return False
        self.outliers[worst] = away[worst]
        return True

    def drift(self, theta: Array) -> tuple[Array, Array]:
        """(cells,) mean of the drift, steps included, and its covariance."""
        total, _ = self.parts(theta)
        own = np.exp(2 * theta[6]) * self.walked + self.stepped
        solved = np.linalg.solve(total, np.column_stack([self.values, own]))
        return own @ solved[:, 0], own - own @ solved[:, 1:]

    def surplus(self, theta: Array) -> float:
        """Variance of the values over what the model expects, main effects set apart; at least 1."""
        total, _ = self.parts(theta)
        inverse = np.linalg.inv(total)
        left = len(self.values) - float(np.trace(self.fixed[np.ix_(self.rows, self.rows)] @ inverse))
        return max(1.0, float(self.values @ inverse @ self.values) / max(left, 1.0))


def fit(cells: Sequence[Cell], values: Array) -> Posterior:
    """The posterior of every configuration among `cells` (at least one), whose log values are `values`."""
    model = _Model(cells, values)
    starts = (_CENTRE + _STARTS)[:, model.active]
    free, information = min((model.mode(start) for start in starts), key=lambda found: model.loss(found[0]))
    for _ in range(_MOST_STEPS_OF_DRIFT if model.active[NAMES.index("drift")] else 0):
        if not model.add_step(model.whole(free)):
            break
        free, information = model.mode(free)
    while len(model.outliers) < _MOST_OUTLIERS and model.name_outlier(free):
        pass
    points, weights = _integrate(model, free, information)
    found = [model.posterior(model.whole(point)) for point in points]
    mode = model.whole(free)
    drift, drift_covariance = model.drift(mode)
    launches = list(dict.fromkeys(cell.launch for cell in cells))
    own = {name: np.array([cell.launch == name for cell in cells]) for name in launches}
    doubting = {name: model.posterior(mode, doubted=rows) for name, rows in own.items()} if len(launches) > 1 else {}
    return Posterior(
        configurations=model.names,
        weights=weights,
        means=np.array([mean for mean, _ in found]),
        covariances=np.array([covariance for _, covariance in found]),
        doubting=doubting,
        outliers=model.outliers,
        drift=drift,
        drift_covariance=drift_covariance,
        parameters=np.array([model.whole(point) for point in points]),
        scales=_medians(model, points, weights),
    )


def follow(whole: Posterior, cells: Sequence[Cell], values: Array, rows: Sequence[int]) -> Posterior:
    """The posterior of a part of the cycle, whose spreads are taken from the whole: the controls have no such part.

    Drift is taken out with its own uncertainty. A part that varies more than the whole has wider intervals by as much.

    Args:
        values: log of a time; `whole` is of throughput.
        rows: of each cell, the place of the same cell in `whole`.
    """
    model = _Model(cells, values + whole.drift[rows] - whole.drift.mean())
    launches = list(dict.fromkeys(cell.launch for cell in cells))
    own = {name: np.array([cell.launch == name for cell in cells]) for name in launches}
    doubted = [np.outer(own[name], own[name]) for name in whole.outliers if name in own]
    model.base = model.base + whole.drift_covariance[np.ix_(rows, rows)] + DOUBT**2 * sum(doubted)
    still = np.log(1e-6)
    points = whole.parameters.copy()
    points[:, NAMES.index("drift")] = still
    found = [(*model.posterior(point), model.surplus(point)) for point in points]
    middle = points[int(np.argmax(whole.weights))]
    return Posterior(
        configurations=model.names,
        weights=whole.weights,
        means=np.array([mean for mean, _, _ in found]),
        covariances=np.array([surplus * covariance for _, covariance, surplus in found]),
        doubting={name: model.posterior(middle, doubted=of_launch) for name, of_launch in own.items()}
        if len(launches) > 1
        else {},
        outliers=whole.outliers,
        drift=np.zeros(len(cells)),
        drift_covariance=np.zeros((len(cells), len(cells))),
        parameters=points,
        scales=whole.scales,
    )


def _integrate(model: _Model, mode: Array, information: Array) -> tuple[Array, Array]:
    """Points of the parameter space and their weights: importance sampling from a normal around the mode."""
    spread = np.linalg.cholesky(np.linalg.inv(information))
    draws = _WIDER * norm.ppf(qmc.Sobol(len(mode), scramble=True, rng=0).random(_DRAWS) * (1 - 2e-6) + 1e-6)
    points = mode + draws @ spread.T
    log_proposal = -0.5 * ((draws / _WIDER) ** 2).sum(axis=1)
    log_weights = -np.array([model.loss(point) for point in points]) - log_proposal
    weights = np.exp(log_weights - log_weights.max())
    return points, weights / weights.sum()


def _deviations_of_launches(model: _Model, theta: Array, own: Mapping[str, npt.NDArray[np.bool_]]) -> dict[str, float]:
    """How far the mean of each launch's cells lies from what all other launches predict."""
    total, _ = model.parts(theta)
    inverse = np.linalg.inv(total)
    found = {}
    for name, rows in own.items():
        block = np.linalg.inv(inverse[np.ix_(rows, rows)])
        residual = block @ (inverse[rows] @ model.values)
        mean = np.full(int(rows.sum()), 1 / rows.sum())
        found[name] = float(mean @ residual / np.sqrt(mean @ block @ mean))
    return found


def _medians(model: _Model, points: Array, weights: Array) -> dict[str, float]:
    found = {}
    for place, name in enumerate(np.array(NAMES)[model.active]):
        order = np.argsort(points[:, place])
        middle = points[order[np.searchsorted(np.cumsum(weights[order]), 0.5)], place]
        found[str(name)] = float(expit(middle) if name == "share" else np.exp(middle))
    return found


def _main_effects(designs: Sequence[Cell]) -> Array:
    total = np.full((len(designs), len(designs)), _EFFECT["intercept"] ** 2)
    for name in dict.fromkeys(name for each in designs for name in each.settings):
        total += _EFFECT.get(name, _OTHER) ** 2 * _same(each.settings.get(name, "") for each in designs)
    return total


def _deviations(designs: Sequence[Cell]) -> Array:
    """Of each dimension by the kind of drafting, and of the configuration by itself: each half of the variance."""
    kind = _same((each.kind, each.settings["drafting"] if each.kind == "tree" else "") for each in designs)
    names = [name for name in designs[0].settings if name != "drafting"]
    crossed = [kind * _same(each.settings.get(name, "") for each in designs) for name in names]
    return 0.5 * np.eye(len(designs)) + (0.5 * sum(crossed) / len(crossed) if crossed else 0.0)


def _launches_of_several_sets(cells: Sequence[Cell]) -> set[str]:
    by_launch: dict[str, set[str]] = {}
    for cell in cells:
        by_launch.setdefault(cell.launch, set()).add(cell.communicator)
    return {launch for launch, sets in by_launch.items() if len(sets) > 1}


def _walk(cells: Sequence[Cell]) -> Array:
    """(cells, increments): which increments of its node's walk lie before a cell; each by the root of its time."""
    columns = []
    for node in dict.fromkeys(cell.node for cell in cells):
        times = np.array([cell.at_s if cell.node == node else np.inf for cell in cells])
        ordered = np.unique(times[np.isfinite(times)])
        gaps = np.diff(ordered)
        mean = gaps.mean() if len(gaps) else 1.0
        columns += [
            np.where(np.isfinite(times), (times > start) * np.sqrt(gap / mean), 0.0)
            for start, gap in zip(ordered, gaps, strict=False)
        ]
    found: Array = np.column_stack(columns) if columns else np.zeros((len(cells), 0))
    return found


def _line(cells: Sequence[Cell]) -> Array:
    """(cells, cells) covariance of a line over each node's time, with a slope of 1 a cell."""
    columns = []
    for node in dict.fromkeys(cell.node for cell in cells):
        own = np.array([cell.node == node for cell in cells])
        times = np.array([cell.at_s for cell in cells])
        middle, half = (times[own].max() + times[own].min()) / 2, np.ptp(times[own]) / 2
        ends = own.sum() / 2
        columns.append(np.where(own, ends * (times - middle) / half, 0.0) if half > 0 else np.zeros(len(cells)))
    found: Array = np.array(columns).T @ np.array(columns)
    return found


def _same(labels: object) -> Array:
    names = list(labels)  # type: ignore[call-overload]
    codes = {name: place for place, name in enumerate(dict.fromkeys(names))}
    of_row = np.array([codes[name] for name in names])
    same: Array = (of_row[:, None] == of_row[None, :]).astype(float)
    return same
