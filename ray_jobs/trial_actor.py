"""The actor of one node: keeps its engine between trials and answers Tune block by block."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ray import tune

from sweeps.engines.base import Engine
from sweeps.engines.summary import BlockSummary
from sweeps.measure.held_engine import HeldEngine
from sweeps.measure.records import Outcome, PlannedTrial
from sweeps.measure.rows import last_end_s
from sweeps.measure.trial import Measurement
from sweeps.measure.trial_context import TrialContext
from sweeps.results.tables import ResultsFolder
from sweeps.results.writing import full_disk
from sweeps.spec.model import SweepSpec
from sweeps.spec.workload import Block

_MAX_ATTEMPTS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRun:
    """What every actor of a sweep is given."""

    spec: SweepSpec
    sweep_id: str
    folder: ResultsFolder
    """On a path that all nodes see."""
    blocks: tuple[Block, ...]
    open_engine: Callable[[SweepSpec, ResultsFolder], Engine]
    """Called in the actor; pickled by reference."""

    @property
    def num_measured(self) -> int:
        return sum(not block.warmup for block in self.blocks)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockResult:
    """One block on its way from actor to driver; an object, because Tune flattens dicts."""

    block: BlockSummary
    seconds: Mapping[str, float]
    all_reduce: str | None = None
    nccl_unread: bool = False


class SweepTrainable(tune.Trainable):
    """The actor of one node: keeps its engine between trials. One `step` is one block, or the end of a trial."""

    def setup(self, config: dict[str, Any], run: SweepRun) -> None:  # type: ignore[override] # by tune.with_parameters
        self._run = run
        self._held: HeldEngine | None = None
        self._measurement: Measurement | None = None
        self._spent: Mapping[str, float] = {}
        self._begun = False
        if not run.spec.engine.is_virtual:
            check_visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), run.spec.resources.gpus)
        self._held = HeldEngine(
            run.open_engine(run.spec, run.folder), not_before_s=last_end_s(run.folder, config["node"].name)
        )
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take the next trial; never returns False, on which Tune would wait for ever."""
        if self._measurement is not None:
            self._measurement.stop()
        self._begin(new_config)
        return True

    def step(self) -> dict[str, Any]:
        try:
            return self._step()
        except OSError as error:
            if (full := full_disk(error)) is None:
                raise
            return {"full": str(full), "done": True}  # the journal stays, and the next driver makes rows of it

    def _step(self) -> dict[str, Any]:
        if self._measurement is None or not self._begun:
            self._measurement, self._begun = self._measure(), True
        result = self._measurement.advance()
        if isinstance(result, Outcome) and result.transient and self._attempt < _MAX_ATTEMPTS:
            self._spent = self._total(result.seconds)
            self._attempt += 1
            self._measurement = self._measure()
            result = self._measurement.advance()
        if isinstance(result, BlockSummary):
            seconds = self._total(self._measurement.seconds)
            newest = BlockResult(
                block=result,
                seconds=seconds,
                all_reduce=self._measurement.all_reduce,
                nccl_unread=self._measurement.nccl_unread,
            )
            return {"block": newest, "done": False}
        return {"outcome": replace(result, seconds=self._total(result.seconds)), "done": True}

    def cleanup(self) -> None:
        try:
            if self._measurement is not None:
                try:
                    self._measurement.stop()
                finally:
                    self._measurement.close_engine()
            elif self._held is not None:
                self._held.close()
        except OSError as error:
            if full_disk(error) is None:
                raise

    def _begin(self, config: Mapping[str, Any]) -> None:
        # Nothing is measured or written before the first step: Tune may give the trial to another actor until then.
        self._trial: PlannedTrial = config["trial"]
        self._node: str = config["node"].name
        self._attempt = 1
        self._spent = {}
        self._begun = False

    def _measure(self) -> Measurement:
        assert self._held is not None
        run = self._run
        context = TrialContext(
            sweep_id=run.sweep_id,
            folder=run.folder,
            blocks=run.blocks,
            num_gpus=run.spec.resources.gpus,
            checks=run.spec.checks,
            anchors=run.spec.control.in_server,
            traced=run.spec.workload.trace,
            server=None if run.spec.engine.is_virtual else run.spec.engine,
            node=self._node,
        )
        return Measurement(self._held, self._trial, context, attempt=self._attempt)

    def _total(self, seconds: Mapping[str, float]) -> Mapping[str, float]:
        return {activity: spent + self._spent.get(activity, 0.0) for activity, spent in seconds.items()}


def check_visible_gpus(visible: str | None, num_gpus: int) -> None:
    """Raise RuntimeError if the actor does not see exactly `num_gpus` GPUs."""
    seen = [gpu for gpu in (visible or "").split(",") if gpu]
    if len(seen) != num_gpus:
        raise RuntimeError(f"CUDA_VISIBLE_DEVICES: wanted {num_gpus} GPUs for this trial, got {visible!r}")
