"""Training the drafter on what the target would say, and measuring how far its chains are accepted."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks.miniature.corpus import Corpus
from benchmarks.miniature.drafter import Drafter
from benchmarks.miniature.shapes import Stage
from benchmarks.miniature.target import Target, continue_greedily

_PROMPT, _CONTINUED, _PROMPTS = 64, 64, 32
_SEED = 2 * 10**9


def drafting_loss(
    drafter: Drafter, target: Target, corpus: Corpus, stage: Stage, *, draft_steps: int, seed: int
) -> Callable[[int], torch.Tensor]:
    """The loss of step n: cross entropy with the target's distribution over the draft vocabulary.

    It is the mean over draft steps. Entries that a draft step cannot reach are left out.
    """
    target.eval()

    def loss_of(step: int) -> torch.Tensor:
        windows = corpus.windows(stage.batch, stage.context + 1, seed=seed * 10**6 + step)
        with torch.no_grad():
            logits, taps = target(windows)
            embedded = target.model["embed_tokens"](windows[:, 1:])
            wanted = logits[:, 1:, drafter.kept].float().softmax(dim=-1)
        losses = []
        for number, drafted in enumerate(drafter(embedded, taps[:, :-1], steps=draft_steps)):
            own, theirs = drafted[:, number:].float(), wanted[:, number:]
            losses.append(F.cross_entropy(own.flatten(0, 1), theirs.flatten(0, 1)))
        return torch.stack(losses).mean()

    return loss_of


def own_text(target: Target, corpus: Corpus) -> torch.Tensor:
    """Held-out prompts, each with the target's own greedy text after it."""
    return continue_greedily(target, corpus.windows(_PROMPTS, _PROMPT, seed=_SEED, held_out=True), _CONTINUED)


def acceptance_by_position(drafter: Drafter, target: Target, text: torch.Tensor, *, draft_steps: int) -> list[float]:
    """[i]: share of chains whose first i + 1 drafts are what the target says, over `own_text`.

    The target's text is greedy, so a chain from any place in it is judged as a server would judge it there.
    """
    with torch.no_grad():
        _, taps = target(text)
        embedded = target.model["embed_tokens"](text[:, 1:-1])
        steps = list(drafter(embedded, taps[:, :-2], steps=draft_steps))
    right = [drafter.kept[logits.argmax(dim=-1)] == text[:, 2:] for logits in steps]
    roots = slice(_PROMPT - 2, text.shape[1] - 2 - draft_steps)
    accepted = torch.ones_like(right[0][:, roots])
    shares = []
    for number, each in enumerate(right):
        accepted = accepted & each[:, roots.start + number : roots.stop + number]
        shares.append(float(accepted.float().mean()))
    return shares
