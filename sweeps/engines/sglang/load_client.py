"""Sends a block's prompts to a server and times the stream of their answers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from sweeps.engines.base import HEAD_TOKENS, Request
from sweeps.spec.workload import Block, Prompt

_LINE_BYTES = 1 << 24
"""Longest line of a stream: a chunk repeats all token ids so far."""


class ServerRefusedError(Exception):
    """The server answered, but not with tokens.

    Attributes:
        status: HTTP status; 200 if the generation itself was aborted.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerGoneError(Exception):
    """The connection broke, or the process has ended, before the answer was complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One streamed generation. Times are `time.monotonic` seconds."""

    request: Request
    sent_s: float
    first_s: float
    last_s: float
    first_tokens: int
    """Tokens that came with the first chunk."""
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
        return sum(answer.request.output_tokens - answer.first_tokens for answer in self.answers)


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

    Raises ServerRefusedError, ServerGoneError, TimeoutError.
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
    except* (ServerRefusedError, ServerGoneError) as errors:
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
    sent_s = time.monotonic()
    try:
        async with session.post("/generate", json=payload) as response:
            if response.status != 200:
                reason = (await response.text())[:500]
                raise ServerRefusedError(f"HTTP {response.status}: {reason}", status=response.status)
            chunks = [
                (time.monotonic(), line[6:])
                async for line in response.content
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]")
            ]
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
        raise ServerGoneError(f"the connection broke: {error}") from error
    return _answer(prompt, sent_s, chunks)


def _answer(prompt: Prompt, sent_s: float, chunks: list[tuple[float, bytes]]) -> Answer:
    documents = [json.loads(data) for _, data in chunks]
    for document in documents:
        if "error" in document:
            raise ServerRefusedError(str(document["error"])[:500], status=200)
    meta_info = documents[-1]["meta_info"] if documents else {}
    finish = meta_info.get("finish_reason") or {}
    if finish.get("type") == "abort" or not meta_info.get("completion_tokens"):
        raise ServerRefusedError(f"generation aborted: {finish.get('message', 'no token came')}", status=200)
    output_tokens = int(meta_info["completion_tokens"])
    output_ids = _output_ids(documents, output_tokens)
    told = documents[-1].get("text", "") if output_ids is None else ",".join(map(str, output_ids))
    first_s, last_s = chunks[0][0], chunks[-1][0]
    request = Request(
        prompt_id=prompt.prompt_id,
        prompt_tokens=int(meta_info["prompt_tokens"]),
        output_tokens=output_tokens,
        ttft_ms=(first_s - sent_s) * 1000,
        latency_ms=(last_s - sent_s) * 1000,
        output_hash=_digest(told),
        head_hash=None if output_ids is None else _digest(",".join(map(str, output_ids[:HEAD_TOKENS]))),
    )
    return Answer(
        request=request,
        sent_s=sent_s,
        first_s=first_s,
        last_s=last_s,
        first_tokens=int(documents[0]["meta_info"]["completion_tokens"]),
        output_ids=output_ids or (),
        meta_info=meta_info,
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _output_ids(documents: list[dict[str, Any]], output_tokens: int) -> tuple[int, ...] | None:
    """The generated ids, whether chunks carry all so far or only the new ones; None if the server sends none."""
    last = documents[-1].get("output_ids")
    if last is not None and len(last) == output_tokens:
        return tuple(last)
    pieces = [token for document in documents for token in document.get("output_ids") or ()]
    return tuple(pieces) if len(pieces) == output_tokens else None


def ask_server(url: str, *, timeout_s: float, body: Mapping[str, Any] | None = None) -> bytes:
    """One small request beside the load: GET, or POST with a body. Raises urllib.error.URLError (HTTPError too)."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=timeout_s) as response:
        answer: bytes = response.read()
        return answer
