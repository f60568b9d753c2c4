"""Names that specs, checks and searches share."""

from __future__ import annotations

from typing import Literal

DEFAULT_NCCL_SET = "default"
"""Name of the empty NCCL set, which every spec has."""

DRAFTING = ("num_steps", "eagle_topk", "num_draft_tokens", "drafter")
"""Dimensions that say how is drafted; the last three exist only with speculation."""

SamplerName = Literal["grid", "random", "tpe", "gp", "cycle_model"]

PrunerName = Literal["none", "median", "successive_halving", "hyperband", "wilcoxon", "cycle_bound"]

Acceptance = Literal["measured", "pinned"]
"""Whether servers verify drafts for real, or simulate how many are accepted."""

SIMULATES_ACCEPTANCE = "SGLANG_SIMULATE_"
"""How the names of SGLang's variables for simulated acceptance begin."""

PINNED_LENGTH = "SGLANG_SIMULATE_ACC_LEN"
"""Tokens per cycle, bonus token included; SGLang takes steps + 1 where that is less."""
