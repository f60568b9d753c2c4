"""The all-reduce table: process handling with a stand-in worker, then the real worker over gloo where torch is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from ray_jobs.allreduce.ranks import RankPlan, RankReport, run_ranks
from ray_jobs.allreduce.verdict import DEFAULT_AGAIN, render
from ray_jobs.allreduce_table import (
    ALLREDUCE,
    BUILTIN_SETS,
    InterpreterError,
    main,
    measure,
    server_versions,
    sets_of,
)
from sweeps.spec.model import EngineSpec, SearchSpec, SweepSpec


@pytest.fixture
def plan() -> RankPlan:
    return RankPlan(
        python=[sys.executable, "-S"],
        world_size=2,
        backend="nccl",
        token_bytes=14336,
        tokens=(1, 2),
        calls=20,
        warmup=1,
        repeats=11,
        deadline_s=30.0,
        grace_s=0.3,
        worker=Path(__file__).with_name("standin_worker.py"),
    )


def run(plan: RankPlan, folder: Path, conduct: str) -> RankReport:
    return run_ranks(plan, {**os.environ, "STANDIN": conduct}, folder)


def pids(folder: Path) -> list[int]:
    records = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return [record[key] for record in records for key in ("pid", "child") if key in record]


def all_gone(folder: Path) -> bool:
    """SIGKILL takes a moment to reach a rank's children."""
    ends_s = time.monotonic() + 20
    while any(map(alive, pids(folder))) and time.monotonic() < ends_s:
        time.sleep(0.05)
    return not any(map(alive, pids(folder)))


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_hang_is_a_result_and_leaves_no_process(plan: RankPlan, tmp_path: Path) -> None:
    report = run(replace(plan, deadline_s=4.0), tmp_path / "hang", "hang")
    assert report.outcome == "hang"
    assert report.reason == "no end after 4 s: rank 0 in nccl_init, rank 1 in nccl_init"
    assert report.rows == ()
    assert len(pids(tmp_path / "hang")) == 4  # two ranks and a child of each
    assert all_gone(tmp_path / "hang")


def test_a_crashed_rank_takes_the_others_with_it_and_is_named(plan: RankPlan, tmp_path: Path) -> None:
    report = run(plan, tmp_path / "crash", "crash")
    assert report.outcome == "crash"
    assert report.reason == "rank 1 ended with 1 in nccl_init: RuntimeError: rank 1 has had enough"
    assert all_gone(tmp_path / "crash")


@pytest.mark.parametrize(
    ("conduct", "outcome", "reason"),
    [
        ("good", "ok", None),
        ("no_algorithm", "nccl_no_algorithm", "invalid usage"),
        ("wrong", "wrong_output", "sum is wrong at graph 28672 B"),
        ("half_line", "crash", "ended with 9"),
        ("does_not_close", "ok", "did not close"),
    ],
)
def test_outcomes(plan: RankPlan, tmp_path: Path, conduct: str, outcome: str, reason: str | None) -> None:
    report = run(plan, tmp_path / conduct, conduct)
    assert report.outcome == outcome
    assert (reason is None) == (report.reason is None)
    assert (reason or "") in (report.reason or "")


def test_an_earlier_run_in_the_same_folder_is_not_read_again(plan: RankPlan, tmp_path: Path) -> None:
    assert run(plan, tmp_path / "same", "good").outcome == "ok"
    assert run(replace(plan, deadline_s=1.0), tmp_path / "same", "hang").outcome == "hang"


def test_a_missing_interpreter_starts_nothing(plan: RankPlan, tmp_path: Path) -> None:
    with pytest.raises(InterpreterError, match="wanted the server's interpreter"):
        server_versions(["/nowhere/python"])


def test_table_keeps_every_set_and_gives_ranks_a_clean_environment(
    plan: RankPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    sets: dict[str, Mapping[str, str]] = {
        "default": {},
        "LL": {"NCCL_PROTO": "LL"},
        "broken": {"STANDIN": "no_algorithm"},
        "wrong": {"STANDIN": "wrong"},
        "multicast": {"NCCL_NVLS_ENABLE": "1"},
    }
    table = measure(sets, plan, tmp_path, env=os.environ, fixed={"NCCL_IB_DISABLE": "1"}, evidence=True)
    table.write(tmp_path)
    stored = pq.read_table(tmp_path / "allreduce.parquet")
    assert stored.schema.names == ALLREDUCE.names
    assert stored.schema.metadata == ALLREDUCE.metadata
    rows = stored.cast(ALLREDUCE).to_pylist()
    outcomes = [(row["set"], row["tokens"], row["outcome"]) for row in rows]
    assert outcomes == [
        ("default", 1, "ok"),
        ("default", 2, "ok"),
        ("LL", 1, "ok"),
        ("LL", 2, "ok"),
        ("broken", None, "nccl_no_algorithm"),
        ("wrong", 1, "ok"),
        ("wrong", 2, "wrong_output"),
        ("multicast", None, "refused"),
        (DEFAULT_AGAIN, 1, "ok"),
        (DEFAULT_AGAIN, 2, "ok"),
    ]
    assert (rows[0]["us_p10"], rows[0]["us_median"], rows[0]["us_p90"]) == (10.1, 10.5, 10.9)
    assert rows[4]["us_median"] is None
    assert json.loads((tmp_path / "allreduce.json").read_text())["removed_env"] == ["NCCL_ALGO"]
    seen = json.loads((tmp_path / "logs/LL/rank0.jsonl").read_text().splitlines()[1])["machine"]["env"]
    assert seen["NCCL_PROTO"] == "LL"
    assert seen["NCCL_NVLS_ENABLE"] == "0"
    assert seen["NCCL_IB_DISABLE"] == "1"
    assert "NCCL_ALGO" not in seen
    assert "NCCL_DEBUG_FILE" not in seen


def test_evidence_logs_are_kept_per_rank_and_small(plan: RankPlan, tmp_path: Path) -> None:
    sets: dict[str, Mapping[str, str]] = {"default": {}, "LL": {"NCCL_PROTO": "LL", "NCCL_PORTO": "LL"}}
    table = measure(sets, plan, tmp_path, env=os.environ, evidence=True)
    columns = ("set", "tokens", "algorithm", "protocol", "channels", "transports", "unread")
    chosen = [tuple(row[name] for name in columns) for row in table.rows if row["set"] != DEFAULT_AGAIN]
    assert chosen == [
        ("default", 1, "Ring", "Simple", 2, ["P2P/IPC"], []),
        ("default", 2, "Ring", "Simple", 2, ["P2P/IPC"], []),
        ("LL", 1, "Ring", "LL", 2, ["P2P/IPC"], ["NCCL_PORTO"]),
        ("LL", 2, "Ring", "LL", 2, ["P2P/IPC"], ["NCCL_PORTO"]),
    ]
    console = Console(width=160, record=True)
    render(table.rows, console)
    assert "NCCL_PORTO" in (printed := console.export_text())
    assert "Ring Simple x2" in printed
    kept = sorted((tmp_path / "nccl/default").iterdir())
    assert [path.name for path in kept] == ["rank0.log", "rank1.log"]
    text = kept[0].read_text()
    assert text.startswith("node:1:1 [0] NCCL INFO Channel 00/0")
    assert text.endswith("last line")
    assert len(text) < 70_000


def test_sets_are_the_default_the_specs_and_the_asked_ones_without_repeats() -> None:
    spec = SweepSpec(
        sweep="s",
        engine=EngineSpec(kind="simulated"),
        search=SearchSpec(),
        nccl_sets={"ours": {"NCCL_PROTO": "LL"}, "p2p-off": {"NCCL_P2P_DISABLE": "1"}},
    )
    assert list(sets_of(spec)) == ["default", "ours", "p2p-off"]
    assert list(sets_of(spec, ["LL", "Simple", "P2P-off"])) == ["default", "ours", "p2p-off", "Simple"]
    assert sets_of(None, list(BUILTIN_SETS)) == BUILTIN_SETS


def test_without_gpus_the_table_is_skipped_with_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\necho '{\"gpus\": []}'\n", encoding="utf-8")
    interpreter.chmod(0o755)
    assert main(["--out", str(tmp_path / "out"), "--python", str(interpreter)]) == 0
    assert "all-reduce table skipped: it needs 2 GPUs or more" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


ENGINE_PYTHON = Path(os.environ.get("SPECSWEEP_ENGINE_PYTHON", Path(__file__).parents[2] / ".venv-engine/bin/python"))


@pytest.mark.engine
@pytest.mark.skipif(not ENGINE_PYTHON.exists(), reason="the real worker needs the engine environment's torch")
def test_real_worker_over_gloo(tmp_path: Path) -> None:
    ranks = ["--backend", "gloo", "--world-size", "2", "--deadline-s", "120", "--python", str(ENGINE_PYTHON)]
    sizes = ["--tokens", "1", "3", "--calls", "2", "--repeats", "5", "--warmup", "1"]
    assert main(["--out", str(tmp_path), "--builtin", "LL", *ranks, *sizes]) == 0
    rows = pq.read_table(tmp_path / "allreduce.parquet").to_pylist()
    assert [(row["set"], row["tokens"]) for row in rows] == [
        (name, tokens) for name in ("default", "LL", DEFAULT_AGAIN) for tokens in (1, 3)
    ]
    assert {(row["outcome"], row["mode"], row["timer_kind"]) for row in rows} == {("ok", "eager", "host")}
    assert all(0 < row["us_p10"] <= row["us_median"] <= row["us_p90"] for row in rows)


@pytest.mark.engine
@pytest.mark.skipif(not ENGINE_PYTHON.exists(), reason="the real worker needs the engine environment's torch")
def test_real_ranks_die_with_a_killed_driver(tmp_path: Path) -> None:
    driver = (
        "import os\n"
        "from pathlib import Path\n"
        "from ray_jobs.allreduce.ranks import RankPlan, run_ranks\n"
        f"plan = RankPlan(python=[{str(ENGINE_PYTHON)!r}], world_size=2, backend='gloo', token_bytes=14336,\n"
        "                tokens=(1,), calls=20, warmup=1, repeats=10_000_000, deadline_s=600)\n"
        f"run_ranks(plan, dict(os.environ), Path({str(tmp_path)!r}))\n"
    )
    with subprocess.Popen([sys.executable, "-c", driver], cwd=Path(__file__).parents[2]) as process:
        ends_s = time.monotonic() + 60
        while not (children := ranks_of(process.pid)) and time.monotonic() < ends_s:
            time.sleep(0.05)
        process.kill()
    assert len(children) == 2
    while any(map(alive, children)) and time.monotonic() < ends_s:
        time.sleep(0.05)
    assert not any(map(alive, children))


def ranks_of(pid: int) -> list[int]:
    """The two ranks of a driver, once both are there and have asked to die with it (their first act)."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    loads_torch = ["libtorch" in Path(f"/proc/{child}/maps").read_text() for child in children]
    return children if loads_torch == [True, True] else []
