from __future__ import annotations

import dataclasses
import pickle
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.results.tables import DRAFTING_COLUMNS
from sweeps.spec.binding import binds_at_start
from sweeps.spec.document import SpecError
from sweeps.spec.model import EngineSpec, SearchSpec, StatesSpec, SweepSpec
from sweeps.spec.names import DRAFTING
from sweeps.spec.space import TREE_DRAFT_TOKENS, InvalidConfigurationError, Space, candidate_pool

SETS = {
    "six": {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"},
    "six-again": {"NCCL_ALGO": "ring", "NCCL_PROTO": "ll"},
    "nothing": {},
    "tree": {"NCCL_ALGO": "allreduce:tree"},
}


def space_of(*, switch_in_place: bool = True, **search: Any) -> Space:
    return Space(
        SweepSpec(
            sweep="t",
            engine=EngineSpec(kind="simulated", machine="m", switch_in_place=switch_in_place),
            search=SearchSpec(**search),
            nccl_sets=SETS,
            drafters={"first": "a", "second": "b"},
        )
    )


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    def some(values: list[Any], *, least: int = 1) -> tuple[Any, ...]:
        return tuple(draw(st.lists(st.sampled_from(values), unique=True, min_size=least, max_size=3)))

    return space_of(
        switch_in_place=draw(st.booleans()),
        num_steps=some([0, 1, 2, 3, 5, 7]),
        eagle_topk=some([1, 2, 4, 8]),
        num_draft_tokens=some([2, 4, 8, 16], least=0),
        drafter=some(["first", "second"], least=0),
        nccl=some(["default", *SETS]),
        args={"attention-backend": some(["fa3", "triton"])} if draw(st.booleans()) else {},
        env={"SGLANG_X": some(["0", "1"])} if draw(st.booleans()) else {},
    )


@settings(max_examples=150)
@given(spaces())
def test_every_suggestion_is_one_configuration_or_has_a_reason(space: Space) -> None:
    configurations = space.configurations()
    reasons = {str(dict(suggestion)) for suggestion, _ in space.invalid()}
    assert len(set(configurations)) == len(configurations)
    assert len({one.configuration_id for one in configurations}) == len(configurations)
    for suggestion in space.suggestions():
        if str(dict(suggestion)) in reasons:
            with pytest.raises(InvalidConfigurationError):
                space.resolve(suggestion)
        else:
            assert space.resolve(suggestion) in configurations


@settings(max_examples=150)
@given(spaces())
def test_a_configuration_and_its_suggestion_are_inverse(space: Space) -> None:
    for configuration in (*space.configurations(), space.control):
        assert space.resolve(space.suggestion(configuration)) == configuration
    assert set(space.suggestion(space.control)) == {dimension.name for dimension in space.dimensions}


@settings(max_examples=150)
@given(spaces())
def test_configurations_keep_the_rules_of_drafting(space: Space) -> None:
    for one in space.configurations():
        if not one.speculates:
            assert (one.eagle_topk, one.num_draft_tokens, one.drafter) == (None, None, None)
        else:
            assert one.eagle_topk is not None
            assert one.num_draft_tokens is not None
            assert one.drafter in {"first", "second"}
            assert candidate_pool(one.num_steps, one.eagle_topk) >= one.num_draft_tokens - 1
            assert one.num_draft_tokens >= one.num_steps + 1
            assert one.eagle_topk > 1 or one.num_draft_tokens == one.num_steps + 1


@settings(max_examples=150)
@given(spaces())
def test_anchors_add_the_target_alone_to_every_chain_that_is_switched_in_place(space: Space) -> None:
    control = replace(space.spec.control, in_server=True)
    switching = replace(space.spec, engine=replace(space.spec.engine, switch_in_place=True))
    space, anchored = Space(switching), Space(replace(switching, control=control))
    for one in space.configurations():
        kept = space.states(one)
        members = kept or (one,)
        wanted = {*members, *(each.target_alone() for each in members)} if one.is_chain else set(kept)
        assert set(anchored.states(one)) == wanted
        assert anchored.launch_key(one) == space.launch_key(one)


@given(spaces())
def test_states_are_what_one_server_can_switch_between(space: Space) -> None:
    held = space.held
    for one in space.configurations():
        states = space.states(one)
        assert not states or one in states
        for other in space.configurations():
            shared = space.launch_key(one) == space.launch_key(other)
            assert shared == (other in states or other == one)
            if not shared:
                continue
            assert (one.speculates, one.drafter) == (other.speculates, other.drafter)
            assert held.top_k or one.eagle_topk == other.eagle_topk
            assert held.nccl or one.nccl_env == other.nccl_env
            switches = held.steps if one.is_chain else held.trees
            assert switches or (one.num_steps, one.num_draft_tokens) == (other.num_steps, other.num_draft_tokens)


def test_no_speculation_collapses_drafting() -> None:
    space = space_of(num_steps=(0,), eagle_topk=(1, 4), num_draft_tokens=(8, 16), drafter=("first", "second"))
    assert [one.label for one in space.configurations()] == ["no speculation, nccl default"]


def test_topk_one_derives_draft_tokens_whatever_is_suggested() -> None:
    space = space_of(num_steps=(3,), num_draft_tokens=(8, 16))
    assert space.resolve({"num_steps": 3, "num_draft_tokens": 16}).num_draft_tokens == 4
    assert len(space.configurations()) == 1


@pytest.mark.parametrize(
    ("num_steps", "eagle_topk", "num_draft_tokens", "pool"),
    [(1, 4, 8, "pool 4 < 7"), (2, 2, 8, "pool 6 < 7"), (3, 2, 8, None), (2, 4, 22, "pool 20 < 21"), (2, 4, 21, None)],
)
def test_pool_rule_names_its_numbers(num_steps: int, eagle_topk: int, num_draft_tokens: int, pool: str | None) -> None:
    space = space_of(num_steps=(num_steps,), eagle_topk=(eagle_topk,), num_draft_tokens=(num_draft_tokens,))
    if pool is None:
        assert space.configurations()[0].num_draft_tokens == num_draft_tokens
    else:
        assert space.configurations() == ()
        assert pool in space.invalid()[0][1]


@pytest.mark.parametrize(
    ("num_steps", "num_draft_tokens", "reason"), [(5, 5, "5 < 6"), (5, 6, None), (7, 4, "4 < 8"), (3, 4, None)]
)
def test_a_tree_holds_a_whole_accepted_path(num_steps: int, num_draft_tokens: int, reason: str | None) -> None:
    space = space_of(num_steps=(num_steps,), eagle_topk=(4,), num_draft_tokens=(num_draft_tokens,))
    if reason is None:
        assert space.configurations()[0].num_draft_tokens == num_draft_tokens
    else:
        assert space.configurations() == ()
        assert (
            f"draft tokens {num_draft_tokens}: {reason} (a whole accepted path does not fit)" in space.invalid()[0][1]
        )


@given(st.integers(1, 20), st.integers(2, 10))
def test_absent_draft_tokens_fill_the_tree_and_always_fit(num_steps: int, eagle_topk: int) -> None:
    (one,) = space_of(num_steps=(num_steps,), eagle_topk=(eagle_topk,)).configurations()
    assert one.num_draft_tokens is not None
    assert num_steps + 1 <= one.num_draft_tokens <= max(TREE_DRAFT_TOKENS, num_steps + 1)


def test_nccl_names_with_the_same_variables_are_one_configuration() -> None:
    space = space_of(nccl=("six-again", "six", "nothing", "default", "tree"))
    assert [one.nccl_set for one in space.configurations()] == ["six-again", "default", "tree"]
    assert space.configurations()[0].nccl_env == (("NCCL_ALGO", "Ring"), ("NCCL_PROTO", "LL"))


def test_control_is_outside_the_space_where_the_spec_does_not_ask_for_it() -> None:
    space = space_of(num_steps=(2, 3), nccl=("six",), args={"attention-backend": ("triton", "fa3")})
    assert space.control not in space.configurations()
    assert space.control.label == "no speculation, nccl default, attention-backend triton"
    assert space.states(space.control) == ()


def test_launch_key_holds_what_binds_at_start() -> None:
    space = space_of(num_steps=(0, 1, 2), eagle_topk=(1, 2), nccl=("default", "six"))
    assert len({space.launch_key(one) for one in space.configurations()}) == 3, "none, top-k 1, top-k 2"
    chain = space.resolve({"num_steps": 2, "eagle_topk": 1, "nccl": "six"})
    assert {(one.num_steps, one.nccl_set) for one in space.states(chain)} == set(product((1, 2), ("default", "six")))


@pytest.mark.parametrize(
    ("states", "keys"),
    [
        (StatesSpec(), 3),
        (StatesSpec(trees=False), 4),
        (StatesSpec(nccl=False), 6),
        (StatesSpec(nccl=False, trees=False), 2 * (1 + 1 + 2)),
    ],
)
def test_each_kind_of_state_is_switched_off_by_itself(states: StatesSpec, keys: int) -> None:
    space = space_of(num_steps=(0, 1, 2), eagle_topk=(1, 2), nccl=("default", "six"))
    space = Space(replace(space.spec, engine=replace(space.spec.engine, states=states)))
    assert len({space.launch_key(one) for one in space.configurations()}) == keys


@pytest.mark.parametrize(
    ("args", "states", "keys"),
    [
        ({"attention-backend": "triton"}, StatesSpec(top_k=True), 2),
        ({"attention_backend": "triton"}, StatesSpec(top_k=True), 2),
        ({"attention-backend": "triton"}, StatesSpec(), 3),
        ({"attention-backend": "triton"}, StatesSpec(top_k=True, trees=False), 3),
        ({"speculative-draft-attention-backend": "triton"}, StatesSpec(top_k=True), 3),
    ],
)
def test_top_k_is_a_state_if_the_attention_backend_does_not_depend_on_it(
    args: dict[str, str], states: StatesSpec, keys: int
) -> None:
    space = space_of(num_steps=(0, 2), eagle_topk=(1, 2))
    space = Space(replace(space.spec, engine=replace(space.spec.engine, args=args, states=states)))
    assert len({space.launch_key(one) for one in space.configurations()}) == keys


def test_the_all_reduce_back_end_is_a_state_where_it_is_searched() -> None:
    space = space_of(num_steps=(1,), args={"disable-custom-all-reduce": (False, True), "attention-backend": ("a", "b")})
    assert len({space.launch_key(one) for one in space.configurations()}) == 2
    one = space.configurations()[0]
    assert {each.custom_all_reduce_off for each in space.states(one)} == {False, True}


def test_a_server_without_graphs_holds_no_nccl_sets() -> None:
    space = space_of(num_steps=(1,), nccl=("default", "six"))
    engine = replace(space.spec.engine, args={"disable_cuda_graph": True})
    assert len({Space(replace(space.spec, engine=engine)).launch_key(one) for one in space.configurations()}) == 2


def test_variables_that_act_outside_communicators_need_a_launch() -> None:
    assert binds_at_start({"NCCL_PROTO": "LL", "NCCL_TUNER_PLUGIN": "x"})
    assert binds_at_start({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert not binds_at_start({"NCCL_PROTO": "LL", "NCCL_PROTOO": "LL"})


def test_configuration_id_does_not_depend_on_names() -> None:
    one = space_of(num_steps=(2,), nccl=("six",)).configurations()[0]
    other = space_of(num_steps=(1, 2), nccl=("tree", "six-again")).configurations()[-1]
    assert one.configuration_id == other.configuration_id
    assert one.configuration_id != dataclasses.replace(one, args=(("page-size", 1),)).configuration_id


@pytest.mark.parametrize("suggestion", [{"num_steps": 1}, {"num_steps": 1, "nccl": "sixx"}])
def test_a_suggestion_that_does_not_fit_is_refused(suggestion: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfigurationError, match="nccl"):
        space_of(num_steps=(0, 1), nccl=("default", "six")).resolve(suggestion)


def test_a_space_too_large_to_enumerate_is_refused() -> None:
    with pytest.raises(SpecError, match="400,000 combinations, wanted at most 200,000"):
        space_of(num_steps=tuple(range(1000)), args={"page-size": tuple(range(400))}).configurations()


def test_a_space_travels_to_another_process() -> None:
    space = space_of(num_steps=(0, 1, 2), nccl=("default", "six"))
    space.configurations()
    assert pickle.loads(pickle.dumps(space)).configurations() == space.configurations()


@given(spaces())
def test_specs_and_tables_name_the_same_drafting_settings(space: Space) -> None:
    assert DRAFTING == DRAFTING_COLUMNS
    for configuration in space.configurations():
        assert configuration.drafting == tuple(getattr(configuration, name) for name in DRAFTING)


@given(spaces())
def test_settings_are_equal_if_only_the_rest_differs(space: Space) -> None:
    for one in space.configurations():
        other = replace(one.target_alone(), nccl_set="other", nccl_env=(("NCCL_PROTO", "Simple"),))
        assert one.server_settings == other.server_settings
        assert one.nccl_and_server_settings != other.nccl_and_server_settings
        assert one.nccl_and_server_settings == one.target_alone().nccl_and_server_settings
