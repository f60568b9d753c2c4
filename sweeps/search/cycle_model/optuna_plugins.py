"""The `cycle_model` sampler and the `cycle_bound` pruner: search that uses what is known about a cycle.

The sampler asks for the configuration that is most likely within `stop_within` of the best, per GPU second: a switch in
place costs seconds, a relaunch minutes, and both are learnt from the sweep. (Expected improvement per second took a
third longer on the benchmark's machines: it takes long shots before sure wins.) The pruner ends a trial that cannot
reach the incumbent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial
from scipy.stats import norm

from sweeps.measure.records import Decision, Finding
from sweeps.search.cycle_model.allreduce_prior import read_prior
from sweeps.search.cycle_model.beliefs import Beliefs
from sweeps.search.cycle_model.chooser import Chooser
from sweeps.search.cycle_model.model import DRAWS
from sweeps.search.cycle_model.rules import Rules
from sweeps.search.observations import Certainty, Observation, Observations
from sweeps.spec.space import Configuration, Space


class CycleModelSampler(BaseSampler):
    """Suggests whole configurations of the finite space.

    Args:
        allreduce: `allreduce.parquet` of `ray_jobs.allreduce_table` with this spec's sets, timed on this machine at
            this model's bytes a token: where NCCL sets start from.
        draws: posterior draws per decision.

    Raises SpecError for a table that cannot be read.
    """

    def __init__(
        self,
        space: Space,
        observations: Observations,
        rules: Rules | None = None,
        /,
        *,
        seed: int | None = None,
        allreduce: str | None = None,
        draws: int = DRAWS,
    ) -> None:
        prior = read_prior(Path(allreduce)) if allreduce else None
        self.beliefs = Beliefs(space, observations, seed=seed or 0, draws=draws, prior=prior, rules=rules)
        """Shared with the pruner."""
        self._space = space
        self._chooser = Chooser(self.beliefs)
        self._random = optuna.samplers.RandomSampler(seed=seed)
        self._drained = 0

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Assumptions that were dropped so far."""
        return tuple(self.beliefs.model.findings)

    def drain_findings(self) -> tuple[Finding, ...]:
        """Those since the last call."""
        drained = self.findings[self._drained :]
        self._drained += len(drained)
        return drained

    def incumbent(self) -> Configuration | None:
        """The measured configuration with the highest posterior mean; None while none has ended."""
        return self.beliefs.incumbent()

    def certainty(self, within: float) -> Certainty:
        """P(the incumbent is within this share of the best configuration), or why it cannot be told."""
        return self._chooser.certainty(within)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {
            dimension.name: optuna.distributions.CategoricalDistribution(dimension.choices)
            for dimension in self._space.dimensions
            if len(dimension.choices) > 1
        }

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        wanted = self._chooser.next_configuration()
        if wanted is None:
            return {}
        suggestion = self._space.suggestion(wanted)
        return {name: suggestion[name] for name in search_space}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._random.sample_independent(study, trial, param_name, param_distribution)


class CycleBoundPruner(BasePruner):
    """Ends a trial whose optimistic throughput stays below the incumbent's (`prune_bound`).

    It ends nothing if the metric of the study is not `tok_s`.

    Args:
        risk: P(a trial that could win is ended), per decision.
        min_blocks: never before so many blocks.
    """

    def __init__(self, beliefs: Beliefs, /, *, risk: float = 0.001, min_blocks: int = 2) -> None:
        if not 0.0 < risk < 0.5:
            raise ValueError(f"wanted risk in (0, 0.5), got {risk}")
        self._beliefs = beliefs
        self._sigmas = float(norm.isf(risk))
        self._min_blocks = min_blocks

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        return self.decide(trial.number).prune

    def decide(self, number: int) -> Decision:
        """For the running trial with this study number, after its newest block was observed."""
        seen = self._beliefs.observations.of_number(number)
        if seen is None or len(seen.blocks) < self._min_blocks:
            return Decision(prune=False)
        incumbent = self._beliefs.incumbent()
        if incumbent is None or incumbent == seen.trial.configuration:
            return Decision(prune=False)
        return self._bound(seen, incumbent) if self._beliefs.rules.bound else Decision(prune=False)

    def _bound(self, seen: Observation, incumbent: Configuration) -> Decision:
        numbers = self._beliefs.bound_on(seen, incumbent, self._sigmas)
        if numbers is None or numbers["optimistic"] >= numbers["incumbent"]:
            return Decision(prune=False, numbers=numbers or {})
        return Decision(
            prune=True,
            reason=(
                f"cycle_bound: at best {numbers['optimistic']:.2f} tok/s (accept length at most "
                f"{numbers['accept_length_bound']:.2f} over {numbers['cycle_ms']:.2f} ms) "
                f"against {numbers['incumbent']:.2f} of the incumbent ({incumbent.label})"
            ),
            numbers=numbers,
        )
