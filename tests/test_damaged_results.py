"""Any file of a results folder, damaged anywhere: no traceback, nothing believed, the rest is read, the sweep ends."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from analysis.data.load import load
from analysis.judge.verdict import verdict
from ray_jobs.results import open_results
from ray_jobs.run_sweep import open_sweep
from sweeps import SpecsweepError
from sweeps.command_end import end
from sweeps.measure.held_engine import HeldEngine
from sweeps.measure.trial import Measurement
from sweeps.measure.trial_context import TrialContext
from sweeps.results.tables import TABLES, ResultsFolder, TableError, read_parts, read_table
from sweeps.search.study import SweepStudy
from sweeps.spec.reading import parse_spec
from sweeps.spec.space import Space
from sweeps.spec.workload import plan_blocks
from tests.sweeps.stub_engine import SPEC as TEXT
from tests.sweeps.stub_engine import StubEngine, drive

optuna.logging.set_verbosity(optuna.logging.WARNING)

SPEC = parse_spec(TEXT, source="stub.yaml")
SPACE = Space(SPEC)
FEW = settings(
    max_examples=15,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def context(root: Path, sweep_id: str) -> TrialContext:
    return TrialContext(
        sweep_id=sweep_id, folder=ResultsFolder(root), blocks=plan_blocks(SPEC.workload, folder=root), num_gpus=8
    )


def resume(root: Path, *, limit: int = 200) -> SweepStudy:
    """What `specsweep run` does over an existing folder, on the stub's clock and without Ray."""
    opened = open_results(root, SPEC, TEXT)
    try:
        study = open_sweep(SPEC, SPACE, opened, num_blocks=SPEC.workload.blocks)
        drive(study, HeldEngine(StubEngine()), context(root, opened.sweep_id), limit=limit)
        return study
    finally:
        opened.release()


@pytest.fixture(scope="module", autouse=True)
def _unsynced() -> Iterator[None]:
    """Syncing is most of what these sweeps take, and no machine goes down in them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep whose driver was killed in its fifth trial, which has a journal of two blocks."""
    root = tmp_path_factory.mktemp("sweep") / "results"
    opened = open_results(root, SPEC, TEXT)
    study = open_sweep(SPEC, SPACE, opened, num_blocks=SPEC.workload.blocks)
    held, where = HeldEngine(StubEngine()), context(root, opened.sweep_id)
    for _ in range(4):
        trial = study.ask()
        assert trial is not None
        measurement = Measurement(held, trial, where)
        for _ in range(SPEC.workload.blocks):
            study.report(trial, measurement.advance(), seconds=measurement.seconds)  # type: ignore[arg-type]
        study.tell(trial, measurement.advance())  # type: ignore[arg-type]
    running = study.ask()
    assert running is not None
    measurement = Measurement(held, running, where)
    for _ in range(2):
        measurement.advance()
    (root / "study.journal.lock").symlink_to(root / "study.journal")
    opened.release()
    return root


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())


def flip(content: bytes, place: float, value: int) -> bytes:
    where = min(int(place * len(content)), len(content) - 1)
    return content[:where] + bytes([content[where] ^ value]) + content[where + 1 :]


def cut(content: bytes, place: float, value: int) -> bytes:
    return content[: int(place * len(content))]


def zero(content: bytes, place: float, value: int) -> bytes:
    where = int(place * len(content))
    return content[:where] + b"\0" * len(content[where : where + 64]) + content[where + 64 :]


def repeat(content: bytes, place: float, value: int) -> bytes:
    where = int(place * len(content))
    return content[:where] + content[max(0, where - 40) :]


@FEW
@given(
    number=st.integers(0, 10_000),
    place=st.floats(0, 1, exclude_max=True),
    value=st.integers(1, 255),
    damage=st.sampled_from([flip, cut, zero, repeat]),
)
def test_any_file_damaged_anywhere(
    swept: Path,
    tmp_path_factory: pytest.TempPathFactory,
    number: int,
    place: float,
    value: int,
    damage: Callable[[bytes, float, int], bytes],
) -> None:
    root = tmp_path_factory.mktemp("damaged") / "results"
    shutil.copytree(swept, root, symlinks=True)
    every = files(root)
    path = every[number % len(every)]
    name = path.relative_to(root).as_posix()
    path.write_bytes(damage(path.read_bytes(), place, value) if path.stat().st_size else b"\0")

    if path.parent.parent.name == "tables":
        assert_named(swept, root, name)
    judge(root)
    if path.name == "sweep.json":
        assert "\n" not in (refusal(lambda: resume(root)) or "")
        return
    resume(root)
    seen = load(root)
    done = set(seen.trials.filter(status="completed")["configuration_id"])
    assert done == {each.configuration_id for each in SPACE.configurations()}
    ids = seen.all_trials.select("trial_id", "attempt").rows()
    assert len(ids) == len(set(ids))


def assert_named(swept: Path, root: Path, name: str) -> None:
    """The damaged part is named, or it holds what it held."""
    table = name.split("/")[1]
    found = read_parts(ResultsFolder(root), table)
    named = any(damage.file == name for damage in found.damaged)
    assert named or found.rows.equals(read_table(ResultsFolder(swept), table))
    if named and table != "trials":
        try:
            listed = [each.reason for each in load(root).excluded if each.kind == "damaged"]
        except TableError:
            raise AssertionError("one damaged part hides the folder") from None
        assert any(name in reason for reason in listed)
        with pytest.raises(TableError, match="--strict"):
            load(root, strict=True)


def judge(root: Path) -> None:
    """The analysis says something, or says in one line why it cannot."""
    assert "\n" not in (refusal(lambda: verdict(load(root))) or "")


def refusal(call: Callable[[], object]) -> str | None:
    """What a user is told if a call is refused."""
    try:
        call()
    except SpecsweepError as error:
        return str(error)
    return None


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """As somebody's script would: valid Parquet, no checksum."""
    table = pq.read_table(path)
    pq.write_table(change(table).replace_schema_metadata(table.schema.metadata), path)


def column_as(name: str, kind: pa.DataType) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.set_column(table.column_names.index(name), name, table[name].cast(kind))


@pytest.mark.parametrize(
    ("change", "said", "is_lost"),
    [
        (column_as("tok_s", pa.string()), "column tok_s: is string, wanted double", True),
        (lambda table: table.drop(["wall_s"]), "has no column wall_s", True),
        (lambda table: table.slice(0, 0), "holds no rows", True),
        (lambda table: table.slice(0, 2), "has 2 of the 6 blocks", False),
        (lambda table: pa.concat_tables([table, table]), "6 rows are there twice", False),
        (lambda table: table.append_column("mine", table["tok_s"]), "column mine: is not a column", False),
    ],
)
def test_a_part_that_a_script_changed_is_named_with_its_column(
    swept: Path, tmp_path: Path, change: Callable[[pa.Table], pa.Table], said: str, *, is_lost: bool
) -> None:
    root = tmp_path / "results"
    shutil.copytree(swept, root, symlinks=True)
    rewrite(root / "tables/blocks/t0004-a1.parquet", change)
    results = load(root)
    (excluded,) = [each for each in results.excluded if said in each.reason]
    assert (excluded.what, excluded.kind, excluded.trial_id) == ("file", "damaged", "t0004")
    assert "tables/blocks/t0004-a1.parquet" in excluded.reason
    assert ("t0004" in results.trials["trial_id"]) is not is_lost
    assert {"k0000", "t0003", "t0005"} <= set(results.trials["trial_id"])


@pytest.mark.parametrize("copied", ["t0004-a1 (copy).parquet", "t0099-a1.parquet", "t0004-a2.parquet", "sweep.parquet"])
@pytest.mark.parametrize("table", ["trials", "blocks"])
def test_a_copied_part_counts_once(swept: Path, tmp_path: Path, copied: str, table: str) -> None:
    root = tmp_path / "results"
    shutil.copytree(swept, root, symlinks=True)
    part = root / "tables" / table / "t0004-a1.parquet"
    shutil.copy(part, part.with_name(copied))
    results = load(root)
    assert results.trials.equals(load(swept).trials)
    assert results.blocks.equals(load(swept).blocks)
    assert any(copied in each.reason for each in results.excluded)


def test_a_part_of_another_sweep_is_left_out(swept: Path, tmp_path: Path) -> None:
    root = tmp_path / "results"
    shutil.copytree(swept, root, symlinks=True)
    path = root / "tables/blocks/t0004-a1.parquet"
    rewrite(path, lambda table: table.set_column(0, "sweep_id", pa.array(["other"] * len(table))))
    (excluded,) = [each for each in load(root).excluded if each.what == "file" and "another sweep" in each.reason]
    assert "other" in excluded.reason


def test_rows_of_a_trial_that_is_not_there_are_named(swept: Path, tmp_path: Path) -> None:
    root = tmp_path / "results"
    shutil.copytree(swept, root, symlinks=True)
    (root / "tables/trials/t0004-a1.parquet").unlink()
    reasons = [each.reason for each in load(root).excluded]
    assert any("has rows of t0004" in reason and "blocks" in reason for reason in reasons)


def test_every_table_of_the_folder_was_in_the_test(swept: Path) -> None:
    there = {path.parent.name for path in files(swept)}
    assert {"trials", "blocks", "requests", "cycles", "kernels", "journal"} <= there
    assert there - {"journal", "results"} <= set(TABLES)


class _Full:
    """`os.fsync` of a disk that takes a number of files more."""

    def __init__(self, more: int) -> None:
        self.more = more

    def __call__(self, descriptor: int) -> None:
        self.more -= 1
        if self.more < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("more", [*range(12), *range(12, 150, 9)])
def test_a_disk_that_is_full_at_any_place_is_one_line_and_the_same_command_goes_on(
    more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Manifest, spec, study, journals and parts: each is synced, and each sync may be the one that fails."""
    root = tmp_path / "results"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _Full(more))
        code = end(lambda: 0 if resume(root) else 1)
    said = capsys.readouterr().err
    assert code == 2
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert "No space left on device" in said
    assert str(root) in said, "the file is named"
    before = {path: path.read_bytes() for path in root.rglob("*.parquet")}
    resume(root)
    assert {path: path.read_bytes() for path in before} == before
    results = load(root)
    assert not [each for each in results.excluded if each.kind == "damaged"]
    done = set(results.trials.filter(status="completed")["configuration_id"])
    assert done == {each.configuration_id for each in SPACE.configurations()}
    assert not list(root.rglob("*.tmp"))
