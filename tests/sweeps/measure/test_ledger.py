from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.measure.ledger import Ledger
from sweeps.results.tables import ACTIVITIES, Activity

SECONDS = st.floats(min_value=0.0, max_value=1e5)


class Clock:
    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


@given(st.lists(st.tuples(st.sampled_from(ACTIVITIES), SECONDS), max_size=20), st.floats(0, 1e6))
def test_every_second_belongs_to_one_activity(spent: list[tuple[Activity, float]], since_s: float) -> None:
    clock = Clock(since_s)
    ledger = Ledger(clock, since_s=since_s)
    for activity, seconds in spent:
        clock.now_s += seconds
        ledger.charge(activity)
    assert sum(ledger.seconds.values()) == pytest.approx(clock.now_s - since_s)
    assert set(ledger.seconds) == set(ACTIVITIES)


@given(SECONDS, SECONDS, SECONDS)
def test_a_boot_is_split_without_losing_a_second(wall_s: float, weights_s: float, capture_s: float) -> None:
    clock = Clock()
    ledger = Ledger(clock, since_s=0.0)
    clock.now_s = wall_s
    ledger.charge_boot({"launch": 1.0, "weight_load": weights_s, "capture": capture_s})
    assert sum(ledger.seconds.values()) == pytest.approx(wall_s)
    assert all(seconds >= -1e-6 for seconds in ledger.seconds.values())


def test_an_account_shorter_than_the_wall_time_leaves_the_rest_to_launch() -> None:
    clock = Clock()
    ledger = Ledger(clock, since_s=0.0)
    clock.now_s = 100.0
    ledger.charge_boot({"weight_load": 60.0, "capture": 30.0})
    assert {name: spent for name, spent in ledger.seconds.items() if spent} == {
        "launch": pytest.approx(10.0),
        "weight_load": 60.0,
        "capture": 30.0,
    }


def test_unknown_activities_of_a_boot_are_refused() -> None:
    ledger = Ledger(Clock(), since_s=0.0)
    with pytest.raises(ValueError, match="got coffee"):
        ledger.charge_boot({"coffee": 1.0})
