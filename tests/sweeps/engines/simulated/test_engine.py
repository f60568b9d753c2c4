from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest

from sweeps.engines.base import EngineError
from sweeps.engines.simulated.engine import SimulatedEngine, profile_of
from sweeps.engines.simulated.machine_profile import Fault, Interaction, Intervention, MachineProfile
from sweeps.engines.summary import BlockSummary, summarise
from sweeps.results.tables import CYCLE_COLUMNS
from sweeps.search.observations import pooled as search_pooled
from sweeps.spec.document import SpecError
from sweeps.spec.model import SweepSpec
from sweeps.spec.reading import parse_spec
from sweeps.spec.space import Configuration, Space
from sweeps.spec.workload import Block, plan_blocks
from tests.certain import certain

SPEC = """
sweep: simulated
engine: {{kind: simulated, machine: {machine}, noise: {noise}}}
search:
  num_steps: [0, 1, 2, 3]
  eagle_topk: [1, 4]
  drafter: [mine]
  nccl: [default, six]
nccl_sets:
  six: {{NCCL_PROTO: LL, NCCL_ALGO: Ring, NCCL_P2P_LEVEL: SYS, NCCL_MAX_NCHANNELS: "16",
        NCCL_BUFFSIZE: "16777216", NCCL_NTHREADS: "512"}}
drafters: {{mine: {drafter}}}
workload: {{blocks: 12, requests_per_block: {requests}, concurrency: {requests}}}
study: {{seed: {seed}}}
"""


def make_spec(
    machine: str = "rtx-pro-6000-pcie-x8",
    drafter: str = "founding",
    *,
    noise: float = 1.0,
    requests: int = 1,
    seed: int = 0,
) -> SweepSpec:
    return parse_spec(
        SPEC.format(machine=machine, drafter=drafter, noise=noise, requests=requests, seed=seed), source="spec"
    )


def pick(spec: SweepSpec, num_steps: int, *, nccl: str = "default", eagle_topk: int = 1) -> Configuration:
    return Space(spec).resolve({"num_steps": num_steps, "nccl": nccl, "eagle_topk": eagle_topk})


def blocks_of(spec: SweepSpec) -> tuple[Block, ...]:
    return plan_blocks(spec.workload, folder=Path())


def test_a_batch_that_the_profile_says_nothing_about_is_refused_before_it_runs() -> None:
    spec = make_spec()
    wide = replace(spec, workload=replace(spec.workload, concurrency=(1, 100)))
    engine = SimulatedEngine(wide)
    engine.launch(pick(wide, 1))
    with pytest.raises(
        EngineError, match=r"100 requests at a time: a forward of 400 tokens, .* nothing beyond 256"
    ) as bad:
        engine.launch(pick(wide, 3))
    assert (bad.value.stage, bad.value.kind) == ("plan", "invalid_config")


def test_speculation_gains_most_where_one_request_runs_at_a_time() -> None:
    spec = make_spec("h200-nvlink-x8", "kimi-k2.5-eagle3", noise=0.0)
    engine = SimulatedEngine(spec)
    gains = [
        engine.expected(pick(spec, 3), batch_size=size).tok_s / engine.expected(pick(spec, 0), batch_size=size).tok_s
        for size in (1, 4, 16, 32)
    ]
    assert max(gains) == gains[0] > 1.2 * gains[2], "drafts of a batch touch further experts"


def measure(engine: SimulatedEngine, configuration: Configuration) -> list[BlockSummary]:
    engine.launch(configuration)
    summaries = []
    for block in blocks_of(engine.spec):
        record = engine.run_block(block)
        if not block.warmup:
            summaries.append(summarise(record, block_index=block.index))
    return summaries


def pooled(summaries: Sequence[BlockSummary], name: str) -> float:
    return fmean(getattr(summary, name) for summary in summaries)


def test_the_founding_case_comes_out_of_the_blocks() -> None:
    spec = make_spec()
    many = replace(spec, workload=replace(spec.workload, blocks=200))
    engine = SimulatedEngine(many)
    plain, eagle = measure(engine, pick(many, 0)), measure(engine, pick(many, 2))
    assert pooled(plain, "tok_s") == pytest.approx(82.2, rel=0.01)
    assert pooled(eagle, "verify_ms") == pytest.approx(29.0, rel=0.01)
    assert pooled(eagle, "verify_ms") / pooled(eagle, "cycle_ms") == pytest.approx(0.969, rel=0.01)
    assert pooled(eagle, "accept_length") == pytest.approx(1.80, rel=0.01)
    assert pooled(eagle, "tok_s") == pytest.approx(60.0, rel=0.01)


def test_without_noise_the_blocks_are_the_expectation() -> None:
    spec = make_spec("h200-nvlink-x8", "kimi-k2.5-eagle3", noise=0.0)
    quiet = profile_of(spec)
    quiet = replace(quiet, noise=replace(quiet.noise, warmup=0.0, cold=0.0))
    engine = SimulatedEngine(spec, profile=quiet)
    for steps, topk in ((0, 1), (1, 1), (3, 1), (3, 4)):
        chosen = pick(spec, steps, eagle_topk=topk)
        mean, blocks = engine.expected(chosen), measure(engine, chosen)
        assert pooled(blocks, "cycle_ms") == pytest.approx(mean.cycle_ms, rel=1e-9)
        assert pooled(blocks, "tok_s") == pytest.approx(mean.tok_s, rel=0.005)


def test_the_worth_of_the_prompts_is_their_tokens_over_their_seconds() -> None:
    """However far the prompts are apart, the truth of benchmarks is what the report and the search compute."""
    spec = make_spec("h200-nvlink-x8", "kimi-k2.5-eagle3")
    quiet = profile_of(spec)
    drafters = {name: replace(each, prompt_spread=1.0) for name, each in quiet.drafters.items()}
    still = dict.fromkeys(("verify_cycle", "other_cycle", "block", "launch", "warmup", "cold"), 0.0)
    engine = SimulatedEngine(spec, profile=replace(quiet, drafters=drafters, noise=replace(quiet.noise, **still)))
    chosen, rates, rng = pick(spec, 3), [], np.random.default_rng(0)
    engine.launch(chosen)
    for _ in range(40):
        blocks = [engine.block_summary(index, rng=rng) for index in range(12)]
        rates.append(search_pooled(blocks, "tok_s"))
    truth = engine.expected_tok_s(chosen, num_blocks=12)
    assert fmean(map(certain, rates)) == pytest.approx(truth, rel=0.004)
    assert fmean(certain(block.tok_s) for block in blocks) > 1.03 * truth, "the mean of rates is another number"


def test_runs_are_reproducible_and_launches_differ() -> None:
    spec = make_spec()
    first, second = SimulatedEngine(spec), SimulatedEngine(spec)
    chosen = pick(spec, 2)
    once = measure(first, chosen)
    assert once == measure(second, chosen)
    again = measure(first, chosen)
    assert [block.verify_ms for block in again] != [block.verify_ms for block in once]
    assert measure(SimulatedEngine(make_spec(seed=1)), chosen) != once


def test_blocks_pair_across_configurations() -> None:
    spec = make_spec()
    long = replace(spec, workload=replace(spec.workload, blocks=60, output_tokens=1024))
    engine = SimulatedEngine(long)
    one, other = (
        [certain(block.accept_length) for block in measure(engine, pick(long, steps, nccl=nccl))]
        for steps, nccl in ((2, "default"), (3, "six"))
    )
    assert np.corrcoef(one, other)[0, 1] > 0.6


def test_cycles_fit_the_schema_and_their_parts_sum_to_them() -> None:
    spec = make_spec()
    engine = SimulatedEngine(spec)
    for steps, parts in ((0, ["verify_forward_ms", "gap_ms"]), (2, ["draft_ms", "verify_ms", "extend_ms", "gap_ms"])):
        engine.launch(pick(spec, steps))
        record = engine.run_block(blocks_of(spec)[0])
        cycles = record.cycles
        assert cycles.schema.equals(CYCLE_COLUMNS)
        assert cycles["timer_kind"].unique().to_pylist() == ["simulated"]
        assert cycles["num_steps"].unique().to_pylist() == [steps]
        assert np.sum([cycles[name] for name in parts], axis=0) == pytest.approx(cycles["cycle_ms"].to_numpy())
        assert np.diff(cycles["started_ms"]) == pytest.approx(cycles["cycle_ms"].to_numpy()[:-1])
        assert pc.sum(cycles["tokens"]).as_py() >= record.decode_tokens == 255
        assert cycles["verify_ms"].null_count == (cycles.num_rows if steps == 0 else 0)
        assert record.wall_s > record.decode_s > 0.0


def test_a_batch_thins_out_and_serves_more_tokens_per_second() -> None:
    spec = make_spec(requests=8)
    engine = SimulatedEngine(spec)
    engine.launch(pick(spec, 2))
    record = engine.run_block(blocks_of(spec)[0])
    sizes = record.cycles["batch_size"].to_pylist()
    assert sizes[0] == 8
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 8
    assert len(record.requests) == 8
    assert certain(summarise(record, block_index=0).tok_s) > 2 * engine.expected(pick(spec, 2)).tok_s


def test_time_is_virtual_and_the_first_boot_is_cold() -> None:
    spec = make_spec()
    engine = SimulatedEngine(spec)
    first = engine.launch(pick(spec, 0))
    assert engine.now_s() == pytest.approx(sum(first.boot_s.values()))
    before_s = engine.now_s()
    record = engine.run_block(blocks_of(spec)[0])
    assert engine.now_s() - before_s == pytest.approx(record.wall_s)
    for _ in range(2):  # the second time there is nothing to stop
        engine.close()
        assert engine.now_s() == pytest.approx(before_s + record.wall_s + engine.profile.boot.stop_s)
    second = engine.launch(pick(spec, 0))
    assert second.boot_s["weight_load"] < first.boot_s["weight_load"]
    speculative = engine.launch(pick(spec, 2))
    assert speculative.boot_s["capture"] > second.boot_s["capture"]


def test_the_first_blocks_after_a_launch_are_slower() -> None:
    spec = make_spec(noise=0.0)
    engine = SimulatedEngine(spec)
    engine.launch(pick(spec, 0))
    times = [certain(summarise(engine.run_block(block), block_index=0).cycle_ms) for block in blocks_of(spec)[:6]]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.03 * times[-1]


def test_drift_slows_the_sweep_down() -> None:
    spec = make_spec(noise=0.0)
    profile = profile_of(spec)
    drifting = replace(profile, noise=replace(profile.noise, cold=0.0, warmup=0.0, drift_per_hour=0.05))
    engine = SimulatedEngine(spec, profile=drifting)
    early = pooled(measure(engine, pick(spec, 0)), "cycle_ms")
    while engine.now_s() < 2 * 3600:
        engine.launch(pick(spec, 0))
    assert pooled(measure(engine, pick(spec, 0)), "cycle_ms") / early == pytest.approx(1.10, abs=0.02)


def test_step_counts_switch_in_place_where_the_launch_prepared_for_them() -> None:
    spec = make_spec()
    space, engine = Space(spec), SimulatedEngine(spec)
    two, three = pick(spec, 2), pick(spec, 3)
    assert engine.switch(two) is None
    engine.launch(two, states=space.states(two))
    before_s = engine.now_s()
    report = engine.switch(three)
    assert report is not None
    assert report.effective["num_steps"] == "3"
    assert engine.now_s() - before_s < 0.1
    record = engine.run_block(blocks_of(spec)[0])
    assert record.cycles["num_steps"].unique().to_pylist() == [3]
    assert [engine.switch(other) for other in (pick(spec, 0), pick(spec, 3, eagle_topk=4))] == [None, None]
    engine.launch(two)
    assert engine.switch(three) is None
    assert engine.switch(two) is not None


def engine_with(spec: SweepSpec, **parts: Any) -> SimulatedEngine:
    profile: MachineProfile = replace(profile_of(spec), **parts)
    return SimulatedEngine(spec, profile=profile)


def test_a_hang_takes_its_deadline_and_leaves_no_server() -> None:
    spec = make_spec()
    fault = Fault(when={"env.NCCL_PROTO": "LL"}, kind="hang_nccl_init", stage="nccl_init", message="stuck")
    engine = engine_with(spec, faults=(fault,))
    with pytest.raises(EngineError) as caught:
        engine.launch(pick(spec, 2, nccl="six"))
    assert (caught.value.stage, caught.value.kind) == ("nccl_init", "hang_nccl_init")
    assert engine.now_s() >= spec.engine.deadlines_s.nccl_init
    with pytest.raises(EngineError, match="none is up"):
        engine.run_block(blocks_of(spec)[0])
    engine.launch(pick(spec, 2))


def test_a_fault_in_a_block_comes_after_the_blocks_that_succeed() -> None:
    spec = make_spec()
    fault = Fault(when={"num_steps": "3"}, kind="crash", stage="measure", message="illegal access", after_blocks=2)
    engine = engine_with(spec, faults=(fault,))
    engine.launch(pick(spec, 3))
    blocks = blocks_of(spec)
    engine.run_block(blocks[0])
    engine.run_block(blocks[1])
    with pytest.raises(EngineError, match="illegal access") as caught:
        engine.run_block(blocks[2])
    assert caught.value.transient


def test_nccl_without_an_algorithm_fails_at_capture_and_costs_the_load() -> None:
    spec = make_spec()
    configuration = replace(pick(spec, 0), nccl_env=(("NCCL_ALGO", "NVLS"),))
    engine = SimulatedEngine(spec)
    with pytest.raises(EngineError) as caught:
        engine.launch(configuration)
    assert (caught.value.stage, caught.value.kind) == ("capture", "nccl_no_algorithm")
    assert engine.now_s() > engine.profile.boot.weight_load_s


def grades(engine: SimulatedEngine, configuration: Configuration) -> dict[str, str]:
    report = engine.launch(configuration)
    assert {row.rank for row in report.evidence if row.setting.startswith("env.")} == set(range(8))
    return {row.setting: row.grade for row in report.evidence if row.rank == 0}


def test_evidence_tells_effective_from_not_exercised() -> None:
    spec = make_spec()
    founding = grades(SimulatedEngine(spec), pick(spec, 2, nccl="six"))
    assert founding["env.NCCL_PROTO"] == "effective"
    assert founding["env.NCCL_P2P_LEVEL"] == "effective"
    assert founding["args.speculative_num_steps"] == "effective"
    nvlink = make_spec("h200-nvlink-x8", "kimi-k2.5-eagle3")
    bypassed = grades(SimulatedEngine(nvlink), pick(nvlink, 2, nccl="six"))
    assert bypassed["env.NCCL_PROTO"] == "not_exercised"


def test_evidence_shows_other_hands() -> None:
    spec = make_spec()
    overriding = Intervention(setting="env.NCCL_PROTO", value="Simple", by="the engine")
    injecting = Intervention(setting="env.NCCL_SHM_DISABLE", value="0", by="/etc/nccl.conf")
    found = grades(engine_with(spec, interventions=(overriding, injecting)), pick(spec, 2, nccl="six"))
    assert found["env.NCCL_PROTO"] == "overridden"
    assert found["env.NCCL_SHM_DISABLE"] == "extra"
    forced = Intervention(setting="args.speculative-eagle-topk", value="1", by="the engine")
    tree = grades_of_arguments(engine_with(spec, interventions=(forced,)), pick(spec, 3, eagle_topk=4))
    assert tree["args.speculative_eagle_topk"] == "overridden"


def grades_of_arguments(engine: SimulatedEngine, configuration: Configuration) -> dict[str, str]:
    return {row.setting: row.grade for row in engine.launch(configuration).evidence}


def test_the_report_says_simulated_and_carries_the_command() -> None:
    spec = make_spec()
    report = SimulatedEngine(spec).launch(pick(spec, 2, nccl="six"))
    assert "simulated" in report.machine
    assert report.num_gpus == 8
    assert report.environment["NCCL_PROTO"] == "LL"
    assert "--speculative-num-steps" in report.command
    assert report.all_reduce == "nccl"


def test_kernel_times_sum_to_the_phases() -> None:
    spec = make_spec()
    engine = SimulatedEngine(spec)
    engine.launch(pick(spec, 2))
    mean, block = engine.expected(pick(spec, 2)), blocks_of(spec)[-1]
    kernels = certain(engine.trace(block))
    for phase, phase_ms in (("draft", mean.draft_ms), ("verify", mean.verify_ms), ("extend", mean.extend_ms)):
        assert sum(row.us_per_cycle for row in kernels if row.phase == phase) == pytest.approx(1000 * certain(phase_ms))
    shares = [row.us_per_cycle for row in kernels if row.phase == "verify" and row.kind == "communication"]
    assert sum(shares) / (1000 * certain(mean.verify_ms)) == pytest.approx(0.104, abs=0.01)


def test_a_drawn_summary_is_like_a_measured_one() -> None:
    spec = make_spec("h200-nvlink-x8", "kimi-k2.5-eagle3")
    many = replace(spec, workload=replace(spec.workload, blocks=400))
    rng = np.random.default_rng(0)
    for steps in (0, 3):
        engine = SimulatedEngine(many)
        blocks = measure(engine, pick(many, steps))
        engine.launch(pick(many, steps))
        drawn = [engine.block_summary(index, rng=rng) for index in (0, 0, *range(400))][2:]
        for name in ("tok_s", "cycle_ms", "wall_s", "num_cycles"):
            assert pooled(drawn, name) == pytest.approx(pooled(blocks, name), rel=0.02)
        tok_s = [[certain(block.tok_s) for block in side] for side in (drawn, blocks)]
        assert stdev(tok_s[0]) == pytest.approx(stdev(tok_s[1]), rel=0.25)
        assert all(sum(block.accept_histogram) == block.num_cycles for block in drawn if block.accept_histogram)


def test_a_drafter_by_the_name_of_the_spec_and_a_broken_assumption_reach_the_blocks() -> None:
    spec = make_spec(noise=0.0)
    when = {"env.NCCL_PROTO": "LL"}
    engine = engine_with(spec, interactions=(Interaction(when=when, factor="accept_length", scale=0.9),))
    plain, broken = (pooled(measure(engine, pick(spec, 2, nccl=nccl)), "accept_length") for nccl in ("default", "six"))
    assert plain == pytest.approx(1.80, rel=0.01)
    assert broken == pytest.approx(0.9 * plain, rel=0.01)


def test_a_spec_without_machine_or_with_a_foreign_drafter_is_refused() -> None:
    spec = make_spec()
    with pytest.raises(SpecError, match=r"engine\.machine"):
        SimulatedEngine(replace(spec, engine=replace(spec.engine, machine=None)))
    with pytest.raises(SpecError, match="no drafter profile 'nobody'"):
        SimulatedEngine(replace(spec, drafters={"mine": "nobody"}))


def pinned_spec(length: str = "2.5") -> SweepSpec:
    spec = make_spec(noise=1.0)
    engine = replace(spec.engine, env={"SGLANG_SIMULATE_ACC_LEN": length})
    return replace(spec, acceptance="pinned", engine=engine)


@pytest.mark.parametrize(("num_steps", "length"), [(3, 2.5), (1, 2.0)])
def test_pinned_acceptance_is_the_same_for_every_prompt_and_changes_no_time(num_steps: int, length: float) -> None:
    spec = make_spec(noise=1.0)
    configuration = pick(spec, num_steps)
    real = measure(SimulatedEngine(spec), configuration)
    pinned = measure(SimulatedEngine(pinned_spec()), configuration)
    told = [block.accept_length for block in pinned if block.accept_length is not None]
    assert fmean(told) == pytest.approx(length, rel=0.02)
    if length == num_steps + 1:
        assert set(told) == {length}, "SGLang clips to steps + 1"
    assert fmean(block.accept_length or 0.0 for block in real) < 0.9 * length
    assert fmean(block.cycle_ms or 0.0 for block in pinned) == pytest.approx(
        fmean(block.cycle_ms or 0.0 for block in real), rel=0.01
    )


def test_a_pinned_sweep_pins_every_configuration() -> None:
    spec = pinned_spec("2")
    engine = SimulatedEngine(spec)
    assert engine.expected(pick(spec, 3)).accept_length == 2.0
    assert engine.expected(pick(spec, 0)).accept_length is None
