"""Prompts and blocks: seeded, pure, the same for every trial of a sweep."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sweeps.spec import SpecError, WorkloadSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt, as text or as token ids (exactly one of them)."""

    prompt_id: str
    text: str | None = None
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The unit of reporting, pruning and statistics: some prompts at one concurrency."""

    index: int
    """From 0 for measured blocks; warm-up blocks count on their own."""
    warmup: bool
    prompts: tuple[Prompt, ...]
    output_tokens: int
    concurrency: int
    temperature: float
    ignore_eos: bool


def plan_blocks(spec: WorkloadSpec, *, folder: Path) -> tuple[Block, ...]:
    """Warm-up blocks, then measured blocks. `folder` is where a relative prompt file is looked up. Raises SpecError."""
    prompts = _synthetic(spec) if spec.prompts == "synthetic" else _from_file(spec, folder / spec.prompts)
    size = spec.requests_per_block
    return tuple(
        Block(
            index=number - spec.warmup_blocks if number >= spec.warmup_blocks else number,
            warmup=number < spec.warmup_blocks,
            prompts=tuple(prompts[(number * size + offset) % len(prompts)] for offset in range(size)),
            output_tokens=spec.output_tokens,
            concurrency=spec.concurrency,
            temperature=spec.temperature,
            ignore_eos=spec.ignore_eos,
        )
        for number in range(spec.warmup_blocks + spec.blocks)
    )


def _synthetic(spec: WorkloadSpec) -> list[Prompt]:
    rng = np.random.default_rng(spec.seed)
    total = (spec.warmup_blocks + spec.blocks) * spec.requests_per_block
    ids = rng.integers(10, spec.vocabulary, size=(total, spec.prompt_tokens))
    return [Prompt(prompt_id=f"s{spec.seed}-{row}", token_ids=tuple(map(int, ids[row]))) for row in range(total)]


def _from_file(spec: WorkloadSpec, path: Path) -> list[Prompt]:
    if not path.is_file():
        raise SpecError(f"workload.prompts: wanted `synthetic` or a JSON Lines file, but {path} does not exist")
    prompts = []
    for number, line in enumerate(filter(None, path.read_text(encoding="utf-8").splitlines())):
        row = json.loads(line)
        prompt_id = str(row.get("id", f"{path.stem}-{number}"))
        ids = row.get("token_ids")
        prompts.append(Prompt(prompt_id=prompt_id, text=row.get("prompt"), token_ids=tuple(ids) if ids else None))
    if not prompts:
        raise SpecError(f"workload.prompts: {path} holds no prompt")
    return prompts
