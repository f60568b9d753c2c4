"""The folder of this node that holds leases, scratch folders and GPU locks: this user's alone, or nothing starts."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from sweeps.engines.base import EngineError


def default_node_folder() -> Path:
    """`specsweep-UID` in the folder for temporary files (TMPDIR)."""
    return Path(tempfile.gettempdir()) / f"specsweep-{os.geteuid()}"


def open_node_folder(path: Path) -> Path:
    """Make the folder if it is absent, and check that no other user can write or read it.

    Leases in it say what is killed and removed, so a folder that another user made, a link, and a folder that others
    may enter are refused. Raises EngineError (`engine_unavailable`).
    """
    try:
        path.mkdir(parents=True, mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise _refusal(path, f"it cannot be made: {error.strerror}") from error
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode):
        raise _refusal(path, "it is a link" if stat.S_ISLNK(about.st_mode) else "it is not a folder")
    if about.st_uid != os.geteuid():
        raise _refusal(path, f"it belongs to user {about.st_uid}, this process runs as user {os.geteuid()}")
    if about.st_mode & 0o077:
        raise _refusal(path, f"its mode is {stat.S_IMODE(about.st_mode):04o}, so others may enter it (chmod 700)")
    return path


def _refusal(path: Path, why: str) -> EngineError:
    return EngineError(
        f"{path}: wanted a folder of this user alone for leases and scratch files, but {why}; "
        "remove it, or set TMPDIR to a folder of your own",
        stage="plan",
        kind="engine_unavailable",
    )
