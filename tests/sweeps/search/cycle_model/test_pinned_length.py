from __future__ import annotations

import math

import numpy as np
import pytest

from sweeps.engines.summary import BlockSummary
from sweeps.measure.records import Outcome
from sweeps.search.cycle_model.model import CycleModel
from sweeps.search.cycle_model.pinned_length import PinnedLength
from sweeps.search.observations import Observations
from sweeps.spec.reading import parse_spec
from sweeps.spec.space import Configuration, Space
from tests.sweeps.stub_engine import plan

SPEC = """
sweep: pinned
engine: {kind: simulated, machine: h200-nvlink-x2, env: {SGLANG_SIMULATE_ACC_LEN: "3"}}
acceptance: pinned
drafters: {mini: mini}
search: {num_steps: [0, 1, 2, 3, 5]}
"""
SPACE = Space(parse_spec(SPEC, source="pinned"))
MEMBERS = SPACE.configurations()


def block(configuration: Configuration, length: float, index: int = 1) -> BlockSummary:
    cycle_ms = 6.0 + 0.3 * configuration.num_steps
    return BlockSummary(
        block_index=index,
        started_s=10.0 * index,
        wall_s=5.0,
        decode_tokens=1000,
        decode_s=cycle_ms / length,
        num_cycles=100,
        accept_length=length if configuration.speculates else None,
        accept_histogram=None,
        draft_ms=0.3 * configuration.num_steps if configuration.speculates else None,
        verify_ms=5.5 if configuration.speculates else None,
        verify_forward_ms=5.4,
        extend_ms=0.3 if configuration.speculates else None,
        gap_ms=0.2,
        cycle_ms=cycle_ms,
    )


def observed(lengths: dict[int, float]) -> Observations:
    observations = Observations()
    for number, (steps, length) in enumerate(lengths.items()):
        configuration = next(each for each in MEMBERS if each.num_steps == steps)
        trial = plan(configuration, SPACE, f"t{number:04d}")
        observations.start(trial)
        for index in range(1, 5):
            observations.add_block(trial.trial_id, block(configuration, length, index), seconds={"measure": 5.0})
        observations.finish(trial.trial_id, Outcome(status="completed", relaunched=True, seconds={"launch": 60.0}))
    return observations


def test_a_length_is_the_pinned_one_or_steps_and_one_until_a_trial_shows_it() -> None:
    model, rng = PinnedLength(MEMBERS, pinned=2.5), np.random.default_rng(0)
    assert model.draw(3, rng).tolist() == [[length] * 3 for length in (1.0, 2.0, 2.5, 2.5, 2.5)]
    model.fit(list(observed({3: 2.48})), {})
    assert model.draw(2, rng)[3].tolist() == [2.48, 2.48]


def test_a_trial_tells_its_own_length_and_the_control_none() -> None:
    model = PinnedLength(MEMBERS, pinned=3.0)
    control, drafted = observed({0: 1.0, 2: 3.0})
    assert model.adjusted(control) is None
    told = model.adjusted(drafted)
    assert told is not None
    assert told[0] == pytest.approx(math.log(3.0))


def test_a_pinned_sweep_predicts_every_step_count_at_its_kink() -> None:
    """A model of drafters would go on rising after 2 steps, where 1 and 2 steps lost nothing."""
    posterior = CycleModel(SPACE).posterior(observed({0: 1.0, 1: 2.0, 2: 3.0, 5: 3.0}))
    assert posterior is not None
    lengths = {each.num_steps: own for each, own in zip(posterior.members, posterior.accept_length, strict=True)}
    assert {steps: set(own.tolist()) for steps, own in lengths.items()} == {
        0: {1.0},
        1: {2.0},
        2: {3.0},
        3: {3.0},
        5: {3.0},
    }
