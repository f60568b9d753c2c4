"""An engine of a few lines on a virtual clock, and the spec it runs: for tests of what stands around engines."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from sweeps.engines.base import BlockRecord, EngineError, Evidence, KernelTime, LaunchReport, Request
from sweeps.measure.held_engine import HeldEngine
from sweeps.measure.records import Outcome, PlannedTrial
from sweeps.measure.trial import Measurement
from sweeps.measure.trial_context import TrialContext
from sweeps.results.tables import CYCLE_COLUMNS, ResultsFolder
from sweeps.search.study import SweepStudy
from sweeps.spec.model import SweepSpec
from sweeps.spec.reading import parse_spec
from sweeps.spec.space import Configuration, Space
from sweeps.spec.workload import Block, plan_blocks

SPEC = """
sweep: stub
engine: {kind: simulated, machine: stub, states: {nccl: false, all_reduce: false, trees: false}}
search:
  num_steps: [0, 1, 2, 3]
  eagle_topk: [1, 2]
  num_draft_tokens: [4]
  nccl: [default, ring]
drafters: {head: head}
nccl_sets: {ring: {NCCL_ALGO: Ring}}
workload: {warmup_blocks: 1, blocks: 6, prompt_tokens: 4, output_tokens: 16}
control: {every: 5}
"""


def stub_spec(extra: str = "", text: str = SPEC) -> SweepSpec:
    return parse_spec(text + extra, source="stub.yaml")


def tok_s_of(configuration: Configuration) -> float:
    """The stub's landscape: best at 2 steps, top-k 1; a tree costs; NCCL does nothing."""
    if not configuration.speculates:
        return 80.0
    return 100.0 - 10.0 * abs(configuration.num_steps - 2) - 5.0 * (configuration.eagle_topk or 0)


TOKENS = 100
"""Tokens of a block after its first."""


@dataclass
class StubEngine:
    """Launch 100 s, switch 1 s, block 5 s, stop 3 s. Fails as told by the scripts."""

    name: str = "simulated"
    clock_s: float = 0.0
    failures: dict[str, list[EngineError | None]] = field(default_factory=dict)
    """`launch` or `block` -> errors to raise, in order, one per call; None for a call that succeeds."""
    calls: list[str] = field(default_factory=list)
    live: Configuration | None = None
    states: tuple[Configuration, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    machine: str = "stub"
    version: str = "stub 1"
    dies: bool = False

    def now_s(self) -> float:
        return self.clock_s

    def launch(self, configuration: Configuration, *, states: tuple[Configuration, ...] = ()) -> LaunchReport:
        self.calls.append("launch")
        self.live = None
        self.clock_s += 100.0
        self._maybe_fail("launch")
        self.live, self.states = configuration, states
        return self._report(configuration, {"launch": 10.0, "weight_load": 60.0, "capture": 30.0})

    def switch(self, configuration: Configuration) -> LaunchReport | None:
        self.calls.append("switch")
        if self.live is None:
            return None
        self.clock_s += 1.0
        self.live = configuration
        return self._report(configuration, {})

    def run_block(self, block: Block) -> BlockRecord:
        self.calls.append("warmup" if block.warmup else "block")
        if self.dies and not block.warmup and block.index == 2:
            os._exit(9)
        self._maybe_fail("block")
        assert self.live is not None
        started_s, tok_s = self.clock_s, tok_s_of(self.live) + 0.1 * (block.index % 3)
        self.clock_s += 5.0
        return BlockRecord(
            started_s=started_s,
            wall_s=5.0,
            decode_s=TOKENS / tok_s,
            decode_tokens=TOKENS,
            requests=tuple(_request(prompt.prompt_id, block) for prompt in block.prompts),
            cycles=_cycles(self.live, started_s, tok_s),
            telemetry={"sm_clock_mhz": 2000.0},
        )

    def run_anchor(self, block: Block) -> BlockRecord | None:
        self.calls.append("anchor")
        if self.live is None or not any(each.num_steps == 0 for each in self.states):
            return None
        speculating, self.live = self.live, self.live.target_alone()
        record = self.run_block(block)
        self.calls.pop()
        self.live = speculating
        return record

    def trace(self, block: Block) -> tuple[KernelTime, ...] | None:
        self.calls.append("trace")
        self.clock_s += 2.0
        return (
            KernelTime(phase="verify", kind="communication", kernel="all_reduce", us_per_cycle=900, calls_per_cycle=61),
        )

    def close(self) -> None:
        if self.live is not None:
            self.calls.append("close")
            self.live = None
            self.clock_s += 3.0

    def _maybe_fail(self, where: str) -> None:
        if self.failures.get(where) and (error := self.failures[where].pop(0)) is not None:
            raise error

    def _report(self, configuration: Configuration, boot_s: dict[str, float]) -> LaunchReport:
        return LaunchReport(
            version=self.version,
            machine=self.machine,
            num_gpus=8,
            boot_s=boot_s,
            command=("stub", "--steps", str(configuration.num_steps)),
            environment=dict(configuration.nccl_env),
            effective={"num_steps": str(configuration.num_steps)},
            evidence=self.evidence,
            all_reduce="nccl",
        )


SCRIPT = "stub.json"


def open_stub(spec: SweepSpec, folder: ResultsFolder) -> StubEngine:
    """Opened in an actor. `stub.json` of the folder holds kinds of errors by call, and is used up by the first engine:
    {"launch": ["crash", ...], "block": [...], "die_in_block": true}. The machine's name tells the engine."""
    script = folder.root / SCRIPT
    failures: dict[str, list[EngineError | None]] = {}
    told = json.loads(script.read_text()) if script.is_file() else {}
    script.unlink(missing_ok=True)
    for where in ("launch", "block"):
        failures[where] = [EngineError(f"told to: {kind}", stage="load", kind=kind) for kind in told.get(where, [])]
    engine = StubEngine(failures=failures, machine=f"stub-{os.getpid()}-{uuid.uuid4().hex[:6]}")
    engine.dies = told.get("die_in_block", False)
    return engine


def stub_context(spec: SweepSpec, folder: Path) -> TrialContext:
    return TrialContext(
        sweep_id="s1",
        folder=ResultsFolder(folder),
        blocks=plan_blocks(spec.workload, folder=folder),
        num_gpus=spec.resources.gpus,
    )


def plan(configuration: Configuration, space: Space, trial_id: str = "t0000") -> PlannedTrial:
    return PlannedTrial(
        trial_id=trial_id,
        role="candidate",
        number=int(trial_id[1:]),
        configuration=configuration,
        requested=space.suggestion(configuration),
        launch_key=space.launch_key(configuration),
        states=space.states(configuration),
    )


def drive(study: SweepStudy, held: HeldEngine, context: TrialContext, *, limit: int = 200) -> list[PlannedTrial]:
    """Run a study to its end without Ray. Returns the trials in order."""
    ran: list[PlannedTrial] = []
    while (trial := study.ask()) is not None and len(ran) < limit:
        ran.append(trial)
        measurement = Measurement(held, trial, context)
        result = measurement.advance()
        while not isinstance(result, Outcome):
            decision = study.report(trial, result, seconds=measurement.seconds)
            if decision.prune:
                result = Outcome(status="pruned", reason=decision.reason, seconds=measurement.seconds)
                break
            result = measurement.advance()
        measurement.stop()
        study.tell(trial, result)
    return ran


def _request(prompt_id: str, block: Block) -> Request:
    return Request(
        prompt_id=prompt_id,
        prompt_tokens=4,
        output_tokens=TOKENS + 1,
        ttft_ms=10.0,
        latency_ms=500.0,
        output_hash=hashlib.sha256(prompt_id.encode()).hexdigest()[:16],
    )


def _cycles(configuration: Configuration, started_s: float, tok_s: float) -> pa.Table:
    """As many cycles of 2 tokens (1 without speculation) as make TOKENS, as long as `tok_s` tells."""
    speculates = configuration.speculates
    tokens = 2 if speculates else 1
    cycle_ms = 1e3 * tokens / tok_s
    draft_ms = 0.5 * configuration.num_steps if speculates else 0.0
    verify_ms = cycle_ms - draft_ms - 0.4
    row = {
        "rank": 0,
        "draft_ms": draft_ms if speculates else None,
        "verify_ms": verify_ms if speculates else None,
        "verify_forward_ms": 0.95 * verify_ms if speculates else cycle_ms - 0.1,
        "extend_ms": 0.3 if speculates else None,
        "gap_ms": 0.1,
        "cycle_ms": cycle_ms,
        "batch_size": 1,
        "num_steps": configuration.num_steps,
        "tokens": tokens,
        "timer_kind": "simulated",
    }
    starts = [
        {"cycle_index": index, "started_ms": started_s * 1e3 + index * cycle_ms} for index in range(TOKENS // tokens)
    ]
    return pa.Table.from_pylist([{**row, **start} for start in starts], schema=CYCLE_COLUMNS)
