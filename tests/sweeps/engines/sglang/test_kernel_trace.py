"""TRACE is synthetic, in the structure of a real one: a prefill, then four equal cycles."""

import gzip
import shutil
from pathlib import Path

import pytest

from sweeps.engines.sglang.kernel_trace import communication_share, kernel_kind, read_kernel_times, short_name
from sweeps.engines.sglang.trace_spans import TraceError, read_events, read_when_whole, trace_files
from tests.chrome_trace import kernel, span, write

ASSETS = Path(__file__).parents[3] / "assets"
TRACE = ASSETS / "traces" / "1764428400.0-TP-0.trace.json"


def test_phases_kinds_and_time_per_cycle() -> None:
    rows = {
        (row.phase, row.kernel): (row.kind, row.us_per_cycle, row.calls_per_cycle) for row in read_kernel_times(TRACE)
    }
    assert rows == {
        ("draft", "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"): ("gemm", 40.0, 1.0),
        ("draft", "_fwd_grouped_kernel_stage1"): ("attention", 10.0, 1.0),
        ("draft", "Memcpy DtoD"): ("other", 2.0, 1.0),
        ("verify", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"): ("communication", 200.0, 4.0),
        ("verify", "fused_moe_kernel"): ("moe", 100.0, 2.0),
        ("verify", "_fwd_grouped_kernel_stage1"): ("attention", 40.0, 2.0),
        ("other", "at::native::{anonymous}::cunn_SoftMaxForward"): ("sampling", 6.0, 1.0),
        ("other", "verify_tree_greedy_kernel"): ("sampling", 4.0, 1.0),
        ("other", "at::native::vectorized_elementwise_kernel"): ("other", 1.0, 1.0),
        ("extend", "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"): ("gemm", 40.0, 1.0),
    }


def test_the_share_of_communication_in_verify() -> None:
    rows = read_kernel_times(TRACE)
    assert communication_share(rows) == pytest.approx(200 / 340)
    assert communication_share(rows, phase="draft") == 0.0
    assert communication_share([]) is None


def test_gzip_and_order_of_ranks(tmp_path: Path) -> None:
    packed = tmp_path / "deep" / "1-TP-10.trace.json.gz"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress(TRACE.read_bytes()))
    shutil.copy(TRACE, tmp_path / "1-TP-2.trace.json")
    (tmp_path / "server.log").touch()
    assert [path.name for path in trace_files(tmp_path)] == ["1-TP-2.trace.json", "1-TP-10.trace.json.gz"]
    assert read_kernel_times(packed) == read_kernel_times(TRACE)


def test_newer_span_names_and_a_plain_server(tmp_path: Path) -> None:
    newer = [
        item for n in range(3) for item in (span("step[VERIFY bs=1]", 100 * n, 50), kernel("gemm", 100 * n + 1, 7))
    ]
    (row,) = read_kernel_times(write(tmp_path / "a.json", *newer))
    assert (row.phase, row.us_per_cycle) == ("verify", 7.0)
    plain = [
        item for n in range(3) for item in (span("step[DECODE bs=4]", 100 * n, 50), kernel("gemm", 100 * n + 1, 7))
    ]
    assert read_kernel_times(write(tmp_path / "b.json", *plain)) == (row,)


def test_a_prefill_between_cycles_is_left_out(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.json",
        span("step[VERIFY bs=1]", 0, 50),
        kernel("gemm", 1, 7),
        span("step[EXTEND bs=1 toks=9]", 100, 50),
        kernel("gemm", 101, 30),
        span("draft_extend", 200, 50),
        kernel("gemm", 201, 30),
        span("step[VERIFY bs=1]", 300, 50),
    )
    assert sum(row.us_per_cycle for row in read_kernel_times(path)) == 7.0


def test_a_span_that_starts_on_another_stream_before_the_last_has_ended(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.json",
        span("step[VERIFY bs=1]", 0, 50),
        span("draft_extend", 40, 60),
        kernel("late gemm", 45, 3),
        kernel("gemm", 60, 5),
        span("step[VERIFY bs=1]", 300, 50),
    )
    assert {(row.phase, row.kernel) for row in read_kernel_times(path)} == {("verify", "late gemm"), ("extend", "gemm")}


def test_a_trace_is_read_once_it_is_whole(tmp_path: Path) -> None:
    assert read_when_whole(tmp_path, read_events, timeout_s=30, is_gone=lambda: True) is None
    shutil.copy(TRACE, tmp_path)
    assert read_when_whole(tmp_path, read_events, timeout_s=30, is_gone=lambda: False) == read_events(TRACE)


@pytest.mark.parametrize("content", ["", "[1", '{"traceEvents": 3}', '{"traceEvents": []}'])
def test_what_is_no_trace_says_so(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(TraceError, match=r"a\.json"):
        read_kernel_times(path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_TREE_LL", "communication"),
        ("sglang::cross_device_reduce_1stage", "communication"),
        ("flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport", "communication"),
        ("sgl_hip::all_reduce_one_shot_push_kernel", "communication"),
        ("multimem_all_reduce_kernel", "communication"),
        ("fused_moe_kernel", "moe"),
        ("topkGatingSoftmax", "moe"),
        ("moe_align_block_size_kernel", "moe"),
        ("marlin_moe_wna16::Marlin", "moe"),
        ("flash::FlashAttnFwdSm90", "attention"),
        ("_fwd_kernel_stage2", "attention"),
        ("flashinfer::BatchDecodeWithPagedKVCacheKernel", "attention"),
        ("set_mla_kv_buffer_kernel", "attention"),
        ("cutlass::Kernel2", "gemm"),
        ("gemvx::kernel", "gemm"),
        ("nvjet_tst_64x8", "gemm"),
        ("sm90_xmma_gemm_bf16bf16", "gemm"),
        ("build_tree_efficient", "sampling"),
        ("flashinfer::sampling::TopPRenormProbKernel", "sampling"),
        ("triton_red_fused_rms_norm", "other"),
        ("Memset", "other"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kernel_kind(name) == kind


def test_short_names() -> None:
    assert short_name("void foo::bar<int, (baz)2>(float*)") == "foo::bar"
    assert short_name("Memcpy DtoH (Device -> Pageable)") == "Memcpy DtoH"
    assert len(short_name("x" * 500)) == 120
