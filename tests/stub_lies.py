"""The lies of the stub server (`STUB_FAULT=lie:NAME`): in its streams, in its probes' cycles, in its account of itself.

Each changes one thing of an otherwise sound answer. Standard library only: the stub runs without site packages.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Document = dict[str, Any]
Columns = dict[str, list[Any]]


def _meta(name: str, value: Callable[[int], object], *, last_only: bool = True) -> Callable[[Document, bool], Document]:
    """Another value of a field of `meta_info`, in the last chunk or in all."""

    def lie(document: Document, finished: bool) -> Document:
        if finished or not last_only:
            document["meta_info"][name] = value(document["meta_info"].get(name, 0))
        return document

    return lie


def _without_ids(document: Document, _: bool) -> Document:
    return {**document, "output_ids": document["output_ids"][: len(document["output_ids"]) // 3]}


def _negative_ids(document: Document, _: bool) -> Document:
    return {**document, "output_ids": [-1 - each for each in document["output_ids"]]}


DOCUMENTS: dict[str, Callable[[Document, bool], Document]] = {
    "counts_tenfold": _meta("completion_tokens", lambda count: 10 * count),
    "counts_chunks": _meta("completion_tokens", lambda count: max(1, count // 2)),
    "counts_negative": _meta("completion_tokens", lambda count: -count),
    "counts_fall": _meta("completion_tokens", lambda count: count + 100 if count < 12 else count, last_only=False),
    "ids_missing": _without_ids,
    "ids_negative": _negative_ids,
    "one_request_id": _meta("id", lambda _: "one", last_only=False),
    "prompt_longer": _meta("prompt_tokens", lambda count: count + 3),
    "prompt_cached": _meta("cached_tokens", lambda _: 7),
    "cached_negative": _meta("cached_tokens", lambda _: -1),
    "count_as_text": _meta("completion_tokens", str),
    "count_of_2_to_70": _meta("completion_tokens", lambda _: 1 << 70),
    "count_missing": _meta("completion_tokens", lambda _: None),
}
"""Lies that change a chunk's document."""

RAW: dict[str, bytes] = {
    "no_json": b"data: {'output_ids': [1]}\n\n",
    "no_object": b"data: [1, 2, 3]\n\n",
    "null": b"data: null\n\n",
    "invalid_utf8": b'data: {"text": "\xff\xfe"}\n\n',
    "html": b"<html><body>502 Bad Gateway</body></html>\n",
    "nested": b"data: " + b"[" * 100_000 + b"\n\n",
}
"""Lies that take the place of every chunk."""

TOKENS: dict[str, Callable[[list[int]], list[int]]] = {
    "loops": lambda tokens: [tokens[number % 2] for number in range(len(tokens))],
    "says_one_token": lambda tokens: [tokens[0]] * len(tokens),
    "ignores_the_prompt": lambda tokens: list(range(100, 100 + len(tokens))),
}
"""Lies about what is generated."""


class Stream:
    """The lines of one answer, as the lie has them."""

    def __init__(self, lie: str) -> None:
        self._lie = lie
        self._held: list[bytes] = []

    def say(self, document: Document, *, finished: bool) -> list[bytes]:
        """Lines to send now."""
        if self._lie in RAW:
            return [RAW[self._lie]]
        if self._lie in DOCUMENTS:
            document = DOCUMENTS[self._lie](document, finished)
        line = f"data: {json.dumps(document)}\n\n".encode()
        if self._lie == "comes_in_one_chunk":
            return [line] if finished else []
        if self._lie == "first_chunk_holds_most" and len(document["output_ids"]) < 18 and not finished:
            return []
        if self._lie == "is_buffered":
            self._held.append(line)
            return self._held if finished else []
        return [line]


def _scaled(name: str, factor: float) -> Callable[[int, Columns], Columns]:
    return lambda _, columns: {**columns, name: [factor * value for value in columns[name]]}


def _stretched(factor: float) -> Callable[[int, Columns], Columns]:
    """Every time of a cycle alike, its start excepted."""

    def lie(_: int, columns: Columns) -> Columns:
        times = {name for name in columns if name.endswith("_ms") and name != "started_ms"}
        return {
            name: [value and factor * value for value in values] if name in times else values
            for name, values in columns.items()
        }

    return lie


def _of_rank_1(lie: Callable[[int, Columns], Columns]) -> Callable[[int, Columns], Columns]:
    return lambda rank, columns: lie(rank, columns) if rank == 1 else columns


def _each(name: str, value: Callable[[Any], Any]) -> Callable[[int, Columns], Columns]:
    return lambda _, columns: {**columns, name: [value(each) for each in columns[name]]}


def _every_second(_: int, columns: Columns) -> Columns:
    return {name: values[::2] for name, values in columns.items()}


def _reversed_starts(_: int, columns: Columns) -> Columns:
    return {**columns, "started_ms": columns["started_ms"][::-1]}


CYCLES: dict[str, Callable[[int, Columns], Columns]] = {
    "probe_counts_half": _each("tokens", lambda count: count // 2),
    "probe_counts_double": _each("tokens", lambda count: 2 * count),
    "probe_drops_cycles": _every_second,
    "cycles_too_short": _stretched(0.1),
    "cycles_too_long": _stretched(8.0),
    "cycles_negative": _stretched(-1.0),
    "phase_not_a_number": _each("verify_ms", lambda _: float("nan")),
    "phases_sum_to_less": _scaled("verify_ms", 0.5),
    "forward_longer_than_verify": _scaled("verify_forward_ms", 3.0),
    "rank_misses_a_cycle": _of_rank_1(lambda _, columns: {name: values[1:] for name, values in columns.items()}),
    "rank_is_slower": _of_rank_1(_stretched(3.0)),
    "clock_runs_backward": _reversed_starts,
    "cycles_of_yesterday": _each("started_ms", lambda at: at - 86_400_000),
    "batch_of_seven": _each("batch_size", lambda _: 7),
    "cycle_time_null": _each("cycle_ms", lambda _: None),
    "cycle_time_text": _each("cycle_ms", lambda _: "1.2.3"),
    "tokens_of_2_to_70": _each("tokens", lambda _: 1 << 70),
    "columns_of_two_lengths": lambda _, columns: {**columns, "tokens": columns["tokens"][1:]},
}
"""Lies about cycles: rank, columns -> columns."""

OTHERS = frozenset({
    "answers_half", "last_chunk_late", "is_buffered", "comes_in_one_chunk", "first_chunk_holds_most", "info_is_html",
    "info_is_a_list", "hardly_accepts", "probe_answers_a_list", "handshake_torn", "handshake_without_states",
    "simulates_acceptance", "comes_empty",
})  # fmt: skip
"""Lies that the stub itself knows."""

LIES = frozenset({*DOCUMENTS, *RAW, *TOKENS, *CYCLES, *OTHERS})
