"""What-if claims against recorded sweeps: which stand, and what is left out of them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.record import figures_of
from benchmarks.what_if import MINIATURE, figures, trials_of, wrong_texts


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return figures()


def test_the_record_is_that_of_the_recordings(found: dict[str, Any]) -> None:
    recorded = figures_of("what_if")

    assert recorded.keys() == found.keys()
    for name, claim in found.items():
        if isinstance(claim, dict):
            assert recorded[name]["largest_error"] == pytest.approx(claim["largest_error"], rel=1e-4)  # type: ignore[index]


def test_only_the_state_with_another_text_is_left_out() -> None:
    wrong = wrong_texts(MINIATURE)

    assert wrong == {"t0009"}
    (trial,) = [each for each in trials_of(MINIATURE) if each.facts["trial_id"] in wrong]
    assert (trial.facts["num_steps"], trial.facts["eagle_topk"]) == (4, 1)
    assert max(block["accept_length"] for block in trial.blocks) < 1.1


def test_throughput_at_another_accept_length_holds_at_one_request(found: dict[str, Any]) -> None:
    claim = found["another accept length, 1 at a time"]

    assert claim["predictions"] > 30
    assert claim["median_error"] < 0.02
    assert claim["largest_error"] < 0.08
    assert claim["within_2_percent"] > 0.6 * claim["predictions"]


def test_it_is_too_high_where_requests_of_a_wave_end_apart(found: dict[str, Any]) -> None:
    rows = found["another accept length, 4 at a time"]["rows"]

    assert all(row["error"] > 0 for row in rows)
    assert max(row["error"] for row in rows) > 0.2


def test_it_falls_across_launches_of_a_model_that_waits_for_its_host(found: dict[str, Any]) -> None:
    assert found["pinned length from cycles of another sweep"]["within_2_percent"] == 0


def test_longest_chain_tells_the_accept_lengths_of_the_shorter(found: dict[str, Any]) -> None:
    claim = found["shorter chains from the longest"]

    assert [row["num_steps"] for row in claim["rows"]] == [1, 2, 3, 5]
    assert claim["largest_error"] < 0.01


def test_good_drafter_is_predicted_from_the_poor_ones_cycles(found: dict[str, Any]) -> None:
    errors = {row["num_steps"]: row["error"] for row in found["another drafter, 1 at a time"]["rows"]}

    assert max(abs(errors[steps]) for steps in (1, 2, 3, 5)) < 0.02
    assert -0.09 < errors[7] < -0.02, "far beyond the two step counts that the line was drawn through"
