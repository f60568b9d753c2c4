"""Which node measures what: every node begins with a control, and keeps its server if the next trial can use it.

Nodes are blocks of the experiment. The controls of each node are what the analysis tells nodes apart by
(`docs/statistics.md`), so a node measures no candidate before it has begun a control.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from ray_jobs.nodes import Node, Nodes
from sweeps.measure.records import Outcome, PlannedTrial
from sweeps.results.tables import ResultsFolder, read_parts
from sweeps.search.study import SweepStudy

MAX_ERRORS_IN_A_ROW = 3
"""Of one node: then it is left out."""


class Placement:
    """Gives the trials of a study to nodes, one to each."""

    def __init__(self, study: SweepStudy, nodes: Nodes, folder: ResultsFolder) -> None:
        self._study = study
        self._nodes = nodes
        self._on: dict[str, tuple[Node, PlannedTrial]] = {}
        """What runs, by Tune's id of the trial."""
        self._controls: dict[str, int] = dict.fromkeys(_with_control(folder), -1)
        """Name of a node -> the start of its newest control in this run, -1 if an earlier run measured it."""
        self._serving: dict[str, str] = {}
        """Node id -> launch key of the server that it holds."""
        self._errors: Counter[str] = Counter()
        """Node id -> trials in a row that the node spoilt."""

    def next(self, tune_id: str) -> tuple[PlannedTrial, Node] | None:
        """A trial and the free node for it. None: no node is free, or nothing is to be measured now."""
        free = self._nodes.free({node.node_id for node, _ in self._on.values()})
        found = self._first_control(free) or self._next_trial(free)
        if found is not None:
            trial, node = found
            self._on[tune_id] = node, trial
            self._nodes.hold(node)
            self._serving[node.node_id] = trial.launch_key
            if trial.role == "control":
                self._controls[node.name] = trial.start_index or 0
        return found

    def ended(self, tune_id: str, outcome: Outcome) -> None:
        """The node of a trial is free again. A control that did not end well is no control of its node."""
        node, trial = self._on.pop(tune_id)
        if trial.role == "control" and outcome.status == "failed":
            self._controls.pop(node.name, None)

    def stranded(self) -> list[str]:
        """Tune's ids of trials whose node is gone: Tune itself would wait for the node for ever."""
        there = self._nodes.there()
        return [tune_id for tune_id, (node, _) in self._on.items() if node.node_id not in there]

    def is_lost(self, tune_id: str) -> bool:
        """Whether the node of a trial is gone."""
        return not self._nodes.holds(self._on[tune_id][0])

    def node_of(self, tune_id: str) -> str:
        """The name of the node of a trial."""
        return self._on[tune_id][0].name

    def node_is_well(self, tune_id: str) -> None:
        """The node of a trial did what it should."""
        self._errors[self._on[tune_id][0].node_id] = 0

    def blame_node(self, tune_id: str, what: str) -> None:
        """The node of a trial spoilt it. After some in a row the node is left out; without a node the sweep ends."""
        node, _ = self._on[tune_id]
        self._serving.pop(node.node_id, None)
        self._errors[node.node_id] += 1
        if self._errors[node.node_id] < MAX_ERRORS_IN_A_ROW:
            return
        why = f"{MAX_ERRORS_IN_A_ROW} trials in a row {what}"
        self._nodes.leave_out(node, f"is left out: {why}")
        if not len(self._nodes):
            self._study.stop(why)

    def _first_control(self, free: list[Node]) -> tuple[PlannedTrial, Node] | None:
        begun = sum(trial.role == "control" for _, trial in self._on.values())
        for node in free:
            if node.name not in self._controls and self._study.candidates_left > begun:
                trial = self._study.ask_control()
                if trial is not None:
                    return trial, node
        return None

    def _next_trial(self, free: list[Node]) -> tuple[PlannedTrial, Node] | None:
        able = [node for node in free if node.name in self._controls] or (free if not self._on else [])
        if not able:
            return None
        trial = self._study.ask()
        return None if trial is None else (trial, self._best_for(trial, able))

    def _best_for(self, trial: PlannedTrial, able: list[Node]) -> Node:
        """For a control the node whose last one is oldest; else one that holds the right server, or none yet."""
        if trial.role == "control":
            return min(able, key=lambda node: self._controls.get(node.name, -1))
        keys = [self._serving.get(node.node_id) for node in able]
        for wanted in (trial.launch_key, None):
            if wanted in keys:
                return able[keys.index(wanted)]
        return able[0]


def _with_control(folder: ResultsFolder) -> Collection[str]:
    """Names of nodes that measured a control in an earlier run."""
    rows = read_parts(folder, "trials", columns=["role", "status", "node"]).rows.to_pylist()
    return {row["node"] for row in rows if row["role"] == "control" and row["status"] == "completed" and row["node"]}
