from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_jobs.store_lock import LOCK, STALE_S, StoreBusyError, StoreLock, lock_of
from sweeps.results.store import Store, open_store


@pytest.fixture
def store(s3_url: str) -> Store:
    return open_store(s3_url)


def held(store: Store, folder_id: str) -> StoreLock:
    lock = lock_of(store, folder_id, Path(f"/somewhere/{folder_id}"))
    lock.take(settle_s=0.0)
    return lock


def test_a_second_folder_is_refused_in_one_line_with_the_holder_and_the_rule(store: Store) -> None:
    held(store, "first")
    with pytest.raises(StoreBusyError) as refused:
        held(store, "second")
    said = str(refused.value)
    assert f"in use by a running driver (pid {os.getpid()} on " in said
    assert "folder /somewhere/first, heard of" in said
    assert "a lock that is not renewed for 300 s is taken over" in said
    assert "\n" not in said
    assert set(store.sizes_bytes()) == {LOCK}, "the file that told the time is gone"


def test_the_folder_that_held_it_last_has_it_again_at_once(store: Store) -> None:
    held(store, "first")
    held(store, "first").renew()


def test_a_released_lock_is_free_and_still_names_its_last_holder(store: Store) -> None:
    held(store, "first").release()
    second = lock_of(store, "second", Path("/b"))
    last = second.held_by()
    assert last is not None
    assert (last.folder_id, last.released) == ("first", True)
    second.take(settle_s=0.0)


@pytest.mark.parametrize(("age_s", "taken"), [(STALE_S - 60, False), (STALE_S + 60, True)])
def test_a_lock_that_nobody_renews_is_taken_over(tmp_path: Path, age_s: float, taken: bool) -> None:
    store = open_store(f"file://{tmp_path}")
    first = held(store, "first")
    written_s = (tmp_path / LOCK).stat().st_mtime
    os.utime(tmp_path / LOCK, (written_s - age_s, written_s - age_s))
    if not taken:
        with pytest.raises(StoreBusyError, match="heard of 2"):
            held(store, "second")
        return
    held(store, "second")
    with pytest.raises(StoreBusyError, match=r"was taken over by pid .*folder /somewhere/second"):
        first.renew()
    first.release()
    last = first.held_by()
    assert last is not None
    assert (last.folder_id, last.released) == ("second", False), "the former holder cannot release it"


def test_a_store_without_times_leaves_the_clocks_of_the_machines() -> None:
    store = open_store("fsspec+memory://lock-without-times/copy")
    held(store, "first")
    with pytest.raises(StoreBusyError, match="in use by a running driver"):
        held(store, "second")


def test_of_two_that_take_it_at_the_same_time_one_has_it(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    together, outcomes = threading.Barrier(2), []

    def take(folder_id: str) -> None:
        lock = lock_of(store, folder_id, tmp_path)
        together.wait()
        try:
            lock.take(settle_s=1.0)
            outcomes.append("held")
        except StoreBusyError:
            outcomes.append("refused")

    threads = [threading.Thread(target=take, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["held", "refused"]


@given(
    content=st.binary(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["folder_id", "driver", "folder", "renewed_at", "released"]), inner, max_size=5
            )
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_what_is_no_lock_is_refused_in_one_line(content: bytes) -> None:
    store = open_store("fsspec+memory://forged-lock/copy")
    store.write(LOCK, content)
    lock = lock_of(store, "mine", Path("/a"))
    with pytest.raises(StoreBusyError, match="is not the lock of a driver") as refused:
        lock.held_by()
    assert "\n" not in str(refused.value)
