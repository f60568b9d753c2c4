from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.engines.base import EngineError
from sweeps.measure.output_check import (
    Outputs,
    agree,
    control_outputs,
    outputs_of,
    refuse_inert_draft,
    refuse_wrong_output,
)
from sweeps.results.tables import ResultsFolder, write_part

HEADS: Outputs = {(1, 0, f"p{number}"): f"h{number}" for number in range(8)}


def changed(count: int) -> Outputs:
    return {key: "other" if number < count else head for number, (key, head) in enumerate(HEADS.items())}


def block(accept_length: float | None, num_cycles: int, suspect: str | None = None) -> dict[str, Any]:
    return {"accept_length": accept_length, "num_cycles": num_cycles, "suspect": suspect}


def inert(blocks: list[dict[str, Any]]) -> bool:
    try:
        refuse_inert_draft(blocks)
    except EngineError:
        return True
    return False


def test_a_draft_that_is_never_accepted_is_inert() -> None:
    with pytest.raises(EngineError, match="no draft token is accepted") as raised:
        refuse_inert_draft([block(1.0, 60), block(1.0, 60)])
    assert (raised.value.kind, raised.value.transient) == ("draft_inert", False)


def test_a_draft_that_is_accepted_by_chance_is_inert() -> None:
    with pytest.raises(EngineError, match="hardly a draft token is accepted"):
        refuse_inert_draft([block(1.01, 120), block(1.02, 400)])


@pytest.mark.parametrize(
    "blocks",
    [
        [],
        [block(None, 500)],
        [block(1.0, 60)],
        [block(1.0, 60), block(1.03, 60)],
        [block(1.04, 300)],
        [block(1.0, 300, suspect="times: decode_s 0")],
        [block(1.2, 5000)],
    ],
)
def test_no_speculation_few_cycles_or_a_poor_draft_are_not(blocks: list[dict[str, Any]]) -> None:
    assert not inert(blocks)


def test_output_like_the_controls_passes_with_its_agreement() -> None:
    agreement = refuse_wrong_output(changed(2), [HEADS, HEADS, changed(1)])
    assert agreement is not None
    assert (agreement.equal, agreement.compared, agreement.share) == (6, 8, 0.75)


def test_output_unlike_most_controls_is_wrong() -> None:
    with pytest.raises(EngineError, match="in 0 of 8 requests") as raised:
        refuse_wrong_output(changed(8), [HEADS])
    assert raised.value.kind == "wrong_output"


def test_a_broken_first_control_is_outvoted() -> None:
    broken = dict.fromkeys(HEADS, "broken")
    with pytest.raises(EngineError, match="in 0 of 8 requests"):
        refuse_wrong_output(broken, [broken, HEADS, HEADS])
    assert refuse_wrong_output(HEADS, [broken, HEADS, HEADS]) is not None


def test_where_controls_disagree_nobody_fails() -> None:
    assert refuse_wrong_output(changed(8), [HEADS, dict.fromkeys(HEADS, "broken")]) is None
    half = refuse_wrong_output({**changed(8), **dict(list(HEADS.items())[4:])}, [HEADS, changed(4)])
    assert half is not None
    assert (half.equal, half.compared) == (4, 4)


def test_without_a_control_or_common_requests_nothing_is_judged() -> None:
    assert refuse_wrong_output(HEADS, []) is None
    assert refuse_wrong_output(HEADS, [{(1, 9, "p0"): "h"}]) is None
    assert refuse_wrong_output({(1, 0, "p0"): "x"}, [HEADS]) is None


KEYS = st.tuples(st.sampled_from((None, 1, 4)), st.integers(0, 3), st.sampled_from("abcd"))


@given(st.dictionaries(KEYS, st.sampled_from("xy"), min_size=4))
def test_a_trial_agrees_with_itself(heads: Outputs) -> None:
    agreement = agree(heads, [heads])
    assert agreement is not None
    assert agreement.share == 1.0


def test_controls_are_read_from_their_parts(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path)
    row = {
        "sweep_id": "s", "attempt": 1, "block_index": 0, "prompt_id": "p", "prompt_tokens": 1, "output_tokens": 1,
        "latency_ms": 1.0, "output_hash": "o",
    }  # fmt: skip
    for trial_id, head in (("k0000", "h"), ("k0001", None), ("t0000", "t")):
        rows = [{**row, "trial_id": trial_id, "head_hash": head}]
        write_part(folder, "requests", rows, trial_id=trial_id, attempt=1)
    assert control_outputs(folder) == ({(None, 0, "p"): "h"},)
    assert outputs_of([]) == {}
