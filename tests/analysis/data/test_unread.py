from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis.data.load import load
from analysis.data.unread import unread_variables, with_twins
from analysis.judge.factors import FACTOR_METRICS, factors, observe

RECORDED = Path(__file__).parents[3] / "recordings" / "h200_x2_nccl_v1"


def trial(trial_id: str, variables: dict[str, str], **changes: Any) -> dict[str, Any]:
    return {
        "trial_id": trial_id,
        "configuration_id": f"c-{trial_id}",
        "num_steps": 2,
        "eagle_topk": 1,
        "num_draft_tokens": 3,
        "drafter": "mini",
        "acceptance": "measured",
        "args": {},
        "env": {},
        "nccl_env": variables,
        "all_reduce": "nccl",
    } | changes


def evidence(*rows: tuple[str, str, str | None]) -> pl.DataFrame:
    return pl.DataFrame(
        [{"trial_id": trial, "setting": f"env.{name}", "read_by_nccl": read} for trial, name, read in rows],
        schema={"trial_id": pl.String, "setting": pl.String, "read_by_nccl": pl.String},
    )


def frame(*rows: dict[str, Any]) -> pl.DataFrame:
    as_pairs = [{**row, **{name: list(row[name].items()) for name in ("args", "env", "nccl_env")}} for row in rows]
    return pl.DataFrame(as_pairs, schema_overrides=dict.fromkeys(("args", "env", "nccl_env"), pl.Object))


PLAIN = trial("plain", {})
MISSPELT = trial("misspelt", {"NCCL_MAX_NCHANELS": "16"})
SPOKEN = [("misspelt", "NCCL_NVLS_ENABLE", "0"), ("misspelt", "NCCL_MAX_NCHANELS", None)]


def twins(*rows: dict[str, Any], read: pl.DataFrame) -> list[str]:
    return with_twins(frame(*rows), read)["twin"].to_list()


def test_a_set_that_nccl_did_not_read_repeats_the_default() -> None:
    assert twins(PLAIN, MISSPELT, read=evidence(*SPOKEN)) == ["c-plain", "c-plain"]


def test_only_of_the_same_configuration_otherwise() -> None:
    deeper = trial("plain", {}, num_steps=3, num_draft_tokens=4)
    assert twins(deeper, MISSPELT, read=evidence(*SPOKEN)) == ["c-plain", "c-misspelt"]


@pytest.mark.parametrize(("served", "twin"), [("custom", "c-plain"), ("nccl", "c-misspelt"), (None, "c-misspelt")])
def test_a_set_repeats_the_default_where_something_else_does_the_all_reduces(served: str | None, twin: str) -> None:
    read = evidence(("misspelt", "NCCL_MAX_NCHANELS", "16"))
    assert twins(PLAIN, MISSPELT | {"all_reduce": served}, read=read) == ["c-plain", twin]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [("misspelt", "NCCL_MAX_NCHANELS", None)],
        [*SPOKEN, ("misspelt", "NCCL_MAX_NCHANELS", "16")],
    ],
    ids=["no evidence", "NCCL kept no account", "one rank read it"],
)
def test_nothing_is_taken_for_unread_without_proof(rows: list[tuple[str, str, str | None]]) -> None:
    assert unread_variables(frame(PLAIN, MISSPELT), evidence(*rows)) == {}


def test_a_misspelt_variable_of_a_recorded_sweep_is_not_exercised_and_shows_what_launches_differ_by() -> None:
    results = load(RECORDED)
    observed = {metric: observe(results, metric) for metric in FACTOR_METRICS}
    found = [one for one in factors(results, observed) if one.dimension == "nccl" and one.metric == "verify_ms"]
    verdicts = {one.value: one.effect.verdict for one in found if one.effect is not None}
    assert verdicts["misspelt"] == "not exercised"
    assert all(verdict != "better" for verdict in verdicts.values())
    reasons = {one.value: one.effect.reason for one in found if one.effect is not None}
    assert "NCCL_MAX_NCHANELS" in str(reasons["misspelt"])
    repeated = results.trials.filter(pl.col("twin") != pl.col("configuration_id"))
    assert set(repeated.filter(pl.col("all_reduce") == "nccl")["nccl_set"]) == {"misspelt"}
    assert repeated.filter(pl.col("all_reduce") == "custom")["nccl_set"].n_unique() == 6  # all but the default
