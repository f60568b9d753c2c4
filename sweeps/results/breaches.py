# ruff: noqa: D103 - the table of rules says what each function looks for
"""The numbers with which a block breaks each rule of `plausible`, None if it holds or if nothing is known of it.

Formulas and reasons of the tolerances stand in the table of rules.
"""

from __future__ import annotations

import math
from collections import Counter

from sweeps.results.block_facts import BlockFacts

_PHASES = ("draft_ms", "verify_ms", "verify_forward_ms", "extend_ms", "gap_ms", "cycle_ms")
_SLOWEST_TOK_S = 1e-3
_ROUNDING = 1e-6
_RATE = 0.10
_FEWEST_ALIKE_TOKENS = 16
_FEWEST_ALIKE_PROMPTS = 3
_FEWEST_LOOPING_TOKENS = 8


def _ok(value: float | None) -> bool:
    """Positive and finite."""
    return value is not None and math.isfinite(value) and value > 0


def times(facts: BlockFacts) -> str | None:
    numbers = {"wall_s": facts.wall_s, "decode_s": facts.decode_s, "decode_tokens": float(facts.decode_tokens)}
    if facts.cycle_ms is not None:
        numbers["cycle_ms"] = facts.cycle_ms
    for name, value in numbers.items():
        if not _ok(value):
            return f"{name} {value:g}, wanted a positive number"
    if facts.decode_s > facts.wall_s * (1 + _ROUNDING):
        return f"decode_s {facts.decode_s:g} in a block of wall_s {facts.wall_s:g}"
    return None


def tok_s(facts: BlockFacts) -> str | None:
    if facts.tok_s is None or not math.isfinite(facts.tok_s) or facts.tok_s < _SLOWEST_TOK_S:
        return f"tok_s {facts.tok_s}"
    if not _ok(facts.decode_s):
        return None  # `times` says it
    quotient = facts.decode_tokens / facts.decode_s
    if abs(facts.tok_s - quotient) > _ROUNDING * abs(quotient):
        return f"tok_s {facts.tok_s:.6g}, but {facts.decode_tokens} tokens in {facts.decode_s:.6g} s are {quotient:.6g}"
    return None


def phases(facts: BlockFacts) -> str | None:
    values = {name: getattr(facts, name) for name in _PHASES}
    for name, value in values.items():
        if value is not None and not (math.isfinite(value) and value >= -_RATE * abs(facts.cycle_ms or 0.0)):
            return f"{name} {value:g}"
    if facts.cycle_ms is None:
        return None
    parts = ("draft_ms", "verify_ms", "extend_ms") if facts.verify_ms is not None else ("verify_forward_ms",)
    if facts.gap_ms is None or all(values[name] is None for name in parts):
        return None
    total = facts.gap_ms + sum(values[name] or 0.0 for name in parts)
    if abs(total - facts.cycle_ms) > 1e-3 * facts.cycle_ms + 1e-6:
        return f"the phases sum to {total:.6g} ms in a cycle of {facts.cycle_ms:.6g} ms"
    if facts.verify_ms is not None and (facts.verify_forward_ms or 0.0) > facts.verify_ms * (1 + _RATE):
        return f"a forward of {facts.verify_forward_ms:.6g} ms inside a verify of {facts.verify_ms:.6g} ms"
    return None


def _longest(facts: BlockFacts) -> int | None:
    """Tokens that one request can get from one cycle; None if the configuration is not known."""
    if facts.num_steps is None:
        return None
    return min(facts.num_steps + 1, facts.num_draft_tokens or facts.num_steps + 1)


def accept_length(facts: BlockFacts) -> str | None:
    length, longest = facts.accept_length, _longest(facts)
    if length is None:
        return None
    if not math.isfinite(length) or length < 1.0 - _ROUNDING:
        return f"{length:g}, but every verify yields its bonus token"
    if longest is not None and length > longest + _ROUNDING:
        return f"{length:.4g} tokens a cycle, but {facts.num_steps} draft steps give at most {longest}"
    return None


def histogram(facts: BlockFacts) -> str | None:
    histogram, longest = facts.accept_histogram, _longest(facts)
    if not histogram or facts.accept_length is None:
        return None
    cycles = sum(histogram)
    if min(histogram) < 0 or cycles == 0:
        return f"{list(histogram)}"
    beyond = [tokens for tokens, count in enumerate(histogram) if count and longest is not None and tokens > longest]
    if histogram[0] or beyond:
        return f"cycles of {', '.join(map(str, beyond or [0]))} tokens, wanted 1 to {longest}"
    mean = sum(tokens * count for tokens, count in enumerate(histogram)) / cycles
    if abs(mean - facts.accept_length) > 0.01 * mean:
        return f"a mean of {mean:.4g}, but accept_length {facts.accept_length:.4g}"
    return None


def asked_tokens(facts: BlockFacts) -> str | None:
    asked = facts.asked_tokens
    for answer in facts.answers if asked is not None else ():
        assert asked is not None
        if answer.output_tokens > asked or answer.output_tokens < (asked if facts.exact else 1):
            wanted = f"{asked}" if facts.exact else f"1 to {asked}"
            return f"{answer.output_tokens} tokens for prompt {answer.prompt_id}, wanted {wanted}"
    return None


def probe_tokens(facts: BlockFacts) -> str | None:
    probe, output, longest = facts.probe_tokens, facts.output_tokens, _longest(facts)
    length = 1.0 if facts.accept_length is None else facts.accept_length
    if probe is None and facts.concurrency == 1 and facts.num_cycles and _ok(length):
        probe = round(facts.num_cycles * length)
    if probe is None or output is None or longest is None:
        return None
    spare = len(facts.answers)
    if probe < facts.decode_tokens - spare:
        return f"the client counted {facts.decode_tokens} tokens, the probe {probe}"
    if probe > output + 3 * longest * spare:
        return f"the probe counted {probe} tokens, the client {output} in {spare} answers"
    return None


def throughput(facts: BlockFacts) -> str | None:
    length = 1.0 if facts.accept_length is None else facts.accept_length
    if not (_ok(facts.cycle_ms) and _ok(facts.decode_s) and _ok(length) and facts.decode_tokens > 0):
        return None
    assert facts.cycle_ms is not None
    cycle_s = facts.cycle_ms / 1000
    alone_s = facts.decode_tokens / length * cycle_s  # if each cycle served one request
    shared = alone_s / facts.decode_s
    least_s = alone_s / facts.at_once
    fast_s = max((1 - _RATE) * least_s - max(2 * cycle_s, 0.030) * facts.waves, least_s / 4)
    told = f"tok_s x cycle / accept length = {shared:.3g}"
    if facts.decode_s < fast_s:
        return f"{told} requests a cycle at concurrency {facts.concurrency}"
    slow_s = (1 + _RATE) * alone_s if facts.at_once == 1 else 2 * alone_s
    if facts.decode_s > slow_s + max(3 * cycle_s, 0.050) * max(1, len(facts.answers)):
        return f"{told}: the client waited {facts.decode_s:.4g} s for {alone_s:.4g} s of cycles"
    return None


def buffered(facts: BlockFacts) -> str | None:
    output = facts.output_tokens
    if output is None or output < 4 * len(facts.answers):
        return None
    first = output - facts.decode_tokens
    allowed = max(output / 2, len(facts.answers) * (1 + (_longest(facts) or 1)))
    if first > allowed:
        return f"{first} of {output} tokens came with the first chunks: the stream is buffered"
    return None


def latency(facts: BlockFacts) -> str | None:
    for answer in facts.answers:
        ttft, latency = answer.ttft_ms, answer.latency_ms
        if not _ok(latency) or (ttft is not None and (not _ok(ttft) or ttft > latency * (1 + _ROUNDING))):
            return f"prompt {answer.prompt_id}: first token after {ttft} ms, last after {latency} ms"
        if latency / 1000 > facts.wall_s * (1 + _ROUNDING) + 1e-3:
            return f"prompt {answer.prompt_id} took {latency:.6g} ms in a block of {1000 * facts.wall_s:.6g} ms"
    return None


def prompt_tokens(facts: BlockFacts) -> str | None:
    for answer in facts.answers:
        sent = None if answer.stream is None else answer.stream.sent_tokens
        if sent is not None and answer.prompt_tokens != sent:
            return f"{answer.prompt_tokens} tokens in prompt {answer.prompt_id}, sent were {sent}"
    return None


def counted_ids(facts: BlockFacts) -> str | None:
    for answer in facts.answers:
        stream = answer.stream
        if stream is None or stream.ids is None:
            continue
        if stream.ids != answer.output_tokens:
            return f"{answer.output_tokens} tokens counted for {answer.prompt_id}, {stream.ids} ids came"
        if stream.lowest_id is not None and stream.lowest_id < 0:
            return f"token id {stream.lowest_id} for {answer.prompt_id}"
    return None


def falling_count(facts: BlockFacts) -> str | None:
    for answer in facts.answers:
        if answer.stream is not None and answer.stream.count_falls:
            return f"the count of {answer.prompt_id} fell {answer.stream.count_falls} times"
    return None


def request_ids(facts: BlockFacts) -> str | None:
    names = [answer.stream.request_id for answer in facts.answers if answer.stream is not None]
    told = [name for name in names if name is not None]
    twice = sorted({name for name in told if told.count(name) > 1})
    return f"{twice[0]} names {told.count(twice[0])} answers" if twice else None


def cached(facts: BlockFacts) -> str | None:
    for answer in facts.answers:
        cached = answer.cached_tokens
        if cached is None or answer.prompt_tokens <= 0:
            continue
        if cached < 0 or cached > (answer.shared_share + 0.1) * answer.prompt_tokens + 1:
            return f"{cached} of {answer.prompt_tokens} tokens of prompt {answer.prompt_id} came from the prefix cache"
    return None


def looping(facts: BlockFacts) -> str | None:
    if not facts.speculates:
        return None
    told = [
        (answer.distinct_bigrams, answer.output_tokens - 1)
        for answer in facts.answers
        if answer.distinct_bigrams is not None and answer.output_tokens >= _FEWEST_LOOPING_TOKENS
    ]
    loops = [(distinct, pairs) for distinct, pairs in told if distinct < pairs / 3]
    if loops and 2 * len(loops) >= len(told):
        distinct, pairs = loops[0]
        return f"{len(loops)} of {len(told)} answers repeat themselves ({distinct} different pairs of {pairs})"
    return None


def same_answer(facts: BlockFacts) -> str | None:
    long = {each.prompt_id: each.output_hash for each in facts.answers if each.output_tokens >= _FEWEST_ALIKE_TOKENS}
    every = {**facts.earlier, **long}
    alike = [prompt for prompt, told in every.items() if told in long.values()]
    counts = Counter(every[prompt] for prompt in alike).most_common(1)
    if counts and counts[0][1] >= _FEWEST_ALIKE_PROMPTS and 2 * counts[0][1] > len(every):
        return f"{counts[0][1]} of {len(every)} prompts have one answer of {_FEWEST_ALIKE_TOKENS} tokens or more"
    return None


def rank_cycles(facts: BlockFacts) -> str | None:
    counts = {} if facts.cycles is None else facts.cycles.per_rank
    if len(set(counts.values())) > 1:
        return "cycles " + ", ".join(f"{count} in rank {rank}" for rank, count in sorted(counts.items()))
    return None


def rank_times(facts: BlockFacts) -> str | None:
    means = {} if facts.cycles is None else facts.cycles.cycle_ms_per_rank
    if len(means) < 2 or not all(map(_ok, means.values())):
        return None
    shortest, longest = min(means, key=lambda rank: means[rank]), max(means, key=lambda rank: means[rank])
    if means[longest] > (1 + _RATE) * means[shortest] + 0.5:
        return f"a mean cycle of {means[longest]:.4g} ms in rank {longest}, {means[shortest]:.4g} ms in rank {shortest}"
    return None


def cycle_clock(facts: BlockFacts) -> str | None:
    cycles = facts.cycles
    if cycles is None or not _ok(facts.cycle_ms):
        return None
    if cycles.backward:
        return f"{cycles.backward} cycles start before the one before them"
    assert facts.cycle_ms is not None
    if abs(cycles.median_step_ms - cycles.median_ms) > 0.25 * max(cycles.median_step_ms, cycles.median_ms) + 0.5:
        return f"a median of {cycles.median_ms:.4g} ms, but of {cycles.median_step_ms:.4g} ms from start to start"
    slack_ms = max(3 * facts.cycle_ms, 20.0)
    told = f"cycles of {cycles.within_span_ms:.6g} ms in {cycles.span_ms:.6g} ms between their starts"
    if cycles.within_span_ms > (1 + _RATE) * cycles.span_ms + slack_ms:
        return told
    if len(facts.answers) == 1 and cycles.within_span_ms < (1 - _RATE) * cycles.span_ms - slack_ms:
        return told
    return None


def cycle_window(facts: BlockFacts) -> str | None:
    cycles = facts.cycles
    if cycles is None or cycles.first_start_s is None or cycles.last_start_s is None:
        return None
    early, late = facts.started_s - cycles.first_start_s, cycles.last_start_s - facts.started_s - facts.wall_s
    if max(early, late) > 1.0 or not math.isfinite(early + late):
        return f"cycles {max(early, late):.4g} s outside the block"
    return None


def batch(facts: BlockFacts) -> str | None:
    if facts.cycles is not None and facts.cycles.largest_batch > facts.at_once:
        return f"{facts.cycles.largest_batch} requests in a cycle, in flight were {facts.at_once}"
    return None


def cycle_tokens(facts: BlockFacts) -> str | None:
    cycles, longest = facts.cycles, _longest(facts)
    if cycles is None or longest is None:
        return None
    if cycles.most_tokens > longest + _ROUNDING or cycles.fewest_tokens < 1 - _ROUNDING:
        return f"{cycles.fewest_tokens:g} to {cycles.most_tokens:g} tokens per request and cycle, wanted 1 to {longest}"
    return None


def foreign(facts: BlockFacts) -> str | None:
    return f"processes {facts.foreign_pids} held memory of the trial's GPUs" if facts.foreign_pids else None
