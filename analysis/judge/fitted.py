"""One metric of a sweep and the model fitted to its cells: the material of every comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.judge.cells import Array, Cells
from analysis.judge.covariance import Cell
from analysis.judge.mixed_model import Posterior, fit, follow


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """Cells of one metric, and what the model says of their configurations."""

    cells: Cells
    posterior: Posterior | None
    """None for a metric that does not depend on the launch (accept length), and without cells."""
    noise: Array
    """(cells,) variance of a cell's log value by the noise of its blocks."""
    influences: Array
    """(cells, blocks) of `Cells.influences`."""
    kinds: tuple[str, ...]
    """Of each cell: plain, chain or tree."""
    repeated: frozenset[str]
    """Kinds of server (plain, chain, tree) of which some configuration was launched twice."""

    @property
    def drift(self) -> float | None:
        """Relative change between the highest and the lowest of the drift; None without a model."""
        if self.posterior is None or not self.posterior.drift.size:
            return None
        return float(np.expm1(np.ptp(self.posterior.drift)))

    @property
    def outliers(self) -> Mapping[str, float]:
        """Launches that no other launch would have predicted -> by how many standard deviations."""
        return {} if self.posterior is None else self.posterior.outliers


def fit_cells(
    cells: Cells,
    settings: Mapping[str, Mapping[str, Any]],
    *,
    launches_matter: bool = True,
    whole: Fitted | None = None,
) -> Fitted:
    """Fit the model to the cells that have a logarithm.

    Args:
        settings: configuration id -> its dimensions, as `factors.Point.settings`.
        launches_matter: False for accept length, which depends on prompts and not on the launch.
        whole: throughput of the same cells, whose spreads and drift a time follows.
    """
    cells = cells.positive()
    influences = cells.influences()
    kinds = [kind_of(settings[key]) for key in cells.keys]
    noise = _noise(influences, kinds)
    posterior = None
    if launches_matter and len(cells):
        described = [_describe(cells, row, settings, kinds[row], float(noise[row])) for row in range(len(cells))]
        values = cells.log_values()
        places: dict[tuple[str, str], int] = {}
        if whole is not None:
            places = {cell: row for row, cell in enumerate(zip(whole.cells.keys, whole.cells.launches, strict=True))}
        own = list(zip(cells.keys, cells.launches, strict=True))
        if whole is not None and whole.posterior is not None and all(cell in places for cell in own):
            posterior = follow(whole.posterior, described, values, [places[cell] for cell in own])
        else:
            posterior = fit(described, values)
    return Fitted(
        cells=cells,
        posterior=posterior,
        noise=noise,
        influences=influences,
        kinds=tuple(kinds),
        repeated=_repeated(cells, kinds),
    )


def kind_of(settings: Mapping[str, Any]) -> str:
    """plain, chain or tree."""
    if not int(settings["num_steps"] or 0):
        return "plain"
    return "chain" if settings["eagle_topk"] == "1" else "tree"


def _describe(cells: Cells, row: int, settings: Mapping[str, Mapping[str, Any]], kind: str, variance: float) -> Cell:
    own = settings[cells.keys[row]]
    drafting = "/".join(str(own[name]) for name in ("num_steps", "eagle_topk", "num_draft_tokens", "drafter"))
    acted = settings.get(cells.twins[row], {**own, "nccl": "default"} if cells.twins[row] != cells.keys[row] else own)
    others = {name: str(acted.get(name)) for name in acted if name not in _DRAFTING}
    return Cell(
        configuration=cells.keys[row],
        settings={"drafting": drafting if kind != "plain" else "none", **others},
        kind=kind,
        launch=cells.launches[row],
        communicator=str(own.get("nccl")),
        node=cells.nodes[row],
        at_s=float(cells.at_s[row]),
        variance=variance,
    )


_DRAFTING = ("num_steps", "eagle_topk", "num_draft_tokens", "drafter")


def _noise(influences: Array, kinds: Sequence[str]) -> Array:
    """(cells,) of each cell's mean over blocks: what is left of its blocks once the prompts' part is taken out.

    A prompt's part is the mean influence of a block over all complete cells of one kind.
    """
    names = np.array(kinds)
    complete = ~np.isnan(influences).any(axis=1)
    per_block = np.zeros(len(kinds))
    for kind in dict.fromkeys(kinds):
        rows = np.flatnonzero((names == kind) & complete)
        if len(rows) > 1 and influences.shape[1] > 1:
            residual = influences[rows] - influences[rows].mean(axis=0)
            df = (len(rows) - 1) * (influences.shape[1] - 1)
            per_block[names == kind] = float((residual**2).sum()) / df
        else:
            own = influences[names == kind]
            per_block[names == kind] = float(np.nanvar(own)) if np.isfinite(own).any() else 0.0
    blocks = np.maximum((~np.isnan(influences)).sum(axis=1), 1)
    found: Array = per_block / blocks
    return found


def _repeated(cells: Cells, kinds: Sequence[str]) -> frozenset[str]:
    launches: dict[tuple[str, str], set[str]] = {}
    for kind, twin, launch in zip(kinds, cells.twins, cells.launches, strict=True):
        launches.setdefault((kind, twin), set()).add(launch)
    return frozenset(kind for (kind, _), of_one in launches.items() if len(of_one) > 1)
