"""Tells the copier of every trial that ended, and the table of events of what happened to the copy."""

from __future__ import annotations

from ray_jobs.copying import Copier
from ray_jobs.results import OpenedResults
from ray_jobs.tune_bridge import SweepObserver
from sweeps.engines.summary import BlockSummary
from sweeps.foreign_text import one_line
from sweeps.measure.records import Decision, Outcome, PlannedTrial
from sweeps.measure.rows import record_findings
from sweeps.search.optuna_study import InvalidSuggestion


class CopyingObserver:
    """A `SweepObserver` that passes everything on to another one."""

    def __init__(self, observer: SweepObserver, copier: Copier, opened: OpenedResults) -> None:
        self._observer = observer
        self._copier = copier
        self._opened = opened
        self._at_s = 0.0

    def started(self, trial: PlannedTrial) -> None:
        self._observer.started(trial)

    def block_done(self, trial: PlannedTrial, block: BlockSummary, decision: Decision) -> None:
        self._at_s = max(self._at_s, block.started_s + block.wall_s)
        self._observer.block_done(trial, block, decision)

    def ended(self, trial: PlannedTrial, outcome: Outcome) -> None:
        self._observer.ended(trial, outcome)
        if findings := self._copier.drain_findings():
            opened = self._opened
            record_findings(opened.folder, trial.trial_id, findings, sweep_id=opened.sweep_id, at_s=self._at_s)
            for finding in findings:
                print(one_line(f"{finding.event.replace('_', ' ')}: {finding.detail}"), flush=True)
        self._copier.notice()

    def refused(self, invalid: InvalidSuggestion) -> None:
        self._observer.refused(invalid)
