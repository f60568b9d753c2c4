"""Kernel time by phase and kind, from the Chrome trace of the server's own profiler; graph replays included.

The share of communication in verify bounds what any NCCL setting can win, before any has been tried.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from sweeps.engines.base import KernelTime

Phase = Literal["draft", "verify", "extend", "other"]
KernelKind = Literal["communication", "attention", "moe", "gemm", "sampling", "other"]

KIND_RULES: tuple[tuple[KernelKind, str], ...] = (
    (
        "communication",
        r"nccl|all_?reduce|all_?gather|reduce_?scatter|cross_device|one_?shot|two_?shot|multimem|lamport|mscclpp|nvshmem",
    ),
    ("moe", r"moe|expert|top_?k_?gating|grouped_?gemm|group_?gemm|align_block_size"),
    (
        "attention",
        r"attn|attention|fmha|flash(?!infer)|mla|paged|batch_?(decode|prefill)|merge_state|kv_(buffer|indices)|_fwd_",
    ),
    ("sampling", r"sampl|argmax|softmax|top_?[kp]|renorm|build_tree|verify_tree|accept|radixsort|multinomial"),
    ("gemm", r"gemm|gemv|matmul|nvjet|xmma|cublas|cutlass|split_?k|wgmma|marlin|dot_kernel"),
)
"""Kind and what its kernels are called, lower case; the first that fits, `other` where none does."""

_SPANS: tuple[tuple[str, str], ...] = (
    ("draft_extend", r"^draft_extend$"),
    ("draft", r"^draft$"),
    ("verify", r"^step\[(TARGET_)?VERIFY\b"),
    ("decode", r"^step\[DECODE\b"),
    ("prefill", r"^step\[(EXTEND|MIXED|PREFILL)\b"),
)
"""SGLang's GPU annotations, 0.5.16 to 0.5.23. Inside `draft` and `draft_extend` there are steps of the draft model."""

_PHASES: Mapping[str, Phase | None] = {
    "draft": "draft",
    "draft_extend": "extend",
    "verify": "verify",
    "decode": "verify",
    "prefill": None,
}
_KERNEL_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_NAME_CHARACTERS = 120
_Read = TypeVar("_Read")


class TraceError(ValueError):
    """A trace without one complete cycle, or not a trace."""


@dataclass(frozen=True, slots=True)
class _Span:
    start_us: float
    end_us: float
    kind: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedCycle:
    """One draft -> verify -> draft-extend round by the profiler's spans: start and end of each, ms of its clock."""

    draft: tuple[float, float]
    forward: tuple[float, float]
    """The target's forward inside verify; verify itself has no span."""
    extend: tuple[float, float]
    idle_before: tuple[float, float, float] | None
    """What the GPU waited, with nothing to do, before each of the three; None in a trace of the host."""


def trace_files(folder: Path) -> tuple[Path, ...]:
    """The traces of a profiler window, first tensor-parallel rank first."""
    found = (*folder.rglob("*.trace.json"), *folder.rglob("*.trace.json.gz"))

    def rank(path: Path) -> tuple[int, str]:
        match = re.search(r"TP-(\d+)", path.name)
        return (int(match[1]) if match else 0, path.name)

    return tuple(sorted(found, key=rank))


def read_kernel_times(path: Path) -> tuple[KernelTime, ...]:
    """Microseconds and calls per cycle of every kernel of one rank, longest first within a phase.

    A cycle runs from one verify to the next; of a plain server, from one decode step to the next, and that step's
    kernels are `verify`. What runs between the phases (acceptance, sampling, copies) is `other`; prefill is left out.
    Raises TraceError.
    """
    events = _events(path)
    spans = _outermost(events)
    target = "verify" if any(span.kind == "verify" for span in spans) else "decode"
    starts = [span.start_us for span in spans if span.kind == target]
    if len(starts) < 2:
        raise TraceError(f"{path}: wanted two or more {target} steps for a whole cycle, got {len(starts)}")
    num_cycles = len(starts) - 1
    durations: dict[tuple[Phase, str], list[float]] = defaultdict(list)
    openings = [span.start_us for span in spans]
    for event in events:
        at_us = float(event.get("ts", 0))
        if event.get("cat") not in _KERNEL_CATEGORIES or not starts[0] <= at_us < starts[-1]:
            continue
        phase = _phase_at(at_us, spans, openings)
        if phase is not None:
            durations[phase, short_name(event["name"])].append(float(event.get("dur", 0)))
    rows = [
        KernelTime(
            phase=phase,
            kind=kernel_kind(kernel),
            kernel=kernel,
            us_per_cycle=sum(values) / num_cycles,
            calls_per_cycle=len(values) / num_cycles,
        )
        for (phase, kernel), values in durations.items()
    ]
    return tuple(sorted(rows, key=lambda row: (row.phase, -row.us_per_cycle, row.kernel)))


def read_cycles(path: Path) -> tuple[TracedCycle, ...]:
    """The cycles after the first prefill in order, by the spans of the GPU, or of the host where no GPU was traced.

    On a GPU a span reaches from its first kernel's start to its last kernel's end. Raises TraceError, also where the
    trace does not begin before a prefill: which cycles it holds is then not known.
    """
    events = _events(path)
    spans = _joined(_outermost(events) or _outermost(events, category="user_annotation"))
    first = next((number for number, span in enumerate(spans) if span.kind in ("prefill", "verify")), None)
    if first is None or spans[first].kind != "prefill":
        raise TraceError(f"{path}: wanted a prefill before the first cycle, got {[span.kind for span in spans[:3]]}")
    kernels = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0)))
        for event in events
        if event.get("cat") in _KERNEL_CATEGORIES
    )
    idle_ms = _idle_before(
        [start for start, _ in kernels], list(itertools.accumulate((end for _, end in kernels), max))
    )
    cycles = [
        TracedCycle(
            draft=_milliseconds(draft),
            forward=_milliseconds(forward),
            extend=_milliseconds(extend),
            idle_before=(idle_ms(draft), idle_ms(forward), idle_ms(extend)) if kernels else None,
        )
        for draft, forward, extend in zip(spans[first:], spans[first + 1 :], spans[first + 2 :], strict=False)
        if (draft.kind, forward.kind, extend.kind) == ("draft", "verify", "draft_extend")
    ]
    num_ended = sum(span.kind == "draft_extend" for span in spans)
    if not cycles or len(cycles) != num_ended:
        raise TraceError(f"{path}: {num_ended} draft-extends, {len(cycles)} of them at the end of a whole cycle")
    return tuple(cycles)


def _idle_before(starts: Sequence[float], ended: Sequence[float]) -> Callable[[_Span], float]:
    """Milliseconds from the last kernel's end to a span's start.

    Args:
        ended: by kernel, when it and all that started before it had ended.
    """

    def idle_ms(span: _Span) -> float:
        number = bisect_left(starts, span.start_us)
        return max(0.0, span.start_us - ended[number - 1]) / 1000.0 if number else 0.0

    return idle_ms


def _joined(spans: Iterable[_Span]) -> list[_Span]:
    """One span for what follows itself: a phase that ran on two streams, one after the other."""
    groups = [list(group) for _, group in itertools.groupby(spans, key=lambda span: span.kind)]
    return [replace(group[0], end_us=max(span.end_us for span in group)) for group in groups]


def _milliseconds(span: _Span) -> tuple[float, float]:
    return span.start_us / 1000.0, span.end_us / 1000.0


def communication_share(rows: Iterable[KernelTime], *, phase: Phase = "verify") -> float | None:
    """Kernel time of communication over all kernel time of the phase; None where the phase has no kernels."""
    of_phase = [row for row in rows if row.phase == phase]
    total = sum(row.us_per_cycle for row in of_phase)
    return sum(row.us_per_cycle for row in of_phase if row.kind == "communication") / total if total else None


def kernel_kind(kernel: str) -> KernelKind:
    """By its name, KIND_RULES."""
    name = kernel.lower()
    return next((kind for kind, pattern in KIND_RULES if re.search(pattern, name)), "other")


def short_name(kernel: str) -> str:
    """Without return type, template arguments and parameters; namespaces stay."""
    name = re.sub(r"^(void|bool|int)\s+", "", kernel.strip().replace("(anonymous namespace)", "{anonymous}"))
    return re.split(r"[<(]", name, maxsplit=1)[0].strip()[:_NAME_CHARACTERS]


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        document = json.loads(raw)
    except (OSError, EOFError, ValueError) as error:
        raise TraceError(f"{path}: not a Chrome trace: {error}") from error
    events = document.get("traceEvents") if isinstance(document, Mapping) else document
    if not isinstance(events, list):
        raise TraceError(f"{path}: wanted `traceEvents`, got {type(events).__name__}")
    return cast("list[dict[str, Any]]", events)


def _outermost(events: Sequence[Mapping[str, Any]], *, category: str = "gpu_user_annotation") -> list[_Span]:
    """The phase spans of one timeline in order, none inside or over another (streams may overlap)."""
    named = [(event, _span_kind(event["name"])) for event in events if event.get("cat") == category]
    found = [
        _Span(float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0)), kind)
        for event, kind in named
        if kind
    ]
    spans: list[_Span] = []
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
        spans.append(_Span(start_us, span.end_us, "prefill" if of_prefill else span.kind))
    return spans


def _span_kind(name: str) -> str | None:
    return next((kind for kind, pattern in _SPANS if re.search(pattern, name)), None)


def _phase_at(at_us: float, spans: Sequence[_Span], openings: Sequence[float]) -> Phase | None:
    """None inside prefill."""
    number = bisect_right(openings, at_us) - 1
    if number < 0 or at_us >= spans[number].end_us:
        return "other"
    return _PHASES[spans[number].kind]


def read_when_whole(
    folder: Path, read: Callable[[Path], _Read], *, timeout_s: float, is_gone: Callable[[], bool]
) -> _Read | None:
    """What `read` makes of the first rank's trace, once that is whole; None where none comes."""
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
