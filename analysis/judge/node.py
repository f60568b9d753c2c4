"""A node of many GPUs predicted from the share that one of its GPUs was measured with.

A cycle of the node is the measured cycle of the share, without its own communication, plus what the node's collective
operations take. How many there are is counted in SGLang 0.5.17's trace (`recordings/h200_x2_nccl_v1`): a forward of the
target has two all-reduces a layer, one for the embedding and one all-gather of the logits; a forward of the drafter has
three all-reduces and one all-gather. The draft phase has one forward less than there are draft steps, since the first
draft comes from draft-extend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.data.load import Results
from analysis.judge.phases import Phases, communication_ms
from analysis.judge.sides import Side
from analysis.judge.verdict import SweepVerdict

_DRAFTER_COLLECTIVES = 4
_BYTES_PER_VALUE = 2
"""bfloat16."""


class NotPredictableError(ValueError):
    """The recording cannot be carried over to a node: one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What the number and size of collective operations depend on."""

    layers: int
    hidden: int

    @property
    def forward_collectives(self) -> int:
        """Of one forward of the target."""
        return 2 * self.layers + 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """Microseconds of one all-reduce among the node's GPUs, by message size; an all-gather is taken to cost as much."""

    nbytes: Sequence[float]
    """Ascending."""
    low_us: Sequence[float]
    high_us: Sequence[float]
    source: str

    def between(self, nbytes: float) -> tuple[float, float]:
        """Interpolated; outside of the sizes that are known, that of the nearest one."""
        low = float(np.interp(nbytes, self.nbytes, self.low_us))
        return low, float(np.interp(nbytes, self.nbytes, self.high_us))


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRate:
    """One configuration on the node."""

    label: str
    num_steps: int
    accept_length: float
    """Tokens a cycle; 1 without speculation."""
    share_cycle_ms: float
    """Measured, without communication."""
    collectives: int
    """Of a cycle."""
    communication_ms: tuple[float, float]
    cycle_ms: float
    """With communication in the middle of its range."""
    tok_s: float
    interval: tuple[float, float]
    """Both ends of communication, and of the measured throughput's 95 % interval."""


def predict_node(
    results: Results,
    judged: SweepVerdict,
    *,
    shape: Shape,
    latency: Latency,
    accept_lengths: Mapping[int, float],
) -> tuple[NodeRate, ...]:
    """No speculation and every chain whose accept length is known, by step count.

    Args:
        accept_lengths: tokens a cycle by step count.

    Raises NotPredictableError if nothing was timed, or a share of several GPUs was not traced.
    """
    sides = {side.configuration_id: side for side in judged.sides}
    found: dict[int, NodeRate] = {}
    for each in judged.phases:
        length = 1.0 if not each.speculates else accept_lengths.get(each.num_steps)
        if each.cycle_ms is None or length is None or not _is_chain(results, each) or each.num_steps in found:
            continue
        found[each.num_steps] = _rate(results, each, sides[each.configuration_id], length, shape, latency)
    if not found:
        raise NotPredictableError(f"{results.sweep_id}: no chain of a step count with an accept length was timed")
    return tuple(found[steps] for steps in sorted(found))


def _is_chain(results: Results, each: Phases) -> bool:
    own = results.trials.filter(results.trials["configuration_id"] == each.configuration_id)
    return not each.speculates or own["eagle_topk"][0] == 1


def _rate(results: Results, each: Phases, side: Side, accept_length: float, shape: Shape, latency: Latency) -> NodeRate:
    share_ms = _share_ms(results, each)
    tokens = each.num_steps + 1 if each.speculates else 1
    row_bytes = shape.hidden * _BYTES_PER_VALUE
    ends = []
    for end in (0, 1):
        us = shape.forward_collectives * latency.between(tokens * row_bytes)[end]
        if each.speculates:
            us += (each.num_steps - 1) * _DRAFTER_COLLECTIVES * latency.between(row_bytes)[end]
            us += _DRAFTER_COLLECTIVES * latency.between(tokens * row_bytes)[end]
        ends.append(us / 1000)
    low_ms, high_ms = ends
    spread = (1.0, 1.0) if side.interval is None else tuple(value / side.tok_s for value in side.interval)
    cycle_ms = share_ms + (low_ms + high_ms) / 2
    return NodeRate(
        label=each.label,
        num_steps=each.num_steps,
        accept_length=accept_length,
        share_cycle_ms=share_ms,
        collectives=shape.forward_collectives + each.num_steps * _DRAFTER_COLLECTIVES,
        communication_ms=(low_ms, high_ms),
        cycle_ms=cycle_ms,
        tok_s=1000 * accept_length / cycle_ms,
        interval=(
            1000 * accept_length / (share_ms / spread[0] + high_ms),
            1000 * accept_length / (share_ms / spread[1] + low_ms),
        ),
    )


def _share_ms(results: Results, each: Phases) -> float:
    """The measured cycle less the communication in its own trace."""
    assert each.cycle_ms is not None, "only timed configurations are predicted"
    own = results.trials.filter(results.trials["configuration_id"] == each.configuration_id)
    if own["num_gpus"].max() == 1:
        return each.cycle_ms
    measured = communication_ms(results, each.configuration_id)
    if measured is None:
        raise NotPredictableError(
            f"{each.label}: measured on {own['num_gpus'][0]} GPUs without a kernel trace, so its own communication "
            "cannot be taken out"
        )
    return each.cycle_ms - measured
