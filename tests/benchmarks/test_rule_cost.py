"""What a rule of the search wins: the same sweeps with it and without."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.landscapes import Landscape
from benchmarks.rule_cost import COMMON, MEANT_FOR, REFUSED, judged, landscape_of, measure
from sweeps.search.cycle_model.rules import RULES, Rules


def row(**changes: Any) -> dict[str, Any]:
    same: dict[str, Any] = {"landscape": "x", "seeds": 40, "right_s_ratio": [1.0, 1.0], "ended_s_ratio": [0.9, 1.2]}
    return {**same, "changed": 3, "wrong_certificate": [1, 2], "best_pruned": [0, 0], "not_right": [3, 3], **changes}


def test_every_rule_has_landscapes_that_it_was_made_for() -> None:
    assert set(MEANT_FOR) == set(RULES)


def test_a_rule_can_be_switched_off_alone() -> None:
    assert Rules().without("settling") == Rules(settling=False)
    with pytest.raises(ValueError, match=r"wanted one of .*settling.*, got 'luck'"):
        Rules().without("luck")


def test_a_rule_pays_if_something_is_worse_without_it() -> None:
    assert not judged([row(), row()])["pays"]
    slower = judged([row(), row(landscape="y", ended_s_ratio=[1.1, 1.3])])
    assert slower["pays"]
    assert slower["because"] == ["y: seconds until the stop 1.10 to 1.30 times without it"]
    assert judged([row(wrong_certificate=[0, 9])])["because"] == [
        "x: a wrong certificate in 9 of 40 sweeps without it, 0 with it"
    ]
    assert not judged([row(best_pruned=[9, 0])])["pays"], "worse with the rule"


def test_the_same_seeds_run_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.rule_cost.COMMON", ("h200-sets",))
    monkeypatch.setattr("benchmarks.rule_cost.MEANT_FOR", {"equivalent_sets": ()})
    (found,) = measure(("equivalent_sets",), 2)["equivalent_sets"]["rows"]
    assert found["changed"] == 2
    assert found["ended_s_without"] > 1.5 * found["ended_s_with"]


def test_the_landscape_that_refuses_sets_does() -> None:
    landscape = landscape_of(REFUSED)
    assert isinstance(landscape, Landscape)
    assert "nvls" in landscape.spec.search.nccl
    assert not {"nvls", "collnet"} & {member.nccl_set for member in landscape.truth(0)}
    assert REFUSED not in COMMON
