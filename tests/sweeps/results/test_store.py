from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from sweeps.results.store import Store, StoreError, fetched, is_url, open_store


@pytest.fixture(params=["s3", "file", "fsspec"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "s3":
        return open_store(request.getfixturevalue("s3_url"))
    if request.param == "file":
        return open_store(f"file://{tmp_path}/copy")
    return open_store(f"fsspec+memory://{uuid.uuid4().hex}/copy")


@pytest.mark.parametrize("name", ["sweep.json", "tables/blocks/t0001-a1.parquet", "logs/a b é%20+=.log"])
def test_what_is_sent_comes_back_byte_by_byte(store: Store, tmp_path: Path, name: str) -> None:
    here = tmp_path / "here"
    here.write_bytes(bytes(range(256)) * 100)
    store.send(here, name)
    assert store.sizes_bytes() == {name: 25600}
    store.fetch([name], tmp_path / "back")
    assert (tmp_path / "back" / name).read_bytes() == here.read_bytes()


def test_a_file_is_replaced_read_and_removed(store: Store) -> None:
    assert store.read("driver.lock") is None
    assert store.written_at("driver.lock") is None
    store.write("driver.lock", b"one")
    store.write("driver.lock", b"two")
    assert store.read("driver.lock") == b"two"
    assert (store.written_at("driver.lock") is None) == store.url.startswith("fsspec"), "memory keeps no times"
    store.remove("driver.lock")
    assert store.sizes_bytes() == {}


def test_a_folder_without_files_is_empty(store: Store) -> None:
    assert store.sizes_bytes() == {}


def test_a_name_that_points_out_of_the_folder_is_refused() -> None:
    store = open_store(f"fsspec+memory://{uuid.uuid4().hex}/copy")
    store.files.handler.fs.pipe_file(f"{store.base}/tables/../../../planted", b"x")
    with pytest.raises(StoreError, match="which is no place in a folder"):
        store.sizes_bytes()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://key:secret@bucket/prefix", r"s3://\*\*\*@bucket/prefix: wanted a URL without a password"),
        ("gopher://bucket/prefix", "wanted a URL such as s3://bucket/prefix"),
        ("s3://bucket/prefix?colour=blue&region=us-east-1", "wanted a URL such as"),
        ("fsspec+nothing://bucket", "wanted a URL such as"),
    ],
)
def test_a_url_that_cannot_be_is_refused_in_one_line(url: str, said: str) -> None:
    with pytest.raises(StoreError, match=said) as refused:
        open_store(url)
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_bucket_that_does_not_exist_is_told(s3_url: str, tmp_path: Path) -> None:
    store = open_store(s3_url.replace("bucket-", "another-").replace("&allow_bucket_creation=true", ""))
    with pytest.raises(StoreError, match=r"s3://another-\w+/team/sweep: cannot write sweep.json"):
        store.write("sweep.json", b"{}")


def test_a_reader_gets_the_manifest_and_the_tables_it_asks_for(s3_url: str) -> None:
    store = open_store(s3_url)
    with pytest.raises(StoreError, match=r"it has no sweep\.json"), fetched(s3_url, tables=["trials"]):
        pass
    names = ["sweep.json", "spec.yaml", "tables/trials/t0001-a1.parquet", "tables/cycles/t0001-a1.parquet", "logs/x"]
    for name in names:
        store.write(name, name.encode())
    with fetched(s3_url, tables=["trials"]) as folder:
        found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == set(names[:3])
    assert not folder.exists()


def test_a_path_is_no_url() -> None:
    assert is_url("s3://bucket/prefix")
    assert not is_url("/shared/results")
    assert not is_url(Path("s3://bucket/prefix"))
