"""The contract of every engine, and the tree of its errors.

An engine serves one configuration at a time. Times are seconds of the engine's own clock (`now_s`): real and monotonic
for a server, virtual for the simulated and replayed ones. A missing value is None, never 0 or NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import pyarrow as pa

from sweeps import SpecsweepError
from sweeps.foreign_text import one_line, printable
from sweeps.results.block_facts import StreamFacts
from sweeps.spec.space import Configuration
from sweeps.spec.workload import Block

Stage = Literal["plan", "load", "nccl_init", "capture", "draft_init", "first_request", "measure", "stop"]
Kind = Literal[
    "invalid_config",
    "gpu_oom",
    "host_oom",
    "nccl_no_algorithm",
    "hang_nccl_init",
    "hang_in_verify",
    "hang",
    "late",
    "draft_inert",
    "wrong_output",
    "implausible",
    "bad_answer",
    "busy",
    "killed",
    "crash",
    "not_effective",
    "no_handshake",
    "gpu_not_clean",
    "engine_unavailable",
]
Grade = Literal["effective", "seen", "not_seen", "overridden", "extra", "not_exercised"]

TRANSIENT_KINDS: frozenset[str] = frozenset({"host_oom", "crash", "killed", "busy", "implausible", "gpu_not_clean"})
"""Kinds that one retry may cure; every other kind is a property of the configuration."""


HEAD_TOKENS = 16
LOOP_WINDOW = 128
"""Pairs of tokens among which `Request.distinct_bigrams` looks for repeats."""


class EngineError(SpecsweepError):
    """A configuration that could not be served or measured: always a row, never a lost sweep.

    Attributes:
        stage: how far it came.
        kind: what went wrong.
        log_tail: the last lines of the server's log, if there is one.
        server_lives: the live server is sound, and serves its other states.
    """

    def __init__(
        self, message: str, *, stage: Stage, kind: Kind, log_tail: str | None = None, server_lives: bool = False
    ) -> None:
        super().__init__(one_line(message))
        self.stage: Stage = stage
        self.kind: Kind = kind
        self.server_lives = server_lives
        self.log_tail = None if log_tail is None else printable(log_tail)

    @property
    def transient(self) -> bool:
        return self.kind in TRANSIENT_KINDS


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What became of one requested (or unasked) setting in one rank."""

    rank: int
    setting: str
    """`env.NCCL_PROTO`, `args.num_steps`, ..."""
    requested: str | None
    seen: str | None
    """In the process: C getenv, or /server_info."""
    effective: str | None
    """What the engine acts on, if that can be told."""
    grade: Grade
    detail: str | None = None
    read_by_nccl: str | None = None
    """What NCCL's own log says it read; None for other settings and without that log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchReport:
    """A server that is up: proven by one real generation."""

    version: str
    """Version of the serving engine (`0.5.21`), or the machine profile's name and version."""
    machine: str
    """GPU model and count, host, or the profile's name."""
    num_gpus: int
    boot_s: Mapping[str, float]
    """Seconds by activity: `launch`, `weight_load`, `capture`; sums to the whole boot."""
    command: tuple[str, ...]
    """Serves this configuration alone, every flag of it; paths under the project's folder are relative to that."""
    environment: Mapping[str, str]
    """What this launch set explicitly."""
    removed: tuple[str, ...] = ()
    """Inherited variables that were taken out because the sweep sets them."""
    effective: Mapping[str, str] = field(default_factory=dict)
    """The engine's own account of its settings: `num_steps`, `eagle_topk`, `attention_backend`, ..."""
    evidence: tuple[Evidence, ...] = ()
    all_reduce: str | None = None
    """What serves decode-size all-reduces (`nccl`, `custom`, ...), if known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One finished generation, as its client saw it."""

    prompt_id: str
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float | None
    latency_ms: float
    output_hash: str
    """Hash of the generated token ids: equal for equal greedy output."""
    head_hash: str | None = None
    """Hash of the first HEAD_TOKENS ids: equal heads of unequal outputs distinguish rounding from corruption."""
    cached_tokens: int | None = None
    """Prompt tokens that the server took from its prefix cache."""
    distinct_bigrams: int | None = None
    """Different pairs of neighbouring token ids, in each LOOP_WINDOW pairs: few in an answer that loops."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRecord:
    """Everything that one block measured."""

    started_s: float
    wall_s: float
    decode_s: float
    """Length of the union of the requests' intervals from first to last token."""
    decode_tokens: int
    """Tokens after each request's first: those that decode_s produced."""
    requests: tuple[Request, ...]
    """In the order of the block's prompts."""
    cycles: pa.Table
    """`tables.CYCLE_COLUMNS`, one row per rank and cycle; may be empty."""
    telemetry: Mapping[str, float | str] = field(default_factory=dict)
    """`sm_clock_mhz`, `power_w`, `temperature_c`, `throttle_reasons`, ... over exactly the trial's GPUs."""
    streams: tuple[StreamFacts, ...] = ()
    """What the client saw of each request's stream, in their order; () for an engine without one."""
    is_clock_shared: bool = False
    """The cycles' starts are on the clock of `started_s` to the millisecond, as measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTime:
    """Kernel time by phase, from a profiler window."""

    phase: Literal["draft", "verify", "extend", "other"]
    kind: Literal["communication", "attention", "moe", "gemm", "sampling", "other"]
    kernel: str
    us_per_cycle: float
    calls_per_cycle: float


class Engine(Protocol):
    """Launch, switch, run blocks, trace, close. Not thread-safe; owned by one trial actor."""

    name: str
    """`simulated`, `sglang` or `replay`: in every row and title."""

    def now_s(self) -> float:
        """The engine's clock."""
        ...

    def launch(self, configuration: Configuration, *, states: tuple[Configuration, ...] = ()) -> LaunchReport:
        """Serve `configuration`; a running server is closed first. Raises EngineError.

        Args:
            states: configurations of the same launch key that the server shall hold as states, as far as it can; () for
                `configuration` alone.
        """
        ...

    def switch(self, configuration: Configuration) -> LaunchReport | None:
        """Change the live server to `configuration` in place; None, and nothing changed, if only a launch can."""
        ...

    def run_block(self, block: Block) -> BlockRecord:
        """Run one block to its end. Raises EngineError."""
        ...

    def run_anchor(self, block: Block) -> BlockRecord | None:
        """Run one block with the live server's target alone (step count 0), then serve the configuration again.

        None, and nothing changed, if the server does not hold the target alone as a state.
        Raises EngineError.
        """
        ...

    def trace(self, block: Block) -> tuple[KernelTime, ...] | None:
        """Profile a few cycles of `block`; None if the engine has no profiler."""
        ...

    def close(self) -> None:
        """Stop the server and prove that nothing of it is left. Idempotent.

        Raises EngineError (`gpu_not_clean`) if something survives.
        """
        ...
