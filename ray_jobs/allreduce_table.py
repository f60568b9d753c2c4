"""The all-reduce table: microseconds per all-reduce at decode sizes, by NCCL set, before any model is loaded.

    python -m ray_jobs.allreduce_table --sets sweeps/specs/NAME.yaml --out FOLDER [--python INTERPRETER]

One process a GPU measures all sets. Each communicator has a copy of the NCCL library with variables of its own, and its
own NCCL log as evidence of what it chose. The communicators are timed in turn, round after round, so that drift cancels
in their differences. The default has several communicators (`--copies`): what differs between them is no effect of a
set. A set that hangs has failed; the other sets are then measured in fresh processes. The result says which sets could
matter to a sweep.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray_jobs.allreduce.display import render
from ray_jobs.allreduce.evidence import LOG_SETTINGS, read_evidence
from ray_jobs.allreduce.groups import measure_members
from ray_jobs.allreduce.ranks import Member, RankPlan
from ray_jobs.allreduce.set_rows import DEFAULT_SET
from ray_jobs.allreduce.table import SERVER_DEFAULTS, AllReduceTable, member_rows
from sweeps import SpecsweepError
from sweeps.foreign_text import console as plain_console
from sweeps.foreign_text import print_error
from sweeps.spec.model import SweepSpec
from sweeps.spec.reading import find_spec, read_spec

TOKEN_BYTES = 14336
"""Hidden size 7168 in bf16: one token of Kimi-K2.5 and DeepSeek-V3."""
TOKENS = (1, 2, 3, 4, 6, 8, 16)
DEFAULT_COPIES = 2
"""Communicators of the default set, so that their difference is seen. Of every other set there is one."""
BUILTIN_SETS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "LL": {"NCCL_PROTO": "LL"},
    "LL128": {"NCCL_PROTO": "LL128"},
    "Simple": {"NCCL_PROTO": "Simple"},
    "Ring": {"NCCL_ALGO": "Ring"},
    "Tree": {"NCCL_ALGO": "allreduce:tree"},
    "P2P-off": {"NCCL_P2P_DISABLE": "1"},
}
_VERSIONS = Path(__file__).parent / "preflight" / "server_versions.py"


class InterpreterError(SpecsweepError, ValueError):
    """The server's interpreter cannot be run."""


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
    default_copies: int = DEFAULT_COPIES,
    copies: int = 1,
) -> AllReduceTable:
    """Measure all sets; a set that fails is a row with its outcome.

    Args:
        sets: name -> NCCL variables.
        plan: sizes, rounds, interpreter.
        folder: gets `logs` (of the ranks) and NCCL's own logs in `nccl/SET/copyN`.
        env: what the ranks inherit; NCCL variables in it are removed.
        fixed: variables that every set has.
        evidence: have NCCL log what it reads and chooses. It logs every eager call then, so only graphs are timed.
        default_copies: communicators of the default set.
        copies: communicators of every other set.
    """
    inherited = {name: value for name, value in env.items() if not name.startswith("NCCL_")}
    common = {**inherited, "OMP_NUM_THREADS": "1", **SERVER_DEFAULTS, **(fixed or {})}
    # NVLink multicast belongs to the whole host, so no set may turn it on
    allowed = {name for name, variables in sets.items() if {**common, **variables}["NCCL_NVLS_ENABLE"] == "0"}
    log = LOG_SETTINGS if evidence else {"NCCL_DEBUG": "WARN"}
    members = [
        Member(
            nccl_set=name,
            copy=copy,
            env={**variables, **log},
            logs=folder / "nccl" / _file_name(name) / f"copy{copy}",
        )
        for copy in range(max(default_copies, copies))  # communicators of one set are not made next to each other
        for name, variables in sets.items()
        if name in allowed and copy < (default_copies if name == DEFAULT_SET else copies)
    ]
    measured = measure_members(plan, members, {**common, "NCCL_DEBUG": "WARN"}, folder / "logs")
    described = {name: measured.machine.get(name) for name in ("gpu_name", "nccl_version", "torch_version")}
    rows: list[dict[str, Any]] = []
    for name, variables in sets.items():
        head = {
            "set": name,
            "env": dict(variables),
            "backend": plan.backend,
            "world_size": plan.world_size,
            **described,
        }
        if name not in allowed:
            reason = "NCCL_NVLS_ENABLE other than 0 is not tried here"
            rows.append({**head, "outcome": "refused", "reason": reason})
        own = [result for result in measured.results if result.member.nccl_set == name]
        for result in sorted(own, key=lambda result: result.member.copy):
            logged = read_evidence(result.member.logs, variables)
            rows += member_rows(head, plan, result, logged if evidence else None)
    removed = tuple(sorted(set(env) - set(inherited)))
    machine = {**measured.machine, "wall_s": measured.wall_s}
    return AllReduceTable(rows=tuple(rows), machine=machine, removed=removed)


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
        print_error(error)
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
        modes=("eager", "graph") if arguments.no_evidence else ("graph",),
        calls=arguments.calls,
        warmup=arguments.warmup,
        repeats=arguments.repeats,
        rounds=arguments.rounds,
        deadline_s=arguments.deadline_s,
    )
    evidence = not arguments.no_evidence and arguments.backend == "nccl"
    fixed = spec.engine.env if spec else None
    table = measure(
        sets_of(spec, builtin),
        plan,
        arguments.out,
        env=os.environ,
        fixed=fixed,
        evidence=evidence,
        default_copies=arguments.copies,
        copies=arguments.copies if arguments.copies_of_all else 1,
    )
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
        "--deadline-s",
        type=float,
        default=30.0,
        help="seconds to make one communicator, or to time it in one round; a set that takes longer has failed",
    )
    parser.add_argument(
        "--copies",
        type=_positive,
        default=DEFAULT_COPIES,
        help="communicators of the default set; 7 to find small effects",
    )
    parser.add_argument("--copies-of-all", action="store_true", help="make as many communicators of every set")
    parser.add_argument("--token-bytes", type=int, default=TOKEN_BYTES)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--calls", type=int, default=20, help="all-reduces per repeat")
    parser.add_argument("--warmup", type=int, default=5, help="untimed repeats before those of each round")
    parser.add_argument("--repeats", type=_positive, default=10, help="per round")
    parser.add_argument("--rounds", type=_positive, default=10, help="each times every communicator once")
    parser.add_argument(
        "--no-evidence", action="store_true", help="leave NCCL's log off, and time eager calls beside graphs"
    )
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"wanted 1 or more, got {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
