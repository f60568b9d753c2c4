from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ray_jobs.ray_settings import LOCAL_SETTINGS, RAY_SETTINGS
from ray_jobs.results import open_results
from ray_jobs.run_sweep import main
from sweeps.engines import open_engine
from sweeps.engines.simulated.machine_profile import read_profile
from sweeps.measure.held_engine import HeldEngine
from sweeps.results.store import fetched, open_store
from sweeps.results.tables import ResultsFolder, read_table
from sweeps.search.study import SweepStudy
from sweeps.search.study_journal import open_journal
from sweeps.spec.reading import read_spec
from sweeps.spec.space import Space
from tests.ray_jobs.waiting import wait_until
from tests.sweeps.stub_engine import drive, stub_context

ROOT = Path(__file__).parent.parent.parent
SMALL = """
sweep: small
engine: {kind: simulated, machine: rtx-pro-6000-pcie-x8}
drafters: {founding: founding}
search: {num_steps: [0, 1, 2, 3, 5], eagle_topk: [1, 2], nccl: [default, ring]}
nccl_sets: {ring: {NCCL_ALGO: Ring}}
workload: {prompt_tokens: 16, output_tokens: 64, warmup_blocks: 1, blocks: 4}
control: {every: 4}
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture(autouse=True)
def _restored_environment(monkeypatch: pytest.MonkeyPatch, _clean_environment: None) -> None:
    # main() settles Ray's environment; monkeypatch takes it back.
    for name, value in {**RAY_SETTINGS, **LOCAL_SETTINGS}.items():
        monkeypatch.setenv(name, value)


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "ray_jobs.run_sweep", *map(str, words)]


def completed(root: Path) -> dict[str, dict[str, object]]:
    rows = read_table(ResultsFolder(root), "trials").to_pylist()
    return {row["trial_id"]: row for row in rows if row["status"] == "completed"}


def num_trials(root: Path) -> int:
    return sum(1 for _ in root.glob("tables/trials/*.parquet"))


class TestRefusals:
    """Exit code 2 and one clear line, before any cluster is started."""

    @pytest.fixture(autouse=True)
    def _no_cluster(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def never(*args: object, **kwargs: object) -> None:
            raise AssertionError("a cluster was started for a sweep that cannot run")

        monkeypatch.setattr("ray.init", never)

    def refused(self, capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
        assert main([str(word) for word in words]) == 2
        said = capsys.readouterr().err.strip()
        assert said.startswith("error: ")
        return said

    def test_no_such_spec(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "does not exist" in self.refused(capsys, tmp_path / "none.yaml")

    @pytest.mark.parametrize(
        ("before", "after", "said"),
        [
            ("sweep: small", "sweep: [small", "YAML"),
            ("num_steps: [0, 1, 2, 3, 5]", "num_steps: []", "num_steps"),
            ("eagle_topk: [1, 2]", "eagle_topk: [-1]", "eagle_topk"),
            ("control: {every: 4}", "study: {sampler: {name: tpe, options: {seeds: 1}}}", "seeds"),
            ("pcie-x8", "pcie-x9", "did you mean rtx-pro-6000-pcie-x8"),
            ("{founding: founding}", "{founding: founded}", "founded"),
        ],
    )
    def test_a_spec_that_cannot_be(
        self, spec: Path, capsys: pytest.CaptureFixture[str], before: str, after: str, said: str
    ) -> None:
        spec.write_text(SMALL.replace(before, after))
        assert said in self.refused(capsys, spec)
        assert not (Path.cwd() / "results" / "small").exists()

    def test_a_folder_that_cannot_be_written(
        self, spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").write_text("")
        assert "cannot be written" in self.refused(capsys, spec, "--results", tmp_path / "file" / "results")

    def test_the_folder_of_another_spec(self, spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        root = tmp_path / "results"
        root.mkdir()
        (root / "sweep.json").write_text(json.dumps({"sweep_id": "x", "spec_fingerprint": "feedfeedfeed"}))
        said = self.refused(capsys, spec, "--results", root)
        assert "another spec" in said
        assert "feedfeedfeed" in said

    def test_a_folder_of_something_else(self, spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "neither empty nor a results folder" in self.refused(capsys, spec, "--results", tmp_path)

    def test_the_folder_of_a_running_driver(
        self, spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        root = tmp_path / "results"
        other = open_results(root, read_spec(spec), spec.read_text())
        said = self.refused(capsys, spec, "--results", root)
        assert f"in use by a running driver (pid {os.getpid()}" in said
        other.release()

    def test_a_finished_sweep_is_concluded_at_once(
        self, spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        root = tmp_path / "results"
        sweep = read_spec(spec)
        space, opened = Space(sweep), open_results(root, sweep, spec.read_text())
        study = SweepStudy(sweep, space, storage=open_journal(opened.folder.study))
        context = replace(stub_context(sweep, root), sweep_id=opened.sweep_id)
        drive(study, HeldEngine(open_engine(sweep, opened.folder)), context)
        opened.release()
        assert main([str(spec), "--results", str(root)]) == 0
        assert "18 of 18 were measured" in capsys.readouterr().out

    def test_a_folder_beside_a_folder(self, spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        said = self.refused(capsys, spec, "--results", tmp_path / "a", "--folder", tmp_path / "b")
        assert "--folder: wanted together with a URL" in said

    def test_a_url_that_nobody_serves(self, spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        said = self.refused(capsys, spec, "--results", "gopher://bucket", "--folder", tmp_path / "b")
        assert "wanted a URL such as s3://bucket/prefix" in said
        assert not (tmp_path / "b").exists()

    def test_nothing_to_resume(self, spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "--resume" in self.refused(capsys, spec, "--resume", "--results", tmp_path / "new")


class TestDryRun:
    def test_it_prints_the_space_and_the_cost_and_creates_nothing(
        self, spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert main([str(spec), "--dry-run"]) == 0
        said = capsys.readouterr().out
        assert "18 configurations" in said
        assert "GPU hours on 8 GPUs" in said
        assert "not measured" in said
        assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]

    def test_it_prints_every_launch_command_of_the_real_engine(
        self, spec: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        spec.write_text(
            SMALL.replace("{kind: simulated, machine: rtx-pro-6000-pcie-x8}", "{kind: sglang, model_path: m}").replace(
                "eagle_topk: [1, 2]", "eagle_topk: [1, 4], num_draft_tokens: [8]"
            )
        )
        assert main([str(spec), "--dry-run"]) == 0
        said = capsys.readouterr().out
        assert "690 s for the first launch, 330 s for each later one" in said
        assert "NCCL_ALGO=Ring" in said
        assert "--speculative-num-steps 5" in said
        assert "pool 4 < 7" in said
        assert "assumed" in said

    def test_one_server_of_several_states_is_one_command(self, spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
        real = SMALL.replace("{kind: simulated, machine: rtx-pro-6000-pcie-x8}", "{kind: sglang, model_path: m}")
        spec.write_text(real)
        assert main([str(spec), "--dry-run"]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if "sglang.launch_server" in line]
        chains = [line for line in lines if "--speculative-eagle-topk 1" in line]
        assert len(chains) == 1
        assert "(8 states in one server: nccl ring NCCL_ALGO=Ring)" in chains[0], "four step counts, two NCCL sets"
        assert "--speculative-num-steps 5" in chains[0]
        assert "NCCL_ALGO" not in chains[0].split("): ")[1], "no set stands in the environment of the process"

    def test_only_the_first_launch_is_cold(self, spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([str(spec), "--dry-run"]) == 0
        profile = read_profile("rtx-pro-6000-pcie-x8").boot
        warm_s = profile.launch_s + profile.weight_load_s + profile.capture_s
        cold_s = warm_s + profile.cold_weight_load_s + profile.cold_capture_s
        drafting_s = warm_s + profile.drafter_load_s + profile.drafter_capture_s
        drafting_s += profile.communicator_s + 4 * profile.state_s
        said = capsys.readouterr().out
        assert f"{cold_s:.0f} s for the first launch, {drafting_s:.0f} s for each later one" in said

    def test_what_is_known_of_an_nccl_set_is_told_before_it_runs(
        self, spec: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        spec.write_text(SMALL.replace("{NCCL_ALGO: Ring}", "{NCCL_BUFFSIZE: 16777216, NCCL_P2P_LEVEL: SYS}"))
        assert main([str(spec), "--dry-run"]) == 0
        said = capsys.readouterr().out
        assert "nccl ring: NCCL_BUFFSIZE=16777216: no effect on decode: " in said
        assert "nccl ring: NCCL_P2P_LEVEL=SYS: caution: with IOMMU" in said

    def test_many_invalid_suggestions_are_told_by_rule(self, spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
        many = "num_steps: [0, 1, 2, 3, 5, 7], eagle_topk: [2, 3], num_draft_tokens: [2, 4, 16, 32]"
        spec.write_text(SMALL.replace("num_steps: [0, 1, 2, 3, 5], eagle_topk: [1, 2]", many))
        assert main([str(spec), "--dry-run"]) == 0
        told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("invalid (")]
        assert len(told) == 2
        assert any("the drafter offers too few candidates; first steps 1, top-k 2" in line for line in told)
        assert any("a whole accepted path does not fit; first steps 2, top-k 2" in line for line in told)


@pytest.mark.ray
def test_a_signal_to_the_whole_group_ends_the_sweep_and_not_ray_first(spec: Path, tmp_path: Path) -> None:
    root = tmp_path / "results"
    with (tmp_path / "log").open("wb") as log:
        driver = subprocess.Popen(command(spec, "--results", root), cwd=ROOT, stdout=log, stderr=log, process_group=0)
        try:
            wait_until(lambda: num_trials(root) >= 2, driver)
            os.killpg(driver.pid, signal.SIGTERM)  # as `timeout` does
            code = driver.wait(timeout=40)  # without its GCS a Ray driver gives up after 60 s
        finally:
            driver.kill()
            driver.wait()
    assert code == 130, (tmp_path / "log").read_text(encoding="utf-8")


@pytest.mark.ray
def test_a_killed_driver_loses_no_finished_trial(spec: Path, tmp_path: Path) -> None:
    root = tmp_path / "results"
    with (tmp_path / "log").open("wb") as log:
        driver = subprocess.Popen(command(spec, "--results", root), cwd=ROOT, stdout=log, stderr=log)
        try:
            wait_until(lambda: num_trials(root) >= 3, driver)
        finally:
            driver.send_signal(signal.SIGKILL)
            driver.wait()
    before = completed(root)
    again = subprocess.run(
        command(spec, "--results", root, "--resume"), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resumed: " in again.stdout
    after = completed(root)
    assert {trial_id: after[trial_id] for trial_id in before} == before
    measured = [row["configuration_id"] for row in after.values() if row["role"] == "candidate"]
    assert len(measured) == len(set(measured)) == 17  # the control is the eighteenth


@pytest.mark.ray
@pytest.mark.slow
def test_another_head_goes_on_with_a_sweep_at_a_url(spec: Path, tmp_path: Path, s3_url: str) -> None:
    """The first driver is killed, and its folder is lost with its machine."""
    store = open_store(s3_url)
    with (tmp_path / "log").open("wb") as log:
        words = command(spec, "--results", s3_url, "--folder", tmp_path / "first")
        driver = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
        try:
            wait_until(lambda: sum(name.startswith("tables/trials/") for name in store.sizes_bytes()) >= 3, driver)
        finally:
            driver.send_signal(signal.SIGKILL)
            driver.wait()
    words = command(spec, "--results", s3_url, "--folder", tmp_path / "second", "--resume")
    busy = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert busy.returncode == 2
    assert "in use by a running driver" in busy.stderr
    store.remove("driver.lock")  # five minutes later it would be taken over
    before = {name for name in store.sizes_bytes() if name.startswith("tables/trials/")}
    again = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resumed: " in again.stdout
    assert "copied to s3://" in again.stdout
    after = completed(tmp_path / "second")
    measured = [row["configuration_id"] for row in after.values() if row["role"] == "candidate"]
    assert len(measured) == len(set(measured)) == 17
    with fetched(s3_url, tables=["trials"]) as copy:
        assert before <= {path.relative_to(copy).as_posix() for path in copy.rglob("*")}
        assert completed(copy) == after


@pytest.mark.ray
def test_a_stopped_job_ends_its_trial_politely(spec: Path, tmp_path: Path) -> None:
    root = tmp_path / "results"
    with (tmp_path / "log").open("wb") as log:
        driver = subprocess.Popen(command(spec, "--results", root), cwd=ROOT, stdout=log, stderr=log)
        wait_until(lambda: num_trials(root) >= 2, driver)
        driver.terminate()
        assert driver.wait(timeout=60) == 130, (tmp_path / "log").read_text()
    rows = read_table(ResultsFolder(root), "trials").to_pylist()
    assert {row["status"] for row in rows} <= {"completed", "failed"}
    assert {row["kind"] for row in rows if row["status"] == "failed"} <= {"interrupted"}
    assert not list((root / "journal").glob("*.jsonl"))


@pytest.mark.ray
@pytest.mark.slow
def test_the_same_command_succeeds_as_a_ray_job(spec: Path, tmp_path: Path, head: tuple[str, dict[str, str]]) -> None:
    address, environment = head
    root, copied = tmp_path / "results", tmp_path / "checkout"
    for package in ("sweeps", "ray_jobs"):
        (copied / package).parent.mkdir(exist_ok=True)
        subprocess.run(["cp", "-r", ROOT / package, copied / package], check=True)
    ray = Path(sys.executable).with_name("ray")
    entrypoint = command(spec, "--results", root)
    submitted = subprocess.run(
        [str(ray), "job", "submit", "--address", address, "--working-dir", str(copied), "--", *entrypoint],
        env=environment, cwd=copied, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    said = submitted.stdout + submitted.stderr
    assert submitted.returncode == 0, said
    assert "succeeded" in said
    assert "trial 1 of at most" in said
    assert len({row["configuration_id"] for row in completed(root).values()}) == 18
