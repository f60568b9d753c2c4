"""Run one sweep: `python -m ray_jobs.run_sweep SPEC [--results DIR | --results URL] [--resume] [--dry-run]`.

The same command runs on one machine and under `ray job submit --working-dir . -- python -m ray_jobs.run_sweep SPEC`.
Exit codes: 0 done, with the control and at least one candidate measured; 1 a trial ended in an unexpected error; 2 the
sweep could not begin, or the disk is full; 3 it ended and nothing was measured that could be compared; 4 it ended well,
and the URL of `--results` has not got all of it; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ray_jobs.budgets import add_budget_options, with_budget
from ray_jobs.plan import Command, estimate, print_plan
from ray_jobs.progress import SweepProgress
from ray_jobs.ray_settings import settle_environment
from ray_jobs.results import OpenedResults, default_root, open_results, tell_damage
from ray_jobs.stored_results import StoredResults, stored_results
from sweeps.command_end import end
from sweeps.engines import open_engine
from sweeps.foreign_text import console
from sweeps.measure.recovery import recover
from sweeps.redaction import redacted_variables, redacted_words
from sweeps.results.store import is_url
from sweeps.results.tables import ResultsFolder
from sweeps.search.resume import read_earlier
from sweeps.search.study import SweepStudy
from sweeps.search.study_journal import open_study
from sweeps.spec.document import SpecError
from sweeps.spec.model import SweepSpec
from sweeps.spec.reading import find_spec, read_spec
from sweeps.spec.space import Configuration, Space
from sweeps.spec.workload import Block, plan_blocks
from sweeps.spec.yaml_text import read_text

if TYPE_CHECKING:  # Ray is imported once its environment is settled
    from ray_jobs.nodes import Nodes

NOTHING_MEASURED = 3
INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a spec asks for."""

    spec: SweepSpec
    text: str
    """Of the spec, as it was written."""
    space: Space
    blocks: tuple[Block, ...]


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m ray_jobs.run_sweep") -> int:
    """Run the command line. Returns the exit code.

    Args:
        prog: the command's name in its usage.
    """
    arguments = _parser(prog).parse_args(argv)
    settle_environment()
    return end(lambda: _dry_run(arguments) if arguments.dry_run else _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    asked = _read(arguments)
    SweepStudy(asked.spec, asked.space)  # a sampler, pruner or option that does not fit is refused at once
    if arguments.results is not None and is_url(arguments.results):
        with stored_results(arguments.results, arguments.folder) as stored:
            code = _run_in(stored.root, asked, arguments, stored)
        return code or stored.code
    if arguments.folder is not None:
        raise SpecError("--folder: wanted together with a URL as --results; a folder is itself --results DIR")
    return _run_in(Path(arguments.results or default_root(asked.spec)), asked, arguments)


def _run_in(root: Path, asked: Asked, arguments: argparse.Namespace, stored: StoredResults | None = None) -> int:
    spec, space = asked.spec, asked.space
    opened = open_results(root, spec, asked.text, must_exist=arguments.resume)
    try:
        if stored is not None:
            stored.begin()
        num_blocks = spec.workload.blocks * len(spec.workload.concurrency)
        study = open_sweep(spec, space, opened, num_blocks=num_blocks, retry_failed=arguments.retry_failed)
        if opened.resumed and study.trials_left == 0 and study.ask() is None:
            _conclude(SweepProgress(study), opened)
            return 0 if study.has_measured else NOTHING_MEASURED
        with contextlib.closing(_connect(spec, opened)) as nodes:
            signal.signal(signal.SIGTERM, _interrupt)
            return _measure(study, asked, opened, nodes, stored=stored)
    finally:
        opened.release()


def _connect(spec: SweepSpec, opened: OpenedResults) -> Nodes:
    """Join or start the cluster and check its nodes."""
    from ray_jobs import cluster
    from ray_jobs.nodes import Nodes

    cluster.connect(spec.engine, spec.resources)
    nodes = Nodes(spec, opened.folder)
    nodes.wait()
    if (said := cluster.waiting_for(spec.resources)) is not None:
        print(said, flush=True)
    return nodes


def _measure(
    study: SweepStudy, asked: Asked, opened: OpenedResults, nodes: Nodes, *, stored: StoredResults | None
) -> int:
    from ray_jobs.copying_observer import CopyingObserver
    from ray_jobs.monitoring import SweepMetrics
    from ray_jobs.trial_actor import SweepRun
    from ray_jobs.tune_bridge import SweepObserver, run_study

    spec, folder = asked.spec, opened.folder
    run = SweepRun(spec=spec, sweep_id=opened.sweep_id, folder=folder, blocks=asked.blocks, open_engine=open_engine)
    progress = SweepProgress(study)
    progress.console.print(f"results: {opened.folder.root}", highlight=False, soft_wrap=True)
    if opened.resumed:
        measured = sum(seen.is_measured for seen in study.observations)
        progress.console.print(
            f"resumed: {measured} trials were already measured, {len(study.observations)} tried", highlight=False
        )
    observer: SweepObserver = SweepMetrics(progress, spec)
    if stored is not None:
        observer = CopyingObserver(observer, stored.copier, opened)
    interrupted = False
    with progress:
        try:
            num_errors = run_study(study, run, observer, nodes)
        except KeyboardInterrupt:
            interrupted, num_errors = True, 0
    _conclude(progress, opened)
    if num_errors:
        progress.console.print(f"{num_errors} trials ended in an unexpected error", highlight=False)
        return 1
    if interrupted or not study.finished:
        return INTERRUPTED
    return 0 if study.has_measured else NOTHING_MEASURED


def _conclude(progress: SweepProgress, opened: OpenedResults) -> None:
    progress.console.print(progress.summary())
    progress.console.print(progress.totals(), highlight=False, soft_wrap=True)
    progress.console.print(f"report: python -m analysis report {opened.folder.root}", highlight=False, soft_wrap=True)


def open_sweep(
    spec: SweepSpec, space: Space, opened: OpenedResults, *, num_blocks: int, retry_failed: bool = False
) -> SweepStudy:
    """The study of an opened folder, as far as its tables go; what is damaged in them is printed and left out.

    Args:
        retry_failed: configurations that failed are tried again, whatever the cause.
    """
    recover(opened.folder, num_blocks=num_blocks)
    earlier = read_earlier(opened.folder, space, sweep_id=opened.sweep_id, retry_failed=retry_failed)
    storage, rebuilt = open_study(opened.folder.study, spec, space, earlier)
    tell_damage(opened, earlier, rebuilt)
    observations = earlier.observations
    return SweepStudy(
        spec,
        space,
        storage=storage,
        observations=observations,
        clock=_clock(spec, lambda: observations.held_s),
    )


def _clock(spec: SweepSpec, held_s: Callable[[], float]) -> Callable[[], float]:
    """Wall time of a real engine; what the trials say they held, of a virtual one."""
    return held_s if spec.engine.is_virtual else time.monotonic


def _dry_run(arguments: argparse.Namespace) -> int:
    asked = _read(arguments)
    spec, space, blocks = asked.spec, asked.space, asked.blocks
    SweepStudy(spec, space)
    virtual = spec.engine.is_virtual
    engine = open_engine(spec, ResultsFolder(default_root(spec))) if virtual else None
    print_plan(
        spec,
        space,
        estimate(spec, space, blocks, engine),
        console(),
        command_of=None if virtual else lambda configuration: _command(spec, space, configuration),
    )
    return 0


def _command(spec: SweepSpec, space: Space, configuration: Configuration) -> Command:
    from sweeps.engines.sglang.launch_plan import plan_launch
    from sweeps.engines.sglang.state_plan import plan_states

    states = plan_states(spec.engine, configuration, space.states(configuration))
    plan = plan_launch(spec, configuration, folder=Path("SCRATCH"), inherited={}, states=states)
    words, environment = redacted_words(plan.command), redacted_variables(plan.requested)
    if states is None:
        return Command(words=words, environment=environment)
    return Command(
        words=words,
        environment=environment,
        num_states=len(states.states),
        nccl_sets=states.communicators,
    )


def _read(arguments: argparse.Namespace) -> Asked:
    path = find_spec(arguments.spec)
    spec = with_budget(read_spec(path), arguments)
    blocks = plan_blocks(spec.workload, folder=path.resolve().parent)
    if spec.engine.is_virtual:  # an unknown machine, drafter or recording is refused here, not in every trial
        open_engine(spec, ResultsFolder(default_root(spec)))
    return Asked(spec=spec, text=read_text(path), space=Space(spec), blocks=blocks)


def _interrupt(signum: int, frame: object) -> None:
    # Tune ends actors politely on SIGINT only; a job is stopped with SIGTERM.
    os.kill(os.getpid(), signal.SIGINT)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Run one sweep.")
    parser.add_argument("spec", type=Path, metavar="SPEC", help="the sweep's YAML, or the name of a shipped one")
    parser.add_argument(
        "--results",
        metavar="DIR|URL",
        help="results folder (default: results/SWEEP-TIME), or where it is copied to, s3://bucket/prefix say",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="with a URL: the folder that is copied (default: ~/specsweep-results/NAME); all nodes must see it",
    )
    parser.add_argument("--resume", action="store_true", help="insist on an existing results folder of this spec")
    parser.add_argument(
        "--retry-failed", action="store_true", help="with --resume: try failed configurations again, whatever the cause"
    )
    add_budget_options(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="print the space, the commands and the cost; run nothing"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
