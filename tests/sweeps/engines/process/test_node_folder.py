"""The node folder: what is in it decides what is killed, so it must be this user's alone."""

import os
from pathlib import Path

import pytest

from sweeps.engines.base import EngineError
from sweeps.engines.process.node_folder import default_node_folder, open_node_folder


def test_a_new_folder_is_this_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = open_node_folder(tmp_path / "node")
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert open_node_folder(folder) == folder


def test_the_folder_is_named_after_the_user() -> None:
    assert default_node_folder().name == f"specsweep-{os.geteuid()}"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o755, 0o701])
def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "node").chmod(mode)
    with pytest.raises(EngineError, match=f"its mode is 0{mode:o}") as raised:
        open_node_folder(tmp_path / "node")
    assert raised.value.kind == "engine_unavailable"


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "node").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345678)
    with pytest.raises(EngineError, match="belongs to user"):
        open_node_folder(tmp_path / "node")


def test_a_link_and_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "node").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match="it is a link"):
        open_node_folder(tmp_path / "node")
    with pytest.raises(EngineError, match="not a folder"):
        open_node_folder(tmp_path / "file")
    with pytest.raises(EngineError, match="cannot be made"):
        open_node_folder(tmp_path / "file" / "node")
