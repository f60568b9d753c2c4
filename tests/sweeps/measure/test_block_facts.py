from __future__ import annotations

import pytest

from sweeps.measure.block_facts import allowed_rules, shared_prefixes
from sweeps.spec.model import ChecksSpec
from sweeps.spec.workload import Prompt


def test_a_prompt_shares_what_another_begins_with() -> None:
    prompts = [
        Prompt(prompt_id="a", token_ids=(1, 2, 3, 4)),
        Prompt(prompt_id="b", token_ids=(1, 2, 9)),
        Prompt(prompt_id="c", token_ids=(5, 6)),
        Prompt(prompt_id="d", text="You are kind. What is 1?"),
        Prompt(prompt_id="e", text="You are kind. Who is it?"),
        Prompt(prompt_id="f", text="No."),
    ]
    shares = shared_prefixes([*prompts, prompts[0]])
    assert shares == pytest.approx({"a": 0.5, "b": 2 / 3, "c": 0.0, "d": 16 / 24, "e": 16 / 24, "f": 0.0})
    assert shared_prefixes([]) == {}


def test_checks_that_are_off_take_their_rules_with_them() -> None:
    assert allowed_rules(ChecksSpec(), "measured") == frozenset()
    assert allowed_rules(ChecksSpec(), "pinned") == {"looping", "same_answer"}
    assert allowed_rules(ChecksSpec(looping="allow"), "measured") == {"looping"}
    assert allowed_rules(ChecksSpec(wrong_output="allow"), "measured") == {"same_answer"}
