"""Optuna's side alone: what ends up in its study."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from sweeps.engines.summary import BlockSummary
from sweeps.measure.records import PlannedTrial, Role, Status
from sweeps.search.observations import Observation, Observations
from sweeps.search.optuna_study import DRIVER_DIED, OptunaStudy
from sweeps.search.study_journal import open_journal
from sweeps.spec.model import SweepSpec
from sweeps.spec.space import Configuration, Space
from tests.sweeps.stub_engine import stub_spec

optuna.logging.set_verbosity(optuna.logging.WARNING)


SPEC = stub_spec("study: {sampler: {name: random}}\n")
"""A grid refuses what is infeasible at once; here only what a test says is in the study."""


def books(spec: SweepSpec, path: Path | None = None) -> OptunaStudy:
    return OptunaStudy(spec, Space(spec), Observations(), open_journal(path) if path else None)


def block(index: int, tok_s: float) -> BlockSummary:
    unknown = dict.fromkeys(
        ("accept_histogram", "draft_ms", "verify_ms", "verify_forward_ms", "extend_ms", "gap_ms", "cycle_ms")
    )
    summary = {"block_index": index, "started_s": 0.0, "wall_s": 1.0, "num_cycles": 9}
    summary |= {"decode_tokens": 300, "decode_s": 300 / tok_s}
    return BlockSummary(**summary, accept_length=2.0, **unknown)  # type: ignore[arg-type]


def observed(
    trial_id: str, configuration: Configuration, *rates: float, role: Role = "candidate", status: Status = "completed"
) -> Observation:
    trial = PlannedTrial(
        trial_id=trial_id,
        role=role,
        number=0 if role == "candidate" else None,
        configuration=configuration,
        requested={},
        launch_key="key",
    )
    blocks = tuple(block(index, tok_s) for index, tok_s in enumerate(rates, start=1))
    return Observation(trial=trial, status=status, blocks=blocks)


def member(spec: SweepSpec, num_steps: int) -> Configuration:
    return next(each for each in Space(spec).configurations() if each.num_steps == num_steps)


def test_a_configuration_proposed_by_name_is_measured_and_told() -> None:
    spec = SPEC
    own, wanted = books(spec), member(spec, 2)
    proposal = own.propose_this(wanted)
    assert Space(spec).resolve(proposal.requested) == wanted

    trial_id = own.take(proposal, wanted)
    trial = observed(trial_id, wanted, 90.0, 92.0)
    for number, each in enumerate(trial.blocks, start=1):
        assert not own.report(replace(trial, blocks=trial.blocks[:number]), each).prune
    own.close(trial)

    (told,) = own.study.trials
    rate = 2 / (1 / 90.0 + 1 / 92.0)
    assert told.state == TrialState.COMPLETE
    assert told.value == pytest.approx(rate), "tokens over seconds"
    assert told.user_attrs == {
        "trial_id": "t0000",
        "configuration_id": wanted.configuration_id,
        "label": wanted.label,
    }
    assert told.intermediate_values == pytest.approx({1: 90.0, 2: rate}), "what it had so far"


def test_a_repeated_attempt_reports_its_blocks_again_without_complaint() -> None:
    spec = SPEC
    own, wanted = books(spec), member(spec, 2)
    trial_id = own.take(own.propose_this(wanted), wanted)
    for tok_s in (90.0, 50.0):
        trial = observed(trial_id, wanted, tok_s)
        own.report(trial, trial.blocks[0])

    assert own.study.trials[0].intermediate_values == {1: 90.0}


def test_what_no_server_can_run_fails_and_is_a_row_once() -> None:
    own = books(SPEC)
    first = own.propose()
    again = replace(own.propose(), requested=first.requested)
    for proposal in (first, again):
        own.refuse(proposal, "pool 4 < 7")

    (row,) = own.drain_invalid()
    assert (row.requested, row.reason) == (first.requested, "pool 4 < 7")
    assert own.drain_invalid() == ()
    assert {told.state for told in own.study.trials} == {TrialState.FAIL}
    assert {told.user_attrs["reason"] for told in own.study.trials} == {"pool 4 < 7"}


@pytest.mark.parametrize(("steps", "shared"), [((0, 1), 1), ((1, 2), 0)])
def test_a_control_that_is_a_point_of_the_space_is_told_once(steps: tuple[int, ...], shared: int) -> None:
    spec = replace(SPEC, search=replace(SPEC.search, num_steps=steps))
    own, control = books(spec), Space(spec).control
    for trial_id in ("k0000", "k0001"):
        own.share_control(observed(trial_id, control, 80.0, 82.0, role="control"))

    assert [told.value for told in own.study.trials] == pytest.approx([2 / (1 / 80.0 + 1 / 82.0)] * shared)
    assert [told.user_attrs for told in own.study.trials] == [{"control": "k0000"}] * shared


def test_a_trial_that_a_killed_driver_left_open_without_a_result_fails(tmp_path: Path) -> None:
    spec = SPEC
    first = books(spec, tmp_path / "study.journal")
    first.take(first.propose(), member(spec, 1))

    (told,) = books(spec, tmp_path / "study.journal").study.trials
    assert (told.state, told.user_attrs["reason"]) == (TrialState.FAIL, DRIVER_DIED)
