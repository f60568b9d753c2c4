"""The bound on NCCL tuning: one server, one profiler window, and how much of verify is communication."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ray_jobs.preflight.node_checks import Check
from sweeps.engines import open_engine
from sweeps.engines.base import EngineError, KernelTime
from sweeps.engines.sglang.kernel_trace import communication_share
from sweeps.results.tables import ResultsFolder
from sweeps.spec.document import SpecError
from sweeps.spec.model import SweepSpec
from sweeps.spec.space import Configuration, Space
from sweeps.spec.workload import Block

NAME = "communication in verify"


def check_communication(spec: SweepSpec, blocks: Sequence[Block], out: Path) -> Check:
    """Launch the first configuration that speculates (else the control), warm it up, and trace a few cycles of it."""
    space = Space(spec)
    configuration = next((found for found in space.configurations() if found.speculates), space.control)
    try:
        kernels = _traced(spec, configuration, blocks, out)
    except EngineError as error:
        return Check(name=NAME, state="failed", detail=f"{configuration.label}: {error.kind} in {error.stage}: {error}")
    except SpecError as error:
        return Check(name=NAME, state="failed", detail=str(error))
    share = communication_share(kernels) if kernels else None
    if share is None:
        return Check(
            name=NAME, state="skipped", detail=f"the trace of the {spec.engine.kind} engine has no kernels of verify"
        )
    origin = f"{spec.engine.kind}: " if spec.engine.is_virtual else ""
    return Check(
        name=NAME,
        state="ok",
        detail=f"{origin}{share:.1%} of kernel time with {configuration.label}: no NCCL set can shorten verify by more",
    )


def _traced(
    spec: SweepSpec, configuration: Configuration, blocks: Sequence[Block], out: Path
) -> tuple[KernelTime, ...] | None:
    engine = open_engine(spec, ResultsFolder(out / "trace"))
    try:
        engine.launch(configuration)
        engine.run_block(blocks[0])
        return engine.trace(blocks[-1])
    finally:
        engine.close()
