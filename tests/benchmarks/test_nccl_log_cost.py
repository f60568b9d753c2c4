from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.nccl_log_cost import LOGS, RanksError, measure
from ray_jobs.allreduce.ranks import RankPlan

WORKER = """
import argparse, json, os
from pathlib import Path
parser = argparse.ArgumentParser()
for name in ("rank", "out", "members", "first-round"):
    parser.add_argument(f"--{name}")
arguments, _ = parser.parse_known_args()
if os.environ.get("FAILS"):
    raise SystemExit("no ranks today")
member, = json.loads(Path(arguments.members).read_text())
env = {**os.environ, **member["env"]}
logs = env["NCCL_DEBUG"] == "INFO"
spread = 1.0 + os.getpid() % 7 / 1000
factor = 1.0 if not logs else 3.0 if "TUNING" in env["NCCL_DEBUG_SUBSYS"] else 1.5
with open(arguments.out, "a") as out:
    print(json.dumps({"machine": {}}), file=out)
    for mode in ("eager", "graph"):
        cell = {"member": 0, "round": 0, "mode": mode, "tokens": 1, "timer_kind": "host"}
        print(json.dumps({"cell": {**cell, "samples_us": [10 * factor * spread] * 3}}), file=out)
    print(json.dumps({"stage": "done", "member": None, "step": 1}), file=out)
if logs:
    (Path(member["logs"]) / f"rank{arguments.rank}.log").write_text("NCCL INFO")
"""


def plan(folder: Path) -> RankPlan:
    worker = folder / "worker.py"
    worker.write_text(WORKER)
    return RankPlan(
        python=[sys.executable],
        world_size=2,
        backend="gloo",
        token_bytes=2,
        tokens=(1,),
        calls=1,
        warmup=0,
        repeats=3,
        rounds=1,
        grace_s=0.3,
        worker=worker,
    )


def test_ratios_are_of_the_servers_log_settings_to_none(tmp_path: Path) -> None:
    figures = measure(plan(tmp_path), pairs=2, env=os.environ, folder=tmp_path)
    for log, factor in zip(LOGS, (3.0, 1.5), strict=True):
        ratios = figures[f"ratio_{log}"]
        assert isinstance(ratios, dict)
        assert [each["ratio"] for each in ratios.values()] == pytest.approx([factor, factor], rel=0.01)
    without = figures["us_per_all_reduce_without_log"]
    assert without == {mode: pytest.approx(10.0, rel=0.01) for mode in ("eager, 1 tokens", "graph, 1 tokens")}
    assert figures["logs_written"] == 2 * 2 * 2  # ranks x logs x starts: the log was on where it says so


def test_ranks_that_fail_are_told(tmp_path: Path) -> None:
    with pytest.raises(RanksError, match="crash"):
        measure(plan(tmp_path), pairs=2, env={**os.environ, "FAILS": "1"}, folder=tmp_path)
