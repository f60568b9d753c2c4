from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sweeps.engines.sglang import log_follower
from sweeps.engines.sglang.log_follower import LogFollower
from sweeps.engines.sglang.server_log import stage_reached

LINES = [
    "[2026-11-29 17:53:12 TP0] Init torch distributed begin.",
    "[2026-11-29 17:53:12 TP0] Load weight begin. avail mem=139.11 GB",
    "[2026-11-29 17:53:12 TP0] Load weight end. elapsed=0.01 s",
    "[2026-11-29 17:53:12 TP0] Capture target verify CUDA graph begin.",
    "noise \u00e9",
    "[2026-11-29 17:53:12] INFO:     Uvicorn running on http://127.0.0.1:1",
]


def test_a_log_that_does_not_exist_yet_is_empty(tmp_path: Path) -> None:
    follower = LogFollower(tmp_path / "none.log")
    assert not follower.read()
    assert (follower.text(), follower.stage) == ("", "load")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(LINES), max_size=12), st.lists(st.integers(1, 40), max_size=30))
def test_pieces_tell_what_the_whole_log_tells(tmp_path: Path, lines: list[str], cuts: list[int]) -> None:
    content = "".join(f"{line}\n" for line in lines).encode()
    path = tmp_path / "server.log"
    path.write_bytes(b"")
    follower = LogFollower(path)
    for cut in cuts:
        with path.open("ab") as log:
            piece, content = content[:cut], content[cut:]
            log.write(piece)
        assert follower.read() == bool(piece)
    with path.open("ab") as log:
        log.write(content)
    text = path.read_text(encoding="utf-8")
    assert follower.text() == text
    assert follower.stage == stage_reached(text)
    assert follower.bytes_read == path.stat().st_size


def test_each_byte_is_read_once_and_a_huge_log_keeps_its_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_follower, "_KEPT_BYTES", 100)
    path = tmp_path / "server.log"
    path.write_text("first line\n" + "middle\n" * 1000 + "last line\n", encoding="utf-8")
    follower = LogFollower(path)
    text = follower.text()
    assert follower.bytes_read == path.stat().st_size
    assert text == follower.text()
    assert follower.bytes_read == path.stat().st_size
    assert text.startswith("first line")
    assert text.endswith("last line\n")
