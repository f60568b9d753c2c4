from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ray_jobs.progress import SweepProgress
from sweeps.engines.summary import BlockSummary
from sweeps.measure.held_engine import HeldEngine
from sweeps.measure.records import Outcome
from sweeps.measure.trial import Measurement
from sweeps.search.study import SweepStudy
from sweeps.spec.names import Acceptance
from sweeps.spec.space import Space
from tests.sweeps.stub_engine import StubEngine, stub_context, stub_spec


def watched(
    folder: Path, console: Console, *, wall_s_per_block: float = 0.0, acceptance: Acceptance = "measured"
) -> tuple[SweepProgress, SweepStudy]:
    """Run the stub sweep under a progress display, with a wall clock of the test's own."""
    spec = stub_spec("study: {pruner: {name: median, options: {n_startup_trials: 1}}}\n")
    spec = replace(spec, acceptance=acceptance)
    study, held, context = SweepStudy(spec, Space(spec)), HeldEngine(StubEngine()), stub_context(spec, folder)
    wall_s = [0.0]
    progress = SweepProgress(study, console, now_s=lambda: wall_s[0])
    with progress:
        while (trial := study.ask()) is not None:
            progress.started(trial)
            for invalid in study.drain_invalid():
                progress.refused(invalid)
            measurement = Measurement(held, trial, context)
            result = measurement.advance()
            while isinstance(result, BlockSummary):
                wall_s[0] += wall_s_per_block
                decision = study.report(trial, result, seconds=measurement.seconds)
                progress.block_done(trial, result, decision)
                result = (
                    Outcome(status="pruned", reason=decision.reason, seconds=measurement.seconds)
                    if decision.prune
                    else measurement.advance()
                )
            measurement.stop()
            study.tell(trial, result)
            progress.ended(trial, result)
    return progress, study


def text_of(folder: Path, **options: Any) -> tuple[list[str], SweepProgress, SweepStudy, io.StringIO]:
    sink = io.StringIO()
    progress, study = watched(folder, Console(file=sink, width=160), **options)
    return sink.getvalue().splitlines(), progress, study, sink


def test_pinned_trials_say_so_in_the_log_and_in_the_table(tmp_path: Path) -> None:
    lines, progress, study, sink = text_of(tmp_path, acceptance="pinned")
    told = [line for line in lines if line.startswith("trial ")]
    assert len(told) == len(study.observations)
    assert all("pinned" in line.split("|")[0] for line in told)
    progress.console.print(progress.summary())
    shown = sink.getvalue().splitlines()[len(lines) :]
    assert any("completed, pinned" in line for line in shown)


def test_a_job_log_has_one_plain_line_per_trial(tmp_path: Path) -> None:
    lines, _, study, _ = text_of(tmp_path)
    trials = [line for line in lines if line.startswith("trial ")]
    assert len(trials) == len(study.observations)
    assert trials[0].startswith("trial 1 of at most")
    assert "k0000 (control) | no speculation" in trials[0]
    for wanted in ("tok/s", "verify", "incumbent", "simulated GPU minutes", "ETA"):
        assert wanted in trials[-1]
    assert any("pruned: median" in line for line in trials)
    assert sum("costs nothing: steps 1, top-k 2" in line for line in lines) == 2
    assert "\x1b" not in "".join(lines)


def test_the_number_of_trials_is_never_promised_too_low(tmp_path: Path) -> None:
    lines, _, study, _ = text_of(tmp_path)
    promised = [int(line.split(" of at most ")[1].split()[0]) for line in lines if line.startswith("trial ")]
    assert all(number >= len(study.observations) for number in promised)
    assert promised[-1] == len(study.observations)


def test_slow_blocks_have_lines_of_their_own(tmp_path: Path) -> None:
    lines, _, study, _ = text_of(tmp_path, wall_s_per_block=11.0)
    blocks = [line for line in lines if "| block " in line]
    assert len(blocks) == sum(len(seen.blocks) for seen in study.observations)


def test_the_summary_ranks_by_throughput_and_says_why_it_ended(tmp_path: Path) -> None:
    _, progress, study, sink = text_of(tmp_path)
    progress.console.print(progress.summary())
    said = sink.getvalue()
    assert "12 of 12 were measured" in " ".join(said.split())
    best = study.incumbent
    assert best is not None
    rows = [line for line in said.splitlines() if line.startswith("│")]
    means = [seen.mean("tok_s") or 0.0 for seen in study.observations.of_configuration(best)]
    assert rows[0].split("│")[5].strip() == f"{max(means):.2f}"
    totals = progress.totals()
    assert sum(int(part.split()[0]) for part in totals.split(";")[0].split(", ")) == len(study.observations)
    gpu_hours = study.observations.held_s * 8 / 3600
    assert f"simulated GPU hours {gpu_hours:.2f}: " in totals


def test_a_terminal_gets_a_live_table(tmp_path: Path) -> None:
    sink = io.StringIO()
    watched(tmp_path, Console(file=sink, width=160, height=40, force_terminal=True))
    said = sink.getvalue()
    assert "\x1b" in said
    assert "trial 1 of at most" not in said


@pytest.mark.parametrize("interrupted", [True])
def test_an_unfinished_sweep_says_so(tmp_path: Path, *, interrupted: bool) -> None:
    spec = stub_spec()
    sink = io.StringIO()
    progress = SweepProgress(SweepStudy(spec, Space(spec)), Console(file=sink, width=160))
    progress.console.print(progress.summary())
    assert ("interrupted" in sink.getvalue()) is interrupted
