"""States of one server: whether the winner holds when it is launched by itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from analysis.data.load import Results
from analysis.judge.claims import MARGIN
from analysis.judge.fitted import Fitted

_NORMAL = 1.96
"""Standard errors of a 95 % interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Confirmation:
    """The winner in a server of its own against its state in a server of many."""

    configuration_id: str
    apart: float
    """Relative: -0.01 is a server of its own that is 1 % slower."""
    interval: tuple[float, float]
    """95 %, of this launch: pairs of blocks."""
    lead_alone: float | None
    """Over the control, in its own server; None if the winner is the control or there is no control."""
    trial_ids: tuple[str, ...]
    """Launched alone."""
    confirmed: bool


def confirmation(results: Results, throughput: Fitted, winner: str, control: str | None) -> Confirmation | None:
    """Compare launches that served the winner alone with those that served more; None without one of each.

    Not confirmed: the lead over the control is gone in a server of its own, or that server is slower than the state by
    more than MARGIN and by more than launches of its kind differ by.
    """
    cells = throughput.cells
    served: dict[str, set[str]] = {}
    for key, launch in zip(cells.keys, cells.launches, strict=True):
        served.setdefault(launch, set()).add(key)
    rows = np.array([key == winner for key in cells.keys])
    alone = rows & np.array([len(served[launch]) == 1 for launch in cells.launches])
    state = rows & ~alone
    if not (alone.any() and state.any()) or winner == control:
        return None
    logs = np.log(cells.numerators / cells.denominators)
    pairs = np.nanmean(logs[alone], axis=0) - np.nanmean(logs[state], axis=0)
    pairs = pairs[~np.isnan(pairs)]
    if len(pairs) < 2:
        return None
    values = cells.log_values()
    mean = float(values[alone].mean() - values[state].mean())
    error = float(np.std(pairs, ddof=1)) / np.sqrt(len(pairs))
    against = np.array([key == control for key in cells.keys])
    lead = float(values[alone].mean() - values[against].mean()) if against.any() else None
    lead_in_state = float(values[state].mean() - values[against].mean()) if against.any() else None
    too_slow = mean < np.log1p(-MARGIN) - _NORMAL * np.sqrt(2) * _launch_sd(throughput, alone)
    lost = lead is not None and lead_in_state is not None and lead <= 0 < lead_in_state
    names = {launch for launch, used in zip(cells.launches, alone, strict=True) if used}
    trials = results.trials.filter(pl.col("launch").is_in(sorted(names)))["trial_id"].to_list()
    return Confirmation(
        configuration_id=winner,
        apart=float(np.expm1(mean)),
        interval=(float(np.expm1(mean - _NORMAL * error)), float(np.expm1(mean + _NORMAL * error))),
        lead_alone=None if lead is None else float(np.expm1(lead)),
        trial_ids=tuple(trials),
        confirmed=not (too_slow or lost),
    )


def _launch_sd(throughput: Fitted, rows: npt.NDArray[np.bool_]) -> float:
    """By the model, of launches of the kind of `rows`."""
    if throughput.posterior is None:
        return 0.0
    kind = next(kind for kind, used in zip(throughput.kinds, rows, strict=True) if used)
    scales = throughput.posterior.scales
    own = scales.get(kind, 0.0) if kind != "plain" else 0.0
    return float(np.hypot(scales.get("plain", 0.0), own))
