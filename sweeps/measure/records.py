"""Records of one trial: what was planned, how it ended, what a pruner decided, what the search found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sweeps.engines.base import KernelTime, Kind, Stage
from sweeps.spec.names import Acceptance
from sweeps.spec.space import Configuration, Suggestion

Role = Literal["candidate", "control", "incumbent"]

Status = Literal["running", "completed", "pruned", "failed"]

FailureKind = Kind | Literal["interrupted"]
"""Why a trial failed; `interrupted` if nobody can blame the configuration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTrial:
    """What is to be measured next, and as what."""

    trial_id: str
    """See `name_trial`."""
    role: Role
    number: int | None
    """Optuna's number of the trial; None for controls and incumbents, which are not in the study."""
    configuration: Configuration
    requested: Suggestion
    """Dimension -> value as suggested."""
    launch_key: str
    states: tuple[Configuration, ...] = ()
    """Configurations that a launch for this trial shall be able to switch to."""
    acceptance: Acceptance = "measured"
    """`pinned`: timed with simulated acceptance."""
    start_index: int | None = None
    """Place in the order in which trials started, over all drivers of the sweep; None in older rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a trial ended."""

    status: Literal["completed", "pruned", "failed", "invalid"]
    """`invalid`: refused without a launch, because the server's version cannot run it (`limits`)."""
    reason: str | None = None
    stage: Stage | None = None
    kind: FailureKind | None = None
    transient: bool = False
    relaunched: bool | None = None
    """False: switched in place; None: never got that far."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall seconds by activity (`tables.ACTIVITIES`), engine's clock."""
    kernels: tuple[KernelTime, ...] = ()
    all_reduce: str | None = None
    """What served the all-reduces, by the launch's evidence (`evidence.all_reduce_backend`)."""
    nccl_unread: bool = False
    """NCCL, by its own log, read no variable of the configuration's NCCL set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What a pruner said after a block, and the numbers it said it on."""

    prune: bool
    reason: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What the search itself found out: an assumption that a measurement contradicted, why the sweep stopped."""

    event: str
    detail: str
    numbers: Mapping[str, float] = field(default_factory=dict)


def kind_for_search(kind: FailureKind | None) -> FailureKind | None:
    """The kind that the search is told: a node whose GPUs stayed in use says nothing about a configuration."""
    return "interrupted" if kind == "gpu_not_clean" else kind


TRIAL_LETTERS: Mapping[Role, str] = {"candidate": "t", "control": "k", "incumbent": "i"}
"""Role -> first letter of its trial ids."""


def name_trial(role: Role, number: int) -> str:
    """`t0007`, `k0000`, `i0000`: a letter for the role, and a number of four digits or more.

    Args:
        number: Optuna's number for a candidate; controls and incumbents are counted from 0, each role on its own.
    """
    return f"{TRIAL_LETTERS[role]}{number:04d}"


def study_number(name: str) -> int | None:
    """Optuna's number of a trial id; None for controls and incumbents, which are no trials of the study."""
    return int(name[1:]) if name.startswith(TRIAL_LETTERS["candidate"]) else None
