"""Throughput of every configuration of a sweep, from a small Bayesian model per factor of the cycle. No Optuna.

tok/s = accept length / (draft + forward + rest). Each factor is fitted over the dimensions that it can depend on
(`cycle_influence`), joint posterior draws are multiplied out. Terms are tested against every new measurement; one that
fails is widened, with its numbers in `findings`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain as concatenated

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2

from sweeps.acceptance_model import ChainModel, length_error
from sweeps.allreduce_prior import AllReducePrior, all_reduces
from sweeps.cycle_influence import WIDENED, Factor, Floats, Term, design, influence_of, level, tree_depth
from sweeps.factor_model import FactorModel, Measurements
from sweeps.observations import Finding, Observation, Observations
from sweeps.space import Configuration, Space
from sweeps.summary import BlockSummary

DRAWS = 256
_SURPRISE = 4.0
"""Standard deviations from its prediction at which a measurement contradicts the terms of a factor."""
_HETEROGENEOUS = 1e-4
"""Level of the test whether accept length is the same whatever the NCCL set (and args, env)."""
_PARTICLES: Mapping[Factor, int] = {"forward": 8, "draft": 4, "rest": 4, "accept_length": 8}
_FLOOR: Mapping[Factor, float] = {"forward": 0.0004, "draft": 0.003, "rest": 0.003, "accept_length": 0.002}
_UNSETTLED = 0.004
"""Relative error added while a launch's first blocks are all there is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Posterior:
    """Joint draws, (configurations, draws)."""

    members: tuple[Configuration, ...]
    accept_length: Floats
    """1 without speculation."""
    cycle_ms: Floats
    verify_ms: Floats
    tok_s: Floats


@dataclass(slots=True)
class CycleModel:
    """The model of one sweep.

    Args:
        influence: factor -> dimensions that may change it, in place of the table's.
        prior: what an all-reduce takes by NCCL set, where it was timed.
    """

    space: Space
    influence: Mapping[str, Iterable[str]] | None = None
    prior: AllReducePrior | None = None
    seed: int = 0
    findings: list[Finding] = field(default_factory=list)
    members: tuple[Configuration, ...] = ()
    _terms: dict[Factor, tuple[Term, ...]] = field(default_factory=dict)
    _factors: dict[Factor, FactorModel] = field(default_factory=dict)
    _chains: dict[str | None, ChainModel] = field(default_factory=dict)
    _rows: dict[Configuration, int] = field(default_factory=dict)
    _drafting: dict[str | None, tuple[NDArray[np.int64], Floats]] = field(default_factory=dict)
    """Drafter -> its members' rows and depths."""
    _steps: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    _is_chain: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    _tested: set[tuple[str, str, int]] = field(default_factory=set)
    _widened: set[Factor] = field(default_factory=set)
    _began_s: float = 0.0
    _expected: Floats | None = None
    """What the all-reduce table adds to each member's forward, as a share of it; once a trace told how often."""
    _rng: np.random.Generator = field(default_factory=np.random.default_rng)

    def __post_init__(self) -> None:
        self.members = tuple(dict.fromkeys((*self.space.configurations(), self.space.control)))
        self._rows = {member: row for row, member in enumerate(self.members)}
        self._steps = np.array([member.num_steps for member in self.members])
        self._is_chain = np.array([member.eagle_topk == 1 for member in self.members])
        for drafter in dict.fromkeys(member.drafter for member in self.members if member.speculates):
            rows = [row for row, each in enumerate(self.members) if each.speculates and each.drafter == drafter]
            self._drafting[drafter] = np.array(rows), np.array([tree_depth(self.members[row]) for row in rows])
        self._terms = influence_of(self.influence)
        self._rng = np.random.default_rng((self.seed, 0xC1C))
        for factor in self._terms:
            self._build(factor)

    def posterior(self, observations: Observations, *, draws: int = DRAWS) -> Posterior | None:
        """Fit and draw; None while no trial has a block, or where the engine times no phase."""
        trials = [seen for seen in observations if seen.blocks and seen.trial.configuration in self._rows]
        usable = [seen for seen in trials if _forward_ms(seen.blocks[-1]) is not None]
        if not usable:
            return None
        launches = _launches(observations)
        self._began_s = usable[0].blocks[0].started_s
        lengths = self._fit_acceptance(usable, launches, draws)
        times: dict[Factor, Floats] = {}
        for factor in ("forward", "draft", "rest"):
            times[factor] = self._fit_times(factor, usable, launches, draws, observations)
        speculates = (self._steps > 0)[:, None]
        cycle_ms = times["forward"] + times["rest"]
        np.add(cycle_ms, times["draft"], out=cycle_ms, where=speculates)
        overhead = np.where(speculates, *_overheads(usable))
        return Posterior(
            members=self.members,
            accept_length=lengths,
            cycle_ms=cycle_ms,
            verify_ms=times["forward"],
            tok_s=1000.0 * overhead * lengths / cycle_ms,
        )

    def adjusted_length(self, seen: Observation) -> tuple[float, float] | None:
        """(log of a trial's accept length as if it had run every block, its standard error); None without any."""
        blocks = [block for block in seen.blocks if block.accept_length is not None] if self._tells_length(seen) else []
        configuration = seen.trial.configuration
        chain = self._chains.get(configuration.drafter)
        if not blocks or chain is None or chain._mean is None:
            return None
        depth = tree_depth(configuration)
        indices = [block.block_index for block in blocks]
        length, error = _pooled_length(blocks, configuration.num_steps)
        there, everywhere = chain.expected(depth, indices), chain.expected(depth, range(chain.blocks))
        return math.log(length * everywhere / there), error

    def row(self, configuration: Configuration) -> int:
        return self._rows[configuration]

    # Factors

    def _build(self, factor: Factor) -> None:
        own = design(self._terms[factor], self.members, expected=self._expected if factor == "forward" else None)
        self._factors[factor] = FactorModel(own, multiplies=factor != "accept_length", particles=_PARTICLES[factor])

    def _fit_times(
        self,
        factor: Factor,
        trials: list[Observation],
        launches: Mapping[str, int],
        draws: int,
        observations: Observations,
    ) -> Floats:
        kept = [seen for seen in trials if factor != "draft" or seen.trial.configuration.speculates]
        series = [(seen, _series(factor, seen)) for seen in kept]
        series = [(seen, values) for seen, values in series if values.size]
        if not series:
            return np.zeros((len(self.members), draws))
        data = self._measurements(factor, series, launches)
        expected = self.expected_ms(observations) if factor == "forward" else None
        if expected is not None:
            data = replace(data, values=data.values - expected[data.rows])
            if self._expected is None:
                self._expected = expected / float(np.median(data.values))
                self._build(factor)
        model = self._factors[factor]
        model.fit(data, self._rng)
        if self._contradicted(factor, model, data, [seen for seen, _ in series]):
            self._factors[factor].fit(data, self._rng, sweeps=4)
        gain = _communication_ms(observations) if factor == "forward" else None
        drawn = self._factors[factor].draw(draws, self._rng, nccl_gain=gain)
        if expected is not None:
            drawn += expected[:, None]
        floor = 0.2 * float(data.values.min())
        return np.maximum(drawn, floor, out=drawn)

    def expected_ms(self, observations: Observations) -> Floats | None:
        """What NCCL sets add to each member's forward by the all-reduce table; None without it or without a trace.

        For members with the control's arguments alone: others may reduce by other means than the traced ones.
        """
        control = next(
            (seen for seen in observations if seen.kernels and not seen.trial.configuration.speculates), None
        )
        if self.prior is None or control is None:
            return None
        calls, of_control = all_reduces(control.kernels), control.trial.configuration
        return np.array(
            [
                calls * self.prior.difference_us(member.nccl_set, member.num_draft_tokens or 1) / 1000.0
                if (member.args, member.env) == (of_control.args, of_control.env)
                else 0.0
                for member in self.members
            ]
        )

    def _measurements(
        self, factor: Factor, series: list[tuple[Observation, Floats]], launches: Mapping[str, int]
    ) -> Measurements:
        deviations = [values / values.mean() - 1.0 for _, values in series if values.size > 2]
        spread = math.sqrt(
            (sum(float((each**2).sum()) for each in deviations) + 3 * 0.004**2)
            / (sum(each.size - 1 for each in deviations) + 3)
        )
        errors = [
            max(_FLOOR[factor], spread / math.sqrt(values.size)) + (_UNSETTLED / values.size if values.size < 4 else 0)
            for _, values in series
        ]
        return Measurements(
            rows=np.array([self._rows[seen.trial.configuration] for seen, _ in series]),
            values=np.array([float(values.mean()) for _, values in series]),
            errors=np.array(errors),
            launches=np.array([launches[seen.trial.trial_id] for seen, _ in series]),
            hours=np.array([self._hours(seen) for seen, _ in series]),
        )

    def _hours(self, seen: Observation) -> float:
        return (seen.blocks[len(seen.blocks) // 2].started_s - self._began_s) / 3600.0

    def _contradicted(self, factor: Factor, model: FactorModel, data: Measurements, trials: list[Observation]) -> bool:
        """Test each trial once, when it has ended, against what all others predict; widen the factor where it fails."""
        for place, seen in enumerate(trials):
            key = (factor, seen.trial.trial_id, len(seen.blocks))
            if seen.status == "running" or key in self._tested or place < 3:
                continue
            self._tested.add(key)
            z = model.surprise(data, place)
            if abs(z) >= _SURPRISE and factor not in self._widened:
                self._widen(
                    factor,
                    f"{factor}: trial {seen.trial.trial_id} ({seen.trial.configuration.label}) lies {z:.1f} standard "
                    "deviations from what its factors predict",
                    {"z": z},
                )
                return True
        return False

    def _widen(self, factor: Factor, detail: str, numbers: Mapping[str, float]) -> None:
        self._widened.add(factor)
        self._terms[factor] = (*self._terms[factor], *WIDENED[factor])
        added = ", ".join(term.name for term in WIDENED[factor])
        self._build(factor)
        self.findings.append(Finding(event="assumption_dropped", detail=f"{detail}; now with {added}", numbers=numbers))

    # Accept length

    def _fit_acceptance(self, trials: list[Observation], launches: Mapping[str, int], draws: int) -> Floats:
        drafting = [seen for seen in trials if seen.trial.configuration.speculates and self._tells_length(seen)]
        lengths = np.ones((len(self.members), draws))
        if not self._drafting:
            return lengths
        positions = int(self._steps.max())
        blocks = self.space.spec.workload.blocks
        for drafter, (rows, depths) in self._drafting.items():
            chain = self._chains.setdefault(drafter, ChainModel(positions, blocks))
            chain.fit(
                [
                    (seen.trial.configuration.num_steps, seen.blocks)
                    for seen in self._reference_chains(drafting)
                    if seen.trial.configuration.drafter == drafter
                ]
            )
            curve = chain.draw(self._rng.standard_normal((positions + blocks, draws)))
            lengths[rows] = _at_depth(curve, depths)
        residuals = [entry for seen in drafting if (entry := self._residual(seen)) is not None]
        self._test_acceptance(residuals)
        return self._with_residuals(lengths, residuals, launches, draws)

    def _tells_length(self, seen: Observation) -> bool:
        """In a mixed sweep a pinned trial repeats the accept length of other trials: it counts once, there."""
        repeats = seen.trial.acceptance == "pinned" and self.space.spec.acceptance == "mixed"
        return not repeats and any(block.accept_length is not None for block in seen.blocks)

    def _reference_chains(self, drafting: list[Observation]) -> list[Observation]:
        """Chain trials that share one curve: all of them, or once that failed those of the control's settings."""
        chains = [seen for seen in drafting if seen.trial.configuration.eagle_topk == 1]
        if "accept_length" not in self._widened:
            return chains
        return [seen for seen in chains if _settings(seen) == _settings(chains[0])]

    def _residual(self, seen: Observation) -> tuple[Observation, float, float] | None:
        """Log accept length against a chain of the same depth over the same blocks, with its standard error."""
        blocks = [block for block in seen.blocks if block.accept_length is not None]
        configuration = seen.trial.configuration
        chain = self._chains[configuration.drafter]
        length, error = _pooled_length(blocks, configuration.num_steps)
        expected = chain.expected(tree_depth(configuration), [block.block_index for block in blocks])
        return seen, math.log(length / expected), error

    def _test_acceptance(self, residuals: list[tuple[Observation, float, float]]) -> None:
        if "accept_length" in self._widened:
            return
        chains = [entry for entry in residuals if entry[0].trial.configuration.eagle_topk == 1]
        first = self.members[0]
        names = ["nccl", *(f"args.{name}" for name, _ in first.args), *(f"env.{name}" for name, _ in first.env)]
        for name in names:
            groups: dict[object, list[tuple[float, float]]] = {}
            for seen, residual, error in chains:
                groups.setdefault(level(seen.trial.configuration, name), []).append((residual, error))
            if len(groups) < 2:
                continue
            means = [_weighted(group) for group in groups.values()]
            centre, _ = _weighted(means)
            statistic = sum(((mean - centre) / error) ** 2 for mean, error in means)
            p = float(chi2.sf(statistic, len(groups) - 1))
            if p < _HETEROGENEOUS:
                self._widen(
                    "accept_length",
                    f"accept_length differs between values of {name} (chi-squared {statistic:.1f} over {len(groups)})",
                    {"chi_squared": statistic, "p": p},
                )
                return

    def _with_residuals(
        self,
        lengths: Floats,
        residuals: list[tuple[Observation, float, float]],
        launches: Mapping[str, int],
        draws: int,
    ) -> Floats:
        model = self._factors["accept_length"]
        widened = "accept_length" in self._widened or self.influence is not None
        kept = [entry for entry in residuals if widened or entry[0].trial.configuration.eagle_topk != 1]
        if not model.design.terms:
            return lengths
        if not kept:
            return self._times(lengths, _prior_draw(model, draws, self._rng))
        data = Measurements(
            rows=np.array([self._rows[seen.trial.configuration] for seen, _, _ in kept]),
            values=np.array([residual for _, residual, _ in kept]),
            errors=np.array([max(_FLOOR["accept_length"], error) for _, _, error in kept]),
            launches=np.array([launches[seen.trial.trial_id] for seen, _, _ in kept]),
            hours=np.zeros(len(kept)),
        )
        model.fit(data, self._rng)
        shift = model.draw(draws, self._rng)
        plain = self._steps == 0
        shift[plain if widened else plain | self._is_chain] = 0.0
        return self._times(lengths, shift)

    def _times(self, lengths: Floats, shift: Floats) -> Floats:
        """Accept lengths changed by `shift` (logs), between 1 and steps + 1."""
        bound = (self._steps + 1.0)[:, None]
        np.clip(shift, -1.0, 1.0, out=shift)
        np.exp(shift, out=shift)
        shift *= lengths
        return np.clip(shift, 1.0, bound, out=shift)


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


def _launches(observations: Observations) -> dict[str, int]:
    """Trial id -> number of the launch that served it."""
    number, launches = -1, {}
    for seen in observations:
        number += seen.relaunched is not False or number < 0
        launches[seen.trial.trial_id] = number
    return launches


def _forward_ms(block: BlockSummary) -> float | None:
    return block.verify_ms if block.verify_ms is not None else block.verify_forward_ms


def _series(factor: Factor, seen: Observation) -> Floats:
    """A factor's value of each block; a launch's first block is left out where there are others."""
    values: list[float] = []
    for block in seen.blocks:
        value = {
            "forward": _forward_ms(block),
            "draft": block.draft_ms,
            "rest": None if block.gap_ms is None else block.gap_ms + (block.extend_ms or 0.0),
        }[factor]
        if value is not None:
            values.append(value)
    if seen.relaunched is not False and len(values) > 2:
        values = values[1:]
    return np.array(values)


def _pooled_length(blocks: list[BlockSummary], steps: int) -> tuple[float, float]:
    """Accept length over blocks (tokens over cycles) and its relative standard error."""
    cycles = np.array([block.num_cycles for block in blocks], dtype=float)
    lengths = np.array([block.accept_length for block in blocks], dtype=float)
    errors = np.array([length_error(block, steps) for block in blocks])
    share = cycles / cycles.sum()
    length = float((share * lengths).sum())
    return length, float(np.sqrt((share**2 * errors**2).sum()) / length)


def _weighted(entries: list[tuple[float, float]]) -> tuple[float, float]:
    weights = np.array([error**-2 for _, error in entries])
    means = np.array([mean for mean, _ in entries])
    return float((weights * means).sum() / weights.sum()), float(weights.sum() ** -0.5)


def _settings(seen: Observation) -> tuple[object, ...]:
    configuration = seen.trial.configuration
    return configuration.nccl_env, configuration.args, configuration.env


def _overheads(trials: list[Observation]) -> tuple[float, float]:
    """Measured tok/s over accept length / cycle time, with and without speculation: batch size, what no phase has."""
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for seen in trials:
        for block in seen.blocks:
            if block.cycle_ms:
                ratio = block.tok_s * block.cycle_ms / (1000.0 * (block.accept_length or 1.0))
                ratios[seen.trial.configuration.speculates].append(ratio)
    every = list(concatenated(*ratios.values())) or [1.0]
    with_speculation, without = (float(np.median(ratios[key] or every)) for key in (True, False))
    return with_speculation, without


def _communication_ms(observations: Observations) -> float | None:
    """Communication inside the control's forward, where its profiler window told: no NCCL set can win more."""
    for seen in observations:
        if seen.kernels and not seen.trial.configuration.speculates and not seen.trial.configuration.nccl_env:
            kinds = [kernel for kernel in seen.kernels if kernel.phase == "verify" and kernel.kind == "communication"]
            return sum(kernel.us_per_cycle for kernel in kinds) / 1000.0
    return None
