"""The Ray cluster of a sweep: the one we are in, or a local one; checked before anything is scheduled."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from sweeps import SpecsweepError
from sweeps.spec.model import EngineSpec, ResourceSpec


class ClusterError(SpecsweepError, RuntimeError):
    """A cluster that cannot run the sweep: what was needed, and what it has."""


def connect(engine: EngineSpec, resources: ResourceSpec) -> None:
    """Join the cluster of RAY_ADDRESS (every Ray job has one), else start one on this machine.

    A local cluster has the spec's number of logical GPUs for an engine without real ones. Raises ClusterError.
    """
    if address := os.environ.get("RAY_ADDRESS"):
        with _told_in_a_line(f"RAY_ADDRESS {address}: no cluster that this process can join"):
            ray.init(log_to_driver=False)
        return
    with _group_of_their_own(), _told_in_a_line("Ray did not start on this machine"):
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, int(resources.cpus) + 1),
            num_gpus=resources.gpus if engine.is_virtual else None,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 * 2**20,
        )


@contextmanager
def _told_in_a_line(what: str) -> Iterator[None]:
    """Raise ClusterError for a cluster that cannot be reached, or whose first node was too slow to start."""
    try:
        yield
    except Exception as error:
        if type(error) is not Exception and not isinstance(error, ConnectionError | TimeoutError):
            raise
        # For a node that takes more than 30 s to start Ray raises the root class itself.
        raise ClusterError(f"{what}: {' '.join(str(error).split())[:400]}") from error


@contextmanager
def _group_of_their_own() -> Iterator[None]:
    """Processes started inside get a process group of their own.

    `timeout`, Slurm and a terminal signal the whole group of the command. Ray would die of it at once, and the driver
    would wait a minute for it instead of ending its sweep. A session's leader cannot leave its group and starts as is.
    """
    if os.getsid(0) == os.getpid():
        yield
        return
    before = os.getpgrp()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0) as leader:
        os.setpgid(0, leader.pid)
        try:
            yield
        finally:
            os.setpgid(0, before)


def suitable_nodes(resources: ResourceSpec) -> list[dict[str, Any]]:
    """Nodes that can hold one trial. Raises ClusterError with need and have if there is none."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    fit = [
        node
        for node in alive
        if node["Resources"].get("GPU", 0) >= resources.gpus and node["Resources"].get("CPU", 0) >= resources.cpus
    ]
    if not fit:
        have = ", ".join(
            f"{node['NodeManagerHostname']}: {node['Resources'].get('GPU', 0):g} GPUs, "
            f"{node['Resources'].get('CPU', 0):g} CPUs"
            for node in alive
        )
        raise ClusterError(
            f"resources: wanted a node with {resources.gpus} GPUs and {resources.cpus:g} CPUs; the cluster has {have}"
        )
    return fit


def waiting_for(resources: ResourceSpec) -> str | None:
    """What the first trial will wait for if others hold the GPUs now; None if it can start."""
    free = ray.available_resources().get("GPU", 0)
    if free >= resources.gpus:
        return None
    return f"waiting: a trial needs {resources.gpus} GPUs of one node, the cluster has {free:g} free now"
