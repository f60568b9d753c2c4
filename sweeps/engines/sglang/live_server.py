"""A started SGLang server, and how to talk to it: generations, commands to its probes, its own endpoints.

Every failed exchange is an EngineError with its reason: the last lines of the server's log if the server has died.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sweeps.engines.base import EngineError, Kind, Stage
from sweeps.engines.process.guard import ServerProcess
from sweeps.engines.sglang.boot import Boot, stopped
from sweeps.engines.sglang.launch_plan import LaunchPlan
from sweeps.engines.sglang.load_client import (
    BUSY_STATUSES,
    BadAnswerError,
    Load,
    ServerGoneError,
    ServerRefusedError,
    ask_server,
    send_block,
)
from sweeps.engines.sglang.probe_link import Handshake, ProbeError, ProbeGoneError, ProbeLink
from sweeps.engines.sglang.server_log import log_tail
from sweeps.engines.sglang.state_plan import State, state_name
from sweeps.spec.space import Configuration
from sweeps.spec.workload import Block

_PROBE_TIMEOUT_S = 30.0
_CONTROL_TIMEOUT_S = 30.0
_BUSY_POLL_S = 0.1
_LAST_WORDS_S = 10.0
"""How long a process may outlive its connection before it has to say why."""


@dataclass(kw_only=True)  # no slots: the server's account is cached in the instance
class LiveServer:
    """The running server and what is known about it."""

    plan: LaunchPlan
    """What it was launched with. `plan.folder` is removed with the server."""
    configuration: Configuration
    """What it serves now: the plan's, until a switch."""
    server: ServerProcess
    log_path: Path
    boot: Boot
    is_stopping: Callable[[], bool]
    handshakes: tuple[Handshake, ...] = ()
    sent: set[str] = field(default_factory=set)
    """Ids of prompts that the prefix cache may hold."""
    link: ProbeLink = field(init=False)

    def __post_init__(self) -> None:
        self.link = ProbeLink(self.plan.folder)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.plan.num_ranks))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.plan.port}"

    @property
    def timer_kind(self) -> str:
        """`cuda_event` on a GPU, `host` on a CPU."""
        return self.handshakes[0].timer_kind

    def is_gone(self) -> bool:
        return self.server.returncode() is not None

    def given_up(self) -> bool:
        """Whether there is nothing to wait for: no server, or no wish for its answer."""
        return self.is_gone() or self.is_stopping()

    def greet(self) -> None:
        """Take every rank's handshake. Raises EngineError (`no_handshake`)."""
        try:
            handshakes = self.link.handshakes()
        except ProbeError as error:
            raise self._probe_failure(error, "first_request") from error
        found = tuple(handshake.rank for handshake in handshakes)
        unwrapped = sorted({role for handshake in handshakes for role in handshake.missing})
        if found != self.ranks or unwrapped:
            raise EngineError(
                f"cycle probe: wanted a handshake from ranks {list(self.ranks)}, got {list(found)}; "
                f"calls that are not wrapped: {', '.join(unwrapped) or 'none'}",
                stage="first_request",
                kind="no_handshake",
                log_tail=log_tail(self.boot.log()),
            )
        self.handshakes = handshakes

    def generate(self, block: Block, stage: Stage, *, timeout_s: float) -> Load:
        """Run one block. Raises EngineError."""
        self.sent |= {prompt.prompt_id for prompt in block.prompts}
        try:
            return send_block(block, url=self.url, timeout_s=timeout_s, is_gone=self.given_up)
        except BadAnswerError as error:
            raise EngineError(
                f"/generate: {error}", stage=stage, kind="bad_answer", log_tail=log_tail(self.boot.log())
            ) from error
        except ServerRefusedError as error:
            raise EngineError(
                str(error), stage=stage, kind=_kind_of_status(error.status), log_tail=log_tail(self.boot.log())
            ) from error
        except TimeoutError as error:
            name = "first_request" if stage == "first_request" else "block"
            raise self.boot.failure(None, stage, f"{error} (deadlines_s.{name})") from error
        except (ServerGoneError, urllib.error.URLError) as error:
            if self.is_stopping():
                raise stopped(stage) from error
            raise self._crash(stage) from error

    def holds(self, configuration: Configuration) -> State | None:
        """The live state that serves `configuration`; None if there is none, in any rank."""
        state = None if self.plan.states is None else self.plan.states.state_of(configuration)
        return state if state is not None and self.is_held(state) else None

    def state_error(self, configuration: Configuration) -> str | None:
        """Why the first rank without the configuration's state has none."""
        name = state_name(configuration)
        accounts = [handshake.states.get(name) for handshake in self.handshakes]
        return next((account.error for account in accounts if account is not None and account.error), None)

    def communicator_error(self, nccl_set: str) -> str | None:
        """Why the communicator of an NCCL set did not come up; None if it did, or if there is none of its own."""
        made = [handshake.communicators.get(nccl_set) for handshake in self.handshakes]
        return next((account.error for account in made if account is not None and account.error), None)

    def is_held(self, state: State) -> bool:
        """Whether every rank has the state."""
        accounts = [handshake.states.get(state.name) for handshake in self.handshakes]
        return all(account is not None and account.error is None for account in accounts)

    def pin(self, state: State) -> None:
        """Switch to this state from the next cycle on."""
        self.command({"do": "pin", "state": state.name})

    def forget(self) -> None:
        """Drop the cycles so far."""
        self.command({"do": "forget"})

    def command(self, command: Mapping[str, Any]) -> None:
        """Give every rank's probe one command. Raises EngineError."""
        try:
            self.link.ask(self.ranks, command, timeout_s=_PROBE_TIMEOUT_S, is_gone=self.given_up)
        except ProbeError as error:
            raise self._probe_failure(error) from error

    def take(self, stage: Stage, *, num_steps: int | None = None, state: State | None = None) -> pa.Table:
        """The cycles of all ranks since the last time, `CYCLE_COLUMNS`.

        Raises EngineError, also if a rank saw no cycle, or one ran with other steps or in another state than given.
        """
        try:
            cycles, ran = self.link.take(self.ranks, timeout_s=_PROBE_TIMEOUT_S, is_gone=self.given_up)
        except ProbeError as error:
            raise self._probe_failure(error) from error
        if state is not None and ran != {state.name}:
            raise EngineError(
                f"state: wanted {state.name} in every cycle, but they ran in {', '.join(sorted(ran)) or 'none'}",
                stage=stage,
                kind="not_effective",
            )
        for rank in self.ranks if num_steps is not None else ():
            own = cycles.filter(pc.equal(cycles["rank"], rank))
            if not own.num_rows:
                raise EngineError(f"cycle probe: rank {rank} saw no cycle", stage=stage, kind="no_handshake")
            states = set(own["num_steps"].to_pylist())
            if states != {num_steps}:
                raise EngineError(
                    f"num_steps: wanted {num_steps} in every cycle, rank {rank} ran {sorted(states)}",
                    stage=stage,
                    kind="not_effective",
                )
        return cycles

    def take_own(self, stage: Stage) -> pa.Table:
        """As `take`; every cycle must have run in the state of the configuration that is served."""
        return self.take(stage, num_steps=self.configuration.num_steps, state=self.holds(self.configuration))

    def flush(self) -> None:
        """Empty the prefix cache: every trial and every anchor begins so, whatever its server has answered before."""
        self.post("/flush_cache", {})
        self.sent = set()

    def flush_repeated(self, block: Block) -> None:
        """Empty the prefix cache if it may hold a prompt of the block: at another concurrency, say."""
        if any(prompt.prompt_id in self.sent for prompt in block.prompts):
            self.flush()

    def post(self, path: str, body: Mapping[str, Any]) -> None:
        """One small request to an endpoint of the server's own, asked again while the server is busy.

        Raises EngineError.
        """
        deadline = time.monotonic() + _CONTROL_TIMEOUT_S
        while True:
            try:
                ask_server(self.url + path, body=body, timeout_s=_CONTROL_TIMEOUT_S)
            except urllib.error.HTTPError as error:
                # 400 is how SGLang says that requests are still running, or a profile
                said = error.read(500).decode("utf-8", "replace")
                is_busy = error.code in BUSY_STATUSES or error.code == 400
                if is_busy and time.monotonic() < deadline and not self.given_up():
                    time.sleep(_BUSY_POLL_S)
                    continue
                kind: Kind = "busy" if is_busy else "engine_unavailable"
                raise EngineError(f"{path}: {error}: {said}", stage="measure", kind=kind) from error
            except (OSError, http.client.HTTPException) as error:  # URLError, or a connection that broke
                raise self._crash("measure") from error
            return

    @cached_property
    def info(self) -> Mapping[str, Any]:
        """The server's account of itself; the older name of the endpoint if the newer does not exist."""
        for path in ("/server_info", "/get_server_info"):
            try:
                told = ask_server(self.url + path, timeout_s=_CONTROL_TIMEOUT_S)
            except urllib.error.HTTPError:
                continue
            except (OSError, http.client.HTTPException) as error:
                raise self._crash("first_request") from error
            return _account(path, told)
        raise EngineError(
            "the server answers neither /server_info nor /get_server_info",
            stage="first_request",
            kind="engine_unavailable",
        )

    def _crash(self, stage: Stage) -> EngineError:
        """The connection broke before the process ended: give it a moment to say why."""
        self._await_end()
        return self.boot.failure(self.server.returncode(), stage)

    def _await_end(self) -> None:
        deadline = time.monotonic() + _LAST_WORDS_S
        while self.server.returncode() is None and time.monotonic() < deadline:
            time.sleep(0.1)

    def _probe_failure(self, error: ProbeError, stage: Stage = "measure") -> EngineError:
        """A rank that died has no probe either: then it is the server's crash, which may show a moment later."""
        if isinstance(error, ProbeGoneError):
            self._await_end()
        if self.is_gone():
            return self.boot.failure(self.server.returncode(), stage)
        return EngineError(
            f"cycle probe: {error}", stage=stage, kind="no_handshake", log_tail=log_tail(self.boot.log())
        )


def _account(path: str, told: bytes) -> Mapping[str, Any]:
    try:
        answer = json.loads(told)
    except (ValueError, RecursionError) as error:
        problem = f"not JSON ({error})"
    else:
        if isinstance(answer, Mapping):
            return answer
        problem = "wanted an object"
    begin = told[:100].decode("utf-8", "replace")
    raise EngineError(f"{path}: {problem}, got {begin!r}", stage="first_request", kind="bad_answer")


def _kind_of_status(status: int) -> Kind:
    if status in BUSY_STATUSES:
        return "busy"
    return "invalid_config" if 400 <= status < 500 else "crash"
