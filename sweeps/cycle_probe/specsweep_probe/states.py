"""The states of one server: what its graphs were captured with, and switching between them.

A state is a step count, a top-k, a number of draft tokens, an NCCL set and an all-reduce back end: everything that
binds when graphs are captured. `states.json` in the probe's folder says which states the server shall hold:

    {"first": NAME, "deadline_s": 60,
     "communicators": {SET: {"NCCL_PROTO": "LL"}},
     "states": [{"name": NAME, "num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4,
                 "communicator": SET or null, "custom": true}]}

`communicator` null is the one that the server was launched with. SGLang builds states itself, for its adaptive
controller; a `StateKeeper` takes that controller's place, so that the same calls build ours, for chains and for trees.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from specsweep_probe.communicators import (
    LOG_VARIABLES,
    Communicator,
    agree,
    c_environment,
    groups,
    log_file,
    make,
    smallest,
)
from specsweep_probe.top_k import captured_with, resize_relay, set_top_k

PLAN_FILE = "states.json"
RESERVE_BYTES = 2 << 30
"""GPU memory that stays free for prefill when states are built: 2 GiB, a chunk of 8,192 tokens of the largest model."""
_CAPTURE_CHANGES = (
    "attn_backend",
    "decode_cuda_graph_runner",
    "graph_mem_usage",
    "graph_memory_usage",
    "graph_time_usage",
    "init_new_workspace",
)
"""What a capture changes in SGLang's model runner, 0.5.16 to 0.5.23; restored afterwards."""
_HEADROOM = 1.25
"""A further state is built if this many times the largest state so far is free, beside the reserve."""


def read_plan(folder: Path) -> dict[str, Any] | None:
    """The plan of this server; None if it holds one state alone."""
    path = folder / PLAN_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


class States:
    """Builds the planned states and holds them by name. Subclasses know how one is built and applied."""

    def __init__(self, plan: dict[str, Any], folder: Path) -> None:
        self._plan = plan
        self._entries: dict[str, dict[str, Any]] = {entry["name"]: entry for entry in plan["states"]}
        self._folder = folder
        self.wanted: str = plan["first"]
        """The state that the next decode step runs in."""
        self.active: str | None = None
        self.states: dict[str, Any] = {}
        self.accounts: dict[str, dict[str, Any]] = {}
        """Name -> seconds, memory_mib and error of each planned state."""
        self.communicators: dict[str, Communicator] = {}
        self._by_shape: dict[tuple[int, int, int], Any] = {}
        self._largest_bytes = 0

    def build_all(self) -> None:
        """Build every planned state, communicator by communicator; the launched communicator's first."""
        over, rank = groups(), _rank()
        planned = self._plan["states"]
        for entry in (each for each in planned if each["communicator"] is None):
            self._build_one(entry, None, over)
        for name, variables in self._plan["communicators"].items():
            communicator = self.communicators[name] = Communicator(name, variables)
            logged = {**LOG_VARIABLES, "NCCL_DEBUG_FILE": log_file(self._folder, name)}
            with c_environment({**logged, **variables}):
                make(communicator, over, self._folder, rank=rank, deadline_s=self._plan["deadline_s"])
                for entry in (each for each in planned if each["communicator"] == name):
                    self._build_one(entry, communicator, over)

    def activate(self) -> None:
        """Apply the wanted state, if it is held and not the active one."""
        if self.wanted != self.active and self.wanted in self.states:
            self.apply(self._entries[self.wanted], self.states[self.wanted])
            self.active = self.wanted

    def build(self, entry: dict[str, Any]) -> Any:
        raise NotImplementedError

    def apply(self, entry: dict[str, Any], state: Any) -> None:
        raise NotImplementedError

    def launched(self, entry: dict[str, Any]) -> Any | None:
        """The state that the server was launched in, if `entry` asks for it."""
        raise NotImplementedError

    def account(self) -> dict[str, Any]:
        """What the handshake says of the states."""
        return {
            "states": self.accounts,
            "communicators": {name: each.account() for name, each in self.communicators.items()},
        }

    def _build_one(self, entry: dict[str, Any], communicator: Communicator | None, over: list[Any]) -> None:
        began_s, free = time.monotonic(), _free_bytes()
        account = self.accounts[entry["name"]] = {"seconds": 0.0, "memory_mib": 0.0, "error": None}
        state = self._already_there(entry, communicator, over)
        if communicator is not None and communicator.error is not None:
            account["error"] = communicator.error
        elif state is None:
            state, account["error"] = self._captured(entry, communicator, over)
        if account["error"] is None:
            self.states[entry["name"]] = state
            self._by_shape[_shape(entry)] = state
        taken = free - _free_bytes()
        self._largest_bytes = max(self._largest_bytes, taken)
        account.update(seconds=time.monotonic() - began_s, memory_mib=taken / 2**20)

    def _already_there(self, entry: dict[str, Any], communicator: Communicator | None, over: list[Any]) -> Any | None:
        """The launched state, or with one rank any state of this shape: no NCCL set acts there."""
        if not over and _shape(entry) in self._by_shape:
            return self._by_shape[_shape(entry)]
        return self.launched(entry) if communicator is None else None

    def _captured(
        self, entry: dict[str, Any], communicator: Communicator | None, over: list[Any]
    ) -> tuple[Any, str | None]:
        """A new state, or why there is none: the same in all ranks."""
        needed = RESERVE_BYTES + int(_HEADROOM * self._largest_bytes)
        if _is_on_gpu() and (free := smallest(_free_bytes(), over)) < needed:
            return None, f"memory: {free / 2**30:.1f} GiB are free, wanted {needed / 2**30:.1f} GiB for a further state"
        error = None
        try:
            with ExitStack() as swapped:
                for group in over:
                    swapped.enter_context(group.using(communicator, custom_all_reduce=entry["custom"]))
                state = self.build(entry)
        except RuntimeError as failure:  # out of memory, or NCCL at the first operation of its kind
            state, error = None, f"{type(failure).__name__}: {failure}"
        if not agree(error is None, over):
            return None, error or "it could not be captured in another rank"
        return state, error


class StateKeeper(States):
    """States of a server that speculates, in the place of SGLang's adaptive controller."""

    def __init__(self, plan: dict[str, Any], folder: Path, worker: Any) -> None:
        super().__init__(plan, folder)
        self.worker = worker
        self._graph_sizes: Any = None
        self._registered: Any = None
        self._launched_top_k: int = worker.topk
        self.relay: Any = None
        """The scheduler's buffers between two cycles (`FutureMap`), once there is a scheduler."""

    @property
    def candidate_steps(self) -> list[int]:
        return sorted({entry["num_steps"] for entry in self._plan["states"]})

    def register(self, state: Any, steps: int | None = None) -> None:
        """SGLang hands over the state that the server was launched in."""
        self._registered = state

    def init_states(self, cuda_graph_bs: Any = None) -> None:
        """SGLang has captured its own graphs: build the further states."""
        self._graph_sizes = cuda_graph_bs
        self.build_all()

    def activate_step_by_batch(self, batch_size: int) -> None:
        self.activate()

    def on_verify_complete(self, num_correct_drafts_per_req: Any, batch_size: int = 0) -> None:
        """The acceptance so far changes nothing: the engine switches."""

    def launched(self, entry: dict[str, Any]) -> Any | None:
        own = self._registered
        launched = (own.speculative_num_steps, self._launched_top_k, own.speculative_num_draft_tokens)
        return own if launched == _shape(entry) else None

    def build(self, entry: dict[str, Any]) -> Any:
        shape = dict(zip(("num_steps", "top_k", "num_draft_tokens"), _shape(entry), strict=True))
        with captured_with(self.worker, **shape):
            return self.worker.build_adaptive_runtime_state(
                speculative_num_steps=entry["num_steps"],
                speculative_num_draft_tokens=entry["num_draft_tokens"],
                cuda_graph_bs=self._graph_sizes,
            )

    def apply(self, entry: dict[str, Any], state: Any) -> None:
        if entry["eagle_topk"] != self.worker.topk:
            set_top_k(self.worker, entry["eagle_topk"])
            resize_relay(self.relay, entry["eagle_topk"])
        # SGLang returns early if the step count is the same, though another NCCL set may be wanted
        self.worker.speculative_num_steps = -1
        self.worker.apply_runtime_state(state)


class PlainStates(States):
    """States of a server without speculation: a decode graph, and the attention back end that it was captured with."""

    def __init__(self, plan: dict[str, Any], folder: Path, model_runner: Any) -> None:
        super().__init__(plan, folder)
        self.model_runner = model_runner

    def launched(self, entry: dict[str, Any]) -> Any:
        return self.model_runner.attn_backend, self.model_runner.decode_cuda_graph_runner

    def build(self, entry: dict[str, Any]) -> Any:
        runner = self.model_runner
        before = {name: getattr(runner, name) for name in _CAPTURE_CHANGES if hasattr(runner, name)}
        try:
            runner.attn_backend = runner._get_attention_backend(init_new_workspace=True)
            runner.init_decode_cuda_graph()
            return runner.attn_backend, runner.decode_cuda_graph_runner
        finally:
            for name, value in before.items():
                setattr(runner, name, value)

    def apply(self, entry: dict[str, Any], state: Any) -> None:
        self.model_runner.attn_backend, self.model_runner.decode_cuda_graph_runner = state


def _shape(entry: dict[str, Any]) -> tuple[int, int, int]:
    """Steps, top-k and draft tokens."""
    return entry["num_steps"], entry["eagle_topk"], entry["num_draft_tokens"]


def _rank() -> int:
    import torch

    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _is_on_gpu() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _free_bytes() -> int:
    if not _is_on_gpu():
        return 0
    import torch

    return int(torch.cuda.mem_get_info()[0])
