from __future__ import annotations

import pytest

from sweeps.results.nccl_acts import is_unread, may_act, traced_by_nccl, variables_read

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
SYMMETRIC = "ncclSymkDevKernel_AllReduce_AGxLL_R_sum_bf16"
OWN = "{anonymous}::all_reduce_kernel"


@pytest.mark.parametrize(
    ("kernels", "by_nccl"),
    [
        ([NCCL, "fused_moe_kernel"], True),
        ([SYMMETRIC], True),
        ([OWN, "ncclDevKernel_AllGather_RING_LL"], False),
        (["sglang::cross_device_reduce_1stage"], False),
        (["allreduce_fusion_kernel_oneshot_lamport"], False),
        ([OWN, NCCL], True),
        (["ncclDevKernel_AllGather_RING_LL", "fused_moe_kernel"], None),
        ([], None),
    ],
)
def test_a_trace_tells_who_reduces_only_if_it_holds_an_all_reduce(kernels: list[str], *, by_nccl: bool | None) -> None:
    assert traced_by_nccl(kernels) is by_nccl


def test_settings_may_act_unless_something_else_is_known_to_reduce() -> None:
    assert [name for name in (None, "nccl", "nccl_symmetric", "custom", "flashinfer", "none") if may_act(name)] == [
        None,
        "nccl",
        "nccl_symmetric",
    ]


def test_a_set_is_unread_if_nccl_read_other_variables_and_none_of_its_own() -> None:
    read = variables_read([("env.NCCL_PROTO", "LL"), ("env.NCCL_ALGO", None), ("args.tp_size", "8"), ("env.HOME", "x")])

    assert read == {"NCCL_PROTO"}
    assert is_unread({"NCCL_PORTO": "LL"}, read)
    assert not is_unread({"NCCL_PORTO": "LL", "NCCL_PROTO": "LL"}, read)
    assert not is_unread({}, read), "the default asks for nothing"
    assert not is_unread({"NCCL_PORTO": "LL"}, frozenset()), "nothing is known of what NCCL read"
