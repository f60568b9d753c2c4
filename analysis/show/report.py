"""The report: one self-contained page that needs no network. The most important answer comes first."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from html import escape
from pathlib import Path
from string import Template

from plotly.offline import get_plotlyjs

from analysis.judge.claims import MARGIN
from analysis.judge.priors import DOUBT
from analysis.judge.verdict import SweepVerdict
from analysis.show.answer_sections import concurrencies, dimensions, throughput
from analysis.show.closing_sections import cost, drift, launch, left_out
from analysis.show.configuration_section import configurations, measured
from analysis.show.cycle_sections import cycle, what_if
from analysis.show.elements import side_tile, tile, todays_phases
from analysis.show.wording import hours, nccl_answer
from sweeps.results.writing import replace_text

_TEMPLATE = Path(__file__).with_name("page.html")
_DRAW = Path(__file__).with_name("page.js")
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
        measured(verdict),
        throughput(verdict),
        concurrencies(verdict),
        cycle(verdict),
        dimensions(verdict),
        what_if(verdict),
        configurations(verdict),
        launch(verdict),
        left_out(verdict),
        drift(verdict),
        cost(verdict),
        f"<footer>{escape(_HOW)}</footer>",
    )
    body = "\n".join(sections)
    scripts = {"plotly": _normal(get_plotlyjs()), "draw": _normal(_DRAW.read_text(encoding="utf-8"))}
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
        + (f"<p class='lead'>{escape(nccl)}</p>" if (nccl := nccl_answer(verdict)) else "")
        + (f'<p class="aside">{escape(selection[:1].upper() + selection[1:])}.</p>' if selection else "")
        + "</header>"
    )


def _tiles(verdict: SweepVerdict) -> str:
    pays, needed = verdict.speculation_pays, verdict.break_even
    tiles = [side_tile("no speculation, control", verdict.control), side_tile("best speculative", pays.speculative)]
    if needed is not None and pays.speculative is not None:
        today = todays_phases(verdict)
        value = f"{today.accept_length:.2f}" if today and today.accept_length else "not known"
        tiles.append(tile("accept length today", value, f"break-even at {needed.accept_length:.2f}"))
    if verdict.communication is not None:
        share = f"{verdict.communication.share:.1%}"
        tiles.append(tile("communication in verify", share, "of kernel time"))
    grid = verdict.cost.exhaustive_grid
    note = "" if grid is None else f"a full grid: {hours(grid)}"
    tiles.append(tile("cost", f"{hours(verdict.cost.total)} <small>GPU hours</small>", note))
    return f'<div class="tiles">{"".join(tiles)}</div>'
