"""Speaks the protocol of `ray_jobs/allreduce/worker.py` without torch; misbehaves as its variable STANDIN says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
    rank, conduct = int(options["--rank"]), os.environ.get("STANDIN", "good")
    out = Path(options["--out"]).open("a", encoding="utf-8")  # noqa: SIM115

    def write(**record: object) -> None:
        out.write(json.dumps(record) + "\n")
        out.flush()

    write(stage="nccl_init", pid=os.getpid())
    if conduct == "hang":
        write(child=subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
        time.sleep(600)
    if conduct == "crash":
        sys.exit("RuntimeError: rank 1 has had enough") if rank == 1 else time.sleep(600)
    if conduct == "no_algorithm":
        print("NCCL WARN No algorithm/protocol available for function AllReduce with datatype ncclBfloat16", flush=True)
        sys.exit("torch.distributed.DistBackendError: invalid usage")
    if rank == 0:
        seen = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
        write(machine={"gpu_name": "none", "nccl_version": "2.0.0", "torch_version": "0", "env": seen})
        for tokens in (1, 2):
            write(row=row(tokens, conduct, repeats=int(options["--repeats"])))
    if "NCCL_DEBUG_FILE" in os.environ:
        Path(os.environ["NCCL_DEBUG_FILE"]).write_text(nccl_log(rank) + "x" * 100_000 + "\nlast line", encoding="utf-8")
    if conduct == "half_line":
        out.write('{"stage": "eag')
        out.flush()
        os._exit(9)
    write(stage="done")
    if conduct == "does_not_close":
        time.sleep(600)


def nccl_log(rank: int) -> str:
    protocol = os.environ.get("NCCL_PROTO")
    said = [f"NCCL_PROTO set by environment to {protocol}"] if protocol else []
    said.append(f"Channel 00/0 : {rank}[{rank}] -> 1[1] via P2P/IPC")
    choice = f"Bytes -> Algo RING proto {protocol or 'SIMPLE'} channel{{Lo..Hi}}={{0..1}}"
    said.extend(f"AllReduce: {14336 * tokens} {choice}" for tokens in (1, 2) if rank == 0)
    return "".join(f"node:1:1 [{rank}] NCCL INFO {line}\n" for line in said)


def row(tokens: int, conduct: str, *, repeats: int) -> dict[str, object]:
    us = 10.0 * tokens * (2 if conduct == "slow" else 1)
    return {
        "bytes": 14336 * tokens,
        "tokens": tokens,
        "mode": "graph",
        "timer_kind": "cuda_event",
        "samples_us": [us + 0.1 * index for index in range(repeats)],
        "outcome": "wrong_output" if conduct == "wrong" and tokens == 2 else "ok",
    }


if __name__ == "__main__":
    main()
