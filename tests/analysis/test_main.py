from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.__main__ import main
from sweeps.results.tables import ResultsFolder
from tests.analysis.synthetic import FOUNDING_CONTROL, FOUNDING_EAGLE, QUIET, SIX, STEPS, Run, interleaved, write_sweep

BREAK_EVEN = ["break-even", "--cycle-ms", "29.95", "--baseline-tok-s", "82.2"]


def test_break_even_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BREAK_EVEN, "--target-tok-s", "150"]) == 0
    printed = capsys.readouterr().out
    assert "2.46" in printed
    assert "with 16 draft steps: 0.78" in printed


def test_break_even_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BREAK_EVEN, "--target-tok-s", "150", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert round(found["break_even_accept_length"], 2) == 2.46
    assert round(found["conditional_accuracy_needed"], 2) == 0.78
    assert found["num_steps"] == 16
    assert found["reason"] is None


def test_break_even_out_of_reach_is_null_with_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BREAK_EVEN, "--target-tok-s", "150", "--num-steps", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["conditional_accuracy_needed"] is None
    assert "at most 3" in found["reason"]


@pytest.mark.parametrize("bad", [["--cycle-ms", "0"], ["--num-steps", "0"], ["--target-tok-s", "nan"]])
def test_break_even_of_nonsense_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str], bad: str) -> None:
    assert main([*BREAK_EVEN, *bad]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_verdict_as_json_has_what_programs_were_promised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_sweep(tmp_path / "r", interleaved([*STEPS, *SIX]), QUIET)
    assert main(["verdict", str(root), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["engine"] == "simulated"
    assert found["control"]["interval"][0] < found["control"]["tok_s"] < found["control"]["interval"][1]
    assert {"configuration", "tok_s", "interval", "launch_command"} <= set(found["best"])
    assert found["speculation_pays"]["verdict"] == "worse"
    wanted = {"draft_ms", "verify_ms", "extend_ms", "gap_ms", "cycle_ms", "verify_share", "accept_length"}
    assert all(wanted <= set(phases) for phases in found["phases"])
    assert all({"dimension", "metric", "effect", "interval", "verdict"} <= set(each) for each in found["factors"])
    assert found["excluded"] == []
    assert found["gpu_seconds"]["weight_load"] > 0


def test_the_page_stands_alone_and_says_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_sweep(tmp_path / "r", interleaved([*STEPS, *SIX]), QUIET)
    out = tmp_path / "deep" / "page.html"
    assert main(["report", str(root), "--out", str(out)]) == 0
    page = out.read_text(encoding="utf-8")
    assert "simulated, not measured" in page
    assert "Speculation does not pay here." in page
    assert "<title>s1 (engine: simulated)</title>" in page
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", page)
    assert page.count("* plotly.js v") == 1
    printed = capsys.readouterr().out
    assert "Speculation does not pay here" in printed
    assert str(out) in printed


def test_labels_from_a_spec_cannot_inject_markup(tmp_path: Path) -> None:
    evil = replace(FOUNDING_CONTROL, nccl="<script>alert(1)</script>")
    root = write_sweep(tmp_path / "r", interleaved([evil, FOUNDING_EAGLE], every=1), QUIET)
    assert main(["report", str(root)]) == 0
    assert "<script>alert" not in (root / "report.html").read_text(encoding="utf-8")


CONTROL, EAGLE = Run(arm=FOUNDING_CONTROL, role="control"), Run(arm=FOUNDING_EAGLE)
CRASHED = replace(EAGLE, status="failed", columns={"kind": "crash", "reason": "exit code -11"})


@pytest.mark.parametrize(
    ("runs", "num_blocks"),
    [
        ([CRASHED, CRASHED], 12),
        ([CONTROL, CONTROL], 12),
        ([EAGLE], 12),
        ([CONTROL, EAGLE, CONTROL], 1),
        ([replace(EAGLE, columns={"acceptance": "pinned"}), CONTROL], 12),
    ],
    ids=["nothing completed", "only a control", "only speculation", "one block", "pinned"],
)
def test_a_sweep_that_did_not_get_far_still_gives_an_honest_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], runs: list[Run], num_blocks: int
) -> None:
    root = write_sweep(tmp_path / "r", runs, replace(QUIET, num_blocks=num_blocks))
    assert main(["report", str(root)]) == 0
    assert "undecided" in capsys.readouterr().out
    assert "Whether speculation pays here is undecided." in (root / "report.html").read_text(encoding="utf-8")


def test_a_folder_without_one_ended_trial_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_sweep(tmp_path / "r", [])
    assert main(["report", str(root)]) == 2
    assert "no trial has ended yet" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report", "verdict"])
def test_what_is_no_results_folder_is_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, str(tmp_path / "nowhere")]) == 2
    assert main([command, str(tmp_path)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert all(line.startswith("error: ") for line in errors)


def test_a_page_that_cannot_be_written_is_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_sweep(tmp_path / "r", [Run(arm=FOUNDING_CONTROL, role="control")])
    assert main(["report", str(root), "--out", str(ResultsFolder(root).manifest / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err
