"""Small logs and benchmarks as others write them. Made up, in the forms of the real ones."""

from __future__ import annotations

import json

FOUNDING = """some line of the scheduler
[2026-03-01 10:00:00 TP0] Target verify: 29.01 ms/cyc (96.9%)
[2026-03-01 10:00:01 TP0] Target verify: 29.02 ms/cyc (96.9%)
Target verify: 29.01 ms/cyc (96.7%)
Target verify: 29.02 ms/cyc (96.9%)
[2026-03-01 10:00:04 TP0] Target verify: 29.01 ms/cyc (96.9%)
"""
PREFILL = "[2026-01-01 10:00:00 TP0] Prefill batch, #new-seq: 1, #new-token: 128, input throughput (token/s): 900.0"


def start(*, speculative: bool = True, tp: int = 8, dp: int = 1, quoted: bool = False, extra: str = "") -> str:
    """The line with the resolved arguments, as 0.5.17 or (quoted) 0.5.21 writes it."""
    arguments = {
        "model_path": "'/srv/models/kimi'",
        "tp_size": str(tp),
        "dp_size": str(dp),
        "decode_log_interval": "40",
        "speculative_algorithm": "'EAGLE3'" if speculative else "None",
        "speculative_draft_model_path": "'/srv/models/head'" if speculative else "None",
        "speculative_num_steps": "3" if speculative else "None",
        "speculative_eagle_topk": "1" if speculative else "None",
        "speculative_num_draft_tokens": "4" if speculative else "None",
    }
    if quoted:
        return "server_args={" + ", ".join(f"'{name}': {value}" for name, value in arguments.items()) + extra + "}"
    return "server_args=ServerArgs(" + ", ".join(f"{name}={value}" for name, value in arguments.items()) + extra + ")"


def decode(
    tok_s: float, *, accept: str = "accept len: 1.80, accept rate: 0.27, ", running: int = 1, ranks: str = " TP0"
) -> str:
    return (
        f"[2026-01-01 10:00:01{ranks}] Decode batch, #running-req: {running}, #token: 36, token usage: 0.01, {accept}"
        f"cuda graph: True, gen throughput (token/s): {tok_s}, #queue-req: 0"
    )


def server_log(*rates: float, speculative: bool = True) -> str:
    accept = "accept len: 1.80, accept rate: 0.27, " if speculative else ""
    return "\n".join(
        [start(speculative=speculative), PREFILL, decode(9.0, accept=accept)]
        + [decode(rate, accept=accept) for rate in rates]
    )


def bench_serving(rate: float, accept_length: float | None, *, concurrency: int = 1) -> str:
    row = {
        "backend": "sglang",
        "dataset_name": "random",
        "request_rate": "inf",
        "max_concurrency": concurrency,
        "duration": 100.0,
        "completed": 32,
        "total_input_tokens": 4096,
        "total_output_tokens": int(100 * rate),
        "output_throughput": rate,
        "median_ttft_ms": 80.5,
        "p99_ttft_ms": 120.25,
        "accept_length": accept_length,
    }
    return json.dumps(row)


def bench_speculative(steps: int, accept_length: float, step_s: float, *, batch: int = 1) -> str:
    row = {
        "batch_size": batch,
        "steps": steps,
        "topk": 1 if steps else 0,
        "num_draft_tokens": steps + 1 if steps else 0,
        "acc_length": accept_length,
        "step_time": step_s,
        "speed": accept_length / step_s,
        "completion_tokens": 512.0,
    }
    return json.dumps(row)


VLLM = json.dumps(
    {
        "date": "20260101-100000",
        "backend": "vllm",
        "model_id": "org/model",
        "num_prompts": 32,
        "request_rate": "inf",
        "max_concurrency": 4,
        "duration": 50.0,
        "completed": 32,
        "total_input_tokens": 4096,
        "total_output_tokens": 12000,
        "output_throughput": 240.0,
        "total_token_throughput": 322.0,
        "mean_ttft_ms": 90.0,
        "spec_decode_acceptance_rate": 26.7,
        "spec_decode_acceptance_length": 1.8,
    },
    indent=2,
)
NCCL_DEBUG = """host-a:100:100 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
host-a:100:100 [0] NCCL INFO NCCL version 2.27.5+cuda12.9
host-a:100:101 [0] NCCL INFO NCCL_PROTO set by environment to LL
host-a:100:101 [0] NCCL INFO comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1000 - Init START
host-a:200:201 [1] NCCL INFO NCCL_PROTO set by environment to LL
host-a:200:201 [1] NCCL INFO comm 0x2 rank 1 nranks 2 cudaDev 1 busId 2000 - Init START
host-a:100:101 [0] NCCL INFO AllReduce: 14336 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..7}
host-a:200:201 [1] transport/net.cc:1 NCCL WARN something is odd
"""
NCCL_TESTS = """# nThread 1 nGpus 2 minBytes 8 maxBytes 28672 step: 2(factor) warmup iters: 5 iters: 20
# Using devices
#  Rank  0 Group  0 Pid    100 on     host-a device  0 [0000:01:00] NVIDIA H200
#  Rank  1 Group  0 Pid    100 on     host-a device  1 [0000:02:00] NVIDIA H200
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
       14336          7168  bfloat16     sum      -1    12.34    1.16    1.16      0    12.10    1.18    1.18      0
       28672         14336  bfloat16     sum      -1    14.50    1.98    1.98      0    14.40    1.99    1.99      0
       57344         28672  bfloat16     sum      -1    20.00    2.87    2.87      5    20.10    2.85    2.85      0
# Out of bounds values : 1 FAILED
# Avg bus bandwidth    : 1.9
"""
