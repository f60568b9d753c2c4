"""cluster.yaml and deploy/: accepted by Ray's own validation, and every flag and file in them exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray._private.runtime_env.packaging import get_excludes_from_ignore_files
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import start

ROOT = Path(__file__).parents[2]
START_COMMANDS = ("head_start_ray_commands", "worker_start_ray_commands")


@pytest.fixture(scope="module")
def cluster() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    return document


def test_ray_accepts_it(cluster: dict[str, Any]) -> None:
    prepared = prepare_config(cluster)
    validate_config(prepared)
    assert prepared["provider"]["type"] == "local"


def test_ray_would_refuse_an_unknown_key(cluster: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="min_wrokers"):
        validate_config(prepare_config({**cluster, "min_wrokers": 1}))


def test_every_worker_is_wanted(cluster: dict[str, Any]) -> None:
    assert cluster["min_workers"] == cluster["max_workers"] == len(cluster["provider"]["worker_ips"])


@pytest.mark.parametrize("commands", START_COMMANDS)
def test_start_commands_use_rays_own_options_and_say_the_auth_mode(cluster: dict[str, Any], commands: str) -> None:
    text = next(command for command in cluster[commands] if "ray start" in command)
    assert "RAY_AUTH_MODE=token" in text
    known = {option for parameter in start.params for option in parameter.opts}
    given = {word.split("=")[0] for word in shlex.split(text.split("ray start", 1)[1])}
    assert given
    assert given <= known


def test_mounted_and_named_files_exist(cluster: dict[str, Any]) -> None:
    mounted = [source for source in cluster["file_mounts"].values() if source.startswith("./")]
    assert mounted
    assert all((ROOT / source).is_file() for source in mounted)


def test_modules_and_specs_named_in_deployment_texts_exist() -> None:
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("cluster.yaml", "deploy/README.md"))
    modules = set(re.findall(r"python -m ([a-z_.]+)", text))
    assert modules
    assert all((ROOT / f"{module.replace('.', '/')}.py").is_file() for module in modules)
    assert all((ROOT / path).is_file() for path in re.findall(r"sweeps/specs/[a-z0-9_]+\.yaml", text))


def test_a_job_uploads_the_code_and_not_the_history(tmp_path: Path) -> None:
    for name in (".gitignore", ".rayignore"):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    kept = [tmp_path / "sweeps" / "specs" / "a.yaml", tmp_path / "recordings" / "h200" / "sweep.parquet"]
    left = [tmp_path / ".git" / "pack", tmp_path / ".venv" / "lib", tmp_path / "results" / "old" / "sweep.json"]
    for path in (*kept, *left):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def parts(path: Path) -> list[Path]:
        return [path, *(parent for parent in path.parents if parent.is_relative_to(tmp_path))]

    excluded = get_excludes_from_ignore_files(tmp_path, include_gitignore=True)
    uploaded = [path for path in (*kept, *left) if not any(rule(part) for rule in excluded for part in parts(path))]
    assert uploaded == kept


def test_every_part_of_the_requirements_pins_everything() -> None:
    parts = ("light", "gpu", "analysis")
    for name in (*(f"requirements-{part}.txt" for part in parts), "tests/requirements.txt"):
        lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text(encoding="utf-8").splitlines()]
        pins = [line for line in lines if line and not line.startswith("-r ")]
        assert pins
        assert all(re.fullmatch(r"[A-Za-z0-9-]+(\[[a-z0-9,]+\])?==[0-9.]+", pin) for pin in pins), name


def test_the_light_part_has_no_torch() -> None:
    text = (ROOT / "requirements-light.txt").read_text(encoding="utf-8")
    assert not re.search(r"^(torch|sglang)\b", text, flags=re.MULTILINE)
