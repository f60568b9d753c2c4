from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.engines.summary import BlockSummary
from sweeps.measure.records import Outcome, candidate_id
from sweeps.search.observations import Observation, Observations, block_value, combine
from sweeps.spec.space import Configuration, Space
from tests.sweeps.stub_engine import plan, stub_spec

SPACE = Space(stub_spec())
FIRST, SECOND = SPACE.configurations()[2:4]


def block(index: int, tok_s: float, cycle_ms: float | None = 30.0) -> BlockSummary:
    return BlockSummary(
        block_index=index, started_s=0.0, wall_s=5.0, tok_s=tok_s, num_cycles=10, accept_length=2.0,
        accept_histogram=None, draft_ms=1.0, verify_ms=None, verify_forward_ms=28.0, extend_ms=0.3, gap_ms=0.1,
        cycle_ms=cycle_ms,
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
    observe(observations, candidate_id(7), FIRST, 60.0)
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


def pinned(configuration: Configuration, trial_id: str, status: str, *blocks: BlockSummary) -> Observation:
    trial = replace(plan(configuration, SPACE, trial_id), acceptance="pinned")
    return Observation(trial=trial, status=status, blocks=blocks)  # type: ignore[arg-type]


def measured(configuration: Configuration, trial_id: str, *lengths: float) -> Observation:
    blocks = [replace(block(index, 0.0), accept_length=length) for index, length in enumerate(lengths)]
    return Observation(trial=plan(configuration, SPACE, trial_id), status="completed", blocks=tuple(blocks))


@given(
    lengths=st.lists(st.floats(1.0, 8.0), min_size=1, max_size=6),
    cycle_ms=st.floats(1.0, 100.0),
    pin=st.floats(1.0, 8.0),
)
def test_a_pinned_block_predicts_the_length_of_its_own_prompts_over_its_own_cycles(
    lengths: list[float], cycle_ms: float, pin: float
) -> None:
    told = [replace(block(index, 1.0), accept_length=length) for index, length in enumerate(lengths)]
    timed = replace(block(0, 1000.0 * pin / cycle_ms, cycle_ms), accept_length=pin, accept_histogram=(0, 5, 5))
    predicted = combine(timed, told)
    assert predicted.tok_s == pytest.approx(1000.0 * lengths[0] / cycle_ms)
    assert predicted.cycle_ms == cycle_ms
    assert predicted.accept_length == pytest.approx(lengths[0])
    assert predicted.accept_histogram is None, "its counts were made up by the server"
    assert combine(predicted, told).tok_s == pytest.approx(predicted.tok_s)
    elsewhere = combine(replace(timed, block_index=99), told)
    assert elsewhere.accept_length == pytest.approx(sum(lengths) / len(lengths))
    assert combine(timed, []) == timed


def test_a_pinned_trial_is_held_as_what_it_predicts_also_when_read_back() -> None:
    other = next(each for each in SPACE.configurations() if each != FIRST and each.drafting == FIRST.drafting)
    timed = replace(block(0, 90.0), accept_length=3.0)
    for observations in (
        Observations([measured(FIRST, "t0000", 2.0), pinned(other, "t0001", "completed", timed)]),
        Observations([pinned(other, "t0001", "completed", timed), measured(FIRST, "t0000", 2.0)]),
    ):
        assert observations["t0001"].values("tok_s") == (60.0,)
    live = Observations([measured(FIRST, "t0000", 2.0)])
    live.start(replace(plan(other, SPACE, "t0001"), acceptance="pinned"))
    live.add_block("t0001", timed, seconds={})
    assert live["t0001"].values("tok_s") == (60.0,)


def test_a_measured_trial_counts_and_not_what_was_predicted_of_it() -> None:
    observations = Observations(
        [
            replace(measured(FIRST, "t0000", 2.0), blocks=(block(0, 50.0),)),
            pinned(SECOND, "t0001", "completed", block(0, 60.0)),
        ]
    )
    assert observations.incumbent("tok_s") == SECOND
    assert observations.is_measured(FIRST)
    assert not observations.is_measured(SECOND)
    observe(observations, "i0000", SECOND, 40.0)
    assert observations.incumbent("tok_s") == FIRST


def test_what_fails_when_it_is_measured_is_no_incumbent() -> None:
    observations = Observations(
        [
            replace(measured(FIRST, "t0000", 2.0), blocks=(block(0, 50.0),)),
            pinned(SECOND, "t0001", "completed", block(0, 60.0)),
        ]
    )
    check = plan(SECOND, SPACE, "t0002")
    observations.start(check)
    observations.finish("t0002", Outcome(status="failed", kind="interrupted"))
    assert observations.unconfirmed == frozenset()
    observations.start(check)
    observations.finish("t0002", Outcome(status="failed", kind="gpu_oom"))
    assert observations.unconfirmed == {SECOND}
    assert observations.incumbent("tok_s") == FIRST
