"""What anybody could find: generalised least squares by somebody who knows every spread, the drift and the nodes.

No judgement that has to learn these finds a gain more often, at the same rate of false claims. A goal that the oracle
misses asks for more launches, not for a better analysis.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy import stats

from benchmarks.verdict_scenes.noise import Noise
from benchmarks.verdict_scenes.sweep import Sweep
from benchmarks.verdict_scenes.truth import DEFAULT_SET, Array, Configuration

_LEVEL = 0.05


def finds(sweep: Sweep, noise: Noise) -> dict[str, float]:
    """`oracle found`: all gains of NCCL sets, after Holm; `oracle width` of an NCCL effect's interval, in percent."""
    truth = sweep.truth
    gains = {gain.nccl: gain.relative for gain in truth.gains if gain.relative}
    rows = np.flatnonzero(~sweep.failed)
    members = [sweep.configurations[row] for row in rows]
    names = sorted({member.nccl for member in members} - {DEFAULT_SET})
    if not gains or not set(gains) <= set(names):
        return {}
    design = _design(sweep, members, names)
    weights = np.linalg.inv(_covariance(sweep, noise, rows))
    precision = design.T @ weights @ design
    covariance = np.linalg.pinv(precision)
    estimate = (covariance @ design.T @ weights @ _values(sweep, noise, rows))[-len(names) :]
    error = np.sqrt(np.diag(covariance)[-len(names) :])
    p_values = dict(zip(names, 2 * stats.norm.sf(np.abs(estimate / error)), strict=True))
    claimed = _holm(p_values)
    return {
        "oracle found": float(np.mean([name in claimed for name in gains])),
        "oracle width": float(np.mean(200 * stats.norm.isf(_LEVEL / 2) * error)),
    }


def _design(sweep: Sweep, members: Sequence[Configuration], names: Sequence[str]) -> Array:
    """A column for each step count and top-k, then one for each set, in proportion to what the set can do there."""
    shapes = sorted({(member.num_steps, member.topk) for member in members})
    columns = [[float((member.num_steps, member.topk) == shape) for member in members] for shape in shapes]
    gaining = {gain.nccl for gain in sweep.truth.gains}
    for name in names:
        of_set = [np.log1p(sweep.truth.gain(member)) if member.nccl == name else 0.0 for member in members]
        most = max(of_set, key=abs) if name in gaining else 0.0
        columns.append(
            [each / most if most else float(m.nccl == name) for each, m in zip(of_set, members, strict=True)]
        )
    return np.array(columns).T


def _values(sweep: Sweep, noise: Noise, rows: npt.NDArray[np.intp]) -> Array:
    """Mean log throughput of each trial, without drift and nodes; first blocks of a launch are left out if slow."""
    values = []
    for row in rows:
        first = int(bool(noise.warm_up) and sweep.table.relaunched[row])
        seen = slice(first, sweep.num_blocks[row])
        own = sweep.slowness[row, seen] - sweep.shared[row, seen]
        values.append(np.log(sweep.truth.value("tok_s", sweep.configurations[row])) - own.mean())
    return np.array(values)


def _covariance(sweep: Sweep, noise: Noise, rows: npt.NDArray[np.intp]) -> Array:
    members = [sweep.configurations[row] for row in rows]
    slots = [sweep.table.slots[row] for row in rows]
    drafts = np.array([member.speculates for member in members])
    sets = np.array([member.set_number for member in members])
    copies = np.array([slot.copy for slot in slots])
    steps = np.array([member.num_steps for member in members])
    launches = sweep.table.launches[rows]
    one_launch = launches[:, None] == launches
    one_communicator = one_launch & (sets[:, None] == sets) & (copies[:, None] == copies)
    one_steps = steps[:, None] == steps
    sds = np.array([noise.launch_sd(drafts=bool(each)) for each in drafts])
    total = one_launch * (np.outer(sds, sds) + noise.branches**2 / 4)
    total += (one_launch & one_steps & drafts) * noise.interaction**2
    total += one_communicator * noise.communicator**2 + (one_communicator & one_steps) * noise.state**2
    keeps = (1 + noise.autocorrelation) / (1 - noise.autocorrelation)
    blocks = np.array([noise.block_sd(drafts=bool(each)) ** 2 for each in drafts]) / sweep.num_blocks[rows]
    return np.asarray(total + np.diag(keeps * blocks))


def _holm(p_values: dict[str, float]) -> set[str]:
    claimed: set[str] = set()
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        if p * (len(p_values) - rank) >= _LEVEL:
            break
        claimed.add(name)
    return claimed
