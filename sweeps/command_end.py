"""How a command ends: what is not our defect is one line and an exit code, never a traceback."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

from sweeps import SpecsweepError
from sweeps.foreign_text import print_error
from sweeps.results.writing import full_disk

REFUSED = 2
"""Exit code: the command could not begin, or the disk took nothing more."""
PIPE_CLOSED = 128 + 13
"""Exit code: whoever read the output went away (`| head`); a shell says so of SIGPIPE."""
_OF_THE_PATH = frozenset(
    {errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ESTALE}
)
"""What a file system says of a path that was given."""


def end(command: Callable[[], int]) -> int:
    """Run a command and return its exit code. Errors that a person can mend are one line on standard error."""
    try:
        code = command()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its end
        return PIPE_CLOSED
    except SpecsweepError as error:
        return _refuse(error)
    except OSError as error:
        if (full := full_disk(error)) is not None:
            return _refuse(full)
        if error.errno not in _OF_THE_PATH:
            raise
        return _refuse(f"{error.filename or 'a file'}: {error.strerror}")
    return code


def _refuse(said: object) -> int:
    print_error(said)
    return REFUSED
