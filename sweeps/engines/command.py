"""The command and variables that serve one configuration with SGLang, as every engine records them. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from sweeps.redaction import is_secret, redacted_variables, redacted_words, reference
from sweeps.spec.model import EngineSpec, Scalar, SweepSpec
from sweeps.spec.names import PINNED_LENGTH
from sweeps.spec.space import Configuration

PROJECT = Path(__file__).resolve().parents[2]
"""Where relative paths of a spec are looked up: the project's folder on this node, also under `ray job submit`."""

DEFAULT_PORT = 30000

MODEL = "MODEL"
"""Stands for the model in a recorded command of an engine without weights (simulated, replay)."""

OTHER_INTERPRETERS = ("PYTHONPATH", "PYTHONHOME", "OMP_NUM_THREADS")
"""Inherited values of these belong to this process (Ray sets the last to a trial's CPU count), not to the server."""

NEVER_INHERITED = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Whoever has them may run code on the cluster."""

_ALIASES = {"tp": "tp-size", "tensor-parallel-size": "tp-size", "pp": "pp-size", "model": "model-path"}


def server_arguments(spec: SweepSpec, configuration: Configuration) -> dict[str, Scalar]:
    """Server arguments by their canonical name; the configuration's win. `speculative-*` only if it speculates."""
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
) -> tuple[str, ...]:
    """Every word of the command."""
    engine = spec.engine
    command = [*engine.launcher, _located(engine.python) if engine.python else sys.executable]
    command += ["-m", "sglang.launch_server"]
    if engine.model_path:
        command += ["--model-path", _located(engine.model_path)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    if configuration.speculates:
        command += _speculation(spec, configuration)
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
    return redacted_words(map(_portable, words))


def recorded_environment(spec: SweepSpec, configuration: Configuration) -> dict[str, str]:
    """`launch_environment` without secrets, with paths under the project's folder relative to it."""
    variables = redacted_variables(launch_environment(spec, configuration))
    return {name: ":".join(map(_portable, value.split(":"))) for name, value in variables.items()}


def recorded_removals(removed: tuple[str, ...]) -> tuple[str, ...]:
    """Inherited variables that mattered to the sweep: without those that only a worker process brings along."""
    return tuple(name for name in removed if name not in (*OTHER_INTERPRETERS, *NEVER_INHERITED))


def _speculation(spec: SweepSpec, configuration: Configuration) -> list[str]:
    words = ["--speculative-algorithm", spec.engine.algorithm]
    if configuration.drafter is not None:
        words += ["--speculative-draft-model-path", _located(spec.drafters[configuration.drafter])]
    for name, value in (
        ("num-steps", configuration.num_steps),
        ("eagle-topk", configuration.eagle_topk),
        ("num-draft-tokens", configuration.num_draft_tokens),
    ):
        words += [f"--speculative-{name}", str(value)]
    return words


def launch_environment(spec: SweepSpec, configuration: Configuration) -> dict[str, str]:
    """Variables that serve this configuration, to be set on top of a clean environment; the configuration's win.

    `${NAME}` stands for the value of a variable that the server takes from the node's environment.
    """
    variables = {name: reference(name) for name in spec.engine.inherit}
    variables |= {name: _located_list(name, value) for name, value in spec.engine.env.items()}
    return {**variables, **dict(configuration.nccl_env), **dict(configuration.env)}


def secret_values(engine: EngineSpec, environment: Mapping[str, str]) -> list[str]:
    """Values that no text of a results folder may hold: those of the spec's secrets, and of what is inherited.

    Args:
        environment: of this process.
    """
    own = {name: value for name, value in engine.env.items() if is_secret(name)}
    inherited = [*engine.inherit, *(name for name, value in own.items() if value == reference(name))]
    written = [value for name, value in own.items() if value != reference(name)]
    return written + [environment[name] for name in inherited if name in environment]


def pinned_accept_length(spec: SweepSpec, configuration: Configuration) -> float | None:
    """Tokens per cycle that the server simulates, at most steps + 1 (SGLang clips it so); None if it does not."""
    length = launch_environment(spec, configuration).get(PINNED_LENGTH)
    return min(float(length), configuration.num_steps + 1.0) if length and configuration.speculates else None


def num_ranks(spec: SweepSpec, configuration: Configuration) -> int:
    """Scheduler processes of the server: tensor parallel x pipeline parallel."""
    arguments = server_arguments(spec, configuration)
    return int(arguments.get("tp-size", 1)) * int(arguments.get("pp-size", 1))


def _canonical(name: str) -> str:
    name = name.lstrip("-").replace("_", "-")
    return _ALIASES.get(name, name)


def _located(value: str) -> str:
    """`value` under the project's folder if that exists, else as it is (a model's name)."""
    here = PROJECT / value
    return str(here) if not Path(value).is_absolute() and here.exists() else value


def _portable(value: str) -> str:
    return str(Path(value).relative_to(PROJECT)) if value.startswith(f"{PROJECT}/") else value


def _located_list(name: str, value: str) -> str:
    return ":".join(map(_located, value.split(":"))) if name == "PYTHONPATH" else value
