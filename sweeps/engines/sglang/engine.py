"""The real SGLang server as an engine: a child process under a guard, probed from inside."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pyarrow as pa

from sweeps.engines.base import BlockRecord, EngineError, KernelTime, LaunchReport
from sweeps.engines.command import recorded_command, recorded_environment, recorded_removals
from sweeps.engines.process.guard import ServerProcess, reap_leases, reap_scratch, scratch_folder
from sweeps.engines.process.node_folder import default_node_folder, open_node_folder
from sweeps.engines.process.trial_gpus import TrialGpus
from sweeps.engines.sglang.boot import Boot, boot_seconds, free_port, prove_closed
from sweeps.engines.sglang.evidence import effective_settings, gather_evidence, keep_nccl_logs, nccl_warnings
from sweeps.engines.sglang.kernel_trace import read_kernel_times
from sweeps.engines.sglang.launch_plan import LaunchPlan, missing_variables, plan_launch
from sweeps.engines.sglang.live_server import LiveServer
from sweeps.engines.sglang.state_history import StateHistory
from sweeps.engines.sglang.state_plan import StatePlan
from sweeps.engines.sglang.trace_spans import read_when_whole
from sweeps.spec.binding import held_by
from sweeps.spec.model import SweepSpec
from sweeps.spec.space import Configuration
from sweeps.spec.workload import Block, Prompt

PLAN_FILE = "states.json"
"""What the probe reads the planned states from, in the server's scratch folder."""
_GRACE_S = 15.0
_TRACE_STEPS = 24
"""Forward steps of a profiler window: enough cycles for a mean, a trace of some megabytes."""
_TRACE_TIMEOUT_S = 120.0
_ANCHOR_MAY_CAUSE: frozenset[str] = frozenset({"crash", "gpu_oom", "invalid_config"})
"""Ends of a launch that its further state for 0 steps may have caused."""
_FIRST_BLOCK = Block(
    index=0,
    warmup=True,
    prompts=(Prompt(prompt_id="first", token_ids=tuple(range(10, 26))),),
    output_tokens=8,
    concurrency=1,
    temperature=0.0,
    ignore_eos=True,
)
"""Proves that the server generates, through verify if it speculates. Ids below 26 are in every vocabulary."""


class SGLangEngine:
    """Serves one configuration at a time with a supported SGLang (`versions`). See `base.Engine` for the contract.

    Args:
        logs: folder for server logs and launch records.
        node_folder: on a file system of this node; leases and probe files live there.
        stop_request: once this file exists, waits for the server end with an EngineError.
    """

    name = "sglang"

    def __init__(
        self, spec: SweepSpec, *, logs: Path, node_folder: Path | None = None, stop_request: Path | None = None
    ) -> None:
        self._spec = spec
        self._logs = logs
        self._node_folder = node_folder or default_node_folder()
        self._stop_request = stop_request
        self._live: LiveServer | None = None
        self._held = held_by(spec.engine)
        self._history = StateHistory(spec.engine)
        self._anchors_refused = False
        self._launches = 0
        self._gpus: TrialGpus | None = None

    def now_s(self) -> float:
        return time.monotonic()

    def launch(self, configuration: Configuration, *, states: tuple[Configuration, ...] = ()) -> LaunchReport:
        """See the contract. A chain that does not start with a state for anchors is started once more without."""
        without = tuple(each for each in states if each.speculates == configuration.speculates)
        anchored = without != states
        if not anchored or self._anchors_refused:
            return self._launch(configuration, without)
        try:
            return self._launch(configuration, states)
        except EngineError as error:
            if error.kind not in _ANCHOR_MAY_CAUSE or self._is_stopping():
                raise
        report = self._launch(configuration, without)
        self._anchors_refused = True
        return report

    def _launch(self, configuration: Configuration, states: tuple[Configuration, ...]) -> LaunchReport:
        self.close()
        self._history.refuse_failed(configuration, server_lives=False)
        self._reap()
        plan = self._history.plan(configuration, states)
        started_s = self.now_s()
        self._gpus = TrialGpus(self._spec.resources.gpus, self._node_folder / "gpus")
        self._prove_free()  # at once, unless an earlier server still holds memory
        live = self._start(configuration, plan)
        try:
            live.boot.wait_for_port(live.plan.port)
            live.generate(_FIRST_BLOCK, "first_request", timeout_s=self._spec.engine.deadlines_s.first_request)
            ready_s = self.now_s()
            live.greet()
            if self._history.learn(live, configuration, states):
                return self._report(live, boot_s=boot_seconds(live.boot.log(), ready_s - started_s))
        except EngineError as error:
            self._abandon(error)
            if self._is_stopping() or not self._history.learn_from_log(live):
                raise
        except BaseException:
            self._abandon(None)
            raise
        return self._launch(configuration, states)

    def switch(self, configuration: Configuration) -> LaunchReport | None:
        live = self._live
        if live is None or live.is_gone() or live.plan.states is None:
            return None
        if configuration.launch_key(self._held) != live.configuration.launch_key(self._held):
            return None
        self._history.learn_communicator(live, configuration)
        self._history.refuse_failed(configuration, server_lives=True)
        state = live.holds(configuration)
        if state is None:
            return None
        live.pin(state)
        live.configuration = configuration
        live.generate(_FIRST_BLOCK, "measure", timeout_s=self._spec.engine.deadlines_s.block)
        return self._report(live, boot_s={})

    def run_block(self, block: Block) -> BlockRecord:
        live = self._require_live()
        return self._record(live, block)

    def run_anchor(self, block: Block) -> BlockRecord | None:
        live = self._require_live()
        speculating = live.configuration
        alone, own = live.holds(speculating.target_alone()), live.holds(speculating)
        if alone is None or own is None:
            return None
        live.pin(alone)
        live.configuration = speculating.target_alone()
        try:
            live.flush()
            record = self._record(live, block)
        finally:
            live.configuration = speculating
        live.pin(own)
        live.flush()
        return record

    def _record(self, live: LiveServer, block: Block) -> BlockRecord:
        live.flush_repeated(block)
        live.forget()
        assert self._gpus is not None
        with self._gpus.window(live.server.survivors) as readings:
            load = live.generate(block, "measure", timeout_s=self._spec.engine.deadlines_s.block)
        cycles = live.take_own("measure")
        return BlockRecord(
            started_s=load.started_s,
            wall_s=load.ended_s - load.started_s,
            decode_s=load.decode_s,
            decode_tokens=load.decode_tokens,
            requests=tuple(answer.request for answer in load.answers),
            cycles=cycles,
            telemetry=readings,
            streams=tuple(answer.stream for answer in load.answers),
            is_clock_shared=True,
        )

    def trace(self, block: Block) -> tuple[KernelTime, ...] | None:
        live = self._require_live()
        if live.timer_kind != "cuda_event":
            return None
        folder = live.plan.folder / "trace"
        self.profile(block, folder, num_steps=_TRACE_STEPS)
        try:
            return read_when_whole(folder, read_kernel_times, timeout_s=_TRACE_TIMEOUT_S, is_gone=live.given_up)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def profile(self, block: Block, folder: Path, *, num_steps: int) -> pa.Table:
        """Run one block with the server's profiler on for its first forward steps; the cycles that the probe saw.

        The traces appear in `folder` some seconds later. Without Python stacks, which would slow the host most.
        """
        live = self._require_live()
        on_gpu = live.timer_kind == "cuda_event"
        settings = {
            "output_dir": str(folder),
            "num_steps": num_steps,
            "activities": ["CPU", "GPU"] if on_gpu else ["CPU"],
            "with_stack": False,
        }
        live.forget()
        live.post("/start_profile", settings)
        live.generate(block, "measure", timeout_s=self._spec.engine.deadlines_s.block)
        return live.take("measure")

    def close(self) -> None:
        live, self._live = self._live, None
        if live is None:
            return
        keep_nccl_logs(
            live.plan.folder, live.log_path.with_suffix(".nccl")
        )  # the guard takes the folder with the server
        live.server.stop(self._spec.engine.deadlines_s.stop)
        survivors = live.server.survivors()
        shutil.rmtree(live.plan.folder, ignore_errors=True)
        if survivors:
            raise EngineError(
                f"processes {survivors} of the server survived SIGKILL", stage="stop", kind="gpu_not_clean"
            )
        prove_closed(live.plan.port)
        self._prove_free()
        self._release_gpus()

    def _prove_free(self) -> None:
        """Wait until the trial's GPUs are free. Raises EngineError (`gpu_not_clean`)."""
        if self._gpus is None:
            return
        try:
            self._gpus.prove_free(timeout_s=self._spec.engine.deadlines_s.stop)
        except EngineError:
            self._release_gpus()
            raise

    def _release_gpus(self) -> None:
        if self._gpus is not None:
            self._gpus.close()
            self._gpus = None

    def _require_live(self) -> LiveServer:
        assert self._live is not None, "a block without a launched server"
        return self._live

    def _reap(self) -> None:
        """Before the first launch: what earlier engines of this node left behind."""
        open_node_folder(self._node_folder)
        if self._launches == 0:
            reaped = reap_leases(self._node_folder / "leases")
            if reaped.survivors:
                raise EngineError(
                    f"processes {list(reaped.survivors)} of an earlier server survive",
                    stage="plan",
                    kind="gpu_not_clean",
                )
            reap_scratch(self._node_folder, self._node_folder / "leases")

    def _start(self, configuration: Configuration, states: StatePlan | None) -> LiveServer:
        if missing := missing_variables(self._spec, os.environ):
            names = ", ".join(missing)
            raise EngineError(
                f"engine.inherit: {names} is not set on {socket.gethostname()}", stage="plan", kind="invalid_config"
            )
        self._logs.mkdir(parents=True, exist_ok=True)
        plan = plan_launch(
            self._spec,
            configuration,
            folder=scratch_folder(self._node_folder),
            inherited=os.environ,
            states=states,
            port=free_port(),
        )
        if states is not None:
            (plan.folder / PLAN_FILE).write_text(json.dumps(states.document()), encoding="utf-8")
        self._launches += 1
        log_path = self._logs / f"{configuration.configuration_id}-{plan.folder.name}.log"
        self._write_record(plan, log_path)
        server = ServerProcess.start(
            plan.command,
            env=plan.environment,
            log_path=log_path,
            lease_dir=self._node_folder / "leases",
            grace_s=_GRACE_S,
            scratch=plan.folder,
        )
        live = LiveServer(
            plan=plan,
            configuration=configuration,
            server=server,
            log_path=log_path,
            boot=Boot(
                server,
                log_path=log_path,
                deadlines=self._spec.engine.deadlines_s,
                is_stopping=self._is_stopping,
                nccl_warnings=partial(nccl_warnings, plan.folder),
            ),
            is_stopping=self._is_stopping,
        )
        self._live = live
        return live

    def _write_record(self, plan: LaunchPlan, log_path: Path) -> None:
        """What was started, beside the server's log: the command, and how the variables differ from this process's."""
        record = json.dumps(plan.record(os.environ), indent=2)
        log_path.with_suffix(".launch.json").write_text(record, encoding="utf-8")

    def _is_stopping(self) -> bool:
        return self._stop_request is not None and self._stop_request.exists()

    def _abandon(self, cause: EngineError | None) -> None:
        """Stop what a failed launch left; its own error is the one that counts."""
        try:
            self.close()
        except EngineError as unclean:
            if cause is None:
                raise
            cause.add_note(str(unclean))

    def _report(self, live: LiveServer, *, boot_s: Mapping[str, float]) -> LaunchReport:
        configuration = live.configuration
        cycles = live.take_own("first_request")
        live.flush()
        first = live.handshakes[0]
        evidence, all_reduce = gather_evidence(live, cycles)
        return LaunchReport(
            version=first.sglang,
            machine=f"{live.plan.num_ranks} x {first.device}, {socket.gethostname()}",
            num_gpus=self._spec.resources.gpus,
            boot_s=boot_s,
            command=recorded_command(self._spec, configuration),
            environment=recorded_environment(self._spec, configuration),
            removed=recorded_removals(live.plan.removed),
            effective=effective_settings(live),
            evidence=evidence,
            all_reduce=all_reduce,
        )
