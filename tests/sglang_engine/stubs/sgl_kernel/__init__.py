"""The compiled CPU kernels that SGLang 0.5.23 imports and PyPI does not carry, in plain torch.

Ours, written from what each call passes and what the caller does with it; nothing of SGLang's is
copied. Only what a dense Llama target with an EAGLE-3 draft calls is here: any other name can be
imported and raises when called. Trees are built and verified by SGLang's own Triton kernels, which
run under Triton's interpreter.
"""

import ctypes

import torch

ATTENTION_DTYPE = torch.float32
"""What attention is computed in; tests raise it to move the rounding and nothing else."""


def _rows(*columns):
    """Python ints of per-request tensors, request by request."""
    return zip(*(column.tolist() for column in columns), strict=True)


def build_tree_kernel_efficient_cpu(parent_list, selected_index, *rest):
    from sglang.kernels.ops.speculative.spec_tree import sgl_build_tree_kernel_triton

    if parent_list.numel() == 0:  # one level: the kernel still wants a pointer
        parent_list = selected_index.new_zeros((selected_index.shape[0], 1))
    sgl_build_tree_kernel_triton(parent_list, selected_index, *rest)


def verify_tree_greedy_cpu(**tensors):
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_triton

    renamed = {name.replace("retrive_", "retrieve_"): value for name, value in tensors.items()}
    verify_tree_greedy_triton(**renamed)


def assign_req_to_token_pool_cpu(pools, req_to_token, starts, ends, slots, _width):
    """Enters freshly allocated slots into the requests' rows."""
    taken = 0
    for pool, start, end in _rows(pools, starts, ends):
        count = end - start
        req_to_token[pool, start:end] = slots[taken : taken + count].to(req_to_token.dtype)
        taken += count


def assign_extend_cache_locs_cpu(pools, req_to_token, starts, ends, slots, _width):
    """The slots of each request's new rows, one request after the other."""
    taken = 0
    for pool, start, end in _rows(pools, starts, ends):
        count = end - start
        slots[taken : taken + count] = req_to_token[pool, start:end].to(slots.dtype)
        taken += count


def assign_draft_cache_locs_contiguous_cpu(
    pools, req_to_token, lengths, slots, _width, topk, num_steps
):
    """Slots of the drafted levels: beam by beam, `num_steps` each, right after the length."""
    window = topk * num_steps
    table = slots.view(-1, window)
    for row, (pool, length) in enumerate(_rows(pools, lengths)):
        table[row] = req_to_token[pool, length : length + window].to(slots.dtype)


def build_draft_decode_metadata_cpu(req_to_token, pools, lengths, topk, num_steps, width):
    """One row of slots for each beam: the committed prefix, then the beam's own slots."""
    table = req_to_token.new_zeros((pools.numel() * topk, width))
    beams = iter(table)
    for pool, length in _rows(pools, lengths):
        for beam in range(topk):
            row, own = next(beams), length + beam * num_steps
            row[:length] = req_to_token[pool, :length]
            row[length : length + num_steps] = req_to_token[pool, own : own + num_steps]
    return table


def fill_bonus_tokens_cpu(tokens, accept_lengths, bonus, stride):
    table = tokens.reshape(-1, stride)
    last = accept_lengths.long()[:, None] - 1
    bonus.copy_(table.gather(1, last)[:, 0])


def fill_accept_out_cache_loc_cpu(accept_index, slots, accepted_slots, _size=None):
    index = accept_index.flatten()
    index = index[index >= 0].long()
    accepted_slots[: len(index)] = slots[index]


def copy_all_layer_kv_cache_cpu(pointers, strides, to_slots, from_slots):
    """Copies rows of every layer's buffers, all read before any is written."""
    pairs = list(_rows(to_slots, from_slots))
    for address, size in _rows(pointers.view(torch.int64), strides):
        held = [ctypes.string_at(address + source * size, size) for _, source in pairs]
        for (goal, _), data in zip(pairs, held, strict=True):
            ctypes.memmove(address + goal * size, data, size)


def rotate_input_ids_cpu(ids, starts, lengths, next_ids, at=None):
    """Shifts each request's ids left by one and writes the chosen token at its end, or at `at`."""
    chosen = next_ids.flatten()
    for row, (start, length) in enumerate(_rows(starts, lengths)):
        if length == 0:
            continue
        stop = start + length
        ids[start : stop - 1] = ids[start + 1 : stop].clone()
        ids[int(at[row]) if at is not None else stop - 1] = chosen[row]


def decode_attention_cpu(
    q, keys, values, _ks, _vs, out, k, v, slots, _logits, req_to_token, pools, lengths, scale,
    cap, is_cross, window, _encoder, sinks,
):  # fmt: skip
    """One query a row; the new keys and values are written first."""
    _only_plain(cap, is_cross, sinks)
    if k is not None:
        keys[slots.long()] = k.reshape(-1, *keys.shape[1:]).to(keys.dtype)
        values[slots.long()] = v.reshape(-1, *values.shape[1:]).to(values.dtype)
    for row, (pool, length) in enumerate(_rows(pools, lengths)):
        seen = req_to_token[pool, :length].long()
        near = _near(torch.tensor([length - 1]), length, window)
        out[row] = _attend(q[row : row + 1], keys[seen], values[seen], near, scale)[0]


def extend_attention_cpu(
    q, _k, _v, out, keys, values, _ks, _vs, req_to_token, pools, lengths, counts, starts, _longest,
    scale, cap, is_cross, window, _encoder, sinks, tree_mask, is_causal,
):  # fmt: skip
    """Several queries a request, at the end of its slots; keys and values are written already.

    `tree_mask` is flat, `[rows, rows]` of each request in turn: who sees whom among the new rows.
    """
    _only_plain(cap, is_cross, sinks)
    read = 0
    for pool, length, count, start in _rows(pools, lengths, counts, starts):
        seen = req_to_token[pool, :length].long()
        at = torch.arange(length - count, length)
        visible = torch.ones((count, length), dtype=torch.bool)
        if tree_mask is not None:
            block = tree_mask.flatten()[read : read + count * count]
            visible[:, length - count :] = block.view(count, count)
            read += count * count
        elif is_causal:
            visible = torch.arange(length)[None] <= at[:, None]
        visible = visible & _near(at, length, window)
        rows = slice(start, start + count)
        out[rows] = _attend(q[rows], keys[seen], values[seen], visible, scale)


def _near(at, length, window):
    """[rows, slots]: whether a slot is within the window before each row; 0 is no window."""
    if window <= 0:
        return torch.ones((len(at), length), dtype=torch.bool)
    return torch.arange(length)[None] > at[:, None] - window


def _attend(q, keys, values, visible, scale):
    """q [T, N, H], keys and values [S, K, H], visible [T, S]; grouped heads share a key."""
    T, N, H = q.shape
    K = keys.shape[1]
    grouped = q.to(ATTENTION_DTYPE).reshape(T, K, N // K, H)
    scores = torch.einsum("tkgh,skh->kgts", grouped, keys.to(ATTENTION_DTYPE)) * scale
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    found = torch.einsum("kgts,skh->tkgh", weights, values.to(ATTENTION_DTYPE))
    return found.reshape(T, N, H).to(q.dtype)


def _only_plain(cap, is_cross, sinks):
    if cap or is_cross or sinks is not None:
        raise NotImplementedError("softcap, cross attention and sinks are not in this stand-in")


_NAMESPACE = torch.library.Library("sgl_kernel", "DEF")
torch.ops.sgl_kernel.decode_attention_cpu = decode_attention_cpu
torch.ops.sgl_kernel.extend_attention_cpu = extend_attention_cpu
torch.ops.sgl_kernel.fused_sigmoid_mul_cpu = None


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in")

    return missing
