"""Pieces of the page: sections, tables, tiles, drawings. Everything of the folder is escaped here or by the caller."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import plotly.graph_objects as go

from analysis.judge.claims import Effect
from analysis.judge.phases import Phases
from analysis.judge.sides import Side
from analysis.judge.verdict import SweepVerdict
from analysis.show import charts
from analysis.show.wording import blocks_only, percent, verdict_words


def section(title: str, text: str, *parts: str) -> str:
    """One section of the page; `parts` are HTML."""
    return f"<section><h2>{escape(title)}</h2><p>{escape(text)}</p>{''.join(parts)}</section>"


def table(header: Sequence[str], rows: Iterable[str]) -> str:
    """Column names that start with # are numbers."""
    names = "".join(
        f'<th class="n">{escape(name[1:])}</th>' if name.startswith("#") else f"<th>{escape(name)}</th>"
        for name in header
    )
    return f'<div class="scroll"><table><tr>{names}</tr>{"".join(f"<tr>{row}</tr>" for row in rows)}</table></div>'


def drawing(figure: go.Figure) -> str:
    """A drawing as data: the page's own script draws it, so no other script has to be allowed."""
    height = "" if figure.layout.height is None else f' style="height:{int(figure.layout.height)}px"'
    return f'<div class="figure"{height} data-figure="{escape(str(figure.to_json()))}"></div>'


def tile(name: str, value: str, note: str) -> str:
    """One figure at the top of the page; `value` is HTML."""
    return (
        f'<div class="tile"><div class="name">{escape(name)}</div><div class="value">{value}</div>'
        f'<div class="note">{escape(note)}</div></div>'
    )


def side_tile(name: str, side: Side | None) -> str:
    """Throughput of one side."""
    if side is None:
        return tile(name, "none", "no results")
    interval = "" if side.interval is None else f"{side.interval[0]:.1f} to {side.interval[1]:.1f}, "
    launches = f"{side.num_launches} launch{'' if side.num_launches == 1 else 'es'}"
    if blocks_only([side]):
        launches = f"blocks of {launches} only"
    return tile(name, f"{side.tok_s:.1f} <small>tok/s</small>", interval + launches)


def judged_cell(effect: Effect | None, reason: str | None) -> str:
    """A table cell with a verdict, its effect and interval."""
    if effect is None:
        return f'<td class="cell"><span class="why">{escape(reason or "")}</span></td>'
    low, high = effect.interval
    note = effect.reason or effect.assumption
    why = f' title="{escape(note)}"' if note else ""
    shade = effect.verdict.replace(" ", "-")
    return (
        f'<td class="cell"{why}><span class="word {shade}">{verdict_words(effect)}</span><br>{percent(effect.effect)}'
        f'<div class="range">{percent(low)} to {percent(high)}</div></td>'
    )


def or_dash(value: float | None, digits: int) -> str:
    """A number for a table; a dash if there is none."""
    return "—" if value is None else f"{value:.{digits}f}"


def row_names(verdict: SweepVerdict) -> dict[str, str]:
    """What tells a configuration from the others, for a chart."""
    return {key: charts.wrapped(escape(name)) for key, name in verdict.names.items()}


def todays_phases(verdict: SweepVerdict) -> Phases | None:
    """Of the best speculative configuration."""
    side = verdict.speculation_pays.speculative
    return next((each for each in verdict.phases if side and each.configuration_id == side.configuration_id), None)
