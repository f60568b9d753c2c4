from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.choices import choose
from sweeps.spec.document import Problem, SpecError, read_document, refuse
from sweeps.spec.yaml_text import read_text


def test_lines_of_keys_and_items() -> None:
    document = read_document("a:\n  b: 1\n  c:\n    - 2\n    - d: 3\n", source="s")
    assert document.lines == {("a",): 1, ("a", "b"): 2, ("a", "c"): 3, ("a", "c", 0): 4, ("a", "c", 1): 5} | {
        ("a", "c", 1, "d"): 5
    }
    assert document.problems == ()


def test_keys_written_twice_are_problems_at_any_depth() -> None:
    document = read_document("a: {b: 1, b: 2}\nc: [{d: 1, d: 1}]", source="s")
    assert {problem.key for problem in document.problems} == {("a", "b"), ("c", 0, "d")}


def test_aliases_and_merges_are_walked_once() -> None:
    document = read_document("base: &x {b: 1}\none: {<<: *x, b: 2}\ntwo: *x", source="s")
    assert document.problems == ()
    assert document.values["one"] == {"b": 2}


BOMB = "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (BOMB, r"s:\d+: wanted at most 50000 values, but aliases repeat more"),
        ("a: &l [*l]", "s:1: an alias repeats a value inside itself"),
        ("a: &l {b: {c: *l}}", "s:1: an alias repeats a value inside itself"),
        ("a: " + "[" * 5000, "s:1: wanted at most 40 levels of nesting, got more"),
        ("a: " + "{b: " * 5000, "s:1: wanted at most 40 levels of nesting, got more"),
        ("- " * 5000, "s:1: wanted at most 40 levels of nesting, got more"),
        ("a: " + "x" * (300 << 10), "s: wanted at most 256 KiB of YAML, got 300 KiB"),
        ("a: 2026-99-99", "s: not valid YAML: a value cannot be read .*month"),
        ("a: " + "9" * 5000, "s: not valid YAML: a value cannot be read"),
        ("a: !!float ''", "s: not valid YAML: a value cannot be read"),
        ("a: !!python/object/apply:os.system [id]", "could not determine a constructor"),
    ],
)
def test_text_that_would_hang_or_fill_the_memory_is_refused_in_one_line(text: str, told: str) -> None:
    with pytest.raises(SpecError, match=told) as caught:
        read_document(text, source="s")
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 400


@given(st.text() | st.text(alphabet="a:&*[]{}-<!?|>\n\t \"'\\#%@,09.", max_size=60))
def test_any_text_is_a_document_or_one_line(text: str) -> None:
    told = ""
    try:
        read_document(text, source="s")
    except SpecError as error:
        told = str(error)
    assert told.isprintable()


@pytest.mark.parametrize("text", ['{"a\\e[2J": 1}', 'a: {"b\\n": 1}', 'a: ["x\\0"]', 'a: "\\u202e"', 'a: "\\ud800"'])
def test_text_that_commands_a_terminal_is_a_problem(text: str) -> None:
    (problem,) = read_document(text, source="s").problems
    assert "printable" in problem.message
    with pytest.raises(SpecError) as caught:
        refuse([problem], source="s", lines={})
    assert str(caught.value).isprintable()


def test_large_files_and_what_is_no_file_are_refused_unread(tmp_path: Path) -> None:
    large = tmp_path / "large.yaml"
    with large.open("wb") as file:
        file.truncate(100 << 20)
    os.mkfifo(tmp_path / "pipe.yaml")
    for path, told in ((large, "at most 256 KiB"), (tmp_path / "pipe.yaml", "not a plain file"), (tmp_path, "not a")):
        with pytest.raises(SpecError, match=told):
            read_text(path)


def test_problems_are_told_in_the_order_of_the_file() -> None:
    lines: dict[tuple[str | int, ...], int] = {("a",): 1, ("b",): 5}
    with pytest.raises(SpecError) as caught:
        refuse(
            [Problem(("b", "x"), "late"), Problem(("a", 0), "early"), Problem(("z",), "nowhere")],
            source="s",
            lines=lines,
        )
    assert str(caught.value).splitlines() == ["s: z: nowhere", "s:1: a[0]: early", "s:5: b.x: late"]
    refuse([], source="s", lines=lines)


def test_a_problem_stays_on_its_line_whatever_it_quotes() -> None:
    with pytest.raises(SpecError) as caught:
        refuse([Problem(("a", "b\n\x1b[1mc", 1), "got\r\u2028x")], source="s", lines={})
    assert str(caught.value) == r"s: a.b\n\x1b[1mc[1]: got\r\u2028x"


def test_choices_without_a_likely_one() -> None:
    assert choose("zzz", ["grid", "tpe"]) == "choices: grid, tpe"
    assert choose("tpee", ["grid", "tpe"]) == "did you mean tpe? (choices: grid, tpe)"
    assert choose("a", []) == "choices: none"
