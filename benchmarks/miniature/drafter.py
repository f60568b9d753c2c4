"""An EAGLE-3 drafter: one decoder layer over the embedding of the next token and three hidden states of the target.

Entry i of a sequence sees token i + 1 and the target's taps at position i, and predicts token i + 2. While a server
drafts, further entries have no taps: each takes the hidden state that the entry before it put out. Training unrolls
that (EAGLE-3's training-time test): in draft step s all entries are computed at once as if the last s tokens were
drafts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from benchmarks.miniature.layers import Mlp, Norm, heads_first, heads_last, linear, rotate_halves, rotations
from benchmarks.miniature.shapes import VOCABULARY, DrafterShape


class Projections(nn.Module):
    """Attention's four projections; the input is twice as wide as the output."""

    def __init__(self, hidden: int, shape: DrafterShape) -> None:
        super().__init__()
        self.q_proj = linear(2 * hidden, shape.heads * shape.head)
        self.k_proj = linear(2 * hidden, shape.kv_heads * shape.head)
        self.v_proj = linear(2 * hidden, shape.kv_heads * shape.head)
        self.o_proj = linear(shape.heads * shape.head, hidden, depth=1)


class MidLayer(nn.Module):
    """The decoder layer."""

    def __init__(self, hidden: int, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(hidden)
        self.hidden_norm = Norm(hidden)
        self.self_attn = Projections(hidden, shape)
        self.post_attention_layernorm = Norm(hidden)
        self.mlp = Mlp(hidden, shape.intermediate, depth=1)


class Drafter(nn.Module):
    """Args: `hidden`: the target's hidden size; `kept`: token ids of the draft vocabulary, ascending."""

    def __init__(self, hidden: int, shape: DrafterShape, kept: torch.Tensor) -> None:
        super().__init__()
        self.shape, self._hidden = shape, hidden
        self.fc = linear(3 * hidden, hidden)
        self.midlayer = MidLayer(hidden, shape)
        self.norm = Norm(hidden)
        self.lm_head = linear(hidden, shape.vocabulary)
        self.register_buffer("kept", kept, persistent=False)

    def forward(self, embedded: torch.Tensor, taps: torch.Tensor, *, steps: int) -> Iterator[torch.Tensor]:
        """Logits (batch, length, draft vocabulary) of each draft step; entries below the step's number mean nothing.

        Args:
            embedded: the target's embeddings of the tokens one place on, (batch, length, hidden).
            taps: (batch, length, 3 hidden).
        """
        layer = self.midlayer
        hidden = self.fc(taps)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for _ in range(steps):
            both = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(hidden)], dim=-1)
            hidden = hidden + layer.self_attn.o_proj(self._attend(both, keys, values))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            yield self.lm_head(self.norm(hidden))
            hidden = _later(hidden, 1)

    def _attend(self, both: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
        """Attend to entries with taps, then to one entry of each draft step so far; adds this step's to the lists."""
        shape, attention = self.shape, self.midlayer.self_attn
        length, groups = both.shape[1], shape.heads // shape.kv_heads
        turn = rotations(length, shape.head, like=both)
        query = rotate_halves(heads_first(attention.q_proj(both), shape.heads), *turn)
        key = rotate_halves(heads_first(attention.k_proj(both), shape.kv_heads), *turn)
        keys.append(key.repeat_interleave(groups, dim=1))
        values.append(heads_first(attention.v_proj(both), shape.kv_heads).repeat_interleave(groups, dim=1))
        step = len(keys) - 1
        query = query * shape.head**-0.5
        visible = torch.ones(length, length, dtype=torch.bool, device=both.device).tril(-step)
        scores = [(query @ keys[0].transpose(-1, -2)).masked_fill(~visible, float("-inf"))]
        drafts = [(_later(keys[past], step - past), _later(values[past], step - past)) for past in range(1, step + 1)]
        scores += [(query * own).sum(dim=-1, keepdim=True) for own, _ in drafts]
        shares = torch.cat(scores, dim=-1).float().softmax(dim=-1).to(query.dtype)
        attended = shares[..., :length] @ values[0]
        for place, (_, value) in enumerate(drafts):
            attended = attended + shares[..., length + place, None] * value
        return heads_last(attended)

    def hugging_face(self) -> dict[str, torch.Tensor]:
        """Weights under the names of `LlamaForCausalLMEagle3`, with the maps between both vocabularies.

        `d2t` [draft id]: token id minus draft id. `t2d` [token id]: whether it is in the draft vocabulary.
        """
        kept = self.kept.cpu()
        is_kept = torch.zeros(VOCABULARY, dtype=torch.bool)
        is_kept[kept] = True
        return {**self.state_dict(), "d2t": kept - torch.arange(kept.numel()), "t2d": is_kept}

    def config(self, taps: tuple[int, ...]) -> dict[str, object]:
        """What `config.json` says beside the common part."""
        shape = self.shape
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": self._hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": 1,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head,
            "draft_vocab_size": shape.vocabulary,
            "mlp_bias": False,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(taps), "use_aux_hidden_state": True},
        }


def _later(x: torch.Tensor, places: int) -> torch.Tensor:
    """Move along the length (second to last dimension) by some places, zeros first."""
    if places == 0:
        return x
    return torch.cat([torch.zeros_like(x[..., :places, :]), x[..., :-places, :]], dim=-2)
