"""One simulated sweep: truth and noise on a timetable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from benchmarks.verdict_scenes.noise import Noise
from benchmarks.verdict_scenes.plan import Plan, Timetable, timetable
from benchmarks.verdict_scenes.truth import Array, Configuration, Truth

PRUNED_BELOW = 0.95
"""Of the leader's throughput over the same blocks."""
_MOST_STEPS = 16
_LETTER = {"control": "k", "candidate": "t", "incumbent": "i"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """What ran, by trial (T,) and by block (T, B); blocks from `num_blocks` on were not run."""

    truth: Truth
    crowded: Truth | None
    """At the second concurrency; None: there was one alone."""
    plan: Plan
    table: Timetable
    configurations: tuple[Configuration, ...]
    num_blocks: npt.NDArray[np.int64]
    failed: npt.NDArray[np.bool_]
    cycles: Array
    slowness: Array
    """Log of the time that a cycle took over its true time."""
    crowded_slowness: Array
    """The same at the second concurrency."""
    shared: Array
    """Of it, drift and node."""
    outlier: int | None
    """A launch that was slower by accident."""
    is_timed: bool
    """Cycles are timed by phase."""

    @property
    def names(self) -> tuple[str, ...]:
        """Trial ids."""
        return tuple(f"{_LETTER[slot.role]}{row:04d}" for row, slot in enumerate(self.table.slots))

    def trials_of(self, launch: int) -> tuple[str, ...]:
        """Trial ids of one launch."""
        return tuple(name for name, each in zip(self.names, self.table.launches, strict=True) if each == launch)

    @property
    def shift(self) -> float:
        """Mean log slowness by drift and node over all trials with results: levels are true at that mean."""
        rows = np.flatnonzero(~self.failed)
        return float(np.mean([self.shared[row, : self.num_blocks[row]].mean() for row in rows]))

    def truth_at(self, concurrency: int) -> Truth:
        """Of the search's own concurrency, 1, or of the second one."""
        return self.crowded if self.crowded is not None and concurrency == self.crowded.requests else self.truth

    def measured(self) -> tuple[Configuration, ...]:
        """Configurations with results, in the order of their first trial."""
        rows = np.flatnonzero(~self.failed)
        return tuple(dict.fromkeys(self.configurations[row] for row in rows))


def simulate(
    truth: Truth,
    noise: Noise,
    plan: Plan,
    rng: np.random.Generator,
    *,
    crowded: Truth | None = None,
    is_timed: bool = True,
) -> Sweep:
    """One sweep. What leads so far is known from the trials before, by tokens over seconds.

    Args:
        crowded: the truth at a second concurrency, if each block is followed by its counterpart there.
        is_timed: whether the engine times the phases of a cycle.
    """
    grid = truth.configurations()
    table = timetable(plan, grid, rng)
    passed = (table.at_s - table.at_s.min()) / np.ptp(table.at_s)
    nodes = noise.node * rng.standard_normal(int(table.nodes.max()) + 1)
    shared = noise.drifted(rng, passed) + nodes[table.nodes][:, None]
    luck = _Luck.drawn(noise, plan, table, truth.num_sets, rng)
    prompts = rng.standard_normal(plan.num_blocks)
    cycles = np.stack([truth.cycles(member, prompts) for member in grid])
    seconds = cycles * _cycles_ms(truth)[:, None] / 1000
    took = np.empty_like(shared)
    again = np.empty_like(shared)
    num_blocks = np.full(len(table.slots), plan.num_blocks)
    chosen: list[int] = []
    for row, slot in enumerate(table.slots):
        place = (
            _leader(grid, chosen, took, num_blocks, plan)
            if slot.configuration is None
            else grid.index(slot.configuration)
        )
        once, twice = (luck.slowness(row, grid[place], blocks) + shared[row] for blocks in luck.blocks)
        took[row], again[row] = seconds[place] * np.exp(once), twice
        if slot.role == "candidate" and plan.prunes_after is not None:
            num_blocks[row] = _ended_after(took[: row + 1], plan)
        chosen.append(place)
    rows = np.array([row for row, slot in enumerate(table.slots) if slot.role != "incumbent" or chosen[row] != 0])
    members = [chosen[row] for row in rows]
    return Sweep(
        truth=truth,
        crowded=crowded,
        plan=plan,
        table=table.only(rows),
        configurations=tuple(grid[place] for place in members),
        num_blocks=num_blocks[rows],
        failed=np.array([plan.later_controls_fail and table.slots[row].role == "control" and row > 0 for row in rows]),
        cycles=cycles[members],
        slowness=np.log(took[rows] / seconds[members]),
        crowded_slowness=again[rows],
        shared=shared[rows],
        outlier=luck.outlier,
        is_timed=is_timed,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Luck:
    """What a sweep draws before it runs; standardised, but for `accidents`."""

    noise: Noise
    table: Timetable
    of_launch: Array
    of_steps: Array
    """(launches, steps)."""
    of_communicator: Array
    """(launches, sets, copies)."""
    of_state: Array
    """(launches, sets, copies, steps)."""
    blocks: tuple[Array, Array]
    """(T, B) at each of two concurrencies."""
    accidents: Array
    """(launches,) outliers and branches."""
    outlier: int | None

    @classmethod
    def drawn(cls, noise: Noise, plan: Plan, table: Timetable, num_sets: int, rng: np.random.Generator) -> _Luck:
        launches, trials = int(table.launches.max()) + 1, len(table.slots)
        accidents = noise.branches * rng.integers(2, size=launches).astype(float)
        outlier = int(rng.integers(1, launches)) if noise.outlier else None
        if outlier is not None:
            accidents[outlier] += noise.outlier
        return cls(
            noise=noise,
            table=table,
            of_launch=noise.standard(rng, launches),
            of_steps=rng.standard_normal((launches, _MOST_STEPS)),
            of_communicator=rng.standard_normal((launches, num_sets, plan.copies)),
            of_state=rng.standard_normal((launches, num_sets, plan.copies, _MOST_STEPS)),
            blocks=(noise.blocks(rng, trials, plan.num_blocks), noise.blocks(rng, trials, plan.num_blocks)),
            accidents=accidents,
            outlier=outlier,
        )

    def slowness(self, row: int, member: Configuration, blocks: Array) -> Array:
        """(B,) of one trial, without what all trials share."""
        noise, drafts, launch = self.noise, member.speculates, self.table.launches[row]
        own = noise.launch_sd(drafts=drafts) * self.of_launch[launch] + self.accidents[launch]
        if drafts:
            own += noise.interaction * self.of_steps[launch, member.num_steps]
        if noise.communicator or noise.state:
            place = launch, member.set_number, self.table.slots[row].copy
            own += noise.communicator * self.of_communicator[place]
            own += noise.state * self.of_state[(*place, member.num_steps)]
        slow = own + noise.block_sd(drafts=drafts) * blocks[row]
        if self.table.relaunched[row]:
            slow[0] += noise.warm_up
        return np.asarray(slow)


@cache
def _cycles_ms(truth: Truth) -> Array:
    return np.array([truth.phases_ms(member)["cycle"] for member in truth.configurations()])


def _leader(
    grid: Sequence[Configuration], chosen: Sequence[int], took: Array, num_blocks: npt.NDArray[np.int64], plan: Plan
) -> int:
    """Place in the grid of the fastest so far, by the seconds of its whole trials; the control without any."""
    spent: dict[int, list[float]] = {}
    for row, place in enumerate(chosen):
        if num_blocks[row] == plan.num_blocks and (grid[place].speculates or plan.again != "best speculative"):
            spent.setdefault(place, []).append(float(took[row].sum()))
    return min(spent, key=lambda place: float(np.mean(spent[place])), default=0)


def _ended_after(took: Array, plan: Plan) -> int:
    """Blocks of the last trial: fewer if it lies too far below the best over its first blocks."""
    first = took[:, : plan.prunes_after].sum(axis=1)
    is_slow = plan.prunes_after is not None and first.min() < PRUNED_BELOW * first[-1]
    return plan.prunes_after if is_slow and plan.prunes_after is not None else plan.num_blocks
