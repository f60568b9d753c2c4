"""What serves the all-reduces of decode: by NCCL's log, by the server's arguments, by its log."""

import pytest

from sweeps.engines.all_reduce_backend import RankFacts, all_reduce_backend
from sweeps.nccl.log import NcclLog, Operation, read_nccl_log

DECODE = Operation(collective="AllReduce", num_bytes=14336, algorithm="Ring", protocol="LL", channels=1)
PREFILL = Operation(collective="AllReduce", num_bytes=1 << 27, algorithm="Ring", protocol="Simple", channels=8)


def rank(nccl: NcclLog) -> RankFacts:
    return RankFacts(rank=0, environment={}, nccl=nccl)


@pytest.mark.parametrize(
    ("resolved", "log_text", "operations", "backend"),
    [
        ({"tp_size": "1"}, "", (), "none"),
        ({"tp_size": "8"}, "", (), "custom"),
        ({"tp_size": "8", "disable_custom_all_reduce": "True"}, "", (), "nccl"),
        ({"tp_size": "8"}, "[TP0] Setup Custom allreduce failed with overlapping devices", (), "nccl"),
        ({"tp_size": "8", "enable_flashinfer_allreduce_fusion": "True"}, "", (), "flashinfer"),
        ({"tp_size": "8", "enable_mscclpp": "True"}, "", (), "mscclpp"),
        ({"tp_size": "8"}, "", (DECODE,), "nccl"),
        ({"tp_size": "8"}, "", (PREFILL,), "custom"),
        ({}, "", (), None),
    ],
)
def test_what_serves_the_decode(
    resolved: dict[str, str], log_text: str, operations: tuple[Operation, ...], backend: str | None
) -> None:
    ranks = [rank(NcclLog(operations=operations))]
    assert all_reduce_backend(resolved, log_text, ranks) == backend


def test_a_symmetric_kernel_is_its_own_backend() -> None:
    log = read_nccl_log(
        "h:1:1 [0] NCCL INFO AllReduce [Symmetric]: 14336 Bytes -> Kernel AllReduce_AGxLL_R nchannels 4"
    )
    assert all_reduce_backend({"tp_size": "2"}, "", [rank(log)]) == "nccl_symmetric"


def test_a_communicators_warm_up_is_no_decode() -> None:
    """Two H200 with SGLang's custom all-reduce: the only all-reduce in NCCL's log was of one number."""
    warm_up = Operation(collective="AllReduce", num_bytes=4, algorithm="Ring", protocol="LL", channels=1)
    resolved = {"tp_size": "2", "disable_custom_all_reduce": "False"}

    assert all_reduce_backend(resolved, "", [rank(NcclLog(operations=(warm_up,)))]) == "custom"
    assert all_reduce_backend(resolved, "", [rank(NcclLog(operations=(warm_up, DECODE)))]) == "nccl"
