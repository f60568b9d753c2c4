"""What only a real SGLang server is given: its whole environment, the probe's files, the adaptive settings. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sweeps.engines.command import OTHER_INTERPRETERS, launch_environment, num_ranks, server_arguments
from sweeps.spec.model import SweepSpec
from sweeps.spec.space import Configuration

PROBE_FOLDER = Path(__file__).resolve().parents[2] / "cycle_probe"

ADAPTIVE_ALGORITHMS = frozenset({"EAGLE", "EAGLE3"})
"""What SGLang 0.5.16 to 0.5.23 builds adaptive runtime states for (`adaptive_unsupported_reason`), at top-k 1."""

_FAST_CRASH = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
"""Without these a crashed rank keeps its GPUs up to a minute for dumps that nobody reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeFiles:
    """Where the probe and the engine meet."""

    folder: Path
    num_steps: int | None = None
    """Step count to pin from the first cycle on; None: the server's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildEnvironment:
    """All variables of the server process, and how they came about."""

    variables: Mapping[str, str]
    removed: tuple[str, ...]
    """Inherited variables that were left out, sorted."""


def can_switch(spec: SweepSpec, configuration: Configuration, step_candidates: tuple[int, ...]) -> bool:
    """Whether a launch with these candidates can change its step count in place, as far as the arguments tell."""
    return (
        spec.engine.switch_in_place
        and len(step_candidates) > 1
        and configuration.eagle_topk == 1
        and spec.engine.algorithm in ADAPTIVE_ALGORITHMS
    )


def adaptive_settings(step_candidates: tuple[int, ...]) -> dict[str, dict[str, object]]:
    """Content of SGLang's adaptive config: one slot for every batch size, all candidates in it."""
    return {
        "1": {
            "candidate_steps": sorted(step_candidates),
            "up_hysteresis": 0.0,
            "down_hysteresis": -0.25,
            "ceiling_coeff": 0,
        }
    }


def child_environment(
    spec: SweepSpec, configuration: Configuration, *, inherited: Mapping[str, str], probe: ProbeFiles
) -> ChildEnvironment:
    """The whole environment of the server process.

    Inherited variables that the sweep sets anywhere are taken out first, so that a configuration without them has none.
    """
    swept = {name for variables in spec.nccl_sets.values() for name in variables}
    swept |= {*spec.search.env, *spec.engine.env, *OTHER_INTERPRETERS}
    variables = {name: value for name, value in inherited.items() if name not in swept}
    removed = tuple(sorted(swept & set(inherited)))
    requested = launch_environment(spec, configuration)
    for name, value in _FAST_CRASH.items():
        variables.setdefault(name, value)
    variables.update(requested)
    variables["PYTHONPATH"] = ":".join(filter(None, (str(PROBE_FOLDER), requested.get("PYTHONPATH"))))
    variables["SPT_NOENV"] = "1"  # setproctitle would overwrite the environment block that /proc shows
    variables["SPECSWEEP_PROBE_DIR"] = str(probe.folder)
    variables["SPECSWEEP_PROBE_ENV"] = ",".join(sorted(requested))
    if num_ranks(spec, configuration) > 1 and "NCCL_DEBUG" not in variables:
        replays_graphs = server_arguments(spec, configuration).get("disable-cuda-graph") is not True
        variables |= nccl_log_settings(probe.folder, replays_graphs=replays_graphs)
    if probe.num_steps is not None:
        variables["SPECSWEEP_PROBE_NUM_STEPS"] = str(probe.num_steps)
    if variables.get("SGLANG_PLUGINS"):
        variables["SGLANG_PLUGINS"] += ",specsweep_probe"
    return ChildEnvironment(variables=variables, removed=removed)


def nccl_log_settings(folder: Path, *, replays_graphs: bool) -> dict[str, str]:
    """NCCL's own account, one file per process in `folder`; the same in every trial.

    Per-operation lines come once, at capture, under CUDA graphs; without graphs they would come in every cycle.
    """
    return {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,ENV,GRAPH,P2P,SHM" + (",TUNING" if replays_graphs else ""),
        "NCCL_DEBUG_FILE": str(folder / "nccl.%h.%p.log"),
    }
