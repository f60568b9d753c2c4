from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks.pack_recording import main, pack
from sweeps.results.tables import TABLES, ResultsFolder, TableError, read_table, write_part


@pytest.fixture
def sweep(weird_tmp_path: Path) -> ResultsFolder:
    """Three parts of `events`, the first trial's in two attempts; no other table has rows."""
    folder = ResultsFolder(weird_tmp_path / "sweep")
    folder.root.mkdir()
    folder.manifest.write_text(json.dumps({"sweep_id": "s1", "engine": "simulated"}), encoding="utf-8")
    folder.spec.write_text("sweep: s\n# as written\n", encoding="utf-8")
    folder.study.write_text("{}\n", encoding="utf-8")
    for trial_id, attempt in (("t0001", 2), ("k0000", 1), ("t0001", 1)):
        rows = [
            {
                "sweep_id": "s1",
                "trial_id": trial_id,
                "attempt": attempt,
                "at_s": at_s,
                "event": "pruned",
                "numbers": {"p": 1 / 3},
            }
            for at_s in (2.1, 0.3)
        ]
        write_part(folder, "events", rows, trial_id=trial_id, attempt=attempt)
    return folder


def test_every_table_reads_as_before_from_one_part(sweep: ResultsFolder) -> None:
    packed = ResultsFolder(sweep.root.parent / "packed")
    pack(sweep.root, packed.root)

    assert [path.relative_to(packed.root).as_posix() for path in packed.root.rglob("*.parquet")] == [
        "tables/events/sweep.parquet"
    ]
    for table in TABLES:
        assert read_table(packed, table).equals(read_table(sweep, table), check_metadata=True)
    (part,) = {path.parent: path for path in sweep.root.rglob("*.parquet")}.values()
    assert pq.read_schema(packed.packed("events")).equals(pq.read_schema(part), check_metadata=True)


def test_what_belongs_to_the_sweep_is_copied_and_the_study_is_not(sweep: ResultsFolder) -> None:
    packed = ResultsFolder(sweep.root.parent / "packed")
    pack(sweep.root, packed.root)

    assert packed.spec.read_bytes() == sweep.spec.read_bytes()
    assert packed.manifest.read_bytes() == sweep.manifest.read_bytes()
    assert sorted(path.name for path in packed.root.iterdir()) == ["spec.yaml", "sweep.json", "tables"]


def test_a_sweep_with_a_trial_in_its_journal_is_not_packed(sweep: ResultsFolder) -> None:
    journal = sweep.journal("t0002", 1)
    journal.parent.mkdir()
    journal.write_text("{}\n", encoding="utf-8")

    with pytest.raises(TableError, match=r"t0002-a1\.jsonl; resume the sweep first"):
        pack(sweep.root, sweep.root.parent / "packed")
    assert not (sweep.root.parent / "packed").exists()


def test_an_existing_folder_is_left_alone(sweep: ResultsFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(sweep.root), str(sweep.root.parent)]) == 1
    assert "wanted a new folder, but it exists" in capsys.readouterr().err
    assert [path.name for path in sweep.root.parent.iterdir()] == ["sweep"]


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), str(tmp_path / "packed")]) == 1
    assert "no sweep.json" in capsys.readouterr().err
