"""Prompts and blocks: seeded, pure, the same for every trial of a sweep."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sweeps.spec.document import SpecError
from sweeps.spec.model import WorkloadSpec


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
    """Warm-up blocks, then measured blocks; of each number one at every concurrency, in the order of the spec.

    Args:
        folder: where a relative prompt file is looked up.

    Raises SpecError.
    """
    prompts = _synthetic(spec) if spec.prompts == "synthetic" else _from_file(spec, folder / spec.prompts)
    sizes = {concurrency: max(spec.requests_per_block, concurrency) for concurrency in spec.concurrency}
    return tuple(
        Block(
            index=number - spec.warmup_blocks if number >= spec.warmup_blocks else number,
            warmup=number < spec.warmup_blocks,
            prompts=tuple(prompts[(number * size + offset) % len(prompts)] for offset in range(size)),
            output_tokens=spec.output_tokens,
            concurrency=concurrency,
            temperature=spec.temperature,
            ignore_eos=spec.ignore_eos,
        )
        for number in range(spec.warmup_blocks + spec.blocks)
        for concurrency, size in sizes.items()
    )


def _synthetic(spec: WorkloadSpec) -> list[Prompt]:
    rng = np.random.default_rng(spec.seed)
    total = (spec.warmup_blocks + spec.blocks) * max(spec.requests_per_block, *spec.concurrency)
    ids = rng.integers(10, spec.vocabulary, size=(total, spec.prompt_tokens))
    return [Prompt(prompt_id=f"s{spec.seed}-{row}", token_ids=tuple(map(int, ids[row]))) for row in range(total)]


def _from_file(spec: WorkloadSpec, path: Path) -> list[Prompt]:
    if not path.is_file():
        raise SpecError(f"workload.prompts: wanted `synthetic` or a JSON Lines file, but {path} does not exist")
    lines = enumerate(path.read_text(encoding="utf-8").split("\n"), start=1)
    prompts = [_prompt(line, source=f"{path}:{number}") for number, line in lines if line.strip()]
    if not prompts:
        raise SpecError(f"workload.prompts: {path} holds no prompt")
    names = Counter(prompt.prompt_id for prompt in prompts)
    if twice := [name for name, times in names.items() if times > 1]:
        raise SpecError(f"workload.prompts: {path}: the id {twice[0]!r} is there {names[twice[0]]} times, wanted once")
    return prompts


def _prompt(line: str, *, source: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise SpecError(f"workload.prompts: {source}: not JSON: {error.msg}") from error
    if not isinstance(row, dict) or ("prompt" in row) == ("token_ids" in row):
        raise SpecError(f"workload.prompts: {source}: wanted one of the keys prompt and token_ids, got {line[:60]}")
    prompt_id = str(row.get("id", f"line-{source.rpartition(':')[2]}"))
    if "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"]:
            raise SpecError(f"workload.prompts: {source}: prompt: wanted text, got {row['prompt']!r}")
        return Prompt(prompt_id=prompt_id, text=row["prompt"])
    ids = row["token_ids"]
    if not (isinstance(ids, list) and ids and all(type(one) is int and one >= 0 for one in ids)):
        raise SpecError(f"workload.prompts: {source}: token_ids: wanted a list of token numbers, got {ids!r:.60}")
    return Prompt(prompt_id=prompt_id, token_ids=tuple(ids))
