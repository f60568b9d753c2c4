"""The dry run: what a spec would measure and launch, and what that would cost. Starts no server and no cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from sweeps.engines.base import Engine
from sweeps.foreign_text import cell, one_line
from sweeps.nccl.grammar import cautions, inert_at_decode
from sweeps.redaction import shell_line
from sweeps.spec.model import SweepSpec
from sweeps.spec.space import Configuration, Space, nccl_env
from sweeps.spec.workload import Block

ASSUMED_COLD_BOOT_S = 690.0
"""First launch of a 1T-parameter model on 8 GPUs with its weights on local disks: an order of magnitude, not a figure.

A later launch, and what the machine profiles of 8 GPUs add to the first one: 300 s until 595 GB are in the page cache,
60 s to compile kernels.
"""
ASSUMED_BOOT_S = 330.0
"""Seconds of a later launch, with the weights in the page cache."""
ASSUMED_TOK_S = 60.0
"""Per request: the founding case's throughput with speculation."""
_MOST_REASONS = 6
"""More reasons than these are told by rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One server as it would be launched."""

    words: Sequence[str]
    environment: Mapping[str, str]
    """What the spec and the configuration set."""
    num_states: int = 1
    """Configurations that this server holds, and switches between."""
    nccl_sets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Variables of the NCCL sets that have a communicator of their own in this server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Upper bounds: every configuration measured in full, nothing pruned, nothing certified early."""

    num_configurations: int
    num_invalid: int
    num_trials: int
    """Controls and incumbents included."""
    num_launches: int
    cold_boot_s: float
    """Seconds of the first launch: weights not yet in the page cache, kernels not yet compiled."""
    boot_s: float
    """Seconds of each later launch."""
    trial_s: float
    """Warm-up and measured blocks of one trial."""
    source: str
    """Where the seconds come from."""

    def gpu_hours(self, num_gpus: int) -> float:
        boots_s = self.cold_boot_s + (self.num_launches - 1) * self.boot_s
        return (boots_s + self.num_trials * self.trial_s) * num_gpus / 3600


def estimate(spec: SweepSpec, space: Space, blocks: Sequence[Block], engine: Engine | None) -> Estimate:
    """Count trials and launches. Seconds come from an engine with a virtual clock, and are assumed without one."""
    members = space.configurations()
    num_candidates = min(len(members) * spec.study.max_replicates, spec.budget.trials or len(members) * 2**20)
    num_keys = len({space.launch_key(member) for member in members})
    by_candidates = min(num_candidates, num_keys)
    if space.held.nccl:  # the control is launched once, and the winner by itself
        shares_control = any(space.launch_key(member) == space.launch_key(space.control) for member in members)
        num_controls, num_incumbents, again = 1, int(spec.control.incumbent), -int(shares_control)
    else:
        num_controls = 2 + (max(0, num_candidates - 1) // spec.control.every if spec.control.every else 0)
        num_incumbents, again = num_controls - 1 if spec.control.incumbent else 0, max(0, num_controls - 2)
    cold_boot_s, boot_s, trial_s, source = _tried(engine, space, blocks) if engine is not None else _assumed(blocks)
    return Estimate(
        num_configurations=len(members),
        num_invalid=len(space.invalid()),
        num_trials=num_candidates + num_controls + num_incumbents,
        num_launches=by_candidates + num_controls + num_incumbents + again,
        cold_boot_s=cold_boot_s,
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
        command_of: the server that would be launched for a configuration; None for engines without a command.
    """
    console.print(_space_table(space))
    for line in (
        *_invalid_lines([reason for _, reason in space.invalid()]),
        *unused_values(spec, space),
        *_nccl_lines(spec),
    ):
        console.print(one_line(line), markup=False, highlight=False, soft_wrap=True)
    if command_of is None:
        console.print(f"engine {spec.engine.kind}: no server is launched")
    else:
        for launch_key, first in _first_by_launch_key(space).items():
            line = one_line(_command_line(launch_key, command_of(first)))
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    gpus = spec.resources.gpus
    console.print(
        f"at most {bounds.num_trials} trials (controls included) in {bounds.num_launches} launches: "
        f"{bounds.gpu_hours(gpus):.1f} GPU hours on {gpus} GPUs "
        f"({bounds.cold_boot_s:.0f} s for the first launch, {bounds.boot_s:.0f} s for each later one, "
        f"{bounds.trial_s:.0f} s per trial; {bounds.source})" + _limits(spec, bounds.gpu_hours(gpus)),
        highlight=False,
        soft_wrap=True,
    )


def _limits(spec: SweepSpec, gpu_hours: float) -> str:
    """What ends the sweep before the estimate does."""
    budget = spec.budget
    told = ""
    if budget.gpu_hours is not None and budget.gpu_hours < gpu_hours:
        told += f"; budget.gpu_hours ends the sweep at {budget.gpu_hours:g} GPU hours"
    if budget.wall_hours is not None and budget.wall_hours * spec.resources.gpus < gpu_hours:
        told += f"; budget.wall_hours ends the driver at {budget.wall_hours:g} hours"
    return told


def _sets(command: Command) -> str:
    """`: nccl ring NCCL_ALGO=Ring, nccl none`: the communicators beside the launched one."""
    sets = [
        " ".join((f"nccl {name}", *(f"{variable}={value}" for variable, value in variables.items())))
        for name, variables in command.nccl_sets.items()
    ]
    return f": {', '.join(sets)}" if sets else ""


def _command_line(launch_key: str, command: Command) -> str:
    held = f" ({command.num_states} states in one server{_sets(command)})" if command.num_states > 1 else ""
    variables = (f"{name}={value}" for name, value in command.environment.items())
    return f"{launch_key}{held}: {shell_line((*variables, *command.words))}"


def _invalid_lines(reasons: Sequence[str]) -> list[str]:
    """Each reason with its count. If there are many: each rule (the words in brackets at the end) with one example."""
    counts = Counter(reasons)
    if len(counts) <= _MOST_REASONS:
        return [f"invalid ({count} suggestions): {reason}" for reason, count in counts.items()]
    rules: dict[str, list[str]] = {}
    for reason in reasons:
        rules.setdefault(reason[reason.rfind("(") :] if reason.endswith(")") else reason, []).append(reason)
    return [f"invalid ({len(same)} suggestions): {rule.strip('()')}; first {same[0]}" for rule, same in rules.items()]


def unused_values(spec: SweepSpec, space: Space) -> list[str]:
    """Values of the spec that no configuration has: they vanish by a rule of the space, and nothing measures them."""
    members = (space.control, *space.configurations())
    search = spec.search
    listed: dict[str, tuple[Sequence[object], set[object]]] = {
        "num_steps": (search.num_steps, {each.num_steps for each in members}),
        "eagle_topk": (search.eagle_topk, {each.eagle_topk for each in members}),
        "num_draft_tokens": (search.num_draft_tokens, {each.num_draft_tokens for each in members}),
        "drafter": (search.drafter, {each.drafter for each in members}),
    }
    return [
        f"search.{name}: no configuration has {', '.join(map(str, unused))}"
        for name, (values, used) in listed.items()
        if (unused := [value for value in values if value not in used and value is not None and value != "auto"])
    ]


def _nccl_lines(spec: SweepSpec) -> list[str]:
    """What is known of the searched NCCL sets before anything runs."""
    sets = {name: dict(nccl_env(spec, name)) for name in dict.fromkeys(spec.search.nccl)}
    return [
        f"nccl {name}: {variable}={variables[variable]}: {head}{reason}"
        for name, variables in sets.items()
        for head, notes in (("no effect on decode: ", inert_at_decode(variables)), ("caution: ", cautions(variables)))
        for variable, reason in notes.items()
    ]


def _tried(engine: Engine, space: Space, blocks: Sequence[Block]) -> tuple[float, float, float, str]:
    """Seconds of the first launch (the control), of a later one, and of a trial; and where they come from."""
    cold = engine.launch(space.control)
    configuration = space.configurations()[-1]
    warm = engine.launch(configuration, states=space.states(configuration))
    began_s = engine.now_s()
    for block in blocks:
        engine.run_block(block)
    trial_s = engine.now_s() - began_s
    engine.close()
    boots_s = sum(cold.boot_s.values()), sum(warm.boot_s.values())
    return *boots_s, trial_s, f"timing from the engine {engine.name}, not measured"


def _assumed(blocks: Sequence[Block]) -> tuple[float, float, float, str]:
    waves = ((block, -(-len(block.prompts) // block.concurrency)) for block in blocks)
    trial_s = sum(count * block.output_tokens for block, count in waves) / ASSUMED_TOK_S
    return ASSUMED_COLD_BOOT_S, ASSUMED_BOOT_S, trial_s, f"assumed, with {ASSUMED_TOK_S:.0f} tok/s per request"


def _space_table(space: Space) -> Table:
    table = Table(title=f"{len(space.configurations())} configurations, {len(space.invalid())} invalid suggestions")
    for name in ("id", "launch key", "configuration"):
        table.add_column(name)
    for member in space.configurations():
        table.add_row(member.configuration_id, space.launch_key(member), cell(member.label))
    return table


def _first_by_launch_key(space: Space) -> dict[str, Configuration]:
    first: dict[str, Configuration] = {}
    for member in (space.control, *space.configurations()):
        first.setdefault(space.launch_key(member), member)
    return first
