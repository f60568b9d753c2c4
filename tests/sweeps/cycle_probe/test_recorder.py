"""The probe's arithmetic, without a server: the probe's folder is put on the path as the server does it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.engines.evidence import WATCHED

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True, scope="module")
def _probe_on_path() -> Iterator[None]:
    sys.path.insert(0, str(ROOT / "sweeps" / "cycle_probe"))
    yield
    sys.path.remove(str(ROOT / "sweeps" / "cycle_probe"))


class StepClock:
    """Every mark is the next of the given times, in ms; a mark may be released once only."""

    kind = "host"

    def __init__(self, times_ms: list[float]) -> None:
        self._times = iter(times_ms)
        self.released: list[tuple[int, float]] = []
        self._count = 0

    def mark(self) -> tuple[int, float]:
        self._count += 1
        return (self._count, next(self._times))

    def elapsed_ms(self, start: tuple[int, float], end: tuple[int, float]) -> float:
        return end[1] - start[1]

    def is_done(self, mark: Any) -> bool:
        return True

    def release(self, marks: Any) -> None:
        self.released += marks


def record_cycle(recorder: Any, *, tokens: int | None = None) -> None:
    mark = recorder.clock.mark
    cycle = recorder.begin(1)
    cycle.draft_end = mark()
    cycle.verify_start = mark()
    cycle.forward_start = mark()
    cycle.forward_end = mark()
    cycle.verify_end = mark()
    cycle.extend_start = mark()
    cycle.extend_end = cycle.end = mark()
    recorder.end(cycle, num_steps=2, tokens=tokens)


def test_phases_and_gap_of_two_cycles_that_follow_each_other() -> None:
    from specsweep_probe.recorder import Recorder

    recorder = Recorder(StepClock([0, 1, 2, 3, 6, 7, 8, 9, 12, 13, 14, 15, 18, 19, 20, 21]))
    record_cycle(recorder)
    record_cycle(recorder)
    recorder.tell(3)
    recorder.tell(1)

    columns = recorder.take()["cycles"]

    assert columns["cycle_ms"] == [12, 9], "to the start of the next; the last to its own end"
    assert columns["draft_ms"] == [1, 1]
    assert columns["verify_ms"] == [5, 5]
    assert columns["verify_forward_ms"] == [3, 3]
    assert columns["extend_ms"] == [1, 1]
    assert columns["gap_ms"] == [5, 2]
    assert columns["tokens"] == [3, 1]


def test_prefill_between_two_cycles_is_in_neither() -> None:
    from specsweep_probe.recorder import Recorder

    recorder = Recorder(StepClock([0, 1, 2, 3, 6, 7, 8, 9, 500, 501, 502, 503, 506, 507, 508, 509]))
    record_cycle(recorder, tokens=1)
    recorder.interrupt()
    record_cycle(recorder, tokens=1)

    assert recorder.take()["cycles"]["cycle_ms"] == [9, 9]


@given(st.lists(st.floats(0, 10), min_size=8, max_size=80), st.integers(1, 4))
def test_phases_add_up_and_every_mark_is_released_once(deltas: list[float], limit: int) -> None:
    from specsweep_probe import recorder as module

    count = len(deltas) // 8
    times = [sum(deltas[: number + 1]) for number in range(count * 8)]
    clock = StepClock(times)
    patch = pytest.MonkeyPatch()
    patch.setattr(module, "PENDING_LIMIT", limit)
    with patch.context():
        recorder = module.Recorder(clock)
        for _ in range(count):
            record_cycle(recorder, tokens=1)
        columns = recorder.take()["cycles"]
    patch.undo()

    assert len(columns["cycle_ms"]) == count
    for number in range(count):
        parts = sum(columns[name][number] for name in ("draft_ms", "verify_ms", "extend_ms", "gap_ms"))
        assert parts == pytest.approx(columns["cycle_ms"][number], abs=1e-9)
    assert len(clock.released) == len(set(clock.released)) == count * 8


def test_results_beyond_the_limit_are_counted_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    from specsweep_probe import recorder as module

    monkeypatch.setattr(module, "RESULT_LIMIT", 1)
    recorder = module.Recorder(StepClock([float(number) for number in range(16)]))
    record_cycle(recorder, tokens=1)
    record_cycle(recorder, tokens=1)

    assert recorder.take()["dropped"] == 1
    assert recorder.take()["dropped"] == 0


def test_forgotten_cycles_do_not_come_back() -> None:
    from specsweep_probe.recorder import Recorder

    recorder = Recorder(StepClock([float(number) for number in range(8)]))
    record_cycle(recorder, tokens=1)
    recorder.forget()

    assert recorder.take()["cycles"]["cycle_ms"] == []


@pytest.mark.parametrize("version", ["0.5.16", "0.5.17", "0.5.21", "0.5.23", "0.5.21+cpu"])
def test_known_versions_have_targets_without_a_warning(version: str) -> None:
    from specsweep_probe.targets import targets_for

    assert targets_for(version)[1] is None


def test_unknown_version_is_tried_with_a_warning() -> None:
    from specsweep_probe.targets import BY_VERSION, targets_for

    targets, warning = targets_for("0.6.0")

    assert targets == BY_VERSION["0.5.23"]
    assert warning is not None
    assert "0.6.0" in warning


def test_probe_reports_what_the_evidence_watches() -> None:
    from specsweep_probe.control import WATCHED as REPORTED

    assert REPORTED == WATCHED


def test_probe_is_found_as_a_plugin_through_its_folder() -> None:
    import importlib.metadata

    (found,) = importlib.metadata.entry_points(group="sglang.srt.plugins")

    assert found.value == "specsweep_probe:register"
    assert callable(found.load())
