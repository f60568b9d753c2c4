"""The simulated engine: a profiled machine on a virtual clock. Its numbers are computed, never measured.

Launches, blocks and switches move `now_s` and nothing sleeps. Runs are reproducible: randomness derives from the
study's seed, the configuration and the number of the launch; the difficulty of a block's prompts from seed and block
alone, so that blocks pair across configurations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from sweeps.engines.base import BlockRecord, EngineError, KernelTime, LaunchReport, Stage
from sweeps.engines.command import launch_environment, pinned_accept_length, recorded_command, recorded_environment
from sweeps.engines.simulated.block import Conditions, shifted, simulate_block, summarise_block
from sweeps.engines.simulated.evidence import evidence_of, kernels_of
from sweeps.engines.simulated.expected_cycle import ExpectedCycle, expected, intervened, pinned_at, settings_of
from sweeps.engines.simulated.machine_profile import Fault, MachineProfile, read_profile
from sweeps.engines.simulated.nccl_choice import fits
from sweeps.engines.summary import BlockSummary
from sweeps.spec.binding import held_by
from sweeps.spec.document import SpecError
from sweeps.spec.model import SweepSpec
from sweeps.spec.space import Configuration
from sweeps.spec.workload import Block


@dataclass(slots=True)
class _Server:
    """What is up."""

    configuration: Configuration
    launch_key: str
    states: frozenset[Configuration]
    """Configurations that it holds, its own among them."""
    number: int
    luck: float
    """Of this launch, against the machine's mean, in standard deviations."""
    blocks_run: int = 0


class SimulatedEngine:
    """A machine of `sweeps/machines/` as an engine. Raises SpecError for a machine or drafter that is not there.

    Args:
        spec: `engine.machine`, `engine.noise`, `study.seed` and `drafters` (name -> acceptance profile) are used.
        profile: another machine than the spec names, for benchmarks.
    """

    name = "simulated"

    def __init__(self, spec: SweepSpec, *, seed: int | None = None, profile: MachineProfile | None = None) -> None:
        self.spec = spec
        self.profile = profile_of(spec) if profile is None else profile
        self._seed = spec.study.seed if seed is None else seed
        self._clock_s = 0.0
        self._launches = 0
        self._server: _Server | None = None
        self._expected: dict[tuple[Configuration, int], ExpectedCycle] = {}
        self._held = held_by(spec.engine)
        self._reports: dict[Configuration, LaunchReport] = {}
        self._difficulties: dict[tuple[bool, int], float] = {}

    def now_s(self) -> float:
        """Virtual seconds since the engine was made."""
        return self._clock_s

    def expected(self, configuration: Configuration, *, batch_size: int = 1) -> ExpectedCycle:
        """The noise-free cycle in this spec. Raises EngineError where the machine has none."""
        key = configuration, batch_size
        if key not in self._expected:
            settings = settings_of(configuration, self.spec.engine)
            mean = expected(self.profile, configuration, batch_size=batch_size, settings=settings)
            length = pinned_accept_length(self.spec, configuration)
            self._expected[key] = mean if length is None else pinned_at(mean, length)
        return self._expected[key]

    def expected_tok_s(self, configuration: Configuration, *, num_blocks: int) -> float:
        """tok/s at batch size 1 over the sweep's own blocks, without noise: their tokens over their seconds.

        Raises EngineError where the machine has no such cycle.
        """
        mean = self.expected(configuration)
        if not configuration.speculates:
            return mean.tok_s
        spread = self.profile.drafter(configuration.drafter).prompt_spread * self.spec.engine.noise
        lengths = [
            1.0 + sum(shifted(mean.survival, spread * self._difficulty(index, warmup=False)))
            for index in range(num_blocks)
        ]
        return 1000.0 * num_blocks / sum(1.0 / length for length in lengths) / mean.cycle_ms

    def launch(self, configuration: Configuration, *, states: tuple[Configuration, ...] = ()) -> LaunchReport:
        """See the contract; a fault of the profile takes the time that it would take."""
        self.close()
        number, self._launches = self._launches, self._launches + 1
        boot_s = self._boot_s(configuration, states, cold=number == 0)
        self._fail_at_launch(configuration, boot_s)
        self._clock_s += sum(boot_s.values())
        draw = self._rng(configuration, number, 0).standard_normal()
        self._server = _Server(
            configuration=configuration,
            launch_key=configuration.launch_key(self._held),
            states=frozenset((configuration, *states)),
            number=number,
            luck=float(draw),
        )
        return replace(self._report(configuration), boot_s=boot_s)

    def switch(self, configuration: Configuration) -> LaunchReport | None:
        """See the contract. Costs `boot.switch_s`."""
        server = self._server
        if server is None:
            return None
        if configuration != server.configuration:
            switchable = configuration in server.states and server.launch_key == configuration.launch_key(self._held)
            if not switchable or self._fault(configuration, measuring=False):
                return None
            self._clock_s += self.profile.boot.switch_s
            server.configuration = configuration
        return self._report(configuration)

    def run_block(self, block: Block) -> BlockRecord:
        """See the contract. Cycles of rank 0, timer kind `simulated`."""
        server = self._served()
        self._fail_in_block(server)
        rng = self._rng(server.configuration, server.number, 1 + server.blocks_run)
        record = simulate_block(
            block,
            lambda batch_size: self.expected(server.configuration, batch_size=batch_size),
            self.profile.forward,
            self._conditions(server, rng, block.index, warmup=block.warmup, prompts=len(block.prompts)),
            rng,
            num_steps=server.configuration.num_steps,
        )
        server.blocks_run += 1
        self._clock_s += record.wall_s
        return record

    def run_anchor(self, block: Block) -> BlockRecord | None:
        """See the contract: the plain decode step under this launch's luck, a switch before and after it."""
        server = self._served()
        speculating = server.configuration
        if speculating.target_alone() not in server.states or not self._held.steps:
            return None
        server.configuration = speculating.target_alone()
        self._clock_s += self.profile.boot.switch_s
        try:
            return self.run_block(block)
        finally:
            server.configuration = speculating
            self._clock_s += self.profile.boot.switch_s

    def block_summary(self, block_index: int, *, rng: np.random.Generator) -> BlockSummary:
        """What `summarise(run_block(block))` would say of one request, drawn directly in some tens of microseconds.

        Args:
            rng: all randomness of it, so that a benchmark pays for no generator per block.
        """
        server = self._served()
        self._fail_in_block(server)
        workload = self.spec.workload
        summary = summarise_block(
            block_index,
            workload.output_tokens,
            self.expected(server.configuration),
            self.profile.forward,
            self._conditions(server, rng, block_index, warmup=False, prompts=1),
            rng,
            prompt_tokens=workload.prompt_tokens,
        )
        server.blocks_run += 1
        self._clock_s += summary.wall_s
        return summary

    def trace(self, block: Block) -> tuple[KernelTime, ...]:
        """Kernel time of the model's parts; they sum to the expected phases. `phase` verify is the target forward."""
        server = self._served()
        self._clock_s += self.profile.boot.trace_s
        mean = self.expected(server.configuration, batch_size=min(block.concurrency, len(block.prompts)))
        return kernels_of(self.profile, server.configuration, mean)

    def close(self) -> None:
        """See the contract."""
        if self._server is not None:
            self._server = None
            self._clock_s += self.profile.boot.stop_s

    def _served(self) -> _Server:
        if self._server is None:
            raise EngineError("wanted a launched server, but none is up", stage="measure", kind="engine_unavailable")
        return self._server

    def _rng(self, configuration: Configuration, launch: int, draw: int) -> np.random.Generator:
        return np.random.default_rng((self._seed, int(configuration.configuration_id[1:], 16), launch, draw))

    def _conditions(
        self, server: _Server, rng: np.random.Generator, index: int, *, warmup: bool, prompts: int
    ) -> Conditions:
        noise, scale = self.profile.noise, self.spec.engine.noise
        spread = self._prompt_spread(server.configuration)
        warming = 1.0 + noise.warmup * math.exp(-server.blocks_run)
        heating = 1.0 - noise.cold * math.exp(-self._clock_s / noise.cold_tau_s)
        drift = 1.0 + noise.drift_per_hour * self._clock_s / 3600.0
        drafting = 1.0 if server.configuration.speculates else 0.0
        launch = math.exp(math.hypot(noise.launch, drafting * noise.drafting_launch) * scale * server.luck)
        launch *= math.exp(math.copysign(noise.launch_branches / 2.0, server.luck) * scale)
        block = math.exp(math.hypot(noise.block, drafting * noise.drafting_block) * scale * rng.standard_normal())
        return Conditions(
            started_s=self._clock_s,
            slowdown=launch * block * warming * heating * drift,
            difficulty=spread * scale * self._difficulty(index, warmup=warmup) / math.sqrt(prompts),
            verify_jitter=noise.verify_cycle * scale,
            other_jitter=noise.other_cycle * scale,
            sampled=scale > 0.0,
        )

    def _prompt_spread(self, configuration: Configuration) -> float:
        if not configuration.speculates or pinned_accept_length(self.spec, configuration) is not None:
            return 0.0
        return self.profile.drafter(configuration.drafter).prompt_spread

    def _difficulty(self, index: int, *, warmup: bool) -> float:
        """Standard normal; two neighbouring blocks are as much harder as easier, like a prompt set that is balanced."""
        key = warmup, index
        if key not in self._difficulties:
            rng = np.random.default_rng((self._seed, 0xB10C, int(warmup), index // 2))
            self._difficulties[key] = (-1.0) ** index * float(rng.standard_normal())
        return self._difficulties[key]

    def _boot_s(
        self, configuration: Configuration, states: tuple[Configuration, ...], *, cold: bool
    ) -> dict[str, float]:
        boot, drafting = self.profile.boot, configuration.speculates
        load_s = boot.weight_load_s + drafting * boot.drafter_load_s + cold * boot.cold_weight_load_s
        capture_s = boot.capture_s + drafting * boot.drafter_capture_s + cold * boot.cold_capture_s
        capture_s += self._states_s(configuration, states)
        return {"launch": boot.launch_s, "weight_load": load_s, "capture": capture_s}

    def _states_s(self, configuration: Configuration, states: tuple[Configuration, ...]) -> float:
        """Seconds for the communicators of further NCCL sets, and for the graphs of their states.

        Further step counts under the launched NCCL set are in `drafter_capture_s`.
        """
        boot = self.profile.boot
        beside = [each for each in states if each.nccl_env != configuration.nccl_env or each.args != configuration.args]
        sets = {each.nccl_env for each in beside}
        return len(sets) * boot.communicator_s + len(beside) * boot.state_s

    def _report(self, configuration: Configuration) -> LaunchReport:
        if configuration not in self._reports:
            self._reports[configuration] = self._make_report(configuration)
        return self._reports[configuration]

    def _make_report(self, configuration: Configuration) -> LaunchReport:
        profile, mean = self.profile, self.expected(configuration)
        requested = launch_environment(self.spec, configuration)
        effective = {"num_steps": str(configuration.num_steps)}
        if configuration.speculates:
            effective["eagle_topk"] = str(configuration.eagle_topk)
            effective["num_draft_tokens"] = str(configuration.num_draft_tokens)
        if mean.nccl is not None:
            effective |= {"nccl_algo": mean.nccl.algo, "nccl_proto": mean.nccl.proto}
            effective["nccl_transport"] = mean.nccl.transport
        return LaunchReport(
            version=f"{profile.name} {profile.version}",
            machine=f"{profile.name} (simulated {profile.num_gpus} x {profile.gpu})",
            num_gpus=profile.num_gpus,
            boot_s={},
            command=recorded_command(self.spec, configuration),
            environment=recorded_environment(self.spec, configuration),
            effective=effective,
            evidence=evidence_of(profile, configuration, mean, requested),
            all_reduce=mean.all_reduce,
        )

    def _fault(self, configuration: Configuration, *, measuring: bool) -> Fault | None:
        settings = intervened(self.profile, settings_of(configuration, self.spec.engine))
        faults = (fault for fault in self.profile.faults if (fault.stage == "measure") == measuring)
        return next((fault for fault in faults if fits(fault.when, settings)), None)

    def _fail_at_launch(self, configuration: Configuration, boot_s: Mapping[str, float]) -> None:
        if fault := self._fault(configuration, measuring=False):
            self._clock_s += self._seconds_until(fault.stage, boot_s)
            self._raise(fault)
        try:
            for concurrency in self.spec.workload.concurrency:
                self.expected(configuration, batch_size=concurrency)
        except EngineError as error:
            self._clock_s += self._seconds_until(error.stage, boot_s)
            raise
        except SpecError as error:
            raise EngineError(str(error), stage="plan", kind="invalid_config") from error

    def _fail_in_block(self, server: _Server) -> None:
        fault = self._fault(server.configuration, measuring=True)
        if fault and server.blocks_run >= fault.after_blocks:
            self._raise(fault)

    def _raise(self, fault: Fault) -> NoReturn:
        if fault.kind.startswith("hang"):
            deadlines = self.spec.engine.deadlines_s
            self._clock_s += deadlines.block if fault.stage == "measure" else getattr(deadlines, fault.stage)
        raise EngineError(fault.message, stage=fault.stage, kind=fault.kind, log_tail=f"(simulated) {fault.message}")

    def _seconds_until(self, stage: Stage, boot_s: Mapping[str, float]) -> float:
        """Of a launch that gets this far."""
        spent = {"nccl_init": ("launch",), "load": ("launch",), "plan": ()}
        return sum(boot_s[activity] for activity in spent.get(stage, ("launch", "weight_load")))


def profile_of(spec: SweepSpec) -> MachineProfile:
    """The spec's machine, its drafters under the spec's names. Raises SpecError."""
    if spec.engine.machine is None:
        raise SpecError("engine.machine: the simulated engine needs a machine profile")
    profile = read_profile(spec.engine.machine)
    return replace(profile, drafters={**profile.drafters, **{n: profile.drafter(t) for n, t in spec.drafters.items()}})
