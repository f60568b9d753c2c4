"""A sweep's YAML as frozen dataclasses: what is asked, on which engine, with which budget.

Reading rejects unknown keys and illegal values with the file, the key, the value and the nearest valid one. What the
values mean together (which configurations exist) is `space`; this module knows only their shape.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

Scalar = bool | int | float | str
EngineKind = Literal["simulated", "sglang", "replay"]
SamplerName = Literal["grid", "random", "tpe", "gp", "cycle_model"]
PrunerName = Literal["none", "median", "successive_halving", "hyperband", "wilcoxon", "cycle_bound"]
Metric = Literal["tok_s", "cycle_ms", "verify_ms"]

DEFAULT_NCCL_SET = "default"
"""Name of the empty NCCL set, which every spec has."""

_STRICT = ConfigDict(extra="forbid")


class SpecError(ValueError):
    """A spec that cannot be run as written. The message names file, key, value and the choices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """Longest wait for each stage of a launch, in seconds."""

    __pydantic_config__ = _STRICT

    load: float = 1800.0
    nccl_init: float = 300.0
    capture: float = 900.0
    draft_init: float = 600.0
    first_request: float = 120.0
    block: float = 600.0
    stop: float = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """Which engine answers, and how it is started."""

    __pydantic_config__ = _STRICT

    kind: EngineKind
    machine: str | None = None
    """simulated: name of a profile in `sweeps/machines/`, or a path to one."""
    noise: float = 1.0
    """simulated: scale of the profile's noise (0 = none)."""
    recording: str | None = None
    """replay: the results folder whose blocks are resampled."""
    python: str | None = None
    """sglang: interpreter of the server; this process's own where absent."""
    launcher: tuple[str, ...] = ()
    """sglang: command put before the interpreter (numactl, a container run)."""
    model_path: str | None = None
    algorithm: str = "EAGLE3"
    """sglang: value of --speculative-algorithm for configurations that speculate."""
    args: Mapping[str, Scalar] = field(default_factory=dict)
    """sglang: further server arguments, names as on the command line without the dashes (`tp-size`: 8)."""
    env: Mapping[str, str] = field(default_factory=dict)
    """sglang: further environment variables of the server."""
    switch_in_place: bool = True
    """Change step counts inside a live server where engine and version can; relaunch otherwise."""
    deadlines_s: Deadlines = field(default_factory=Deadlines)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpec:
    """The dimensions. One value pins a dimension; several are searched."""

    __pydantic_config__ = _STRICT

    num_steps: tuple[int, ...] = (0,)
    """Draft steps per cycle; 0 is no speculation."""
    eagle_topk: tuple[int, ...] = (1,)
    num_draft_tokens: tuple[int, ...] = ()
    """Tokens verified per cycle at top-k > 1; derived (steps + 1) at top-k 1."""
    drafter: tuple[str, ...] = ()
    """Names from `drafters`; the first alone where absent."""
    nccl: tuple[str, ...] = (DEFAULT_NCCL_SET,)
    """Names from `nccl_sets`; `default` is the empty set."""
    args: Mapping[str, tuple[Scalar, ...]] = field(default_factory=dict)
    """Server arguments as dimensions, names as in `engine.args`."""
    env: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Environment variables as dimensions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadSpec:
    """The prompts and blocks that every trial runs, the same in the same order."""

    __pydantic_config__ = _STRICT

    prompts: str = "synthetic"
    """`synthetic`, or a JSON Lines file of `{"prompt": text}` or `{"token_ids": [...]}` rows, relative to the spec."""
    vocabulary: int = 32000
    """synthetic: token ids are drawn below this."""
    prompt_tokens: int = 128
    output_tokens: int = 256
    concurrency: int = 1
    requests_per_block: int = 1
    warmup_blocks: int = 2
    blocks: int = 12
    temperature: float = 0.0
    ignore_eos: bool = True
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A sampler or pruner by name; options go to its constructor."""

    __pydantic_config__ = _STRICT

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class StudySpec:
    """How configurations are chosen, pruned and stopped."""

    __pydantic_config__ = _STRICT

    metric: Metric = "tok_s"
    sampler: Choice = field(default_factory=lambda: Choice(name="grid"))
    pruner: Choice = field(default_factory=lambda: Choice(name="none"))
    seed: int = 0
    max_replicates: int = 1
    """How often one effective configuration may be measured as a candidate."""
    stop_probability: float | None = None
    """End when P(incumbent within `stop_within` of the best) reaches this (cycle_model only)."""
    stop_within: float = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlSpec:
    """The configuration measured again and again: no speculation, NCCL set `default`."""

    __pydantic_config__ = _STRICT

    every: int = 8
    """A control trial after so many candidates (0 = only the first and the last)."""
    incumbent: bool = True
    """Re-measure the incumbent beside each later control."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetSpec:
    """The sweep ends with whichever is reached first."""

    __pydantic_config__ = _STRICT

    trials: int | None = None
    gpu_hours: float | None = None
    wall_hours: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceSpec:
    """What one trial holds alone, on one node."""

    __pydantic_config__ = _STRICT

    gpus: int = 8
    cpus: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetSpec:
    """What speculation should reach; drives the accuracy needed in the report."""

    __pydantic_config__ = _STRICT

    tok_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepSpec:
    """One sweep: one YAML, one Optuna study, one results folder."""

    __pydantic_config__ = _STRICT

    sweep: str
    description: str = ""
    engine: EngineSpec
    search: SearchSpec
    nccl_sets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    drafters: Mapping[str, str] = field(default_factory=dict)
    """Name -> path (sglang) or acceptance profile of the machine (simulated)."""
    workload: WorkloadSpec = field(default_factory=WorkloadSpec)
    study: StudySpec = field(default_factory=StudySpec)
    control: ControlSpec = field(default_factory=ControlSpec)
    budget: BudgetSpec = field(default_factory=BudgetSpec)
    resources: ResourceSpec = field(default_factory=ResourceSpec)
    target: TargetSpec = field(default_factory=TargetSpec)
    acceptance: Literal["measured", "pinned"] = "measured"
    """`pinned`: the server simulates acceptance (rows say so, no recommendation is made from them)."""


def read_spec(path: Path) -> SweepSpec:
    """Read and check one spec file. Raises SpecError."""
    return parse_spec(path.read_text(encoding="utf-8"), source=str(path))


def parse_spec(text: str, *, source: str) -> SweepSpec:
    """Check spec text; `source` is named in errors. Raises SpecError."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SpecError(f"{source}: not valid YAML: {error}") from error
    if not isinstance(document, dict):
        raise SpecError(f"{source}: wanted a mapping with the keys of a sweep, got {type(document).__name__}")
    try:
        return TypeAdapter(SweepSpec).validate_python(document)
    except ValidationError as error:
        raise SpecError(f"{source}: {error}") from error


def fingerprint(text: str) -> str:
    """Twelve hex digits that identify spec text; a results folder accepts only its own."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def nearest(value: str, choices: list[str]) -> str | None:
    """The choice most like `value`, if any is like it."""
    return next(iter(difflib.get_close_matches(value, choices, n=1, cutoff=0.6)), None)
