"""The API that `import analysis` gives, and the page that shows it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import polars as pl
import pytest

import analysis
from sweeps.results.tables import TABLES
from tests.analysis.synthetic import FOUNDING_EAGLE, World, interleaved, write_sweep

PAGE = Path(__file__).parents[2] / "docs" / "notebook.md"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sweep(tmp_path_factory.mktemp("sweep") / "r", interleaved([FOUNDING_EAGLE]), World())


def test_every_exported_name_is_there_and_is_no_module() -> None:
    assert analysis.__all__ == sorted(analysis.__all__)
    assert not [name for name in analysis.__all__ if inspect.ismodule(getattr(analysis, name))]


def test_a_folder_may_be_text(root: Path) -> None:
    assert analysis.load(str(root)).sweep_id == analysis.load(root).sweep_id
    assert analysis.verdict(str(root)) == analysis.verdict(analysis.load(root))


def test_one_row_per_configuration_fastest_first(root: Path) -> None:
    judged = analysis.verdict(root)
    table = analysis.configurations(judged)
    assert table["label"].to_list() == [side.label for side in judged.sides]
    assert set(table["role"]) == {"control", "candidate"}
    control, candidate = (table.filter(pl.col("role") == role) for role in ("control", "candidate"))
    assert control["verdict"].to_list() == [None]
    assert candidate["verdict"].to_list() == ["worse"]
    assert candidate["effect_low"][0] < candidate["effect"][0] < candidate["effect_high"][0] < 0
    documented = set(re.findall(r"`(\w+)`", analysis.configurations.__doc__ or ""))
    assert set(table.columns) == documented


def test_frames_are_the_tables_as_recorded(root: Path) -> None:
    frames = analysis.frames(root)
    assert set(frames) == set(TABLES)
    assert all(frames[name].columns == TABLES[name].names for name in frames)
    assert frames["blocks"].height >= analysis.load(root).blocks.height > 0


def test_the_page_is_written_where_it_was_asked_for(root: Path, tmp_path: Path) -> None:
    out = analysis.report(root, str(tmp_path / "page.html"))
    assert out.read_text(encoding="utf-8").startswith("<!")


@pytest.mark.parametrize("ask", [analysis.load, analysis.verdict, analysis.frames])
def test_what_is_no_results_folder_is_one_known_error(ask: object, tmp_path: Path) -> None:
    assert callable(ask)
    with pytest.raises(analysis.SpecsweepError, match="wanted a results folder"):
        ask(str(tmp_path / "none"))


def test_the_documented_lines_work(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "founding-case").symlink_to(root)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(PAGE), "exec"), {})
    assert (tmp_path / "founding-case.html").is_file()
