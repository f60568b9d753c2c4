"""The import rule: who may know whom, and where the frameworks may appear."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("sweeps", "ray_jobs", "analysis", "benchmarks")

LAYERS = {
    # A module may import its own layer and below; a module of `sweeps` that is not named here is in layer 0.
    "ray_jobs": 5,
    "ray_jobs.tune_bridge": 4,
    "sweeps.search.study": 3,
    "sweeps.measure.trial": 3,
    "sweeps.search.optuna_study": 2,
    "sweeps.search.samplers": 2,
    "sweeps.search.schedule": 2,
    "sweeps.search.mixed_acceptance": 2,
    "sweeps.search.resume": 2,
    "sweeps.search.cycle_model.optuna_plugins": 2,
    "sweeps.search.cycle_model.estimator": 2,
    "sweeps.search.cycle_model.model": 2,
    "sweeps.search.cycle_model.terms": 2,
    "sweeps.search.cycle_model.allreduce_prior": 2,
    "sweeps.search.cycle_model.acceptance_curve": 2,
    "sweeps.search.cycle_model.random_effects": 2,
    "sweeps.search.cycle_model.accept_length": 2,
    "sweeps.search.cycle_model.block_series": 2,
    "sweeps.search.cycle_model.equivalent_sets": 2,
    "sweeps.search.cycle_model.pinned_length": 2,
    "sweeps.engines": 2,
    "sweeps.engines.evidence": 2,
    "sweeps.measure.rows": 2,
    "sweeps.measure.output_check": 2,
    "sweeps.results.journal": 1,
    "sweeps.measure.ledger": 1,
    "sweeps.search.observations": 1,
    "sweeps.engines.base": 1,
    "sweeps.engines.summary": 1,
    "sweeps.spec.space": 0,
    "sweeps.spec.model": 0,
    "sweeps.nccl.grammar": 0,
    "sweeps.spec.workload": 0,
    "sweeps.results.tables": 0,
}
STRANGERS = [("sweeps.search.study", "sweeps.measure.trial"), ("sweeps.measure.trial", "sweeps.search.study")]
FRAMEWORKS = {
    "ray": ("ray_jobs.tune_bridge", "ray_jobs", "benchmarks"),
    "optuna": (
        "sweeps.search.study",
        "sweeps.search.optuna_study",
        "sweeps.search.samplers",
        "sweeps.search.cycle_model.optuna_plugins",
        "ray_jobs.tune_bridge",
        "ray_jobs",
        "benchmarks",
    ),
    "plotly": ("analysis",),
    "polars": ("analysis",),
    "duckdb": ("analysis", "benchmarks"),
    # These run in the server's interpreter, not in the driver's.
    "sglang": ("sweeps.cycle_probe", "ray_jobs.preflight.server_versions"),
    "torch": (
        "sweeps.cycle_probe",
        "ray_jobs.preflight.server_versions",
        "ray_jobs.allreduce.ranks",
        "ray_jobs.allreduce.worker",
    ),
}


def modules() -> list[tuple[str, Path]]:
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def layer(module: str) -> int | None:
    known = [name for name in LAYERS if within(module, name)]
    if known:
        return LAYERS[max(known, key=len)]
    return 0 if within(module, "sweeps") and not within(module, "sweeps.cycle_probe") else None


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_point_downwards(module: str, path: Path) -> None:
    for imported in imports(path):
        own, theirs = layer(module), layer(imported)
        assert own is None or theirs is None or theirs <= own, f"{module} imports {imported} from above"
        assert not any(within(module, a) and within(imported, b) for a, b in STRANGERS), f"{module} imports {imported}"
        assert not within(imported, "sweeps.cycle_probe") or within(module, "sweeps.cycle_probe"), (
            f"{module} imports {imported}: the probe runs inside the server"
        )


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_frameworks_stay_where_they_belong(module: str, path: Path) -> None:
    for imported in imports(path):
        for framework, allowed in FRAMEWORKS.items():
            assert not within(imported, framework) or within(module, *allowed), f"{module} imports {imported}"


@pytest.mark.parametrize(
    ("module", "path"), [entry for entry in modules() if within(entry[0], "analysis")], ids=lambda value: str(value)
)
def test_analysis_knows_only_the_tables(module: str, path: Path) -> None:
    own = {imported for imported in imports(path) if within(imported, "sweeps", "ray_jobs", "benchmarks")}
    assert all(within(imported, "sweeps.results.tables") or imported == "sweeps" for imported in own), sorted(own)
