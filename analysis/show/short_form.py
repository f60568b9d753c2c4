"""The report's short form, for a terminal or a job log."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from analysis.judge.factors import FACTOR_METRICS, Factor
from analysis.judge.sides import Side
from analysis.judge.verdict import SweepVerdict
from analysis.show.wording import (
    METRIC_NAMES,
    command_note,
    communication_bound,
    crossover,
    hours,
    interval_heading,
    launched_alone,
    nccl_answer,
    percent,
    verdict_words,
    verify_parts_line,
)
from sweeps.foreign_text import cell

_COLOURS = {"better": "green", "worse": "red", "equivalent": "blue", "undecided": "yellow", "not exercised": "dim"}
_MOST_ROWS = 12


def print_short_form(verdict: SweepVerdict, console: Console) -> None:
    """The verdict sentence, the fastest configurations, the dimensions, break-even, the winner's command, the cost."""
    pays = verdict.speculation_pays
    simulated = " (simulated numbers, not measured)" if verdict.engine == "simulated" else ""
    console.print(
        Panel(
            cell(pays.sentence, style=_COLOURS[pays.verdict]),
            title=cell(f"{verdict.sweep_id} · engine {verdict.engine}{simulated}"),
            title_align="left",
        )
    )
    if pays.selection:
        console.print(cell(pays.selection, style="dim"))
    console.print(Group(*_tables(verdict)))
    if verdict.confirmation is not None:
        name = verdict.names[verdict.confirmation.configuration_id]
        console.print(cell(f"{name}:{launched_alone(verdict)}"))
    for line in _lines(verdict):
        console.print(cell(line))
    if verdict.best is not None:
        console.print()
        console.print(
            cell(f"Launch {verdict.best.label} ({verdict.best_reason}):{command_note(verdict)}", style="bold")
        )
        console.print(cell("  " + verdict.best.launch_command), soft_wrap=True)


def _tables(verdict: SweepVerdict) -> list[RenderableType]:
    crowds = [_concurrencies(verdict)] if verdict.by_concurrency else []
    return [_configurations(verdict), *crowds, *([_dimensions(verdict)] if verdict.factors else [])]


def _configurations(verdict: SweepVerdict) -> Table:
    table = Table(title="Configurations, fastest first (drift is taken out)", title_justify="left", header_style="bold")
    table.add_column("configuration", overflow="fold")
    for name in (
        "tok/s",
        interval_heading(verdict.sides),
        "against control",
        "accept length",
        "draft",
        "verify",
        "extend",
        "cycle ms",
    ):
        table.add_column(name, justify="right")
    phases = {each.configuration_id: each for each in verdict.phases}
    shown = list(verdict.sides[:_MOST_ROWS])
    if verdict.control is not None and verdict.control not in shown:
        shown.append(verdict.control)
    for side in shown:
        each = phases[side.configuration_id]
        times = (each.draft_ms, each.verify_ms or each.decode_ms, each.extend_ms, each.cycle_ms)
        table.add_row(
            cell(verdict.names[side.configuration_id]),
            f"{side.tok_s:.1f}",
            "" if side.interval is None else f"{side.interval[0]:.1f} to {side.interval[1]:.1f}",
            _against(side),
            *(f"{value:.2f}" if value is not None else "" for value in (each.accept_length, *times)),
        )
    return table


def _concurrencies(verdict: SweepVerdict) -> Table:
    table = Table(title="Requests at a time", title_justify="left", header_style="bold")
    table.add_column("concurrency", justify="right")
    table.add_column("best speculative", overflow="fold")
    for name in ("tok/s", "without", "speculation"):
        table.add_column(name, justify="right")
    for each in verdict.by_concurrency:
        pays = each.speculation_pays
        words = pays.verdict if pays.effect is None else f"{percent(pays.effect.effect)} {verdict_words(pays.effect)}"
        table.add_row(
            str(each.concurrency),
            cell("" if pays.speculative is None else verdict.names[pays.speculative.configuration_id]),
            *("" if side is None else f"{side.tok_s:.1f}" for side in (pays.speculative, pays.plain)),
            Text(words, style=_COLOURS[pays.verdict]),
        )
    return table


def _against(side: Side) -> Text:
    effect = side.against_control
    if effect is None:
        return Text("control" if side.role == "control" else "", style="dim")
    return Text(f"{percent(effect.effect)} {verdict_words(effect)}", style=_COLOURS[effect.verdict])


def _dimensions(verdict: SweepVerdict) -> Table:
    table = Table(title="What each dimension does", title_justify="left", header_style="bold")
    table.add_column("dimension", overflow="fold")
    for metric in FACTOR_METRICS:
        table.add_column(METRIC_NAMES[metric], justify="right")
    groups: dict[str, dict[str, Factor]] = {}
    for factor in verdict.factors:
        name = f"{factor.dimension} {factor.reference} -> {factor.value}"
        groups.setdefault(name, {})[factor.metric] = factor
    for name, by_metric in groups.items():
        table.add_row(cell(name), *(_cell(by_metric[metric]) for metric in FACTOR_METRICS))
    return table


def _cell(factor: Factor) -> Text:
    if factor.effect is None:
        return Text("no pair", style="dim")
    words = verdict_words(factor.effect)
    return Text(f"{percent(factor.effect.effect)}\n{words}", style=_COLOURS[factor.effect.verdict])


def _lines(verdict: SweepVerdict) -> list[str]:
    lines = [line for line in (nccl_answer(verdict), crossover(verdict) if verdict.by_concurrency else "") if line]
    needed = verdict.break_even
    if needed is not None:
        line = f"Break-even accept length at a cycle of {needed.cycle_ms:.2f} ms: {needed.accept_length:.2f}"
        if needed.target_tok_s is not None:
            line += f"; for {needed.target_tok_s:.0f} tok/s: {needed.target_accept_length:.2f}"
        lines.append(line + ".")
    lines.append(
        "No kernel trace, so the share of communication in verify is unknown."
        if verdict.communication is None
        else communication_bound(verdict.communication)
    )
    if verdict.verify_parts is not None:
        lines.append(verify_parts_line(verdict.verify_parts))
    excluded = [each for each in verdict.excluded if each.kind not in ("pruned", "superseded")]
    pruned, again = (sum(each.kind == kind for each in verdict.excluded) for kind in ("pruned", "superseded"))
    lines.extend(f"Excluded: {each.label}: {each.kind}: {each.reason}" for each in excluded[:_MOST_ROWS])
    if len(excluded) > _MOST_ROWS:
        lines.append(f"... and {len(excluded) - _MOST_ROWS} more exclusions; the page lists all.")
    if pruned:
        lines.append(f"Pruned: {pruned} trials; the page has the reasons.")
    if again:
        lines.append(f"Superseded: {again} attempts that were measured again later.")
    lines.extend(f"Warning: {warning}" for warning in verdict.warnings)
    spent = {name: seconds for name, seconds in verdict.cost.gpu_seconds.items() if seconds > 0}
    parts = ", ".join(f"{name.replace('_', ' ')} {hours(seconds)}" for name, seconds in spent.items())
    grid = verdict.cost.exhaustive_grid
    against = "" if grid is None else f"; a full grid with one launch per configuration: {hours(grid)}"
    lines.append(f"GPU hours: {hours(verdict.cost.total)} ({parts}){against}.")
    return lines
