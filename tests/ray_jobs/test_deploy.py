"""The recipes of deploy/: what they name exists, and the launcher hands a container what the server needs."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import sweeps

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
LAUNCHER = DEPLOY / "docker-launcher.sh"
RAY = re.search(r"^ray\[.*\]==(\S+)", (ROOT / "requirements-light.txt").read_text(encoding="utf-8"), re.MULTILINE)
PRINTS = """#!/usr/bin/env bash
printf '%s\\n' "$@"
"""


def run_launcher(folder: Path, *words: str, **variables: str) -> list[str]:
    """The arguments that `docker` gets; the stand-in prints them."""
    docker = folder / "docker"
    docker.write_text(PRINTS, encoding="utf-8")
    docker.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder), **variables}
    done = subprocess.run(
        [str(LAUNCHER), *words], env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout.splitlines()


def options(printed: list[str], name: str) -> list[str]:
    return [value for option, value in itertools.pairwise(printed) if option == name]


def test_the_container_gets_the_variables_of_the_sweep_and_its_own_path(tmp_path: Path) -> None:
    printed = run_launcher(
        tmp_path,
        "image:1",
        "python3",
        "-m",
        "sglang.launch_server",
        NCCL_PROTO="LL",
        SGLANG_X="1",
        CUDA_VISIBLE_DEVICES="2,3",
    )
    passed = options(printed, "--env")
    assert {"NCCL_PROTO", "SGLANG_X"} <= set(passed)
    assert not {"PATH", "HOME", "CUDA_VISIBLE_DEVICES"} & set(passed)
    assert options(printed, "--gpus") == ['"device=2,3"']
    assert printed[-4:] == ["server", "python3", "-m", "sglang.launch_server"]


def test_what_the_command_names_and_the_probe_needs_is_mounted_once(tmp_path: Path) -> None:
    model, probe, scratch = (tmp_path / name for name in ("model", "probe", "scratch"))
    for path in (model, probe, scratch):
        path.mkdir()
    words = [
        "image:1",
        "--shm-size=32g",
        "python3",
        "--model-path",
        str(model),
        "--tokenizer-path",
        str(model),
        "/absent",
    ]
    printed = run_launcher(tmp_path, *words, PYTHONPATH=f"{probe}:", SPECSWEEP_PROBE_DIR=str(scratch))
    assert options(printed, "--volume") == [f"{path}:{path}" for path in (scratch, probe, model)]
    assert "--shm-size=32g" in printed[: printed.index("image:1")]
    assert "--gpus" not in printed


def test_the_launcher_says_how_it_is_called(tmp_path: Path) -> None:
    done = subprocess.run([str(LAUNCHER), "image"], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("name", ["docker-launcher.sh", "sweep.sbatch"])
def test_the_scripts_are_whole(name: str) -> None:
    subprocess.run(["bash", "-n", str(DEPLOY / name)], check=True, timeout=30)


def test_a_slurm_job_without_a_spec_says_how_it_is_called() -> None:
    done = subprocess.run(
        ["bash", str(DEPLOY / "sweep.sbatch")], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stderr) == (2, "usage: sbatch sweep.sbatch SPEC RESULTS [OPTION...]\n")


def test_the_kubernetes_job_has_the_versions_of_this_project() -> None:
    assert RAY is not None
    job: dict[str, Any] = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text(encoding="utf-8"))
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    images = {container["image"] for group in groups for container in group["template"]["spec"]["containers"]}
    assert cluster["rayVersion"] == RAY.group(1)
    assert images == {f"registry.example/specsweep:{sweeps.__version__}"}
    for group in groups:
        pod = group["template"]["spec"]
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    module = re.search(r"python -m ([a-z_.]+)", job["spec"]["entrypoint"])
    assert module is not None
    assert (ROOT / f"{module.group(1).replace('.', '/')}.py").is_file()


def test_the_image_copies_what_exists_and_installs_the_package() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    copied = [word for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert {"sweeps", "ray_jobs", "analysis", "pyproject.toml"} <= set(copied)
    assert all((ROOT / name).exists() for name in copied)
    assert f"specsweep:{sweeps.__version__}" in text
