"""TRACE is synthetic, in the structure of a real one: a prefill, then four equal cycles. HOST_TRACE was recorded from
the real server on the CPU, three steps, and reduced to its spans: a prefill, then seven cycles. GPU_TRACE was recorded
on an H200 beside the probe's own cycles, and reduced to ten cycles and the first and last kernel of every graph."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from benchmarks.profiled_cycles import MARK_CALL, read_cycles
from sweeps.engines.sglang.trace_spans import TraceError
from tests.chrome_trace import event, kernel, span, write

ASSETS = Path(__file__).parents[1] / "assets"
TRACE = ASSETS / "traces" / "1764428400.0-TP-0.trace.json"
HOST_TRACE = ASSETS / "host_trace" / "cpu-TP-0.trace.json"
GPU_TRACE = ASSETS / "gpu_trace" / "h200-TP-0.trace.json.gz"


def test_cycles_by_the_spans_of_the_gpu() -> None:
    cycles = read_cycles(TRACE)
    assert [cycle.draft[0] for cycle in cycles] == [1.370, 1.970, 2.570, 3.170]
    assert {round(cycle.draft[1] - cycle.draft[0], 6) for cycle in cycles} == {0.100}
    assert {round(cycle.forward[1] - cycle.forward[0], 6) for cycle in cycles} == {0.400}
    assert {round(cycle.extend[1] - cycle.extend[0], 6) for cycle in cycles} == {0.060}


def test_cycles_by_the_spans_of_a_host() -> None:
    cycles = read_cycles(HOST_TRACE)
    assert len(cycles) == 7
    assert cycles[0].draft == pytest.approx((13.918871, 17.113668))
    assert {cycle.marks for cycle in cycles} == {None}
    for cycle in cycles:
        assert cycle.draft[0] < cycle.draft[1] < cycle.forward[0] < cycle.forward[1] < cycle.extend[0] < cycle.extend[1]


def test_a_phase_on_two_streams_is_one(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.json",
        span("step[EXTEND bs=1 toks=9]", 0, 50),
        span("draft", 100, 50),
        span("draft", 160, 10),
        span("step[VERIFY bs=1]", 200, 50),
        span("step[VERIFY bs=1]", 260, 20),
        span("draft_extend", 300, 50),
        span("draft", 400, 50),
    )
    (cycle,) = read_cycles(path)
    assert (cycle.draft, cycle.forward, cycle.extend) == ((0.1, 0.17), (0.2, 0.28), (0.3, 0.35))
    assert cycle.idle_before is None


def test_what_the_gpu_waited_before_a_phase(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.json",
        span("step[EXTEND bs=1 toks=9]", 0, 50),
        kernel("long", 0, 70),
        kernel("short", 10, 5),
        span("draft", 100, 50),
        kernel("draft", 100, 50),
        span("step[VERIFY bs=1]", 200, 50),
        kernel("verify", 200, 50),
        kernel("sampling", 250, 45),
        span("draft_extend", 290, 50),
    )
    (cycle,) = read_cycles(path)
    assert cycle.idle_before == pytest.approx((0.03, 0.05, 0.0))


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ([], "a prefill before the first cycle"),
        ([span("step[EXTEND bs=1 toks=9]", 0, 50), span("step[VERIFY bs=1]", 60, 5), span("draft_extend", 70, 5)], "2"),
    ],
)
def test_a_trace_whose_cycles_cannot_be_counted(tmp_path: Path, first: list[dict[str, Any]], said: str) -> None:
    cycle = [span("draft", 100, 50), span("step[VERIFY bs=1]", 200, 50), span("draft_extend", 300, 50)]
    with pytest.raises(TraceError, match=said):
        read_cycles(write(tmp_path / "a.json", *first, *cycle))


def test_on_an_h200_the_marks_of_the_trace_are_the_probes_to_ten_microseconds() -> None:
    probe = pq.read_table(GPU_TRACE.with_name("cycles.parquet")).to_pydict()
    cycles = read_cycles(GPU_TRACE)
    assert len(cycles) == 10
    for number, cycle in enumerate(cycles):
        assert cycle.marks is not None
        for name in ("draft", "verify", "extend"):
            start, end = getattr(cycle.marks, name)
            assert probe[f"{name}_ms"][number] == pytest.approx(end - start, abs=0.010)
        start, end = cycle.marks.forward
        assert probe["verify_forward_ms"][number] == pytest.approx(end - start, abs=0.010)
        assert cycle.marks.draft[0] < cycle.draft[0], "the GPU waited for its host before the first kernel"


def work(start: float, length: float, *, launched: float, number: int) -> list[dict[str, Any]]:
    return [
        event("cuda_runtime", "cudaLaunchKernel", launched, 1, correlation=number),
        event("kernel", "gemm", start, length, correlation=number, stream=7),
    ]


def test_a_mark_passes_after_what_was_launched_before_it_and_never_before_it_is_recorded(tmp_path: Path) -> None:
    """All recorded on the host within 100 us; the GPU is busy until 1000 and idle when the draft-extend is marked."""
    calls = [(name, at) for at, name in enumerate(("start", "draft", "verify", "forward", "end", "verified"), start=10)]
    host = [
        event("user_annotation", "step[EXTEND bs=1 toks=9]", 0, 5),
        event("user_annotation", "draft", 10.5, 1),
        event("user_annotation", "step[TARGET_VERIFY bs=1]", 13.5, 0.4),
        event("user_annotation", "draft_extend", 2000, 10),
    ]
    marks = [event("cuda_runtime", MARK_CALL, at, 0.0) for _, at in calls]
    marks += [event("cuda_runtime", MARK_CALL, at, 0.0) for at in (2001.0, 2009.0)]
    gpu = [
        span("step[EXTEND bs=1 toks=9]", 0, 20),
        span("draft", 100, 300),
        span("step[TARGET_VERIFY bs=1]", 400, 600),
        span("draft_extend", 2002, 3),
    ]
    ran = [
        *work(100, 300, launched=10.7, number=1),
        *work(400, 600, launched=13.6, number=2),
        *work(2002, 3, launched=2001.5, number=3),
    ]
    (cycle,) = read_cycles(write(tmp_path / "a.json", *host, *marks, *gpu, *ran))
    assert cycle.marks is not None
    assert cycle.marks.draft == (0.010, 0.4), "nothing ran when it started; it ends with its kernel"
    assert cycle.marks.forward == (0.4, 1.0)
    assert cycle.marks.extend == (2.001, 2.009), "the GPU had nothing to do: the host's own times"


def test_a_gpu_trace_without_calls_of_the_host_has_spans_alone() -> None:
    assert {cycle.marks for cycle in read_cycles(TRACE)} == {None}
