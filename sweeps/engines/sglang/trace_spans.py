"""The phases of a server's cycles in the Chrome trace of its own profiler: spans by name, none inside another."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

_SPANS: tuple[tuple[str, str], ...] = (
    ("draft_extend", r"^draft_extend$"),
    ("draft", r"^draft$"),
    ("verify", r"^step\[(TARGET_)?VERIFY\b"),
    ("decode", r"^step\[DECODE\b"),
    ("prefill", r"^step\[(EXTEND|MIXED|PREFILL)\b"),
)
"""SGLang's GPU annotations, in the supported releases (`versions`).

Inside `draft` and `draft_extend` there are steps of the draft model."""

GPU_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Categories of what ran on a GPU."""

_Read = TypeVar("_Read")


class TraceError(ValueError):
    """Not a trace, or one without a complete cycle."""


@dataclass(frozen=True, slots=True)
class Span:
    """One phase on one timeline, microseconds of the trace's clock."""

    start_us: float
    end_us: float
    kind: str


def trace_files(folder: Path) -> tuple[Path, ...]:
    """The traces of a profiler window, first tensor-parallel rank first."""
    found = (*folder.rglob("*.trace.json"), *folder.rglob("*.trace.json.gz"))

    def rank(path: Path) -> tuple[int, str]:
        match = re.search(r"TP-(\d+)", path.name)
        return (int(match[1]) if match else 0, path.name)

    return tuple(sorted(found, key=rank))


def read_when_whole(
    folder: Path, read: Callable[[Path], _Read], *, timeout_s: float, is_gone: Callable[[], bool]
) -> _Read | None:
    """The result of `read` for the first rank's trace, once the file is whole; None if no trace comes."""
    deadline, last_bytes = time.monotonic() + timeout_s, -1
    while time.monotonic() < deadline and not is_gone():
        time.sleep(1.0)
        for path in trace_files(folder)[:1]:
            is_whole, last_bytes = path.stat().st_size == last_bytes, path.stat().st_size
            try:
                return read(path)
            except TraceError:
                if is_whole:
                    return None
    return None


def read_events(path: Path) -> list[dict[str, Any]]:
    """Everything in a trace, packed or not. Raises TraceError."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        document = json.loads(raw)
    except (OSError, EOFError, ValueError) as error:
        raise TraceError(f"{path}: not a Chrome trace: {error}") from error
    events = document.get("traceEvents") if isinstance(document, Mapping) else document
    if not isinstance(events, list):
        raise TraceError(f"{path}: wanted `traceEvents`, got {type(events).__name__}")
    return cast("list[dict[str, Any]]", events)


def outermost(events: Sequence[Mapping[str, Any]], *, category: str = "gpu_user_annotation") -> list[Span]:
    """The phase spans of one timeline in order, none inside or over another (streams may overlap)."""
    named = [(event, _span_kind(event["name"])) for event in events if event.get("cat") == category]
    found = [
        Span(float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0)), kind) for event, kind in named if kind
    ]
    spans: list[Span] = []
    last_target = ""
    for span in sorted(found, key=lambda span: (span.start_us, -span.end_us)):
        last = spans[-1] if spans else None
        if last and span.end_us <= last.end_us:
            continue
        if last and span.start_us < last.end_us and span.kind == last.kind:
            spans[-1] = replace(last, end_us=span.end_us)
            continue
        if span.kind in ("verify", "decode", "prefill"):
            last_target = span.kind
        of_prefill = span.kind == "draft_extend" and last_target == "prefill"
        start_us = max(span.start_us, last.end_us) if last else span.start_us
        spans.append(Span(start_us, span.end_us, "prefill" if of_prefill else span.kind))
    return spans


def _span_kind(name: str) -> str | None:
    return next((kind for kind, pattern in _SPANS if re.search(pattern, name)), None)
