"""Results at a URL: the working folder of this machine that the URL is copied from, filled from it if it is empty."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from ray_jobs.copying import Copier, is_copied
from ray_jobs.store_lock import LOCK, lock_of
from sweeps.foreign_text import one_line
from sweeps.results.store import Store, open_store
from sweeps.spec.document import SpecError

FOLDER_ID = ".folder-id"
"""Name of the file that tells one working folder from another; it is never copied."""
NOT_UPLOADED = 4
"""Exit code: the sweep ended well, and its URL has not got all of it."""
_END_WITHIN_S = 60.0
"""For the last files at the end: Ray gives a stopped job 90 s with the settings of deploy/README.md."""
_NAMED = 3


def working_folder(url: str) -> Path:
    """Where this machine works on the results of a URL: the same for every working directory."""
    parts = urlsplit(url)
    words = [parts.netloc, *PurePosixPath(parts.path).parts[-2:]]
    name = "-".join(filter(None, (re.sub(r"[^A-Za-z0-9._-]+", "", word) for word in words)))
    digest = hashlib.sha256(url.partition("?")[0].encode()).hexdigest()[:8]
    return Path.home() / "specsweep-results" / f"{name}-{digest}"


@dataclass
class StoredResults:
    """A working folder whose URL this driver holds. `begin` when the folder is opened; `code` holds after the end."""

    root: Path
    copier: Copier
    begun: bool = False
    code: int = 0
    """NOT_UPLOADED if the URL has not got everything."""

    def begin(self) -> None:
        """Send from now on: the folder is this driver's, and has its manifest."""
        self.begun = True
        self.copier.start()

    def end(self) -> None:
        """Send what is left, and print what is not there."""
        url = self.copier.store.url
        try:
            missing = self.copier.finish(within_s=_END_WITHIN_S)
        except KeyboardInterrupt:
            missing = self.copier.missing()
        if not missing:
            print(f"copied to {url}", flush=True)
            return
        self.code = NOT_UPLOADED
        for finding in self.copier.drain_findings():
            print(one_line(f"{finding.event.replace('_', ' ')}: {finding.detail}"), flush=True)
        named = ", ".join(missing[:_NAMED]) + (f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else "")
        mend = "move one of the two away" if self.copier.lost_to else "the same command sends them"
        print(one_line(f"not at {url}: {named}. {self.root} has them; {mend}"), flush=True)


@contextmanager
def stored_results(url: str, folder: Path | None) -> Iterator[StoredResults]:
    """Hold the URL for a working folder, which is filled from the URL if it is empty; let it go at the end.

    Args:
        folder: the working folder; None: `working_folder(url)`.

    Raises StoreError if the URL cannot be read or written, StoreBusyError if another driver holds it, and SpecError if
    the two hold different sweeps or the folder is older than the URL.
    """
    store = open_store(url)
    root = (folder or working_folder(url)).resolve()
    mine = _read_id(root)
    lock = lock_of(store, mine or uuid.uuid4().hex, root)
    last = lock.held_by()
    lock.refuse_if_busy(last)
    _refuse_another_sweep(store, root, is_newest=mine is not None and (last is None or last.folder_id == mine))
    lock.take()
    there = {name: size for name, size in store.sizes_bytes().items() if is_copied(name)}
    stored = StoredResults(root, Copier(store, lock, root, there))
    try:
        if "sweep.json" in there and not (root / "sweep.json").is_file():
            _fill(store, root, tuple(there))
        _write_id(root, lock.holder.folder_id)
        yield stored
    finally:
        if stored.begun:
            stored.end()
        else:
            lock.release()


def _refuse_another_sweep(store: Store, root: Path, *, is_newest: bool) -> None:
    """Raise SpecError if folder and URL cannot both be kept.

    Args:
        is_newest: no other folder has sent anything since this one did.
    """
    content = store.read("sweep.json")
    if content is None:
        others = sorted(name for name in store.sizes_bytes() if is_copied(name))
        if others and not is_newest:
            raise SpecError(
                f"--results: {store.url} is neither empty nor the copy of a results folder: it has {others[0]}, "
                "and no sweep.json"
            )
        return
    manifest = root / "sweep.json"
    if not manifest.is_file():
        if root.is_dir() and (found := [path.name for path in root.iterdir() if path.name not in (LOCK, FOLDER_ID)]):
            raise SpecError(
                f"--folder: {root} is to be filled from {store.url}, but it is not empty: it has {found[0]}"
            )
        return
    theirs, ours = _sweep_id(content, store.url), _sweep_id(manifest.read_bytes(), str(manifest))
    if theirs != ours:
        raise SpecError(f"--results: {store.url} holds the sweep {theirs}, and {root} the sweep {ours}")
    if not is_newest:
        raise SpecError(
            f"--results: {store.url} was sent there from another folder than {root}, which may be older; "
            "move this folder away, and it is filled anew"
        )


def _sweep_id(content: bytes, where: str) -> str:
    try:
        return str(json.loads(content)["sweep_id"])
    except (ValueError, LookupError, TypeError) as error:
        raise SpecError(f"--results: {where}: sweep.json is not the manifest of a sweep") from error


def _fill(store: Store, root: Path, names: tuple[str, ...]) -> None:
    """Fetch all files under another name first: a folder that is there is whole."""
    filling = root.with_name(f"{root.name}.filling")
    shutil.rmtree(filling, ignore_errors=True)
    filling.mkdir(parents=True, mode=0o700)
    store.fetch(names, filling)
    for left in (LOCK, FOLDER_ID):
        (root / left).unlink(missing_ok=True)
    filling.rename(root)
    print(one_line(f"{len(names)} files fetched from {store.url} into {root}"), flush=True)


def _read_id(root: Path) -> str | None:
    path = root / FOLDER_ID
    return path.read_text(encoding="utf-8").strip() or None if path.is_file() else None


def _write_id(root: Path, folder_id: str) -> None:
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    (root / FOLDER_ID).write_text(f"{folder_id}\n", encoding="utf-8")
