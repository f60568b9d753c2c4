"""A sweep's numbers arrive at the endpoint that Prometheus scrapes, and at the observer behind."""

from __future__ import annotations

import re
import time
import urllib.request
from typing import Any

import pytest
import ray

from ray_jobs.monitoring import SweepMetrics
from sweeps.engines.summary import BlockSummary
from sweeps.measure.records import Decision, Outcome, PlannedTrial
from sweeps.search.optuna_study import InvalidSuggestion
from sweeps.spec.model import EngineSpec, ResourceSpec, SearchSpec, SweepSpec
from sweeps.spec.space import Configuration

CONFIGURATION = Configuration(
    num_steps=0, eagle_topk=None, num_draft_tokens=None, drafter=None, nccl_set="default", nccl_env=()
)
TRIAL = PlannedTrial(
    trial_id="t0001", role="candidate", number=1, configuration=CONFIGURATION, requested={}, launch_key="l0"
)
BLOCK = BlockSummary(
    block_index=0,
    started_s=0.0,
    wall_s=1.0,
    decode_tokens=165,
    decode_s=2.0,
    num_cycles=10,
    accept_length=None,
    accept_histogram=None,
    draft_ms=None,
    verify_ms=None,
    verify_forward_ms=12.0,
    extend_ms=None,
    gap_ms=0.1,
    cycle_ms=12.25,
)


class Recorder:
    """An observer that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def started(self, trial: PlannedTrial) -> None:
        self.told.append("started")

    def block_done(self, trial: PlannedTrial, block: BlockSummary, decision: Decision) -> None:
        self.told.append("block_done")

    def ended(self, trial: PlannedTrial, outcome: Outcome) -> None:
        self.told.append("ended")

    def refused(self, invalid: InvalidSuggestion) -> None:
        self.told.append("refused")


@pytest.mark.ray
def test_a_blocks_numbers_reach_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    context: Any = ray.init(  # Ray declares a base class without the address
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 * 2**20,
        _system_config={"metrics_report_interval_ms": 200},
    )
    try:
        recorder = Recorder()
        spec = SweepSpec(
            sweep="s", engine=EngineSpec(kind="simulated"), search=SearchSpec(), resources=ResourceSpec(gpus=8)
        )
        metrics = SweepMetrics(recorder, spec)
        metrics.started(TRIAL)
        metrics.block_done(TRIAL, BLOCK, Decision(prune=False))
        metrics.ended(TRIAL, Outcome(status="completed", seconds={"measure": 2.0, "idle": 0.0}))
        assert recorder.told == ["started", "block_done", "ended"]
        found = scraped(context.address_info)
    finally:
        ray.shutdown()
    assert found["ray_specsweep_tok_s"] == ("82.5", {"configuration": CONFIGURATION.label, "engine": "simulated"})
    assert found["ray_specsweep_cycle_ms"][0] == "12.25"
    assert float(found["ray_specsweep_trials_total"][0]) == 1
    assert float(found["ray_specsweep_gpu_seconds_total"][0]) == 16
    assert "ray_specsweep_verify_ms" not in found  # there is none without speculation: no series, not 0


def scraped(address: dict[str, Any]) -> dict[str, tuple[str, dict[str, str]]]:
    """The sweep's series at the node's endpoint, once the counters (set last) are there."""
    node = ray.nodes()[0]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    ends_s = time.monotonic() + 60
    while time.monotonic() < ends_s:
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
        found = {
            match[1]: (
                match[3],
                dict(re.findall(r'(configuration|engine)="([^"]*)"', match[2])),
            )
            for match in re.finditer(r"^(ray_specsweep_\w+)\{(.*)\} (\S+)$", text, flags=re.MULTILINE)
        }
        if "ray_specsweep_gpu_seconds_total" in found and "ray_specsweep_tok_s" in found:
            return found
        time.sleep(0.2)
    raise AssertionError(f"no metrics of the sweep at {url}")
