from __future__ import annotations

import pytest

from sweeps.search.cycle_model.terms import TERMS, WIDENED, design, tree_depth
from sweeps.spec.space import Configuration, Space
from tests.sweeps.stub_engine import stub_spec


def members() -> tuple[Configuration, ...]:
    return Space(stub_spec()).configurations()


def test_accept_length_does_not_depend_on_nccl_until_a_measurement_says_so() -> None:
    assert not any("nccl" in term.levels for term in TERMS["accept_length"])
    assert any("nccl" in term.levels for term in WIDENED["accept_length"])
    assert any("nccl" in term.levels for term in TERMS["forward"])


def test_equal_settings_have_equal_columns_and_one_level_has_none() -> None:
    own = design(TERMS["forward"], members())
    assert own.columns.shape[0] == len(members())
    names = {term.name for term in own.terms}
    assert "nccl" in names
    assert not any("args" in name for name in names)  # the space has none
    for term_index, term in enumerate(own.terms):
        if term.levels == ("nccl",) and not term.lines:
            assert (own.columns[:, own.group == term_index].sum(axis=1) == 1).all()


def test_a_tree_without_the_tokens_for_its_steps_is_shallower() -> None:
    depths = {(c.num_steps, c.eagle_topk): tree_depth(c) for c in members() if c.speculates}
    assert depths[3, 1] == 3
    assert depths[3, 2] == pytest.approx(3 / 2**0.5)
