"""What a sweep believes about its space: the cycle model with its newest posterior. Shared by sampler and pruner."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from sweeps.search.cycle_model.allreduce_prior import AllReducePrior
from sweeps.search.cycle_model.model import DRAWS, CycleModel, Posterior
from sweeps.search.cycle_model.prune_bound import Draws, prune_bound
from sweeps.search.cycle_model.rules import Rules
from sweeps.search.cycle_model.terms import Floats
from sweeps.search.observations import Certainty, Observation, Observations
from sweeps.spec.model import Metric
from sweeps.spec.space import Configuration, Space

_NEARLY_CERTAIN = 0.85
"""P of one fit from which on it is told from _REPEATS fits. Four standard deviations of one fit below 0.95, or more."""
_REPEATS = 8
"""Fits for one P near certainty: 64 samples of the scales and 2,048 draws, which know it to 0.01."""


class Beliefs:
    """The model of one sweep; refitted when a trial has ended since.

    Args:
        draws: posterior draws per decision.
        prior: the all-reduce table, if there is one.
    """

    def __init__(
        self,
        space: Space,
        observations: Observations,
        *,
        seed: int,
        draws: int = DRAWS,
        prior: AllReducePrior | None = None,
        rules: Rules | None = None,
    ) -> None:
        self.space = space
        self.observations = observations
        self.rules = Rules() if rules is None else rules
        self.metric: Metric = space.spec.study.metric
        self.sign = 1.0 if self.metric == "tok_s" else -1.0
        """-1 if a smaller metric is better: draws are multiplied by it, so larger is always better."""
        self.model = CycleModel(space, prior=prior, seed=seed, rules=self.rules)
        self.values: Floats = np.zeros((0, 0))
        """The metric's draws, larger is better, (configurations, draws)."""
        self._draws = draws
        self._means: Floats = np.zeros(0)
        self._fitted_to: tuple[object, ...] = ()
        self._posterior: Posterior | None = None
        self._incumbent: Configuration | None = None
        self._certainty: tuple[float, Certainty] | None = None
        """Of the newest posterior, with the share that it is for."""
        self._members = frozenset(space.configurations())

    def posterior(self) -> Posterior | None:
        """The posterior given all ended trials; None while no trial tells anything."""
        ended = [seen for seen in self.observations if seen.status != "running"]
        key = tuple((seen.trial.trial_id, seen.status) for seen in ended)
        if key != self._fitted_to or self._posterior is None:
            self._fitted_to = key
            self._posterior = self.model.posterior(Observations(ended), draws=self._draws)
            if self._posterior is not None:
                self.values = self._metric_draws(self._posterior)
                self._means = self.values.mean(axis=1)
            self._incumbent = self._best_measured()
            self._certainty = None
        return self._posterior

    def incumbent(self) -> Configuration | None:
        """The measured configuration with the highest posterior mean; the best raw mean without a posterior."""
        if self.posterior() is None:
            return self.observations.incumbent(self.metric, among=self._members)
        return self._incumbent

    def mean(self, configuration: Configuration) -> float:
        """Posterior mean of the metric, larger is better."""
        return float(self._means[self.model.row(configuration)])

    def of(self, configuration: Configuration) -> Floats:
        """The metric's draws of one configuration, (draws,)."""
        own: Floats = self.values[self.model.row(configuration)]
        return own

    def draws_where_incumbent_loses(self, within: float) -> NDArray[np.bool_]:
        """Whether the incumbent is more than `within` below the best, (draws,). All True without an incumbent."""
        incumbent = self.incumbent()
        assert self._posterior is not None, "draws before a posterior"
        if incumbent is None:
            return np.ones(self._draws, dtype=np.bool_)
        return self._loses(self.values, incumbent, within)

    def certainty(self, within: float) -> Certainty:
        """P(the incumbent is within this share of the best).

        Near certainty it is the mean over _REPEATS fits, each with its own samples of the scales and draws: of one fit
        it varies by 0.015 to 0.05, and the luckiest of many looks would stop the sweep.
        """
        incumbent = self.incumbent()
        if incumbent is None:
            return Certainty(lacks="no candidate has been measured to its end")
        if self._certainty is None or self._certainty[0] != within:
            shares = [1.0 - float(self._loses(self.values, incumbent, within).mean())]
            ended = Observations(seen for seen in self.observations if seen.status != "running")
            while shares[0] >= _NEARLY_CERTAIN and len(shares) < _REPEATS:
                posterior = self.model.posterior(ended, draws=self._draws)
                assert posterior is not None, "a second fit of what was fitted before"
                shares.append(1.0 - float(self._loses(self._metric_draws(posterior), incumbent, within).mean()))
            error = float(np.std(shares, ddof=1) / np.sqrt(len(shares))) if len(shares) > 1 else None
            self._certainty = within, Certainty(probability=float(np.mean(shares)), error=error)
        return self._certainty[1]

    def _loses(self, drawn: Floats, incumbent: Configuration, within: float) -> NDArray[np.bool_]:
        failed = [self.model.row(member) for member in self.failed()]
        values = drawn[: len(self._members)]
        best = (np.delete(values, failed, axis=0) if failed else values).max(axis=0)
        own = drawn[self.model.row(incumbent)]
        loses: NDArray[np.bool_] = own < best - within * np.abs(own)
        return loses

    def counts(self) -> dict[Configuration, int]:
        """How often each configuration was measured, re-measured incumbents and failures left out."""
        counts: dict[Configuration, int] = {}
        for seen in self.observations:
            if seen.trial.role != "incumbent" and seen.status != "failed":
                counts[seen.trial.configuration] = counts.get(seen.trial.configuration, 0) + 1
        return counts

    def failed(self) -> set[Configuration]:
        """Members that failed as candidates, for a reason of their own."""
        ended = [seen for seen in self.observations if seen.status == "failed" and seen.kind != "interrupted"]
        return {seen.trial.configuration for seen in ended if seen.trial.role == "candidate"} & self._members

    def bound_on(self, seen: Observation, incumbent: Configuration, sigmas: float) -> dict[str, float] | None:
        """`prune_bound` of a running trial; None if it cannot be told, or for another metric than tok/s."""
        posterior, configuration = self.posterior(), seen.trial.configuration
        if posterior is None or self.metric != "tok_s":
            return None
        own = self.model.row(configuration)
        numbers = prune_bound(
            [block.cycle_ms for block in seen.blocks if block.cycle_ms is not None],
            Draws(
                tok_s=posterior.tok_s[own],
                cycle_ms=posterior.cycle_ms[own],
                accept_length=posterior.accept_length[own],
            ),
            posterior.tok_s[self.model.row(incumbent)],
            launch_spread=self.model.launch_spread(drafts=configuration.speculates),
            num_steps=configuration.num_steps,
            length=self.model.adjusted_length(seen) if configuration.speculates else None,
            sigmas=sigmas,
        )
        return None if numbers is None else {**numbers, "blocks": float(len(seen.blocks))}

    def _metric_draws(self, posterior: Posterior) -> Floats:
        of_metric: Mapping[Metric, Floats] = {
            "tok_s": posterior.tok_s,
            "cycle_ms": posterior.cycle_ms,
            "verify_ms": posterior.verify_ms,
        }
        values = of_metric[self.metric]
        return values if self.sign > 0 else -values

    def _best_measured(self) -> Configuration | None:
        if self._posterior is None:
            return None
        completed = (seen.trial.configuration for seen in self.observations if seen.status == "completed")
        return max((each for each in completed if each in self._members), key=self.mean, default=None)
