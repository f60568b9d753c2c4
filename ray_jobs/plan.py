"""The dry run: what a spec would measure and launch, and what that would cost. Starts no server and no cluster."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from sweeps.engines.base import Engine
from sweeps.nccl.grammar import cautions, inert_at_decode
from sweeps.spec.model import SweepSpec
from sweeps.spec.space import Configuration, Space, nccl_env
from sweeps.spec.workload import Block

ASSUMED_BOOT_S = 330.0
"""Launch of a 1T-parameter model on 8 GPUs with its weights on local disks: an order of magnitude, not a figure."""
ASSUMED_TOK_S = 60.0
"""Per request: the founding case's throughput with speculation."""
_MOST_REASONS = 6
"""More reasons than these are told by rule."""


Command = tuple[Sequence[str], Mapping[str, str]]
"""Words and environment of a server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Upper bounds: every configuration measured in full, nothing pruned, nothing certified early."""

    num_configurations: int
    num_invalid: int
    num_trials: int
    """Controls and incumbents included."""
    num_launches: int
    boot_s: float
    trial_s: float
    """Warm-up and measured blocks of one trial."""
    source: str
    """Where the seconds come from."""

    def gpu_hours(self, num_gpus: int) -> float:
        return (self.num_launches * self.boot_s + self.num_trials * self.trial_s) * num_gpus / 3600


def estimate(spec: SweepSpec, space: Space, blocks: Sequence[Block], engine: Engine | None) -> Estimate:
    """Count trials and launches; seconds are tried out on an engine with a virtual clock, assumed without one."""
    members = space.configurations()
    num_candidates = min(len(members) * spec.study.max_replicates, spec.budget.trials or len(members) * 2**20)
    num_controls = 2 + (max(0, num_candidates - 1) // spec.control.every if spec.control.every else 0)
    num_incumbents = num_controls - 1 if spec.control.incumbent else 0
    num_keys = len({space.launch_key(member) for member in members})
    by_candidates = min(num_candidates, num_keys)
    boot_s, trial_s, source = _tried(engine, space, blocks) if engine is not None else _assumed(blocks)
    return Estimate(
        num_configurations=len(members),
        num_invalid=len(space.invalid()),
        num_trials=num_candidates + num_controls + num_incumbents,
        num_launches=by_candidates + num_controls + num_incumbents + max(0, num_controls - 2),
        boot_s=boot_s,
        trial_s=trial_s,
        source=source,
    )


def print_plan(
    spec: SweepSpec,
    space: Space,
    bounds: Estimate,
    console: Console,
    *,
    command_of: Callable[[Configuration], Command] | None,
) -> None:
    """Print the effective space, the launch commands and the estimate.

    Args:
        command_of: argv and environment of a configuration's server; None for engines without a command.
    """
    console.print(_space_table(space))
    for line in (*_invalid_lines([reason for _, reason in space.invalid()]), *_nccl_lines(spec)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if command_of is None:
        console.print(f"engine {spec.engine.kind}: no server is launched")
    else:
        for launch_key, first in _first_by_launch_key(space).items():
            argv, environment = command_of(first)
            words = [*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(argv)]
            console.print(f"{launch_key}: {' '.join(words)}", markup=False, highlight=False, soft_wrap=True)
    gpus = spec.resources.gpus
    console.print(
        f"at most {bounds.num_trials} trials (controls included) in {bounds.num_launches} launches: "
        f"{bounds.gpu_hours(gpus):.1f} GPU hours on {gpus} GPUs "
        f"({bounds.boot_s:.0f} s per launch, {bounds.trial_s:.0f} s per trial; {bounds.source})",
        highlight=False,
        soft_wrap=True,
    )


def _invalid_lines(reasons: Sequence[str]) -> list[str]:
    """Each reason with its count; where there are many, each rule (the words in brackets at the end) with one of it."""
    counts = Counter(reasons)
    if len(counts) <= _MOST_REASONS:
        return [f"invalid ({count} suggestions): {reason}" for reason, count in counts.items()]
    rules: dict[str, list[str]] = {}
    for reason in reasons:
        rules.setdefault(reason[reason.rfind("(") :] if reason.endswith(")") else reason, []).append(reason)
    return [f"invalid ({len(same)} suggestions): {rule.strip('()')}; first {same[0]}" for rule, same in rules.items()]


def _nccl_lines(spec: SweepSpec) -> list[str]:
    """What is known of the searched NCCL sets before anything runs."""
    sets = {name: dict(nccl_env(spec, name)) for name in dict.fromkeys(spec.search.nccl)}
    return [
        f"nccl {name}: {variable}={variables[variable]}: {head}{reason}"
        for name, variables in sets.items()
        for head, notes in (("changes no decode: ", inert_at_decode(variables)), ("caution: ", cautions(variables)))
        for variable, reason in notes.items()
    ]


def _tried(engine: Engine, space: Space, blocks: Sequence[Block]) -> tuple[float, float, str]:
    configuration = space.configurations()[-1]
    report = engine.launch(configuration, step_candidates=space.step_candidates(configuration))
    began_s = engine.now_s()
    for block in blocks:
        engine.run_block(block)
    trial_s = engine.now_s() - began_s
    engine.close()
    return sum(report.boot_s.values()), trial_s, f"tried out on the engine {engine.name}: simulated, not measured"


def _assumed(blocks: Sequence[Block]) -> tuple[float, float, str]:
    waves = ((block, -(-len(block.prompts) // block.concurrency)) for block in blocks)
    trial_s = sum(count * block.output_tokens for block, count in waves) / ASSUMED_TOK_S
    return ASSUMED_BOOT_S, trial_s, f"assumed: {ASSUMED_BOOT_S:.0f} s boot and {ASSUMED_TOK_S:.0f} tok/s per request"


def _space_table(space: Space) -> Table:
    table = Table(title=f"{len(space.configurations())} configurations, {len(space.invalid())} invalid suggestions")
    for name in ("id", "launch key", "configuration"):
        table.add_column(name)
    for member in space.configurations():
        table.add_row(member.configuration_id, space.launch_key(member), member.label)
    return table


def _first_by_launch_key(space: Space) -> dict[str, Configuration]:
    first: dict[str, Configuration] = {}
    for member in (space.control, *space.configurations()):
        first.setdefault(space.launch_key(member), member)
    return first
