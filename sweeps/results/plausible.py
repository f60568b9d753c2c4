"""One table of rules: what no block of an honest server can say. Applied to each block after it is measured, and again
by `analysis` to whatever folder it reads.

A block that breaks a rule is `suspect`: it stays in `blocks` with the rule's name and numbers, and takes part in no
comparison, neither in the study nor in the report. Tolerances come from the recorded sweeps (`recordings/`, 826 blocks
on H200s), whose worst value each reason names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from sweeps.results import breaches
from sweeps.results.block_facts import BlockFacts


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that holds in every honest block."""

    name: str
    formula: str
    """What holds, in the columns' names."""
    reason: str
    """Why it holds, and where the tolerance comes from."""
    breach: Callable[[BlockFacts], str | None]
    """The numbers that break it; None if it holds or nothing is known."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A rule that a block breaks, with the numbers."""

    rule: str
    numbers: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.numbers}"


def suspicions(facts: BlockFacts, *, allowed: Collection[str] = ()) -> tuple[Suspicion, ...]:
    """Every rule that a block breaks, in the order of the table.

    Args:
        allowed: names of rules that the sweep's own `checks` switch off.
    """
    broken = ((rule.name, rule.breach(facts)) for rule in RULES if rule.name not in allowed)
    return tuple(Suspicion(name, numbers) for name, numbers in broken if numbers is not None)


def suspect(facts: BlockFacts, *, allowed: Collection[str] = ()) -> str | None:
    """The column `suspect` of a block: `RULE: numbers` of every broken rule, None for a sound block."""
    return "; ".join(map(str, suspicions(facts, allowed=allowed))) or None


RULES: tuple[Rule, ...] = (
    Rule(
        "times",
        "0 < decode_s <= wall_s, decode_tokens > 0, cycle_ms > 0",
        "an answer of one token has no decode time, and so no throughput",
        breaches.times,
    ),
    Rule(
        "tok_s",
        "tok_s = decode_tokens / decode_s >= 0.001",
        "it is computed so; the quotient's rounding",
        breaches.tok_s,
    ),
    Rule(
        "phases",
        "draft + verify + extend + gap = cycle; each >= -10 % of the cycle; forward <= verify + 10 %",
        "gap is defined as the rest, so only rounding differs (1e-15); GPU events of two streams may overlap a little",
        breaches.phases,
    ),
    Rule(
        "accept_length",
        "1 <= accept_length <= min(num_steps + 1, num_draft_tokens)",
        "a verify yields the accepted path of the tree (at most its depth) and a bonus token; a mean has no tolerance",
        breaches.accept_length,
    ),
    Rule(
        "accept_histogram",
        "no cycle of 0 or of more than num_steps + 1 tokens; mean = accept_length within 1 %",
        "both count the same cycles",
        breaches.histogram,
    ),
    Rule(
        "asked_tokens",
        "output_tokens = output_tokens asked for (1 to that without ignore_eos)",
        "the server stops at max_new_tokens exactly: all recorded answers do",
        breaches.asked_tokens,
    ),
    Rule(
        "counted_ids",
        "output_tokens = token ids in the stream, none negative",
        "one id is one token",
        breaches.counted_ids,
    ),
    Rule("falling_count", "token counts of a stream never fall", "tokens are not taken back", breaches.falling_count),
    Rule("request_ids", "no two answers have one request id", "an answer belongs to one request", breaches.request_ids),
    Rule(
        "prompt_tokens",
        "prompt_tokens = tokens sent (prompts given as ids)",
        "the server adds nothing to ids",
        breaches.prompt_tokens,
    ),
    Rule(
        "probe_tokens",
        "decode_tokens - answers <= tokens of the probe <= output_tokens + 3 (num_steps + 1) answers",
        "the probe counts what the last cycles make beyond the end (recorded: at most 1.7 cycles a request), and not "
        "what a prefill makes",
        breaches.probe_tokens,
    ),
    Rule(
        "throughput",
        "0.9 <= tok_s x cycle_ms / accept_length <= concurrency x 1.1, and two cycles or 30 ms; above concurrency 1 "
        "only a half below",
        "each cycle serves 1 to concurrency requests; recorded: 0.977 to 1.035 (2.5 to 4.0 at concurrency 4). A "
        "read that comes late moves an end "
        "of the interval by a cycle or a time slice. Prefills of others take part of the time above concurrency 1",
        breaches.throughput,
    ),
    Rule(
        "buffered",
        "tokens of first chunks <= half of the output",
        "a stream that comes at its end has no decode time; recorded: 1 token a request",
        breaches.buffered,
    ),
    Rule("latency", "0 < ttft_ms <= latency_ms <= wall_s", "one clock takes all of them", breaches.latency),
    Rule(
        "cached_tokens",
        "cached_tokens <= what the prompt shares with another prompt, and 10 % of it (a page, a template)",
        "each trial and each repeated prompt begins with an empty prefix cache; rows read back tell only of prompts "
        "that were cached as a whole",
        breaches.cached,
    ),
    Rule(
        "looping",
        "different pairs in each 128 pairs of tokens >= 1/3, in more than half of the answers (speculation only)",
        "a loop is drafted almost without a miss, so its accept length says nothing of text; pages of prose, code and "
        "tables have 0.5 to 1",
        breaches.looping,
    ),
    Rule(
        "same_answer",
        "no answer (of 16 tokens or more) to 3 prompts or more, and more than half of the prompts so far",
        "an answer that ignores its prompt is no work; two prompts may share one by chance (recorded: 2 of 24)",
        breaches.same_answer,
    ),
    Rule(
        "rank_cycles",
        "every rank has the same number of cycles",
        "the ranks compute each cycle together",
        breaches.rank_cycles,
    ),
    Rule(
        "rank_times",
        "mean cycles of the ranks within 10 % and 0.5 ms",
        "each cycle's all-reduces wait for the slowest rank; recorded: 0.45 %",
        breaches.rank_times,
    ),
    Rule(
        "cycle_clock",
        "cycles start in order; from start to start is a cycle: medians within 25 % and 0.5 ms, sums within 10 % and 3 "
        "cycles or 20 ms",
        "a cycle lasts until the next one starts; prefills of further requests may come between, and a host starts GPU "
        "work ahead of its turn. Recorded: medians 0.957 to 1.053, sums 1.000 to 1.021",
        breaches.cycle_clock,
    ),
    Rule(
        "cycle_window", "cycles start within the block, give or take 1 s", "one clock takes both", breaches.cycle_window
    ),
    Rule("batch", "requests in a cycle <= concurrency", "no more are in flight", breaches.batch),
    Rule(
        "cycle_tokens",
        "1 <= tokens per request and cycle <= num_steps + 1",
        "as accept_length, cycle by cycle",
        breaches.cycle_tokens,
    ),
    Rule(
        "foreign_process",
        "no process but the server's holds memory of the trial's GPUs",
        "another's work slows the block by an unknown amount",
        breaches.foreign,
    ),
)
"""In the order in which a block's `suspect` names them."""
