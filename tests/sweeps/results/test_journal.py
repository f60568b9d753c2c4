from __future__ import annotations

from pathlib import Path

import pytest

from sweeps.measure.held_engine import HeldEngine
from sweeps.measure.recovery import recover
from sweeps.measure.trial import Measurement
from sweeps.results.journal import read_journal
from sweeps.results.tables import ResultsFolder, read_table
from sweeps.spec.space import Space
from tests.sweeps.stub_engine import StubEngine, plan, stub_context, stub_spec


def measured(folder: Path, *, num_blocks: int) -> Path:
    """A trial that was left after so many blocks, as a killed process leaves it. Returns its journal."""
    spec = stub_spec()
    space = Space(spec)
    measurement = Measurement(HeldEngine(StubEngine()), plan(space.control, space), stub_context(spec, folder))
    for _ in range(num_blocks):
        measurement.advance()
    return ResultsFolder(folder).journal("t0000", 1)


def test_a_killed_trial_keeps_every_finished_block(weird_tmp_path: Path) -> None:
    measured(weird_tmp_path, num_blocks=3)
    folder = ResultsFolder(weird_tmp_path)
    assert read_table(folder, "trials").num_rows == 0
    assert recover(folder, num_blocks=6) == ("t0000",)
    (trial,) = read_table(folder, "trials").to_pylist()
    assert (trial["status"], trial["kind"], trial["num_blocks"]) == ("failed", "interrupted", 3)
    assert trial["measure_s"] == pytest.approx(15.0)
    assert read_table(folder, "blocks")["block_index"].to_pylist() == [0, 1, 2]
    assert read_table(folder, "requests").num_rows == 3
    assert read_table(folder, "cycles").num_rows == 300
    assert recover(folder, num_blocks=6) == ()


def test_a_trial_killed_after_its_last_block_is_completed(tmp_path: Path) -> None:
    measured(tmp_path, num_blocks=6)
    recover(ResultsFolder(tmp_path), num_blocks=6)
    assert read_table(ResultsFolder(tmp_path), "trials")["status"].to_pylist() == ["completed"]


@pytest.mark.parametrize("lost_bytes", [1, 2, 40, 400])
def test_a_torn_last_line_costs_its_block_only(tmp_path: Path, lost_bytes: int) -> None:
    journal = measured(tmp_path, num_blocks=2)
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-lost_bytes])
    rows = read_journal(journal).rows
    assert rows is not None
    # Only the line's end is missing: the record itself is whole.
    assert len(rows.blocks) == (2 if lost_bytes == 1 else 1)


@pytest.mark.parametrize("damage", ["cut", "no JSON", "a list", "one digit"])
def test_a_damaged_line_costs_what_it_held_and_the_journal_is_kept(tmp_path: Path, damage: str) -> None:
    journal = measured(tmp_path, num_blocks=3)
    lines = journal.read_bytes().split(b"\n")
    (second,) = [number for number, line in enumerate(lines) if b'"block_index": 1' in line]
    lines[second] = {
        "cut": lines[second][:50],
        "no JSON": b"{" + lines[second],
        "a list": b"[1, 2]",
        "one digit": lines[second].replace(b'"wall_s": 5.0', b'"wall_s": 6.0'),
    }[damage]
    journal.write_bytes(b"\n".join(lines))

    assert read_journal(journal).damaged_lines == (second + 1,)
    folder = ResultsFolder(tmp_path)
    assert recover(folder, num_blocks=6) == ("t0000",)
    assert read_table(folder, "blocks")["block_index"].to_pylist() == [0, 2]
    assert read_table(folder, "trials")["kind"].to_pylist() == ["interrupted"]
    assert read_table(folder, "events")["detail"].to_pylist() == [f"lines {second + 1}"]
    assert [path.name for path in journal.parent.iterdir()] == ["t0000-a1.jsonl.damaged"]
    assert recover(folder, num_blocks=6) == ()


def test_a_journal_whose_beginning_is_lost_is_no_trial(tmp_path: Path) -> None:
    journal = measured(tmp_path, num_blocks=1)
    journal.write_bytes(b"\0" * journal.stat().st_size + b"\n")
    assert recover(ResultsFolder(tmp_path), num_blocks=6) == ()
    assert "t0000" in ResultsFolder(tmp_path).names_in_use()


def test_an_empty_journal_is_no_trial(tmp_path: Path) -> None:
    path = tmp_path / "t0000-a1.jsonl"
    path.write_bytes(b"")
    assert read_journal(path).rows is None
