from __future__ import annotations

from dataclasses import replace

import pytest

from sweeps.engines.base import KernelTime
from sweeps.search.cycle_model.equivalent_sets import find_representatives, where_nccl_acts
from sweeps.search.observations import Observation
from sweeps.spec.reading import parse_spec
from sweeps.spec.space import Configuration, Space
from tests.sweeps.stub_engine import plan

SPEC = """
sweep: twins
engine: {kind: simulated, machine: h200-nvlink-x8}
drafters: {mine: kimi-k2.5-eagle3}
nccl_sets: {ll: {NCCL_PROTO: LL}, simple: {NCCL_PROTO: Simple}}
search:
  num_steps: [1, 3]
  nccl: [default, ll, simple]
  args: {disable-custom-all-reduce: [false, true]}
"""
SPACE = Space(parse_spec(SPEC, source="twins"))
MEMBERS = SPACE.configurations()
NCCL_REDUCES = KernelTime(
    phase="verify", kind="communication", kernel="ncclDevKernel_AllReduce_Sum", us_per_cycle=600, calls_per_cycle=49
)


def member(steps: int, nccl: str, *, by_nccl: bool) -> Configuration:
    return next(
        each
        for each in MEMBERS
        if (each.num_steps, each.nccl_set, dict(each.args)["disable-custom-all-reduce"]) == (steps, nccl, by_nccl)
    )


CUSTOM = member(3, "ll", by_nccl=False)


OWN_REDUCES = replace(NCCL_REDUCES, kernel="{anonymous}::all_reduce_kernel")


def seen(
    configuration: Configuration,
    all_reduce: str | None,
    kernels: tuple[KernelTime, ...] = (),
    *,
    nccl_unread: bool = False,
) -> Observation:
    return Observation(
        trial=plan(configuration, SPACE),
        status="completed",
        all_reduce=all_reduce,
        kernels=kernels,
        nccl_unread=nccl_unread,
    )


def groups(*observations: Observation, failed: frozenset[Configuration] = frozenset()) -> set[frozenset[Configuration]]:
    rows = find_representatives(MEMBERS, where_nccl_acts(MEMBERS, observations), failed=failed).tolist()
    return {frozenset(MEMBERS[place] for place, row in enumerate(rows) if row == each) for each in rows}


ALONE = {frozenset({each}) for each in MEMBERS}


@pytest.mark.parametrize("backend", ["custom", "flashinfer", "none"])
def test_where_something_else_all_reduces_sets_are_one_thing_at_each_step_count(backend: str) -> None:
    found = groups(seen(CUSTOM, backend))
    for steps in (1, 3):
        assert frozenset(member(steps, nccl, by_nccl=False) for nccl in ("default", "ll", "simple")) in found
        assert {frozenset({member(steps, nccl, by_nccl=True)}) for nccl in ("default", "ll", "simple")} <= found


@pytest.mark.parametrize(
    "observations",
    [
        [],
        [seen(CUSTOM, None)],
        [seen(CUSTOM, "nccl")],
        [seen(CUSTOM, "nccl_symmetric")],
        [seen(CUSTOM, "custom"), seen(member(1, "default", by_nccl=False), "nccl")],
        [seen(CUSTOM, "custom", (NCCL_REDUCES,))],
    ],
    ids=[
        "nothing launched",
        "nobody knows",
        "NCCL",
        "NCCL's symmetric kernels",
        "launches disagree",
        "the trace differs",
    ],
)
def test_elsewhere_each_set_speaks_for_itself(observations: list[Observation]) -> None:
    assert groups(*observations) == ALONE


def test_a_trace_outranks_what_launches_without_one_state() -> None:
    traced = seen(CUSTOM, "nccl", (OWN_REDUCES,))
    found = groups(traced, seen(member(1, "default", by_nccl=False), "nccl"))
    assert frozenset(member(3, nccl, by_nccl=False) for nccl in ("default", "ll", "simple")) in found


def test_a_set_that_nccl_does_not_read_is_the_default_and_no_other_is() -> None:
    misspelt = member(3, "simple", by_nccl=True)
    found = groups(seen(misspelt, "nccl", nccl_unread=True))
    for steps in (1, 3):
        assert frozenset(member(steps, nccl, by_nccl=True) for nccl in ("default", "simple")) in found
        assert frozenset({member(steps, "ll", by_nccl=True)}) in found
        assert {frozenset({member(steps, nccl, by_nccl=False)}) for nccl in ("default", "ll", "simple")} <= found


def test_the_default_stands_for_an_unread_set_whatever_their_order() -> None:
    backwards = MEMBERS[::-1]
    told = [seen(member(3, "simple", by_nccl=True), "nccl", nccl_unread=True)]
    rows = find_representatives(backwards, where_nccl_acts(backwards, told)).tolist()
    assert backwards[rows[backwards.index(member(1, "simple", by_nccl=True))]] == member(1, "default", by_nccl=True)


def test_an_unread_set_without_a_default_that_works_speaks_for_itself() -> None:
    broken = member(3, "default", by_nccl=True)
    found = groups(seen(member(1, "simple", by_nccl=True), "nccl", nccl_unread=True), failed=frozenset({broken}))
    assert {frozenset({broken}), frozenset({member(3, "simple", by_nccl=True)})} <= found


def test_a_set_that_failed_is_no_stand_in_and_has_none() -> None:
    broken = member(3, "default", by_nccl=False)
    found = groups(seen(CUSTOM, "custom"), failed=frozenset({broken}))
    assert frozenset({broken}) in found
    assert frozenset({CUSTOM, member(3, "simple", by_nccl=False)}) in found


def test_a_stand_in_is_a_member_of_its_group() -> None:
    rows = find_representatives(MEMBERS, where_nccl_acts(MEMBERS, [seen(CUSTOM, "custom")]))
    assert (rows[rows] == rows).all()
    for place, row in enumerate(rows.tolist()):
        assert replace(MEMBERS[place], nccl_set="", nccl_env=()) == replace(MEMBERS[row], nccl_set="", nccl_env=())
