from __future__ import annotations

import numpy as np
import pytest

from sweeps.search.cycle_model.accept_length import LengthModel
from sweeps.search.cycle_model.terms import TERMS
from sweeps.search.observations import Observations
from sweeps.spec.reading import parse_spec
from sweeps.spec.space import Space
from tests.sweeps.worlds import SPEC, observed, row, survival

TREES = SPEC.replace("num_steps: [0, 1, 2, 3, 5, 7]", "num_steps: [0, 3, 5]\n  eagle_topk: [1, 4]")


def model_of(spec: str) -> tuple[Space, LengthModel]:
    space = Space(parse_spec(spec, source="model"))
    rows = {member: number for number, member in enumerate(space.configurations())}
    return space, LengthModel(space, rows, TERMS["accept_length"])


def launched(observations: Observations) -> dict[str, int]:
    return {seen.trial.trial_id: number for number, seen in enumerate(observations)}


def test_one_chain_predicts_every_smaller_step_count() -> None:
    space, model = model_of(SPEC)
    seen = observed(space, [(0, "default"), (7, "default")])
    assert model.fit(list(seen), launched(seen)) is None
    lengths = model.draw(256, np.random.default_rng(0))
    for steps in (2, 3, 5):
        own = lengths[row(space, steps, "default")]
        assert own.mean() == pytest.approx(1.0 + sum(survival(steps)), rel=0.02)
        assert own.std() < 0.05
    assert (lengths[row(space, 0, "default")] == 1.0).all()


def test_a_contradiction_is_told_once_and_remembered() -> None:
    space, model = model_of(SPEC)
    wanted = [(0, "default"), (7, "default"), (7, "a"), (5, "a")]
    seen = observed(space, wanted, scale=lambda c: 0.9 if c.nccl_set == "a" else 1.0)
    found = model.fit(list(seen), launched(seen))
    assert found is not None
    assert "accept_length differs between values of nccl" in found.detail
    assert model.fit(list(seen), launched(seen)) is None
    lengths = model.draw(256, np.random.default_rng(0))
    for nccl, scale in (("default", 1.0), ("a", 0.9)):
        expected = 1.0 + sum(survival(7, scale))
        assert lengths[row(space, 7, nccl)].mean() == pytest.approx(expected, rel=0.04)


def test_a_tree_never_measured_is_less_sure_than_a_chain_of_its_depth() -> None:
    space, model = model_of(TREES)
    seen = observed(space, [(0, "default"), (5, "default")])
    model.fit(list(seen), launched(seen))
    spreads = {
        member.is_chain: np.log(own).std()
        for member, own in zip(space.configurations(), model.draw(256, np.random.default_rng(0)), strict=True)
        if (member.num_steps, member.nccl_set) == (3, "default")
    }
    assert spreads[False] > 2.0 * spreads[True]


def test_a_length_over_every_block_is_its_own_and_nothing_is_told_before_a_fit() -> None:
    space, model = model_of(SPEC)
    seen = observed(space, [(0, "default"), (7, "default")])
    control, chain = seen
    assert model.adjusted(chain) is None
    model.fit(list(seen), launched(seen))
    assert model.adjusted(control) is None
    adjusted = model.adjusted(chain)
    assert adjusted is not None
    assert adjusted[0] == pytest.approx(np.log(1.0 + sum(survival(7))), abs=0.05)
