"""What a sweep has learnt so far, in memory: which trial ran where, its blocks, what they cost.

The study fills it as trials run and rebuilds it from the results folder on resume; samplers and pruners read it. No
Ray, no Optuna, no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from sweeps.engines.base import KernelTime
from sweeps.engines.summary import BlockSummary
from sweeps.measure.records import Decision, Finding, Outcome, PlannedTrial, Status, candidate_id
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
    """What served the all-reduces; None until the trial has ended, and where the evidence does not tell."""
    nccl_unread: bool = False
    """NCCL, by its own log, read no variable of the configuration's NCCL set."""
    reason: str | None = None
    kind: str | None = None
    """Of a failure: `engines.base.Kind`, or `interrupted` where nobody can blame the configuration."""
    refused: bool = False
    """Failed without a launch (outcome `invalid`): it cost nothing."""

    def values(self, metric: Metric) -> tuple[float, ...]:
        """The metric of each block that has one."""
        return tuple(value for block in self.blocks if (value := block_value(block, metric)) is not None)

    def mean(self, metric: Metric) -> float | None:
        values = self.values(metric)
        return sum(values) / len(values) if values else None


@runtime_checkable
class DecidingPruner(Protocol):
    """A pruner that can say why. `SweepStudy` asks `decide` instead of `prune` where it exists."""

    def decide(self, number: int) -> Decision:
        """For the running trial with this study number, after its newest block was observed."""
        ...


@runtime_checkable
class CertifyingSampler(Protocol):
    """A sampler that can tell how sure it is. `SweepStudy` stops a sweep on it (`study.stop_probability`)."""

    def probability_within(self, within: float) -> float | None:
        """P(the incumbent is within this share of the best configuration); None while it cannot be told."""
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
    """Every trial of a sweep in the order of its start, controls included. Single-threaded, like the driver.

    A pinned trial is held as what it predicts: its cycles with the accept length that its drafting was measured with
    (as it is, where its drafting never was).
    """

    def __init__(self, observations: Iterable[Observation] = ()) -> None:
        self._by_id = {observation.trial.trial_id: observation for observation in observations}
        for trial_id, seen in self._by_id.items():
            if seen.trial.acceptance == "pinned":
                self._by_id[trial_id] = replace(seen, blocks=tuple(self._combined(seen, each) for each in seen.blocks))
        self._last_started: str | None = None
        self._started_before: str | None = None

    def __iter__(self) -> Iterator[Observation]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, trial_id: str) -> Observation:
        return self._by_id[trial_id]

    def of_number(self, number: int) -> Observation | None:
        """The candidate with this study number."""
        return self._by_id.get(candidate_id(number))

    def of_configuration(self, configuration: Configuration) -> tuple[Observation, ...]:
        """Every trial of a configuration, whatever its role."""
        return tuple(seen for seen in self if seen.trial.configuration == configuration)

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
        self._by_id[trial_id] = replace(seen, blocks=(*kept, self._combined(seen, block)), seconds=dict(seconds))

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

    def is_measured(self, configuration: Configuration) -> bool:
        """Whether a trial of it ran to its end with real acceptance."""
        return any(seen.status == "completed" and _is_real(seen) for seen in self.of_configuration(configuration))

    @property
    def known_drafting(self) -> frozenset[tuple[object, ...]]:
        """`Configuration.drafting` of every whole trial that told its accept length."""
        whole = (seen for seen in self if seen.status == "completed" and _is_real(seen))
        told = (seen for seen in whole if any(block.accept_length is not None for block in seen.blocks))
        return frozenset(seen.trial.configuration.drafting for seen in told)

    @property
    def unconfirmed(self) -> frozenset[Configuration]:
        """Failed with real acceptance and never measured: no prediction of theirs can be trusted."""
        failed = (seen for seen in self if seen.status == "failed" and seen.kind != "interrupted" and _is_real(seen))
        return frozenset(each for seen in failed if not self.is_measured(each := seen.trial.configuration))

    def _measured_blocks(self, configuration: Configuration) -> list[BlockSummary]:
        alike = (seen for seen in self if seen.trial.configuration.drafting == configuration.drafting)
        whole = (seen for seen in alike if seen.status == "completed" and _is_real(seen))
        return [block for seen in whole for block in seen.blocks if block.accept_length is not None]

    def _combined(self, seen: Observation, block: BlockSummary) -> BlockSummary:
        if seen.trial.acceptance == "measured":
            return block
        return combine(block, self._measured_blocks(seen.trial.configuration))

    def incumbent(self, metric: Metric, *, among: Iterable[Configuration] | None = None) -> Configuration | None:
        """The configuration with the best mean over its completed trials (the measured ones, where it has any); None
        while there is none.

        Args:
            among: only these count (a control outside the space is no candidate); None for all.
        """
        allowed = None if among is None else set(among)
        doubted = self.unconfirmed
        means: dict[Configuration, list[float]] = {}
        for seen in self:
            configuration = seen.trial.configuration
            if seen.status != "completed" or configuration in doubted:
                continue
            if allowed is not None and configuration not in allowed:
                continue
            if not _is_real(seen) and self.is_measured(configuration):
                continue
            if (mean := seen.mean(metric)) is not None:
                means.setdefault(configuration, []).append(mean)
        if not means:
            return None
        pick = max if MAXIMISED[metric] else min
        return pick(means, key=lambda configuration: sum(means[configuration]) / len(means[configuration]))


def combine(pinned: BlockSummary, measured: Sequence[BlockSummary]) -> BlockSummary:
    """What a pinned block predicts: its cycles, with the accept length that the same prompts had in `measured`.

    tok/s is accept length over cycle time, so it scales with the former. Where none of `measured` ran these prompts,
    all of them tell the length; without any, or without a length to replace, the block stays as it is.
    """
    same = [block for block in measured if block.block_index == pinned.block_index] or measured
    cycles = sum(block.num_cycles for block in same)
    if not cycles or not pinned.accept_length:
        return pinned
    length = sum((block.accept_length or 1.0) * block.num_cycles for block in same) / cycles
    tok_s = pinned.tok_s * length / pinned.accept_length
    return replace(pinned, tok_s=tok_s, accept_length=length, accept_histogram=None)


def _is_real(seen: Observation) -> bool:
    return seen.trial.acceptance == "measured"


def block_value(block: BlockSummary, metric: Metric) -> float | None:
    """A block's value of the study's metric; None where the phase does not exist (verify without speculation)."""
    values: Mapping[Metric, float | None] = {
        "tok_s": block.tok_s,
        "cycle_ms": block.cycle_ms,
        "verify_ms": block.verify_ms,
    }
    return values[metric]
