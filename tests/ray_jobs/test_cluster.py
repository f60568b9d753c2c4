from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ray_jobs import cluster
from sweeps.spec.model import ResourceSpec


def node(host: str, gpus: float, *, cpus: float = 32.0, alive: bool = True) -> dict[str, Any]:
    return {"Alive": alive, "NodeManagerHostname": host, "NodeID": host, "Resources": {"GPU": gpus, "CPU": cpus}}


def test_nodes_with_enough_of_everything_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node("a", 8), node("b", 4), node("c", 8, cpus=0.5), node("d", 8, alive=False), node("e", 16)]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    assert [fit["NodeID"] for fit in cluster.suitable_nodes(ResourceSpec())] == ["a", "e"]


def test_too_few_gpus_fail_with_need_and_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.nodes", lambda: [node("a", 4), node("b", 0)])
    with pytest.raises(
        cluster.ClusterError, match=r"wanted a node with 8 GPUs and 1 CPUs; the cluster has a: 4 GPUs.*b: 0"
    ):
        cluster.suitable_nodes(ResourceSpec())


@pytest.mark.parametrize(("free", "said"), [({"GPU": 8.0}, None), ({"GPU": 3.0}, "3 free now"), ({}, "0 free now")])
def test_busy_gpus_are_waited_for_aloud(
    monkeypatch: pytest.MonkeyPatch, free: dict[str, float], said: str | None
) -> None:
    monkeypatch.setattr("ray.available_resources", lambda: free)
    waiting = cluster.waiting_for(ResourceSpec())
    assert (said is None) == (waiting is None)
    assert said is None or said in str(waiting)


LOCAL = """
import json, os, sys
from ray_jobs.ray_settings import settle_environment
settle_environment()
import ray
from ray_jobs.cluster import connect
from sweeps.spec.model import EngineSpec, ResourceSpec
connect(EngineSpec(kind="simulated", machine="x"), ResourceSpec(gpus=1))
@ray.remote
def token_of_a_worker():
    return os.environ.get("RAY_AUTH_TOKEN") == sys.argv[0]
ray.get(token_of_a_worker.remote())
print(json.dumps([ray.get_runtime_context().gcs_address, os.environ["RAY_AUTH_TOKEN"]]), flush=True)
sys.stdin.read()
"""
STRANGER = """
import sys
from ray._raylet import GcsClient
try:
    print("in", len(GcsClient(sys.argv[1]).get_all_node_info()))
except Exception as error:
    print("refused", type(error).__name__, error)
"""


@pytest.mark.ray
def test_a_local_cluster_lets_nobody_in_who_has_not_this_runs_token(tmp_path: Path) -> None:
    """It listens on all interfaces. The token is made for the run, and no file holds it."""
    environment = {**os.environ, "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    owner = subprocess.Popen(
        [sys.executable, "-c", LOCAL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert owner.stdout is not None
    try:
        address, token = json.loads(owner.stdout.readline())
        answers = {}
        for name, own in {
            "none": {"RAY_AUTH_MODE": "disabled"},
            "wrong": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64},
            "right": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token},
        }.items():
            command = [sys.executable, "-c", STRANGER, address]
            ran = subprocess.run(command, capture_output=True, text=True, env={**environment, **own}, timeout=120)
            answers[name] = ran.stdout
    finally:
        owner.communicate("")
    assert answers["none"].startswith("refused")
    assert answers["wrong"].startswith("refused")
    assert answers["right"] == "in 1\n"
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and token in path.read_text(errors="replace")]
