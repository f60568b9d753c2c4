from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ray_jobs.copying import Copier, files_to_copy
from ray_jobs.store_lock import LOCK, lock_of
from sweeps.results.store import Store, open_store
from tests.s3_server import S3Server


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "working"
    for name in (
        "sweep.json",
        "spec.yaml",
        "study.journal",
        "tables/trials/t0000-a1.parquet",
        "tables/blocks/t0000-a1.parquet",
        "logs/t0000-a1/server.log",
        "journal/t0001-a1.jsonl",
        "tune/run-0/tuner.pkl",
        "driver.lock",
        "stop-requested",
        ".folder-id",
        "tables/blocks/.t0001-a1.parquet.0011.tmp",
    ):
        write(root / name, name)
    (root / "study.journal.lock").symlink_to("nowhere")
    return root


COPIED = {
    "sweep.json",
    "spec.yaml",
    "study.journal",
    "tables/trials/t0000-a1.parquet",
    "tables/blocks/t0000-a1.parquet",
    "logs/t0000-a1/server.log",
}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def copier(url: str, root: Path) -> Copier:
    store = open_store(url)
    lock = lock_of(store, "mine", root)
    lock.take(settle_s=0.0)
    return Copier(store, lock, root, {name: size for name, size in store.sizes_bytes().items() if name != LOCK})


@pytest.fixture
def running(s3_url: str, root: Path) -> Iterator[Copier]:
    running = copier(s3_url, root)
    running.start()
    yield running
    running.finish(within_s=0.0)


def wait_for(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < end_s, "it took too long"
        time.sleep(0.02)


def there(store: Store) -> set[str]:
    return set(store.sizes_bytes()) - {LOCK}


def test_what_a_copy_has_of_a_folder(root: Path) -> None:
    assert set(files_to_copy(root)) == COPIED


def test_a_trial_is_there_soon_after_it_ended_and_the_lock_is_free_at_the_end(running: Copier, root: Path) -> None:
    wait_for(lambda: there(running.store) == COPIED)
    write(root / "tables/trials/t0001-a1.parquet", "more")
    write(root / "study.journal", "longer than before")
    running.notice()
    wait_for(lambda: there(running.store) == {*COPIED, "tables/trials/t0001-a1.parquet"})
    assert running.finish(within_s=30.0) == ()
    assert running.store.read("study.journal") == b"longer than before"
    last = running.lock.held_by()
    assert last is not None
    assert last.released


def test_the_manifest_comes_first_and_the_row_of_a_trial_after_its_other_parts(
    running: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    send = Store.send

    def noted(store: Store, path: Path, name: str) -> None:
        send(store, path, name)
        sent.append(name)

    monkeypatch.setattr(Store, "send", noted)
    for path in running.root.rglob("*.*"):
        path.touch()
    assert running.finish(within_s=30.0) == ()
    assert set(sent[:2]) == {"sweep.json", "spec.yaml"}
    assert sent[-2:] == ["tables/trials/t0000-a1.parquet", "study.journal"]


def test_parts_that_are_there_are_not_sent_again(
    s3_url: str, root: Path, running: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert running.finish(within_s=30.0) == ()
    again = copier(s3_url, root)
    sent: list[str] = []
    monkeypatch.setattr(Store, "send", lambda store, path, name: sent.append(name))
    again.start()
    assert again.finish(within_s=30.0) == ()
    assert set(sent) == {name for name in COPIED if not name.startswith("tables/")}


def test_a_lost_connection_is_told_and_made_up_for(running: Copier, root: Path, s3: S3Server) -> None:
    wait_for(lambda: there(running.store) == COPIED)
    s3.stop()
    try:
        write(root / "tables/trials/t0001-a1.parquet", "more")
        running.notice()
        found: list[str] = []

        def told(event: str) -> bool:
            found.extend(finding.event for finding in running.drain_findings())
            return event in found

        wait_for(lambda: told("upload_failed"))
    finally:
        s3.start()
    wait_for(lambda: told("upload_resumed"))
    assert found == ["upload_failed", "upload_resumed"]
    assert running.finish(within_s=30.0) == ()
    assert running.store.read("tables/trials/t0001-a1.parquet") == b"more"


def test_what_is_not_there_at_the_end_is_named(running: Copier, root: Path, s3: S3Server) -> None:
    wait_for(lambda: there(running.store) == COPIED)
    s3.stop()
    try:
        write(root / "tables/trials/t0001-a1.parquet", "more")
        assert running.finish(within_s=0.0) == ("tables/trials/t0001-a1.parquet",)
    finally:
        s3.start()


def test_nothing_is_sent_once_another_driver_has_taken_over(running: Copier, root: Path) -> None:
    wait_for(lambda: there(running.store) == COPIED)
    running.lock.release()
    lock_of(running.store, "another", Path("/elsewhere")).take(settle_s=0.0)
    write(root / "tables/trials/t0001-a1.parquet", "more")
    assert running.finish(within_s=30.0) == ("tables/trials/t0001-a1.parquet",)
    assert "taken over by pid" in (running.lost_to or "")
    assert [finding.event for finding in running.drain_findings()] == ["upload_taken_over"]
    assert there(running.store) == COPIED
