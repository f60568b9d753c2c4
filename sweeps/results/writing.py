"""Writing into a folder that somebody else may have prepared: whole files, and never through a link."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

_OPTUNAS_LOCK = "study.journal.lock"
"""Optuna's lock is itself a link, and is never written through."""


class ForeignLinkError(ValueError):
    """A results folder holds something that is neither a plain file nor a folder."""


def refuse_links(root: Path) -> None:
    """Raise ForeignLinkError for the first link, pipe or device below `root`: a resumed sweep would write through it.

    A folder that was copied from elsewhere keeps its links, and they may point to any file of this user.
    """
    for entry in _entries(root):
        mode = entry.stat(follow_symlinks=False).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) and entry.name != _OPTUNAS_LOCK:
            what = "a link" if stat.S_ISLNK(mode) else "neither a file nor a folder"
            raise ForeignLinkError(
                f"{entry.path} is {what}; a results folder that is written to holds files and folders only"
            )


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    ahead = [os.fspath(folder)]
    while ahead:
        with os.scandir(ahead.pop()) as found:
            for entry in found:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    ahead.append(entry.path)


def replace_text(path: Path, text: str) -> None:
    """Write a file whole: under a new name beside it, then renamed. A link at `path` is replaced, not followed.

    What is no file and no link to one (a terminal, a pipe, `/dev/stdout`) is written to as it is. Raises OSError.
    """
    if (path.exists() and not path.is_file()) or path.is_relative_to("/dev") or path.is_relative_to("/proc"):
        path.write_text(text, encoding="utf-8")
        return
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
