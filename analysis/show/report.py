"""The report: one self-contained page that needs no network. The most important answer comes first."""

from __future__ import annotations

import shlex
from base64 import b64encode
from collections.abc import Iterable, Sequence
from hashlib import sha256
from html import escape
from pathlib import Path
from string import Template

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from analysis.data.load import Excluded
from analysis.judge.effects import MARGIN, Effect
from analysis.judge.factors import FACTOR_METRICS, Factor
from analysis.judge.mixed_model import DOUBT
from analysis.judge.phases import Phases
from analysis.judge.verdict import Side, SweepVerdict
from analysis.judge.verify_parts import VerifyPart, VerifyParts
from analysis.judge.what_if import Saving, StepNeed, ms_to_break_even, savings
from analysis.show import charts
from analysis.show.nodes import nodes_apart
from analysis.show.wording import (
    METRIC_NAMES,
    blocks_only,
    command_note,
    communication_bound,
    crossover,
    drift_inside,
    hours,
    launched_alone,
    percent,
    verdict_words,
    verify_parts_line,
)
from sweeps.redaction import shell_word
from sweeps.results.writing import replace_text

_DRAW = """
for (const place of document.querySelectorAll("div.figure")) {
  const figure = JSON.parse(place.dataset.figure);
  Plotly.newPlot(place, figure.data, figure.layout, {displayModeBar: false, responsive: true});
}
"""
_TEMPLATE = Path(__file__).with_name("page.html")
_HOW = (
    "Throughput is all decoded tokens over all decode seconds, accept length all tokens over all verify cycles. "
    "Intervals (95%) cover launches, communicators, drift and prompts. One model is fitted to all launches: each kind "
    "of server (plain, chain, tree) has a spread of its own, estimated from this sweep and from other machines. "
    "Blocks are the same prompts for every configuration and are compared in pairs. A difference is claimed only if it "
    f"still shows if any single launch is off by {DOUBT:.0%}. "
    f"“Equivalent” means that two one-sided tests put the difference within {MARGIN:.0%}. Verdicts in the table of "
    "dimensions have Holm's correction over the comparisons of one metric, NCCL sets and drafting apart; the intervals "
    "in that table do not."
)


def write_report(verdict: SweepVerdict, path: Path) -> None:
    """Write the page. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, page(verdict))


def page(verdict: SweepVerdict) -> str:
    """The whole HTML document."""
    title = f"{verdict.sweep_id} (engine: {verdict.engine})"
    sections = (
        _header(verdict),
        _tiles(verdict),
        _throughput(verdict),
        _concurrencies(verdict),
        _cycle(verdict),
        _dimensions(verdict),
        _what_if(verdict),
        _launch(verdict),
        _left_out(verdict),
        _drift(verdict),
        _cost(verdict),
        f"<footer>{escape(_HOW)}</footer>",
    )
    body = "\n".join(sections)
    scripts = {"plotly": _normal(get_plotlyjs()), "draw": _DRAW}
    allowed = " ".join(map(_script_source, scripts.values()))
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(title), body=body, allowed=allowed, **scripts
    )


def _normal(script: str) -> str:
    """As a browser reads and hashes it: it makes one line break of each kind."""
    return script.replace("\r\n", "\n").replace("\r", "\n")


def _script_source(script: str) -> str:
    """What a Content-Security-Policy calls exactly this script. Nothing else that a page holds runs."""
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


def _header(verdict: SweepVerdict) -> str:
    simulated = verdict.engine == "simulated"
    engine = "simulated engine: these numbers are simulated, not measured" if simulated else f"engine: {verdict.engine}"
    shade = "engine simulated" if simulated else "engine"
    pinned = '<span class="engine simulated">acceptance pinned: no recommendation</span>' if verdict.pinned else ""
    head, _, numbers = verdict.speculation_pays.sentence.partition(": ")
    lead = numbers[:1].upper() + numbers[1:]
    selection = verdict.speculation_pays.selection
    return (
        f'<header><div class="over"><span>{escape(verdict.sweep_id)}</span><span>{escape(verdict.machine or "")}</span>'
        f'<span class="{shade}">{escape(engine)}</span>{pinned}</div>'
        f"<h1>{escape(head.rstrip('.'))}.</h1><p class='lead'>{escape(lead)}</p>"
        + (f'<p class="aside">{escape(selection[:1].upper() + selection[1:])}.</p>' if selection else "")
        + "</header>"
    )


def _tiles(verdict: SweepVerdict) -> str:
    pays, needed = verdict.speculation_pays, verdict.break_even
    tiles = [_side_tile("no speculation, control", verdict.control), _side_tile("best speculative", pays.speculative)]
    if needed is not None and pays.speculative is not None:
        today = _today(verdict)
        value = f"{today.accept_length:.2f}" if today and today.accept_length else "not known"
        tiles.append(_tile("accept length today", value, f"break-even at {needed.accept_length:.2f}"))
    if verdict.communication is not None:
        share = f"{verdict.communication.share:.1%}"
        tiles.append(_tile("communication in verify", share, "of kernel time"))
    grid = verdict.cost.exhaustive_grid
    note = "" if grid is None else f"a full grid: {hours(grid)}"
    tiles.append(_tile("cost", f"{hours(verdict.cost.total)} <small>GPU hours</small>", note))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _throughput(verdict: SweepVerdict) -> str:
    if not verdict.sides:
        return _section("Throughput", "No trial was completed, so there is nothing to compare.")
    more = len(verdict.sides) - charts.MOST_ROWS
    text = "Every configuration with its 95% interval. Drift is taken out; the fastest is on top."
    if any(side.pruned for side in verdict.sides):
        text += " A hollow marker was pruned before its last block."
    if more > 0:
        text += f" The {more} slowest are not drawn."
    if blocks_only(verdict.sides):
        text += (
            " Some kind of server was never launched twice: what its launches differ by is taken from other machines."
        )
    return _section(
        "Throughput", text, _figure(charts.throughput_dots(verdict.sides, _names(verdict), verdict.control))
    )


def _concurrencies(verdict: SweepVerdict) -> str:
    if not verdict.by_concurrency:
        return ""
    rows = []
    for each in verdict.by_concurrency:
        pays = each.speculation_pays
        speculative, plain = (
            "<td>none</td>"
            if side is None
            else f"<td>{side.tok_s:.1f} tok/s<div class='why'>{escape(verdict.names[side.configuration_id])}</div></td>"
            for side in (pays.speculative, pays.plain)
        )
        rows.append(
            f'<td class="n">{each.concurrency}</td>{plain}{speculative}{_judged_cell(pays.effect, pays.reason)}'
        )
    header = ["#requests at a time", "best without speculation", "best speculative", "speculation"]
    return _section("How many requests at a time", crossover(verdict), _table(header, rows))


def _cycle(verdict: SweepVerdict) -> str:
    timed = [each for each in verdict.phases if each.cycle_ms is not None]
    if not timed:
        return _section("Where the cycle goes", "No cycle was timed.")
    parts = [_figure(charts.phase_bars(timed, _names(verdict), verdict.control))]
    if verdict.communication is not None:
        parts.append(f'<p class="say">{escape(communication_bound(verdict.communication))}</p>')
        parts.append("<h3>Kernel time inside verify</h3>")
        parts.append(_figure(charts.kernel_bars(verdict.communication)))
    else:
        parts.append("<p>No kernel trace, so the share of communication in verify is unknown.</p>")
    if verdict.verify_parts is not None:
        parts.append(_verify_parts(verdict.verify_parts))
    text = "A cycle is one draft, verify, extend round of the server. Without speculation it is one decode step."
    return _section("Where the cycle goes", text, *parts)


def _verify_parts(found: VerifyParts) -> str:
    rows = [
        f'<td>{escape(part.kind)}<div class="why">{escape(_changed_kernel(part))}</div></td>'
        f'<td class="n">{part.decode_ms:.2f}</td><td class="n">{part.verify_ms:.2f}</td>'
        f'<td class="n">{part.extra_ms:+.2f}</td><td class="n">{_or_dash(part.tok_s, 1)}</td>'
        f'<td class="n">{_or_dash(part.break_even_accept_length, 2)}</td>'
        for part in found.parts
    ]
    header = ["kernels", "#decode step ms", "#verify ms", "#more ms", "#tok/s without", "#break-even without"]
    return (
        f'<h3>What makes verify dear</h3><p class="say">{escape(verify_parts_line(found))}</p>{_table(header, rows)}'
        "<p>The last two columns say what this configuration would reach, and which accept length would break even, if "
        "the part took no longer in verify than in a decode step.</p>"
    )


def _changed_kernel(part: VerifyPart) -> str:
    if part.kernel == part.decode_kernel or not part.decode_kernel:
        return f"longest: {part.kernel}" if part.kernel else ""
    return f"longest in decode: {part.decode_kernel}; in verify: {part.kernel or 'none'}"


def _or_dash(value: float | None, digits: int) -> str:
    return "—" if value is None else f"{value:.{digits}f}"


def _dimensions(verdict: SweepVerdict) -> str:
    title = "What each dimension does"
    if not verdict.factors:
        return _section(title, "Every dimension has results for one value only, so there is no effect to show.")
    groups: dict[tuple[str, str, str], dict[str, Factor]] = {}
    for factor in verdict.factors:
        groups.setdefault((factor.dimension, factor.value, factor.reference), {})[factor.metric] = factor
    rows = []
    for (dimension, value, reference), by_metric in groups.items():
        most = max(factor.num_pairs for factor in by_metric.values())
        notes = [f"{most} matched pair{'' if most == 1 else 's'}", *{f.note for f in by_metric.values() if f.note}]
        head = f"<b>{escape(dimension)}</b> {escape(reference)} → {escape(value)}"
        first = f'<td>{head}<div class="why">{escape("; ".join(notes))}</div></td>'
        rows.append(first + "".join(_effect_cell(by_metric[metric]) for metric in FACTOR_METRICS))
    header = ["dimension", *(METRIC_NAMES[metric] for metric in FACTOR_METRICS)]
    text = "Each row compares pairs of configurations that differ in that dimension alone. For times, lower is better."
    return _section(title, text, _table(header, rows))


def _what_if(verdict: SweepVerdict) -> str:
    title = "When speculation pays"
    needed, plain, today = verdict.break_even, verdict.speculation_pays.plain, _today(verdict)
    figure = charts.accept_length_curve(verdict, _names(verdict))
    if needed is None or figure is None or today is None or plain is None:
        return _section(title, f"{verdict.break_even_reason or 'not known'}.".capitalize())
    missing_ms = ms_to_break_even(today, baseline_tok_s=plain.tok_s)
    parts = [_figure(figure)]
    if verdict.step_needs:
        parts.append("<h3>Accuracy that the drafter needs</h3>")
        parts.append(
            "<p>Accuracy is the chance that a draft token is accepted, given that all tokens before it were. It is "
            "assumed to be constant along a chain (top-k 1). " + _not_run(verdict.step_needs) + "</p>"
        )
        parts.append(_needs_table(verdict.step_needs))
    parts.append("<h3>Next milliseconds to save</h3>")
    if missing_ms is not None:
        parts.append(f"<p>{escape(_missing(missing_ms, today.accept_length))}</p>")
    rows = [
        f'<td>{saving.phase}</td><td class="n">{saving.ms:.2f} ms</td><td class="n">{saving.share:.1%}</td>'
        f'<td class="n">{"—" if saving.tok_s_1ms_less is None else f"{saving.tok_s_1ms_less:.1f}"}</td>'
        f'<td class="n">{_alone(saving, missing_ms)}</td>'
        for saving in savings(today)
    ]
    parts.append(_table(["phase", "#now", "#share of cycle", "#tok/s with 1 ms less", "#alone, breaks even at"], rows))
    text = (
        f"At the cycle of {verdict.names[today.configuration_id]} ({needed.cycle_ms:.2f} ms), speculation breaks even "
        f"at an accept length of {needed.accept_length:.2f}."
    )
    return _section(title, text, *parts)


def _launch(verdict: SweepVerdict) -> str:
    title = "Launch the winner"
    if verdict.best is None:
        return _section(title, f"{verdict.best_reason[:1].upper()}{verdict.best_reason[1:]}.")
    text = f"{verdict.best.label}: {verdict.best_reason}.{launched_alone(verdict)}{command_note(verdict)}"
    command = verdict.best.launch_command or "the engine gave no command"
    return _section(title, text, f"<pre>{escape(_broken(command))}</pre>")


def _left_out(verdict: SweepVerdict) -> str:
    pruned, again = ([each for each in verdict.excluded if each.kind == kind] for kind in ("pruned", "superseded"))
    others = [each for each in verdict.excluded if each.kind not in ("pruned", "superseded")]
    parts = []
    if others:
        parts.append(_exclusions(others))
    if pruned:
        many = f"{len(pruned)} pruned trial{'' if len(pruned) == 1 else 's'}: compared on the blocks that were run"
        parts.append(f"<details><summary>{many}</summary>{_exclusions(pruned)}</details>")
    if again:
        many = f"{len(again)} superseded attempt{'' if len(again) == 1 else 's'}: measured again later"
        parts.append(f"<details><summary>{many}</summary>{_exclusions(again)}</details>")
    if verdict.warnings:
        items = "".join(f"<li>{escape(warning)}</li>" for warning in verdict.warnings)
        parts.append(f'<h3>Warnings</h3><ul class="notes">{items}</ul>')
    text = (
        "Trials, blocks and damaged files left out of the comparisons, and why."
        if others
        else "No trial was left out of the comparisons."
    )
    return _section("Excluded, and why", text, *parts)


def _exclusions(excluded: Sequence[Excluded]) -> str:
    rows = [
        f"<td>{escape(each.label)}<div class='why'>{escape(each.trial_id)}</div></td><td>{escape(each.kind)}</td>"
        f"<td>{escape(each.reason)}{f' ({each.count} blocks)' if each.what == 'blocks' else ''}</td>"
        for each in excluded
    ]
    return _table(["configuration", "what happened", "why"], rows)


def _cost(verdict: SweepVerdict) -> str:
    spent, grid = verdict.cost.total, verdict.cost.exhaustive_grid
    text = f"{hours(spent)} GPU hours over {sum(verdict.cost.by_status.values())} trials "
    text += "(" + ", ".join(f"{count} {status}" for status, count in verdict.cost.by_status.items()) + ")."
    if grid is not None:
        text += (
            f" A full grid of {verdict.cost.num_configurations} {verdict.cost.counts}, each with its own launch and "
            f"all its blocks, without controls, would take {hours(grid)} GPU hours."
        )
    return _section("What it cost", text, _figure(charts.cost_bars(verdict)))


def _drift(verdict: SweepVerdict) -> str:
    title = "Did the machine drift"
    rates = [run.tok_s for run in verdict.control_runs]
    inside = "" if verdict.server_drift is None else f" {drift_inside(verdict.server_drift)}"
    if apart := nodes_apart(verdict.control_runs):
        inside += f" {apart}"
    if len(rates) < 2:
        return _section(title, f"The control has fewer than two valid runs, so the drift is unknown.{inside}")
    text = (
        f"The control ran {len(rates)} times: {min(rates):.1f} to {max(rates):.1f} tok/s "
        f"({max(rates) / min(rates) - 1:.1%} apart; the band in the chart is ±1%). "
    )
    drift = verdict.drift or 0.0
    small = "No drift above 1% was found."
    text += f"Over the sweep the machine drifted by {drift:.1%}; this is taken out." if drift > MARGIN else small
    text += inside
    return _section(title, text, _figure(charts.control_timeline(verdict)))


def _names(verdict: SweepVerdict) -> dict[str, str]:
    return {key: charts.wrapped(escape(name)) for key, name in verdict.names.items()}


def _today(verdict: SweepVerdict) -> Phases | None:
    side = verdict.speculation_pays.speculative
    return next((each for each in verdict.phases if side and each.configuration_id == side.configuration_id), None)


def _not_run(needs: Sequence[StepNeed]) -> str:
    """What the table holds beside the step counts that were run."""
    if any(need.estimated for need in needs):
        return (
            "The cycle time of step counts that were not run is estimated by a line through the step counts that were."
        )
    if len(needs) > 1:
        return "The cycle times of the step counts that were run do not lie on a line, so no other is estimated."
    return "One step count was run, so no other is estimated."


def _needs_table(needs: Sequence[StepNeed]) -> str:
    targeted = any(need.target is not None for need in needs)
    rows = []
    for need in needs:
        cycle = f"{need.cycle_ms:.1f} ms" + (" (estimated)" if need.estimated else "")
        today = "—" if need.accept_length_today is None else f"{need.accept_length_today:.2f}"
        accuracies = [need.break_even] + ([need.target] if need.target is not None else [])
        cells = "".join(
            f'<td class="n">{each.accept_length:.2f}</td><td class="n">'
            + ("out of reach" if each.conditional_accuracy is None else f"{each.conditional_accuracy:.0%}")
            + "</td>"
            for each in accuracies
        )
        rows.append(f'<td>{need.num_steps}</td><td class="n">{cycle}</td><td class="n">{today}</td>{cells}')
    header = [
        "draft steps",
        "#cycle",
        "#accept length today",
        "#accept length to break even",
        "#accuracy to break even",
    ]
    return _table(header + (["#accept length for the target", "#accuracy for the target"] if targeted else []), rows)


def _missing(missing_ms: float, accept_length: float | None) -> str:
    today = "" if accept_length is None else f" of {accept_length:.2f}"
    if missing_ms > 0:
        return f"At today's accept length{today}, the cycle must become {missing_ms:.1f} ms shorter to break even."
    return f"At today's accept length{today}, speculation pays until the cycle is {-missing_ms:.1f} ms longer."


def _alone(saving: Saving, missing_ms: float | None) -> str:
    if missing_ms is None:
        return "—"
    return f"{saving.ms - missing_ms:.2f} ms" if missing_ms < saving.ms else "not with this phase alone"


def _effect_cell(factor: Factor) -> str:
    return _judged_cell(factor.effect, factor.reason)


def _judged_cell(effect: Effect | None, reason: str | None) -> str:
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


def _side_tile(name: str, side: Side | None) -> str:
    if side is None:
        return _tile(name, "none", "no results")
    interval = "" if side.interval is None else f"{side.interval[0]:.1f} to {side.interval[1]:.1f}, "
    launches = f"{side.num_launches} launch{'' if side.num_launches == 1 else 'es'}"
    if blocks_only([side]):
        launches = f"blocks of {launches} only"
    return _tile(name, f"{side.tok_s:.1f} <small>tok/s</small>", interval + launches)


def _tile(name: str, value: str, note: str) -> str:
    return (
        f'<div class="tile"><div class="name">{escape(name)}</div><div class="value">{value}</div>'
        f'<div class="note">{escape(note)}</div></div>'
    )


def _section(title: str, text: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p>{escape(text)}</p>{''.join(parts)}</section>"


def _table(header: Sequence[str], rows: Iterable[str]) -> str:
    """Column names that start with # are numbers."""
    names = "".join(
        f'<th class="n">{escape(name[1:])}</th>' if name.startswith("#") else f"<th>{escape(name)}</th>"
        for name in header
    )
    return f'<div class="scroll"><table><tr>{names}</tr>{"".join(f"<tr>{row}</tr>" for row in rows)}</table></div>'


def _figure(figure: go.Figure) -> str:
    """A drawing as data: the page's own script draws it, so no other script has to be allowed."""
    height = "" if figure.layout.height is None else f' style="height:{int(figure.layout.height)}px"'
    return f'<div class="figure"{height} data-figure="{escape(str(figure.to_json()))}"></div>'


def _broken(command: str) -> str:
    """One flag a line. Breaks stand between words, each of which is quoted as it was: a shell reads the same words."""
    lines = [""]
    for word in shlex.split(command):
        if word == "-m" or word.startswith("--"):
            lines.append("  ")
        elif lines[-1].strip():
            lines[-1] += " "
        lines[-1] += shell_word(word)
    return " \\\n".join(lines)
