from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.judge.break_even import accept_length_at, accept_length_for, accuracy_for, break_even
from tests.certain import certain

accuracies = st.floats(0.0, 1.0)
steps = st.integers(1, 24)


def enumerated(accuracy: float, num_steps: int) -> float:
    """Mean tokens per cycle from the distribution itself: exactly i drafts accepted, then the bonus token."""
    exactly = [accuracy**i * (1 - accuracy) for i in range(num_steps)] + [accuracy**num_steps]
    return sum(probability * (i + 1) for i, probability in enumerate(exactly))


def test_the_founding_case() -> None:
    answer = break_even(cycle_ms=29.95, baseline_tok_s=82.2, target_tok_s=150.0)
    assert round(answer.accept_length, 2) == 2.46
    assert answer.num_steps == 16
    assert certain(answer.target_accuracy).conditional_accuracy == pytest.approx(0.78, abs=0.005)


@given(accuracies, steps)
def test_accept_length_is_the_mean_of_the_distribution(accuracy: float, num_steps: int) -> None:
    assert accept_length_at(accuracy, num_steps=num_steps) == pytest.approx(enumerated(accuracy, num_steps), rel=1e-9)


@given(st.floats(0.0, 1.0), steps)
def test_accuracy_is_the_inverse_of_accept_length(share: float, num_steps: int) -> None:
    wanted = 1.0 + share * num_steps
    found = accuracy_for(wanted, num_steps=num_steps)
    assert accept_length_at(certain(found.conditional_accuracy), num_steps=num_steps) == pytest.approx(wanted, rel=1e-6)


@given(st.floats(1.0, 200.0), st.floats(1.0, 500.0), steps, accuracies)
def test_faster_than_the_baseline_exactly_above_break_even(
    cycle_ms: float, baseline_tok_s: float, num_steps: int, accuracy: float
) -> None:
    needed = break_even(cycle_ms=cycle_ms, baseline_tok_s=baseline_tok_s, num_steps=num_steps)
    tok_s = 1000 * accept_length_at(accuracy, num_steps=num_steps) / cycle_ms
    if needed.accuracy.conditional_accuracy is None:
        assert tok_s < baseline_tok_s
    elif abs(accuracy - needed.accuracy.conditional_accuracy) > 1e-6:
        assert (tok_s > baseline_tok_s) == (accuracy > needed.accuracy.conditional_accuracy)


def test_out_of_reach_is_null_with_the_numbers() -> None:
    found = accuracy_for(4.4925, num_steps=2)
    assert found.conditional_accuracy is None
    assert "4.49" in certain(found.reason)
    assert "2 draft steps give at most 3" in certain(found.reason)


def test_the_ends_of_the_range() -> None:
    assert accuracy_for(0.7, num_steps=3).conditional_accuracy == 0.0
    assert accuracy_for(4.0, num_steps=3).conditional_accuracy == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("tok_s", "cycle_ms", "name"), [(0.0, 1.0, "tok_s"), (1.0, -2.0, "cycle_ms"), (float("nan"), 1.0, "tok_s")]
)
def test_numbers_that_mean_nothing_are_refused(tok_s: float, cycle_ms: float, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        accept_length_for(tok_s, cycle_ms=cycle_ms)
    with pytest.raises(ValueError, match="num_steps"):
        accuracy_for(2.0, num_steps=0)
