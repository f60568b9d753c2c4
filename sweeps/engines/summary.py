"""What one block says about its configuration: the numbers that are reported, pruned on and modelled."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from sweeps.engines.base import BlockRecord

_LONGEST = 1000
"""Tokens of a cycle beyond which a histogram would be only long."""
_PHASES = ("draft_ms", "verify_ms", "verify_forward_ms", "extend_ms", "gap_ms", "cycle_ms")


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSummary:
    """Means over the block's cycles (rank 0), in milliseconds; None if the phase does not exist."""

    block_index: int
    started_s: float
    wall_s: float
    decode_tokens: int
    decode_s: float
    num_cycles: int
    accept_length: float | None
    """Tokens per request and verify cycle, bonus token included; None without speculation."""
    accept_histogram: tuple[int, ...] | None
    """[i]: cycles that produced i tokens; batch size 1 only."""
    draft_ms: float | None
    verify_ms: float | None
    verify_forward_ms: float | None
    extend_ms: float | None
    gap_ms: float | None
    cycle_ms: float | None

    @property
    def tok_s(self) -> float | None:
        """None without decode time; `plausible` keeps such a block from whoever compares."""
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else None


def summarise(record: BlockRecord, *, block_index: int) -> BlockSummary:
    """Reduce a block's record, believable or not (`sweeps.results.plausible` judges that)."""
    cycles = record.cycles.filter(pc.equal(record.cycles["rank"], 0))
    means = {name: pc.mean(cycles[name]).as_py() for name in _PHASES}
    verified = cycles.filter(pc.and_(pc.is_valid(cycles["verify_ms"]), pc.is_valid(cycles["tokens"])))
    accept_length = _accept_length(verified)
    return BlockSummary(
        block_index=block_index,
        started_s=record.started_s,
        wall_s=record.wall_s,
        decode_tokens=record.decode_tokens,
        decode_s=record.decode_s,
        num_cycles=cycles.num_rows,
        accept_length=accept_length,
        accept_histogram=_accept_histogram(verified),
        **means,
    )


def _accept_length(verified: pa.Table) -> float | None:
    requests = pc.sum(verified["batch_size"]).as_py()
    return float(pc.sum(verified["tokens"]).as_py() / requests) if requests else None


def _accept_histogram(verified: pa.Table) -> tuple[int, ...] | None:
    if not verified.num_rows or pc.max(verified["batch_size"]).as_py() != 1:
        return None
    if pc.min(verified["tokens"]).as_py() < 0 or pc.max(verified["tokens"]).as_py() > _LONGEST:
        return None
    counts = {row["values"]: row["counts"] for row in pc.value_counts(verified["tokens"]).to_pylist()}
    return tuple(counts.get(tokens, 0) for tokens in range(max(counts) + 1))
