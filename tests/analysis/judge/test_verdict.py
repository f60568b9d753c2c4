from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from analysis.data.load import load
from analysis.judge.claims import Effect
from analysis.judge.factors import Factor
from analysis.judge.sides import Side
from analysis.judge.verdict import SweepVerdict, verdict
from analysis.show.document import document
from analysis.show.report import page
from analysis.show.short_form import print_short_form
from sweeps.results.tables import ResultsFolder, write_part
from tests.analysis.synthetic import (
    FOUNDING_CONTROL,
    FOUNDING_EAGLE,
    QUIET,
    SIX,
    STEPS,
    Arm,
    Run,
    World,
    interleaved,
    with_effect,
    write_sweep,
)
from tests.certain import certain


def judged(root: Path, runs: Sequence[Run], world: World = QUIET, **manifest: Any) -> SweepVerdict:
    return verdict(load(write_sweep(root / "r", runs, world, **manifest)))


def printed(found: SweepVerdict) -> str:
    written = io.StringIO()
    console = Console(file=written, width=250)
    print_short_form(found, console)
    return written.getvalue()


def factor(found: SweepVerdict, dimension: str, value: str, metric: str) -> Factor:
    [one] = [f for f in found.factors if (f.dimension, f.value, f.metric) == (dimension, value, metric)]
    return one


def effect_of(found: SweepVerdict, dimension: str, value: str, metric: str) -> Effect:
    return certain(factor(found, dimension, value, metric).effect)


def test_the_founding_case_comes_out_as_it_did(tmp_path: Path) -> None:
    found = judged(tmp_path, interleaved([*STEPS, *SIX], every=2))
    pays = found.speculation_pays
    assert pays.verdict == "worse"
    assert pays.sentence.startswith("Speculation does not pay here: ")
    assert certain(found.control).tok_s == pytest.approx(82.2, rel=0.01)
    eagle = next(each for each in found.phases if each.configuration_id == FOUNDING_EAGLE.configuration_id)
    assert eagle.verify_ms == pytest.approx(29.0, rel=0.01)
    assert eagle.verify_share == pytest.approx(0.969, abs=0.002)
    assert eagle.accept_length == pytest.approx(1.80, rel=0.01)
    for metric in ("verify_ms", "draft_ms", "accept_length", "tok_s"):
        assert effect_of(found, "nccl", "founding-six", metric).verdict == "equivalent"
    assert effect_of(found, "num_steps", "3", "verify_ms").verdict == "worse"
    assert effect_of(found, "num_steps", "3", "accept_length").verdict == "better"
    two_steps = next(need for need in found.step_needs if need.num_steps == 2)
    assert two_steps.break_even.accept_length == pytest.approx(2.46, abs=0.02)
    assert certain(two_steps.target).conditional_accuracy is None
    assert certain(found.best).role == "control"


def test_speculation_that_pays_is_recommended_with_its_command(tmp_path: Path) -> None:
    better = replace(FOUNDING_EAGLE, num_steps=3, accept_length=3.4)
    found = judged(tmp_path, interleaved([*STEPS[:2], better, SIX[0]], every=1))
    assert found.speculation_pays.verdict == "better"
    assert certain(found.best).configuration_id == better.configuration_id
    assert "--speculative-num-steps 3" in certain(found.best).launch_command


def test_a_true_two_percent_is_found_and_its_variables_are_in_the_command(tmp_path: Path) -> None:
    tuned = with_effect(FOUNDING_CONTROL, 0.02)
    found = judged(tmp_path, interleaved([tuned, FOUNDING_EAGLE, tuned], every=1))
    assert certain(found.best).configuration_id == tuned.configuration_id
    assert certain(found.best).launch_command.startswith("env NCCL_PROTO=LL python")
    effect = effect_of(found, "nccl", "tuned", "tok_s")
    assert effect.verdict == "better"
    assert effect.interval[0] < 0.02 < effect.interval[1]


def test_two_percent_of_a_single_launch_are_not_claimed(tmp_path: Path) -> None:
    tuned = with_effect(FOUNDING_CONTROL, 0.02)
    found = judged(tmp_path, interleaved([tuned, FOUNDING_EAGLE], every=1))
    effect = effect_of(found, "nccl", "tuned", "tok_s")
    assert effect.verdict == "undecided"
    assert certain(effect.reason).startswith("the difference rests on one launch (t0001)")


def test_only_variables_that_stay_out_are_taken_out_in_the_command(tmp_path: Path) -> None:
    columns = {"removed_env": ["NCCL_ALGO", "NCCL_PROTO"], "environment": {"NCCL_PROTO": "LL"}}
    found = judged(tmp_path, [replace(run, columns=columns) for run in interleaved([FOUNDING_EAGLE])])
    assert certain(found.best).launch_command.startswith("env -u NCCL_ALGO NCCL_PROTO=LL python")
    assert "replace MODEL with" in printed(found)


def test_a_null_effect_is_no_reason_to_leave_the_control(tmp_path: Path) -> None:
    found = judged(tmp_path, interleaved([SIX[0], FOUNDING_EAGLE, SIX[2]], every=1))
    assert certain(found.best).role == "control"
    assert effect_of(found, "nccl", "founding-six", "tok_s").verdict == "equivalent"


def test_drift_as_large_as_the_effect_does_not_make_one(tmp_path: Path) -> None:
    world = replace(QUIET, drift_per_trial=0.004)
    found = judged(tmp_path, interleaved([SIX[0], *STEPS, *SIX[1:]], every=1), world)
    assert found.control_runs[0].tok_s / found.control_runs[-1].tok_s > 1.03
    effect = effect_of(found, "nccl", "founding-six", "tok_s")
    assert effect.verdict in ("equivalent", "undecided")
    assert abs(effect.effect) < 0.005
    assert 0.02 < certain(found.drift) < 0.06


def test_a_sweep_without_a_repeat_claims_what_no_luck_of_launches_explains(tmp_path: Path) -> None:
    runs = [Run(arm=FOUNDING_CONTROL, role="control"), *(Run(arm=arm) for arm in (*STEPS, *SIX))]
    found = judged(tmp_path, runs)
    assert found.speculation_pays.verdict == "worse"
    assert "no chain or plain server was launched twice" in found.speculation_pays.sentence
    assert {side.interval_covers for side in found.sides} == {"blocks and launches by the prior"}
    of_nccl = [f.effect for f in found.factors if f.dimension == "nccl" and f.metric in ("tok_s", "verify_ms")]
    assert not {certain(effect).verdict for effect in of_nccl} & {"better", "worse"}
    assert "spread of launches from other machines" in printed(found)
    assert "taken from other machines" in page(found)


def test_an_interrupted_trial_that_was_measured_again_is_no_alarm(tmp_path: Path) -> None:
    columns = {"kind": "interrupted", "reason": "the trial's process died"}
    died = [Run(arm=arm, status="failed", columns=columns) for arm in STEPS[:2]]
    runs = [*died, *interleaved(STEPS[:1])]
    found = judged(tmp_path, runs)
    kinds = {(each.trial_id, each.kind) for each in found.excluded}
    assert kinds == {("t0000", "superseded"), ("t0001", "interrupted")}
    assert STEPS[1].label in printed(found)
    assert "Superseded: 1" in printed(found)
    assert "measured again as t0003" in page(found)


def test_the_best_was_chosen_and_its_interval_is_wider_for_it(tmp_path: Path) -> None:
    found = judged(tmp_path, interleaved(STEPS, every=1))
    assert "chosen among 3" in found.speculation_pays.selection
    best, *others = [side for side in found.sides if side.speculates]

    def reach(side: Side) -> float:
        low, high = certain(side.interval)
        return (side.tok_s - low) / (high - side.tok_s)

    assert reach(best) > 1.15 * max(map(reach, others))


def test_an_outlier_launch_makes_no_claim(tmp_path: Path) -> None:
    runs = interleaved([*STEPS, *SIX], every=1)
    odd = next(place for place, run in enumerate(runs) if run.arm == SIX[1])
    runs[odd] = replace(runs[odd], slow=0.10)
    found = judged(tmp_path, runs)
    for metric in ("tok_s", "verify_ms"):
        assert effect_of(found, "nccl", "founding-six", metric).verdict in ("equivalent", "undecided")


def test_a_search_that_was_cut_off_has_no_verdict_on_what_it_has_not_measured(tmp_path: Path) -> None:
    runs = interleaved(STEPS[:2], every=1)
    cut = judged(tmp_path / "cut", runs, num_configurations=30)
    assert cut.speculation_pays.verdict == "undecided"
    assert "the search was cut off after 2 speculative configurations" in certain(cut.speculation_pays.reason)
    whole = judged(tmp_path / "whole", runs)
    assert whole.speculation_pays.verdict == "worse"


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("budget.trials: 2 candidates were run", "undecided"),
        ("budget.gpu_hours: 1.02 of 1.0 are used; P(incumbent within 1.0%) 0.41", "undecided"),
        ("P(incumbent within 1.0% of the best) = 0.962 >= 0.95", "worse"),
        ("every configuration of the space was tried: 30 of 30 were measured", "worse"),
    ],
)
def test_a_budget_is_no_end_of_the_search(tmp_path: Path, reason: str, word: str) -> None:
    folder = write_sweep(tmp_path, interleaved(STEPS[:2], every=1), QUIET, num_configurations=30)
    stopped = {"sweep_id": "s1", "trial_id": "t0001", "attempt": 1, "at_s": 9.0}
    event = {**stopped, "event": "search_stopped", "detail": reason, "numbers": {}}
    write_part(ResultsFolder(folder), "events", [event], trial_id="t0001", attempt=1)

    assert verdict(load(folder)).speculation_pays.verdict == word


def test_nccl_that_does_not_serve_decode_is_not_exercised(tmp_path: Path) -> None:
    runs = [replace(run, columns={"all_reduce": "custom"}) for run in interleaved([*STEPS, *SIX])]
    found = judged(tmp_path, runs)
    effects = [f.effect for f in found.factors if f.dimension == "nccl"]
    assert {certain(effect).verdict for effect in effects} == {"not exercised"}
    assert "custom" in certain(certain(effects[0]).reason)
    assert effect_of(found, "num_steps", "3", "tok_s").verdict == "better"


def test_pairs_that_never_reach_nccl_are_set_apart_from_those_that_do(tmp_path: Path) -> None:
    plain = {FOUNDING_CONTROL.configuration_id, SIX[0].configuration_id}
    runs = [
        run if run.arm.configuration_id in plain else replace(run, columns={"all_reduce": "custom"})
        for run in interleaved([*STEPS, *SIX])
    ]
    throughput = factor(judged(tmp_path, runs), "nccl", "founding-six", "tok_s")
    assert throughput.num_pairs == 1
    assert "3 pairs left out" in certain(throughput.note)
    assert certain(throughput.effect).verdict != "not exercised"


def test_nccl_is_not_credited_with_a_lucky_accept_length(tmp_path: Path) -> None:
    lucky = tuple(replace(arm, accept_length=arm.accept_length * 1.1) for arm in SIX[1:])
    found = judged(tmp_path, interleaved([*STEPS, *lucky], every=1))
    throughput = effect_of(found, "nccl", "founding-six", "tok_s")
    assert effect_of(found, "nccl", "founding-six", "verify_ms").verdict == "equivalent"
    assert throughput.interval[0] > 0
    assert throughput.verdict == "undecided"
    assert "accept length" in certain(throughput.reason)


def test_settings_that_evidence_calls_idle_are_not_exercised(tmp_path: Path) -> None:
    runs = interleaved([*STEPS, *SIX])
    root = write_sweep(tmp_path / "r", runs, QUIET)
    for number, run in enumerate(runs):
        if run.arm.nccl != "default":
            row = {"rank": 0, "setting": "env.NCCL_PROTO", "requested": "LL", "seen": "LL", "grade": "not_exercised"}
            row |= {"sweep_id": "s1", "trial_id": f"t{number:04d}", "attempt": 1}
            write_part(ResultsFolder(root), "evidence", [row], trial_id=f"t{number:04d}", attempt=1)
    assert effect_of(verdict(load(root)), "nccl", "founding-six", "verify_ms").verdict == "not exercised"


def test_a_setting_that_never_arrived_is_never_called_no_effect(tmp_path: Path) -> None:
    lost = {"kind": "not_effective", "stage": "first_request", "reason": "NCCL_PROTO: wanted LL, seen None"}
    runs = [
        replace(run, status="failed", columns=lost) if run.arm.nccl != "default" else run
        for run in interleaved([*STEPS, *SIX])
    ]
    found = judged(tmp_path, runs)
    assert not [f for f in found.factors if f.dimension == "nccl"]
    assert {each.kind for each in found.excluded} == {"not_effective"}


def test_dimensions_that_only_change_together_have_no_effect_of_their_own(tmp_path: Path) -> None:
    arms = [replace(STEPS[0], nccl="a"), replace(STEPS[1], nccl="b")]
    found = judged(tmp_path, interleaved(arms, every=1))
    alone = factor(found, "num_steps", "2", "verify_ms")
    assert alone.effect is None
    assert "differ in num_steps alone" in certain(alone.reason)


def test_pinned_acceptance_recommends_nothing(tmp_path: Path) -> None:
    runs = [replace(run, columns={"acceptance": "pinned"}) for run in interleaved(STEPS)]
    found = judged(tmp_path, runs)
    assert found.best is None
    verdicts = {f.metric: certain(f.effect).verdict for f in found.factors if f.value == "3"}
    assert (verdicts["tok_s"], verdicts["accept_length"]) == ("undecided", "undecided")
    assert verdicts["draft_ms"] == "worse"
    assert found.speculation_pays.verdict == "undecided"
    assert document(found)["acceptance"] == "pinned"


def test_a_pruned_configuration_is_shown_but_never_the_best(tmp_path: Path) -> None:
    fast = Arm(num_steps=4, accept_length=4.0, draft_ms=1.0, verify_ms=29.0, extend_ms=0.3)
    runs = [*interleaved(STEPS), Run(arm=fast, status="pruned", num_blocks=3, columns={"reason": "median"})]
    found = judged(tmp_path, runs)
    assert found.sides[0].configuration_id == fast.configuration_id
    assert found.sides[0].pruned
    assert certain(found.best).configuration_id != fast.configuration_id
    assert ("pruned", "median") in {(each.kind, each.reason) for each in found.excluded}


def test_speculation_that_was_pruned_everywhere_is_judged_on_the_blocks_it_ran(tmp_path: Path) -> None:
    runs = [
        run if run.role == "control" else replace(run, status="pruned", num_blocks=5, columns={"reason": "wilcoxon"})
        for run in interleaved(STEPS, every=1)
    ]
    pays = judged(tmp_path, runs).speculation_pays
    assert pays.verdict == "worse"
    assert "all were pruned" in pays.selection
    assert certain(pays.effect).num_blocks == 5


@pytest.mark.parametrize("status", ["only a control", "only speculation", "nothing completed", "one block"])
def test_a_sweep_that_did_not_get_far_says_so(tmp_path: Path, status: str) -> None:
    control, eagle = Run(arm=FOUNDING_CONTROL, role="control"), Run(arm=FOUNDING_EAGLE)
    runs = {
        "only a control": [control, control],
        "only speculation": [eagle],
        "nothing completed": [replace(run, status="failed", columns={"kind": "crash"}) for run in (control, eagle)],
        "one block": [control, eagle, control],
    }[status]
    found = judged(tmp_path, runs, replace(QUIET, num_blocks=1) if status == "one block" else QUIET)
    assert found.speculation_pays.verdict == "undecided"
    assert found.speculation_pays.reason
    json.dumps(document(found), allow_nan=False)


def test_gpu_seconds_and_the_grid(tmp_path: Path) -> None:
    found = judged(tmp_path, interleaved(STEPS, every=1), num_configurations=18)
    assert found.cost.gpu_seconds["weight_load"] == 7 * 250 * 8
    one = 8 * (20 + 250 + 48)
    assert found.cost.exhaustive_grid == pytest.approx(18 * one)


def test_the_share_of_communication_bounds_what_nccl_can_win(tmp_path: Path) -> None:
    root = write_sweep(tmp_path / "r", interleaved(STEPS, every=1), QUIET)
    for number in (1, 3, 5):
        keys = {"sweep_id": "s1", "trial_id": f"t{number:04d}", "attempt": 1, "phase": "verify", "calls_per_cycle": 1.0}
        rows = [
            keys | {"kind": kind, "kernel": kind, "us_per_cycle": us}
            for kind, us in (("communication", 3000.0), ("moe", 9000.0), ("other", 15000.0))
        ]
        write_part(ResultsFolder(root), "kernels", rows, trial_id=f"t{number:04d}", attempt=1)
    found = certain(verdict(load(root)).communication)
    assert found.share == pytest.approx(3 / 27)
    assert found.most_tok_s == pytest.approx(found.tok_s * found.cycle_ms / (found.cycle_ms - 3.0))


def test_communication_of_draft_and_extend_counts_and_the_defaults_trace_is_taken(tmp_path: Path) -> None:
    runs = interleaved([SIX[2], STEPS[1]], every=1)
    root = write_sweep(tmp_path / "r", runs, QUIET)
    for number, run in enumerate(runs):
        if run.arm.num_steps:
            us = 3000.0 if run.arm.nccl == "default" else 20000.0
            keys = {"sweep_id": "s1", "trial_id": f"t{number:04d}", "attempt": 1, "calls_per_cycle": 1.0, "kernel": "k"}
            parts = [("verify", us), ("draft", 200.0), ("extend", 100.0)]
            rows = [keys | {"phase": phase, "kind": "communication", "us_per_cycle": each} for phase, each in parts]
            write_part(ResultsFolder(root), "kernels", rows, trial_id=f"t{number:04d}", attempt=1)
    found = certain(verdict(load(root)).communication)
    assert found.label == STEPS[1].label
    assert found.by_nccl
    assert found.ms == pytest.approx(3.3)
    assert certain(found.most_tok_s) == pytest.approx(found.tok_s * found.cycle_ms / (found.cycle_ms - 3.3))


def test_a_real_gain_in_the_draft_phase_is_a_gain(tmp_path: Path) -> None:
    slow = tuple(replace(arm, draft_ms=6.0) for arm in STEPS)
    fast = tuple(replace(arm, draft_ms=3.0, nccl="tuned") for arm in STEPS)
    found = judged(tmp_path, interleaved([*slow, *fast, *slow, *fast], every=1))
    assert effect_of(found, "nccl", "tuned", "draft_ms").verdict == "better"
    assert effect_of(found, "nccl", "tuned", "tok_s").verdict == "better"


@pytest.mark.parametrize(("alone", "confirmed"), [(1.0, True), (0.5, False)])
def test_a_winner_must_hold_when_it_is_launched_by_itself(tmp_path: Path, alone: float, confirmed: bool) -> None:
    fast = Arm(num_steps=4, accept_length=4.0, draft_ms=1.0, verify_ms=29.0, extend_ms=0.3)
    states = [Run(arm=STEPS[0]), Run(arm=fast, relaunched=False)]
    again = Run(arm=replace(fast, verify_ms=fast.verify_ms / alone), role="incumbent")
    found = judged(tmp_path, [Run(arm=FOUNDING_CONTROL, role="control"), *states, again])
    held = certain(found.confirmation)
    assert held.confirmed == confirmed
    assert held.trial_ids == ("t0003",)
    assert (found.best is None) != confirmed
    assert "t0003" in page(found)
    assert confirmed or "is not confirmed: launched by itself (t0003)" in found.best_reason


def test_what_else_the_two_sides_differ_in_stands_beside_the_verdict(tmp_path: Path) -> None:
    runs = [
        replace(run, columns={"args": {"attention-backend": "triton"}}) if run.arm.num_steps else run
        for run in interleaved(STEPS, every=1)
    ]
    selection = judged(tmp_path, runs).speculation_pays.selection
    assert "the two also differ in attention-backend (triton with speculation, not set without)" in selection
