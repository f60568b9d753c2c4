from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import optuna
import pytest
from optuna.trial import TrialState

from sweeps.engines.base import EngineError
from sweeps.engines.summary import BlockSummary
from sweeps.measure.held_engine import HeldEngine
from sweeps.measure.records import Decision, Outcome, PlannedTrial
from sweeps.measure.recovery import recover
from sweeps.measure.trial import Measurement
from sweeps.results.tables import ResultsFolder
from sweeps.search.observations import Observations
from sweeps.search.resume import read_observations
from sweeps.search.samplers import Search, build_search
from sweeps.search.study import SweepStudy
from sweeps.search.study_journal import open_journal
from sweeps.spec.document import SpecError
from sweeps.spec.model import EngineSpec, SweepSpec
from sweeps.spec.names import OPTUNA_PRUNERS, OPTUNA_SAMPLERS, FromOptuna
from sweeps.spec.space import Configuration, Space
from tests.sweeps.stub_engine import SPEC, StubEngine, drive, stub_context, stub_spec, tok_s_of

SAMPLERS = tuple(name for name, made in OPTUNA_SAMPLERS.items() if "torch" not in made.needs)
PRUNERS = tuple(OPTUNA_PRUNERS)

optuna.logging.set_verbosity(optuna.logging.WARNING)


def study_of(spec: SweepSpec, **options: object) -> SweepStudy:
    return SweepStudy(spec, Space(spec), **options)  # type: ignore[arg-type]


def run(spec: SweepSpec, folder: Path) -> tuple[SweepStudy, list[PlannedTrial]]:
    study = study_of(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        trials = drive(study, HeldEngine(StubEngine()), stub_context(spec, folder))
    return study, trials


def best(space: Space) -> Configuration:
    return max(space.configurations(), key=tok_s_of)


@pytest.mark.parametrize("pruner", PRUNERS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_and_pruner_finds_the_best_and_measures_each_configuration_once(
    sampler: str, pruner: str, tmp_path: Path
) -> None:
    spec = stub_spec(f"study: {{sampler: {{name: {sampler}}}, pruner: {{name: {pruner}}}}}\n")
    study, trials = run(spec, tmp_path)
    assert study.finished
    assert study.incumbent is not None
    assert tok_s_of(study.incumbent) == tok_s_of(best(study.space))
    candidates = [trial.configuration for trial in trials if trial.role == "candidate"]
    assert len(candidates) == len(set(candidates))
    assert {*candidates, study.space.control} == set(study.space.configurations())
    assert not study.observations.running
    states = {frozen.state for frozen in study.study.trials}
    assert TrialState.RUNNING not in states


def test_a_row_in_the_table_of_names_is_all_that_a_sampler_of_optuna_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As CONTRIBUTING tells; Optuna's quasi-Monte-Carlo sampler is not among ours."""
    text = "study: {sampler: {name: qmc, options: {scramble: true}}}\n"
    with pytest.raises(SpecError, match="no sampler 'qmc'"):
        stub_spec(text)
    monkeypatch.setitem(cast(dict[str, FromOptuna], OPTUNA_SAMPLERS), "qmc", FromOptuna(class_name="QMCSampler"))
    study, trials = run(stub_spec(text), tmp_path)
    assert isinstance(study.study.sampler, optuna.samplers.QMCSampler)
    assert {trial.configuration for trial in trials} == set(study.space.configurations())


@pytest.mark.parametrize(("table", "module"), [(OPTUNA_SAMPLERS, optuna.samplers), (OPTUNA_PRUNERS, optuna.pruners)])
def test_every_name_is_a_class_of_optuna(table: Mapping[str, FromOptuna], module: ModuleType) -> None:
    for made in table.values():
        assert issubclass(getattr(module, made.class_name), optuna.samplers.BaseSampler | optuna.pruners.BasePruner)


def test_the_grid_is_ordered_by_launch_key(tmp_path: Path) -> None:
    _, trials = run(stub_spec(), tmp_path)
    keys = [trial.launch_key for trial in trials if trial.role == "candidate"]
    changes = sum(before != after for before, after in itertools.pairwise(keys))
    assert changes == len(set(keys)) - 1


def test_controls_come_first_between_and_last_with_the_incumbent_beside_them(tmp_path: Path) -> None:
    _, trials = run(stub_spec(), tmp_path)
    assert trials[0].trial_id == "k0000"
    assert trials[0].configuration == Space(stub_spec()).control
    assert [trial.role for trial in trials[-2:]] == ["control", "incumbent"]
    between = [
        len([t for t in trials[:place] if t.role == "candidate"])
        for place, trial in enumerate(trials)
        if trial.role == "control"
    ]
    assert between == [0, 5, 10, 11]


def test_without_intermediate_controls_there_are_two(tmp_path: Path) -> None:
    spec = stub_spec(text=stub_spec_text(every=0, incumbent="false"))
    _, trials = run(spec, tmp_path)
    assert [trial.role for trial in trials if trial.role != "candidate"] == ["control", "control"]


def stub_spec_text(*, every: int, incumbent: str = "true") -> str:
    return SPEC.replace("control: {every: 5}", f"control: {{every: {every}, incumbent: {incumbent}}}")


def test_infeasible_suggestions_fail_with_a_reason_and_come_once(tmp_path: Path) -> None:
    for sampler in SAMPLERS:
        spec = stub_spec(f"study: {{sampler: {{name: {sampler}}}}}\n")
        study, trials = run(spec, tmp_path / sampler)
        invalid = study.drain_invalid()
        asked = [frozenset(entry.requested.items()) for entry in invalid]
        assert len(asked) == len(set(asked)) > 0
        assert all("pool 2 < 3" in entry.reason for entry in invalid)
        failed = {frozen.number: frozen for frozen in study.study.trials if frozen.state == TrialState.FAIL}
        assert all("pool 2 < 3" in failed[int(entry.trial_id[1:])].user_attrs["reason"] for entry in invalid)
        assert not {entry.trial_id for entry in invalid} & {trial.trial_id for trial in trials}
        assert study.drain_invalid() == ()


def test_pruned_trials_are_pruned_with_numbers_in_the_reason(tmp_path: Path) -> None:
    spec = stub_spec("study: {pruner: {name: median, options: {n_startup_trials: 1}}}\n")
    study, _ = run(spec, tmp_path)
    pruned = [frozen for frozen in study.study.trials if frozen.state == TrialState.PRUNED]
    assert pruned
    for frozen in pruned:
        assert "median: tok_s" in frozen.user_attrs["reason"]
        seen = study.observations.of_number(frozen.number)
        assert seen is not None
        assert seen.status == "pruned"
        assert len(seen.blocks) < spec.workload.blocks


def test_wilcoxon_gets_blocks_and_the_others_what_a_trial_has_so_far(tmp_path: Path) -> None:
    for pruner, steps in (("wilcoxon", range(6)), ("median", range(1, 7))):
        spec = stub_spec(f"study: {{pruner: {{name: {pruner}}}}}\n")
        study, _ = run(spec, tmp_path / pruner)
        control = next(frozen for frozen in study.study.trials if "control" in frozen.user_attrs)
        assert list(control.intermediate_values) == list(steps)
        values = list(control.intermediate_values.values())
        blocks = [80.0, 80.1, 80.2, 80.0, 80.1, 80.2]
        so_far = [count / sum(1 / rate for rate in blocks[:count]) for count in range(1, 7)]
        assert values == pytest.approx(blocks if pruner == "wilcoxon" else so_far), "tokens over seconds"
        assert control.value == pytest.approx(so_far[-1])


def test_replicates_up_to_the_cap(tmp_path: Path) -> None:
    spec = stub_spec("study: {sampler: {name: tpe}, max_replicates: 2}\n")
    study, trials = run(spec, tmp_path)
    counts = [
        sum(t.configuration == member for t in trials if t.role == "candidate")
        for member in study.space.configurations()
    ]
    in_space_control = study.space.configurations().index(study.space.control)
    assert all(count == 2 for place, count in enumerate(counts) if place != in_space_control)
    assert counts[in_space_control] == 1


def test_budgets_end_a_sweep_with_a_last_control(tmp_path: Path) -> None:
    for budget, said in (("trials: 3", "3 candidates"), ("gpu_hours: 0.5", "budget.gpu_hours")):
        spec = stub_spec(f"budget: {{{budget}}}\n")
        study, trials = run(spec, tmp_path / said.replace(" ", ""))
        assert study.stop_reason is not None
        assert said in study.stop_reason
        assert trials[-1].role != "candidate"
        assert "control" in [trial.role for trial in trials[-2:]]


def test_wall_hours_are_counted_on_the_given_clock() -> None:
    now_s = [0.0]
    spec = stub_spec("budget: {wall_hours: 1.0}\ncontrol: {every: 0}\n".replace("control: {every: 0}\n", ""))
    study = study_of(spec, clock=lambda: now_s[0])
    control = study.ask()
    assert control is not None
    study.tell(control, Outcome(status="completed"))
    now_s[0] = 3601.0
    assert study.ask() is None
    assert study.stop_reason is not None
    assert "budget.wall_hours" in study.stop_reason


def test_the_end_waits_for_running_trials() -> None:
    study = study_of(stub_spec("budget: {trials: 1}\n"))
    control, candidate = study.ask(), study.ask()
    assert control is not None
    assert candidate is not None
    assert study.ask() is None
    assert not study.finished
    study.tell(control, Outcome(status="completed"))
    study.tell(candidate, Outcome(status="failed", reason="died", kind="crash"))
    last = study.ask()
    assert last is not None
    assert last.role == "control"


def test_a_failed_configuration_is_told_and_not_asked_again(tmp_path: Path) -> None:
    study = study_of(stub_spec("study: {sampler: {name: tpe}}\n"))
    asked = []
    while (trial := study.ask()) is not None:
        asked.append(trial.configuration.configuration_id if trial.role == "candidate" else None)
        failed = Outcome(status="failed", reason="CUDA out of memory", stage="load", kind="gpu_oom")
        study.tell(trial, failed if trial.role == "candidate" else Outcome(status="completed"))
    known = [entry for entry in asked if entry is not None]
    others = {each.configuration_id for each in study.space.configurations()} - {study.space.control.configuration_id}
    assert sorted(known) == sorted(others)
    reasons = {frozen.user_attrs["reason"] for frozen in study.study.trials if frozen.state == TrialState.FAIL}
    assert "CUDA out of memory" in reasons
    assert study.incumbent is None


def test_a_control_that_fails_twice_in_the_same_way_ends_the_sweep_with_its_reason() -> None:
    study = study_of(stub_spec())
    asked = []
    while (trial := study.ask()) is not None:
        asked.append(trial.trial_id)
        study.tell(trial, Outcome(status="failed", reason="no module sglang", stage="load", kind="engine_unavailable"))
    assert asked == ["k0000", "k0001"]
    assert study.stop_reason is not None
    assert "failed twice in the same way (engine_unavailable): no module sglang" in study.stop_reason
    assert not study.has_measured


def test_a_control_that_fails_once_is_measured_the_next_time(tmp_path: Path) -> None:
    study = study_of(stub_spec())
    error = EngineError("no answer", stage="load", kind="crash")
    trials = drive(study, HeldEngine(StubEngine(failures={"launch": [error]})), stub_context(stub_spec(), tmp_path))
    assert [(each.trial_id, each.role) for each in trials[:2]] == [("k0000", "control"), ("k0001", "control")]
    assert study.has_measured
    assert "12 of 12 were measured" in str(study.stop_reason)


def test_a_sweep_whose_candidates_all_fail_has_measured_nothing() -> None:
    study = study_of(stub_spec())
    while (trial := study.ask()) is not None:
        if trial.role == "control":
            block = BlockSummary(
                block_index=0, started_s=0.0, wall_s=1.0, decode_tokens=80, decode_s=1.0, num_cycles=9,
                accept_length=None, accept_histogram=None, draft_ms=None, verify_ms=None,
                verify_forward_ms=None, extend_ms=None, gap_ms=None, cycle_ms=12.0,
            )  # fmt: skip
            study.report(trial, block, seconds={})
            study.tell(trial, Outcome(status="completed"))
        else:
            study.tell(trial, Outcome(status="failed", reason="no memory", stage="load", kind="gpu_oom"))
    assert not study.has_measured


def test_a_node_gets_a_control_of_its_own_as_long_as_candidates_may_follow() -> None:
    study = study_of(stub_spec("budget: {trials: 2}\n"))
    first, second = study.ask_control(), study.ask_control()
    assert first is not None
    assert second is not None
    assert [(trial.trial_id, trial.role) for trial in (first, second)] == [("k0000", "control"), ("k0001", "control")]
    candidates = [study.ask(), study.ask()]
    assert [trial.role for trial in candidates if trial is not None] == ["candidate"] * 2, "the due control was taken"
    assert study.ask_control() is None
    for trial in (first, second, *candidates):
        assert trial is not None
        study.tell(trial, Outcome(status="completed"))
    assert study.ask_control() is None


def test_stop_ends_at_once() -> None:
    study = study_of(stub_spec())
    study.stop("3 errors in a row")
    assert study.ask() is None
    assert study.finished


class TestResume:
    def test_no_finished_trial_is_lost_or_repeated(self, tmp_path: Path) -> None:
        spec = stub_spec("study: {sampler: {name: tpe}}\n")
        space, folder = Space(spec), ResultsFolder(tmp_path)
        first = SweepStudy(spec, space, storage=open_journal(folder.study))
        ran = drive(first, HeldEngine(StubEngine()), stub_context(spec, tmp_path), limit=4)
        running = first.ask()  # asked, and the driver dies
        assert running is not None
        recover(folder, num_blocks=spec.workload.blocks)
        observations = read_observations(folder, space)
        assert [seen.trial.trial_id for seen in observations] == [trial.trial_id for trial in ran]
        assert [seen.blocks for seen in observations] == [first.observations[t.trial_id].blocks for t in ran]
        second = SweepStudy(spec, space, storage=open_journal(folder.study), observations=observations)
        told = {frozen.number: frozen for frozen in second.study.trials}
        if running.number is not None:
            assert told[running.number].state == TrialState.FAIL
            assert told[running.number].user_attrs["reason"] == "driver_died"
        rest = drive(second, HeldEngine(StubEngine()), stub_context(spec, tmp_path))
        both = [t.configuration for t in (*ran, *rest) if t.role == "candidate"]
        assert len(both) == len(set(both))
        assert {*both, space.control} == set(space.configurations())

    def test_a_trial_that_finished_while_the_driver_died_counts(self, tmp_path: Path) -> None:
        spec = stub_spec()
        space, folder = Space(spec), ResultsFolder(tmp_path)
        first = SweepStudy(spec, space, storage=open_journal(folder.study))
        context = stub_context(spec, tmp_path)
        ran = drive(first, HeldEngine(StubEngine()), context, limit=2)
        untold = first.ask()
        assert untold is not None
        measurement = Measurement(HeldEngine(StubEngine()), untold, context)
        while isinstance(measurement.advance(), BlockSummary):
            pass
        second = SweepStudy(
            spec, space, storage=open_journal(folder.study), observations=read_observations(folder, space)
        )
        assert untold.number is not None
        frozen = second.study.trials[untold.number]
        assert frozen.state == TrialState.COMPLETE
        assert frozen.value == pytest.approx(tok_s_of(untold.configuration) + 0.1, abs=0.05)
        assert len(second.observations) == len(ran) + 1

    def test_a_finished_sweep_stays_finished(self, tmp_path: Path) -> None:
        spec = stub_spec()
        space, folder = Space(spec), ResultsFolder(tmp_path)
        study = SweepStudy(spec, space, storage=open_journal(folder.study))
        drive(study, HeldEngine(StubEngine()), stub_context(spec, tmp_path))
        again = SweepStudy(
            spec, space, storage=open_journal(folder.study), observations=read_observations(folder, space)
        )
        assert again.ask() is None
        assert again.finished
        assert again.drain_invalid() == ()


@pytest.mark.parametrize(
    ("study", "said"),
    [
        ("sampler: {name: tpe, options: {n_startup: 3}}", "tpe takes .*n_startup_trials.*, got n_startup"),
        ("pruner: {name: none, options: {x: 1}}", "none takes no options, got x"),
        ("pruner: {name: median, options: {n_startup_trials: -1}}", "refuses"),
        ("metric: verify_ms", "verify_ms does not exist without speculation"),
        ("stop_probability: 0.95", "only the sampler cycle_model"),
    ],
)
def test_a_study_that_cannot_be_is_refused(study: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        study_of(stub_spec(f"study: {{{study}}}\n"))


def test_gp_names_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SpecError, match="gp needs torch, scipy"):
        study_of(stub_spec("study: {sampler: {name: gp}}\n"))


def test_a_pruner_that_can_say_why_is_asked(tmp_path: Path) -> None:
    class Bound(optuna.pruners.NopPruner):
        def __init__(self, observations: Observations) -> None:
            self.observations = observations

        def decide(self, number: int) -> Decision:
            seen = self.observations.of_number(number)
            assert seen is not None
            return Decision(prune=len(seen.blocks) == 2, reason="bound 61 < 80", numbers={"bound": 61.0})

    def with_bound(*args: Any, **known: Any) -> Search:
        sampler, _ = build_search(*args, **known)
        return sampler, Bound(known["observations"])

    study = study_of(stub_spec(), build=with_bound)
    trials = drive(study, HeldEngine(StubEngine()), stub_context(study.spec, tmp_path))
    candidates = [study.observations[trial.trial_id] for trial in trials if trial.role == "candidate"]
    assert {(seen.status, len(seen.blocks), seen.reason) for seen in candidates} == {("pruned", 2, "bound 61 < 80")}


def bad_arguments(count: int) -> dict[str, list[EngineError | None]]:
    """The control's launch succeeds, and so many after it do not."""
    return {"launch": [None, *(EngineError("no such flag", stage="load", kind="invalid_config") for _ in range(count))]}


def test_configurations_that_the_version_refuses_take_no_budget_and_stay_known_on_resume(tmp_path: Path) -> None:
    trees_first = SPEC.replace("[0, 1, 2, 3]", "[3, 2, 1, 0]").replace("[1, 2]", "[2, 1]")
    spec = stub_spec("budget: {trials: 5}\n", text=trees_first)
    context = stub_context(spec, tmp_path)
    server = EngineSpec(kind="sglang", model_path="m", args={"attention-backend": "flashmla"})
    study = study_of(spec)
    trials = drive(study, HeldEngine(StubEngine(version="0.5.17")), replace(context, server=server))
    seen = [study.observations[trial.trial_id] for trial in trials if trial.role == "candidate"]
    assert all(each.refused for each in seen if each.trial.configuration.eagle_topk == 2)
    assert sum(each.status == "completed" for each in seen) == 5
    assert any(each.refused for each in seen)
    failed = drive(
        study_of(spec), HeldEngine(StubEngine(failures=bad_arguments(2))), stub_context(spec, tmp_path / "b")
    )
    assert sum(trial.role == "candidate" for trial in failed) == 5, "a launch that failed takes budget"
    assert not any(each.refused for each in read_observations(ResultsFolder(tmp_path / "b"), study.space))
    again = read_observations(ResultsFolder(tmp_path), study.space)
    assert {each.trial.trial_id for each in again if each.refused} == {
        each.trial.trial_id for each in seen if each.refused
    }
    assert study_of(spec, observations=again).candidates_left == 0


def test_an_incumbent_whose_repeat_was_interrupted_is_repeated_by_the_next_driver(tmp_path: Path) -> None:
    spec = stub_spec("budget: {trials: 2}\n")
    study, trials = run(spec, tmp_path)
    assert [trial.role for trial in trials[-2:]] == ["control", "incumbent"]
    interrupted = [
        replace(seen, status="failed", kind="interrupted", blocks=()) if seen.trial == trials[-1] else seen
        for seen in study.observations
    ]
    resumed = SweepStudy(spec, study.space, observations=Observations(interrupted))
    asked = resumed.ask()
    assert asked is not None
    assert (asked.role, asked.configuration) == ("incumbent", trials[-1].configuration)
    resumed.tell(asked, Outcome(status="completed"))
    assert resumed.ask() is None
    assert resumed.finished


OFF, ON = "nccl: false, all_reduce: false, trees: false", "nccl: true, all_reduce: true, trees: true"


def with_states() -> SweepSpec:
    assert OFF in SPEC
    return stub_spec(text=SPEC.replace(OFF, ON))


def test_with_states_the_control_is_launched_once_and_the_winner_by_itself_at_the_end(tmp_path: Path) -> None:
    study, trials = run(with_states(), tmp_path)
    roles = [trial.role for trial in trials]
    assert roles.count("control") == 1
    assert (roles[0], roles[-1], roles.count("incumbent")) == ("control", "incumbent", 1)
    winner = trials[-1]
    assert winner.configuration == study.incumbent
    assert winner.states == ()
    assert winner.launch_key not in {trial.launch_key for trial in trials[:-1]}
    assert len({trial.launch_key for trial in trials}) == 1 + 2 + 1, "no speculation, top-k 1 and 2, the winner"


def test_with_states_trials_left_counts_down_to_none(tmp_path: Path) -> None:
    study = study_of(with_states())
    left = []
    held, context = HeldEngine(StubEngine()), stub_context(with_states(), tmp_path)
    while study.trials_left:
        left.append(study.trials_left)
        assert drive_one(study, held, context)
    assert left == sorted(left, reverse=True)
    assert study.ask() is None
    assert study.finished


def drive_one(study: SweepStudy, held: HeldEngine, context: Any) -> bool:
    trial = study.ask()
    if trial is None:
        return False
    measurement = Measurement(held, trial, context)
    result = measurement.advance()
    while not isinstance(result, Outcome):
        study.report(trial, result, seconds=measurement.seconds)
        result = measurement.advance()
    study.tell(trial, result)
    return True


@pytest.mark.parametrize("sampler", ["grid", "random"])
def test_a_trial_that_a_killed_driver_had_enqueued_is_not_handed_out(sampler: str, tmp_path: Path) -> None:
    spec = stub_spec(f"study: {{sampler: {{name: {sampler}}}}}\n")
    storage = optuna.storages.InMemoryStorage()
    killed = study_of(spec, storage=storage)
    first = killed.space.configurations()[0]
    killed.study.enqueue_trial(dict(killed.space.suggestion(first)))

    study = study_of(spec, storage=storage)
    trials = drive(study, HeldEngine(StubEngine()), stub_context(spec, tmp_path))

    measured = [trial.configuration for trial in trials if trial.role == "candidate"]
    assert len(measured) == len(set(measured))
    assert not study.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
