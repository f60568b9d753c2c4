"""What earlier servers of this node could not hold as states, and what the next one is therefore asked for."""

from __future__ import annotations

from collections.abc import Iterable

from sweeps.engines.base import EngineError
from sweeps.engines.sglang.live_server import LiveServer
from sweeps.engines.sglang.server_log import StateFailure, state_failure
from sweeps.engines.sglang.state_plan import StatePlan, plan_states, state_name
from sweeps.spec.binding import held_by
from sweeps.spec.model import EngineSpec
from sweeps.spec.space import Configuration


class StateHistory:
    """Plans the states of each server from what the servers before it could hold."""

    def __init__(self, engine: EngineSpec) -> None:
        self._engine = engine
        self._held = held_by(engine)
        self._has_none = False
        """A server of this version has no states: each configuration is launched."""
        self._failed: dict[str, StateFailure] = {}
        """NCCL sets whose communicator did not come up."""
        self._left_out: frozenset[Configuration] = frozenset()
        """Configurations that the last server had no memory for: the next server builds them first."""

    def plan(self, configuration: Configuration, states: Iterable[Configuration]) -> StatePlan | None:
        """The states of a server that is launched for `configuration`; None if its own is all there is."""
        if self._has_none:
            return None
        ordered = sorted(states, key=lambda each: each not in self._left_out)
        return plan_states(self._engine, configuration, ordered, refused=frozenset(self._failed))

    def refuse_failed(self, configuration: Configuration, *, server_lives: bool) -> None:
        """Raise EngineError if the communicator of the configuration's NCCL set did not come up before."""
        failure = self._failed.get(configuration.nccl_set)
        if failure is not None and self._held.nccl:
            raise EngineError(
                f"NCCL set {configuration.nccl_set}: {failure.error}",
                stage="nccl_init",
                kind=failure.kind,
                server_lives=server_lives,
            )

    def learn_communicator(self, live: LiveServer, configuration: Configuration) -> None:
        """Remember the configuration's NCCL set if its communicator did not come up in this living server."""
        if (error := live.communicator_error(configuration.nccl_set)) is not None:
            self._failed[configuration.nccl_set] = StateFailure(nccl_set=configuration.nccl_set, error=error)

    def learn_from_log(self, live: LiveServer) -> bool:
        """Remember the NCCL set that ended a server while it started. False if the log names none."""
        failure = state_failure(live.boot.log())
        if failure is None or live.plan.states is None or failure.nccl_set not in live.plan.states.communicators:
            return False
        self._failed[failure.nccl_set] = failure
        return True

    def learn(self, live: LiveServer, configuration: Configuration, states: Iterable[Configuration]) -> bool:
        """Take in what a new server holds. False if it must be launched anew, without what it could not hold.

        Raises EngineError if it has no memory for the state that it was launched for.
        """
        if live.plan.states is None:
            return True
        if live.holds(configuration) is not None:
            self._left_out = frozenset(each for each in states if live.holds(each) is None)
            return True
        self.learn_communicator(live, configuration)
        if not live.handshakes[0].states:
            self._has_none = True
        elif configuration.nccl_set not in self._failed:
            said = live.state_error(configuration)
            raise EngineError(f"state {state_name(configuration)}: {said}", stage="capture", kind="gpu_oom")
        return False
