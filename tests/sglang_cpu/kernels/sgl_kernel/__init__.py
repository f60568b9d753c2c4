"""The operators of sgl-kernel's CPU build that SGLang calls without AMX, in plain torch. For tests: small and slow.

No wheel on PyPI has the CPU operators. Anything that is not here fails where it is called, by name.
"""

import torch

from sgl_kernel import attention
from sgl_kernel.kv_cache import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
)
from sgl_kernel.verify import (
    build_tree_kernel_efficient_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
    verify_tree_greedy_cpu,
)

__version__ = "0.0.0+torch"

torch.ops.sgl_kernel.decode_attention_cpu = attention.decode
torch.ops.sgl_kernel.extend_attention_cpu = attention.extend


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in for CPU tests")

    return absent
