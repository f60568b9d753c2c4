"""Writing into a folder that somebody else may have prepared: whole files, and never through a link."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from sweeps import SpecsweepError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})
"""What a file system says that takes nothing more: no space, over quota, too large, read-only, broken."""
_OPTUNAS_LOCK = "study.journal.lock"
"""Optuna's lock is itself a link, and is never written through."""


class StorageError(SpecsweepError, OSError):
    """The disk under a results folder takes nothing more. What was measured is kept, and a later run goes on."""


def full_disk(error: BaseException | None) -> StorageError | None:
    """What to tell a person if an error, or one that it came from, is that of a full or broken disk; else None."""
    while error is not None:
        if isinstance(error, StorageError):
            return error
        if isinstance(error, OSError) and error.errno in _FULL:
            where = "a file" if error.filename is None else str(error.filename)
            return StorageError(
                f"{where} cannot be written: {os.strerror(error.errno)}. What was measured is kept; "
                "once there is space, the same command goes on"
            )
        error = error.__cause__ or error.__context__
    return None


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


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in an OSError of a write, which does not know it."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def replace_text(path: Path, text: str) -> None:
    """`replace_bytes` of text in UTF-8."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Write a file whole: under a new name beside it, then renamed. A link at `path` is replaced, not followed.

    What is no file and no link to one (a terminal, a pipe, `/dev/stdout`) is written to as it is. Raises OSError, which
    names `path`.
    """
    if (path.exists() and not path.is_file()) or path.is_relative_to("/dev") or path.is_relative_to("/proc"):
        path.write_bytes(content)
        return
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.tmp")
    with naming(path):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
