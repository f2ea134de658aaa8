"""Sparse edits of stored logits: bias of single tokens, repetition, frequency and presence penalties.

`fmms.controls.apply_edits` is the definition. Edits come as (row, token, value, kind) in any order; they are sorted
here, so that each edited logit is read and written by one lane and equal entries are taken in a fixed order.
"""

import torch
import triton
import triton.language as tl

from fmms.request import REPETITION, Request

_NONE = torch.iinfo(torch.int64).max


def sort_edits(request: Request) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(keys int64 [N] ascending, values fp32 [N], bad bool [H]) of a request's edits.

    A key is 4 * (row * V + token) + kind, or the largest int64 for an entry that changes no logit.
    """
    rows, tokens, values = request.edit_rows, request.edit_tokens, request.edit_values
    in_batch = (rows >= 0) & (rows < request.rows)
    in_vocab = (tokens >= 0) & (tokens < request.vocab)
    no_factor = (request.edit_kinds == REPETITION) & ~((values > 0) & (values < torch.inf))
    wrong = in_batch & (tokens != -1) & (~in_vocab | no_factor)
    bad = torch.zeros(request.rows + 1, dtype=torch.bool, device=request.device)
    bad.index_fill_(0, torch.where(wrong, rows, request.rows), True)
    keys = torch.where(
        in_batch & in_vocab & ~no_factor, (rows * request.vocab + tokens) * 4 + request.edit_kinds, _NONE
    )
    keys, order = torch.sort(keys, stable=True)
    return keys, values[order], bad[: request.rows]


@triton.jit(do_not_specialize=["N"])
def apply_edits(logits, keys, values, allowed, banned, N, V, stride_allowed, BLOCK: tl.constexpr):
    """Grid: (blocks of edits,). Changes logits fp32 [H, V] in place; keys int64 and values fp32 [N] from `sort_edits`;
    allowed int32 [H, words] and banned int64 [H], or None: a masked logit stays -inf."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(keys + at, mask=at < N, other=0x7FFFFFFFFFFFFFFF) >> 2
    before = tl.load(keys + at - 1, mask=(at > 0) & (at < N), other=0x7FFFFFFFFFFFFFFF) >> 2
    real = (at < N) & (target < (0x7FFFFFFFFFFFFFFF >> 2))
    first = real & ((at == 0) | (before != target))  # this lane takes the logit and all entries for it

    bias = tl.zeros((BLOCK,), tl.float64)
    factor = tl.full((BLOCK,), 1.0, tl.float64)
    frequency = tl.zeros((BLOCK,), tl.float64)
    presence = tl.zeros((BLOCK,), tl.float64)
    active = first
    while tl.max(active.to(tl.int32), 0) > 0:
        key = tl.load(keys + at, mask=active & (at < N), other=0x7FFFFFFFFFFFFFFF)
        active = active & ((key >> 2) == target)
        value = tl.load(values + at, mask=active, other=0.0).to(tl.float64)
        kind = key & 3
        bias += tl.where(active & (kind == 0), value, 0.0)
        factor *= tl.where(active & (kind == 1), value, 1.0)
        frequency += tl.where(active & (kind == 2), value, 0.0)
        presence += tl.where(active & (kind == 3), value, 0.0)
        at += 1

    keep = first
    row, token = target // V, target % V
    if allowed is not None:
        word = tl.load(allowed + row * stride_allowed + (token >> 5), mask=keep, other=0)
        keep = keep & (((word.to(tl.int64) >> (token & 31)) & 1) != 0)
    if banned is not None:
        keep = keep & (token != tl.load(banned + row, mask=keep, other=-1))
    x = tl.load(logits + target, mask=keep, other=0.0).to(tl.float64) + bias
    impossible = x == float("-inf")  # stays so: times a factor that has become 0 it would be NaN
    x = tl.where(x > 0.0, x / factor, x * factor)
    x = tl.where(impossible, float("-inf"), x)
    tl.store(logits + target, (x - frequency - presence).to(tl.float32), mask=keep)
