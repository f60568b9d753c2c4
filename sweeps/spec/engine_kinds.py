"""The engines that a spec can name, and what the rest of the program may know of each without opening one.

An engine is added here (a name and its facts) and in `sweeps.engines` (how to open it); nothing else compares kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

EngineKind = Literal["simulated", "sglang", "replay"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFacts:
    """Facts that hold for every sweep on this kind of engine."""

    required_key: Literal["machine", "model_path", "recording"]
    """Key of the spec's `engine` section without which it cannot serve."""
    is_virtual: bool
    """It computes its numbers on a clock of its own: no server, no checkpoint, no GPU."""


ENGINE_KINDS: Mapping[EngineKind, EngineFacts] = {
    "simulated": EngineFacts(required_key="machine", is_virtual=True),
    "sglang": EngineFacts(required_key="model_path", is_virtual=False),
    "replay": EngineFacts(required_key="recording", is_virtual=True),
}
