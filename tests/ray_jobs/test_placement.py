from __future__ import annotations

from pathlib import Path

import pytest

from ray_jobs.nodes import Node, Nodes
from ray_jobs.placement import MAX_ERRORS_IN_A_ROW, Placement
from sweeps.measure.records import Outcome, PlannedTrial
from sweeps.results.tables import ResultsFolder
from sweeps.search.study import SweepStudy
from sweeps.spec.space import Space
from tests.sweeps.stub_engine import stub_spec

DONE = Outcome(status="completed")


class FixedNodes(Nodes):
    """Nodes that a test names, without a cluster."""

    def __init__(self, folder: Path, *names: str) -> None:
        super().__init__(stub_spec(), ResultsFolder(folder))
        self._fit = {name: Node(name, name, 1.0) for name in names}

    def refresh(self, *, at_once: bool = False) -> None:
        """Nothing changes."""

    def lose(self, name: str) -> None:
        del self._fit[name]

    def take_gpus(self, **free: float) -> None:
        """Others hold the GPUs of some nodes, all but so many."""
        self._available = {name: {"CPU": 1.0, "GPU": gpus} for name, gpus in free.items()}


class Sweep:
    """A study whose trials are given to nodes and ended by hand."""

    def __init__(self, folder: Path, *names: str, spec: str = "") -> None:
        self.nodes = FixedNodes(folder, *names)
        self.study = SweepStudy(stub_spec(spec), Space(stub_spec(spec)))
        self.placement = Placement(self.study, self.nodes, ResultsFolder(folder))
        self.number = 0

    def next(self) -> tuple[str, PlannedTrial, str] | None:
        """Tune's id, the trial, and the node's name."""
        self.number += 1
        found = self.placement.next(str(self.number))
        return None if found is None else (str(self.number), found[0], found[1].name)

    def must(self) -> tuple[str, PlannedTrial, str]:
        found = self.next()
        assert found is not None
        return found

    def end(self, placed: tuple[str, PlannedTrial, str], outcome: Outcome = DONE) -> None:
        self.placement.ended(placed[0], outcome)
        self.study.tell(placed[1], outcome)


def test_every_node_begins_with_a_control_and_holds_one_trial(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, "a", "b", "c")
    begun = [sweep.must() for _ in range(3)]
    assert [(trial.role, node) for _, trial, node in begun] == [("control", "a"), ("control", "b"), ("control", "c")]
    assert sweep.next() is None, "no node is free"
    sweep.end(begun[1])
    _, trial, node = sweep.must()
    assert (trial.role, node) == ("candidate", "b")


def test_a_node_without_a_candidate_to_follow_measures_no_control(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, "a", "b", "c", spec="budget: {trials: 2}\n")
    assert [sweep.must()[1].role for _ in range(2)] == ["control", "control"]
    assert sweep.next() is None


def test_a_node_whose_control_failed_measures_it_again_before_any_candidate(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, "a", "b")
    one, other = sweep.must(), sweep.must()
    sweep.end(other)
    sweep.end(one, Outcome(status="failed", kind="interrupted"))
    assert [(trial.role, node) for _, trial, node in (sweep.must(), sweep.must())] == [
        ("control", "a"),
        ("candidate", "b"),
    ]


def test_a_trial_goes_to_the_node_that_holds_its_server(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, "a", "b", spec="study: {sampler: {name: grid}}\n")
    for placed in [sweep.must(), sweep.must()]:
        sweep.end(placed)
    first = sweep.must()
    second = sweep.must()
    keys = {first[2]: first[1].launch_key, second[2]: second[1].launch_key}
    sweep.end(second)
    sweep.end(first)
    third = sweep.must()
    assert third[1].launch_key in keys.values(), "the grid is ordered by launch key"
    assert keys[third[2]] == third[1].launch_key


def test_a_periodic_control_goes_to_the_node_whose_last_one_is_oldest(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, "b", "a", spec="")
    one, other = sweep.must(), sweep.must()
    sweep.end(other)
    sweep.end(one)
    seen = []
    for _ in range(12):
        placed = sweep.must()
        if placed[1].role == "control":
            seen.append(placed[2])
        sweep.end(placed)
    assert seen[:2] == ["b", "a"]


def test_a_node_that_spoils_three_trials_in_a_row_is_left_out_and_the_last_one_ends_the_sweep(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, "a", "b")
    for spoilt in ("a", "b"):
        assert sweep.study.stop_reason is None
        for _ in range(MAX_ERRORS_IN_A_ROW):
            placed = sweep.must()
            assert placed[2] == spoilt
            sweep.placement.blame_node(placed[0], "found their node unusable: 9 MiB in use")
            sweep.end(placed, Outcome(status="failed", kind="interrupted"))
    assert [finding.detail.split()[0] for finding in sweep.nodes.drain_findings()] == ["a", "b"]
    assert sweep.study.stop_reason == "3 trials in a row found their node unusable: 9 MiB in use"


def test_a_success_between_them_forgives_a_node(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, "a")
    for _ in range(2 * MAX_ERRORS_IN_A_ROW):
        placed = sweep.must()
        sweep.placement.blame_node(placed[0], "died")
        sweep.end(placed, Outcome(status="failed", kind="interrupted"))
        placed = sweep.must()
        sweep.placement.node_is_well(placed[0])
        sweep.end(placed)
        if sweep.study.finished:
            break
    assert len(sweep.nodes) == 1


def test_a_node_whose_gpus_others_hold_is_passed_over_until_they_are_free(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, "a", "b")
    sweep.nodes.take_gpus(a=4.0, b=8.0)
    first = sweep.must()
    assert first[2] == "b"
    sweep.nodes.take_gpus(a=4.0, b=0.0)
    assert sweep.next() is None, "b holds a trial, and a is in use"
    sweep.end(first)
    second = sweep.must()
    assert second[2] == "b", "its GPUs are held by this sweep"
    sweep.nodes.take_gpus(a=8.0, b=0.0)
    assert sweep.must()[2] == "a"


def test_without_a_free_node_the_first_trial_waits(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, "a")
    sweep.nodes.take_gpus(a=0.0)
    assert sweep.must()[2] == "a"


@pytest.mark.parametrize("gone", ["a", "b"])
def test_what_was_placed_on_a_lost_node_is_told_as_stranded(tmp_path: Path, gone: str) -> None:
    sweep = Sweep(tmp_path, "a", "b")
    placed = {node: tune_id for tune_id, _, node in (sweep.must(), sweep.must())}
    sweep.nodes.lose(gone)
    assert sweep.placement.stranded() == [placed[gone]]
    assert sweep.placement.is_lost(placed[gone])
    assert sweep.placement.node_of(placed[gone]) == gone
