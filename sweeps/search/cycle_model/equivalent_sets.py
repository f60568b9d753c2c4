"""Equivalent NCCL sets: configurations that differ only in NCCL settings which do not act.

Either another kernel does the all-reduces, or NCCL reads no variable of a set (`sweeps.results.nccl_acts`). Both depend
on server arguments, variables and the machine alone. So one launch tells for all step counts, and the search need not
launch the same server again under another name. What NCCL still does if another kernel reduces is left out: it gathers
logits, one of 50 collectives in a forward of 24 layers (two H200, traced).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sweeps.results.nccl_acts import BY_NCCL, traced_by_nccl
from sweeps.search.observations import Observation
from sweeps.spec.names import DEFAULT_NCCL_SET
from sweeps.spec.space import Configuration


def where_nccl_acts(members: Sequence[Configuration], observations: Iterable[Observation]) -> NDArray[np.bool_]:
    """Whether the NCCL set of each member acts, or may, (members,). The empty set counts as acting if NCCL reduces."""
    seen = tuple(observations)
    other_kernel, unread = _reduced_by_others(seen), _unread(seen)
    return np.array(
        [each.server_settings not in other_kernel and each.nccl_and_server_settings not in unread for each in members],
        dtype=np.bool_,
    )


def find_representatives(
    members: Sequence[Configuration], nccl_acts: NDArray[np.bool_], *, failed: Collection[Configuration] = ()
) -> NDArray[np.int64]:
    """Row of the member that is measured for each member, (members,): its own row if its NCCL set acts.

    A set that does not act is measured as the default set, or as the first of its kind if the default is no member.

    Args:
        failed: members that are measured for themselves alone.
    """
    if nccl_acts.all():
        return np.arange(len(members))
    first: dict[Configuration, int] = {}
    for row, member in enumerate(members):
        if not member.nccl_env and nccl_acts[row] and member not in failed:
            first.setdefault(_with_default(member), row)
    rows = []
    for row, (member, acts) in enumerate(zip(members, nccl_acts.tolist(), strict=True)):
        alone = acts or member in failed
        rows.append(row if alone else first.setdefault(_with_default(member), row))
    return np.array(rows, dtype=np.int64)


def _reduced_by_others(observations: Iterable[Observation]) -> set[object]:
    """Arguments and variables with which another kernel does the all-reduces, in every launch that tells.

    Where a launch was traced, what launches without a trace state does not count.
    """
    stated: dict[object, list[bool]] = {}
    traced: dict[object, list[bool]] = {}
    for seen in observations:
        settings = seen.trial.configuration.server_settings
        by_nccl = traced_by_nccl(kernel.kernel for kernel in seen.kernels if kernel.phase == "verify")
        if by_nccl is not None:
            traced.setdefault(settings, []).append(by_nccl)
        elif seen.all_reduce is not None:
            stated.setdefault(settings, []).append(seen.all_reduce in BY_NCCL)
    return {settings for settings, by_nccl in {**stated, **traced}.items() if not any(by_nccl)}


def _unread(observations: Iterable[Observation]) -> set[object]:
    """Arguments, variables and NCCL set of every launch in which NCCL read no variable of the set."""
    return {seen.trial.configuration.nccl_and_server_settings for seen in observations if seen.nccl_unread}


def _with_default(configuration: Configuration) -> Configuration:
    return replace(configuration, nccl_set=DEFAULT_NCCL_SET, nccl_env=())
