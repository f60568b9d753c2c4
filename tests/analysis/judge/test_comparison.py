"""Two sweeps of the same work: per-phase differences, and refusal of what is not comparable."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.__main__ import main
from analysis.data.load import load
from analysis.judge.comparison import NotComparableError, compare_sweeps
from analysis.show.comparison import markdown
from tests.analysis.synthetic import FOUNDING_CONTROL, FOUNDING_EAGLE, QUIET, Arm, Run, World, write_sweep

LAUNCHES = 4


def sweep(folder: Path, arms: Sequence[Arm], *, world: World = QUIET, columns: dict[str, Any] | None = None) -> Path:
    runs = [
        Run(arm=arm, role="candidate" if arm.num_steps else "control", columns=columns or {})
        for _ in range(LAUNCHES)
        for arm in arms
    ]
    return write_sweep(folder, runs, world, sweep_id="s1")


def slower(arm: Arm, factor: float) -> Arm:
    return replace(arm, verify_ms=arm.verify_ms * factor)


def test_a_slower_verify_is_worse_in_its_phase_and_fails_the_build(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = sweep(tmp_path / "a", [FOUNDING_CONTROL, FOUNDING_EAGLE], columns={"engine_version": "0.5.17"})
    b = sweep(
        tmp_path / "b",
        [FOUNDING_CONTROL, slower(FOUNDING_EAGLE, 1.1)],
        world=replace(QUIET, seed=7),
        columns={"engine_version": "0.5.23"},
    )
    found = compare_sweeps(load(a), load(b))
    eagle = next(pair for pair in found.pairs if "steps" in pair.label)
    assert eagle.verdict == "worse"
    verify = eagle.effects["verify_ms"]
    assert verify is not None
    assert verify.verdict == "worse"
    assert verify.effect == pytest.approx(0.1, abs=0.01)
    assert next(pair for pair in found.pairs if pair is not eagle).verdict == "equivalent"
    assert found.changes["engine_version"] == ("0.5.17", "0.5.23")
    assert main(["compare", str(a), str(b)]) == 0
    assert main(["compare", str(a), str(b), "--fail-on", "worse"]) == 1
    assert main(["compare", str(b), str(a), "--fail-on", "worse"]) == 0
    printed = capsys.readouterr().out
    assert "**Throughput of 2 configurations: 1 worse, 1 equivalent.**" in printed
    assert "engine version: `0.5.17` → `0.5.23`" in printed


def test_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (sweep(tmp_path / name, [FOUNDING_CONTROL]) for name in "ab")
    assert main(["compare", str(a), str(b), "--format", "json", "--fail-on", "undecided"]) == 0
    (pair,) = json.loads(capsys.readouterr().out)["pairs"]
    assert pair["verdict"] == "equivalent"
    assert pair["metrics"]["verify_ms"]["before"] is None


def test_single_launches_claim_no_small_difference(tmp_path: Path) -> None:
    folders = []
    for name, arm in (("a", FOUNDING_EAGLE), ("b", slower(FOUNDING_EAGLE, 1.05))):
        folders.append(write_sweep(tmp_path / name, [Run(arm=arm)], QUIET))
    (pair,) = compare_sweeps(*map(load, folders)).pairs
    assert pair.verdict == "undecided"


def test_another_drafter_is_matched_by_everything_else(tmp_path: Path) -> None:
    other = replace(FOUNDING_EAGLE, accept_length=2.2)
    a = sweep(tmp_path / "a", [FOUNDING_EAGLE], columns={"drafter": "old"})
    b = sweep(tmp_path / "b", [other], columns={"drafter": "new", "configuration_id": "another"})
    found = compare_sweeps(load(a), load(b))
    (pair,) = found.pairs
    assert pair.verdict == "better"
    assert found.changes["drafter"] == ("old", "new")


@pytest.mark.parametrize(
    ("engine", "columns", "spec", "told"),
    [
        ("sglang", {}, "", "engine kind"),
        ("simulated", {"acceptance": "pinned"}, "", "acceptance: measured and pinned"),
        ("simulated", {"num_gpus": 4}, "", "number of GPUs"),
        ("simulated", {}, "workload: {temperature: 0.6}", "sampling: temperature 0 and 0.6"),
        ("simulated", {}, "workload: {ignore_eos: false}", "sampling: ignore_eos true and false"),
    ],
)
def test_what_is_not_comparable_is_refused_with_the_reason(
    tmp_path: Path, engine: str, columns: dict[str, Any], spec: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    a = sweep(tmp_path / "a", [FOUNDING_CONTROL])
    b = write_sweep(tmp_path / "b", [Run(arm=FOUNDING_CONTROL, columns=columns)], QUIET, engine=engine)
    (a / "spec.yaml").write_text("workload: {blocks: 12}  # temperature: 0.9\n")
    (b / "spec.yaml").write_text(spec)
    with pytest.raises(NotComparableError, match=told):
        compare_sweeps(load(a), load(b))
    assert main(["compare", str(a), str(b)]) == 2
    assert told.split(":")[0] in capsys.readouterr().err


def test_sweeps_without_a_common_configuration_are_refused(tmp_path: Path) -> None:
    a, b = sweep(tmp_path / "a", [FOUNDING_CONTROL]), sweep(tmp_path / "b", [FOUNDING_EAGLE])
    with pytest.raises(NotComparableError, match="no configuration in common"):
        compare_sweeps(load(a), load(b))


def test_markdown_of_foreign_names_is_text(tmp_path: Path) -> None:
    bad = "`|<img onerror=x>[a](javascript:b)\n| @everyone | \x1b[2J"
    arms = [replace(FOUNDING_CONTROL, nccl=bad)]
    a, b = (sweep(tmp_path / name, arms, columns={"machine": bad + name}) for name in "ab")
    text = markdown(compare_sweeps(load(a), load(b)))
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    for line in text.splitlines():
        outside = "".join(line.split("`")[::2])
        assert "<img" not in outside
        assert "@everyone" not in outside
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1
