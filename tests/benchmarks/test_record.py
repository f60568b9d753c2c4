from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import record as records


def test_a_record_says_where_and_when_it_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RESULTS", tmp_path / "results")
    records.record("speed", {"x_s": 2.0})
    path = records.record("speed", {"x_s": 1.0})
    content = json.loads(path.read_text())
    assert path == tmp_path / "results" / "speed.json"
    assert content["figures"] == {"x_s": 1.0}
    assert {"date", "machine", "versions"} <= set(content)
    assert content["machine"]["cores"] >= 1
