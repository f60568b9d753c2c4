"""Layers that targets and drafter share. Attributes are named as in Hugging Face files: a state dict is the file."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks.miniature.shapes import NORM_EPSILON, ROPE_BASE

INITIAL_STD = 0.02


class Norm(nn.Module):
    """Root-mean-square norm with a weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, NORM_EPSILON)


class Mlp(nn.Module):
    """Gated MLP with SiLU."""

    def __init__(self, hidden: int, intermediate: int, *, depth: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden, intermediate)
        self.up_proj = linear(hidden, intermediate)
        self.down_proj = linear(intermediate, hidden, depth=depth)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def linear(inputs: int, outputs: int, *, depth: int = 0) -> nn.Linear:
    """A projection without bias. `depth`: layers of a residual stream that it writes to, which scales it down."""
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(made.weight, std=INITIAL_STD / (2 * depth) ** 0.5 if depth else INITIAL_STD)
    return made


def rotations(length: int, size: int, *, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of rotary positions, (length, size / 2) each."""
    frequencies = ROPE_BASE ** (-torch.arange(0, size, 2, device=like.device, dtype=torch.float32) / size)
    angles = torch.arange(length, device=like.device, dtype=torch.float32)[:, None] * frequencies
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate_halves(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary positions as Llama pairs them: element i with element i + size / 2. `x` is (..., length, size)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


def rotate_neighbours(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary positions as DeepSeek-V3 pairs them: element 2 i with element 2 i + 1."""
    first, second = x[..., 0::2], x[..., 1::2]
    turned = torch.stack([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
    return turned.flatten(-2)


def heads_first(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(batch, length, heads * size) to (batch, heads, length, size)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def heads_last(x: torch.Tensor) -> torch.Tensor:
    """The inverse of `heads_first`."""
    return x.transpose(1, 2).flatten(-2)
