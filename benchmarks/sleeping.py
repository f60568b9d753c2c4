"""The simulated engine in real time, for benchmarks of several nodes: launches and blocks sleep."""

from __future__ import annotations

import time

from sweeps.engines.base import BlockRecord, LaunchReport
from sweeps.engines.simulated.engine import SimulatedEngine
from sweeps.results.tables import ResultsFolder
from sweeps.spec.model import SweepSpec
from sweeps.spec.space import Configuration
from sweeps.spec.workload import Block

LAUNCH_S, BLOCK_S = 2.0, 0.5
"""Wall seconds: enough that 8 nodes on 2 cores mostly sleep."""


class SleepingEngine(SimulatedEngine):
    """Numbers and clock are those of the simulated engine; the wall waits as well."""

    def launch(self, configuration: Configuration, *, states: tuple[Configuration, ...] = ()) -> LaunchReport:
        time.sleep(LAUNCH_S)
        return super().launch(configuration, states=states)

    def run_block(self, block: Block) -> BlockRecord:
        time.sleep(BLOCK_S)
        return super().run_block(block)


def open_sleeping(spec: SweepSpec, folder: ResultsFolder) -> SleepingEngine:
    """Opened in an actor."""
    return SleepingEngine(spec)


def open_simulated(spec: SweepSpec, folder: ResultsFolder) -> SimulatedEngine:
    """As it is without sleep."""
    return SimulatedEngine(spec)
