"""Which states one server shall hold, and what it is launched with so that it can. Pure.

The probe's `states` module reads `StatePlan.document()` in every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sweeps.engines.sglang.versions import STATE_ALGORITHMS
from sweeps.spec.binding import CUSTOM_ALL_REDUCE_OFF
from sweeps.spec.model import EngineSpec
from sweeps.spec.names import DEFAULT_NCCL_SET
from sweeps.spec.space import Configuration


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What one state's graphs are captured with."""

    name: str
    num_steps: int
    eagle_topk: int
    """1 without speculation."""
    num_draft_tokens: int
    """Tokens verified per cycle; 1 without speculation."""
    communicator: str | None
    """NCCL set with a communicator of its own; None: the one that the server was launched with."""
    custom: bool
    """SGLang's custom all-reduce if it applies; NCCL alone otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePlan:
    """The states of one server, the first one's first."""

    launched: Configuration
    """What the server is launched with (`launched_configuration`)."""
    states: tuple[State, ...]
    communicators: Mapping[str, Mapping[str, str]]
    """NCCL set -> its variables."""
    first: str
    """Name of the state of the configuration that the server is launched for."""
    deadline_s: float
    """Longest wait for one communicator."""

    def state_of(self, configuration: Configuration) -> State | None:
        """The state that serves `configuration`; None if the plan has none."""
        name = state_name(configuration)
        return next((state for state in self.states if state.name == name), None)

    def without(self, communicator: str) -> StatePlan:
        """The plan without a set whose communicator does not come up."""
        return replace(
            self,
            states=tuple(state for state in self.states if state.communicator != communicator),
            communicators={name: each for name, each in self.communicators.items() if name != communicator},
        )

    def document(self) -> dict[str, Any]:
        """As the probe reads it."""
        return {
            "first": self.first,
            "deadline_s": self.deadline_s,
            "communicators": {name: dict(variables) for name, variables in self.communicators.items()},
            "states": [
                {
                    "name": state.name,
                    "num_steps": state.num_steps,
                    "eagle_topk": state.eagle_topk,
                    "num_draft_tokens": state.num_draft_tokens,
                    "communicator": state.communicator,
                    "custom": state.custom,
                }
                for state in self.states
            ],
        }


def plan_states(
    engine: EngineSpec,
    configuration: Configuration,
    states: Iterable[Configuration],
    *,
    refused: frozenset[str] = frozenset(),
) -> StatePlan | None:
    """States for a server that is launched for `configuration`; None if its own is all there is.

    Args:
        states: further configurations of the same launch key. The server gets no more than `states.max_per_server`.
        refused: NCCL sets whose communicator did not come up in an earlier server of this node.
    """
    if configuration.speculates and engine.algorithm not in STATE_ALGORITHMS:
        return None
    limit = None if engine.states.max_per_server == "auto" else engine.states.max_per_server
    wanted = [each for each in dict.fromkeys((configuration, *states)) if each.nccl_set not in refused][:limit]
    if len(wanted) < 2 or wanted[0] != configuration:
        return None
    launched = launched_configuration(configuration, wanted)
    found = {state_name(each): _state(each, launched) for each in wanted}
    used = {state.communicator for state in found.values()}
    return StatePlan(
        launched=launched,
        states=tuple(found.values()),
        communicators={each.nccl_set: dict(each.nccl_env) for each in wanted if each.nccl_set in used},
        first=state_name(configuration),
        deadline_s=engine.states.init_deadline_s,
    )


def launched_configuration(configuration: Configuration, states: Iterable[Configuration]) -> Configuration:
    """What a server is launched with so that it can hold `states` beside `configuration`.

    The largest steps, top-k and draft tokens, because buffers are sized by them; NCCL as it is, because each set brings
    its own communicator; custom all-reduce on if any state uses it. `configuration` itself if it is alone.
    """
    every = (configuration, *states)
    if len(set(every)) == 1:
        return configuration
    any_custom = not all(each.custom_all_reduce_off for each in every)
    args = tuple(
        (name, False) if name == CUSTOM_ALL_REDUCE_OFF and any_custom else (name, value)
        for name, value in configuration.args
    )
    alone = len({each.nccl_env for each in every}) == 1
    launched = replace(configuration, args=args)
    if not alone:
        launched = replace(launched, nccl_set=DEFAULT_NCCL_SET, nccl_env=())
    if not configuration.speculates:
        return launched
    return replace(
        launched,
        num_steps=max(each.num_steps for each in every),
        eagle_topk=max(each.eagle_topk or 1 for each in every),
        num_draft_tokens=max(each.num_draft_tokens or 1 for each in every),
    )


def state_name(configuration: Configuration) -> str:
    """`3x4-custom-default`, `3x8k2-custom-default`: steps, draft tokens, top-k above 1, all-reduce, NCCL set.

    A file name, too.
    """
    backend = "nccl" if configuration.custom_all_reduce_off else "custom"
    top_k = f"k{configuration.eagle_topk}" if (configuration.eagle_topk or 1) > 1 else ""
    shape = f"{configuration.num_steps}x{configuration.num_draft_tokens or 1}{top_k}"
    return f"{shape}-{backend}-{configuration.nccl_set}"


def _state(configuration: Configuration, launched: Configuration) -> State:
    """A set that the server was not launched with gets a communicator. So does NCCL beside custom all-reduce, so that
    its log holds the decode's operations of NCCL alone."""
    beside_custom = configuration.custom_all_reduce_off != launched.custom_all_reduce_off
    own_communicator = configuration.nccl_env != launched.nccl_env or beside_custom
    return State(
        name=state_name(configuration),
        num_steps=configuration.num_steps,
        eagle_topk=configuration.eagle_topk or 1,
        num_draft_tokens=configuration.num_draft_tokens or 1,
        communicator=configuration.nccl_set if own_communicator else None,
        custom=not configuration.custom_all_reduce_off,
    )
