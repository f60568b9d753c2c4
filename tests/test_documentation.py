"""What the documents promise is there: links, make targets, commands, specs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import get_args

import pytest

from ray_jobs.__main__ import COMMANDS
from sweeps.engines.base import Kind

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path
    for folders in ("", "deploy/", "benchmarks/", "recordings/", "recordings/*/")
    for path in ROOT.glob(folders + "*.md")
)
LINK = re.compile(r"\]\(([^)#\s]+)")
MODULE = re.compile(r"python -m ((?:ray_jobs|analysis|benchmarks)[\w.]*)")
TARGET = re.compile(r"\bmake ([a-z][a-z-]+(?: [a-z][a-z-]+)*)$|`make ([a-z-]+)`", re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document: Path) -> None:
    links = [link for link in LINK.findall(document.read_text(encoding="utf-8")) if "://" not in link]
    missing = [link for link in links if not (document.parent / link).exists()]

    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_names_a_module(document: Path) -> None:
    modules = set(MODULE.findall(document.read_text(encoding="utf-8")))
    missing = [name for name in modules if importlib.util.find_spec(name.rstrip(".")) is None]

    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_specsweep_command_exists(document: Path) -> None:
    named = set(re.findall(r"(?:`|^    )specsweep ([a-z][a-z-]*)", document.read_text(encoding="utf-8"), re.MULTILINE))

    assert named <= set(COMMANDS)


def test_the_readme_is_short_and_shows_every_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    assert text.count("\n") <= 120
    assert not [name for name in COMMANDS if name != "allreduce" and f"specsweep {name}" not in text]


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = "\n".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    named = {word for words in TARGET.findall(text) for group in words for word in group.split()}

    assert named
    assert named <= targets


def test_documents_name_no_path_of_the_machine_they_were_written_on() -> None:
    files = [*DOCUMENTS, *ROOT.glob("sweeps/**/*.yaml"), ROOT / "pyproject.toml", ROOT / "cluster.yaml"]
    machine = re.compile(r"/(?:work|root|home/\w+)/")

    assert not [path for path in files if machine.search(path.read_text(encoding="utf-8"))]


def test_every_kind_of_failure_is_documented() -> None:
    table = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")

    assert not [kind for kind in (*get_args(Kind), "interrupted") if not re.search(rf"`(failed: )?{kind}`", table)]
