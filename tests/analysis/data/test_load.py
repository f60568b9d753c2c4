from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis.data.load import gpu_seconds, load
from sweeps.results.tables import ResultsFolder, TableError, read_table, write_part
from tests.analysis.synthetic import FOUNDING_CONTROL, FOUNDING_EAGLE, Run, World, write_sweep

CONTROL = Run(arm=FOUNDING_CONTROL, role="control")
EAGLE = Run(arm=FOUNDING_EAGLE)


def edit_blocks(root: Path, trial_id: str, **changes: Any) -> None:
    """Change columns of a trial's first block."""
    folder = ResultsFolder(root)
    path = folder.part("blocks", trial_id, 1)
    rows = pq.read_table(path).to_pylist()
    rows[0] |= changes
    write_part(folder, "blocks", rows, trial_id=trial_id, attempt=1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"accept_length": 0.0}, "accept_length: 0"),
        ({"accept_length": 0.58}, "accept_length: 0.58"),
        ({"accept_length": float("nan")}, "accept_length: nan"),
        ({"accept_length": 3.4, "accept_histogram": None}, "accept_length: 3.4 tokens a cycle, but 2 draft steps"),
        ({"tok_s": 3.9e-05}, "tok_s: tok_s 3.9e-05"),
        ({"tok_s": float("nan")}, "tok_s: tok_s nan"),
        ({"tok_s": None}, "tok_s: tok_s None"),
        ({"decode_s": 0.0}, "times: decode_s 0"),
        ({"decode_s": 0.01, "tok_s": 25_600.0}, "throughput: "),
        ({"cycle_ms": -1.0}, "times: cycle_ms -1"),
        ({"verify_ms": 3.0}, "phases: the phases sum to"),
        ({"suspect": "rank_cycles: cycles 4 in rank 0, 5 in rank 1"}, "rank_cycles: cycles 4"),
    ],
)
def test_a_suspect_block_is_dropped_counted_and_explained(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    root = write_sweep(tmp_path / "r", [CONTROL, EAGLE], World(num_blocks=4))
    edit_blocks(root, "t0001", **changes)
    results = load(root)
    assert results.blocks.filter(trial_id="t0001").height == 3
    [dropped] = results.excluded
    assert (dropped.what, dropped.trial_id, dropped.kind, dropped.count) == ("blocks", "t0001", "suspect", 1)
    assert reason in dropped.reason


def test_failed_invalid_and_not_effective_trials_are_excluded_with_their_reason(tmp_path: Path) -> None:
    failed = Run(
        arm=FOUNDING_EAGLE, status="failed", columns={"kind": "gpu_oom", "stage": "capture", "reason": "no memory"}
    )
    invalid = Run(arm=FOUNDING_EAGLE, status="invalid", columns={"reason": "pool 4 < 7"})
    root = write_sweep(tmp_path / "r", [CONTROL, EAGLE, failed, invalid])
    evidence = {"rank": 3, "setting": "env.NCCL_PROTO", "requested": "LL", "seen": None, "grade": "not_seen"}
    keys = {"sweep_id": "s1", "trial_id": "t0001", "attempt": 1}
    write_part(ResultsFolder(root), "evidence", [keys | evidence], trial_id="t0001", attempt=1)
    results = load(root)
    assert results.trials["trial_id"].to_list() == ["t0000"]
    kinds = {each.trial_id: (each.kind, each.reason) for each in results.excluded}
    assert kinds["t0001"][0] == "not_effective"
    assert "NCCL_PROTO" in kinds["t0001"][1]
    assert kinds["t0002"] == ("gpu_oom", "no memory (at capture)")
    assert kinds["t0003"] == ("invalid_config", "pool 4 < 7")


def test_what_arrived_and_is_read_by_nothing_still_takes_part(tmp_path: Path) -> None:
    root = write_sweep(tmp_path / "r", [CONTROL, EAGLE])
    evidence = {"rank": 0, "setting": "env.NCCL_MISSPELT", "requested": "1", "seen": "1", "grade": "not_seen"}
    keys = {"sweep_id": "s1", "trial_id": "t0001", "attempt": 1}
    write_part(ResultsFolder(root), "evidence", [keys | evidence], trial_id="t0001", attempt=1)
    assert load(root).trials["trial_id"].to_list() == ["t0000", "t0001"]


def test_only_the_last_attempt_counts_but_all_attempts_cost(tmp_path: Path) -> None:
    root = write_sweep(tmp_path / "r", [CONTROL, EAGLE])
    once = gpu_seconds(load(root))["weight_load"]
    folder = ResultsFolder(root)
    for table in ("trials", "blocks"):
        rows = [row | {"attempt": 2} for row in pq.read_table(folder.part(table, "t0001", 1)).to_pylist()]
        write_part(folder, table, rows, trial_id="t0001", attempt=2)
    results = load(root)
    assert results.trials.filter(trial_id="t0001")["attempt"].to_list() == [2]
    assert results.blocks.filter(trial_id="t0001").height == 12
    assert gpu_seconds(results)["weight_load"] == once + 8 * 250.0
    assert [each.kind for each in results.excluded] == ["superseded"]


def test_trials_switched_in_place_share_the_launch_of_the_one_before(tmp_path: Path) -> None:
    deeper = replace(FOUNDING_EAGLE, num_steps=3)
    root = write_sweep(tmp_path / "r", [CONTROL, EAGLE, Run(arm=deeper, relaunched=False), EAGLE, CONTROL])
    launches = load(root).trials["launch"].to_list()
    assert launches[1] == launches[2]
    assert len(set(launches)) == 4


def test_clocks_within_two_percent_of_the_controls_are_no_matter(tmp_path: Path) -> None:
    root = write_sweep(tmp_path / "r", [CONTROL, EAGLE, EAGLE], World(num_blocks=1))
    for trial_id, mhz in (("t0000", 1980.0), ("t0001", 1950.0), ("t0002", 2018.0)):
        edit_blocks(root, trial_id, sm_clock_mhz=mhz)
    assert not any("SM clock" in each for each in load(root).warnings)


def test_clocks_that_differ_and_mixed_versions_are_warned_of(tmp_path: Path) -> None:
    root = write_sweep(tmp_path / "r", [CONTROL, replace(EAGLE, columns={"engine_version": "2"})], World(num_blocks=1))
    edit_blocks(root, "t0000", sm_clock_mhz=2040.0)
    edit_blocks(root, "t0001", sm_clock_mhz=1687.0)
    warnings = " ".join(load(root).warnings)
    assert "2% away from the control's 2040 MHz in t0001 1687 MHz" in warnings
    assert "engine_version (1, 2)" in warnings


@pytest.mark.parametrize(
    "damage", ["missing", "no manifest", "empty manifest", "not json", "no trial", "torn", "newer"]
)
def test_a_folder_that_cannot_be_read_is_one_clear_line(tmp_path: Path, damage: str) -> None:
    root = write_sweep(tmp_path / "r", [CONTROL])
    folder = ResultsFolder(root)
    part = folder.part("trials", "t0000", 1)
    if damage == "missing":
        root = tmp_path / "nowhere"
    elif damage == "no manifest":
        folder.manifest.unlink()
    elif damage == "empty manifest":
        folder.manifest.write_text("{}")
    elif damage == "not json":
        folder.manifest.write_text("{")
    elif damage == "no trial":
        part.unlink()
    elif damage == "torn":
        part.write_bytes(part.read_bytes()[:200])
    else:
        table: pa.Table = read_table(folder, "trials")
        pq.write_table(table.replace_schema_metadata({"specsweep.schema_version": "99"}), part)
    with pytest.raises(TableError) as error:
        load(root)
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_what_servers_resolved_differently_is_a_warning(tmp_path: Path) -> None:
    wide = replace(CONTROL, columns={"effective": {"cuda_graph_max_bs": "160", "mem_fraction_static": "0.9"}})
    narrow = replace(EAGLE, columns={"effective": {"cuda_graph_max_bs": "48", "mem_fraction_static": "0.8"}})
    (said,) = [line for line in load(write_sweep(tmp_path / "r", [wide, narrow])).warnings if "resolved" in line]
    assert said.startswith("servers resolved cuda_graph_max_bs differently (160 in t0000; 48 in t0001)")
    swept = replace(narrow, columns={**narrow.columns, "args": {"cuda-graph-max-bs": "48"}})
    assert not [line for line in load(write_sweep(tmp_path / "s", [wide, swept])).warnings if "resolved" in line]


def test_an_inert_drafter_that_was_measured_is_a_warning(tmp_path: Path) -> None:
    inert = Run(arm=replace(FOUNDING_EAGLE, accept_length=1.0), status="pruned")
    (said,) = list(load(write_sweep(tmp_path / "r", [CONTROL, EAGLE, inert], World(prompt_sd=0.0))).warnings)
    assert said.startswith("hardly a draft token is accepted in t0002: cycle times hold")
