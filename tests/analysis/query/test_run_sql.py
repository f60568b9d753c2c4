"""SQL over a results folder: the questions answered, nothing else reached, damage named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from analysis.__main__ import main
from analysis.query.questions import QUESTIONS
from analysis.query.run_sql import QueryError, run_sql
from analysis.query.table_reference import reference
from tests.analysis.synthetic import FOUNDING_CONTROL, FOUNDING_EAGLE, QUIET, Run, write_sweep

ROOT = Path(__file__).parents[3]
RECORDING = ROOT / "recordings" / "h200_x2_nccl_v1"


@pytest.mark.parametrize(("question", "sql"), QUESTIONS, ids=[question for question, _ in QUESTIONS])
def test_every_question_has_an_answer_in_a_recorded_sweep(question: str, sql: str) -> None:
    rows, damaged = run_sql(RECORDING, sql)

    assert rows.height > 0, question
    assert not damaged


def test_the_fastest_configuration_is_that_of_the_blocks() -> None:
    rows, _ = run_sql(RECORDING, QUESTIONS[0][1])
    rates = rows["tok_s"].to_list()

    assert rates == sorted(rates, reverse=True)
    assert rows["blocks"].min() == 6


def test_the_document_is_what_the_schema_says() -> None:
    assert (ROOT / "docs" / "tables.md").read_text(encoding="utf-8") == reference()


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM glob('/etc/*')",
        "SELECT * FROM parquet_scan('/etc/passwd')",
        "COPY (SELECT 1) TO 'stolen.csv'",
        "EXPORT DATABASE 'stolen'",
        "ATTACH 'stolen.db'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "CREATE TABLE more AS SELECT 1",
        "DELETE FROM trials",
        "SELECT 1; SELECT 2",
        "SELECT 1; DROP TABLE trials",
        "SELECT * FROM frame",
        "CALL pragma_version()",
        "",
        "SELEC 1",
        "SELECT nothing FROM trials",
    ],
)
def test_nothing_but_one_select_over_the_tables(sql: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(QueryError) as refused:
        run_sql(RECORDING, sql)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_damaged_part_is_named_and_costs_its_own_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [Run(arm=FOUNDING_CONTROL, role="control"), Run(arm=FOUNDING_EAGLE)]
    folder = write_sweep(tmp_path / "sweep", runs, QUIET, sweep_id="s1")
    part = sorted((folder / "tables" / "trials").glob("*.parquet"))[-1]
    part.write_bytes(part.read_bytes()[:-9])

    assert main(["query", str(folder), "SELECT count(*) AS n FROM trials", "--format", "json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == [{"n": 1}]
    assert part.name in said.err
    assert main(["query", str(folder), "SELECT 1", "--strict"]) == 2


@pytest.mark.parametrize("form", ["table", "csv", "json", "md"])
def test_forms_hold_maps_nulls_and_foreign_text(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    sql = "SELECT nccl_env, reason, '\x1b[31m|red' AS odd, 0.5 AS half FROM trials WHERE nccl_set = 'simple' LIMIT 1"

    assert main(["query", str(RECORDING), sql, "--format", form]) == 0
    said = capsys.readouterr().out
    assert "NCCL_PROTO" in said
    assert "\x1b[31m" not in said or form == "csv"
    assert "0.5" in said


def test_a_folder_that_is_none_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(RECORDING / "tables", tmp_path / "tables")

    assert main(["query", str(tmp_path), "SELECT 1"]) == 2
    assert "sweep.json" in capsys.readouterr().err
