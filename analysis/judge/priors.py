"""Parameters of the model of launches, and what is known of them before any data.

A parameter is a standard deviation on the log scale (0.01 is 1 %) or, for `share`, a share of a variance. The model
works on their logarithms, and on the logit of the share.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

KINDS = ("plain", "chain", "tree")
_PRIORS: Mapping[str, tuple[float, float]] = {
    # name: median and width (of the logarithm; of the logit for the share). Recorded launches of one configuration
    # differ by 0.2 % (plain, two H200), 0.3 to 1 % (chains, one H200) and 10 to 12 % (chains, two H200): two widths
    # cover all of them. Such a prior counts for less than one repeated launch.
    "plain": (0.006, 1.3),
    "chain": (0.01, 1.3),
    "tree": (0.01, 1.3),
    "share": (0.5, 1.5),
    "communicator": (0.007, 0.4),  # 0.6 to 0.8 % of the cycle at full size, two H200
    "deviation": (0.003, 1.0),
    "drift": (0.0003, 0.8),  # per cell: 1 % over forty cells, if it is a line; wider, a walk takes what launches are
}
NAMES = tuple(_PRIORS)
PLACE = {name: place for place, name in enumerate(NAMES)}
CENTRE: Array = np.array([0.0 if name == "share" else np.log(median) for name, (median, _) in _PRIORS.items()])
WIDTH: Array = np.array([width for _, width in _PRIORS.values()])
STARTS: Array = np.array([[0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 3.0], [0, 1.6, 1.6, 0, 0, 0, 0]])
"""From CENTRE: as it is, with a drift of 0.6 % a cell, and with chains and trees that differ by 5 %. Launches and drift
can each explain what the other does, so the posterior may have several modes."""
STILL = float(np.log(1e-6))
"""Of a parameter that a sweep does not have."""

MAIN_EFFECT: Mapping[str, float] = {"drafting": 1.0, "intercept": 1.0}
"""Prior standard deviation of main effects on the log scale; all others OTHER_EFFECT."""
OTHER_EFFECT = 0.3
NODE = 0.1
"""Between nodes."""
STEP = 0.1
"""Of a step of the drift: another host or another clock, up to some 20 %."""
EVIDENCE = 3.0
"""Gain in log evidence, beyond the choice among all places, that a step or an outlier must bring: odds of 20."""
DOUBT = 0.12
"""Standard deviation by which a single launch may be off for a reason of its own. Launches of one configuration
differed by 11.5 % on two H200 (`recordings/h200_x2_nccl_v1`), and the founding case's baseline by 7.9 % without a known
cause."""
