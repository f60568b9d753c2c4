"""A machine as the simulated engine knows it: YAML with a source for every number -> frozen dataclasses.

In YAML a number (or a list or mapping of numbers) is written `{value: 28.7, source: where it is from}`; one without a
source is an error. In memory the values are plain, and `MachineProfile.sources` keeps the texts by dotted path, so that
a variant is one `dataclasses.replace` away. What the numbers mean together is `expected_cycle` and `nccl_choice`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from sweeps.choices import nearest
from sweeps.engines.base import Kind, Stage
from sweeps.spec.document import SpecError
from sweeps.spec.yaml_text import parse, read_text

PROFILES = Path(__file__).parents[2] / "machines"
"""Where profiles are looked up by name."""

Algo = Literal["Ring", "Tree", "NVLS"]
Proto = Literal["LL", "LL128", "Simple"]
Transport = Literal["P2P", "SHM", "NET"]
PathLevel = Literal["LOC", "NVL", "PIX", "PXB", "PHB", "SYS"]
Factor = Literal["draft_ms", "verify_ms", "extend_ms", "gap_ms", "accept_length"]
Match = Mapping[str, str]
"""Setting -> value, as in `expected_cycle.settings_of`: `env.NCCL_PROTO: LL`, `eagle_topk: "4"`; `*` is any value."""

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """One forward of the target, and what a cycle adds to it. Milliseconds at batch size 1 unless said."""

    __pydantic_config__ = _STRICT

    other_ms: float
    """Everything but experts and all-reduces: attention, dense GEMMs, launch gaps."""
    moe_ms_per_expert: float
    """Per distinct expert that the tokens of a forward touch, over all layers."""
    experts: int
    experts_per_token: int
    verify_path_ms: float
    """What the same forward costs more when it verifies drafts (graph coverage, multi-token attention)."""
    verify_prepare_ms: float
    """Verify phase outside its forward: tree mask, sampling, acceptance."""
    decode_gap_ms: float
    """Between plain decode steps."""
    gap_ms: float
    """Between the phases of a cycle."""
    all_reduces: int
    message_bytes_per_token: int
    prefill_base_ms: float
    prefill_token_ms: float
    max_tokens: int
    """Of one forward, over the batch: beyond it time is no longer that of reading the weights, and the model says
    nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafting:
    """The draft and draft-extend phases, and what a tree of drafts is worth."""

    __pydantic_config__ = _STRICT

    start_ms: float
    step_ms: float
    """Per draft step at top-k 1, all-reduces excluded."""
    topk_share: float
    """Growth of start and steps per further top-k."""
    all_reduces_per_step: int
    """Also of the draft-extend forward."""
    extend_ms: float
    extend_token_ms: float
    """Per draft token and request."""
    tree_spread: float
    """How much of a level's further top-k candidates the tree keeps: its mean width is 1 + spread x (top-k - 1)."""
    tree_gain: float
    """P(a level's next candidate is right | all before it were wrong)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafter:
    """Acceptance of one drafter on the profile's workload."""

    __pydantic_config__ = _STRICT

    accept_length: tuple[float, ...]
    """[i]: accept length with i + 1 draft steps at top-k 1, bonus token included."""
    tail: float
    """Conditional acceptance of every later position."""
    prompt_spread: float
    """Standard deviation over prompts, in logits of the conditional acceptance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduceBackend:
    """What serves decode-size all-reduces; the first backend whose `when` fits does."""

    __pydantic_config__ = _STRICT

    backend: str
    """`nccl` takes its times from the profile's NCCL model."""
    when: Match = field(default_factory=dict)
    latency_us: float | None = None
    bandwidth_gbs: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclPick:
    """What NCCL uses by itself where `when` fits; a field left out stays as it was."""

    __pydantic_config__ = _STRICT

    when: Match = field(default_factory=dict)
    algo: Algo | None = None
    proto: Proto | None = None
    transport: Transport | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclModel:
    """All-reduce time by algorithm, protocol and transport: latency + bytes / bandwidth."""

    __pydantic_config__ = _STRICT

    path: PathLevel
    """Of the GPU pair that is farthest apart: NCCL_P2P_LEVEL must reach it for peer-to-peer."""
    picks: tuple[NcclPick, ...]
    """Later ones win; the first fits always."""
    latency_us: Mapping[Transport, Mapping[Algo, Mapping[Proto, float]]]
    bandwidth_gbs: Mapping[Transport, Mapping[Proto, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """Random parts as coefficients of variation (scaled by the spec's `noise`), and two systematic ones."""

    __pydantic_config__ = _STRICT

    verify_cycle: float
    """Cycle to cycle, verify (or plain decode)."""
    other_cycle: float
    """Cycle to cycle, draft, extend and gap."""
    block: float
    launch: float
    warmup: float
    """By how much the first block after a launch is slower; falls by e each block."""
    cold: float
    """By how much a cold machine is faster than its steady state (thermal drift)."""
    cold_tau_s: float
    drift_per_hour: float = 0.0
    """Linear slowing, for landscapes."""
    launch_branches: float = 0.0
    """Launches fall on two branches that are this far apart, relative; for landscapes."""
    drafting_launch: float = 0.0
    """Launch to launch where drafts are made, beside `launch`: a small model's drafting waits for the host."""
    drafting_block: float = 0.0
    """Block to block where drafts are made, beside `block`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Boot:
    """Seconds of a launch by activity."""

    __pydantic_config__ = _STRICT

    launch_s: float
    weight_load_s: float
    drafter_load_s: float
    capture_s: float
    drafter_capture_s: float
    cold_weight_load_s: float
    """Added to the first launch on the machine."""
    cold_capture_s: float
    """Added to the first launch on the machine: kernel compiles."""
    communicator_s: float
    """Of each further NCCL set that a server holds."""
    state_s: float
    """Of each further state: its graphs."""
    switch_s: float
    stop_s: float
    trace_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Configurations that fail on this machine."""

    __pydantic_config__ = _STRICT

    when: Match
    kind: Kind
    stage: Stage
    message: str
    after_blocks: int = 0
    """stage `measure`: blocks since launch that still succeed."""
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Intervention:
    """Somebody else sets a variable: the engine itself, or a configuration file."""

    __pydantic_config__ = _STRICT

    setting: str
    value: str
    by: str
    """`the engine`, `/etc/nccl.conf`, ..."""
    only_if_unset: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Interaction:
    """A factor that is not what its parts say, where `when` fits: for landscapes that break an assumption."""

    __pydantic_config__ = _STRICT

    when: Match
    factor: Factor
    scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineProfile:
    """A calibrated machine with a target model and its drafters."""

    __pydantic_config__ = _STRICT

    name: str
    version: str
    description: str
    gpu: str
    num_gpus: int
    forward: Forward
    drafting: Drafting
    drafters: Mapping[str, Drafter]
    all_reduce: tuple[AllReduceBackend, ...]
    nccl: NcclModel
    noise: Noise
    boot: Boot
    faults: tuple[Fault, ...] = ()
    interventions: tuple[Intervention, ...] = ()
    interactions: tuple[Interaction, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    """Dotted path -> where that number is from."""

    def drafter(self, name: str | None) -> Drafter:
        """By name; the profile's first where None. Raises SpecError."""
        if name is None:
            return next(iter(self.drafters.values()))
        if name not in self.drafters:
            raise SpecError(f"machine {self.name}: no drafter profile {name!r}; there are {', '.join(self.drafters)}")
        return self.drafters[name]


def read_profile(machine: str) -> MachineProfile:
    """A profile by name, or by path (anything that ends in `.yaml`). Raises SpecError."""
    path = Path(machine) if machine.endswith(".yaml") else PROFILES / f"{machine}.yaml"
    if not path.is_file():
        names = sorted(known.stem for known in PROFILES.glob("*.yaml"))
        guess = nearest(machine, names)
        hint = f"; did you mean {guess}?" if guess else ""
        raise SpecError(f"engine.machine: no profile {machine!r}; there are {', '.join(names)}{hint}")
    return parse_profile(read_text(path), source=str(path))


def parse_profile(text: str, *, source: str) -> MachineProfile:
    """Check profile text; `source` is named in errors. Raises SpecError."""
    document, _ = parse(text, source=source)
    if not isinstance(document, dict):
        raise SpecError(f"{source}: wanted the mapping of a machine profile, got {type(document).__name__}")
    sources: dict[str, str] = {}
    try:
        plain = _take_sources(document, "", sources)
        profile = TypeAdapter(MachineProfile).validate_python({**plain, "sources": sources})
    except (ValidationError, ValueError) as error:
        raise SpecError(f"{source}: {error}") from error
    if not profile.drafters:
        raise SpecError(f"{source}: drafters: wanted at least one")
    return profile


def _take_sources(node: Any, path: str, sources: dict[str, str]) -> Any:
    """`node` without its sources, which are put into `sources`. Raises ValueError for a number that has none."""
    if isinstance(node, dict):
        if "value" in node and "source" in node and set(node) == {"value", "source"}:
            sources[path] = str(node["source"])
            return node["value"]
        return {key: _take_sources(part, f"{path}.{key}".lstrip("."), sources) for key, part in node.items()}
    if isinstance(node, list):
        return [_take_sources(part, f"{path}.{index}", sources) for index, part in enumerate(node)]
    if isinstance(node, (int, float)) and not isinstance(node, bool):
        raise ValueError(f"{path}: {node} has no source; write {{value: {node}, source: ...}}")
    return node
