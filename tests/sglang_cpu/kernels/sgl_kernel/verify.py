"""Draft trees: building, greedy verification, and what follows from what was accepted. Outputs are written in place.

A tree of n nodes per request: node 0 is the last accepted token, node k >= 1 the k-th selected candidate. First child and
next sibling (-1 for none) make it a linked structure.
"""

import torch


def build_tree_kernel_efficient_cpu(
    parent_list,
    selected_index,
    verified_seq_len,
    tree_mask,
    positions,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    topk,
    depth,
    draft_token_num,
    tree_mask_mode,
):
    """`tree_mask_mode` 0: mask rows cover the prefix too, and only their last n columns are written here."""
    num_nodes = draft_token_num
    full_rows = int(tree_mask_mode) == 0
    mask = tree_mask.view(-1)
    candidate_parents = parent_list.tolist() if parent_list.numel() else None
    offset = 0
    for request, prefix in enumerate(verified_seq_len.tolist()):
        selected = selected_index[request, : num_nodes - 1].tolist()
        parents = _parents(selected, candidate_parents[request] if candidate_parents else [], topk)
        retrieve_index[request] = torch.arange(request * num_nodes, (request + 1) * num_nodes)
        _link(parents, retrieve_next_token[request], retrieve_next_sibling[request])
        width = prefix + num_nodes if full_rows else num_nodes
        for node in range(num_nodes):
            path = _path_to_root(node, parents, depth)
            row = torch.zeros(num_nodes, dtype=tree_mask.dtype)
            row[[0, *path]] = 1
            begin = offset + width * node + (prefix if full_rows else 0)
            mask[begin : begin + num_nodes] = row
            positions[request * num_nodes + node] = prefix + len(path)
        offset += width * num_nodes


def _parents(selected, candidate_parents, topk):
    """Node -> parent node. Candidate c hangs on candidate `candidate_parents[c // topk]`, of group 0 on the root."""
    node_of = {}
    for number, candidate in enumerate(selected):
        node_of.setdefault(candidate, number + 1)
    parents = {}
    for number, candidate in enumerate(selected):
        group = candidate // topk
        parent = 0 if group == 0 else node_of.get(candidate_parents[group])
        if parent is not None:
            parents[number + 1] = parent
    return parents


def _link(parents, first_child, next_sibling):
    """Children in the order of their numbers."""
    for node in sorted(parents, reverse=True):
        parent = parents[node]
        if (older := int(first_child[parent])) != -1:
            next_sibling[node] = older
        first_child[parent] = node


def _path_to_root(node, parents, depth):
    path = []
    while node and len(path) < depth:
        path.append(node)
        node = parents.get(node, 0)
    return path


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Walk down while a child holds the token that the target predicts; count the drafts accepted on the way."""
    wanted = target_predict.reshape(-1).tolist()
    max_path = accept_index.shape[1]
    for request in range(candidates.shape[0]):
        tokens, index = candidates[request].tolist(), retrive_index[request].tolist()
        first_child = retrive_next_token[request].tolist()
        next_sibling = retrive_next_sibling[request].tolist()
        node, accepted = 0, [index[0]]
        while len(accepted) < max_path:
            child = first_child[node]
            while child != -1 and tokens[child] != wanted[index[node]]:
                child = next_sibling[child]
            if child == -1:
                break
            node = child
            accepted.append(index[node])
        for slot, position in enumerate(accepted):
            accept_index[request, slot] = position
            predicts[position] = wanted[position]
        accept_token_num[request] = len(accepted) - 1


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    """The last accepted token of each request; rows of `accept_tokens` are `accept_stride` wide."""
    last = torch.arange(accept_lens.numel()) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last].to(bonus_tokens.dtype))


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    """Slots of the accepted nodes, -1 left out."""
    accepted = accept_index.flatten()
    slots = out_cache_loc[accepted[accepted >= 0].long()]
    accept_out_cache_loc[: slots.numel()] = slots


def rotate_input_ids_cpu(input_ids, extend_start_loc, extend_seq_lens, topk_index, select_index=None):
    """Shift each request's ids left by one and put its new token in the last (or selected) place."""
    new_tokens = topk_index.flatten()
    for request, (begin, length) in enumerate(zip(extend_start_loc.tolist(), extend_seq_lens.tolist())):
        if length > 0:
            end = begin + length
            input_ids[begin : end - 1] = input_ids[begin + 1 : end].clone()
            place = end - 1 if select_index is None else int(select_index[request])
            input_ids[place] = new_tokens[request]
