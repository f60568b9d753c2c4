from __future__ import annotations

from pathlib import Path

import pytest

from analysis.server_log import ServerLogError, read_server_log, summarise_log

PREFILL = "[2026-01-01 10:00:00] Prefill batch, #new-seq: 1, #new-token: 128"


def decode(tok_s: float, *, accept: str = "accept len: 1.80, accept rate: 0.40, ", running: int = 1) -> str:
    return (
        f"[2026-01-01 10:00:01 TP0] Decode batch, #running-req: {running}, #token: 36, token usage: 0.01, {accept}"
        f"cuda graph: True, gen throughput (token/s): {tok_s}, #queue-req: 0"
    )


def test_the_window_after_a_prefill_is_left_out() -> None:
    found = summarise_log([PREFILL, decode(0.73), decode(60.0), decode(61.0), PREFILL, decode(12.0), decode(62.0)])
    assert (found.tok_s, found.num_windows, found.after_prefill) == (61.0, 3, 2)
    assert found.accept_length == pytest.approx(1.80)
    assert found.graph_share == 1.0


@pytest.mark.parametrize(
    "line",
    [
        "[2024-12-01 10:00:00] Decode batch. #running-req: 1, #token: 36, gen throughput (token/s): 60.0",
        "[2026-01-01 10:00:00 DP0 TP0] Decode batch, #running-req: 1, #full token: 36, full token usage: 0.0, "
        "pre-allocated usage: 0.0, cpu graph: False, gen throughput (token/s): 60.0",
    ],
)
def test_lines_of_other_versions_are_understood(line: str) -> None:
    found = summarise_log([decode(1.0), line])
    assert found.tok_s == 60.0
    assert found.accept_length is None


def test_zero_is_not_known_and_below_one_is_impossible() -> None:
    found = summarise_log(
        [decode(9.0), decode(60.0, accept="accept len: 0.0, "), decode(61.0, accept="accept len: 0.58, "), decode(4e-5)]
    )
    assert (found.num_windows, found.impossible, found.accept_length) == (1, 2, None)


def test_accept_length_is_weighted_by_running_requests() -> None:
    lines = [decode(9.0), decode(60.0, accept="accept len: 1.0, "), decode(60.0, accept="accept len: 3.0, ", running=3)]
    assert summarise_log(lines).accept_length == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["INFO: Uvicorn running"], "no `Decode batch` line"),
        ([PREFILL, decode(9.0)], "none of 1 decode windows"),
        ([decode(9.0), "Decode batch, throughput 60 somewhere"], "1 of 2 decode lines"),
    ],
)
def test_a_log_that_says_nothing_is_an_error_not_a_zero(tmp_path: Path, lines: list[str], words: str) -> None:
    path = tmp_path / "server.log"
    path.write_text("\n".join(lines))
    with pytest.raises(ServerLogError, match=words):
        read_server_log(path)
    with pytest.raises(ServerLogError, match="nowhere"):
        read_server_log(tmp_path / "nowhere")
