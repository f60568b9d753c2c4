"""The target of the GPU sweep: the DeepSeek-V3 backbone of Kimi-K2.5, with latent attention and experts."""

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
    rotate_neighbours,
    rotations,
)
from benchmarks.miniature.shapes import VOCABULARY, KimiShape

_BALANCE_RATE = 0.001
"""Change of an expert's bias after each step, towards equal load (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""


_grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm
"""Public since torch 2.10."""


class LatentAttention(nn.Module):
    """Multi-head latent attention: queries and keys through low ranks, one rotary key for all heads."""

    def __init__(self, shape: KimiShape) -> None:
        super().__init__()
        self._shape = shape
        self.q_a_proj = linear(shape.hidden, shape.q_rank)
        self.q_a_layernorm = Norm(shape.q_rank)
        self.q_b_proj = linear(shape.q_rank, shape.heads * (shape.nope + shape.rope))
        self.kv_a_proj_with_mqa = linear(shape.hidden, shape.kv_rank + shape.rope)
        self.kv_a_layernorm = Norm(shape.kv_rank)
        self.kv_b_proj = linear(shape.kv_rank, shape.heads * (shape.nope + shape.value))
        self.o_proj = linear(shape.heads * shape.value, shape.hidden, depth=shape.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = self._shape
        turn = rotations(x.shape[1], shape.rope, like=x)
        query = heads_first(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))), shape.heads)
        plain, turned = query.split([shape.nope, shape.rope], dim=-1)
        query = torch.cat([plain, rotate_neighbours(turned, *turn)], dim=-1)
        latent, shared = self.kv_a_proj_with_mqa(x).split([shape.kv_rank, shape.rope], dim=-1)
        both = heads_first(self.kv_b_proj(self.kv_a_layernorm(latent)), shape.heads)
        plain, value = both.split([shape.nope, shape.value], dim=-1)
        shared = rotate_neighbours(shared[:, None], *turn).expand(-1, shape.heads, -1, -1)
        key = torch.cat([plain, shared], dim=-1)
        # Flash attention wants heads of one size: values are padded to the keys', the padding is cut off again.
        value = F.pad(value, (0, shape.nope + shape.rope - shape.value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)[..., : shape.value]
        return self.o_proj(heads_last(attended))


class Gate(nn.Module):
    """Scores of experts: sigmoids; the bias decides who is chosen, never how much a choice counts."""

    def __init__(self, shape: KimiShape) -> None:
        super().__init__()
        self._chosen = shape.experts_per_token
        self.weight = nn.Parameter(torch.randn(shape.experts, shape.hidden) * INITIAL_STD)
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.experts))
        self.register_buffer("load", torch.zeros(shape.experts), persistent=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, hidden) to chosen experts and their weights, (tokens, experts per token) each."""
        scores = F.linear(x, self.weight).float().sigmoid()
        chosen = (scores.detach() + self.e_score_correction_bias).topk(self._chosen, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.training:
            self.load += _counts(chosen, self.load.numel())
        return chosen, weights / weights.sum(dim=-1, keepdim=True)

    def balance(self) -> None:
        """Move the bias towards equal load over what was seen since the last call."""
        self.e_score_correction_bias += _BALANCE_RATE * (self.load.mean() - self.load).sign()
        self.load.zero_()


class Experts(nn.Module):
    """Routed experts and a shared one. Each routed matrix is one tensor over all experts."""

    def __init__(self, shape: KimiShape) -> None:
        super().__init__()
        self._shape = shape
        self.gate = Gate(shape)
        self.shared_experts = Mlp(shape.hidden, shape.expert, depth=shape.layers)
        small = INITIAL_STD / (2 * shape.layers) ** 0.5
        self.gate_up = nn.Parameter(torch.randn(shape.experts, shape.hidden, 2 * shape.expert) * INITIAL_STD)
        self.down = nn.Parameter(torch.randn(shape.experts, shape.expert, shape.hidden) * small)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        chosen, weights = self.gate(tokens)
        order = chosen.flatten().argsort(stable=True)
        counts = _counts(chosen, self._shape.experts)
        rows = tokens[order // self._shape.experts_per_token]
        first, second = grouped_product(rows, self.gate_up, counts).chunk(2, dim=-1)
        rows = grouped_product(F.silu(first) * second, self.down, counts)
        back = rows[order.argsort()].unflatten(0, weights.shape)
        routed = (back * weights[..., None].to(back.dtype)).sum(dim=1)
        return routed.view_as(x) + self.shared_experts(x)


def _counts(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """How often each expert was chosen. `torch.bincount` would wait for the device in every layer."""
    flat = chosen.flatten()
    return torch.zeros(experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))


def grouped_product(rows: torch.Tensor, matrices: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Rows sorted by group times the matrix of their group; `counts` rows belong to each group."""
    if rows.dtype == torch.bfloat16:
        return _grouped_mm(rows, matrices, offs=counts.cumsum(0).to(torch.int32))
    parts = rows.split(counts.tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])


class Layer(nn.Module):
    """One decoder layer; the first has a dense MLP."""

    def __init__(self, shape: KimiShape, number: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden)
        self.self_attn = LatentAttention(shape)
        self.post_attention_layernorm = Norm(shape.hidden)
        self.mlp = Experts(shape) if number else Mlp(shape.hidden, shape.intermediate, depth=shape.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Kimi(nn.Module):
    """Token ids (batch, length) to logits (batch, length, vocabulary) and the taps."""

    def __init__(self, shape: KimiShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(VOCABULARY, shape.hidden),
                "layers": nn.ModuleList([Layer(shape, number) for number in range(shape.layers)]),
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
        shape = self.shape
        idle = (shape.layers - 1) * (shape.experts - shape.experts_per_token) * 3 * shape.hidden * shape.expert
        return sum(weight.numel() for weight in self.parameters()) - VOCABULARY * shape.hidden - idle

    def after_step(self) -> None:
        """Balance the experts' load."""
        for layer in self.model["layers"][1:]:
            layer.mlp.gate.balance()

    def hugging_face(self) -> dict[str, torch.Tensor]:
        """Weights under the names of `DeepseekV3ForCausalLM`: every expert by itself."""
        named: dict[str, torch.Tensor] = {}
        for name, weight in self.state_dict().items():
            before, _, last = name.rpartition(".")
            if last == "gate_up":
                for expert, matrix in enumerate(weight):
                    gate, up = matrix.T.chunk(2)
                    named[f"{before}.experts.{expert}.gate_proj.weight"] = gate
                    named[f"{before}.experts.{expert}.up_proj.weight"] = up
            elif last == "down":
                named |= {f"{before}.experts.{expert}.down_proj.weight": each.T for expert, each in enumerate(weight)}
            else:
                named[name] = weight
        return named

    def config(self) -> dict[str, object]:
        """What `config.json` says beside the common part."""
        shape = self.shape
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "moe_intermediate_size": shape.expert,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.heads,
            "n_shared_experts": 1,
            "n_routed_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "q_lora_rank": shape.q_rank,
            "kv_lora_rank": shape.kv_rank,
            "qk_nope_head_dim": shape.nope,
            "qk_rope_head_dim": shape.rope,
            "v_head_dim": shape.value,
            "rope_interleave": True,
        }
