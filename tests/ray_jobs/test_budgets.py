from __future__ import annotations

import argparse

import pytest

from ray_jobs.budgets import add_budget_options, with_budget
from ray_jobs.run_sweep import main
from sweeps.spec.document import SpecError
from sweeps.spec.reading import parse_spec

SPEC = """
sweep: s
engine: {kind: simulated, machine: h200-nvlink-x8}
search: {num_steps: [0, 1, 2]}
drafters: {kimi-k2.5-eagle3: org/drafter}
budget: {trials: 9, wall_hours: 2}
"""


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_budget_options(parser)
    return parser.parse_args(words)


def test_what_the_command_line_gives_stands_for_the_specs_own() -> None:
    spec = parse_spec(SPEC, source="s.yaml")

    assert with_budget(spec, options()) == spec
    found = with_budget(spec, options("--trials", "3", "--gpu-hours", "1.5")).budget
    assert (found.trials, found.gpu_hours, found.wall_hours) == (3, 1.5, 2)


@pytest.mark.parametrize(
    "words", [("--trials", "0"), ("--gpu-hours", "-1"), ("--wall-hours", "inf"), ("--gpu-hours", "nan")]
)
def test_a_budget_of_nothing_is_refused(words: tuple[str, str]) -> None:
    with pytest.raises(SpecError, match=f"{words[0]}: wanted a positive number"):
        with_budget(parse_spec(SPEC, source="s.yaml"), options(*words))


def test_the_dry_run_estimates_within_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["founding_case", "--dry-run", "--trials", "4"]) == 0
    few = capsys.readouterr().out
    assert "at most 6 trials" in few or "at most 7 trials" in few
    assert main(["founding_case", "--dry-run", "--gpu-hours", "0.5"]) == 0
    assert "budget.gpu_hours ends the sweep at 0.5 GPU hours" in capsys.readouterr().out
    assert main(["founding_case", "--dry-run", "--trials", "0"]) == 2
