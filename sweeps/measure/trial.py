"""Measures one configuration on an engine: launch or switch, warm-up, blocks, trace, rows. No Ray, no Optuna.

One `Measurement` is one attempt at one trial. Its caller pulls it block by block, so that a pruner can stop it between
two. Whatever happens, every second of held GPUs is in the ledger and everything measured is in the tables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Literal

from sweeps.engines.base import EngineError, KernelTime, LaunchReport
from sweeps.engines.command import secret_values
from sweeps.engines.sglang.limits import check_limits
from sweeps.engines.summary import BlockSummary, summarise
from sweeps.measure.block_checks import BlockChecks
from sweeps.measure.held_engine import HeldEngine
from sweeps.measure.launch_evidence import reads_none_of, refuse_not_effective
from sweeps.measure.ledger import Ledger
from sweeps.measure.records import Outcome, PlannedTrial
from sweeps.measure.rows import block_row, interrupted, interrupted_columns, prune_reason, report_columns, trial_row
from sweeps.measure.trial_context import TrialContext
from sweeps.redaction import without_values
from sweeps.results.journal import Journal, Row, TrialRows
from sweeps.results.tables import TableError
from sweeps.spec.workload import Block


class Measurement:
    """One attempt at one trial, pulled block by block with `advance`."""

    def __init__(self, held: HeldEngine, trial: PlannedTrial, context: TrialContext, *, attempt: int = 1) -> None:
        self._held = held
        self._trial = trial
        self._context = context
        self._attempt = attempt
        self._ledger = Ledger(held.now_s, since_s=held.free_since_s)
        self._relaunched: bool | None = None
        self._measured = 0
        self._kernels: tuple[KernelTime, ...] = ()
        self._outcome: Outcome | None = None
        if (finished := context.folder.part("trials", trial.trial_id, attempt)).exists():
            raise TableError(f"{finished}: this trial was measured already, and nothing is written over it")
        self._rows = TrialRows(trial=self._first_row())
        self._checks = BlockChecks(trial, context, self._rows)
        self._journal = Journal(context.folder.journal(trial.trial_id, attempt))
        self._journal.append("trial", trial=self._rows.trial)

    @property
    def outcome(self) -> Outcome | None:
        """None while the trial runs."""
        return self._outcome

    @property
    def seconds(self) -> Mapping[str, float]:
        """Wall seconds by activity so far."""
        return self._ledger.seconds

    @property
    def relaunched(self) -> bool | None:
        return self._relaunched

    @property
    def all_reduce(self) -> str | None:
        """What serves the all-reduces, once the launch has told."""
        return None if self._report is None else self._report.all_reduce

    @property
    def nccl_unread(self) -> bool:
        """Whether NCCL, by its own log, read no variable of the trial's NCCL set."""
        return self._report is not None and reads_none_of(self._trial.configuration, self._report)

    @property
    def _report(self) -> LaunchReport | None:
        """Report of this trial's launch or switch; None before it."""
        return None if self._relaunched is None else self._held.report

    def advance(self) -> BlockSummary | Outcome:
        """Measure the next block (the first call also launches or switches, and warms up), or end the trial.

        A suspect block is measured and recorded, and the one after it returned in its place. The checks of the output
        follow each block, so that no pruner hears of a broken server as of a slow one. An EngineError ends the trial as
        failed: it is a row, not an error. Anything else is raised.
        """
        assert self._outcome is None, "a trial that has ended was advanced"
        if self._is_stopping():
            return self.stop()
        if self._relaunched is None and (reason := self._beyond_limits()) is not None:
            return self._end(Outcome(status="invalid", reason=reason, stage="plan", kind="invalid_config"))
        try:
            if self._relaunched is None:
                self._prepare()
            blocks = self._context.deciding
            while self._measured < len(blocks):
                if self._is_stopping():
                    return self.stop()
                summary = self._measure(blocks[self._measured])
                self._checks.refuse_output()
                if summary is not None:
                    return summary
            self._anchor("after")
            self._trace(blocks[-1])
        except EngineError as error:
            return self.stop() if self._is_stopping() else self._fail(error)
        return self._end(Outcome(status="completed"))

    def stop(self) -> Outcome:
        """End the trial early: pruned if the driver's decision says so, interrupted otherwise. Idempotent."""
        if self._outcome is not None:
            return self._outcome
        reason = prune_reason(self._context.folder, self._trial.trial_id)
        if reason is not None:
            return self._end(Outcome(status="pruned", reason=reason))
        self._ledger.charge("failed")
        return self._end(interrupted("the sweep was stopped before this trial ended", self._measured))

    def close_engine(self) -> None:
        """Stop the server after the last trial, and add the seconds to its row. Raises EngineError."""
        assert self._outcome is not None, "the server was stopped under a running trial"
        self._ledger.charge("idle")
        try:
            self._held.close()
        except EngineError as unclean:
            self._event("gpu_not_clean", str(unclean))
            raise
        finally:
            self._ledger.charge("stop")
            self._stamp()
            self._rows.write(self._context.folder)

    def _is_stopping(self) -> bool:
        return self._context.folder.stop_request.exists()

    def _beyond_limits(self) -> str | None:
        server = self._context.server
        if server is None:
            return None
        return check_limits(self._trial.configuration, server.args, self._held.version, engine_env=server.env)

    def _prepare(self) -> None:
        self._ledger.charge("idle")
        report = self._switch() or self._launch()
        self._held.report, self._held.version = report, report.version
        self._rows.trial.update(report_columns(report), relaunched=self._relaunched)
        self._rows.evidence = [{**self._rows.keys, **asdict(evidence)} for evidence in report.evidence]
        self._stamp()
        self._journal.append("evidence", trial=self._rows.trial, evidence=self._rows.evidence)
        self._held.live_launch_key = self._trial.launch_key
        refuse_not_effective(report.evidence)
        for block in self._context.blocks:
            if block.warmup:
                self._held.engine.run_block(block)
                self._ledger.charge("warmup")

        self._anchor("before")

    def _anchor(self, place: Literal["before", "after"]) -> None:
        """One block at step count 0 in a chain's server, unless the last trial has just left one."""
        held = self._held
        if not (self._context.anchors and self._trial.configuration.is_chain) or held.anchored:
            return
        block = self._context.blocks[0]
        record = held.engine.run_anchor(block)
        if record is None:
            if place == "before":
                self._event("no_anchor", "this server has no state for 0 steps: it is measured without anchors")
            return
        self._ledger.charge("measure")
        summary = summarise(record, block_index=block.index)
        broken = self._checks.judge(record, summary, block, self._trial.configuration.target_alone())
        record = replace(record, started_s=record.started_s + held.offset_s)
        summary = replace(summary, started_s=record.started_s)
        row = {**self._rows.keys, "place": place, **block_row(record, summary, block, broken)}
        self._rows.anchors.append(row)
        held.anchored = True
        self._stamp()
        self._journal.append("anchors", trial=self._rows.trial, anchors=[row])

    def _switch(self) -> LaunchReport | None:
        if self._held.live_launch_key != self._trial.launch_key:
            return None
        report = self._held.engine.switch(self._trial.configuration)
        self._ledger.charge("switch")
        if report is not None:
            self._relaunched = False
        return report

    def _launch(self) -> LaunchReport:
        if self._held.live_launch_key is not None:
            self._held.close()
            self._ledger.charge("stop")
        self._relaunched, self._held.anchored = True, False
        report = self._held.engine.launch(self._trial.configuration, states=self._trial.states)
        self._ledger.charge_boot(report.boot_s)
        return report

    def _measure(self, block: Block) -> BlockSummary | None:
        """Run the block at the deciding concurrency, then at every other concurrency (for its rows only).

        None if the block is suspect. Raises EngineError (`implausible`) if too many are.
        """
        summary = self._take(block)
        if summary is None:
            self._checks.refuse_implausible()
        for beside in self._context.blocks:
            if not beside.warmup and beside.index == block.index and beside.concurrency != block.concurrency:
                self._take(beside)
        return summary

    def _take(self, block: Block) -> BlockSummary | None:
        """Run and record one block; None if it is suspect."""
        self._held.anchored = False
        record = self._held.engine.run_block(block)
        self._ledger.charge("measure")
        summary = summarise(record, block_index=block.index)
        broken = self._checks.judge(record, summary, block, self._trial.configuration)
        record = replace(record, started_s=record.started_s + self._held.offset_s)
        summary = replace(summary, started_s=record.started_s)
        row = {**self._rows.keys, **block_row(record, summary, block, broken)}
        place = {"block_index": block.index, "concurrency": block.concurrency}
        requests = [{**self._rows.keys, **place, **asdict(request)} for request in record.requests]
        self._rows.blocks.append(row)
        self._rows.requests.extend(requests)
        self._rows.cycles.append(record.cycles)
        self._measured += block.concurrency == self._context.blocks[0].concurrency
        self._stamp()
        self._journal.append("block", trial=self._rows.trial, block=row, requests=requests, cycles=record.cycles)
        return None if broken else summary

    def _trace(self, block: Block) -> None:
        wanted = {
            "every_trial": True,
            "every_launch": self._relaunched or self._trial.role == "control",
            "controls": self._trial.role == "control",
            "never": False,
        }
        if not wanted[self._context.traced]:
            return
        self._kernels = self._held.engine.trace(block) or ()
        self._ledger.charge("trace")
        self._rows.kernels = [{**self._rows.keys, **asdict(kernel)} for kernel in self._kernels]

    def _fail(self, error: EngineError) -> Outcome:
        try:
            if not error.server_lives:
                self._held.close()
        except EngineError as unclean:
            error.add_note(str(unclean))
            self._event("gpu_not_clean", str(unclean))
        self._ledger.charge("failed")
        hidden = [] if self._context.server is None else secret_values(self._context.server, os.environ)
        self._rows.trial["log_tail"] = None if error.log_tail is None else without_values(error.log_tail, hidden)
        reason = without_values(str(error), hidden)
        return self._end(
            Outcome(status="failed", reason=reason, stage=error.stage, kind=error.kind, transient=error.transient)
        )

    def _end(self, outcome: Outcome) -> Outcome:
        self._outcome = replace(
            outcome,
            relaunched=self._relaunched,
            seconds=self._ledger.seconds,
            kernels=self._kernels,
            all_reduce=self.all_reduce,
            nccl_unread=self.nccl_unread,
        )
        self._rows.trial.update(status=outcome.status, reason=outcome.reason, stage=outcome.stage, kind=outcome.kind)
        self._stamp()
        self._rows.write(self._context.folder)
        self._journal.discard()
        self._held.free_since_s = self._ledger.mark_s
        return self._outcome

    def _event(self, event: str, detail: str) -> None:
        self._rows.events.append(
            {**self._rows.keys, "at_s": self._held.now_s(), "event": event, "detail": detail, "numbers": {}}
        )

    def _stamp(self) -> None:
        seconds = {f"{activity}_s": spent for activity, spent in self._ledger.seconds.items()}
        self._rows.trial.update(seconds, ended_s=self._ledger.mark_s, num_blocks=self._measured)

    def _first_row(self) -> Row:
        context = self._context
        return {
            **trial_row(self._trial, sweep_id=context.sweep_id, attempt=self._attempt),
            "engine": self._held.engine.name,
            "node": context.node,
            "num_gpus": context.num_gpus,
            **interrupted_columns(),
            "started_s": self._ledger.mark_s,
            "ended_s": self._ledger.mark_s,
        }
