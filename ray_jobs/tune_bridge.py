"""Ray Tune around a `SweepStudy`: the Searcher and TrialScheduler pair that share it, and the actor with the engine.

Tune places trials and keeps actors; it decides nothing. Suggestions, pruning, controls, budget and resuming are the
study's and the results folder's, so Tune's own snapshots are never read back.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from ray import tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from ray_jobs.nodes import Node, Nodes
from ray_jobs.placement import Placement
from ray_jobs.trial_actor import SweepRun, SweepTrainable
from sweeps.engines.summary import BlockSummary
from sweeps.foreign_text import one_line
from sweeps.measure.records import Decision, FailureKind, Outcome, PlannedTrial, kind_for_search
from sweeps.measure.recovery import recover
from sweeps.measure.rows import (
    PROCESS_DIED,
    invalid_row,
    last_outcome,
    lost_row,
    record_decision,
    record_findings,
)
from sweeps.results.tables import ResultsFolder, write_part
from sweeps.results.writing import StorageError, full_disk
from sweeps.search.optuna_study import InvalidSuggestion
from sweeps.search.study import SweepStudy


class SweepObserver(Protocol):
    """Told of what happens, in the driver's thread."""

    def started(self, trial: PlannedTrial) -> None: ...

    def block_done(self, trial: PlannedTrial, block: BlockSummary, decision: Decision) -> None: ...

    def ended(self, trial: PlannedTrial, outcome: Outcome) -> None: ...

    def refused(self, invalid: InvalidSuggestion) -> None: ...


class StudySearcher(Searcher):
    """Hands Tune the study's trials and the study Tune's endings."""

    def __init__(self, study: SweepStudy, run: SweepRun, observer: SweepObserver, nodes: Nodes) -> None:
        super().__init__()
        self.study = study
        self.run = run
        self.observer = observer
        self._lost_trials: list[PlannedTrial] = []
        self.full: StorageError | None = None
        """Why the run ended, if the disk was full."""
        self._nodes = nodes
        self._placement = Placement(study, nodes, run.folder)
        self._live: dict[str, PlannedTrial] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its configuration; nothing reads it back, and the study's storage must not be copied.
        return {"_metric": None, "_mode": None}

    def set_search_properties(self, metric: str | None, mode: str | None, config: Any, **spec: Any) -> bool:
        return True

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
        placed = self._placement.next(trial_id)
        for invalid in self.study.drain_invalid():
            self._refuse(invalid)
        self._note_findings()
        if placed is None:
            return str(Searcher.FINISHED) if self.study.finished else None
        trial, node = placed
        self._live[trial_id] = trial
        self.observer.started(trial)
        return {"trial": trial, "node": node}

    def stranded(self) -> list[str]:
        """Trials that wait for an actor on a node that is gone."""
        return self._placement.stranded()

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
        if outcome.kind == "gpu_not_clean":
            self._placement.blame_node(trial_id, f"found their node unusable: {outcome.reason}")
        else:
            self._placement.node_is_well(trial_id)
        self._end(trial_id, replace(outcome, kind=kind_for_search(outcome.kind)))

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the study's journal and the results folder hold all there is."""

    def restore(self, checkpoint_path: str) -> None:
        raise NotImplementedError("a sweep resumes from its results folder, never from a Tune snapshot")

    def _end(self, trial_id: str, outcome: Outcome) -> None:
        trial = self._live.pop(trial_id)
        self._placement.ended(trial_id, outcome)
        self.study.tell(trial, outcome)
        self.observer.ended(trial, outcome)

    def _lost(self, trial_id: str) -> None:
        """The actor ended without saying how: its journal becomes rows, and the study is told what the rows say.

        The first time the trial counts as interrupted, so that its configuration is measured again. A configuration
        whose process dies twice is blamed for it, unless its node was lost.
        """
        trial, run = self._live[trial_id], self.run
        is_node_lost = self._placement.is_lost(trial_id)
        before = self.study.observations.of_configuration(trial.configuration)
        is_second = any(seen.reason == PROCESS_DIED for seen in before) and not is_node_lost
        died_of: FailureKind = "crash" if is_second else "interrupted"
        if not recover(run.folder, num_blocks=run.num_measured, only=trial.trial_id, died_of=died_of):
            reason = f"node {self._placement.node_of(trial_id)} was lost" if is_node_lost else PROCESS_DIED
            row = lost_row(trial, run.spec, reason, sweep_id=run.sweep_id) | {"kind": died_of}
            write_part(run.folder, "trials", [row], trial_id=trial.trial_id, attempt=1)
        self._lost_trials.append(trial)
        if not is_node_lost:
            self._placement.blame_node(trial_id, "ended in an unexpected error")
        self._end(trial_id, last_outcome(run.folder, trial.trial_id))

    @property
    def num_errors(self) -> int:
        """Trials whose process died, and whose configuration was not measured again."""
        measured = self.study.observations.measured()
        return sum(trial.configuration not in measured for trial in self._lost_trials)

    def _note_findings(self) -> None:
        ended = [seen for seen in self.study.observations if seen.status != "running"]
        of_nodes = self._nodes.drain_findings()
        for finding in of_nodes:
            print(one_line(f"{finding.event.replace('_', ' ')}: {finding.detail}"), flush=True)
        findings = (*of_nodes, *self.study.drain_findings())
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
        self._waiting: dict[str, Any] = {}
        """Tune's trials that may not have an actor yet, by id."""
        self._kept: set[Any] = set()

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        return True

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """Have Tune keep the actor of each node between trials.

        Tune keeps as many actors as trials wait for the same resources, and one more in all; the actor of a node is
        dropped, with its server, if a trial waits for another node just then. The cache is private to Ray (2.60).
        """
        self._waiting[trial.trial_id] = trial
        if trial.placement_group_factory not in self._kept:
            self._kept.add(trial.placement_group_factory)
            tune_controller._actor_cache.increase_max(trial.placement_group_factory)

    def choose_trial_to_run(self, tune_controller: Any, **_: Any) -> None:
        """Choose none: Tune starts what waits in its order. A trial that waits for a node that is gone ends here."""
        for trial_id in self._searcher.stranded():
            trial = self._waiting.get(trial_id)
            if trial is not None and trial.status == trial.PENDING:
                tune_controller.stop_trial(trial)

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        self._waiting.pop(trial.trial_id, None)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        self._waiting.pop(trial.trial_id, None)

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        self._waiting.pop(trial.trial_id, None)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        prune = self._searcher.take_block(trial.trial_id, result)
        return str(TrialScheduler.STOP if prune else TrialScheduler.CONTINUE)

    def debug_string(self) -> str:
        return "the sweep's study prunes"


def run_study(study: SweepStudy, run: SweepRun, observer: SweepObserver, nodes: Nodes | None = None) -> int:
    """Run a study to its end on the connected Ray cluster. Returns the number of unexpected errors.

    Raises StorageError if the disk under the results folder took nothing more, ClusterError if no node can hold a
    trial.

    Args:
        nodes: checked already; one trial runs on each. None: those of the cluster, checked here.
    """
    if nodes is None:
        with contextlib.closing(Nodes(run.spec, run.folder)) as nodes:
            nodes.wait()
            return run_study(study, run, observer, nodes)
    searcher = StudySearcher(study, run, observer, nodes)
    num_gpus = run.spec.resources.gpus
    trainable = tune.with_resources(
        tune.with_parameters(SweepTrainable, run=run), lambda config: _on_its_node(config, num_gpus)
    )
    run.folder.tune.mkdir(parents=True, exist_ok=True)
    tuner = tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(
            search_alg=searcher,
            scheduler=StudyScheduler(searcher),
            num_samples=-1,
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


def _on_its_node(config: Mapping[str, Any], num_gpus: int) -> tune.PlacementGroupFactory:
    """All GPUs of a trial on the node that was chosen for it."""
    node: Node = config["node"]
    return tune.PlacementGroupFactory(
        [{"CPU": node.cpus, "GPU": num_gpus}],
        strategy="STRICT_PACK",
        bundle_label_selector=[{"ray.io/node-id": node.node_id}],
    )


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
