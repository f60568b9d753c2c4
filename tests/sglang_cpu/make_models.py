"""Write the engine tests' tiny models: a target, a random EAGLE-3 drafter, a drafter that is the target plus noise.

    python tests/sglang_cpu/make_models.py FOLDER

Random weights of this size make varied greedy text, and the noisy copy gets part of its drafts accepted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD, VOCABULARY = 64, 128, 2, 4, 2, 16, 512
WEIGHT_STD, NOISE_STD = 0.35, 0.02
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "mlp_bias": False,
}
Weights = dict[str, torch.Tensor]


class Random:
    """Draws weights from one seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float = WEIGHT_STD) -> torch.Tensor:
        return (torch.randn(*shape, generator=self._generator) * std).bfloat16()


def norm() -> torch.Tensor:
    return torch.ones(HIDDEN, dtype=torch.bfloat16)


def block(random: Random, prefix: str, *, attention_input: int = HIDDEN) -> Weights:
    """Attention and MLP of one layer."""
    return {
        f"{prefix}.self_attn.q_proj.weight": random.normal(HEADS * HEAD, attention_input),
        f"{prefix}.self_attn.k_proj.weight": random.normal(KV_HEADS * HEAD, attention_input),
        f"{prefix}.self_attn.v_proj.weight": random.normal(KV_HEADS * HEAD, attention_input),
        f"{prefix}.self_attn.o_proj.weight": random.normal(HIDDEN, HEADS * HEAD),
        f"{prefix}.mlp.gate_proj.weight": random.normal(INTERMEDIATE, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": random.normal(INTERMEDIATE, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": random.normal(HIDDEN, INTERMEDIATE),
        f"{prefix}.input_layernorm.weight": norm(),
    }


def target_weights() -> Weights:
    random = Random(1)
    weights = {
        "model.embed_tokens.weight": random.normal(VOCABULARY, HIDDEN),
        "model.norm.weight": norm(),
        "lm_head.weight": random.normal(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {**block(random, prefix), f"{prefix}.post_attention_layernorm.weight": norm()}
    return weights


def eagle3_weights() -> Weights:
    random = Random(2)
    return {
        "fc.weight": random.normal(HIDDEN, 3 * HIDDEN),
        "norm.weight": norm(),
        "lm_head.weight": random.normal(VOCABULARY, HIDDEN),
        **block(random, "midlayer", attention_input=2 * HIDDEN),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "d2t": torch.zeros(VOCABULARY, dtype=torch.int64),
        "t2d": torch.ones(VOCABULARY, dtype=torch.bool),
    }


def with_noise(weights: Weights) -> Weights:
    """The same model, near enough to be right often and wrong often."""
    random = Random(7)
    return {
        name: weight if weight.dim() < 2 else weight + random.normal(*weight.shape, std=NOISE_STD)
        for name, weight in weights.items()
    }


def save(folder: Path, weights: Weights, **changes: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes, indent=2), encoding="utf-8")
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def main(root: Path) -> None:
    target = target_weights()
    save(root / "target", target)
    save(root / "standalone", with_noise(target))
    save(
        root / "eagle3",
        eagle3_weights(),
        architectures=["LlamaForCausalLMEagle3"],
        num_hidden_layers=1,
        draft_vocab_size=VOCABULARY,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
