"""The lock of a results folder's copy at a URL: one working folder at a time sends its files there.

The lock is an object that names its holder. A holder renews it every `RENEW_S`; a lock that was not renewed for
`STALE_S` by the clock of the store is taken over. A file lock protects the working folder itself, so the folder that
held the URL last may have it again at once: the driver before it has ended. pyarrow has no exclusive creation of an
object: who takes a lock waits `SETTLE_S` and looks whether it is still the holder, and looks again before it sends.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from sweeps import SpecsweepError
from sweeps.foreign_text import one_line
from sweeps.results.store import Store

LOCK = "driver.lock"
RENEW_S = 60.0
STALE_S = 300.0
"""Five renewals: a connection may be gone for some minutes before another head takes over."""
SETTLE_S = 2.0
"""More than the time from reading a lock to writing it: two requests of some 30 ms, with room for retries."""


class StoreBusyError(SpecsweepError):
    """Another driver sends its results to this URL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Who holds a lock, as its object says."""

    folder_id: str
    driver: str
    folder: str
    renewed_at: str
    released: bool = False


@dataclass(frozen=True, slots=True)
class StoreLock:
    """The lock of one working folder on one store. All methods raise StoreError if the store does not answer."""

    store: Store
    holder: Holder

    def held_by(self) -> Holder | None:
        """The last holder; None if there was none."""
        content = self.store.read(LOCK)
        if content is None:
            return None
        try:
            return _holder(json.loads(content))
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise StoreBusyError(
                one_line(f"--results: {self.store.url}/{LOCK} is not the lock of a driver: {error}; remove it")
            ) from error

    def refuse_if_busy(self, last: Holder | None) -> None:
        """Raise StoreBusyError if another working folder holds the lock and renews it."""
        if last is None or last.released or last.folder_id == self.holder.folder_id:
            return
        age_s = self._age_s(last)
        if age_s <= STALE_S:
            raise StoreBusyError(
                one_line(
                    f"--results: {self.store.url} is in use by a running driver ({last.driver}, folder {last.folder}, "
                    f"heard of {age_s:.0f} s ago); a lock that is not renewed for {STALE_S:.0f} s is taken over"
                )
            )

    def take(self, *, settle_s: float = SETTLE_S) -> None:
        """Become the holder. Raises StoreBusyError if another one did so at the same time."""
        last = self.held_by()
        self.refuse_if_busy(last)
        self._write(released=False)
        if last is None or last.folder_id != self.holder.folder_id:
            time.sleep(settle_s)
            self.renew()

    def renew(self) -> None:
        """Say that the driver lives. Raises StoreBusyError if another working folder has taken over."""
        last = self.held_by()
        if last is not None and last.folder_id != self.holder.folder_id:
            raise StoreBusyError(one_line(f"{self.store.url} was taken over by {last.driver} (folder {last.folder})"))
        self._write(released=False)

    def release(self) -> None:
        """Let another driver take the lock; it still says who held it last."""
        last = self.held_by()
        if last is not None and last.folder_id == self.holder.folder_id:
            self._write(released=True)

    def _write(self, *, released: bool) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self.store.write(LOCK, json.dumps(asdict(replace(self.holder, renewed_at=now, released=released))).encode())

    def _age_s(self, last: Holder) -> float:
        """Seconds since the lock was renewed, by the store's clock, which a file that is written now tells.

        A store that keeps no times (some of fsspec) leaves the clocks of the two machines.
        """
        probe = f".probe-{self.holder.folder_id}"
        self.store.write(probe, b"")
        now, renewed_at = self.store.written_at(probe), self.store.written_at(LOCK)
        self.store.remove(probe)
        if now is None or renewed_at is None:
            now, renewed_at = datetime.now(UTC), datetime.fromisoformat(last.renewed_at)
        return (now - renewed_at).total_seconds()


def _holder(found: object) -> Holder:
    """Raises ValueError or LookupError for what is no holder."""
    if not isinstance(found, dict):
        raise ValueError(f"wanted an object, got {type(found).__name__}")
    words = {name: found[name] for name in ("folder_id", "driver", "folder", "renewed_at")}
    if not all(isinstance(word, str) for word in words.values()) or not isinstance(found["released"], bool):
        raise ValueError("a value is of another type")
    if datetime.fromisoformat(words["renewed_at"]).tzinfo is None:
        raise ValueError("its time has no zone")
    return Holder(**words, released=found["released"])


def lock_of(store: Store, folder_id: str, root: Path) -> StoreLock:
    """The lock as this process would hold it."""
    driver = f"pid {os.getpid()} on {socket.gethostname()}"
    return StoreLock(store, Holder(folder_id=folder_id, driver=driver, folder=str(root), renewed_at=""))
