from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ray_jobs.results import default_root, open_results
from sweeps.results.tables import SCHEMA_VERSION
from sweeps.spec.document import SpecError
from sweeps.spec.reading import fingerprint
from sweeps.spec.space import Space
from tests.sweeps.stub_engine import SPEC, stub_spec


def test_a_new_folder_says_what_it_is(weird_tmp_path: Path) -> None:
    opened = open_results(weird_tmp_path / "new" / "results", stub_spec(), SPEC)
    opened.release()
    manifest = opened.folder.read_manifest()
    assert manifest["sweep_id"] == opened.sweep_id
    assert manifest["spec_fingerprint"] == fingerprint(SPEC)
    assert (manifest["schema_version"], manifest["engine"], manifest["target_tok_s"]) == (
        SCHEMA_VERSION,
        "simulated",
        None,
    )
    assert manifest["num_configurations"] == len(Space(stub_spec()).configurations()) > 0
    assert {"python", "ray", "optuna"} <= set(manifest["versions"])
    assert opened.folder.spec.read_text() == SPEC


def test_the_same_spec_resumes_with_the_same_id(tmp_path: Path) -> None:
    first = open_results(tmp_path, stub_spec(), SPEC)
    first.release()
    second = open_results(tmp_path, stub_spec(), SPEC, must_exist=True)
    second.release()
    assert (second.resumed, second.sweep_id) == (True, first.sweep_id)


def test_a_driver_that_died_before_the_manifest_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "driver.lock").write_text("pid 1 on nowhere")
    (tmp_path / "spec.yaml").write_text("half")
    open_results(tmp_path, stub_spec(), SPEC).release()
    assert json.loads((tmp_path / "sweep.json").read_text())["engine"] == "simulated"


def test_another_spec_is_refused_and_the_folder_left_alone(tmp_path: Path) -> None:
    open_results(tmp_path, stub_spec(), SPEC).release()
    with pytest.raises(SpecError, match="another spec"):
        open_results(tmp_path, stub_spec(), SPEC + "# changed")
    assert (tmp_path / "spec.yaml").read_text() == SPEC


def test_a_broken_manifest_is_named(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(SpecError, match=r"sweep\.json cannot be read"):
        open_results(tmp_path, stub_spec(), SPEC)


def test_results_of_a_job_do_not_go_into_rays_own_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "session" / "runtime_resources" / "working_dir_files" / "pkg"
    copy.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not default_root(stub_spec()).is_absolute()
    monkeypatch.chdir(copy)
    assert default_root(stub_spec()).is_relative_to(Path.home() / "specsweep-results")


def test_a_packed_recording_is_not_resumed(tmp_path: Path) -> None:
    opened = open_results(tmp_path, stub_spec(), SPEC)
    opened.release()
    part = opened.folder.packed("trials")
    part.parent.mkdir(parents=True)
    part.touch()
    with pytest.raises(SpecError, match="packed recording, which cannot be resumed"):
        open_results(tmp_path, stub_spec(), SPEC, must_exist=True)


@pytest.mark.parametrize(
    "name", ["driver.lock", "spec.yaml", "sweep.json", "study.journal", "journal/t0000-a1.jsonl", "tables", "logs/x"]
)
def test_a_folder_with_a_link_is_not_written_to(tmp_path: Path, name: str) -> None:
    """A copied folder keeps its links, and they may point to any file of this user."""
    open_results(tmp_path / "results", stub_spec(), SPEC).release()
    victim = tmp_path / "precious"
    victim.write_text("precious")
    place = tmp_path / "results" / name
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(victim)
    with pytest.raises(SpecError, match=r"is a link|has no sweep\.json"):
        open_results(tmp_path / "results", stub_spec(), SPEC)
    assert victim.read_text() == "precious"


def test_a_pipe_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    open_results(tmp_path, stub_spec(), SPEC).release()
    os.mkfifo(tmp_path / "stop-requested")
    with pytest.raises(SpecError, match="neither a file nor a folder"):
        open_results(tmp_path, stub_spec(), SPEC)


def test_a_new_folder_is_its_users_alone(tmp_path: Path) -> None:
    opened = open_results(tmp_path / "a" / "results", stub_spec(), SPEC)
    opened.release()
    assert opened.folder.root.stat().st_mode & 0o777 == 0o700


def test_secrets_are_not_kept_and_do_not_make_another_sweep(tmp_path: Path) -> None:
    def text(token: str) -> str:
        return f"{SPEC}\nmore: {{HF_TOKEN: {token}}}\n"

    open_results(tmp_path, stub_spec(), text("marker-one")).release()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and "marker" in path.read_text()]
    assert open_results(tmp_path, stub_spec(), text("marker-two")).resumed
    assert fingerprint((tmp_path / "spec.yaml").read_text()) == fingerprint(text("marker-one"))
