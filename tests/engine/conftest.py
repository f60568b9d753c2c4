"""The real SGLang on the CPU: each server is started once, measured, and stopped before any test looks at it."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from benchmarks.bench_engine import BenchEngine
from sweeps.engines.base import BlockRecord, LaunchReport
from sweeps.engines.sglang.load_client import Load
from sweeps.spec.model import SweepSpec
from sweeps.spec.reading import parse_spec
from sweeps.spec.space import Configuration, Space
from sweeps.spec.workload import Block, plan_blocks

ROOT = Path(__file__).parents[2]
SPEC = ROOT / "sweeps" / "specs" / "tiny_cpu.yaml"
PYTHON_VARIABLE = "SPECSWEEP_ENGINE_PYTHON"
"""Interpreter with another SGLang version, for the suite over all versions."""


@pytest.fixture(scope="session")
def document() -> dict[str, Any]:
    """The spec of the tiny model, with the interpreter under test."""
    content: dict[str, Any] = yaml.safe_load(SPEC.read_text(encoding="utf-8"))
    content["engine"]["python"] = os.environ.get(PYTHON_VARIABLE, content["engine"]["python"])
    if not (ROOT / content["engine"]["python"]).exists():
        pytest.skip(f"no {content['engine']['python']}: `make engine` builds it")
    return content


@dataclass
class Served:
    """What one server left: everything the tests ask about, kept after its end."""

    report: LaunchReport
    blocks: list[BlockRecord] = field(default_factory=list)
    by_steps: dict[int, BlockRecord] = field(default_factory=dict)
    switches: dict[int, LaunchReport | None] = field(default_factory=dict)
    load: Load | None = None
    crowded: BlockRecord | None = None
    anchor: BlockRecord | None = None
    alive_after: list[int] = field(default_factory=list)
    files_after: list[Path] = field(default_factory=list)

    @property
    def hashes(self) -> list[str]:
        return [request.output_hash for block in self.blocks for request in block.requests]


class Bench:
    """Builds specs and engines on the tiny model."""

    def __init__(self, document: Mapping[str, Any], folder: Path) -> None:
        self._document = document
        self.folder = folder

    def spec(self, *, engine: Mapping[str, Any] | None = None, **sections: Any) -> SweepSpec:
        """The tiny spec with some engine fields (mappings are merged) and whole sections replaced."""
        content = copy.deepcopy(dict(self._document))
        for name, value in (engine or {}).items():
            content["engine"][name] = {**content["engine"].get(name, {}), **value} if isinstance(value, dict) else value
        content.update(sections)
        return parse_spec(yaml.safe_dump(content), source="tiny_cpu.yaml, changed")

    def engine(self, spec: SweepSpec) -> BenchEngine:
        return BenchEngine(spec, logs=self.folder / "logs", node_folder=self.folder / "node")

    def blocks(self, spec: SweepSpec) -> tuple[Block, ...]:
        return tuple(block for block in plan_blocks(spec.workload, folder=self.folder) if not block.warmup)

    def left(self, processes: list[psutil.Process], served: Served) -> None:
        """Note which of the server's processes and files are still there."""
        served.alive_after = [each.pid for each in processes if each.is_running() and each.status() != "zombie"]
        served.files_after = list((self.folder / "node").glob("server-*"))


@pytest.fixture(scope="session")
def bench(document: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(document, tmp_path_factory.mktemp("engine"))


def configuration(spec: SweepSpec, num_steps: int, eagle_topk: int = 1) -> Configuration:
    """The spec's configuration with these steps; its control for 0."""
    space = Space(spec)
    if num_steps == 0:
        return space.control
    found = [c for c in space.configurations() if (c.num_steps, c.eagle_topk) == (num_steps, eagle_topk)]
    return found[0]
