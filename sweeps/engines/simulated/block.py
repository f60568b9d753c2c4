"""Cycles of one block drawn around an expected cycle, on a virtual clock. Pure: randomness comes in as a generator."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sweeps.engines.base import BlockRecord, Request
from sweeps.engines.simulated.expected_cycle import ExpectedCycle
from sweeps.engines.simulated.machine_profile import Forward
from sweeps.engines.summary import BlockSummary
from sweeps.results.tables import CYCLE_COLUMNS
from sweeps.spec.workload import Block, Prompt

_GOLDEN = 0.6180339887498949
"""Steps of this size fill [0, 1) evenly: acceptance without sampling noise."""
_CYCLE_PARTS = ("draft_ms", "verify_ms", "extend_ms", "gap_ms")
_PHASES = ("draft_ms", "verify_ms", "verify_forward_ms", "extend_ms", "gap_ms")

Floats = NDArray[np.float64]
_Columns = dict[str, NDArray[Any] | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """What a block runs under."""

    started_s: float
    slowdown: float
    """Of every phase: launch, block, warm-up and drift together."""
    difficulty: float
    """Of the block's prompts, in logits of the conditional acceptance; the same for every configuration."""
    verify_jitter: float
    """Coefficient of variation, cycle to cycle."""
    other_jitter: float
    sampled: bool = True
    """False: acceptance evenly spread over [0, 1) instead of drawn."""


def simulate_block(
    block: Block,
    expectation: Callable[[int], ExpectedCycle],
    forward: Forward,
    conditions: Conditions,
    rng: np.random.Generator,
    *,
    num_steps: int,
) -> BlockRecord:
    """One block, wave by wave: `concurrency` requests are prefilled together and decoded until each has its tokens.

    Args:
        expectation: of a batch size; a wave that thins out runs its last cycles at smaller ones.
    """
    now_s = conditions.started_s
    decode_s = 0.0
    waves: list[_Columns] = []
    requests: list[Request] = []
    for first in range(0, len(block.prompts), block.concurrency):
        prompts = block.prompts[first : first + block.concurrency]
        ttft_ms = (
            forward.prefill_base_ms + forward.prefill_token_ms * sum(map(_length, prompts))
        ) * conditions.slowdown
        now_s += ttft_ms / 1000.0
        wave = _Wave.draw(len(prompts), max(1, block.output_tokens - 1), expectation, conditions, rng)
        waves.append(wave.columns(now_s * 1000.0, sum(map(_size, waves)), num_steps))
        requests += [
            Request(
                prompt_id=prompt.prompt_id,
                prompt_tokens=_length(prompt),
                output_tokens=block.output_tokens,
                ttft_ms=ttft_ms,
                latency_ms=ttft_ms + float(ended_ms),
                output_hash=hashlib.sha256(f"{prompt.prompt_id}/{block.output_tokens}".encode()).hexdigest()[:16],
            )
            for prompt, ended_ms in zip(prompts, wave.ended_ms, strict=True)
        ]
        decode_s += float(wave.ended_ms.max()) / 1000.0
        now_s += float(wave.ended_ms.max()) / 1000.0
    return BlockRecord(
        started_s=conditions.started_s,
        wall_s=now_s - conditions.started_s,
        decode_s=decode_s,
        decode_tokens=max(1, block.output_tokens - 1) * len(block.prompts),
        requests=tuple(requests),
        cycles=_table(waves),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wave:
    """Requests that run together; arrays over cycles, `ended_ms` over requests (from their first token)."""

    phases: dict[str, Floats | None]
    cycle_ms: Floats
    batch_size: NDArray[np.int64]
    tokens: NDArray[np.int64]
    ended_ms: Floats

    @classmethod
    def draw(
        cls,
        requests: int,
        wanted: int,
        expectation: Callable[[int], ExpectedCycle],
        conditions: Conditions,
        rng: np.random.Generator,
    ) -> _Wave:
        full = expectation(requests)
        survival = shifted(full.survival, conditions.difficulty)
        tokens = _tokens(survival, (wanted, requests), conditions, rng)
        total = tokens.cumsum(axis=0)
        last = (total < wanted).sum(axis=0)
        cycles = int(last.max()) + 1
        tokens, total = tokens[:cycles], total[:cycles]
        active = np.arange(cycles)[:, None] <= last[None, :]
        batch_size = active.sum(axis=1)
        phases = _phase_times(batch_size, expectation, conditions, rng)
        timed = ("verify_forward_ms", "gap_ms") if full.verify_ms is None else _CYCLE_PARTS
        cycle_ms = np.sum([times for name in timed if (times := phases[name]) is not None], axis=0)
        # Tokens of a cycle count as spread over it, so that a request ends inside its last one.
        ends = cycle_ms.cumsum()
        columns = np.arange(requests)
        excess = (total[last, columns] - wanted) / tokens[last, columns]
        return cls(
            phases=phases,
            cycle_ms=cycle_ms,
            batch_size=batch_size,
            tokens=(tokens * active).sum(axis=1),
            ended_ms=ends[last] - excess * cycle_ms[last],
        )

    def columns(self, started_ms: float, first_index: int, num_steps: int) -> _Columns:
        size = self.cycle_ms.size
        return {
            "rank": np.zeros(size, dtype=np.int32),
            "cycle_index": np.arange(first_index, first_index + size),
            "started_ms": started_ms + self.cycle_ms.cumsum() - self.cycle_ms,
            **self.phases,
            "cycle_ms": self.cycle_ms,
            "batch_size": self.batch_size.astype(np.int32),
            "num_steps": np.full(size, num_steps, dtype=np.int32),
            "tokens": self.tokens.astype(np.int32),
        }


def summarise_block(
    index: int,
    output_tokens: int,
    mean: ExpectedCycle,
    forward: Forward,
    conditions: Conditions,
    rng: np.random.Generator,
    *,
    prompt_tokens: int,
) -> BlockSummary:
    """The summary of a block of one request, drawn directly: same means and, to first order, same spread.

    The number of cycles is the expected one (so that its tokens vary, not it), and cycle jitter enters as the jitter
    of a mean. For benchmarks that run thousands of virtual sweeps.
    """
    wanted = max(1, output_tokens - 1)
    survival = shifted(mean.survival, conditions.difficulty)
    cycles = max(1, round(wanted / (1.0 + sum(survival))))
    histogram = None
    accept_length = None
    if mean.verify_ms is not None:
        reached = (1.0, *survival, 0.0)
        share = [reached[i] - reached[i + 1] for i in range(len(reached) - 1)]
        counts = rng.multinomial(cycles, share).tolist() if conditions.sampled else [cycles * each for each in share]
        accept_length = 1.0 + sum(i * count for i, count in enumerate(counts)) / cycles
        histogram = (0, *(round(count) for count in counts))
    jitters = rng.standard_normal(4).tolist()
    root = math.sqrt(cycles)
    verify = conditions.slowdown * (1.0 + conditions.verify_jitter * jitters[0] / root)
    other = [conditions.slowdown * (1.0 + conditions.other_jitter * each / root) for each in jitters[1:]]
    draft_ms = None if mean.draft_ms is None else mean.draft_ms * other[0]
    verify_ms = None if mean.verify_ms is None else mean.verify_ms * verify
    extend_ms = None if mean.extend_ms is None else mean.extend_ms * other[1]
    gap_ms = mean.gap_ms * other[2]
    forward_ms = mean.verify_forward_ms * verify
    cycle_ms = gap_ms + (forward_ms if verify_ms is None else verify_ms + (draft_ms or 0.0) + (extend_ms or 0.0))
    decode_s = wanted * cycle_ms / (1000.0 * (accept_length or 1.0))
    ttft_ms = (forward.prefill_base_ms + forward.prefill_token_ms * prompt_tokens) * conditions.slowdown
    return BlockSummary(
        block_index=index,
        started_s=conditions.started_s,
        wall_s=ttft_ms / 1000.0 + decode_s,
        decode_tokens=wanted,
        decode_s=decode_s,
        num_cycles=cycles,
        accept_length=accept_length,
        accept_histogram=histogram,
        draft_ms=draft_ms,
        verify_ms=verify_ms,
        verify_forward_ms=forward_ms,
        extend_ms=extend_ms,
        gap_ms=gap_ms,
        cycle_ms=cycle_ms,
    )


def shifted(survival: Sequence[float], difficulty: float) -> tuple[float, ...]:
    """`survival` with the logit of every conditional acceptance lowered by `difficulty`."""
    if difficulty == 0.0:
        return tuple(survival)
    reached, before, out = 1.0, 1.0, []
    odds_factor = math.exp(-difficulty)
    for probability in survival:
        conditional = probability / before if before else 0.0
        before = probability
        reached *= conditional * odds_factor / (1.0 - conditional + conditional * odds_factor)
        out.append(reached)
    return tuple(out)


def _tokens(
    survival: tuple[float, ...], shape: tuple[int, int], conditions: Conditions, rng: np.random.Generator
) -> NDArray[np.int64]:
    if not survival:
        return np.ones(shape, dtype=np.int64)
    size = shape[0] * shape[1]
    uniform = rng.random(size) if conditions.sampled else (0.5 + _GOLDEN * np.arange(1, size + 1)) % 1.0
    accepted = len(survival) - np.searchsorted(np.array(survival[::-1]), uniform, side="right")
    return (1 + accepted).reshape(shape)


def _phase_times(
    batch_size: NDArray[np.int64],
    expectation: Callable[[int], ExpectedCycle],
    conditions: Conditions,
    rng: np.random.Generator,
) -> dict[str, Floats | None]:
    sizes, which = np.unique(batch_size, return_inverse=True)
    means = [expectation(int(size)) for size in sizes]
    jitters = {name: rng.standard_normal(batch_size.size) for name in ("draft_ms", "verify_ms", "extend_ms", "gap_ms")}
    jitters["verify_forward_ms"] = jitters["verify_ms"]
    phases: dict[str, Floats | None] = {}
    for name in _PHASES:
        values = [getattr(mean, name) for mean in means]
        if values[0] is None:
            phases[name] = None
            continue
        jitter = conditions.verify_jitter if name.startswith("verify") else conditions.other_jitter
        phases[name] = np.array(values)[which] * conditions.slowdown * np.exp(jitter * jitters[name])
    return phases


def _length(prompt: Prompt) -> int:
    """Tokens of a prompt; of text, about a quarter of its characters."""
    return len(prompt.token_ids) if prompt.token_ids is not None else max(1, len(prompt.text or "") // 4)


def _size(wave: _Columns) -> int:
    starts = wave["started_ms"]
    assert starts is not None
    return int(starts.size)


def _table(waves: Sequence[_Columns]) -> pa.Table:
    size = sum(map(_size, waves))
    columns = []
    for field in CYCLE_COLUMNS:
        if field.name == "timer_kind":
            columns.append(
                pa.DictionaryArray.from_arrays(np.zeros(size, dtype=np.int32), ["simulated"]).cast(field.type)
            )
        elif waves[0][field.name] is None:
            columns.append(pa.nulls(size, field.type))
        else:
            columns.append(pa.array(np.concatenate([wave[field.name] for wave in waves]), type=field.type))
    return pa.Table.from_arrays(columns, schema=CYCLE_COLUMNS)
