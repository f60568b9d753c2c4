"""The nodes of a sweep: which may hold trials, which are left out and why. Nodes join and leave while it runs.

Every node is checked where it is before it gets a trial: it must see the results folder, the paths of the spec, and an
interpreter that can serve. A node that fails is left out and named; the sweep goes on without it.
"""

from __future__ import annotations

import socket
import tempfile
import time
import uuid
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_jobs.cluster import ClusterError, suitable_nodes
from ray_jobs.preflight.node_checks import check_node
from sweeps.measure.records import Finding
from sweeps.results.tables import ResultsFolder
from sweeps.spec.model import ResourceSpec, SweepSpec

_LOOK_EVERY_S = 2.0
"""Asking the cluster for its nodes takes some ms."""
_ANSWER_WITHIN_S = 120.0
"""A check starts a worker and, for a real engine, the server's interpreter, which imports torch."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node that can hold one trial."""

    node_id: str
    """Ray's; a node that was restarted has another one."""
    name: str
    """As the tables have it: its name in the cluster if it was given one, else its host's."""
    cpus: float
    """What its trial asks for, so that no trial of another sweep fits beside it."""


class Nodes:
    """Looks after the nodes of one sweep. Call `wait` once, then `refresh` now and then, and `close` at the end."""

    def __init__(self, spec: SweepSpec, folder: ResultsFolder) -> None:
        self._spec = spec
        self._fit: dict[str, Node] = {}
        self._asked: dict[str, tuple[Node, Any, float]] = {}
        self._left_out: dict[str, str] = {}
        self._held: set[str] = set()
        """Node ids of nodes that this sweep has placed a trial on."""
        self._available: Mapping[str, Mapping[str, float]] = {}
        """Node id -> what nobody holds."""
        self._findings: deque[Finding] = deque()
        self._marker = folder.root / f".seen-{uuid.uuid4().hex[:8]}"
        self._looked_s = float("-inf")

    def wait(self) -> None:
        """Check every node there is. Raises ClusterError if none can hold a trial, with the reason of each."""
        self._marker.write_bytes(b"")
        suitable_nodes(self._spec.resources)
        self.refresh()
        while self._asked:
            time.sleep(0.05)
            self._take_answers()
        if not self._fit:
            raise ClusterError("; ".join(f"node {name} {why}" for name, why in self._left_out.items()))

    def close(self) -> None:
        """Remove what was left in the results folder."""
        self._marker.unlink(missing_ok=True)

    def __len__(self) -> int:
        return len(self._fit)

    def free(self, busy: Collection[str]) -> list[Node]:
        """Nodes that may hold a trial and hold none of `busy` (node ids), in the order in which they came.

        A node whose GPUs others hold is not among them, unless nothing else is left: then its trial waits for them.
        """
        self.refresh()
        free = [node for node_id, node in self._fit.items() if node_id not in busy]
        at_once = [node for node in free if node.node_id in self._held or self._has_free_gpus(node)]
        return at_once or ([] if busy else free)

    def hold(self, node: Node) -> None:
        """A trial is placed on a node: from then on its GPUs are those of this sweep."""
        self._held.add(node.node_id)

    def there(self) -> frozenset[str]:
        """Node ids of all nodes that may hold a trial."""
        self.refresh()
        return frozenset(self._fit)

    def _has_free_gpus(self, node: Node) -> bool:
        free = self._available.get(node.node_id)
        return free is None or free.get("GPU", 0.0) >= self._spec.resources.gpus

    def holds(self, node: Node) -> bool:
        """Whether a node is still there and not left out."""
        self.refresh(at_once=True)
        return node.node_id in self._fit

    def leave_out(self, node: Node, why: str) -> None:
        """Give a node no further trial."""
        self._fit.pop(node.node_id, None)
        self._left_out[node.name] = why
        self._findings.append(Finding(event="node_left_out", detail=f"{node.name} {why}"))

    def drain_findings(self) -> tuple[Finding, ...]:
        """Nodes that came, went or were left out since the last call."""
        found = tuple(self._findings)
        self._findings.clear()
        return found

    def refresh(self, *, at_once: bool = False) -> None:
        """See which nodes there are now."""
        if not at_once and time.monotonic() - self._looked_s < _LOOK_EVERY_S:
            return
        is_first, self._looked_s = self._looked_s == float("-inf"), time.monotonic()
        alive = {entry["NodeID"]: entry for entry in ray.nodes() if entry["Alive"]}
        self._available = ray._private.state.available_resources_per_node()  # the public call sums over nodes
        for node_id in [node_id for node_id in self._fit if node_id not in alive]:
            lost = self._fit.pop(node_id)
            self._findings.append(Finding(event="node_lost", detail=lost.name))
        names = node_names(alive.values())
        for node_id, entry in alive.items():
            known = node_id in self._fit or node_id in self._asked or names[node_id] in self._left_out
            if not known and has_room(entry, self._spec.resources):
                self._ask(entry, names[node_id], whole=not is_first or len(alive) > 1)
                if not is_first:
                    self._findings.append(Finding(event="node_joined", detail=names[node_id]))
        self._take_answers()

    def _ask(self, entry: Mapping[str, Any], name: str, *, whole: bool) -> None:
        node = Node(entry["NodeID"], name, exclusive_cpus(self._spec.resources, entry["Resources"]))
        if self._spec.engine.is_virtual and entry["NodeManagerHostname"] == socket.gethostname():
            self._fit[node.node_id] = node
            return
        there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        look = ray.remote(num_cpus=0, max_retries=0)(_what_is_wrong).options(scheduling_strategy=there)
        answer = look.remote(self._spec, str(self._marker), whole)
        self._asked[node.node_id] = (node, answer, time.monotonic())

    def _take_answers(self) -> None:
        for node_id, (node, answer, since_s) in list(self._asked.items()):
            ready, _ = ray.wait([answer], timeout=0)
            if not ready and time.monotonic() - since_s < _ANSWER_WITHIN_S:
                continue
            del self._asked[node_id]
            if (why := _answer(answer) if ready else f"did not answer within {_ANSWER_WITHIN_S:.0f} s") is None:
                self._fit[node_id] = node
            else:
                self.leave_out(node, why)


def node_names(alive: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Node id -> name: that of `ray start --node-name`, else the host's; with a part of the id if two are alike."""
    listed = list(alive)
    given = {
        entry["NodeID"]: entry["NodeManagerHostname"]
        if entry.get("NodeName") in (None, "", entry["NodeManagerAddress"])
        else entry["NodeName"]
        for entry in listed
    }
    times = Counter(given.values())
    return {node_id: name if times[name] == 1 else f"{name}-{node_id[:6]}" for node_id, name in given.items()}


def has_room(entry: Mapping[str, Any], resources: ResourceSpec) -> bool:
    """Whether a node, as `ray.nodes` lists it, has what one trial asks for."""
    have = entry["Resources"]
    return bool(have.get("GPU", 0) >= resources.gpus and have.get("CPU", 0) >= resources.cpus)


def exclusive_cpus(resources: ResourceSpec, have: Mapping[str, float]) -> float:
    """CPUs to ask of a node, so that it has no room for a trial of another sweep beside the one that it holds.

    If the GPUs do not see to that (none asked for, or half of the node's), more than half of its CPUs do.
    """
    cpus, gpus = have.get("CPU", 0.0), have.get("GPU", 0.0)
    return max(resources.cpus, cpus // 2 + 1) if gpus >= 2 * resources.gpus else resources.cpus


def _answer(answer: Any) -> str | None:
    try:
        why: str | None = ray.get(answer)
    except ray.exceptions.RayError as error:
        return f"could not be checked: {str(error).strip().splitlines()[-1][:300]}"
    return why


def _what_is_wrong(spec: SweepSpec, marker: str, whole: bool) -> str | None:  # noqa: FBT001 # Ray's types know no keywords
    """Runs on the node. Why it can hold no trial; None if it can.

    Args:
        whole: also ask the server's interpreter, which takes some seconds.
    """
    if not Path(marker).exists():
        return f"does not see the results folder {Path(marker).parent}: it must be on a path that all nodes see"
    if spec.engine.is_virtual:
        return None
    if missing := missing_paths(spec):
        return "lacks " + ", ".join(f"{key} {path}" for key, path in missing.items())
    if not whole:
        return None
    with tempfile.TemporaryDirectory(prefix="specsweep-preflight-") as scratch:
        checks = check_node(spec, Path(scratch), all_reduce=False).checks
    failed = [f"{check.name}: {check.detail}" for check in checks if check.state == "failed"]
    return "fails its preflight: " + "; ".join(failed) if failed else None


def missing_paths(spec: SweepSpec) -> dict[str, str]:
    """Absolute paths of the spec (interpreter, model, drafters) that this node does not have, by key."""
    if spec.engine.launcher:
        return {}  # a container has paths of its own
    used = spec.search.drafter or tuple(spec.drafters)[:1]
    named = {
        "engine.python": spec.engine.python,
        "engine.model_path": spec.engine.model_path,
        **{f"drafters.{name}": spec.drafters.get(name) for name in used},
    }
    paths = {key: path for key, path in named.items() if path is not None and Path(path).is_absolute()}
    return {key: path for key, path in paths.items() if not Path(path).exists()}
