"""What a table says of each set: two recorded H200 first, then small made-up tables, with and without NCCL's choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ray_jobs.allreduce.by_launches import launch_noise
from ray_jobs.allreduce.display import render
from ray_jobs.allreduce.set_rows import DEFAULT_AGAIN
from ray_jobs.allreduce.verdict import judge_sets

RECORDED = Path(__file__).parents[3] / "recordings/nccl_allreduce_h200_x2/allreduce.parquet"
CHOICE = {"algorithm": "Ring", "protocol": "LL", "channels": 4, "transports": ["P2P/IPC"], "unread": [], "env": {}}


@pytest.fixture(scope="module")
def recorded() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(RECORDED).to_pylist()
    return rows


def verdicts(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {verdict.name: verdict.verdict for verdict in judge_sets(rows)}


def test_on_two_h200_nothing_is_faster_than_nccls_own_choice(recorded: list[dict[str, Any]]) -> None:
    assert verdicts(recorded) == {
        "ll-ring": "same",
        "simple": "slower",
        "ll128": "slower",
        "p2p-off": "slower",
        "founding-six": "same",
        "misspelt": "same",
        "LL": "same",
        "Ring": "same",
        "Tree": "slower",
    }
    assert launch_noise(recorded) == pytest.approx(12.962 / 11.885 - 1, abs=0.01)
    details = {verdict.name: verdict.detail for verdict in judge_sets(recorded)}
    assert details["misspelt"] == "NCCL makes its default choice; launches of the default differ by up to 9.8%"
    assert details["founding-six"].startswith("NCCL makes its default choice at 1, 2, 3, 4, 6, 8 tok;")


@pytest.mark.parametrize("kept", ["misspelt", "LL", "founding-six", "Ring"])
def test_one_set_alone_against_two_launches_of_the_default_is_not_faster_either(
    recorded: list[dict[str, Any]], kept: str
) -> None:
    few = [one for one in recorded if one["set"] in ("default", DEFAULT_AGAIN, kept, "simple")]
    assert verdicts(few) == {kept: "same", "simple": "slower"}


def test_the_printed_sentence_names_only_what_could_matter(recorded: list[dict[str, Any]]) -> None:
    console = Console(width=200, record=True)
    render(recorded, console)
    printed = console.export_text()
    assert "Launches with NCCL's default choice differ by up to 9.8%; smaller differences are noise." in printed
    assert "Sets that could matter: simple, ll128, p2p-off, Tree." in printed


def row(name: str, median: float, *, spread: float = 0.01, mode: str = "graph", tokens: int = 3) -> dict[str, Any]:
    return {
        "set": name,
        "outcome": "ok",
        "reason": None,
        "mode": mode,
        "tokens": tokens,
        "us_median": median,
        "us_p10": median * (1 - spread),
        "us_p90": median * (1 + spread),
    }


@given(base=st.floats(5, 500), factor=st.floats(0.2, 5), spread=st.floats(0, 0.3))
def test_a_set_could_matter_only_where_the_spreads_are_apart(base: float, factor: float, spread: float) -> None:
    (verdict,) = judge_sets([row("default", base, spread=spread), row("x", base * factor, spread=spread)])
    apart = max(factor, 1 / factor) > (1 + spread) / (1 - spread) * 1.0001 and abs(factor - 1) > 0.0301
    meet = max(factor, 1 / factor) < (1 + spread) / (1 - spread) * 0.9999 or abs(factor - 1) < 0.0299
    if apart:
        assert verdict.verdict == ("faster" if factor < 1 else "slower")
        assert verdict.gain_us[3] == pytest.approx(base - base * factor)
    if meet:
        assert verdict.verdict == "same"
        assert not verdict.could_matter


def test_what_differs_between_two_launches_of_the_default_is_noise() -> None:
    rows = [row("default", 20.0), row("x", 24.0)]
    assert judge_sets(rows)[0].verdict == "slower"
    assert judge_sets([*rows, row(DEFAULT_AGAIN, 25.0)])[0].verdict == "same"


def test_graph_replay_is_judged_where_it_was_measured() -> None:
    eager = [row("default", 20.0, mode="eager"), row("x", 40.0, mode="eager")]
    assert judge_sets(eager)[0].verdict == "slower"
    assert judge_sets([*eager, row("default", 20.0), row("x", 20.0)])[0].verdict == "same"


def test_a_set_that_failed_at_any_size_is_never_called_faster() -> None:
    bad = {**row("x", 1.0, tokens=4), "outcome": "wrong_output", "reason": "sum is wrong"}
    (verdict,) = judge_sets([row("default", 20.0), row("x", 1.0), bad])
    assert verdict.verdict == "failed"
    assert not verdict.could_matter


def launches(*medians_us: float, **seen: Any) -> list[dict[str, Any]]:
    """The default, then sets `a`, `b`, ... that NCCL reads nothing of, as it logged its choice for them."""
    names = ["default", *"abcdefg"]
    return [{**row(name, median), **CHOICE, **seen} for name, median in zip(names, medians_us, strict=False)]


def other(median: float, **seen: Any) -> dict[str, Any]:
    return {**row("x", median), **CHOICE, **seen}


@pytest.mark.parametrize(
    "differs", [{"algorithm": "Tree"}, {"protocol": "Simple"}, {"channels": 8}, {"transports": ["SHM/direct/direct"]}]
)
def test_another_choice_must_differ_by_more_than_launches_of_the_same_choice(differs: dict[str, Any]) -> None:
    same = launches(20, 20, 20, 25, 25)
    assert launch_noise(same) == pytest.approx(0.25)
    assert verdicts([*same, other(27.0, **differs)])["x"] == "same"
    assert verdicts([*same, other(29.0, **differs)])["x"] == "slower"
    assert verdicts([*same, other(15.0, **differs)])["x"] == "faster"


def test_few_launches_are_no_measure_of_their_noise_but_many_are() -> None:
    moved = other(21.5, protocol="Simple")
    assert verdicts([*launches(20, 20, 20, 20), moved])["x"] == "same"
    assert verdicts([*launches(20, 20, 20, 20, 20), moved])["x"] == "slower"


def test_an_equal_choice_is_the_same_launch_unless_a_variable_may_act_behind_it() -> None:
    same = launches(20, 20, 20, 20, 20)
    assert verdicts([*same, other(30.0, env={"NCCL_PROTO": "LL"})])["x"] == "same"
    threads = {"NCCL_NTHREADS": "64"}
    assert verdicts([*same, other(30.0, env=threads)])["x"] == "slower"
    assert verdicts([*same, other(21.5, env=threads)])["x"] == "same"
    assert verdicts([*same, other(30.0, env={"NCCL_NTREADS": "64"}, unread=["NCCL_NTREADS"])])["x"] == "same"
    assert launch_noise([*same, other(30.0, env=threads)]) == 0.0


def test_a_set_whose_choice_is_not_known_is_judged_by_the_noise_of_those_that_are() -> None:
    unknown = {**row("x", 24.0), **CHOICE, "algorithm": None}
    assert verdicts([*launches(20, 20, 20, 20, 20), unknown])["x"] == "slower"
    assert verdicts([*launches(20, 20, 20, 25, 20), unknown])["x"] == "same"


def test_without_any_choice_the_spreads_alone_decide() -> None:
    blind = launches(20, 20, 20, 20, 20, algorithm=None)
    assert launch_noise(blind) is None
    assert verdicts([*blind, other(21.0, algorithm=None)])["x"] == "slower"
