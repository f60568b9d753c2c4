"""Paired verdicts on simulated tables: communicators differ steadily, rounds a little, the machine drifts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rich.console import Console

from ray_jobs.allreduce.display import render
from ray_jobs.allreduce.paired import MAX_COMMUNICATOR_DIFFERENCE, differences, spread_of_communicators
from ray_jobs.allreduce.verdict import judge_sets, noise_sentence

TOKENS = (1, 4, 16)
CHOICE = {"algorithm": "Ring", "protocol": "LL", "channels": 4, "transports": ["P2P/IPC"]}


def table(
    seed: int,
    effects: dict[str, float],
    *,
    copies: int = 7,
    copies_of_sets: int = 1,
    communicator: float = 0.0,
    modes: float = 0.0,
    drift: float = 0.0,
    rounds: int = 10,
) -> list[dict[str, Any]]:
    """Rows of the default and of one set for each effect (share of the default's time).

    Args:
        communicator: standard deviation of a communicator's time, the same at all sizes; half as much at each.
        modes: by how much a communicator in the slower of two equally likely modes takes longer.
        drift: of the whole machine, from the first round to the last.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for name, effect in {"default": 0.0, **effects}.items():
        for copy in range(copies if name == "default" else copies_of_sets):
            own = rng.normal(0.0, communicator) + modes * rng.integers(2)
            for tokens in TOKENS:
                place = own + rng.normal(0.0, communicator / 2)
                noise = rng.normal(0.0, 0.002, rounds) + np.linspace(0.0, drift, rounds)
                us = 20.0 * (1 + effect) * np.exp(place + noise)
                rows.append(
                    {
                        "set": name,
                        "copy": copy,
                        "env": {},
                        "backend": "nccl",
                        "world_size": 2,
                        "outcome": "ok",
                        "reason": None,
                        "mode": "graph",
                        "tokens": tokens,
                        "us_median": float(np.median(us)),
                        "us_p10": float(us.min()),
                        "us_p90": float(us.max()),
                        "rounds": list(range(rounds)),
                        "round_us": us.tolist(),
                    }
                )
    return rows


def claims(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {verdict.name: verdict.verdict for verdict in judge_sets(rows) if verdict.could_matter}


@pytest.mark.parametrize(
    "spread", [{"communicator": 0.003}, {"communicator": 0.03}, {"modes": 0.10, "communicator": 0.005}]
)
@pytest.mark.parametrize("copies", [2, 7])
def test_sets_without_an_effect_are_not_called_one(spread: dict[str, Any], copies: int) -> None:
    nulls = dict.fromkeys("abcde", 0.0)
    tables, false = 60, 0
    for seed in range(tables):
        false += len(claims(table(seed, nulls, copies=copies, drift=0.05, **spread)))
    assert false / (tables * len(nulls)) <= 0.02


def test_two_percent_are_found_if_communicators_differ_by_less() -> None:
    found = [claims(table(seed, {"x": 0.02, "null": 0.0}, communicator=0.002, drift=0.05)) for seed in range(40)]
    assert sum(each.get("x") == "slower" for each in found) >= 38
    found = [claims(table(seed, {"x": -0.02, "null": 0.0}, communicator=0.002)) for seed in range(40)]
    assert sum(each.get("x") == "faster" for each in found) >= 38


def test_drift_cancels_in_paired_differences() -> None:
    still, moved = (differences(table(1, {"x": 0.02}, drift=drift))["x"][4] for drift in (0.0, 0.3))
    assert moved.share == pytest.approx(still.share, abs=1e-9)
    assert moved.share == pytest.approx(0.02, abs=0.002)
    assert moved.half_width == pytest.approx(still.half_width, rel=1e-6)
    assert 0.0005 < moved.half_width < 0.004


def test_no_difference_below_that_of_two_copies_is_an_effect() -> None:
    rows = table(3, {"x": 0.05}, copies=8)
    assert claims(rows) == {"x": "slower"}
    slow = [{**row, "round_us": [us * 1.06 for us in row["round_us"]]} if row["copy"] == 7 else row for row in rows]
    assert claims(slow) == {}
    spread = spread_of_communicators(slow)
    assert spread is not None
    assert spread.largest == pytest.approx(0.06, abs=0.005)


def test_few_communicators_show_large_effects_only() -> None:
    rows = table(4, {"simple": 0.6, "small": 0.1}, copies=2)
    assert claims(rows) == {"simple": "slower"}
    assert noise_sentence(rows) is not None
    assert f"no difference below {MAX_COMMUNICATOR_DIFFERENCE:.0%} is called an effect" in (noise_sentence(rows) or "")
    assert "--copies 7" in (noise_sentence(rows) or "")
    assert noise_sentence(table(4, {"x": 0.1}, copies=1)) is None


def test_sets_that_choose_as_the_default_are_further_copies_of_it() -> None:
    names = dict.fromkeys("abcdef", 0.0)
    rows = [{**row, **CHOICE, "unread": []} for row in table(5, {**names, "x": 0.03}, copies=1, communicator=0.002)]
    moved = [{**row, "protocol": "LL128"} if row["set"] == "x" else row for row in rows]
    assert claims(moved) == {"x": "slower"}
    (verdict, *_) = judge_sets(moved)
    assert (verdict.verdict, verdict.detail) == ("same", "NCCL makes its default choice")


def test_an_equal_choice_is_no_effect_unless_a_variable_may_act_behind_it() -> None:
    rows = [{**row, **CHOICE, "unread": []} for row in table(6, {"x": 0.3})]
    assert claims(rows) == {}
    threads = [{**row, "env": {"NCCL_NTHREADS": "64"}} if row["set"] == "x" else row for row in rows]
    assert claims(threads) == {"x": "slower"}


def test_a_set_that_failed_in_any_copy_has_failed_and_a_lost_default_is_told() -> None:
    rows = table(7, {"x": 0.5}, copies=2)
    hang = {"set": "x", "copy": 1, "outcome": "hang", "reason": "no end after 30 s"}
    assert [verdict.verdict for verdict in judge_sets([*rows, hang])] == ["failed"]
    alone = [row for row in rows if row["set"] != "default"]
    assert [verdict.verdict for verdict in judge_sets(alone)] == ["no default to compare with"]


def test_rounds_of_a_second_group_are_paired_among_themselves() -> None:
    first = table(8, {"x": 0.02})
    second = [
        {
            **row,
            "copy": row["copy"] + 7,
            "rounds": [number + 10 for number in row["rounds"]],
            "round_us": [us * 1.2 for us in row["round_us"]],
        }
        for row in table(9, {"x": 0.02})
    ]
    difference = differences([*first, *second])["x"][4]
    assert difference.share == pytest.approx(0.02, abs=0.003)
    assert claims([*first, *second]) == {"x": "slower"}


def test_the_printed_table_names_copies_and_intervals() -> None:
    console = Console(width=200, record=True)
    render(table(10, {"simple": 0.6}, copies=2), console)
    printed = console.export_text()
    assert "default #2" in printed
    assert "+59." in printed or "+60." in printed
    assert " +- 0." in printed
    assert "Communicators with equal variables differ by up to" in printed
    assert "Sets that could matter: simple." in printed
