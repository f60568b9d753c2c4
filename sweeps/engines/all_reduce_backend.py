"""What serves the all-reduces of decode: by NCCL's own log, else by the server's arguments and log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sweeps.nccl.log import NcclLog, Operation

DECODE_BYTES_AT_LEAST = 1 << 10
"""Half a thousand hidden units in bf16; a communicator's warm-up and a barrier are one number."""
DECODE_BYTES_AT_MOST = 1 << 20
"""All-reduces of decode and verify are smaller; those of prefill need not be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """What one rank reported of itself."""

    rank: int
    environment: Mapping[str, str]
    """By C getenv, from inside the rank: os.environ and /proc/PID/environ can both differ from it."""
    nccl: NcclLog | None = None
    """None if NCCL's log was not asked for."""


def decode_operations(ranks: Sequence[RankFacts], decode_bytes: frozenset[int]) -> tuple[Operation, ...]:
    """All-reduces of the decode; printed by rank 0 alone, and equal in all ranks of a communicator."""
    return tuple(
        operation
        for facts in ranks
        if facts.nccl
        for operation in facts.nccl.operations
        if operation.collective in ("AllReduce", None)
        and (operation.num_bytes in decode_bytes if decode_bytes else _like_a_decode(operation.num_bytes))
    )


def _like_a_decode(num_bytes: int) -> bool:
    return DECODE_BYTES_AT_LEAST <= num_bytes <= DECODE_BYTES_AT_MOST


def all_reduce_backend(
    resolved: Mapping[str, str | None],
    log_text: str,
    ranks: Sequence[RankFacts] = (),
    *,
    decode_bytes: frozenset[int] = frozenset(),
) -> str | None:
    """What serves decode-size all-reduces: `none` (one rank), `nccl`, `nccl_symmetric`, `custom`, `flashinfer`, ...

    NCCL's own log decides if it is there; else the server's arguments and log, in its order of preference.
    None if neither tells.
    """
    if resolved.get("tp_size") == "1":
        return "none"
    operations = decode_operations(ranks, decode_bytes)
    if operations:
        return "nccl_symmetric" if any(operation.symmetric for operation in operations) else "nccl"
    if "tp_size" not in resolved:
        return None
    for backend, field in (
        ("nccl_symmetric", "enable_symm_mem"),
        ("flashinfer", "enable_flashinfer_allreduce_fusion"),
        ("mscclpp", "enable_mscclpp"),
        ("torch_symmetric", "enable_torch_symm_mem"),
    ):
        if resolved.get(field) == "True":
            return backend
    refused = "Setup Custom allreduce failed" in log_text or "Custom allreduce is disabled" in log_text
    return "nccl" if refused or resolved.get("disable_custom_all_reduce") == "True" else "custom"
