"""What NCCL chose for each size, from the log of the very communicator that was timed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeps.nccl.log import NcclLog, excerpt, read_nccl_log

LOG_SETTINGS = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,TUNING,P2P,SHM"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SetEvidence:
    """Rank 0's account of one communicator: only that rank prints the choice per operation."""

    log: NcclLog
    variables: Mapping[str, str]

    @property
    def unread(self) -> list[str]:
        """Variables of the set that NCCL did not read: misspelt, or without a part to play here."""
        return sorted(self.variables.keys() - self.log.set_by_environment.keys())

    def columns(self, num_bytes: int | None) -> dict[str, Any]:
        """Columns of one row of the table; `algorithm`, `protocol`, `channels` for the all-reduce of this size."""
        chosen = [one for one in self.log.operations if one.num_bytes == num_bytes and one.collective == "AllReduce"]
        last = chosen[-1] if chosen else None
        return {
            "algorithm": last and last.algorithm,
            "protocol": last and last.protocol,
            "channels": last and last.channels,
            "transports": sorted(self.log.transports),
            "unread": self.unread,
        }


def read_evidence(logs: Path, variables: Mapping[str, str]) -> SetEvidence | None:
    """Read `logs`/rank0.log, and shorten every rank's log to its excerpt. None if rank 0 left no log."""
    first: SetEvidence | None = None
    for path in sorted(logs.glob("rank*.log")):
        text = path.read_bytes()
        if path.name == "rank0.log":
            first = SetEvidence(log=read_nccl_log(text.decode("utf-8", errors="replace")), variables=variables)
        path.write_bytes(excerpt(text))
    return first
