"""A study whose file was damaged, lost or copied back from yesterday: its sweep goes on from the tables."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState

from sweeps.measure.held_engine import HeldEngine
from sweeps.results.tables import ResultsFolder, read_table
from sweeps.search.resume import Earlier, read_earlier
from sweeps.search.study import SweepStudy
from sweeps.search.study_journal import open_journal, open_study
from sweeps.spec.space import Space
from tests.sweeps.stub_engine import StubEngine, drive, stub_context, stub_spec

optuna.logging.set_verbosity(optuna.logging.WARNING)

SPEC = stub_spec("study: {sampler: {name: random}}\n")
SPACE = Space(SPEC)
NUM_TRIALS = 5


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that a driver left after five trials; `older.journal` is its study two trials earlier."""
    root = tmp_path_factory.mktemp("swept")
    held, context = HeldEngine(StubEngine()), stub_context(SPEC, root)
    study = SweepStudy(SPEC, SPACE, storage=open_journal(ResultsFolder(root).study))
    drive(study, held, context, limit=NUM_TRIALS - 2)
    shutil.copy(root / "study.journal", root / "older.journal")
    rest = SweepStudy(
        SPEC,
        SPACE,
        storage=open_journal(ResultsFolder(root).study),
        observations=read_earlier(ResultsFolder(root), SPACE).observations,
    )
    drive(rest, held, context, limit=2)
    return root


def reopen(root: Path) -> tuple[SweepStudy, Earlier, str | None]:
    folder = ResultsFolder(root)
    earlier = read_earlier(folder, SPACE)
    storage, rebuilt = open_study(folder.study, SPEC, SPACE, earlier)
    return SweepStudy(SPEC, SPACE, storage=storage, observations=earlier.observations), earlier, rebuilt


def parts(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in (root / "tables").rglob("*.parquet")}


def finish(root: Path, study: SweepStudy) -> None:
    """Run the sweep to its end; nothing that was there is touched, and every configuration ends up measured."""
    before = parts(root)
    drive(study, HeldEngine(StubEngine()), stub_context(SPEC, root))
    after = parts(root)
    assert {name: after[name] for name in before} == before
    rows = read_table(ResultsFolder(root), "trials").to_pylist()
    done = {row["configuration_id"] for row in rows if row["status"] == "completed"}
    assert done == {each.configuration_id for each in SPACE.configurations()}
    assert len({row["trial_id"] for row in rows}) == len(rows)


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def lose(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def go_back(path: Path) -> None:
    shutil.copy(path.with_name("older.journal"), path)


def change_a_value(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    (last,) = [number for number, line in enumerate(lines) if '"values":[' in line][-1:]
    lines[last] = lines[last].replace('"values":[', '"values":[1')
    path.write_text("".join(lines))


def take_another(path: Path) -> None:
    """The whole and valid study of another sweep."""
    path.unlink()
    study = optuna.create_study(storage=open_journal(path), study_name="another", direction="maximize")
    study.ask()


@pytest.mark.parametrize("damage", [tear, halve, lose, empty, go_back, change_a_value, take_another])
def test_a_damaged_study_is_rebuilt_and_its_sweep_goes_on(
    damage: Callable[[Path], None], swept: Path, tmp_path: Path
) -> None:
    root = tmp_path / "copy"
    shutil.copytree(swept, root)
    damage(root / "study.journal")
    broken = (root / "study.journal").read_bytes() if damage is not lose else None

    study, earlier, rebuilt = reopen(root)

    assert rebuilt is not None
    assert "rebuilt from the tables" in rebuilt
    kept = [path.read_bytes() for path in root.glob("study.journal.broken-*")]
    assert kept == ([] if broken is None else [broken])
    told = {frozen.user_attrs.get("trial_id"): frozen for frozen in study.study.trials}
    for seen in earlier.observations:
        if seen.trial.role == "candidate":
            assert told[seen.trial.trial_id].value == pytest.approx(seen.mean("tok_s"))
            assert told[seen.trial.trial_id].number == seen.trial.number
    assert reopen(root)[2] is None, "a rebuilt study agrees with the tables"
    finish(root, study)


def test_a_whole_study_is_left_alone(swept: Path) -> None:
    before = (swept / "study.journal").read_bytes()
    earlier = read_earlier(ResultsFolder(swept), SPACE)
    assert open_study(swept / "study.journal", SPEC, SPACE, earlier)[1] is None
    assert (swept / "study.journal").read_bytes() == before


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_no_flipped_byte_of_the_study_is_believed(
    swept: Path, tmp_path_factory: pytest.TempPathFactory, place: float, flip: int
) -> None:
    root = tmp_path_factory.mktemp("flipped") / "copy"
    shutil.copytree(swept, root)
    content = bytearray((root / "study.journal").read_bytes())
    content[int(place * len(content))] ^= flip
    (root / "study.journal").write_bytes(bytes(content))

    study, earlier, _ = reopen(root)

    for seen in earlier.observations:
        if seen.trial.number is not None:
            frozen = study.study.trials[seen.trial.number]
            assert (frozen.state, frozen.value) == (TrialState.COMPLETE, seen.mean("tok_s"))
            assert SPACE.resolve({**seen.trial.requested, **frozen.params}) == seen.trial.configuration
    assert len(study.study.trials) > max(int(name[1:]) for name in earlier.names_in_use if name.startswith("t"))


@pytest.mark.parametrize("table", ["trials", "blocks"])
def test_a_trial_whose_part_is_damaged_is_measured_again_under_another_name(
    table: str, swept: Path, tmp_path: Path
) -> None:
    root = tmp_path / "copy"
    shutil.copytree(swept, root)
    lost = sorted((root / "tables" / table).glob("t*.parquet"))[-1]
    lost.write_bytes(lost.read_bytes()[:100])

    study, earlier, rebuilt = reopen(root)

    assert lost.name in " ".join(map(str, earlier.damaged))
    assert rebuilt is not None
    drive(study, HeldEngine(StubEngine()), stub_context(SPEC, root))
    assert lost.stat().st_size == 100, "a damaged part is evidence, and stays"
    seen = read_earlier(ResultsFolder(root), SPACE).observations
    done = {each.trial.configuration for each in seen if each.status == "completed"}
    assert done == set(SPACE.configurations())


def test_names_of_lost_trials_are_not_given_again(swept: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(swept, root)
    last = sorted((root / "tables" / "trials").glob("t*.parquet"))[-1].stem
    for path in (root / "tables").glob(f"*/{last}.parquet"):
        path.unlink()
    (root / "study.journal").unlink()
    (root / "logs" / last).mkdir(parents=True)
    (root / "tables" / "trials" / "k0000-a1.parquet").write_bytes(b"")

    study, _, _ = reopen(root)
    ran = drive(study, HeldEngine(StubEngine()), stub_context(SPEC, root))

    names = {trial.trial_id for trial in ran}
    assert names.isdisjoint({last.removesuffix("-a1"), "k0000"})
    assert "k0001" in names


def test_the_lock_of_a_dead_driver_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "study.journal"
    (tmp_path / "study.journal.lock").symlink_to(path)
    open_journal(path)
    assert not (tmp_path / "study.journal.lock").is_symlink()
