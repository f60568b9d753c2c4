"""Simulated sweeps: what runs when, and what `analysis` reads of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.verdict_scenes.frames import results_of
from benchmarks.verdict_scenes.noise import Noise
from benchmarks.verdict_scenes.plan import Plan
from benchmarks.verdict_scenes.sweep import Sweep, simulate
from benchmarks.verdict_scenes.truth import Gain, Truth

QUIET = Noise(launch=0.0, block=0.0)


def sweep(truth: Truth | None = None, noise: Noise = QUIET, *, seed: int = 0, **plan: Any) -> Sweep:
    return simulate(truth or Truth(), noise, Plan(**plan), np.random.default_rng(seed))


def test_without_noise_every_block_is_the_truth() -> None:
    found = sweep(Truth(speculation=0.3, gains=(Gain("set-1", 0.02),)))
    results = results_of(found)
    told = {row["trial_id"]: row["tok_s"] for row in results.blocks.iter_rows(named=True)}
    for trial_id, member in zip(found.names, found.configurations, strict=True):
        assert told[trial_id] == pytest.approx(found.truth.value("tok_s", member))


def test_servers_are_what_the_loader_makes_of_the_trials() -> None:
    found = sweep(noise=Noise(launch=0.01, block=0.0))
    launches = dict(results_of(found).trials.select("trial_id", "launch").iter_rows())
    own = dict(zip(found.names, found.table.launches, strict=True))
    assert len(set(launches.values())) == len(set(own.values()))
    assert len({(launches[name], own[name]) for name in found.names}) == len(set(own.values()))
    by_launch = {
        launch: [row for row, name in enumerate(found.names) if own[name] == launch] for launch in own.values()
    }
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
    results = results_of(sweep(later_controls_fail=True))
    assert results.trials.filter(results.trials["role"] == "control").height == 1
    assert {excluded.kind for excluded in results.excluded} == {"crash"}


def test_a_pruned_trial_has_fewer_blocks() -> None:
    found = sweep(Truth(per_step=-0.08), prunes_after=4)
    results = results_of(found)
    pruned = results.trials.filter(results.trials["status"] == "pruned")
    assert pruned.height > 0
    counts = dict(results.blocks.group_by("trial_id").len().iter_rows())
    assert {counts[name] for name in pruned["trial_id"]} == {4}
    assert max(counts.values()) == 12


@pytest.mark.parametrize("named", [True, False])
def test_after_a_gap_the_clock_goes_on_and_the_labels_jump(named: bool) -> None:
    results = results_of(sweep(gap_after=0.5, gap_is_named=named))
    trials = results.trials.sort("started_at")
    assert trials["node"].n_unique() == (2 if named else 1)
    labels = trials["started_at"].diff().dt.total_seconds().drop_nulls().to_numpy()
    clock = trials["started_s"].diff().drop_nulls().to_numpy()
    assert (labels - clock).max() == pytest.approx(5 * 3600, abs=1)
