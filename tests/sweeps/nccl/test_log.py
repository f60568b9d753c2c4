"""The asset is put together from lines of public logs of NCCL 2.21 to 2.30."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.nccl.grammar import ALGORITHMS, PROTOCOLS, enabled
from sweeps.nccl.log import Operation, read_nccl_log

RANK_0 = (Path(__file__).parents[2] / "assets" / "nccl_logs" / "rank0.log").read_text(encoding="utf-8")


def test_a_whole_log() -> None:
    log = read_nccl_log(RANK_0)
    assert (log.version, log.rank, log.num_channels) == ("2.27.5", 0, 8)
    assert log.set_by_environment == {
        "NCCL_DEBUG": "INFO",
        "NCCL_P2P_LEVEL": "SYS",
        "NCCL_MIN_NCHANNELS": "8",
        "NCCL_PROTO": "LL",
        "NCCL_ALGO": "allreduce:tree",
        "NCCL_CTA_POLICY": "EFFICIENCY",
    }
    assert log.invalid == {"NCCL_NTHREADS": "-2"}
    assert log.transports == {"P2P/IPC", "P2P/direct"}
    assert log.enabled["AllReduce"] == {"LL", "LL128", "Tree"}
    assert log.enabled["Broadcast"] == {"LL", "Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS"}
    assert log.warnings == ("No algorithm/protocol available for function Broadcast",)
    assert log.operations == (
        Operation(collective="AllReduce", num_bytes=14336, algorithm="Tree", protocol="LL", channels=2),
        Operation(collective="AllGather", num_bytes=4096, algorithm="Ring", protocol="Simple", channels=1),
        Operation(collective="AllReduce", num_bytes=14336, algorithm="AllReduce_AGxLL_R", protocol=None, channels=4),
    )
    assert [operation.symmetric for operation in log.operations] == [False, False, True]


@pytest.mark.parametrize("head", ["AllReduce: ", ""])
def test_operations_of_older_versions_have_numbers(head: str) -> None:
    log = read_nccl_log(f"h:1:1 [0] NCCL INFO {head}262144 Bytes -> Algo 1 proto 2 time 54.707825\n")
    assert log.operations == (
        Operation(
            collective="AllReduce" if head else None,
            num_bytes=262144,
            algorithm="Ring",
            protocol="Simple",
            channels=None,
        ),
    )


def test_an_empty_log_claims_nothing() -> None:
    log = read_nccl_log("")
    assert (log.version, log.rank, log.num_channels) == (None, None, None)
    assert not log.set_by_environment
    assert not log.operations


def printed(name: str, spelling: str) -> str:
    """How some version prints a name."""
    names = ALGORITHMS if name in ALGORITHMS else PROTOCOLS
    capitals = "NVLS_TREE" if name == "NVLSTree" else name.upper()
    return {"name": name, "capitals": capitals, "number": str(names.index(name))}[spelling]


@given(st.sampled_from(ALGORITHMS), st.sampled_from(PROTOCOLS), st.sampled_from(["name", "capitals", "number"]))
def test_whatever_a_version_prints_is_a_name_of_the_settings(algorithm: str, protocol: str, spelling: str) -> None:
    line = f"AllReduce: 14336 Bytes -> Algo {printed(algorithm, spelling)} proto {printed(protocol, spelling)}"
    (operation,) = read_nccl_log(f"h:1:1 [0] NCCL INFO {line}\n").operations

    assert enabled("NCCL_ALGO", operation.algorithm, function="AllReduce") == frozenset({algorithm})
    assert operation.protocol is not None
    assert enabled("NCCL_PROTO", operation.protocol, function="AllReduce") == frozenset({protocol})


@given(st.text())
def test_no_text_hides_a_line_before_it(text: str) -> None:
    line = "h:1:1 [0] NCCL INFO AllReduce: 14336 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}\n"
    (operation,) = read_nccl_log(line).operations

    assert operation in read_nccl_log(f"{line}h:1:1 [0] NCCL INFO {text}\n{text}").operations
