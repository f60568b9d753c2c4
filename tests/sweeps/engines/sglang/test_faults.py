"""The real engine over a server that misbehaves: every way to fail is an EngineError, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sweeps.engines.base import EngineError
from sweeps.engines.process import lease
from sweeps.engines.sglang.engine import SGLangEngine
from sweeps.engines.sglang.evidence import keep_nccl_logs
from sweeps.measure.held_engine import HeldEngine
from sweeps.measure.launch_evidence import refuse_not_effective
from sweeps.measure.records import Outcome, PlannedTrial
from sweeps.measure.trial import Measurement
from sweeps.measure.trial_context import TrialContext
from sweeps.results.tables import ResultsFolder, read_table
from sweeps.spec.model import Deadlines, EngineSpec, ResourceSpec, SearchSpec, SweepSpec, WorkloadSpec
from sweeps.spec.space import Configuration, Space
from sweeps.spec.workload import Block, plan_blocks
from tests.sweeps.states import at_steps
from tests.sweeps.stub_engine import plan

STUB = Path(__file__).parents[3] / "stub_server.py"
SPEC = SweepSpec(
    sweep="faults",
    engine=EngineSpec(
        kind="sglang",
        launcher=(sys.executable, "-I", "-S", str(STUB)),
        model_path="stub",
        args={"tp-size": 2},
        switch_in_place=False,
        deadlines_s=Deadlines(load=20, nccl_init=20, capture=20, draft_init=20, first_request=20, block=20, stop=30),
    ),
    search=SearchSpec(num_steps=(0, 2), nccl=("ll",)),
    nccl_sets={"ll": {"NCCL_PROTO": "LL"}},
    drafters={"any": "any"},
    workload=WorkloadSpec(prompt_tokens=8, output_tokens=24, blocks=1, warmup_blocks=0),
    resources=ResourceSpec(gpus=2),
)


class Faulty:
    """Engines over the stub, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engines: list[SGLangEngine] = []

    def engine(
        self, fault: str, *, switch_in_place: bool = False, attention: str | None = None, **deadlines_s: float
    ) -> SGLangEngine:
        limits = replace(SPEC.engine.deadlines_s, **deadlines_s)
        server = replace(SPEC.engine, env={"STUB_FAULT": fault}, deadlines_s=limits, switch_in_place=switch_in_place)
        if attention is not None:
            server = replace(server, args={**server.args, "attention-backend": attention})
        spec = replace(SPEC, engine=server)
        self.engines.append(
            SGLangEngine(
                spec,
                logs=self.folder / "logs",
                node_folder=self.folder / "node",
                stop_request=ResultsFolder(self.folder).stop_request,
            )
        )
        return self.engines[-1]

    @property
    def configuration(self) -> Configuration:
        return next(each for each in Space(SPEC).configurations() if each.num_steps == 2)

    @property
    def block(self) -> Block:
        return plan_blocks(SPEC.workload, folder=Path())[-1]

    def daemon(self) -> tuple[int, int]:
        text = "".join(path.read_text() for path in (self.folder / "logs").glob("*.log"))
        pid, port = text.split("daemon ")[1].split()[:2]
        return int(pid), int(port)

    def nothing_is_left(self) -> bool:
        node = self.folder / "node"
        return [path.name for path in node.iterdir()] == ["leases"] and not list((node / "leases").iterdir())


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[Faulty]:
    bench = Faulty(tmp_path)
    yield bench
    for engine in bench.engines:
        engine.close()


def test_a_server_that_has_no_state_for_anchors_is_started_without_and_not_asked_again(faulty: Faulty) -> None:
    engine = faulty.engine("no_zero_state", switch_in_place=True)
    for _ in range(2):
        report = engine.launch(faulty.configuration, states=at_steps(faulty.configuration, 0, 1, 2))
        assert report.effective["states"] == "2x3-custom-ll,1x2-custom-ll"
        assert engine.run_anchor(faulty.block) is None
    assert len(list((faulty.folder / "logs").glob("*.log"))) == 3


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("fault", "stage", "kind", "words", "deadlines_s"),
    [
        ("crash_at_load", "load", "crash", "TP0: RuntimeError: CUDA error", {}),
        ("gpu_oom", "capture", "gpu_oom", "CUDA out of memory", {}),
        ("host_oom", "load", "killed", r"ended with code -9 \(SIGKILL\)", {}),
        ("no_algorithm", "nccl_init", "nccl_no_algorithm", "invalid usage", {}),
        ("bad_argument", "load", "invalid_config", "--no-such-flag", {}),
        (
            "hang_at_init",
            "nccl_init",
            "hang_nccl_init",
            r"took longer than deadlines_s\.\w+, 0\.5 s",
            {"nccl_init": 0.5},
        ),
        # The start of a process counts as loading, and its first lines as a log that grows: both take time under load.
        ("hang_at:load", "load", "hang", r"took longer than deadlines_s\.\w+, 4 s", {"load": 4.0}),
        ("hang_at:draft_init", "draft_init", "hang", r"took longer than deadlines_s\.\w+, 0\.5 s", {"draft_init": 0.5}),
        ("hang_at:capture", "capture", "hang", r"took longer than deadlines_s\.\w+, 0\.5 s", {"capture": 0.5}),
        ("slow_ready:30", "capture", "hang", r"took longer than deadlines_s\.\w+, 0\.5 s", {"capture": 0.5}),
        ("dead_verify", "first_request", "hang_in_verify", "no complete answer", {"first_request": 0.5}),
        ("unauthorised", "first_request", "invalid_config", "401", {}),
        ("crash_in_block:0", "first_request", "crash", "illegal memory access", {}),
        ("no_handshake", "first_request", "no_handshake", r"ranks \[0, 1\], got \[\]", {}),
        ("half_cycles", "measure", "no_handshake", "is torn", {}),
    ],
)
def test_a_launch_that_fails(
    faulty: Faulty, fault: str, stage: str, kind: str, words: str, deadlines_s: dict[str, Any]
) -> None:
    engine = faulty.engine(fault, **deadlines_s)
    with pytest.raises(EngineError, match=words) as raised:
        engine.launch(faulty.configuration)
    assert (raised.value.stage, raised.value.kind) == (stage, kind)
    assert faulty.nothing_is_left()


def test_a_command_that_ends_at_once_is_seen_at_once(faulty: Faulty) -> None:
    server = replace(SPEC.engine, launcher=("/bin/false",))
    engine = SGLangEngine(replace(SPEC, engine=server), logs=faulty.folder / "logs", node_folder=faulty.folder / "node")
    for _ in range(3):
        with pytest.raises(EngineError, match="ended with code 1 in stage load") as raised:
            engine.launch(faulty.configuration)
        assert raised.value.kind == "crash"


def test_a_server_that_is_busy_for_a_moment_is_asked_again(faulty: Faulty) -> None:
    engine = faulty.engine("busy:0.4")
    engine.launch(faulty.configuration)
    assert engine.run_block(faulty.block).decode_tokens == 23


def test_a_stage_whose_log_still_grows_is_late_and_does_not_hang(faulty: Faulty) -> None:
    engine = faulty.engine("talks_at_load", load=1.0)
    with pytest.raises(EngineError, match=r"longer than deadlines_s\.load, 1 s, and its log still grows") as raised:
        engine.launch(faulty.configuration)
    assert (raised.value.stage, raised.value.kind) == ("load", "late")


def test_what_nccl_says_in_its_own_file_is_the_cause(faulty: Faulty) -> None:
    engine = faulty.engine("no_algorithm")
    with pytest.raises(EngineError, match="No algorithm/protocol available for function AllGather") as raised:
        engine.launch(faulty.configuration)
    assert raised.value.kind == "nccl_no_algorithm"


def test_acceptance_that_a_rank_simulates_unasked_is_refused(faulty: Faulty) -> None:
    engine = faulty.engine("inject:SGLANG_SIMULATE_ACC_LEN=3")
    with pytest.raises(EngineError, match=r"SGLANG_SIMULATE_ACC_LEN: 3 in ranks \[0, 1\], but nobody") as raised:
        engine.launch(faulty.configuration)
    assert raised.value.kind == "not_effective"


def test_ranks_that_yield_to_other_processes_are_named(faulty: Faulty) -> None:
    report = faulty.engine("niceness:15").launch(faulty.configuration)
    rows = [(row.rank, row.seen, row.grade) for row in report.evidence if row.setting == "process.niceness"]
    assert rows == [(0, "15", "extra"), (1, "15", "extra")]


def test_what_the_server_resolved_is_in_its_row(faulty: Faulty) -> None:
    effective = faulty.engine("").launch(faulty.configuration).effective
    assert effective["nccl_version"] == "2.27.5"
    assert effective["max_running_requests"] == "48"
    assert effective["effective_max_running_requests_per_dp"] == "32"


def test_a_crash_in_the_middle_of_a_block(faulty: Faulty) -> None:
    engine = faulty.engine("crash_in_block:1")
    engine.launch(faulty.configuration)
    with pytest.raises(EngineError, match="illegal memory access") as raised:
        engine.run_block(faulty.block)
    assert (raised.value.stage, raised.value.kind, raised.value.transient) == ("measure", "crash", True)
    assert raised.value.log_tail
    engine.close()
    assert faulty.nothing_is_left()


def test_a_verify_that_dies_in_the_middle_of_a_block(faulty: Faulty) -> None:
    engine = faulty.engine("hang_in_block:1", block=0.5)
    engine.launch(faulty.configuration)
    with pytest.raises(EngineError, match=r"within 0\.5 s") as raised:
        engine.run_block(faulty.block)
    assert (raised.value.stage, raised.value.kind, raised.value.transient) == ("measure", "hang_in_verify", False)
    engine.close()
    assert faulty.nothing_is_left()


def test_a_server_that_ignores_sigterm_goes_after_the_grace(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sweeps.engines.sglang.engine._GRACE_S", 0.3)
    engine = faulty.engine("ignore_sigterm")
    engine.launch(faulty.configuration)
    (path,) = (faulty.folder / "node" / "leases").iterdir()
    server = lease.Lease.read(path).server
    assert server is not None
    engine.close()
    assert lease.identify(server.pid) is None
    assert faulty.nothing_is_left()


@pytest.mark.parametrize(("fault", "stage"), [("hang_at_init", "nccl_init"), ("dead_verify", "first_request")])
def test_a_stop_request_ends_the_wait_for_a_server(faulty: Faulty, fault: str, stage: str) -> None:
    """Deadlines are far away: only the request can end it."""
    engine = faulty.engine(fault, nccl_init=600, first_request=600)
    timer = threading.Timer(1.0, ResultsFolder(faulty.folder).stop_request.touch)
    timer.start()
    with pytest.raises(EngineError, match="asked to stop") as raised:
        engine.launch(faulty.configuration)
    timer.join()
    assert raised.value.stage == stage
    assert not raised.value.transient
    assert faulty.nothing_is_left()


def test_a_trial_that_waits_for_its_server_when_the_sweep_is_stopped_was_interrupted(faulty: Faulty) -> None:
    engine, space = faulty.engine("hang_at_init", nccl_init=600), Space(SPEC)
    folder = ResultsFolder(faulty.folder)
    context = TrialContext(sweep_id="s", folder=folder, blocks=(faulty.block,), num_gpus=2)
    measurement = Measurement(HeldEngine(engine), plan(faulty.configuration, space), context)
    timer = threading.Timer(1.0, folder.stop_request.touch)
    timer.start()
    outcome = measurement.advance()
    timer.join()
    assert isinstance(outcome, Outcome)
    assert (outcome.status, outcome.kind, outcome.transient) == ("failed", "interrupted", False)
    measurement.close_engine()
    assert faulty.nothing_is_left()
    (row,) = read_table(folder, "trials").to_pylist()
    assert (row["status"], row["kind"]) == ("failed", "interrupted")


def test_slow_is_not_dead(faulty: Faulty) -> None:
    report = faulty.engine("slow_ready:0.7").launch(faulty.configuration)
    assert sum(report.boot_s.values()) >= 0.7


@pytest.mark.parametrize(
    ("fault", "setting", "seen"),
    [
        ("override:NCCL_PROTO=Simple", "env.NCCL_PROTO", "Simple"),
        ("draft_tokens", "args.speculative_num_draft_tokens", "4"),
    ],
)
def test_an_overridden_setting_makes_the_trial_not_effective(
    faulty: Faulty, fault: str, setting: str, seen: str
) -> None:
    report = faulty.engine(fault).launch(faulty.configuration)
    rows = [row for row in report.evidence if row.setting == setting]
    assert {(row.rank, row.grade, row.seen) for row in rows} == {(0, "overridden", seen), (1, "overridden", seen)}
    with pytest.raises(EngineError, match=setting):
        refuse_not_effective(report.evidence)


@pytest.mark.parametrize(
    ("attention", "grades"), [("triton", {"overridden"}), ("stub", {"effective"}), ("auto", set()), (None, set())]
)
def test_an_argument_that_the_spec_fixes_is_evidence_too(
    faulty: Faulty, attention: str | None, grades: set[str]
) -> None:
    report = faulty.engine("", attention=attention).launch(faulty.configuration)
    rows = [row for row in report.evidence if row.setting == "args.attention_backend"]
    assert {row.grade for row in rows} == grades
    assert {row.seen for row in rows} <= {"stub"}
    refused = pytest.raises(EngineError, match="attention_backend") if attention == "triton" else nullcontext()
    with refused:
        refuse_not_effective(report.evidence)


@pytest.mark.parametrize(
    ("fault", "read", "effective", "grade"),
    [
        ("", "LL", "LL", "effective"),
        ("unread:NCCL_PROTO", None, None, "seen"),
        ("protocol:Simple", "LL", "Simple", "overridden"),
    ],
)
def test_nccls_own_log_tells_what_became_of_a_variable(
    faulty: Faulty, fault: str, read: str | None, effective: str | None, grade: str
) -> None:
    report = faulty.engine(fault).launch(faulty.configuration)
    rows = [row for row in report.evidence if row.setting == "env.NCCL_PROTO"]
    assert {(row.rank, row.read_by_nccl, row.effective, row.grade) for row in rows} == {
        (rank, read, effective, grade) for rank in (0, 1)
    }
    assert report.all_reduce == "nccl"


@pytest.mark.parametrize("fault", ["", "hang_at:capture"])
def test_nccls_logs_stay_with_the_servers_also_of_one_that_had_to_be_ended(faulty: Faulty, fault: str) -> None:
    engine = faulty.engine(fault, capture=1.0)
    with nullcontext() if not fault else pytest.raises(EngineError):
        engine.launch(faulty.configuration)
    engine.close()
    (folder,) = (faulty.folder / "logs").glob("*.nccl")
    assert len(list(folder.glob("stub.*.log"))) == 2
    assert any("AllReduce: 14336 Bytes" in path.read_text() for path in folder.iterdir())


def test_a_log_that_goes_while_it_is_kept_is_no_failure(tmp_path: Path) -> None:
    """The guard of a server that died takes its folder at any moment: the link stands for a file just taken."""
    (tmp_path / "nccl.a.1.log").write_text("NCCL INFO")
    (tmp_path / "nccl.b.2.log").symlink_to(tmp_path / "taken")
    keep_nccl_logs(tmp_path, tmp_path / "kept")
    keep_nccl_logs(tmp_path / "taken", tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["a.1.log"]


def test_an_injected_variable_is_extra_and_no_failure(faulty: Faulty) -> None:
    report = faulty.engine("inject:NCCL_P2P_LEVEL=SYS").launch(faulty.configuration)
    (row, _) = [row for row in report.evidence if row.setting == "env.NCCL_P2P_LEVEL"]
    assert (row.grade, row.requested, row.seen) == ("extra", None, "SYS")
    assert "source unknown" in str(row.detail)
    refuse_not_effective(report.evidence)


def test_a_daemon_and_its_port_go_with_the_server(faulty: Faulty) -> None:
    engine = faulty.engine("daemon")
    engine.launch(faulty.configuration)
    pid, port = faulty.daemon()
    assert listens(port)
    engine.close()
    assert lease.identify(pid) is None
    assert not listens(port)
    assert faulty.nothing_is_left()


def test_the_daemon_of_a_failed_launch_goes_too(faulty: Faulty) -> None:
    with pytest.raises(EngineError):
        faulty.engine("daemon,gpu_oom").launch(faulty.configuration)
    assert lease.identify(faulty.daemon()[0]) is None
    assert faulty.nothing_is_left()


def test_what_a_killed_guard_left_is_reaped_at_the_next_start_and_a_twin_lives(faulty: Faulty) -> None:
    faulty.engine("daemon").launch(faulty.configuration)
    pid, _ = faulty.daemon()
    (path,) = (faulty.folder / "node" / "leases").iterdir()
    left = lease.Lease.read(path)
    assert left.server is not None
    twin = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
    os.kill(left.guard.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while lease.identify(left.server.pid) == left.server:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert lease.identify(pid) is not None
    (scratch,) = (faulty.folder / "node").glob("server-*")
    faulty.engine("").launch(faulty.configuration)
    assert lease.identify(pid) is None
    assert not scratch.exists()
    assert twin.poll() is None
    twin.kill()
    twin.wait()


def measured(faulty: Faulty, fault: str, trial_id: str, *, num_steps: int, output_tokens: int = 24) -> Outcome:
    """One trial of the real engine over the stub, in the results folder of `faulty`."""
    engine = faulty.engine(fault)
    configuration = next(each for each in Space(SPEC).configurations() if each.num_steps == num_steps)
    workload = replace(SPEC.workload, blocks=5, output_tokens=output_tokens)
    context = TrialContext(
        sweep_id="s",
        folder=ResultsFolder(faulty.folder / "results"),
        blocks=plan_blocks(workload, folder=Path()),
        num_gpus=2,
    )
    planned = PlannedTrial(
        trial_id=trial_id,
        role="control" if trial_id.startswith("k") else "candidate",
        number=None,
        configuration=configuration,
        requested={},
        launch_key=trial_id,
    )
    measurement = Measurement(HeldEngine(engine), planned, context)
    while not isinstance(outcome := measurement.advance(), Outcome):
        pass
    engine.close()
    return outcome


def test_output_unlike_the_controls_is_wrong_and_like_it_is_not(faulty: Faulty) -> None:
    assert measured(faulty, "", "k0000", num_steps=0).status == "completed"
    assert measured(faulty, "", "t0000", num_steps=2).status == "completed"
    wrong = measured(faulty, "wrong_output", "t0001", num_steps=2)
    assert (wrong.status, wrong.kind, wrong.transient) == ("failed", "wrong_output", False)


def test_a_draft_that_is_never_accepted_is_inert(faulty: Faulty) -> None:
    inert = measured(faulty, "draft_inert", "t0000", num_steps=2, output_tokens=30)
    assert (inert.status, inert.kind) == ("failed", "draft_inert")
    assert len(read_table(ResultsFolder(faulty.folder / "results"), "blocks")) == 4


_LOOKS = (
    "import os, sys\n"
    "assert os.environ['HF_TOKEN'] == 'written-marker'[::-1], 'a wrong value'\n"
    "assert os.environ['WANDB_API_KEY'] == 'inherited-marker'[::-1], 'a wrong value'\n"
)
_SERVES = _LOOKS + "sys.argv = sys.argv[1:]\nexec(compile(open(sys.argv[0]).read(), sys.argv[0], 'exec'))"
_TELLS = _LOOKS + "raise RuntimeError('no login with ' + os.environ['HF_TOKEN'] + ' ' + os.environ['WANDB_API_KEY'])"


@pytest.mark.parametrize("script", [_SERVES, _TELLS])
def test_a_secret_reaches_the_server_and_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Tables, launch record, outcome and report; what the server itself prints stays in its log."""
    monkeypatch.setenv("WANDB_API_KEY", "inherited-marker"[::-1])
    told = {"HF_TOKEN": "written-marker"[::-1], "http_proxy": "http://user:rekram-word@proxy"}
    launcher = (sys.executable, "-I", "-S", "-c", script, str(STUB))
    server = replace(SPEC.engine, env=told, inherit=("WANDB_API_KEY",), launcher=launcher)
    folder = ResultsFolder(tmp_path / "results")
    engine = SGLangEngine(replace(SPEC, engine=server), logs=folder.root / "logs", node_folder=tmp_path / "node")
    blocks = plan_blocks(SPEC.workload, folder=Path())
    context = TrialContext(sweep_id="s", folder=folder, blocks=blocks, num_gpus=2, server=server)
    configuration = next(each for each in Space(SPEC).configurations() if each.num_steps == 2)
    measurement = Measurement(HeldEngine(engine), plan(configuration, Space(SPEC)), context)
    outcome = None
    while not isinstance(outcome, Outcome):
        outcome = measurement.advance()
    measurement.close_engine()
    assert ("no login with *** ***" in str(outcome.reason)) is (script == _TELLS), outcome.reason
    tables = {table: read_table(folder, table).to_pylist() for table in ("trials", "evidence", "events")}
    assert "rekram" not in str((tables, outcome))
    records = [path.read_text() for path in folder.root.rglob("*.launch.json")]
    assert "rekram" not in str(records)
    assert '"HF_TOKEN": "${HF_TOKEN}"' in records[0]
    if script == _SERVES:
        seen = {row["setting"]: (row["requested"], row["seen"], row["grade"]) for row in tables["evidence"]}
        assert seen["env.HF_TOKEN"] == ("${HF_TOKEN}", "${HF_TOKEN}", "seen")
        assert seen["env.WANDB_API_KEY"] == ("${WANDB_API_KEY}", "${WANDB_API_KEY}", "seen")
        assert seen["env.http_proxy"][1] == "http://***@proxy"


def test_a_variable_that_is_to_be_inherited_and_is_not_there_is_named(tmp_path: Path) -> None:
    spec = replace(SPEC, engine=replace(SPEC.engine, inherit=("HF_TOKEN_OF_NOBODY",)))
    engine = SGLangEngine(spec, logs=tmp_path / "logs", node_folder=tmp_path / "node")
    with pytest.raises(EngineError, match=r"engine\.inherit: HF_TOKEN_OF_NOBODY is not set on") as raised:
        engine.launch(next(iter(Space(SPEC).configurations())))
    assert raised.value.kind == "invalid_config"
