"""The installed package: one version, one command, and everything that the code looks up beside itself."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import sweeps
from ray_jobs.__main__ import COMMANDS, main
from sweeps.spec.reading import SHIPPED

ROOT = Path(__file__).parents[1]
BREAK_EVEN = ["break-even", "--cycle-ms", "29.95", "--baseline-tok-s", "82.2"]


def test_project_and_probe_have_one_version() -> None:
    (folder,) = (ROOT / "sweeps" / "cycle_probe").glob("specsweep_probe-*.dist-info")
    metadata = (folder / "METADATA").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "sweeps.__version__"}
    assert folder.name == f"specsweep_probe-{sweeps.__version__}.dist-info"
    assert re.findall(r"^Version: (.+)$", metadata, re.MULTILINE) == [sweeps.__version__]
    assert f"## {sweeps.__version__}" in changelog


def test_the_lock_holds_every_pin_with_its_hashes() -> None:
    parts = ("requirements-light.txt", "requirements-analysis.txt", "tests/requirements.txt")
    text = "\n".join((ROOT / part).read_text(encoding="utf-8") for part in parts)
    pins = set(re.findall(r"^([a-z0-9-]+)(?:\[[a-z,]+\])?==(\S+)", text, re.MULTILINE))
    locked = (ROOT / "requirements-lock.txt").read_text(encoding="utf-8")
    blocks = re.findall(
        r"^([a-z0-9-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", locked, re.MULTILINE
    )

    assert len(pins) > 15
    assert pins <= {(name, version) for name, version, _ in blocks}
    assert len(blocks) == len(re.findall("==", locked))


@pytest.mark.parametrize("words", [[], ["reprot"], ["--nonsense"]])
def test_an_unknown_command_is_one_line_with_the_choices(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(name in line for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_under_its_own_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: specsweep {name} ")


@pytest.mark.parametrize("words", [["run"], ["dry-run"], ["allreduce", "--out", "none", "--sets"], ["verdict"]])
def test_what_does_not_exist_is_one_line_and_exit_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "no_such_thing"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "no_such_thing" in line


def test_a_shipped_spec_is_found_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dry-run", "founding_case"]) == 0
    assert "18 configurations" in capsys.readouterr().out
    assert {path.stem for path in SHIPPED.glob("*.yaml")} >= {"founding_case", "kimi_k25_8gpu"}


def test_reading_results_starts_no_ray() -> None:
    asked = [BREAK_EVEN, ["verdict", "nowhere"], ["report", "nowhere"], ["server-log", "nowhere"]]
    program = (
        "import sys\nfrom ray_jobs.__main__ import main\n"
        f"codes = [main(words) for words in {asked!r}]\n"
        "assert codes == [0, 2, 2, 2], codes\n"
        "loaded = {'ray', 'optuna', 'torch'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)


def _version(package: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, importlib.metadata.version(package).split(".")[:2]))
    except importlib.metadata.PackageNotFoundError:
        return ()


@pytest.mark.skipif(_version("setuptools") < (77,), reason="needs the setuptools of tests/requirements.txt")
def test_the_wheel_runs_without_the_checkout(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    source, venv, elsewhere = tmp_path / "source", tmp_path / "venv", tmp_path / "elsewhere"
    elsewhere.mkdir()
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        if name.startswith(("sweeps/", "ray_jobs/", "analysis/", "tests/requirements")) or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())

    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(build, check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob(f"specsweep-{sweeps.__version__}-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = str(venv / "bin" / "python")
    install = [*pip, "--python", python, "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, text=True)
    (site,) = venv.glob("lib/python3*/site-packages")
    dependencies = [folder for folder in sys.path if Path(folder).name == "site-packages"]
    (site / "dependencies.pth").write_text("\n".join(dependencies) + "\n", encoding="utf-8")

    def specsweep(*words: str) -> str:
        command = [str(venv / "bin" / "specsweep"), *words]
        return subprocess.run(command, cwd=elsewhere, check=True, capture_output=True, text=True).stdout

    assert "18 configurations" in specsweep("dry-run", "founding_case")
    assert "2.46" in specsweep(*BREAK_EVEN)
    assert specsweep("--version").strip() == sweeps.__version__
    look = (
        "from pathlib import Path\n"
        "import analysis, ray_jobs, sweeps, ray_jobs.allreduce_table as table, sweeps.engines.process.lease as lease\n"
        "from ray_jobs.allreduce.ranks import WORKER\n"
        "from sweeps.engines.sglang.launch_plan import PROBE_FOLDER\n"
        "from sweeps.engines.simulated.machine_profile import PROFILES\n"
        "assert all((Path(p.__file__).parent / 'py.typed').is_file() for p in (analysis, ray_jobs, sweeps))\n"
        "assert WORKER.is_file() and table._VERSIONS.is_file() and Path(lease.__file__).is_file()\n"
        "assert list(PROBE_FOLDER.glob('*.dist-info/entry_points.txt')) and list(PROFILES.glob('*.yaml'))\n"
        f"assert Path(sweeps.__file__).is_relative_to({str(venv)!r}), sweeps.__file__\n"
    )
    subprocess.run([python, "-c", look], cwd=elsewhere, check=True, capture_output=True, text=True)
