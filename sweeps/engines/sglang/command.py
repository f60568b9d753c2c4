"""The command and environment that serve one configuration with SGLang. Pure: also what a dry run prints."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sweeps.spec.checks import PINNED_LENGTH, SIMULATES_ACCEPTANCE
from sweeps.spec.model import Scalar, SweepSpec
from sweeps.spec.space import Configuration

PROJECT = Path(__file__).resolve().parents[3]
"""Where relative paths of a spec are looked up: the project's folder on this node, also under `ray job submit`."""
PROBE_FOLDER = Path(__file__).resolve().parents[2] / "cycle_probe"
DEFAULT_PORT = 30000
MODEL = "MODEL"
"""In a recorded command, where an engine without weights (simulated, replay) has no model."""

ADAPTIVE_ALGORITHMS = frozenset({"EAGLE", "EAGLE3"})
"""What SGLang 0.5.16 to 0.5.23 builds adaptive runtime states for (`adaptive_unsupported_reason`), at top-k 1."""

_OTHER_INTERPRETERS = ("PYTHONPATH", "PYTHONHOME", "OMP_NUM_THREADS")
"""Inherited values of these belong to this process (Ray sets the last to a trial's CPU count), not to the server."""
_FAST_CRASH = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
"""Without these a crashed rank keeps its GPUs up to a minute for dumps that nobody reads."""
_ALIASES = {"tp": "tp-size", "tensor-parallel-size": "tp-size", "pp": "pp-size", "model": "model-path"}


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


def server_arguments(spec: SweepSpec, configuration: Configuration) -> dict[str, Scalar]:
    """Server arguments by their canonical name; the configuration's win. `speculative-*` only where it speculates."""
    arguments = {_canonical(name): value for name, value in spec.engine.args.items()}
    arguments.update((_canonical(name), value) for name, value in configuration.args)
    if configuration.speculates:
        return arguments
    return {name: value for name, value in arguments.items() if not name.startswith("speculative-")}


def launch_command(
    spec: SweepSpec,
    configuration: Configuration,
    *,
    port: int = DEFAULT_PORT,
    step_candidates: tuple[int, ...] = (),
    adaptive_config: Path | None = None,
) -> tuple[str, ...]:
    """Every word of the command.

    Args:
        adaptive_config: path of a file with `adaptive_settings(step_candidates)`: the server then starts with the
            largest of them (one that starts with less has too small buffers for more) and keeps the states of all.
    """
    engine = spec.engine
    command = [*engine.launcher, _located(engine.python) if engine.python else sys.executable]
    command += ["-m", "sglang.launch_server"]
    if engine.model_path:
        command += ["--model-path", _located(engine.model_path)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    if configuration.speculates:
        switchable = () if adaptive_config is None else step_candidates
        command += _speculation(spec, configuration, max((configuration.num_steps, *switchable)))
        if adaptive_config is not None:
            command += ["--speculative-adaptive", "--speculative-adaptive-config", str(adaptive_config)]
    for name, value in server_arguments(spec, configuration).items():
        if value is True:
            command.append(f"--{name}")
        elif value is not False:
            command += [f"--{name}", str(value)]
    return tuple(command)


def recorded_command(spec: SweepSpec, configuration: Configuration) -> tuple[str, ...]:
    """The command as a results folder keeps it: what any machine with this project can run from the project's folder.

    `python` stands for an interpreter that the spec does not name, MODEL for a model that it does not name.
    """
    engine = spec.engine
    words = list(launch_command(spec, configuration))
    if engine.python is None:
        words[len(engine.launcher)] = "python"
    if engine.model_path is None:
        at = words.index("--host")
        words[at:at] = ["--model-path", MODEL]
    return tuple(map(_portable, words))


def recorded_environment(spec: SweepSpec, configuration: Configuration) -> dict[str, str]:
    """`launch_environment`, with paths under the project's folder relative to it."""
    variables = launch_environment(spec, configuration)
    return {name: ":".join(map(_portable, value.split(":"))) for name, value in variables.items()}


def recorded_removals(removed: tuple[str, ...]) -> tuple[str, ...]:
    """Inherited variables that mattered to the sweep: without those that only a worker process brings along."""
    return tuple(name for name in removed if name not in _OTHER_INTERPRETERS)


def _speculation(spec: SweepSpec, configuration: Configuration, num_steps: int) -> list[str]:
    words = ["--speculative-algorithm", spec.engine.algorithm]
    if configuration.drafter is not None:
        words += ["--speculative-draft-model-path", _located(spec.drafters[configuration.drafter])]
    draft_tokens = configuration.num_draft_tokens if num_steps == configuration.num_steps else num_steps + 1
    for name, value in (
        ("num-steps", num_steps),
        ("eagle-topk", configuration.eagle_topk),
        ("num-draft-tokens", draft_tokens),
    ):
        words += [f"--speculative-{name}", str(value)]
    return words


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


def launch_environment(spec: SweepSpec, configuration: Configuration) -> dict[str, str]:
    """Variables that serve this configuration, to be set on top of a clean environment; the configuration's win.

    In a mixed sweep only a pinned configuration gets those that simulate acceptance.
    """
    real = spec.acceptance == "mixed" and not configuration.pinned
    fixed = {n: v for n, v in spec.engine.env.items() if not (real and n.startswith(SIMULATES_ACCEPTANCE))}
    variables = {name: _located_list(name, value) for name, value in fixed.items()}
    return {**variables, **dict(configuration.nccl_env), **dict(configuration.env)}


def pinned_accept_length(spec: SweepSpec, configuration: Configuration) -> float | None:
    """Tokens per cycle that the server simulates, at most steps + 1 (SGLang clips it so); None where it does not."""
    length = launch_environment(spec, configuration).get(PINNED_LENGTH)
    return min(float(length), configuration.num_steps + 1.0) if length and configuration.speculates else None


def child_environment(
    spec: SweepSpec, configuration: Configuration, *, inherited: Mapping[str, str], probe: ProbeFiles
) -> ChildEnvironment:
    """The whole environment of the server process.

    Inherited variables that the sweep sets anywhere are taken out first, so that a configuration without them has none.
    """
    swept = {name for variables in spec.nccl_sets.values() for name in variables}
    swept |= {*spec.search.env, *spec.engine.env, *_OTHER_INTERPRETERS}
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


def num_ranks(spec: SweepSpec, configuration: Configuration) -> int:
    """Scheduler processes of the server: tensor parallel x pipeline parallel."""
    arguments = server_arguments(spec, configuration)
    return int(arguments.get("tp-size", 1)) * int(arguments.get("pp-size", 1))


def _canonical(name: str) -> str:
    name = name.lstrip("-").replace("_", "-")
    return _ALIASES.get(name, name)


def _located(value: str) -> str:
    """`value` under the project's folder where that exists, else as it is (a model's name)."""
    here = PROJECT / value
    return str(here) if not Path(value).is_absolute() and here.exists() else value


def _portable(value: str) -> str:
    return str(Path(value).relative_to(PROJECT)) if value.startswith(f"{PROJECT}/") else value


def _located_list(name: str, value: str) -> str:
    return ":".join(map(_located, value.split(":"))) if name == "PYTHONPATH" else value
