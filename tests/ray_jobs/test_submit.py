"""`specsweep submit`: what is refused before Ray is asked, and a real job on a real head."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ray_jobs.submit import main
from sweeps.results.tables import ResultsFolder, read_table
from tests.ray_jobs.waiting import free_port

SMALL = """
sweep: small
engine: {kind: simulated, machine: rtx-pro-6000-pcie-x8}
drafters: {founding: founding}
search: {num_steps: [0, 1, 2]}
workload: {prompt_tokens: 16, output_tokens: 64, warmup_blocks: 1, blocks: 4, prompts: texts.jsonl}
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "mine" / "small.yaml"
    path.parent.mkdir()
    path.write_text(SMALL, encoding="utf-8")
    (path.parent / "texts.jsonl").write_text('{"prompt": "hello there"}\n' * 8, encoding="utf-8")
    return path


def test_a_relative_results_folder_is_refused(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(spec), "--results", "here"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --results: wanted an absolute path that every node has, or a URL, got here")


def test_no_head_is_one_line(spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    assert main([str(spec), "--results", str(tmp_path / "r"), "--address", address]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith(f"error: no Ray head answers at {address}: ")
    assert "MiB of Ray's 512 MiB" in printed.out


def test_a_spec_that_does_not_exist_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nowhere.yaml", "--results", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "nowhere.yaml does not exist" in line


@pytest.mark.ray
@pytest.mark.slow
def test_a_job_runs_to_its_end_and_hands_on_its_exit_code(
    spec: Path, tmp_path: Path, head: tuple[str, dict[str, str]]
) -> None:
    address, environment = head
    root = tmp_path / "results"
    words = [sys.executable, "-m", "ray_jobs.submit", str(spec), "--results", str(root), "--address", address]

    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=180, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCEEDED" in done.stdout
    assert "trial 1 of at most" in done.stdout
    assert {row["status"] for row in read_table(ResultsFolder(root), "trials").to_pylist()} == {"completed"}

    other = spec.with_name("other.yaml")
    other.write_text(SMALL.replace("blocks: 4", "blocks: 5"), encoding="utf-8")
    refused = subprocess.run(
        [*words[:3], str(other), *words[4:]], env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert refused.returncode == 2, "the folder belongs to another spec"
    assert "FAILED" in refused.stdout
