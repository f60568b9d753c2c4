"""The probe's states over a worker and groups that stand in for SGLang's; no torch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from specsweep_probe import communicators, states, top_k

from sweeps.engines.sglang.engine import PLAN_FILE
from sweeps.engines.sglang.launch_plan import nccl_log_settings
from sweeps.engines.sglang.server_log import STATE_FAILURE


def entry(
    name: str, num_steps: int, num_draft_tokens: int, *, communicator: str | None, custom: bool = True, top_k: int = 1
) -> dict[str, Any]:
    """A state as the plan has it."""
    return {
        "name": name,
        "num_steps": num_steps,
        "eagle_topk": top_k,
        "num_draft_tokens": num_draft_tokens,
        "communicator": communicator,
        "custom": custom,
    }


PLAN: dict[str, Any] = {
    "first": "1x2-custom-ll",
    "deadline_s": 5.0,
    "communicators": {"ll": {"NCCL_PROTO": "LL"}, "default": {}},
    "states": [
        entry("1x2-custom-ll", 1, 2, communicator="ll"),
        entry("3x4-custom-ll", 3, 4, communicator="ll"),
        entry("3x4-custom-default", 3, 4, communicator=None),
        entry("3x4-nccl-default", 3, 4, communicator="default", custom=False),
    ],
}


def c_getenv(name: str) -> str | None:
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    value = libc.getenv(name.encode())
    return None if value is None else value.decode()


class DraftWorker:
    """Checks its chain buffers as SGLang does: against the top-k of the moment."""

    def __init__(self, worker: Worker) -> None:
        self.topk = worker.topk
        self.speculative_num_steps = worker.speculative_num_steps
        self.speculative_num_draft_tokens = worker.speculative_num_draft_tokens

    def _rebuild_topk1_chain_buffers(self) -> None:
        assert self.topk > 1 or self.speculative_num_draft_tokens == self.speculative_num_steps + 1


class Worker:
    """Captures what its group has at the time, as SGLang's graphs do."""

    def __init__(self, group: SimpleNamespace) -> None:
        self.group = group
        self.speculative_num_steps = 3
        self.speculative_num_draft_tokens = 4
        self.topk = 1
        self._draft_worker = DraftWorker(self)
        self.applied: list[Any] = []
        self.refused: set[int] = set()

    def captured(self, num_steps: int, num_draft_tokens: int) -> SimpleNamespace:
        return SimpleNamespace(
            speculative_num_steps=num_steps,
            speculative_num_draft_tokens=num_draft_tokens,
            communicator=self.group.pynccl_comm,
            custom=self.group.ca_comm,
            top_k=(self.topk, self._draft_worker.topk),
            protocol=c_getenv("NCCL_PROTO"),
        )

    def build_adaptive_runtime_state(
        self, *, speculative_num_steps: int, speculative_num_draft_tokens: int, cuda_graph_bs: Any
    ) -> SimpleNamespace:
        if speculative_num_steps in self.refused:
            raise RuntimeError("CUDA out of memory")
        self._draft_worker._rebuild_topk1_chain_buffers()  # SGLang restores the former shape, and checks it
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


class Arguments:
    """Where SGLang keeps its arguments: the values that were set, in order."""

    def __init__(self) -> None:
        self.top_ks: list[int] = []

    def override(self, source: str, *, speculative_eagle_topk: int) -> None:
        self.top_ks.append(speculative_eagle_topk)


class Buffer:
    """A tensor's shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def new_zeros(self, shape: tuple[int, ...]) -> Buffer:
        return Buffer(shape)


def test_states_of_two_top_k_are_captured_and_applied_in_one_server(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = Arguments()
    monkeypatch.setattr(top_k, "_argument_stores", lambda worker: [arguments])
    worker.topk = worker._draft_worker.topk = 2
    worker.speculative_num_draft_tokens = worker._draft_worker.speculative_num_draft_tokens = 6
    plan = {
        "first": "3x6k2-custom-default",
        "deadline_s": 5.0,
        "communicators": {},
        "states": [
            entry("3x6k2-custom-default", 3, 6, communicator=None, top_k=2),
            entry("3x4-custom-default", 3, 4, communicator=None),
        ],
    }
    keeper = states.StateKeeper(plan, tmp_path, worker)
    keeper.register(worker.captured(3, 6))
    keeper.init_states()
    assert {name: each.top_k for name, each in keeper.states.items()} == {
        "3x6k2-custom-default": (2, 2),
        "3x4-custom-default": (1, 1),
    }
    assert (worker.topk, worker.speculative_num_draft_tokens, worker._draft_worker.speculative_num_steps) == (2, 6, 3)
    assert arguments.top_ks == [1, 2], "set for the capture, and restored"

    keeper.relay = SimpleNamespace(topk_p_buf=Buffer((8, 2)), topk_index_buf=None)
    keeper.wanted = "3x4-custom-default"
    keeper.activate()
    assert (worker.topk, worker._draft_worker.topk, keeper.relay.topk_p_buf.shape) == (1, 1, (8, 1))
    assert worker.applied == [keeper.states["3x4-custom-default"]]


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
            entry("0x1-custom-default", 0, 1, communicator=None),
            entry("0x1-custom-ll", 0, 1, communicator="ll"),
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
