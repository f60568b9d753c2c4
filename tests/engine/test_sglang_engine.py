"""The real engine against what must hold of it: equal text, true counts, evidence per rank, and a clean end."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from sweeps.engines.base import EngineError, Evidence
from sweeps.engines.sglang.engine import SGLangEngine
from sweeps.engines.summary import summarise
from sweeps.spec.model import SweepSpec
from sweeps.spec.space import Configuration
from tests.engine.conftest import Bench, Served, configuration
from tests.sweeps.states import at_steps

pytestmark = [pytest.mark.engine, pytest.mark.engine_all]

NCCL = {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"}


def server_processes(engine: SGLangEngine) -> list[psutil.Process]:
    assert engine._live is not None
    server = psutil.Process(engine._live.server.pid)
    return [server, *server.children(recursive=True)]


def serve(
    bench: Bench, spec: SweepSpec, wanted: Configuration, *, steps: tuple[int, ...] = (), crowded: bool = False
) -> Served:
    """One server, all blocks, further step counts in place, then its end."""
    engine = bench.engine(spec)
    try:
        served = Served(engine.launch(wanted, states=at_steps(wanted, 0, *steps) if steps else ()))
        processes = server_processes(engine)
        blocks = bench.blocks(spec)
        served.blocks = [engine.run_block(block) for block in blocks]
        if crowded:
            many = replace(
                blocks[0], prompts=tuple(prompt for block in blocks for prompt in block.prompts), concurrency=3
            )
            served.crowded = engine.run_block(many)
        served.anchor = engine.run_anchor(blocks[0])
        for num_steps in steps:
            served.switches[num_steps] = engine.switch(configuration(spec, num_steps))
            served.by_steps[num_steps] = engine.run_block(blocks[0])
        engine.record_cycles(on=False)
        served.load = engine.generate(blocks[1])
    finally:
        engine.close()
    bench.left(processes, served)
    return served


@pytest.fixture(scope="module")
def plain(bench: Bench) -> Served:
    spec = bench.spec()
    return serve(bench, spec, configuration(spec, 0), crowded=True)


@pytest.fixture(scope="module")
def chain(bench: Bench) -> Served:
    """EAGLE-3 at top-k 1, launched for 1 to 3 steps, switched in place; inherited NCCL settings in its way."""
    spec = bench.spec(
        nccl_sets={"ll-ring": NCCL}, search={"num_steps": [1, 2, 3], "nccl": ["ll-ring"]}, engine={"env": {}}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_PROTO", "Simple")
        return serve(bench, spec, configuration(spec, 3), steps=(1, 3, 2))


@pytest.fixture(scope="module")
def tree(bench: Bench) -> Served:
    spec = bench.spec()
    return serve(bench, spec, configuration(spec, 3, eagle_topk=2))


@pytest.fixture(scope="module")
def standalone(bench: Bench) -> Served:
    spec = bench.spec(engine={"algorithm": "STANDALONE"}, drafters={"noisy": ".venv-engine/models/standalone"})
    return serve(bench, spec, configuration(spec, 3))


@pytest.fixture(scope="module")
def two_ranks(bench: Bench) -> Served:
    spec = bench.spec(
        engine={"args": {"tp-size": 2}, "env": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}},  # one core a rank
        nccl_sets={"ll-ring": NCCL},
        search={"num_steps": [2], "nccl": ["ll-ring"]},
    )
    return serve(bench, spec, configuration(spec, 2))


def cycles(served: Served, rank: int = 0) -> pa.Table:
    table = pa.concat_tables([block.cycles for block in served.blocks])
    return table.filter(pc.equal(table["rank"], rank))


def evidence(served: Served, setting: str) -> list[Evidence]:
    return [row for row in served.report.evidence if row.setting == setting]


@pytest.mark.parametrize("name", ["chain", "tree", "standalone"])
def test_greedy_text_equals_that_of_no_speculation(name: str, plain: Served, request: pytest.FixtureRequest) -> None:
    speculating: Served = request.getfixturevalue(name)

    assert len(set(plain.hashes)) == len(plain.hashes), "the tiny model must not repeat itself"
    assert speculating.hashes == plain.hashes


def test_steps_are_switched_in_place_and_every_cycle_proves_it(chain: Served, plain: Served) -> None:
    for num_steps, record in chain.by_steps.items():
        report = chain.switches[num_steps]
        assert report is not None, f"relaunch wanted for {num_steps} steps"
        assert report.boot_s == {}
        assert report.effective["num_steps"] == str(num_steps)
        assert set(record.cycles["num_steps"].to_pylist()) == {num_steps}
        assert record.requests[0].output_hash == plain.hashes[0]
        row = next(row for row in report.evidence if row.setting == "args.speculative_num_steps")
        assert (row.requested, row.seen, row.effective, row.grade) == (str(num_steps), "3", str(num_steps), "effective")


def test_an_anchor_is_the_target_alone_in_the_same_server(chain: Served, plain: Served, tree: Served) -> None:
    assert chain.anchor is not None
    assert set(chain.anchor.cycles["num_steps"].to_pylist()) == {0}
    assert set(chain.anchor.cycles["tokens"].to_pylist()) == {1}
    assert chain.anchor.cycles["draft_ms"].null_count == chain.anchor.cycles.num_rows
    assert chain.anchor.requests[0].output_hash == plain.hashes[0]
    assert (plain.anchor, tree.anchor) == (None, None)


def test_launch_says_what_would_serve_the_configuration_alone(chain: Served) -> None:
    command = chain.report.command

    assert command[command.index("--speculative-num-steps") + 1] == "3"
    assert not [word for word in command if "warmup" in word]
    assert chain.report.environment["NCCL_PROTO"] == "LL"
    assert "SPECSWEEP_PROBE_DIR" not in chain.report.environment
    assert sorted(chain.report.effective["states"].split(",")) == [
        f"{steps}x{steps + 1}-custom-ll-ring" for steps in (0, 1, 2, 3)
    ]


def test_phases_of_a_cycle_add_up(chain: Served, tree: Served, standalone: Served) -> None:
    for served in (chain, tree, standalone):
        for row in cycles(served).to_pylist():
            parts = row["draft_ms"] + row["verify_ms"] + row["extend_ms"] + row["gap_ms"]
            assert parts == pytest.approx(row["cycle_ms"], rel=1e-9)
            assert 0 < row["verify_forward_ms"] <= row["verify_ms"]
            assert row["gap_ms"] >= 0
            assert row["timer_kind"] == "host"


def test_cycles_follow_each_other_without_a_hole(chain: Served) -> None:
    for block in chain.blocks:
        rows = block.cycles.to_pylist()
        covered_ms = sum(row["cycle_ms"] for row in rows)
        span_ms = rows[-1]["started_ms"] - rows[0]["started_ms"] + rows[-1]["cycle_ms"]
        assert covered_ms == pytest.approx(span_ms, rel=0.01)
        assert covered_ms <= block.wall_s * 1000


def test_plain_decode_steps_are_cycles_without_speculation(plain: Served) -> None:
    for row in cycles(plain).to_pylist():
        assert row["verify_ms"] is row["draft_ms"] is row["extend_ms"] is None
        assert row["verify_forward_ms"] + row["gap_ms"] == pytest.approx(row["cycle_ms"])
        assert (row["num_steps"], row["tokens"], row["batch_size"]) == (0, 1, 1)
    assert summarise(plain.blocks[0], block_index=0).accept_length is None


def test_requests_of_a_wave_share_cycles(plain: Served) -> None:
    assert plain.crowded is not None

    sizes = plain.crowded.cycles["batch_size"].to_pylist()

    assert max(sizes) > 1
    assert plain.crowded.cycles["tokens"].to_pylist() == sizes
    assert plain.crowded.decode_tokens == sum(request.output_tokens - 1 for request in plain.crowded.requests)
    assert plain.crowded.decode_s <= plain.crowded.wall_s


def test_partly_accepted_drafts_are_counted_as_the_server_counts_them(standalone: Served) -> None:
    record = standalone.blocks[1]
    assert standalone.load is not None
    (answer,) = standalone.load.answers

    summary = summarise(record, block_index=1)

    assert answer.request.output_hash == record.requests[0].output_hash
    assert record.cycles.num_rows == answer.meta_info["spec_verify_ct"]
    assert summary.accept_length is not None
    assert 1.0 < summary.accept_length < 4.0
    produced = pc.sum(record.cycles["tokens"]).as_py()
    assert 0 <= produced - (record.requests[0].output_tokens - 1) <= 3, "only the last cycle may produce too many"


def test_random_drafter_is_hardly_ever_right(tree: Served) -> None:
    assert summarise(tree.blocks[0], block_index=0).accept_length == pytest.approx(1.0, abs=0.2)


def test_every_rank_records_the_same_cycles(two_ranks: Served) -> None:
    first, second = cycles(two_ranks, 0), cycles(two_ranks, 1)

    assert first.num_rows == second.num_rows > 0
    assert first["tokens"].to_pylist() == second["tokens"].to_pylist()
    assert two_ranks.report.machine.startswith("2 x CPU")


def test_every_rank_sees_the_requested_variables(two_ranks: Served) -> None:
    for name, value in NCCL.items():
        rows = evidence(two_ranks, f"env.{name}")
        assert [(row.rank, row.requested, row.seen) for row in rows] == [(0, value, value), (1, value, value)]
    extra = evidence(two_ranks, "env.NCCL_CUMEM_ENABLE")
    assert [(row.requested, row.seen, row.grade) for row in extra] == [(None, "0", "extra")] * 2


def test_inherited_variable_of_a_swept_name_is_replaced_and_told(chain: Served) -> None:
    assert "NCCL_PROTO" in chain.report.removed
    assert [row.seen for row in evidence(chain, "env.NCCL_PROTO")] == ["LL"]


def test_boot_is_split_by_activity(plain: Served) -> None:
    boot_s = plain.report.boot_s

    assert set(boot_s) == {"launch", "weight_load", "capture"}
    assert boot_s["launch"] > boot_s["weight_load"] > 0


@pytest.mark.parametrize("name", ["plain", "chain", "tree", "standalone", "two_ranks"])
def test_nothing_is_left_of_a_server(name: str, request: pytest.FixtureRequest) -> None:
    served: Served = request.getfixturevalue(name)

    assert served.alive_after == []
    assert served.files_after == []


def test_standalone_is_not_switched_in_place(bench: Bench) -> None:
    spec = bench.spec(engine={"algorithm": "STANDALONE"})

    assert bench.engine(spec).switch(configuration(spec, 1)) is None


def test_crash_at_load_says_why(bench: Bench) -> None:
    spec = bench.spec(engine={"args": {"dtype": "float99"}})
    engine = bench.engine(spec)

    with pytest.raises(EngineError, match="float99") as caught:
        engine.launch(configuration(spec, 0))

    assert caught.value.stage == "load"
    assert caught.value.log_tail
    assert engine._live is None


def test_rank_killed_in_a_block_is_a_crash_at_once(bench: Bench) -> None:
    spec = bench.spec()
    engine = bench.engine(spec)
    try:
        engine.launch(configuration(spec, 0))
        processes = server_processes(engine)
        assert engine._live is not None
        os.kill(engine._live.handshakes[0].pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(EngineError) as caught:
            engine.run_block(bench.blocks(spec)[0])
    finally:
        engine.close()

    assert caught.value.stage == "measure"
    assert caught.value.kind in ("crash", "killed")
    assert caught.value.transient
    assert time.monotonic() - started < spec.engine.deadlines_s.block / 2
    assert not [each for each in processes if each.is_running() and each.status() != "zombie"]
