"""A sweep's YAML as frozen dataclasses: what is asked, on which engine, with which budget.

Reading rejects unknown keys and illegal values with the file, the key, the value and the nearest valid one. This module
knows the shape of a spec, `checks` what must hold between its values, `space` which configurations exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, Strict

from sweeps.spec.engine_kinds import ENGINE_KINDS, EngineKind
from sweeps.spec.names import DEFAULT_NCCL_SET, Acceptance

Scalar = bool | int | float | str
Metric = Literal["tok_s", "cycle_ms", "verify_ms"]
Traced = Literal["every_trial", "every_launch", "controls", "never"]


_STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True)


def _as_text(value: object) -> object:
    """YAML reads `NCCL_NTHREADS: 512` as a number; an environment holds text."""
    if isinstance(value, bool):
        raise ValueError('wanted the text of an environment variable: quote it ("true", "on") or write 0 or 1')
    return repr(value) if isinstance(value, int | float) else value


def _as_list(value: object) -> object:
    """`concurrency: 1` is `concurrency: [1]`."""
    return (value,) if isinstance(value, int) else value


Count = Annotated[int, Strict(), Field(ge=0)]
AtLeastOne = Annotated[int, Strict(), Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, lt=1)]
EnvValue = Annotated[str, BeforeValidator(_as_text, json_schema_input_type=str | int | float)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """Longest wait for each stage of a launch, in seconds."""

    __pydantic_config__ = _STRICT

    load: Positive = 1800.0
    """From the start of the process to the target's weights in memory; a download counts."""
    nccl_init: Positive = 300.0
    """NCCL's communicators."""
    capture: Positive = 900.0
    """CUDA graphs, those of all states included."""
    draft_init: Positive = 600.0
    """The drafter's weights and graphs."""
    first_request: Positive = 120.0
    """The first generation."""
    block: Positive = 600.0
    """One block of requests."""
    stop: Positive = 60.0
    """From the wish to stop until the server is killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StatesSpec:
    """What one live server may hold as states, instead of a launch for each (`spec.binding` says what binds when)."""

    __pydantic_config__ = _STRICT

    nccl: bool = True
    """NCCL sets: each gets a communicator of its own in the same server."""
    all_reduce: bool = True
    """SGLang's custom all-reduce and NCCL, if `disable-custom-all-reduce` is searched."""
    trees: bool = True
    """Steps and draft tokens at a top-k above 1; `switch_in_place` decides at top-k 1."""
    top_k: bool = False
    """Several values of top-k beside each other, if `attention-backend` is fixed in `engine.args`. Off by default: on
    an H200 one of 18 such states generated wrong text (recordings/h200_miniature_v1)."""
    max_per_server: AtLeastOne | Literal["auto"] = "auto"
    """States per server; `auto`: as many as the GPUs' memory holds. The rest is served by further launches."""
    init_deadline_s: Positive = 60.0
    """Longest wait for the communicator of one NCCL set; a set that takes longer is a failed configuration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """Which engine answers, and how it is started."""

    __pydantic_config__ = _STRICT

    kind: EngineKind
    """`sglang`: a real server. `simulated`: a machine profile. `replay`: a recorded sweep."""
    machine: str | None = None
    """simulated: name of a profile in `sweeps/machines/`, or a path to one."""
    noise: NotNegative = 1.0
    """simulated: scale of the profile's noise (0 = none)."""
    recording: str | None = None
    """replay: the results folder whose blocks are resampled."""
    python: str | None = None
    """sglang: interpreter of the server; this process's own if absent."""
    launcher: tuple[str, ...] = ()
    """sglang: command put before the interpreter (numactl, a container run)."""
    model_path: str | None = None
    """sglang: folder of the target, or its name on a model hub."""
    algorithm: str = "EAGLE3"
    """sglang: value of --speculative-algorithm for configurations that speculate."""
    args: Mapping[str, Scalar] = field(default_factory=dict)
    """sglang: further server arguments, names as on the command line without the dashes (`tp-size`: 8)."""
    env: Mapping[str, EnvValue] = field(default_factory=dict)
    """sglang: further environment variables of the server."""
    inherit: tuple[str, ...] = ()
    """sglang: variables that must be in the node's environment, such as `HF_TOKEN`; results have no value of them."""
    switch_in_place: bool = True
    """Change step counts inside a live server if engine and version can; relaunch otherwise."""
    states: StatesSpec = field(default_factory=StatesSpec)
    deadlines_s: Deadlines = field(default_factory=Deadlines)

    @property
    def is_virtual(self) -> bool:
        """Whether it starts no server: its numbers are computed on a clock of its own."""
        return ENGINE_KINDS[self.kind].is_virtual

    @property
    def needs_gpus(self) -> bool:
        """Whether a trial's server runs on GPUs."""
        return not self.is_virtual and self.args.get("device") != "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpec:
    """The dimensions. One value pins a dimension; several are searched."""

    __pydantic_config__ = _STRICT

    num_steps: tuple[Count, ...] = (0,)
    """Draft steps per cycle; 0 is no speculation."""
    eagle_topk: tuple[AtLeastOne, ...] = (1,)
    """Candidates per draft step; 1 is a chain, more is a tree."""
    num_draft_tokens: tuple[AtLeastOne, ...] = ()
    """Tokens verified per cycle at top-k > 1; steps + 1 at top-k 1. Absent: as many as the tree offers, up to 8 (or
    steps + 1 if that is more)."""
    drafter: tuple[str, ...] = ()
    """Names from `drafters`; the first alone if absent."""
    nccl: tuple[str, ...] = (DEFAULT_NCCL_SET,)
    """Names from `nccl_sets`; `default` is the empty set."""
    args: Mapping[str, tuple[Scalar, ...]] = field(default_factory=dict)
    """Server arguments as dimensions, names as in `engine.args`."""
    env: Mapping[str, tuple[EnvValue, ...]] = field(default_factory=dict)
    """Environment variables as dimensions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadSpec:
    """The prompts and blocks that every trial runs, the same in the same order."""

    __pydantic_config__ = _STRICT

    prompts: str = "synthetic"
    """`synthetic`, or a JSON Lines file of `{"prompt": text}` or `{"token_ids": [...]}` rows, relative to the spec."""
    vocabulary: Annotated[int, Strict(), Field(gt=10)] = 32000
    """synthetic: token ids are drawn below this."""
    prompt_tokens: AtLeastOne = 128
    """synthetic: length of each prompt."""
    output_tokens: Annotated[int, Strict(), Field(ge=2)] = 256
    """Tokens generated for each prompt."""
    concurrency: Annotated[
        tuple[AtLeastOne, ...],
        BeforeValidator(_as_list, json_schema_input_type=AtLeastOne | tuple[AtLeastOne, ...]),
    ] = (1,)
    """Requests in flight at a time: one number or several. Every trial measures its configuration at each; the first
    is what the search decides on, and each has its own verdict."""
    requests_per_block: AtLeastOne = 1
    """Prompts of one block. As many as the concurrency if that is more."""
    warmup_blocks: Count = 2
    """Blocks that each trial runs first and does not report."""
    blocks: AtLeastOne = 12
    """Measured blocks of each trial."""
    temperature: NotNegative = 0.0
    """0: greedy."""
    ignore_eos: bool = True
    """Generate `output_tokens` whatever the text."""
    trace: Traced = "every_trial"
    """After which trials a block runs once more under the server's profiler (seconds each, never a measured block)."""
    seed: Count = 0
    """synthetic: draws the prompts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A sampler or pruner by name; options go to its constructor."""

    __pydantic_config__ = _STRICT

    name: str
    """A name of the lists in the README (`cycle_model`, `median`, ...)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of its constructor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudySpec:
    """How configurations are chosen, pruned and stopped."""

    __pydantic_config__ = _STRICT

    metric: Metric = "tok_s"
    """What is optimised: throughput is maximised, times are minimised."""
    sampler: Choice = field(default_factory=lambda: Choice(name="grid"))
    """Chooses what to measure next."""
    pruner: Choice = field(default_factory=lambda: Choice(name="none"))
    """Ends a trial early."""
    seed: Count = 0
    """Of sampler and pruner."""
    max_replicates: AtLeastOne = 1
    """How often one effective configuration may be measured as a candidate."""
    stop_probability: Share | None = None
    """End when P(incumbent within `stop_within` of the best) reaches this (cycle_model only)."""
    stop_within: Share = 0.01
    """Share of the best throughput that a winner may miss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlSpec:
    """The configuration measured again and again: no speculation, NCCL set `default`."""

    __pydantic_config__ = _STRICT

    every: Count = 8
    """A control trial after so many candidates (0 = only the first and the last). If NCCL sets are states of a live
    server (`engine.states`), the control is measured once, first."""
    incumbent: bool = True
    """Re-measure the incumbent beside each later control; with states, once at the end in a server of its own."""
    in_server: bool = False
    """One block at step count 0 around each chain (top-k 1) inside its live server: an anchor against drift."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetSpec:
    """The sweep ends with whichever is reached first."""

    __pydantic_config__ = _STRICT

    trials: AtLeastOne | None = None
    """Candidates; controls are not counted."""
    gpu_hours: Positive | None = None
    """Held GPUs x hours."""
    wall_hours: Positive | None = None
    """Hours of this run of the driver."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceSpec:
    """What one trial holds alone, on one node."""

    __pydantic_config__ = _STRICT

    gpus: Count = 8
    """Whole GPUs of one node; 0 for a server on the CPU."""
    cpus: NotNegative = 1.0
    """CPUs that Ray reserves for the trial's actor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetSpec:
    """What speculation should reach; drives the accuracy needed in the report."""

    __pydantic_config__ = _STRICT

    tok_s: Positive | None = None
    """Tokens per second of one request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChecksSpec:
    """What makes a trial a failed one. Random weights make all of these checks meaningless: `allow` there."""

    __pydantic_config__ = _STRICT

    inert_draft: Literal["refuse", "allow"] = "refuse"
    """A drafter whose tokens are never accepted."""
    wrong_output: Literal["refuse", "allow"] = "refuse"
    """Greedy output that begins unlike the controls', and one answer to several prompts."""
    looping: Literal["refuse", "allow"] = "refuse"
    """Answers that repeat themselves: a drafter hits almost every token of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepSpec:
    """One sweep: one YAML, one Optuna study, one results folder."""

    __pydantic_config__ = _STRICT

    sweep: str
    """Name of the sweep: letters, digits, `.`, `_` and `-` (it names files)."""
    description: str = ""
    """One line for the report."""
    engine: EngineSpec
    search: SearchSpec
    nccl_sets: Mapping[str, Mapping[str, EnvValue]] = field(default_factory=dict)
    """Name -> NCCL variables. `default` exists in every spec and is empty."""
    drafters: Mapping[str, str] = field(default_factory=dict)
    """Name -> path (sglang) or acceptance profile of the machine (simulated)."""
    workload: WorkloadSpec = field(default_factory=WorkloadSpec)
    study: StudySpec = field(default_factory=StudySpec)
    control: ControlSpec = field(default_factory=ControlSpec)
    budget: BudgetSpec = field(default_factory=BudgetSpec)
    resources: ResourceSpec = field(default_factory=ResourceSpec)
    target: TargetSpec = field(default_factory=TargetSpec)
    checks: ChecksSpec = field(default_factory=ChecksSpec)
    acceptance: Acceptance = "measured"
    """`pinned`: every server simulates acceptance; rows say so, and no recommendation is made from them. The length to
    pin is SGLANG_SIMULATE_ACC_LEN in `engine.env`."""
    allow_unknown_nccl: bool = False
    """Let NCCL_* names pass that no NCCL reads: a misspelt variable as a negative control."""
