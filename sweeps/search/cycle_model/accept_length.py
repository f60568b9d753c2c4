"""Accept length of every configuration of a sweep, from the trials that tell it. No Optuna.

Each drafter's chains share one curve over step counts (`acceptance_curve`). A configuration's accept length is that
curve at the depth of its drafts, times a correction for trees (a factor model). Each fit tests whether chain length
depends on anything else (chi-squared); if so, chains get the correction too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2

from sweeps.measure.records import Finding
from sweeps.search.cycle_model.acceptance_curve import ChainModel, length_error
from sweeps.search.cycle_model.random_effects import FactorModel, Measurements
from sweeps.search.cycle_model.terms import WIDENED, Factor, Floats, Term, design, level, tree_depth
from sweeps.search.observations import Observation
from sweeps.spec.space import Configuration, Space

_HETEROGENEOUS = 1e-4
"""Level of the test whether accept length is the same for all NCCL sets (and args, env). It is made at every fit."""
_PARTICLES = 8
"""Samples of the scales. Not tuned."""
_FLOOR = 0.002
"""Least standard error of a log accept length: requests are cut at the last token. Not tuned: a guess."""


@dataclass(slots=True)
class LengthModel:
    """Posterior of accept length over the configurations of one sweep; `fit`, then `draw`.

    Args:
        rows: every configuration -> its row in the draws, in their order.
        terms: of the factor `accept_length`.
        widens: whether the correction gets more terms once chains are seen to differ.
    """

    space: Space
    rows: Mapping[Configuration, int]
    terms: tuple[Term, ...]
    widens: bool = True
    _widened: bool = False
    _correction: FactorModel = field(init=False)
    _chains: dict[str | None, ChainModel] = field(default_factory=dict)
    _drafting: dict[str | None, tuple[NDArray[np.int64], Floats]] = field(default_factory=dict)
    """Drafter -> its configurations' rows and depths."""
    _steps: NDArray[np.int64] = field(init=False)
    _is_chain: NDArray[np.bool_] = field(init=False)
    _residuals: list[_Residual] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._steps = np.array([member.num_steps for member in self.rows])
        self._is_chain = np.array([member.is_chain for member in self.rows])
        for drafter in dict.fromkeys(member.drafter for member in self.rows if member.speculates):
            own = {row: member for member, row in self.rows.items() if member.speculates and member.drafter == drafter}
            self._drafting[drafter] = np.array(list(own)), np.array([tree_depth(member) for member in own.values()])
        self._build()

    def fit(self, trials: list[Observation], launches: Mapping[str, int]) -> Finding | None:
        """Fit the curves of all drafters; the prior alone if no trial has an accept length.

        Args:
            trials: of known configurations, in the order of their start; those that tell no accept length are skipped.
            launches: trial id -> number of the launch that served it.

        Returns:
            What the trials contradict, once: the model is wider from then on.
        """
        telling = [seen for seen in trials if seen.trial.configuration.speculates and self._tells(seen)]
        references = self._references(telling)
        for drafter in self._drafting:
            chain = self._chains.get(drafter) or ChainModel(int(self._steps.max()), self.space.spec.workload.blocks)
            own = [seen for seen in references if seen.trial.configuration.drafter == drafter]
            chain.fit([(seen.trial.configuration.num_steps, seen.blocks) for seen in own])
            self._chains[drafter] = chain
        self._residuals = [self._residual(seen, launches) for seen in telling]
        return self._contradicted() if self.widens and not self._widened else None

    def draw(self, draws: int, rng: np.random.Generator) -> Floats:
        """Joint posterior draws, (configurations, draws), in tokens per cycle; 1 without speculation."""
        lengths = np.ones((len(self.rows), draws))
        if not self._drafting:
            return lengths
        assert self._chains, "draws of lengths that have not been fitted"
        for drafter, (rows, depths) in self._drafting.items():
            chain = self._chains[drafter]
            curve = chain.draw(rng.standard_normal((chain.positions + chain.blocks, draws)))
            lengths[rows] = _at_depth(curve, depths)
        return self._corrected(lengths, rng)

    def adjusted(self, seen: Observation) -> tuple[float, float] | None:
        """(log of a trial's accept length as if it had run every block, its standard error); None without any."""
        configuration = seen.trial.configuration
        chain = self._chains.get(configuration.drafter)
        if chain is None or not self._tells(seen):
            return None
        depth = tree_depth(configuration)
        length, error, indices = _pooled(seen)
        there, everywhere = chain.expected(depth, indices), chain.expected(depth, range(chain.blocks))
        return math.log(length * everywhere / there), error

    def _build(self) -> None:
        own = design(self.terms, tuple(self.rows))
        self._correction = FactorModel(own, multiplies=False, particles=_PARTICLES)

    def _tells(self, seen: Observation) -> bool:
        return any(block.accept_length is not None for block in seen.blocks)

    def _references(self, telling: list[Observation]) -> list[Observation]:
        """Chain trials that share one curve: all of them, or once that failed those of the control's settings."""
        chains = [seen for seen in telling if seen.trial.configuration.is_chain]
        if not self._widened:
            return chains
        wanted = chains[0].trial.configuration.nccl_and_server_settings
        return [seen for seen in chains if seen.trial.configuration.nccl_and_server_settings == wanted]

    def _residual(self, seen: Observation, launches: Mapping[str, int]) -> _Residual:
        configuration = seen.trial.configuration
        length, error, indices = _pooled(seen)
        expected = self._chains[configuration.drafter].expected(tree_depth(configuration), indices)
        return _Residual(configuration, launches[seen.trial.trial_id], math.log(length / expected), error)

    def _contradicted(self) -> Finding | None:
        """Test whether chains differ between the values of a dimension; widen the correction if they do."""
        chains = [entry for entry in self._residuals if entry.configuration.is_chain]
        first = next(iter(self.rows))
        names = ["nccl", *(f"args.{name}" for name, _ in first.args), *(f"env.{name}" for name, _ in first.env)]
        for name in names:
            groups: dict[object, list[tuple[float, float]]] = {}
            for entry in chains:
                groups.setdefault(level(entry.configuration, name), []).append((entry.log_ratio, entry.error))
            if len(groups) < 2:
                continue
            means = [_weighted(group) for group in groups.values()]
            centre, _ = _weighted(means)
            statistic = sum(((mean - centre) / error) ** 2 for mean, error in means)
            p = float(chi2.sf(statistic, len(groups) - 1))
            if p < _HETEROGENEOUS:
                detail = f"accept_length differs between values of {name}"
                return self._widen(
                    f"{detail} (chi-squared {statistic:.1f} over {len(groups)})", {"chi_squared": statistic, "p": p}
                )
        return None

    def _widen(self, detail: str, numbers: Mapping[str, float]) -> Finding:
        self._widened = True
        self.terms = (*self.terms, *WIDENED["accept_length"])
        self._build()
        return widening("accept_length", detail, numbers)

    def _corrected(self, lengths: Floats, rng: np.random.Generator) -> Floats:
        model, draws = self._correction, lengths.shape[1]
        kept = [entry for entry in self._residuals if self._widened or not entry.configuration.is_chain]
        if not model.design.terms:
            return lengths
        if not kept:
            return self._times(lengths, _prior_draw(model, draws, rng))
        data = Measurements(
            rows=np.array([self.rows[entry.configuration] for entry in kept]),
            values=np.array([entry.log_ratio for entry in kept]),
            errors=np.array([max(_FLOOR, entry.error) for entry in kept]),
            launches=np.array([entry.launch for entry in kept]),
            hours=np.zeros(len(kept)),
            noisy=np.zeros(len(kept), dtype=np.bool_),
        )
        model.fit(data, rng)
        shift = model.draw(draws, rng)
        plain = self._steps == 0
        shift[plain if self._widened else plain | self._is_chain] = 0.0
        return self._times(lengths, shift)

    def _times(self, lengths: Floats, shift: Floats) -> Floats:
        """Accept lengths changed by `shift` (logs), between 1 and steps + 1."""
        bound = (self._steps + 1.0)[:, None]
        np.clip(shift, -1.0, 1.0, out=shift)
        np.exp(shift, out=shift)
        shift *= lengths
        return np.clip(shift, 1.0, bound, out=shift)


def widening(factor: Factor, detail: str, numbers: Mapping[str, float]) -> Finding:
    """The finding that measurements contradict a factor's terms, and which it gets in WIDENED."""
    added = ", ".join(term.name for term in WIDENED[factor])
    return Finding(event="assumption_dropped", detail=f"{detail}; now with {added}", numbers=numbers)


@dataclass(frozen=True, slots=True)
class _Residual:
    """A trial's accept length against a chain of the same depth over the same blocks."""

    configuration: Configuration
    launch: int
    """Number of the launch that served it."""
    log_ratio: float
    error: float
    """Standard error of `log_ratio`."""


def _at_depth(curve: Floats, depths: Floats) -> Floats:
    """Accept length by step count, (positions, draws), between two steps."""
    whole = np.concatenate([np.ones((1, curve.shape[1])), curve])
    distinct, places = np.unique(depths, return_inverse=True)
    below = np.minimum(distinct.astype(int), curve.shape[0] - 1)
    part = (distinct - below)[:, None]
    between: Floats = whole[below] * (1.0 - part) + whole[below + 1] * part
    return between[places]


def _prior_draw(model: FactorModel, draws: int, rng: np.random.Generator) -> Floats:
    widths = np.array([sum(term.scales) / len(term.scales) for term in model.design.terms])[model.design.group]
    drawn: Floats = model.design.columns @ (rng.standard_normal((widths.size, draws)) * widths[:, None])
    return drawn


def _pooled(seen: Observation) -> tuple[float, float, list[int]]:
    """Accept length over a trial's blocks (tokens over cycles), its relative standard error, the blocks' indices."""
    blocks = [block for block in seen.blocks if block.accept_length is not None]
    steps = seen.trial.configuration.num_steps
    cycles = np.array([block.num_cycles for block in blocks], dtype=float)
    lengths = np.array([block.accept_length for block in blocks], dtype=float)
    errors = np.array([length_error(block, steps) for block in blocks])
    share = cycles / cycles.sum()
    length = float((share * lengths).sum())
    error = float(np.sqrt((share**2 * errors**2).sum()) / length)
    return length, error, [block.block_index for block in blocks]


def _weighted(entries: list[tuple[float, float]]) -> tuple[float, float]:
    weights = np.array([error**-2 for _, error in entries])
    means = np.array([mean for mean, _ in entries])
    return float((weights * means).sum() / weights.sum()), float(weights.sum() ** -0.5)
