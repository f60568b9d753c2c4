"""Where results are: a folder of this machine, or the URL of its copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sweeps.results.store import fetched, is_url
from sweeps.results.tables import TABLES

_NOT_READ = ("cycles",)
"""Nothing that a command says is worked out from single cycles, and they are most of the bytes."""


@contextmanager
def at_hand(place: str) -> Iterator[Path]:
    """The folder of a path; of a URL, a temporary folder with what the analysis reads. Raises StoreError."""
    if not is_url(place):
        yield Path(place)
        return
    with fetched(place, tables=[table for table in TABLES if table not in _NOT_READ]) as folder:
        yield folder
