"""The import rule: who may know whom, and where the frameworks may appear."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("sweeps", "ray_jobs", "analysis", "benchmarks")

EVERYWHERE = ("sweeps.choices", "sweeps.command_end", "sweeps.foreign_text", "sweeps.redaction")

MAY_IMPORT = {
    # Each package, and which of ours it may import beside itself. Everything may import those of EVERYWHERE.
    "sweeps.choices": set[str](),
    "sweeps.command_end": {"sweeps.results"},
    "sweeps.foreign_text": set[str](),
    "sweeps.redaction": set[str](),
    "sweeps.results": set[str](),
    "sweeps.nccl": set[str](),
    "sweeps.spec": {"sweeps.nccl"},
    "sweeps.engines": {"sweeps.spec", "sweeps.nccl", "sweeps.results"},
    "sweeps.measure": {"sweeps.engines", "sweeps.spec", "sweeps.results"},
    "sweeps.search": {"sweeps.measure", "sweeps.engines", "sweeps.spec", "sweeps.nccl", "sweeps.results"},
    "ray_jobs.__main__": {"ray_jobs", "sweeps", "analysis"},
    "ray_jobs": {"sweeps"},
    "analysis.importing": {"sweeps.results", "sweeps.nccl"},
    "analysis": {"sweeps.results", "analysis.importing"},
}
APART = ("sweeps.engines.sglang", "sweeps.engines.simulated", "sweeps.engines.replay")
"""Engines know nothing of each other."""
WITHIN_ANALYSIS = ("analysis.importing", "analysis.data", "analysis.judge", "analysis.show", "analysis.query")
"""Each imports only those before it."""
PROBE = "sweeps.cycle_probe"
"""Runs inside the server, in the server's interpreter: imports nothing of ours, and nothing of ours imports it."""

FRAMEWORKS = {
    "ray": ("ray_jobs", "benchmarks"),
    "optuna": ("sweeps.search", "ray_jobs", "benchmarks"),
    "plotly": ("analysis",),
    "polars": ("analysis",),
    "duckdb": ("analysis", "benchmarks"),
    "sglang": (PROBE, "ray_jobs.preflight.server_versions", "benchmarks.miniature.pinning"),
    "torch": (PROBE, "ray_jobs.preflight.server_versions", "ray_jobs.allreduce", "benchmarks.miniature"),
}


def modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def package_of(module: str) -> str | None:
    return next((name for name in MAY_IMPORT if within(module, name)), None)


def test_packages_import_only_what_the_rule_allows() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, path in modules()
        if (own := package_of(module)) is not None
        for imported in imports(path)
        if (theirs := package_of(imported)) is not None
        if not within(theirs, own, *EVERYWHERE, *MAY_IMPORT[own])
    ]
    assert not wrong, "\n".join(wrong)


def test_engines_know_nothing_of_each_other() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, path in modules()
        if within(module, *APART)
        for imported in imports(path)
        if within(imported, *APART) and not any(within(module, each) and within(imported, each) for each in APART)
    ]
    assert not wrong, "\n".join(wrong)


def test_analysis_loads_then_judges_then_shows() -> None:
    floors = {name: number for number, name in enumerate(WITHIN_ANALYSIS)}

    def floor(module: str) -> int | None:
        return next((number for name, number in floors.items() if within(module, name)), None)

    wrong = [
        f"{module} imports {imported}"
        for module, path in modules()
        if (own := floor(module)) is not None
        for imported in imports(path)
        if (theirs := floor(imported)) is not None and theirs > own
    ]
    assert not wrong, "\n".join(wrong)


def test_the_probe_is_alone() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, path in modules()
        for imported in imports(path)
        if (within(imported, PROBE) and not within(module, PROBE))
        or (within(module, PROBE) and within(imported, *PACKAGES) and not within(imported, PROBE))
    ]
    assert not wrong, "\n".join(wrong)


def test_frameworks_stay_where_they_belong() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, path in modules()
        for imported in imports(path)
        for framework, allowed in FRAMEWORKS.items()
        if within(imported, framework) and not within(module, *allowed)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_test_module_imports_another() -> None:
    """What tests share stands in a plain module: a world, a stub, a contract."""
    wrong = [
        f"{path.relative_to(ROOT)} imports {imported}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for imported in imports(path)
        if imported.startswith("tests.") and any(part.startswith("test_") for part in imported.split("."))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_folder_of_tests_is_a_package() -> None:
    """Else two test modules of one name, in folders that mirror two packages, are one to Python."""
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(folders) > 10
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]


def test_the_rule_sees_what_it_forbids() -> None:
    assert package_of("sweeps.spec.model") == "sweeps.spec"
    assert package_of("sweeps.cycle_probe.specsweep_probe.hooks") is None
    assert len(list(modules())) > 100
    assert set(imports(Path(__file__))) >= {"ast", "pathlib", "pathlib.Path"}
