"""Engines: what serves a configuration and reports its cycles. `open_engine` picks one by name."""

from __future__ import annotations

from sweeps.engines.base import Engine
from sweeps.results.tables import ResultsFolder
from sweeps.spec.model import SweepSpec


def open_engine(spec: SweepSpec, folder: ResultsFolder) -> Engine:
    """The engine that the spec names, not yet launched. Each kind loads only what it needs.

    Args:
        folder: of the sweep; the real server's logs go there, and a replayed recording is looked up beside its spec.
    """
    if spec.engine.kind == "sglang":
        from sweeps.engines.sglang.engine import SGLangEngine

        return SGLangEngine(spec, logs=folder.root / "logs", stop_request=folder.stop_request)
    if spec.engine.kind == "replay":
        from sweeps.engines.replay.engine import ReplayEngine

        return ReplayEngine(spec)
    from sweeps.engines.simulated.engine import SimulatedEngine

    return SimulatedEngine(spec)
