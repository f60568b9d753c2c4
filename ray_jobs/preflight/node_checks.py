"""What must be true on the node that serves: interpreter, probe, GPUs, models, NCCL's surroundings, all-reduces."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ray_jobs.allreduce.ranks import RankPlan
from ray_jobs.allreduce.table import AllReduceTable
from ray_jobs.allreduce.verdict import judge_sets
from ray_jobs.allreduce_table import (
    TOKEN_BYTES,
    TOKENS,
    InterpreterError,
    measure,
    server_versions,
    sets_of,
)
from sweeps.engines.command import PROJECT
from sweeps.engines.env_sources import ConfFile, nccl_conf_files
from sweeps.engines.sglang.launch_plan import plan_launch
from sweeps.redaction import redacted
from sweeps.spec.model import SweepSpec
from sweeps.spec.space import Space

PLUGIN = "specsweep_probe"
IDLE_BYTES = 2 * 2**30
"""Memory in use below which a GPU is idle: a driver's own and the context of the check itself."""

State = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of the preflight."""

    name: str
    state: State
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """What one node answered."""

    checks: tuple[Check, ...]
    versions: Mapping[str, Any] = field(default_factory=dict)
    table: AllReduceTable | None = None


def check_node(
    spec: SweepSpec,
    out: Path,
    *,
    all_reduce: bool,
    deadline_s: float = 30.0,
    inherited: Mapping[str, str] | None = None,
    conf_files: Callable[[Mapping[str, str]], Sequence[ConfFile]] = nccl_conf_files,
) -> NodeReport:
    """Check this node for `spec`. Nothing is launched but the interpreter, and the ranks of the all-reduce table.

    Args:
        spec: the sweep; an engine without a server skips all of this.
        out: folder for the all-reduce table's logs.
        all_reduce: measure the table if there are GPUs.
        deadline_s: for one NCCL set to be set up, or to be timed in one round.
        inherited: environment that a server would inherit here; this process's own if absent.
        conf_files: the configuration files that NCCL reads for a server's environment.
    """
    if spec.engine.is_virtual:
        word = f"the {spec.engine.kind} engine starts no server"
        return NodeReport(checks=(Check(name="server", state="skipped", detail=word),))
    inherited = os.environ if inherited is None else inherited
    launch = plan_launch(spec, Space(spec).control, folder=out / "probe", inherited=inherited)
    python = [*spec.engine.launcher, spec.engine.python or sys.executable]
    here = [
        *_models(spec),
        *_conf_files(conf_files(launch.environment)),
        *_inherited(inherited, launch.removed),
    ]
    try:
        versions = server_versions(python, env=launch.environment)
    except InterpreterError as error:
        return NodeReport(checks=(Check(name="server interpreter", state="failed", detail=str(error)), *here))
    checks = [*_interpreter(spec, python, versions), *here]
    if not all_reduce:
        return NodeReport(checks=tuple(checks), versions=versions)
    world_size = min(spec.resources.gpus, len(versions["gpus"]))
    if world_size < 2:
        word = f"needs 2 GPUs or more; {len(versions['gpus'])} here, {spec.resources.gpus} asked by the spec"
        skipped = Check(name="all-reduce table", state="skipped", detail=word)
        return NodeReport(checks=(*checks, skipped), versions=versions)
    plan = RankPlan(
        python=python,
        world_size=world_size,
        backend="nccl",
        token_bytes=TOKEN_BYTES,
        tokens=TOKENS,
        deadline_s=deadline_s,
    )
    table = measure(sets_of(spec), plan, out, env=launch.environment, fixed=_fixed(spec), evidence=True)
    return NodeReport(checks=(*checks, *_all_reduces(table)), versions=versions, table=table)


def _fixed(spec: SweepSpec) -> dict[str, str]:
    return {name: value for name, value in spec.engine.env.items() if name.startswith("NCCL_")}


def _interpreter(spec: SweepSpec, python: Sequence[str], seen: Mapping[str, Any]) -> Iterator[Check]:
    names = ("python", "sglang", "torch", "cuda", "nccl", "driver")
    detail = ", ".join(f"{name} {seen[name] or 'none'}" for name in names)
    complete = seen["sglang"] and seen["torch"]
    detail = f"{shlex.join(python)}: {detail}"
    yield Check(name="server interpreter", state="ok" if complete else "failed", detail=detail)
    found = PLUGIN in seen["plugins"]
    yield Check(
        name="cycle probe",
        state="ok" if found else "failed",
        detail="the server's interpreter finds it" if found else f"no plugin {PLUGIN} for the server's interpreter",
    )
    need, gpus = spec.resources.gpus, seen["gpus"]
    models = ", ".join(dict.fromkeys(gpus)) or "none"
    yield Check(
        name="GPUs of this node",
        state="ok" if len(gpus) >= need else "failed",
        detail=f"need {need}, have {len(gpus)} ({models})",
    )
    busy = [
        f"GPU {index}: {used / 2**30:.1f} GiB" for index, used in enumerate(seen["used_bytes"]) if used > IDLE_BYTES
    ]
    if busy:
        yield Check(name="GPU memory in use", state="failed", detail=f"{', '.join(busy)}: another process holds it")


def _models(spec: SweepSpec) -> Iterator[Check]:
    """A folder is there or not; a name that is no path is the hub's to answer, and may be downloaded at launch."""
    paths = {"model": spec.engine.model_path, **{f"drafter {name}": path for name, path in spec.drafters.items()}}
    for name, path in paths.items():
        if path is None:
            continue
        folder = next((place for place in (Path(path), PROJECT / path) if place.exists()), None)
        if folder is not None:
            complete = folder.is_file() or (folder / "config.json").is_file()
            word = str(folder) if complete else f"{folder} has no config.json"
            yield Check(name=name, state="ok" if complete else "failed", detail=word)
        elif Path(path).is_absolute() or path.startswith(".") or path.count("/") > 1:
            yield Check(name=name, state="failed", detail=f"{path} does not exist on this node")
        else:
            yield Check(
                name=name,
                state="warning",
                detail=f"{path} is not a folder here, so the server will download it during its launch",
            )


def _conf_files(files: Sequence[ConfFile]) -> Iterator[Check]:
    for file in files:
        settings = ", ".join(f"{name}={value}" for name, value in file.settings.items())
        word = f"{file.path} changes every NCCL set, also `default`: {settings or 'no settings'}"
        yield Check(name="NCCL configuration file", state="warning" if settings else "ok", detail=word)
    if not files:
        yield Check(name="NCCL configuration file", state="ok", detail="none")


def _inherited(inherited: Mapping[str, str], removed: Sequence[str]) -> Iterator[Check]:
    """Variables that a server would get from this node without the spec saying so."""
    kept = [
        f"{name}={redacted(name, inherited[name])}"
        for name in sorted(inherited)
        if name.startswith(("NCCL_", "SGLANG_")) and name not in removed
    ]
    if removed:
        word = f"removed, because the sweep sets them itself or they simulate acceptance: {', '.join(removed)}"
        yield Check(name="inherited variables removed", state="ok", detail=word)
    yield Check(
        name="inherited variables kept",
        state="warning" if kept else "ok",
        detail=f"every server will have {', '.join(kept)}" if kept else "none of NCCL_*, SGLANG_*",
    )


def _all_reduces(table: AllReduceTable) -> Iterator[Check]:
    """A set that hangs or is wrong must not be swept; if no set differs, sweeping NCCL is a waste."""
    default = next((row for row in table.rows if row["set"] == "default" and row["outcome"] != "ok"), None)
    if default is not None:
        word = f"default: {default['outcome']}: {default['reason']}"
        yield Check(name="all-reduce table", state="failed", detail=word)
        return
    verdicts = judge_sets(table.rows)
    for verdict in verdicts:
        if verdict.verdict == "failed":
            yield Check(name=f"NCCL set {verdict.name}", state="failed", detail=verdict.detail)
    matter = ", ".join(verdict.name for verdict in verdicts if verdict.could_matter)
    yield Check(name="all-reduce table", state="ok", detail=f"NCCL sets that could matter: {matter or 'none'}")
