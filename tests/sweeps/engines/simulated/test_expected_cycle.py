from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sweeps.engines.base import EngineError
from sweeps.engines.simulated.expected_cycle import distinct_experts, expected
from sweeps.engines.simulated.machine_profile import Drafter, Interaction, Intervention, read_profile
from sweeps.spec.space import Configuration, candidate_pool
from tests.certain import certain

FOUNDING = read_profile("rtx-pro-6000-pcie-x8")
TURIN = read_profile("rtx-pro-6000-turin-x8")
H200 = read_profile("h200-nvlink-x8")
SIX = {
    "NCCL_PROTO": "LL",
    "NCCL_ALGO": "Ring",
    "NCCL_P2P_LEVEL": "SYS",
    "NCCL_MAX_NCHANNELS": "16",
    "NCCL_BUFFSIZE": "16777216",
    "NCCL_NTHREADS": "512",
}


def configuration(
    num_steps: int = 0,
    *,
    eagle_topk: int = 1,
    num_draft_tokens: int | None = None,
    drafter: str = "founding",
    nccl: dict[str, str] | None = None,
    env: dict[str, str] | None = None,
    args: dict[str, bool] | None = None,
) -> Configuration:
    speculates = num_steps > 0
    return Configuration(
        num_steps=num_steps,
        eagle_topk=eagle_topk if speculates else None,
        num_draft_tokens=(num_draft_tokens or num_steps + 1) if speculates else None,
        drafter=drafter if speculates else None,
        nccl_set="set",
        nccl_env=tuple(sorted((nccl or {}).items())),
        env=tuple((env or {}).items()),
        args=tuple((args or {}).items()),
    )


def test_the_founding_case_is_within_one_percent() -> None:
    plain, eagle = expected(FOUNDING, configuration()), expected(FOUNDING, configuration(2))
    assert plain.tok_s == pytest.approx(82.2, rel=0.01)
    assert eagle.verify_ms == pytest.approx(29.0, rel=0.01)
    assert certain(eagle.verify_ms) / eagle.cycle_ms == pytest.approx(0.969, rel=0.01)
    assert eagle.accept_length == pytest.approx(1.80, rel=0.01)
    assert eagle.tok_s == pytest.approx(60.0, rel=0.01)


def test_the_six_variables_change_nothing_on_the_founding_machine() -> None:
    for steps in (0, 1, 2, 5):
        assert expected(FOUNDING, configuration(steps, nccl=SIX)) == expected(FOUNDING, configuration(steps))
    assert expected(FOUNDING, configuration(nccl={"NCCL_PROTO": "Simple"})).tok_s < 60


@pytest.mark.parametrize(
    ("nccl", "tok_s"),
    [
        ({}, 40.0),
        ({"NCCL_PROTO": "LL"}, 44.7),
        ({"NCCL_P2P_LEVEL": "SYS"}, 47.5),
        ({"NCCL_GRAPH_FILE": "turin.xml"}, 66.0),
        (SIX, 66.0),
        ({**SIX, "NCCL_P2P_DISABLE": "1"}, 44.7),
        ({"NCCL_P2P_LEVEL": "sys"}, 40.0),
    ],
)
def test_nccl_matters_on_turin(nccl: dict[str, str], tok_s: float) -> None:
    assert expected(TURIN, configuration(nccl=nccl)).tok_s == pytest.approx(tok_s, rel=0.01)


def test_nvlink_bypasses_nccl_unless_the_custom_all_reduce_is_disabled() -> None:
    plain = expected(H200, configuration())
    assert plain.tok_s == pytest.approx(106.1, rel=0.01)
    assert plain.all_reduce == "custom"
    assert plain.nccl is None
    assert expected(H200, configuration(nccl=SIX)) == plain
    off = {"disable-custom-all-reduce": True}
    slow = expected(H200, configuration(nccl={"NCCL_PROTO": "Simple"}, args=off))
    assert slow.all_reduce == "nccl"
    assert slow.tok_s < expected(H200, configuration(args=off)).tok_s < plain.tok_s


def test_accept_length_by_steps_is_the_published_table() -> None:
    published = (1.83, 2.43, 2.88, 3.24, 3.46, 3.62, 3.71, 3.77)
    lengths = [expected(H200, configuration(k, drafter="kimi-k2.5-eagle3")).accept_length for k in range(1, 9)]
    assert lengths == pytest.approx(published)


def test_the_best_step_count_is_an_inner_one_and_a_tree_loses_at_equal_budget() -> None:
    by_steps = {k: expected(H200, configuration(k, drafter="kimi-k2.5-eagle3")).tok_s for k in range(1, 9)}
    assert max(by_steps, key=by_steps.__getitem__) in (5, 6)
    for steps, topk in ((5, 3), (7, 4)):
        tree = configuration(steps, eagle_topk=topk, num_draft_tokens=steps + 1, drafter="kimi-k2.5-eagle3")
        assert expected(H200, tree).tok_s < by_steps[steps]
        chain = replace(tree, eagle_topk=1)
        assert certain(expected(H200, tree).accept_length) < certain(expected(H200, chain).accept_length)


def test_the_pcie_ipc_backend_takes_nccl_out_of_the_way() -> None:
    on = {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"}
    served = expected(TURIN, configuration(env=on))
    assert served.all_reduce == "pcie_ipc"
    assert served.tok_s > 66


@pytest.mark.parametrize(
    ("nccl", "kind"),
    [
        ({"NCCL_ALGO": "NVLS"}, "nccl_no_algorithm"),
        ({"NCCL_ALGO": "Tree"}, "nccl_no_algorithm"),
        ({"NCCL_ALGO": "Rign"}, "invalid_config"),
    ],
)
def test_a_set_that_leaves_nccl_nothing_fails_before_any_cycle(nccl: dict[str, str], kind: str) -> None:
    with pytest.raises(EngineError) as caught:
        expected(FOUNDING, configuration(nccl=nccl))
    assert caught.value.kind == kind
    assert not caught.value.transient


def test_no_transport_between_gpus_is_very_slow() -> None:
    nccl = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    assert expected(FOUNDING, configuration(nccl=nccl)).tok_s < 20


def test_interactions_break_assumptions_on_request() -> None:
    broken = replace(
        FOUNDING,
        interactions=(
            Interaction(when={"env.NCCL_PROTO": "LL", "eagle_topk": "4"}, factor="verify_ms", scale=1.1),
            Interaction(when={"env.NCCL_PROTO": "LL"}, factor="accept_length", scale=0.95),
        ),
    )
    tree = configuration(3, eagle_topk=4, num_draft_tokens=8, nccl={"NCCL_PROTO": "LL"})
    before, after = expected(FOUNDING, tree), expected(broken, tree)
    assert after.verify_ms == pytest.approx(1.1 * certain(before.verify_ms))
    assert after.accept_length == pytest.approx(0.95 * certain(before.accept_length))
    assert expected(broken, configuration(3)) == expected(FOUNDING, configuration(3))


def test_an_intervention_decides_what_is_acted_on() -> None:
    forced = replace(TURIN, interventions=(Intervention(setting="env.NCCL_PROTO", value="Simple", by="the engine"),))
    assert certain(expected(forced, configuration(nccl=SIX)).nccl).proto == "Simple"
    unless = replace(forced, interventions=(replace(forced.interventions[0], only_if_unset=True),))
    assert certain(expected(unless, configuration(nccl=SIX)).nccl).proto == "LL"


def test_a_saturating_drafter_gains_nothing_from_more_steps() -> None:
    drafter = Drafter(accept_length=(1.7, 2.0), tail=0.0, prompt_spread=0.0)
    profile = replace(FOUNDING, drafters={"founding": drafter})
    assert expected(profile, configuration(7)).accept_length == pytest.approx(2.0)


def test_distinct_experts() -> None:
    assert distinct_experts(1, 384, 8) == pytest.approx(8.0)
    assert distinct_experts(3, 384, 8) == pytest.approx(23.50, abs=0.01)
    assert distinct_experts(10_000, 384, 8) == pytest.approx(384.0)


@given(
    steps=st.integers(1, 12),
    topk=st.integers(1, 8),
    tokens=st.integers(2, 64),
    batch=st.integers(1, 64),
    drafter=st.sampled_from(sorted(H200.drafters)),
)
def test_every_configuration_has_a_possible_cycle(steps: int, topk: int, tokens: int, batch: int, drafter: str) -> None:
    budget = steps + 1 if topk == 1 else min(tokens, candidate_pool(steps, topk) + 1)
    assume(batch * budget <= H200.forward.max_tokens)
    cycle = expected(
        H200, configuration(steps, eagle_topk=topk, num_draft_tokens=budget, drafter=drafter), batch_size=batch
    )
    assert all(1.0 >= early >= late >= 0.0 for early, late in zip(cycle.survival, cycle.survival[1:], strict=False))
    assert 1.0 <= certain(cycle.accept_length) <= min(steps, budget - 1) + 1
    assert certain(cycle.verify_ms) > cycle.verify_forward_ms > cycle.communication_ms > 0.0
    assert min(certain(cycle.draft_ms), certain(cycle.extend_ms), cycle.gap_ms) > 0.0
