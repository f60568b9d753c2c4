"""The preflight: what it says of a spec, a node and a cluster, and that it says it before anything is launched."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ray_jobs.check_cluster import main
from ray_jobs.preflight.node_checks import Check, check_node
from sweeps.engines.env_sources import ConfFile, nccl_conf_files
from sweeps.spec.model import EngineSpec, ResourceSpec, SearchSpec, SweepSpec

STANDIN = Path(__file__).with_name("standin_worker.py")
SEEN: Mapping[str, Any] = {
    "python": "3.12.3",
    "sglang": "0.5.23",
    "torch": "2.14.1",
    "cuda": "13.0",
    "nccl": "2.30.7",
    "driver": "600.1",
    "gpus": ["H200", "H200"],
    "used_bytes": [600_000_000, 600_000_000],
    "plugins": ["specsweep_probe"],
}


def interpreter(folder: Path, **changed: Any) -> Path:
    """Stands in for the server's interpreter: says what it sees, and runs stand-in ranks."""
    path = folder / "python"
    seen = json.dumps({**SEEN, **changed})
    path.write_text(
        "#!/bin/sh\n"
        f"case \"$1\" in */server_versions.py) echo '{seen}'; exit;; esac\n"
        f'shift; exec "{sys.executable}" -S "{STANDIN}" "$@"\n',
        encoding="utf-8",
    )
    path.chmod(0o755)
    return path


def sglang_spec(python: Path, model: Path, *, gpus: int = 2, **fields: Any) -> SweepSpec:
    engine = EngineSpec(kind="sglang", python=str(python), model_path=str(model), env=fields.pop("env", {}))
    return SweepSpec(sweep="s", engine=engine, search=SearchSpec(), resources=ResourceSpec(gpus=gpus), **fields)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return folder


def no_files(environment: Mapping[str, str]) -> tuple[ConfFile, ...]:
    return ()


def checks_of(spec: SweepSpec, out: Path, **options: Any) -> dict[str, Check]:
    options = {"all_reduce": False, "inherited": {}, "conf_files": no_files, **options}
    return {check.name: check for check in check_node(spec, out, **options).checks}


def states(checks: Mapping[str, Check]) -> dict[str, str]:
    return {name: check.state for name, check in checks.items()}


def test_a_sound_node(tmp_path: Path, model: Path) -> None:
    checks = checks_of(sglang_spec(interpreter(tmp_path), model), tmp_path)
    assert set(states(checks).values()) == {"ok"}
    assert "sglang 0.5.23, torch 2.14.1, cuda 13.0, nccl 2.30.7, driver 600.1" in checks["server interpreter"].detail
    assert checks["GPUs of this node"].detail == "need 2, have 2 (H200)"


@pytest.mark.parametrize(
    ("changed", "name", "word"),
    [
        ({"gpus": []}, "GPUs of this node", "need 2, have 0 (none)"),
        ({"sglang": None}, "server interpreter", "sglang none"),
        ({"used_bytes": [0, 90 * 2**30]}, "GPU memory in use", "GPU 1: 90.0 GiB"),
        ({"plugins": []}, "cycle probe", "no plugin specsweep_probe"),
    ],
)
def test_what_the_servers_interpreter_lacks(
    tmp_path: Path, model: Path, changed: Mapping[str, Any], name: str, word: str
) -> None:
    checks = checks_of(sglang_spec(interpreter(tmp_path, **changed), model), tmp_path)
    assert [key for key, state in states(checks).items() if state == "failed"] == [name]
    assert word in checks[name].detail


def test_an_interpreter_that_does_not_run_is_one_failed_check(tmp_path: Path, model: Path) -> None:
    checks = checks_of(sglang_spec(tmp_path / "nowhere", model), tmp_path, all_reduce=True)
    assert checks["server interpreter"].state == "failed"
    assert "all-reduce table" not in checks


def test_models_are_there_or_missing_or_the_hubs(tmp_path: Path, model: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    drafters = {"here": str(model), "gone": str(tmp_path / "gone"), "hub": "org/name", "empty": str(empty)}
    checks = checks_of(sglang_spec(interpreter(tmp_path), model, drafters=drafters), tmp_path)
    assert {name: checks[f"drafter {name}"].state for name in drafters} == {
        "here": "ok",
        "gone": "failed",
        "hub": "warning",
        "empty": "failed",
    }


def test_an_nccl_conf_file_is_shown_with_its_settings(tmp_path: Path, model: Path) -> None:
    conf = tmp_path / "nccl.conf"
    conf.write_text("# a comment\nNCCL_PROTO=LL\n", encoding="utf-8")
    spec = sglang_spec(interpreter(tmp_path), model)
    read = partial(nccl_conf_files, system=conf, home=tmp_path / "nobody")
    check = checks_of(spec, tmp_path, conf_files=read)["NCCL configuration file"]
    assert check.state == "warning"
    assert check.detail == f"{conf} changes every NCCL set, also `default`: NCCL_PROTO=LL"


@pytest.mark.parametrize("sets_it", ["the environment", "the spec"])
def test_a_named_conf_file_replaces_the_users_and_is_not_warned_of_twice(
    tmp_path: Path, model: Path, sets_it: str
) -> None:
    (tmp_path / ".nccl.conf").write_text("NCCL_ALGO=Ring\n", encoding="utf-8")
    named = tmp_path / "named.conf"
    named.write_text("# nothing\n", encoding="utf-8")
    read = partial(nccl_conf_files, system=tmp_path / "absent", home=tmp_path)
    spec, variables = sglang_spec(interpreter(tmp_path), model), {"NCCL_CONF_FILE": str(named)}
    users = checks_of(spec, tmp_path, conf_files=read)["NCCL configuration file"]
    if sets_it == "the spec":
        spec = replace(spec, engine=replace(spec.engine, env={**spec.engine.env, **variables}))
    inherited = variables if sets_it == "the environment" else {}
    own = checks_of(spec, tmp_path, inherited=inherited, conf_files=read)["NCCL configuration file"]
    assert (users.state, own.state) == ("warning", "ok")
    assert own.detail.startswith(str(named))


def test_inherited_variables_are_named_removed_or_kept(tmp_path: Path, model: Path) -> None:
    spec = sglang_spec(interpreter(tmp_path), model, nccl_sets={"LL": {"NCCL_PROTO": "LL"}})
    checks = checks_of(spec, tmp_path, inherited={"NCCL_PROTO": "Simple", "NCCL_IB_DISABLE": "1", "HOME": "/"})
    assert checks["inherited variables removed"].detail == (
        "removed, because the sweep sets them itself or they simulate acceptance: NCCL_PROTO"
    )
    assert checks["inherited variables kept"].state == "warning"
    assert checks["inherited variables kept"].detail.endswith("have NCCL_IB_DISABLE=1")


@pytest.mark.parametrize("acceptance", ["measured", "pinned"])
def test_inherited_simulated_acceptance_reaches_no_server(tmp_path: Path, model: Path, acceptance: str) -> None:
    spec = sglang_spec(interpreter(tmp_path), model, acceptance=acceptance)
    checks = checks_of(spec, tmp_path, inherited={"SGLANG_SIMULATE_ACC_LEN": "3"})
    assert checks["inherited variables removed"].detail.endswith("SGLANG_SIMULATE_ACC_LEN")
    assert checks["inherited variables kept"].state == "ok"


def test_the_all_reduce_table_says_which_sets_matter_and_which_must_not_be_swept(tmp_path: Path, model: Path) -> None:
    sets = {
        "slow": {"STANDIN": "slow", "NCCL_PROTO": "LL"},
        "same": {"NCCL_IB_DISABLE": "1"},
        "broken": {"STANDIN": "no_algorithm"},
    }
    spec = sglang_spec(interpreter(tmp_path), model, nccl_sets=sets)
    report = check_node(spec, tmp_path, all_reduce=True, inherited={}, conf_files=no_files)
    checks = {check.name: check for check in report.checks}
    assert checks["all-reduce table"] == Check(
        name="all-reduce table", state="ok", detail="NCCL sets that could matter: slow"
    )
    assert checks["NCCL set broken"].state == "failed"
    assert checks["NCCL set broken"].detail.startswith("nccl_no_algorithm: ncclAllReduce: invalid usage")
    assert report.table is not None
    assert {row["set"] for row in report.table.rows} == {"default", "slow", "same", "broken"}


def test_a_default_that_hangs_fails_the_preflight(tmp_path: Path, model: Path) -> None:
    spec = sglang_spec(interpreter(tmp_path), model, env={"STANDIN": "hang"})
    checks = checks_of(spec, tmp_path, all_reduce=True, deadline_s=1.0)
    assert checks["all-reduce table"].state == "failed"
    assert checks["all-reduce table"].detail.startswith("default: hang: no end after 1 s")


def test_fewer_than_two_gpus_skip_the_table_with_a_word(tmp_path: Path, model: Path) -> None:
    spec = sglang_spec(interpreter(tmp_path, gpus=["H200"]), model, gpus=1)
    check = checks_of(spec, tmp_path, all_reduce=True)["all-reduce table"]
    assert (check.state, check.detail) == ("skipped", "needs 2 GPUs or more; 1 here, 1 asked by the spec")


SIMULATED = """
sweep: preflight
engine: {kind: simulated, machine: rtx-pro-6000-pcie-x8}
search: {num_steps: [0, 2]}
drafters: {eagle3: founding}
resources: {gpus: GPUS, cpus: 1}
"""


def run(arguments: list[str], folder: Path) -> tuple[int, dict[str, Any]]:
    code = main([*arguments, "--json", str(folder / "preflight.json")])
    return code, json.loads((folder / "preflight.json").read_text(encoding="utf-8"))


def test_command_line_on_a_simulated_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    spec = tmp_path / "spec.yaml"
    spec.write_text(SIMULATED.replace("GPUS", "8"), encoding="utf-8")
    code, document = run([str(spec)], tmp_path)
    assert code == 0
    assert document["ok"]
    assert {check["name"]: check["state"] for check in document["checks"]} == {
        "spec": "ok",
        "cluster": "skipped",
        "server": "skipped",
    }
    assert "2 configurations of 2 suggestions" in capsys.readouterr().out


def test_trace_bounds_what_nccl_can_win_and_says_that_it_is_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    spec = tmp_path / "spec.yaml"
    spec.write_text(SIMULATED.replace("GPUS", "8").replace("[0, 2]", "[0, 2, 3]"), encoding="utf-8")
    _, document = run([str(spec), "--trace"], tmp_path)
    check = document["checks"][-1]
    assert (check["name"], check["state"]) == ("communication in verify", "ok")
    assert re.match(r"simulated: [0-9.]+% of kernel time with steps 2, ", check["detail"])


def test_a_drafter_that_the_machine_does_not_know_is_a_failed_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    spec = tmp_path / "spec.yaml"
    spec.write_text(SIMULATED.replace("GPUS", "8").replace("founding", "funding"), encoding="utf-8")
    code, document = run([str(spec), "--trace"], tmp_path)
    assert code == 1
    assert "no drafter profile 'funding'" in document["checks"][-1]["detail"]


def test_a_broken_spec_is_the_only_check(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("sweep: [", encoding="utf-8")
    code, document = run([str(spec)], tmp_path)
    assert code == 1
    assert [(check["name"], check["state"]) for check in document["checks"]] == [("spec", "failed")]
    assert run([str(tmp_path / "none.yaml")], tmp_path)[0] == 1


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 4})
        yield cluster.address
        cluster.shutdown()


@pytest.fixture
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")


@pytest.mark.ray
@pytest.mark.usefixtures("_no_token")
def test_cluster_has_a_free_node_or_says_what_is_missing(address: str, tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(SIMULATED.replace("GPUS", "8"), encoding="utf-8")
    code, document = run([str(spec), "--address", address], tmp_path)
    assert code == 1
    assert "wanted a node with 8 GPUs" in document["checks"][1]["detail"]
    assert "4 GPUs" in document["checks"][1]["detail"]

    spec.write_text(SIMULATED.replace("GPUS", "4"), encoding="utf-8")
    code, document = run([str(spec), "--address", address], tmp_path)
    assert code == 0
    assert document["checks"][1]["detail"] == "nodes with 4 GPUs: 1, one of them free"
    assert document["checks"][2]["detail"] == "the simulated engine starts no server"


@pytest.mark.ray
@pytest.mark.usefixtures("_no_token")
def test_gpus_held_by_another_job_are_not_free(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_jobs.check_cluster.FREE_WITHIN_S", 1.0)
    import ray

    holder = (
        "import ray, sys, time\n"
        f"ray.init(address={address!r}, log_to_driver=False)\n"
        "from ray.util.placement_group import placement_group\n"
        "placement_group([{'GPU': 1}]).wait(60)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        while "held" not in (line := other.stdout.readline()):
            assert line, "the other job ended"
        spec = tmp_path / "spec.yaml"
        spec.write_text(SIMULATED.replace("GPUS", "4"), encoding="utf-8")
        code, document = run([str(spec), "--address", address], tmp_path)
    assert not ray.is_initialized()
    assert code == 1
    assert "need a node with 4 free GPUs" in document["checks"][1]["detail"]
