"""Shapes of a drift over the time of each node: a walk, a line, a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis.judge.covariance import Cell
from analysis.judge.priors import Array


def walk(cells: Sequence[Cell]) -> Array:
    """(cells, increments): which increments of its node's walk lie before a cell; each by the root of its time."""
    columns = []
    for node in dict.fromkeys(cell.node for cell in cells):
        times = np.array([cell.at_s if cell.node == node else np.inf for cell in cells])
        ordered = np.unique(times[np.isfinite(times)])
        gaps = np.diff(ordered)
        mean = gaps.mean() if len(gaps) else 1.0
        columns += [
            np.where(np.isfinite(times), (times > start) * np.sqrt(gap / mean), 0.0)
            for start, gap in zip(ordered, gaps, strict=False)
        ]
    found: Array = np.column_stack(columns) if columns else np.zeros((len(cells), 0))
    return found


def line(cells: Sequence[Cell]) -> Array:
    """(cells, cells) covariance of a line over each node's time, with a slope of 1 a cell."""
    columns = []
    for node in dict.fromkeys(cell.node for cell in cells):
        own = np.array([cell.node == node for cell in cells])
        times = np.array([cell.at_s for cell in cells])
        middle, half = (times[own].max() + times[own].min()) / 2, np.ptp(times[own]) / 2
        ends = own.sum() / 2
        columns.append(np.where(own, ends * (times - middle) / half, 0.0) if half > 0 else np.zeros(len(cells)))
    found: Array = np.array(columns).T @ np.array(columns)
    return found
