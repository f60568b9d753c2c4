"""Copies of a small C library that caches its variables as NCCL does."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ray_jobs.allreduce.nccl_library import NcclLibrary, NcclRefusedError, loaded_library, variables

SOURCE = r"""
#include <stdlib.h>
#include <string.h>
typedef struct { char internal[128]; } ncclUniqueId;
static const char *cached = NULL;
static void read_once(void) { if (!cached) cached = getenv("NCCL_PROTO") ? strdup(getenv("NCCL_PROTO")) : "unset"; }
int ncclGetUniqueId(ncclUniqueId *id) { read_once(); memset(id, 0, 128); strcpy(id->internal, cached); return 0; }
int ncclCommInitRank(void **comm, int n, ncclUniqueId id, int rank) {
    read_once();
    if (!strcmp(cached, "Refused")) return 5;
    *comm = strdup(id.internal);
    return 0;
}
int ncclAllReduce(const void *in, void *out, size_t count, int type, int op, void *comm, void *stream) {
    if (type != 9 || op != 0) return 4;
    for (size_t i = 0; i < count; i++) ((unsigned short *)out)[i] = (unsigned short)strlen(comm);
    return 0;
}
const char *ncclGetErrorString(int code) { return code == 5 ? "invalid usage" : "invalid argument"; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("nccl")
    (folder / "nccl.c").write_text(SOURCE)
    path = folder / "libnccl.so.2"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(path), str(folder / "nccl.c")], check=True)
    return path


def load(library: Path, name: str) -> NcclLibrary:
    copy = library.with_name(name)
    shutil.copyfile(library, copy)
    loaded = NcclLibrary(copy)
    copy.unlink()  # a loaded library needs no file name
    return loaded


def seen(library: NcclLibrary) -> str:
    return library.unique_id().rstrip(b"\0").decode()


def test_each_copy_keeps_the_variables_it_was_first_used_with(library: Path) -> None:
    first, second, third = (load(library, f"copy-{number}.so") for number in range(3))
    with variables({"NCCL_PROTO": "LL"}):
        assert seen(first) == "LL"
    with variables({"NCCL_PROTO": "Simple"}):
        assert seen(second) == "Simple"
    assert [seen(each) for each in (first, second, third)] == ["LL", "Simple", "unset"]


def test_a_communicator_sums_in_place_and_errors_are_in_nccls_words(library: Path) -> None:
    with variables({"NCCL_PROTO": "LL128"}):
        loaded = load(library, "sums.so")
        communicator = loaded.communicator(loaded.unique_id(), rank=0, world_size=1)
    values = (ctypes.c_uint16 * 3)()
    communicator.all_reduce(ctypes.addressof(values), count=3, stream=0)
    assert list(values) == [len("LL128")] * 3
    with variables({"NCCL_PROTO": "Refused"}):
        refused = load(library, "refused.so")
        unique_id = refused.unique_id()
        with pytest.raises(NcclRefusedError, match=r"^ncclCommInitRank: invalid usage$"):
            refused.communicator(unique_id, rank=0, world_size=1)


def test_a_file_that_is_no_library_is_told(tmp_path: Path) -> None:
    (tmp_path / "libnccl.so").write_text("no library")
    with pytest.raises(NcclRefusedError, match="cannot load a copy of NCCL"):
        NcclLibrary(tmp_path / "libnccl.so")


def test_variables_are_put_back_and_python_never_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p

    def inside_and_fail() -> None:
        with variables({"NCCL_ALGO": "Tree", "NCCL_PROTO": "LL"}):
            assert (libc.getenv(b"NCCL_ALGO"), libc.getenv(b"NCCL_PROTO")) == (b"Tree", b"LL")
            assert os.environ["NCCL_ALGO"] == "Ring"
            assert "NCCL_PROTO" not in os.environ
            raise NcclRefusedError("no algorithm")

    with pytest.raises(NcclRefusedError):
        inside_and_fail()
    assert (libc.getenv(b"NCCL_ALGO"), libc.getenv(b"NCCL_PROTO")) == (b"Ring", None)


def test_the_loaded_library_is_found_in_the_process_itself(library: Path) -> None:
    code = (
        "import ctypes\n"
        "from ray_jobs.allreduce.nccl_library import loaded_library\n"
        f"ctypes.CDLL({str(library)!r})\n"
        "print(loaded_library())\n"
    )
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    assert Path(found) == library


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["/a b/libnccl.so.2", "/usr/lib/libc.so.6", "/a/libnccl-net.so"], "/a b/libnccl.so.2"),
        (["/usr/lib/libc.so.6"], None),
        (["/a/libnccl.so.2", "/b/libnccl.so.2.28.9"], None),
    ],
)
def test_one_loaded_library_or_an_error(tmp_path: Path, names: list[str], wanted: str | None) -> None:
    maps = tmp_path / "maps"
    lines = [f"7f0000000000-7f0000001000 r-xp 00000000 08:01 12345      {name}\n" for name in names for _ in range(2)]
    maps.write_text("7f0000000000-7f0000001000 rw-p 00000000 00:00 0 \n" + "".join(lines))
    if wanted is not None:
        assert loaded_library(maps) == Path(wanted)
    else:
        with pytest.raises(NcclRefusedError, match="wanted one loaded library"):
            loaded_library(maps)
