"""Hugging Face folders: `config.json` and `model.safetensors` in bfloat16, as a server loads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.miniature.shapes import NORM_EPSILON, ROPE_BASE, SEPARATOR, VOCABULARY

COMMON: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "rms_norm_eps": NORM_EPSILON,
    "rope_theta": ROPE_BASE,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": SEPARATOR,
    "eos_token_id": SEPARATOR,
}
_FLOAT32 = "e_score_correction_bias"


def write_model(folder: Path, config: Mapping[str, object], weights: Mapping[str, torch.Tensor]) -> None:
    """Write a folder that is complete or not there."""
    unfinished = folder.with_name(folder.name + ".tmp")
    unfinished.mkdir(parents=True, exist_ok=True)
    (unfinished / "config.json").write_text(json.dumps({**COMMON, **config}, indent=2) + "\n", encoding="utf-8")
    save_file(
        {name: _stored(name, weight) for name, weight in weights.items()},
        unfinished / "model.safetensors",
        metadata={"format": "pt"},
    )
    unfinished.rename(folder)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a folder that `write_model` wrote."""
    return load_file(folder / "model.safetensors")


def _stored(name: str, weight: torch.Tensor) -> torch.Tensor:
    kept = weight.dtype if not weight.is_floating_point() else torch.bfloat16
    return weight.detach().cpu().to(torch.float32 if name.endswith(_FLOAT32) else kept).contiguous()
