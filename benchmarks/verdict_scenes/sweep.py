"""One simulated sweep: truth and noise on a timetable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from benchmarks.verdict_scenes.noise import Noise
from benchmarks.verdict_scenes.plan import BLOCK_S, Plan, Timetable, timetable
from benchmarks.verdict_scenes.truth import Array, Configuration, Truth

PRUNED_BELOW = 0.95
"""Of the leader's throughput over the same blocks."""
_LETTER = {"control": "k", "candidate": "t", "incumbent": "i"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """What ran, by trial (T,) and by block (T, B); blocks from `num_blocks` on were not run."""

    truth: Truth
    plan: Plan
    table: Timetable
    configurations: tuple[Configuration, ...]
    num_blocks: npt.NDArray[np.int64]
    failed: npt.NDArray[np.bool_]
    cycles: Array
    slowness: Array
    """Log of the time that a cycle took over its true time."""
    shared: Array
    """Of it, drift and node."""
    outlier: int | None
    """A launch that was slower by accident."""

    @property
    def names(self) -> tuple[str, ...]:
        """Trial ids."""
        return tuple(f"{_LETTER[slot.role]}{row:04d}" for row, slot in enumerate(self.table.slots))

    @property
    def shift(self) -> float:
        """Mean log slowness by drift and node over all trials with results: levels are true at that mean."""
        rows = np.flatnonzero(~self.failed)
        return float(np.mean([self.shared[row, : self.num_blocks[row]].mean() for row in rows]))

    def measured(self) -> tuple[Configuration, ...]:
        """Configurations with results, in the order of their first trial."""
        rows = np.flatnonzero(~self.failed)
        return tuple(dict.fromkeys(self.configurations[row] for row in rows))


def simulate(truth: Truth, noise: Noise, plan: Plan, rng: np.random.Generator) -> Sweep:
    """One sweep. What leads so far is known from the trials before, by tokens over seconds."""
    grid = truth.configurations()
    table = timetable(plan, grid, rng)
    num_trials, num_launches = len(table.slots), int(table.launches.max()) + 1
    prompts = rng.standard_normal(plan.num_blocks)
    cycles = np.stack([truth.cycles(member, prompts) for member in grid])
    at_s = table.started_s[:, None] + BLOCK_S * np.arange(plan.num_blocks)
    nodes = noise.node * rng.standard_normal(int(table.nodes.max()) + 1)
    shared = noise.drifted(rng, (at_s - at_s.min()) / np.ptp(at_s)) + nodes[table.nodes][:, None]
    of_launch, of_steps = noise.standard(rng, num_launches), rng.standard_normal((num_launches, 16))
    of_block = noise.blocks(rng, num_trials, plan.num_blocks)
    accidents = noise.branches * rng.integers(2, size=num_launches).astype(float)
    outlier = int(rng.integers(1, num_launches)) if noise.outlier else None
    if outlier is not None:
        accidents[outlier] += noise.outlier
    warm_up = np.zeros((num_trials, plan.num_blocks))
    warm_up[table.relaunched, 0] = noise.warm_up
    seconds = cycles * _cycles_ms(truth)[:, None] / 1000
    slowness = shared + warm_up
    num_blocks = np.full(num_trials, plan.num_blocks)
    kept = np.ones(num_trials, dtype=bool)
    chosen: list[int] = []
    for row, slot in enumerate(table.slots):
        leader = _leader(grid, chosen, seconds, slowness, num_blocks, speculates=plan.again == "best speculative")
        place = leader if slot.configuration is None else grid.index(slot.configuration)
        kept[row] = slot.role != "incumbent" or place != 0
        drafts, launch = grid[place].speculates, table.launches[row]
        own = noise.launch_sd(drafts=drafts) * of_launch[launch] + accidents[launch]
        if drafts:
            own += noise.interaction * of_steps[launch, grid[place].num_steps]
        slowness[row] += own + noise.block_sd(drafts=drafts) * of_block[row]
        chosen.append(place)
        if plan.prunes_after is not None and slot.role == "candidate" and row:
            first = slice(plan.prunes_after)
            mine = (seconds[place, first] * np.exp(slowness[row, first])).sum()
            best = min(
                (seconds[other, first] * np.exp(slowness[before, first])).sum()
                for before, other in enumerate(chosen[:-1])
            )
            if best < PRUNED_BELOW * mine:
                num_blocks[row] = plan.prunes_after
    rows = np.flatnonzero(kept)
    return Sweep(
        truth=truth,
        plan=plan,
        table=table.only(rows),
        configurations=tuple(grid[chosen[row]] for row in rows),
        num_blocks=num_blocks[rows],
        failed=np.array([plan.later_controls_fail and table.slots[row].role == "control" and row > 0 for row in rows]),
        cycles=cycles[[chosen[row] for row in rows]],
        slowness=slowness[rows],
        shared=shared[rows],
        outlier=outlier,
    )


@cache
def _cycles_ms(truth: Truth) -> Array:
    return np.array([truth.phases_ms(member)["cycle"] for member in truth.configurations()])


def _leader(
    grid: Sequence[Configuration],
    chosen: Sequence[int],
    seconds: Array,
    slowness: Array,
    num_blocks: npt.NDArray[np.int64],
    *,
    speculates: bool,
) -> int:
    """Place in the grid of the fastest so far, by tokens over seconds of its whole trials; the control without any."""
    spent: dict[int, list[float]] = {}
    for row, place in enumerate(chosen):
        if num_blocks[row] == slowness.shape[1] and (grid[place].speculates or not speculates):
            spent.setdefault(place, []).append(float((seconds[place] * np.exp(slowness[row])).sum()))
    return min(spent, key=lambda place: float(np.mean(spent[place])), default=0)
