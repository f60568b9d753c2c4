"""A whole sweep on the real engine, from the command line to the tables: Ray Tune, Optuna's pruner, SGLang, Parquet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
import yaml

from sweeps.results.tables import ResultsFolder, read_table
from tests.engine.conftest import ROOT

pytestmark = pytest.mark.engine

DRAFTERS = {"EAGLE3": ".venv-engine/models/eagle3", "STANDALONE": ".venv-engine/models/standalone"}


def run_sweep(document: dict[str, Any], algorithm: str, folder: Path) -> tuple[ResultsFolder, str]:
    engine = {**document["engine"], "algorithm": algorithm}
    path = folder / "spec.yaml"
    path.write_text(
        yaml.safe_dump({**document, "engine": engine, "drafters": {"tiny": DRAFTERS[algorithm]}}), encoding="utf-8"
    )
    results = folder / "results"
    done = subprocess.run(
        [sys.executable, "-m", "ray_jobs.run_sweep", str(path), "--results", str(results)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return ResultsFolder(results), done.stdout


@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
def test_sweep_over_steps_and_topk(algorithm: str, document: dict[str, Any], tmp_path: Path) -> None:
    folder, output = run_sweep(document, algorithm, tmp_path)

    trials = read_table(folder, "trials")
    candidates = trials.filter(pc.equal(trials["role"], "candidate")).to_pylist()
    measured = {(row["num_steps"], row["eagle_topk"]) for row in candidates}
    assert measured == {(num_steps, topk) for num_steps in (1, 2, 3) for topk in (1, 2)}
    assert {row["status"] for row in trials.to_pylist()} <= {"completed", "pruned"}
    assert all(row["reason"] for row in candidates if row["status"] == "pruned")
    assert "control" in trials["role"].to_pylist()
    assert {(row["engine"], row["engine_version"]) for row in candidates} == {("sglang", "0.5.21")}
    for row in candidates:
        assert row["effective"] is not None
        assert dict(row["effective"])["num_steps"] == str(row["num_steps"])
    relaunched = sorted(row["relaunched"] for row in candidates)
    in_place = [False] * 5 + [True] if algorithm == "EAGLE3" else [True] * 6
    assert relaunched == in_place, "only EAGLE has states; one server holds both values of top-k, as the spec asks"
    for row in candidates:
        assert not [word for word in row["command"] if word.startswith(str(ROOT))], "a command for any machine"
    _texts_agree(folder)
    _acceptance_is_of(algorithm, folder)
    assert "results:" in output


def test_one_server_serves_every_chain_at_every_concurrency_and_its_anchors(
    document: dict[str, Any], tmp_path: Path
) -> None:
    changed = {
        "search": {"num_steps": [1, 3]},
        "workload": {**document["workload"], "concurrency": [1, 3]},
        "control": {**document["control"], "in_server": True},
        "study": {**document["study"], "pruner": {"name": "none"}},
    }

    folder, _ = run_sweep({**document, **changed}, "EAGLE3", tmp_path)

    chains = {row["trial_id"]: row for row in read_table(folder, "trials").to_pylist() if row["num_steps"]}
    assert sorted(row["relaunched"] for row in chains.values()) == [False, True]
    blocks = read_table(folder, "blocks").to_pylist()
    for trial_id in chains:
        own = [(row["block_index"], row["concurrency"]) for row in blocks if row["trial_id"] == trial_id]
        assert own == [(index, concurrency) for index in range(3) for concurrency in (1, 3)]
    cycles = read_table(folder, "cycles")
    for concurrency in (1, 3):
        sizes = cycles.filter(pc.equal(cycles["concurrency"], concurrency))["batch_size"].to_pylist()
        assert max(sizes) == concurrency
    first, second = sorted(chains, key=lambda trial_id: chains[trial_id]["started_s"])
    anchors = read_table(folder, "anchors").sort_by("started_s").to_pylist()
    assert [(row["trial_id"], row["place"]) for row in anchors] == [
        (first, "before"),
        (first, "after"),
        (second, "after"),
    ]
    assert {row["accept_length"] for row in anchors} == {1.0}, "the target alone, through verify"
    assert len({row["output_hash"] for row in anchors}) == 1
    _texts_agree(folder)


def _texts_agree(folder: ResultsFolder) -> None:
    """Greedy text of a prompt is the same in every trial at its concurrency, the control included."""
    texts: dict[tuple[str, int], set[str]] = {}
    for row in read_table(folder, "requests").to_pylist():
        texts.setdefault((row["prompt_id"], row["concurrency"]), set()).add(row["output_hash"])
    assert texts
    assert all(len(hashes) == 1 for hashes in texts.values())


def _acceptance_is_of(algorithm: str, folder: ResultsFolder) -> None:
    blocks = read_table(folder, "blocks").to_pylist()
    lengths = [row["accept_length"] for row in blocks if row["accept_length"] is not None]
    mean = sum(lengths) / len(lengths)
    assert (mean > 1.1) == (algorithm == "STANDALONE")
    cycles = read_table(folder, "cycles")
    assert cycles.num_rows >= len(blocks)
    assert set(cycles["timer_kind"].to_pylist()) == {"host"}
