"""Small worlds that tests of the search share: a spec, what its servers would measure, and a sweep over some of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sweeps.engines.base import KernelTime
from sweeps.engines.summary import BlockSummary
from sweeps.measure.records import Outcome, PlannedTrial
from sweeps.search.observations import Observations
from sweeps.spec.space import Configuration, Space

SPEC = """
sweep: model
engine: {kind: simulated, machine: rtx-pro-6000-pcie-x8, states: {nccl: false, all_reduce: false, trees: false}}
drafters: {mine: founding}
nccl_sets: {a: {NCCL_ALGO: Ring}, b: {NCCL_ALGO: "allreduce:tree"}, c: {NCCL_PROTO: LL}, d: {NCCL_PROTO: Simple}}
search:
  num_steps: [0, 1, 2, 3, 5, 7]
  nccl: [default, a, b, c, d]
workload: {warmup_blocks: 0, blocks: 8}
"""
NCCL_MS = {"default": 0.0, "a": -3.0, "b": 2.0, "c": 0.0, "d": 1.0}
ACCEPTED = (0.8, 0.75, 0.7, 0.7, 0.65, 0.6, 0.6)


def survival(steps: int, scale: float = 1.0) -> list[float]:
    return [float(each) for each in np.cumprod(np.array(ACCEPTED[:steps]) * scale)]


def cycle_of(c: Configuration, nccl_ms: dict[str, float] | None = None) -> tuple[float, float, float]:
    """Draft, forward, rest in milliseconds."""
    forward_ms = 20.0 + (nccl_ms or NCCL_MS)[c.nccl_set] + 0.6 * (c.num_draft_tokens or 1) + 3.0 * c.speculates
    return 0.4 + 0.3 * c.num_steps, forward_ms, 0.5


Length = Callable[[Configuration], float]


def blocks_of(
    c: Configuration,
    rng: np.random.Generator,
    *,
    count: int = 8,
    scale: Length = lambda c: 1.0,
    nccl_ms: dict[str, float] | None = None,
) -> list[BlockSummary]:
    draft_ms, forward_ms, rest_ms = cycle_of(c, nccl_ms)
    blocks = []
    for index in range(count):
        noise = 1.0 + 0.001 * rng.standard_normal()
        reached = [1.0, *survival(c.num_steps, scale(c)), 0.0]
        shares = -np.diff(reached)
        counts = rng.multinomial(400, shares / shares.sum())
        length = float(1 + (counts * np.arange(counts.size)).sum() / 400) if c.speculates else None
        cycle_ms = noise * (forward_ms + rest_ms + draft_ms * c.speculates)
        blocks.append(
            BlockSummary(
                block_index=index,
                started_s=10.0 * index,
                wall_s=5.0,
                decode_tokens=400,
                decode_s=0.4 * cycle_ms / (length or 1.0),
                num_cycles=400,
                accept_length=length,
                accept_histogram=(0, *map(int, counts)) if c.speculates else None,
                draft_ms=draft_ms * noise if c.speculates else None,
                verify_ms=forward_ms * noise if c.speculates else None,
                verify_forward_ms=forward_ms * noise,
                extend_ms=0.3 * noise if c.speculates else None,
                gap_ms=(0.2 if c.speculates else 0.5) * noise,
                cycle_ms=cycle_ms,
            )
        )
    return blocks


def observed(
    space: Space,
    wanted: Sequence[tuple[int, str]],
    *,
    kernels: tuple[KernelTime, ...] = (),
    scale: Length = lambda c: 1.0,
    nccl_ms: dict[str, float] | None = None,
    all_reduce: str | None = None,
) -> Observations:
    rng, seen = np.random.default_rng(5), Observations()
    for number, (steps, nccl) in enumerate(wanted):
        configuration = next(c for c in space.configurations() if (c.num_steps, c.nccl_set) == (steps, nccl))
        trial = PlannedTrial(
            trial_id=f"t{number:04d}",
            role="candidate",
            number=number,
            configuration=configuration,
            requested=space.suggestion(configuration),
            launch_key=space.launch_key(configuration),
        )
        seen.start(trial)
        for block in blocks_of(configuration, rng, scale=scale, nccl_ms=nccl_ms):
            seen.add_block(trial.trial_id, block, seconds={"launch": 400.0, "measure": 40.0})
        seconds = {"launch": 400.0, "measure": 40.0}
        seen.finish(
            trial.trial_id,
            Outcome(status="completed", relaunched=True, seconds=seconds, kernels=kernels, all_reduce=all_reduce),
        )
    return seen


def row(space: Space, steps: int, nccl: str) -> int:
    return next(i for i, c in enumerate(space.configurations()) if (c.num_steps, c.nccl_set) == (steps, nccl))


def truth(c: Configuration) -> float:
    draft_ms, forward_ms, rest_ms = cycle_of(c)
    return 1000.0 * (1.0 + sum(survival(c.num_steps))) / (forward_ms + rest_ms + draft_ms * c.speculates)
