"""Everything that names SGLang releases agrees with the one list of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from sweeps.engines.sglang.versions import NEWEST, OLDEST, SUPPORTED, Release, release_of, supported

ROOT = Path(__file__).parents[4]
TARGETS = ROOT / "sweeps" / "cycle_probe" / "specsweep_probe" / "targets.py"


def test_the_probe_knows_the_same_releases() -> None:
    for node in ast.walk(ast.parse(TARGETS.read_text(encoding="utf-8"))):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "BY_VERSION":
            assert isinstance(node.value, ast.Dict)
            assert [ast.literal_eval(key) for key in node.value.keys if key is not None] == list(SUPPORTED)
            return
    raise AssertionError("the probe has no table BY_VERSION")


def test_the_whole_engine_suite_runs_over_the_oldest_and_the_newest() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert set(re.findall(r"ENGINE_VENV\)-(\d+\.\d+\.\d+)", makefile)) == {SUPPORTED[0], SUPPORTED[-1]}


def test_the_newest_is_what_a_gpu_node_installs() -> None:
    assert f"sglang=={SUPPORTED[-1]}" in (ROOT / "requirements-gpu.txt").read_text(encoding="utf-8").split()


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.5.17", (0, 5, 17)),
        ("v0.5.17.post1", (0, 5, 17)),
        ("0.5.21+cpu", (0, 5, 21)),
        ("main", None),
        ("", None),
        (None, None),
    ],
)
def test_release_of(version: str | None, release: Release | None) -> None:
    assert release_of(version) == release


def test_releases_are_listed_oldest_first() -> None:
    assert [supported(version) for version in SUPPORTED] == sorted(supported(version) for version in SUPPORTED)
    assert (supported(SUPPORTED[0]), supported(SUPPORTED[-1])) == (OLDEST, NEWEST)
    with pytest.raises(ValueError, match=r"wanted one of 0\.5\.16, .*, got '0\.5\.2'"):
        supported("0.5.2")
