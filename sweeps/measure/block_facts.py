"""What a block that has just been measured tells the rules of `sweeps.results.plausible`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise, takewhile
from operator import eq
from statistics import median

import pyarrow as pa
import pyarrow.compute as pc

from sweeps.engines.base import BlockRecord
from sweeps.engines.summary import BlockSummary
from sweeps.results.block_facts import AnswerFacts, BlockFacts, CycleFacts
from sweeps.spec.model import ChecksSpec
from sweeps.spec.names import Acceptance
from sweeps.spec.space import Configuration
from sweeps.spec.workload import Block, Prompt


def facts_of_block(
    record: BlockRecord,
    summary: BlockSummary,
    block: Block,
    configuration: Configuration,
    *,
    shared: Mapping[str, float],
    earlier: Mapping[str, str],
) -> BlockFacts:
    """All facts of one block.

    Args:
        configuration: what served it (for an anchor the target alone).
        shared: prompt id -> share of the prompt that another prompt begins with, too (`shared_prefixes`).
        earlier: prompt id -> output hash of the trial's earlier answers at this concurrency.
    """
    asked = Counter(prompt.prompt_id for prompt in block.prompts)  # a prompt that a block repeats is cached by itself
    streams = record.streams or (None,) * len(record.requests)
    answers = tuple(
        AnswerFacts(
            prompt_id=request.prompt_id,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            latency_ms=request.latency_ms,
            output_hash=request.output_hash,
            ttft_ms=request.ttft_ms,
            cached_tokens=request.cached_tokens,
            shared_share=1.0 if asked[request.prompt_id] > 1 else shared.get(request.prompt_id, 0.0),
            distinct_bigrams=request.distinct_bigrams,
            stream=stream,
        )
        for request, stream in zip(record.requests, streams, strict=True)
    )
    return BlockFacts(
        num_steps=configuration.num_steps,
        num_draft_tokens=configuration.num_draft_tokens,
        concurrency=block.concurrency,
        started_s=record.started_s,
        wall_s=record.wall_s,
        decode_s=record.decode_s,
        decode_tokens=record.decode_tokens,
        tok_s=summary.tok_s,
        num_cycles=summary.num_cycles,
        accept_length=summary.accept_length,
        accept_histogram=summary.accept_histogram,
        draft_ms=summary.draft_ms,
        verify_ms=summary.verify_ms,
        verify_forward_ms=summary.verify_forward_ms,
        extend_ms=summary.extend_ms,
        gap_ms=summary.gap_ms,
        cycle_ms=summary.cycle_ms,
        probe_tokens=probe_tokens(record.cycles),
        asked_tokens=block.output_tokens if record.streams else None,
        exact=block.ignore_eos,
        answers=answers,
        earlier=earlier,
        cycles=_cycle_facts(record),
        foreign_pids=foreign_pids(record),
    )


def probe_tokens(cycles: pa.Table) -> int | None:
    """Tokens of all cycles of rank 0; None if some are not told, or there is no cycle."""
    own = cycles.filter(pc.equal(cycles["rank"], 0))["tokens"]
    return int(pc.sum(own).as_py()) if len(own) and not own.null_count else None


def foreign_pids(record: BlockRecord) -> str | None:
    """Processes beside the server that held memory of its GPUs; None if there were none, or nobody could look."""
    pids = record.telemetry.get("foreign_pids")
    return str(pids) if pids else None


def shared_prefixes(prompts: Iterable[Prompt]) -> dict[str, float]:
    """Prompt id -> the largest share of the prompt (ids, or characters of a text) that another prompt begins with.

    A prefix cache may hold that much of it although the prompt itself was never sent.
    """
    different = {prompt.prompt_id: prompt.text or prompt.token_ids or () for prompt in prompts}
    shares = dict.fromkeys(different, 0.0)
    for kind in (str, tuple):
        ordered = sorted((content, name) for name, content in different.items() if isinstance(content, kind))
        for (one, first), (other, second) in pairwise(ordered):
            common = sum(takewhile(bool, map(eq, one, other)))  # the longest common begin is that of a neighbour
            shares[first] = max(shares[first], common / max(1, len(one)))
            shares[second] = max(shares[second], common / max(1, len(other)))
    return shares


def allowed_rules(checks: ChecksSpec, acceptance: Acceptance) -> frozenset[str]:
    """Rules that the sweep switches off: simulated acceptance leaves no output that means anything."""
    pinned = acceptance == "pinned"
    off = {
        "looping": pinned or checks.looping == "allow",
        "same_answer": pinned or checks.wrong_output == "allow",
    }
    return frozenset(name for name, is_off in off.items() if is_off)


def _cycle_facts(record: BlockRecord) -> CycleFacts | None:
    cycles = record.cycles
    if not cycles.num_rows:
        return None
    by_rank = cycles.group_by("rank").aggregate([("cycle_ms", "mean"), ("cycle_ms", "count")]).to_pylist()
    first = cycles.filter(pc.equal(cycles["rank"], pc.min(cycles["rank"])))
    starts = first["started_ms"].to_pylist()
    served = first.filter(pc.and_(pc.is_valid(first["tokens"]), pc.greater(first["batch_size"], 0)))
    per_request = pc.divide(served["tokens"].cast(pa.float64()), served["batch_size"].cast(pa.float64()))
    return CycleFacts(
        per_rank={row["rank"]: row["cycle_ms_count"] for row in by_rank},
        cycle_ms_per_rank={row["rank"]: row["cycle_ms_mean"] for row in by_rank},
        largest_batch=pc.max(first["batch_size"]).as_py(),
        fewest_tokens=pc.min(per_request).as_py() if served.num_rows else 1.0,
        most_tokens=pc.max(per_request).as_py() if served.num_rows else 1.0,
        backward=sum(later < earlier for earlier, later in pairwise(starts)),
        span_ms=starts[-1] - starts[0],
        median_ms=median(first["cycle_ms"].to_pylist()),
        median_step_ms=median(
            [later - earlier for earlier, later in pairwise(starts)] or first["cycle_ms"].to_pylist()
        ),
        within_span_ms=pc.sum(first["cycle_ms"]).as_py() - first["cycle_ms"][-1].as_py(),
        first_start_s=starts[0] / 1000 if record.is_clock_shared else None,
        last_start_s=starts[-1] / 1000 if record.is_clock_shared else None,
    )
