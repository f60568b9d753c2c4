"""Times and tokens of a streamed answer."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.engines.sglang.load_client import (
    Answer,
    BadAnswerError,
    ServerRefusedError,
    distinct_bigrams,
    read_answer,
    union_length,
)
from sweeps.spec.workload import Prompt
from tests.stub_lies import RAW

PROMPT = Prompt(prompt_id="p", token_ids=(1, 2))


def chunk(ids: list[int] | None, completion_tokens: int, **extra: object) -> bytes:
    meta = {"completion_tokens": completion_tokens, "prompt_tokens": 2, "finish_reason": None, **extra}
    return json.dumps({"meta_info": meta} | ({} if ids is None else {"output_ids": ids})).encode()


def answered(chunks: list[tuple[float, bytes]]) -> Answer:
    return read_answer(PROMPT, 0.0, [(at_s, b"data: " + data) for at_s, data in chunks])


def test_cumulative_and_incremental_streams_give_the_same_answer() -> None:
    cumulative = answered([(1.0, chunk([7], 1)), (2.0, chunk([7, 8, 9], 3))])
    incremental = answered([(1.0, chunk([7], 1)), (2.0, chunk([8, 9], 3))])

    assert cumulative.output_ids == incremental.output_ids == (7, 8, 9)
    assert cumulative.request == incremental.request
    assert cumulative.request.ttft_ms == pytest.approx(1000)
    assert cumulative.request.latency_ms == pytest.approx(2000)
    assert (cumulative.stream.first_tokens, cumulative.request.output_tokens) == (1, 3)


def test_other_tokens_make_another_hash() -> None:
    first = answered([(1.0, chunk([7, 8], 2))])
    second = answered([(1.0, chunk([7, 9], 2))])

    assert first.request.output_hash != second.request.output_hash


def test_aborted_generation_is_refused() -> None:
    aborted = chunk([], 0, finish_reason={"type": "abort", "message": "out of cache"})

    with pytest.raises(ServerRefusedError, match="out of cache"):
        answered([(1.0, aborted)])


def test_empty_stream_is_no_answer() -> None:
    with pytest.raises(BadAnswerError, match="no token"):
        answered([])


intervals = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10)).map(lambda pair: (pair[0], sum(pair))), max_size=20)


@given(intervals)
def test_union_is_between_the_longest_interval_and_the_sum(pairs: list[tuple[float, float]]) -> None:
    lengths = [end - start for start, end in pairs]
    union = union_length(pairs)

    assert union <= sum(lengths) + 1e-6
    assert union >= max(lengths, default=0.0) - 1e-6
    assert union == pytest.approx(union_length(list(reversed(pairs))))


def test_gap_between_intervals_is_not_counted() -> None:
    assert union_length([(0, 1), (0.5, 2), (5, 6)]) == pytest.approx(3)


def test_a_loop_has_few_pairs_and_a_long_text_of_few_letters_has_not() -> None:
    letters = random.Random(0).choices(range(30), k=2001)
    assert distinct_bigrams([7, 8] * 500) < 40
    assert distinct_bigrams(letters) > 0.8 * 2000
    assert distinct_bigrams([1]) == distinct_bigrams([]) == 0


@pytest.mark.parametrize("lie", sorted(RAW))
def test_what_is_no_stream_is_a_bad_answer(lie: str) -> None:
    with pytest.raises(BadAnswerError):
        read_answer(PROMPT, 0.0, [(1.0, RAW[lie])])


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(1 << 70),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
META = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(("completion_tokens", "prompt_tokens", "finish_reason", "cached_tokens", "id"), ANYTHING),
)
DOCUMENT = st.fixed_dictionaries(
    {}, optional={"meta_info": META | ANYTHING, "output_ids": ANYTHING, "text": ANYTHING, "error": ANYTHING}
)
LINE = st.one_of(
    st.binary(max_size=40),
    st.builds(lambda data: b"data: " + data, st.binary(max_size=40)),
    (DOCUMENT | ANYTHING).map(lambda value: b"data: " + json.dumps(value).encode()),
)


@settings(max_examples=400)
@given(st.lists(LINE, max_size=5))
def test_whatever_a_server_streams_is_an_answer_or_one_of_two_errors(lines: list[bytes]) -> None:
    try:
        answer = read_answer(PROMPT, 0.0, [(float(number), line) for number, line in enumerate(lines)])
    except (BadAnswerError, ServerRefusedError):
        return
    assert answer.request.output_tokens != 0
