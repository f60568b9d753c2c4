from __future__ import annotations

import pytest

from sweeps.search.cycle_model.terms import INFLUENCE, design, influence_of, tree_depth
from sweeps.spec.document import SpecError
from sweeps.spec.space import Configuration, Space
from tests.sweeps.stub_engine import stub_spec


def members() -> tuple[Configuration, ...]:
    return Space(stub_spec()).configurations()


def levels(factor: str, **overrides: list[str]) -> set[str]:
    return {level for term in influence_of(overrides)[factor] for level in term.levels}  # type: ignore[index]


def test_accept_length_does_not_depend_on_nccl_unless_the_spec_says_so() -> None:
    assert "nccl" not in levels("accept_length")
    assert "nccl" in levels("forward")
    assert "nccl" in levels("accept_length", accept_length=["nccl", "eagle_topk"])


def test_an_override_takes_dimensions_away() -> None:
    assert "nccl" not in levels("forward", forward=["num_draft_tokens", "args"])
    assert {"tokens", "args"} <= levels("forward", forward=["num_draft_tokens", "args"])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"verify": ["nccl"]}, "no factor 'verify'; there are forward, draft, rest, accept_length"),
        ({"forward": ["topk"]}, "influence.forward: no dimension 'topk'; there are num_steps"),
    ],
)
def test_an_override_of_something_unknown_names_the_choices(overrides: dict[str, list[str]], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        influence_of(overrides)


def test_equal_settings_have_equal_columns_and_one_level_has_none() -> None:
    own = design(INFLUENCE["forward"], members())
    assert own.columns.shape[0] == len(members())
    assert set(own.nccl) == {"default", "ring"}
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
