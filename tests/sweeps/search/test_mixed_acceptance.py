from __future__ import annotations

from dataclasses import replace

import pytest

from sweeps.measure.records import Acceptance, Outcome, Role
from sweeps.search.mixed_acceptance import acceptance_of, checked_prediction
from sweeps.search.observations import Observations
from sweeps.spec.space import Space
from tests.sweeps.search.test_observations import block
from tests.sweeps.stub_engine import plan, stub_spec

SPEC = replace(stub_spec(), acceptance="mixed")
SPACE = Space(SPEC)
TWO, TWO_RING = (SPACE.resolve({"num_steps": 2, "eagle_topk": 1, "nccl": name}) for name in ("default", "ring"))
THREE_RING = SPACE.resolve({"num_steps": 3, "eagle_topk": 1, "nccl": "ring"})


def seen(status: str = "completed", acceptance: Acceptance = "measured") -> Observations:
    """One trial of 2 steps with NCCL's default set."""
    observations = Observations()
    observations.start(replace(plan(TWO, SPACE), acceptance=acceptance))
    observations.add_block("t0000", block(0, 60.0), seconds={})
    if status != "running":
        observations.finish("t0000", Outcome(status=status))  # type: ignore[arg-type]
    return observations


def test_a_drafting_that_was_measured_is_only_timed_elsewhere() -> None:
    assert acceptance_of(SPACE, Observations(), TWO_RING, role="candidate") == "measured"
    assert acceptance_of(SPACE, seen(), TWO_RING, role="candidate") == "pinned"
    assert acceptance_of(SPACE, seen(), THREE_RING, role="candidate") == "measured", "another drafting"


@pytest.mark.parametrize(
    ("status", "acceptance"), [("running", "measured"), ("pruned", "measured"), ("completed", "pinned")]
)
def test_only_a_whole_measured_trial_tells_a_length(status: str, acceptance: Acceptance) -> None:
    assert acceptance_of(SPACE, seen(status, acceptance), TWO_RING, role="candidate") == "measured"


def test_a_server_that_is_up_and_verifies_for_real_is_used_as_it_is() -> None:
    assert acceptance_of(SPACE, seen(), TWO, role="candidate") == "measured"


@pytest.mark.parametrize("role", ["control", "incumbent"])
def test_what_is_measured_again_is_measured(role: Role) -> None:
    assert acceptance_of(SPACE, seen(), TWO_RING, role=role) == "measured"


def test_without_speculation_there_is_nothing_to_pin() -> None:
    observations = seen()
    observations.start(plan(SPACE.control, SPACE, "t0001"))
    observations.finish("t0001", Outcome(status="completed"))
    ring = SPACE.resolve({"num_steps": 0, "nccl": "ring"})
    assert acceptance_of(SPACE, observations, ring, role="candidate") == "measured"


@pytest.mark.parametrize("stated", ["measured", "pinned"])
def test_otherwise_the_spec_says(stated: Acceptance) -> None:
    space = Space(replace(SPEC, acceptance=stated))
    assert acceptance_of(space, seen(), TWO_RING, role="candidate") == stated
    assert acceptance_of(space, Observations(), SPACE.control, role="control") == stated


def test_the_first_measured_trial_checks_what_was_predicted_and_no_other_does() -> None:
    observations = seen()
    for trial_id, tok_s, acceptance in (
        ("t0001", 80.0, "pinned"),
        ("t0002", 90.0, "pinned"),
        ("i0000", 81.6, "measured"),
        ("i0001", 70.0, "measured"),
    ):
        trial = plan(TWO_RING, SPACE, trial_id)
        observations.start(replace(trial, acceptance=acceptance))  # type: ignore[arg-type]
        observations.add_block(trial_id, block(0, tok_s), seconds={})
        observations.finish(trial_id, Outcome(status="completed"))
    found = {
        each.trial.trial_id: finding
        for each in observations
        if (finding := checked_prediction(observations, each, "tok_s")) is not None
    }
    assert list(found) == ["i0000"]
    assert found["i0000"].numbers == pytest.approx({"predicted": 85.0, "measured": 81.6, "share": -0.04})
    assert "tok_s 85.00 predicted" in found["i0000"].detail
    assert "81.60 measured as i0000 (-4.0%)" in found["i0000"].detail


def test_what_fails_checks_nothing() -> None:
    observations = seen()
    observations.start(replace(plan(TWO_RING, SPACE, "t0001"), acceptance="pinned"))
    observations.add_block("t0001", block(0, 80.0), seconds={})
    observations.finish("t0001", Outcome(status="completed"))
    observations.start(plan(TWO_RING, SPACE, "i0000"))
    observations.add_block("i0000", block(0, 80.0), seconds={})
    observations.finish("i0000", Outcome(status="failed", kind="crash"))
    assert checked_prediction(observations, observations["i0000"], "tok_s") is None
