"""Configurations that are one thing to the server: NCCL sets where something else than NCCL does the all-reduces.

Who serves them is evidence of each launch, and the same for all NCCL sets: it depends on arguments, variables and the
machine. So one launch tells for every set with the same arguments, and the search need not launch those. What NCCL
still does there is left out: it gathers logits, one of 50 collectives in a forward of 24 layers (two H200, traced).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sweeps.search.cycle_model.allreduce_prior import all_reduces
from sweeps.search.observations import Observation
from sweeps.spec.space import Configuration

_BY_NCCL = frozenset({"nccl", "nccl_symmetric"})


def where_nccl_acts(members: Sequence[Configuration], observations: Iterable[Observation]) -> NDArray[np.bool_]:
    """Of each member whether NCCL does its all-reduces, or may, (members,)."""
    inert = _inert(observations)
    if not inert:
        return np.ones(len(members), dtype=np.bool_)
    return np.array([_settings(member) not in inert for member in members])


def find_stand_ins(
    members: Sequence[Configuration], nccl_acts: NDArray[np.bool_], *, failed: Collection[Configuration] = ()
) -> NDArray[np.int64]:
    """Of each member the row of the one that stands for it, (members,): its own where NCCL sets act.

    Args:
        failed: they stand for themselves alone.
    """
    if nccl_acts.all():
        return np.arange(len(members))
    first: dict[object, int] = {}
    rows = []
    for row, (member, acts) in enumerate(zip(members, nccl_acts.tolist(), strict=True)):
        if acts or member in failed:
            rows.append(row)
        else:
            rows.append(first.setdefault(replace(member, nccl_set="", nccl_env=()), row))
    return np.array(rows, dtype=np.int64)


def _inert(observations: Iterable[Observation]) -> set[object]:
    """Arguments and variables with which every launch that told had its all-reduces served by something else."""
    told: dict[object, list[bool]] = {}
    for seen in observations:
        if seen.all_reduce is not None:
            by_nccl = seen.all_reduce in _BY_NCCL or all_reduces(seen.kernels) > 0
            told.setdefault(_settings(seen.trial.configuration), []).append(by_nccl)
    return {settings for settings, by_nccl in told.items() if not any(by_nccl)}


def _settings(configuration: Configuration) -> object:
    return (configuration.args, configuration.env)
