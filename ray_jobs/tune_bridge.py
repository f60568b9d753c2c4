"""Ray Tune around a `SweepStudy`: the Searcher and TrialScheduler pair that share it, and the actor with the engine.

Tune places trials and keeps actors; it decides nothing. Suggestions, pruning, controls, budget and resuming are the
study's and the results folder's, so Tune's own snapshots are never read back.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import ray
from ray import tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from ray_jobs.trial_actor import SweepRun, SweepTrainable
from sweeps.engines.summary import BlockSummary
from sweeps.measure.records import Decision, FailureKind, Outcome, PlannedTrial, kind_for_search
from sweeps.measure.rows import (
    PROCESS_DIED,
    invalid_row,
    last_outcome,
    lost_row,
    record_decision,
    record_findings,
)
from sweeps.measure.trial import recover
from sweeps.results.tables import ResultsFolder, write_part
from sweeps.results.writing import StorageError, full_disk
from sweeps.search.optuna_study import InvalidSuggestion
from sweeps.search.study import SweepStudy
from sweeps.spec.model import ResourceSpec

_MAX_ERRORS_IN_A_ROW = 3


class SweepObserver(Protocol):
    """Told of what happens, in the driver's thread."""

    def started(self, trial: PlannedTrial) -> None: ...

    def block_done(self, trial: PlannedTrial, block: BlockSummary, decision: Decision) -> None: ...

    def ended(self, trial: PlannedTrial, outcome: Outcome) -> None: ...

    def refused(self, invalid: InvalidSuggestion) -> None: ...


class StudySearcher(Searcher):
    """Hands Tune the study's trials and the study Tune's endings."""

    def __init__(self, study: SweepStudy, run: SweepRun, observer: SweepObserver, *, max_concurrent: int) -> None:
        super().__init__()
        self.study = study
        self.run = run
        self.observer = observer
        self._lost_trials: list[PlannedTrial] = []
        self.full: StorageError | None = None
        """Why the run ended, if the disk was full."""
        self._errors_in_a_row = 0
        self._max_concurrent = max_concurrent
        self._live: dict[str, PlannedTrial] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its configuration; nothing reads it back, and the study's storage must not be copied.
        return {"_metric": None, "_mode": None}

    def set_search_properties(self, metric: str | None, mode: str | None, config: Any, **spec: Any) -> bool:
        return True

    def set_max_concurrency(self, max_concurrent: int) -> bool:
        self._max_concurrent = max_concurrent
        return True  # Tune's own limiter would drop the endings of trials that it did not start

    @contextlib.contextmanager
    def _halting(self) -> Iterator[None]:
        """End the run if the disk is full: nothing more is asked for, and nothing that could not be kept is told."""
        try:
            yield
        except OSError as error:
            if (full := full_disk(error)) is None:
                raise
            self._halt(full)

    def _halt(self, full: StorageError) -> None:
        self.full = self.full or full
        self.study.stop(str(self.full))

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override] # FINISHED is a str
        with self._halting():
            return self._suggest(trial_id)
        return str(Searcher.FINISHED)

    def _suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        if len(self._live) >= self._max_concurrent:
            return None
        trial = self.study.ask()
        for invalid in self.study.drain_invalid():
            self._refuse(invalid)
        self._note_findings()
        if trial is None:
            return str(Searcher.FINISHED) if self.study.finished else None
        self._live[trial_id] = trial
        self.observer.started(trial)
        return {"trial": trial}

    def take_block(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """True: the trial ends here. A decision to prune is on disk before the actor hears of it."""
        with self._halting():
            return self.full is not None or self._take_block(trial_id, result)
        return True

    def _take_block(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        trial, newest = self._live[trial_id], result["block"]
        block = newest.block
        decision = self.study.report(trial, block, seconds=newest.seconds)
        if decision.prune:
            at_s = block.started_s + block.wall_s
            record_decision(self.run.folder, trial.trial_id, decision, sweep_id=self.run.sweep_id, at_s=at_s)
        self.observer.block_done(trial, block, decision)
        if decision.prune:
            pruned = Outcome(
                status="pruned",
                reason=decision.reason,
                seconds=newest.seconds,
                all_reduce=newest.all_reduce,
                nccl_unread=newest.nccl_unread,
            )
            self._end(trial_id, pruned)
        return decision.prune

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Blocks reach the study through the scheduler, which Tune asks first."""

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:  # noqa: FBT001, FBT002
        if trial_id not in self._live:
            return
        if result and "full" in result:
            self._halt(StorageError(result["full"]))
        if self.full is not None:
            del self._live[trial_id]
            return
        with self._halting():
            self._complete(trial_id, result, error=error)

    def _complete(self, trial_id: str, result: dict[str, Any] | None, *, error: bool) -> None:
        if error or not result or "outcome" not in result:
            self._lost(trial_id)
            return
        outcome: Outcome = result["outcome"]
        self._end(trial_id, replace(outcome, kind=kind_for_search(outcome.kind)))
        if outcome.kind == "gpu_not_clean":
            self._count_error(f"found their node unusable: {outcome.reason}")
        else:
            self._errors_in_a_row = 0

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the study's journal and the results folder hold all there is."""

    def restore(self, checkpoint_path: str) -> None:
        raise NotImplementedError("a sweep resumes from its results folder, never from a Tune snapshot")

    def _end(self, trial_id: str, outcome: Outcome) -> None:
        trial = self._live.pop(trial_id)
        self.study.tell(trial, outcome)
        self.observer.ended(trial, outcome)

    def _lost(self, trial_id: str) -> None:
        """The actor ended without saying how: its journal becomes rows, and the study is told what the rows say.

        The first time the trial counts as interrupted, so that its configuration is measured again. A configuration
        whose process dies twice is blamed for it.
        """
        trial, run = self._live[trial_id], self.run
        before = self.study.observations.of_configuration(trial.configuration)
        died_of: FailureKind = "crash" if any(seen.reason == PROCESS_DIED for seen in before) else "interrupted"
        if not recover(run.folder, num_blocks=run.num_measured, only=trial.trial_id, died_of=died_of):
            row = lost_row(trial, run.spec, PROCESS_DIED, sweep_id=run.sweep_id) | {"kind": died_of}
            write_part(run.folder, "trials", [row], trial_id=trial.trial_id, attempt=1)
        self._lost_trials.append(trial)
        self._end(trial_id, last_outcome(run.folder, trial.trial_id))
        self._count_error("ended in an unexpected error")

    @property
    def num_errors(self) -> int:
        """Trials whose process died, and whose configuration was not measured again."""
        measured = self.study.observations.measured()
        return sum(trial.configuration not in measured for trial in self._lost_trials)

    def _count_error(self, what: str) -> None:
        self._errors_in_a_row += 1
        if self._errors_in_a_row >= _MAX_ERRORS_IN_A_ROW:
            self.study.stop(f"{self._errors_in_a_row} trials in a row {what}")

    def _note_findings(self) -> None:
        ended = [seen for seen in self.study.observations if seen.status != "running"]
        findings = self.study.drain_findings()
        if findings and ended:
            last = ended[-1]
            at_s = max((block.started_s + block.wall_s for seen in ended for block in seen.blocks), default=0.0)
            record_findings(self.run.folder, last.trial.trial_id, findings, sweep_id=self.run.sweep_id, at_s=at_s)

    def _refuse(self, invalid: InvalidSuggestion) -> None:
        run = self.run
        row = invalid_row(invalid.requested, invalid.reason, run.spec, trial_id=invalid.trial_id, sweep_id=run.sweep_id)
        write_part(run.folder, "trials", [row], trial_id=invalid.trial_id, attempt=1)
        self.observer.refused(invalid)


class StudyScheduler(FIFOScheduler):
    """Asks the study after each block whether the trial goes on."""

    _supports_buffered_results = False

    def __init__(self, searcher: StudySearcher) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._searcher = searcher

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        return True

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        prune = self._searcher.take_block(trial.trial_id, result)
        return str(TrialScheduler.STOP if prune else TrialScheduler.CONTINUE)

    def debug_string(self) -> str:
        return "the sweep's study prunes"


def run_study(study: SweepStudy, run: SweepRun, observer: SweepObserver, *, num_nodes: int) -> int:
    """Run a study to its end on the connected Ray cluster. Returns the number of unexpected errors.

    Raises StorageError if the disk under the results folder took nothing more.

    Args:
        num_nodes: nodes with enough GPUs; as many trials run at once.
    """
    resources = run.spec.resources
    searcher = StudySearcher(study, run, observer, max_concurrent=num_nodes)
    bundle = {"CPU": exclusive_cpus(resources, ray.nodes()), "GPU": resources.gpus}
    trainable = tune.with_resources(
        tune.with_parameters(SweepTrainable, run=run),
        tune.PlacementGroupFactory([bundle], strategy="STRICT_PACK"),
    )
    run.folder.tune.mkdir(parents=True, exist_ok=True)
    tuner = tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(
            search_alg=searcher,
            scheduler=StudyScheduler(searcher),
            num_samples=-1,
            max_concurrent_trials=num_nodes,
            reuse_actors=True,
            trial_name_creator=_name,
            trial_dirname_creator=_name,
        ),
        run_config=tune.RunConfig(
            name=f"run-{sum(1 for _ in run.folder.tune.iterdir())}",
            storage_path=str(run.folder.tune),
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False),
            failure_config=tune.FailureConfig(max_failures=0),
            verbose=0,
        ),
    )
    try:
        with _prompt_stop(run.folder):
            tuner.fit()
    except (tune.TuneError, OSError) as error:
        searcher.full = searcher.full or full_disk(error)
        if searcher.full is None:
            raise
    if searcher.full is not None:
        raise searcher.full
    return searcher.num_errors


def exclusive_cpus(resources: ResourceSpec, nodes: Iterable[Mapping[str, Any]]) -> float:
    """CPUs to ask for, so that no node has room for a second trial beside the one whose server it runs.

    If the GPUs do not see to that (none asked for, or half of a node's), more than half of a node's CPUs do.
    """
    have: list[tuple[float, float]] = [
        (node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0)) for node in nodes if node["Alive"]
    ]
    fit = [(cpus, gpus) for cpus, gpus in have if gpus >= resources.gpus and cpus >= resources.cpus]
    roomy = [cpus for cpus, gpus in fit if gpus >= 2 * resources.gpus]
    if not roomy:
        return resources.cpus
    return max(resources.cpus, min(max(roomy) // 2 + 1, min(cpus for cpus, _ in fit)))


@contextlib.contextmanager
def _prompt_stop(folder: ResultsFolder) -> Iterator[None]:
    """On the first SIGINT, tell the actors before Tune does: one that waits for its server hears nothing from Tune.

    Tune takes SIGUSR1 for the same, and leaves SIGINT alone if TUNE_DISABLE_SIGINT_HANDLER is set.
    """
    folder.stop_request.unlink(missing_ok=True)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, unset = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGUSR1)

    def ask(signum: int, frame: object) -> None:
        signal.signal(signal.SIGINT, before)
        folder.stop_request.touch()
        if signal.getsignal(signal.SIGUSR1) == unset:  # Tune does not listen yet
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGUSR1)

    signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGUSR1, unset)
        folder.stop_request.unlink(missing_ok=True)


def _name(trial: Any) -> str:
    planned = trial.config.get("trial")
    return planned.trial_id if planned is not None else str(trial.trial_id)
