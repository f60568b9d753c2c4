"""Every test starts without settings that a shell left behind, and may ask for a path that naive code breaks on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

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
