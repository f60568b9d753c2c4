from __future__ import annotations

from dataclasses import replace

import numpy as np
import optuna
import pytest

from benchmarks.landscapes import LANDSCAPES, Landscape
from benchmarks.policies import POLICIES, run_policy
from sweeps.measure.records import Outcome
from sweeps.search.cycle_model.beliefs import Beliefs
from sweeps.search.cycle_model.optuna_plugins import CycleBoundPruner, CycleModelSampler
from sweeps.search.observations import CertifyingSampler, DecidingPruner, Observation, Observations, RecommendingSampler
from sweeps.search.study import SweepStudy
from sweeps.spec.document import SpecError
from sweeps.spec.reading import parse_spec
from sweeps.spec.space import Configuration, Space
from tests.sweeps.stub_engine import plan, stub_spec
from tests.sweeps.worlds import NCCL_MS, SPEC, blocks_of, observed

optuna.logging.set_verbosity(optuna.logging.WARNING)

CHOICES = "study: {sampler: {name: cycle_model}, pruner: {name: cycle_bound}, stop_probability: 0.95}\n"


def study_of(extra: str = CHOICES) -> SweepStudy:
    spec = parse_spec(SPEC + extra + "control: {every: 0, incumbent: false}\n", source="search")
    return SweepStudy(spec, Space(spec))


def measure(study: SweepStudy, rng: np.random.Generator, *, slow: float = 1.0) -> tuple[Configuration, Outcome]:
    trial = study.ask()
    assert trial is not None
    seconds = {"launch": 400.0, "measure": 40.0}
    outcome = Outcome(status="completed", relaunched=True, seconds=seconds)
    for block in blocks_of(trial.configuration, rng):
        times = ("draft_ms", "verify_ms", "verify_forward_ms", "extend_ms", "gap_ms", "cycle_ms")
        slower = {name: slow * value for name in times if (value := getattr(block, name)) is not None}
        changed = replace(block, decode_s=block.decode_s * slow, **slower)
        if (decision := study.report(trial, changed, seconds=seconds)).prune:
            outcome = Outcome(status="pruned", reason=decision.reason, relaunched=True, seconds=seconds)
            break
    study.tell(trial, outcome)
    return trial.configuration, outcome


def test_they_are_what_the_study_asks_for() -> None:
    space, observations = Space(stub_spec()), Observations()
    sampler = CycleModelSampler(space, observations, seed=1)
    assert isinstance(sampler, CertifyingSampler)
    assert isinstance(sampler, RecommendingSampler)
    assert isinstance(CycleBoundPruner(sampler.beliefs), DecidingPruner)
    assert sampler.incumbent() is None
    certainty = sampler.certainty(0.01)
    assert certainty.probability is None
    assert str(certainty) == "cannot be told: no candidate has been measured to its end"


def test_the_control_comes_first_and_then_the_largest_chain() -> None:
    study, rng = study_of(), np.random.default_rng(0)
    first, _ = measure(study, rng)
    second, _ = measure(study, rng)
    assert not first.speculates
    assert (second.num_steps, second.eagle_topk, second.nccl_set) == (7, 1, "default")


def test_a_table_that_cannot_be_read_is_refused_before_anything_runs() -> None:
    with pytest.raises(SpecError, match="allreduce: wanted"):
        study_of("study: {sampler: {name: cycle_model, options: {allreduce: absent.parquet}}}\n")


def test_it_finds_the_best_and_stops_by_itself_before_the_grid() -> None:
    study, rng, measured = study_of(), np.random.default_rng(0), []
    while study.stop_reason is None:
        assert study.trials_left > 0
        measured.append(measure(study, rng)[0])
    assert study.incumbent is not None
    assert study.incumbent.nccl_set == "a"
    assert study.stop_reason is not None
    assert study.stop_reason.startswith("P(incumbent within 1.0% of the best) = ")
    assert len(measured) < 0.6 * len(study.space.configurations())
    assert {each.nccl_set for each in measured} == set(NCCL_MS), "no set is certified away"
    assert " +- " in study.stop_reason, "with its Monte Carlo error"


def test_a_trial_that_cannot_win_is_pruned_with_its_numbers() -> None:
    study, rng = study_of("study: {sampler: {name: grid}, pruner: {name: cycle_bound}}\n"), np.random.default_rng(0)
    for _ in range(4):
        measure(study, rng)
    trial = study.ask()
    assert trial is not None
    blocks = blocks_of(trial.configuration, rng)
    decisions = [
        study.report(
            trial, replace(b, decode_s=b.decode_s * 3, cycle_ms=(b.cycle_ms or 0) * 3), seconds={"measure": 1.0}
        )
        for b in blocks[:2]
    ]
    assert not decisions[0].prune
    assert decisions[1].prune
    assert {"optimistic", "incumbent", "accept_length_bound", "cycle_ms", "blocks"} <= set(decisions[1].numbers)
    assert decisions[1].numbers["optimistic"] < decisions[1].numbers["incumbent"]
    assert "cycle_bound: at best" in decisions[1].reason


def test_a_trial_as_fast_as_the_incumbent_is_not_pruned() -> None:
    space, rng = Space(parse_spec(SPEC, source="search")), np.random.default_rng(0)
    observations = observed(space, [(0, "default"), (7, "default"), (3, "default"), (3, "a")])
    beliefs = Beliefs(space, observations, seed=0)
    incumbent = beliefs.incumbent()
    assert incumbent is not None
    equal = space.resolve({"num_steps": incumbent.num_steps, "nccl": "c"})
    assert equal != incumbent
    observations.start(plan(equal, space, "t0009"))
    for block in blocks_of(incumbent, rng):
        observations.add_block("t0009", block, seconds={"measure": 1.0})
        decision = CycleBoundPruner(beliefs).decide(9)
        assert not decision.prune
    assert decision.numbers["blocks"] == 8.0


def test_a_configuration_that_failed_is_not_asked_again() -> None:
    study, rng = study_of(), np.random.default_rng(0)
    measure(study, rng)
    failed = []
    for _ in range(4):
        trial = study.ask()
        assert trial is not None
        failed.append(trial.configuration)
        study.tell(trial, Outcome(status="failed", reason="no", kind="crash", seconds={"launch": 300.0}))
    assert len(set(failed)) == 4


@pytest.mark.parametrize("option", ["risk: 0.9", "risk: 0.0"])
def test_levels_that_are_none_are_refused(option: str) -> None:
    with pytest.raises(SpecError, match="refuses"):
        study_of(f"study: {{pruner: {{name: cycle_bound, options: {{{option}}}}}}}\n")


def test_a_study_goes_on_from_earlier_observations() -> None:
    study, rng = study_of(), np.random.default_rng(0)
    for _ in range(4):
        measure(study, rng)
    again = SweepStudy(study.spec, study.space, observations=study.observations)
    assert again.incumbent == study.incumbent
    following = again.ask()
    assert following is not None
    assert following.configuration not in {seen.trial.configuration for seen in list(study.observations)[:-1]}


@pytest.mark.parametrize("metric", ["cycle_ms", "tok_s"])
def test_other_metrics_are_searched_too(metric: str) -> None:
    study = study_of(f"study: {{metric: {metric}, sampler: {{name: cycle_model}}, stop_probability: 0.95}}\n")
    rng = np.random.default_rng(0)
    for _ in range(4):
        measure(study, rng)
    assert study.incumbent is not None
    if metric == "cycle_ms":
        assert not study.incumbent.speculates


def test_nothing_times_the_phases_and_the_sampler_still_samples() -> None:
    study, rng = study_of(), np.random.default_rng(0)
    for _ in range(3):
        trial = study.ask()
        assert trial is not None
        for block in blocks_of(trial.configuration, rng):
            bare = replace(
                block, draft_ms=None, verify_ms=None, verify_forward_ms=None, extend_ms=None, gap_ms=None, cycle_ms=None
            )
            study.report(trial, bare, seconds={"measure": 1.0})
        study.tell(trial, Outcome(status="completed", relaunched=True, seconds={"measure": 1.0}))
    assert study.incumbent is not None
    assert study.stop_reason is None


def test_switch_in_place_is_preferred_to_a_launch_that_says_as_much() -> None:
    run = run_policy(LANDSCAPES["pcie-eagle3"], POLICIES["cycle_model"], seed=1, switch_in_place=True)
    assert run.launches < run.trials


def test_a_machine_that_refuses_a_set_does_not_stop_the_search() -> None:
    landscape = LANDSCAPES["pcie-eagle3"]
    assert isinstance(landscape, Landscape)
    sets = landscape.sets + '  nvls: {NCCL_ALGO: "allreduce:nvls"}\n'
    bent = replace(landscape, sets=sets, search=landscape.search.replace("threads,", "threads, nvls,"))
    run = run_policy(bent, POLICIES["cycle_model"], seed=0, switch_in_place=True)
    assert run.final <= 0.01


def test_findings_and_the_reason_of_the_stop_are_said_once() -> None:
    study, rng = study_of(), np.random.default_rng(0)
    while study.stop_reason is None:
        measure_or_stop(study, rng)
    (finding,) = study.drain_findings()
    assert finding.event == "search_stopped"
    assert "P(incumbent within" in finding.detail
    assert study.drain_findings() == ()


def measure_or_stop(study: SweepStudy, rng: np.random.Generator) -> None:
    trial = study.ask()
    if trial is None:
        return
    for block in blocks_of(trial.configuration, rng):
        study.report(trial, block, seconds={"launch": 400.0, "measure": 40.0})
    study.tell(trial, Outcome(status="completed", relaunched=True, seconds={"launch": 400.0, "measure": 40.0}))


def certified(extra: str) -> tuple[SweepStudy, np.random.Generator]:
    """A sweep whose search has stopped as certain; the last control and the winner again are to come."""
    spec = parse_spec(SPEC + CHOICES + extra, source="search")
    study, rng = SweepStudy(spec, Space(spec)), np.random.default_rng(0)
    while study.stop_reason is None:
        measure(study, rng)  # the last one asks for a control
    return study, rng


def test_a_winner_that_wins_again_ends_the_sweep() -> None:
    study, rng = certified("control: {every: 0}\n")
    measure(study, rng)
    assert study.ask() is None
    assert study.finished


def test_a_winner_that_was_one_launchs_luck_is_no_winner() -> None:
    """Two H200: 526 tok/s and certain, 467 when it was launched again."""
    study, rng = certified("control: {every: 0}\n")
    winner = study.incumbent
    study.drain_findings()
    again, _ = measure(study, rng, slow=1.4)
    assert again == winner
    following = study.ask()
    assert following is not None
    assert following.role == "candidate"
    assert study.stop_reason is None
    (withdrawn,) = study.drain_findings()
    assert withdrawn.event == "certificate_withdrawn"
    assert "was launched again" in withdrawn.detail


@pytest.mark.parametrize("order", ["default, wrong, b, d", "wrong, default, b, d"])
@pytest.mark.parametrize("nccl_unread", [True, False])
def test_a_set_that_nccl_does_not_read_is_not_launched_again(order: str, *, nccl_unread: bool) -> None:
    text = SPEC.replace("{a: {NCCL_ALGO", "{wrong: {NCCL_PORTO: LL}, a: {NCCL_ALGO")
    text = text.replace("nccl: [default, a, b, c, d]", f"nccl: [{order}]") + "allow_unknown_nccl: true\n"
    spec = parse_spec(text + CHOICES + "control: {every: 0, incumbent: false}\n", source="search")
    space, rng, seconds = Space(spec), np.random.default_rng(0), {"launch": 400.0, "measure": 40.0}
    nccl_ms = {**NCCL_MS, "wrong": -0.4}
    misspelt = next(each for each in space.configurations() if (each.num_steps, each.nccl_set) == (7, "wrong"))
    launched = Observation(
        trial=replace(plan(misspelt, space), role="incumbent", number=None),
        status="completed",
        blocks=tuple(blocks_of(misspelt, rng, nccl_ms=nccl_ms)),
        seconds=seconds,
        relaunched=True,
        all_reduce="nccl",
        nccl_unread=nccl_unread,
    )
    study, asked = SweepStudy(spec, space, observations=Observations([launched])), []
    while study.stop_reason is None and (trial := study.ask()) is not None:
        asked.append(trial.configuration.nccl_set)
        for block in blocks_of(trial.configuration, rng, nccl_ms=nccl_ms):
            study.report(trial, block, seconds=seconds)
        study.tell(trial, Outcome(status="completed", relaunched=True, seconds=seconds, all_reduce="nccl"))
    assert ("wrong" in asked) is not nccl_unread
    assert "default" in asked
