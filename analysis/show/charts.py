"""The figures of a report. Data in, plotly figure out; no files, no HTML."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from analysis.judge.phases import Communication, Phases
from analysis.judge.sides import Side
from analysis.judge.verdict import SweepVerdict

MOST_ROWS = 24
"""Configurations in one figure; the tables hold the rest."""
PHASE_COLOURS: Mapping[str, str] = {
    "draft": "#5B8DB8",
    "verify": "#C4553B",
    "extend": "#E3A857",
    "gap": "#C9CDD3",
    "decode step": "#64748B",
}
GOOD, BAD, NEUTRAL, INK, GRID = "#2F7D5B", "#B23A2E", "#64748B", "#1F2933", "#E6E9ED"
_FONT = "Inter, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
_ROW_PX = 38


def phase_bars(phases: Sequence[Phases], names: Mapping[str, str], control: Side | None) -> go.Figure:
    """Stacked cycle phases, one bar per configuration, fastest configuration on top."""
    timed = [each for each in phases if each.cycle_ms is not None]
    key = None if control is None else control.configuration_id
    shown = [*timed[:MOST_ROWS], *(each for each in timed[MOST_ROWS:] if each.configuration_id == key)]
    labels = [names[each.configuration_id] for each in shown]
    stacks = {
        "decode step": [each.decode_ms for each in shown],
        "draft": [each.draft_ms for each in shown],
        "verify": [each.verify_ms for each in shown],
        "extend": [each.extend_ms for each in shown],
        "gap": [each.gap_ms if each.gap_ms and each.gap_ms > 0 else None for each in shown],
    }
    longest = max((each.cycle_ms or 0.0 for each in shown), default=1.0)
    figure = go.Figure()
    for phase, values in stacks.items():
        if any(value is not None for value in values):
            figure.add_bar(
                name=phase,
                y=labels,
                x=values,
                orientation="h",
                marker_color=PHASE_COLOURS[phase],
                text=[f"{value:.1f}" if value is not None and value > longest * 0.05 else "" for value in values],
                textposition="inside",
                insidetextanchor="middle",
                textfont={"color": "white"},
                hovertemplate="%{y}<br>" + phase + " %{x:.2f} ms<extra></extra>",
            )
    for each, label in zip(shown, labels, strict=True):
        share = "" if each.verify_share is None else f" · verify {each.verify_share:.1%}"
        figure.add_annotation(
            x=each.cycle_ms,
            y=label,
            text=f"  {each.cycle_ms:.1f} ms{share}",
            showarrow=False,
            xanchor="left",
            font={"size": 12, "color": NEUTRAL},
        )
    figure.update_layout(barmode="stack", legend={"traceorder": "normal"})
    figure.update_xaxes(title="milliseconds per cycle (mean)", range=[0, longest * 1.3])
    return _rows(figure, len(shown))


def throughput_dots(sides: Sequence[Side], names: Mapping[str, str], control: Side | None) -> go.Figure:
    """Tokens per second with intervals; a line at the control."""
    shown = _shown(sides, control)
    figure = go.Figure()
    groups = (("without speculation", False, PHASE_COLOURS["decode step"]), ("with speculation", True, "#C4553B"))
    for name, speculates, colour in groups:
        group = [side for side in shown if side.speculates == speculates]
        intervals = [side.interval or (side.tok_s, side.tok_s) for side in group]
        figure.add_scatter(
            name=name,
            x=[side.tok_s for side in group],
            y=[names[side.configuration_id] for side in group],
            mode="markers",
            marker={
                "size": 11,
                "color": ["white" if side.pruned else colour for side in group],
                "line": {"width": 2, "color": colour},
            },
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [high - side.tok_s for side, (_, high) in zip(group, intervals, strict=True)],
                "arrayminus": [side.tok_s - low for side, (low, _) in zip(group, intervals, strict=True)],
                "thickness": 2,
                "width": 5,
                "color": colour,
            },
            hovertemplate="%{y}<br>%{x:.1f} tok/s<extra></extra>",
        )
    if control is not None:
        line = {"color": NEUTRAL, "dash": "dot", "width": 1.5}
        figure.add_vline(x=control.tok_s, line=line)
        figure.add_scatter(x=[None], y=[None], mode="lines", line=line, name=f"control {control.tok_s:.1f} tok/s")
    figure.update_yaxes(categoryorder="array", categoryarray=[names[side.configuration_id] for side in shown])
    figure.update_xaxes(title="tokens per second", rangemode="tozero")
    return _rows(figure, len(shown))


def accept_length_curve(verdict: SweepVerdict, names: Mapping[str, str]) -> go.Figure | None:
    """Throughput against accept length at the best speculative configuration's cycle time, with today's point."""
    needed, speculative = verdict.break_even, verdict.speculation_pays.speculative
    if needed is None or speculative is None:
        return None
    points = [each for each in verdict.phases if each.speculates and each.accept_length and each.tok_s]
    today = next(each for each in verdict.phases if each.configuration_id == speculative.configuration_id)
    others = [each for each in points if each is not today]
    far = max(needed.accept_length, needed.target_accept_length or 0.0, *(each.accept_length or 0 for each in points))
    lengths = [1.0 + step * (far * 1.12 - 1.0) / 60 for step in range(61)]
    figure = go.Figure()
    figure.add_scatter(
        x=lengths,
        y=[1000 * length / needed.cycle_ms for length in lengths],
        mode="lines",
        line={"color": "#C4553B"},
        name=f"a cycle of {needed.cycle_ms:.1f} ms",
        hovertemplate="AL %{x:.2f}: %{y:.0f} tok/s<extra></extra>",
    )
    figure.add_scatter(
        x=[each.accept_length for each in others],
        y=[each.tok_s for each in others],
        mode="markers",
        name="other configurations",
        marker={"size": 8, "color": "#D9B3A9"},
        text=[names[each.configuration_id] for each in others],
        hovertemplate="%{text}<br>%{y:.1f} tok/s<extra></extra>",
    )
    figure.add_scatter(
        x=[today.accept_length],
        y=[today.tok_s],
        mode="markers",
        name="today",
        marker={"size": 14, "color": "#C4553B", "line": {"width": 2, "color": "white"}},
        hovertemplate="today: AL %{x:.2f}, %{y:.1f} tok/s<extra></extra>",
    )
    _level(figure, needed.baseline_tok_s, needed.accept_length, "no speculation", NEUTRAL)
    if needed.target_tok_s is not None and needed.target_accept_length is not None:
        _level(figure, needed.target_tok_s, needed.target_accept_length, "target", GOOD)
    figure.update_xaxes(title="accept length (tokens per cycle, bonus token included)", range=[0.9, far * 1.12])
    figure.update_yaxes(title="tokens per second", rangemode="tozero")
    return _styled(figure, height=400)


def control_timeline(verdict: SweepVerdict) -> go.Figure:
    """The control again and again through the sweep: what drifts shows here."""
    figure = go.Figure()
    for node in dict.fromkeys(run.node for run in verdict.control_runs):
        runs = [run for run in verdict.control_runs if run.node == node]
        figure.add_scatter(
            x=[run.at_s / 3600 for run in runs],
            y=[run.tok_s for run in runs],
            mode="lines+markers",
            name=node or "control",
            marker={"size": 9},
            line={"width": 1.5, "dash": "dot"},
            text=[run.trial_id for run in runs],
            hovertemplate="%{text}: %{y:.2f} tok/s after %{x:.2f} h<extra></extra>",
        )
    rates = [run.tok_s for run in verdict.control_runs]
    middle = sum(rates) / len(rates)
    reach = max(0.02 * middle, 1.4 * max(abs(rate - middle) for rate in rates))
    figure.add_hrect(y0=middle * 0.99, y1=middle * 1.01, fillcolor=NEUTRAL, opacity=0.08, line_width=0)
    figure.update_xaxes(title="hours since the first trial")
    figure.update_yaxes(title="tokens per second", range=[middle - reach, middle + reach])
    return _styled(figure, height=270, top=46 if len(figure.data) > 1 else 10)


def cost_bars(verdict: SweepVerdict) -> go.Figure:
    """GPU hours by activity."""
    spent = {name: seconds / 3600 for name, seconds in verdict.cost.gpu_seconds.items() if seconds > 0}
    ordered = sorted(spent.items(), key=lambda item: -item[1])
    figure = go.Figure()
    figure.add_bar(
        y=[name.replace("_", " ") for name, _ in ordered],
        x=[hours for _, hours in ordered],
        orientation="h",
        marker_color="#7C93A8",
        text=[f"{hours:.2f}" for _, hours in ordered],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{y}: %{x:.2f} GPU hours<extra></extra>",
    )
    figure.update_xaxes(title="GPU hours", range=[0, 1.18 * max(spent.values(), default=1.0)])
    return _rows(figure, len(ordered))


def kernel_bars(found: Communication) -> go.Figure:
    """Kernel time by kind inside verify."""
    kinds = list(found.us_by_kind.items())
    figure = go.Figure()
    figure.add_bar(
        y=[kind for kind, _ in kinds],
        x=[us / 1000 for _, us in kinds],
        orientation="h",
        marker_color=["#C4553B" if kind == "communication" else "#B8C2CC" for kind, _ in kinds],
        text=[f"{us / 1000:.2f}" for _, us in kinds],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{y}: %{x:.2f} ms<extra></extra>",
    )
    figure.update_xaxes(
        title="milliseconds per cycle", range=[0, 1.18 * max((us for _, us in kinds), default=1) / 1000]
    )
    return _rows(figure, len(kinds))


def _shown(sides: Sequence[Side], control: Side | None) -> list[Side]:
    shown = list(sides[:MOST_ROWS])
    if control is not None and control not in shown:
        shown.append(control)
    return shown


def _level(figure: go.Figure, tok_s: float, accept_length: float, name: str, colour: str) -> None:
    figure.add_hline(y=tok_s, line={"color": colour, "dash": "dot", "width": 1.5})
    figure.add_annotation(
        x=accept_length,
        y=tok_s,
        ax=-14,
        ay=-34,
        text=f"{name} {tok_s:.0f} tok/s: AL {accept_length:.2f}",
        arrowcolor=colour,
        font={"size": 12.5, "color": colour},
        xanchor="right",
        bgcolor="rgba(255,255,255,0.85)",
    )


def _rows(figure: go.Figure, count: int) -> go.Figure:
    legend = len(figure.data) > 1
    styled = _styled(figure, height=(110 if legend else 76) + _ROW_PX * max(count, 1), top=46 if legend else 8)
    styled.update_yaxes(autorange="reversed", automargin=True, showgrid=False, ticklabelstandoff=8)
    return styled


def _styled(figure: go.Figure, *, height: int, top: int = 46) -> go.Figure:
    figure.update_layout(
        template="plotly_white",
        colorway=[PHASE_COLOURS["decode step"], "#C4553B", "#E3A857", GOOD],
        height=height,
        font={"family": _FONT, "size": 13, "color": INK},
        margin={"l": 10, "r": 30, "t": top, "b": 50},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "xanchor": "left"},
        bargap=0.35,
        hoverlabel={"bgcolor": "white", "font": {"family": _FONT}},
    )
    figure.update_xaxes(gridcolor=GRID, zerolinecolor=GRID, automargin=True)
    figure.update_yaxes(gridcolor=GRID, zerolinecolor=GRID, automargin=True)
    return figure


def wrapped(label: str) -> str:
    """A long label on several lines."""
    return "<br>".join(textwrap.wrap(label, 58, break_on_hyphens=False))
