"""Simulated sweeps: what runs when, and what `analysis` reads of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.verdict_scenes.claims import judge
from benchmarks.verdict_scenes.frames import results_of, trial_ids
from benchmarks.verdict_scenes.noise import Noise
from benchmarks.verdict_scenes.plan import Plan
from benchmarks.verdict_scenes.scenes import SCENES
from benchmarks.verdict_scenes.sweep import Sweep, simulate
from benchmarks.verdict_scenes.truth import Gain, Truth

QUIET = Noise(launch=0.0, block=0.0)


def sweep(truth: Truth | None = None, noise: Noise = QUIET, *, seed: int = 0, **plan: Any) -> Sweep:
    return simulate(truth or Truth(), noise, Plan(**plan), np.random.default_rng(seed))


def test_without_noise_every_block_is_the_truth() -> None:
    found = sweep(Truth(speculation=0.3, gains=(Gain("set-1", 0.02),)))
    (results,) = results_of([found])
    told = {row["trial_id"]: row["tok_s"] for row in results.blocks.iter_rows(named=True)}
    for trial_id, member in zip(found.names, found.configurations, strict=True):
        assert told[f"0-{trial_id}"] == pytest.approx(found.truth.value("tok_s", member))


def test_servers_are_what_the_loader_makes_of_the_trials() -> None:
    found = sweep(noise=Noise(launch=0.01, block=0.0))
    launches = dict(results_of([found])[0].trials.select("trial_id", "launch").iter_rows())
    own = dict(zip(trial_ids("0", found), found.table.launches, strict=True))
    assert len(set(launches.values())) == len(set(own.values()))
    assert len({(launches[name], own[name]) for name in own}) == len(set(own.values()))
    by_launch = {launch: [row for row, name in enumerate(own) if own[name] == launch] for launch in own.values()}
    for rows in by_launch.values():
        assert np.ptp(found.slowness[rows]) == pytest.approx(0.0), "one server, one effect"


def test_control_first_then_after_every_eight_candidates_and_last() -> None:
    roles = [slot.role for slot in sweep(Truth(speculation=0.3)).table.slots]
    assert roles.count("candidate") == 29
    assert roles[0] == "control"
    assert roles[9:11] == ["control", "incumbent"]
    assert roles[-2:] == ["control", "incumbent"]
    assert "incumbent" not in [slot.role for slot in sweep(again="none").table.slots]


def test_the_incumbent_is_what_leads_and_never_the_control() -> None:
    found = sweep(Truth(speculation=0.3, gains=(Gain("set-1", 0.10),)))
    again = [
        member for slot, member in zip(found.table.slots, found.configurations, strict=True) if slot.role[0] == "i"
    ]
    assert again[-1].nccl == "set-1"
    assert again[-1].speculates
    plain = sweep(Truth(speculation=-0.3, num_sets=1))
    assert not [slot for slot in plain.table.slots if slot.role == "incumbent"]


def test_drift_keeps_its_size_and_levels_are_true_at_its_mean() -> None:
    found = sweep(Truth(speculation=0.3), Noise(launch=0.0, block=0.0, drift="line"))
    assert np.ptp(found.slowness) == pytest.approx(0.08)
    assert found.shift == pytest.approx(found.slowness.mean())


def test_failed_controls_are_left_out_by_the_loader() -> None:
    results = results_of([sweep(later_controls_fail=True)])[0]
    assert results.trials.filter(results.trials["role"] == "control").height == 1
    assert {excluded.kind for excluded in results.excluded} == {"crash"}


def test_a_pruned_trial_has_fewer_blocks() -> None:
    found = sweep(Truth(per_step=-0.08), prunes_after=4)
    (results,) = results_of([found])
    pruned = results.trials.filter(results.trials["status"] == "pruned")
    assert pruned.height > 0
    counts = dict(results.blocks.group_by("trial_id").len().iter_rows())
    assert {counts[name] for name in pruned["trial_id"]} == {4}
    assert max(counts.values()) == 12


@pytest.mark.parametrize("named", [True, False])
def test_after_a_gap_the_clock_goes_on_and_the_labels_jump(named: bool) -> None:
    results = results_of([sweep(gap_after=0.5, gap_is_named=named)])[0]
    trials = results.trials.sort("started_at")
    assert trials["node"].n_unique() == (2 if named else 1)
    labels = trials["started_at"].diff().dt.total_seconds().drop_nulls().to_numpy()
    clock = trials["started_s"].diff().drop_nulls().to_numpy()
    assert (labels - clock).max() == pytest.approx(5 * 3600, abs=1)


def test_sweeps_loaded_together_are_what_each_is_alone() -> None:
    sweeps = [sweep(noise=Noise(), seed=seed, prunes_after=4) for seed in range(3)]
    together = results_of(sweeps)
    for results, one in zip(together, sweeps, strict=True):
        (alone,) = results_of([one])
        for mine, its in zip(judge(results).claims, judge(alone).claims, strict=True):
            assert (mine.kind, mine.subject, mine.verdict) == (its.kind, its.subject, its.verdict)
            assert mine.value == pytest.approx(its.value)
        assert len(results.excluded) == len(alone.excluded)


def test_a_second_concurrency_has_blocks_of_its_own() -> None:
    crowded = Truth(speculation=-0.1, plain_ms=15.0, requests=4)
    found = simulate(Truth(speculation=0.2), QUIET, Plan(), np.random.default_rng(0), crowded=crowded)
    (results,) = results_of([found])
    assert results.concurrencies == (1, 4)
    assert not results.warnings
    plain = results.at(4).blocks.filter(results.at(4).blocks["accept_length"].is_null())
    assert plain["tok_s"].to_numpy() == pytest.approx(4000 / 15)


def test_states_share_a_server_and_rounds_interleave_their_blocks() -> None:
    found = sweep(Truth(speculation=0.2), states="rounds", copies=2)
    table = found.table
    assert len(set(table.launches)) == 3, "control, drafts, the winner alone"
    drafting = [row for row, slot in enumerate(table.slots) if table.launches[row] == 1]
    assert len(drafting) == 6 * 4 * 2
    starts = table.at_s[drafting]
    assert starts[:, 0].max() < starts[:, 1].min(), "round by round"
    assert (np.argsort(starts[:, 1]) == np.argsort(starts[:, 0])[::-1]).all(), "each round in reverse order"
    assert table.slots[-1].role == "incumbent"
    assert len(set(results_of([found])[0].trials["launch"])) == 3


def test_phases_may_stay_untimed() -> None:
    found = simulate(Truth(), QUIET, Plan(), np.random.default_rng(0), is_timed=False)
    (results,) = results_of([found])
    assert results.blocks["draft_ms"].null_count() == results.blocks.height
    assert not results.blocks["cycle_ms"].null_count()


@pytest.mark.parametrize("is_timed", [True, False])
def test_every_scene_passes_the_loader(is_timed: bool) -> None:
    rng = np.random.default_rng(0)
    swept = [
        simulate(scene.truth, scene.noise, scene.plan, rng, is_timed=is_timed)
        for scene in SCENES
        if scene.crowded is None
    ]
    for found, results in zip(swept, results_of(swept), strict=True):
        assert {each.kind for each in results.excluded} <= {"crash", "pruned"}, found.plan
        assert set(results.trials["configuration_id"]) == {each.configuration_id for each in found.measured()}
