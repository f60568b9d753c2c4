"""What an SGLang server's own log says about decoding, summed up: `specsweep server-log`.

`analysis.importing.sglang_log` reads the log; `specsweep import` makes a results folder of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from analysis.importing.records import MOST_UNPARSED
from analysis.importing.sglang_log import Log, graph_share, mean_accept_length
from sweeps import SpecsweepError


class ServerLogError(SpecsweepError, ValueError):
    """A log that does not hold what was looked for, or not in a known form."""


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
    """Median over the windows; of data-parallel servers the sum of their medians."""
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
    log = Log()
    for line in lines:
        log.take(line)
    windows = [each for own in log.windows.values() for each in own]
    total = len(windows) + log.unparsed
    if not total:
        raise ServerLogError("no `Decode batch` line; is this the log of an SGLang server that has generated?")
    if log.unparsed > MOST_UNPARSED * total:
        raise ServerLogError(f"{log.unparsed} of {total} decode lines are in no known form")
    possible = [each for each in windows if each.is_possible]
    used = {
        name: [each for each in own if each.is_possible and not each.after_prefill] for name, own in log.windows.items()
    }
    free = [each for own in used.values() for each in own]
    if not free:
        length = mean_accept_length(possible)
        known = "" if length is None else f" (accept length {length:.2f}, bonus token included)"
        raise ServerLogError(
            f"none of {total} decode windows is free of prefill and idle time: generate for longer{known}"
        )
    return ServerLog(
        num_windows=len(free),
        after_prefill=len(possible) - len(free),
        impossible=len(windows) - len(possible),
        unparsed_lines=log.unparsed,
        tok_s=sum(median(each.tok_s for each in own) for own in used.values() if own),
        accept_length=mean_accept_length(free),
        graph_share=graph_share(free),
    )
