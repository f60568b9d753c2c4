"""The profile of two H200 against what was recorded on them: all-reduces alone, and a sweep over NCCL sets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from sweeps.engines.simulated.engine import SimulatedEngine
from sweeps.engines.simulated.expected_cycle import ExpectedCycle, expected
from sweeps.engines.simulated.machine_profile import read_profile
from sweeps.engines.simulated.nccl_choice import all_reduce_us, choose
from sweeps.results.tables import ResultsFolder, read_table
from sweeps.spec.model import SweepSpec
from sweeps.spec.reading import parse_spec
from sweeps.spec.space import Configuration, Space

RECORDINGS = Path(__file__).parents[4] / "recordings"
PROFILE = read_profile("h200-nvlink-x2")
OWN_CHOICE = ("default", "ll-ring", "misspelt", "founding-six")
"""Sets under which NCCL takes Ring LL in every all-reduce of the sweep."""

Trial = Mapping[str, Any]


@pytest.fixture(scope="module")
def trials() -> list[dict[str, Any]]:
    """Completed trials of the sweep, each with the means of its blocks."""
    folder = ResultsFolder(RECORDINGS / "h200_x2_nccl_v1")
    blocks = read_table(folder, "blocks").to_pylist()
    found = []
    for trial in read_table(folder, "trials").to_pylist():
        own = [one for one in blocks if (one["trial_id"], one["attempt"]) == (trial["trial_id"], trial["attempt"])]
        if trial["status"] == "completed":
            names = ("tok_s", "draft_ms", "verify_ms", "verify_forward_ms", "extend_ms", "gap_ms", "cycle_ms")
            kept = {name: [one[name] for one in own if one[name] is not None] for name in names}
            trial["custom"] = dict(trial["args"])["disable-custom-all-reduce"] == "False"
            found.append({**trial, **{name: fmean(values) if values else None for name, values in kept.items()}})
    return found


def cycle(num_steps: int, nccl_env: Mapping[str, str], *, custom: bool = False) -> ExpectedCycle:
    speculates = num_steps > 0
    configuration = Configuration(
        num_steps=num_steps,
        eagle_topk=1 if speculates else None,
        num_draft_tokens=num_steps + 1 if speculates else None,
        drafter="mini" if speculates else None,
        nccl_set="set",
        nccl_env=tuple(sorted(nccl_env.items())),
        env=(),
        args=(("disable-custom-all-reduce", not custom),),
    )
    return expected(PROFILE, configuration)


@pytest.mark.parametrize("name", ["default", "simple", "ll128", "p2p-off", "ll-ring", "Ring", "Tree"])
def test_all_reduces_are_those_of_the_table_within_ten_percent(name: str) -> None:
    rows = pq.read_table(RECORDINGS / "nccl_allreduce_h200_x2/allreduce.parquet").to_pylist()
    replayed = [row for row in rows if row["set"] == name and row["mode"] == "graph"]
    assert len(replayed) == 7
    for row in replayed:
        settings = {f"env.{variable}": value for variable, value in row["env"]}
        choice = choose(PROFILE.nccl, settings, message_bytes=row["bytes"])
        assert all_reduce_us(PROFILE.nccl, choice, message_bytes=row["bytes"]) == pytest.approx(
            row["us_median"], rel=0.10
        )
        assert choice.proto == row["protocol"]
        assert choice.transport == row["transports"][0].partition("/")[0]
        if (name, row["tokens"]) != ("ll128", 16):  # where NCCL goes back to Ring
            assert choice.algo == row["algorithm"]


def test_controls_are_those_of_the_sweep_within_one_percent(trials: list[dict[str, Any]]) -> None:
    plain, controls = cycle(0, {}), [trial for trial in trials if trial["role"] == "control"]
    assert len(controls) == 4
    for control in controls:
        assert plain.tok_s == pytest.approx(control["tok_s"], rel=0.01)
        assert plain.cycle_ms == pytest.approx(control["cycle_ms"], rel=0.01)


def test_verify_is_that_of_every_trial_within_ten_percent(trials: list[dict[str, Any]]) -> None:
    speculated = [trial for trial in trials if trial["num_steps"] and not trial["custom"]]
    assert len(speculated) == 21
    for trial in speculated:
        mean = cycle(trial["num_steps"], dict(trial["nccl_env"]))
        assert mean.verify_ms == pytest.approx(trial["verify_ms"], rel=0.10)
        assert mean.cycle_ms == pytest.approx(trial["cycle_ms"], rel=2 * PROFILE.noise.drafting_launch)
        assert mean.accept_length == 1.0


def test_under_custom_all_reduce_whatever_the_set(trials: list[dict[str, Any]]) -> None:
    """The server is the same in all of them, and its launches differ as launches do."""
    speculated = [trial for trial in trials if trial["num_steps"] and trial["custom"]]
    assert len(speculated) == 21
    for trial in speculated:
        mean = cycle(trial["num_steps"], dict(trial["nccl_env"]), custom=True)
        assert mean.all_reduce == "custom"
        assert mean.verify_ms == pytest.approx(trial["verify_ms"], rel=0.15)
        assert abs(math.log(mean.cycle_ms / trial["cycle_ms"])) < 3 * PROFILE.noise.drafting_launch
    plain = [trial["verify_forward_ms"] for trial in speculated if trial["num_steps"] == 1]
    assert cycle(1, {}, custom=True).verify_forward_ms == pytest.approx(fmean(plain), rel=0.01)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_phases_are_the_means_of_launches_of_one_choice(trials: list[dict[str, Any]], num_steps: int) -> None:
    of_nccl = [trial for trial in trials if trial["num_steps"] == num_steps and not trial["custom"]]
    launches = [trial for trial in of_nccl if trial["nccl_set"] in OWN_CHOICE]
    mean = cycle(num_steps, {})
    for name in ("draft_ms", "verify_ms", "verify_forward_ms", "extend_ms", "gap_ms", "cycle_ms"):
        assert getattr(mean, name) == pytest.approx(fmean(trial[name] for trial in launches), rel=0.05)


def test_what_was_not_measured_does_not_say_so() -> None:
    assert PROFILE.sources["all_reduce.1.bandwidth_gbs"].startswith("assumed, not measured")
    unseen = ("nccl.latency_us.NET", "nccl.latency_us.SHM.Ring.Simple", "nccl.latency_us.P2P.Tree.Simple")
    assert all(PROFILE.sources[path].startswith("assumed") for path in unseen)
    assert cycle(1, {"NCCL_P2P_DISABLE": "1"}, custom=True).all_reduce == "custom"


SPEC = """
sweep: two
engine: {kind: simulated, machine: h200-nvlink-x2, args: {disable-custom-all-reduce: true}}
drafters: {mini: mini}
search: {num_steps: [0, 1]}
workload: {prompt_tokens: 128, output_tokens: 128, blocks: 4}
"""


def test_launches_differ_where_drafts_are_made_and_hardly_elsewhere() -> None:
    spec: SweepSpec = parse_spec(SPEC, source="spec")
    engine, space = SimulatedEngine(spec), Space(spec)

    def launched_ms(chosen: Configuration) -> float:
        engine.launch(chosen)
        rng = np.random.default_rng(7)
        return fmean(engine.block_summary(index, rng=rng).cycle_ms or 0.0 for index in range(1, 9))

    def spread(num_steps: int) -> float:
        chosen = space.resolve({"num_steps": num_steps})
        return stdev(math.log(launched_ms(chosen)) for _ in range(30))

    assert spread(0) == pytest.approx(PROFILE.noise.launch, rel=0.5)
    assert spread(1) == pytest.approx(PROFILE.noise.drafting_launch, rel=0.5)
