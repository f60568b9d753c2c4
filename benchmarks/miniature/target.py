"""Training the target: next byte of the standard library."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks.miniature.corpus import Corpus
from benchmarks.miniature.kimi import Kimi
from benchmarks.miniature.llama import Llama
from benchmarks.miniature.shapes import KimiShape, LlamaShape, Stage

Target = Llama | Kimi
_HELD_OUT_SEED, _HELD_OUT_WINDOWS = 10**9, 16


def make_target(shape: LlamaShape | KimiShape) -> Target:
    """A target with random weights from torch's global seed."""
    return Llama(shape) if isinstance(shape, LlamaShape) else Kimi(shape)


def next_token_loss(target: Target, corpus: Corpus, stage: Stage, *, seed: int) -> Callable[[int], torch.Tensor]:
    """The loss of step n, in nats per byte."""

    def loss_of(step: int) -> torch.Tensor:
        if step:
            target.after_step()
        return _loss(target, corpus.windows(stage.batch, stage.context + 1, seed=seed * 10**6 + step))

    return loss_of


def held_out_loss(target: Target, corpus: Corpus, context: int) -> float:
    """Nats per byte over fixed windows of held-out files."""
    target.eval()
    with torch.no_grad():
        windows = corpus.windows(_HELD_OUT_WINDOWS, context + 1, seed=_HELD_OUT_SEED, held_out=True)
        return float(_loss(target, windows))


def continue_greedily(target: Target, prompts: torch.Tensor, length: int) -> torch.Tensor:
    """Prompts (batch, n) with the target's own greedy text after them, (batch, n + length)."""
    target.eval()
    tokens = prompts
    with torch.no_grad():
        for _ in range(length):
            logits, _ = target(tokens)
            tokens = torch.cat([tokens, logits[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
    return tokens


def _loss(target: Target, windows: torch.Tensor) -> torch.Tensor:
    logits, _ = target(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
