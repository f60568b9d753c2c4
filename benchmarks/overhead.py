"""What the framework costs beside the engine: `python -m benchmarks.overhead`.

Per trial: from the study's suggestion to the engine's first request, less what the engine itself took, with the actor
reused; bare Ray Tune trials that do nothing, in the same run; a simulated sweep of 100 trials x 24 blocks as a whole.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import tune

from benchmarks.record import record
from ray_jobs import cluster
from ray_jobs.ray_settings import settle_environment
from ray_jobs.trial_actor import SweepRun
from ray_jobs.tune_bridge import run_study
from sweeps.engines.base import BlockRecord, KernelTime, LaunchReport
from sweeps.engines.simulated.engine import SimulatedEngine
from sweeps.engines.summary import BlockSummary
from sweeps.measure.records import Decision, Outcome, PlannedTrial
from sweeps.results.tables import ResultsFolder, read_table
from sweeps.search.optuna_study import InvalidSuggestion
from sweeps.search.study import SweepStudy
from sweeps.search.study_journal import open_journal
from sweeps.spec.model import SweepSpec
from sweeps.spec.reading import parse_spec
from sweeps.spec.space import Configuration, Space
from sweeps.spec.workload import Block, plan_blocks

SPEC = """
sweep: overhead
engine: {kind: simulated, machine: rtx-pro-6000-pcie-x8}
drafters: {founding: founding}
search:
  num_steps: [0, 1, 2, 3, 4, 5, 6, 7]
  eagle_topk: [1, 2]
  nccl: [default, n1, n2, n3, n4, n5, n6, n7]
nccl_sets:
  n1: {NCCL_ALGO: Ring}
  n2: {NCCL_ALGO: "allreduce:tree"}
  n3: {NCCL_PROTO: LL}
  n4: {NCCL_PROTO: Simple}
  n5: {NCCL_NTHREADS: 512}
  n6: {NCCL_MAX_NCHANNELS: 16}
  n7: {NCCL_BUFFSIZE: 16777216}
workload: {prompt_tokens: 128, output_tokens: 256, warmup_blocks: 2, blocks: 24}
study: {sampler: {name: SAMPLER}}
budget: {trials: TRIALS}
control: {every: 0, incumbent: false}
"""
NUM_TRIALS = 98
"""Candidates; the first and the last control make it 100 trials."""
_CALLS = "calls.jsonl"


class TimedEngine:
    """The simulated engine, with wall-clock notes of when it was called and how long it took."""

    name = "simulated"

    def __init__(self, spec: SweepSpec, folder: ResultsFolder) -> None:
        self._engine = SimulatedEngine(spec)
        self._calls = (folder.root / _CALLS).open("a", buffering=1)

    def now_s(self) -> float:
        return self._engine.now_s()

    def launch(self, configuration: Configuration, *, states: tuple[Configuration, ...] = ()) -> LaunchReport:
        began_s = time.time()
        report = self._engine.launch(configuration, states=states)
        self._note("launch", began_s)
        return report

    def switch(self, configuration: Configuration) -> LaunchReport | None:
        began_s = time.time()
        report = self._engine.switch(configuration)
        self._note("switch", began_s)
        return report

    def run_block(self, block: Block) -> BlockRecord:
        began_s = time.time()
        result = self._engine.run_block(block)
        self._note("block", began_s)
        return result

    def run_anchor(self, block: Block) -> BlockRecord | None:
        return self._engine.run_anchor(block)

    def trace(self, block: Block) -> tuple[KernelTime, ...] | None:
        began_s = time.time()
        result = self._engine.trace(block)
        self._note("trace", began_s)
        return result

    def close(self) -> None:
        began_s = time.time()
        self._engine.close()
        self._note("close", began_s)

    def _note(self, call: str, began_s: float) -> None:
        self._calls.write(json.dumps([call, began_s, time.time()]) + "\n")


class Clocked:
    """Notes when the driver asked for each trial."""

    def __init__(self) -> None:
        self.asked_s: list[float] = []

    def started(self, trial: PlannedTrial) -> None:
        self.asked_s.append(time.time())

    def block_done(self, trial: PlannedTrial, block: BlockSummary, decision: Decision) -> None: ...

    def ended(self, trial: PlannedTrial, outcome: Outcome) -> None: ...

    def refused(self, invalid: InvalidSuggestion) -> None: ...


class TimedStudy(SweepStudy):
    """Notes how long each suggestion took."""

    suggest_s: list[float]

    def ask(self) -> PlannedTrial | None:
        began_s = time.time()
        trial = super().ask()
        if trial is not None:
            self.suggest_s = [*getattr(self, "suggest_s", []), time.time() - began_s]
        return trial


class Nothing(tune.Trainable):
    """A bare Tune trial: one step, no work."""

    def step(self) -> dict[str, Any]:
        return {"value": 1.0, "done": True}

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        return True


def sweep_overheads(sampler: str, num_trials: int) -> Mapping[str, float]:
    """Seconds per trial from suggestion (its own cost included) to first request, engine time taken out."""
    spec = parse_spec(SPEC.replace("SAMPLER", sampler).replace("TRIALS", str(num_trials)), source="overhead")
    with tempfile.TemporaryDirectory() as root:
        folder, space, clocked = ResultsFolder(Path(root)), Space(spec), Clocked()
        began_s = time.monotonic()
        study = TimedStudy(spec, space, storage=open_journal(folder.study))
        run = SweepRun(
            spec=spec,
            sweep_id="overhead",
            folder=folder,
            blocks=plan_blocks(spec.workload, folder=folder.root),
            open_engine=TimedEngine,
        )
        run_study(study, run, clocked)
        whole_s = time.monotonic() - began_s
        calls = [json.loads(line) for line in (folder.root / _CALLS).read_text().splitlines()]
        num_rows, num_blocks = read_table(folder, "trials").num_rows, read_table(folder, "blocks").num_rows
    gaps = [
        suggested_s + _first_request_less_engine(asked_s, calls)
        for asked_s, suggested_s in zip(clocked.asked_s, study.suggest_s, strict=True)
    ]
    reused = gaps[1:]  # the first starts the actor
    engine_s = sum(end_s - start_s for _, start_s, end_s in calls)
    return {
        "trials": num_rows,
        "blocks": num_blocks,
        "sweep_s": whole_s,
        "engine_s": engine_s,
        "all_overhead_per_trial_s": (whole_s - engine_s) / num_rows,
        "per_trial_median_s": statistics.median(reused),
        "per_trial_p95_s": sorted(reused)[int(0.95 * len(reused))],
        "suggest_median_s": statistics.median(study.suggest_s),
    }


def bare_tune_s(num_trials: int) -> float:
    """Median seconds between the starts of consecutive Tune trials that do nothing, actor reused."""
    starts: list[float] = []

    class Starts(tune.Callback):
        def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            starts.append(time.monotonic())

    with tempfile.TemporaryDirectory() as root:
        tune.Tuner(
            tune.with_resources(Nothing, tune.PlacementGroupFactory([{"CPU": 1, "GPU": 8}])),
            tune_config=tune.TuneConfig(num_samples=num_trials, max_concurrent_trials=1, reuse_actors=True),
            run_config=tune.RunConfig(
                storage_path=root,
                verbose=0,
                callbacks=[Starts()],
                checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False),
            ),
        ).fit()
    return statistics.median(after - before for before, after in itertools.pairwise(starts[1:]))


def main() -> None:
    """Measure, print, record."""
    settle_environment()
    spec = parse_spec(SPEC.replace("SAMPLER", "grid").replace("TRIALS", "1"), source="overhead")
    cluster.connect(spec.engine, spec.resources)
    figures: dict[str, Any] = {"bare_tune_per_trial_median_s": bare_tune_s(NUM_TRIALS)}
    for sampler in ("grid", "tpe"):
        figures[sampler] = sweep_overheads(sampler, NUM_TRIALS)
    ray.shutdown()
    figures["targets"] = {"per_trial_median_s": 0.3, "sweep_s": 60.0}
    print(json.dumps(figures, indent=2))
    print(record("overhead", figures))


def _first_request_less_engine(asked_s: float, calls: list[Any]) -> float:
    """From `asked_s` to the first block after it, less the engine calls in between (stop, launch, switch)."""
    after = [call for call in calls if call[1] >= asked_s]
    first = next(place for place, call in enumerate(after) if call[0] == "block")
    engine_s = sum(end_s - start_s for _, start_s, end_s in after[:first])
    return float(after[first][1] - asked_s - engine_s)


if __name__ == "__main__":
    main()
