from __future__ import annotations

from dataclasses import replace

import pytest

from sweeps.observations import Acceptance, Observations, Outcome, Role
from sweeps.schedule import acceptance_of
from sweeps.space import Space
from tests.sweeps.stub_engine import plan, stub_spec
from tests.sweeps.test_observations import block

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
