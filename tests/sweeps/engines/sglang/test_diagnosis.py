"""Real excerpts (0.5.16, 0.5.17, 0.5.21) and the messages of public reports."""

import pytest

from sweeps.engines.base import TRANSIENT_KINDS
from sweeps.engines.sglang.diagnosis import diagnose
from tests.sweeps.engines.sglang.logs import CAPTURING, STARTED, failing, log, read


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


def test_a_port_that_another_took_is_named_and_worth_a_second_try() -> None:
    taken = (
        "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 28999): address already in use"
    )
    text = STARTED + log(taken, "INFO:     Waiting for application shutdown.", "kill_process_tree called: parent_pid=7")
    found = diagnose(text, returncode=3)
    assert "('127.0.0.1', 28999): address already in use" in found.message
    assert found.kind == "crash"
    assert "crash" in TRANSIENT_KINDS
