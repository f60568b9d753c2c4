from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.bench_engine import BenchEngine
from benchmarks.probe_against_profiler import SETTLING_CYCLES, compare, compare_phases
from benchmarks.probe_overhead import measure
from benchmarks.profiled_cycles import read_cycles
from sweeps.spec.reading import read_spec

ROOT = Path(__file__).parents[2]
TRACED = read_cycles(ROOT / "tests" / "assets" / "host_trace" / "cpu-TP-0.trace.json")


def as_probe(factor: float, *, before: int = 0) -> dict[str, np.ndarray]:
    """What a probe says that sees `factor` times the profiler's times; `before` is what it says of the first cycles."""
    starts = np.array([cycle.draft[0] for cycle in TRACED])
    columns = {
        "draft_ms": [cycle.draft[1] - cycle.draft[0] for cycle in TRACED],
        "verify_ms": [cycle.extend[0] - cycle.draft[1] for cycle in TRACED],
        "verify_forward_ms": [cycle.forward[1] - cycle.forward[0] for cycle in TRACED],
        "extend_ms": [cycle.extend[1] - cycle.extend[0] for cycle in TRACED],
        "cycle_ms": [*np.diff(starts), 99.0],
    }
    seen = {name: factor * np.array(values) for name, values in columns.items()}
    for values in seen.values():
        values[:before] = 1e9
    return {name: np.append(values, [1e9, 1e9]) for name, values in seen.items()}


def test_a_probe_that_agrees_and_one_that_is_three_percent_long() -> None:
    for factor, percent in ((1.0, 0.0), (1.03, 3.0)):
        phases = compare_phases(as_probe(factor), TRACED)["phases"]
        assert isinstance(phases, dict)
        assert [row["difference_percent"] for row in phases.values()] == pytest.approx([percent] * 5, abs=1e-9)


def test_only_cycles_that_both_saw_count() -> None:
    compared = compare_phases(as_probe(1.0, before=SETTLING_CYCLES), TRACED)
    assert compared["cycles"] == len(TRACED) - SETTLING_CYCLES - 1
    assert compared == compare_phases(as_probe(1.0), TRACED)


def test_on_an_h200_probe_and_profiler_agree_within_a_tenth_of_a_percent() -> None:
    phases = compare(ROOT / "tests" / "assets" / "gpu_trace")["phases"]
    assert isinstance(phases, dict)
    for row in phases.values():
        assert abs(row["difference_percent"]) < 0.1
    for name in ("draft_ms", "verify_forward_ms"):
        assert phases[name]["kernels"] + phases[name]["gpu_idle_before"] >= 0.9 * phases[name]["profiler"]
        assert phases[name]["kernels"] < phases[name]["profiler"]


@pytest.mark.parametrize("name", ["probe_cpu", "probe_h200"])
def test_the_specs_measure_one_speculative_configuration(name: str) -> None:
    spec = read_spec(ROOT / "benchmarks" / "specs" / f"{name}.yaml")
    assert "SGLANG_SIMULATE_ACC_LEN" not in spec.engine.env
    assert spec.search.num_steps == (3,)


@pytest.mark.engine
def test_on_the_real_server_probe_profiler_and_client_agree(tmp_path: Path) -> None:
    """Loosely: what they differ by is for the benchmark to say."""
    spec = read_spec(ROOT / "benchmarks" / "specs" / "probe_cpu.yaml")
    if not (ROOT / str(spec.engine.python)).exists():
        pytest.skip(f"no {spec.engine.python}: `make engine` builds it")
    engine = BenchEngine(spec, logs=tmp_path / "logs", node_folder=tmp_path / "node")
    try:
        parts = list(measure(engine, spec, num_fours=2, traces=tmp_path / "traces"))
    finally:
        engine.close()
    figures = {name: value for part in parts for name, value in part.items()}
    assert figures["phases_and_gap_to_cycles"] == pytest.approx(1.0, abs=1e-6)
    assert figures["cycles_to_host_starts"] == pytest.approx(1.0, abs=0.01)
    assert figures["settled_cycles_to_host_starts"] == pytest.approx(1.0, abs=0.01)
    assert figures["cycles_to_client_wall"] == pytest.approx(1.0, abs=0.1)
    compared = figures["against_profiler"]
    assert isinstance(compared, dict)
    assert compared["cycles"] > 40
    for row in compared["phases"].values():
        assert row["probe"] == pytest.approx(row["profiler"], rel=0.15)
        assert row["gpu_idle_before"] is None
