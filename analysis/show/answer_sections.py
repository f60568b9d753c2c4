"""Sections of the page that answer: throughput, requests at a time, what each dimension does."""

from __future__ import annotations

from html import escape

from analysis.judge.factors import FACTOR_METRICS, Factor
from analysis.judge.verdict import SweepVerdict
from analysis.show import charts
from analysis.show.elements import drawing, judged_cell, row_names, section, table
from analysis.show.wording import METRIC_NAMES, blocks_only, crossover


def throughput(verdict: SweepVerdict) -> str:
    """Every configuration with its interval."""
    if not verdict.sides:
        return section("Throughput", "No trial was completed, so there is nothing to compare.")
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
    return section(
        "Throughput", text, drawing(charts.throughput_dots(verdict.sides, row_names(verdict), verdict.control))
    )


def concurrencies(verdict: SweepVerdict) -> str:
    """Whether speculation pays, by requests at a time; empty if one number was measured."""
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
        rows.append(f'<td class="n">{each.concurrency}</td>{plain}{speculative}{judged_cell(pays.effect, pays.reason)}')
    header = ["#requests at a time", "best without speculation", "best speculative", "speculation"]
    return section("How many requests at a time", crossover(verdict), table(header, rows))


def dimensions(verdict: SweepVerdict) -> str:
    """What each dimension does to each metric."""
    title = "What each dimension does"
    if not verdict.factors:
        return section(title, "Every dimension has results for one value only, so there is no effect to show.")
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
    return section(title, text, table(header, rows))


def _effect_cell(factor: Factor) -> str:
    return judged_cell(factor.effect, factor.reason)
