"""Speaks the protocol of `ray_jobs/allreduce/worker.py` without torch; each set misbehaves as its STANDIN says."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MICROSECONDS = {"slow": 20.0}
"""Per token; 10 unless the set's STANDIN is here."""


class Rank:
    """This process: its options, its journal, and what the other ranks answered in the scratch folder."""

    def __init__(self) -> None:
        words = sys.argv[1:]
        self.options = dict(zip(words[::2], words[1::2], strict=False))
        self.number = int(self.options["--rank"])
        self.out = Path(self.options["--out"]).open("a", encoding="utf-8")  # noqa: SIM115
        self.members: list[dict[str, Any]] = json.loads(Path(self.options["--members"]).read_text())
        self.step = 0

    def write(self, **record: object) -> None:
        self.out.write(json.dumps(record) + "\n")
        self.out.flush()

    def stage(self, name: str, member: int | None = None) -> None:
        self.step += 1
        self.write(stage=name, member=member, step=self.step)

    def conduct(self, member: int) -> str:
        return str(self.members[member]["env"].get("STANDIN", os.environ.get("STANDIN", "good")))

    def all_agree(self, *, good: bool) -> bool:
        store, ranks = Path(self.options["--scratch"]), range(int(self.options["--world-size"]))
        answers = [store / f"answer-{self.step}-{rank}" for rank in ranks]
        temporary = store / f"answer-{self.number}.tmp"
        temporary.write_text("good" if good else "bad")
        temporary.replace(answers[self.number])
        while not all(answer.exists() for answer in answers):
            time.sleep(0.01)
        return all(answer.read_text() == "good" for answer in answers)


def main() -> None:
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # as the worker: a rank does not outlive its owner
    rank = Rank()
    if not Path("/proc", rank.options["--owner"].partition("@")[0]).exists():
        sys.exit("the process that started this rank has ended")
    rank.write(pid=os.getpid())
    if os.environ.get("STANDIN") == "no_start":
        time.sleep(600)
    if rank.number == 0:
        seen = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
        rank.write(machine={"gpu_name": "none", "nccl_version": "2.0.0", "torch_version": "0", "env": seen})
    live = [member for member in range(len(rank.members)) if set_up(rank, member)]
    first, rounds = int(rank.options["--first-round"]), int(rank.options["--rounds"])
    for round_number in range(first, first + rounds):
        for member in live[:: 1 if round_number % 2 == 0 else -1]:
            rank.stage("round", member)
            time_round(rank, member, round_number, is_last=round_number == first + rounds - 1)
    rank.stage("done")
    rank.all_agree(good=True)
    if os.environ.get("STANDIN") == "does_not_end":
        time.sleep(600)


def set_up(rank: Rank, member: int) -> bool:
    conduct = rank.conduct(member)
    rank.stage("set_up", member)
    copy = Path(rank.options["--scratch"]) / f"libnccl-{member}.so"
    if rank.number == 0:
        copy.write_text("a library")
    write_log(rank, member)
    if conduct == "hang" or (conduct == "hang_on_rank_1" and rank.number == 1):
        rank.write(child=subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
        time.sleep(600)
    if conduct == "crash":
        sys.exit("RuntimeError: rank 1 has had enough") if rank.number == 1 else time.sleep(600)
    if conduct == "no_algorithm":
        rank.write(failed={"member": member, "reason": "ncclAllReduce: invalid usage"})
    if conduct == "no_memory_on_rank_1" and rank.number == 1:
        rank.write(failed={"member": member, "reason": "cannot copy NCCL: no space left"})
    if conduct == "wrong_on_rank_1" and rank.number == 1:
        rank.write(wrong={"member": member, "mode": "graph", "tokens": 2})
    rank.stage("agree", member)
    refused = conduct == "no_algorithm" or (conduct == "no_memory_on_rank_1" and rank.number == 1)
    agreed = rank.all_agree(good=not refused)
    if rank.number == 0:
        copy.unlink(missing_ok=True)
        rank.write(ready={"member": member, "init_s": 0.5, "communicator_mib": 100.0 + member})
    return agreed


def time_round(rank: Rank, member: int, round_number: int, *, is_last: bool) -> None:
    conduct = rank.conduct(member)
    if conduct == "hang_in_last_round" and is_last:
        time.sleep(600)
    if conduct == "half_line":
        rank.out.write('{"stage": "rou')
        rank.out.flush()
        os._exit(9)
    if rank.number:
        return
    for tokens in (1, 2):
        us = MICROSECONDS.get(conduct, 10.0) * tokens + 0.1 * round_number
        samples_us = [us + 0.01 * repeat for repeat in range(int(rank.options["--repeats"]))]
        where = {"member": member, "round": round_number, "mode": "graph", "tokens": tokens}
        rank.write(cell={**where, "samples_us": samples_us, "timer_kind": "cuda_event"})


def write_log(rank: Rank, member: int) -> None:
    """As NCCL would, had it read NCCL_PROTO from this member's environment."""
    env = rank.members[member]["env"]
    said = []
    if rank.conduct(member) == "no_algorithm":
        said.append("WARN No algorithm/protocol available for function AllReduce with datatype ncclBfloat16.")
    if env["NCCL_DEBUG"] == "INFO":
        protocol = env.get("NCCL_PROTO")
        if protocol:
            said.append(f"INFO NCCL_PROTO set by environment to {protocol}")
        said.append(f"INFO Channel 00/0 : {rank.number}[{rank.number}] -> 1[1] via P2P/IPC")
        choice = f"Bytes -> Algo RING proto {protocol or 'SIMPLE'} channel{{Lo..Hi}}={{0..1}}"
        said.extend(f"INFO AllReduce: {14336 * tokens} {choice}" for tokens in (1, 2) if rank.number == 0)
        said.append("INFO " + "x" * 100_000 + "\nlast line")
    text = "\n".join(f"node:1:1 [{rank.number}] NCCL {line}" for line in said)
    (Path(rank.members[member]["logs"]) / f"rank{rank.number}.log").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
