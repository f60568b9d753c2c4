"""What a server's log says while it starts: lines by rank, start-up times, the stage it reached, failed states.

Formats are those of the supported releases (`versions`). Logs are for people and change: what is not found is None,
never an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import get_args

from sweeps.engines.base import Kind, Stage

_PREFIX = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?P<rank>(?: [A-Z]+\d+)*)\] ?(?P<text>.*)")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
NOISE = re.compile(r'^\[[^\]]*\] INFO: +\S+ - "(GET|POST) |Capturing batches|(it/s|s/it)\]$|UserWarning|warnings\.warn')
STATE_FAILURE = "specsweep-state-failure "
"""Begins the probe's line (`specsweep_probe.communicators.FAILURE_MARK`)."""
_TAIL_LINES, _TAIL_CHARACTERS = 40, 6000
_STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True, kw_only=True, slots=True)
class StartupTimings:
    """Seconds of a start, of the first rank; None if the log does not tell."""

    weight_load_s: float | None
    """Target and draft weights."""
    capture_s: float | None
    """All graphs together."""
    graphs_s: Mapping[str, float] = field(default_factory=dict)
    """By graph: `decode`, `target_verify`, `draft_decode`, `draft_extend`, ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateFailure:
    """An NCCL set whose communicator did not come up in a server that holds several."""

    nccl_set: str
    error: str
    """In NCCL's own words, or how long it hung."""

    @property
    def kind(self) -> Kind:
        if self.error.startswith("hung"):
            return "hang_nccl_init"
        return "nccl_no_algorithm" if "invalid usage" in self.error.lower() else "invalid_config"


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line without colours and time."""

    rank: str
    """`TP0`, `DP1 TP0`, ...; empty for the server's own lines and for unstamped ones."""
    text: str
    stamped: bool
    """It began with a time."""


def raw_lines(text: str) -> list[str]:
    """Lines without colours; a message that a progress bar swallowed has its line again."""
    return re.sub(r"(?<=it/s\]|s/it\])(?=\[\d{4}-)", "\n", _ANSI.sub("", text).replace("\r", "\n")).splitlines()


def log_lines(text: str) -> Iterator[LogLine]:
    """Every line, with its rank."""
    for raw in raw_lines(text):
        match = _PREFIX.match(raw)
        yield LogLine(match["rank"].strip(), match["text"], stamped=True) if match else LogLine("", raw, stamped=False)


def state_failure(text: str) -> StateFailure | None:
    """The first communicator that the probe says did not come up."""
    for line in raw_lines(text):
        if STATE_FAILURE in line:
            try:
                said = json.loads(line.partition(STATE_FAILURE)[2])
                return StateFailure(nccl_set=said["communicator"], error=said["error"])
            except (ValueError, KeyError, TypeError):
                continue  # another process wrote into the line
    return None


def startup_timings(text: str) -> StartupTimings | None:
    """None before the first weights are loaded."""
    loaded = _seconds(text, r"Load weight end\. .*?elapsed=(\d+(?:\.\d+)?) s")
    captured = _seconds(text, r"Capture .*?(?:end\.|ends?) .*?elapsed[=:] ?(\d+(?:\.\d+)?) ?s")
    summary = re.search(r"Engine startup timings \(s\): .*?cuda_graph=\{([^}]*)\}", text)
    graphs = (
        {name: float(value) for name, value in re.findall(r"(\w+)=(\d+(?:\.\d+)?)(?![\d.])", summary[1])}
        if summary
        else {}
    )
    if loaded is None and not graphs:
        return None
    return StartupTimings(weight_load_s=loaded, capture_s=sum(graphs.values()) if graphs else captured, graphs_s=graphs)


def _seconds(text: str, pattern: str) -> float | None:
    """Sum over the first rank's lines that match."""
    found = [(line.rank, match[1]) for line in log_lines(text) if (match := re.search(pattern, line.text))]
    first = min((rank for rank, _ in found), default="")
    return sum(float(value) for rank, value in found if rank == first) if found else None


def stage_reached(text: str) -> Stage:
    """The stage of the log's last milestone: `load` in an empty log, `measure` once the server calls itself ready."""
    tracker = StageTracker()
    tracker.feed(text)
    return tracker.stage


class StageTracker:
    """The stage that a growing log has reached."""

    def __init__(self) -> None:
        self.stage: Stage = "load"
        self._loaded: set[str] = set()

    def feed(self, text: str) -> None:
        """Go on with whole lines."""
        for line in log_lines(text):
            match = _MILESTONE.search(line.text) if line.stamped else None
            if match is None:
                continue
            name = match.lastgroup
            if name == "load_end":
                self._loaded.add(line.rank)
            elif name in ("init_end", "load_begin"):
                self.stage = "draft_init" if line.rank in self._loaded else "load"
            else:
                self.stage = next(stage for stage in _STAGES if stage == name)


_MILESTONE = re.compile(
    r"(?P<init_end>Init (?:torch distributed|parallel) ends)|(?P<nccl_init>Init (?:torch distributed|parallel) begin)"
    r"|(?P<load_begin>Load weight begin)|(?P<load_end>Load weight end)|(?P<capture>Capture .*(?:graph|CG).* begin)"
    r"|(?P<first_request>Uvicorn running on)|(?P<measure>The server is fired up)",
    re.IGNORECASE,
)


def log_tail(text: str) -> str:
    """The last lines, without progress bars and access lines."""
    lines = [line for line in raw_lines(text) if line.strip() and not NOISE.search(line)]
    return "\n".join(line[:400] for line in lines[-_TAIL_LINES:])[-_TAIL_CHARACTERS:]
