"""Every rule against one sound block, each broken by the least that is a lie; the recorded sweeps break none."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.results.block_facts import AnswerFacts, BlockFacts, CycleFacts, StreamFacts, facts_of_rows
from sweeps.results.plausible import RULES, suspect, suspicions
from sweeps.results.tables import ResultsFolder, read_table

RECORDINGS = sorted(path.parent for path in (Path(__file__).parents[3] / "recordings").glob("*/sweep.json"))
STREAM = StreamFacts(request_id="r0", sent_tokens=64, first_tokens=1, ids=101, lowest_id=5, count_falls=0)
ANSWER = AnswerFacts(
    prompt_id="p0", prompt_tokens=64, output_tokens=101, latency_ms=1030.0, output_hash="h0", ttft_ms=30.0,
    cached_tokens=0, shared_share=0.0, distinct_bigrams=95, stream=STREAM,
)  # fmt: skip
CYCLES = CycleFacts(
    per_rank={0: 50, 1: 50}, cycle_ms_per_rank={0: 20.0, 1: 20.1}, largest_batch=1, fewest_tokens=1.0, most_tokens=3.0,
    backward=0, span_ms=980.0, within_span_ms=980.0, median_ms=20.0, median_step_ms=20.0,
    first_start_s=10.03, last_start_s=11.01,
)  # fmt: skip
SOUND = BlockFacts(
    num_steps=2, num_draft_tokens=3, concurrency=1, started_s=10.0, wall_s=1.04, decode_s=1.0, decode_tokens=100,
    tok_s=100.0, num_cycles=50, accept_length=2.0, accept_histogram=(0, 15, 20, 15), draft_ms=2.0, verify_ms=16.0,
    verify_forward_ms=15.0, extend_ms=1.0, gap_ms=1.0, cycle_ms=20.0, probe_tokens=101, asked_tokens=101, exact=True,
    answers=(ANSWER,), cycles=CYCLES,
)  # fmt: skip
PLAIN = replace(
    SOUND, num_steps=0, num_draft_tokens=None, accept_length=None, accept_histogram=None, draft_ms=None,
    verify_ms=None, verify_forward_ms=9.5, extend_ms=None, gap_ms=0.5, cycle_ms=10.0, num_cycles=100,
    cycles=replace(CYCLES, per_rank={0: 100}, cycle_ms_per_rank={0: 10.0}, most_tokens=1.0),
)  # fmt: skip


def answer(**changes: Any) -> BlockFacts:
    return replace(SOUND, answers=(replace(ANSWER, **changes),))


def stream(**changes: Any) -> BlockFacts:
    return answer(stream=replace(STREAM, **changes))


def cycles(**changes: Any) -> BlockFacts:
    return replace(SOUND, cycles=replace(CYCLES, **changes))


def two(**changes: Any) -> BlockFacts:
    """Two answers at a time, the second changed."""
    second = replace(ANSWER, **{"prompt_id": "p1", "output_hash": "h1", "stream": None, **changes})
    return replace(SOUND, concurrency=2, answers=(ANSWER, second), decode_tokens=200, tok_s=200.0, probe_tokens=202)


LIES: list[tuple[str, BlockFacts]] = [
    ("times", replace(SOUND, decode_s=0.0, tok_s=None)),
    ("times", replace(SOUND, decode_tokens=-60, tok_s=-60.0)),
    ("times", replace(SOUND, cycle_ms=-20.0)),
    ("times", replace(SOUND, wall_s=math.inf)),
    ("times", replace(SOUND, wall_s=0.9)),
    ("tok_s", replace(SOUND, tok_s=101.0)),
    ("tok_s", replace(SOUND, tok_s=math.nan)),
    ("phases", replace(SOUND, verify_ms=12.0)),
    ("phases", replace(SOUND, extend_ms=math.nan)),
    ("phases", replace(SOUND, draft_ms=-10.0, gap_ms=13.0)),
    ("phases", replace(SOUND, verify_forward_ms=19.0)),
    ("accept_length", replace(SOUND, accept_length=0.97)),
    ("accept_length", replace(SOUND, accept_length=3.01)),
    ("accept_length", replace(SOUND, num_steps=5, accept_length=3.5)),
    ("accept_histogram", replace(SOUND, accept_histogram=(5, 10, 20, 15))),
    ("accept_histogram", replace(SOUND, accept_histogram=(0, 15, 20, 10, 5))),
    ("accept_histogram", replace(SOUND, accept_histogram=(0, 20, 20, 10))),
    ("asked_tokens", answer(output_tokens=50)),
    ("asked_tokens", answer(output_tokens=1010)),
    ("asked_tokens", replace(answer(output_tokens=102), exact=False)),
    ("counted_ids", stream(ids=30)),
    ("counted_ids", stream(lowest_id=-1)),
    ("falling_count", stream(count_falls=1)),
    ("request_ids", two(stream=replace(STREAM, sent_tokens=None))),
    ("prompt_tokens", answer(prompt_tokens=63)),
    ("probe_tokens", replace(SOUND, probe_tokens=90)),
    ("probe_tokens", replace(SOUND, probe_tokens=190)),
    ("probe_tokens", replace(SOUND, probe_tokens=None, num_cycles=30)),
    ("throughput", replace(SOUND, decode_s=0.01, tok_s=10_000.0)),
    ("throughput", replace(SOUND, decode_s=0.8, tok_s=125.0)),
    ("throughput", replace(SOUND, decode_s=1.5, tok_s=100 / 1.5, wall_s=1.6)),
    ("throughput", replace(two(), decode_s=0.4, tok_s=500.0)),
    ("buffered", replace(SOUND, decode_tokens=20, decode_s=0.2)),
    ("latency", answer(latency_ms=20.0)),
    ("latency", answer(ttft_ms=-1.0)),
    ("latency", answer(latency_ms=1100.0)),
    ("cached_tokens", answer(cached_tokens=63)),
    ("cached_tokens", answer(cached_tokens=-1)),
    ("looping", answer(distinct_bigrams=2)),
    ("same_answer", replace(two(output_hash="h0"), earlier={"p7": "h0", "p8": "h1"})),
    ("same_answer", replace(SOUND, earlier={"p7": "h0", "p8": "h0"})),
    ("rank_cycles", cycles(per_rank={0: 50, 1: 49})),
    ("rank_times", cycles(cycle_ms_per_rank={0: 20.0, 1: 26.0})),
    ("cycle_clock", cycles(backward=1)),
    ("cycle_clock", cycles(span_ms=300.0)),
    ("cycle_clock", cycles(span_ms=2000.0)),
    ("cycle_clock", cycles(median_ms=2.0)),
    ("cycle_window", cycles(first_start_s=3.0)),
    ("cycle_window", cycles(last_start_s=50.0)),
    ("batch", cycles(largest_batch=2)),
    ("cycle_tokens", cycles(most_tokens=4.0)),
    ("cycle_tokens", cycles(fewest_tokens=0.0)),
    ("foreign_process", replace(SOUND, foreign_pids="4711")),
]


def test_a_sound_block_breaks_no_rule() -> None:
    assert suspect(SOUND) is None
    assert suspect(PLAIN) is None
    assert suspect(two(stream=replace(STREAM, request_id="r1"))) is None


@pytest.mark.parametrize(("rule", "lie"), LIES)
def test_a_lie_is_caught_by_name(rule: str, lie: BlockFacts) -> None:
    assert rule in [suspicion.rule for suspicion in suspicions(lie)]
    assert f"{rule}: " in str(suspect(lie))


def test_every_rule_is_tried_and_described() -> None:
    assert {rule.name for rule in RULES} == {name for name, _ in LIES}
    assert all(rule.formula and rule.reason for rule in RULES)


def test_what_is_not_known_breaks_nothing() -> None:
    bare = replace(SOUND, answers=(), cycles=None, probe_tokens=None, asked_tokens=None, num_steps=None)
    assert suspect(bare) is None
    unknown: dict[str, Any] = {field.name: None for field in fields(BlockFacts) if field.name.endswith("_ms")}
    assert suspect(replace(bare, accept_length=None, accept_histogram=None, num_cycles=None, **unknown)) is None


def test_a_rule_that_the_sweep_allows_is_not_applied() -> None:
    assert suspect(answer(distinct_bigrams=2), allowed={"looping"}) is None


def test_loops_say_nothing_against_a_server_that_does_not_draft() -> None:
    assert suspect(replace(PLAIN, answers=(replace(ANSWER, distinct_bigrams=2),))) is None


def test_two_prompts_may_have_one_answer_by_chance() -> None:
    assert suspect(replace(two(output_hash="h0", stream=None), earlier={})) is None
    assert suspect(replace(SOUND, earlier={"p5": "h5", "p6": "h6", "p7": "h0", "p8": "h0", "p9": "h9"})) is None


def test_a_shared_prefix_may_be_cached() -> None:
    assert suspect(answer(cached_tokens=48, shared_share=0.75)) is None
    assert suspect(answer(cached_tokens=6)) is None


NUMBERS = st.one_of(st.none(), st.integers(-5, 1 << 40), st.floats(allow_nan=True, allow_infinity=True))
PINNED = ("looping", "same_answer")
"""Rules about the text, which means nothing if acceptance is simulated."""
NAMES = [field.name for field in fields(BlockFacts) if field.name.endswith(("_ms", "_s", "_length", "_cycles"))]


@settings(max_examples=300)
@given(st.sampled_from(NAMES), NUMBERS)
def test_no_number_stops_the_rules(name: str, value: float | None) -> None:
    required = name in ("started_s", "wall_s", "decode_s")
    changed: Any = {name: 0.0 if value is None and required else value}
    suspect(replace(SOUND, **changed))


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.name)
def test_recorded_blocks_are_sound(recording: Path) -> None:
    folder = ResultsFolder(recording)
    trials = {row["trial_id"]: row for row in read_table(folder, "trials").to_pylist()}
    answers: dict[tuple[str, int, int], list[dict[str, Any]]] = defaultdict(list)
    for row in read_table(folder, "requests").to_pylist():
        answers[row["trial_id"], row["block_index"], row["concurrency"] or 1].append(row)
    blocks = read_table(folder, "blocks").to_pylist()
    assert blocks
    for row in blocks:
        trial = trials[row["trial_id"]]
        facts = facts_of_rows(
            row,
            num_steps=trial["num_steps"],
            num_draft_tokens=trial["num_draft_tokens"],
            requests=answers[row["trial_id"], row["block_index"], row["concurrency"] or 1],
        )
        allowed = PINNED if trial["acceptance"] == "pinned" else ()
        assert suspect(facts, allowed=allowed) is None
