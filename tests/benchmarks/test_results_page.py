"""The page of results: every figure under its own heading."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.record import figures_of
from benchmarks.results_page import PAGE, _medians, _table


def landscape(**medians: float | None) -> dict[str, Any]:
    numbers = {name: {"median_s": median} for name, median in medians.items()}
    return {"configurations": 3, "oracle_s": 1.0, "grid_relaunch_s": 9.0, "policies": {"relaunch": numbers}}


def test_a_policy_that_a_landscape_lacks_leaves_its_cell_empty() -> None:
    head, rows = _medians({"a": landscape(random=5.0, cycle_model=2.0), "b": landscape(tpe=4.0)}, "relaunch")
    assert head[-3:] == ("random", "tpe", "cycle_model")
    assert rows == [("a", 3, 1.0, 9.0, 5.0, None, 2.0), ("b", 3, 1.0, 9.0, None, 4.0, None)]


def test_rows_of_another_length_than_the_head_are_refused() -> None:
    with pytest.raises(AssertionError, match="other lengths"):
        _table(("a", "b"), [(1, 2), (1,)])


def test_the_page_holds_what_was_recorded() -> None:
    figures: Any = figures_of("search_cost")
    wanted = figures["landscapes"]["h200-sets"]["policies"]["switch_in_place"]
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    head = next(line for line in lines if line.startswith("| landscape | configurations | oracle"))
    row = next(line for line in lines if line.startswith("| h200-sets | 64"))
    shown = dict(zip(head.split(" | "), row.split(" | "), strict=True))
    assert shown["gp"] == "-"
    assert shown["cycle_model"] == f"{wanted['cycle_model']['median_s']:,.0f}"
