"""What a sweep still has to measure: configurations left, controls due, budget used. Pure; no Optuna."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sweeps.measure.records import Role
from sweeps.results.events import BUDGET_REASON
from sweeps.search.observations import Observation, Observations
from sweeps.spec.model import SweepSpec
from sweeps.spec.space import Configuration, Space


class Schedule:
    """Reads the observations of a sweep and says what is due.

    Args:
        clock: seconds for `budget.wall_hours`, which counts from here.
    """

    def __init__(self, spec: SweepSpec, space: Space, observations: Observations, clock: Callable[[], float]) -> None:
        self._spec = spec
        self._space = space
        self._observations = observations
        self._clock = clock
        self._began_s = clock()
        self._due: deque[Role] = deque()
        self._is_closed = False
        """The trials after the last candidate are scheduled."""
        keys: dict[str, int] = {}
        members = space.configurations()
        places = [(keys.setdefault(space.launch_key(member), len(keys)), member) for member in members]
        self._grid = tuple(member for _, member in sorted(places, key=lambda entry: entry[0]))
        if not any(_is_control(seen) and seen.status != "failed" for seen in observations):
            self._due.append("control")
        elif (newest := list(observations)[-1]).trial.role == "incumbent" and newest.kind == "interrupted":
            self._due.append("incumbent")

    @property
    def num_candidates(self) -> int:
        """Candidates started so far, interrupted and refused ones excepted."""
        return sum(_is_candidate(seen) and not seen.refused for seen in self._observations)

    @property
    def candidates_left(self) -> int:
        """How many candidates the space and `budget.trials` still allow at most."""
        counts = self.counts()
        left = sum(max(0, self._spec.study.max_replicates - counts.get(member, 0)) for member in self._grid)
        limit = self._spec.budget.trials
        return left if limit is None else max(0, min(left, limit - self.num_candidates))

    @property
    def trials_left(self) -> int:
        """Trials to come at most: candidates, the controls after each `control.every` of them and at the end, and the
        incumbents beside these."""
        if self._space.held.nccl:
            closing = self._spec.control.incumbent and not self._is_closed and not self._ends_with_incumbent()
            return self.candidates_left + len(self._due) + closing
        since = 0 if "control" in self._due else self._since_control()
        beside = 2 if self._spec.control.incumbent else 1
        return self.candidates_left + len(self._due) + self._controls(since + self.candidates_left) * beside

    def _controls(self, num_candidates: int) -> int:
        every = self._spec.control.every
        whole, rest = divmod(num_candidates, every) if every else (0, num_candidates)
        return whole + (1 if rest else 0)

    def counts(self) -> dict[Configuration, int]:
        """How often each configuration was measured as a candidate; a control of the space counts as one of them."""
        counts: dict[Configuration, int] = {}
        for seen in self._observations:
            if _is_candidate(seen):
                counts[seen.trial.configuration] = counts.get(seen.trial.configuration, 0) + 1
        if any(_is_control(seen) and seen.status != "failed" for seen in self._observations):
            counts[self._space.control] = counts.get(self._space.control, 0) + 1
        return counts

    def open_configurations(self) -> list[Configuration]:
        """Still to be measured: fewest replicates first, then grouped by launch key, in the order of the space."""
        counts = self.counts()
        limit = self._spec.study.max_replicates
        left = [member for member in self._grid if counts.get(member, 0) < limit]
        return sorted(left, key=lambda member: counts.get(member, 0))

    def budget_reached(self) -> str | None:
        """Which budget is used up, with its numbers; None while there is some left."""
        budget = self._spec.budget
        gpu_hours = self._observations.held_s * self._spec.resources.gpus / 3600
        wall_hours = (self._clock() - self._began_s) / 3600
        if budget.trials is not None and self.num_candidates >= budget.trials:
            return f"{BUDGET_REASON}trials: {budget.trials} candidates were run"
        if budget.gpu_hours is not None and gpu_hours >= budget.gpu_hours:
            return f"{BUDGET_REASON}gpu_hours: {gpu_hours:.2f} of {budget.gpu_hours} are used"
        if budget.wall_hours is not None and wall_hours >= budget.wall_hours:
            return f"{BUDGET_REASON}wall_hours: {wall_hours:.2f} of {budget.wall_hours} are used"
        return None

    def next_beside(self) -> Role | None:
        """The control or incumbent that is due before any further candidate."""
        return self._due.popleft() if self._due else None

    def control_is_taken(self) -> None:
        """A control begins that was not asked for here: it stands for one that is due."""
        if "control" in self._due:
            self._due.remove("control")

    def repeat_control(self) -> None:
        """A control is due next: the one before told nothing."""
        if "control" not in self._due:
            self._due.appendleft("control")

    def candidate_ended(self) -> None:
        """A candidate has ended: a control may be due (`control.every`)."""
        every = self._spec.control.every
        self._is_closed = False
        if every and self._since_control() >= every and not self._space.held.nccl:
            self._schedule_control()

    def close(self) -> bool:
        """No candidate comes any more: schedule the last trials. False if they were already scheduled.

        A last control and the incumbent again; if NCCL sets are states, the incumbent in a server of its own. States
        are compared within their server, so the control is launched once.
        """
        if self._since_control() == 0:
            return False
        if not self._space.held.nccl:
            self._schedule_control()
            return True
        if self._is_closed or self._ends_with_incumbent() or not self._spec.control.incumbent:
            return False
        self._is_closed = True
        self._due.append("incumbent")
        return True

    def _ends_with_incumbent(self) -> bool:
        """Whether the incumbent was measured after the last candidate, maybe by an earlier driver."""
        newest = next((seen for seen in reversed(list(self._observations)) if seen.kind != "interrupted"), None)
        return newest is not None and newest.trial.role == "incumbent"

    def _since_control(self) -> int:
        count = 0
        for seen in reversed(list(self._observations)):
            if _is_control(seen):
                return count
            count += seen.trial.role == "candidate" and not seen.refused
        return count

    def _schedule_control(self) -> None:
        if "control" in self._due or any(seen.trial.role == "control" for seen in self._observations.running):
            return
        self._due.append("control")
        if self._spec.control.incumbent:
            self._due.append("incumbent")


def is_served_alone(role: Role, space: Space) -> bool:
    """Whether a trial gets a server of its own: the winner does, if candidates are compared as states of one server."""
    return role == "incumbent" and space.held.nccl


def _is_candidate(seen: Observation) -> bool:
    return seen.trial.role == "candidate" and seen.kind != "interrupted"


def _is_control(seen: Observation) -> bool:
    return seen.trial.role == "control" and seen.kind != "interrupted"
