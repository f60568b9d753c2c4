"""Gauges of a running sweep on Ray's metrics endpoint, beside Ray's own: for Prometheus, and Grafana on top of it."""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge

from ray_jobs.tune_bridge import SweepObserver
from sweeps.engines.summary import BlockSummary
from sweeps.measure.records import Decision, Outcome, PlannedTrial
from sweeps.search.optuna_study import InvalidSuggestion
from sweeps.spec.model import SweepSpec

_BLOCK_GAUGES = {
    "tok_s": "Decode throughput of the last block, tokens per second",
    "accept_length": "Tokens per cycle of the last block, bonus token included",
    "verify_ms": "Mean verify time of the last block",
    "cycle_ms": "Mean cycle time of the last block",
}
_SWEEP_TAGS = ("sweep", "engine")
_TRIAL_TAGS = (*_SWEEP_TAGS, "role", "configuration")


class SweepMetrics:
    """A `SweepObserver` that passes everything on to another one, and counts.

    Metrics (Ray adds `ray_` in front and `_total` to counters): `specsweep_tok_s`, `specsweep_accept_length`,
    `specsweep_verify_ms`, `specsweep_cycle_ms` by configuration; `specsweep_trials` by status;
    `specsweep_gpu_seconds` by activity. The label `engine` keeps simulated sweeps apart from measured ones.
    """

    def __init__(self, observer: SweepObserver, spec: SweepSpec) -> None:
        self._observer = observer
        self._num_gpus = spec.resources.gpus
        self._sweep = {"sweep": spec.sweep, "engine": spec.engine.kind}
        self._gauges = {
            name: Gauge(f"specsweep_{name}", description=text, tag_keys=_TRIAL_TAGS)
            for name, text in _BLOCK_GAUGES.items()
        }
        self._trials = Counter("specsweep_trials", description="Ended trials", tag_keys=(*_SWEEP_TAGS, "status"))
        self._gpu_seconds = Counter(
            "specsweep_gpu_seconds", description="GPU seconds of ended trials", tag_keys=(*_SWEEP_TAGS, "activity")
        )

    def started(self, trial: PlannedTrial) -> None:
        self._observer.started(trial)

    def block_done(self, trial: PlannedTrial, block: BlockSummary, decision: Decision) -> None:
        tags = {**self._sweep, "role": trial.role, "configuration": trial.configuration.label}
        for name, gauge in self._gauges.items():
            value = getattr(block, name)
            if value is not None:
                gauge.set(value, tags=tags)
        self._observer.block_done(trial, block, decision)

    def ended(self, trial: PlannedTrial, outcome: Outcome) -> None:
        self._trials.inc(1, tags={**self._sweep, "status": outcome.status})
        for activity, seconds in outcome.seconds.items():
            if seconds * self._num_gpus > 0:
                self._gpu_seconds.inc(seconds * self._num_gpus, tags={**self._sweep, "activity": activity})
        self._observer.ended(trial, outcome)

    def refused(self, invalid: InvalidSuggestion) -> None:
        self._trials.inc(1, tags={**self._sweep, "status": "invalid"})
        self._observer.refused(invalid)
