"""What a job takes along, and what it leaves on this machine."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from ray_jobs.upload import LIMIT_BYTES, plan_upload
from sweeps.spec.document import SpecError
from sweeps.spec.reading import read_spec

SPEC = """
sweep: small
engine: {kind: simulated, machine: rtx-pro-6000-pcie-x8}
drafters: {founding: founding}
search: {num_steps: [0, 1, 2]}
workload: {blocks: 2, prompts: PROMPTS}
"""


def write_spec(folder: Path, *, prompts: str = "synthetic", changes: str = "") -> Path:
    path = folder / "mine.yaml"
    path.write_text(SPEC.replace("PROMPTS", prompts) + changes, encoding="utf-8")
    return path


def test_a_shipped_spec_travels_in_the_package(tmp_path: Path) -> None:
    upload = plan_upload(Path("founding_case"))
    upload.write(tmp_path)
    assert read_spec(tmp_path / upload.spec).sweep == "founding-case"
    names = {str(name) for name in upload.files}
    assert {
        "ray_jobs/run_sweep.py",
        "sweeps/cycle_probe/specsweep_probe/hooks.py",
        "sweeps/nccl/variables.csv",
    } <= names
    assert not [name for name in names if "__pycache__" in name or name.split("/")[0] not in ("sweeps", "ray_jobs")]
    assert 0 < upload.size_bytes < LIMIT_BYTES / 20


def test_a_prompt_file_travels_beside_its_spec(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "texts").mkdir(parents=True)
    (home / "texts" / "chat.jsonl").write_text('{"prompt": "hello"}\n' * 8, encoding="utf-8")
    (home / "weights.bin").write_bytes(b"\0" * 1000)
    upload = plan_upload(write_spec(home, prompts="texts/chat.jsonl"))
    upload.write(tmp_path / "job")
    assert upload.spec == "job/mine.yaml"
    assert {name for name in upload.files if name.parts[0] == "job"} == {
        PurePosixPath("job/mine.yaml"),
        PurePosixPath("job/texts/chat.jsonl"),
    }
    prompts = Path(read_spec(tmp_path / "job" / upload.spec).workload.prompts)
    assert prompts.read_text(encoding="utf-8").startswith('{"prompt"')
    assert prompts.is_relative_to(tmp_path / "job")


def test_a_prompt_file_outside_the_folder_of_the_spec_is_refused(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "chat.jsonl").write_text('{"prompt": "hello"}\n' * 8, encoding="utf-8")
    with pytest.raises(SpecError, match=r"workload.prompts: ../chat.jsonl lies outside the spec's folder"):
        plan_upload(write_spec(home, prompts="../chat.jsonl"))


@pytest.mark.parametrize("key", ["model_path", "python"])
def test_weights_and_interpreters_are_named_by_paths_that_nodes_have(tmp_path: Path, key: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "config.json").write_text("{}", encoding="utf-8")
    path = write_spec(tmp_path)
    path.write_text(
        path.read_text(encoding="utf-8").replace("engine: {", f"engine: {{{key}: there, "), encoding="utf-8"
    )
    with pytest.raises(SpecError, match=rf"engine.{key}: there is a path of this machine; wanted an absolute path"):
        plan_upload(path)


def test_a_spec_that_cannot_run_is_refused_before_anything_is_uploaded(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="nccl"):
        plan_upload(write_spec(tmp_path, changes="nccl_sets: {wrong: {NCCL_PROT: LL}}\n"))
