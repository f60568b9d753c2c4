from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.nccl.catalogue import CATALOGUE, OLDEST_NCCL, release
from sweeps.nccl.grammar import ALGORITHMS, ELEMENTS, PROTOCOLS, variable_problem


@given(st.sampled_from(sorted(CATALOGUE)), st.text(max_size=12))
def test_every_catalogued_variable_judges_any_value(name: str, value: str) -> None:
    found = variable_problem(name, value)
    assert found is None or repr(value) in found or name in ELEMENTS
    if not value.strip():
        assert found is not None


def test_the_catalogue_agrees_with_itself() -> None:
    assert list(CATALOGUE) == sorted(CATALOGUE)
    for variable in CATALOGUE.values():
        assert variable.decode in {None, "none", "low", "medium", "high"}
        assert variable.since is None or release(variable.since) >= (2, 3)
        assert variable.until is None or release(variable.until) >= release(variable.since or "0")
        if variable.default and not variable.gone:
            assert variable_problem(variable.name, variable.default) is None
    named = {name: row.values.split()[1:] for name, row in CATALOGUE.items() if row.values.startswith("list ")}
    assert named == {"NCCL_ALGO": list(ALGORITHMS), "NCCL_PROTO": list(PROTOCOLS)}


@pytest.mark.parametrize(
    ("name", "legal", "illegal"),
    [
        ("NCCL_NTHREADS", ["64", "512"], ["32", "65", "544", "0512", "-64", "64.0"]),
        ("NCCL_BUFFSIZE", ["1", "16777216"], ["0", "4M", "1e6"]),
        ("NCCL_P2P_LEVEL", ["LOC", "SYS", "0", "5"], ["sys", "6", "NET"]),
        ("NCCL_CUMEM_ENABLE", ["-2", "0", "1"], ["-1", "2", "yes"]),
        ("NCCL_IB_TIMEOUT", ["20", "-1", "0x14", "+3"], ["020", "twenty", "20s", "2 0"]),
        ("NCCL_THREAD_THRESHOLDS", ["8 8 64 64 8 64"], ["8", "8 8 64 64 8 x"]),
        ("NCCL_DEBUG_FILE", ["/tmp/nccl.%h.%p.log"], ["", " /tmp/x", "a\nb"]),
    ],
)
def test_values_are_what_nccl_reads_as_written(name: str, legal: list[str], illegal: list[str]) -> None:
    assert [value for value in legal if CATALOGUE[name].problem(value)] == []
    assert [value for value in illegal if not CATALOGUE[name].problem(value)] == []


def test_what_no_supported_nccl_reads_is_gone() -> None:
    assert CATALOGUE["NCCL_TREE_THRESHOLD"].gone
    assert not CATALOGUE["NCCL_SHM_USE_CUDA_MEMCPY"].gone
    assert OLDEST_NCCL == (2, 27)
