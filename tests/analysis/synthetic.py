"""Results folders with a known truth, written through the contract (`sweeps.results.tables`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from sweeps.results.tables import ACTIVITIES, SCHEMA_VERSION, ResultsFolder, write_part

BLOCK_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One configuration and its true numbers."""

    num_steps: int = 0
    nccl: str = "default"
    accept_length: float = 1.0
    draft_ms: float = 0.0
    verify_ms: float = 12.165  # the decode step where there is no speculation
    extend_ms: float = 0.0
    eagle_topk: int = 1

    @property
    def cycle_ms(self) -> float:
        return self.draft_ms + self.verify_ms + self.extend_ms

    @property
    def tok_s(self) -> float:
        return 1000 * self.accept_length / self.cycle_ms

    @property
    def label(self) -> str:
        head = f"steps {self.num_steps}, top-k {self.eagle_topk}" if self.num_steps else "no speculation"
        return f"{head}, nccl {self.nccl}"

    @property
    def configuration_id(self) -> str:
        return f"c-{self.num_steps}-{self.eagle_topk}-{self.nccl}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One trial to write."""

    arm: Arm
    role: str = "candidate"
    status: str = "completed"
    num_blocks: int | None = None
    relaunched: bool = True
    node: str = "node-a"
    slow: float = 0.0
    """By how much this launch is slower than the machine, beside the world's noise."""
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class World:
    """How noisy the truth is seen. Standard deviations are relative."""

    launch_sd: float = 0.003
    cycle_sd: float = 0.002
    """Of a block's mean cycle time, anew in every trial."""
    prompt_sd: float = 0.10
    """Of a block's accept length: the prompt's own, the same in every trial."""
    drift_per_trial: float = 0.0
    num_blocks: int = 12
    trial_s: float = 400.0
    seed: int = 0


FOUNDING_CONTROL = Arm()
FOUNDING_EAGLE = Arm(num_steps=2, accept_length=1.80, draft_ms=0.62, verify_ms=29.01, extend_ms=0.32)
QUIET = World(launch_sd=0.0008, cycle_sd=0.001, prompt_sd=0.03)
STEPS = (
    replace(FOUNDING_EAGLE, num_steps=1, accept_length=1.55, draft_ms=0.31, verify_ms=28.2),
    FOUNDING_EAGLE,
    replace(FOUNDING_EAGLE, num_steps=3, accept_length=1.95, draft_ms=0.93, verify_ms=29.6),
)
SIX = tuple(replace(arm, nccl="founding-six") for arm in (FOUNDING_CONTROL, *STEPS))


def write_sweep(
    root: Path, runs: Sequence[Run], world: World | None = None, *, engine: str = "simulated", **manifest: Any
) -> Path:
    """Write the folder; returns it."""
    world = world or World()
    rng = np.random.default_rng(world.seed)
    folder = ResultsFolder(root)
    root.mkdir(parents=True, exist_ok=True)
    facts = {"sweep_id": "s1", "schema_version": SCHEMA_VERSION, "engine": engine, "target_tok_s": 150.0}
    folder.manifest.write_text(json.dumps({**facts, **manifest}), encoding="utf-8")
    prompts = np.exp(rng.normal(0, world.prompt_sd, world.num_blocks))
    launch = 1.0
    for number, run in enumerate(runs):
        if run.relaunched:
            launch = float(np.exp(rng.normal(0, world.launch_sd)))
        slow = launch * float(np.exp(world.drift_per_trial * number)) * (1 + run.slow)
        _write_trial(folder, run, number, world, slow=slow, prompts=prompts, rng=rng, engine=engine)
    return root


def interleaved(candidates: Sequence[Arm], *, control: Arm = FOUNDING_CONTROL, every: int = 2) -> list[Run]:
    """Control first, after every few candidates, and last."""
    runs = [Run(arm=control, role="control")]
    for index, arm in enumerate(candidates, start=1):
        runs.append(Run(arm=arm))
        if index % every == 0 or index == len(candidates):
            runs.append(Run(arm=control, role="control"))
    return runs


def with_effect(arm: Arm, relative: float, *, nccl: str = "tuned") -> Arm:
    """The same arm under another NCCL set, its throughput changed by `relative`."""
    return replace(arm, nccl=nccl, verify_ms=(arm.cycle_ms / (1 + relative)) - arm.draft_ms - arm.extend_ms)


def _write_trial(
    folder: ResultsFolder, run: Run, number: int, world: World, *, slow: float, prompts: Any, rng: Any, engine: str
) -> None:
    arm, started_s = run.arm, number * world.trial_s
    trial_id = f"t{number:04d}"
    keys = {"sweep_id": "s1", "trial_id": trial_id, "attempt": 1}
    count = world.num_blocks if run.num_blocks is None else run.num_blocks
    seconds = dict.fromkeys((f"{activity}_s" for activity in ACTIVITIES), 0.0)
    seconds |= {"launch_s": 20.0, "weight_load_s": 250.0 if run.relaunched else 0.0, "measure_s": 4.0 * count}
    trial = {
        **keys,
        **seconds,
        "role": run.role,
        "engine": engine,
        "engine_version": "1",
        "machine": "a machine",
        "node": run.node,
        "num_gpus": 8,
        "acceptance": "measured",
        "status": run.status,
        "configuration_id": None if run.status == "invalid" else arm.configuration_id,
        "launch_key": f"l-{arm.nccl}-{arm.num_steps > 0}",
        "label": arm.label,
        "relaunched": run.relaunched,
        "requested": {"num_steps": str(arm.num_steps), "nccl": arm.nccl},
        "num_steps": arm.num_steps,
        "eagle_topk": arm.eagle_topk if arm.num_steps else None,
        "num_draft_tokens": arm.num_steps + 1 if arm.num_steps else None,
        "drafter": "eagle3" if arm.num_steps else None,
        "nccl_set": arm.nccl,
        "nccl_env": {} if arm.nccl == "default" else {"NCCL_PROTO": "LL"},
        "command": ["python", "-m", "sglang.launch_server", "--speculative-num-steps", str(arm.num_steps)],
        "environment": {} if arm.nccl == "default" else {"NCCL_PROTO": "LL"},
        "started_at": datetime(2026, 1, 1, tzinfo=UTC),
        "started_s": started_s,
        "ended_s": started_s + world.trial_s,
        "num_blocks": count,
        **run.columns,
    }
    write_part(folder, "trials", [trial], trial_id=trial_id, attempt=1)
    if run.status in ("completed", "pruned"):
        blocks = [
            {**keys, **_block(run.arm, index, started_s + 300 + 4 * index, slow, float(prompts[index]), world, rng)}
            for index in range(count)
        ]
        write_part(folder, "blocks", blocks, trial_id=trial_id, attempt=1)


def _block(arm: Arm, index: int, at_s: float, slow: float, prompt: float, world: World, rng: Any) -> dict[str, Any]:
    slow = slow * float(np.exp(rng.normal(0, world.cycle_sd)))
    wanted = max(1.0, arm.accept_length * prompt) if arm.num_steps else 1.0
    cycles = round(BLOCK_TOKENS / wanted)
    seconds = cycles * arm.cycle_ms * slow / 1000
    histogram = None
    if arm.num_steps:
        extra = BLOCK_TOKENS - cycles
        histogram = [0, 0] + [0] * arm.num_steps
        full, rest = divmod(extra, arm.num_steps)
        histogram[arm.num_steps + 1] += full
        if rest:
            histogram[rest + 1] += 1
        histogram[1] += cycles - full - (1 if rest else 0)
    return {
        "block_index": index,
        "started_s": at_s,
        "wall_s": seconds,
        "decode_s": seconds,
        "decode_tokens": BLOCK_TOKENS,
        "tok_s": BLOCK_TOKENS / seconds,
        "num_requests": 1,
        "num_cycles": cycles,
        "accept_length": BLOCK_TOKENS / cycles if arm.num_steps else None,
        "draft_ms": arm.draft_ms * slow if arm.num_steps else None,
        "verify_ms": arm.verify_ms * slow if arm.num_steps else None,
        "verify_forward_ms": arm.verify_ms * slow,
        "extend_ms": arm.extend_ms * slow if arm.num_steps else None,
        "gap_ms": 0.0,
        "cycle_ms": arm.cycle_ms * slow,
        "accept_histogram": histogram,
        "timer_kind": "simulated",
        "output_hash": f"h{index}",
    }
