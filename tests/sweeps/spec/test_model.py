from __future__ import annotations

import dataclasses
import re
import textwrap
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sweeps.choices import nearest
from sweeps.engines import OPENERS
from sweeps.spec.document import SpecError
from sweeps.spec.engine_kinds import ENGINE_KINDS, EngineKind
from sweeps.spec.model import ControlSpec, Deadlines, SweepSpec
from sweeps.spec.reading import fingerprint, parse_spec, read_spec
from sweeps.spec.space import Space

SPECS = sorted((Path(__file__).parents[3] / "sweeps" / "specs").glob("*.yaml"))

SIMULATED: dict[str, Any] = {
    "sweep": "t",
    "engine": {"kind": "simulated", "machine": "m"},
    "search": {"num_steps": [0, 2]},
}
SGLANG: dict[str, Any] = {
    "sweep": "t",
    "engine": {"kind": "sglang", "model_path": "org/model"},
    "search": {"num_steps": [0, 2]},
    "drafters": {"d": "org/drafter"},
}


def spec_with(base: dict[str, Any], **changes: Any) -> SweepSpec:
    """`engine__args={...}` sets engine.args."""
    document: dict[str, Any] = yaml.safe_load(yaml.safe_dump(base))
    for path, value in changes.items():
        *sections, last = path.split("__")
        section = document
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    return parse_spec(yaml.safe_dump(document), source="s.yaml")


def problems(base: dict[str, Any], **changes: Any) -> list[str]:
    with pytest.raises(SpecError) as caught:
        spec_with(base, **changes)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("path", SPECS, ids=[path.stem for path in SPECS])
def test_specs_that_come_along_load_and_plan(path: Path) -> None:
    space = Space(read_spec(path))
    assert len(space.configurations()) > 1
    assert not space.control.speculates


def test_the_founding_case_asks_the_founding_question() -> None:
    spec = read_spec(next(path for path in SPECS if path.stem == "founding_case"))
    assert spec.nccl_sets["founding-six"] == {
        "NCCL_PROTO": "LL",
        "NCCL_ALGO": "Ring",
        "NCCL_P2P_LEVEL": "SYS",
        "NCCL_MAX_NCHANNELS": "16",
        "NCCL_BUFFSIZE": "16777216",
        "NCCL_NTHREADS": "512",
    }
    space = Space(spec)
    assert space.control in space.configurations()
    founding = space.resolve({"num_steps": 2, "eagle_topk": 1, "nccl": "founding-six"})
    assert founding in space.configurations()
    assert spec.target.tok_s == 150


def test_every_problem_is_a_line_with_file_line_key_value_and_choice() -> None:
    text = textwrap.dedent(
        """\
        sweep: t
        engine: {kind: simulatd, machine: m}
        search:
          num_stpes: [1, 2]
          eagle_topk: [1, "two", -1]
          nccl: default
        study: {metric: toks, sampler: tpe}
        """
    )
    with pytest.raises(SpecError) as caught:
        parse_spec(text, source="bad.yaml")
    assert str(caught.value).splitlines() == [
        "bad.yaml:2: engine.kind: got 'simulatd'; did you mean simulated? (choices: simulated, sglang, replay)",
        "bad.yaml:4: search.num_stpes: unknown key, value [1, 2]; did you mean num_steps? "
        "(choices: num_steps, eagle_topk, num_draft_tokens, drafter, nccl, args, env)",
        "bad.yaml:5: search.eagle_topk[1]: wanted a whole number, got 'two'",
        "bad.yaml:5: search.eagle_topk[2]: wanted greater than or equal to 1, got -1",
        "bad.yaml:6: search.nccl: wanted a list, got 'default': write [default]",
        "bad.yaml:7: study.metric: got 'toks'; did you mean tok_s? (choices: tok_s, cycle_ms, verify_ms)",
        "bad.yaml:7: study.sampler: wanted a mapping with the keys name, options, got 'tpe'",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", r"x\.yaml:1: not valid YAML"),
        ("- 1", r"x\.yaml: wanted a mapping with the keys of a sweep, got \[1\]"),
        ("", "got nothing"),
        ("sweep: a\nsweep: b", r"x\.yaml:1: sweep: written twice, again on line 2"),
        ("engine:\n  args: {tp: 1}\n  args: {tp: 2}", r"x\.yaml:2: engine\.args: written twice"),
        ("sweep: a", r"x\.yaml: engine: wanted a mapping with the keys kind, .*, but the key is absent"),
    ],
)
def test_broken_documents(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_spec(text, source="x.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sweep": "a b"}, "sweep: wanted a name of letters"),
        ({"engine__machine": None}, "engine.machine: wanted one for the simulated engine"),
        ({"engine": {"kind": "replay"}}, "engine.recording: wanted one for the replay engine"),
        ({"engine": {"kind": "replay", "recording": "/no/where"}}, "engine.recording: wanted a results folder"),
        ({"search__num_steps": []}, "search.num_steps: wanted at least one value"),
        ({"engine__args": {"dp-size": 2}}, "engine.args.dp-size: not supported: data parallel ranks"),
        ({"search__args": {"enable-dp-attention": [True]}}, "search.args.enable-dp-attention: not supported"),
        ({"search__num_steps": [1, 2, 1]}, "search.num_steps: 1 is there twice"),
        ({"search__num_steps": [-1]}, "greater than or equal to 0, got -1"),
        ({"search__num_steps": [True]}, "wanted a whole number, got True"),
        ({"search__eagle_topk": []}, "search.eagle_topk: wanted at least one value"),
        ({"search__nccl": []}, "search.nccl: wanted at least one value"),
        ({"search__args": {"page-size": []}}, "search.args.page-size: wanted at least one value"),
        ({"search__args": {"x": [1, True]}}, "search.args.x: 1 is there twice"),
        ({"search__nccl": ["default", "sx"], "nccl_sets": {"six": {}}}, "no NCCL set 'sx'; did you mean six?"),
        ({"search__nccl": ["defualt"]}, "search.nccl[0]: no NCCL set 'defualt'; did you mean default?"),
        ({"nccl_sets": {"default": {}}}, "`default` is the empty set"),
        ({"search__drafter": ["b"], "drafters": {"a": "x"}}, "no drafter 'b'; choices: a"),
        ({"study__sampler": {"name": "tpee"}}, "study.sampler.name: no sampler 'tpee'; did you mean tpe?"),
        ({"study__pruner": {"name": "wilcox"}}, "did you mean wilcoxon?"),
        ({"study__stop_within": 1.5}, "study.stop_within: wanted less than 1"),
        ({"workload__concurrency": []}, "workload.concurrency: wanted at least one value"),
        ({"workload__concurrency": [1, 0]}, "workload.concurrency[1]: wanted greater than or equal to 1"),
        ({"workload__concurrency": [1, 4, 1]}, "workload.concurrency: wanted each number once, got [1, 4, 1]"),
        (
            {"workload__concurrency": [1, 8], "search__args": {"cuda-graph-max-bs": [4, 8]}},
            "workload.concurrency: 8 requests at a time, but cuda-graph-max-bs is 4: larger batches would run without",
        ),
        (
            {"workload__concurrency": 8, "engine__args": {"max-running-requests": 2}},
            "workload.concurrency: 8 requests at a time, but max-running-requests is 2: further requests would wait",
        ),
        ({"workload__temperature": float("nan")}, "workload.temperature: wanted a finite number, got nan"),
        ({"workload__blocks": 0}, "workload.blocks: wanted greater than or equal to 1"),
        ({"budget__gpu_hours": 0}, "budget.gpu_hours: wanted greater than 0"),
        ({"target__tok_s": -1}, "target.tok_s: wanted greater than 0"),
        ({"engine__deadlines_s": {"load": 0}}, "engine.deadlines_s.load: wanted greater than 0"),
        ({"engine__deadlines_s": {"laod": 1}}, "did you mean load?"),
        ({"engine__args": {"speculative-num-steps": 3}}, "it is the dimension search.num_steps"),
        ({"engine__args": {"port": 3}}, "the operating system is asked for a free one"),
        ({"search__args": {"--host": ["a"]}}, "the server listens on this machine alone"),
        ({"engine__args": {"tp_size": 8}}, "without dashes in front: tp-size"),
        ({"engine__args": {"a": 1}, "search__args": {"a": [1, 2]}}, "search.args.a: set in engine.args too"),
        ({"engine__env": {"A": "1"}, "search__env": {"A": ["1", "2"]}}, "search.env.A: set in engine.env too"),
        ({"engine__env": {"A": True}}, "engine.env.A: wanted the text of an environment variable: quote it"),
        ({"engine__env": {"A": None}}, "engine.env.A: wanted text, got nothing"),
        ({"engine__env": {"A-B": "1"}}, "wanted the name of an environment variable"),
        ({"engine__env": {"NCCL_P2P_LEVL": "SYS"}}, "engine.env.NCCL_P2P_LEVL: not an NCCL variable, value 'SYS'"),
        ({"search__env": {"NCCL_PROTO": ["LL", "LL12"]}}, "search.env.NCCL_PROTO: no name 'LL12'"),
        ({"search__env": {"CUDA_DEVICE_MAX_CONNECTIONS": ["1"]}}, "SGLang forces 8"),
        ({"engine__env": {"CUDA_VISIBLE_DEVICES": "0"}}, "Ray gives each trial its GPUs"),
        ({"nccl_sets": {"a": {"FOO": 1}}}, "nccl_sets.a.FOO: not an NCCL variable"),
        ({"nccl_sets": {"a": {"NCCL_ALGO": "Tree"}}}, "write allreduce:tree"),
        ({"search__env": {"SGLANG_SIMULATE_ACC_LEN": ["2"]}}, "say so with acceptance: pinned"),
        ({"acceptance": "mixed"}, "acceptance: got 'mixed'; choices: measured, pinned"),
        (
            {"acceptance": "pinned", "engine__env": {"SGLANG_SIMULATE_ACC_LEN": "0.5"}},
            "engine.env.SGLANG_SIMULATE_ACC_LEN: wanted tokens per cycle, bonus token included (1 or more), got '0.5'",
        ),
    ],
)
def test_what_cannot_be_run_is_told_in_one_line(changes: dict[str, Any], message: str) -> None:
    (line,) = problems(SIMULATED, **changes)
    assert line.startswith("s.yaml")
    assert message in line


def test_a_variable_has_one_owner() -> None:
    changes: dict[str, Any] = {"nccl_sets": {"a": {"NCCL_PROTO": "LL"}}, "search__nccl": ["default", "a"]}
    for section, value in (("engine__env", "LL"), ("search__env", ["LL"])):
        (line,) = problems(SIMULATED, **changes, **{section: {"NCCL_PROTO": value}})
        assert "nccl_sets.a.NCCL_PROTO: set in" in line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine__model_path": None}, "engine.model_path: wanted one for the sglang engine"),
        ({"engine__model_path": "/no/model"}, "engine.model_path: wanted a checkpoint, but /no/model does not exist"),
        ({"drafters": {"d": "/no/drafter"}}, "drafters.d: wanted a checkpoint, but /no/drafter does not exist"),
        ({"drafters": {"d": ""}}, "drafters.d: wanted a path"),
        ({"drafters": {}}, "drafters: wanted a drafter: EAGLE3 cannot speculate without its checkpoint"),
        ({"acceptance": "pinned"}, "acceptance: `pinned` wants the accept length in engine.env"),
        ({"engine__args": {"tp-size": 8}, "resources__gpus": 4}, "tp-size x pp-size is 8, but a trial holds 4"),
        ({"search__args": {"tp": [4, 8]}, "engine__args": {"pp": 2}}, "is 16, but a trial holds 8"),
        ({"engine__env": {"NCCL_TOPO_FILE": "/no/file"}}, "engine.env.NCCL_TOPO_FILE: wanted a file"),
        ({"nccl_sets": {"a": {"NCCL_GRAPH_FILE": "/no/file"}}}, "nccl_sets.a.NCCL_GRAPH_FILE: wanted a file"),
    ],
)
def test_what_the_real_engine_needs(changes: dict[str, Any], message: str) -> None:
    (line,) = problems(SGLANG, **changes)
    assert message in line


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"drafters": {}, "search__num_steps": [0]},
        {"drafters": {}, "engine__algorithm": "NGRAM"},
        {"engine__args": {"tp-size": 8, "device": "cpu"}, "resources__gpus": 1},
        {"engine__args": {"speculative-draft-attention-backend": "triton"}},
        {"acceptance": "pinned", "engine__env": {"SGLANG_SIMULATE_ACC_LEN": 2.5}},
    ],
)
def test_what_the_real_engine_takes(changes: dict[str, Any]) -> None:
    assert spec_with(SGLANG, **changes).engine.kind == "sglang"


def test_numbers_become_the_text_of_an_environment() -> None:
    spec = spec_with(
        SIMULATED,
        nccl_sets={"a": {"NCCL_NTHREADS": 512}},
        engine__env={"B": 2.5},
        search__env={"C": [0, 1, "auto"]},
    )
    assert spec.nccl_sets["a"] == {"NCCL_NTHREADS": "512"}
    assert spec.engine.env == {"B": "2.5"}
    assert spec.search.env == {"C": ("0", "1", "auto")}


def test_a_misspelt_variable_can_be_a_negative_control() -> None:
    misspelt = {"a": {"NCCL_MIN_NCHANNEL": "8"}}
    assert "did you mean NCCL_MIN_NCHANNELS?" in problems(SIMULATED, nccl_sets=misspelt)[0]
    assert spec_with(SIMULATED, nccl_sets=misspelt, allow_unknown_nccl=True).nccl_sets == misspelt


def test_relative_paths_count_from_the_spec(weird_tmp_path: Path) -> None:
    for name in ("model", "drafter"):
        (weird_tmp_path / name).mkdir()
    for name in ("topo.xml", "prompts.jsonl"):
        (weird_tmp_path / name).touch()
    document = {
        "sweep": "t",
        "engine": {"kind": "sglang", "model_path": "./model", "python": "bin/python"},
        "search": {"num_steps": [2], "nccl": ["topo"]},
        "nccl_sets": {"topo": {"NCCL_TOPO_FILE": "topo.xml", "NCCL_PROTO": "LL"}},
        "drafters": {"here": "drafter", "hub": "org/drafter"},
        "workload": {"prompts": "prompts.jsonl"},
    }
    path = weird_tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(document), "utf-8")
    spec = read_spec(path)
    assert spec.engine.model_path == str(weird_tmp_path / "model")
    assert spec.engine.python == "bin/python"
    assert spec.drafters == {"here": str(weird_tmp_path / "drafter"), "hub": "org/drafter"}
    assert spec.nccl_sets["topo"] == {"NCCL_TOPO_FILE": str(weird_tmp_path / "topo.xml"), "NCCL_PROTO": "LL"}
    assert spec.workload.prompts == str(weird_tmp_path / "prompts.jsonl")
    (weird_tmp_path / "prompts.jsonl").unlink()
    (weird_tmp_path / "model").rmdir()
    with pytest.raises(SpecError) as caught:
        read_spec(path)
    assert [line.split(": ")[1] for line in str(caught.value).splitlines()] == ["engine.model_path", "workload.prompts"]


def test_an_unreadable_spec_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"gone\.yaml: wanted the YAML of a sweep, but it cannot be read"):
        read_spec(tmp_path / "gone.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="cannot be read"):
        read_spec(tmp_path / "binary.yaml")


plain = st.none() | st.booleans() | st.integers(-3, 99) | st.floats() | st.text(max_size=5)
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
FIELDS = [field.name for field in dataclasses.fields(SweepSpec)]


def refusal(text: str) -> list[str]:
    """The lines of the SpecError, none where the text is a spec; anything else fails the test."""
    try:
        parse_spec(text, source="f.yaml")
    except SpecError as error:
        return str(error).splitlines()
    return []


@given(st.dictionaries(st.sampled_from([*FIELDS, "x"]), values, max_size=5))
def test_any_document_is_a_spec_or_a_spec_error(document: dict[str, Any]) -> None:
    text = yaml.safe_dump({**SIMULATED, **document}, allow_unicode=True)
    assert all(re.match(r"f\.yaml(:\d+)?: ", line) for line in refusal(text))


@given(st.sampled_from(["engine", "search", "workload", "study", "control", "budget"]), st.data())
def test_any_section_is_a_spec_or_a_spec_error(section: str, data: st.DataObject) -> None:
    kept = SIMULATED.get(section, {})
    keys = {"engine": ["args", "env", "deadlines_s", "kind", "noise"], "search": ["args", "env", "nccl", "eagle_topk"]}
    names = st.sampled_from(keys.get(section, ["blocks", "sampler", "options", "every", "trials", "seed"]))
    document = {**SIMULATED, section: {**kept, **data.draw(st.dictionaries(names, values, max_size=3))}}
    assert all(f": {section}" in line for line in refusal(yaml.safe_dump(document)))


def test_fingerprint_tells_texts_apart() -> None:
    assert fingerprint("a: 1") == fingerprint("a: 1") != fingerprint("a: 2")
    assert re.fullmatch(r"[0-9a-f]{12}", fingerprint(""))


def test_nearest_offers_only_what_is_like_it() -> None:
    assert nearest("num_stpes", ["num_steps", "eagle_topk"]) == "num_steps"
    assert nearest("nccl_proto", ["NCCL_PROTO"]) == "NCCL_PROTO"
    assert nearest("zzz", ["num_steps"]) is None


def test_defaults_pass_their_own_checks() -> None:
    assert spec_with(SIMULATED).engine.deadlines_s == Deadlines()
    assert spec_with(SIMULATED).control == ControlSpec()


def test_every_engine_that_a_spec_may_name_has_facts_and_can_be_opened() -> None:
    assert set(ENGINE_KINDS) == set(OPENERS) == set(get_args(EngineKind))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"engine": {"args": {"api-key": "x"}}}, "the sweep sets this argument: the load client sends none"),
        ({"engine": {"args": {"admin_api_key": "x"}}}, "the sweep sets this argument"),
        ({"engine": {"args": {"ssl-keyfile": "x"}}}, "the load client speaks plain HTTP"),
        ({"engine": {"args": {"nnodes": 2}}}, "one server on the GPUs of one node"),
        ({"engine": {"args": {"storage-access-key": "x"}}}, "every user of the machine can read a command line"),
        ({"search": {"env": {"HF_TOKEN": ["a", "b"]}}}, "wanted no secret as a dimension"),
        ({"search": {"args": {"hf-auth-token": ["a"]}}}, "every user of the machine can read a command line"),
        ({"engine": {"inherit": ["A B"]}}, "wanted the name of an environment variable"),
        ({"engine": {"inherit": ["RAY_AUTH_TOKEN"]}}, "whoever has it may run code on the cluster"),
        ({"engine": {"inherit": ["A"], "env": {"A": "1"}}}, "A is set in engine.env too"),
        ({"engine": {"env": {"A": "x\0"}}}, r"wanted printable text, got the character \x00"),
    ],
)
def test_doors_of_a_spec_are_closed(change: dict[str, dict[str, Any]], told: str) -> None:
    document: dict[str, Any] = yaml.safe_load(DOORS)
    for section, keys in change.items():
        for key, value in keys.items():
            document[section][key] = value
    with pytest.raises(SpecError) as caught:
        parse_spec(yaml.safe_dump(document), source="s")
    assert told in str(caught.value)


def test_a_secret_of_the_wrong_shape_is_not_shown() -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(DOORS + "HF_TOKEN: marker\n", source="s")
    assert "marker" not in str(caught.value)


DOORS = """
sweep: s
engine: {kind: simulated, machine: h200-nvlink-x8}
search: {num_steps: [0]}
"""
