"""Whether NCCL settings acted in a launch: the one rule that grading, search and report share.

Two facts decide. Who does the all-reduces of the target's forward: a trace of the server tells, else the launch's
evidence (`all_reduce` of table `trials`). And what NCCL read: a set of which NCCL read no variable is the default set
under another name. The rule lives beside the tables because `analysis` may import nothing else of `sweeps`. It is
applied to what the tables hold and stored in no column of its own, so recordings made before the rule follow it too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

BY_NCCL = frozenset({"nccl", "nccl_symmetric"})
"""Values of `all_reduce` that mean NCCL."""

ALL_REDUCE_KERNELS = r"(?i)all_?reduce|cross_device_reduce|one_?shot|two_?shot|multimem|lamport"
NCCL_KERNELS = "(?i)nccl"
"""Regular expressions for kernel names: whatever does an all-reduce, and whatever belongs to NCCL."""


def may_act(all_reduce: str | None) -> bool:
    """Whether NCCL does the all-reduces, or may: None is not known."""
    return all_reduce is None or all_reduce in BY_NCCL


def is_nccl_all_reduce(kernel: str) -> bool:
    """Whether a kernel of this name is an all-reduce of NCCL's."""
    return bool(re.search(ALL_REDUCE_KERNELS, kernel) and re.search(NCCL_KERNELS, kernel))


def traced_by_nccl(kernels: Iterable[str]) -> bool | None:
    """Whether NCCL did an all-reduce, by the kernels of a target forward; None without an all-reduce among them."""
    reduces = [kernel for kernel in kernels if re.search(ALL_REDUCE_KERNELS, kernel)]
    return any(map(is_nccl_all_reduce, reduces)) if reduces else None


def variables_read(evidence: Iterable[tuple[str, str | None]]) -> frozenset[str]:
    """Variables that NCCL read, by (`setting`, `read_by_nccl`) of a launch's evidence."""
    return frozenset(name for setting, read in evidence if read is not None and (name := nccl_variable(setting)))


def nccl_variable(setting: str) -> str | None:
    """`NCCL_PROTO` of the setting `env.NCCL_PROTO`; None for all other settings."""
    return setting.removeprefix("env.") if setting.startswith("env.NCCL_") else None


def is_unread(nccl_set: Collection[str], read: Collection[str]) -> bool:
    """Whether NCCL read no variable of a set. False if nothing is known of what NCCL read: `read` is empty then."""
    return bool(nccl_set) and bool(read) and not set(nccl_set) & set(read)
