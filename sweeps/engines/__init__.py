"""Engines: what serves a configuration and reports its cycles. `open_engine` opens the one that a spec names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sweeps.engines.base import Engine
from sweeps.results.tables import ResultsFolder
from sweeps.spec.engine_kinds import EngineKind
from sweeps.spec.model import SweepSpec


def open_engine(spec: SweepSpec, folder: ResultsFolder) -> Engine:
    """The engine that the spec names, not yet launched.

    Args:
        folder: of the sweep; the real server's logs go there.
    """
    return OPENERS[spec.engine.kind](spec, folder)


def _open_simulated(spec: SweepSpec, _: ResultsFolder) -> Engine:
    from sweeps.engines.simulated.engine import SimulatedEngine

    return SimulatedEngine(spec)


def _open_sglang(spec: SweepSpec, folder: ResultsFolder) -> Engine:
    from sweeps.engines.sglang.engine import SGLangEngine

    return SGLangEngine(spec, logs=folder.root / "logs", stop_request=folder.stop_request)


def _open_replay(spec: SweepSpec, _: ResultsFolder) -> Engine:
    from sweeps.engines.replay.engine import ReplayEngine

    return ReplayEngine(spec)


OPENERS: Mapping[EngineKind, Callable[[SweepSpec, ResultsFolder], Engine]] = {
    "simulated": _open_simulated,
    "sglang": _open_sglang,
    "replay": _open_replay,
}
"""How to open each kind; every opener imports only what its engine needs."""
