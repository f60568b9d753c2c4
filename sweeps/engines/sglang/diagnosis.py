"""Why a server ended or stands still: the first failing rank's innermost exception, and what kind of failure it is.

Formats are those of the supported releases (`versions`). Logs are for people and change: what is not found is None,
never an error.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sweeps.engines.base import Kind, Stage
from sweeps.engines.sglang.server_log import NOISE, LogLine, log_lines, log_tail, stage_reached

_MESSAGE_CHARACTERS = 600
"""Of a failure's message in a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Why a server ended or stands still."""

    stage: Stage
    kind: Kind
    message: str
    """One line: the first failing rank and its innermost exception, or what is known instead."""
    tail: str
    """The last lines of the log, without progress bars and access lines."""


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
    cause: LogLine | None,
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
    for line in log_lines(text):
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


def _first_cause(text: str, *, ended: bool) -> LogLine | None:
    """The innermost exception of the first rank that failed by itself, or an argument parser's complaint.

    A traceback that the server does not call fatal explains its end, but not why a live one stands still.
    """
    causes = list(_causes(list(log_lines(text))))
    own = [cause for cause in causes if not _SECONDARY.search(cause.text)]
    fatal = [cause for cause in own if cause.stamped]
    if fatal or not ended:
        return fatal[0] if fatal else None
    if causes:
        return own[-1] if own else causes[0]
    return next(
        (
            line
            for line in log_lines(text)
            if re.search(r"while attempting to bind on address", line.text)
            or (
                not line.stamped  # SGLang logs `...: No module named 'vllm'` about models that nobody serves
                and re.search(r"^[\w./ -]+: (error: |No module named |.*command not found)", line.text)
            )
        ),
        None,
    )


def _causes(lines: list[LogLine]) -> Iterator[LogLine]:
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
            yield LogLine(head.rank, first, stamped="hit an exception" in head.text)


def _last_words(text: str, returncode: int | None, stage: Stage) -> str:
    last = next(
        (line.text for line in reversed(list(log_lines(text))) if line.text and not NOISE.search(line.text)), ""
    )
    code = _code(text, returncode)
    by = f" ({number.name})" if returncode is not None and (number := _signal(code)) is not None else ""
    end = "did not answer in time" if returncode is None else f"ended with code {returncode}{by}"
    return f"server {end} in stage {stage}; last line: {last or '(none)'}"
