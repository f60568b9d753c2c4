from __future__ import annotations

from pathlib import Path

import pytest

from analysis.__main__ import main
from sweeps.results.store import open_store

RECORDING = Path(__file__).parent.parent.parent.parent / "recordings" / "h200_kimi_mini_v1"


@pytest.fixture
def url(s3_url: str) -> str:
    store = open_store(s3_url)
    for path in RECORDING.rglob("*"):
        if path.is_file():
            store.send(path, path.relative_to(RECORDING).as_posix())
    return s3_url


def test_a_url_says_what_its_folder_says(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verdict", str(RECORDING), "--json"]) == 0
    of_the_folder = capsys.readouterr().out
    assert main(["verdict", url, "--json"]) == 0
    assert capsys.readouterr().out == of_the_folder


def test_the_page_of_a_url_lies_in_the_working_directory(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", url]) == 0
    assert capsys.readouterr().out.endswith("Report: report.html\n")
    assert "<html" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_url_and_a_folder_can_be_compared(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", url, str(RECORDING), "--fail-on", "worse"]) == 0
    assert "|" in capsys.readouterr().out


def test_a_url_without_results_is_refused_in_one_line(s3_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verdict", s3_url]) == 2
    said = capsys.readouterr().err
    assert "wanted the copy of a results folder, but it has no sweep.json" in said
    assert said.count("\n") == 1
