"""Recordings for the replay engine: a results folder as a sweep leaves it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from sweeps.engines.base import Engine
from sweeps.measure.held_engine import HeldEngine
from sweeps.measure.records import Outcome, PlannedTrial
from sweeps.measure.trial import Measurement
from sweeps.measure.trial_context import TrialContext
from sweeps.results.tables import ResultsFolder
from sweeps.spec.model import SweepSpec
from sweeps.spec.space import Configuration, Space
from sweeps.spec.workload import plan_blocks


def record_sweep(
    engine: Engine, spec: SweepSpec, folder: ResultsFolder, configurations: Sequence[Configuration]
) -> None:
    """Measure the configurations, in this order, as candidates t0000, t0001, ...; failures are rows."""
    folder.manifest.write_text(json.dumps({"sweep_id": "s1", "schema_version": 1}), encoding="utf-8")
    held, space = HeldEngine(engine=engine), Space(spec)
    blocks = plan_blocks(spec.workload, folder=Path())
    context = TrialContext(sweep_id="s1", folder=folder, blocks=blocks, num_gpus=8)
    for number, configuration in enumerate(configurations):
        trial = PlannedTrial(
            trial_id=f"t{number:04d}",
            role="candidate",
            number=number,
            configuration=configuration,
            requested=space.suggestion(configuration),
            launch_key=space.launch_key(configuration),
            states=space.states(configuration),
        )
        measurement = Measurement(held, trial, context)
        while not isinstance(measurement.advance(), Outcome):
            pass
