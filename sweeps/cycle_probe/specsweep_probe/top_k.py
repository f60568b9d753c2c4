"""Changes the top-k of a live server's draft worker, for states of several top-k in one server.

SGLang takes top-k as fixed when the server starts. It reads the value in the draft worker, in the worker's own
attributes and in the server's arguments, and it keeps top-k values between two cycles in buffers of that width. All
four places are changed here. Names were read in the wheels of 0.5.16, 0.5.17, 0.5.19, 0.5.21 and 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SHAPE = ("speculative_num_steps", "speculative_num_draft_tokens")
_RELAYED = ("topk_p_buf", "topk_index_buf")
"""Buffers of SGLang's `FutureMap`, (requests, top-k); absent or None until the first cycle."""


def set_top_k(worker: Any, top_k: int) -> None:
    """Let the worker and its draft worker draft with `top_k` from now on. The server must be idle."""
    worker.topk = worker._draft_worker.topk = top_k
    for arguments in _argument_stores(worker):
        arguments.override("specsweep", speculative_eagle_topk=top_k)


@contextmanager
def captured_with(worker: Any, *, num_steps: int, top_k: int, num_draft_tokens: int) -> Iterator[None]:
    """Inside, the worker has this shape, so that SGLang's own call captures it; afterwards the shape that it had.

    SGLang's call changes steps and draft tokens by itself, but it checks the ones that it restores against top-k.
    """
    if top_k == worker.topk:
        yield
        return
    drafting, launched_top_k = worker._draft_worker, worker.topk
    before = [(owner, name, getattr(owner, name)) for owner in (worker, drafting) for name in _SHAPE]
    try:
        set_top_k(worker, top_k)
        for owner in (worker, drafting):
            owner.speculative_num_steps, owner.speculative_num_draft_tokens = num_steps, num_draft_tokens
        yield
    finally:
        set_top_k(worker, launched_top_k)
        for owner, name, value in before:
            setattr(owner, name, value)
        drafting._rebuild_topk1_chain_buffers()


def resize_relay(relay: Any, top_k: int) -> None:
    """Give the scheduler's buffers between two cycles the width of `top_k`. What they held is lost: nothing is running.

    Args:
        relay: SGLang's `FutureMap`.
    """
    for name in _RELAYED:
        buffer = getattr(relay, name, None)
        if buffer is not None and buffer.shape[1:] != (top_k,):
            setattr(relay, name, buffer.new_zeros((buffer.shape[0], top_k)))


def _argument_stores(worker: Any) -> list[Any]:
    """Where SGLang keeps its arguments: in the arguments themselves up to 0.5.17, in a context from 0.5.17 on."""
    from sglang.srt.runtime_context import get_context

    stores = (worker.server_args, get_context())
    return [store for store in stores if hasattr(type(store), "override")]
