"""The valid configurations of a sweep: conditions, derived values, effective forms, launch keys. Pure.

A *suggestion* is one value per dimension, as a sampler draws it. `Space.resolve` turns it into the *effective*
configuration, the form in which equal things are equal: no speculation has no drafter, top-k 1 derives its draft tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from sweeps.spec import Scalar, SweepSpec

Suggestion = Mapping[str, Scalar]
Settings = tuple[tuple[str, str], ...]


class InvalidConfigurationError(ValueError):
    """A suggestion that no server could run. The message carries the rule and its numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimension:
    """One searched or pinned dimension: `num_steps`, `eagle_topk`, `num_draft_tokens`, `drafter`, `nccl`,
    `args.NAME` or `env.NAME`."""

    name: str
    choices: tuple[Scalar, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """One effective configuration. Equal objects are replicates of one point."""

    num_steps: int
    """0: no speculation; then the three below are None."""
    eagle_topk: int | None
    num_draft_tokens: int | None
    drafter: str | None
    nccl_set: str
    """First of the spec's names whose variables these are."""
    nccl_env: Settings
    args: tuple[tuple[str, Scalar], ...] = ()
    """Values of the `args.*` dimensions."""
    env: Settings = ()
    """Values of the `env.*` dimensions."""

    @property
    def speculates(self) -> bool:
        return self.num_steps > 0

    @property
    def configuration_id(self) -> str:
        """`c` and ten hex digits, the same in every sweep that holds this configuration."""
        return "c" + _digest(
            (self.num_steps, self.eagle_topk, self.num_draft_tokens, self.drafter, self.nccl_env, self.args, self.env)
        )

    @property
    def label(self) -> str:
        """Short, for people: `steps 2, top-k 1, nccl founding-six`."""
        head = (
            f"steps {self.num_steps}, top-k {self.eagle_topk}, draft tokens {self.num_draft_tokens}, {self.drafter}"
            if self.speculates
            else "no speculation"
        )
        rest = [f"nccl {self.nccl_set}", *(f"{name} {value}" for name, value in (*self.args, *self.env))]
        return ", ".join([head, *rest])

    def launch_key(self, *, switch_in_place: bool) -> str:
        """Equal for configurations that one live server can serve. `l` and ten hex digits.

        With `switch_in_place`, step counts at top-k 1 share a key; no speculation is always a launch of its own.
        """
        free = switch_in_place and self.speculates and self.eagle_topk == 1
        steps = None if free else (self.num_steps, self.num_draft_tokens)
        return "l" + _digest(
            (self.speculates, steps, self.eagle_topk, self.drafter, self.nccl_env, self.args, self.env)
        )


@dataclass(frozen=True, slots=True)
class Space:
    """Every configuration that a spec asks for."""

    spec: SweepSpec

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        raise NotImplementedError

    def resolve(self, suggestion: Suggestion) -> Configuration:
        """The effective configuration. Raises InvalidConfigurationError with the rule's numbers (`pool 4 < 7`)."""
        raise NotImplementedError

    def suggestions(self) -> Iterator[Suggestion]:
        """The full product of the dimensions, valid or not."""
        names = [dimension.name for dimension in self.dimensions]
        for values in product(*(dimension.choices for dimension in self.dimensions)):
            yield dict(zip(names, values, strict=True))

    def configurations(self) -> tuple[Configuration, ...]:
        """The distinct valid configurations, in the order of the spec."""
        raise NotImplementedError

    def suggestion(self, configuration: Configuration) -> Suggestion:
        """The first suggestion that resolves to `configuration`."""
        raise NotImplementedError

    @property
    def control(self) -> Configuration:
        """No speculation with NCCL set `default` and the first value of every other dimension."""
        raise NotImplementedError

    def launch_key(self, configuration: Configuration) -> str:
        return configuration.launch_key(switch_in_place=self.spec.engine.switch_in_place)

    def step_candidates(self, configuration: Configuration) -> tuple[int, ...]:
        """Step counts of the space that share `configuration`'s launch key, ascending; () where none is switched."""
        raise NotImplementedError


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:10]
