from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from analysis.data.load import load
from analysis.judge.verdict import ControlRun, SweepVerdict, verdict
from analysis.show.nodes import nodes_apart
from analysis.show.report import write_report
from tests.analysis.synthetic import STEPS, Run, interleaved, write_sweep


def control(node: str, tok_s: float) -> ControlRun:
    return ControlRun(trial_id="k0000", node=node, at_s=0.0, tok_s=tok_s)


@pytest.mark.parametrize("runs", [[], [control("a", 80.0)], [control("a", 80.0), control("a", 60.0)]])
def test_one_node_differs_from_nothing(runs: list[ControlRun]) -> None:
    assert nodes_apart(runs) == ""


def test_nodes_within_the_margin_are_told_as_such() -> None:
    assert nodes_apart([control("a", 80.0), control("b", 80.4)]) == (
        "The controls of the 2 nodes are within 0.5% of each other."
    )


def sweep_over_two_nodes(root: Path) -> Path:
    """Every configuration on both nodes; the second is 3 % slower."""
    runs: list[Run] = []
    for each in interleaved(STEPS):
        runs += [each, replace(each, node="node<b>", slow=0.03)]
    return write_sweep(root, runs)


def test_the_page_names_the_slow_node_and_the_comparisons_do_without_it(tmp_path: Path) -> None:
    judged = verdict(load(sweep_over_two_nodes(tmp_path)))
    said = nodes_apart(judged.control_runs)
    assert "Nodes differ: the control reached " in said
    assert "tok/s on node<b> (" in said
    assert "less than on node-a (" in said
    gap = float(said.partition(" runs), ")[2].partition("%")[0])
    assert 2.0 < gap < 4.0
    write_report(judged, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Nodes differ: the control reached " in page
    assert "node&lt;b&gt;" in page
    alone = verdict(load(write_sweep(tmp_path / "one", interleaved(STEPS))))

    def verdicts(of: SweepVerdict) -> dict[str, str]:
        return {side.configuration_id: side.against_control.verdict for side in of.sides if side.against_control}

    assert verdicts(judged) == verdicts(alone)
    assert set(verdicts(alone).values()) == {"worse"}
