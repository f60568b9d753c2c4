from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from sweeps.engines.base import EngineError
from sweeps.engines.replay.engine import ReplayEngine
from sweeps.engines.simulated.engine import SimulatedEngine, profile_of
from sweeps.engines.simulated.machine_profile import Fault
from sweeps.engines.summary import summarise
from sweeps.results.tables import CYCLE_COLUMNS, ResultsFolder, TableError, read_table
from sweeps.spec.document import SpecError
from sweeps.spec.model import SweepSpec
from sweeps.spec.reading import parse_spec
from sweeps.spec.space import Configuration, Space
from sweeps.spec.workload import Block, plan_blocks
from tests.certain import certain
from tests.sweeps.engines.recorded import record_sweep
from tests.sweeps.states import at_steps

SPEC = """
sweep: recorded
engine: {kind: simulated, machine: rtx-pro-6000-pcie-x8}
search: {num_steps: [0, 1, 2, 3, 5], drafter: [founding]}
drafters: {founding: founding}
workload: {blocks: 6, warmup_blocks: 1, output_tokens: 64}
"""
RECORDED_STEPS = (0, 1, 2, 2, 3)
"""Step count 2 twice; 3 fails; 5 is never run."""


@pytest.fixture(scope="module")
def spec() -> SweepSpec:
    return parse_spec(SPEC, source="spec")


@pytest.fixture(scope="module")
def folder(spec: SweepSpec, tmp_path_factory: pytest.TempPathFactory) -> ResultsFolder:
    """A folder as a sweep on the simulated engine leaves it."""
    folder = ResultsFolder(tmp_path_factory.mktemp("re corded'é"))
    record(spec, folder)
    return folder


def record(spec: SweepSpec, folder: ResultsFolder) -> None:
    fault = Fault(when={"num_steps": "3"}, kind="gpu_oom", stage="capture", message="out of memory")
    engine = SimulatedEngine(spec, profile=replace(profile_of(spec), faults=(fault,)))
    record_sweep(engine, spec, folder, [pick(spec, steps) for steps in RECORDED_STEPS])


@pytest.fixture
def engine(spec: SweepSpec, folder: ResultsFolder) -> Iterator[ReplayEngine]:
    engine = ReplayEngine(replaying(spec, folder.root))
    yield engine
    engine.close()


def replaying(spec: SweepSpec, recording: Path) -> SweepSpec:
    return replace(spec, engine=replace(spec.engine, kind="replay", machine=None, recording=str(recording)))


def blocks_of(spec: SweepSpec) -> tuple[Block, ...]:
    return plan_blocks(spec.workload, folder=Path())


def pick(spec: SweepSpec, num_steps: int) -> Configuration:
    return Space(spec).resolve({"num_steps": num_steps})


def test_each_concurrency_replays_its_own_blocks(spec: SweepSpec, tmp_path: Path) -> None:
    crowded = replace(spec, workload=replace(spec.workload, concurrency=(1, 4)))
    record(crowded, ResultsFolder(tmp_path))
    engine = ReplayEngine(replaying(crowded, tmp_path))
    engine.launch(pick(spec, 2))
    rows = read_table(ResultsFolder(tmp_path), "blocks").to_pylist()
    walls = {each: {row["wall_s"] for row in rows if row["concurrency"] == each} for each in (1, 4)}
    for block in blocks_of(crowded):
        record_ = engine.run_block(block)
        assert record_.wall_s in walls[block.concurrency]
        assert len(record_.requests) == block.concurrency
        assert max(record_.cycles["batch_size"].to_pylist()) == block.concurrency
    one, other = (engine.tok_s(pick(spec, steps)) for steps in (0, 2))
    assert max(one, other) < 200.0, "the truth is that of the first concurrency"


def test_a_concurrency_that_was_not_recorded_is_refused(spec: SweepSpec, folder: ResultsFolder) -> None:
    wide = replace(replaying(spec, folder.root), workload=replace(spec.workload, concurrency=(1, 8)))
    with pytest.raises(TableError, match=r"recorded at concurrency \[1\], wanted \[8\] as well"):
        ReplayEngine(wide)


def test_blocks_are_recorded_ones_with_their_cycles_on_the_new_clock(
    spec: SweepSpec, folder: ResultsFolder, engine: ReplayEngine
) -> None:
    recorded = {
        row["wall_s"]: row for row in read_table(folder, "blocks").to_pylist() if row["trial_id"] in ("t0002", "t0003")
    }
    engine.launch(pick(spec, 2))
    for block in blocks_of(spec)[1:]:
        before_s = engine.now_s()
        record = engine.run_block(block)
        row = recorded[record.wall_s]
        summary = summarise(record, block_index=block.index)
        assert record.cycles.schema.equals(CYCLE_COLUMNS)
        assert summary.verify_ms == pytest.approx(row["verify_ms"])
        assert summary.num_cycles == row["num_cycles"]
        assert list(certain(summary.accept_histogram)) == row["accept_histogram"]
        assert summary.tok_s == pytest.approx(row["tok_s"])
        assert before_s * 1000 < record.cycles["started_ms"][0].as_py() < engine.now_s() * 1000
        assert engine.now_s() == pytest.approx(before_s + record.wall_s)
        assert len(record.requests) == 1


def test_long_replay_converges_to_the_recorded_mean(spec: SweepSpec, engine: ReplayEngine) -> None:
    engine.launch(pick(spec, 2))
    block = blocks_of(spec)[-1]
    replayed = [engine.run_block(block) for _ in range(600)]
    assert len({record.wall_s for record in replayed}) == 12
    tok_s = fmean(record.decode_tokens / record.decode_s for record in replayed)
    assert tok_s == pytest.approx(engine.tok_s(pick(spec, 2)), rel=0.02)


def test_draws_pair_across_configurations_and_follow_the_seed(spec: SweepSpec, folder: ResultsFolder) -> None:
    indices = {(row["trial_id"], row["wall_s"]): row["block_index"] for row in read_table(folder, "blocks").to_pylist()}
    by_wall = {wall_s: index for (_, wall_s), index in indices.items()}

    def drawn(steps: int, seed: int) -> list[int]:
        engine = ReplayEngine(replaying(spec, folder.root), seed=seed)
        engine.launch(pick(spec, steps))
        return [by_wall[engine.run_block(block).wall_s] for block in blocks_of(spec)]

    assert drawn(1, seed=0) == drawn(0, seed=0) == drawn(2, seed=0)
    assert len({tuple(drawn(1, seed=seed)) for seed in range(5)}) > 1


def test_boots_take_their_recorded_seconds(spec: SweepSpec, folder: ResultsFolder, engine: ReplayEngine) -> None:
    trials = {row["trial_id"]: row for row in read_table(folder, "trials").to_pylist()}
    report = engine.launch(pick(spec, 0))
    assert report.boot_s == {name: trials["t0000"][f"{name}_s"] for name in ("launch", "weight_load", "capture")}
    assert engine.now_s() == pytest.approx(sum(report.boot_s.values()))
    assert report.machine.startswith("replay of rtx-pro-6000-pcie-x8 (simulated")
    assert report.evidence == ()
    never_launched = engine.launch(pick(spec, 2))
    assert never_launched.boot_s == engine.recording.boot_s
    assert never_launched.effective["num_steps"] == "2"
    assert {row.setting for row in never_launched.evidence} >= {"args.speculative_num_steps"}


def test_steps_switch_in_place_as_recorded(spec: SweepSpec, engine: ReplayEngine) -> None:
    one, two = pick(spec, 1), pick(spec, 2)
    engine.launch(one, states=at_steps(one, 1, 2, 5))
    before_s = engine.now_s()
    assert engine.switch(two) is not None
    assert engine.now_s() - before_s == pytest.approx(engine.recording.switch_s)
    assert engine.switch(pick(spec, 5)) is None
    assert engine.switch(pick(spec, 0)) is None
    relaunching = ReplayEngine(replace(engine.spec, engine=replace(engine.spec.engine, switch_in_place=False)))
    relaunching.launch(one, states=at_steps(one, 1, 2))
    assert relaunching.switch(two) is None


def test_what_was_never_recorded_is_an_invalid_configuration(spec: SweepSpec, engine: ReplayEngine) -> None:
    with pytest.raises(EngineError, match=r"steps 5.*not among the 4 recorded configurations") as caught:
        engine.launch(pick(spec, 5))
    assert (caught.value.stage, caught.value.kind) == ("plan", "invalid_config")


def test_what_failed_fails_again_and_takes_its_time(spec: SweepSpec, engine: ReplayEngine) -> None:
    with pytest.raises(EngineError, match="as recorded: out of memory") as caught:
        engine.launch(pick(spec, 3))
    assert (caught.value.stage, caught.value.kind) == ("capture", "gpu_oom")
    assert engine.now_s() > 0.0
    with pytest.raises(EngineError, match="none is up"):
        engine.run_block(blocks_of(spec)[0])


def test_the_recorded_trace_and_a_summary_without_cycles(spec: SweepSpec, engine: ReplayEngine) -> None:
    engine.launch(pick(spec, 2))
    kernels = certain(engine.trace(blocks_of(spec)[-1]))
    assert {row.kind for row in kernels} >= {"communication", "moe"}
    rng = np.random.default_rng(0)
    drawn = [engine.block_summary(index % 6, rng=rng) for index in range(600)]
    assert fmean(certain(summary.tok_s) for summary in drawn) == pytest.approx(engine.tok_s(pick(spec, 2)), rel=0.02)
    assert drawn[0].accept_histogram is not None


def test_a_folder_that_is_no_recording_is_refused(spec: SweepSpec, tmp_path: Path) -> None:
    with pytest.raises(TableError, match="wanted a results folder"):
        ReplayEngine(replaying(spec, tmp_path))
    (tmp_path / "sweep.json").write_text("{}", encoding="utf-8")
    with pytest.raises(TableError, match="`blocks` is empty"):
        ReplayEngine(replaying(spec, tmp_path))
    with pytest.raises(SpecError, match=r"engine\.recording"):
        ReplayEngine(replace(spec, engine=replace(spec.engine, kind="replay", recording=None)))
