"""What a server decides by itself and may decide otherwise in the next launch: named in `effective` of table `trials`.

Speculation takes memory and changes defaults, so a server with it may hold smaller graphs or fewer requests than the
one it is compared with. Such a difference is no effect of speculation.
"""

from __future__ import annotations

RESOLVED = (
    "attention_backend",
    "chunked_prefill_size",
    "cuda_graph_bs",
    "cuda_graph_max_bs",
    "decode_attention_backend",
    "disable_cuda_graph",
    "disable_overlap_schedule",
    "disable_radix_cache",
    "dtype",
    "effective_max_running_requests_per_dp",
    "kv_cache_dtype",
    "max_running_requests",
    "max_total_num_tokens",
    "max_total_tokens",
    "mem_fraction_static",
    "moe_runner_backend",
    "nccl_version",
    "page_size",
    "prefill_attention_backend",
    "quantization",
    "sampling_backend",
    "schedule_policy",
    "stream_interval",
)
"""Names in `effective` that should agree between the arms of a comparison."""
EXPECTED_TO_DIFFER = frozenset({"max_total_num_tokens", "mem_fraction_static"})
"""The drafter's weights and cache take memory: these differ with speculation by nature, and bind no single request."""
