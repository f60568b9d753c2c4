"""The all-reduce table: microseconds per all-reduce at decode sizes, by NCCL set, before any model is loaded.

    python -m ray_jobs.allreduce_table --sets sweeps/specs/NAME.yaml --out FOLDER [--python INTERPRETER]

Each set runs in fresh processes, one a GPU, under a deadline (NCCL binds its variables per process, and some sets
hang), then once more untimed with NCCL's log on, as evidence of what it chose. The default is measured first and last:
what differs between the two is noise. The result says which sets could matter to a sweep.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ray_jobs.allreduce.evidence import SetEvidence, collect
from ray_jobs.allreduce.ranks import RankPlan, RankReport, run_ranks
from ray_jobs.allreduce.verdict import DEFAULT_AGAIN, DEFAULT_SET, plain_console, render
from sweeps import SpecsweepError
from sweeps.nccl.grammar import SGLANG_DEFAULTS
from sweeps.spec.model import SweepSpec
from sweeps.spec.reading import find_spec, read_spec

SCHEMA_VERSION = 1
TOKEN_BYTES = 14336
"""Hidden size 7168 in bf16: one token of Kimi-K2.5 and DeepSeek-V3."""
TOKENS = (1, 2, 3, 4, 6, 8, 16)
EVIDENCE_AT_ONCE = 4
"""Sets whose NCCL log is taken side by side: nothing is timed then."""
SERVER_DEFAULTS: Mapping[str, str] = {**SGLANG_DEFAULTS, "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
"""What the server sets by itself before its ranks start (`entrypoints/engine.py` of SGLang 0.5.23)."""
BUILTIN_SETS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "LL": {"NCCL_PROTO": "LL"},
    "LL128": {"NCCL_PROTO": "LL128"},
    "Simple": {"NCCL_PROTO": "Simple"},
    "Ring": {"NCCL_ALGO": "Ring"},
    "Tree": {"NCCL_ALGO": "allreduce:tree"},
    "P2P-off": {"NCCL_P2P_DISABLE": "1"},
}
ALLREDUCE = pa.schema(
    [
        pa.field("set", pa.string(), nullable=False),
        pa.field("env", pa.map_(pa.string(), pa.string()), nullable=False),
        pa.field("backend", pa.string(), nullable=False),  # nccl | gloo
        pa.field("world_size", pa.int32(), nullable=False),
        pa.field(
            "outcome", pa.string(), nullable=False
        ),  # ok | wrong_output | hang | crash | nccl_no_algorithm | refused
        pa.field("reason", pa.string()),
        pa.field("bytes", pa.int64()),  # this and the rest: null where the set gave no figures
        pa.field("tokens", pa.int32()),
        pa.field("mode", pa.string()),  # eager | graph
        pa.field("us_median", pa.float64()),
        pa.field("us_p10", pa.float64()),
        pa.field("us_p90", pa.float64()),
        pa.field("repeats", pa.int32()),
        pa.field("calls", pa.int32()),  # all-reduces per repeat; the figures are per all-reduce
        pa.field("timer_kind", pa.string()),  # cuda_event | host
        pa.field("algorithm", pa.string()),  # this and the next four: NCCL's own log, of an untimed run of the set
        pa.field("protocol", pa.string()),
        pa.field("channels", pa.int32()),
        pa.field("transports", pa.list_(pa.string())),  # of rank 0
        pa.field("unread", pa.list_(pa.string())),  # variables of the set that NCCL did not read
        pa.field("gpu_name", pa.string()),
        pa.field("nccl_version", pa.string()),
        pa.field("torch_version", pa.string()),
    ],
    metadata={"specsweep.table": "allreduce", "specsweep.schema_version": str(SCHEMA_VERSION)},
)

_VERSIONS = Path(__file__).parent / "preflight" / "server_versions.py"


class InterpreterError(SpecsweepError, ValueError):
    """The server's interpreter cannot be run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduceTable:
    """Rows of schema `ALLREDUCE`, and what they were measured with."""

    rows: tuple[Mapping[str, Any], ...]
    machine: Mapping[str, Any]
    removed: tuple[str, ...]
    """Inherited NCCL variables that the ranks did not get."""

    def write(self, folder: Path) -> None:
        """`allreduce.parquet` and the same as `allreduce.json`, each renamed into place when complete."""
        folder.mkdir(parents=True, exist_ok=True)
        table = pa.Table.from_pylist([{**row, "env": list(row["env"].items())} for row in self.rows], schema=ALLREDUCE)
        document = {"machine": self.machine, "removed_env": self.removed, "server_defaults": SERVER_DEFAULTS}
        temporary = folder / f"allreduce.{os.getpid()}.tmp"
        pq.write_table(table, temporary, compression="zstd")
        temporary.replace(folder / "allreduce.parquet")
        temporary.write_text(json.dumps({**document, "rows": self.rows}, indent=1) + "\n", encoding="utf-8")
        temporary.replace(folder / "allreduce.json")


def sets_of(spec: SweepSpec | None, builtin: Sequence[str] = ()) -> dict[str, Mapping[str, str]]:
    """Name -> variables: `default`, the spec's sets, then built-in ones that are none of these. Equal sets run once."""
    declared = spec.nccl_sets if spec else {}
    wanted: dict[str, Mapping[str, str]] = {"default": {}, **declared, **{name: BUILTIN_SETS[name] for name in builtin}}
    distinct: dict[str, Mapping[str, str]] = {}
    for name, variables in wanted.items():
        if variables not in distinct.values():
            distinct[name] = variables
    return distinct


def server_versions(
    python: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = 120.0
) -> dict[str, Any]:
    """What the server's interpreter sees: `gpus`, `driver`, `cuda`, `nccl`, `torch`, `sglang`, `plugins`, `python`.

    Raises InterpreterError.
    """
    command = [*python, str(_VERSIONS)]
    try:
        answer = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InterpreterError(f"{shlex.join(python)}: wanted the server's interpreter, got: {error}") from error
    if answer.returncode != 0:
        tail = (answer.stderr.strip() or "no output").splitlines()[-1]
        raise InterpreterError(f"{shlex.join(python)}: wanted the server's interpreter, but it ended with: {tail}")
    seen: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return seen


def measure(
    sets: Mapping[str, Mapping[str, str]],
    plan: RankPlan,
    folder: Path,
    *,
    env: Mapping[str, str],
    fixed: Mapping[str, str] | None = None,
    evidence: bool,
) -> AllReduceTable:
    """Run every set in turn; a set that fails is a row with its outcome.

    Where there is something to compare, the default's variables run once more at the end, as set `default (again)`.

    Args:
        sets: name -> NCCL variables.
        plan: sizes, repeats, interpreter.
        folder: gets `logs/SET` and, with `evidence`, NCCL's own logs in `nccl/SET`.
        env: what the ranks inherit; NCCL variables in it are removed.
        fixed: variables that every set has.
        evidence: run each set once more, untimed, with NCCL's log on.
    """
    inherited = {name: value for name, value in env.items() if not name.startswith("NCCL_")}
    common = {**inherited, "OMP_NUM_THREADS": "1", **SERVER_DEFAULTS, **(fixed or {})}
    rows: list[dict[str, Any]] = []
    asked: dict[str, Mapping[str, str]] = {}
    machine: dict[str, Any] = {}
    wedged: str | None = None
    again = {DEFAULT_AGAIN: sets[DEFAULT_SET]} if DEFAULT_SET in sets and len(sets) > 1 else {}
    for name, variables in {**sets, **again}.items():
        report = _refused({**common, **variables}, wedged) or run_ranks(
            plan, {**common, "NCCL_DEBUG": "WARN", **variables}, folder / "logs" / _file_name(name)
        )
        machine.update(report.machine)
        found = _rows(name, variables, plan, report)
        if report.survivors:
            wedged = f"ranks of set {name} survived SIGKILL (pids {', '.join(map(str, report.survivors))})"
        rows += found
        if evidence and name != DEFAULT_AGAIN and report.outcome not in ("hang", "refused"):
            asked[name] = variables
    seen = _evidence(asked, plan, common, folder)
    rows = [{**row, **seen[row["set"]].columns(row.get("bytes"))} if row["set"] in seen else row for row in rows]
    removed = tuple(sorted(set(env) - set(inherited)))
    described = {name: machine.get(name) for name in ("gpu_name", "nccl_version", "torch_version")}
    return AllReduceTable(rows=tuple({**row, **described} for row in rows), machine=machine, removed=removed)


def _evidence(
    sets: Mapping[str, Mapping[str, str]], plan: RankPlan, common: Mapping[str, str], folder: Path
) -> dict[str, SetEvidence]:
    """Untimed, so several sets at once, after everything that is timed."""

    def one(name: str) -> SetEvidence | None:
        place = _file_name(name)
        scratch, kept = folder / "logs" / place / "evidence", folder / "nccl" / place
        return collect(plan, {**common, **sets[name]}, sets[name], scratch=scratch, kept=kept)

    with ThreadPoolExecutor(max_workers=EVIDENCE_AT_ONCE) as pool:
        return {name: seen for name, seen in zip(sets, pool.map(one, sets), strict=True) if seen is not None}


def _refused(environment: Mapping[str, str], wedged: str | None) -> RankReport | None:
    """A set that must not run: NVLink multicast belongs to the whole host; a wedged GPU hangs whatever comes next."""
    multicast = environment["NCCL_NVLS_ENABLE"] != "0"
    reason = "NCCL_NVLS_ENABLE other than 0 is not tried here" if multicast else wedged
    return RankReport(outcome="refused", reason=reason, rows=(), machine={}, wall_s=0.0) if reason else None


def _rows(name: str, variables: Mapping[str, str], plan: RankPlan, report: RankReport) -> list[dict[str, Any]]:
    head = {
        "set": name,
        "env": dict(variables),
        "backend": plan.backend,
        "world_size": plan.world_size,
        "outcome": report.outcome,
        "reason": report.reason,
    }
    measured = [{**head, **_figures(row, plan)} for row in report.rows]
    whole = report.outcome in ("ok", "wrong_output")
    return measured if whole else [*measured, head]


def _figures(row: Mapping[str, Any], plan: RankPlan) -> dict[str, Any]:
    low, middle, high = np.quantile(row["samples_us"], (0.1, 0.5, 0.9)).round(3).tolist()
    return {
        **{name: row[name] for name in ("outcome", "bytes", "tokens", "mode", "timer_kind")},
        "us_median": middle,
        "us_p10": low,
        "us_p90": high,
        "repeats": len(row["samples_us"]),
        "calls": plan.calls,
    }


def _file_name(name: str) -> str:
    return name.replace("/", "_")


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m ray_jobs.allreduce_table") -> int:
    """Command line. Returns 0, also if the table is skipped because GPUs are missing; 2 for unusable input.

    Args:
        prog: the command's name in its usage.
    """
    arguments = _arguments(argv, prog)
    try:
        return _measure_and_print(arguments)
    except SpecsweepError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _measure_and_print(arguments: argparse.Namespace) -> int:
    console = plain_console()
    spec = read_spec(find_spec(arguments.sets)) if arguments.sets else None
    python = shlex.split(arguments.python)
    world_size = arguments.world_size or len(server_versions(python)["gpus"])
    if world_size < 2:
        console.print(f"all-reduce table skipped: it needs 2 GPUs or more, {shlex.join(python)} sees {world_size}")
        return 0
    builtin = arguments.builtin if arguments.builtin is not None else ([] if spec else list(BUILTIN_SETS))
    plan = RankPlan(
        python=python,
        world_size=world_size,
        backend=arguments.backend,
        token_bytes=arguments.token_bytes,
        tokens=arguments.tokens,
        calls=arguments.calls,
        warmup=arguments.warmup,
        repeats=arguments.repeats,
        deadline_s=arguments.deadline_s,
    )
    evidence = not arguments.no_evidence and arguments.backend == "nccl"
    fixed = spec.engine.env if spec else None
    table = measure(sets_of(spec, builtin), plan, arguments.out, env=os.environ, fixed=fixed, evidence=evidence)
    table.write(arguments.out)
    render(table.rows, console)
    return 0


def _arguments(argv: Sequence[str] | None, prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog, description="Microseconds per all-reduce by NCCL set.")
    parser.add_argument("--sets", type=Path, help="spec whose nccl_sets are measured")
    parser.add_argument(
        "--builtin", nargs="*", choices=list(BUILTIN_SETS), help="further sets (default: all, if there is no spec)"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for allreduce.parquet, allreduce.json and logs")
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter of the server, any command prefix included"
    )
    parser.add_argument("--world-size", type=int, help="ranks (default: one per visible GPU)")
    parser.add_argument(
        "--backend", choices=("nccl", "gloo"), default="nccl", help="gloo: on CPUs, host timer, eager only"
    )
    parser.add_argument(
        "--deadline-s", type=float, default=60.0, help="seconds for one set, start of the interpreters included"
    )
    parser.add_argument("--token-bytes", type=int, default=TOKEN_BYTES)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--calls", type=int, default=20, help="all-reduces per repeat")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--no-evidence", action="store_true", help="skip the runs with NCCL's log on")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
