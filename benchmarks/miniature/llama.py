"""The target of the CPU suite: a Llama."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks.miniature.layers import (
    INITIAL_STD,
    Mlp,
    Norm,
    heads_first,
    heads_last,
    linear,
    rotate_halves,
    rotations,
)
from benchmarks.miniature.shapes import VOCABULARY, LlamaShape


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self._shape = shape
        self.q_proj = linear(shape.hidden, shape.heads * shape.head)
        self.k_proj = linear(shape.hidden, shape.kv_heads * shape.head)
        self.v_proj = linear(shape.hidden, shape.kv_heads * shape.head)
        self.o_proj = linear(shape.heads * shape.head, shape.hidden, depth=shape.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = self._shape
        turn = rotations(x.shape[1], shape.head, like=x)
        query = rotate_halves(heads_first(self.q_proj(x), shape.heads), *turn)
        key = rotate_halves(heads_first(self.k_proj(x), shape.kv_heads), *turn)
        value = heads_first(self.v_proj(x), shape.kv_heads)
        groups = shape.heads // shape.kv_heads
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
        return self.o_proj(heads_last(F.scaled_dot_product_attention(query, key, value, is_causal=True)))


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden)
        self.mlp = Mlp(shape.hidden, shape.intermediate, depth=shape.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Token ids (batch, length) to logits (batch, length, vocabulary) and the taps."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(VOCABULARY, shape.hidden),
                "layers": nn.ModuleList([Layer(shape) for _ in range(shape.layers)]),
                "norm": Norm(shape.hidden),
            }
        )
        nn.init.normal_(self.model["embed_tokens"].weight, std=INITIAL_STD)
        self.lm_head = linear(shape.hidden, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.model["embed_tokens"](tokens)
        taps = []
        for number, layer in enumerate(self.model["layers"]):
            x = layer(x)
            if number in self.shape.taps:
                taps.append(x)
        return self.lm_head(self.model["norm"](x)), torch.cat(taps, dim=-1)

    def weights_per_token(self) -> int:
        """Weights that one token is multiplied with."""
        return sum(weight.numel() for weight in self.parameters()) - VOCABULARY * self.shape.hidden

    def after_step(self) -> None:
        """Nothing to balance."""

    def hugging_face(self) -> dict[str, torch.Tensor]:
        """Weights under the names of `LlamaForCausalLM`."""
        return dict(self.state_dict())

    def config(self) -> dict[str, object]:
        """What `config.json` says beside the common part."""
        shape = self.shape
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head,
            "mlp_bias": False,
        }
