"""What NCCL's log, on for evidence in every trial, costs an all-reduce: `python -m benchmarks.nccl_log_cost`.

Ranks of the all-reduce table, one a GPU, with the log settings of a server and without, started in turn: off, on, on,
off and so on, for NCCL's choices differ from start to start. The figure is the ratio of microseconds per all-reduce, on
to off, with a 95 % t interval over the pairs (logarithms). In a CUDA graph, which is how a server decodes, the log has
its say at capture; without one the lines per operation come with every call, and a server's are off then, so `eager` is
measured with those lines and without.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from benchmarks.record import record
from ray_jobs.allreduce.groups import measure_members
from ray_jobs.allreduce.ranks import Member, RankPlan
from ray_jobs.allreduce.table import SERVER_DEFAULTS
from ray_jobs.allreduce_table import TOKEN_BYTES, server_versions
from sweeps.engines.sglang.launch_plan import nccl_log_settings

TOKENS = (1, 4)
LOGS = ("of_graphs", "without_operations")
"""What a server's log holds under CUDA graphs, and without them."""

Medians = dict[tuple[str, int], float]


class RanksError(RuntimeError):
    """The ranks of one start did not measure everything."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, record, print."""
    arguments = _arguments(argv)
    python = shlex.split(arguments.python)
    plan = RankPlan(
        python=python,
        world_size=arguments.world_size or len(server_versions(python)["gpus"]),
        backend=arguments.backend,
        token_bytes=TOKEN_BYTES,
        tokens=TOKENS,
        modes=("eager", "graph"),
        warmup=10,
        repeats=arguments.repeats,
        rounds=1,
    )
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(plan, pairs=arguments.pairs, env=os.environ, folder=Path(folder))
    print(record("nccl_log_cost", figures))
    print(json.dumps(figures, indent=1))


def measure(plan: RankPlan, *, pairs: int, env: Mapping[str, str], folder: Path) -> dict[str, object]:
    """Ratio on to off by log, mode and tokens. Raises RanksError."""
    inherited = {name: value for name, value in env.items() if not name.startswith("NCCL_")}
    quiet = {**inherited, "OMP_NUM_THREADS": "1", **SERVER_DEFAULTS, "NCCL_DEBUG": "WARN"}
    settings = {log: nccl_log_settings(folder, replays_graphs=log == LOGS[0]) for log in LOGS}
    off: list[Medians] = []
    on: dict[str, list[Medians]] = {log: [] for log in LOGS}
    for pair in range(pairs):
        order = ("off", *LOGS) if pair % 2 == 0 else (*reversed(LOGS), "off")
        for log in order:
            measured = _medians(plan, settings.get(log, {}), quiet, folder, name=f"{log}-{pair}")
            (off if log == "off" else on[log]).append(measured)
    logged = [path for log in LOGS for path in folder.glob(f"{log}-*/copy0/*.log") if path.stat().st_size]
    return {
        "world_size": plan.world_size,
        "backend": plan.backend,
        "starts_of_each": pairs,
        "logs_written": len(logged),
        "us_per_all_reduce_without_log": {
            f"{mode}, {tokens} tokens": statistics.median(each[mode, tokens] for each in off) for mode, tokens in off[0]
        },
        **{f"ratio_{log}": _ratios(on[log], off) for log in LOGS},
    }


def _medians(
    plan: RankPlan, settings: Mapping[str, str], env: Mapping[str, str], folder: Path, *, name: str
) -> Medians:
    """Microseconds per all-reduce by mode and tokens, of one start of the ranks."""
    member = Member(nccl_set=name, copy=0, env=settings, logs=folder / name / "copy0")
    (result,) = measure_members(plan, [member], env, folder / "ranks").results
    if result.outcome != "ok":
        raise RanksError(f"wanted every rank to measure, got {result.outcome}: {result.reason}")
    return {(cell.mode, cell.tokens): next(iter(cell.round_us.values())) for cell in result.cells}


def _ratios(on: Sequence[Medians], off: Sequence[Medians]) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    for mode, tokens in off[0]:
        logs = [math.log(one[mode, tokens] / other[mode, tokens]) for one, other in zip(on, off, strict=True)]
        interval = stats.t.interval(0.95, len(logs) - 1, loc=np.mean(logs), scale=stats.sem(logs))
        found[f"{mode}, {tokens} tokens"] = {
            "ratio": math.exp(statistics.mean(logs)),
            "interval_95": [math.exp(bound) for bound in interval],
        }
    return found


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nccl_log_cost", description="Cost of NCCL's log.")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the server")
    parser.add_argument("--world-size", type=int, help="ranks; one per visible GPU where absent")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl", help="gloo: on CPUs, no NCCL, no log")
    parser.add_argument("--pairs", type=int, default=5, help="starts with each log, and as many without; 2 or more")
    parser.add_argument("--repeats", type=int, default=200)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
