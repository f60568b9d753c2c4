"""What a sweep has measured so far, in memory: trials, their blocks, what they cost.

The study fills it as trials run and rebuilds it from the results folder on resume; samplers and pruners read it. No
Ray, no Optuna, no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from sweeps.engines.base import KernelTime
from sweeps.engines.summary import BlockSummary
from sweeps.measure.records import (
    TRIAL_LETTERS,
    Decision,
    FailureKind,
    Finding,
    Outcome,
    PlannedTrial,
    Role,
    Status,
    name_trial,
)
from sweeps.spec.model import Metric
from sweeps.spec.space import Configuration

MAXIMISED: Mapping[Metric, bool] = {"tok_s": True, "cycle_ms": False, "verify_ms": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """One trial as known now. A block list that ended early belongs to a pruned or failed trial."""

    trial: PlannedTrial
    status: Status
    blocks: tuple[BlockSummary, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall seconds by activity; {} until the first block."""
    relaunched: bool | None = None
    kernels: tuple[KernelTime, ...] = ()
    all_reduce: str | None = None
    """What did the all-reduces; None until the trial has ended, or if the evidence is silent."""
    nccl_unread: bool = False
    """NCCL, by its own log, read no variable of the configuration's NCCL set."""
    reason: str | None = None
    kind: FailureKind | None = None
    """Failure kind; `interrupted` if the configuration is not the cause."""
    refused: bool = False
    """Failed without a launch (outcome `invalid`): it cost nothing."""

    @property
    def is_measured(self) -> bool:
        """It ended with blocks that tell something: to its end, or pruned."""
        return self.status in ("completed", "pruned") and bool(self.blocks)

    def blocks_with(self, metric: Metric) -> tuple[BlockSummary, ...]:
        """The blocks that have a value of the metric."""
        return tuple(block for block in self.blocks if block_value(block, metric) is not None)

    def values(self, metric: Metric) -> tuple[float, ...]:
        """The metric of each block that has one."""
        return tuple(value for block in self.blocks if (value := block_value(block, metric)) is not None)

    def mean(self, metric: Metric) -> float | None:
        return pooled(self.blocks, metric)


@runtime_checkable
class DecidingPruner(Protocol):
    """A pruner that can say why. `SweepStudy` calls `decide`, if there is one, instead of `prune`."""

    def decide(self, number: int) -> Decision:
        """For the running trial with this study number, after its newest block was observed."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Certainty:
    """How sure a sampler is of its incumbent."""

    probability: float | None = None
    """None while it cannot be told."""
    error: float | None = None
    """Monte Carlo standard error of it; None if it was not estimated."""
    lacks: str | None = None
    """What has to be measured before it can be told."""

    def __str__(self) -> str:
        if self.probability is None:
            return f"cannot be told: {self.lacks}"
        return f"{self.probability:.3f}" + ("" if self.error is None else f" +- {self.error:.3f}")


@runtime_checkable
class CertifyingSampler(Protocol):
    """A sampler that can tell how sure it is. `SweepStudy` stops a sweep on it (`study.stop_probability`)."""

    def certainty(self, within: float) -> Certainty:
        """P(the incumbent is within this share of the best configuration), or why it cannot be told."""
        ...


@runtime_checkable
class RecommendingSampler(Protocol):
    """A sampler that knows better than raw means which measured configuration is best."""

    def incumbent(self) -> Configuration | None:
        """The best measured configuration; None while it cannot be told."""
        ...

    def drain_findings(self) -> tuple[Finding, ...]:
        """What was found since the last call."""
        ...


class Observations:
    """Every trial of a sweep in the order of its start, controls included. Single-threaded, like the driver."""

    def __init__(self, observations: Iterable[Observation] = (), *, names_in_use: Iterable[str] = ()) -> None:
        """Start from an earlier driver's trials, and keep off names that its files bear besides."""
        self._by_id = {observation.trial.trial_id: observation for observation in observations}
        self._names_in_use = frozenset(names_in_use)
        starts = [seen.trial.start_index for seen in self if seen.trial.start_index is not None]
        self._next_start = max(starts, default=-1) + 1
        self._last_started: str | None = None
        self._started_before: str | None = None

    def __iter__(self) -> Iterator[Observation]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, trial_id: str) -> Observation:
        return self._by_id[trial_id]

    def next_number(self, role: Role) -> int:
        """The first number that no trial of this role ever had: readable or not, running or over."""
        letter = TRIAL_LETTERS[role]
        used = [int(name[1:]) for name in (*self._names_in_use, *self._by_id) if name.startswith(letter)]
        return max(used, default=-1) + 1

    def next_start(self) -> int:
        """The place of the next trial in the order of starts; each call takes one."""
        self._next_start += 1
        return self._next_start - 1

    def of_number(self, number: int) -> Observation | None:
        """The candidate with this study number."""
        return self._by_id.get(name_trial("candidate", number))

    def of_configuration(self, configuration: Configuration) -> tuple[Observation, ...]:
        """Every trial of a configuration, whatever its role."""
        return tuple(seen for seen in self if seen.trial.configuration == configuration)

    def measured(self) -> frozenset[Configuration]:
        """Configurations with a measured trial."""
        return frozenset(seen.trial.configuration for seen in self if seen.is_measured)

    @property
    def running(self) -> tuple[Observation, ...]:
        return tuple(seen for seen in self if seen.status == "running")

    @property
    def live_launch_key(self) -> str | None:
        """Launch key of the server that the last started trial left up; None before the first and after a failure.

        With several nodes it is the newest of several live servers.
        """
        if self._last_started is None or self._by_id[self._last_started].status == "failed":
            return None
        return self._by_id[self._last_started].trial.launch_key

    @property
    def held_s(self) -> float:
        """Wall seconds that trials have held their GPUs for, over all activities."""
        return sum(sum(seen.seconds.values()) for seen in self)

    def start(self, trial: PlannedTrial) -> None:
        self._by_id[trial.trial_id] = Observation(trial=trial, status="running")
        self._started_before, self._last_started = self._last_started, trial.trial_id

    def add_block(self, trial_id: str, block: BlockSummary, *, seconds: Mapping[str, float]) -> None:
        """Add a running trial's newest block and its seconds so far. A repeated attempt starts over at block 0."""
        seen = self._by_id[trial_id]
        kept = tuple(earlier for earlier in seen.blocks if earlier.block_index < block.block_index)
        self._by_id[trial_id] = replace(seen, blocks=(*kept, block), seconds=dict(seconds))

    def finish(self, trial_id: str, outcome: Outcome) -> None:
        seen = self._by_id[trial_id]
        if outcome.status == "invalid" and trial_id == self._last_started:
            self._last_started = self._started_before  # its server still runs
        self._by_id[trial_id] = replace(
            seen,
            status="failed" if outcome.status == "invalid" else outcome.status,
            refused=outcome.status == "invalid",
            reason=outcome.reason,
            kind=outcome.kind,
            relaunched=outcome.relaunched,
            seconds=dict(outcome.seconds or seen.seconds),
            kernels=outcome.kernels,
            all_reduce=outcome.all_reduce,
            nccl_unread=outcome.nccl_unread,
        )

    def incumbent(self, metric: Metric, *, among: Iterable[Configuration] | None = None) -> Configuration | None:
        """The configuration with the best mean over its completed trials; None while there is none.

        Args:
            among: only these count (a control outside the space is no candidate); None for all.
        """
        allowed = None if among is None else set(among)
        blocks: dict[Configuration, list[BlockSummary]] = {}
        for seen in self:
            configuration = seen.trial.configuration
            if seen.status == "completed" and (allowed is None or configuration in allowed):
                blocks.setdefault(configuration, []).extend(seen.blocks)
        means = {each: mean for each, own in blocks.items() if (mean := pooled(own, metric)) is not None}
        if not means:
            return None
        pick = max if MAXIMISED[metric] else min
        return pick(means, key=means.__getitem__)


def pooled(blocks: Iterable[BlockSummary], metric: Metric) -> float | None:
    """The metric over blocks as the report has it: tokens over seconds, or milliseconds over cycles; None without any.

    A ratio of sums. The mean of the blocks' rates is larger by about their squared coefficient of variation, and only
    with speculation, so it would favour speculation and long drafts.
    """
    known = [(block, value) for block in blocks if (value := block_value(block, metric)) is not None]
    if not known:
        return None
    if metric == "tok_s":
        return sum(block.decode_tokens for block, _ in known) / sum(block.decode_s for block, _ in known)
    cycles = [max(1, block.num_cycles) for block, _ in known]
    return sum(count * value for count, (_, value) in zip(cycles, known, strict=True)) / sum(cycles)


def block_value(block: BlockSummary, metric: Metric) -> float | None:
    """A block's value of the study's metric; None if the phase does not exist (verify without speculation)."""
    values: Mapping[Metric, float | None] = {
        "tok_s": block.tok_s,
        "cycle_ms": block.cycle_ms,
        "verify_ms": block.verify_ms,
    }
    return values[metric]
