"""Shapes and recipes: how large, how long, from which data. Sizes count elements, `steps` optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass

VOCABULARY = 512
"""Token ids 0 to 255 are bytes, 256 separates documents, the rest is padding that is never seen."""
SEPARATOR = 256
NORM_EPSILON = 1e-5
ROPE_BASE = 10000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaShape:
    """A Llama backbone: grouped-query attention, dense MLPs."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    intermediate: int
    taps: tuple[int, int, int]
    """Layers whose output the drafter sees."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KimiShape:
    """The DeepSeek-V3 backbone that Kimi-K2.5 uses: latent attention (MLA), one dense layer, then experts."""

    hidden: int
    layers: int
    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    intermediate: int
    expert: int
    """Intermediate size of one expert; there is one shared expert of the same size."""
    experts: int
    experts_per_token: int
    taps: tuple[int, int, int]
    """The first is 1: SGLang 0.5.21 counts taps of this backbone from the layer's output only then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterShape:
    """The one decoder layer of an EAGLE-3 drafter; its hidden size is the target's."""

    heads: int
    kv_heads: int
    head: int
    intermediate: int
    vocabulary: int
    """Draft vocabulary: the most frequent tokens of the training text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One training run: windows of `context` tokens, `batch` at a time."""

    steps: int
    batch: int
    context: int
    learning_rate: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Everything but the seed and the text."""

    target: LlamaShape | KimiShape
    drafter: DrafterShape
    target_stage: Stage
    drafter_stage: Stage
    draft_steps: int
    """Draft steps unrolled in training (EAGLE-3's training-time test)."""
    poor_share: float | None = None
    """Also keep the drafter as it was after this share of its training."""


RECIPES = {
    "tiny": Recipe(
        target=LlamaShape(hidden=128, layers=4, heads=4, kv_heads=2, head=32, intermediate=384, taps=(0, 1, 2)),
        drafter=DrafterShape(heads=4, kv_heads=2, head=32, intermediate=384, vocabulary=128),
        target_stage=Stage(steps=1200, batch=8, context=192, learning_rate=4e-3),
        drafter_stage=Stage(steps=500, batch=8, context=192, learning_rate=3e-3),
        draft_steps=5,
    ),
    "large": Recipe(
        target=KimiShape(
            hidden=1024,
            layers=64,
            heads=16,
            q_rank=512,
            kv_rank=512,
            nope=128,
            rope=64,
            value=128,
            intermediate=4096,
            expert=512,
            experts=16,
            experts_per_token=4,
            taps=(1, 31, 60),
        ),
        drafter=DrafterShape(heads=16, kv_heads=16, head=64, intermediate=4096, vocabulary=256),
        target_stage=Stage(steps=1400, batch=16, context=512, learning_rate=8e-4),
        drafter_stage=Stage(steps=900, batch=16, context=512, learning_rate=8e-4),
        draft_steps=7,
        poor_share=0.05,
    ),
}
"""`tiny`: the pair of the test suite, minutes on two CPU cores. `large`: one H200, minutes; deep and narrow, since the
time of a decode step at batch 1 grows with the layers and the cost of training with the weights."""
