"""The copy of a results folder at a URL, kept up to date by a thread of the driver while trials run.

The folder is the truth; what changed in it is sent after every trial and at the end. A store that does not answer ends
no sweep: the same files are tried again, and an event says so. Sending waits for the network and hardly computes, so
trials, which run in processes of their own, do not wait for it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ray_jobs.store_lock import RENEW_S, StoreBusyError, StoreLock
from sweeps.measure.records import Finding
from sweeps.results.store import Store, StoreError

_NOT_SENT = frozenset({"journal", "tune", "driver.lock", "stop-requested"})
"""Of this driver alone: rows that become parts, Tune's own folder, the lock of the folder, a request to stop."""
_LAST = ("tables/trials/", "study.journal")
"""Sent after all others: a trial that has its row has all its parts, and the study says no more than the tables."""
_FIRST = ("sweep.json", "spec.yaml")
"""Sent before all others: files without a manifest are nobody's."""
_AT_ONCE = 8
_SHARE_OF_LOOKING = 0.05
"""Looking for changed files takes at most this share of the time: 0.5 s of a folder of 20,000 trials."""
_RETRY_S = (2.0, 5.0, 10.0, 20.0, 40.0, 60.0)
"""Seconds until the next try after the first, second, ... failure in a row; the last one holds from there on."""

Seen = tuple[int, int]
"""Size in bytes and time of change in ns."""


def is_copied(name: str) -> bool:
    """Whether a file of a results folder has a copy: temporary and hidden files have none."""
    parts = name.split("/")
    return parts[0] not in _NOT_SENT and not name.endswith(".tmp") and not any(part.startswith(".") for part in parts)


def files_to_copy(root: Path) -> dict[str, Seen]:
    """Every file of a results folder that its copy has, by name."""
    return dict(_below(root, ""))


def _below(folder: Path, prefix: str) -> Iterator[tuple[str, Seen]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            name = prefix + entry.name
            if not is_copied(name):
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISDIR(status.st_mode):
                yield from _below(Path(entry.path), f"{name}/")
            elif stat.S_ISREG(status.st_mode):
                yield name, (status.st_size, status.st_mtime_ns)


def _in_order(names: Mapping[str, Seen]) -> list[list[str]]:
    """Groups of names: each is sent when the one before it is there."""
    groups: list[list[str]] = [[], [], [], []]
    for name in sorted(names):
        last = next((place for place, start in enumerate(_LAST, start=2) if name.startswith(start)), 1)
        groups[0 if name in _FIRST else last].append(name)
    return groups


@dataclass
class Copier:
    """Sends what changed in a folder. `start` it, `notice` every trial, `finish` at the end.

    A part that the store has in the same size is not sent again: parts are written once.
    """

    store: Store
    lock: StoreLock
    root: Path
    there_bytes: Mapping[str, int]
    """What the store had at the start, by name."""
    lost_to: str | None = None
    """Who took the URL over, if somebody did: nothing is sent from then on."""
    _sent: dict[str, Seen] = field(default_factory=dict)
    _findings: deque[Finding] = field(default_factory=deque)
    _failures: int = 0
    _renewed_s: float = 0.0
    _looked_s: float = 0.0

    def __post_init__(self) -> None:
        self._wake, self._ending = threading.Event(), threading.Event()
        self._end_s = float("inf")
        self._thread = threading.Thread(target=self._run, name="copier", daemon=True)

    def start(self) -> None:
        """Begin: the first look sends the manifest."""
        self._renewed_s = time.monotonic()
        self._sent = {
            name: seen
            for name, seen in files_to_copy(self.root).items()
            if name.startswith("tables/") and self.there_bytes.get(name) == seen[0]
        }
        self._wake.set()
        self._thread.start()

    def notice(self) -> None:
        """A trial ended: its files are sent soon."""
        self._wake.set()

    def drain_findings(self) -> tuple[Finding, ...]:
        """What happened since the last call, for the table of events."""
        return tuple(self._findings.popleft() for _ in range(len(self._findings)))

    def finish(self, *, within_s: float) -> tuple[str, ...]:
        """Send what is left, with further tries until `within_s` have passed. Returns the names that are not there."""
        self._end_s = time.monotonic() + within_s
        self._ending.set()
        self._wake.set()
        self._thread.join(within_s + _RETRY_S[-1])
        return self.missing()

    def missing(self) -> tuple[str, ...]:
        """Names of files that the store has not got, or not as they are now."""
        return tuple(sorted(self._changed()))

    def _run(self) -> None:
        while not self._ending.is_set():
            self._wake.wait(self._until_due_s())
            self._wake.clear()
            done = self._sent_all()
            pause_s = self._looked_s / _SHARE_OF_LOOKING if done else self._retry_s
            self._ending.wait(pause_s)
            if not done:
                self._wake.set()
        while not self._sent_all() and self.lost_to is None and time.monotonic() + self._retry_s < self._end_s:
            time.sleep(self._retry_s)
        if not self._failures:
            self._release()

    def _until_due_s(self) -> float:
        left_s = self._renewed_s + RENEW_S - time.monotonic()
        return RENEW_S if self.lost_to is not None else max(0.0, left_s)

    @property
    def _retry_s(self) -> float:
        return _RETRY_S[min(max(self._failures, 1), len(_RETRY_S)) - 1]

    def _sent_all(self) -> bool:
        """One try. False if the store did not take everything."""
        if self.lost_to is not None:
            return True
        try:
            self._renew()
            self._send_changed()
        except StoreBusyError as error:
            self.lost_to = str(error)
            self._findings.append(Finding(event="upload_taken_over", detail=self.lost_to))
            return True
        except StoreError as error:
            if not self._failures:
                self._findings.append(Finding(event="upload_failed", detail=f"{error}; it is tried again"))
            self._failures += 1
            return False
        if self._failures:
            self._findings.append(Finding(event="upload_resumed", detail=f"after {self._failures} failed tries"))
        self._failures = 0
        return True

    def _renew(self) -> None:
        self.lock.renew()
        self._renewed_s = time.monotonic()

    def _send_changed(self) -> None:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for names in _in_order(changed := self._changed()):
                for name in pool.map(self._send, names):
                    self._sent[name] = changed[name]

    def _send(self, name: str) -> str:
        with contextlib.suppress(FileNotFoundError):  # removed since it was seen: there is nothing to send
            self.store.send(self.root / name, name)
        return name

    def _changed(self) -> dict[str, Seen]:
        began_s = time.monotonic()
        changed = {name: seen for name, seen in files_to_copy(self.root).items() if self._sent.get(name) != seen}
        self._looked_s = time.monotonic() - began_s
        return changed

    def _release(self) -> None:
        try:
            self.lock.release()
        except (StoreError, StoreBusyError) as error:
            self._findings.append(Finding(event="upload_failed", detail=f"the lock was not released: {error}"))
