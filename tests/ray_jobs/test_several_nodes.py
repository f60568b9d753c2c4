"""A sweep over several nodes: raylets of one machine, with 8 logical GPUs each. Nodes come, go, and are unfit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from ray_jobs.ray_settings import RAY_SETTINGS
from ray_jobs.trial_actor import SweepRun
from ray_jobs.tune_bridge import run_study
from sweeps.engines.summary import BlockSummary
from sweeps.measure.records import Decision, Outcome, PlannedTrial
from sweeps.results.tables import ResultsFolder, read_table
from sweeps.search.optuna_study import InvalidSuggestion
from sweeps.search.study import SweepStudy
from sweeps.spec.space import Space
from sweeps.spec.workload import plan_blocks
from tests.ray_jobs.sleeping_stub import DIRTY, open_sleeping
from tests.sweeps.stub_engine import stub_spec

pytestmark = [pytest.mark.ray, pytest.mark.slow]

GPUS: dict[str, Any] = {"num_cpus": 1, "num_gpus": 8}
ROOT = str(Path(__file__).parents[2])


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, _clean_environment: None) -> Iterator[tuple[Cluster, Any]]:
    """A head without GPUs, and the nodes `left` and `right`; the former is given too."""
    for name, value in {**RAY_SETTINGS, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": ROOT}.items():
        monkeypatch.setenv(name, value)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
    try:
        left = cluster.add_node(node_name="left", **GPUS)
        cluster.add_node(node_name="right", **GPUS)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster, left
    finally:
        ray.shutdown()
        cluster.shutdown()


class Events:
    """An observer that changes the cluster after a number of ended trials."""

    def __init__(self, cluster: Cluster, left: Any) -> None:
        self._cluster = cluster
        self._left = left
        self._num_ended = 0

    def started(self, trial: PlannedTrial) -> None:
        """Nothing."""

    def block_done(self, trial: PlannedTrial, block: BlockSummary, decision: Decision) -> None:
        if self._num_ended >= 14 and self._left is not None:
            self._cluster.remove_node(self._left, allow_graceful=False)
            self._left = None

    def ended(self, trial: PlannedTrial, outcome: Outcome) -> None:
        self._num_ended += 1
        if self._num_ended == 3:
            self._cluster.add_node(node_name="late", **GPUS)
            self._cluster.add_node(node_name="dirty", env_vars={DIRTY: "1"}, **GPUS)

    def refused(self, invalid: InvalidSuggestion) -> None:
        """Nothing."""


def test_nodes_that_come_are_used_and_what_ran_on_one_that_went_is_measured_elsewhere(
    cluster: tuple[Cluster, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = stub_spec("study: {max_replicates: 5, sampler: {name: grid}}\n")
    space, folder = Space(spec), ResultsFolder(tmp_path)
    study = SweepStudy(spec, space)
    blocks = plan_blocks(spec.workload, folder=tmp_path)
    run = SweepRun(spec=spec, sweep_id="s1", folder=folder, blocks=blocks, open_engine=open_sleeping)
    assert run_study(study, run, Events(*cluster)) == 0
    assert study.finished
    rows = [row for row in read_table(folder, "trials").to_pylist() if row["status"] != "invalid"]
    rows.sort(key=lambda row: row["start_index"])
    by_node = {name: [row for row in rows if row["node"] == name] for name in ("left", "right", "late", "dirty")}

    for name in ("left", "right", "late"):
        assert by_node[name][0]["role"] == "control", f"{name} began without a control"
        engines = {row["machine"] for row in by_node[name] if row["status"] == "completed"}
        assert len(engines) == 1, f"{name} did not keep its engine between trials"
        assert len(by_node[name]) > 2
    assert {row["kind"] for row in by_node["dirty"]} == {"gpu_not_clean"}
    assert {row["role"] for row in by_node["dirty"]} == {"control"}, (
        "a configuration was tried on a node without control"
    )

    lost = [row for row in rows if row["kind"] == "interrupted"]
    assert len(lost) <= 1 + 1, "the trial on the lost node, and one that was being placed there"
    measured = {row["configuration_id"] for row in rows if row["status"] == "completed"}
    assert measured == {member.configuration_id for member in (space.control, *space.configurations())}

    told = {(row["event"], row["detail"].partition(" ")[0]) for row in read_table(folder, "events").to_pylist()}
    assert {("node_joined", "late"), ("node_joined", "dirty"), ("node_lost", "left")} <= told
    assert ("node_left_out", "dirty") in told
    said = capsys.readouterr().out
    assert "node left out: dirty is left out: 3 trials in a row found their node unusable" in said
    assert "node lost: left" in said
