"""Preflight: is this spec sound, is there a node for it, and would its servers start as the spec means?

    python -m ray_jobs.check_cluster SPEC [--address auto] [--out FOLDER] [--json FILE] [--trace]

Takes seconds, or about a minute with GPUs, for the all-reduce table. `--trace` launches one server and says how much of
verify is communication: no NCCL set can win more than that. Exit code 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ray_jobs.allreduce.display import render
from ray_jobs.preflight.node_checks import Check, NodeReport, State, check_node
from sweeps.foreign_text import console as plain_console
from sweeps.spec.document import SpecError
from sweeps.spec.model import SweepSpec
from sweeps.spec.reading import find_spec, read_spec
from sweeps.spec.space import Space
from sweeps.spec.workload import Block, plan_blocks

FREE_WITHIN_S = 20.0
"""How long a node's GPUs may take to be granted: what is free is granted at once."""
NODE_DEADLINE_S = 1800.0
COLOURS: Mapping[State, str] = {"ok": "green", "warning": "yellow", "failed": "red", "skipped": "dim"}


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m ray_jobs.check_cluster") -> int:
    """Command line. Returns 1 if a check failed.

    Args:
        prog: the command's name in its usage.
    """
    arguments = _arguments(argv, prog)
    with tempfile.TemporaryDirectory(prefix="specsweep-preflight-") as scratch:
        report = preflight(arguments, (arguments.out or Path(scratch)).absolute())
    console = plain_console()
    console.print(_rendered(report.checks))
    if report.table is not None:
        render(report.table.rows, console)
    if arguments.json:
        arguments.json.write_text(json.dumps(_document(report), indent=1) + "\n", encoding="utf-8")
    return int(any(check.state == "failed" for check in report.checks))


def preflight(arguments: argparse.Namespace, out: Path) -> NodeReport:
    """All checks in order; those of the node only if spec and cluster are sound."""
    try:
        path = find_spec(arguments.spec)
        spec = read_spec(path)
        blocks = plan_blocks(spec.workload, folder=path.resolve().parent)
        first = check_space(spec, num_blocks=len(blocks))
    except (SpecError, OSError) as error:
        return NodeReport(checks=(Check(name="spec", state="failed", detail=str(error)),))
    options = {
        "all_reduce": not arguments.no_all_reduce,
        "deadline_s": arguments.deadline_s,
        "trace": blocks if arguments.trace else None,
    }
    if arguments.address:
        report = _on_cluster(spec, arguments.address, out, options)
    else:
        local = Check(name="cluster", state="skipped", detail="no --address, so only this machine was checked")
        node = node_report(spec, out, **options)
        report = replace(node, checks=(local, *node.checks))
    if report.table is not None and arguments.out:
        report.table.write(out)
    return replace(report, checks=(first, *report.checks))


def check_space(spec: SweepSpec, *, num_blocks: int) -> Check:
    """The spec's configurations and launches. Raises SpecError."""
    space = Space(spec)
    configurations = space.configurations()
    suggestions = sum(1 for _ in space.suggestions())
    launches = len({space.launch_key(configuration) for configuration in configurations})
    state: State = "ok" if configurations else "failed"
    detail = (
        f"{spec.sweep}: {len(configurations)} configurations of {suggestions} suggestions, {launches} launches, "
        f"{num_blocks} blocks each"
    )
    return Check(name="spec", state=state, detail=detail)


def node_report(
    spec: SweepSpec, out: Path, *, all_reduce: bool, deadline_s: float, trace: Sequence[Block] | None
) -> NodeReport:
    """Check the node this runs on; with blocks to `trace`, a server is launched if nothing has failed."""
    report = check_node(spec, out, all_reduce=all_reduce, deadline_s=deadline_s)
    if trace is None or any(check.state == "failed" for check in report.checks):
        return report
    from ray_jobs.preflight.communication_share import check_communication

    return replace(report, checks=(*report.checks, check_communication(spec, trace, out)))


def _on_cluster(spec: SweepSpec, address: str, out: Path, options: Mapping[str, Any]) -> NodeReport:
    """Take the GPUs of one node as a trial would, and check that node while holding them."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from ray_jobs.cluster import ClusterError, suitable_nodes

    try:
        ray.init(address=address, log_to_driver=False)
    except ConnectionError as error:
        return NodeReport(checks=(Check(name="cluster", state="failed", detail=f"{address}: {error}"),))
    try:
        nodes = suitable_nodes(spec.resources)
    except ClusterError as error:
        ray.shutdown()
        return NodeReport(checks=(Check(name="cluster", state="failed", detail=str(error)),))
    bundle = {"CPU": spec.resources.cpus, "GPU": spec.resources.gpus}
    group = placement_group([bundle], strategy="STRICT_PACK")
    try:
        if not group.wait(FREE_WITHIN_S):
            return NodeReport(checks=(_none_free(spec, nodes),))
        on_node: Any = ray.remote(  # Ray's types know no keyword-only arguments
            num_cpus=spec.resources.cpus,
            num_gpus=spec.resources.gpus,
            max_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group),
        )
        node: NodeReport = ray.get(on_node(node_report).remote(spec, out, **options), timeout=NODE_DEADLINE_S)
    finally:
        remove_placement_group(group)
        ray.shutdown()
    detail = f"nodes with {spec.resources.gpus} GPUs: {len(nodes)}, one of them free"
    return replace(node, checks=(Check(name="cluster", state="ok", detail=detail), *node.checks))


def _none_free(spec: SweepSpec, nodes: Sequence[Mapping[str, Any]]) -> Check:
    hosts = ", ".join(node["NodeManagerHostname"] for node in nodes)
    detail = (
        f"need a node with {spec.resources.gpus} free GPUs and {spec.resources.cpus:g} free CPUs; "
        f"{hosts} fit, but none was free within {FREE_WITHIN_S:g} s; `ray status` says what holds them"
    )
    return Check(name="cluster", state="failed", detail=detail)


def _rendered(checks: Sequence[Check]) -> Table:
    table = Table(title="preflight", title_justify="left")
    for column in ("check", "state", "detail"):
        table.add_column(column, overflow="fold", no_wrap=column == "state")
    for check in checks:
        table.add_row(Text(check.name), Text(check.state, style=COLOURS[check.state]), Text(check.detail))
    return table


def _document(report: NodeReport) -> dict[str, Any]:
    return {
        "ok": all(check.state != "failed" for check in report.checks),
        "checks": [asdict(check) for check in report.checks],
        "versions": dict(report.versions),
        "allreduce": [dict(row) for row in report.table.rows] if report.table else None,
    }


def _arguments(argv: Sequence[str] | None, prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog, description="Preflight of a sweep.")
    parser.add_argument("spec", type=Path, metavar="SPEC", help="the sweep's YAML, or the name of a shipped one")
    parser.add_argument("--address", default=os.environ.get("RAY_ADDRESS"), help="Ray cluster (default: RAY_ADDRESS)")
    parser.add_argument("--out", type=Path, help="keep the all-reduce table, its logs and NCCL's in this folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the checks, versions and table as JSON")
    parser.add_argument("--no-all-reduce", action="store_true", help="skip the all-reduce table")
    parser.add_argument(
        "--deadline-s",
        type=float,
        default=30.0,
        help="seconds to set up one NCCL set of the table, or to time it in one round",
    )
    parser.add_argument(
        "--trace", action="store_true", help="launch a server and measure the share of communication in verify"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
