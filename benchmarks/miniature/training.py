"""One training run: seeded windows, AdamW on float32 copies, a learning rate that rises and falls, a resumable loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from tqdm import tqdm

from benchmarks.miniature.shapes import Stage

_WARM_UP_SHARE = 0.05
_GRADIENT_NORM = 1.0
_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.01
_Model = TypeVar("_Model", bound=nn.Module)
_SHOWN_EVERY = 10
"""Steps between readings of the loss: each waits for the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a run stands."""

    step: int
    share: float
    """0 to 1: of the steps, or of the time limit if that is the larger share."""
    loss: float | None


class Optimizer:
    """AdamW over float32 copies of weights of any type."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._copies = [weight.detach().float().clone().requires_grad_() for weight in self._weights]
        matrices = [copy for copy in self._copies if copy.dim() > 1]
        others = [copy for copy in self._copies if copy.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": _WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(groups, lr=0.0, betas=_BETAS, fused=True)

    def step(self, learning_rate: float) -> None:
        """Apply the gradients of the weights and clear them."""
        for copy, weight in zip(self._copies, self._weights, strict=True):
            copy.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        nn.utils.clip_grad_norm_(self._copies, _GRADIENT_NORM, foreach=True)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._copies)

    def state(self) -> dict[str, object]:
        return {"adam": self._adam.state_dict(), "copies": [copy.detach() for copy in self._copies]}

    def restore(self, state: dict[str, object]) -> None:
        self._adam.load_state_dict(state["adam"])
        with torch.no_grad():
            torch._foreach_copy_(self._copies, state["copies"])


def cast_weights(model: _Model, dtype: torch.dtype) -> _Model:
    """Cast weights, not buffers: an expert's bias moves by steps that bfloat16 would lose."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    return model


def run(
    name: str,
    model: nn.Module,
    stage: Stage,
    loss_of: Callable[[int], torch.Tensor],
    *,
    limit_s: float | None = None,
    checkpoint: Path | None = None,
    checkpoint_every_s: float = 60.0,
    after_step: Callable[[Progress], None] = lambda _: None,
) -> Progress:
    """Train until the stage's steps are done or the time is up.

    Args:
        loss_of: the loss of step n; the same n gives the same data, so a resumed run goes on as if never stopped.
        limit_s: seconds after which the run has ended; the learning rate falls to zero by then.
        checkpoint: file to resume from and to write to, removed by whoever called.
    """
    optimizer, first = Optimizer(model), 0
    if checkpoint is not None and checkpoint.is_file():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.restore(saved["optimizer"])
        first = int(saved["step"])
    began = saved_at = time.monotonic()
    progress = Progress(step=first, share=first / stage.steps, loss=None)
    with tqdm(total=stage.steps, initial=first, desc=name, mininterval=5.0, dynamic_ncols=True) as bar:
        for step in range(first, stage.steps):
            elapsed = time.monotonic() - began
            share = max(step / stage.steps, 0.0 if limit_s is None else elapsed / limit_s)
            if share >= 1.0:
                break
            loss = loss_of(step)
            loss.backward()
            optimizer.step(stage.learning_rate * min(share / _WARM_UP_SHARE + 0.01, 1.0) * (1.0 - share))
            shown = float(loss.detach()) if (step - first) % _SHOWN_EVERY == 0 else progress.loss
            progress = Progress(step=step + 1, share=share, loss=shown)
            after_step(progress)
            bar.update()
            bar.set_postfix_str(f"loss {shown:.3f}, {share:.0%}", refresh=False)
            if checkpoint is not None and time.monotonic() - saved_at > checkpoint_every_s:
                _save(checkpoint, model, optimizer, step + 1)
                saved_at = time.monotonic()
    return progress


def _save(path: Path, model: nn.Module, optimizer: Optimizer, step: int) -> None:
    unfinished = path.with_suffix(".tmp")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state(), "step": step}, unfinished)
    unfinished.rename(path)
