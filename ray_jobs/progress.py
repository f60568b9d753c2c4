"""What a person sees of a running sweep: a live bar and table in a terminal, plain lines in a job's log."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sweeps.engines.summary import BlockSummary
from sweeps.foreign_text import cell, one_line
from sweeps.foreign_text import console as plain_console
from sweeps.measure.records import Decision, Outcome, PlannedTrial
from sweeps.search.observations import Observation
from sweeps.search.optuna_study import InvalidSuggestion
from sweeps.search.study import SweepStudy

_LOG_WIDTH = 160
_MIN_S_BETWEEN_BLOCK_LINES = 10.0
_MIN_S_BETWEEN_SCREENS = 0.25
_SHOWN = 12


class SweepProgress:
    """Observes a study. Use as a context manager around the run.

    Args:
        now_s: wall clock, for the estimate of the time left.
    """

    def __init__(
        self, study: SweepStudy, console: Console | None = None, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console or plain_console(log_width=_LOG_WIDTH)
        self._study = study
        self._now_s = now_s
        self._began_s = now_s()
        self._line_s = self._began_s
        self._num_before = len(study.observations)
        self._num_ended = sum(seen.status != "running" for seen in study.observations)
        self._places = {seen.trial.trial_id: place for place, seen in enumerate(study.observations, start=1)}
        self._shown_s: float | None = None
        self._num_blocks = study.spec.workload.blocks
        self._live: Live | None = None
        self._bar = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        )
        self._task = self._bar.add_task("trials", total=self._num_expected)

    def __enter__(self) -> SweepProgress:
        if self.console.is_terminal:
            self._live = Live(self._screen(), console=self.console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._show()
            self._live.stop()
            self._live = None

    def started(self, trial: PlannedTrial) -> None:
        self._places.setdefault(trial.trial_id, len(self._places) + 1)
        self._refresh()

    def block_done(self, trial: PlannedTrial, block: BlockSummary, decision: Decision) -> None:
        self._refresh()
        if self._live is None and self._now_s() - self._line_s >= _MIN_S_BETWEEN_BLOCK_LINES:
            self._say(f"{self._head(trial)} | block {block.block_index + 1}/{self._num_blocks} | {_figures(block)}")

    def ended(self, trial: PlannedTrial, outcome: Outcome) -> None:
        self._num_ended += 1
        self._refresh()
        if self._live is None:
            said = outcome.status if outcome.reason is None else f"{outcome.status}: {outcome.reason}"
            self._say(f"{self._head(trial)} | {self._means(self._study.observations[trial.trial_id])} | {said}")

    def refused(self, invalid: InvalidSuggestion) -> None:
        if self._live is None:
            self._say(f"{invalid.trial_id} invalid, costs nothing: {invalid.reason}")

    def summary(self) -> Table:
        """The final table: configurations by throughput, best first."""
        return self._table(
            title=f"{self._study.spec.sweep} ({self._engine}): {self._study.stop_reason or 'interrupted'}"
        )

    def totals(self) -> str:
        """One line: trials by status, GPU hours by activity."""
        seen = list(self._study.observations)
        statuses = Counter(_status(trial) for trial in seen)
        spent: Counter[str] = Counter()
        for trial in seen:
            spent.update(trial.seconds)
        hours = {name: seconds * self._study.spec.resources.gpus / 3600 for name, seconds in spent.items() if seconds}
        return (
            f"{', '.join(f'{count} {status}' for status, count in statuses.items())}; "
            f"{self._prefix}GPU hours {sum(hours.values()):.2f}: "
            f"{', '.join(f'{name} {value:.2f}' for name, value in hours.items())}"
        )

    @property
    def _prefix(self) -> str:
        return "simulated " if self._study.spec.engine.is_virtual else ""

    @property
    def _engine(self) -> str:
        engine = self._study.spec.engine
        return engine.kind if engine.machine is None else f"{engine.kind} {engine.machine}"

    @property
    def _num_expected(self) -> int:
        """Trials so far and to come, at most: candidates, controls and incumbents beside them."""
        return len(self._study.observations) + self._study.trials_left

    def _head(self, trial: PlannedTrial) -> str:
        place = self._places[trial.trial_id]
        marks = [*(() if trial.role == "candidate" else (trial.role,)), *_pinned(trial)]
        role = f" ({', '.join(marks)})" if marks else ""
        return f"trial {place} of at most {self._num_expected} {trial.trial_id}{role} | {trial.configuration.label}"

    def _say(self, line: str) -> None:
        self._line_s = self._now_s()
        text = one_line(f"{line} | {self._state()}")
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _state(self) -> str:
        study = self._study
        held_min = study.observations.held_s * study.spec.resources.gpus / 60
        best = study.incumbent
        parts = [f"{self._prefix}GPU minutes {held_min:.1f}"]
        if best is not None:
            means = [self._mean(seen) for seen in study.observations.of_configuration(best)]
            known = [mean for mean in means if mean is not None]
            parts.insert(0, f"incumbent {sum(known) / len(known):.1f} {study.spec.study.metric} ({best.label})")
        if (left_s := self._left_s()) is not None:
            parts.append(f"ETA {left_s / 60:.1f} min")
        return " | ".join(parts)

    def _left_s(self) -> float | None:
        done = self._num_ended - self._num_before
        return None if done <= 0 else (self._now_s() - self._began_s) / done * (self._num_expected - self._num_ended)

    def _refresh(self) -> None:
        """Draw the live table anew, at most as often as it is looked at: it costs time over all trials so far."""
        if self._live is None or (self._shown_s is not None and self._now_s() - self._shown_s < _MIN_S_BETWEEN_SCREENS):
            return
        self._show()

    def _show(self) -> None:
        self._shown_s = self._now_s()
        ended = self._num_ended
        self._bar.update(
            self._task, completed=ended, total=max(self._num_expected, ended), description=one_line(self._state())
        )
        if self._live is not None:
            self._live.update(self._screen())

    def _screen(self) -> Group:
        return Group(self._bar, self._table(title=f"{self._study.spec.sweep} ({self._engine})"))

    def _table(self, *, title: str) -> Table:
        table = Table(title=cell(title))
        for name in ("trial", "configuration", "status", "blocks", "tok/s", "verify ms", "cycle ms", "accept length"):
            table.add_column(name, justify="left" if name in ("trial", "configuration", "status") else "right")
        by_speed = sorted(self._study.observations, key=lambda seen: seen.mean("tok_s") or 0.0, reverse=True)
        for seen in by_speed[:_SHOWN]:
            table.add_row(
                seen.trial.trial_id,
                cell(seen.trial.configuration.label),
                ", ".join((_status(seen), *_pinned(seen.trial))),
                str(len(seen.blocks)),
                *(_number(value) for value in _row_figures(seen)),
            )
        if len(by_speed) > _SHOWN:
            table.caption = f"{len(by_speed) - _SHOWN} more in the results folder"
        return table

    def _mean(self, seen: Observation) -> float | None:
        return seen.mean(self._study.spec.study.metric)

    def _means(self, seen: Observation) -> str:
        tok_s, verify_ms, _, accept_length = _row_figures(seen)
        return f"{_number(tok_s)} tok/s, verify {_number(verify_ms)} ms, AL {_number(accept_length)}"


def _pinned(trial: PlannedTrial) -> tuple[str, ...]:
    return ("pinned",) if trial.acceptance == "pinned" else ()


def _status(seen: Observation) -> str:
    return "invalid" if seen.refused else seen.status


def _row_figures(seen: Observation) -> tuple[float | None, float | None, float | None, float | None]:
    """tok/s, verify ms, cycle ms (means over blocks) and accept length (ratio of sums)."""
    cycles = [block for block in seen.blocks if block.accept_length is not None]
    num_cycles = sum(block.num_cycles for block in cycles)
    tokens = sum((block.accept_length or 0.0) * block.num_cycles for block in cycles)
    return (
        seen.mean("tok_s"),
        seen.mean("verify_ms"),
        seen.mean("cycle_ms"),
        tokens / num_cycles if num_cycles else None,
    )


def _figures(block: BlockSummary) -> str:
    return f"{block.tok_s:.1f} tok/s, verify {_number(block.verify_ms)} ms, AL {_number(block.accept_length)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
