from __future__ import annotations

from dataclasses import replace

import pytest

from sweeps.engines.summary import BlockSummary
from sweeps.measure.records import Outcome, name_trial
from sweeps.search.observations import Observations, block_value, pooled
from sweeps.spec.space import Space
from tests.sweeps.stub_engine import plan, stub_spec

SPACE = Space(stub_spec())
FIRST, SECOND = SPACE.configurations()[2:4]


def block(index: int, tok_s: float, cycle_ms: float | None = 30.0) -> BlockSummary:
    return BlockSummary(
        block_index=index, started_s=0.0, wall_s=5.0, decode_tokens=300, decode_s=300 / tok_s, num_cycles=10,
        accept_length=2.0, accept_histogram=None, draft_ms=1.0, verify_ms=None, verify_forward_ms=28.0, extend_ms=0.3,
        gap_ms=0.1, cycle_ms=cycle_ms,
    )  # fmt: skip


def observe(
    observations: Observations, trial_id: str, configuration: object, *tok_s: float, status: str = "completed"
) -> None:
    trial = plan(configuration, SPACE, trial_id)  # type: ignore[arg-type]
    observations.start(trial)
    for index, value in enumerate(tok_s):
        observations.add_block(trial_id, block(index, value), seconds={"measure": 5.0 * (index + 1)})
    observations.finish(trial_id, Outcome(status=status, kind=None))  # type: ignore[arg-type]


def test_the_incumbent_is_the_best_mean_of_completed_trials() -> None:
    observations = Observations()
    assert observations.incumbent("tok_s") is None
    observe(observations, "t0000", FIRST, 60.0, 62.0)
    observe(observations, "t0001", SECOND, 99.0, status="pruned")
    assert observations.incumbent("tok_s") == FIRST
    observe(observations, "t0002", SECOND, 61.5, 61.7)
    assert observations.incumbent("tok_s") == SECOND
    observe(observations, "t0003", SECOND, 40.0)
    assert observations.incumbent("tok_s") == FIRST
    assert observations.incumbent("tok_s", among=[SECOND]) == SECOND


def test_times_are_minimised() -> None:
    observations = Observations()
    observe(observations, "t0000", FIRST, 60.0)
    observe(observations, "t0001", SECOND, 61.0)
    observations.add_block("t0001", block(0, 61.0, cycle_ms=31.0), seconds={})
    assert observations.incumbent("cycle_ms") == FIRST


def test_a_repeated_attempt_starts_over() -> None:
    observations = Observations()
    observe(observations, "t0000", FIRST, 60.0, 62.0, 64.0)
    observations.add_block("t0000", block(0, 70.0), seconds={"measure": 5.0, "failed": 100.0})
    assert observations["t0000"].values("tok_s") == (70.0,)
    assert observations.held_s == 105.0


def test_the_live_server_is_the_last_started_unless_it_failed() -> None:
    observations = Observations()
    assert observations.live_launch_key is None
    observe(observations, "t0000", FIRST, 60.0)
    assert observations.live_launch_key == SPACE.launch_key(FIRST)
    observe(observations, "t0001", SECOND, status="failed")
    assert observations.live_launch_key is None


def test_trials_are_found_by_number_and_configuration() -> None:
    observations = Observations()
    observe(observations, name_trial("candidate", 7), FIRST, 60.0)
    found = observations.of_number(7)
    assert found is not None
    assert found.trial.configuration == FIRST
    assert observations.of_number(8) is None
    assert observations.of_configuration(FIRST) == (found,)
    assert observations.running == ()


@pytest.mark.parametrize(("metric", "value"), [("tok_s", 60.0), ("cycle_ms", 30.0), ("verify_ms", None)])
def test_a_metric_that_a_block_does_not_have_is_none(metric: str, value: float | None) -> None:
    assert block_value(block(0, 60.0), metric) == value  # type: ignore[arg-type]
    assert block_value(replace(block(0, 60.0), cycle_ms=None), "cycle_ms") is None


def test_throughput_is_tokens_over_seconds_whatever_blocks_differ_by() -> None:
    slow, fast = block(0, 40.0), block(1, 120.0)
    assert pooled([slow, fast], "tok_s") == pytest.approx(600 / (300 / 40.0 + 300 / 120.0))
    assert pooled([slow, replace(fast, decode_tokens=100, decode_s=1.0)], "tok_s") == pytest.approx(400 / 8.5)


def test_a_time_is_its_mean_over_cycles() -> None:
    few, many = block(0, 60.0, cycle_ms=10.0), block(1, 60.0, cycle_ms=20.0)
    assert pooled([few, replace(many, num_cycles=30)], "cycle_ms") == pytest.approx(17.5)
    assert pooled([few], "verify_ms") is None
