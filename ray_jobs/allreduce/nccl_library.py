"""A copy of the loaded NCCL library, with variables of its own.

NCCL caches each variable once per loaded library, and the dynamic loader tells libraries apart by inode. A copy of the
file is therefore another library with an empty cache: its communicators keep the variables that the environment held
while they were made. Only the standard library is imported, because the server's interpreter loads this file by path.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

UNIQUE_ID_BYTES = 128
BFLOAT16 = 9
"""`ncclDataType_t` of NCCL 2.10 and later."""
SUM = 0
"""`ncclRedOp_t`."""

_REFUSALS = (4, 5)
"""ncclInvalidArgument, ncclInvalidUsage."""
_MAPS = Path("/proc/self/maps")
_LIBRARY = re.compile(r"libnccl\.so(\.\d+)*")


class NcclError(RuntimeError):
    """A call of NCCL failed."""


class NcclRefusedError(NcclError):
    """NCCL cannot be found, copied or loaded, or it refused a call as invalid. The GPU is as before."""


def loaded_library(maps: Path = _MAPS) -> Path:
    """The file of the NCCL library that this process has loaded. Raises NcclRefusedError if there is not just one."""
    fields = (line.rstrip("\n").split(maxsplit=5) for line in maps.read_text(encoding="utf-8").splitlines())
    mapped = dict.fromkeys(Path(words[5]) for words in fields if len(words) == 6)
    found = [path for path in mapped if _LIBRARY.fullmatch(path.name)]
    if len(found) != 1:
        names = ", ".join(map(str, found)) or "none"
        raise NcclRefusedError(f"wanted one loaded library libnccl.so, got {names}")
    return found[0]


def copy_library(target: Path) -> None:
    """Copy the loaded library to `target`. Raises NcclRefusedError."""
    source = loaded_library()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    except OSError as error:
        raise NcclRefusedError(f"cannot copy NCCL: {error}") from error


@contextlib.contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set C environment variables, and put the former ones back. Python's `os.environ` keeps its values.

    Not for use while other threads call `getenv`.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.getenv.restype = ctypes.c_char_p
    before = {name: libc.getenv(os.fsencode(name)) for name in values}
    try:
        for name, value in values.items():
            if libc.setenv(os.fsencode(name), os.fsencode(value), 1):
                raise OSError(ctypes.get_errno(), f"setenv {name}={value}")
        yield
    finally:
        for name, value in before.items():
            if value is None:
                libc.unsetenv(os.fsencode(name))
            else:
                libc.setenv(os.fsencode(name), value, 1)


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


class NcclLibrary:
    """One loaded NCCL library file.

    Its constructor raises NcclRefusedError if the file cannot be loaded. DEEPBIND makes the file's own symbols come
    before those of the NCCL library that torch has loaded.
    """

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_DEEPBIND)
        except OSError as error:
            raise NcclRefusedError(f"cannot load a copy of NCCL: {error}") from error
        library.ncclGetErrorString.restype = ctypes.c_char_p
        library.ncclCommInitRank.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int]
        library.ncclAllReduce.argtypes = [
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
            *(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
        ]
        self._library = library

    def unique_id(self) -> bytes:
        """For one communicator, made by one rank for all. Raises NcclError."""
        unique_id = _UniqueId()
        self._check("ncclGetUniqueId", self._library.ncclGetUniqueId(ctypes.byref(unique_id)))
        return bytes(unique_id)

    def communicator(self, unique_id: bytes, *, rank: int, world_size: int) -> NcclCommunicator:
        """This rank's part of a new communicator, on the current CUDA device. Returns once every rank has called it.

        Raises NcclError.
        """
        handle = ctypes.c_void_p()
        given = _UniqueId.from_buffer_copy(unique_id)
        self._check("ncclCommInitRank", self._library.ncclCommInitRank(ctypes.byref(handle), world_size, given, rank))
        return NcclCommunicator(self, handle)

    def all_reduce(self, handle: ctypes.c_void_p, pointer: int, count: int, stream: int) -> None:
        """Enqueue a bf16 sum in place. Raises NcclError."""
        code = self._library.ncclAllReduce(pointer, pointer, count, BFLOAT16, SUM, handle, stream)
        self._check("ncclAllReduce", code)

    def _check(self, call: str, code: int) -> None:
        if code:
            error = NcclRefusedError if code in _REFUSALS else NcclError
            raise error(f"{call}: {self._library.ncclGetErrorString(code).decode(errors='replace')}")


class NcclCommunicator:
    """One rank's communicator. It is never closed: closing a broken one can hang, and the process ends soon."""

    def __init__(self, library: NcclLibrary, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle

    def all_reduce(self, pointer: int, *, count: int, stream: int) -> None:
        """Enqueue a sum in place of `count` bf16 values at device address `pointer`. Raises NcclError."""
        self._library.all_reduce(self._handle, pointer, count, stream)
