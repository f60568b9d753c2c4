from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.nccl.grammar import (
    ALGORITHMS,
    ELEMENTS,
    FUNCTIONS,
    SGLANG_DEFAULTS,
    ListEntry,
    NcclSetError,
    candidates,
    canonical,
    cautions,
    enabled,
    format_list,
    inert_at_decode,
    parse_list,
    set_problems,
    variable_problem,
)
from sweeps.spec.model import EngineSpec, SearchSpec, SweepSpec
from sweeps.spec.space import nccl_env
from tests.certain import certain

FOUNDING_SIX = {
    "NCCL_PROTO": "LL",
    "NCCL_ALGO": "Ring",
    "NCCL_P2P_LEVEL": "SYS",
    "NCCL_MAX_NCHANNELS": "16",
    "NCCL_BUFFSIZE": "16777216",
    "NCCL_NTHREADS": "512",
}

variables = st.sampled_from(sorted(ELEMENTS))


def any_case(text: str) -> st.SearchStrategy[str]:
    return st.tuples(*(st.sampled_from((letter.lower(), letter.upper())) for letter in text)).map("".join)


@st.composite
def entries(draw: st.DrawFn, variable: str, *, first: bool) -> ListEntry:
    names = st.lists(st.sampled_from(ELEMENTS[variable]), unique=True, min_size=1)
    functions = st.sampled_from(FUNCTIONS)
    return ListEntry(draw(st.none() | functions if first else functions), draw(st.booleans()), tuple(draw(names)))


@st.composite
def lists(draw: st.DrawFn) -> tuple[str, tuple[ListEntry, ...]]:
    variable = draw(variables)
    rest = draw(st.lists(entries(variable, first=False), max_size=3))
    return variable, (draw(entries(variable, first=True)), *rest)


@given(lists(), st.data())
def test_legal_lists_are_read_in_any_case_and_written_back(
    case: tuple[str, tuple[ListEntry, ...]], data: st.DataObject
) -> None:
    variable, parsed = case
    text = data.draw(any_case(format_list(parsed)))
    assert parse_list(text, ELEMENTS[variable]) == parsed
    assert canonical(variable, text) == format_list(parsed)
    assert variable_problem(variable, text) is None


@given(lists(), st.data())
def test_mutated_lists_are_refused(case: tuple[str, tuple[ListEntry, ...]], data: st.DataObject) -> None:
    variable, parsed = case
    text = format_list(parsed)
    place = data.draw(st.integers(0, len(text)))
    mutation = data.draw(st.sampled_from([" ", "x", ",,", ";;", "^^", "::", ";ll", "=", "|"]))
    broken = text[:place] + mutation + text[place:]
    with pytest.raises(NcclSetError):
        parse_list(broken, ELEMENTS[variable])
    assert variable_problem(variable, broken) is not None


@given(lists())
def test_lists_enable_what_nccl_would(case: tuple[str, tuple[ListEntry, ...]]) -> None:
    variable, parsed = case
    position = list(ELEMENTS).index(variable)
    left = candidates({variable: format_list(parsed)})
    everything = candidates({})
    for function in FUNCTIONS:
        mine = [entry for entry in parsed if entry.function in {None, function}]
        wanted = everything[function]
        if mine:  # the last entry for a function wins
            chosen = {pair for pair in wanted if pair[position] in mine[-1].elements}
            wanted = wanted - chosen if mine[-1].negated else frozenset(chosen)
        assert left[function] == wanted


def as_nccl_reads(value: str, elements: Sequence[str]) -> dict[str, set[str]] | None:
    """A second reading of NCCL 2.30's `parseList`, split by split; None where it fails with ncclInvalidUsage.

    Its `strtok` skips empty tokens, strips no blanks and takes two parts of `a:b:c`. Without any setting all is on.
    """
    on = {function: set(elements) for function in FUNCTIONS}
    for position, entry in enumerate(token for token in value.split(";") if token):
        parts = [part for part in entry.split(":") if part]
        if not parts or (len(parts) == 1 and position > 0):
            return None
        prefix, names = (None, parts[0]) if len(parts) == 1 else parts[:2]
        meant = [function for function in FUNCTIONS if prefix is None or function.lower() == prefix.lower()]
        tokens = [token.lower() for token in names.removeprefix("^").split(",") if token]
        known = {element.lower(): element for element in elements}
        if not meant or not set(tokens) <= set(known):
            return None
        listed = {known[token] for token in tokens}
        on |= {function: set(elements) - listed if names.startswith("^") else set(listed) for function in meant}
    return on


PIECES = (*ELEMENTS["NCCL_ALGO"], *ELEMENTS["NCCL_PROTO"], *FUNCTIONS, *"^,;: 1", "NVLS_TREE", "ring", "allreduce:")


@given(variables, st.lists(st.sampled_from(PIECES), max_size=7).map("".join))
def test_what_is_accepted_nccl_accepts_and_reads_alike(variable: str, value: str) -> None:
    by_nccl = as_nccl_reads(value, ELEMENTS[variable])
    for function in FUNCTIONS:
        left = enabled(variable, value, function=function)
        assert left is None or (by_nccl is not None and left == by_nccl[function])


@given(lists())
def test_every_list_that_is_written_is_read_by_nccl(case: tuple[str, tuple[ListEntry, ...]]) -> None:
    variable, parsed = case
    by_nccl = as_nccl_reads(format_list(parsed), ELEMENTS[variable])
    assert certain(by_nccl) == {
        name: set(certain(enabled(variable, format_list(parsed), function=name))) for name in FUNCTIONS
    }


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("NCCL_PROTO", "^LL128", {"LL", "Simple"}),
        ("NCCL_PROTO", "ll,LL128,simple", {"LL", "LL128", "Simple"}),
        ("NCCL_ALGO", "allreduce:tree", {"Tree"}),
        ("NCCL_ALGO", "allgather:ring", set(ALGORITHMS)),
        ("NCCL_ALGO", "ring;allreduce:tree,ring", {"Tree", "Ring"}),
        ("NCCL_ALGO", "NVLSTree", {"NVLSTree"}),
        ("NCCL_ALGO", "NVLS_TREE", None),
        ("NCCL_ALGO", " ring", None),
        ("NCCL_ALGO", "ring, tree", None),
        ("NCCL_ALGO", "1", None),
        ("NCCL_ALGO", "ring;tree", None),
        ("NCCL_ALGO", "Rinng", None),
    ],
)
def test_what_a_value_leaves_for_all_reduces(name: str, value: str, wanted: set[str] | None) -> None:
    assert enabled(name, value, function="AllReduce") == wanted
    assert (variable_problem(name, value) is None) is (wanted is not None)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("tre", "did you mean Tree"),
        ("ring;tree", "only the first entry may lack a function"),
        ("alreduce:ring", "did you mean AllReduce"),
        ("", "no name ''"),
        ("ring,ring", "twice"),
        ("allreduce:ring:tree", "no name"),
    ],
)
def test_list_errors_say_what_to_write(value: str, message: str) -> None:
    assert message in str(variable_problem("NCCL_ALGO", value))


@pytest.mark.parametrize(
    ("given_set", "message"),
    [
        ({"NCCL_ALGO": "Tree"}, "leaves AllGather nothing to run on one node; .* write allreduce:tree"),
        ({"NCCL_ALGO": "nvls"}, "leaves Broadcast nothing .* write allreduce:nvls"),
        ({"NCCL_ALGO": "allreduce:nvls", "NCCL_PROTO": "LL"}, "leaves AllReduce nothing"),
        ({"NCCL_ALGO": "allreduce:collnetchain", "NCCL_PROTO": "LL,LL128"}, "leaves AllReduce nothing"),
        ({"NCCL_ALGO": "allgather:pat"}, "leaves AllGather nothing"),
        ({"NCCL_ALGO": "allreduce:nvlstree"}, "leaves AllReduce nothing"),
        ({"NCCL_PROTO": "^LL,LL128,Simple"}, "leaves AllReduce nothing"),
        ({"NCCL_MIN_NCHANNELS": "16", "NCCL_MAX_NCHANNELS": "8"}, "wanted at most NCCL_MAX_NCHANNELS"),
        ({"NCCL_MIN_CTAS": "9", "NCCL_MAX_CTAS": "8"}, "wanted at most NCCL_MAX_CTAS"),
        ({"NCCL_NTHREADS": "100"}, "a multiple of 32 from 64 to 512, got '100'"),
        ({"NCCL_NTHREADS": "1024"}, "a multiple of 32 from 64 to 512"),
        ({"NCCL_P2P_LEVEL": "sys"}, "did you mean SYS"),
        ({"NCCL_P2P_DISABLE": "true"}, "wanted one of 0, 1"),
        ({"NCCL_BUFFSIZE": "16MB"}, "a whole number from 1"),
        ({"NCCL_MAX_NCHANNELS": "016"}, "from 1 to 64"),
        ({"NCCL_IB_TIMEOUT": "twenty"}, "NCCL reads anything else as 0"),
        ({"NCCL_THREAD_THRESHOLDS": "8 8 64"}, "6 whole numbers"),
        ({"NCCL_MIN_NCHANNEL": "8"}, "did you mean NCCL_MIN_NCHANNELS"),
        ({"NCCL_THREAD_THRESHOLD": "8"}, "no longer read by NCCL .* did you mean NCCL_THREAD_THRESHOLDS"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "not an NCCL variable"),
    ],
)
def test_sets_that_nccl_would_ignore_or_refuse_later(given_set: dict[str, str], message: str) -> None:
    ((name, found),) = set_problems(given_set)
    assert name in given_set
    assert re.search(message, found)


@pytest.mark.parametrize(
    "given_set",
    [
        {},
        FOUNDING_SIX,
        {"NCCL_ALGO": "allreduce:tree"},
        {"NCCL_ALGO": "ring;allreduce:tree,ring"},
        {"NCCL_ALGO": "NVLS,Ring"},
        {"NCCL_PROTO": "^LL128"},
        {"NCCL_PROTO": "LL,LL128,Simple", "NCCL_P2P_LEVEL": "PHB"},
        {"NCCL_MIN_NCHANNELS": "8", "NCCL_MAX_NCHANNELS": "8"},
        {"NCCL_THREAD_THRESHOLDS": "8 8 64 64 8 64"},
        {"NCCL_P2P_LEVEL": "5", "NCCL_CUMEM_ENABLE": "-2", "NCCL_IB_TIMEOUT": "0x16"},
        *({name: value} for name, value in SGLANG_DEFAULTS.items()),
    ],
)
def test_legal_sets_pass(given_set: dict[str, str]) -> None:
    assert list(set_problems(given_set)) == []


def test_an_unknown_name_can_be_swept_on_purpose() -> None:
    assert list(set_problems({"NCCL_MIN_NCHANNEL": "8"}, allow_unknown=True)) == []
    assert "NCCL does not read it" in inert_at_decode({"NCCL_MIN_NCHANNEL": "8"}).values()


def test_each_wrong_variable_is_told_once() -> None:
    wrong = {"NCCL_ALGO": "Tree,x", "NCCL_PROTO": "LL", "NCCL_NTHREADS": "1"}
    assert [name for name, _ in set_problems(wrong)] == ["NCCL_ALGO", "NCCL_NTHREADS"]


def test_what_of_the_founding_six_is_inert_in_decode() -> None:
    assert set(inert_at_decode(FOUNDING_SIX)) == {"NCCL_MAX_NCHANNELS", "NCCL_BUFFSIZE", "NCCL_NTHREADS"}


@pytest.mark.parametrize(
    ("given_set", "inert"),
    [
        ({"NCCL_MAX_NCHANNELS": "2"}, set()),
        ({"NCCL_MIN_NCHANNELS": "8"}, set()),
        ({"NCCL_MIN_NCHANNELS": "8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}, {"NCCL_MIN_NCHANNELS"}),
        ({"NCCL_IB_DISABLE": "1"}, {"NCCL_IB_DISABLE"}),
        ({"NCCL_NVLS_ENABLE": "0"}, {"NCCL_NVLS_ENABLE"}),
        ({"NCCL_NVLS_ENABLE": "2"}, set()),
        ({"NCCL_P2P_LEVEL": "SYS", "NCCL_P2P_DISABLE": "1"}, {"NCCL_P2P_LEVEL"}),
        ({"NCCL_NTHREADS": "128"}, set()),
    ],
)
def test_inert_at_decode(given_set: dict[str, str], inert: set[str]) -> None:
    assert set(inert_at_decode(given_set)) == inert


def test_cautions_name_what_has_hung_or_corrupted() -> None:
    dangerous = {
        "NCCL_P2P_LEVEL": "SYS",
        "NCCL_PROTO": "LL,LL128",
        "NCCL_GRAPH_REGISTER": "1",
        "NCCL_NVLS_ENABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
    }
    assert set(cautions(dangerous)) == set(dangerous) - {"NCCL_P2P_DISABLE"}
    assert cautions({"NCCL_PROTO": "^LL128", "NCCL_P2P_LEVEL": "PXB"}) == {}


def test_nccl_env_is_sorted_and_canonical() -> None:
    spec = SweepSpec(
        sweep="t",
        engine=EngineSpec(kind="simulated", machine="m"),
        search=SearchSpec(),
        nccl_sets={"one": {"NCCL_PROTO": "^ll128", "NCCL_ALGO": "RING;AllReduce:tree"}},
    )
    assert nccl_env(spec, "one") == (("NCCL_ALGO", "Ring;allreduce:Tree"), ("NCCL_PROTO", "^LL128"))
    assert nccl_env(spec, "default") == ()
