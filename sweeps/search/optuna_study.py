"""Optuna's side of a sweep: asks its sampler and pruner, and keeps its study in line with what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from sweeps.engines.summary import BlockSummary
from sweeps.measure.records import Decision, name_trial
from sweeps.search.observations import MAXIMISED, DecidingPruner, Observation, Observations, pooled
from sweeps.search.samplers import Search, build_search
from sweeps.search.study_journal import SPECULATIVE, finished_trial, is_free, step_of
from sweeps.spec.model import SweepSpec
from sweeps.spec.space import Configuration, Space, Suggestion

DRIVER_DIED = "driver_died"


@dataclass(frozen=True, kw_only=True, slots=True)
class InvalidSuggestion:
    """A suggestion that cost nothing because no server could run it."""

    trial_id: str
    requested: Suggestion
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """A trial that Optuna opened: to be taken, refused or failed."""

    handle: optuna.Trial
    requested: Suggestion


class OptunaStudy:
    """One study with its sampler and pruner. Single-threaded.

    Args:
        storage: None: in memory.
        observations: shared with the sweep; samplers and pruners read them.
        build: makes sampler and pruner, as `build_search`.

    Raises SpecError for a sampler, pruner or option that does not fit.
    """

    def __init__(
        self,
        spec: SweepSpec,
        space: Space,
        observations: Observations,
        storage: BaseStorage | None = None,
        *,
        build: Callable[..., Search] = build_search,
    ) -> None:
        self._spec = spec
        self._space = space
        self._observations = observations
        self._metric = spec.study.metric
        self.study = self._open(
            storage,
            build(spec.study, num_blocks=spec.workload.blocks, space=space, observations=observations),
        )
        self._asked: dict[str, optuna.Trial] = {}
        self._reported: dict[str, set[int]] = {}
        self._invalid: list[InvalidSuggestion] = []
        self._known_invalid: set[frozenset[tuple[str, object]]] = set()
        self._members = frozenset(space.configurations())
        self._adopt()

    def propose(self) -> Proposal:
        """What the sampler wants next."""
        handle = self.study.ask()
        return Proposal(handle=handle, requested=self._suggest(handle))

    def propose_this(self, configuration: Configuration) -> Proposal:
        """A trial of `configuration`."""
        wanted = self._space.suggestion(configuration)
        self.study.enqueue_trial({name: value for name, value in wanted.items() if is_free(self._space, name)})
        return self.propose()

    def take(self, proposal: Proposal, configuration: Configuration) -> str:
        """The proposal becomes a trial of `configuration`; its id."""
        name = name_trial("candidate", proposal.handle.number)
        proposal.handle.set_user_attr("trial_id", name)
        proposal.handle.set_user_attr("configuration_id", configuration.configuration_id)
        proposal.handle.set_user_attr("label", configuration.label)
        self._asked[name] = proposal.handle
        return name

    def refuse(self, proposal: Proposal, reason: str) -> None:
        """No server could run it."""
        self._refuse(proposal.handle, proposal.requested, reason)

    def fail(self, proposal: Proposal, reason: str) -> None:
        """It is not to be measured."""
        self._fail(proposal.handle, reason)

    def report(self, observed: Observation, block: BlockSummary) -> Decision:
        """Report a block of a candidate, and decide whether its trial goes on. A last block is never pruned."""
        known = observed.blocks_with(self._metric)
        if not known or not math.isfinite(observed.values(self._metric)[-1]):
            return Decision(prune=False)
        handle = self._asked[observed.trial.trial_id]
        step, value = step_of(self._spec, known)
        reported = self._reported.setdefault(observed.trial.trial_id, set())
        if step not in reported:  # Optuna keeps the first report of a step, and a repeated attempt has them again
            reported.add(step)
            handle.report(value, step)
        if len(observed.blocks) >= self._spec.workload.blocks:
            return Decision(prune=False)
        return self._decide(handle, observed)

    def close(self, observed: Observation) -> None:
        """Tell how a candidate ended."""
        self._reported.pop(observed.trial.trial_id, None)
        self._close(self._asked.pop(observed.trial.trial_id), observed)

    def share_control(self, observed: Observation) -> None:
        """A control that is also a point of the space is one: samplers and pruners learn from its first measurement."""
        mean = observed.mean(self._metric)
        if observed.trial.role != "control" or observed.status != "completed" or mean is None:
            return
        known = any("control" in frozen.user_attrs for frozen in self.study.get_trials(deepcopy=False))
        if known or observed.trial.configuration not in self._members:
            return
        self.study.add_trial(finished_trial(self._spec, self._space, observed, {"control": observed.trial.trial_id}))

    def drain_invalid(self) -> tuple[InvalidSuggestion, ...]:
        """Infeasible suggestions met since the last call."""
        drained, self._invalid = tuple(self._invalid), []
        return drained

    def _suggest(self, handle: optuna.Trial) -> Suggestion:
        """Draw the dimensions that apply: none of speculation's at 0 steps, draft tokens only at top-k > 1."""
        requested: dict[str, bool | int | float | str] = {}
        for dimension in self._space.dimensions:
            if requested.get("num_steps") == 0 and dimension.name in SPECULATIVE:
                continue
            if dimension.name == "num_draft_tokens" and requested.get("eagle_topk") == 1:
                continue
            if is_free(self._space, dimension.name):
                drawn = handle.suggest_categorical(dimension.name, dimension.choices)
                assert drawn is not None  # no dimension has None among its choices
                requested[dimension.name] = drawn
            else:
                requested[dimension.name] = dimension.choices[0]
        return requested

    def _open(self, storage: BaseStorage | None, search: Search) -> optuna.Study:
        sampler, pruner = search
        return optuna.create_study(
            storage=storage,
            study_name=self._spec.sweep,
            load_if_exists=True,
            sampler=sampler,
            pruner=pruner,
            direction="maximize" if MAXIMISED[self._metric] else "minimize",
        )

    def _adopt(self) -> None:
        """Bring the study of an earlier run in line with its results."""
        for frozen in self.study.get_trials(deepcopy=False):
            if "invalid" in frozen.user_attrs:
                self._known_invalid.add(frozenset(frozen.user_attrs["invalid"].items()))
            if frozen.state == TrialState.RUNNING:
                self._settle(frozen)
        # Left by a driver that was killed between enqueueing a trial and asking for it. `ask` hands it out first, and
        # every later trial would be one behind.
        for _ in self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            self._fail(self.study.ask(), DRIVER_DIED)
        if self._spec.study.sampler.name == "grid":
            for requested, reason in self._space.invalid():
                if frozenset(requested.items()) not in self._known_invalid:
                    self._refuse(self.study.ask(), requested, reason)

    def _settle(self, frozen: FrozenTrial) -> None:
        handle = optuna.Trial(self.study, frozen._trial_id)
        observed = self._observations.of_number(frozen.number)
        if observed is None or observed.status == "failed":
            self._fail(handle, DRIVER_DIED if observed is None else observed.reason or DRIVER_DIED)
            return
        known = observed.blocks_with(self._metric)
        for count in range(1, len(known) + 1):
            step, value = step_of(self._spec, known[:count])
            if step not in frozen.intermediate_values:
                handle.report(value, step)
        self._close(handle, observed)

    def _decide(self, handle: optuna.Trial, observed: Observation) -> Decision:
        pruner = self.study.pruner
        if isinstance(pruner, DecidingPruner):
            return pruner.decide(handle.number)
        if not handle.should_prune():
            return Decision(prune=False)
        mean = observed.mean(self._metric)
        assert mean is not None, "a decision without a value"
        best = self._observations.incumbent(self._metric)
        numbers = {"mean": mean, "blocks": float(len(observed.blocks))}
        reason = f"{self._spec.study.pruner.name}: {self._metric} {mean:.2f} over {len(observed.blocks)} blocks"
        if best is not None:
            of_best = self._observations.of_configuration(best)
            known = pooled((block for seen in of_best for block in seen.blocks), self._metric)
            assert known is not None, "an incumbent without a value"
            numbers["incumbent"] = known
            reason += f", incumbent {numbers['incumbent']:.2f} ({best.label})"
        return Decision(prune=True, reason=reason, numbers=numbers)

    def _close(self, handle: optuna.Trial, observed: Observation) -> None:
        mean = observed.mean(self._metric)
        if observed.status == "failed" or mean is None:
            self._fail(handle, observed.reason or f"no block had a {self._metric}")
            return
        if observed.reason is not None:
            handle.set_user_attr("reason", observed.reason)
        if observed.status == "pruned":
            self.study.tell(handle, state=TrialState.PRUNED)
        else:
            self.study.tell(handle, mean)

    def _refuse(self, handle: optuna.Trial, requested: Suggestion, reason: str) -> None:
        handle.set_user_attr("invalid", dict(requested))
        self._fail(handle, reason)
        key = frozenset(requested.items())
        if key not in self._known_invalid:
            self._known_invalid.add(key)
            self._invalid.append(
                InvalidSuggestion(trial_id=name_trial("candidate", handle.number), requested=requested, reason=reason)
            )

    def _fail(self, handle: optuna.Trial, reason: str) -> None:
        handle.set_user_attr("reason", reason)
        self.study.tell(handle, state=TrialState.FAIL)
