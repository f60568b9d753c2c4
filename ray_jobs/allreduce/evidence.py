"""What NCCL chose for each size of a set: one untimed run with NCCL's log on, read and kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray_jobs.allreduce.ranks import RankPlan, run_ranks
from sweeps.nccl.log import NcclLog, excerpt, read_nccl_log

LOG_SETTINGS = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,TUNING,P2P,SHM"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SetEvidence:
    """Rank 0's account of one set: only that rank prints the choice per operation."""

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


def collect(
    plan: RankPlan, environment: Mapping[str, str], variables: Mapping[str, str], *, scratch: Path, kept: Path
) -> SetEvidence | None:
    """Run every size once with the log on; an excerpt of each rank's log goes to `kept`/rankN.log.

    None where rank 0 left no log.
    """
    run_ranks(replace(plan, repeats=0), {**environment, **LOG_SETTINGS}, scratch, log_env="NCCL_DEBUG_FILE")
    kept.mkdir(parents=True, exist_ok=True)
    first: SetEvidence | None = None
    for rank in range(plan.world_size):
        path = scratch / f"rank{rank}.nccl.log"
        if not path.is_file():
            continue
        text = path.read_bytes()
        path.unlink()
        if rank == 0:
            first = SetEvidence(log=read_nccl_log(text.decode("utf-8", errors="replace")), variables=variables)
        (kept / f"rank{rank}.log").write_bytes(excerpt(text))
    return first
