"""Which trials a simulated sweep runs, when, and in which server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from benchmarks.verdict_scenes.truth import Array, Configuration

Role = Literal["control", "candidate", "incumbent"]
BOOT_S, BLOCK_S, SWITCH_S = 240.0, 5.0, 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How a sweep is run; the defaults are those of a spec."""

    num_blocks: int = 12
    every: int | None = 8
    """Candidates between two controls; None: none between."""
    closing: bool = True
    """A last control."""
    again: Literal["best", "best speculative", "none"] = "best"
    """What is launched again beside each control but the first."""
    later_controls_fail: bool = False
    replicates: int = 0
    """Further launches, each of the configuration that leads so far."""
    stop_after: int | None = None
    """Candidates, after which the sweep is stopped."""
    num_nodes: int = 1
    prunes_after: int | None = None
    """Blocks after which a candidate ends that lies more than 5 % below the best so far."""
    gap_after: float | None = None
    """Share of the trials after which the driver was away for hours and came back on another host."""
    gap_is_named: bool = True
    """The other host has another name."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One trial to come. `configuration` None: what leads so far."""

    role: Role
    configuration: Configuration | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Timetable:
    """By slot, (T,) each."""

    slots: tuple[Slot, ...]
    launches: npt.NDArray[np.int64]
    relaunched: npt.NDArray[np.bool_]
    nodes: npt.NDArray[np.int64]
    started_s: Array
    """Engine's clock of the node."""

    def only(self, rows: npt.NDArray[np.intp]) -> Timetable:
        """Some of the trials."""
        return Timetable(
            slots=tuple(self.slots[row] for row in rows),
            launches=self.launches[rows],
            relaunched=self.relaunched[rows],
            nodes=self.nodes[rows],
            started_s=self.started_s[rows],
        )


def timetable(plan: Plan, grid: Sequence[Configuration], rng: np.random.Generator) -> Timetable:
    """One sweep over `grid`, whose first member is the control.

    Servers come in random order and each serves all its configurations at a stretch, unless a control ends it.
    """
    slots = _slots(plan, grid, rng)
    nodes = _nodes(plan, slots, rng)
    live: dict[int, str | None] = {}
    clock = dict.fromkeys(range(plan.num_nodes), 0.0)
    launches, relaunched, started = [], [], []
    newest: dict[int, int] = {}
    for slot, node in zip(slots, nodes, strict=True):
        clock.setdefault(node, max(clock.values()))
        key = slot.configuration.launch_key if slot.configuration is not None else None
        anew = key is None or slot.role != "candidate" or live.get(node) != key
        live[node] = key
        if anew:
            newest[node] = 1 + max(newest.values(), default=-1)
            clock[node] += BOOT_S
        started.append(clock[node])
        clock[node] += plan.num_blocks * BLOCK_S + SWITCH_S
        launches.append(newest[node])
        relaunched.append(anew)
    return Timetable(
        slots=tuple(slots),
        launches=np.array(launches),
        relaunched=np.array(relaunched),
        nodes=np.array(nodes),
        started_s=np.array(started),
    )


def _slots(plan: Plan, grid: Sequence[Configuration], rng: np.random.Generator) -> list[Slot]:
    control = grid[0]
    keys = list(dict.fromkeys(member.launch_key for member in grid[1:]))
    order = [keys[place] for place in rng.permutation(len(keys))]
    candidates: list[Configuration | None] = [
        member for key in order for member in grid[1:] if member.launch_key == key
    ]
    candidates += [None] * plan.replicates
    beside = [Slot("control", control)] + ([Slot("incumbent", None)] if plan.again != "none" else [])
    slots = [Slot("control", control)]
    since = 0
    for configuration in candidates[: plan.stop_after]:
        slots.append(Slot("candidate", configuration))
        since += 1
        if plan.every is not None and since >= plan.every:
            slots += beside
            since = 0
    if plan.closing and since and plan.stop_after is None:
        slots += beside
    return slots


def _nodes(plan: Plan, slots: Sequence[Slot], rng: np.random.Generator) -> list[int]:
    """Each server's node: trials of one launch key stay together, all others are spread at random."""
    places: list[int] = []
    key, node = None, 0
    for slot in slots:
        own = slot.configuration.launch_key if slot.configuration is not None and slot.role == "candidate" else None
        if own is None or own != key:
            node = int(rng.integers(plan.num_nodes))
        key = own
        places.append(node)
    if plan.gap_after is not None:
        first = int(plan.gap_after * len(places))
        places[first:] = [plan.num_nodes] * (len(places) - first)
    return places
