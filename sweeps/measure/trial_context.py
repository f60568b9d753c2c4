"""What all trials of a sweep on one node have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

from sweeps.results.tables import ResultsFolder
from sweeps.spec.model import ChecksSpec, EngineSpec, Traced
from sweeps.spec.workload import Block


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialContext:
    """What all trials of a sweep on one node have in common."""

    sweep_id: str
    folder: ResultsFolder
    blocks: tuple[Block, ...]
    """Warm-up blocks, then measured blocks."""
    num_gpus: int
    checks: ChecksSpec = field(default_factory=ChecksSpec)
    traced: Traced = "every_trial"
    anchors: bool = False
    """Measure step count 0 around each chain inside its live server (`control.in_server`)."""
    server: EngineSpec | None = None
    """Given for a real server: configurations that its version cannot run are then refused without a launch."""
    node: str | None = None

    @property
    def deciding(self) -> tuple[Block, ...]:
        """The measured blocks at the first concurrency: what a trial reports."""
        first = self.blocks[0].concurrency
        return tuple(block for block in self.blocks if not block.warmup and block.concurrency == first)
