"""States of a live server: the real engine's code before the stub server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from sweeps.engines.base import EngineError
from sweeps.engines.sglang.engine import SGLangEngine
from sweeps.measure.held_engine import HeldEngine
from sweeps.measure.trial import Measurement
from sweeps.spec.model import Deadlines, EngineSpec, ResourceSpec, SearchSpec, SweepSpec, WorkloadSpec
from sweeps.spec.space import Configuration, Space
from sweeps.spec.workload import plan_blocks
from tests.sweeps.stub_engine import plan, stub_context

STUB = Path(__file__).parents[3] / "stub_server.py"
SPEC = SweepSpec(
    sweep="states",
    engine=EngineSpec(
        kind="sglang",
        launcher=(sys.executable, "-I", "-S", str(STUB)),
        model_path="stub",
        args={"tp-size": 2},
        deadlines_s=Deadlines(load=60, nccl_init=60, capture=60, draft_init=60, first_request=60, block=60, stop=60),
    ),
    search=SearchSpec(num_steps=(1, 2), nccl=("default", "ll", "simple")),
    nccl_sets={"ll": {"NCCL_PROTO": "LL"}, "simple": {"NCCL_PROTO": "Simple"}},
    drafters={"any": "any"},
    workload=WorkloadSpec(prompt_tokens=8, output_tokens=24, blocks=1, warmup_blocks=0),
    resources=ResourceSpec(gpus=2),
)
BLOCK = plan_blocks(SPEC.workload, folder=Path())[-1]


@dataclass
class Node:
    """Engines over the stub, in one folder."""

    folder: Path
    engines: list[SGLangEngine] = field(default_factory=list)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    for engine in node.engines:
        engine.close()
    assert not list(tmp_path.rglob("libnccl*")), "no copy is left on the node"


def several(node: Node, fault: str) -> tuple[SGLangEngine, dict[str, Configuration]]:
    """An engine over the stub, and configurations of one server by `STEPS SET`."""
    spec = replace(SPEC, engine=replace(SPEC.engine, env={"STUB_FAULT": fault} if fault else {}))
    engine = SGLangEngine(spec, logs=node.folder / "logs", node_folder=node.folder / "node")
    node.engines.append(engine)
    return engine, {f"{each.num_steps} {each.nccl_set}": each for each in Space(spec).configurations()}


def num_launches(node: Node) -> int:
    return len(list((node.folder / "logs").glob("*.log")))


def test_evidence_of_a_state_is_that_of_its_own_communicator(node: Node) -> None:
    engine, by_name = several(node, "")
    states = tuple(by_name.values())
    engine.launch(by_name["1 default"], states=states)
    for nccl_set, protocol in (("simple", "Simple"), ("ll", "LL")):
        report = engine.switch(by_name[f"2 {nccl_set}"])
        assert report is not None
        rows = [row for row in report.evidence if row.setting == "env.NCCL_PROTO"]
        assert [(row.rank, row.seen, row.effective, row.grade) for row in rows] == [
            (rank, protocol, protocol, "effective") for rank in (0, 1)
        ]
        assert report.effective["state"] == f"2x3-custom-{nccl_set}"
    engine.close()
    kept = {path.name.split(".")[0] for path in (node.folder / "logs").glob("*.nccl/*")}
    assert {"ll", "simple"} <= kept
    assert num_launches(node) == 1


def test_a_set_whose_communicator_fails_is_a_failed_configuration_and_the_server_lives_on(node: Node) -> None:
    engine, by_name = several(node, "set_fails:ll")
    engine.launch(by_name["1 default"], states=tuple(by_name.values()))
    with pytest.raises(EngineError, match="NCCL set ll: RuntimeError: NCCL error: invalid usage") as failed:
        engine.switch(by_name["2 ll"])
    assert (failed.value.kind, failed.value.stage, failed.value.server_lives) == (
        "nccl_no_algorithm",
        "nccl_init",
        True,
    )
    assert engine.switch(by_name["2 simple"]) is not None
    assert set(engine.run_block(BLOCK).cycles["num_steps"].to_pylist()) == {2}
    assert num_launches(node) == 1


def test_a_set_that_hangs_costs_one_launch_and_is_left_out_of_the_next(node: Node) -> None:
    engine, by_name = several(node, "set_hangs:ll")
    report = engine.launch(by_name["1 default"], states=tuple(by_name.values()))
    assert "ll" not in report.effective["states"]
    assert num_launches(node) == 2
    with pytest.raises(EngineError, match="hung: it did not come up within 60 s") as hung:
        engine.switch(by_name["1 ll"])
    assert hung.value.kind == "hang_nccl_init"
    with pytest.raises(EngineError, match="NCCL set ll: hung"):
        engine.launch(by_name["2 ll"], states=tuple(by_name.values()))
    assert num_launches(node) == 2, "a set that is known to hang is not launched again"


def test_states_that_do_not_fit_the_memory_are_served_by_a_further_launch(node: Node) -> None:
    engine, by_name = several(node, "states_fit:4")
    report = engine.launch(by_name["1 default"], states=tuple(by_name.values()))
    assert len(report.effective["states"].split(",")) == 4
    left = [each for each in by_name.values() if engine.switch(each) is None]
    assert len(left) == 2
    engine.launch(left[0], states=tuple(by_name.values()))
    assert all(engine.switch(each) is not None for each in left)
    assert num_launches(node) == 2


def test_a_server_without_states_is_launched_for_each_configuration(node: Node) -> None:
    engine, by_name = several(node, "no_states")
    report = engine.launch(by_name["1 ll"], states=tuple(by_name.values()))
    assert "states" not in report.effective
    assert report.environment["NCCL_PROTO"] == "LL"
    assert engine.switch(by_name["2 ll"]) is None
    engine.launch(by_name["2 ll"], states=tuple(by_name.values()))
    assert num_launches(node) == 3, "one found it out"


def test_a_failed_state_leaves_the_next_trial_its_server(node: Node) -> None:
    engine, by_name = several(node, "set_fails:ll")
    held = HeldEngine(engine)
    context = stub_context(SPEC, node.folder)
    outcomes = []
    for number, name in enumerate(("1 default", "1 ll", "1 simple")):
        trial = plan(by_name[name], Space(SPEC), f"t{number:04d}")
        measurement = Measurement(held, trial, context)
        while measurement.outcome is None:
            measurement.advance()
        outcomes.append((measurement.outcome.status, measurement.outcome.kind))
    assert outcomes == [("completed", None), ("failed", "nccl_no_algorithm"), ("completed", None)]
    assert num_launches(node) == 1
