"""The valid configurations of a sweep: conditions, derived values, effective forms, launch keys. Pure.

A *suggestion* is one value per dimension, as a sampler draws it. `Space.resolve` turns it into the *effective*
configuration, the form in which equal things are equal: no speculation has no drafter, top-k 1 derives its draft
tokens, NCCL names with the same variables are one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod

from sweeps import SpecsweepError
from sweeps.nccl.grammar import canonical
from sweeps.spec.binding import CUSTOM_ALL_REDUCE_OFF, Held, binds_at_start, held_by
from sweeps.spec.document import SpecError
from sweeps.spec.model import Scalar, SweepSpec
from sweeps.spec.names import DEFAULT_NCCL_SET, DRAFTING

Suggestion = Mapping[str, Scalar]
Settings = tuple[tuple[str, str], ...]

TREE_DRAFT_TOKENS = 8
"""Tokens verified per cycle at top-k > 1 if the spec gives none: the usual tree size of published EAGLE settings."""

MAX_SUGGESTIONS = 200_000
"""Largest product of dimensions that is enumerated (a few seconds)."""


class InvalidConfigurationError(SpecsweepError, ValueError):
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
    def drafting(self) -> tuple[int | str | None, ...]:
        """Values of DRAFTING: all that accept length depends on."""
        return self.num_steps, self.eagle_topk, self.num_draft_tokens, self.drafter

    @property
    def server_settings(self) -> tuple[tuple[tuple[str, Scalar], ...], Settings]:
        """Searched arguments and variables of the server: equal if only drafting and NCCL set differ."""
        return self.args, self.env

    @property
    def nccl_and_server_settings(self) -> tuple[Settings, tuple[tuple[str, Scalar], ...], Settings]:
        """All but drafting: equal if only that differs."""
        return self.nccl_env, self.args, self.env

    @property
    def is_chain(self) -> bool:
        """Drafts one token after another (top-k 1): its step count can be switched in a live server."""
        return self.speculates and self.eagle_topk == 1

    def target_alone(self) -> Configuration:
        """The same settings without speculation."""
        return replace(self, num_steps=0, eagle_topk=None, num_draft_tokens=None, drafter=None)

    @property
    def configuration_id(self) -> str:
        """`c` and ten hex digits, the same in every sweep that holds this configuration."""
        return "c" + _digest((*self.drafting, *self.nccl_and_server_settings))

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

    @property
    def custom_all_reduce_off(self) -> bool:
        """Whether the configuration leaves the all-reduces of a decode to NCCL."""
        return any(name == CUSTOM_ALL_REDUCE_OFF and value is not False for name, value in self.args)

    def launch_key(self, held: Held) -> str:
        """Equal for configurations that one live server can serve. `l` and ten hex digits.

        What a server holds as states is left out. No speculation is always a launch of its own.
        """
        free = held.steps if self.is_chain else held.trees and self.speculates
        steps = None if free else (self.num_steps, self.num_draft_tokens)
        nccl_env = () if held.nccl and not binds_at_start(dict(self.nccl_env)) else self.nccl_env
        args = tuple(each for each in self.args if not (held.all_reduce and each[0] == CUSTOM_ALL_REDUCE_OFF))
        top_k = None if held.top_k else self.eagle_topk
        key = (self.speculates, steps, top_k, self.drafter, nccl_env, args, self.env)
        return "l" + _digest(key)


@dataclass(frozen=True)  # no slots: the enumerations are cached in the instance
class Space:
    """Every configuration that a spec asks for."""

    spec: SweepSpec

    @cached_property
    def dimensions(self) -> tuple[Dimension, ...]:
        """In a fixed order, NCCL last so that a grid's neighbours differ in it alone.

        `num_draft_tokens` and `drafter` only if the spec has values for them.
        """
        search = self.spec.search
        named: list[tuple[str, tuple[Scalar, ...]]] = [
            ("num_steps", search.num_steps),
            ("eagle_topk", search.eagle_topk),
            ("num_draft_tokens", search.num_draft_tokens),
            ("drafter", search.drafter or tuple(self.spec.drafters)[:1]),
            *((f"args.{name}", values) for name, values in search.args.items()),
            *((f"env.{name}", values) for name, values in search.env.items()),
            ("nccl", search.nccl),
        ]
        return tuple(Dimension(name=name, choices=choices) for name, choices in named if choices)

    def resolve(self, suggestion: Suggestion) -> Configuration:
        """The effective configuration. A dimension with one choice may be left out of the suggestion.

        Raises InvalidConfigurationError with the rule's numbers (`pool 4 < 7`).
        """
        num_steps = int(self._value(suggestion, "num_steps"))
        nccl_set, nccl_env = self._nccl[self._known_nccl(str(self._value(suggestion, "nccl")))]
        eagle_topk = num_draft_tokens = drafter = None
        if num_steps > 0:
            eagle_topk = int(self._value(suggestion, "eagle_topk"))
            num_draft_tokens = self._draft_tokens(suggestion, num_steps, eagle_topk)
            drafter = str(self._value(suggestion, "drafter")) if "drafter" in self._choices else None
        return Configuration(
            num_steps=num_steps,
            eagle_topk=eagle_topk,
            num_draft_tokens=num_draft_tokens,
            drafter=drafter,
            nccl_set=nccl_set,
            nccl_env=nccl_env,
            args=tuple((name, self._value(suggestion, f"args.{name}")) for name in self.spec.search.args),
            env=tuple((name, str(self._value(suggestion, f"env.{name}"))) for name in self.spec.search.env),
        )

    def suggestions(self) -> Iterator[Suggestion]:
        """The full product of the dimensions, valid or not."""
        names = [dimension.name for dimension in self.dimensions]
        for values in product(*(dimension.choices for dimension in self.dimensions)):
            yield dict(zip(names, values, strict=True))

    def configurations(self) -> tuple[Configuration, ...]:
        """The distinct valid configurations, in the order of the spec."""
        return self._configurations

    def invalid(self) -> tuple[tuple[Suggestion, str], ...]:
        """The suggestions that resolve to nothing, each with its reason."""
        return self._enumeration[1]

    def suggestion(self, configuration: Configuration) -> Suggestion:
        """The first suggestion that resolves to `configuration`; outside the space (the control) its own values."""
        if (known := self._enumeration[0].get(configuration)) is not None:
            return known
        own: dict[str, Scalar | None] = {
            **dict(zip(DRAFTING, configuration.drafting, strict=True)),
            "nccl": configuration.nccl_set,
            **{f"args.{name}": value for name, value in configuration.args},
            **{f"env.{name}": value for name, value in configuration.env},
        }
        return {d.name: d.choices[0] if (value := own.get(d.name)) is None else value for d in self.dimensions}

    @cached_property
    def control(self) -> Configuration:
        """No speculation with NCCL set `default` and the first value of every other dimension."""
        first = {dimension.name: dimension.choices[0] for dimension in self.dimensions}
        return self.resolve({**first, "num_steps": 0, "nccl": DEFAULT_NCCL_SET})

    @cached_property
    def held(self) -> Held:
        """What one live server may hold as states."""
        return held_by(self.spec.engine)

    def launch_key(self, configuration: Configuration) -> str:
        return configuration.launch_key(self.held)

    def states(self, configuration: Configuration) -> tuple[Configuration, ...]:
        """Configurations that a server launched for `configuration` shall be able to switch to, in the space's order.

        () if there is none but its own. With `control.in_server`, a chain's server also holds its target alone.
        """
        found = [*self._by_launch_key.get(self.launch_key(configuration), ())]
        if self.spec.control.in_server and self.held.steps and configuration.is_chain:
            found += dict.fromkeys(each.target_alone() for each in (*found, configuration))
        others = [each for each in found if each != configuration]
        return tuple(found) if others else ()

    def alone_key(self, configuration: Configuration) -> str:
        """Launch key of a server that serves `configuration` alone, as a user would start it.

        The winner is launched so once: its NCCL variables stand in the environment of the whole process.
        """
        return configuration.launch_key(Held())

    @cached_property
    def _choices(self) -> dict[str, tuple[Scalar, ...]]:
        return {dimension.name: dimension.choices for dimension in self.dimensions}

    @cached_property
    def _nccl(self) -> dict[str, tuple[str, Settings]]:
        """Each NCCL name with the first name of the same variables, and these, sorted."""
        names = dict.fromkeys((DEFAULT_NCCL_SET, *self.spec.search.nccl, *self.spec.nccl_sets))
        first: dict[Settings, str] = {}
        settings = {name: nccl_env(self.spec, name) for name in names}
        return {name: (first.setdefault(env, name), env) for name, env in settings.items()}

    @cached_property
    def _enumeration(self) -> tuple[dict[Configuration, Suggestion], tuple[tuple[Suggestion, str], ...]]:
        size = prod(len(dimension.choices) for dimension in self.dimensions)
        if size > MAX_SUGGESTIONS:
            raise SpecError(f"search: {size:,} combinations, wanted at most {MAX_SUGGESTIONS:,}: pin some dimensions")
        valid: dict[Configuration, Suggestion] = {}
        invalid = []
        for suggestion in self.suggestions():
            try:
                valid.setdefault(self.resolve(suggestion), suggestion)
            except InvalidConfigurationError as error:
                invalid.append((suggestion, str(error)))
        return valid, tuple(invalid)

    @cached_property
    def _configurations(self) -> tuple[Configuration, ...]:
        return tuple(self._enumeration[0])

    @cached_property
    def _by_launch_key(self) -> dict[str, tuple[Configuration, ...]]:
        members: dict[str, tuple[Configuration, ...]] = {}
        for configuration in self.configurations():
            key = self.launch_key(configuration)
            members[key] = (*members.get(key, ()), configuration)
        return members

    def _value(self, suggestion: Suggestion, name: str) -> Scalar:
        if name in suggestion:
            return suggestion[name]
        choices = self._choices[name]
        if len(choices) > 1:
            raise InvalidConfigurationError(f"{name}: wanted one of {list(choices)}, but the suggestion has none")
        return choices[0]

    def _known_nccl(self, name: str) -> str:
        if name not in self._nccl:
            raise InvalidConfigurationError(f"nccl: no set {name!r}; there are {', '.join(self._nccl)}")
        return name

    def _draft_tokens(self, suggestion: Suggestion, num_steps: int, eagle_topk: int) -> int:
        if eagle_topk == 1:
            return num_steps + 1
        pool = candidate_pool(num_steps, eagle_topk)
        if "num_draft_tokens" not in self._choices:
            return min(pool + 1, max(TREE_DRAFT_TOKENS, num_steps + 1))
        num_draft_tokens = int(self._value(suggestion, "num_draft_tokens"))
        if pool < num_draft_tokens - 1:
            raise InvalidConfigurationError(
                f"steps {num_steps}, top-k {eagle_topk}, draft tokens {num_draft_tokens}: "
                f"pool {pool} < {num_draft_tokens - 1} (the drafter offers too few candidates)"
            )
        if num_draft_tokens < num_steps + 1:
            # SGLang 0.5.17 starts and dies in the first draft-extend: it pads accepted tokens to steps + 1
            raise InvalidConfigurationError(
                f"steps {num_steps}, top-k {eagle_topk}, draft tokens {num_draft_tokens}: "
                f"{num_draft_tokens} < {num_steps + 1} (a whole accepted path does not fit)"
            )
        return num_draft_tokens


def candidate_pool(num_steps: int, eagle_topk: int) -> int:
    """Candidates that a draft tree offers: top-k in its first step, top-k squared in each later one."""
    return eagle_topk + (num_steps - 1) * eagle_topk**2


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:10]


def nccl_env(spec: SweepSpec, set_name: str) -> tuple[tuple[str, str], ...]:
    """The variables of a named set, sorted, values in canonical form; `default` is empty."""
    return tuple(sorted((name, canonical(name, value)) for name, value in spec.nccl_sets.get(set_name, {}).items()))
