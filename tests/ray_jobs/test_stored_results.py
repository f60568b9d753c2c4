from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ray_jobs import store_lock, stored_results
from ray_jobs.results import OpenedResults, open_results
from ray_jobs.stored_results import NOT_UPLOADED, StoredResults, working_folder
from sweeps.measure.held_engine import HeldEngine
from sweeps.results.store import StoreError, open_store
from sweeps.results.tables import read_table
from sweeps.search.study import SweepStudy
from sweeps.search.study_journal import open_journal
from sweeps.spec.document import SpecError
from sweeps.spec.space import Space
from tests.s3_server import S3Server
from tests.sweeps.stub_engine import SPEC, StubEngine, drive, stub_context, stub_spec


@pytest.fixture(autouse=True)
def _no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_lock.StoreLock.take, "__kwdefaults__", {"settle_s": 0.0})


def sweep(stored: StoredResults, *, limit: int = 3) -> OpenedResults:
    """Measure some trials in the working folder, as a driver would."""
    spec = stub_spec()
    opened = open_results(stored.root, spec, SPEC)
    stored.begin()
    study = SweepStudy(spec, Space(spec), storage=open_journal(opened.folder.study))
    context = replace(stub_context(spec, stored.root), sweep_id=opened.sweep_id)
    drive(study, HeldEngine(StubEngine()), context, limit=limit)
    opened.release()
    return opened


@pytest.fixture
def url(s3_url: str, tmp_path: Path) -> str:
    """Of a sweep of some trials, made in the folder `first`."""
    with stored_results.stored_results(s3_url, tmp_path / "first") as stored:
        sweep(stored)
    assert stored.code == 0
    return s3_url


def files(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name not in (".folder-id", "driver.lock")
    }


def test_an_empty_folder_on_another_head_is_filled_and_goes_on(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stored_results.stored_results(url, tmp_path / "second") as stored:
        assert files(tmp_path / "second") == files(tmp_path / "first")
        opened = open_results(stored.root, stub_spec(), SPEC, must_exist=True)
        assert opened.resumed
        assert read_table(opened.folder, "trials").num_rows == 3
        opened.release()
    assert f"files fetched from {url.partition('?')[0]} into {tmp_path / 'second'}" in capsys.readouterr().out
    assert not (tmp_path / "second.filling").exists()


def test_a_fill_that_was_cut_off_begins_anew(url: str, tmp_path: Path) -> None:
    (tmp_path / "second.filling" / "tables").mkdir(parents=True)
    (tmp_path / "second.filling" / "sweep.json").write_text("half")
    (tmp_path / "second").mkdir()
    with stored_results.stored_results(url, tmp_path / "second"):
        assert files(tmp_path / "second") == files(tmp_path / "first")


def test_the_same_folder_goes_on_at_once(url: str, tmp_path: Path) -> None:
    with stored_results.stored_results(url, tmp_path / "first") as stored:
        assert open_results(stored.root, stub_spec(), SPEC, must_exist=True).resumed


def test_a_folder_that_another_one_has_overtaken_is_refused(url: str, tmp_path: Path) -> None:
    with stored_results.stored_results(url, tmp_path / "second"):
        pass
    with (
        pytest.raises(SpecError, match="which may be older; move this folder away"),
        stored_results.stored_results(url, tmp_path / "first"),
    ):
        pass
    with stored_results.stored_results(url, tmp_path / "second"):
        pass


def test_a_folder_of_another_sweep_is_refused(url: str, tmp_path: Path) -> None:
    open_results(tmp_path / "other", stub_spec(), SPEC).release()
    with (
        pytest.raises(SpecError, match=r"holds the sweep stub-\w+, and .*other the sweep stub-"),
        stored_results.stored_results(url, tmp_path / "other"),
    ):
        pass


def test_a_folder_with_something_else_in_it_is_not_filled(url: str, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("")
    with (
        pytest.raises(SpecError, match=r"is to be filled from s3://.*, but it is not empty: it has thesis\.txt"),
        stored_results.stored_results(url, tmp_path / "home"),
    ):
        pass


def test_a_url_with_something_else_in_it_is_refused(s3_url: str, tmp_path: Path) -> None:
    open_store(s3_url).write("backup.tar", b"")
    with (
        pytest.raises(SpecError, match="neither empty nor the copy of a results folder: it has backup"),
        stored_results.stored_results(s3_url, tmp_path / "new"),
    ):
        pass


def test_a_driver_that_dies_before_its_first_trial_leaves_no_obstacle(s3_url: str, tmp_path: Path) -> None:
    with stored_results.stored_results(s3_url, tmp_path / "first") as stored:
        assert list(stored.root.iterdir()) == [tmp_path / "first" / ".folder-id"]
    with stored_results.stored_results(s3_url, tmp_path / "first") as stored:
        sweep(stored)
    assert stored.code == 0


def test_what_is_not_at_the_url_is_said_at_the_end(
    s3: S3Server,
    s3_url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stored_results, "_END_WITHIN_S", 0.0)
    try:
        with stored_results.stored_results(s3_url, tmp_path / "first") as stored:
            s3.stop()
            sweep(stored)
    finally:
        s3.start()
    said = capsys.readouterr().out
    assert stored.code == NOT_UPLOADED
    assert f"not at {s3_url.partition('?')[0]}: spec.yaml, study.journal, sweep.json and 15 more. " in said
    assert f"{tmp_path / 'first'} has them; the same command sends them" in said
    assert "upload failed: " in said
    with stored_results.stored_results(s3_url, tmp_path / "first") as stored:
        stored.begin()
    assert stored.code == 0
    assert {"sweep.json", "study.journal"} <= set(open_store(s3_url).sizes_bytes())


def test_a_url_that_nobody_serves_is_refused_before_anything_is_made(s3_url: str, tmp_path: Path) -> None:
    elsewhere = s3_url.replace("endpoint_override=127.0.0.1:", "endpoint_override=127.0.0.1:1")[:-28]
    with (
        pytest.raises(StoreError, match=r"s3://bucket-\w+/team/sweep: cannot read driver.lock"),
        stored_results.stored_results(elsewhere.partition("&allow")[0], tmp_path / "new"),
    ):
        pass
    assert not (tmp_path / "new").exists()


def test_the_working_folder_of_a_url_is_the_same_from_everywhere() -> None:
    folder = working_folder("s3://bucket/team/kimi sweep?region=eu")
    assert folder.parent == Path.home() / "specsweep-results"
    assert folder.name.startswith("bucket-team-kimisweep-")
    assert folder == working_folder("s3://bucket/team/kimi sweep?region=us")
    assert folder != working_folder("s3://bucket/team/kimi-sweep")
