"""The Optuna study of a sweep: what to measure next, when to stop a trial, when to stop the sweep. Optuna only, no Ray.

It can be driven by Ray Tune (`tune_bridge`) or by a plain loop on a virtual clock:

    while (trial := study.ask()) is not None:
        ...measure...; study.report(trial, summary, seconds=...); study.tell(trial, outcome)
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

import optuna
from optuna.storages import BaseStorage

from sweeps.engines.summary import BlockSummary
from sweeps.measure.records import Decision, FailureKind, Finding, Outcome, PlannedTrial, Role, name_trial
from sweeps.search.observations import Certainty, CertifyingSampler, Observation, Observations, RecommendingSampler
from sweeps.search.optuna_study import InvalidSuggestion, OptunaStudy, Proposal
from sweeps.search.samplers import Search, build_search
from sweeps.search.schedule import Schedule, is_served_alone
from sweeps.spec.document import SpecError
from sweeps.spec.model import SweepSpec
from sweeps.spec.space import Configuration, InvalidConfigurationError, Space, Suggestion

Phase = Literal["searching", "checking", "closing", "finished"]
_NEXT: Mapping[Phase, frozenset[Phase]] = {
    "searching": frozenset({"checking", "closing", "finished"}),
    "checking": frozenset({"searching", "finished"}),
    "closing": frozenset({"finished"}),
    "finished": frozenset(),
}
"""Which phase may follow which.

Searching: candidates are asked for. Checking: the search is certain of its incumbent, which is launched again beside a
last control; if the repeat contradicts, it searches on. Closing: the budget or the space is used up, a last control is
measured. Finished: nothing is asked for any more.
"""
_TRIES = 8
"""Suggestions drawn before an unseen configuration is taken instead: samplers repeat themselves on a finite space."""


class SweepStudy:
    """Asks samplers, keeps controls and budget, tells Optuna how trials ended. Single-threaded.

    Args:
        storage: of the Optuna study; None: in memory.
        observations: of an earlier run of the same sweep, to go on from.
        clock: seconds for `budget.wall_hours`.
        build: makes sampler and pruner, as `build_search`.

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
        build: Callable[..., Search] = build_search,
    ) -> None:
        _check(spec, space)
        self.spec = spec
        self.space = space
        self.observations = Observations() if observations is None else observations
        self.stop_reason: str | None = None
        """Why no further candidate is asked for; None while there may be one."""
        self._metric = spec.study.metric
        self._optuna = OptunaStudy(spec, space, self.observations, storage, build=build)
        self._schedule = Schedule(spec, space, self.observations, clock)
        self._phase: Phase = "searching"
        self._findings: list[Finding] = []
        self._failed_controls: set[FailureKind | None] = set()
        """Kinds of failure of this driver's controls."""
        self._members = frozenset(space.configurations())
        self._random = random.Random(f"{spec.study.seed}-{len(self.observations)}")

    @property
    def study(self) -> optuna.Study:
        """The Optuna study."""
        return self._optuna.study

    @property
    def finished(self) -> bool:
        """True once `ask` will never return a trial again."""
        return self._phase == "finished"

    @property
    def incumbent(self) -> Configuration | None:
        """The best configuration of the space so far: the sampler's own if it has a model, else the best mean."""
        sampler = self.study.sampler
        if isinstance(sampler, RecommendingSampler) and (best := sampler.incumbent()) is not None:
            return best
        return self.observations.incumbent(self._metric, among=self._members)

    @property
    def has_measured(self) -> bool:
        """Whether the control was measured, and any candidate if the space has one besides."""
        others = self._members - {self.space.control}
        return self._has_control() and (not others or bool(self.observations.measured() & others))

    @property
    def candidates_left(self) -> int:
        """How many candidates the space and `budget.trials` still allow at most."""
        return self._schedule.candidates_left

    @property
    def trials_left(self) -> int:
        """How many trials may still come at most, controls and incumbents included."""
        return 0 if self.finished else self._schedule.trials_left

    def ask(self) -> PlannedTrial | None:
        """What to measure next. None: nothing now (other trials must end first), or nothing ever (`finished`)."""
        trial = None
        while trial is None and not self.finished:
            if (role := self._schedule.next_beside()) is not None:
                trial = self._control_or_incumbent(role)
            elif self._phase == "searching":
                trial = self._candidate()
            elif self.observations.running:
                return None
            elif not self._schedule.close():
                self._enter("searching" if self._is_refuted() else "finished")
        return None if trial is None else self._started(trial)

    def ask_control(self) -> PlannedTrial | None:
        """A control for a node that has none: nodes are compared by it. None if no candidate would follow."""
        if self._phase != "searching" or not self.candidates_left:
            return None
        self._schedule.control_is_taken()
        trial = self._control_or_incumbent("control")
        return None if trial is None else self._started(trial)

    def _started(self, trial: PlannedTrial) -> PlannedTrial:
        trial = replace(trial, start_index=self.observations.next_start())
        self.observations.start(trial)
        return trial

    def report(self, trial: PlannedTrial, block: BlockSummary, *, seconds: Mapping[str, float]) -> Decision:
        """Take a block of a running trial, and decide whether the trial goes on. A last block is never pruned."""
        self.observations.add_block(trial.trial_id, block, seconds=seconds)
        if trial.number is None:
            return Decision(prune=False)
        return self._optuna.report(self.observations[trial.trial_id], block)

    def tell(self, trial: PlannedTrial, outcome: Outcome) -> None:
        """Take the end of a trial into the observations and the study."""
        self.observations.finish(trial.trial_id, outcome)
        observed = self.observations[trial.trial_id]
        if trial.number is None:
            self._optuna.share_control(observed)
            if trial.role == "control":
                self._judge_control(observed)
            return
        self._optuna.close(observed)
        self._schedule.candidate_ended()

    def _judge_control(self, observed: Observation) -> None:
        """Try a failed control again. Stop the sweep if it fails twice in the same way: nothing could be compared."""
        if observed.status != "failed" or self._has_control():
            return
        if observed.kind != "interrupted":
            if observed.kind in self._failed_controls:
                self.stop(f"the control failed twice in the same way ({observed.kind}): {observed.reason}")
            self._failed_controls.add(observed.kind)
        self._schedule.repeat_control()

    def _has_control(self) -> bool:
        return any(seen.trial.role == "control" and seen.is_measured for seen in self.observations)

    def stop(self, reason: str) -> None:
        """Ask for nothing more, not even a last control: something is broken that no configuration can help."""
        self._findings.append(Finding(event="search_stopped", detail=reason))
        self.stop_reason = reason
        if not self.finished:
            self._enter("finished")

    def drain_invalid(self) -> tuple[InvalidSuggestion, ...]:
        """Infeasible suggestions met since the last call: each a row of the tables."""
        return self._optuna.drain_invalid()

    def drain_findings(self) -> tuple[Finding, ...]:
        """What the search found out since the last call, why it stopped included: each a row of `events`."""
        sampler = self.study.sampler
        found, self._findings = tuple(self._findings), []
        if isinstance(sampler, RecommendingSampler):
            found = (*found, *sampler.drain_findings())
        return found

    # What to measure next

    def _candidate(self) -> PlannedTrial | None:
        if (reached := self._schedule.budget_reached()) is not None:
            self._enter("closing", reached + self._uncertified())
            return None
        if (certified := self._certified()) is not None:
            self._enter("checking", certified)
            return None
        open_configurations = self._schedule.open_configurations()
        if not open_configurations:
            measured = len(self.observations.measured() & self._members)
            reason = f"every configuration of the space was tried: {measured} of {len(self._members)} were measured"
            self._enter("closing", reason)
            return None
        if self.spec.study.sampler.name == "grid":
            return self._enqueue(open_configurations[0])
        for _ in range(_TRIES):
            if (trial := self._sample()) is not None:
                return trial
        return self._enqueue(self._random.choice(open_configurations))

    def _sample(self) -> PlannedTrial | None:
        proposal = self._optuna.propose()
        try:
            configuration = self.space.resolve(proposal.requested)
        except InvalidConfigurationError as error:
            self._optuna.refuse(proposal, str(error))
            return None
        if self._schedule.counts().get(configuration, 0) >= self.spec.study.max_replicates:
            self._optuna.fail(proposal, f"duplicate of {configuration.configuration_id}, measured often enough")
            return None
        return self._plan(proposal, configuration)

    def _enqueue(self, configuration: Configuration) -> PlannedTrial:
        proposal = self._optuna.propose_this(configuration)
        return self._plan(proposal, self.space.resolve(proposal.requested))

    def _plan(self, proposal: Proposal, configuration: Configuration) -> PlannedTrial:
        name = self._optuna.take(proposal, configuration)
        return self._planned(name, "candidate", proposal.handle.number, configuration, proposal.requested)

    def _control_or_incumbent(self, role: Role) -> PlannedTrial | None:
        """A control, or the incumbent again: no trials of the Optuna study. None if the control is the incumbent."""
        configuration = self.space.control if role == "control" else self._winner()
        if configuration is None:
            return None
        number = self.observations.next_number(role)
        return self._planned(name_trial(role, number), role, None, configuration, self.space.suggestion(configuration))

    def _winner(self) -> Configuration | None:
        """What is launched again beside a control: the incumbent, or if that does not speculate, the best that does.

        Only drafting servers show what launches of drafting servers differ by.
        """
        incumbent = self.incumbent
        if incumbent is None or incumbent.speculates:
            return incumbent
        drafting = [member for member in self._members if member.speculates]
        best = self.observations.incumbent(self._metric, among=drafting)
        return incumbent if best is None and incumbent != self.space.control else best

    def _planned(
        self, name: str, role: Role, number: int | None, configuration: Configuration, requested: Suggestion
    ) -> PlannedTrial:
        alone = is_served_alone(role, self.space)
        return PlannedTrial(
            trial_id=name,
            role=role,
            number=number,
            configuration=configuration,
            requested=requested,
            launch_key=self.space.alone_key(configuration) if alone else self.space.launch_key(configuration),
            states=() if alone else self.space.states(configuration),
            acceptance=self.spec.acceptance,
        )

    def _certified(self) -> str | None:
        wanted, certainty = self.spec.study.stop_probability, self._certainty()
        if wanted is None or certainty is None or certainty.probability is None or certainty.probability < wanted:
            return None
        return f"P(incumbent within {self.spec.study.stop_within:.1%} of the best) = {certainty} >= {wanted}"

    def _certainty(self) -> Certainty | None:
        sampler = self.study.sampler
        if not isinstance(sampler, CertifyingSampler):
            return None
        return sampler.certainty(self.spec.study.stop_within)

    def _uncertified(self) -> str:
        """Why a sweep that was to end as certain does not; empty if it was not to."""
        certainty = self._certainty() if self.spec.study.stop_probability is not None else None
        return "" if certainty is None else f"; P(incumbent within {self.spec.study.stop_within:.1%}) {certainty}"

    def _enter(self, phase: Phase, reason: str | None = None) -> None:
        """Change the phase, and say why the search stops."""
        assert phase in _NEXT[self._phase], f"a study goes from {self._phase} to {', '.join(_NEXT[self._phase])}"
        self._phase, self.stop_reason = phase, reason if phase != "finished" else self.stop_reason
        if reason is not None:
            self._findings.append(Finding(event="search_stopped", detail=reason))

    def _is_refuted(self) -> bool:
        """Whether the winner, launched again at the end, is no longer certain to be one."""
        newest = list(self.observations)[-1].trial
        if self._phase != "checking" or newest.role != "incumbent" or self._certified() is not None:
            return False
        detail = f"{newest.configuration.label} was launched again{self._uncertified()}"
        self._findings.append(Finding(event="certificate_withdrawn", detail=detail))
        return True


def _check(spec: SweepSpec, space: Space) -> None:
    if spec.study.metric == "verify_ms" and any(member.num_steps == 0 for member in space.configurations()):
        raise SpecError("study.metric: verify_ms does not exist without speculation, but search.num_steps holds 0")
    if spec.study.stop_probability is not None and spec.study.sampler.name != "cycle_model":
        raise SpecError(
            f"study.stop_probability: only the sampler cycle_model can tell it, got sampler {spec.study.sampler.name}"
        )
    if not space.configurations():
        raise SpecError("search: no configuration is valid: " + "; ".join(reason for _, reason in space.invalid()[:3]))
