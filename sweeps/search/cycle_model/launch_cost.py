"""What the next trial costs in wall seconds, learnt from the sweep's own trials."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sweeps.search.cycle_model.terms import Floats
from sweeps.search.observations import Observation, Observations

_RELAUNCH_S = 400.0
"""Seconds of a launch until the sweep has launched once. Not tuned: a guess; large models take minutes."""
_BLOCK_S = 5.0
"""Seconds of a block until one was measured. Not tuned: a launch costs many times more."""
_LAUNCH_ACTIVITIES = ("launch", "weight_load", "capture", "stop")
_BLOCK_ACTIVITIES = ("warmup", "measure", "trace", "switch")


def trial_seconds(observations: Observations, launch_keys: NDArray[np.str_], num_blocks: int) -> Floats:
    """Wall seconds of a whole trial, by launch key: blocks alone if the live server can serve it, else a launch too."""
    ended = [seen for seen in observations if seen.status != "running" and seen.seconds]
    launches_s = [spent_s for seen in ended if (spent_s := _spent_s(seen, _LAUNCH_ACTIVITIES)) and seen.relaunched]
    blocks_s = [_spent_s(seen, _BLOCK_ACTIVITIES) / len(seen.blocks) for seen in ended if seen.blocks]
    # The first launch on a machine is colder than the others.
    launch_s = float(np.mean(launches_s[1:] or launches_s)) if launches_s else _RELAUNCH_S
    block_s = float(np.mean(blocks_s)) if blocks_s else _BLOCK_S
    is_live = launch_keys == observations.live_launch_key
    return np.where(is_live, 0.0, launch_s) + block_s * num_blocks


def _spent_s(seen: Observation, activities: tuple[str, ...]) -> float:
    return sum(seen.seconds.get(name, 0.0) for name in activities)
