"""Sections of the page: what was measured, and the table of all configurations, to sort, filter and copy from."""

from __future__ import annotations

from html import escape

from analysis.judge.phases import Phases
from analysis.judge.sides import Side
from analysis.judge.verdict import SweepVerdict
from analysis.show.elements import judged_cell, or_dash, section

_TABLE_ID = "configurations"
_COLUMNS = (
    ("configuration", ""),
    ("tok/s", "n"),
    ("95 % interval", "n"),
    ("against control", ""),
    ("accept length", "n"),
    ("cycle ms", "n"),
    ("verify ms", "n"),
    ("launches", "n"),
    ("command", ""),
)
_UNSORTED = ("95 % interval", "command")


def measured(verdict: SweepVerdict) -> str:
    """What the sweep is about."""
    rows = "".join(f"<dt>{escape(fact.name)}</dt><dd>{escape(fact.value)}</dd>" for fact in verdict.about)
    return section("What was measured", "As the rows of this folder say.", f'<dl class="facts">{rows}</dl>')


def configurations(verdict: SweepVerdict) -> str:
    """Every configuration with results; empty without any."""
    if not verdict.sides:
        return ""
    heads = "".join(
        f'<th class="{shade}"{"" if name in _UNSORTED else " data-sort"}>{escape(name)}</th>'
        for name, shade in _COLUMNS
    )
    shown = {each.configuration_id: each for each in verdict.phases}
    rows = "".join(_row(verdict, side, shown[side.configuration_id]) for side in verdict.sides)
    field = f'<input type="search" data-filters="{_TABLE_ID}" placeholder="filter" aria-label="filter configurations">'
    table = f'<table id="{_TABLE_ID}"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    text = "Fastest first. A heading sorts by its column; the field keeps the rows whose name holds all of its words."
    return section("Configurations", text, field, f'<div class="scroll">{table}</div>')


def _row(verdict: SweepVerdict, side: Side, phases: Phases) -> str:
    interval = "—" if side.interval is None else f"{side.interval[0]:.1f} to {side.interval[1]:.1f}"
    notes = [word for word, holds in (("control", side.role == "control"), ("pruned", side.pruned)) if holds]
    name = escape(verdict.names[side.configuration_id])
    against = side.against_control
    effect = "" if against is None else f"{against.effect:.6f}"
    judged = judged_cell(against, "").replace("<td", f'<td data-value="{effect}"', 1)
    verify_ms = phases.verify_ms if side.speculates else phases.decode_ms
    copies = f'<button data-copies="{escape(side.launch_command)}">copy</button>' if side.launch_command else ""
    return (
        f"<tr><td>{name}<div class='why'>{', '.join(notes)}</div></td>{_number(side.tok_s, 1)}"
        f'<td class="n">{interval}</td>{judged}{_number(phases.accept_length, 2)}{_number(phases.cycle_ms, 2)}'
        f"{_number(verify_ms, 2)}{_number(side.num_launches, 0)}<td>{copies}</td></tr>"
    )


def _number(value: float | None, digits: int) -> str:
    held = "" if value is None else f"{value:.9g}"
    return f'<td class="n" data-value="{held}">{or_dash(value, digits)}</td>'
