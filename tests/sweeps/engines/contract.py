"""What every engine must do: a suite for a subclass to run over its own engine.

A further engine subclasses `EngineContract` in `test_engine_contract.py` and gives it a `bench` fixture. A test that an
engine cannot pass is overridden there, with what it does instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow.compute as pc
import pytest

from sweeps.engines.base import Engine, LaunchReport
from sweeps.engines.summary import summarise
from sweeps.results.tables import CYCLE_COLUMNS
from sweeps.spec.model import EngineSpec, SearchSpec, SweepSpec, WorkloadSpec
from sweeps.spec.space import Configuration, Space
from sweeps.spec.workload import Block, plan_blocks
from tests.certain import certain
from tests.sweeps.states import at_steps

SPEC = SweepSpec(
    sweep="contract",
    engine=EngineSpec(kind="simulated", machine="rtx-pro-6000-pcie-x8"),
    search=SearchSpec(num_steps=(0, 1, 3), nccl=("default", "ll")),
    nccl_sets={"ll": {"NCCL_PROTO": "LL"}},
    drafters={"founding": "founding"},
    workload=WorkloadSpec(prompt_tokens=8, output_tokens=24, blocks=2, warmup_blocks=1),
)


@dataclass(slots=True)
class Bench:
    """One engine under test and its sweep."""

    spec: SweepSpec
    engine: Engine
    open_engine: Callable[[SweepSpec], Engine]
    """Another engine of the kind, for another spec."""

    @property
    def space(self) -> Space:
        return Space(self.spec)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return plan_blocks(self.spec.workload, folder=Path())

    def configuration(self, num_steps: int, nccl: str = "default") -> Configuration:
        return next(
            each for each in self.space.configurations() if (each.num_steps, each.nccl_set) == (num_steps, nccl)
        )

    def launch(self, num_steps: int, nccl: str = "default") -> LaunchReport:
        configuration = self.configuration(num_steps, nccl)
        return self.engine.launch(configuration, states=self.space.states(configuration))


@contextmanager
def opened(spec: SweepSpec, open_engine: Callable[[SweepSpec], Engine]) -> Iterator[Bench]:
    """A bench whose engine is closed afterwards."""
    bench = Bench(spec, open_engine(spec), open_engine)
    try:
        yield bench
    finally:
        bench.engine.close()


class EngineContract:
    """The suite. Its name keeps pytest from collecting it by itself."""

    @pytest.fixture
    def bench(self) -> Iterator[Bench]:
        raise NotImplementedError("a subclass opens its engine here")

    def test_a_launch_reports_itself(self, bench: Bench) -> None:
        before = bench.engine.now_s()
        report = bench.launch(3, "ll")
        assert set(report.boot_s) <= {"launch", "weight_load", "capture"}
        assert 0 < sum(report.boot_s.values()) <= bench.engine.now_s() - before + 1e-6
        assert report.num_gpus == bench.spec.resources.gpus
        assert report.version
        assert report.machine
        assert "--speculative-num-steps" in report.command
        assert report.environment["NCCL_PROTO"] == "LL"
        assert report.effective["num_steps"] == "3"

    def test_every_request_has_evidence_from_every_rank(self, bench: Bench) -> None:
        report = bench.launch(3, "ll")
        ranks = {row.rank for row in report.evidence}
        for rank in ranks:
            own = {row.setting: row for row in report.evidence if row.rank == rank}
            assert own["env.NCCL_PROTO"].requested == "LL"
            assert own["env.NCCL_PROTO"].seen == "LL"
        lost = [row for row in report.evidence if row.requested is not None and row.grade in ("not_seen", "overridden")]
        assert lost == []

    def test_a_block_is_complete_and_its_times_agree(self, bench: Bench) -> None:
        bench.launch(3)
        before = bench.engine.now_s()
        block = bench.blocks[-1]
        record = bench.engine.run_block(block)
        assert before <= record.started_s
        assert record.started_s + record.wall_s <= bench.engine.now_s()
        assert 0 < record.decode_s <= record.wall_s
        assert [request.prompt_id for request in record.requests] == [prompt.prompt_id for prompt in block.prompts]
        assert all(request.output_tokens == block.output_tokens for request in record.requests)
        assert 0 < record.decode_tokens <= sum(request.output_tokens for request in record.requests)

    def test_cycles_have_the_schema_and_their_phases_sum_up(self, bench: Bench) -> None:
        bench.launch(3)
        record = bench.engine.run_block(bench.blocks[-1])
        cycles = record.cycles
        assert cycles.schema.equals(CYCLE_COLUMNS)
        assert set(cycles["num_steps"].to_pylist()) == {3}
        for row in cycles.to_pylist():
            phases = row["draft_ms"] + row["verify_ms"] + row["extend_ms"] + row["gap_ms"]
            assert phases == pytest.approx(row["cycle_ms"], rel=1e-6)
            assert row["verify_forward_ms"] <= row["verify_ms"]
            assert 1 <= row["tokens"] <= 4
        own = cycles.filter(pc.equal(cycles["rank"], 0))
        assert record.decode_tokens <= sum(own["tokens"].to_pylist()) <= record.decode_tokens + 3  # the last one is cut
        summary = summarise(record, block_index=0)
        assert summary.accept_length is not None
        assert 1 <= summary.accept_length <= 4
        assert certain(summary.tok_s) > 0

    def test_without_speculation_there_is_no_verify(self, bench: Bench) -> None:
        report = bench.launch(0)
        assert "--speculative-num-steps" not in report.command
        record = bench.engine.run_block(bench.blocks[-1])
        assert set(record.cycles["num_steps"].to_pylist()) == {0}
        assert record.cycles["verify_ms"].null_count == record.cycles.num_rows
        assert record.cycles["verify_forward_ms"].null_count == 0
        assert summarise(record, block_index=0).accept_length is None

    def test_greedy_output_does_not_depend_on_the_configuration(self, bench: Bench) -> None:
        hashes = set()
        for num_steps in (0, 3):
            bench.launch(num_steps)
            hashes |= {tuple(request.output_hash for request in bench.engine.run_block(bench.blocks[-1]).requests)}
        assert len(hashes) == 1

    def test_a_switch_in_place_changes_the_cycles_and_nothing_else(self, bench: Bench) -> None:
        bench.launch(3, "ll")
        hashes = [request.output_hash for request in bench.engine.run_block(bench.blocks[-1]).requests]
        report = bench.engine.switch(bench.configuration(1, "ll"))
        assert report is not None
        assert sum(report.boot_s.values()) == 0
        assert report.effective["num_steps"] == "1"
        record = bench.engine.run_block(bench.blocks[-1])
        assert set(record.cycles["num_steps"].to_pylist()) == {1}
        assert [request.output_hash for request in record.requests] == hashes

    def test_an_nccl_set_is_a_state_of_the_live_server(self, bench: Bench) -> None:
        bench.launch(3)
        hashes = [request.output_hash for request in bench.engine.run_block(bench.blocks[-1]).requests]
        report = bench.engine.switch(bench.configuration(3, "ll"))
        assert report is not None
        assert sum(report.boot_s.values()) == 0
        assert report.environment["NCCL_PROTO"] == "LL"
        asked = [row for row in report.evidence if row.setting == "env.NCCL_PROTO"]
        assert {row.requested for row in asked} == {"LL"}
        record = bench.engine.run_block(bench.blocks[-1])
        assert [request.output_hash for request in record.requests] == hashes
        report = bench.engine.switch(bench.configuration(1))
        assert report is not None
        assert "NCCL_PROTO" not in report.environment
        assert not [row for row in report.evidence if row.setting == "env.NCCL_PROTO" and row.requested is not None]

    def test_an_anchor_runs_at_no_steps_inside_the_server_and_leaves_it_as_it_was(self, bench: Bench) -> None:
        bench.launch(3)
        assert bench.engine.run_anchor(bench.blocks[0]) is None, "0 was no candidate of the launch"
        bench.engine.launch(bench.configuration(3), states=at_steps(bench.configuration(3), 0, 1, 3))
        hashes = [request.output_hash for request in bench.engine.run_block(bench.blocks[-1]).requests]
        anchor = bench.engine.run_anchor(bench.blocks[-1])
        assert anchor is not None
        assert set(anchor.cycles["num_steps"].to_pylist()) == {0}
        own = anchor.cycles.filter(pc.equal(anchor.cycles["rank"], 0))
        assert set(own["tokens"].to_pylist()) == {1}
        assert [request.output_hash for request in anchor.requests] == hashes
        assert set(bench.engine.run_block(bench.blocks[-1]).cycles["num_steps"].to_pylist()) == {3}

    def test_a_pinned_sweep_simulates_acceptance_in_every_server(self, bench: Bench) -> None:
        env = {**bench.spec.engine.env, "SGLANG_SIMULATE_ACC_LEN": "2"}
        spec = replace(bench.spec, acceptance="pinned", engine=replace(bench.spec.engine, env=env))
        pinned = Bench(spec, bench.open_engine(spec), bench.open_engine)
        try:
            report = pinned.engine.launch(pinned.configuration(3), states=at_steps(pinned.configuration(3), 1, 3))
            assert report.environment["SGLANG_SIMULATE_ACC_LEN"] == "2"
            seen = [row for row in report.evidence if row.setting == "env.SGLANG_SIMULATE_ACC_LEN"]
            assert {row.seen for row in seen} <= {"2"}
            record = pinned.engine.run_block(pinned.blocks[-1])
            assert summarise(record, block_index=0).accept_length == pytest.approx(2.0)
            assert pinned.engine.switch(pinned.configuration(1)) is not None
        finally:
            pinned.engine.close()

    def test_what_needs_a_launch_is_not_switched_and_the_server_goes_on(self, bench: Bench) -> None:
        bench.launch(3)
        for other in (bench.configuration(0), replace(bench.configuration(3), eagle_topk=2)):
            assert bench.engine.switch(other) is None
        record = bench.engine.run_block(bench.blocks[-1])
        assert set(record.cycles["num_steps"].to_pylist()) == {3}

    def test_a_launch_replaces_the_server(self, bench: Bench) -> None:
        bench.launch(3)
        bench.launch(0)
        assert set(bench.engine.run_block(bench.blocks[-1]).cycles["num_steps"].to_pylist()) == {0}

    def test_close_is_idempotent_and_a_launch_may_follow(self, bench: Bench) -> None:
        bench.engine.close()
        bench.launch(1)
        bench.engine.close()
        bench.engine.close()
        bench.launch(1)
        assert bench.engine.run_block(bench.blocks[-1]).cycles.num_rows > 0

    def test_a_trace_is_absent_or_positive(self, bench: Bench) -> None:
        bench.launch(3)
        rows = bench.engine.trace(bench.blocks[-1])
        if rows is not None:
            assert {row.phase for row in rows} >= {"draft", "verify", "extend"}
            assert all(row.us_per_cycle > 0 and row.calls_per_cycle > 0 for row in rows)
        assert set(bench.engine.run_block(bench.blocks[-1]).cycles["num_steps"].to_pylist()) == {3}
