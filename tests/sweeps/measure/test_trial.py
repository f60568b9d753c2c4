from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pytest

from sweeps.engines.base import BlockRecord, EngineError, Evidence
from sweeps.engines.summary import BlockSummary
from sweeps.measure.held_engine import HeldEngine
from sweeps.measure.records import Decision, Outcome, PlannedTrial
from sweeps.measure.recovery import recover
from sweeps.measure.rows import last_end_s, record_decision
from sweeps.measure.trial import Measurement
from sweeps.measure.trial_context import TrialContext
from sweeps.results.tables import ACTIVITIES, ResultsFolder, read_table
from sweeps.spec.model import EngineSpec, SweepSpec, Traced
from sweeps.spec.space import Space
from sweeps.spec.workload import Block
from tests.sweeps.stub_engine import StubEngine, plan, stub_context, stub_spec, tok_s_of

SPEC = stub_spec()
SPACE = Space(SPEC)
CHAIN = {
    member.num_steps: member for member in SPACE.configurations() if member.eagle_topk == 1 and not member.nccl_env
}


@pytest.fixture
def held() -> HeldEngine:
    return HeldEngine(StubEngine())


@pytest.fixture
def context(tmp_path: Path) -> TrialContext:
    return stub_context(SPEC, tmp_path)


def run(held: HeldEngine, trial: PlannedTrial, context: TrialContext, *, attempt: int = 1) -> Outcome:
    measurement = Measurement(held, trial, context, attempt=attempt)
    while isinstance(result := measurement.advance(), BlockSummary):
        pass
    return result


def row(context: TrialContext, trial_id: str) -> dict[str, object]:
    rows = read_table(context.folder, "trials").to_pylist()
    return next(found for found in rows if found["trial_id"] == trial_id)


def test_a_trial_leaves_rows_in_every_table(held: HeldEngine, context: TrialContext) -> None:
    outcome = run(held, plan(CHAIN[2], SPACE), context)
    assert outcome.status == "completed"
    counts = {
        name: read_table(context.folder, name).num_rows
        for name in ("trials", "blocks", "requests", "cycles", "kernels")
    }
    assert counts == {"trials": 1, "blocks": 6, "requests": 6, "cycles": 300, "kernels": 1}
    assert not list((context.folder.root / "journal").iterdir())
    trial = row(context, "t0000")
    assert dict(trial["requested"])["num_steps"] == "2"  # type: ignore[call-overload]
    assert trial["relaunched"] is True
    assert trial["num_draft_tokens"] == 3


@pytest.mark.parametrize(
    ("traced", "expected"),
    [
        ("every_trial", ["k0000", "t0000", "t0001"]),
        ("every_launch", ["k0000", "t0000"]),
        ("controls", ["k0000"]),
        ("never", []),
    ],
)
def test_traces_are_taken_where_the_spec_wants_them(
    held: HeldEngine, context: TrialContext, traced: Traced, expected: list[str]
) -> None:
    context = replace(context, traced=traced)
    control = next(member for member in SPACE.configurations() if not member.speculates)
    run(held, replace(plan(control, SPACE, "k0000"), role="control"), context)
    run(held, plan(CHAIN[1], SPACE, "t0000"), context)
    run(held, plan(CHAIN[2], SPACE, "t0001"), context)
    traces = read_table(context.folder, "kernels")["trial_id"].to_pylist()
    assert sorted(set(traces)) == expected


def test_the_seconds_of_a_row_are_its_whole_time(held: HeldEngine, context: TrialContext) -> None:
    engine = held.engine
    assert isinstance(engine, StubEngine)
    for number, steps in enumerate((2, 3, 0, 1)):
        engine.clock_s += 7.0  # idle between trials
        run(held, plan(CHAIN.get(steps, SPACE.control), SPACE, f"t{number:04d}"), context)
    rows = read_table(context.folder, "trials").to_pylist()
    for trial in rows:
        spent = sum(trial[f"{activity}_s"] for activity in ACTIVITIES)
        assert spent == pytest.approx(trial["ended_s"] - trial["started_s"])
        assert trial["idle_s"] == pytest.approx(7.0)
    assert sum(trial["ended_s"] - trial["started_s"] for trial in rows) == pytest.approx(engine.clock_s)
    assert [trial["stop_s"] for trial in rows] == [0.0, 0.0, 3.0, 3.0]


def test_a_new_engine_on_the_node_goes_on_where_the_rows_end(held: HeldEngine, context: TrialContext) -> None:
    context = replace(context, node="n1")
    run(held, plan(CHAIN[2], SPACE), context)
    end_s = last_end_s(context.folder, "n1")
    assert end_s == held.now_s() > 0
    assert last_end_s(context.folder, "n2") == 0.0
    run(HeldEngine(StubEngine(), not_before_s=end_s), plan(CHAIN[2], SPACE, "t0001"), context)
    first, second = row(context, "t0000"), row(context, "t0001")
    assert second["started_s"] == first["ended_s"]
    blocks = read_table(context.folder, "blocks").sort_by("started_s")
    assert blocks["trial_id"].to_pylist() == ["t0000"] * 6 + ["t0001"] * 6


def test_an_equal_launch_key_is_switched_in_place(held: HeldEngine, context: TrialContext) -> None:
    run(held, plan(CHAIN[2], SPACE), context)
    assert run(held, plan(CHAIN[3], SPACE, "t0001"), context).relaunched is False
    assert row(context, "t0001")["launch_s"] == 0.0
    assert row(context, "t0001")["switch_s"] == 1.0


def test_an_engine_that_cannot_switch_is_relaunched(
    held: HeldEngine, context: TrialContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(held, plan(CHAIN[2], SPACE), context)
    monkeypatch.setattr(StubEngine, "switch", lambda self, configuration: None)
    assert run(held, plan(CHAIN[3], SPACE, "t0001"), context).relaunched is True


def crowded(spec: SweepSpec) -> SweepSpec:
    return replace(spec, workload=replace(spec.workload, concurrency=(1, 4)))


def test_a_trial_measures_every_concurrency_and_reports_the_first(held: HeldEngine, tmp_path: Path) -> None:
    context = stub_context(crowded(SPEC), tmp_path)
    measurement = Measurement(held, plan(CHAIN[2], SPACE), context)
    reported = []
    while isinstance(result := measurement.advance(), BlockSummary):
        reported.append(result.block_index)
    assert reported == list(range(6))
    blocks = read_table(context.folder, "blocks").sort_by("started_s").to_pylist()
    assert [(found["block_index"], found["concurrency"], found["num_requests"]) for found in blocks] == [
        (index, concurrency, concurrency) for index in range(6) for concurrency in (1, 4)
    ]
    assert row(context, "t0000")["num_blocks"] == 6
    for name in ("cycles", "requests"):
        table = read_table(context.folder, name).to_pylist()
        assert {(found["block_index"], found["concurrency"]) for found in table} == {
            (index, concurrency) for index in range(6) for concurrency in (1, 4)
        }


def test_a_dead_trial_is_complete_only_with_its_blocks_at_every_concurrency(held: HeldEngine, tmp_path: Path) -> None:
    context = stub_context(crowded(SPEC), tmp_path)
    for trial_id, count in (("t0000", 6), ("t0001", 5)):
        measurement = Measurement(held, plan(CHAIN[2], SPACE, trial_id), context)
        for _ in range(count):
            measurement.advance()
    assert sorted(recover(context.folder, num_blocks=12)) == ["t0000", "t0001"]
    assert [row(context, trial_id)["status"] for trial_id in ("t0000", "t0001")] == ["completed", "failed"]


def anchors(context: TrialContext) -> list[tuple[str, str, float]]:
    rows = read_table(context.folder, "anchors").sort_by("started_s").to_pylist()
    return [(found["trial_id"], found["place"], found["tok_s"]) for found in rows]


def test_anchors_stand_around_each_chain_in_a_server_and_none_is_run_twice_in_a_row(
    held: HeldEngine, context: TrialContext
) -> None:
    space = Space(replace(SPEC, control=replace(SPEC.control, in_server=True)))
    context = replace(context, anchors=True)
    for number, steps in enumerate((3, 1, 0)):
        run(held, plan(CHAIN.get(steps, space.control), space, f"t{number:04d}"), context)
    run(held, plan(CHAIN[2], space, "t0003"), context)
    plain = tok_s_of(space.control)
    assert anchors(context) == [
        ("t0000", "before", plain),
        ("t0000", "after", plain),
        ("t0001", "after", plain),
        ("t0003", "before", plain),
        ("t0003", "after", plain),
    ]
    assert read_table(context.folder, "blocks").num_rows == 4 * 6, "an anchor is no block of its trial"


def test_a_server_without_a_state_for_no_steps_is_measured_without_anchors(
    held: HeldEngine, context: TrialContext
) -> None:
    assert run(held, plan(CHAIN[2], SPACE), replace(context, anchors=True)).status == "completed"
    assert anchors(context) == []
    events = [found["event"] for found in read_table(context.folder, "events").to_pylist()]
    assert events == ["no_anchor"]


def test_an_anchor_outlives_the_process(held: HeldEngine, context: TrialContext) -> None:
    space = Space(replace(SPEC, control=replace(SPEC.control, in_server=True)))
    Measurement(held, plan(CHAIN[2], space), replace(context, anchors=True)).advance()
    assert recover(context.folder, num_blocks=6) == ("t0000",)
    assert [place for _, place, _ in anchors(context)] == ["before"]


@pytest.mark.parametrize(("where", "launch_s"), [("launch", 0.0), ("block", 10.0)])
def test_a_failure_is_a_row_and_the_server_is_stopped(
    held: HeldEngine, context: TrialContext, where: str, launch_s: float
) -> None:
    engine = held.engine
    assert isinstance(engine, StubEngine)
    error = EngineError("NCCL: no algorithm", stage="nccl_init", kind="nccl_no_algorithm", log_tail="WARN no algorithm")
    engine.failures[where] = [error]
    outcome = run(held, plan(CHAIN[2], SPACE), context)
    assert (outcome.status, outcome.kind, outcome.transient) == ("failed", "nccl_no_algorithm", False)
    assert (engine.live, held.live_launch_key) == (None, None)
    trial = row(context, "t0000")
    assert trial["log_tail"] == "WARN no algorithm"
    assert trial["launch_s"] == launch_s
    assert trial["failed_s"] == (100.0 if where == "launch" else 3.0)
    assert run(held, plan(CHAIN[2], SPACE, "t0001"), context).status == "completed"


def test_a_second_attempt_has_its_own_parts(held: HeldEngine, context: TrialContext) -> None:
    engine = held.engine
    assert isinstance(engine, StubEngine)
    engine.failures["launch"] = [EngineError("killed", stage="load", kind="host_oom")]
    assert run(held, plan(CHAIN[2], SPACE), context).transient
    assert run(held, plan(CHAIN[2], SPACE), context, attempt=2).status == "completed"
    trials = read_table(context.folder, "trials").to_pylist()
    assert [(trial["attempt"], trial["status"]) for trial in trials] == [(1, "failed"), (2, "completed")]


def test_a_pruned_trial_carries_the_drivers_reason(held: HeldEngine, context: TrialContext) -> None:
    measurement = Measurement(held, plan(CHAIN[2], SPACE), context)
    for _ in range(3):
        measurement.advance()
    decision = Decision(prune=True, reason="median: 61.2 < 80.0", numbers={"mean": 61.2})
    record_decision(context.folder, "t0000", decision, sweep_id="s1", at_s=1.0)
    assert measurement.stop().status == "pruned"
    trial = row(context, "t0000")
    assert (trial["status"], trial["reason"], trial["num_blocks"]) == ("pruned", "median: 61.2 < 80.0", 3)
    (event,) = read_table(context.folder, "events").to_pylist()
    assert dict(event["numbers"]) == {"mean": 61.2}


def test_a_trial_stopped_without_a_decision_was_interrupted(held: HeldEngine, context: TrialContext) -> None:
    measurement = Measurement(held, plan(CHAIN[2], SPACE), context)
    measurement.advance()
    outcome = measurement.stop()
    assert (outcome.status, outcome.kind) == ("failed", "interrupted")
    assert measurement.stop() is outcome


def test_the_last_stop_is_charged_to_the_last_trial(held: HeldEngine, context: TrialContext) -> None:
    measurement = Measurement(held, plan(CHAIN[2], SPACE), context)
    while isinstance(measurement.advance(), BlockSummary):
        pass
    measurement.close_engine()
    assert row(context, "t0000")["stop_s"] == 3.0


@pytest.mark.parametrize(
    ("grade", "status"), [("not_seen", "failed"), ("overridden", "failed"), ("effective", "completed")]
)
def test_a_setting_that_did_not_arrive_is_never_measured(
    held: HeldEngine, context: TrialContext, grade: str, status: str
) -> None:
    engine = held.engine
    assert isinstance(engine, StubEngine)
    lost = Evidence(rank=3, setting="env.NCCL_ALGO", requested="Ring", seen=None, effective=None, grade="effective")
    engine.evidence = (replace(lost, grade=grade),)  # type: ignore[arg-type]
    outcome = run(held, plan(CHAIN[2], SPACE), context)
    assert outcome.status == status
    assert read_table(context.folder, "evidence").num_rows == 1
    if status == "failed":
        assert outcome.kind == "not_effective"
        assert "block" not in engine.calls


def test_a_variable_that_arrived_and_that_nothing_reads_is_measured(held: HeldEngine, context: TrialContext) -> None:
    assert isinstance(held.engine, StubEngine)
    held.engine.evidence = (
        Evidence(rank=0, setting="env.NCCL_MAX_NCHANELS", requested="16", seen="16", effective=None, grade="not_seen"),
    )
    assert run(held, plan(CHAIN[2], SPACE), context).status == "completed"


def test_a_value_of_this_version_that_is_no_engine_error_is_not_swallowed(
    held: HeldEngine, context: TrialContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: StubEngine, block: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(StubEngine, "run_block", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        run(held, plan(CHAIN[2], SPACE), context)
    assert ResultsFolder(context.folder.root).journal("t0000", 1).is_file()


def limited(context: TrialContext) -> TrialContext:
    return replace(context, server=EngineSpec(kind="sglang", model_path="m", args={"attention-backend": "flashmla"}))


def test_what_the_server_version_cannot_run_is_invalid_and_costs_nothing(context: TrialContext) -> None:
    engine = StubEngine(version="0.5.17")
    held, context = HeldEngine(engine), limited(context)
    tree = next(member for member in SPACE.configurations() if member.eagle_topk == 2)
    assert run(held, plan(CHAIN[1], SPACE, "t0000"), context).status == "completed"
    before_s, calls = engine.clock_s, list(engine.calls)
    outcome = run(held, plan(tree, SPACE, "t0001"), context)
    assert (outcome.status, outcome.kind, outcome.relaunched) == ("invalid", "invalid_config", None)
    assert "SGLang 0.5.17: attention backend flashmla" in str(outcome.reason)
    assert (engine.clock_s, engine.calls) == (before_s, calls)
    assert set(outcome.seconds.values()) <= {0.0}
    refused = row(context, "t0001")
    assert (refused["status"], refused["stage"], refused["configuration_id"]) == (
        "invalid",
        "plan",
        tree.configuration_id,
    )
    assert run(held, plan(CHAIN[2], SPACE, "t0002"), context).relaunched is False, "the live server was kept"


def test_before_the_first_launch_the_version_is_unknown_and_nothing_is_refused(context: TrialContext) -> None:
    tree = next(member for member in SPACE.configurations() if member.eagle_topk == 2)
    assert run(HeldEngine(StubEngine(version="0.5.17")), plan(tree, SPACE), limited(context)).status == "completed"


def test_a_stopped_sweep_launches_nothing_more(held: HeldEngine, context: TrialContext) -> None:
    context.folder.stop_request.touch()
    outcome = run(held, plan(CHAIN[2], SPACE), context)
    assert (outcome.status, outcome.kind) == ("failed", "interrupted")
    assert held.engine.calls == []  # type: ignore[attr-defined]


@dataclass
class LyingEngine(StubEngine):
    """Its blocks of the given numbers took a hundredth of the time."""

    lies: frozenset[int] = frozenset()

    def run_block(self, block: Block) -> BlockRecord:
        record = super().run_block(block)
        return replace(record, decode_s=record.decode_s / 100) if block.index in self.lies else record


def test_a_suspect_block_is_recorded_with_its_rule_and_reaches_nobody(context: TrialContext) -> None:
    measurement = Measurement(HeldEngine(LyingEngine(lies=frozenset({0, 3}))), plan(CHAIN[2], SPACE), context)
    seen = []
    while isinstance(result := measurement.advance(), BlockSummary):
        seen.append(result.block_index)
    assert result.status == "completed"
    assert seen == [1, 2, 4, 5]
    told = read_table(context.folder, "blocks")["suspect"].to_pylist()
    assert [index for index, rule in enumerate(told) if rule] == [0, 3]
    assert told[0].startswith("throughput: tok_s x cycle / accept length = 100 requests a cycle at concurrency 1")


def test_a_trial_of_suspect_blocks_is_implausible_and_tried_again(context: TrialContext) -> None:
    outcome = run(HeldEngine(LyingEngine(lies=frozenset({0, 1, 2, 3}))), plan(CHAIN[2], SPACE), context)
    assert (outcome.status, outcome.stage, outcome.kind, outcome.transient) == (
        "failed",
        "measure",
        "implausible",
        True,
    )
    assert "4 of 6 blocks cannot be true: block 0: throughput" in str(outcome.reason)
    assert read_table(context.folder, "blocks").num_rows == 4, "no further block is measured"


def test_a_suspect_anchor_says_so(tmp_path: Path) -> None:
    context = replace(stub_context(SPEC, tmp_path), anchors=True)
    states = (CHAIN[2], CHAIN[2].target_alone())
    engine = LyingEngine(lies=frozenset({0}))
    run(HeldEngine(engine), replace(plan(CHAIN[2], SPACE), states=states), context)
    anchors = read_table(context.folder, "anchors")["suspect"].to_pylist()
    assert anchors
    assert all(rule.startswith("throughput") for rule in anchors)


@dataclass
class InertEngine(StubEngine):
    """Accepts no draft token."""

    def run_block(self, block: Block) -> BlockRecord:
        record = super().run_block(block)
        ones = pa.array([1] * record.cycles.num_rows, type=pa.int32())
        cycles = record.cycles.set_column(record.cycles.schema.get_field_index("tokens"), "tokens", ones)
        tokens = record.cycles.num_rows
        requests = tuple(replace(each, output_tokens=tokens + 1) for each in record.requests)
        return replace(record, decode_s=record.decode_s, decode_tokens=tokens, requests=requests, cycles=cycles)


def test_an_inert_drafter_fails_before_any_pruner_hears_of_its_block(context: TrialContext) -> None:
    measurement = Measurement(HeldEngine(InertEngine()), plan(CHAIN[2], SPACE), context)
    assert isinstance(measurement.advance(), BlockSummary), "50 cycles do not tell an inert drafter"
    outcome = measurement.advance()
    assert isinstance(outcome, Outcome)
    assert (outcome.status, outcome.kind) == ("failed", "draft_inert")
