"""What the rules of `plausible` look at: one block as plain numbers, whether just measured or read from the tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamFacts:
    """What the client saw of one answer beside its times; not in the tables."""

    request_id: str | None
    """The server's own name of the request; None if it gives none."""
    sent_tokens: int | None
    """Length of the prompt; None for a text, whose tokens only the server counts."""
    first_tokens: int
    """Tokens that came with the first chunk."""
    ids: int | None
    """Token ids that the stream carried; None if it carried none."""
    lowest_id: int | None
    count_falls: int
    """Chunks whose token count is below an earlier chunk's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerFacts:
    """One answer."""

    prompt_id: str
    prompt_tokens: int
    output_tokens: int
    latency_ms: float
    output_hash: str
    ttft_ms: float | None = None
    cached_tokens: int | None = None
    """Prompt tokens that came from the server's prefix cache; None if it does not tell."""
    shared_share: float = 0.89
    """Share of the prompt that it has in common with another prompt of the workload, at most; unknown in the tables,
    where only a prompt that was cached as a whole is too much."""
    distinct_bigrams: int | None = None
    """Different pairs of neighbouring tokens; None if the server sends no token ids."""
    stream: StreamFacts | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CycleFacts:
    """What the probes' cycles say beyond their means; not in the tables."""

    per_rank: Mapping[int, int]
    """Cycles by rank."""
    cycle_ms_per_rank: Mapping[int, float]
    """Mean cycle by rank."""
    largest_batch: int
    fewest_tokens: float
    """Per request of a cycle."""
    most_tokens: float
    backward: int
    """Cycles of rank 0 that start before the one before them."""
    span_ms: float
    """From the first start to the last, rank 0."""
    within_span_ms: float
    """Sum of the cycles that start in that span and are not its last, rank 0."""
    median_ms: float
    """Of the cycles, rank 0."""
    median_step_ms: float
    """Of the times from one start to the next, rank 0."""
    first_start_s: float | None = None
    """On the clock of the block; None if the two clocks are not the same."""
    last_start_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFacts:
    """One block. None: not known, so no rule can be broken by it."""

    num_steps: int | None
    num_draft_tokens: int | None
    concurrency: int
    started_s: float
    wall_s: float
    decode_s: float
    decode_tokens: int
    tok_s: float | None
    num_cycles: int | None
    accept_length: float | None
    accept_histogram: tuple[int, ...] | None
    draft_ms: float | None
    verify_ms: float | None
    verify_forward_ms: float | None
    extend_ms: float | None
    gap_ms: float | None
    cycle_ms: float | None
    probe_tokens: int | None = None
    """Tokens of all cycles, rank 0."""
    asked_tokens: int | None = None
    """Per request."""
    exact: bool | None = None
    """The server was asked to go on to the last token asked for (`ignore_eos`)."""
    answers: tuple[AnswerFacts, ...] = ()
    earlier: Mapping[str, str] = field(default_factory=dict)
    """Prompt id -> output hash, of the trial's earlier blocks at this concurrency."""
    cycles: CycleFacts | None = None
    foreign_pids: str | None = None
    """Processes that are not the server's and held memory of its GPUs during the block."""

    @property
    def speculates(self) -> bool:
        return bool(self.num_steps)

    @property
    def output_tokens(self) -> int | None:
        """Tokens of all answers; None if the answers are not known."""
        return sum(answer.output_tokens for answer in self.answers) if self.answers else None

    @property
    def at_once(self) -> int:
        """Requests that can have been in flight together."""
        return min(self.concurrency, len(self.answers) or self.concurrency)

    @property
    def waves(self) -> int:
        """How often all places were filled: edges of an interval count once in each."""
        return max(1, -(-len(self.answers) // self.concurrency))


_BLOCK_COLUMNS = (
    "started_s",
    "wall_s",
    "decode_s",
    "decode_tokens",
    "tok_s",
    "num_cycles",
    "accept_length",
    "draft_ms",
    "verify_ms",
    "verify_forward_ms",
    "extend_ms",
    "gap_ms",
    "cycle_ms",
)
_ANSWER_COLUMNS = (
    "prompt_id",
    "prompt_tokens",
    "output_tokens",
    "latency_ms",
    "output_hash",
    "ttft_ms",
    "cached_tokens",
    "distinct_bigrams",
)


def facts_of_rows(
    block: Mapping[str, Any],
    *,
    num_steps: int | None,
    num_draft_tokens: int | None,
    requests: Iterable[Mapping[str, Any]] = (),
    earlier: Mapping[str, str] | None = None,
) -> BlockFacts:
    """The facts that a row of `blocks` or `anchors` holds, with the rows of `requests` that belong to it."""
    histogram = block["accept_histogram"]
    return BlockFacts(
        num_steps=num_steps,
        num_draft_tokens=num_draft_tokens,
        concurrency=block.get("concurrency") or 1,
        accept_histogram=None if histogram is None else tuple(histogram),
        probe_tokens=block.get("probe_tokens"),
        asked_tokens=block.get("asked_tokens"),
        exact=True,
        answers=tuple(_answer(row) for row in requests),
        earlier=earlier or {},
        foreign_pids=block.get("foreign_pids"),
        **{name: block[name] for name in _BLOCK_COLUMNS},
    )


def _answer(row: Mapping[str, Any]) -> AnswerFacts:
    columns: dict[str, Any] = {name: row.get(name) for name in _ANSWER_COLUMNS}
    return AnswerFacts(**columns)
