from __future__ import annotations

import pytest

from sweeps.choices import choose
from sweeps.spec.document import Problem, SpecError, read_document, refuse


def test_lines_of_keys_and_items() -> None:
    document = read_document("a:\n  b: 1\n  c:\n    - 2\n    - d: 3\n", source="s")
    assert document.lines == {("a",): 1, ("a", "b"): 2, ("a", "c"): 3, ("a", "c", 0): 4, ("a", "c", 1): 5} | {
        ("a", "c", 1, "d"): 5
    }
    assert document.problems == ()


def test_keys_written_twice_are_problems_at_any_depth() -> None:
    document = read_document("a: {b: 1, b: 2}\nc: [{d: 1, d: 1}]", source="s")
    assert {problem.key for problem in document.problems} == {("a", "b"), ("c", 0, "d")}


def test_aliases_merges_and_loops_are_walked_once() -> None:
    document = read_document("base: &x {b: 1}\none: {<<: *x, b: 2}\ntwo: *x\nloop: &l [*l]", source="s")
    assert document.problems == ()
    assert document.values["one"] == {"b": 2}
    bomb = "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))])
    assert len(read_document(bomb, source="s").lines) < 200


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
