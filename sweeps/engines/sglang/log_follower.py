"""Follows a server's log while it grows: each byte is read once, and what a boot asks of it is kept up line by line."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

from sweeps.engines.base import Stage
from sweeps.engines.sglang.server_log import StageTracker

_KEPT_BYTES = 8 << 20
"""Of the log's beginning, and as much of its end: arguments and timings stand first, causes last."""


class LogFollower:
    """One log file, read as far as it goes. A file that does not exist yet is empty.

    A log of more than twice _KEPT_BYTES loses its middle in `text`, not in `stage`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._unfinished = b""
        self._tracker = StageTracker()
        self.grew_s = time.monotonic()
        """When the file was last seen to have grown."""

    @property
    def bytes_read(self) -> int:
        return self._offset

    @property
    def stage(self) -> Stage:
        """Of the last milestone in what was read so far."""
        return self._tracker.stage

    def read(self) -> bool:
        """Read what was written since the last call; whether there was any."""
        grew = False
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                while data := file.read(1 << 20):
                    self._keep(data)
                    grew = True
        except FileNotFoundError:
            return False
        if grew:
            self.grew_s = time.monotonic()
        return grew

    def text(self) -> str:
        """The log, read up to its end."""
        self.read()
        cut = (
            [] if self._offset <= len(self._head) + self._tail_bytes else [b"\n(the middle of this log is left out)\n"]
        )
        return b"".join((bytes(self._head), *cut, *self._tail)).decode("utf-8", "replace")

    def _keep(self, data: bytes) -> None:
        self._offset += len(data)
        room = _KEPT_BYTES - len(self._head)
        self._head += data[:room]
        if rest := data[room:]:
            self._tail.append(rest)
            self._tail_bytes += len(rest)
            while self._tail_bytes - len(self._tail[0]) >= _KEPT_BYTES:
                self._tail_bytes -= len(self._tail.popleft())
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        self._unfinished = self._unfinished[-(1 << 16) :]
        for line in lines:
            self._tracker.feed(line.decode("utf-8", "replace"))
