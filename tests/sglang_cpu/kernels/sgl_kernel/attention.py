"""The two attention operators of the `intel_amx` backend. Buffers are [slots, kv heads, head size]."""

import torch

is_verifying = False
"""Set by the plugin. SGLang 0.5.16 gives the verify step its prefix lengths only."""


def _attend(query, keys, values, visible, scale, logit_cap):
    """[tokens, heads, size] over [length, kv heads, size]; `visible` [tokens, length] or None for all."""
    groups = query.shape[1] // keys.shape[1]
    query = query.float().transpose(0, 1)
    keys = keys.float().transpose(0, 1).repeat_interleave(groups, 0)
    values = values.float().transpose(0, 1).repeat_interleave(groups, 0)
    scores = query @ keys.transpose(1, 2) * scale
    if logit_cap > 0:
        scores = torch.tanh(scores / logit_cap) * logit_cap
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return (scores.softmax(-1) @ values).transpose(0, 1)


def decode(*arguments):
    """One query per request; writes the new key and value first."""
    query, k_buffer, v_buffer, *rest = arguments
    if isinstance(rest[0], (int, float)):  # two scales of the cache, since 0.5.17
        rest = rest[2:]
    output, key, value, slots, _, req_to_token, rows, lengths, scale, logit_cap, _, window, *_ = rest
    if key is not None:
        k_buffer[slots.long()] = key.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[slots.long()] = value.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    for number, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist())):
        begin = max(0, length - window) if window > 0 else 0
        held = req_to_token[row, begin:length].long()
        one = _attend(query[number : number + 1], k_buffer[held], v_buffer[held], None, scale, logit_cap)
        output[number] = one[0].to(output.dtype)


def extend(*arguments):
    """Several new tokens per request, whose keys and values are in the buffers already; causal or under a tree mask."""
    query, _, _, output, k_buffer, v_buffer, *rest = arguments
    if has_scales := isinstance(rest[0], (int, float)):
        rest = rest[2:]
    req_to_token, rows, lengths, new_lengths, begins, _, scale, logit_cap, _, _, _, _, tree_mask, *flags = rest
    is_causal = flags[0] if flags else True
    if is_verifying and not has_scales:
        lengths = lengths + new_lengths
    masks = None if tree_mask is None else _TreeMask(tree_mask, lengths, new_lengths)
    for row, length, new, begin in zip(rows.tolist(), lengths.tolist(), new_lengths.tolist(), begins.tolist()):
        if new == 0:
            continue
        visible = torch.ones(new, length, dtype=torch.bool)
        if masks is not None:
            visible[:, length - new :] = masks.next(length, new)
        elif is_causal:
            visible[:, length - new :] = torch.ones(new, new, dtype=torch.bool).tril()
        held = req_to_token[row, :length].long()
        own = slice(begin, begin + new)
        output[own] = _attend(query[own], k_buffer[held], v_buffer[held], visible, scale, logit_cap).to(output.dtype)


class _TreeMask:
    """Hands out the [new, new] part of each request's mask; rows in the buffer may cover the prefix as well."""

    def __init__(self, buffer, lengths, new_lengths):
        self._buffer = buffer.view(-1)
        new = int(new_lengths[0])
        self._covers_prefix = self._buffer.numel() != new * new * lengths.numel()
        self._offset = 0

    def next(self, length, new):
        width = length if self._covers_prefix else new
        part = self._buffer[self._offset : self._offset + new * width].view(new, width).bool()
        self._offset += new * width
        return part[:, -new:]
