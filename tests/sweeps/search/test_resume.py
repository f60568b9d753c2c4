from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sweeps.engines.base import EngineError, Evidence, Kind
from sweeps.engines.summary import BlockSummary
from sweeps.measure.held_engine import HeldEngine
from sweeps.measure.trial import Measurement
from sweeps.results.tables import ResultsFolder
from sweeps.search.resume import read_earlier, read_observations
from sweeps.spec.space import Space
from tests.sweeps.stub_engine import StubEngine, plan, stub_context, stub_spec


def test_the_last_attempt_is_taken_and_every_attempt_is_paid(tmp_path: Path) -> None:
    spec = stub_spec()
    space, context = Space(spec), stub_context(spec, tmp_path)
    engine = StubEngine(failures={"launch": [EngineError("killed", stage="load", kind="crash")]})
    held, trial = HeldEngine(engine), plan(space.configurations()[2], space, "t0005")
    blocks = []
    for attempt in (1, 2):
        measurement = Measurement(held, trial, context, attempt=attempt)
        while isinstance(result := measurement.advance(), BlockSummary):
            blocks.append(result)
    (seen,) = read_observations(ResultsFolder(tmp_path), space)
    assert seen.trial == trial
    assert seen.status == "completed"
    assert seen.blocks == tuple(blocks)
    assert seen.seconds["failed"] == 100.0
    assert sum(seen.seconds.values()) == engine.clock_s
    assert [kernel.kind for kernel in seen.kernels] == ["communication"]
    assert seen.all_reduce == "nccl"


@pytest.mark.parametrize(("read", "nccl_unread"), [("NCCL_CUMEM_ENABLE", True), ("NCCL_ALGO", False)])
def test_a_set_that_nccl_did_not_read_is_known_live_and_after_a_resume(
    read: str, tmp_path: Path, *, nccl_unread: bool
) -> None:
    spec = stub_spec()
    space = Space(spec)
    ring = next(each for each in space.configurations() if dict(each.nccl_env).keys() == {"NCCL_ALGO"})
    evidence = Evidence(
        rank=0, setting=f"env.{read}", requested=None, seen="0", effective="0", grade="extra", read_by_nccl="0"
    )
    measurement = Measurement(
        HeldEngine(StubEngine(evidence=(evidence,))), plan(ring, space), stub_context(spec, tmp_path)
    )
    assert not measurement.nccl_unread, "nothing was launched"
    while isinstance(result := measurement.advance(), BlockSummary):
        assert measurement.nccl_unread is nccl_unread
    (seen,) = read_observations(ResultsFolder(tmp_path), space)
    assert result.nccl_unread is seen.nccl_unread is nccl_unread


def test_the_search_goes_on_from_the_concurrency_that_it_decides_on(tmp_path: Path) -> None:
    spec = stub_spec()
    spec = replace(spec, workload=replace(spec.workload, concurrency=(4, 1)))
    measurement = Measurement(
        HeldEngine(StubEngine()), plan(Space(spec).configurations()[-1], Space(spec)), stub_context(spec, tmp_path)
    )
    reported = []
    while isinstance(result := measurement.advance(), BlockSummary):
        reported.append(result)
    (seen,) = read_observations(ResultsFolder(tmp_path), Space(spec))
    assert seen.blocks == tuple(reported)


@pytest.mark.parametrize(
    ("kind", "drivers", "every", "again"),
    [
        ("crash", 1, False, True),
        ("engine_unavailable", 1, False, True),
        ("crash", 2, False, False),
        ("gpu_oom", 1, False, False),
        ("gpu_oom", 1, True, True),
        ("crash", 2, True, True),
    ],
)
def test_a_failed_trial_is_tried_again_if_its_cause_may_be_gone(
    kind: Kind, drivers: int, tmp_path: Path, *, every: bool, again: bool
) -> None:
    spec = stub_spec()
    space = Space(spec)
    for number in range(drivers):
        engine = StubEngine(failures={"launch": [EngineError("failed", stage="load", kind=kind)]})
        trial = plan(space.configurations()[-1], space, f"t{number:04d}")
        Measurement(HeldEngine(engine), trial, stub_context(spec, tmp_path)).advance()
    seen = list(read_earlier(ResultsFolder(tmp_path), space, retry_failed=every).observations)
    assert [each.kind == "interrupted" for each in seen] == [again] * drivers


def test_trials_of_configurations_that_the_space_no_longer_has_are_left_out(tmp_path: Path) -> None:
    spec = stub_spec()
    space = Space(spec)
    measurement = Measurement(
        HeldEngine(StubEngine()), plan(space.configurations()[-1], space), stub_context(spec, tmp_path)
    )
    while isinstance(measurement.advance(), BlockSummary):
        pass
    smaller = Space(stub_spec(text=_without_ring()))
    assert len(read_observations(ResultsFolder(tmp_path), space)) == 1
    assert len(read_observations(ResultsFolder(tmp_path), smaller)) == 0


def _without_ring() -> str:
    from tests.sweeps.stub_engine import SPEC

    return SPEC.replace("nccl: [default, ring]", "nccl: [default]")
