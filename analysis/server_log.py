"""What an SGLang server's own log says about decoding: throughput, accept length, graphs, by window.

For logs of servers that no sweep started. The server's windows are coarse (one line in some tens of steps); the first
after a prefill holds the wait before it, so it is left out and counted. Lines are read as `key: value` pairs in any
order, whatever their prefix: the format changes from version to version.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from sweeps import SpecsweepError

_DECODE = re.compile(r"Decode batch[.,:]?\s*(?P<fields>.*)$")
_PREFILL = re.compile(r"Prefill batch\b")
_FIELD = re.compile(r"\s*(?P<key>[^:]+):\s*(?P<value>\S+)\s*$")
_LEAST_TOK_S = 1e-3
_MOST_UNPARSED = 0.1


class ServerLogError(SpecsweepError, ValueError):
    """A log that does not hold what was looked for, or not in a known form."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """One decode line of the log."""

    tok_s: float
    running: int
    accept_length: float | None
    """None if the line has none or says 0.0, which the server writes for "not known"."""
    graph: bool | None
    after_prefill: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLog:
    """All decode windows of a log, summed up."""

    num_windows: int
    """Used; the two below are not."""
    after_prefill: int
    impossible: int
    """Rates near zero (a request that ended in one batch), accept lengths below 1."""
    unparsed_lines: int
    tok_s: float
    """Median over the windows."""
    accept_length: float | None
    """Over the windows that know it, weighted by running requests."""
    graph_share: float | None
    """Windows that ran in a captured graph."""


def read_server_log(path: Path) -> ServerLog:
    """Read one log. Raises ServerLogError without decode windows, or with more than a tenth of them not understood."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ServerLogError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return summarise_log(lines)
    except ServerLogError as error:
        raise ServerLogError(f"{path}: {error}") from error


def summarise_log(lines: Iterable[str]) -> ServerLog:
    """As `read_server_log`, from lines."""
    windows: list[Window] = []
    unparsed, after_prefill = 0, True
    for line in lines:
        if _PREFILL.search(line):
            after_prefill = True
        elif (found := _DECODE.search(line)) is not None:
            window = _window(found["fields"], after_prefill=after_prefill)
            after_prefill = False
            if window is None:
                unparsed += 1
            else:
                windows.append(window)
    total = len(windows) + unparsed
    if not total:
        raise ServerLogError("no `Decode batch` line; is this the log of an SGLang server that has generated?")
    if unparsed > _MOST_UNPARSED * total:
        raise ServerLogError(f"{unparsed} of {total} decode lines are in no known form")
    possible = [each for each in windows if each.tok_s >= _LEAST_TOK_S and (each.accept_length or 1.0) >= 1.0]
    used = [each for each in possible if not each.after_prefill]
    if not used:
        raise ServerLogError(f"none of {total} decode windows is free of prefill and idle time: generate for longer")
    graphs = [each.graph for each in used if each.graph is not None]
    return ServerLog(
        num_windows=len(used),
        after_prefill=len(possible) - len(used),
        impossible=len(windows) - len(possible),
        unparsed_lines=unparsed,
        tok_s=median(each.tok_s for each in used),
        accept_length=_accept_length(used),
        graph_share=sum(graphs) / len(graphs) if graphs else None,
    )


def _window(text: str, *, after_prefill: bool) -> Window | None:
    fields: Mapping[str, str] = {
        found["key"].strip(): found["value"] for part in text.split(",") if (found := _FIELD.match(part)) is not None
    }
    try:
        tok_s = next(float(value) for key, value in fields.items() if key.startswith("gen throughput"))
        running = int(fields["#running-req"])
        accept_length = float(fields.get("accept len", 0.0))
    except (StopIteration, KeyError, ValueError):
        return None
    graph = next((value for key, value in fields.items() if key.endswith("graph")), None)
    return Window(
        tok_s=tok_s,
        running=running,
        accept_length=accept_length or None,
        graph=None if graph is None else graph == "True",
        after_prefill=after_prefill,
    )


def _accept_length(windows: Iterable[Window]) -> float | None:
    known = [(each.accept_length, max(each.running, 1)) for each in windows if each.accept_length is not None]
    return sum(length * weight for length, weight in known) / sum(weight for _, weight in known) if known else None
