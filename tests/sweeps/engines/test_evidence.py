from pathlib import Path
from typing import Any

import pytest

from sweeps.engines.all_reduce_backend import RankFacts
from sweeps.engines.base import Evidence
from sweeps.engines.env_sources import ConfFile, nccl_conf_files
from sweeps.engines.evidence import grade_environment
from sweeps.nccl.log import NcclLog, Operation

DECODE = Operation(collective="AllReduce", num_bytes=14336, algorithm="Ring", protocol="LL", channels=1)
PREFILL = Operation(collective="AllReduce", num_bytes=1 << 27, algorithm="Ring", protocol="Simple", channels=8)


def rank(number: int = 0, environment: dict[str, str] | None = None, nccl: NcclLog | None = None) -> RankFacts:
    return RankFacts(rank=number, environment=environment or {}, nccl=nccl)


def grade(
    name: str, value: str, seen: str | None, nccl: NcclLog | None = None, *, all_reduce: str | None = "nccl"
) -> Evidence:
    facts = rank(environment={} if seen is None else {name: seen}, nccl=nccl)
    (row,) = grade_environment({name: value}, [facts], num_ranks=1, all_reduce=all_reduce)
    assert (row.setting, row.requested, row.seen) == (f"env.{name}", value, seen)
    return row


def read(name: str, value: str, **rest: Any) -> NcclLog:
    return NcclLog(set_by_environment={name: value}, **rest)


def test_a_lost_variable() -> None:
    assert grade("NCCL_PROTO", "LL", None).grade == "not_seen"


def test_a_rank_that_never_reported_has_its_rows() -> None:
    rows = grade_environment({"NCCL_PROTO": "LL"}, [rank(1, {"NCCL_PROTO": "LL"})], num_ranks=3, all_reduce=None)
    assert [(row.rank, row.grade) for row in rows] == [(0, "not_seen"), (1, "seen"), (2, "not_seen")]


@pytest.mark.parametrize(
    ("name", "value", "seen", "words"),
    [
        ("NCCL_NVLS_ENABLE", "0", "1", "--enable-nccl-nvls"),
        ("NCCL_CUMEM_ENABLE", "0", "1", "--enable-symm-mem"),
        ("NCCL_ALGO", "Ring", "allreduce:tree", "--enable-deterministic-inference"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "8", "cannot be swept"),
        ("NCCL_PROTO", "LL", "Simple", "source unknown"),
    ],
)
def test_an_overridden_variable_names_the_hand_and_the_way_out(name: str, value: str, seen: str, words: str) -> None:
    row = grade(name, value, seen)
    assert (row.grade, row.effective) == ("overridden", seen)
    assert words in str(row.detail)


def test_another_all_reduce_leaves_nccl_without_a_path() -> None:
    row = grade("NCCL_PROTO", "LL", "LL", read("NCCL_PROTO", "LL"), all_reduce="custom")
    assert row.grade == "not_exercised"
    assert "custom" in str(row.detail)
    assert grade("SGLANG_X", "1", "1", all_reduce="custom").grade == "seen"


def test_without_nccls_log_a_variable_is_seen_and_no_more() -> None:
    assert grade("NCCL_PROTO", "LL", "LL").grade == "seen"


def test_what_nccl_has_not_read_is_not_effective() -> None:
    row = grade("NCCL_P2P_LEVEL", "Sys", "Sys", NcclLog())
    assert (row.grade, row.read_by_nccl) == ("seen", None)
    assert "has not read it" in str(row.detail)


def test_a_variable_that_no_nccl_asks_for_is_not_seen_though_the_process_has_it() -> None:
    row = grade("NCCL_MAX_NCHANELS", "16", "16", NcclLog())
    assert (row.grade, row.seen, row.read_by_nccl) == ("not_seen", "16", None)


def test_a_refused_value() -> None:
    log = read("NCCL_NTHREADS", "x", invalid={"NCCL_NTHREADS": "-2"})
    row = grade("NCCL_NTHREADS", "x", "x", log)
    assert (row.grade, row.effective) == ("overridden", "-2")


@pytest.mark.parametrize(
    ("name", "value", "log", "wanted", "effective"),
    [
        ("NCCL_PROTO", "LL", {"operations": (DECODE, PREFILL)}, "effective", "LL"),
        ("NCCL_PROTO", "Simple", {"operations": (DECODE, PREFILL)}, "overridden", "LL"),
        ("NCCL_PROTO", "^LL128", {"operations": (DECODE,)}, "effective", "LL"),
        ("NCCL_ALGO", "allreduce:tree", {"operations": (DECODE,)}, "overridden", "Ring"),
        ("NCCL_ALGO", "allgather:tree", {"operations": (DECODE,)}, "effective", "Ring"),
        ("NCCL_PROTO", "LL", {}, "effective", "LL"),
        ("NCCL_PROTO", "LL", {"enabled": {"AllReduce": frozenset({"LL", "Ring", "Tree"})}}, "effective", "LL"),
        (
            "NCCL_PROTO",
            "LL",
            {"enabled": {"AllReduce": frozenset({"LL", "Simple", "Ring"})}},
            "overridden",
            "LL,Simple",
        ),
        ("NCCL_ALGO", "^NVLS", {"enabled": {"AllReduce": frozenset({"LL", "Ring", "Tree"})}}, "effective", "Ring,Tree"),
        ("NCCL_ALGO", "Ring", {"enabled": {"Broadcast": frozenset({"Tree"})}}, "effective", "Ring"),
        ("NCCL_P2P_LEVEL", "SYS", {"transports": frozenset({"P2P/IPC"})}, "effective", "P2P/IPC"),
        ("NCCL_P2P_LEVEL", "SYS", {"transports": frozenset({"SHM/direct/direct"})}, "overridden", "SHM/direct/direct"),
        ("NCCL_P2P_DISABLE", "1", {"transports": frozenset({"P2P/IPC"})}, "overridden", "P2P/IPC"),
        ("NCCL_SHM_DISABLE", "1", {"transports": frozenset({"NET/Socket/0"})}, "effective", "NET/Socket/0"),
        ("NCCL_CUMEM_ENABLE", "1", {"transports": frozenset({"P2P/IPC"})}, "overridden", "P2P/IPC"),
        ("NCCL_CUMEM_ENABLE", "1", {"transports": frozenset({"P2P/CUMEM"})}, "effective", "P2P/CUMEM"),
        ("NCCL_MAX_NCHANNELS", "4", {"num_channels": 8}, "overridden", "8"),
        ("NCCL_MIN_NCHANNELS", "8", {"num_channels": 8}, "effective", "8 channels"),
        ("NCCL_BUFFSIZE", "8388608", {"num_channels": 8}, "effective", "8388608"),
    ],
)
def test_what_nccl_did_with_what_it_read(
    name: str, value: str, log: dict[str, Any], wanted: str, effective: str
) -> None:
    row = grade(name, value, value, read(name, value, **log))
    assert (row.grade, row.effective, row.read_by_nccl) == (wanted, effective, value)


def test_rank_0_alone_prints_operations_and_the_others_are_judged_by_them() -> None:
    environment = {"NCCL_PROTO": "Simple"}
    ranks = [
        rank(0, environment, read("NCCL_PROTO", "Simple", operations=(DECODE,))),
        rank(1, environment, read("NCCL_PROTO", "Simple")),
    ]
    rows = grade_environment(environment, ranks, num_ranks=2, all_reduce="nccl")
    assert [row.grade for row in rows] == ["overridden", "overridden"]


def test_unasked_variables_are_extra_with_their_source() -> None:
    conf = ConfFile(path="/etc/nccl.conf", sha256="ab" * 32, settings={"NCCL_PROTO": "LL"})
    environment = {
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_PROTO": "LL",
        "NCCL_P2P_LEVEL": "SYS",
        "NCCL_DEBUG": "INFO",
        "NCCL_VERSION": "2.27.7-1",  # an image's label
        "PATH": "/bin",
    }
    rows = grade_environment({}, [rank(environment=environment)], num_ranks=1, all_reduce="nccl", conf_files=[conf])
    assert {row.setting: (row.grade, row.requested) for row in rows} == {
        f"env.{name}": ("extra", None) for name in ("NCCL_CUMEM_ENABLE", "NCCL_PROTO", "NCCL_P2P_LEVEL")
    }
    details = {row.setting: str(row.detail) for row in rows}
    assert "engine's default" in details["env.NCCL_CUMEM_ENABLE"]
    assert "/etc/nccl.conf (abababababab)" in details["env.NCCL_PROTO"]
    assert "source unknown" in details["env.NCCL_P2P_LEVEL"]


def test_what_only_nccl_knows_is_extra_too() -> None:
    (row,) = grade_environment({}, [rank(nccl=read("NCCL_PROTO", "LL"))], num_ranks=1, all_reduce="nccl")
    assert (row.grade, row.seen, row.read_by_nccl) == ("extra", None, "LL")


def test_conf_files_are_read_and_hashed(tmp_path: Path) -> None:
    system, user = tmp_path / "nccl.conf", tmp_path / ".nccl.conf"
    system.write_text("# site\nNCCL_PROTO=LL\n\nnonsense\nNCCL_PROTO=Simple\nNCCL_P2P_LEVEL = SYS\n")
    user.write_text("NCCL_ALGO=Ring\n")
    files = nccl_conf_files({"HOME": "/elsewhere"}, system=system, home=tmp_path)
    assert [file.settings for file in files] == [
        {"NCCL_ALGO": "Ring"},
        {"NCCL_PROTO": "LL", "NCCL_P2P_LEVEL ": " SYS"},  # to NCCL another name: it strips no blanks
    ]
    assert len(files[0].sha256) == 64
    other = tmp_path / "other.conf"
    other.write_text("NCCL_ALGO=Tree\n")
    files = nccl_conf_files({"NCCL_CONF_FILE": str(other)}, system=tmp_path / "absent", home=tmp_path)
    assert [file.path for file in files] == [str(other)]
