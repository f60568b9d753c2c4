"""The bridge on a real local cluster of logical GPUs: one for the module, because a cluster takes seconds to start."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import optuna
import pytest
import ray
from optuna.trial import TrialState

from ray_jobs.nodes import Node
from ray_jobs.ray_settings import RAY_SETTINGS
from ray_jobs.trial_actor import SweepRun, SweepTrainable, check_visible_gpus
from ray_jobs.tune_bridge import run_study
from sweeps.engines.base import Engine
from sweeps.engines.simulated.engine import SimulatedEngine
from sweeps.engines.summary import BlockSummary
from sweeps.measure.records import Decision, Outcome, PlannedTrial
from sweeps.measure.recovery import recover
from sweeps.results.tables import ResultsFolder, read_table
from sweeps.search.optuna_study import InvalidSuggestion
from sweeps.search.resume import read_observations
from sweeps.search.study import SweepStudy
from sweeps.search.study_journal import open_journal
from sweeps.spec.model import SweepSpec
from sweeps.spec.space import Space
from sweeps.spec.workload import plan_blocks
from tests.sweeps.stub_engine import SCRIPT, SPEC, open_stub, plan, stub_spec

pytestmark = pytest.mark.ray

optuna.logging.set_verbosity(optuna.logging.WARNING)


OPEN = {"RAY_AUTH_MODE": "disabled"}
"""Ray reads its mode when it is imported, and this module has imported it without a token."""


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    settings = {**RAY_SETTINGS, **OPEN}
    kept = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    ray.init(address="local", num_cpus=2, num_gpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
    for name, value in kept.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture(autouse=True)
def _quiet_tune(monkeypatch: pytest.MonkeyPatch, _clean_environment: None) -> None:
    for name, value in {**RAY_SETTINGS, **OPEN}.items():
        monkeypatch.setenv(name, value)


class Notes:
    """An observer that remembers, and may end the driver's work as a signal would."""

    def __init__(self, *, interrupt_after: int | None = None) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self.started_ids: list[str] = []
        self.invalid: list[InvalidSuggestion] = []
        self._interrupt_after = interrupt_after

    def started(self, trial: PlannedTrial) -> None:
        self.started_ids.append(trial.trial_id)

    def block_done(self, trial: PlannedTrial, block: BlockSummary, decision: Decision) -> None:
        if self._interrupt_after is not None and len(self.outcomes) >= self._interrupt_after:
            os.kill(os.getpid(), signal.SIGINT)
            self._interrupt_after = None

    def ended(self, trial: PlannedTrial, outcome: Outcome) -> None:
        self.outcomes[trial.trial_id] = outcome

    def refused(self, invalid: InvalidSuggestion) -> None:
        self.invalid.append(invalid)


def sweep(
    spec: SweepSpec,
    root: Path,
    *,
    script: Mapping[str, object] | None = None,
    notes: Notes | None = None,
    open_engine: Callable[[SweepSpec, ResultsFolder], Engine] = open_stub,
) -> tuple[SweepStudy, int, Notes, ResultsFolder]:
    folder, space, notes = ResultsFolder(root), Space(spec), notes or Notes()
    if script is not None:
        (root / SCRIPT).write_text(json.dumps(script))
    recover(folder, num_blocks=spec.workload.blocks)
    study = SweepStudy(spec, space, storage=open_journal(folder.study), observations=read_observations(folder, space))
    run = SweepRun(
        spec=spec,
        sweep_id="s1",
        folder=folder,
        blocks=plan_blocks(spec.workload, folder=root),
        open_engine=open_engine,
    )
    return study, run_study(study, run, notes), notes, folder


def trials(folder: ResultsFolder) -> dict[str, dict[str, object]]:
    rows = read_table(folder, "trials").sort_by([("trial_id", "ascending"), ("attempt", "ascending")]).to_pylist()
    return {f"{row['trial_id']}-a{row['attempt']}": row for row in rows}


def test_a_sweep_prunes_refuses_and_keeps_its_actor(weird_tmp_path: Path) -> None:
    spec = stub_spec("study: {pruner: {name: median, options: {n_startup_trials: 1}}}\n")
    study, num_errors, notes, folder = sweep(spec, weird_tmp_path)
    rows = trials(folder)
    assert num_errors == 0
    assert study.finished
    pruned = {key for key, row in rows.items() if row["status"] == "pruned"}
    assert pruned
    for key in pruned:
        assert "median: tok_s" in str(rows[key]["reason"])
        number = int(key[1:5])
        assert study.study.trials[number].state == TrialState.PRUNED
        assert len(study.study.trials[number].intermediate_values) == rows[key]["num_blocks"]
    invalid = [row for row in rows.values() if row["status"] == "invalid"]
    assert len(invalid) == len(notes.invalid) == 2
    assert all("pool 2 < 3" in str(row["reason"]) and row["launch_s"] == 0.0 for row in invalid)
    machines = {row["machine"] for row in rows.values() if row["status"] != "invalid"}
    assert len(machines) == 1, "the engine was opened more than once"
    assert {row["relaunched"] for row in rows.values() if row["status"] == "completed"} == {True, False}
    served = {(seen.status, seen.all_reduce) for seen in study.observations if seen.status != "failed"}
    assert served == {("completed", "nccl"), ("pruned", "nccl")}, "the search was not told who serves all-reduces"
    assert not list((folder.root / "journal").iterdir())
    blocks = read_table(folder, "blocks")
    assert blocks.num_rows == sum(int(str(row["num_blocks"])) for row in rows.values())


def open_simulated(spec: SweepSpec, folder: ResultsFolder) -> SimulatedEngine:
    return SimulatedEngine(spec)


def test_steps_are_switched_in_one_actor_where_no_gpu_is_asked_for(tmp_path: Path) -> None:
    text = SPEC.replace("[0, 1, 2, 3]", "[1, 2, 3]").replace("[1, 2]", "[1]").replace("[default, ring]", "[default]")
    _, num_errors, _, folder = sweep(stub_spec("resources: {gpus: 0}\n", text=text), tmp_path)
    rows = list(trials(folder).values())
    assert num_errors == 0
    assert len({row["machine"] for row in rows}) == 1
    candidates = [row["relaunched"] for row in rows if row["role"] == "candidate"]
    assert candidates == [True, False, False]


def test_a_failing_configuration_is_a_row_and_is_not_retried(tmp_path: Path) -> None:
    script = {"launch": ["nccl_no_algorithm"]}
    _, num_errors, notes, folder = sweep(stub_spec("budget: {trials: 1}\n"), tmp_path, script=script)
    rows = trials(folder)
    assert num_errors == 0
    assert (rows["k0000-a1"]["status"], rows["k0000-a1"]["kind"]) == ("failed", "nccl_no_algorithm")
    assert "k0000-a2" not in rows
    assert notes.outcomes["k0000"].seconds["failed"] == 100.0


def test_a_transient_failure_is_retried_once(tmp_path: Path) -> None:
    script = {"launch": ["crash", "crash", "host_oom"]}
    _, num_errors, notes, folder = sweep(stub_spec("budget: {trials: 1}\n"), tmp_path, script=script)
    rows = trials(folder)
    assert num_errors == 0
    assert [rows[f"k0000-a{attempt}"]["status"] for attempt in (1, 2)] == ["failed", "failed"]
    assert notes.outcomes["k0000"].seconds["failed"] == 200.0
    first_candidate = notes.started_ids[1]
    assert [rows[f"{first_candidate}-a{attempt}"]["status"] for attempt in (1, 2)] == ["failed", "completed"]
    assert notes.outcomes[first_candidate].seconds["failed"] == 100.0


def test_a_node_whose_gpus_stay_in_use_ends_the_sweep_and_no_configuration_is_blamed(tmp_path: Path) -> None:
    script = {"launch": ["gpu_not_clean"] * 6}
    study, num_errors, notes, folder = sweep(stub_spec(), tmp_path, script=script)
    rows = trials(folder)
    assert num_errors == 0
    assert study.stop_reason is not None
    assert "3 trials in a row found their node unusable" in study.stop_reason
    assert [row["kind"] for row in rows.values() if row["status"] == "failed"] == ["gpu_not_clean"] * 6
    assert {seen.kind for seen in read_observations(folder, study.space) if not seen.refused} == {"interrupted"}
    assert {outcome.kind for outcome in notes.outcomes.values()} == {"interrupted"}


def test_a_trial_whose_actor_died_keeps_its_blocks_and_is_measured_again(tmp_path: Path) -> None:
    study, num_errors, notes, folder = sweep(
        stub_spec("budget: {trials: 2}\n"), tmp_path, script={"die_in_block": True}
    )
    rows = trials(folder)
    assert num_errors == 0
    assert study.has_measured
    assert (rows["k0000-a1"]["status"], rows["k0000-a1"]["num_blocks"]) == ("failed", 2)
    assert rows["k0000-a1"]["kind"] == notes.outcomes["k0000"].kind == "interrupted", "told and written alike"
    assert notes.started_ids[:2] == ["k0000", "k0001"]
    others = [outcome.status for trial_id, outcome in notes.outcomes.items() if trial_id != "k0000"]
    assert others
    assert set(others) == {"completed"}


def test_an_interrupted_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    spec = stub_spec()
    with contextlib.suppress(KeyboardInterrupt):
        sweep(spec, tmp_path, notes=Notes(interrupt_after=4))
    assert not ResultsFolder(tmp_path).stop_request.exists()
    before = {key: row for key, row in trials(ResultsFolder(tmp_path)).items() if row["status"] == "completed"}
    assert len(before) >= 4
    study, num_errors, notes, folder = sweep(spec, tmp_path)
    after = trials(folder)
    assert num_errors == 0
    assert study.finished
    assert not {key[:5] for key in before} & set(notes.started_ids)
    assert {key: after[key] for key in before} == before
    measured = [
        row["configuration_id"] for row in after.values() if row["status"] == "completed" and row["role"] == "candidate"
    ]
    control = study.space.control.configuration_id
    assert sorted([*map(str, measured), control]) == sorted(m.configuration_id for m in study.space.configurations())


def test_an_actor_that_lost_its_trial_before_the_first_step_leaves_nothing(tmp_path: Path) -> None:
    """With several nodes Tune gives a waiting trial to the first free actor, and ends the one still starting."""
    spec = stub_spec()
    space, folder = Space(spec), ResultsFolder(tmp_path)
    blocks = plan_blocks(spec.workload, folder=tmp_path)
    actor = SweepTrainable.__new__(SweepTrainable)
    actor.setup(
        {"trial": plan(space.control, space), "node": Node("id", "name", 1.0)},
        SweepRun(spec=spec, sweep_id="s1", folder=folder, blocks=blocks, open_engine=open_stub),
    )
    actor.cleanup()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("visible", [None, "", "0,1,2"])
def test_an_actor_with_other_gpus_than_promised_says_so(visible: str | None) -> None:
    with pytest.raises(RuntimeError, match="wanted 8 GPUs"):
        check_visible_gpus(visible, 8)
    check_visible_gpus("0,1,2,3,4,5,6,7", 8)
