"""The all-reduce table: process handling with a stand-in worker, then the real worker over gloo if torch is there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from ray_jobs.allreduce.display import render
from ray_jobs.allreduce.groups import Measured, measure_members
from ray_jobs.allreduce.ranks import Member, RankPlan
from ray_jobs.allreduce.table import ALLREDUCE
from ray_jobs.allreduce_table import (
    BUILTIN_SETS,
    InterpreterError,
    main,
    measure,
    server_versions,
    sets_of,
)
from sweeps.spec.model import EngineSpec, SearchSpec, SweepSpec

STANDIN = Path(__file__).with_name("standin_worker.py")


@pytest.fixture
def plan() -> RankPlan:
    return RankPlan(
        python=[sys.executable, "-S"],
        world_size=2,
        backend="nccl",
        token_bytes=14336,
        tokens=(1, 2),
        repeats=3,
        rounds=4,
        grace_s=0.3,
        worker=STANDIN,
    )


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where copies of NCCL go."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def run(plan: RankPlan, folder: Path, **conducts: str) -> Measured:
    """One communicator for each set; its name is the keyword, its conduct the value."""
    members = [
        Member(
            nccl_set=name,
            copy=0,
            env={"STANDIN": conduct, "NCCL_DEBUG": "WARN"},
            logs=folder / "nccl" / name / "copy0",
        )
        for name, conduct in conducts.items()
    ]
    return measure_members(plan, members, dict(os.environ), folder)


def outcomes(measured: Measured) -> dict[tuple[str, int], str]:
    return {(each.member.nccl_set, each.member.copy): each.outcome for each in measured.results}


def rounds(measured: Measured) -> dict[tuple[str, int], list[int]]:
    return {
        (each.member.nccl_set, each.member.copy): list(each.cells[0].samples_us) if each.cells else []
        for each in measured.results
    }


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


def test_all_sets_are_timed_in_one_group_in_rounds(plan: RankPlan, tmp_path: Path) -> None:
    measured = run(plan, tmp_path, a="good", b="slow", c="good")
    assert outcomes(measured) == {("a", 0): "ok", ("b", 0): "ok", ("c", 0): "ok"}
    assert set(map(tuple, rounds(measured).values())) == {(0, 1, 2, 3)}
    lines = (tmp_path / "group0/rank1.jsonl").read_text().splitlines()
    order = [record["member"] for line in lines if (record := json.loads(line)).get("stage") == "round"]
    assert order == [0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0]
    slow = measured.results[1]
    assert slow.cells[0].round_us == pytest.approx({0: 20.01, 1: 20.11, 2: 20.21, 3: 20.31})
    assert (slow.init_s, slow.communicator_mib) == (0.5, 101.0)
    assert not (tmp_path / "group1").exists()


def test_a_set_that_nccl_refuses_fails_in_its_words_and_the_others_go_on(plan: RankPlan, tmp_path: Path) -> None:
    measured = run(plan, tmp_path, a="good", b="no_algorithm", c="no_memory_on_rank_1", d="good")
    assert outcomes(measured) == {
        ("a", 0): "ok",
        ("b", 0): "nccl_no_algorithm",
        ("c", 0): "nccl_refused",
        ("d", 0): "ok",
    }
    reasons = [each.reason for each in measured.results]
    words = "No algorithm/protocol available for function AllReduce with datatype ncclBfloat16."
    assert reasons == [None, f"ncclAllReduce: invalid usage: {words}", "cannot copy NCCL: no space left", None]
    assert not (tmp_path / "group1").exists()


@pytest.mark.parametrize(
    ("conduct", "where"), [("hang", "rank 0 in set_up, rank 1 in"), ("hang_on_rank_1", "rank 1 in")]
)
def test_a_hang_is_a_result_and_the_other_sets_are_measured_in_a_fresh_group(
    plan: RankPlan, tmp_path: Path, scratch: Path, conduct: str, where: str
) -> None:
    measured = run(replace(plan, deadline_s=2.0), tmp_path, a="good", b=conduct, c="good")
    assert outcomes(measured) == {("b", 0): "hang", ("a", 0): "ok", ("c", 0): "ok"}
    assert measured.results[0].reason == f"no end after 2 s: {where} set_up"
    assert rounds(measured) == {("b", 0): [], ("a", 0): [4, 5, 6, 7], ("c", 0): [4, 5, 6, 7]}
    assert len(pids(tmp_path / "group0")) == (
        4 if conduct == "hang" else 3
    )  # two ranks, and a child of each that hangs
    assert all_gone(tmp_path / "group0")
    assert list(scratch.iterdir()) == []


def test_a_hang_in_the_rounds_loses_nothing_that_was_measured(plan: RankPlan, tmp_path: Path) -> None:
    measured = run(replace(plan, deadline_s=2.0), tmp_path, a="good", b="hang_in_last_round", c="good")
    assert outcomes(measured) == {
        ("a", 0): "ok",
        ("b", 0): "hang",
        ("c", 0): "ok",
        ("a", 1): "ok",
        ("c", 1): "ok",
    }
    assert rounds(measured) == {
        ("a", 0): [0, 1, 2],  # the last round goes backwards: c, then b
        ("b", 0): [0, 1, 2],
        ("c", 0): [0, 1, 2, 3],
        ("a", 1): [4, 5, 6, 7],
        ("c", 1): [4, 5, 6, 7],
    }
    assert (tmp_path / "nccl/a/copy1/rank0.log").is_file()


def test_a_crashed_rank_takes_the_others_with_it_and_is_named(plan: RankPlan, tmp_path: Path) -> None:
    measured = run(plan, tmp_path, a="good", b="crash")
    assert outcomes(measured) == {("b", 0): "crash", ("a", 0): "ok"}
    reason = "rank 1 ended with 1 in set_up: RuntimeError: rank 1 has had enough"
    assert measured.results[0].reason == reason
    assert all_gone(tmp_path / "group0")


def test_a_half_written_line_is_passed_over(plan: RankPlan, tmp_path: Path) -> None:
    measured = run(plan, tmp_path, a="half_line")
    assert outcomes(measured) == {("a", 0): "crash"}
    assert "ended with" in (measured.results[0].reason or "")


def test_ranks_that_do_not_start_are_no_set_of_them_to_blame(
    plan: RankPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN", "no_start")
    measured = run(replace(plan, start_s=1.0), tmp_path, a="good", b="good")
    assert outcomes(measured) == {("a", 0): "hang", ("b", 0): "hang"}
    assert measured.results[0].reason == "no end after 1 s: rank 0 in start, rank 1 in start"


def test_ranks_that_do_not_end_have_measured(plan: RankPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN", "does_not_end")
    measured = run(plan, tmp_path, a="good")
    assert outcomes(measured) == {("a", 0): "ok"}
    assert measured.results[0].reason == "all rounds measured, but the ranks did not end"
    assert all_gone(tmp_path / "group0")


def test_a_sum_that_is_wrong_on_any_rank_is_told(plan: RankPlan, tmp_path: Path) -> None:
    measured = run(plan, tmp_path, a="wrong_on_rank_1")
    assert outcomes(measured) == {("a", 0): "wrong_output"}
    assert measured.results[0].reason == "sum is wrong at graph 28672 B"
    assert [cell.is_right for cell in measured.results[0].cells] == [True, False]


def test_an_earlier_run_in_the_same_folder_is_not_read_again(plan: RankPlan, tmp_path: Path) -> None:
    assert outcomes(run(plan, tmp_path, a="good")) == {("a", 0): "ok"}
    assert outcomes(run(replace(plan, deadline_s=1.0), tmp_path, a="hang")) == {("a", 0): "hang"}


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_table_leaves_no_copy_of_nccl_on_the_node(tmp_path: Path, scratch: Path, sent: signal.Signals) -> None:
    driver = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from ray_jobs.allreduce.ranks import Member, RankPlan, run_ranks\n"
        f"plan = RankPlan(python=[sys.executable, '-S'], world_size=2, backend='nccl', token_bytes=14336,\n"
        f"                tokens=(1, 2), worker=Path({str(STANDIN)!r}))\n"
        f"member = Member(nccl_set='a', copy=0, env={{'STANDIN': 'hang', 'NCCL_DEBUG': 'WARN'}},\n"
        f"                logs=Path({str(tmp_path / 'nccl')!r}))\n"
        f"run_ranks(plan, [member], dict(os.environ), Path({str(tmp_path / 'ranks')!r}))\n"
    )
    env = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen(
        [sys.executable, "-c", driver], cwd=Path(__file__).parents[2], env=env, stderr=subprocess.DEVNULL
    ) as process:
        ends_s = time.monotonic() + 60
        while not list(scratch.glob("*/libnccl-0.so")) and time.monotonic() < ends_s:
            time.sleep(0.02)
        assert list(scratch.glob("*/libnccl-0.so"))
        process.send_signal(sent)
    while (list(scratch.iterdir()) or ranks_in(tmp_path)) and time.monotonic() < ends_s:
        time.sleep(0.02)
    assert list(scratch.iterdir()) == []
    assert ranks_in(tmp_path) == []


def ranks_in(folder: Path) -> list[int]:
    """Processes of the stand-in worker that still run with their files in this folder."""
    commands = [(each.pid, " ".join(each.info["cmdline"] or ())) for each in psutil.process_iter(["cmdline"])]
    return [pid for pid, command in commands if str(STANDIN) in command and str(folder / "ranks") in command]


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
        "wrong": {"STANDIN": "wrong_on_rank_1"},
        "multicast": {"NCCL_NVLS_ENABLE": "1"},
    }
    table = measure(sets, plan, tmp_path, env=os.environ, fixed={"NCCL_IB_DISABLE": "1"}, evidence=True)
    table.write(tmp_path)
    stored = pq.read_table(tmp_path / "allreduce.parquet")
    assert stored.schema.names == ALLREDUCE.names
    assert stored.schema.metadata == ALLREDUCE.metadata
    rows = stored.cast(ALLREDUCE).to_pylist()
    assert [(row["set"], row["copy"], row["tokens"], row["outcome"]) for row in rows] == [
        ("default", 0, 1, "ok"),
        ("default", 0, 2, "ok"),
        ("default", 1, 1, "ok"),
        ("default", 1, 2, "ok"),
        ("LL", 0, 1, "ok"),
        ("LL", 0, 2, "ok"),
        ("broken", 0, None, "nccl_no_algorithm"),
        ("wrong", 0, 1, "ok"),
        ("wrong", 0, 2, "wrong_output"),
        ("multicast", None, None, "refused"),
    ]
    first, broken = rows[0], rows[6]
    assert (first["us_p10"], first["us_median"], first["us_p90"], first["repeats"]) == (10.011, 10.16, 10.309, 12)
    assert (first["rounds"], first["round_us"]) == ([0, 1, 2, 3], [10.01, 10.11, 10.21, 10.31])
    assert (first["init_s"], first["communicator_mib"]) == (0.5, 100.0)
    assert broken["us_median"] is None
    assert json.loads((tmp_path / "allreduce.json").read_text())["removed_env"] == ["NCCL_ALGO"]
    seen = table.machine["env"]
    assert (seen["NCCL_NVLS_ENABLE"], seen["NCCL_IB_DISABLE"]) == ("0", "1")
    assert seen.keys().isdisjoint({"NCCL_ALGO", "NCCL_PROTO", "NCCL_DEBUG_FILE"})
    member = json.loads((tmp_path / "logs/group0/members.json").read_text())[1]
    assert member["env"] == {"NCCL_PROTO": "LL", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,TUNING,P2P,SHM"}


@pytest.mark.parametrize(
    ("copies", "wanted"),
    [
        ({}, [("default", 0), ("LL", 0), ("default", 1)]),
        ({"default_copies": 1}, [("default", 0), ("LL", 0)]),
        ({"default_copies": 2, "copies": 2}, [("default", 0), ("LL", 0), ("default", 1), ("LL", 1)]),
    ],
)
def test_copies_are_communicators_of_their_own(
    plan: RankPlan, tmp_path: Path, copies: dict[str, Any], wanted: list[tuple[str, int]]
) -> None:
    sets: dict[str, Mapping[str, str]] = {"default": {}, "LL": {"NCCL_PROTO": "LL"}}
    measure(sets, plan, tmp_path, env=os.environ, evidence=True, **copies)
    members = json.loads((tmp_path / "logs/group0/members.json").read_text())
    assert [(member["set"], member["copy"]) for member in members] == wanted
    assert len({member["logs"] for member in members}) == len(wanted)


def test_evidence_logs_are_kept_per_communicator_and_rank_and_small(plan: RankPlan, tmp_path: Path) -> None:
    sets: dict[str, Mapping[str, str]] = {"default": {}, "LL": {"NCCL_PROTO": "LL", "NCCL_PORTO": "LL"}}
    table = measure(sets, plan, tmp_path, env=os.environ, evidence=True)
    columns = ("set", "copy", "tokens", "algorithm", "protocol", "channels", "transports", "unread")
    assert [tuple(row[name] for name in columns) for row in table.rows] == [
        ("default", 0, 1, "Ring", "Simple", 2, ["P2P/IPC"], []),
        ("default", 0, 2, "Ring", "Simple", 2, ["P2P/IPC"], []),
        ("default", 1, 1, "Ring", "Simple", 2, ["P2P/IPC"], []),
        ("default", 1, 2, "Ring", "Simple", 2, ["P2P/IPC"], []),
        ("LL", 0, 1, "Ring", "LL", 2, ["P2P/IPC"], ["NCCL_PORTO"]),
        ("LL", 0, 2, "Ring", "LL", 2, ["P2P/IPC"], ["NCCL_PORTO"]),
    ]
    console = Console(width=160, record=True)
    render(table.rows, console)
    assert "NCCL_PORTO" in (printed := console.export_text())
    assert "Ring Simple x2" in printed
    kept = sorted((tmp_path / "nccl/default/copy1").iterdir())
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
    sizes = ["--tokens", "1", "3", "--calls", "2", "--repeats", "2", "--rounds", "3", "--warmup", "1"]
    assert main(["--out", str(tmp_path), "--builtin", "LL", *ranks, *sizes]) == 0
    rows = pq.read_table(tmp_path / "allreduce.parquet").to_pylist()
    assert [(row["set"], row["copy"], row["tokens"]) for row in rows] == [
        (name, copy, tokens) for name, copy in (("default", 0), ("default", 1), ("LL", 0)) for tokens in (1, 3)
    ]
    assert {tuple(row["rounds"]) for row in rows} == {(0, 1, 2)}
    assert all(row["init_s"] > 0 for row in rows)
    assert {(row["outcome"], row["mode"], row["timer_kind"]) for row in rows} == {("ok", "eager", "host")}
    assert all(0 < row["us_p10"] <= row["us_median"] <= row["us_p90"] for row in rows)


@pytest.mark.engine
@pytest.mark.skipif(not ENGINE_PYTHON.exists(), reason="the real worker needs the engine environment's torch")
def test_real_ranks_die_with_a_killed_driver(tmp_path: Path) -> None:
    driver = (
        "import os\n"
        "from pathlib import Path\n"
        "from ray_jobs.allreduce.ranks import Member, RankPlan, run_ranks\n"
        f"plan = RankPlan(python=[{str(ENGINE_PYTHON)!r}], world_size=2, backend='gloo', token_bytes=14336,\n"
        "                tokens=(1,), calls=20, warmup=1, repeats=10_000_000, deadline_s=600)\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "member = Member(nccl_set='default', copy=0, env={}, logs=folder / 'nccl')\n"
        "run_ranks(plan, [member], dict(os.environ), folder)\n"
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
    ranks = [child for child in children if "libtorch" in Path(f"/proc/{child}/maps").read_text()]
    return ranks if len(ranks) == 2 else []
