"""The cycles of a server as its own profiler saw them: what the cycle probe is compared with.

Two readings of one trace. Spans: from a phase's first kernel to its last (on a CPU, the host's own spans). Marks: when
each of the probe's CUDA events passed. A trace has no events on the GPU's timeline, but it has the host's calls that
recorded them and the kernels of their stream; an event passes when all that was launched before it on its stream has
ended, or when it is recorded, whichever is later.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sweeps.engines.sglang.trace_spans import GPU_WORK, Span, TraceError, outermost, read_events

MARK_CALL = "cudaEventRecordWithFlags"
"""What torch's `Event.record` calls; SGLang's own events go through it, too."""
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
_CYCLE = ("draft", "verify", "draft_extend")

Times = tuple[float, float]
"""Start and end, ms of the trace's clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """When the probe's marks of one cycle passed; the cycle starts with its draft."""

    draft: Times
    verify: Times
    forward: Times
    extend: Times


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledCycle:
    """One draft -> verify -> draft-extend round."""

    draft: Times
    forward: Times
    """The target's forward inside verify; verify itself has no span."""
    extend: Times
    idle_before: tuple[float, float, float] | None
    """What the GPU waited, with nothing to do, before each of the three; None in a trace of the host."""
    marks: Marks | None
    """None in a trace of the host, where a mark is a span's end."""


def read_cycles(path: Path) -> tuple[ProfiledCycle, ...]:
    """The cycles after the first prefill in order.

    Raises TraceError, also where the trace does not begin before a prefill: which cycles it holds is then not known.
    """
    events = read_events(path)
    on_host = outermost(events, category="user_annotation")
    on_gpu = outermost(events)
    rounds = _rounds(path, _joined(on_gpu or on_host))
    work = sorted(_interval(event) for event in events if event.get("cat") in GPU_WORK)
    idle_ms = _idle_before([start for start, _ in work], [*itertools.accumulate((end for _, end in work), max)])
    marks = _marks(path, events, on_host, len(rounds)) if on_gpu else None
    return tuple(
        ProfiledCycle(
            draft=_milliseconds(draft),
            forward=_milliseconds(forward),
            extend=_milliseconds(extend),
            idle_before=(idle_ms(draft), idle_ms(forward), idle_ms(extend)) if work else None,
            marks=marks[number] if marks else None,
        )
        for number, (draft, forward, extend) in enumerate(rounds)
    )


def _rounds(path: Path, spans: Sequence[Span]) -> list[tuple[Span, Span, Span]]:
    first = next((number for number, span in enumerate(spans) if span.kind in ("prefill", "verify")), None)
    if first is None or spans[first].kind != "prefill":
        raise TraceError(f"{path}: wanted a prefill before the first cycle, got {[span.kind for span in spans[:3]]}")
    triples = zip(spans[first:], spans[first + 1 :], spans[first + 2 :], strict=False)
    rounds = [triple for triple in triples if tuple(span.kind for span in triple) == _CYCLE]
    num_ended = sum(span.kind == "draft_extend" for span in spans)
    if not rounds or len(rounds) != num_ended:
        raise TraceError(f"{path}: {num_ended} draft-extends, {len(rounds)} of them at the end of a whole cycle")
    return rounds


def _marks(
    path: Path, events: Sequence[Mapping[str, Any]], on_host: Sequence[Span], num_cycles: int
) -> list[Marks] | None:
    """Of each cycle; None in a trace that has no calls of the host."""
    recorded = sorted(_interval(event) for event in events if event.get("name") == MARK_CALL)
    if not recorded:
        return None
    at_us = [start for start, _ in recorded]
    passed_ms = [time_us / 1000.0 for time_us in _passed(events, recorded)]

    def last_before(time_us: float) -> float:
        return passed_ms[bisect_left(at_us, time_us) - 1]

    def first_after(time_us: float, *, skipping: int = 0) -> float:
        return passed_ms[bisect_left(at_us, time_us) + skipping]

    found = [
        Marks(
            draft=(last_before(draft.start_us), last_before(draft.end_us)),
            verify=(first_after(draft.end_us), first_after(forward.end_us, skipping=1)),
            forward=(last_before(forward.start_us), first_after(forward.end_us)),
            extend=(first_after(extend.start_us), last_before(extend.end_us)),
        )
        for draft, forward, extend in _rounds(path, _joined(on_host))
    ]
    if len(found) < num_cycles:
        raise TraceError(f"{path}: {num_cycles} cycles on the GPU, but {len(found)} on its host")
    return found


def _passed(events: Sequence[Mapping[str, Any]], recorded: Sequence[Times]) -> list[float]:
    """When each event recorded on the stream that works most passed, us."""
    calls = {_correlation(event): event for event in events if event.get("cat") in _LAUNCHES}
    work = [event for event in events if event.get("cat") in GPU_WORK and _correlation(event) in calls]
    ((stream, _),) = Counter(event["args"].get("stream") for event in work).most_common(1)
    launched = sorted(
        (float(calls[_correlation(event)]["ts"]), _interval(event)[1])
        for event in work
        if event["args"].get("stream") == stream
    )
    starts = [start for start, _ in launched]
    ended = [*itertools.accumulate((end for _, end in launched), max)]
    passed = []
    for start, end in recorded:
        number = bisect_left(starts, start)
        passed.append(max((start + end) / 2, ended[number - 1] if number else 0.0))
    return passed


def _correlation(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("correlation")


def _interval(event: Mapping[str, Any]) -> Times:
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0))


def _idle_before(starts: Sequence[float], ended: Sequence[float]) -> Callable[[Span], float]:
    """Milliseconds from the last kernel's end to a span's start.

    Args:
        starts: of all kernels, us.
        ended: by kernel, when it and all that started before it had ended.
    """

    def idle_ms(span: Span) -> float:
        number = bisect_left(starts, span.start_us)
        return max(0.0, span.start_us - ended[number - 1]) / 1000.0 if number else 0.0

    return idle_ms


def _joined(spans: Iterable[Span]) -> list[Span]:
    """One span for what follows itself: a phase that ran on two streams, one after the other."""
    groups = [list(group) for _, group in itertools.groupby(spans, key=lambda span: span.kind)]
    return [replace(group[0], end_us=max(span.end_us for span in group)) for group in groups]


def _milliseconds(span: Span) -> Times:
    return span.start_us / 1000.0, span.end_us / 1000.0
