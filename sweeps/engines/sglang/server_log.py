"""What a server's log says: start-up times, the stage it reached, its resolved arguments, and why it died.

Formats are those of the supported releases (`versions`). Logs are for people and change: what is not found is None,
never an error.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from sweeps.engines.base import Kind, Stage

_PREFIX = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?P<rank>(?: [A-Z]+\d+)*)\] ?(?P<text>.*)")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_NOISE = re.compile(
    r'^\[[^\]]*\] INFO: +\S+ - "(GET|POST) |Capturing batches|(it/s|s/it)\]$|UserWarning|warnings\.warn'
)
STATE_FAILURE = "specsweep-state-failure "
"""Begins the probe's line (`specsweep_probe.communicators.FAILURE_MARK`)."""
_TAIL_LINES, _TAIL_CHARACTERS, _MESSAGE_CHARACTERS = 40, 6000, 600
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
class Diagnosis:
    """Why a server ended or stands still."""

    stage: Stage
    kind: Kind
    message: str
    """One line: the first failing rank and its innermost exception, or what is known instead."""
    tail: str
    """The last lines of the log, without progress bars and access lines."""


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
class _Line:
    rank: str
    text: str
    stamped: bool


def _raw_lines(text: str) -> list[str]:
    """Without colours; a message that a progress bar swallowed has its line again."""
    return re.sub(r"(?<=it/s\]|s/it\])(?=\[\d{4}-)", "\n", _ANSI.sub("", text).replace("\r", "\n")).splitlines()


def _lines(text: str) -> Iterator[_Line]:
    for raw in _raw_lines(text):
        match = _PREFIX.match(raw)
        yield _Line(match["rank"].strip(), match["text"], stamped=True) if match else _Line("", raw, stamped=False)


def state_failure(text: str) -> StateFailure | None:
    """The first communicator that the probe says did not come up."""
    for line in _raw_lines(text):
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
    found = [(line.rank, match[1]) for line in _lines(text) if (match := re.search(pattern, line.text))]
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
        for line in _lines(text):
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


def resolved_arguments(text: str) -> dict[str, str | None]:
    """The server's own account of its arguments, by field name (`speculative_num_steps`); nested values stay text.

    Empty if the log has no `server_args=` line. Both spellings are read: `ServerArgs(name=value)`
    and a dict literal (`versions`).
    """
    match = re.search(r"server_args=(?:ServerArgs\((?P<call>.*)\)|\{(?P<literal>.*)\})\s*$", text, re.MULTILINE)
    if match is None:
        return {}
    arguments: dict[str, str | None] = {}
    for item in _split(match["call"] or match["literal"]):
        name, _, value = item.partition("=" if match["call"] else ":")
        value = value.strip()
        arguments[name.strip(" '\"")] = None if value == "None" else _unquoted(value)
    return arguments


def _split(text: str) -> Iterator[str]:
    """Split at the commas outside quotes and brackets."""
    depth, start, quote, escaped = 0, 0, "", False
    for position, letter in enumerate(text):
        if quote:
            quote = quote if escaped or letter != quote else ""
            escaped = letter == "\\" and not escaped
        elif letter in "'\"":
            quote = letter
        elif letter in "([{<":
            depth += 1
        elif letter in ")]}>":
            depth -= 1
        elif letter == "," and depth == 0:
            yield text[start:position]
            start = position + 1
    if text[start:].strip():
        yield text[start:]


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def diagnose(
    text: str,
    *,
    returncode: int | None,
    stage: Stage | None = None,
    nccl_warnings: Sequence[str] = (),
    host_memory_ran_out: bool = False,
) -> Diagnosis:
    """Why the server ended (`returncode`), or stands still although it lives (None).

    Args:
        stage: given if the caller knows it better than the log does (`first_request`, `measure`).
        nccl_warnings: WARN lines of NCCL's own log files; without NCCL_DEBUG_FILE they stand in `text`.
        host_memory_ran_out: the kernel killed a process of this host for memory since the launch.
    """
    stage = stage_reached(text) if stage is None else stage
    cause = _first_cause(text, ended=returncode is not None)
    message = f"{cause.rank}: {cause.text}" if cause and cause.rank else cause.text if cause else None
    kind = _kind(text, cause, returncode, stage, nccl_warnings, host_memory_ran_out=host_memory_ran_out)
    if kind == "nccl_no_algorithm" or (cause is not None and "NCCL" in cause.text):
        in_text = (line for line in text.splitlines() if "NCCL WARN " in line)
        warned = next(iter((*nccl_warnings, *in_text)), "").partition("NCCL WARN ")[2]
        message = f"{message or 'NCCL'}: NCCL WARN {warned}" if warned else message
    return Diagnosis(
        stage=stage,
        kind=kind,
        message=(message or _last_words(text, returncode, stage))[:_MESSAGE_CHARACTERS],
        tail=log_tail(text),
    )


def log_tail(text: str) -> str:
    """The last lines, without progress bars and access lines."""
    lines = [line for line in _raw_lines(text) if line.strip() and not _NOISE.search(line)]
    return "\n".join(line[:400] for line in lines[-_TAIL_LINES:])[-_TAIL_CHARACTERS:]


_OUT_OF_MEMORY: tuple[tuple[Kind, str], ...] = (
    (
        "gpu_oom",
        r"(CUDA|HIP) out of memory|OutOfMemoryError|CUDA error: out of memory|Failed to CUDA calloc"
        r"|Not enough memory\. Please try|CUBLAS_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation",
    ),
    ("host_oom", r"\bMemoryError\b|Cannot allocate memory|DefaultCPUAllocator: (can't|not enough)"),
)
_OF_EXCEPTION: tuple[tuple[Kind, str], ...] = (
    ("nccl_no_algorithm", r"[Nn]o algorithm/protocol available"),
    *_OUT_OF_MEMORY,
    ("engine_unavailable", r"ModuleNotFoundError|No module named|command not found"),
    (
        "invalid_config",
        r"error: (unrecognized arguments?|argument |ambiguous option|the following arguments)"
        r"|Unrecognized (element|prefix) token|All entries except the first must have a prefix"
        r"|selected index k out of range|arange's range must be a power of 2"
        r"|\b(ValueError|NotImplementedError|AssertionError|HFValidationError)\b"
        r"|is not a local folder and is not a valid model identifier|does not appear to have a file named",
    ),
)
"""Kind and what the innermost exception then says; the first that fits."""

_SECONDARY = re.compile(
    r"Connection (reset|closed|refused)|Broken pipe|remote process exited|DistBackendError.*unhandled system|by peer"
)
"""What the other ranks say when one has died."""

_SERVING = frozenset({"first_request", "measure"})


def _kind(
    text: str,
    cause: _Line | None,
    returncode: int | None,
    stage: Stage,
    nccl_warnings: Sequence[str],
    *,
    host_memory_ran_out: bool,
) -> Kind:
    if any("o algorithm/protocol available" in each for each in (text, *nccl_warnings)):
        return "nccl_no_algorithm"  # NCCL warns, the exception says no more than `invalid usage`
    if cause is not None and (kind := _first_match(_OF_EXCEPTION, cause.text)):
        return kind
    if re.search(r"[Ww]atchdog (caught|timeout)", text) or (returncode is None and cause is None):
        return _hang(stage)
    if cause is not None and not _SECONDARY.search(cause.text):
        return "crash"
    for line in _lines(text):
        if re.search(r"WARN|[Ee]rror|[Ff]ailed", line.text) and (kind := _first_match(_OUT_OF_MEMORY, line.text)):
            return kind
    code = _code(text, returncode)
    if (number := _signal(code)) is not None and number in _FROM_OUTSIDE:
        return "host_oom" if number == signal.SIGKILL and host_memory_ran_out else "killed"
    return "invalid_config" if code == 2 else "crash"


_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that somebody sends; any other is the process's own fault."""


def _code(text: str, returncode: int | None) -> int | None:
    """Exit code of the rank that ended first, if the log tells; else the server's."""
    child = re.search(r"crashed with exit code (-?\d{1,4})\b", text)
    return int(child[1]) if child else returncode


def _signal(code: int | None) -> signal.Signals | None:
    """The signal that an exit code stands for, as Python or as a shell tells it."""
    number = None if code is None else -code if code < 0 else code - 128
    return signal.Signals(number) if number in set(signal.Signals) else None


def _first_match(rules: tuple[tuple[Kind, str], ...], text: str) -> Kind | None:
    return next((kind for kind, pattern in rules if re.search(pattern, text)), None)


def _hang(stage: Stage) -> Kind:
    if stage in _SERVING:
        return "hang_in_verify"
    return "hang_nccl_init" if stage == "nccl_init" else "hang"


def _first_cause(text: str, *, ended: bool) -> _Line | None:
    """The innermost exception of the first rank that failed by itself, or an argument parser's complaint.

    A traceback that the server does not call fatal explains its end, but not why a live one stands still.
    """
    causes = list(_causes(list(_lines(text))))
    own = [cause for cause in causes if not _SECONDARY.search(cause.text)]
    fatal = [cause for cause in own if cause.stamped]
    if fatal or not ended:
        return fatal[0] if fatal else None
    if causes:
        return own[-1] if own else causes[0]
    return next(
        (
            line
            for line in _lines(text)
            if re.search(r"while attempting to bind on address", line.text)
            or (
                not line.stamped  # SGLang logs `...: No module named 'vllm'` about models that nobody serves
                and re.search(r"^[\w./ -]+: (error: |No module named |.*command not found)", line.text)
            )
        ),
        None,
    )


def _causes(lines: list[_Line]) -> Iterator[_Line]:
    """One per chain of tracebacks, of its first; `stamped` if the server reported the chain as fatal."""
    number = 0
    while number < len(lines):
        head = lines[number]
        number += 1
        if "Traceback (most recent call last)" not in head.text:
            continue
        first = ""
        while number < len(lines):
            line = lines[number]
            if line.stamped:
                break
            number += 1
            if not first and line.text and not line.text.startswith((" ", "\t")) and "Traceback" not in line.text:
                first = line.text
        if first:
            yield _Line(head.rank, first, stamped="hit an exception" in head.text)


def _last_words(text: str, returncode: int | None, stage: Stage) -> str:
    last = next((line.text for line in reversed(list(_lines(text))) if line.text and not _NOISE.search(line.text)), "")
    code = _code(text, returncode)
    by = f" ({number.name})" if returncode is not None and (number := _signal(code)) is not None else ""
    end = "did not answer in time" if returncode is None else f"ended with code {returncode}{by}"
    return f"server {end} in stage {stage}; last line: {last or '(none)'}"
