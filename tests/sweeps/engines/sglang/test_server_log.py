"""Real excerpts (0.5.16, 0.5.17, 0.5.21) and the messages of public reports."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.engines.sglang.diagnosis import diagnose
from sweeps.engines.sglang.server_arguments import resolved_arguments
from sweeps.engines.sglang.server_log import log_tail, stage_reached, startup_timings, state_failure
from tests.sweeps.engines.sglang.logs import CAPTURING, log, read


def test_startup_timings_of_three_versions() -> None:
    adaptive = startup_timings(read("0.5.17-eagle3-adaptive"))
    assert adaptive is not None
    assert adaptive.weight_load_s == pytest.approx(0.28)
    assert adaptive.capture_s == pytest.approx(108.73)
    assert adaptive.graphs_s["target_verify"] == 79.97
    plain = startup_timings(read("0.5.17-no-speculation"))
    assert plain is not None
    assert plain.capture_s == pytest.approx(66.42)
    older = startup_timings(read("0.5.16-standalone"))
    assert older is not None
    assert older.weight_load_s == pytest.approx(0.03)
    assert older.capture_s is None


def test_startup_timings_before_the_summary_come_from_the_capture_lines_of_one_rank() -> None:
    text = CAPTURING + log("Capture target verify CUDA graph end. elapsed=76.69 s, mem")
    text += log(
        "Load weight end. elapsed=9.0 s", "Capture target verify CUDA graph end. elapsed=80.0 s, mem", rank="TP1"
    )
    timings = startup_timings(text)
    assert timings is not None
    assert (timings.weight_load_s, timings.capture_s) == (0.27, 76.69)
    assert startup_timings(log("Load weight begin.")) is None


@pytest.mark.parametrize(
    ("last", "stage"),
    [
        ("server_args=", "load"),
        ("Init torch distributed begin", "nccl_init"),
        ("Load weight begin. avail mem=139", "load"),
        ("Load weight begin. avail mem=121", "draft_init"),
        ("Capture target verify CUDA graph begin", "capture"),
        ("Uvicorn running", "first_request"),
        ("fired up", "measure"),
    ],
)
def test_stage_of_a_log_that_ends_at(last: str, stage: str) -> None:
    text = read("0.5.17-eagle3-adaptive")
    end = text.index("\n", text.index(last))
    assert stage_reached(text[:end]) == stage


def test_a_milestone_behind_a_progress_bar_counts() -> None:
    bar = "  0%|  | 0/4 [00:00<?, ?it/s]"
    assert stage_reached(CAPTURING + bar + log("INFO:     Uvicorn running on http://127.0.0.1:1")) == "first_request"


def test_the_tail_has_no_progress_bars_and_access_lines() -> None:
    tail = log_tail(read("0.5.17-eagle3-adaptive"))
    assert "it/s]" not in tail
    assert "GET /" not in tail
    assert "fired up" in tail


PIECES = st.sampled_from(
    [
        "Load weight end. elapsed=1.2.3 s",
        "Capture graph begin",
        "Capture decode end. elapsed=. s",
        "Engine startup timings (s): cuda_graph={decode=1.2.3, x=4}",
        "crashed with exit code -99999999999999999999",
        "server_args=ServerArgs(a=[1, b=)",
        "server_args={'a: 1}",
        "Traceback (most recent call last):",
        "  File",
        "specsweep-state-failure {",
        "specsweep-state-failure [1]",
        "hit an exception: Traceback (most recent call last)",
    ]
)


@given(
    st.lists(st.one_of(PIECES, st.text(max_size=60)), max_size=12), st.sampled_from([None, 0, 1, 2, -9, 300, -70000])
)
def test_no_log_stops_a_diagnosis(pieces: list[str], returncode: int | None) -> None:
    text = "".join(log(piece) for piece in pieces)
    diagnose(text, returncode=returncode)
    startup_timings(text)
    resolved_arguments(text)
    state_failure(text)
