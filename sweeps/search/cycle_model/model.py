"""Throughput of every configuration of a sweep, from a small Bayesian model per factor of the cycle. No Optuna.

tok/s = accept length / (draft + forward + rest). Each factor is fitted over the dimensions that it can depend on
(`terms`), the times here and accept length in `accept_length`; joint posterior draws are multiplied out. Terms
are tested against every new measurement; one that fails is widened, with its numbers in `findings`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from sweeps.measure.records import Finding
from sweeps.search.cycle_model.accept_length import LengthModel, widening
from sweeps.search.cycle_model.allreduce_prior import AllReducePrior, all_reduces
from sweeps.search.cycle_model.block_series import block_spread, forward_ms, number_launches, overheads, series_of
from sweeps.search.cycle_model.equivalent_sets import find_representatives, where_nccl_acts
from sweeps.search.cycle_model.lengths import Lengths
from sweeps.search.cycle_model.pinned_length import PinnedLength
from sweeps.search.cycle_model.random_effects import MAX_STEADY_BLOCK_SPREAD, FactorModel, Measurements
from sweeps.search.cycle_model.rules import Rules
from sweeps.search.cycle_model.terms import TERMS, WIDENED, Factor, Floats, Term, design
from sweeps.search.observations import Observation, Observations
from sweeps.spec.names import PINNED_LENGTH
from sweeps.spec.space import Configuration, Space

DRAWS = 256
"""Joint posterior draws per decision: a probability of 0.95 is then known to 0.014."""
_SURPRISE = 4.0
"""Standard deviations from its prediction at which a measurement contradicts the terms of a factor.
Half or 1.5 times of it changes no median by more than 2 % (docs/search.md, constants)."""
_PARTICLES: Mapping[Factor, int] = {"forward": 8, "draft": 4, "rest": 4}
"""Samples of the scales. Not tuned: most of a cycle is its forward."""
_FLOOR: Mapping[Factor, float] = {"forward": 0.0004, "draft": 0.003, "rest": 0.003}
"""Least relative standard error of a trial's mean. Not tuned: a guess; draft and rest are short and timed less well."""
_UNSETTLED = 0.004
"""Relative error of a trial's mean with one block, over the number of blocks, below four of them.
A guess; half or 1.5 times of it changes no median by more than 8 % (docs/search.md, constants)."""
_LEAST_SHARE = 0.2
"""No draw of a time is below this share of the least one measured: keeps them positive. Not tuned."""


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
        prior: what an all-reduce takes by NCCL set, if it was timed.
    """

    space: Space
    prior: AllReducePrior | None = None
    seed: int = 0
    rules: Rules = field(default_factory=Rules)
    findings: list[Finding] = field(default_factory=list)
    members: tuple[Configuration, ...] = ()
    _terms: dict[Factor, tuple[Term, ...]] = field(default_factory=dict)
    _factors: dict[Factor, FactorModel] = field(default_factory=dict)
    _lengths: Lengths = field(init=False)
    _rows: dict[Configuration, int] = field(default_factory=dict)
    _speculates: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    _tested: set[tuple[str, str, int]] = field(default_factory=set)
    _widened: set[Factor] = field(default_factory=set)
    _began_s: float = 0.0
    _expected: Floats | None = None
    """Time that the all-reduce table adds to each member's forward, relative; None until a trace counted the calls."""
    representatives: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Row of the member that is measured for each member: its own, unless its NCCL set does not act. (members,)"""
    _nccl_acts: NDArray[np.bool_] = field(default_factory=lambda: np.ones(0, dtype=np.bool_))
    _rng: np.random.Generator = field(default_factory=np.random.default_rng)

    def __post_init__(self) -> None:
        self.members = tuple(dict.fromkeys((*self.space.configurations(), self.space.control)))
        self._rows = {member: row for row, member in enumerate(self.members)}
        self._speculates = np.array([member.speculates for member in self.members])
        self._rng = np.random.default_rng((self.seed, 0xC1C))
        self._terms = dict(TERMS)
        lengths = self._terms.pop("accept_length")
        spec = self.space.spec
        pinned = spec.engine.env.get(PINNED_LENGTH) if spec.acceptance == "pinned" else None
        self._lengths = (
            LengthModel(self.space, self._rows, lengths, widens=self.rules.widening)
            if pinned is None
            else PinnedLength(self.members, pinned=float(pinned))
        )
        self.representatives = np.arange(len(self.members))
        self._nccl_acts = np.ones(len(self.members), dtype=np.bool_)
        for factor in self._terms:
            self._build(factor)

    def posterior(self, observations: Observations, *, draws: int = DRAWS) -> Posterior | None:
        """Fit and draw; None while no trial has a block, or if the engine times no phase."""
        trials = [seen for seen in observations if seen.blocks and seen.trial.configuration in self._rows]
        usable = [seen for seen in trials if forward_ms(seen.blocks[-1]) is not None]
        if not usable:
            return None
        self._learn_where_nccl_acts(observations)
        launches = number_launches(observations)
        self._began_s = usable[0].blocks[0].started_s
        contradicted = self._lengths.fit(usable, launches)
        if contradicted is not None:
            self.findings.append(contradicted)
        lengths = self._lengths.draw(draws, self._rng)
        times = {factor: self._fit_times(factor, usable, launches, draws, observations) for factor in self._terms}
        speculates = self._speculates[:, None]
        cycle_ms = times["forward"] + times["rest"]
        np.add(cycle_ms, times["draft"], out=cycle_ms, where=speculates)
        overhead = np.where(speculates, *overheads(usable))
        return Posterior(
            members=self.members,
            accept_length=lengths,
            cycle_ms=cycle_ms,
            verify_ms=times["forward"],
            tok_s=1000.0 * overhead * lengths / cycle_ms,
        )

    def adjusted_length(self, seen: Observation) -> tuple[float, float] | None:
        """(log of a trial's accept length as if it had run every block, its standard error); None without any."""
        return self._lengths.adjusted(seen)

    def launch_spread(self, *, drafts: bool) -> float:
        """What launches of one configuration are taken to differ by in their forward, relative; 0 before a fit."""
        return self._factors["forward"].launch_scale(drafts=drafts)

    @property
    def has_noisy_launches(self) -> bool:
        """Whether blocks of drafting servers differ by so much that their launches may, too."""
        return self._factors["forward"].has_noisy_launches

    def row(self, configuration: Configuration) -> int:
        return self._rows[configuration]

    def known_representative(self, configuration: Configuration) -> Configuration:
        """As `representative`; a configuration outside the space is its own."""
        return self.representative(configuration) if configuration in self._rows else configuration

    def representative(self, configuration: Configuration) -> Configuration:
        """The member that is measured for it, which may be itself."""
        return self.members[int(self.representatives[self._rows[configuration]])]

    def _learn_where_nccl_acts(self, observations: Observations) -> None:
        if not self.rules.equivalent_sets:
            return
        acts = where_nccl_acts(self.members, observations)
        if not np.array_equal(acts, self._nccl_acts):
            self._nccl_acts = acts
            for factor in self._terms:
                self._build(factor)
        failed = {seen.trial.configuration for seen in observations if seen.status == "failed"}
        self.representatives = find_representatives(self.members, acts, failed=failed)

    def _build(self, factor: Factor) -> None:
        expected = self._expected if factor == "forward" else None
        own = design(self._terms[factor], self.members, expected=expected, nccl_acts=self._nccl_acts)
        self._factors[factor] = FactorModel(own, particles=_PARTICLES[factor])

    def _fit_times(
        self,
        factor: Factor,
        trials: list[Observation],
        launches: Mapping[str, int],
        draws: int,
        observations: Observations,
    ) -> Floats:
        kept = [seen for seen in trials if factor != "draft" or seen.trial.configuration.speculates]
        series = [(seen, series_of(factor, seen)) for seen in kept]
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
        drawn = self._factors[factor].draw(draws, self._rng)
        if expected is not None:
            drawn += expected[:, None]
        floor = _LEAST_SHARE * float(data.values.min())
        np.maximum(drawn, floor, out=drawn)
        own = np.arange(len(self.members))
        return drawn if np.array_equal(self.representatives, own) else drawn[self.representatives]

    def expected_ms(self, observations: Observations) -> Floats | None:
        """What NCCL sets add to each member's forward by the all-reduce table; None without it or without a trace.

        For members with the control's arguments alone: others may reduce by other means than the traced ones.
        """
        control = next(
            (seen for seen in observations if seen.kernels and not seen.trial.configuration.speculates), None
        )
        if self.prior is None or control is None or not self.rules.all_reduce_prior:
            return None
        calls, of_control = all_reduces(control.kernels), control.trial.configuration
        return np.array(
            [
                calls * self.prior.difference_us(member.nccl_set, member.num_draft_tokens or 1) / 1000.0
                if member.server_settings == of_control.server_settings
                else 0.0
                for member in self.members
            ]
        )

    def _measurements(
        self, factor: Factor, series: list[tuple[Observation, Floats]], launches: Mapping[str, int]
    ) -> Measurements:
        drafts = np.array([seen.trial.configuration.speculates for seen, _ in series])
        of_drafts = block_spread([values for (_, values), own in zip(series, drafts, strict=True) if own])
        noisy = drafts & (of_drafts > MAX_STEADY_BLOCK_SPREAD) & self.rules.noisy_launches
        quiet = block_spread([values for (_, values), own in zip(series, noisy, strict=True) if not own])
        errors = [
            max(_FLOOR[factor], (of_drafts if own else quiet) / math.sqrt(values.size))
            + (_UNSETTLED / values.size if values.size < 4 else 0)
            for (_, values), own in zip(series, noisy, strict=True)
        ]
        return Measurements(
            rows=self.representatives[[self._rows[seen.trial.configuration] for seen, _ in series]],
            values=np.array([float(values.mean()) for _, values in series]),
            errors=np.array(errors),
            launches=np.array([launches[seen.trial.trial_id] for seen, _ in series]),
            hours=np.array([self._hours(seen) for seen, _ in series]),
            noisy=noisy,
            block_spread=of_drafts,
        )

    def _hours(self, seen: Observation) -> float:
        return (seen.blocks[len(seen.blocks) // 2].started_s - self._began_s) / 3600.0

    def _contradicted(self, factor: Factor, model: FactorModel, data: Measurements, trials: list[Observation]) -> bool:
        """Test each trial once, when it has ended, against what all others predict; widen the factor if it fails."""
        if not self.rules.widening:
            return False
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
        self._build(factor)
        self.findings.append(widening(factor, detail, numbers))
