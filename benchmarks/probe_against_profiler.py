"""The cycle probe's phases against the server's own profiler, over the same cycles.

    python -m benchmarks.probe_against_profiler FOLDER --record NAME

`benchmarks.probe_overhead` calls this; on its own it reads again what that left with `--traces FOLDER` (a trace and
`cycles.parquet`) and renews that part of the record.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.profiled_cycles import Marks, ProfiledCycle, Times, read_cycles
from benchmarks.record import RESULTS
from sweeps.engines.sglang.trace_spans import TraceError, read_when_whole, trace_files

CYCLES = "cycles.parquet"
SETTLING_CYCLES = 4
"""Of a window or a request: the first cycles still feel that it opened."""
PARTS = ("draft_ms", "verify_ms", "extend_ms", "gap_ms")
_COLUMNS = (*PARTS, "verify_forward_ms", "cycle_ms", "started_ms")


def compare(folder: Path) -> dict[str, object]:
    """The figures of one profiler window, or the reason why there are none.

    Args:
        folder: the window's trace, and the probe's cycles as `cycles.parquet`.
    """
    traced = read_when_whole(folder, read_cycles, timeout_s=120.0, is_gone=lambda: False)
    if traced is None:
        return {"reason": _why_unread(folder)}
    return compare_phases(first_rank(pq.read_table(folder / CYCLES)), traced)


def compare_phases(cycles: Mapping[str, np.ndarray], traced: Sequence[ProfiledCycle]) -> dict[str, object]:
    """Mean milliseconds of each phase by probe and profiler, and the difference in percent of the profiler's.

    The window opens before the request, so its n-th cycle is the probe's n-th. On a GPU the profiler's time is between
    the passing of the same marks; `kernels` reaches from the phase's first kernel to its last (verify has no span of
    its own), `gpu_idle_before` is what the GPU waited for its host before that: with the profiler on, hosts are slow.
    """
    used = slice(SETTLING_CYCLES, len(traced) - 1)
    spans = {
        "draft_ms": [each.draft for each in traced],
        "verify_forward_ms": [each.forward for each in traced],
        "extend_ms": [each.extend for each in traced],
    }
    marked = [each.marks for each in traced if each.marks is not None]
    profiler = _by_marks(marked) if marked else _by_spans(traced)
    waits = np.array([each.idle_before or (np.nan,) * 3 for each in traced])[used].mean(axis=0)
    waited = dict(zip(spans, waits.tolist(), strict=True))
    phases: dict[str, object] = {}
    for name, values in profiler.items():
        ours, theirs = float(cycles[name][used].mean()), float(values[used].mean())
        within = name in spans and bool(marked)
        phases[name] = {
            "probe": ours,
            "profiler": theirs,
            "difference_percent": 100.0 * (ours - theirs) / theirs,
            "kernels": float(_lengths(spans[name])[used].mean()) if within else None,
            "gpu_idle_before": waited[name] if within else None,
        }
    return {"cycles": len(range(*used.indices(len(traced)))), "phases": phases}


def _by_spans(traced: Sequence[ProfiledCycle]) -> dict[str, np.ndarray]:
    """`verify` is what lies between draft and draft-extend; a cycle reaches to the next draft."""
    drafts, extends = [each.draft for each in traced], [each.extend for each in traced]
    return {
        "draft_ms": _lengths(drafts),
        "verify_ms": _lengths([(draft[1], extend[0]) for draft, extend in zip(drafts, extends, strict=True)]),
        "verify_forward_ms": _lengths([each.forward for each in traced]),
        "extend_ms": _lengths(extends),
        "cycle_ms": np.diff([draft[0] for draft in drafts]),
    }


def _by_marks(marks: Sequence[Marks]) -> dict[str, np.ndarray]:
    return {
        "draft_ms": _lengths([each.draft for each in marks]),
        "verify_ms": _lengths([each.verify for each in marks]),
        "verify_forward_ms": _lengths([each.forward for each in marks]),
        "extend_ms": _lengths([each.extend for each in marks]),
        "cycle_ms": np.diff([each.draft[0] for each in marks]),
    }


def first_rank(cycles: pa.Table) -> dict[str, np.ndarray]:
    """Column -> values of rank 0, in order; tokens not told are 0."""
    own = cycles.filter(pc.equal(cycles["rank"], 0))
    columns = {name: own[name].to_numpy().astype(float) for name in _COLUMNS}
    return {**columns, "tokens": pc.fill_null(own["tokens"], 0).to_numpy()}


def _lengths(times: Sequence[Times]) -> np.ndarray:
    return np.array([end - start for start, end in times])


def _why_unread(folder: Path) -> str:
    found = trace_files(folder)
    if not found:
        return "the profiler left no trace"
    try:
        return f"read too late, {len(read_cycles(found[0]))} cycles"
    except TraceError as error:
        return str(error)


def main() -> None:
    """Renew `against_profiler` of a record from kept traces."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.probe_against_profiler", description="Read again.")
    parser.add_argument("folder", type=Path, help="what `probe_overhead --traces` left")
    parser.add_argument("--record", required=True, help="name of the record")
    arguments = parser.parse_args()
    path = RESULTS / f"{arguments.record}.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["figures"]["against_profiler"] = compare(arguments.folder)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(content["figures"]["against_profiler"], indent=1))


if __name__ == "__main__":
    main()
