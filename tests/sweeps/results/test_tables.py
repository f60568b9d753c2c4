from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sweeps.results.tables import (
    SCHEMA_VERSION,
    TABLES,
    ResultsFolder,
    TableError,
    read_part,
    read_table,
    remove_part,
    write_part,
)

KEYS = {"sweep_id": "s1", "attempt": 1}


def event(trial_id: str, detail: str, attempt: int = 1) -> dict[str, object]:
    return {
        **KEYS,
        "trial_id": trial_id,
        "attempt": attempt,
        "at_s": 1.5,
        "event": "pruned",
        "detail": detail,
        "numbers": {},
    }


def write(folder: ResultsFolder, trial_id: str, detail: str, attempt: int = 1) -> Path:
    return write_part(folder, "events", [event(trial_id, detail, attempt)], trial_id=trial_id, attempt=attempt)


def details(folder: ResultsFolder) -> list[str]:
    return sorted(read_table(folder, "events")["detail"].to_pylist())


def test_a_repeated_attempt_replaces_its_part_and_no_other(weird_tmp_path: Path) -> None:
    folder = ResultsFolder(weird_tmp_path)
    for trial_id, detail, attempt in (("t0001", "a", 1), ("t0001", "b", 2), ("t0002", "c", 1), ("t0001", "d", 1)):
        write(folder, trial_id, detail, attempt)
    assert details(folder) == ["b", "c", "d"]


def test_ids_survive_as_text(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path)
    write(folder, "t0001", "007")
    (row,) = read_table(folder, "events").to_pylist()
    assert (row["trial_id"], row["detail"]) == ("t0001", "007")


def test_every_table_reads_back_empty_with_its_schema(tmp_path: Path) -> None:
    for name, schema in TABLES.items():
        assert read_table(ResultsFolder(tmp_path), name).schema.equals(schema)


def test_a_missing_value_stays_missing(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path)
    row = {name: value for name, value in event("t0001", "x").items() if name not in ("detail", "numbers")}
    write_part(folder, "events", [row], trial_id="t0001", attempt=1)
    assert read_table(folder, "events").select(["detail", "numbers"]).to_pylist() == [{"detail": None, "numbers": None}]


@pytest.mark.parametrize("broken", [{"at_s": "soon"}, {"sweep_id": None}, {"details": "typo"}])
def test_a_row_that_does_not_fit_is_refused_and_leaves_nothing(tmp_path: Path, broken: dict[str, object]) -> None:
    folder = ResultsFolder(tmp_path)
    with pytest.raises(TableError, match="events: a row does not fit"):
        write_part(folder, "events", [{**event("t0001", "x"), **broken}], trial_id="t0001", attempt=1)
    assert not list(tmp_path.rglob("*.*"))


def test_a_part_of_a_newer_version_asks_for_an_upgrade(tmp_path: Path) -> None:
    path = write(ResultsFolder(tmp_path), "t0001", "x")
    newer = {b"specsweep.schema_version": str(SCHEMA_VERSION + 1).encode()}
    pq.write_table(pq.read_table(path).replace_schema_metadata(newer), path)
    with pytest.raises(TableError, match="upgrade it"):
        read_table(ResultsFolder(tmp_path), "events")


def test_a_foreign_file_is_named(tmp_path: Path) -> None:
    path = ResultsFolder(tmp_path).part("events", "t0001", 1)
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(TableError, match=r"t0001-a1\.parquet"):
        read_table(ResultsFolder(tmp_path), "events")


def test_parts_are_removed_and_read_alone(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path)
    write(folder, "t0001", "x")
    write(folder, "t0002", "y")
    assert read_part(folder, "events", trial_id="t0002", attempt=1)["detail"].to_pylist() == ["y"]
    remove_part(folder, "events", trial_id="t0002", attempt=1)
    remove_part(folder, "events", trial_id="t0002", attempt=1)
    assert read_part(folder, "events", trial_id="t0002", attempt=1).num_rows == 0
    assert details(folder) == ["x"]


def test_a_folder_without_a_manifest_is_no_results_folder(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"no sweep\.json"):
        ResultsFolder(tmp_path).read_manifest()


def test_a_part_from_before_a_column_was_added_has_nulls_there(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path)
    path = folder.part("requests", "t0000", 1)
    path.parent.mkdir(parents=True)
    older = TABLES["requests"].remove(TABLES["requests"].get_field_index("head_hash"))
    metadata = {"specsweep.table": "requests", "specsweep.schema_version": str(SCHEMA_VERSION)}
    row = {
        "sweep_id": "s", "trial_id": "t0000", "attempt": 1, "block_index": 0, "prompt_id": "p", "prompt_tokens": 1,
        "output_tokens": 1, "ttft_ms": None, "latency_ms": 1.0, "output_hash": "h",
    }  # fmt: skip
    pq.write_table(pa.Table.from_pylist([row], schema=older.with_metadata(metadata)), path)
    newer = ("head_hash", "cached_tokens", "distinct_bigrams", "concurrency")
    assert read_table(folder, "requests").to_pylist() == [{**row, **dict.fromkeys(newer)}]
    pq.write_table(pa.Table.from_pylist([row], schema=older.with_metadata(metadata)).drop(["prompt_id"]), path)
    with pytest.raises(TableError, match="no column prompt_id"):
        read_table(folder, "requests")
