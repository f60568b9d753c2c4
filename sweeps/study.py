"""The Optuna study of a sweep: what to measure next, when to stop a trial, when to stop the sweep. Optuna only, no Ray.

It can be driven by Ray Tune (`tune_bridge`) or by a plain loop on a virtual clock:

    while (trial := study.ask()) is not None:
        ...measure...; study.report(trial, summary, seconds=...); study.tell(trial, outcome)
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from sweeps.mixed_acceptance import acceptance_of, checked_prediction
from sweeps.observations import (
    MAXIMISED,
    CertifyingSampler,
    DecidingPruner,
    Decision,
    Finding,
    Observation,
    Observations,
    Outcome,
    PlannedTrial,
    RecommendingSampler,
    Role,
    candidate_id,
)
from sweeps.samplers import build_pruner, build_sampler
from sweeps.schedule import Schedule
from sweeps.space import Configuration, InvalidConfigurationError, Space, Suggestion
from sweeps.spec import SpecError, SweepSpec
from sweeps.summary import BlockSummary

DRIVER_DIED = "driver_died"
_TRIES = 8
"""Suggestions drawn before an unseen configuration is taken instead: samplers repeat themselves on a finite space."""
_SPECULATIVE = frozenset({"eagle_topk", "num_draft_tokens", "drafter"})


@dataclass(frozen=True, kw_only=True, slots=True)
class InvalidSuggestion:
    """A suggestion that cost nothing because no server could run it."""

    trial_id: str
    requested: Suggestion
    reason: str


class SweepStudy:
    """Asks samplers, keeps controls and budget, tells Optuna how trials ended. Single-threaded.

    Args:
        storage: of the Optuna study; in memory where None.
        observations: of an earlier run of the same sweep, to go on from.
        clock: seconds for `budget.wall_hours`.

    Raises SpecError for a sampler, pruner, option or metric that does not fit.
    """

    def __init__(
        self,
        spec: SweepSpec,
        space: Space,
        *,
        storage: BaseStorage | None = None,
        observations: Observations | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check(spec, space)
        self.spec = spec
        self.space = space
        self.observations = Observations() if observations is None else observations
        self.stop_reason: str | None = None
        """Why no further candidate is asked for; None while there may be one."""
        self._metric = spec.study.metric
        self._maximise = MAXIMISED[self._metric]
        self._study = self._open(storage)
        self._schedule = Schedule(spec, space, self.observations, clock)
        self._asked: dict[str, optuna.Trial] = {}
        self._reported: dict[str, set[int]] = {}
        self._finished = False
        self._said_why = False
        self._findings: list[Finding] = []
        self._invalid: list[InvalidSuggestion] = []
        self._known_invalid: set[frozenset[tuple[str, object]]] = set()
        self._members = frozenset(space.configurations())
        self._random = random.Random(f"{spec.study.seed}-{len(self.observations)}")
        self._adopt()

    @property
    def study(self) -> optuna.Study:
        """The Optuna study."""
        return self._study

    @property
    def finished(self) -> bool:
        """True once `ask` will never return a trial again."""
        return self._finished

    @property
    def incumbent(self) -> Configuration | None:
        """The best configuration of the space so far: the sampler's own, where it has a model, else the best mean."""
        sampler = self._study.sampler
        if isinstance(sampler, RecommendingSampler) and (best := sampler.incumbent()) is not None:
            return best
        return self.observations.incumbent(self._metric, among=self._members)

    @property
    def candidates_left(self) -> int:
        """How many candidates the space and `budget.trials` still allow at most."""
        return self._schedule.candidates_left

    @property
    def trials_left(self) -> int:
        """How many trials may still come at most, controls and incumbents included."""
        return 0 if self._finished else self._schedule.trials_left + self._is_unchecked()

    def ask(self) -> PlannedTrial | None:
        """What to measure next. None: nothing now (other trials must end first), or nothing ever (`finished`)."""
        trial = None
        while trial is None and not self._finished:
            if (role := self._schedule.next_beside()) is not None:
                trial = self._beside(role)
            elif self.stop_reason is None:
                trial = self._candidate()
            elif self.observations.running:
                return None
            elif self._is_unchecked():
                trial = self._beside("incumbent")
            else:
                self._finished = not self._schedule.close()
        if trial is not None:
            self.observations.start(trial)
        return trial

    def report(self, trial: PlannedTrial, block: BlockSummary, *, seconds: Mapping[str, float]) -> Decision:
        """Take a block of a running trial, and decide whether the trial goes on. A last block is never pruned."""
        self.observations.add_block(trial.trial_id, block, seconds=seconds)
        observed = self.observations[trial.trial_id]
        values = observed.values(self._metric)
        if trial.number is None or not values or not math.isfinite(values[-1]):
            return Decision(prune=False)
        handle = self._asked[trial.trial_id]
        step, value = self._step(block.block_index, values)
        reported = self._reported.setdefault(trial.trial_id, set())
        if step not in reported:  # Optuna keeps the first report of a step, and a repeated attempt has them again
            reported.add(step)
            handle.report(value, step)
        if len(observed.blocks) >= self.spec.workload.blocks:
            return Decision(prune=False)
        return self._decide(handle, values)

    def tell(self, trial: PlannedTrial, outcome: Outcome) -> None:
        """Take the end of a trial into the observations and the study."""
        self.observations.finish(trial.trial_id, outcome)
        observed = self.observations[trial.trial_id]
        if (checked := checked_prediction(self.observations, observed, self._metric)) is not None:
            self._findings.append(checked)
        if trial.number is None:
            self._share_control(observed)
            return
        self._reported.pop(trial.trial_id, None)
        self._close(self._asked.pop(trial.trial_id), observed)
        self._schedule.candidate_ended()

    def stop(self, reason: str) -> None:
        """Ask for nothing more, not even a last control: something is broken that no configuration can help."""
        self.stop_reason = reason
        self._finished = True

    def drain_invalid(self) -> tuple[InvalidSuggestion, ...]:
        """Infeasible suggestions met since the last call: each a row of the tables."""
        drained, self._invalid = tuple(self._invalid), []
        return drained

    def drain_findings(self) -> tuple[Finding, ...]:
        """What the search found out since the last call, why it stopped included: each a row of `events`."""
        sampler = self._study.sampler
        found, self._findings = tuple(self._findings), []
        if isinstance(sampler, RecommendingSampler):
            found = (*found, *sampler.drain_findings())
        if self.stop_reason is not None and not self._said_why:
            self._said_why = True
            found = (*found, Finding(event="search_stopped", detail=self.stop_reason))
        return found

    # What to measure next

    def _candidate(self) -> PlannedTrial | None:
        self.stop_reason = self._schedule.budget_reached()
        if self.stop_reason is None and (certified := self._certified()) is not None:
            if not self._is_unchecked():
                self.stop_reason = certified
            elif not any(seen.trial.role == "incumbent" for seen in self.observations.running):
                return self._beside("incumbent")  # counts once its winner was measured
        if self.stop_reason is not None:
            return None
        open_configurations = self._schedule.open_configurations()
        if not open_configurations:
            self.stop_reason = f"every configuration of the space was measured ({len(self._members)})"
            return None
        if self.spec.study.sampler.name == "grid":
            return self._enqueue(open_configurations[0])
        for _ in range(_TRIES):
            if (trial := self._sample()) is not None:
                return trial
        return self._enqueue(self._random.choice(open_configurations))

    def _sample(self) -> PlannedTrial | None:
        handle = self._study.ask()
        requested = self._suggest(handle)
        try:
            configuration = self.space.resolve(requested)
        except InvalidConfigurationError as error:
            self._refuse(handle, requested, str(error))
            return None
        if self._schedule.counts().get(configuration, 0) >= self.spec.study.max_replicates:
            self._fail(handle, f"duplicate of {configuration.configuration_id}, measured often enough")
            return None
        return self._plan(handle, configuration, requested)

    def _enqueue(self, configuration: Configuration) -> PlannedTrial:
        wanted = self.space.suggestion(configuration)
        self._study.enqueue_trial({name: value for name, value in wanted.items() if self._is_free(name)})
        handle = self._study.ask()
        requested = self._suggest(handle)  # may be one that a killed driver had enqueued
        return self._plan(handle, self.space.resolve(requested), requested)

    def _plan(self, handle: optuna.Trial, configuration: Configuration, requested: Suggestion) -> PlannedTrial:
        trial_id = candidate_id(handle.number)
        handle.set_user_attr("trial_id", trial_id)
        handle.set_user_attr("configuration_id", configuration.configuration_id)
        handle.set_user_attr("label", configuration.label)
        self._asked[trial_id] = handle
        return self._planned(trial_id, "candidate", handle.number, configuration, requested)

    def _beside(self, role: Role) -> PlannedTrial | None:
        """A control, or the incumbent again: measured beside the study. None where there is no incumbent of its own."""
        configuration = self.space.control if role == "control" else self.incumbent
        if configuration is None or (role == "incumbent" and configuration == self.space.control):
            return None
        number = sum(seen.trial.role == role for seen in self.observations)
        trial_id = f"{'k' if role == 'control' else 'i'}{number:04d}"
        return self._planned(trial_id, role, None, configuration, self.space.suggestion(configuration))

    def _is_unchecked(self) -> bool:
        """Whether only a combination of trials speaks for the incumbent of a mixed sweep."""
        best = self.incumbent if self.spec.acceptance == "mixed" else None
        return best is not None and not self.observations.is_measured(best)

    def _planned(
        self, trial_id: str, role: Role, number: int | None, configuration: Configuration, requested: Suggestion
    ) -> PlannedTrial:
        acceptance = acceptance_of(self.space, self.observations, configuration, role=role)
        return PlannedTrial(
            trial_id=trial_id,
            role=role,
            number=number,
            configuration=configuration,
            requested=requested,
            launch_key=self.space.launch_key(replace(configuration, pinned=acceptance == "pinned")),
            step_candidates=self.space.step_candidates(configuration),
            acceptance=acceptance,
        )

    def _suggest(self, handle: optuna.Trial) -> Suggestion:
        """Draw the dimensions that apply: none of speculation's at 0 steps, draft tokens only at top-k > 1."""
        requested: dict[str, bool | int | float | str] = {}
        for dimension in self.space.dimensions:
            if requested.get("num_steps") == 0 and dimension.name in _SPECULATIVE:
                continue
            if dimension.name == "num_draft_tokens" and requested.get("eagle_topk") == 1:
                continue
            requested[dimension.name] = (
                handle.suggest_categorical(dimension.name, dimension.choices)
                if self._is_free(dimension.name)
                else dimension.choices[0]
            )
        return requested

    def _is_free(self, name: str) -> bool:
        return any(dimension.name == name and len(dimension.choices) > 1 for dimension in self.space.dimensions)

    def _certified(self) -> str | None:
        wanted = self.spec.study.stop_probability
        sampler = self._study.sampler
        if wanted is None or not isinstance(sampler, CertifyingSampler):
            return None
        probability = sampler.probability_within(self.spec.study.stop_within)
        if probability is None or probability < wanted:
            return None
        return f"P(incumbent within {self.spec.study.stop_within:.1%} of the best) = {probability:.3f} >= {wanted}"

    # Optuna's side

    def _open(self, storage: BaseStorage | None) -> optuna.Study:
        spec = self.spec.study
        pruner = build_pruner(
            spec.pruner, num_blocks=self.spec.workload.blocks, space=self.space, observations=self.observations
        )
        sampler = build_sampler(
            spec.sampler, seed=spec.seed + len(self.observations), space=self.space, observations=self.observations
        )
        return optuna.create_study(
            storage=storage,
            study_name=self.spec.sweep,
            load_if_exists=True,
            sampler=sampler,
            pruner=pruner,
            direction="maximize" if self._maximise else "minimize",
        )

    def _adopt(self) -> None:
        """Bring the study of an earlier run in line with its results, and schedule the first control."""
        for frozen in self._study.get_trials(deepcopy=False):
            if "invalid" in frozen.user_attrs:
                self._known_invalid.add(frozenset(frozen.user_attrs["invalid"].items()))
            if frozen.state == TrialState.RUNNING:
                self._settle(frozen)
        if self.spec.study.sampler.name == "grid":
            for requested, reason in self.space.invalid():
                if frozenset(requested.items()) not in self._known_invalid:
                    self._refuse(self._study.ask(), requested, reason)

    def _settle(self, frozen: FrozenTrial) -> None:
        handle = optuna.Trial(self._study, frozen._trial_id)
        observed = self.observations.of_number(frozen.number)
        if observed is None or observed.status == "failed":
            self._fail(handle, DRIVER_DIED if observed is None else observed.reason or DRIVER_DIED)
            return
        for count, block in enumerate(observed.blocks, start=1):
            step, value = self._step(block.block_index, observed.values(self._metric)[:count])
            if step not in frozen.intermediate_values:
                handle.report(value, step)
        self._close(handle, observed)

    def _step(self, block_index: int, values: tuple[float, ...]) -> tuple[int, float]:
        """Wilcoxon pairs blocks (step = block, value = the block's); others compare running means by length."""
        if self.spec.study.pruner.name == "wilcoxon":
            return block_index, values[-1]
        return len(values), sum(values) / len(values)

    def _decide(self, handle: optuna.Trial, values: tuple[float, ...]) -> Decision:
        pruner = self._study.pruner
        if isinstance(pruner, DecidingPruner):
            return pruner.decide(handle.number)
        if not handle.should_prune():
            return Decision(prune=False)
        mean = sum(values) / len(values)
        best = self.observations.incumbent(self._metric)
        numbers = {"mean": mean, "blocks": float(len(values))}
        reason = f"{self.spec.study.pruner.name}: {self._metric} {mean:.2f} over {len(values)} blocks"
        if best is not None:
            of_best = self.observations.of_configuration(best)
            known = [value for seen in of_best if (value := seen.mean(self._metric)) is not None]
            numbers["incumbent"] = sum(known) / len(known)
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
            self._study.tell(handle, state=TrialState.PRUNED)
        else:
            self._study.tell(handle, mean)

    def _share_control(self, observed: Observation) -> None:
        """A control that is also a point of the space is one: samplers and pruners learn from its first measurement."""
        mean = observed.mean(self._metric)
        if observed.trial.role != "control" or observed.status != "completed" or mean is None:
            return
        known = any("control" in frozen.user_attrs for frozen in self._study.get_trials(deepcopy=False))
        if known or observed.trial.configuration not in self._members:
            return
        values = observed.values(self._metric)
        wanted = self.space.suggestion(observed.trial.configuration)
        distributions: dict[str, optuna.distributions.BaseDistribution] = {
            dimension.name: optuna.distributions.CategoricalDistribution(dimension.choices)
            for dimension in self.space.dimensions
            if self._is_free(dimension.name) and dimension.name not in _SPECULATIVE
        }
        self._study.add_trial(
            optuna.trial.create_trial(
                value=mean,
                params={name: wanted[name] for name in distributions},
                distributions=distributions,
                user_attrs={"control": observed.trial.trial_id},
                intermediate_values=dict(
                    self._step(block.block_index, values[:count])
                    for count, block in enumerate(observed.blocks, start=1)
                ),
            )
        )

    def _refuse(self, handle: optuna.Trial, requested: Suggestion, reason: str) -> None:
        handle.set_user_attr("invalid", dict(requested))
        self._fail(handle, reason)
        key = frozenset(requested.items())
        if key not in self._known_invalid:
            self._known_invalid.add(key)
            self._invalid.append(
                InvalidSuggestion(trial_id=candidate_id(handle.number), requested=requested, reason=reason)
            )

    def _fail(self, handle: optuna.Trial, reason: str) -> None:
        handle.set_user_attr("reason", reason)
        self._study.tell(handle, state=TrialState.FAIL)


def open_journal(path: Path) -> BaseStorage:
    """The file storage of a study, one writer; it opens in optuna-dashboard."""
    return JournalStorage(JournalFileBackend(str(path)))


def _check(spec: SweepSpec, space: Space) -> None:
    if spec.study.metric == "verify_ms" and any(member.num_steps == 0 for member in space.configurations()):
        raise SpecError("study.metric: verify_ms does not exist without speculation, but search.num_steps holds 0")
    if spec.study.stop_probability is not None and spec.study.sampler.name != "cycle_model":
        raise SpecError(
            f"study.stop_probability: only the sampler cycle_model can tell it, got sampler {spec.study.sampler.name}"
        )
    if not space.configurations():
        raise SpecError("search: no configuration is valid: " + "; ".join(reason for _, reason in space.invalid()[:3]))
