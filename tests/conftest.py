"""Every test starts without settings that a shell left behind, and may ask for a path that naive code breaks on."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.s3_server import CREDENTIALS, S3Server, serving

# Modules of assertions that are no test modules.
pytest.register_assert_rewrite("tests.sweeps.engines.contract")

# A busy machine makes an example slow, not wrong.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")

_SWEPT_PREFIXES = ("NCCL_", "SGLANG_", "RAY_", "TUNE_")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(_SWEPT_PREFIXES):
            monkeypatch.delenv(name)


@pytest.fixture
def weird_tmp_path(tmp_path: Path) -> Path:
    """A folder whose name holds a space, a quote, a percent sign and a letter beyond ASCII."""
    path = tmp_path / "re sults'100%é"
    path.mkdir()
    return path


@pytest.fixture(scope="session")
def _s3_of_the_session() -> Iterator[S3Server]:
    with serving() as server:
        yield server


@pytest.fixture
def s3(_s3_of_the_session: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A real S3 server, and credentials for it."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return _s3_of_the_session


@pytest.fixture
def s3_url(s3: S3Server) -> str:
    """A folder of a bucket of its own, made already."""
    import pyarrow.fs

    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    url = s3.url(bucket, "team/sweep")
    files, _ = pyarrow.fs.FileSystem.from_uri(url)
    files.create_dir(bucket)
    return url
