from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ray_jobs.nodes import _what_is_wrong, exclusive_cpus, has_room, missing_paths, node_names
from sweeps.spec.model import ResourceSpec
from tests.sweeps.stub_engine import SPEC, stub_spec


def listed(node_id: str, host: str, *, name: str = "", have: Mapping[str, float] | None = None) -> dict[str, Any]:
    """As `ray.nodes` lists a node."""
    address = "10.0.0.1"
    return {
        "NodeID": node_id,
        "NodeManagerHostname": host,
        "NodeManagerAddress": address,
        "NodeName": name or address,
        "Resources": {"CPU": 32.0, "GPU": 8.0, **(have or {})},
    }


def test_a_node_is_named_as_it_was_started_else_by_its_host() -> None:
    nodes = [listed("a" * 8, "gpu-1"), listed("b" * 8, "gpu-2", name="left")]
    assert node_names(nodes) == {"a" * 8: "gpu-1", "b" * 8: "left"}


def test_nodes_of_one_name_are_told_apart() -> None:
    nodes = [listed("a" * 8, "pod"), listed("b" * 8, "pod"), listed("c" * 8, "other")]
    assert node_names(nodes) == {"a" * 8: "pod-aaaaaa", "b" * 8: "pod-bbbbbb", "c" * 8: "other"}


@pytest.mark.parametrize(
    ("have", "fits"), [({}, True), ({"GPU": 4.0}, False), ({"CPU": 0.5}, False), ({"GPU": 16}, True)]
)
def test_a_node_has_room_if_it_has_all_that_a_trial_asks_for(have: dict[str, float], fits: bool) -> None:
    assert has_room(listed("a", "gpu-1", have=have), ResourceSpec()) == fits


@pytest.mark.parametrize(
    ("gpus", "cpus", "node", "wanted"),
    [
        (8, 1.0, (16, 8), 1.0),  # a second trial finds no GPUs
        (0, 1.0, (2, 0), 2.0),
        (0, 1.0, (1, 0), 1.0),
        (8, 1.0, (64, 16), 33.0),
        (8, 4.0, (48, 8), 4.0),
        (0, 40.0, (64, 0), 40.0),
    ],
)
def test_a_node_has_room_for_one_trial(gpus: int, cpus: float, node: tuple[float, float], wanted: float) -> None:
    have = {"CPU": float(node[0]), "GPU": float(node[1])}
    assert exclusive_cpus(ResourceSpec(gpus=gpus, cpus=cpus), have) == wanted


def test_a_node_that_does_not_see_the_results_folder_says_so(tmp_path: Path) -> None:
    marker = tmp_path / "results" / ".seen-1"
    said = _what_is_wrong(stub_spec(), str(marker), True)
    assert said == f"does not see the results folder {tmp_path / 'results'}: it must be on a path that all nodes see"
    marker.parent.mkdir()
    marker.touch()
    assert _what_is_wrong(stub_spec(), str(marker), True) is None


def test_a_missing_drafter_is_named_with_its_key(tmp_path: Path) -> None:
    text = SPEC.replace("{head: head}", f"{{head: {tmp_path}/none, other: /unused}}")
    real = text.replace("{kind: simulated, machine: stub, states:", "{kind: sglang, model_path: hub/name, states:")
    (tmp_path / "none").mkdir()
    spec = stub_spec(text=real.replace(", other: /unused", ""))
    (tmp_path / "none").rmdir()
    (tmp_path / ".seen-1").touch()
    assert missing_paths(spec) == {"drafters.head": f"{tmp_path}/none"}
    assert _what_is_wrong(spec, str(tmp_path / ".seen-1"), False) == f"lacks drafters.head {tmp_path}/none"
    (tmp_path / "none").mkdir()
    assert _what_is_wrong(spec, str(tmp_path / ".seen-1"), False) is None


def test_a_node_without_a_server_to_start_fails_its_preflight(tmp_path: Path) -> None:
    real = "{kind: sglang, model_path: hub/name, python: /bin/false, states:"
    spec = stub_spec(text=SPEC.replace("{kind: simulated, machine: stub, states:", real))
    (tmp_path / ".seen-1").touch()
    said = _what_is_wrong(spec, str(tmp_path / ".seen-1"), True)
    assert said is not None
    assert said.startswith("fails its preflight: server interpreter: ")
