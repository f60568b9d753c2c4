"""The replay engine: a recorded sweep's blocks, resampled, on a virtual clock.

Blocks are drawn with replacement, by block index first and by recorded trial second. The index depends on the study's
seed, the block and how often the configuration has run it, so that first runs pair across configurations as the
recorded blocks did. Boots take their recorded times, and a configuration that failed fails again.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sweeps.engines.base import BlockRecord, EngineError, KernelTime, LaunchReport, Request
from sweeps.engines.replay.recording import BlockKey, RecordedConfiguration, Recording, Row, concurrency_of
from sweeps.engines.summary import BlockSummary
from sweeps.results.tables import CYCLE_COLUMNS
from sweeps.spec.binding import held_by
from sweeps.spec.document import SpecError
from sweeps.spec.model import SweepSpec
from sweeps.spec.space import Configuration
from sweeps.spec.workload import Block

_STARTED_MS = CYCLE_COLUMNS.get_field_index("started_ms")
_BOOT = ("launch", "weight_load", "capture")


class ReplayEngine:
    """Raises SpecError without `engine.recording`, TableError where that is no recording.

    Args:
        recording: that folder, already read: for benchmarks, which start many engines on it.
    """

    name = "replay"

    def __init__(self, spec: SweepSpec, *, seed: int | None = None, recording: Recording | None = None) -> None:
        if spec.engine.recording is None:
            raise SpecError("engine.recording: the replay engine needs the results folder of a recorded sweep")
        self.spec = spec
        self.recording = recording or Recording(Path(spec.engine.recording), spec.workload.concurrency)
        self._seed = spec.study.seed if seed is None else seed
        self._clock_s = 0.0
        self._launches = 0
        self._configuration: Configuration | None = None
        self._held = held_by(spec.engine)
        self._states: frozenset[Configuration] = frozenset()
        self._runs: Counter[tuple[str, bool, int, int]] = Counter()
        self._draws: dict[tuple[bool, int, int], tuple[int, int]] = {}
        """By warm-up, block and run of it: the same for every configuration."""

    def now_s(self) -> float:
        """Virtual seconds since the engine was made."""
        return self._clock_s

    def tok_s(self, configuration: Configuration) -> float:
        """The recorded tokens over seconds: a benchmark's truth. Raises EngineError for what was never measured."""
        recorded = self._recorded(configuration)
        if not recorded.blocks:
            raise EngineError(f"{configuration.label}: no recorded block", stage="plan", kind="invalid_config")
        return recorded.tok_s

    def launch(self, configuration: Configuration, *, states: tuple[Configuration, ...] = ()) -> LaunchReport:
        """See the contract. Raises EngineError (`invalid_config`) for what was never recorded."""
        self.close()
        self._launches += 1
        recorded = self._recorded(configuration)
        if not recorded.blocks:
            self._fail_as_recorded(configuration, recorded)
        trial, boot_s = recorded.measured[0], self.recording.boot_s
        if launched := [row for row in recorded.measured if row["relaunched"]]:
            trial = launched[(self._launches - 1) % len(launched)]
            boot_s = {activity: trial[f"{activity}_s"] for activity in _BOOT}
        self._clock_s += sum(boot_s.values())
        self._configuration, self._states = configuration, frozenset((configuration, *states))
        return self._report(trial, boot_s)

    def switch(self, configuration: Configuration) -> LaunchReport | None:
        """See the contract. In place only where the recorded server could: the recording has a switch."""
        live = self._configuration
        if live is None:
            return None
        if configuration != live:
            recorded = self.recording.configurations.get(configuration.configuration_id)
            switchable = configuration in self._states and (
                live.launch_key(self._held) == configuration.launch_key(self._held)
            )
            if not switchable or recorded is None or not recorded.blocks or self.recording.switch_s is None:
                return None
            self._clock_s += self.recording.switch_s
            self._configuration = configuration
        return self._report(self._recorded(configuration).measured[0], {})

    def run_block(self, block: Block) -> BlockRecord:
        """See the contract: a recorded block, its times moved to this clock."""
        recorded, drawn = self._draw(block.index, block.concurrency, warmup=block.warmup)
        row = recorded[drawn % len(recorded)]
        key: BlockKey = (row["trial_id"], row["attempt"], row["block_index"], concurrency_of(row))
        moved_s = self._clock_s - row["started_s"]
        cycles = self.recording.cycles(key)
        started_ms = pc.add(cycles["started_ms"], pa.scalar(1000.0 * moved_s))
        record = BlockRecord(
            started_s=self._clock_s,
            wall_s=row["wall_s"],
            decode_s=row["decode_s"],
            decode_tokens=row["decode_tokens"],
            requests=_requests(row, self.recording.requests(key)),
            cycles=cycles.set_column(_STARTED_MS, CYCLE_COLUMNS.field(_STARTED_MS), started_ms),
            telemetry={
                name: row[name] for name in ("sm_clock_mhz", "power_w", "temperature_c") if row[name] is not None
            },
        )
        self._clock_s += record.wall_s
        return record

    def run_anchor(self, block: Block) -> BlockRecord | None:
        """See the contract. None: a recording's anchors belong to its own servers' drift."""
        return None

    def block_summary(self, block_index: int, *, rng: np.random.Generator) -> BlockSummary:
        """The summary of a drawn block from its row alone, without its cycles: for benchmarks.

        Args:
            rng: chooses among the trials that have the drawn block.
        """
        recorded, _ = self._draw(block_index, self.spec.workload.concurrency[0], warmup=False)
        row = recorded[int(rng.integers(len(recorded)))]
        summary = BlockSummary(
            block_index=block_index,
            started_s=self._clock_s,
            accept_histogram=None if row["accept_histogram"] is None else tuple(row["accept_histogram"]),
            num_cycles=row["num_cycles"] or 0,
            **{name: row[name] for name in _SUMMARY_COLUMNS},
        )
        self._clock_s += summary.wall_s
        return summary

    def trace(self, block: Block) -> tuple[KernelTime, ...] | None:
        """The recorded trace of the configuration, if it has one; takes no time."""
        return self.recording.kernels(self._recorded(self._served()))

    def close(self) -> None:
        """See the contract."""
        if self._configuration is not None:
            self._configuration = None
            self._clock_s += self.recording.stop_s

    def _served(self) -> Configuration:
        if self._configuration is None:
            raise EngineError("wanted a launched server, but none is up", stage="measure", kind="engine_unavailable")
        return self._configuration

    def _recorded(self, configuration: Configuration) -> RecordedConfiguration:
        recorded = self.recording.configurations.get(configuration.configuration_id)
        if recorded is None:
            raise EngineError(
                f"{configuration.label}: not among the {len(self.recording.configurations)} recorded configurations",
                stage="plan",
                kind="invalid_config",
            )
        return recorded

    def _fail_as_recorded(self, configuration: Configuration, recorded: RecordedConfiguration) -> None:
        trial = recorded.trials[0]
        self._clock_s += sum(trial[f"{activity}_s"] for activity in (*_BOOT, "failed"))
        raise EngineError(
            f"{configuration.label}: as recorded: {trial['reason']}",
            stage=trial["stage"] or "load",
            kind=trial["kind"] or "crash",
            log_tail=trial["log_tail"],
        )

    def _draw(self, index: int, concurrency: int, *, warmup: bool) -> tuple[tuple[Row, ...], int]:
        """The recorded blocks of the drawn index, and a large random number to choose one of them by."""
        configuration = self._served()
        counted = (configuration.configuration_id, warmup, index, concurrency)
        run = (warmup, index, self._runs[counted])
        self._runs[counted] += 1
        if run not in self._draws:
            rng = np.random.default_rng((self._seed, *map(int, run)))
            self._draws[run] = int(rng.integers(self.recording.num_blocks)), int(rng.integers(1 << 30))
        drawn_index, choice = self._draws[run]
        return self._recorded(configuration).blocks_at(drawn_index, concurrency), choice

    def _report(self, trial: Row, boot_s: dict[str, float]) -> LaunchReport:
        return LaunchReport(
            version=trial["engine_version"] or "unknown",
            machine=f"replay of {trial['machine'] or 'an unnamed machine'}",
            num_gpus=trial["num_gpus"],
            boot_s=boot_s,
            command=tuple(trial["command"] or ()),
            environment=dict(trial["environment"] or ()),
            removed=tuple(trial["removed_env"] or ()),
            effective=dict(trial["effective"] or ()),
            evidence=self.recording.evidence(trial),
            all_reduce=trial["all_reduce"],
        )


_SUMMARY_COLUMNS = (
    "wall_s",
    "decode_tokens",
    "decode_s",
    "accept_length",
    "draft_ms",
    "verify_ms",
    "verify_forward_ms",
    "extend_ms",
    "gap_ms",
    "cycle_ms",
)


def _requests(block: Row, rows: tuple[Row, ...]) -> tuple[Request, ...]:
    """The recorded requests; one that stands for the block where the recording has none."""
    if not rows:
        return (
            Request(
                prompt_id="unrecorded",
                prompt_tokens=0,
                output_tokens=block["decode_tokens"] + 1,
                ttft_ms=None,
                latency_ms=1000.0 * block["wall_s"],
                output_hash=block["output_hash"],
            ),
        )
    names = ("prompt_id", "prompt_tokens", "output_tokens", "ttft_ms", "latency_ms", "output_hash")
    values: list[dict[str, Any]] = [{name: row[name] for name in names} for row in rows]
    return tuple(Request(**each) for each in values)
