"""`specsweep COMMAND ...`: every documented command under one name, each handed on to the module that has it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

COMMANDS = {
    "init": "write a first spec from what this node has",
    "run": "run a sweep, or go on with one that was interrupted",
    "submit": "submit a sweep to a Ray cluster and follow it",
    "dry-run": "print what a spec would launch and cost; run nothing",
    "schema": "print the keys of a spec as a JSON schema, for editors",
    "check": "check a node, and time the all-reduce of every NCCL set",
    "allreduce": "time the all-reduce of NCCL sets alone",
    "report": "write the report page of a results folder",
    "verdict": "print the verdicts of a results folder",
    "break-even": "the accept length at which speculation pays, from a cycle time",
    "compare": "two sweeps of the same work: what the second changed",
    "query": "SQL over the tables of a results folder",
    "predict": "a node of many GPUs, from a sweep of one GPU's share of it",
    "import": "logs and benchmarks that you already have, as a results folder",
    "server-log": "throughput and accept length from the log of an SGLang server",
}
"""Sub-commands, and what each does. `specsweep COMMAND --help` has its options."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command. Returns its exit code; 2 for a command that does not exist."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words in (["-h"], ["--help"]):
        print(_usage())
        return 0
    if words == ["--version"]:
        from sweeps import __version__

        print(__version__)
        return 0
    if not words or words[0] not in COMMANDS:
        got = words[0] if words else "nothing"
        print(f"error: wanted one of the commands {', '.join(COMMANDS)}, got {got}", file=sys.stderr)
        return 2
    return _command(words[0])(words[1:])


def _command(name: str) -> Callable[[Sequence[str]], int]:
    """The function behind a sub-command. Only what it needs is imported: reading results starts no Ray."""
    if name in ("run", "dry-run"):
        from ray_jobs import run_sweep

        extra = ["--dry-run"] if name == "dry-run" else []
        return lambda words: run_sweep.main([*words, *extra], prog=f"specsweep {name}")
    if name == "check":
        from ray_jobs import check_cluster

        return lambda words: check_cluster.main(words, prog="specsweep check")
    if name == "init":
        from ray_jobs import init_spec

        return lambda words: init_spec.main(words, prog="specsweep init")
    if name == "submit":
        from ray_jobs import submit

        return lambda words: submit.main(words, prog="specsweep submit")
    if name == "schema":
        from sweeps.spec import reference

        return lambda words: reference.main(words, prog="specsweep schema")
    if name == "allreduce":
        from ray_jobs import allreduce_table

        return lambda words: allreduce_table.main(words, prog="specsweep allreduce")
    from analysis.__main__ import main as analyse

    return lambda words: analyse([name, *words], prog="specsweep")


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = (f"  {name:<{width}}  {what}" for name, what in COMMANDS.items())
    return "\n".join(("usage: specsweep COMMAND ...", "", *lines, "", "specsweep COMMAND --help: its options"))


if __name__ == "__main__":
    sys.exit(main())
