from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.spec.document import SpecError
from sweeps.spec.model import WorkloadSpec
from sweeps.spec.workload import plan_blocks

SPECS = Path(__file__).parents[3] / "sweeps" / "specs"


@given(st.integers(0, 3), st.integers(1, 5), st.integers(1, 4), st.integers(0, 9))
def test_synthetic_blocks_are_the_same_every_time(warmup: int, blocks: int, size: int, seed: int) -> None:
    spec = WorkloadSpec(
        warmup_blocks=warmup, blocks=blocks, requests_per_block=size, seed=seed, prompt_tokens=3, vocabulary=50
    )
    planned = plan_blocks(spec, folder=Path("/nowhere"))
    assert planned == plan_blocks(spec, folder=Path("/elsewhere"))
    assert [(one.warmup, one.index) for one in planned] == [
        *((True, index) for index in range(warmup)),
        *((False, index) for index in range(blocks)),
    ]
    prompts = [prompt for one in planned for prompt in one.prompts]
    assert len({prompt.prompt_id for prompt in prompts}) == len(prompts) == (warmup + blocks) * size
    assert all(10 <= token < 50 for prompt in prompts for token in prompt.token_ids or ())
    assert all(len(prompt.token_ids or ()) == 3 for prompt in prompts)


def test_another_seed_is_another_text() -> None:
    one, other = (plan_blocks(WorkloadSpec(seed=seed), folder=Path())[0].prompts[0] for seed in (0, 1))
    assert one.token_ids != other.token_ids


def test_block_carries_how_it_is_served() -> None:
    spec = WorkloadSpec(concurrency=(2,), requests_per_block=2, output_tokens=7, temperature=0.5, ignore_eos=False)
    block = plan_blocks(spec, folder=Path())[0]
    assert (block.concurrency, block.output_tokens, block.temperature, block.ignore_eos) == (2, 7, 0.5, False)


def test_each_number_has_a_block_at_every_concurrency_wide_enough_for_it() -> None:
    alone = plan_blocks(WorkloadSpec(requests_per_block=2, warmup_blocks=1, blocks=2), folder=Path())
    planned = plan_blocks(
        WorkloadSpec(concurrency=(1, 4), requests_per_block=2, warmup_blocks=1, blocks=2), folder=Path()
    )
    assert [(one.warmup, one.index, one.concurrency, len(one.prompts)) for one in planned] == [
        (warmup, index, concurrency, size)
        for warmup, index in ((True, 0), (False, 0), (False, 1))
        for concurrency, size in ((1, 2), (4, 4))
    ]
    assert tuple(one for one in planned if one.concurrency == 1) == alone, "a further concurrency changes no block"


def test_prompt_file_is_read_in_order_and_repeats_when_it_ends(tmp_path: Path) -> None:
    rows = [{"id": "a", "prompt": "one\u2028line"}, {"token_ids": [5, 6]}]
    (tmp_path / "p.jsonl").write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", "utf-8")
    planned = plan_blocks(WorkloadSpec(prompts="p.jsonl", warmup_blocks=1, blocks=2), folder=tmp_path)
    assert [one.prompts[0].prompt_id for one in planned] == ["a", "line-3", "a"]
    assert planned[0].prompts[0].text == "one\u2028line"
    assert planned[0].prompts[0].token_ids is None
    assert planned[1].prompts[0].token_ids == (5, 6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        ("{", r"p\.jsonl:1: not JSON"),
        ('{"prompt": "a"}\n{"text": "b"}', r"p\.jsonl:2: wanted one of the keys prompt and token_ids"),
        ('{"prompt": "a", "token_ids": [1]}', "wanted one of the keys"),
        ('{"prompt": ""}', "prompt: wanted text"),
        ('{"prompt": 3}', "prompt: wanted text, got 3"),
        ('{"token_ids": []}', "token_ids: wanted a list of token numbers"),
        ('{"token_ids": [1, "2"]}', "token_ids: wanted a list of token numbers"),
        ('{"token_ids": [true]}', "token_ids: wanted a list of token numbers"),
        ("[1]", "wanted one of the keys"),
        ('{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}', "the id '1' is there 2 times"),
    ],
)
def test_bad_prompt_files_name_line_and_value(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(SpecError, match=message):
        plan_blocks(WorkloadSpec(prompts="p.jsonl"), folder=tmp_path)


def test_missing_prompt_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"gone\.jsonl does not exist"):
        plan_blocks(WorkloadSpec(prompts="gone.jsonl"), folder=tmp_path)


def test_the_prompts_that_come_along_are_enough_for_a_sweep() -> None:
    spec = WorkloadSpec(prompts="prompts/mixed.jsonl", warmup_blocks=2, blocks=16)
    texts = [prompt.text for one in plan_blocks(spec, folder=SPECS) for prompt in one.prompts]
    assert len(set(texts)) == len(texts)
