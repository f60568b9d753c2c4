"""What is true in a simulated sweep: each configuration's numbers, without any noise.

All configurations of one truth are a grid of NCCL sets, step counts and top-k values. Speculation changes throughput by
the same share at every step count, so that no scene depends on which step count the search would have preferred. An
NCCL set acts on one phase. A gain of 2 % of throughput shortens the cycle by 1 - 1 / 1.02.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

DEFAULT_SET = "default"
_SET = "set-"
BLOCK_TOKENS = 1000
_ACCURACY = 0.6
"""Conditional accuracy of a prompt in the middle; prompts differ on the logit scale."""
_TREE_BONUS = 0.3
"""What a tree adds to the logit of the accuracy."""
_DRAFT_SHARE, _EXTEND_SHARE = 0.03, 0.03
"""Of a cycle: one draft step, the draft-extend. The rest is verify."""
_GRID = 4001
"""Points of the integral over prompts."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One member of the grid."""

    nccl: str
    num_steps: int
    """0: no speculation."""
    topk: int = 1

    @property
    def speculates(self) -> bool:
        return self.num_steps > 0

    @property
    def set_number(self) -> int:
        """0: the default."""
        return 0 if self.nccl == DEFAULT_SET else int(self.nccl.removeprefix(_SET))

    @property
    def kind(self) -> Literal["plain", "chain", "tree"]:
        return "plain" if not self.speculates else "chain" if self.topk == 1 else "tree"

    @property
    def draft_tokens(self) -> int:
        return self.num_steps + 1 if self.topk == 1 else 4 * self.num_steps

    @property
    def configuration_id(self) -> str:
        return f"{self.nccl}/{self.num_steps}/{self.topk}"

    @property
    def launch_key(self) -> str:
        """Step counts of one top-k share a server."""
        return f"{self.nccl}/{self.kind}/{self.topk}"

    @property
    def label(self) -> str:
        drafts = f"steps {self.num_steps}, top-k {self.topk}" if self.speculates else "no speculation"
        return f"{drafts}, nccl {self.nccl}"


@dataclass(frozen=True, slots=True)
class Gain:
    """What an NCCL set truly does."""

    nccl: str
    relative: float
    """Of throughput; of the draft phase's time, which gets shorter, if that is the phase."""
    topk: int | None = None
    """Only there; None: everywhere."""
    phase: Literal["verify", "draft"] = "verify"
    """What gets faster. `draft`: nothing happens without speculation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    """A grid and its true numbers."""

    num_sets: int = 6
    """The default among them."""
    step_counts: tuple[int, ...] = (0, 1, 2, 3, 4)
    topks: tuple[int, ...] = (1,)
    speculation: float = 0.0
    """Relative change of throughput by speculation, at every step count."""
    per_step: float = 0.0
    """Further relative change per step beyond the first."""
    gains: tuple[Gain, ...] = ()
    plain_ms: float = 10.0
    """A decode step without speculation."""
    requests: int = 1
    """In flight at a time."""
    prompt_sd: float = 0.0
    """Of the prompts' accuracy, in logits."""

    @property
    def sets(self) -> tuple[str, ...]:
        return (DEFAULT_SET, *(f"{_SET}{number}" for number in range(1, self.num_sets)))

    def configurations(self) -> tuple[Configuration, ...]:
        """The grid, the control first."""
        return tuple(
            Configuration(name, steps, topk if steps else 1)
            for name in self.sets
            for steps in self.step_counts
            for topk in (self.topks if steps else (1,))
        )

    def gain(self, of: Configuration) -> float:
        """Relative change of throughput by the NCCL set."""
        found = self._of_set(of.nccl)
        if found is None or (found.topk is not None and not (of.speculates and of.topk == found.topk)):
            return 0.0
        if found.phase == "verify":
            return found.relative
        return 1 / (1 - found.relative * _DRAFT_SHARE * of.num_steps) - 1

    def cycles(self, of: Configuration, prompts: Array) -> Array:
        """Cycles of blocks of BLOCK_TOKENS, by the prompts' deviation in standard deviations. Whole numbers."""
        if not of.speculates:
            return np.full(prompts.shape, float(BLOCK_TOKENS))
        logit = np.log(_ACCURACY / (1 - _ACCURACY)) + (_TREE_BONUS if of.topk > 1 else 0.0) + self.prompt_sd * prompts
        accuracy = 1 / (1 + np.exp(-logit))
        length = np.ones_like(accuracy)
        for _ in range(of.num_steps):
            length = 1 + accuracy * length
        rounded: Array = np.rint(BLOCK_TOKENS / length)
        return rounded

    @cache  # noqa: B019
    def accept_length(self, of: Configuration) -> float:
        """Tokens per cycle over the population of prompts: a ratio of sums."""
        return BLOCK_TOKENS / float(_weights() @ self.cycles(of, _nodes()))

    @cache  # noqa: B019
    def phases_ms(self, of: Configuration) -> dict[str, float]:
        """`draft`, `verify`, `extend` and `cycle`, in milliseconds."""
        usual = self.accept_length(of) * self.plain_ms
        if of.speculates:
            usual /= (1 + self.speculation) * (1 + self.per_step) ** (of.num_steps - 1)
        cycle = usual / (1 + self.gain(of))
        draft = _DRAFT_SHARE * of.num_steps * usual
        extend = _EXTEND_SHARE * usual if of.speculates else 0.0
        gain = self._of_set(of.nccl)
        if gain is not None and gain.phase == "draft" and of.speculates:
            draft -= usual - cycle
        return {"draft": draft, "verify": cycle - draft - extend, "extend": extend, "cycle": cycle}

    def value(self, metric: str, of: Configuration) -> float:
        """True value of `tok_s`, `accept_length` or a phase (`verify_ms`, ...)."""
        length = self.accept_length(of)
        if metric == "accept_length":
            return length
        phases = self.phases_ms(of)
        return (
            1000 * self.requests * length / phases["cycle"] if metric == "tok_s" else phases[metric.removesuffix("_ms")]
        )

    def difference(self, metric: str, of: Configuration, to: Configuration) -> float:
        """Log of the ratio of two configurations."""
        return float(np.log(self.value(metric, of) / self.value(metric, to)))

    def _of_set(self, nccl: str) -> Gain | None:
        return next((gain for gain in self.gains if gain.nccl == nccl), None)

    def contrast(self, metric: str, pairs: Sequence[tuple[Configuration, Configuration]]) -> float:
        """Mean log ratio over pairs, each with the same weight."""
        return float(np.mean([self.difference(metric, of, to) for of, to in pairs]))


@cache
def _nodes() -> Array:
    return np.linspace(-6.0, 6.0, _GRID)


@cache
def _weights() -> Array:
    density = np.exp(-(_nodes() ** 2) / 2)
    weights: Array = density / density.sum()
    return weights
