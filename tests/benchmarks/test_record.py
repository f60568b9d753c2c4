from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
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


def test_of_two_installations_the_one_that_is_imported_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "numpy-0.0.1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.0.1\n")
    monkeypatch.setattr(records, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])

    content = json.loads(records.record("speed", {}).read_text())

    assert content["versions"]["numpy"] == np.__version__
