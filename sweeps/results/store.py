"""The copy of a results folder at a URL: S3, Google Cloud Storage, HDFS, a mounted path, or what fsspec knows.

A sweep writes to a folder on a disk. The copy is made from it file by file, and another machine fills its own folder
from the copy. pyarrow reads the URL (`FileSystem.from_uri`): `s3://bucket/prefix?endpoint_override=HOST:PORT&scheme=http`
names another S3 than Amazon's, `fsspec+PROTOCOL://` any file system of fsspec. Names of files are relative to the URL.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import fs

from sweeps import SpecsweepError

_OBJECT_STORES = ("s3", "gcs", "abfs")
"""`FileSystem.type_name` of file systems without folders, where a file is whole or absent, never half written."""
_CHUNK_BYTES = 8 << 20
_AT_ONCE = 8
"""Files sent or fetched at a time: a small object takes a round trip, some 30 ms to Amazon's S3, whatever its size."""


class StoreError(SpecsweepError):
    """A URL that cannot be read or written: which one, what was tried, and what the file system said."""


def is_url(place: str | os.PathLike[str]) -> bool:
    """Whether a place of results is a URL; a path is none."""
    return isinstance(place, str) and "://" in place


@dataclass(frozen=True, slots=True)
class Store:
    """A folder at a URL. Every method raises StoreError if the file system does not answer or refuses."""

    url: str
    base: str
    """Path of the folder inside the file system."""
    files: fs.FileSystem = field(repr=False)

    def sizes_bytes(self) -> dict[str, int]:
        """Every file by name. Raises StoreError also for a name that points out of the folder."""
        with self._told("cannot be listed"):
            found = self.files.get_file_info(fs.FileSelector(self.base, recursive=True, allow_not_found=True))
        start = len(self.base.rstrip("/")) + 1
        sizes = {each.path[start:]: each.size for each in found if each.type == fs.FileType.File}
        for name in sizes:
            if name.startswith("/") or not {"", ".", ".."}.isdisjoint(name.split("/")):
                raise StoreError(f"{self.url}: holds a file of the name {name!r}, which is no place in a folder")
        return sizes

    def written_at(self, name: str) -> datetime | None:
        """When a file was last written, by the clock of the store; None if there is none, or the store does not say."""
        with self._told(f"cannot look at {name}"):
            (info,) = self.files.get_file_info([self._path(name)])
        return info.mtime if info.type == fs.FileType.File else None

    def read(self, name: str) -> bytes | None:
        """A small file; None if there is none."""
        with self._told(f"cannot read {name}"):
            try:
                with self.files.open_input_stream(self._path(name)) as stream:
                    return bytes(stream.read())
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Write a small file; an older one of the name is replaced."""
        with self._told(f"cannot write {name}"), self._written(name) as stream:
            stream.write(content)

    def send(self, path: Path, name: str) -> None:
        """Copy a file of this machine. Raises OSError if `path` cannot be read."""
        with path.open("rb") as file, self._told(f"cannot write {name}"), self._written(name) as stream:
            shutil.copyfileobj(file, stream, _CHUNK_BYTES)

    def fetch(self, names: Iterable[str], into: Path) -> None:
        """Copy files to this machine, below a folder. Raises OSError if they cannot be written there."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for _ in pool.map(lambda name: self._fetch(name, into / PurePosixPath(name)), list(names)):
                pass

    def remove(self, name: str) -> None:
        """Remove a file."""
        with self._told(f"cannot remove {name}"):
            self.files.delete_file(self._path(name))

    def _fetch(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        told, at = self._told(f"cannot read {name}"), self._path(name)
        with path.open("xb") as file, told, self.files.open_input_stream(at) as stream:
            shutil.copyfileobj(stream, file, _CHUNK_BYTES)

    @contextlib.contextmanager
    def _written(self, name: str) -> Iterator[pa.NativeFile]:
        """A stream to a file that is there whole, or not at all."""
        path = self._path(name)
        if self.files.type_name in _OBJECT_STORES:
            with self.files.open_output_stream(path) as stream:
                yield stream
            return
        self.files.create_dir(path.rpartition("/")[0], recursive=True)
        temporary = f"{path}.{secrets.token_hex(8)}.tmp"
        with self.files.open_output_stream(temporary) as stream:
            yield stream
        self.files.move(temporary, path)

    def _path(self, name: str) -> str:
        return f"{self.base.rstrip('/')}/{name}"

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise StoreError(f"{self.url}: {what}: {_first_line(error)}") from error


def open_store(url: str) -> Store:
    """The folder at a URL. Raises StoreError for a URL that no file system serves, or that holds a password."""
    shown, _, query = url.partition("?")
    parts = urlsplit(url)
    if parts.username is not None:
        raise StoreError(
            f"{parts.scheme}://***@{parts.hostname}{parts.path}: wanted a URL without a password, which every process "
            "list would show; give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws/credentials"
        )
    if parts.scheme == "s3" and "allow_delayed_open" not in query:
        query = "&".join(
            filter(None, (query, "allow_delayed_open=true"))
        )  # a small file is then one request, not three
    try:
        files, base = fs.FileSystem.from_uri(f"{shown}?{query}" if query else shown)
    except (OSError, ImportError, ValueError, pa.ArrowException) as error:
        raise StoreError(
            f"{shown}: wanted a URL such as s3://bucket/prefix or file:///path: {_first_line(error)}"
        ) from error
    return Store(url=shown, base=base, files=files)


@contextlib.contextmanager
def fetched(url: str, *, tables: Iterable[str]) -> Iterator[Path]:
    """What a reader of results needs of a folder at a URL, in a temporary folder: manifest, spec and some tables."""
    store = open_store(url)
    wanted = tuple(f"tables/{table}/" for table in tables)
    names = [name for name in store.sizes_bytes() if name in ("sweep.json", "spec.yaml") or name.startswith(wanted)]
    if "sweep.json" not in names:
        raise StoreError(f"{store.url}: wanted the copy of a results folder, but it has no sweep.json")
    with tempfile.TemporaryDirectory(prefix="specsweep-results-") as folder:
        store.fetch(names, Path(folder))
        yield Path(folder)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
