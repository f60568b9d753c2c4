"""What the controls of several nodes say about the nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from analysis.judge.claims import MARGIN
from analysis.judge.verdict import ControlRun


def nodes_apart(runs: Sequence[ControlRun]) -> str:
    """How far the nodes are apart by their controls, in one or two sentences; nothing if there is one node."""
    by_node: dict[str, list[float]] = {}
    for run in runs:
        by_node.setdefault(run.node, []).append(run.tok_s)
    if len(by_node) < 2:
        return ""
    means = {node: math.exp(sum(map(math.log, rates)) / len(rates)) for node, rates in by_node.items()}
    slow, fast = min(means, key=lambda node: means[node]), max(means, key=lambda node: means[node])
    gap = 1 - means[slow] / means[fast]
    if gap <= MARGIN:
        return f"The controls of the {len(means)} nodes are within {gap:.1%} of each other."
    return (
        f"Nodes differ: the control reached {means[slow]:.1f} tok/s on {slow} ({_times(by_node[slow])}), {gap:.1%} "
        f"less than on {fast} ({means[fast]:.1f}, {_times(by_node[fast])}). What a node differs by is taken out of "
        "the comparisons."
    )


def _times(rates: Sequence[float]) -> str:
    return f"{len(rates)} run{'' if len(rates) == 1 else 's'}"
