"""Every format of others, and any bytes at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from analysis.importing.client_benchmarks import SGLANG as SGLANG_JSON
from analysis.importing.client_benchmarks import VLLM as VLLM_JSON
from analysis.importing.formats import read_any, read_file
from analysis.importing.records import ForeignRun, ImportFileError, Reading
from tests.analysis.importing.samples import (
    FOUNDING,
    NCCL_DEBUG,
    NCCL_TESTS,
    PREFILL,
    VLLM,
    bench_serving,
    bench_speculative,
    decode,
    server_log,
    start,
)


def run_of(text: str) -> ForeignRun:
    (run,) = read_any(text, source="f").runs
    return run


def test_the_founding_case_s_lines() -> None:
    reading = read_any(FOUNDING, source="f")
    cycles = reading.runs[0].verify
    assert [each.verify_ms for each in cycles] == [29.01, 29.02, 29.01, 29.02, 29.01]
    assert [each.share for each in cycles] == pytest.approx([0.969, 0.969, 0.967, 0.969, 0.969])
    assert (reading.understood, reading.unparsed) == (5, 0)


@pytest.mark.parametrize("line", ["Target verify: 29.01 ms/cyc", "target verify:  29 ms / cycle (96.9 %)"])
def test_other_forms_of_a_verify_line(line: str) -> None:
    (cycle,) = run_of(line).verify
    assert cycle.verify_ms in (29.01, 29.0)


@pytest.mark.parametrize(
    "line", ["Target verify: soon", "Target verify: 0.00 ms/cyc (1%)", "Target verify: 1 ms (150%)"]
)
def test_verify_lines_that_cannot_be_true_are_not_understood(line: str) -> None:
    with pytest.raises(ImportFileError, match="1 of 1"):
        read_any(line, source="f")


@pytest.mark.parametrize("quoted", [False, True])
def test_a_server_log_with_its_arguments(*, quoted: bool) -> None:
    lines = [
        start(quoted=quoted),
        "[2026-01-01 09:00:00] Max running requests is reset to 48 for speculative decoding.",
        "[2026-01-01 09:00:01 TP0] Load weight end. elapsed=12.50 s, type=X, avail mem=1.0 GB",
        "[2026-01-01 09:00:01 TP1] Load weight end. elapsed=12.70 s, type=X, avail mem=1.0 GB",
        "[2026-01-01 09:01:00 TP0] Capture target verify CUDA graph end. elapsed=7.25 s, mem usage=0.4 GB",
        PREFILL,
        decode(9.0),
        decode(60.0),
        decode(62.0),
    ]
    run = run_of("\n".join(lines))
    assert (run.drafting.num_steps, run.drafting.eagle_topk, run.drafting.num_draft_tokens) == (3, 1, 4)
    assert (run.drafting.drafter, run.model, run.num_gpus) == ("head", "kimi", 8)
    assert run.boot_s == {"weight_load": 12.5, "capture": 7.25}
    assert [block.tok_s for block in run.blocks] == [60.0, 62.0]
    assert run.blocks[0].cycle_ms == pytest.approx(1000 * 1.8 / 60)
    assert run.accept_length == pytest.approx(1.8)
    assert "reset to 48" in run.events[0].detail


def test_accept_length_is_given_where_no_window_is_free_of_prefill() -> None:
    reading = read_any("\n".join([start(), PREFILL, decode(9.0), PREFILL, decode(8.0)]), source="f")
    assert reading.runs[0].blocks == ()
    assert reading.runs[0].accept_length == pytest.approx(1.8)
    assert any("no window is free" in note for note in reading.notes)


def test_without_speculation_a_cycle_is_a_decode_step() -> None:
    run = run_of(server_log(80.0, speculative=False))
    assert run.drafting.steps == 0
    assert run.accept_length is None
    assert run.blocks[0].cycle_ms == pytest.approx(12.5)


def test_an_accept_length_of_zero_is_not_known_and_below_one_impossible() -> None:
    lines = [start(), decode(9.0), decode(60.0, accept="accept len: 0.00, "), decode(61.0, accept="accept len: 0.5, ")]
    run = run_of("\n".join(lines))
    assert [(block.tok_s, block.accept_length, block.cycle_ms) for block in run.blocks] == [(60.0, None, None)]


@pytest.mark.parametrize(("rate", "told"), [("0.27", "draft steps"), ("0.45", "verified tokens")])
def test_both_meanings_of_the_accept_rate_are_told_apart(rate: str, told: str) -> None:
    lines = [start(), decode(9.0), *[decode(60.0, accept=f"accept len: 1.80, accept rate: {rate}, ")] * 3]
    notes = read_any("\n".join(lines), source="f").notes
    assert any("accept rate is" in note and told in note for note in notes)


def test_ranks_of_one_server_count_once() -> None:
    lines = [start(), *(decode(rate, ranks=f" TP{rank}") for rate in (9.0, 60.0, 62.0) for rank in (1, 0, 2))]
    assert [block.tok_s for block in run_of("\n".join(lines)).blocks] == [60.0, 62.0]


def test_data_parallel_servers_are_kept_apart_and_added_up() -> None:
    lines = [start(dp=2)]
    for rate in (9.0, 60.0, 62.0, 64.0):
        lines += [decode(rate, ranks=" DP0 TP0"), decode(rate / 2, ranks=" DP1 TP0")]
    lines.insert(3, "[2026-01-01 10:00:00 DP1 TP0] Prefill batch, #new-seq: 1")
    run = run_of("\n".join(lines))
    (block,) = run.blocks
    assert (block.concurrency, run.num_gpus) == (2, 16)
    assert block.tok_s == pytest.approx(62.0 + 31.5)


def test_windows_of_other_batches_are_kept_apart() -> None:
    lines = [start(), decode(9.0), decode(60.0), *[decode(200.0, running=4)] * 2]
    assert [(block.concurrency, block.tok_s) for block in run_of("\n".join(lines)).blocks] == [
        (4, 200.0),
        (4, 200.0),
        (1, 60.0),
    ]


def test_too_many_lines_of_no_known_form_are_an_error() -> None:
    with pytest.raises(ImportFileError, match="2 of 12"):
        read_any("\n".join([decode(60.0)] * 10 + ["Decode batch, somewhere"] * 2), source="f")
    assert read_any("\n".join([decode(60.0)] * 19 + ["Decode batch, somewhere"]), source="f").unparsed == 1


def test_a_server_that_never_generated_is_told() -> None:
    reading = read_any(start(), source="f")
    assert reading.notes == ("no `Decode batch` line: this server has not generated",)


def test_bench_serving() -> None:
    reading = read_any("\n".join([bench_serving(60.0, 1.8), bench_serving(82.0, None)]), source="f.jsonl")
    assert reading.format == SGLANG_JSON
    assert [(run.accept_length, run.blocks[0].tok_s) for run in reading.runs] == [(1.8, 60.0), (None, 82.0)]
    assert [run.drafting.speculates for run in reading.runs] == [True, None]
    assert reading.runs[0].blocks[0].cycle_ms is None
    assert "p99_ttft_ms 120.25" in reading.runs[0].events[0].detail


def test_bench_speculative() -> None:
    text = "\n".join([bench_speculative(0, 1.0, 0.0122), bench_speculative(3, 1.8, 0.030, batch=4)])
    plain, drafting = read_any(text, source="f.jsonl").runs
    assert (plain.drafting.steps, plain.accept_length) == (0, None)
    assert plain.blocks[0].tok_s == pytest.approx(1 / 0.0122)
    assert (drafting.drafting.steps, drafting.blocks[0].concurrency) == (3, 4)
    assert drafting.blocks[0].tok_s == pytest.approx(4 * 1.8 / 0.030)
    assert drafting.blocks[0].cycle_ms == pytest.approx(30.0)


def test_vllm() -> None:
    reading = read_any(VLLM, source="f.json")
    (run,) = reading.runs
    assert (reading.format, run.model, run.accept_length) == (VLLM_JSON, "model", 1.8)
    assert (run.blocks[0].concurrency, run.blocks[0].tok_s) == (4, 240.0)


def test_json_with_zeros_in_the_place_of_numbers_is_no_result() -> None:
    with pytest.raises(ImportFileError, match="1 of 1"):
        read_any(bench_serving(0.0, None), source="f")


def test_a_log_of_nccl() -> None:
    reading = read_any(NCCL_DEBUG, source="f")
    (run,) = reading.runs
    assert [(each.rank, each.name, each.value) for each in run.seen] == [
        (0, "NCCL_PROTO", "LL"),
        (1, "NCCL_PROTO", "LL"),
    ]
    assert any("14336 bytes: Ring LL" in each.detail for each in run.events)
    assert any("something is odd" in each.detail for each in run.events)
    assert "NCCL 2.27.5" in reading.notes


def test_a_table_of_nccl_tests() -> None:
    reading = read_any(NCCL_TESTS, source="f")
    assert reading.num_ranks == 2
    assert [(each.num_bytes, each.us, each.is_right) for each in reading.all_reduces] == [
        (14336, 12.34, True),
        (28672, 14.5, True),
        (57344, 20.0, False),
    ]


def test_what_is_none_of_these_is_named_with_the_choices(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing of interest\n")
    with pytest.raises(ImportFileError, match=r"notes\.txt: in no known form; wanted an SGLang server's log"):
        read_file(tmp_path / "notes.txt")
    with pytest.raises(ImportFileError, match="cannot be read"):
        read_file(tmp_path)
    with pytest.raises(ImportFileError, match="cannot be read"):
        read_file(tmp_path / "nowhere")


_PIECES = """
Decode batch|, #running-req: |accept len: |accept rate: |gen throughput (token/s): |1e999|-1|0|%)|Target verify: |
 ms/cyc (|server_args=ServerArgs(|tp_size=|'|[2026-01-01 10:00:00 DP| TP|nan|inf|NCCL INFO |NCCL version |, |1e400|
# algbw busbw|14336 7168 float sum -1 |²|٣| rank | nranks 2|Load weight end. elapsed=| s|Prefill batch|9.5|1|40|}|
speculative_num_steps=|host:1:2 [0] |{"duration": |"completed": |"output_throughput": |"total_output_tokens": |
"accept_length": |{"batch_size": |"steps": |"acc_length": |"step_time": |"topk": |"num_draft_tokens": |
"""
_WORDS = st.sampled_from([*_PIECES.replace("|\n", "|").split("|"), "9" * 400, "[" * 3000])


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=300) | st.lists(_WORDS, max_size=30).map(lambda parts: "".join(parts).encode()))
def test_no_bytes_make_a_reader_fail(content: bytes) -> None:
    try:
        reading: Reading | None = read_any(content.decode("utf-8", "replace"), source="f")
    except ImportFileError:
        reading = None
    for run in () if reading is None else reading.runs:
        assert all(block.tok_s > 0 and block.decode_s > 0 and block.concurrency > 0 for block in run.blocks)
        assert run.accept_length is None or run.accept_length >= 1.0


_VALUE = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.lists(st.integers(), max_size=2)
)


@settings(max_examples=300)
@given(
    st.fixed_dictionaries(
        dict.fromkeys(("batch_size", "steps", "topk", "num_draft_tokens", "acc_length", "step_time"), _VALUE)
    )
    | st.fixed_dictionaries(
        dict.fromkeys(("duration", "completed", "output_throughput", "total_output_tokens"), _VALUE),
        optional=dict.fromkeys(
            ("accept_length", "max_concurrency", "concurrency", "model_id", "speculative_num_steps", "model"), _VALUE
        ),
    )
)
def test_no_values_of_a_benchmark_make_a_reader_fail(row: dict[str, object]) -> None:
    try:
        reading: Reading | None = read_any(json.dumps(row), source="f")
    except ImportFileError:
        reading = None
    for run in () if reading is None else reading.runs:
        assert all(block.tok_s > 0 and block.decode_s > 0 for block in run.blocks)
