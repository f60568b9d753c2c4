"""What must hold between the values of one spec, checked before any GPU second is spent."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sweeps.choices import choose
from sweeps.nccl.grammar import set_problems, variable_problem
from sweeps.redaction import is_secret, is_secret_argument
from sweeps.spec.document import Key, Problem
from sweeps.spec.engine_kinds import ENGINE_KINDS
from sweeps.spec.model import SweepSpec
from sweeps.spec.names import (
    CYCLE_BOUND,
    CYCLE_MODEL,
    DEFAULT_NCCL_SET,
    OPTUNA_PRUNERS,
    OPTUNA_SAMPLERS,
    PINNED_LENGTH,
    SIMULATES_ACCEPTANCE,
)

NEEDS_DRAFTER = frozenset({"EAGLE3", "STANDALONE"})
"""Algorithms whose drafter is a checkpoint of its own; without one SGLang loads the target twice and dies later."""

OWNED_ARGS: Mapping[str, str] = {
    "model-path": "it is engine.model_path",
    "model": "it is engine.model_path",
    "speculative-algorithm": "it is engine.algorithm",
    "speculative-num-steps": "it is the dimension search.num_steps",
    "speculative-eagle-topk": "it is the dimension search.eagle_topk",
    "speculative-num-draft-tokens": "it is the dimension search.num_draft_tokens",
    "speculative-draft-model-path": "it is the dimension search.drafter, with its path in drafters",
    "speculative-draft-model": "it is the dimension search.drafter, with its path in drafters",
    "speculative-adaptive": "the probe builds the states of a server (engine.switch_in_place, engine.states)",
    "speculative-adaptive-config": "the probe builds the states of a server (engine.switch_in_place, engine.states)",
    "host": "the server listens on this machine alone",
    "port": "the operating system is asked for a free one",
    "config": "a second source of arguments could contradict this one",
    "api-key": "the load client sends none, and every user of the machine can read a command line",
    "admin-api-key": "the load client sends none, and every user of the machine can read a command line",
    **dict.fromkeys(
        ("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-keyfile-password", "enable-ssl-refresh"),
        "the load client speaks plain HTTP to this machine alone",
    ),
    **dict.fromkeys(
        ("nnodes", "node-rank", "dist-init-addr", "nccl-init-addr"), "a trial is one server on the GPUs of one node"
    ),
}
"""Server arguments that the sweep sets itself, each with the reason."""

OWNED_ENV: Mapping[str, str] = {
    "CUDA_VISIBLE_DEVICES": "Ray gives each trial its GPUs",
    "CUDA_DEVICE_MAX_CONNECTIONS": "SGLang forces 8 whatever is set",
    "SGLANG_PLUGINS": "the sweep loads its probe through it",
    "RAY_AUTH_TOKEN": "whoever has it may run code on the cluster",
    "RAY_AUTH_TOKEN_PATH": "whoever has it may run code on the cluster",
}


_REPLICATES = frozenset({"dp-size", "dp", "data-parallel-size", "enable-dp-attention"})
"""Server arguments that make several groups of ranks, each with cycles of its own."""
_INHERIT = "a secret belongs in the node's environment, and its variable's name in engine.inherit"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_spec(spec: SweepSpec) -> Iterator[Problem]:
    """Everything wrong with a spec of the right shape, one problem each."""
    for check in (_names, _values, _engine, _models, _args, _nccl_sets, _environment, _acceptance, _workload, _gpus):
        yield from check(spec)


def _names(spec: SweepSpec) -> Iterator[Problem]:
    if not _NAME.fullmatch(spec.sweep):
        yield Problem(
            ("sweep",), f"wanted a name of letters, digits, `.`, `_` and `-` (it names files), got {spec.sweep!r}"
        )
    for index, name in enumerate(spec.search.nccl):
        if name != DEFAULT_NCCL_SET and name not in spec.nccl_sets:
            sets = [DEFAULT_NCCL_SET, *spec.nccl_sets]
            yield Problem(("search", "nccl", index), f"no NCCL set {name!r}; {choose(name, sets)}")
    for index, name in enumerate(spec.search.drafter):
        if name not in spec.drafters:
            yield Problem(("search", "drafter", index), f"no drafter {name!r}; {choose(name, spec.drafters)}")
    for key, given, offered in (
        ("sampler", spec.study.sampler, (*OPTUNA_SAMPLERS, CYCLE_MODEL)),
        ("pruner", spec.study.pruner, (*OPTUNA_PRUNERS, CYCLE_BOUND)),
    ):
        if given.name not in offered:
            yield Problem(("study", key, "name"), f"no {key} {given.name!r}; {choose(given.name, offered)}")


def _values(spec: SweepSpec) -> Iterator[Problem]:
    """Each dimension has values, and none of them twice."""
    search = spec.search
    lists: dict[Key, tuple[Any, ...]] = {
        ("search", "num_steps"): search.num_steps,
        ("search", "eagle_topk"): search.eagle_topk,
        ("search", "nccl"): search.nccl,
        **{("search", "args", name): values for name, values in search.args.items()},
        **{("search", "env", name): values for name, values in search.env.items()},
    }
    for key, values in lists.items():
        if not values:
            yield Problem(key, "wanted at least one value, got an empty list")
    lists[("search", "num_draft_tokens")] = search.num_draft_tokens
    lists[("search", "drafter")] = search.drafter
    for key, values in lists.items():
        for value in (value for value, times in Counter(values).items() if times > 1):
            yield Problem(key, f"{value!r} is there twice (repeats are study.max_replicates)")


def _engine(spec: SweepSpec) -> Iterator[Problem]:
    engine = spec.engine
    needed = ENGINE_KINDS[engine.kind].required_key
    value = getattr(engine, needed)
    if not value:
        yield Problem(("engine", needed), f"wanted one for the {engine.kind} engine, but the key is absent")
    elif needed == "recording" and not Path(value).is_dir():
        yield Problem(("engine", "recording"), f"wanted a results folder, but {engine.recording} is not a folder")


def _models(spec: SweepSpec) -> Iterator[Problem]:
    """On the real engine: a local checkpoint exists; a name without a leading slash is left to the model hub."""
    engine = spec.engine
    if engine.is_virtual:
        return
    speculates = any(steps > 0 for steps in spec.search.num_steps)
    if speculates and engine.algorithm.upper() in NEEDS_DRAFTER and not spec.drafters:
        yield Problem(("drafters",), f"wanted a drafter: {engine.algorithm} cannot speculate without its checkpoint")
    paths: dict[Key, str] = {("drafters", name): path for name, path in spec.drafters.items()}
    if engine.model_path:
        paths["engine", "model_path"] = engine.model_path
    for key, path in paths.items():
        if not path.strip():
            yield Problem(key, "wanted a path or a model's name on the hub, got nothing")
        elif Path(path).is_absolute() and not Path(path).exists():
            yield Problem(key, f"wanted a checkpoint, but {path} does not exist")


def _args(spec: SweepSpec) -> Iterator[Problem]:
    for section, names in (("engine", spec.engine.args), ("search", spec.search.args)):
        for name in names:
            bare = name.lstrip("-").replace("_", "-")
            if bare in OWNED_ARGS:
                yield Problem((section, "args", name), f"the sweep sets this argument: {OWNED_ARGS[bare]}")
            elif is_secret_argument(bare):
                yield Problem((section, "args", name), f"every user of the machine can read a command line; {_INHERIT}")
            elif bare != name:
                yield Problem(
                    (section, "args", name), f"wanted the command line's name without dashes in front: {bare}"
                )
    for section, arguments in (("engine", spec.engine.args), ("search", spec.search.args)):
        for name in sorted(_REPLICATES & arguments.keys()):
            yield Problem(
                (section, "args", name),
                "not supported: data parallel ranks run cycles of their own, and the probe tells one group's alone",
            )
    for name in spec.search.args.keys() & spec.engine.args.keys():
        yield Problem(("search", "args", name), "set in engine.args too: write it in one place")


def _nccl_sets(spec: SweepSpec) -> Iterator[Problem]:
    for name, variables in spec.nccl_sets.items():
        if name == DEFAULT_NCCL_SET:
            yield Problem(("nccl_sets", name), "`default` is the empty set and cannot be written: take another name")
        for variable, message in set_problems(variables, allow_unknown=spec.allow_unknown_nccl):
            owner = "" if variable.startswith("NCCL_") else "; other variables go to engine.env or search.env"
            yield Problem(("nccl_sets", name, variable), message + owner)
        yield from _missing_files(spec, ("nccl_sets", name), variables)


def _environment(spec: SweepSpec) -> Iterator[Problem]:
    fixed = [(("engine", "env", name), name, (value,)) for name, value in spec.engine.env.items()]
    searched = [(("search", "env", name), name, values) for name, values in spec.search.env.items()]
    for key, name, values in (*fixed, *searched):
        if name in OWNED_ENV:
            yield Problem(key, f"cannot be set here: {OWNED_ENV[name]}")
        elif not _ENV_NAME.fullmatch(name):
            yield Problem(key, f"wanted the name of an environment variable, got {name!r}")
        elif name.startswith("NCCL_"):
            found = (variable_problem(name, value, allow_unknown=spec.allow_unknown_nccl) for value in values)
            yield from (Problem(key, message) for message in found if message)
        elif key[0] == "search" and is_secret(name):
            yield Problem(key, f"wanted no secret as a dimension, because every table names its value; {_INHERIT}")
    for index, name in enumerate(spec.engine.inherit):
        if name in OWNED_ENV:
            yield Problem(("engine", "inherit", index), f"{name} cannot be inherited: {OWNED_ENV[name]}")
        elif not _ENV_NAME.fullmatch(name):
            yield Problem(("engine", "inherit", index), f"wanted the name of an environment variable, got {name!r}")
    yield from _missing_files(spec, ("engine", "env"), spec.engine.env)
    yield from _set_in_two_places(spec)


def _set_in_two_places(spec: SweepSpec) -> Iterator[Problem]:
    """A variable has one owner: which of two values a server got would depend on the order of merging."""
    for name in spec.search.env.keys() & spec.engine.env.keys():
        yield Problem(("search", "env", name), "set in engine.env too: write it in one place")
    for index, name in enumerate(spec.engine.inherit):
        sets = {f"nccl_sets.{given}": variables for given, variables in spec.nccl_sets.items()}
        for place, names in {"engine.env": spec.engine.env, "search.env": spec.search.env, **sets}.items():
            if name in names:
                yield Problem(("engine", "inherit", index), f"{name} is set in {place} too: write it in one place")
    for set_name in (name for name in spec.search.nccl if name in spec.nccl_sets):
        for section, names in (("engine", spec.engine.env), ("search", spec.search.env)):
            for name in spec.nccl_sets[set_name].keys() & names.keys():
                yield Problem(("nccl_sets", set_name, name), f"set in {section}.env too: write it in one place")


def _missing_files(spec: SweepSpec, key: Key, variables: Mapping[str, str]) -> Iterator[Problem]:
    """NCCL passes over a topology or graph file that it cannot open."""
    for name in ("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE", "NCCL_CONF_FILE"):
        path = None if spec.engine.is_virtual else variables.get(name)
        if path and Path(path).is_absolute() and not Path(path).is_file():
            yield Problem((*key, name), f"wanted a file, but {path} does not exist")


def _acceptance(spec: SweepSpec) -> Iterator[Problem]:
    stated = spec.acceptance
    if stated == "measured":
        for section, names in (("engine", spec.engine.env), ("search", spec.search.env)):
            for name in (name for name in names if name.startswith(SIMULATES_ACCEPTANCE)):
                yield Problem((section, "env", name), "simulates acceptance: say so with acceptance: pinned")
    length = spec.engine.env.get(PINNED_LENGTH)
    if length is None:
        if stated == "pinned" and not spec.engine.is_virtual:
            yield Problem(("acceptance",), f"`{stated}` wants the accept length in engine.env as {PINNED_LENGTH}")
    elif stated != "measured" and not _is_length(length):
        yield Problem(
            ("engine", "env", PINNED_LENGTH),
            f"wanted tokens per cycle, bonus token included (1 or more), got {length!r}",
        )


def _is_length(value: str) -> bool:
    try:
        return 1.0 <= float(value) < float("inf")
    except ValueError:
        return False


_LIMITS_OF_CONCURRENCY = {
    "max-running-requests": "further requests would wait",
    "cuda-graph-max-bs": "larger batches would run without CUDA graphs",
}
"""Server arguments that bound the batch, and what happens beyond."""


def _workload(spec: SweepSpec) -> Iterator[Problem]:
    workload = spec.workload
    most = max(workload.concurrency, default=0)
    if not workload.concurrency:
        yield Problem(("workload", "concurrency"), "wanted at least one value")
    if len(set(workload.concurrency)) < len(workload.concurrency):
        yield Problem(("workload", "concurrency"), f"wanted each number once, got {list(workload.concurrency)}")
    for name, then in _LIMITS_OF_CONCURRENCY.items():
        if (small := min(_sizes(spec, name), default=most)) < most:
            yield Problem(("workload", "concurrency"), f"{most} requests at a time, but {name} is {small}: {then}")
    if Path(workload.prompts).is_absolute() and not Path(workload.prompts).is_file():
        yield Problem(("workload", "prompts"), f"wanted `synthetic` or a file, but {workload.prompts} does not exist")


def _gpus(spec: SweepSpec) -> Iterator[Problem]:
    if not spec.engine.needs_gpus:
        return
    widest = 1
    for names in (("tp-size", "tp", "tensor-parallel-size"), ("pp-size", "pp", "pipeline-parallel-size")):
        widest *= max((size for name in names for size in _sizes(spec, name)), default=1)
    if widest > spec.resources.gpus:
        yield Problem(
            ("resources", "gpus"),
            f"the server's tp-size x pp-size is {widest}, but a trial holds {spec.resources.gpus}",
        )


def _sizes(spec: SweepSpec, name: str) -> Iterable[int]:
    given = spec.search.args.get(name, (spec.engine.args[name],) if name in spec.engine.args else ())
    return (int(size) for size in given if isinstance(size, int))
