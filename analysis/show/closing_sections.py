"""The last sections of the page: the launch command, what was left out, drift, cost."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape

from analysis.data.excluded import Excluded
from analysis.judge.claims import MARGIN
from analysis.judge.verdict import SweepVerdict
from analysis.show import charts
from analysis.show.elements import drawing, section, table
from analysis.show.nodes import nodes_apart
from analysis.show.wording import command_note, drift_inside, hours, launched_alone
from sweeps.redaction import shell_word


def launch(verdict: SweepVerdict) -> str:
    """The winner's command, to copy."""
    title = "Launch the winner"
    if verdict.best is None:
        return section(title, f"{verdict.best_reason[:1].upper()}{verdict.best_reason[1:]}.")
    text = f"{verdict.best.label}: {verdict.best_reason}.{launched_alone(verdict)}{command_note(verdict)}"
    command = verdict.best.launch_command or "the engine gave no command"
    return section(title, text, f"<pre>{escape(shell_lines(command))}</pre>")


def shell_lines(command: str) -> str:
    """One flag a line. Breaks stand between words, each of which is quoted as it was: a shell reads the same words."""
    lines = [""]
    for word in shlex.split(command):
        if word == "-m" or word.startswith("--"):
            lines.append("  ")
        elif lines[-1].strip():
            lines[-1] += " "
        lines[-1] += shell_word(word)
    return " \\\n".join(lines)


def left_out(verdict: SweepVerdict) -> str:
    """What takes no part in the comparisons and why, and warnings."""
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
    return section("Excluded, and why", text, *parts)


def _exclusions(excluded: Sequence[Excluded]) -> str:
    rows = [
        f"<td>{escape(each.label)}<div class='why'>{escape(each.trial_id)}</div></td><td>{escape(each.kind)}</td>"
        f"<td>{escape(each.reason)}{f' ({each.count} blocks)' if each.what == 'blocks' else ''}</td>"
        for each in excluded
    ]
    return table(["configuration", "what happened", "why"], rows)


def drift(verdict: SweepVerdict) -> str:
    """Whether the machine changed while the sweep ran."""
    title = "Did the machine drift"
    rates = [run.tok_s for run in verdict.control_runs]
    inside = "" if verdict.server_drift is None else f" {drift_inside(verdict.server_drift)}"
    if apart := nodes_apart(verdict.control_runs):
        inside += f" {apart}"
    if len(rates) < 2:
        return section(title, f"The control has fewer than two valid runs, so the drift is unknown.{inside}")
    text = (
        f"The control ran {len(rates)} times: {min(rates):.1f} to {max(rates):.1f} tok/s "
        f"({max(rates) / min(rates) - 1:.1%} apart; the band in the chart is ±1%). "
    )
    drift = verdict.drift or 0.0
    small = "No drift above 1% was found."
    text += f"Over the sweep the machine drifted by {drift:.1%}; this is taken out." if drift > MARGIN else small
    text += inside
    return section(title, text, drawing(charts.control_timeline(verdict)))


def cost(verdict: SweepVerdict) -> str:
    """GPU hours by activity."""
    spent, grid = verdict.cost.total, verdict.cost.exhaustive_grid
    text = f"{hours(spent)} GPU hours over {sum(verdict.cost.by_status.values())} trials "
    text += "(" + ", ".join(f"{count} {status}" for status, count in verdict.cost.by_status.items()) + ")."
    if grid is not None:
        text += (
            f" A full grid of {verdict.cost.num_configurations} {verdict.cost.counts}, each with its own launch and "
            f"all its blocks, without controls, would take {hours(grid)} GPU hours."
        )
    return section("What it cost", text, drawing(charts.cost_bars(verdict)))
