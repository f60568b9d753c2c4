"""Names that specs, checks and searches share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

DEFAULT_NCCL_SET = "default"
"""Name of the empty NCCL set, which every spec has."""

DRAFTING = ("num_steps", "eagle_topk", "num_draft_tokens", "drafter")
"""Dimensions of drafting; the last three exist only with speculation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FromOptuna:
    """A sampler or pruner of Optuna under the name that specs give it."""

    class_name: str
    """In `optuna.samplers` or `optuna.pruners`."""
    needs: tuple[str, ...] = ()
    """Modules that it imports and that Optuna does not install."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Options that it always gets."""


OPTUNA_SAMPLERS: Mapping[str, FromOptuna] = {
    # `grid` is the study's own enumeration (Optuna's does not know the conditions); its sampler only fills in.
    "grid": FromOptuna(class_name="RandomSampler"),
    "random": FromOptuna(class_name="RandomSampler"),
    "tpe": FromOptuna(class_name="TPESampler"),
    "gp": FromOptuna(class_name="GPSampler", needs=("torch", "scipy"), options={"warn_independent_sampling": False}),
}
"""A row here is all that a further sampler of Optuna needs."""

OPTUNA_PRUNERS: Mapping[str, FromOptuna] = {
    "none": FromOptuna(class_name="NopPruner"),
    "median": FromOptuna(class_name="MedianPruner"),
    "successive_halving": FromOptuna(class_name="SuccessiveHalvingPruner"),
    "hyperband": FromOptuna(class_name="HyperbandPruner"),
    "wilcoxon": FromOptuna(class_name="WilcoxonPruner", needs=("scipy",)),
}
"""A row here is all that a further pruner of Optuna needs."""

CYCLE_MODEL = "cycle_model"
"""Our sampler."""

CYCLE_BOUND = "cycle_bound"
"""Our pruner."""

Acceptance = Literal["measured", "pinned"]
"""Whether servers verify drafts for real, or simulate how many are accepted."""

SIMULATES_ACCEPTANCE = "SGLANG_SIMULATE_"
"""How the names of SGLang's variables for simulated acceptance begin."""

PINNED_LENGTH = "SGLANG_SIMULATE_ACC_LEN"
"""Tokens per cycle, bonus token included; SGLang takes steps + 1 if that is less."""
