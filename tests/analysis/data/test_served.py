"""Who served the all-reduces: by the trace, where the trials table says something else."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from analysis.data.load import load
from analysis.data.served import corrections, served_by, with_served
from analysis.judge.factors import FACTOR_METRICS, factors, observe

RECORDED = Path(__file__).parents[3] / "recordings" / "h200_x2_nccl_v1"
NCCL, OWN = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "{anonymous}::all_reduce_kernel"


def kernels(*rows: tuple[str, str, str]) -> pl.DataFrame:
    return pl.DataFrame(
        [
            {"trial_id": trial, "phase": phase, "kernel": kernel, "calls_per_cycle": 49.0}
            for trial, phase, kernel in rows
        ]
    )


def trials(*rows: tuple[str, str, str | None]) -> pl.DataFrame:
    return pl.DataFrame(
        rows, schema={"trial_id": pl.String, "launch": pl.String, "all_reduce": pl.String}, orient="row"
    )


def test_only_all_reduces_of_the_targets_forward_count() -> None:
    seen = served_by(
        kernels(
            ("a", "verify", NCCL),
            ("a", "verify", OWN),
            ("b", "verify", OWN),
            ("b", "verify", "ncclDevKernel_AllGather_RING_LL"),
            ("c", "extend", NCCL),
        )
    )
    assert dict(seen.sort("trial_id").iter_rows()) == {"a": "nccl", "b": OWN}


def test_one_traced_trial_corrects_its_whole_launch_and_no_other() -> None:
    stated = trials(("a", "one", "nccl"), ("b", "one", "nccl"), ("c", "two", "nccl"), ("d", "three", None))
    corrected = with_served(stated, kernels(("b", "verify", OWN)))

    assert dict(corrected.select("trial_id", "all_reduce").iter_rows()) == {
        "a": "custom",
        "b": "custom",
        "c": "nccl",
        "d": None,
    }
    (line,) = corrections(stated, corrected)
    assert line.startswith(f"1 servers: table `trials` says NCCL did the all-reduces, but the trace shows `{OWN}`.")


def test_what_the_table_says_of_another_backend_stays() -> None:
    stated = trials(("a", "one", "flashinfer"))
    corrected = with_served(stated, kernels(("a", "verify", "allreduce_fusion_kernel_oneshot_lamport")))

    assert corrected["all_reduce"].to_list() == ["flashinfer"]
    assert corrections(stated, corrected) == []


def test_a_trace_with_nccls_all_reduce_corrects_the_table_too() -> None:
    stated = trials(("a", "one", "custom"), ("b", "two", None), ("c", "three", "nccl_symmetric"))
    corrected = with_served(stated, kernels(("a", "verify", NCCL), ("b", "verify", OWN), ("c", "verify", NCCL)))

    assert corrected["all_reduce"].to_list() == ["nccl", "custom", "nccl_symmetric"]
    assert corrections(stated, corrected) == [
        "1 servers: table `trials` says custom did the all-reduces, but the trace shows NCCL. NCCL settings may have "
        "had an effect in those servers"
    ]


def test_on_two_h200_nccl_settings_did_not_act_beside_the_custom_all_reduce() -> None:
    results = load(RECORDED)
    custom = {
        row["all_reduce"]
        for row in results.trials.iter_rows(named=True)
        if dict(row["args"])["disable-custom-all-reduce"] == "False"
    }
    observed = {metric: observe(results, metric) for metric in FACTOR_METRICS}
    found = [factor for factor in factors(results, observed) if factor.dimension == "nccl"]

    assert custom == {"custom"}
    assert all(
        "custom does the all-reduces of decode" in str(factor.note) for factor in found if factor.value != "misspelt"
    )
    assert {factor.effect.verdict for factor in found if factor.value == "misspelt" and factor.effect} == {
        "not exercised"
    }
