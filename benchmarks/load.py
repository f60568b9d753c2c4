"""Many trials, several nodes, a month's folder: `python -m benchmarks.load [--part throughput|trials|month|report]`.

Nodes are raylets of this machine with 8 logical GPUs each (`ray.cluster_utils.Cluster`), beside a head without GPUs.

throughput: trials per second on 1, 2 and 8 nodes with the simulated engine that sleeps for its launches and blocks,
from the end of the last first control to the last trial. trials: 2,000 trials without sleep on 1 and on 8 nodes: what
the driver takes. month: a folder of 20,000 trials, opened as `--resume` and the report do. report: verdict and page.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa

from benchmarks.overhead import SPEC
from benchmarks.record import RESULTS, record
from benchmarks.sleeping import open_simulated, open_sleeping
from ray_jobs.ray_settings import settle_environment
from ray_jobs.trial_actor import SweepRun
from ray_jobs.tune_bridge import SweepObserver
from sweeps.engines.base import Engine
from sweeps.engines.summary import BlockSummary
from sweeps.measure.held_engine import HeldEngine
from sweeps.measure.records import Decision, Outcome, PlannedTrial
from sweeps.measure.trial import Measurement
from sweeps.measure.trial_context import TrialContext
from sweeps.results.tables import TABLES, ResultsFolder, read_part, read_table, write_part
from sweeps.search.optuna_study import InvalidSuggestion
from sweeps.search.resume import read_earlier
from sweeps.search.study import SweepStudy
from sweeps.search.study_journal import open_journal
from sweeps.spec.model import SweepSpec
from sweeps.spec.reading import parse_spec
from sweeps.spec.space import Space
from sweeps.spec.workload import plan_blocks

NUM_TRIALS, NUM_OF_A_MONTH = 2000, 20_000
"""20,000 trials are 27 an hour for 30 days: one node at two minutes a trial, or eight at 18."""
REPORTED = (60, 120, 240)
"""Trials of the folders that are reported: 240 take minutes."""
_MEMORY = Path("/dev/shm")
"""A folder in memory: what is measured is Arrow and Python, not the disk."""
PER_NODE = 16
"""Trials per node of the throughput part."""


class Ends:
    """Notes when trials end, and whether they were controls."""

    def __init__(self) -> None:
        self.ended_s: list[float] = []
        self.control_s: list[float] = []

    def started(self, trial: PlannedTrial) -> None:
        """Nothing."""

    def block_done(self, trial: PlannedTrial, block: BlockSummary, decision: Decision) -> None:
        """Nothing."""

    def ended(self, trial: PlannedTrial, outcome: Outcome) -> None:
        (self.control_s if trial.role == "control" else self.ended_s).append(time.monotonic())

    def refused(self, invalid: InvalidSuggestion) -> None:
        """Nothing."""


def load_spec(num_trials: int) -> SweepSpec:
    """The space of `benchmarks.overhead`, repeated as often as needed; 4 blocks to a trial."""
    text = SPEC.replace("SAMPLER", "grid").replace("TRIALS", str(num_trials)).replace("blocks: 24", "blocks: 4")
    text = text.replace("warmup_blocks: 2", "warmup_blocks: 1")
    return parse_spec(text.replace("study: {", f"study: {{max_replicates: {num_trials // 50 + 1}, "), source="load")


@contextmanager
def cluster_of(num_nodes: int) -> Iterator[None]:
    """Raylets of this machine: a head, and nodes with 8 logical GPUs."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
    try:
        for number in range(num_nodes):
            cluster.add_node(num_cpus=1, num_gpus=8, node_name=f"node-{number}")
        ray.init(address=cluster.address, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def run(
    spec: SweepSpec, root: Path, open_engine: Callable[[SweepSpec, ResultsFolder], Engine], observer: SweepObserver
) -> SweepStudy:
    """One sweep on the connected cluster."""
    from ray_jobs.tune_bridge import run_study

    folder = ResultsFolder(root)
    study = SweepStudy(spec, Space(spec), storage=open_journal(folder.study))
    blocks = plan_blocks(spec.workload, folder=root)
    run_study(
        study, SweepRun(spec=spec, sweep_id="load", folder=folder, blocks=blocks, open_engine=open_engine), observer
    )
    return study


def throughput(num_nodes: int) -> Mapping[str, float]:
    """Trials per second after every node has measured its control."""
    with cluster_of(num_nodes), tempfile.TemporaryDirectory() as root:
        run(load_spec(PER_NODE * num_nodes), Path(root), open_sleeping, ends := Ends())
        rows = read_table(ResultsFolder(Path(root)), "trials").to_pylist()
    begin_s = sorted(ends.control_s)[num_nodes - 1]
    counted = [at_s for at_s in ends.ended_s if at_s > begin_s]
    per_node = [sum(row["node"] == f"node-{number}" for row in rows) for number in range(num_nodes)]
    return {
        "trials_per_s": len(counted) / (max(counted) - begin_s),
        "trials": len(rows),
        "fewest_trials_of_a_node": min(per_node),
        "most_trials_of_a_node": max(per_node),
    }


def many_trials(num_nodes: int, num_trials: int) -> Mapping[str, float]:
    """What the driver of a long sweep takes."""
    process = psutil.Process()
    with cluster_of(num_nodes), tempfile.TemporaryDirectory() as root:
        before_bytes, began_s, cpu_s = process.memory_info().rss, time.monotonic(), time.process_time()
        run(load_spec(num_trials), Path(root), open_simulated, ends := Ends())
        wall_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
        rss_bytes = process.memory_info().rss - before_bytes
        files = [path for path in Path(root).rglob("*") if path.is_file()]
        size_bytes = sum(path.stat().st_size for path in files)
    number = len(ends.ended_s) + len(ends.control_s)
    tenth = number // 10
    gaps = [later - sooner for sooner, later in itertools.pairwise(sorted((*ends.ended_s, *ends.control_s)))]
    return {
        "trials": number,
        "wall_s": wall_s,
        "driver_cpu_per_trial_ms": 1e3 * cpu_s / number,
        "first_tenth_per_trial_ms": 1e3 * statistics.fmean(gaps[:tenth]),
        "last_tenth_per_trial_ms": 1e3 * statistics.fmean(gaps[-tenth:]),
        "driver_rss_grew_mib": rss_bytes / 2**20,
        "files": len(files),
        "mib": size_bytes / 2**20,
    }


def month(num_trials: int) -> Mapping[str, float]:
    """A folder of so many trials: written from trials of a real sweep under new names, then opened."""
    from analysis.data.load import load
    from ray_jobs.copying import files_to_copy

    spec = load_spec(num_trials)
    space = Space(spec)
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as name:
        folder = ResultsFolder(Path(name))
        _write_month(folder, spec, num_trials)
        files = [path for path in folder.root.rglob("*") if path.is_file()]
        return {
            "trials": num_trials,
            "files": len(files),
            "mib": sum(path.stat().st_size for path in files) / 2**20,
            "resume_s": _seconds(lambda: read_earlier(folder, space, sweep_id="load")),
            "load_s": _seconds(lambda: load(folder.root)),
            "look_for_changes_s": _seconds(lambda: files_to_copy(folder.root)),
            "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30,
        }


def report(num_trials: int) -> Mapping[str, float]:
    """The verdict and the page of a folder of so many trials."""
    from analysis.data.load import load
    from analysis.judge.verdict import verdict
    from analysis.show.report import write_report

    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as name:
        folder = ResultsFolder(Path(name))
        _write_month(folder, load_spec(num_trials), num_trials)
        results, page = load(folder.root), folder.root / "report.html"
        seconds = _seconds(lambda: write_report(verdict(results), page))
        return {"trials": num_trials, "report_s": seconds, "page_mib": page.stat().st_size / 2**20}


def _seconds(call: Callable[[], object]) -> float:
    began_s = time.monotonic()
    call()
    return time.monotonic() - began_s


def _write_month(folder: ResultsFolder, spec: SweepSpec, num_trials: int) -> None:
    space = Space(spec)
    study, held = SweepStudy(spec, space), HeldEngine(open_simulated(spec, folder))
    scratch = ResultsFolder(folder.root / "scratch")
    context = TrialContext(
        sweep_id="load",
        folder=scratch,
        blocks=plan_blocks(spec.workload, folder=folder.root),
        num_gpus=8,
        node="node-0",
    )
    models = []
    for _ in range(min(num_trials, len(space.configurations()))):
        trial = study.ask()
        assert trial is not None
        measurement = Measurement(held, trial, context)
        while not isinstance(result := measurement.advance(), Outcome):
            study.report(trial, result, seconds=measurement.seconds)
        measurement.stop()
        study.tell(trial, result)
        models.append({table: read_part(scratch, table, trial_id=trial.trial_id, attempt=1) for table in TABLES})
    shutil.rmtree(scratch.root)
    control, candidates = models[0], models[1:]
    for number in range(num_trials):
        model = control if number % 50 == 0 else candidates[number % len(candidates)]
        trial_id = f"k{number:05d}" if number % 50 == 0 else f"t{number:05d}"
        for table, rows in model.items():
            if rows.num_rows:
                write_part(folder, table, _renamed(rows, trial_id, number), trial_id=trial_id, attempt=1)
    manifest = {"sweep_id": "load", "engine": "simulated", "num_configurations": len(space.configurations())}
    folder.manifest.write_text(json.dumps(manifest))


def _renamed(rows: pa.Table, trial_id: str, number: int) -> pa.Table:
    """The rows of a trial under another name, an hour of the engine's clock for every 30 trials."""
    values = {"trial_id": trial_id, "start_index": number}
    for name, value in values.items():
        if name in rows.column_names:
            place = rows.column_names.index(name)
            rows = rows.set_column(
                place, rows.schema.field(name), pa.array([value] * rows.num_rows, rows.schema.types[place])
            )
    for name in ("started_s", "ended_s", "at_s"):
        if name in rows.column_names:
            place = rows.column_names.index(name)
            moved = pa.compute.add(rows[name], number * 120.0)
            rows = rows.set_column(place, rows.schema.field(name), moved)
    return rows


def main() -> None:
    """Measure, print, record; a part replaces its own figures alone."""
    parser = argparse.ArgumentParser(description="Many trials, several nodes, a month's folder.")
    parser.add_argument("--part", choices=("throughput", "trials", "month", "report"), action="append")
    parser.add_argument("--trials", type=int, default=NUM_TRIALS)
    parser.add_argument("--month", type=int, default=NUM_OF_A_MONTH)
    arguments = parser.parse_args()
    settle_environment()
    os.environ.update(RAY_AUTH_MODE="disabled")
    os.environ.pop("RAY_AUTH_TOKEN", None)
    parts: dict[str, Callable[[], Mapping[str, Any]]] = {
        "throughput": lambda: {f"nodes_{number}": throughput(number) for number in (1, 2, 8)},
        "trials": lambda: {f"nodes_{number}": many_trials(number, arguments.trials) for number in (1, 8)},
        "month": lambda: month(arguments.month),
        "report": lambda: {f"trials_{number}": report(number) for number in REPORTED},
    }
    kept = RESULTS / "load.json"
    figures: dict[str, Any] = json.loads(kept.read_text())["figures"] if kept.is_file() else {}
    for part in arguments.part or parts:
        figures[part] = parts[part]()
        print(json.dumps({part: figures[part]}, indent=2), flush=True)
        print(record("load", figures))


if __name__ == "__main__":
    main()
