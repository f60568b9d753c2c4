"""What the all-reduce table lets one expect of an NCCL set before it was ever launched with a model.

The table (`python -m ray_jobs.allreduce_table`, one launch for all sets) times the collective alone; a trace of the
control tells how many of them a forward holds. Their product is where the cycle model starts from; measured trials
overrule it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sweeps.engines.base import KernelTime
from sweeps.results.nccl_acts import is_nccl_all_reduce
from sweeps.spec.document import SpecError
from sweeps.spec.names import DEFAULT_NCCL_SET

LAUNCH_NOISE = 0.10
"""Share by which launches of one set differ on the table (two H200: 9.8 %): less is no expectation."""
_COLUMNS = ("set", "outcome", "tokens", "mode", "us_median")


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReducePrior:
    """Microseconds per all-reduce, by NCCL set and tokens of a forward."""

    us: Mapping[str, Mapping[int, float]]

    def difference_us(self, nccl_set: str, tokens: int) -> float:
        """Difference of one all-reduce to the default set's; 0 within launch noise, and for sets without figures."""
        if nccl_set not in self.us:
            return 0.0
        own, base = (_at(self.us[name], tokens) for name in (nccl_set, DEFAULT_NCCL_SET))
        return own - base if abs(own / base - 1.0) > LAUNCH_NOISE else 0.0


def read_prior(path: Path) -> AllReducePrior:
    """Read `allreduce.parquet`: replayed graphs, as a server decodes, or eager calls if it has none.

    The communicators of one set are averaged.

    Raises SpecError if the table cannot be read or lacks the default set.
    """
    try:
        table = pq.read_table(path, columns=list(_COLUMNS))
    except (OSError, pa.ArrowException, KeyError) as error:
        wanted = "wanted allreduce.parquet of `python -m ray_jobs.allreduce_table`"
        raise SpecError(f"allreduce: {wanted}, but {path} cannot be read: {str(error).splitlines()[0]}") from error
    rows = [row for row in table.to_pylist() if row["outcome"] == "ok" and row["us_median"] is not None]
    modes = {row["mode"] for row in rows}
    mode = "graph" if "graph" in modes else "eager"
    medians: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        if row["mode"] == mode:
            medians.setdefault(row["set"], {}).setdefault(row["tokens"], []).append(row["us_median"])
    us = {
        name: {tokens: float(np.mean(copies)) for tokens, copies in by_tokens.items()}
        for name, by_tokens in medians.items()
    }
    if DEFAULT_NCCL_SET not in us:
        raise SpecError(
            f"allreduce: {path}: wanted figures of the set {DEFAULT_NCCL_SET}, got {', '.join(us) or 'none'}"
        )
    return AllReducePrior(us=us)


def all_reduces(kernels: Iterable[KernelTime]) -> float:
    """NCCL all-reduces of one target forward, as traced; 0 if another kernel does them."""
    return sum(
        kernel.calls_per_cycle for kernel in kernels if kernel.phase == "verify" and is_nccl_all_reduce(kernel.kernel)
    )


def _at(by_tokens: Mapping[int, float], tokens: int) -> float:
    """Between measured sizes linearly, beyond them as at the last."""
    sizes = sorted(by_tokens)
    return float(np.interp(tokens, sizes, [by_tokens[size] for size in sizes]))
