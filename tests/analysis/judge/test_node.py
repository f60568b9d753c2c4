"""A node predicted from one GPU's share: counts as traced, sums as stated, refusals in one line."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from analysis.__main__ import main
from analysis.data.load import load
from analysis.judge.node import Latency, NodeRate, Shape, predict_node
from analysis.judge.phases import communication_ms
from analysis.judge.verdict import verdict

RECORDINGS = Path(__file__).parents[3] / "recordings"
SHARE = RECORDINGS / "kimi_k25_one_of_eight_h200_v1"
KIMI = Shape(layers=61, hidden=7168)
FREE = Latency(nbytes=(0.0,), low_us=(0.0,), high_us=(0.0,), source="no time")
PUBLISHED = {1: 1.83, 2: 2.43, 3: 2.88}


def predicted(latency: Latency) -> dict[int, NodeRate]:
    results = load(SHARE)
    rates = predict_node(results, verdict(results), shape=KIMI, latency=latency, accept_lengths=PUBLISHED)
    return {rate.num_steps: rate for rate in rates}


@pytest.mark.parametrize("num_steps", [1, 3])
def test_collectives_are_counted_as_in_a_trace(num_steps: int) -> None:
    results = load(RECORDINGS / "h200_x2_nccl_v1")
    chains = results.trials.filter((pl.col("num_steps") == num_steps) & (pl.col("all_reduce") == "nccl"))
    traced = results.kernels.filter(pl.col("kind") == "communication")
    calls = (
        traced.join(chains.select("trial_id"), on="trial_id")
        .group_by("trial_id")
        .agg(pl.col("calls_per_cycle").sum())["calls_per_cycle"]
        .to_list()
    )
    shape = Shape(layers=24, hidden=4096)

    assert calls
    assert set(calls) == {shape.forward_collectives + 4.0 * num_steps}


def test_without_communication_a_node_is_its_share() -> None:
    rates = predicted(FREE)

    assert set(rates) == {0, 1, 2, 3}
    for rate in rates.values():
        assert rate.cycle_ms == rate.share_cycle_ms
        assert rate.tok_s == pytest.approx(1000 * rate.accept_length / rate.share_cycle_ms)
        assert rate.interval[0] < rate.tok_s < rate.interval[1]


def test_communication_is_added_by_message_size() -> None:
    by_size = Latency(nbytes=(14336.0, 57344.0), low_us=(8.0, 10.0), high_us=(8.0, 14.0), source="a table")
    rates = predicted(by_size)

    assert rates[0].communication_ms == pytest.approx((124 * 8e-3, 124 * 8e-3))
    forward_and_extend, drafts = 124 + 4, 2 * 4
    assert rates[3].communication_ms == pytest.approx(
        ((forward_and_extend * 10 + drafts * 8) / 1000, (forward_and_extend * 14 + drafts * 8) / 1000)
    )
    assert rates[3].interval[0] < predicted(FREE)[3].interval[0]


def test_a_share_of_two_gpus_loses_its_own_communication() -> None:
    results = load(RECORDINGS / "h200_x2_nccl_v1")
    judged = verdict(results)
    rates = predict_node(results, judged, shape=Shape(layers=24, hidden=4096), latency=FREE, accept_lengths={})
    plain = next(each for each in judged.phases if not each.speculates)
    own_ms = communication_ms(results, plain.configuration_id)

    assert own_ms is not None
    assert plain.cycle_ms is not None
    assert rates[0].share_cycle_ms == pytest.approx(plain.cycle_ms - own_ms)


def test_the_command_says_what_it_assumes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", str(SHARE), "--all-reduce-us", "8", "13", "--accept-length", "1.83", "2.43"]

    assert main(words) == 0
    said = capsys.readouterr().out
    assert "Nothing here was measured on such a node." in said
    assert "8 to 13 us, as stated" in said
    assert "| 2 | 2.43 |" in said
    assert main([*words, "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [each["num_steps"] for each in document["predicted"]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--all-reduce-us", "8"], "--accept-length: needed, because the recorded accept length was pinned"),
        (["--all-reduce-us", "9", "8", "--accept-length", "1.5"], "--all-reduce-us: wanted one positive figure"),
        (["--all-reduce-us", "8", "--accept-length", "2.5"], "1 steps give 1 to 2 tokens a cycle, got 2.5"),
        (["--all-reduce-table", "/nowhere", "--accept-length", "1.5"], "/nowhere/allreduce.parquet does not exist"),
        (
            ["--all-reduce-table", str(RECORDINGS / "nccl_allreduce_h200_x2"), "--accept-length", "1.5"],
            "timed with 2 GPUs, but --gpus is 8",
        ),
    ],
)
def test_what_cannot_be_predicted_is_one_line(
    words: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(SHARE), *words]) == 2
    said = capsys.readouterr().err
    assert wanted in said
    assert said.count("\n") == 1


def test_a_measured_table_gives_the_latency(capsys: pytest.CaptureFixture[str]) -> None:
    table = str(RECORDINGS / "nccl_allreduce_h200_x2")
    words = ["predict", str(SHARE), "--all-reduce-table", table, "--gpus", "2", "--accept-length", "1.83"]

    assert main(words) == 0
    assert "10th to 90th percentile" in capsys.readouterr().out
    assert main([*words, "--nccl-set", "nothing"]) == 2
    assert "the sets are" in capsys.readouterr().err
