"""What a sweep believes about its space, and what it should measure next for its GPU seconds.

Shared by the `cycle_model` sampler and the `cycle_bound` pruner. No Optuna.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sweeps.search.cycle_model.allreduce_prior import AllReducePrior
from sweeps.search.cycle_model.model import CycleModel, Posterior
from sweeps.search.cycle_model.terms import Floats
from sweeps.search.observations import Observation, Observations
from sweeps.spec.model import Metric
from sweeps.spec.names import DEFAULT_NCCL_SET
from sweeps.spec.space import Configuration, Space

_RELAUNCH_S = 400.0
"""Until the sweep has launched once."""
_LAUNCH_ACTIVITIES = ("launch", "weight_load", "capture", "stop")
_GAIN_WEIGHT, _ENOUGH = 0.01, 0.95
_SETTLING = 0.5
"""Once the incumbent is missed with less than this probability, only what it could be missed by is looked for."""
_FAR_OFF = 0.08
"""Share by which a prediction must lie below the incumbent so that it need not be checked."""
_LAUNCH_SPREAD, _UNSETTLED = 0.004, 0.01
"""Relative errors of a cycle time: between launches at least, and of the first block after one."""
_BLOCK_ACTIVITIES = ("warmup", "measure", "trace", "switch")

_ESTIMATORS: weakref.WeakKeyDictionary[Observations, Estimator] = weakref.WeakKeyDictionary()


class Estimator:
    """The model of one sweep with its newest posterior, shared by sampler and pruner."""

    def __init__(self, space: Space, observations: Observations) -> None:
        self.space = space
        # Observations own their estimator through the weak dictionary; a strong reference back would keep both alive.
        self._observations = weakref.ref(observations)
        self.metric: Metric = space.spec.study.metric
        self.sign = 1.0 if self.metric == "tok_s" else -1.0
        self._draws = 256
        self._key: tuple[object, ...] = ()
        self._posterior: Posterior | None = None
        self._values: Floats = np.zeros((0, 0))
        """The metric's draws of the newest posterior, larger is better, and their means."""
        self._means: Floats = np.zeros(0)
        self._incumbent: Configuration | None = None
        self._members = frozenset(space.configurations())
        self._beside: dict[tuple[object, ...], list[Configuration]] = {}
        for member in space.configurations():
            if member.speculates:
                self._beside.setdefault(member.nccl_and_server_settings, []).append(member)
        self._launch_keys = np.array([space.launch_key(member) for member in space.configurations()])
        self._model: CycleModel | None = None

    @classmethod
    def of(cls, space: Space, observations: Observations) -> Estimator:
        """The one that belongs to these observations."""
        if observations not in _ESTIMATORS:
            _ESTIMATORS[observations] = cls(space, observations)
        return _ESTIMATORS[observations]

    def configure(
        self,
        *,
        seed: int,
        draws: int,
        prior: AllReducePrior | None = None,
    ) -> None:
        self._draws = draws
        self._model = CycleModel(self.space, prior=prior, seed=seed)

    @property
    def model(self) -> CycleModel:
        """As configured by the sampler; a pruner beside another sampler has one of its own."""
        if self._model is None:
            self._model = CycleModel(self.space, seed=self.space.spec.study.seed)
        return self._model

    @property
    def observations(self) -> Observations:
        observations = self._observations()
        assert observations is not None, "the observations of a sweep were dropped before its sampler"
        return observations

    def posterior(self) -> Posterior | None:
        """Refitted when a trial has ended since."""
        ended = [seen for seen in self.observations if seen.status != "running"]
        key = tuple((seen.trial.trial_id, seen.status) for seen in ended)
        if key != self._key or self._posterior is None:
            self._key = key
            self._posterior = self.model.posterior(Observations(ended), draws=self._draws)
            if self._posterior is not None:
                self._values = self._worth(self._posterior)
                self._means = self._values.mean(axis=1)
            self._incumbent = self._best_measured()
        return self._posterior

    def incumbent(self) -> Configuration | None:
        if self.posterior() is None:
            return self.observations.incumbent(self.metric, among=self._members)
        return self._incumbent

    def probability_within(self, within: float) -> float | None:
        """None as well while a challenge is open: terms that were not put to the test certify nothing."""
        if self.posterior() is None or self.incumbent() is None or self._challenge() is not None:
            return None
        return float(np.mean(~self._missed(within)))

    def next_configuration(self) -> Configuration | None:
        """The largest chain first; then the most likely to settle the search, per GPU second of its cost.

        None: there is nothing to go by.
        """
        posterior = self.posterior()
        candidates = self._open()
        if not candidates:
            return None
        if (chain := self._first_chain(candidates)) is not None:
            return chain
        if posterior is None:
            return None
        within = self.space.spec.study.stop_within
        missed = self._missed(within)
        wanted = self.space.spec.study.stop_probability or _ENOUGH
        if missed.mean() <= 1.0 - wanted and (challenger := self._challenge()) is not None:
            return challenger
        rows = np.array([self.model.row(member) for member in candidates])
        values = self._values[rows]
        best = values.max(axis=0)
        good = values >= best - within * np.abs(best)
        if missed.mean() < _SETTLING:
            good &= missed
        settles = good.mean(axis=1)
        incumbent = self.incumbent()
        own = self._values[self.model.row(incumbent)] if incumbent is not None else np.median(self._values, axis=0)
        # Between configurations that are equally likely to settle it, the one that gains more.
        share = np.maximum(values - own, 0.0).mean(axis=1) / np.abs(own).mean()
        score = (settles + _GAIN_WEIGHT * share) * (1.0 - self._failure_risk(candidates)) / self._cost_s(rows)
        if not score.any():  # nothing is expected to win: the least certain loser
            score = np.quantile(values - own, 0.999, axis=1)
        return self._plainly(candidates[int(score.argmax())], candidates)

    def _plainly(self, wanted: Configuration, candidates: Sequence[Configuration]) -> Configuration:
        """The same with NCCL's default, where these arguments were never launched and nothing speaks for the set.

        The first launch tells whether sets act there at all. Where they do not, a winner should ask for none: in
        prefill, which no decode rate shows, they do.
        """
        if any(seen.trial.configuration.server_settings == wanted.server_settings for seen in self.observations):
            return wanted
        plain = replace(wanted, nccl_set=DEFAULT_NCCL_SET, nccl_env=())
        if plain not in candidates:
            return wanted
        ours, theirs = (self._values[self.model.row(each)] for each in (wanted, plain))
        better = ours - theirs > self.space.spec.study.stop_within * np.abs(theirs)
        return wanted if better.mean() > 0.5 else plain

    def _missed(self, within: float) -> NDArray[np.bool_]:
        """Of each draw: whether the incumbent is more than `within` below the best."""
        incumbent = self.incumbent()
        assert self._posterior is not None, "draws before a posterior"
        if incumbent is None:
            return np.ones(self._draws, dtype=np.bool_)
        failed = [self.model.row(member) for member in self._failed() & self._members]
        values = self._values[: len(self._members)]
        best = (np.delete(values, failed, axis=0) if failed else values).max(axis=0)
        own = self._values[self.model.row(incumbent)]
        missed: NDArray[np.bool_] = own < best - within * np.abs(own)
        return missed

    def _open(self) -> list[Configuration]:
        """Members that may still be measured; of equivalent members the one that stands for them, else the first.

        Equivalent members share their replicates, except if launches are restless: then another launch tells more.
        """
        model, members = self.model, self.space.configurations()
        units = np.arange(len(model.members)) if model.restless else model.stand_ins
        counts = np.zeros(len(model.members), dtype=np.int64)
        for configuration, count in self._counts().items():
            counts[units[model.row(configuration)]] += count
        kept = counts[units] < self.space.spec.study.max_replicates
        kept[[model.row(member) for member in self._failed() & self._members]] = False
        rows = np.flatnonzero(kept[: len(members)])
        _, firsts = np.unique(model.stand_ins[rows], return_index=True)
        chosen = rows[np.sort(firsts)]
        stand_ins = model.stand_ins[chosen]
        return [members[row] for row in np.where(np.isin(stand_ins, rows), stand_ins, chosen)]

    def _challenge(self) -> Configuration | None:
        """What would show that top-k and the rest of the incumbent's settings do not add up: to be run before the end.

        The best prediction at another top-k with the incumbent's NCCL set and arguments, of which nothing was tried;
        None where all are far off.
        """
        incumbent = self.incumbent()
        if self._posterior is None or incumbent is None or not incumbent.speculates:
            return None
        incumbent = self.model.stand_in(incumbent)
        ended = (seen.trial.configuration for seen in self.observations if seen.status != "running")
        tried = {_cell(self.model.stand_in(each)) for each in ended}
        counts, failed, limit = self._counts(), self._failed(), self.space.spec.study.max_replicates
        cells = [
            member
            for member in self._beside.get(incumbent.nccl_and_server_settings, [])
            if member.eagle_topk != incumbent.eagle_topk
            and counts.get(member, 0) < limit
            and member not in failed
            and _cell(member) not in tried
        ]
        best = max(cells, key=self._mean, default=None)
        own = self._mean(incumbent)
        if best is None or own - self._mean(best) > _FAR_OFF * abs(own):
            return None
        return best

    def against(self, seen: Observation, incumbent: Configuration, sigmas: float) -> dict[str, float] | None:
        """Numbers of the bound on a running trial; None where it cannot be told."""
        posterior = self.posterior()
        cycles = np.array([block.cycle_ms for block in seen.blocks if block.cycle_ms is not None])
        if cycles.size > 2:  # a launch's first block is slow
            cycles = cycles[1:]
        if posterior is None or not cycles.size or self.metric != "tok_s":
            return None
        own, theirs = self.model.row(seen.trial.configuration), self.model.row(incumbent)
        configuration = seen.trial.configuration
        cycle_ms = float(cycles.mean())
        spread = float(cycles.std(ddof=1) / cycle_ms / math.sqrt(cycles.size)) if cycles.size > 1 else 0.01
        launched = max(_LAUNCH_SPREAD, self.model.launch_spread(drafts=configuration.speculates))
        cycle_error = math.hypot(spread, launched, _UNSETTLED / cycles.size)
        reference = np.log(posterior.tok_s[theirs])
        relative = np.log(posterior.accept_length[own]) - reference
        scale = float(np.median(np.log(posterior.tok_s[own] * posterior.cycle_ms[own] / posterior.accept_length[own])))
        mean, variance = float(relative.mean()), float(relative.var()) + 1e-6
        if configuration.speculates and (measured := self.model.adjusted_length(seen)) is not None:
            length, error = measured
            weight = 1.0 / (error**2 + float(reference.var()) + 0.01**2)
            mean = (mean / variance + (length - float(reference.mean())) * weight) / (1.0 / variance + weight)
            variance = 1.0 / (1.0 / variance + weight)
        level = float(np.exp(reference).mean())
        optimistic = mean + sigmas * math.hypot(math.sqrt(variance), cycle_error) + scale - math.log(cycle_ms)
        hard = math.log(configuration.num_steps + 1.0) - math.log(level)
        hard += scale - math.log(cycle_ms) + sigmas * cycle_error
        bounded = min(optimistic, hard)
        return {
            "optimistic": level * math.exp(bounded),
            "incumbent": level,
            "accept_length_bound": level * math.exp(bounded + math.log(cycle_ms) - scale),
            "cycle_ms": cycle_ms,
            "blocks": float(len(seen.blocks)),
        }

    def _mean(self, configuration: Configuration) -> float:
        return float(self._means[self.model.row(configuration)])

    def _worth(self, posterior: Posterior) -> Floats:
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
        measured = [
            seen.trial.configuration
            for seen in self.observations
            if seen.status == "completed" and seen.trial.configuration in self._members
        ]
        return max(measured, key=self._mean, default=None)

    def _first_chain(self, candidates: Sequence[Configuration]) -> Configuration | None:
        """The largest step count at top-k 1, if no chain was tried: with the NCCL set that the all-reduce table
        expects most of, else nearest to the control's other settings."""
        if any((seen.trial.configuration.eagle_topk or 0) == 1 for seen in self.observations):
            return None
        control = self.space.control
        chains = [member for member in candidates if member.eagle_topk == 1]
        expected = self.model.expected_ms(self.observations)
        best_ms = 0.0 if expected is None else min((expected[self.model.row(each)] for each in chains), default=0.0)
        if expected is not None and best_ms < 0.0:
            chains = [member for member in chains if expected[self.model.row(member)] <= 0.98 * best_ms]
            same = [member for member in chains if member.args == control.args]
        else:
            same = [member for member in chains if (member.nccl_env, member.args) == (control.nccl_env, control.args)]
        return max(same or chains, key=lambda member: member.num_steps, default=None)

    def _counts(self) -> dict[Configuration, int]:
        counts: dict[Configuration, int] = {}
        for seen in self.observations:
            if seen.trial.role != "incumbent" and seen.status != "failed":
                counts[seen.trial.configuration] = counts.get(seen.trial.configuration, 0) + 1
        return counts

    def _failed(self) -> set[Configuration]:
        ended = [seen for seen in self.observations if seen.status == "failed" and seen.kind != "interrupted"]
        return {seen.trial.configuration for seen in ended if seen.trial.role == "candidate"}

    def _failure_risk(self, candidates: Sequence[Configuration]) -> Floats:
        """Share of failed launches with the same NCCL set or the same arguments."""
        tried: dict[object, list[bool]] = {}
        for seen in self.observations:
            if seen.status != "running" and seen.relaunched is not False:
                for setting in _single_settings(seen.trial.configuration):
                    tried.setdefault(setting, []).append(seen.status == "failed" and not seen.blocks)
        risks = {setting: sum(failed) / (len(failed) + 0.25) for setting, failed in tried.items() if any(failed)}
        if not risks:
            return np.zeros(len(candidates))
        return np.array([max(risks.get(setting, 0.0) for setting in _single_settings(member)) for member in candidates])

    def _cost_s(self, rows: NDArray[np.int64]) -> Floats:
        ended = [seen for seen in self.observations if seen.status != "running" and seen.seconds]
        boots = [
            spent
            for seen in ended
            if (spent := sum(seen.seconds.get(name, 0.0) for name in _LAUNCH_ACTIVITIES)) and seen.relaunched
        ]
        per_block = [
            sum(seen.seconds.get(name, 0.0) for name in _BLOCK_ACTIVITIES) / len(seen.blocks)
            for seen in ended
            if seen.blocks
        ]
        # The first launch on a machine is colder than the others.
        boot_s = float(np.mean(boots[1:] or boots)) if boots else _RELAUNCH_S
        blocks_s = (float(np.mean(per_block)) if per_block else 5.0) * self.space.spec.workload.blocks
        live = self.observations.live_launch_key
        here = self._launch_keys[rows] == live
        return np.where(here, 0.0, boot_s) + blocks_s


def _cell(configuration: Configuration) -> tuple[object, ...]:
    return (configuration.eagle_topk, *configuration.nccl_and_server_settings)


def _single_settings(configuration: Configuration) -> tuple[object, ...]:
    """Each setting that a launch may fail of, on its own."""
    return (("nccl", configuration.nccl_env), *configuration.args, *configuration.env)
