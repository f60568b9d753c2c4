from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sweeps.engines.sglang.state_plan import StatePlan, launched_configuration, plan_states
from sweeps.spec.model import EngineSpec, SearchSpec, StatesSpec, SweepSpec
from sweeps.spec.names import DEFAULT_NCCL_SET
from sweeps.spec.space import Configuration, Space

SETS = {"ll": {"NCCL_PROTO": "LL"}, "simple": {"NCCL_PROTO": "Simple"}, "plugin": {"NCCL_TUNER_PLUGIN": "x"}}


def space_of(states: StatesSpec | None = None, **search: Any) -> Space:
    engine = EngineSpec(kind="sglang", model_path="m", states=states or StatesSpec())
    return Space(
        SweepSpec(sweep="t", engine=engine, search=SearchSpec(**search), nccl_sets=SETS, drafters={"one": "path"})
    )


def planned(space: Space, configuration: Configuration, refused: frozenset[str] = frozenset()) -> StatePlan:
    plan = plan_states(space.spec.engine, configuration, space.states(configuration), refused=refused)
    assert plan is not None
    return plan


def test_a_chain_holds_every_step_count_and_set_and_starts_as_largest() -> None:
    space = space_of(num_steps=(1, 3), nccl=("default", "ll", "simple"))
    one = space.resolve({"num_steps": 1, "nccl": "ll"})
    plan = planned(space, one)
    assert plan.first == "1x2-custom-ll"
    assert {state.name for state in plan.states} == {
        f"{shape}-custom-{name}" for shape in ("1x2", "3x4") for name in ("default", "ll", "simple")
    }
    assert plan.communicators == {"ll": {"NCCL_PROTO": "LL"}, "simple": {"NCCL_PROTO": "Simple"}}
    assert (plan.launched.num_steps, plan.launched.num_draft_tokens) == (3, 4)
    assert plan.launched.nccl_env == ()
    assert {state.communicator for state in plan.states if state.name.endswith("default")} == {None}


def test_nccl_beside_custom_all_reduce_has_a_communicator_and_so_a_log_of_its_own() -> None:
    space = space_of(num_steps=(1,), nccl=("default", "ll"), args={"disable-custom-all-reduce": (False, True)})
    plan = planned(space, space.configurations()[0])
    communicators = {state.name: (state.communicator, state.custom) for state in plan.states}
    assert communicators["1x2-custom-default"] == (None, True)
    assert communicators["1x2-nccl-default"] == (DEFAULT_NCCL_SET, False)
    assert plan.communicators[DEFAULT_NCCL_SET] == {}
    assert dict(plan.launched.args)["disable-custom-all-reduce"] is False


def test_nccl_alone_is_served_by_a_server_without_custom_all_reduce() -> None:
    space = space_of(num_steps=(1, 2), args={"disable-custom-all-reduce": (True,)})
    plan = planned(space, space.configurations()[0])
    assert dict(plan.launched.args)["disable-custom-all-reduce"] is True
    assert plan.communicators == {}


def test_a_tree_starts_with_the_most_steps_and_the_most_draft_tokens() -> None:
    space = space_of(num_steps=(2, 5), eagle_topk=(4,), num_draft_tokens=(8, 16))
    plan = planned(space, space.configurations()[0])
    assert (plan.launched.num_steps, plan.launched.num_draft_tokens) == (5, 16)
    assert {state.name for state in plan.states} == {
        f"{shape}-custom-default" for shape in ("2x8k4", "2x16k4", "5x8k4", "5x16k4")
    }


def test_several_top_k_start_with_the_largest() -> None:
    space = space_of(num_steps=(2, 5), eagle_topk=(1, 4), num_draft_tokens=(8,))
    space = Space(
        replace(
            space.spec,
            engine=replace(space.spec.engine, args={"attention-backend": "triton"}, states=StatesSpec(top_k=True)),
        )
    )
    chain = next(one for one in space.configurations() if one.is_chain)
    plan = planned(space, chain)
    assert (plan.launched.num_steps, plan.launched.eagle_topk, plan.launched.num_draft_tokens) == (5, 4, 8)
    assert {(state.name.split("-")[0], state.eagle_topk) for state in plan.states} == {
        ("2x3", 1),
        ("5x6", 1),
        ("2x8k4", 4),
        ("5x8k4", 4),
    }
    assert plan.first == "2x3-custom-default"


def test_a_server_without_speculation_holds_nccl_sets() -> None:
    space = space_of(num_steps=(0,), nccl=("default", "ll"))
    plan = planned(space, space.control)
    assert [(state.num_steps, state.num_draft_tokens, state.communicator) for state in plan.states] == [
        (0, 1, None),
        (0, 1, "ll"),
    ]


def test_one_configuration_needs_no_plan() -> None:
    space = space_of(num_steps=(2,))
    one = space.configurations()[0]
    assert plan_states(space.spec.engine, one, space.states(one)) is None
    assert launched_configuration(one, space.states(one)) == one


def test_another_algorithm_has_no_states() -> None:
    space = space_of(num_steps=(1, 2))
    engine = replace(space.spec.engine, algorithm="STANDALONE")
    one = space.configurations()[0]
    assert plan_states(engine, one, space.states(one)) is None


def test_no_more_states_than_the_spec_allows_its_own_first() -> None:
    space = space_of(StatesSpec(max_per_server=2), num_steps=(1, 2, 3))
    three = space.resolve({"num_steps": 3})
    assert [state.name for state in planned(space, three).states] == ["3x4-custom-default", "1x2-custom-default"]


def test_a_set_that_did_not_come_up_is_left_out() -> None:
    space = space_of(num_steps=(1, 2), nccl=("default", "ll"))
    plan = planned(space, space.configurations()[0], refused=frozenset({"ll"}))
    assert not plan.communicators
    assert len(plan.states) == 2


@pytest.mark.parametrize("first", ["plugin", "default"])
def test_a_set_that_binds_at_start_is_launched_in_the_environment(first: str) -> None:
    space = space_of(num_steps=(1, 2), nccl=("default", "plugin"))
    plan = planned(space, space.resolve({"num_steps": 1, "nccl": first}))
    assert plan.communicators == {}
    assert plan.launched.nccl_env == ((("NCCL_TUNER_PLUGIN", "x"),) if first == "plugin" else ())
