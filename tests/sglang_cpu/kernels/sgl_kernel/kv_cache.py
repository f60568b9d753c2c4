"""Bookkeeping of cache slots: which slot holds which token of which request. Outputs are written in place."""

import ctypes

import torch


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    """Row r of the pool gets its next slots, taken from `out_cache_loc` in order."""
    taken = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist()):
        count = last - first
        req_to_token[row, first:last] = out_cache_loc[taken : taken + count].to(req_to_token.dtype)
        taken += count


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    """The other way round: slots start..end of each row, one after the other."""
    pieces = [
        req_to_token[row, first:last]
        for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist())
    ]
    slots = torch.cat(pieces) if pieces else req_to_token.new_empty(0)
    out_cache_loc[: slots.numel()] = slots.to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
):
    """The topk * num_steps slots behind each sequence."""
    width = topk * num_steps
    for number, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist())):
        slots = req_to_token[row, length : length + width]
        out_cache_loc[number * width : (number + 1) * width] = slots.to(out_cache_loc.dtype)


def build_draft_decode_metadata_cpu(req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len):
    """One slot table per request and branch, [batch * topk, pool_len]: the shared prefix, then the branch's own slots."""
    tables = torch.zeros((seq_lens.numel() * topk, pool_len), dtype=req_to_token.dtype)
    for number, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist())):
        branches = tables[number * topk : (number + 1) * topk]
        branches[:, :length] = req_to_token[row, :length]
        own = req_to_token[row, length : length + topk * num_steps]
        branches[:, length : length + num_steps] = own.view(topk, num_steps)
    return tables


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Copy slots within every layer's buffer; all are read before any is written."""
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist()):
        contents = [ctypes.string_at(base + source * stride, stride) for source in sources]
        for target, content in zip(targets, contents):
            ctypes.memmove(base + target * stride, content, stride)
