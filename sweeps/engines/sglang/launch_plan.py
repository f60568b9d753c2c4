"""All facts of one launch of a real SGLang server, worked out once from a spec and a configuration. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sweeps.engines.command import (
    DEFAULT_PORT,
    NEVER_INHERITED,
    OTHER_INTERPRETERS,
    launch_command,
    launch_environment,
    num_ranks,
    server_arguments,
)
from sweeps.engines.sglang.state_plan import StatePlan
from sweeps.redaction import redacted_variables, redacted_words, reference
from sweeps.spec.model import Scalar, SweepSpec
from sweeps.spec.names import SIMULATES_ACCEPTANCE
from sweeps.spec.space import Configuration

PROBE_FOLDER = Path(__file__).resolve().parents[2] / "cycle_probe"

_FAST_CRASH = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
"""Without these a crashed rank keeps its GPUs up to a minute for dumps that nobody reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    """One launch: what is started, with which variables, and how many ranks must report."""

    configuration: Configuration
    """What the server is launched for. A switch changes what it serves, not the plan."""
    states: StatePlan | None
    """What the server shall hold as states; None if `configuration` is all that it serves."""
    folder: Path
    """Scratch folder of the server: probe files, NCCL logs and copies of NCCL."""
    port: int
    arguments: Mapping[str, Scalar]
    """Server arguments by canonical name (`tp-size`), without those of the speculation's dimensions."""
    command: tuple[str, ...]
    """Every word of the command."""
    requested: Mapping[str, str]
    """Variables that the spec and the launched configuration set; a state's NCCL set is not among them.

    `${NAME}` stands for what is inherited (`engine.inherit`).
    """
    environment: Mapping[str, str]
    """All variables of the server process: `requested`, the probe's own, and what is inherited."""
    removed: tuple[str, ...]
    """Inherited variables that were left out, sorted."""
    num_ranks: int
    """Scheduler processes: tensor parallel x pipeline parallel."""

    def record(self, own: Mapping[str, str]) -> dict[str, object]:
        """What was started, as others may read it: the command, and how the variables differ from `own`."""
        differing = {name: value for name, value in self.environment.items() if own.get(name) != value}
        return {
            "command": redacted_words(self.command),
            "environment": redacted_variables(differing),
            "removed": self.removed,
        }


def missing_variables(spec: SweepSpec, inherited: Mapping[str, str]) -> list[str]:
    """The variables that the server shall inherit and that this process does not have."""
    named = [*spec.engine.inherit, *(name for name, value in spec.engine.env.items() if value == reference(name))]
    return [name for name in named if name not in inherited]


def plan_launch(
    spec: SweepSpec,
    configuration: Configuration,
    *,
    folder: Path,
    inherited: Mapping[str, str],
    states: StatePlan | None = None,
    port: int = DEFAULT_PORT,
) -> LaunchPlan:
    """Plan a launch. Nothing is read, written or started.

    Args:
        folder: scratch folder of this server; need not exist yet.
        inherited: variables that the server process would inherit.
        states: what the server shall hold as states, the configuration's among them; None for that alone.
    """
    launched = configuration if states is None else states.launched
    command = launch_command(spec, launched, port=port)
    if not any("skip-server-warmup" in word for word in command):
        command += ("--skip-server-warmup",)  # its request would run beside the first block
    arguments = server_arguments(spec, launched)
    requested = launch_environment(spec, launched)
    ranks = num_ranks(spec, configuration)
    kept, removed = _without_swept(spec, inherited)
    filled = _filled_in(requested, inherited)
    environment = {**_FAST_CRASH, **kept, **filled}
    environment |= _probe_variables(folder, filled)
    if ranks > 1 and "NCCL_DEBUG" not in environment:
        replays_graphs = arguments.get("disable-cuda-graph") is not True
        environment |= nccl_log_settings(folder, replays_graphs=replays_graphs)
    if environment.get("SGLANG_PLUGINS"):
        environment["SGLANG_PLUGINS"] += ",specsweep_probe"
    return LaunchPlan(
        configuration=configuration,
        states=states,
        folder=folder,
        port=port,
        arguments=arguments,
        command=command,
        requested=requested,
        environment=environment,
        removed=removed,
        num_ranks=ranks,
    )


def nccl_log_settings(folder: Path, *, replays_graphs: bool) -> dict[str, str]:
    """Variables that make NCCL write its log, one file per process in `folder`; the same in every trial.

    Under CUDA graphs NCCL prints one line per operation, at capture. Without graphs it would print one in every cycle,
    so those lines are left out.
    """
    return {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,ENV,GRAPH,P2P,SHM" + (",TUNING" if replays_graphs else ""),
        "NCCL_DEBUG_FILE": str(folder / "nccl.%h.%p.log"),
    }


def _filled_in(requested: Mapping[str, str], inherited: Mapping[str, str]) -> dict[str, str]:
    """`requested` with the values of inherited variables; those that are missing are left out."""
    filled = {name: inherited.get(name) if value == reference(name) else value for name, value in requested.items()}
    return {name: value for name, value in filled.items() if value is not None}


def _without_swept(spec: SweepSpec, inherited: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Inherited variables that the sweep sets nowhere, and the names of the others, sorted.

    A variable that one configuration sets must be absent from a configuration that does not set it. Simulated
    acceptance is never inherited.
    """
    swept = {name for variables in spec.nccl_sets.values() for name in variables}
    swept |= {*spec.search.env, *spec.engine.env, *OTHER_INTERPRETERS, *NEVER_INHERITED}
    swept |= {name for name in inherited if name.startswith(SIMULATES_ACCEPTANCE)}
    kept = {name: value for name, value in inherited.items() if name not in swept}
    return kept, tuple(sorted(swept & set(inherited)))


def _probe_variables(folder: Path, requested: Mapping[str, str]) -> dict[str, str]:
    return {
        "PYTHONPATH": ":".join(filter(None, (str(PROBE_FOLDER), requested.get("PYTHONPATH")))),
        "SPT_NOENV": "1",  # setproctitle would overwrite the environment block that /proc shows
        "SPECSWEEP_PROBE_DIR": str(folder),
        "SPECSWEEP_PROBE_ENV": ",".join(sorted(requested)),
    }
