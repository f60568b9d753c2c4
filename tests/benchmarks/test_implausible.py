"""A few lies of each kind, told by a real process; the benchmark tells all."""

from __future__ import annotations

from pathlib import Path

from benchmarks.implausible import LIES, tell
from sweeps.results.plausible import RULES

FEW = ("answers_half", "is_buffered", "loops", "html", "cycles_too_short", "rank_misses_a_cycle", "half_cycles")


def test_lies_are_caught_by_name(tmp_path: Path) -> None:
    told = tell([lie for lie in LIES if lie.name in FEW], tmp_path)
    assert len(told) == len(FEW)
    assert [each.lie.name for each in told if not each.is_caught] == []


def test_there_are_forty_lies_and_each_has_its_own_name() -> None:
    assert len({lie.name for lie in LIES}) == len(LIES) >= 40
    untold = {rule.name for rule in RULES} - {lie.caught_by for lie in LIES}
    assert untold == {"tok_s", "accept_length", "accept_histogram", "latency", "foreign_process"}
