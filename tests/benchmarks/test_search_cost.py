"""The short benchmark, asserted with margin: shares and ratios of simulated seconds, no time of this machine."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from benchmarks.landscapes import LANDSCAPES, Landscape, Replay
from benchmarks.policies import POLICIES as ALL_POLICIES
from benchmarks.policies import Policy, Run, oracle_s, run_policy
from benchmarks.search_cost import OURS, OURS_WITH_TABLE, gather, lines, not_available, renewed, summarise
from sweeps.spec.model import Choice
from sweeps.spec.space import Space

NAMES = ("pcie-eagle3", "h200-48", "broken-accept-nccl")
POLICIES = ("tpe+halving", OURS)
SEEDS = 3


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    *_, results = gather(NAMES, dict.fromkeys(POLICIES, SEEDS))
    return summarise(NAMES, POLICIES, results)


def test_ours_is_a_small_part_of_the_grid(figures: dict[str, Any]) -> None:
    assert figures["landscapes"]["pcie-eagle3"]["grid_over_ours"] > 40
    assert figures["landscapes"]["h200-48"]["grid_over_ours"] > 6


def test_ours_beats_the_others_and_is_near_the_oracle(figures: dict[str, Any]) -> None:
    assert figures["landscapes"]["pcie-eagle3"]["best_other_over_ours"] > 2
    assert figures["landscapes"]["pcie-eagle3"]["ours_over_oracle"] < 2.5
    broken = figures["landscapes"]["broken-accept-nccl"]
    assert broken["best_other_over_ours"] is None or broken["best_other_over_ours"] > 0.8


def test_nothing_beats_an_oracle(figures: dict[str, Any]) -> None:
    for name, entry in figures["landscapes"].items():
        assert entry["oracle_s"] == oracle_s(LANDSCAPES[name])
        for policy in entry["policies"]["switch_in_place"].values():
            assert policy["median_s"] is None or policy["median_s"] > 0.98 * entry["oracle_s"]


def test_landscapes_that_were_run_again_replace_their_own(figures: dict[str, Any]) -> None:
    *_, results = gather(("h200-48",), dict.fromkeys(POLICIES, 1))
    again = renewed(figures, summarise(("h200-48",), POLICIES, results))
    assert again["landscapes"]["pcie-eagle3"] == figures["landscapes"]["pcie-eagle3"]
    assert again["seeds"] == dict.fromkeys(POLICIES, 1)
    assert again["certificate_where_assumptions_hold"]["certified"] == SEEDS * 2 + 2
    assert renewed(figures, figures) == figures


def test_what_is_certified_is_right(figures: dict[str, Any]) -> None:
    certificate = figures["certificate_where_assumptions_hold"]
    assert certificate["certified"] == SEEDS * 2 * 2
    assert certificate["certified_over_2_percent"] == 0.0
    assert certificate["certified_within_1_percent"] > 0.8


def test_switch_and_model_are_told_apart(figures: dict[str, Any]) -> None:
    arms = figures["landscapes"]["h200-48"]["policies"]
    assert arms["switch_in_place"][OURS]["launches_median"] <= arms["relaunch"][OURS]["launches_median"]


def test_policies_that_cannot_run_are_named(figures: dict[str, Any]) -> None:
    assert figures["not_run"]["tpe"] == "was not asked for"
    assert OURS not in figures["not_run"]
    assert set(not_available()) <= {"gp"}
    assert figures["seeds"] == dict.fromkeys(POLICIES, SEEDS)
    assert len(lines(figures)) == len(NAMES) + len(figures["not_run"]) + 1


def test_within_is_when_the_incumbent_comes_to_stay() -> None:
    run = Run(
        times_s=(1.0, 2.0, 3.0, 4.0),
        shortfalls=(0.0, 0.05, 0.005, 0.0),
        ended_s=5.0,
        stop_reason="",
        certified=False,
        withdrawn=0,
        best_pruned=False,
        suggest_ms=(),
        prune_ms=(),
        findings=0,
        trials=4,
        launches=4,
    )
    assert run.within_s() == 3.0
    assert run.within_s(0.001) == 4.0
    assert run.final == 0.0


@pytest.mark.parametrize("name", LANDSCAPES)
def test_landscapes_are_readable_specs(name: str) -> None:
    landscape = LANDSCAPES[name]
    assert landscape.spec.control.every == 0
    assert isinstance(landscape, Replay) or landscape.profile.name == landscape.machine


def test_a_recorded_sweep_is_a_landscape() -> None:
    landscape = LANDSCAPES["h200-replay"]
    run = run_policy(landscape, Policy(Choice(name="grid")), seed=0, switch_in_place=True)
    values = landscape.truth(0)
    assert len(values) == len(Space(landscape.spec).configurations())
    assert run.trials > len(values)
    assert run.final == 0.0
    assert run.ended_s > landscape.launch_s(max(values, key=values.__getitem__))


class Misled(Landscape):
    """Its table says the opposite of what its NCCL does."""

    def all_reduce_table(self, seed: int) -> pa.Table | None:
        table = super().all_reduce_table(seed)
        assert table is not None
        at = table.schema.get_field_index("us_median")
        return table.set_column(at, "us_median", pc.divide(10_000.0, table["us_median"]))


def test_an_all_reduce_table_leads_to_the_best_set_at_once() -> None:
    with_table, without = (
        run_policy(LANDSCAPES["turin"], ALL_POLICIES[name], seed=0, switch_in_place=True)
        for name in (OURS_WITH_TABLE, OURS)
    )
    assert with_table.within_s() < 0.8 * without.within_s()
    assert with_table.final <= 0.01


def test_a_table_that_misleads_is_overruled_by_what_trials_measure() -> None:
    turin = LANDSCAPES["turin"]
    assert isinstance(turin, Landscape)
    misled = Misled(name="misled", machine=turin.machine, search=turin.search, sets=turin.sets)
    runs = [run_policy(misled, ALL_POLICIES[OURS_WITH_TABLE], seed=seed, switch_in_place=True) for seed in range(2)]
    assert all(run.final <= 0.02 for run in runs)


def test_a_landscape_without_nccl_sets_needs_no_table() -> None:
    assert LANDSCAPES["h200-replay"].all_reduce_table(0) is None
