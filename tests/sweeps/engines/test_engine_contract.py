"""The contract over every engine: simulated, replay, the real code before a stub server, the real server on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from sweeps.engines.process.guard import reap_leases
from sweeps.engines.replay.engine import ReplayEngine
from sweeps.engines.sglang.engine import SGLangEngine
from sweeps.engines.simulated.engine import SimulatedEngine
from sweeps.results.tables import ResultsFolder
from sweeps.spec.model import Deadlines, EngineSpec, ResourceSpec, SweepSpec
from sweeps.spec.reading import read_spec
from sweeps.spec.space import Space
from tests.sweeps.engines.contract import SPEC, Bench, EngineContract, opened
from tests.sweeps.engines.recorded import record_sweep
from tests.sweeps.states import at_steps

ROOT = Path(__file__).parents[3]
STUB = ROOT / "tests" / "stub_server.py"


class TestSimulated(EngineContract):
    @pytest.fixture
    def bench(self) -> Iterator[Bench]:
        with opened(SPEC, SimulatedEngine) as bench:
            yield bench


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> SweepSpec:
    """Every configuration, recorded from the simulated engine; one block each, so that replay draws that block."""
    spec = replace(SPEC, workload=replace(SPEC.workload, blocks=1))
    folder = ResultsFolder(tmp_path_factory.mktemp("recording"))
    by_set = sorted(Space(spec).configurations(), key=lambda each: (each.nccl_set, each.num_steps))
    record_sweep(SimulatedEngine(spec), spec, folder, by_set)  # the server of a set is switched between step counts
    return replace(spec, engine=EngineSpec(kind="replay", recording=str(folder.root)))


class TestReplay(EngineContract):
    @pytest.fixture
    def bench(self, recording: SweepSpec) -> Iterator[Bench]:
        with opened(recording, ReplayEngine) as bench:
            yield bench

    def test_an_anchor_runs_at_no_steps_inside_the_server_and_leaves_it_as_it_was(self, bench: Bench) -> None:
        """Replay has no anchors: those of a recording belong to its own servers' drift."""
        bench.engine.launch(bench.configuration(3), states=at_steps(bench.configuration(3), 0, 1, 3))
        assert bench.engine.run_anchor(bench.blocks[-1]) is None
        assert set(bench.engine.run_block(bench.blocks[-1]).cycles["num_steps"].to_pylist()) == {3}

    def test_a_pinned_sweep_simulates_acceptance_in_every_server(self, bench: Bench) -> None:
        pytest.skip("a recording cannot simulate acceptance: it holds what was measured")


class TestStub(EngineContract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[Bench]:
        limits = Deadlines(load=20, nccl_init=20, capture=20, draft_init=20, first_request=20, block=20, stop=30)
        engine = EngineSpec(
            kind="sglang",
            launcher=(sys.executable, "-I", "-S", str(STUB)),
            model_path="stub",
            args={"tp-size": 2},
            env={"STUB_TIMER": "cuda_event"},
            deadlines_s=limits,
        )
        with served(replace(SPEC, engine=engine, resources=ResourceSpec(gpus=2)), tmp_path) as bench:
            yield bench


@pytest.mark.engine
class TestCpu(EngineContract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[Bench]:
        """The real server with the tiny model."""
        tiny = read_spec(ROOT / "sweeps" / "specs" / "tiny_cpu.yaml")
        if not (ROOT / str(tiny.engine.python)).exists():
            pytest.skip(f"no {tiny.engine.python}: `make engine` builds it")
        workload = replace(SPEC.workload, vocabulary=tiny.workload.vocabulary)
        with served(replace(tiny, search=SPEC.search, nccl_sets=SPEC.nccl_sets, workload=workload), tmp_path) as bench:
            yield bench


@contextmanager
def served(spec: SweepSpec, folder: Path) -> Iterator[Bench]:
    """A bench of the real engine that leaves no process behind."""
    node = folder / "node"
    with opened(spec, lambda each: SGLangEngine(each, logs=folder / "logs", node_folder=node)) as bench:
        yield bench
    assert reap_leases(node / "leases").killed == ()
    assert not list((node / "leases").glob("*"))
