"""When each part of a configuration binds: at process start, or at graph capture. Pure.

What binds at process start needs a launch. What binds at graph capture is a *state*: one live server holds many, and
switches between them while it is idle. The calls are the same in SGLang 0.5.16 to 0.5.23.

| part of a configuration              | binds at      | because                                                   |
|--------------------------------------|---------------|-----------------------------------------------------------|
| speculation or none                  | process start | another worker serves it, and a drafter is loaded         |
| drafter                              | process start | weights of the draft worker                               |
| steps and draft tokens               | graph capture | each pair has graphs; the server starts with the largest  |
| top-k                                | graph capture | likewise, with `engine.states.top_k` and a named backend; |
|                                      | process start | else SGLang chooses an attention backend by top-k         |
| NCCL set                             | graph capture | a graph replays the communicator that it was captured with |
| SGLang's custom all-reduce or NCCL   | graph capture | likewise                                                  |
| NCCL variables of `AT_START`         | process start | plugins and logs belong to the process                    |
| further arguments and variables      | process start | read once by the server                                   |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sweeps.spec.model import EngineSpec, Scalar

CUSTOM_ALL_REDUCE_OFF = "disable-custom-all-reduce"
"""Server argument that leaves the all-reduces of a decode to NCCL."""
ATTENTION_BACKEND = "attention-backend"
"""Server argument without which SGLang picks an attention backend at process start, by top-k among other things."""
AT_START = frozenset({"NCCL_CONF_FILE", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"})
"""NCCL variables that act outside communicators. So do plugins (`NCCL_*_PLUGIN`) and names that NCCL does not own."""

_NO_GRAPHS = ("disable-cuda-graph", "enable-two-batch-overlap")
"""Server arguments under which a decode does not replay graphs of the tensor-parallel group alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What one live server may hold as states."""

    steps: bool = False
    """Steps and draft tokens at top-k 1."""
    trees: bool = False
    """Steps and draft tokens at a top-k above 1."""
    top_k: bool = False
    """Several values of top-k; then `steps` and `trees` hold too."""
    nccl: bool = False
    all_reduce: bool = False


def held_by(engine: EngineSpec) -> Held:
    """What a server of this engine may hold, by its spec. A version without the hooks is found out at its launch."""
    replays = not any(_is_on(engine.args, name) for name in _NO_GRAPHS)
    states = engine.states
    trees = engine.switch_in_place and states.trees
    return Held(
        steps=engine.switch_in_place,
        trees=trees,
        top_k=trees and states.top_k and ATTENTION_BACKEND in (_canonical(name) for name in engine.args),
        nccl=states.nccl and replays,
        all_reduce=states.all_reduce and replays,
    )


def binds_at_start(variables: Iterable[str]) -> bool:
    """Whether one of these variables of an NCCL set acts outside communicators."""
    return any(not name.startswith("NCCL_") or name in AT_START or name.endswith("_PLUGIN") for name in variables)


def _is_on(arguments: Mapping[str, Scalar], name: str) -> bool:
    return any(_canonical(key) == name and value is not False for key, value in arguments.items())


def _canonical(name: str) -> str:
    return name.lstrip("-").replace("_", "-")
