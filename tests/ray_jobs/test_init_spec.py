"""A first spec: what is found, what is chosen, and what is refused. NVML is a stand-in: this machine has no GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ray_jobs.first_spec.compose import compose
from ray_jobs.first_spec.found import Gpus, ModelFolder, look_at_gpus, read_model, sglang_version
from ray_jobs.init_spec import main
from sweeps.spec.document import SpecError
from sweeps.spec.reading import parse_spec, read_spec
from sweeps.spec.space import Space

HUB = ModelFolder(path="moonshotai/Kimi-K2.5")
DRAFTER = ModelFolder(path="lightseekorg/kimi-k2.5-eagle3")


class Nvml:
    """NVML of a node; `links` is how many NVLink links each GPU has up."""

    class NVMLError(Exception):
        pass

    def __init__(self, names: list[str], *, links: int, present: bool = True) -> None:
        self.names, self.links, self.present = names, links, present
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.present:
            raise self.NVMLError
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return self.names[handle]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> object:  # noqa: N802
        return type("Memory", (), {"total": (90 + handle) * 2**30})()

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:  # noqa: N802
        if self.links == 0:
            raise self.NVMLError
        return int(link < self.links)


def write_model(folder: Path, *, shards: int = 2, missing: int = 0) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["DeepseekV3ForCausalLM"]}), encoding="utf-8")
    names = [f"model-{index}.safetensors" for index in range(shards)]
    weight_map = {f"layer.{index}": name for index, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    for name in names[missing:]:
        (folder / name).write_bytes(b"\0" * 1000)
    return folder


def gpus(*, nvlink: bool, count: int = 8, gib: int = 141) -> Gpus:
    return Gpus(name="NVIDIA H200", count=count, memory_bytes=gib * 2**30, nvlink=nvlink)


def test_the_node_is_what_nvml_says() -> None:
    nvml = Nvml(["NVIDIA H200"] * 2, links=18)
    assert look_at_gpus(nvml) == Gpus(name="NVIDIA H200", count=2, memory_bytes=90 * 2**30, nvlink=True)
    assert nvml.open == 0
    pcie = look_at_gpus(Nvml(["RTX PRO 6000"] * 2, links=0))
    assert pcie is not None
    assert not pcie.nvlink
    assert look_at_gpus(Nvml([], links=0)) is None
    assert look_at_gpus(Nvml([], links=0, present=False)) is None


def test_a_node_of_mixed_gpus_is_refused() -> None:
    with pytest.raises(SpecError, match="wanted one model, found A, B"):
        look_at_gpus(Nvml(["A", "B"], links=0))


def test_a_model_folder_is_weighed(tmp_path: Path) -> None:
    model = read_model(str(write_model(tmp_path / "m")))
    assert (model.architecture, model.weights_bytes, model.is_local) == ("DeepseekV3ForCausalLM", 2000, True)
    assert not read_model("moonshotai/Kimi-K2.5").is_local


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "it has no config.json"),
        ("{", "cannot be read"),
        ("[]", "wanted a JSON object, got list"),
        ("{}", "wanted `architectures`"),
        ('{"architectures": [3]}', "wanted `architectures`"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(SpecError, match=said):
        read_model(str(tmp_path))


def test_an_incomplete_download_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", shards=5, missing=2)
    with pytest.raises(SpecError, match=r"it lacks 2 of 5 weight files, model-0.safetensors first"):
        read_model(str(folder))


def test_on_nvlink_the_control_runs_as_sglang_would() -> None:
    first = compose("mine", gpus(nvlink=True), HUB, DRAFTER, python=None, prompts="synthetic")
    spec = parse_spec(first.text, source="mine.yaml")
    assert "attention-backend" not in spec.engine.args
    assert spec.search.eagle_topk == (1,)
    assert spec.search.args["disable-custom-all-reduce"] == (False, True)
    assert Space(spec).control.num_steps == 0


def test_on_pcie_trees_and_the_six_variables_are_searched() -> None:
    first = compose("mine", gpus(nvlink=False), HUB, DRAFTER, python="/opt/sglang/bin/python", prompts="synthetic")
    spec = parse_spec(first.text, source="mine.yaml")
    assert (spec.engine.args["attention-backend"], spec.search.eagle_topk) == ("triton", (1, 4))
    assert len(spec.nccl_sets["six"]) == 6
    assert spec.engine.python == "/opt/sglang/bin/python"


def test_one_gpu_without_a_drafter_searches_nothing_that_it_has_not() -> None:
    first = compose("mine", gpus(nvlink=False, count=1), HUB, None, python=None, prompts="synthetic")
    spec = parse_spec(first.text, source="mine.yaml")
    assert (spec.search.num_steps, spec.nccl_sets, spec.resources.gpus) == ((0,), {}, 1)
    assert any("--drafter" in choice for choice in first.choices)


def test_weights_that_do_not_fit_are_refused() -> None:
    heavy = ModelFolder(path="/m", architecture="A", weights_bytes=8 * 130 * 2**30)
    with pytest.raises(SpecError, match=r"130 GiB of weights a GPU do not fit 141 GiB at mem-fraction-static 0.85"):
        compose("mine", gpus(nvlink=True), heavy, None, python=None, prompts="synthetic")


def test_the_load_deadline_grows_with_the_weights() -> None:
    heavy = ModelFolder(path="/m", architecture="A", weights_bytes=595 * 10**9)
    first = compose("mine", gpus(nvlink=True), heavy, DRAFTER, python=None, prompts="synthetic")
    assert parse_spec(first.text.replace("/m", "hub/m"), source="x").engine.deadlines_s.load == 2380


def test_the_command_writes_a_spec_with_its_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "kimi.yaml"
    words = ["--model", "moonshotai/Kimi-K2.5", "--drafter", "a/b", "--out", str(out), "--gpus", "8"]
    assert main([*words, "--memory-gib", "96", "--link", "pcie"]) == 0
    spec = read_spec(out)
    assert spec.sweep == "kimi"
    assert Path(spec.workload.prompts).is_file()
    said = capsys.readouterr().out
    assert "tensor parallel over all of them" in said
    assert "no SGLang in" in said

    assert main([*words, "--memory-gib", "96", "--link", "pcie"]) == 2, "nothing is overwritten"
    assert f"error: {out} exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "said"),
    [([], "no GPU is visible here"), (["--gpus", "8"], "give --memory-gib and --link as well")],
)
def test_a_node_that_nothing_is_known_of_is_one_line(
    extra: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ray_jobs.init_spec.look_at_gpus", lambda: None)
    assert main(["--model", "a/b", "--out", str(tmp_path / "x.yaml"), *extra]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not list(tmp_path.iterdir())


def test_an_interpreter_says_which_sglang_it_has(tmp_path: Path) -> None:
    assert sglang_version(sys.executable) is None
    with pytest.raises(SpecError, match="cannot be run"):
        sglang_version(str(tmp_path / "no-python"))
