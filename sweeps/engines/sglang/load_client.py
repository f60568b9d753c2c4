"""Sends a block's prompts to a server and times the stream of their answers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import aiohttp

from sweeps.engines.base import HEAD_TOKENS, LOOP_WINDOW, Request
from sweeps.results.block_facts import StreamFacts
from sweeps.spec.workload import Block, Prompt

_LINE_BYTES = 1 << 24
"""Longest line of a stream: a chunk repeats all token ids so far."""
BUSY_STATUSES = frozenset({429, 503})
"""A server that takes no more requests for now."""
_BUSY_S, _BUSY_POLL_S = 30.0, 0.2


class ServerRefusedError(Exception):
    """The server answered, but not with tokens.

    Attributes:
        status: HTTP status; 200 if the generation itself was aborted.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class BadAnswerError(Exception):
    """The server answered what SGLang never answers: no stream, no JSON, numbers or lists of another type."""


class ServerGoneError(Exception):
    """The connection broke, or the process has ended, before the answer was complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One streamed generation. Times are `time.monotonic` seconds."""

    request: Request
    stream: StreamFacts
    sent_s: float
    first_s: float
    last_s: float
    output_ids: tuple[int, ...]
    meta_info: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What a block's requests took."""

    started_s: float
    ended_s: float
    answers: tuple[Answer, ...]
    """In the order of the prompts."""

    @property
    def decode_s(self) -> float:
        """Length of the union of the intervals from first to last token."""
        return union_length((answer.first_s, answer.last_s) for answer in self.answers)

    @property
    def decode_tokens(self) -> int:
        return sum(answer.request.output_tokens - answer.stream.first_tokens for answer in self.answers)


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Length that the intervals cover together, without gaps."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def send_block(block: Block, *, url: str, timeout_s: float, is_gone: Callable[[], bool]) -> Load:
    """Run all prompts of `block` at its concurrency.

    Args:
        url: of the server, without a path.
        timeout_s: for the whole block.
        is_gone: asked ten times a second; True ends the wait at once.

    Raises ServerRefusedError, BadAnswerError, ServerGoneError, TimeoutError.
    """
    return asyncio.run(_send_block(block, url, timeout_s, is_gone))


async def _send_block(block: Block, url: str, timeout_s: float, is_gone: Callable[[], bool]) -> Load:
    async with aiohttp.ClientSession(
        base_url=url,
        timeout=aiohttp.ClientTimeout(total=None),
        connector=aiohttp.TCPConnector(limit=0),
        read_bufsize=_LINE_BYTES,
        trust_env=False,
    ) as session:
        started_s = time.monotonic()
        work = asyncio.ensure_future(_run_prompts(session, block))
        watch = asyncio.ensure_future(_watch(is_gone))
        try:
            await asyncio.wait({work, watch}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return Load(started_s=started_s, ended_s=time.monotonic(), answers=tuple(work.result()))
            if watch.done():
                raise ServerGoneError("the server's process has ended")
            raise TimeoutError(f"no complete answer to {len(block.prompts)} requests within {timeout_s:g} s")
        finally:
            work.cancel()
            watch.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)


async def _watch(is_gone: Callable[[], bool]) -> None:
    while not is_gone():
        await asyncio.sleep(0.1)


async def _run_prompts(session: aiohttp.ClientSession, block: Block) -> list[Answer]:
    waiting = iter(enumerate(block.prompts))
    answers: dict[int, Answer] = {}

    async def worker() -> None:
        for number, prompt in waiting:
            answers[number] = await _generate(session, prompt, block)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(block.concurrency, len(block.prompts))):
                group.create_task(worker())
    except* (ServerRefusedError, BadAnswerError, ServerGoneError) as errors:
        raise errors.exceptions[0] from None
    return [answers[number] for number in range(len(block.prompts))]


async def _generate(session: aiohttp.ClientSession, prompt: Prompt, block: Block) -> Answer:
    text = {"text": prompt.text} if prompt.token_ids is None else {"input_ids": list(prompt.token_ids)}
    payload = {
        **text,
        "stream": True,
        "sampling_params": {
            "max_new_tokens": block.output_tokens,
            "temperature": block.temperature,
            "ignore_eos": block.ignore_eos,
        },
    }
    patience_s = time.monotonic() + _BUSY_S
    while True:
        sent_s = time.monotonic()
        try:
            async with session.post("/generate", json=payload) as response:
                if response.status in BUSY_STATUSES and sent_s < patience_s:
                    await response.read()
                elif response.status != 200:
                    reason = (await response.read())[:500].decode("utf-8", "replace")
                    raise ServerRefusedError(f"HTTP {response.status}: {reason}", status=response.status)
                else:
                    lines = [(time.monotonic(), line) async for line in response.content]
                    return read_answer(prompt, sent_s, lines)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise ServerGoneError(f"the connection broke: {error}") from error
        except aiohttp.ClientError as error:
            raise BadAnswerError(f"not HTTP: {error}") from error
        except ValueError as error:
            raise BadAnswerError(f"a line longer than {_LINE_BYTES} bytes: {error}") from error
        await asyncio.sleep(_BUSY_POLL_S)


def read_answer(prompt: Prompt, sent_s: float, lines: Sequence[tuple[float, bytes]]) -> Answer:
    """The answer that a stream of lines, each with its time, tells. Raises ServerRefusedError, BadAnswerError."""
    chunks = [
        (at_s, line[6:]) for at_s, line in lines if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]")
    ]
    if not chunks:
        begin = b"".join(line for _, line in lines)[:200].decode("utf-8", "replace")
        raise BadAnswerError(f"no token came: {begin!r}")
    documents = [_document(data) for _, data in chunks]
    metas = [_mapping(document, "meta_info") for document in documents]
    finish = metas[-1].get("finish_reason") or {}
    if isinstance(finish, Mapping) and finish.get("type") == "abort":
        raise ServerRefusedError(f"generation aborted: {finish.get('message', 'no reason given')}", status=200)
    counts = [_integer(meta, "completion_tokens") for meta in metas]
    if not counts[-1]:
        raise ServerRefusedError("generation aborted: no token came", status=200)
    pieces = [_ids(document) for document in documents]
    output_ids = _output_ids(pieces, counts[-1])
    told = str(documents[-1].get("text", "")) if output_ids is None else ",".join(map(str, output_ids))
    first_s, last_s = chunks[0][0], chunks[-1][0]
    name = metas[-1].get("id")
    request = Request(
        prompt_id=prompt.prompt_id,
        prompt_tokens=_integer(metas[-1], "prompt_tokens"),
        output_tokens=counts[-1],
        ttft_ms=(first_s - sent_s) * 1000,
        latency_ms=(last_s - sent_s) * 1000,
        output_hash=_digest(told),
        head_hash=None if output_ids is None else _digest(",".join(map(str, output_ids[:HEAD_TOKENS]))),
        cached_tokens=_integer(metas[-1], "cached_tokens") if metas[-1].get("cached_tokens") is not None else None,
        distinct_bigrams=None if output_ids is None else distinct_bigrams(output_ids),
    )
    stream = StreamFacts(
        request_id=name if isinstance(name, str) else None,
        sent_tokens=None if prompt.token_ids is None else len(prompt.token_ids),
        first_tokens=counts[0],
        ids=_carried(pieces, output_ids),
        lowest_id=min(output_ids) if output_ids else None,
        count_falls=sum(later < earlier for earlier, later in pairwise(counts)),
    )
    return Answer(
        request=request,
        stream=stream,
        sent_s=sent_s,
        first_s=first_s,
        last_s=last_s,
        output_ids=output_ids or (),
        meta_info=metas[-1],
    )


def distinct_bigrams(ids: Sequence[int]) -> int:
    """Different pairs of neighbours, counted anew after every LOOP_WINDOW pairs: a long answer in few kinds of tokens
    (bytes, say) repeats pairs without being a loop."""
    return sum(
        len(set(pairwise(ids[start : start + LOOP_WINDOW + 1]))) for start in range(0, len(ids) - 1, LOOP_WINDOW)
    )


def _document(data: bytes) -> Mapping[str, Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadAnswerError(f"a chunk is not JSON ({error}): {data[:100].decode('utf-8', 'replace')!r}") from error
    if not isinstance(document, Mapping):
        raise BadAnswerError(f"wanted an object in each chunk, got {data[:100].decode('utf-8', 'replace')!r}")
    if "error" in document:
        raise ServerRefusedError(str(document["error"])[:500], status=200)
    return document


def _mapping(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = document.get(name)
    if not isinstance(value, Mapping):
        raise BadAnswerError(f"{name}: wanted an object, got {str(value)[:100]!r}")
    return value


def _integer(document: Mapping[str, Any], name: str) -> int:
    """A count, believable or not, as far as a table can hold it."""
    value = document.get(name)
    if type(value) is not int or abs(value) >= 1 << 31:
        raise BadAnswerError(f"{name}: wanted a number of tokens, got {str(value)[:100]!r}")
    return value


def _ids(document: Mapping[str, Any]) -> list[int]:
    ids = document.get("output_ids") or []
    if not isinstance(ids, list) or not all(type(one) is int and abs(one) < 1 << 63 for one in ids):
        raise BadAnswerError(f"output_ids: wanted a list of token ids, got {str(ids)[:100]!r}")
    return ids


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _output_ids(pieces: Sequence[Sequence[int]], output_tokens: int) -> tuple[int, ...] | None:
    """The generated ids, whether chunks carry all so far or only the new ones; None if the server sends none."""
    if len(pieces[-1]) == output_tokens:
        return tuple(pieces[-1])
    every = [token for piece in pieces for token in piece]
    return tuple(every) if len(every) == output_tokens else None


def _carried(pieces: Sequence[Sequence[int]], output_ids: tuple[int, ...] | None) -> int | None:
    """How many ids the stream carried; None if it carried none."""
    if output_ids is not None:
        return len(output_ids)
    grows = all(later[: len(earlier)] == earlier for earlier, later in pairwise(pieces))
    return (len(pieces[-1]) if grows else sum(map(len, pieces))) or None


def ask_server(url: str, *, timeout_s: float, body: Mapping[str, Any] | None = None) -> bytes:
    """One small request beside the load: GET, or POST with a body. Raises urllib.error.URLError (HTTPError too)."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=timeout_s) as response:
        answer: bytes = response.read()
        return answer
