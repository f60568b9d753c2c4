from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.data.load import load
from analysis.judge.cells import Cells, cells
from analysis.judge.claims import MARGIN, Effect, holm, judge
from analysis.judge.effects import compare, level
from analysis.judge.factors import observe
from analysis.judge.fitted import Fitted, fit_cells
from tests.analysis.synthetic import (
    FOUNDING_CONTROL,
    FOUNDING_EAGLE,
    Run,
    World,
    interleaved,
    with_effect,
    write_sweep,
)
from tests.certain import certain

NUM_BLOCKS = 12
CONTRAST = {"candidate": 1.0, "control": -1.0}


def sweep_of(
    rng: np.random.Generator,
    *,
    effect: float,
    controls: int = 5,
    candidates: int = 1,
    launch_sd: float = 0.003,
    noise_sd: float = 0.003,
    interaction_sd: float = 0.0,
    drift: float = 0.0,
) -> Cells:
    """Cells of a sweep: controls evenly in time, candidates between the first two and so on; drift over all of it."""
    at = [*np.linspace(0, 1, controls), *np.linspace(0.1, 0.6, candidates)]
    keys = ["control"] * controls + ["candidate"] * candidates
    prompts = rng.normal(0, 0.1, NUM_BLOCKS)
    interaction = rng.normal(0, interaction_sd, NUM_BLOCKS)
    seconds = np.empty((len(keys), NUM_BLOCKS))
    for row, (key, time) in enumerate(zip(keys, at, strict=True)):
        own = np.log1p(effect) + interaction if key == "candidate" else np.zeros(NUM_BLOCKS)
        noise = rng.normal(0, noise_sd, NUM_BLOCKS) + rng.normal(0, launch_sd)
        seconds[row] = np.exp(prompts - own + noise + drift * time)
    return Cells(
        metric="tok_s",
        keys=tuple(keys),
        twins=tuple(keys),
        launches=tuple(f"launch {row}" for row in range(len(keys))),
        nodes=("node",) * len(keys),
        at_s=np.array(at) * 36000,
        speculates=np.zeros(len(keys), dtype=np.bool_),
        numerators=np.full((len(keys), NUM_BLOCKS), 256.0),
        denominators=seconds,
    )


def fitted(made: Cells) -> Fitted:
    """The candidate differs from the control by its NCCL set."""
    drafting = {"num_steps": "0", "eagle_topk": None, "num_draft_tokens": None, "drafter": None}
    return fit_cells(made, {"control": {**drafting, "nccl": "default"}, "candidate": {**drafting, "nccl": "tuned"}})


def compared(made: Cells) -> Effect:
    return certain(compare(fitted(made), CONTRAST))


@pytest.mark.parametrize(
    "world",
    [
        {"effect": 0.02},
        {"effect": 0.0, "controls": 3},
        {"effect": 0.02, "drift": 0.05},
        {"effect": -0.27, "interaction_sd": 0.1},
        {"effect": 0.0, "launch_sd": 0.0, "controls": 8},
        {"effect": 0.02, "candidates": 3, "noise_sd": 0.02},
    ],
    ids=str,
)
def test_the_interval_covers_the_truth_as_often_as_it_says(world: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(300):
        low, high = compared(sweep_of(rng, **world)).interval
        covered += low <= world["effect"] <= high
    assert covered / 300 >= 0.90
    assert covered / 300 <= (0.99 if "interaction_sd" in world else 1.0), "few launches: the prior may be too careful"


def test_a_null_effect_is_seldom_called_one_and_a_real_one_seldom_none() -> None:
    rng = np.random.default_rng(2)
    null = [compared(sweep_of(rng, effect=0.0, controls=6)).verdict for _ in range(200)]
    assert sum(verdict in ("better", "worse") for verdict in null) <= 20
    assert sum(verdict == "equivalent" for verdict in null) >= 100
    at_margin = [compared(sweep_of(rng, effect=MARGIN, controls=6)).verdict for _ in range(200)]
    assert sum(verdict == "equivalent" for verdict in at_margin) <= 20


def test_drift_as_large_as_the_effect_is_taken_out() -> None:
    rng = np.random.default_rng(3)
    found = [compared(sweep_of(rng, effect=0.0, drift=0.05, controls=6)) for _ in range(40)]
    assert abs(np.mean([effect.effect for effect in found])) < 0.005
    assert sum(effect.verdict in ("better", "worse") for effect in found) <= 4


def test_a_step_of_the_machine_is_no_effect() -> None:
    rng = np.random.default_rng(12)
    for _ in range(20):
        made = sweep_of(rng, effect=0.0, controls=8, candidates=2)
        made.denominators[made.at_s > 15000] *= 1.08
        effect = compared(made)
        assert effect.verdict not in ("better", "worse")
        assert abs(effect.effect) < 0.02


@pytest.mark.parametrize(
    ("truth", "verdict"), [(-0.5, "worse"), (1.0, "better"), (-0.05, "undecided"), (0.05, "undecided")]
)
def test_where_all_was_launched_once_only_more_than_launches_may_differ_by_is_claimed(
    truth: float, verdict: str
) -> None:
    effect = compared(sweep_of(np.random.default_rng(4), effect=truth, controls=1))
    assert effect.verdict == verdict
    assert effect.covers == "blocks and launches by the prior"
    assert certain(effect.assumption).startswith("no plain server was launched twice")
    assert effect.effect == pytest.approx(truth, abs=0.03)


def test_configurations_in_one_launch_compare_without_repeats() -> None:
    made = sweep_of(np.random.default_rng(5), effect=0.05, controls=1, launch_sd=0.0)
    together = Cells(**{name: getattr(made, name) for name in made.__slots__} | {"launches": ("one", "one")})
    effect = compared(together)
    assert effect.verdict == "better"
    assert effect.interval[0] < 0.05 < effect.interval[1]


def test_a_configuration_known_on_another_node_only_is_confounded() -> None:
    made = sweep_of(np.random.default_rng(6), effect=0.05)
    nodes = ("a",) * 5 + ("b",)
    apart = Cells(**{name: getattr(made, name) for name in made.__slots__} | {"nodes": nodes})
    effect = compared(apart)
    assert effect.verdict == "undecided"
    assert effect.interval[1] - effect.interval[0] > 0.15, "nodes may differ, and nothing tells by how much"


def test_a_pruned_cell_is_compared_on_the_blocks_that_it_has() -> None:
    rng = np.random.default_rng(7)
    made = sweep_of(rng, effect=0.0, launch_sd=0.0, noise_sd=1e-4)
    made.numerators[-1, 3:] = np.nan
    made.denominators[-1, 3:] = np.nan
    effect = compared(made)
    assert abs(effect.effect) < 0.001  # prompts differ by 10 %: unpaired, three blocks would be far off
    assert effect.num_blocks == 3


def test_accept_length_and_throughput_are_ratios_of_sums(tmp_path: Path) -> None:
    root = write_sweep(tmp_path / "r", [Run(arm=FOUNDING_CONTROL, role="control"), Run(arm=FOUNDING_EAGLE)])
    results = load(root)
    blocks = results.blocks.filter(trial_id="t0001")
    key = FOUNDING_EAGLE.configuration_id
    assert cells(results, "accept_length").total(key) == pytest.approx(12 * 256 / blocks["num_cycles"].sum())
    assert cells(results, "tok_s").total(key) == pytest.approx(12 * 256 / blocks["decode_s"].sum())
    assert cells(results, "draft_ms").total(FOUNDING_CONTROL.configuration_id) is None


def test_choosing_the_best_of_many_widens_the_end_that_it_flatters() -> None:
    made = sweep_of(np.random.default_rng(8), effect=0.0)
    alone = compared(made)
    chosen = certain(compare(fitted(made), CONTRAST, selected_among=(20, 1)))
    assert chosen.interval[0] < alone.interval[0]
    assert chosen.interval[1] == pytest.approx(alone.interval[1])


def test_the_best_of_many_equal_configurations_is_seldom_called_better() -> None:
    rng = np.random.default_rng(9)
    wrong = 0
    for _ in range(200):
        sweeps = [sweep_of(rng, effect=0.0) for _ in range(8)]
        best = max(sweeps, key=lambda made: compared(made).effect)
        wrong += certain(compare(fitted(best), CONTRAST, selected_among=(8, 1))).verdict == "better"
    assert wrong <= 15


def test_levels_are_free_of_drift() -> None:
    made = sweep_of(np.random.default_rng(10), effect=0.0, drift=0.2, launch_sd=0.001, noise_sd=1e-3, controls=8)
    control, candidate = (certain(level(fitted(made), key)) for key in ("control", "candidate"))
    assert certain(made.total("candidate")) > certain(made.total("control")) * 1.02
    assert candidate.value == pytest.approx(control.value, rel=0.02)
    assert certain(control.interval)[0] < control.value < certain(control.interval)[1]


@given(st.lists(st.one_of(st.none(), st.floats(0.0, 1.0)), max_size=12))
def test_holm_never_lowers_a_p_value_and_keeps_their_order(p_values: list[float | None]) -> None:
    adjusted = holm(p_values)
    pairs = [(p, q) for p, q in zip(p_values, adjusted, strict=True) if p is not None and q is not None]
    assert [q is None for q in adjusted] == [p is None for p in p_values]
    assert all(p <= q <= 1.0 for p, q in pairs)
    ordered = [q for _, q in sorted(pairs)]
    assert ordered == sorted(ordered)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_a_family_claims_less_than_its_members() -> None:
    rng = np.random.default_rng(11)
    borderline = next(
        effect
        for effect in (compared(sweep_of(rng, effect=0.012, candidates=3)) for _ in range(500))
        if effect.verdict == "better" and 0.02 < certain(effect.p_difference) < 0.05
    )
    together = judge([borderline] * 10)
    assert {effect.verdict for effect in together} == {"undecided"}
    assert "Holm's correction over 10" in certain(together[0].reason)


def test_written_sweeps_agree_with_the_truth(tmp_path: Path) -> None:
    faster = with_effect(FOUNDING_CONTROL, 0.02)
    runs = interleaved([FOUNDING_EAGLE, faster, replace(FOUNDING_EAGLE, num_steps=3), faster], every=1)
    results = load(write_sweep(tmp_path / "r", runs, World(launch_sd=0.001, drift_per_trial=0.004)))
    contrast = {faster.configuration_id: 1.0, FOUNDING_CONTROL.configuration_id: -1.0}
    effect = certain(compare(observe(results, "tok_s"), contrast))
    assert effect.verdict == "better"
    assert effect.effect == pytest.approx(0.02, abs=0.005)
