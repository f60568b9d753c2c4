"""The stub engine in real time: blocks sleep, so that trials on several nodes overlap."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from sweeps.engines.base import BlockRecord, EngineError
from sweeps.results.tables import ResultsFolder
from sweeps.spec.model import SweepSpec
from sweeps.spec.workload import Block
from tests.sweeps.stub_engine import StubEngine, open_stub

DIRTY = "STUB_NODE_IS_DIRTY"
"""Set in the environment of a node whose GPUs stay in use."""
BLOCK_S = 0.05


@dataclass
class SleepingStub(StubEngine):
    """As the stub, but each block takes `BLOCK_S` of wall time."""

    def run_block(self, block: Block) -> BlockRecord:
        time.sleep(BLOCK_S)
        return super().run_block(block)


def open_sleeping(spec: SweepSpec, folder: ResultsFolder) -> SleepingStub:
    """Opened in an actor; each engine has a machine's name of its own."""
    engine = SleepingStub(machine=open_stub(spec, folder).machine)
    if os.environ.get(DIRTY):
        engine.failures["launch"] = [EngineError("in use", stage="load", kind="gpu_not_clean")] * 100
    return engine
