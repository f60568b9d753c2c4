"""Server arguments: by the server's answer, by its log, by its ranks."""

import pytest

from sweeps.engines.argument_evidence import grade_arguments


def test_arguments() -> None:
    requested = {"speculative_num_steps": "3", "speculative_eagle_topk": "1", "page_size": "64", "no_such": "1"}
    resolved = {"speculative_num_steps": "5", "speculative_eagle_topk": "1", "page_size": "1"}
    rows = grade_arguments(
        requested, resolved, in_ranks=[{"speculative_num_steps": "3"}, {"speculative_num_steps": "5"}]
    )
    graded = {(row.rank, row.setting): row.grade for row in rows}
    assert graded == {
        (0, "args.speculative_num_steps"): "effective",
        (1, "args.speculative_num_steps"): "overridden",
        (0, "args.speculative_eagle_topk"): "effective",
        (1, "args.speculative_eagle_topk"): "effective",
        (0, "args.page_size"): "overridden",
        (1, "args.page_size"): "overridden",
        (0, "args.no_such"): "not_seen",
        (1, "args.no_such"): "not_seen",
    }


@pytest.mark.parametrize(
    ("told", "logged", "grade", "effective"),
    [
        ("fa3", "fa3", "effective", "fa3"),
        ("fa3", "triton", "overridden", "triton"),
        ("triton", "fa3", "overridden", "triton"),
        (None, "fa3", "effective", "fa3"),
        ("fa3", None, "effective", "fa3"),
    ],
)
def test_the_log_can_contradict_the_servers_answer(
    told: str | None, logged: str | None, grade: str, effective: str
) -> None:
    (row,) = grade_arguments(
        {"attention_backend": "fa3"}, {"attention_backend": told}, logged={"attention_backend": logged}
    )
    assert (row.grade, row.seen, row.effective) == (grade, told, effective)
    held = grade_arguments({"x": "2"}, {"x": "3"}, logged={"x": "3"}, in_ranks=[{"x": "2"}])
    assert held[0].grade == "effective", "what a rank runs with is nearer than what was said at the start"


@pytest.mark.parametrize(
    ("wanted", "held"), [("true", "True"), ("0.8", "0.80"), ("4", "4"), ("None", None), ("fa3", "fa3")]
)
def test_equal_arguments_in_different_spelling(wanted: str, held: str | None) -> None:
    (row,) = grade_arguments({"x": wanted}, {"x": held})
    assert row.grade == "effective"
