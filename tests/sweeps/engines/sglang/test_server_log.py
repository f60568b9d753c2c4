"""Real excerpts (0.5.16, 0.5.17, 0.5.21) and the messages of public reports."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.engines.base import TRANSIENT_KINDS
from sweeps.engines.sglang.server_log import (
    diagnose,
    log_tail,
    resolved_arguments,
    stage_reached,
    startup_timings,
    state_failure,
)

LOGS = Path(__file__).parents[3] / "assets" / "server_logs"


def read(name: str) -> str:
    return (LOGS / f"{name}.log").read_text(encoding="utf-8")


def log(*lines: str, rank: str = "TP0") -> str:
    return "\n".join(f"[2026-11-29 15:02:03 {rank}] {line}" for line in lines) + "\n"


def failing(exception: str, *, rank: str = "TP0", inner: str | None = None) -> str:
    frames = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n'
    chain = (
        f"{frames}{inner}\n\nThe above exception was the direct cause of the following exception:\n\n" if inner else ""
    )
    return f"[2026-11-29 15:02:06 {rank}] Scheduler hit an exception: {chain}{frames}{exception}\n\n"


STARTED = log(
    "Init torch distributed begin.", "Init torch distributed ends. elapsed=0.06 s", "Load weight begin. avail"
)
CAPTURING = STARTED + log(
    "Load weight end. elapsed=0.27 s, type=M", "Capture target verify CUDA graph begin. backend=full"
)


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


@pytest.mark.parametrize(
    ("name", "backend", "steps"),
    [
        ("0.5.16-standalone", "torch_native", "3"),
        ("0.5.17-eagle3-adaptive", "triton", "5"),
        ("0.5.21-eagle3", "torch_native", "3"),
    ],
)
def test_resolved_arguments_of_both_spellings(name: str, backend: str, steps: str) -> None:
    arguments = resolved_arguments(read(name))
    assert arguments["attention_backend"] == backend
    assert arguments["speculative_num_steps"] == steps
    assert arguments["speculative_draft_attention_backend"] in (None, "intel_amx")
    assert "bs=[1, 2" in str(arguments["cuda_graph_config"]) or "'bs': [1, 2" in str(arguments["cuda_graph_config"])
    assert "decode" not in arguments


def test_resolved_arguments_with_commas_brackets_and_quotes_inside() -> None:
    text = "[2026-11-29 14:55:02] server_args=ServerArgs(a='x, (y', b=F(c=[1, 2], d=<E.X: 1>), e=None, f='it\\'s')\n"
    assert resolved_arguments(text) == {"a": "x, (y", "b": "F(c=[1, 2], d=<E.X: 1>)", "e": None, "f": "it\\'s"}
    assert resolved_arguments("nothing here") == {}


def test_a_real_launch_failure() -> None:
    found = diagnose(read("0.5.17-no-processor"), returncode=1)
    assert (found.stage, found.kind) == ("load", "invalid_config")
    assert found.message.startswith("ValueError: Unrecognized processing class in")
    assert "launch_server" in found.tail


def test_a_real_peer_of_a_killed_rank() -> None:
    """TP1 was killed with SIGKILL and said nothing; TP0 reports a lost connection; the launcher kills itself."""
    found = diagnose(read("0.5.21-rank-killed"), returncode=-9)
    assert (found.stage, found.kind) == ("measure", "killed")
    assert found.message.startswith("TP0: RuntimeError: ")
    assert "Connection reset by peer" in found.message


@pytest.mark.parametrize(
    ("text", "returncode", "stage", "kind"),
    [
        (CAPTURING + failing("torch.OutOfMemoryError: CUDA out of memory. Tried"), 1, "capture", "gpu_oom"),
        (CAPTURING + failing("Exception: Capture cuda graph failed: CUDA out of memory"), -9, "capture", "gpu_oom"),
        (STARTED + failing("RuntimeError: Not enough memory. Please try to increase --mem"), 1, "load", "gpu_oom"),
        (STARTED + failing("RuntimeError: NCCL error: Failed to CUDA calloc 10485760 bytes"), 1, "load", "gpu_oom"),
        (STARTED + "Killed\n", -9, "load", "killed"),
        (STARTED + "Killed\n", 137, "load", "killed"),
        (STARTED + log("Subprocess scheduler_0 (pid=6) crashed with exit code -9. Triggering"), -9, "load", "killed"),
        (STARTED + log("Subprocess scheduler_0 (pid=6) crashed with exit code -11. Triggering"), -9, "load", "crash"),
        (
            "h:1:1 [0] NCCL WARN No algorithm/protocol available for function ReduceScatter\n"
            + STARTED
            + failing("RuntimeError: NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)"),
            1,
            "load",
            "nccl_no_algorithm",
        ),
        ("launch_server.py: error: unrecognized arguments: --no-such-flag\n", 2, "load", "invalid_config"),
        ("/usr/bin/python3: No module named sglang.launch_server\n", 1, "load", "engine_unavailable"),
        (failing("ValueError: trtllm_mha backend only supports topk = 1"), 1, "load", "invalid_config"),
        (failing("AssertionError"), 1, "load", "invalid_config"),
        (STARTED + failing("RuntimeError: selected index k out of range"), 1, "load", "invalid_config"),
        (STARTED + failing("RuntimeError: CUDA error: an illegal memory access"), 1, "load", "crash"),
        (log("Init torch distributed begin."), None, "nccl_init", "hang_nccl_init"),
        (CAPTURING, None, "capture", "hang"),
        (
            CAPTURING + log("The server is fired up and ready to roll!", "Scheduler watchdog timeout (self.watchdog_"),
            -9,
            "measure",
            "hang_in_verify",
        ),
        (STARTED, 1, "load", "crash"),
    ],
)
def test_kinds(text: str, returncode: int | None, stage: str, kind: str) -> None:
    found = diagnose(text, returncode=returncode)
    assert (found.stage, found.kind) == (stage, kind)
    assert "\n" not in found.message


def test_the_callers_stage_wins() -> None:
    text = CAPTURING + failing("ValueError: arange's range must be a power of 2")
    found = diagnose(text, returncode=1, stage="first_request")
    assert (found.stage, found.kind) == ("first_request", "invalid_config")
    assert diagnose(CAPTURING, returncode=None, stage="first_request").kind == "hang_in_verify"


def test_the_innermost_exception_of_the_first_rank_that_failed_by_itself() -> None:
    text = CAPTURING + failing("RuntimeError: [pair.cc] Connection closed by peer", rank="TP3")
    text += failing(
        "Exception: Capture cuda graph failed", rank="TP1", inner="ValueError: head_dim 72 is not supported"
    )
    text += failing("KeyError: 'late'", rank="TP2")
    found = diagnose(text, returncode=1)
    assert found.message == "TP1: ValueError: head_dim 72 is not supported"
    assert found.kind == "invalid_config"


def test_a_harmless_traceback_before_is_not_the_cause() -> None:
    harmless = "Traceback (most recent call last):\n  File 'x'\nModuleNotFoundError: No module named 'vllm'\n"
    found = diagnose(harmless + STARTED + failing("RuntimeError: CUDA error: device-side assert"), returncode=1)
    assert found.kind == "crash"


def test_a_traceback_that_is_not_fatal_does_not_explain_a_live_server() -> None:
    harmless = "Traceback (most recent call last):\n  File 'x'\nConnectionRefusedError: [Errno 111]\n"
    text = CAPTURING + harmless + log("The server is fired up and ready to roll!")
    assert diagnose(text, returncode=None).kind == "hang_in_verify"
    assert diagnose(text, returncode=1).message.startswith("ConnectionRefusedError")


def test_without_any_cause_the_message_tells_what_is_known() -> None:
    found = diagnose(CAPTURING, returncode=None)
    assert found.message.startswith("server did not answer in time in stage capture; last line: Capture target")
    assert "(none)" in diagnose("", returncode=3).message


def test_the_tail_has_no_progress_bars_and_access_lines() -> None:
    tail = log_tail(read("0.5.17-eagle3-adaptive"))
    assert "it/s]" not in tail
    assert "GET /" not in tail
    assert "fired up" in tail


def test_a_model_that_cannot_be_imported_is_not_why_a_rank_was_killed() -> None:
    text = (
        "[2026-11-29 17:53:12] Ignore import error when loading sglang.srt.models.other: No module named 'vllm'\n"
        "[2026-11-29 17:53:20] Subprocess scheduler_0 crashed with exit code -9. Triggering SIGQUIT for cleanup...\n"
    )

    assert diagnose(text, returncode=-9, stage="measure").kind == "killed"


def test_a_kill_is_for_memory_only_with_evidence() -> None:
    found = diagnose(STARTED, returncode=-9)
    assert found.kind == "killed"
    assert "ended with code -9 (SIGKILL)" in found.message
    assert diagnose(STARTED, returncode=-9, host_memory_ran_out=True).kind == "host_oom"
    assert diagnose(STARTED, returncode=-15, host_memory_ran_out=True).kind == "killed"
    assert diagnose(STARTED, returncode=-11).kind == "crash"
    assert "SIGSEGV" in diagnose(STARTED, returncode=-11).message


def test_what_nccl_wrote_to_its_own_file_tells_the_cause() -> None:
    text = STARTED + failing("RuntimeError: NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)")
    warning = "NCCL WARN No algorithm/protocol available for function AllReduce"
    found = diagnose(text, returncode=1, nccl_warnings=[warning])
    assert found.kind == "nccl_no_algorithm"
    assert warning in found.message


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


def test_a_port_that_another_took_is_named_and_worth_a_second_try() -> None:
    taken = (
        "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 28999): address already in use"
    )
    text = STARTED + log(taken, "INFO:     Waiting for application shutdown.", "kill_process_tree called: parent_pid=7")
    found = diagnose(text, returncode=3)
    assert "('127.0.0.1', 28999): address already in use" in found.message
    assert found.kind == "crash"
    assert "crash" in TRANSIENT_KINDS
