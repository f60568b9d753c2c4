from __future__ import annotations

from dataclasses import replace

import pytest

from analysis.judge.break_even import accept_length_at
from analysis.judge.phases import Phases
from analysis.judge.what_if import ms_to_break_even, savings, step_needs
from tests.certain import certain


def cycle(num_steps: int, *, verify_ms: float = 28.0, accept_length: float = 1.8) -> Phases:
    draft_ms, extend_ms = 0.5 * num_steps, 0.5
    cycle_ms = draft_ms + verify_ms + extend_ms
    return Phases(
        configuration_id=f"c{num_steps}",
        label=f"steps {num_steps}",
        speculates=True,
        num_steps=num_steps,
        draft_ms=draft_ms,
        verify_ms=verify_ms,
        extend_ms=extend_ms,
        gap_ms=0.0,
        cycle_ms=cycle_ms,
        decode_ms=None,
        verify_share=verify_ms / cycle_ms,
        accept_length=accept_length,
        tok_s=1000 * accept_length / cycle_ms,
    )


def test_a_millisecond_is_worth_the_same_wherever_it_is_saved() -> None:
    today = cycle(4)
    worth = {saving.phase: saving.tok_s_1ms_less for saving in savings(today)}
    assert worth["verify"] == worth["draft"] == pytest.approx(1000 * 1.8 / (certain(today.cycle_ms) - 1))
    assert worth["extend"] is None  # shorter than a millisecond
    assert [saving.phase for saving in savings(today)] == ["verify", "draft", "extend"]


def test_the_milliseconds_to_break_even_break_even() -> None:
    today = cycle(2)
    missing = certain(ms_to_break_even(today, baseline_tok_s=82.2))
    assert 1000 * certain(today.accept_length) / (certain(today.cycle_ms) - missing) == pytest.approx(82.2)
    assert certain(ms_to_break_even(today, baseline_tok_s=30.0)) < 0


def test_steps_that_did_not_run_take_their_cycle_from_the_line() -> None:
    needs = step_needs([cycle(1), cycle(2), cycle(5)], baseline_tok_s=82.2, target_tok_s=150.0)
    assert [need.num_steps for need in needs] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [need.num_steps for need in needs if need.estimated] == [3, 4, 6, 7, 8]
    assert needs[2].cycle_ms == pytest.approx(30.0)
    assert needs[2].accept_length_today is None
    assert needs[0].break_even.conditional_accuracy is None  # two tokens at most, 2.38 needed
    accuracy = certain(certain(needs[-1].target).conditional_accuracy)
    reached = accept_length_at(accuracy, num_steps=8)
    assert 1000 * reached / needs[-1].cycle_ms == pytest.approx(150.0)


def test_more_steps_are_never_estimated_cheaper() -> None:
    slower, faster = (replace(cycle(steps), cycle_ms=cycle_ms) for steps, cycle_ms in ((1, 5.0), (3, 4.9)))
    needs = step_needs([slower, faster], baseline_tok_s=82.2, target_tok_s=None)
    assert [need.cycle_ms for need in needs if need.estimated] == pytest.approx([4.95] * 4)


@pytest.mark.parametrize("cycles_ms", [(6.7, 9.4, 5.5), (5.0, 4.6), (5.0, 5.1, 6.4)])
def test_nothing_is_estimated_by_points_that_are_not_on_a_line(cycles_ms: tuple[float, ...]) -> None:
    chain = [replace(cycle(steps), cycle_ms=cycle_ms) for steps, cycle_ms in enumerate(cycles_ms, start=1)]
    needs = step_needs(chain, baseline_tok_s=82.2, target_tok_s=None)
    assert [need.num_steps for need in needs] == list(range(1, len(cycles_ms) + 1))
    assert not any(need.estimated for need in needs)


def test_one_step_count_gives_no_line() -> None:
    [only] = step_needs([cycle(2)], baseline_tok_s=82.2, target_tok_s=None)
    assert only.target is None
    assert not only.estimated
    assert step_needs([], baseline_tok_s=82.2, target_tok_s=None) == ()
