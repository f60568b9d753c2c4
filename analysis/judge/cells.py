"""Cells: one configuration in one launch of the server, block by block. The raw material of every comparison.

A metric of a cell is a ratio of sums over its blocks (tokens / seconds, tokens / verify cycles, milliseconds / cycles),
never a mean of means. A launch is what repeats independently: all trials that one server served share its luck.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import polars as pl

from analysis.data.load import Results

Array = npt.NDArray[np.float64]

_TOKENS = pl.col("accept_histogram").list.eval(pl.element() * pl.int_range(pl.len())).list.sum()
_VERIFIES = pl.col("accept_histogram").list.sum()
_CYCLES = pl.col("num_cycles").fill_null(1)

METRICS: Mapping[str, tuple[pl.Expr, pl.Expr]] = {
    "tok_s": (pl.col("decode_tokens"), pl.col("decode_s")),
    "accept_length": (
        pl.coalesce(_TOKENS, pl.col("accept_length") * _CYCLES),
        pl.coalesce(_VERIFIES, pl.when(pl.col("accept_length").is_not_null()).then(_CYCLES)),
    ),
    **{
        name: (pl.col(name) * _CYCLES, pl.when(pl.col(name).is_not_null()).then(_CYCLES))
        for name in ("draft_ms", "verify_ms", "verify_forward_ms", "extend_ms", "gap_ms", "cycle_ms")
    },
}
"""Metric -> numerator and denominator of a block. Batch sizes within a block are taken as constant."""
HIGHER_IS_BETTER = frozenset({"tok_s", "accept_length"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Cells:
    """L cells x B blocks of one metric; NaN marks a block that a cell does not have (never leaves this package)."""

    metric: str
    keys: tuple[str, ...]
    """Configuration id of each cell."""
    twins: tuple[str, ...]
    """As `keys`, but the default's for a set that NCCL did not read: cells of one twin are repeats."""
    launches: tuple[str, ...]
    nodes: tuple[str, ...]
    at_s: Array
    """Seconds since the node's first trial, mean over the cell's blocks."""
    speculates: npt.NDArray[np.bool_]
    numerators: Array
    denominators: Array
    imported: bool = False
    """Numbers of others: nothing is claimed of what was launched once."""

    def __len__(self) -> int:
        return len(self.keys)

    def total(self, key: str) -> float | None:
        """The metric of a configuration: sum over sum, all its cells and blocks. None where it has none."""
        rows = [index for index, name in enumerate(self.keys) if name == key]
        bottom = np.nansum(self.denominators[rows])
        return float(np.nansum(self.numerators[rows]) / bottom) if bottom > 0 else None

    def positive(self) -> Cells:
        """Those that have a logarithm."""
        rows = np.flatnonzero(np.nansum(self.numerators, axis=1) > 0)
        return Cells(
            metric=self.metric,
            keys=tuple(self.keys[row] for row in rows),
            twins=tuple(self.twins[row] for row in rows),
            launches=tuple(self.launches[row] for row in rows),
            nodes=tuple(self.nodes[row] for row in rows),
            at_s=self.at_s[rows],
            speculates=self.speculates[rows],
            numerators=self.numerators[rows],
            denominators=self.denominators[rows],
            imported=self.imported,
        )

    def log_values(self) -> Array:
        """(L,) natural log of each cell's ratio of sums.

        A cell that lacks blocks (pruned, say) is compared as if it had run them all: what is missing is filled with the
        profile over blocks of the complete cells (those that speculate like it, where there are any).
        """
        present = ~np.isnan(self.denominators)
        values: Array = np.log(np.nansum(self.numerators, axis=1) / np.nansum(self.denominators, axis=1))
        complete = present.all(axis=1)
        for row in np.flatnonzero(~complete):
            like = complete & (self.speculates == self.speculates[row])
            peers = np.asarray(like if like.any() else complete)
            if peers.any():
                values[row] += self._pooled(peers, np.ones_like(present[row])) - self._pooled(peers, present[row])
        return values

    def influences(self) -> Array:
        """(L, B) influence of each block on its cell's log ratio of sums: their mean over blocks is the error (delta
        method), so their variance / B is its sampling variance. Zero mean per cell; NaN where missing."""
        top = self.numerators / np.nanmean(self.numerators, axis=1, keepdims=True)
        bottom = self.denominators / np.nanmean(self.denominators, axis=1, keepdims=True)
        difference: Array = top - bottom
        return difference

    def _pooled(self, rows: npt.NDArray[np.bool_], blocks: npt.NDArray[np.bool_]) -> float:
        return float(np.log(self.numerators[rows][:, blocks].sum() / self.denominators[rows][:, blocks].sum()))


def cells(results: Results, metric: str) -> Cells:
    """The cells that have `metric`."""
    return all_cells(results, (metric,))[metric]


def all_cells(results: Results, metrics: Sequence[str] = tuple(METRICS)) -> dict[str, Cells]:
    """The cells of several metrics, from one pass over the blocks."""
    trials = results.trials.select(
        "trial_id",
        "launch",
        "node",
        "num_steps",
        "twin",
        key="configuration_id",
        since_s=pl.col("started_s") - pl.col("at_s"),
    )
    parts = {f"{place}/{metric}": METRICS[metric][place].cast(pl.Float64) for metric in metrics for place in (0, 1)}
    cell = ["key", "launch"]
    long = results.blocks.select("trial_id", "block_index", "started_s", **parts).join(trials, on="trial_id")
    valid = {metric: pl.col(f"0/{metric}").is_not_null() & (pl.col(f"1/{metric}") > 0) for metric in metrics}
    sums = long.group_by([*cell, "block_index"]).agg(
        *(pl.col(f"{place}/{metric}").filter(valid[metric]).sum() for metric in metrics for place in (0, 1)),
        *(valid[metric].any().alias(f"any/{metric}") for metric in metrics),
    )
    heads = (
        long.group_by(cell)
        .agg(
            pl.col("node").first(),
            pl.col("num_steps").first(),
            pl.col("twin").first(),
            at_s=(pl.col("started_s") - pl.col("since_s")).mean(),
        )
        .sort("node", "at_s", "key")
    )
    return {metric: replace(_of_metric(metric, heads, sums), imported=results.imported) for metric in metrics}


def _of_metric(metric: str, heads: pl.DataFrame, sums: pl.DataFrame) -> Cells:
    own = sums.filter(pl.col(f"any/{metric}"))
    heads = heads.join(own.select("key", "launch").unique(), on=["key", "launch"], how="semi", maintain_order="left")
    own = own.join(heads.with_row_index("row").select("key", "launch", "row"), on=["key", "launch"])
    indices = np.unique(own["block_index"].to_numpy())
    rows = own["row"].to_numpy()
    columns = np.searchsorted(indices, own["block_index"].to_numpy())
    numerators = np.full((heads.height, len(indices)), np.nan)
    denominators = numerators.copy()
    numerators[rows, columns] = own[f"0/{metric}"].to_numpy()
    denominators[rows, columns] = own[f"1/{metric}"].to_numpy()
    return Cells(
        metric=metric,
        keys=tuple(heads["key"]),
        twins=tuple(heads["twin"]),
        launches=tuple(heads["launch"]),
        nodes=tuple(heads["node"]),
        at_s=heads["at_s"].to_numpy().astype(float),
        speculates=(heads["num_steps"].fill_null(0) > 0).to_numpy(),
        numerators=numerators,
        denominators=denominators,
    )
