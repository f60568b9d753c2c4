"""The engine that a node keeps between trials, its live server, and the clock of the rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from sweeps.engines.base import Engine, LaunchReport


@dataclass(slots=True)
class HeldEngine:
    """An engine and what is known about the server that it holds between trials."""

    engine: Engine
    not_before_s: float = 0.0
    """The time at which an earlier engine's rows of this node end: a clock that started anew goes on from there."""
    live_launch_key: str | None = None
    report: LaunchReport | None = None
    version: str | None = None
    """Version of the serving engine; known since the first launch."""
    anchored: bool = False
    """An anchor is the last thing that the server measured."""
    offset_s: float = field(init=False)
    """From the engine's clock to that of the rows."""
    free_since_s: float = field(init=False)
    """When the last trial let go; from there on the GPUs idle."""

    def __post_init__(self) -> None:
        self.offset_s = max(0.0, self.not_before_s - self.engine.now_s())
        self.free_since_s = self.now_s()

    def now_s(self) -> float:
        """The clock of the rows: the engine's, never behind what an earlier engine wrote."""
        return self.engine.now_s() + self.offset_s

    def close(self) -> None:
        """Stop the server. Raises EngineError (`gpu_not_clean`)."""
        self.live_launch_key = self.report = None
        self.engine.close()
