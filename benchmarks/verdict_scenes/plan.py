"""Which trials a simulated sweep runs, when, and in which server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
    states: Literal["none", "sequential", "rounds"] = "none"
    """Whether one server holds all NCCL sets and steps of a top-k, and whether their blocks are interleaved."""
    copies: int = 1
    """Communicators of each NCCL set in one server; each copy is measured as a trial of its own."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One trial to come. `configuration` None: what leads so far."""

    role: Role
    configuration: Configuration | None
    copy: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Timetable:
    """By slot, (T,) each."""

    slots: tuple[Slot, ...]
    launches: npt.NDArray[np.int64]
    relaunched: npt.NDArray[np.bool_]
    nodes: npt.NDArray[np.int64]
    at_s: Array
    """(T, B) start of each block, on the engine's clock."""

    def only(self, rows: npt.NDArray[np.intp]) -> Timetable:
        """Some of the trials."""
        return replace(
            self,
            slots=tuple(self.slots[row] for row in rows),
            launches=self.launches[rows],
            relaunched=self.relaunched[rows],
            nodes=self.nodes[rows],
            at_s=self.at_s[rows],
        )


def timetable(plan: Plan, grid: Sequence[Configuration], rng: np.random.Generator) -> Timetable:
    """One sweep over `grid`, whose first member is the control.

    Servers come in random order and each serves all its configurations at a stretch, unless a control ends it.
    """
    slots = _states(plan, grid, rng) if plan.states != "none" else _slots(plan, grid, rng)
    nodes = _nodes(plan, slots, rng)
    live: dict[int, str | None] = {}
    newest: dict[int, int] = {}
    launches, relaunched = [], []
    for slot, node in zip(slots, nodes, strict=True):
        key = None if slot.configuration is None else server_of(plan, slot.configuration)
        begins = slot.role != "candidate" or key is None or live.get(node) != key
        live[node] = key
        if begins:
            newest[node] = 1 + max(newest.values(), default=-1)
        launches.append(newest[node])
        relaunched.append(begins)
    return Timetable(
        slots=tuple(slots),
        launches=np.array(launches),
        relaunched=np.array(relaunched),
        nodes=np.array(nodes),
        at_s=_times(plan, launches, nodes),
    )


def _times(plan: Plan, launches: Sequence[int], nodes: Sequence[int]) -> Array:
    """(T, B) start of every block; a host that takes over goes on where the clocks of all others stand."""
    clock = dict.fromkeys(range(plan.num_nodes), 0.0)
    blocks = np.arange(plan.num_blocks)
    at_s = np.empty((len(launches), plan.num_blocks))
    for launch in dict.fromkeys(launches):
        rows = [row for row, each in enumerate(launches) if each == launch]
        node = nodes[rows[0]]
        begin = clock.setdefault(node, max(clock.values())) + BOOT_S
        for place, row in enumerate(rows):
            if plan.states == "rounds":
                turn = np.where(blocks % 2 == 0, place, len(rows) - 1 - place)
                at_s[row] = begin + (blocks * len(rows) + turn) * BLOCK_S
            else:
                at_s[row] = begin + place * (plan.num_blocks * BLOCK_S + SWITCH_S) + blocks * BLOCK_S
        clock[node] = float(at_s[rows].max()) + BLOCK_S + SWITCH_S
    return at_s


def server_of(plan: Plan, member: Configuration) -> str:
    """Key of the server that serves a configuration."""
    return member.launch_key if plan.states == "none" else f"{member.kind}/{member.topk}"


def _slots(plan: Plan, grid: Sequence[Configuration], rng: np.random.Generator) -> list[Slot]:
    candidates: list[Configuration | None] = list(_shuffled(grid[1:], rng))
    candidates += [None] * plan.replicates
    beside = [Slot("control", grid[0])] + ([Slot("incumbent", None)] if plan.again != "none" else [])
    slots = [Slot("control", grid[0])]
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


def _shuffled(members: Sequence[Configuration], rng: np.random.Generator) -> Iterator[Configuration]:
    keys = list(dict.fromkeys(member.launch_key for member in members))
    for place in rng.permutation(len(keys)):
        yield from (member for member in members if member.launch_key == keys[place])


def _states(plan: Plan, grid: Sequence[Configuration], rng: np.random.Generator) -> list[Slot]:
    """The control's server, one server for each top-k, and the winner in a server of its own."""
    slots = [Slot("control", grid[0])]
    members = [(member, copy) for member in grid for copy in range(plan.copies) if member != grid[0] or copy]
    for server in dict.fromkeys(server_of(plan, member) for member in grid):
        held = [(member, copy) for member, copy in members if server_of(plan, member) == server]
        slots += [Slot("candidate", *held[place]) for place in rng.permutation(len(held))]
    return [*slots, Slot("incumbent", None)]


def _nodes(plan: Plan, slots: Sequence[Slot], rng: np.random.Generator) -> list[int]:
    """Each server's node: trials of one server stay together, all others are spread at random."""
    places: list[int] = []
    key, node = None, 0
    for slot in slots:
        beside = slot.configuration is None or slot.role != "candidate"
        own = None if beside or slot.configuration is None else server_of(plan, slot.configuration)
        if own is None or own != key:
            node = int(rng.integers(plan.num_nodes))
        key = own
        places.append(node)
    if plan.gap_after is not None:
        first = int(plan.gap_after * len(places))
        places[first:] = [plan.num_nodes] * (len(places) - first)
    return places
