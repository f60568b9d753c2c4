"""The probe's states over a worker and groups that stand in for SGLang's; no torch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from specsweep_probe import communicators, states

from sweeps.engines.sglang.engine import PLAN_FILE
from sweeps.engines.sglang.launch_plan import nccl_log_settings
from sweeps.engines.sglang.server_log import STATE_FAILURE

PLAN: dict[str, Any] = {
    "first": "1x2-custom-ll",
    "deadline_s": 5.0,
    "communicators": {"ll": {"NCCL_PROTO": "LL"}, "default": {}},
    "states": [
        {"name": "1x2-custom-ll", "num_steps": 1, "num_draft_tokens": 2, "communicator": "ll", "custom": True},
        {"name": "3x4-custom-ll", "num_steps": 3, "num_draft_tokens": 4, "communicator": "ll", "custom": True},
        {"name": "3x4-custom-default", "num_steps": 3, "num_draft_tokens": 4, "communicator": None, "custom": True},
        {"name": "3x4-nccl-default", "num_steps": 3, "num_draft_tokens": 4, "communicator": "default", "custom": False},
    ],
}


def c_getenv(name: str) -> str | None:
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    value = libc.getenv(name.encode())
    return None if value is None else value.decode()


class Worker:
    """Captures what its group has at the time, as SGLang's graphs do."""

    def __init__(self, group: SimpleNamespace) -> None:
        self.group = group
        self.speculative_num_steps = 3
        self.applied: list[Any] = []
        self.refused: set[int] = set()

    def captured(self, num_steps: int, num_draft_tokens: int) -> SimpleNamespace:
        return SimpleNamespace(
            speculative_num_steps=num_steps,
            speculative_num_draft_tokens=num_draft_tokens,
            communicator=self.group.pynccl_comm,
            custom=self.group.ca_comm,
            protocol=c_getenv("NCCL_PROTO"),
        )

    def build_adaptive_runtime_state(
        self, *, speculative_num_steps: int, speculative_num_draft_tokens: int, cuda_graph_bs: Any
    ) -> SimpleNamespace:
        if speculative_num_steps in self.refused:
            raise RuntimeError("CUDA out of memory")
        return self.captured(speculative_num_steps, speculative_num_draft_tokens)

    def apply_runtime_state(self, state: Any) -> None:
        assert self.speculative_num_steps != state.speculative_num_steps, "SGLang would return early"
        self.applied.append(state)
        self.speculative_num_steps = state.speculative_num_steps


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    coordinator = SimpleNamespace(pynccl_comm="launched", ca_comm="kernel", world_size=2)
    group = communicators.Group(coordinator)
    made = Worker(coordinator)

    def make(communicator: Any, over: list[Any], folder: Path, *, rank: int, deadline_s: float) -> None:
        communicator.by_group = {id(each.coordinator): f"communicator {communicator.name}" for each in over}
        communicator.environment = communicators.read_environment("NCCL_")

    monkeypatch.setattr(states, "groups", lambda: [group])
    monkeypatch.setattr(states, "make", make)
    monkeypatch.setattr(states, "agree", lambda fine, over: fine)
    monkeypatch.setattr(states, "smallest", lambda value, over: value)
    monkeypatch.setattr(states, "_rank", lambda: 0)
    monkeypatch.setattr(states, "_is_on_gpu", lambda: False)
    yield made
    assert (coordinator.pynccl_comm, coordinator.ca_comm) == ("launched", "kernel"), "the group is left as launched"


def keeper_of(worker: Worker, folder: Path, plan: dict[str, Any] = PLAN) -> states.StateKeeper:
    keeper = states.StateKeeper(plan, folder, worker)
    keeper.register(worker.captured(3, 4))
    keeper.init_states(cuda_graph_bs=[1])
    return keeper


def test_each_state_is_captured_with_its_communicator_back_end_and_variables(worker: Worker, tmp_path: Path) -> None:
    keeper = keeper_of(worker, tmp_path)
    captured = {name: (each.communicator, each.custom, each.protocol) for name, each in keeper.states.items()}
    assert captured == {
        "3x4-custom-default": ("launched", "kernel", None),
        "1x2-custom-ll": ("communicator ll", "kernel", "LL"),
        "3x4-custom-ll": ("communicator ll", "kernel", "LL"),
        "3x4-nccl-default": ("communicator default", None, None),
    }
    assert c_getenv("NCCL_PROTO") is None
    assert keeper.communicators["ll"].environment["NCCL_PROTO"] == "LL"
    assert "NCCL_PROTO" not in keeper.communicators["default"].environment
    assert all(account["error"] is None for account in keeper.account()["states"].values())


def test_the_wanted_state_is_applied_once_also_at_the_same_steps(worker: Worker, tmp_path: Path) -> None:
    keeper = keeper_of(worker, tmp_path)
    keeper.activate_step_by_batch(1)
    keeper.activate_step_by_batch(1)
    keeper.wanted = "3x4-custom-ll"
    keeper.activate_step_by_batch(1)
    keeper.wanted = "3x4-nccl-default"
    keeper.activate_step_by_batch(1)
    assert worker.applied == [keeper.states[n] for n in ("1x2-custom-ll", "3x4-custom-ll", "3x4-nccl-default")]
    assert keeper.active == "3x4-nccl-default"


def test_a_state_that_cannot_be_captured_is_named_and_the_others_are_held(worker: Worker, tmp_path: Path) -> None:
    worker.refused = {1}
    keeper = keeper_of(worker, tmp_path)
    assert keeper.account()["states"]["1x2-custom-ll"]["error"] == "RuntimeError: CUDA out of memory"
    assert set(keeper.states) == {"3x4-custom-ll", "3x4-custom-default", "3x4-nccl-default"}
    keeper.activate_step_by_batch(1)
    assert worker.applied == [], "the launched state goes on until the engine has read the handshake"


def test_states_end_before_the_memory_does(worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "_is_on_gpu", lambda: True)
    monkeypatch.setattr(states, "_free_bytes", lambda: states.RESERVE_BYTES - 1)
    keeper = keeper_of(worker, tmp_path)
    assert set(keeper.states) == {"3x4-custom-default"}
    assert "2.0 GiB are free, wanted 2.0 GiB" in str(keeper.account()["states"]["3x4-custom-ll"]["error"])


def test_with_one_rank_the_sets_share_what_was_captured(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "groups", list)
    keeper = keeper_of(worker, tmp_path)
    assert keeper.states["3x4-custom-ll"] is keeper.states["3x4-custom-default"]
    assert keeper.states["1x2-custom-ll"] is not keeper.states["3x4-custom-ll"]


def test_probe_and_engine_agree_on_names() -> None:
    assert states.PLAN_FILE == PLAN_FILE
    assert communicators.FAILURE_MARK == STATE_FAILURE
    own = nccl_log_settings(Path("/tmp"), replays_graphs=True)
    assert {name: own[name] for name in communicators.LOG_VARIABLES} == communicators.LOG_VARIABLES


class ModelRunner:
    """Holds a decode graph and the attention back end that it was captured with."""

    def __init__(self) -> None:
        self.attn_backend: Any = "attention 0"
        self.decode_cuda_graph_runner: Any = "graph 0"
        self.graph_memory_usage = {"decode": 1.0}
        self.init_new_workspace = False
        self.captures = 0

    def _get_attention_backend(self, *, init_new_workspace: bool) -> str:
        self.init_new_workspace = init_new_workspace
        return f"attention {self.captures + 1}"

    def init_decode_cuda_graph(self) -> None:
        self.captures += 1
        self.graph_memory_usage = {"decode": 9.0}
        self.decode_cuda_graph_runner = f"graph {self.captures}"


def test_a_server_without_speculation_keeps_graph_and_attention_together(worker: Worker, tmp_path: Path) -> None:
    runner = ModelRunner()
    plan = {
        "first": "0x1-custom-default",
        "deadline_s": 5.0,
        "communicators": {"ll": {"NCCL_PROTO": "LL"}},
        "states": [
            {"name": "0x1-custom-default", "num_steps": 0, "num_draft_tokens": 1, "communicator": None, "custom": True},
            {"name": "0x1-custom-ll", "num_steps": 0, "num_draft_tokens": 1, "communicator": "ll", "custom": True},
        ],
    }
    plain = states.PlainStates(plan, tmp_path, runner)
    plain.build_all()
    assert (runner.attn_backend, runner.decode_cuda_graph_runner) == ("attention 0", "graph 0")
    assert (runner.graph_memory_usage, runner.init_new_workspace) == ({"decode": 1.0}, False)
    plain.wanted = "0x1-custom-ll"
    plain.activate()
    assert (runner.attn_backend, runner.decode_cuda_graph_runner) == ("attention 1", "graph 1")


def test_variables_are_restored_also_after_an_error() -> None:
    def fail_inside() -> None:
        with communicators.c_environment({"NCCL_X_BEFORE": "new", "NCCL_X_NEW": "1"}):
            assert c_getenv("NCCL_X_BEFORE") == "new"
            raise RuntimeError

    with communicators.c_environment({"NCCL_X_BEFORE": "old"}):
        with pytest.raises(RuntimeError):
            fail_inside()
        assert c_getenv("NCCL_X_BEFORE") == "old"
        assert c_getenv("NCCL_X_NEW") is None
    assert c_getenv("NCCL_X_BEFORE") is None


def test_with_one_rank_a_set_has_no_communicator_but_its_variables_are_seen(tmp_path: Path) -> None:
    alone = communicators.Communicator("ll", {"NCCL_PROTO": "LL"})
    with communicators.c_environment(alone.variables):
        communicators.make(alone, [], tmp_path, rank=0, deadline_s=5.0)
    assert alone.environment["NCCL_PROTO"] == "LL"
    assert (alone.error, alone.by_group) == (None, {})
    assert not list(tmp_path.iterdir())
