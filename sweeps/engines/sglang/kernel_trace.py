"""Kernel time by phase and kind, from the Chrome trace of the server's own profiler; graph replays included.

The share of communication in verify bounds what any NCCL setting can win, before any has been tried.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from sweeps.engines.base import KernelTime
from sweeps.engines.sglang.trace_spans import GPU_WORK, Span, TraceError, outermost, read_events

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
"""Kind and what its kernels are called, lower case; the first that fits, `other` if none does."""

_PHASES: Mapping[str, Phase | None] = {
    "draft": "draft",
    "draft_extend": "extend",
    "verify": "verify",
    "decode": "verify",
    "prefill": None,
}
_NAME_CHARACTERS = 120


def read_kernel_times(path: Path) -> tuple[KernelTime, ...]:
    """Microseconds and calls per cycle of every kernel of one rank, longest first within a phase.

    A cycle runs from one verify to the next; of a plain server, from one decode step to the next, and that step's
    kernels are `verify`. What runs between the phases (acceptance, sampling, copies) is `other`; prefill is left out.
    Raises TraceError.
    """
    events = read_events(path)
    spans = outermost(events)
    target = "verify" if any(span.kind == "verify" for span in spans) else "decode"
    starts = [span.start_us for span in spans if span.kind == target]
    if len(starts) < 2:
        raise TraceError(f"{path}: wanted two or more {target} steps for a whole cycle, got {len(starts)}")
    num_cycles = len(starts) - 1
    durations: dict[tuple[Phase, str], list[float]] = defaultdict(list)
    openings = [span.start_us for span in spans]
    for event in events:
        at_us = float(event.get("ts", 0))
        if event.get("cat") not in GPU_WORK or not starts[0] <= at_us < starts[-1]:
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


def communication_share(rows: Iterable[KernelTime], *, phase: Phase = "verify") -> float | None:
    """Kernel time of communication over all kernel time of the phase; None if the phase has no kernels."""
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


def _phase_at(at_us: float, spans: Sequence[Span], openings: Sequence[float]) -> Phase | None:
    """None inside prefill."""
    number = bisect_right(openings, at_us) - 1
    if number < 0 or at_us >= spans[number].end_us:
        return "other"
    return _PHASES[spans[number].kind]
