"""Tests of the tests: each planted fault is one that a sampler has shipped with, and the check meant for it must fail.

A fault replaces a device function of the kernels. That works in Triton's interpreter, which looks names up when it
runs; compiled kernels would keep the old function.
"""

import checks
import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from fmms.kernels import edits, epilogue, select, stored, tile  # noqa: E402

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="faults are planted in interpreted kernels: TRITON_INTERPRET=1"
)


@triton.jit
def words_keyed_by_tile(seed, position, unit, sample, PURPOSE: tl.constexpr):
    unit = tl.zeros_like(unit) + tl.arange(0, unit.shape[1])[None, :]
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    unit, low = tl.broadcast(unit.to(tl.uint32), low)
    return tl.philox(seed, unit, tl.zeros_like(unit) + (PURPOSE + sample), low, low)


@triton.jit
def words_of_one_seed(seed, position, unit, sample, PURPOSE: tl.constexpr):
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    unit, low = tl.broadcast(unit.to(tl.uint32), low)
    return tl.philox(seed * 0 + 42, unit, tl.zeros_like(unit) + (PURPOSE + sample), low, tl.zeros_like(low))


@triton.jit
def gumbel_of_24_bits(low, high):
    u = ((high >> 8).to(tl.float32) + 0.5) * (1.0 / 16777216.0)
    return -tl.log(-tl.log(1.0 - u))


@triton.jit
def choose_by_running_sum(p, coarse, fine):
    below = tl.cumsum(p, 2) <= tl.expand_dims(((coarse + fine) * tl.sum(p, 2)).to(tl.float32), 2)
    return tl.minimum(tl.sum(below.to(tl.int32), 2), 31)


@triton.jit
def no_mask(x, rows, live, tokens, V, features, allowed, stride_allowed, banned, GENERAL: tl.constexpr):
    return x


@triton.jit
def mask_of_reversed_bits(x, rows, live, tokens, V, features, allowed, stride_allowed, banned, GENERAL: tl.constexpr):
    return mask_logits(
        x, rows, live, tokens // 32 * 32 + 31 - tokens % 32, V, features, allowed, stride_allowed, banned, GENERAL
    )


@triton.jit
def mask_by_a_large_number(x, rows, live, tokens, V, features, allowed, stride_allowed, banned, GENERAL: tl.constexpr):
    x = mask_logits(x, rows, live, tokens, V, features, allowed, stride_allowed, banned, GENERAL)
    return tl.where((tokens < V)[None, :], tl.maximum(x, -1e30), x)


@triton.jit
def all_ties(row_logits, units, n_units, V, key, ids, cut, wanted, equal, BLOCK_U: tl.constexpr):
    return tl.zeros_like(cut) + V - 1


@triton.jit
def first_ties_found(row_logits, units, n_units, V, key, ids, cut, wanted, equal, BLOCK_U: tl.constexpr):
    """In the order of the groups, which is not that of the ids."""
    at = tl.cumsum(tl.reshape((key == cut).to(tl.int32), (BLOCK_U * 32,)), 0)
    return tl.max(tl.where((key == cut) & (tl.reshape(at, ids.shape) <= wanted), ids, -1))


@triton.jit
def candidates_in_registers(row_logits, units, n_units, start, V, BLOCK_U: tl.constexpr):
    return candidates(row_logits, units, tl.minimum(n_units, BLOCK_U), start, V, BLOCK_U)


@triton.jit
def keep_strictly_above(x, ids, least, last):
    return tl.where(x > least, x, float("-inf"))


@triton.jit
def keep_all(x, ids, least, last):
    return x


mask_logits, candidates = tile.mask_logits, select._candidates


class Relaunched:
    """A kernel whose arguments are changed on their way to it."""

    def __init__(self, kernel, **changes):
        self.kernel, self.changes = kernel, changes

    def __getitem__(self, grid):
        def launch(*args, **options):
            named = dict(zip(self.kernel.arg_names, args, strict=False)) | options | self.changes
            return self.kernel[grid](**named)

        return launch


def edits_without_repetitions(request, sort_edits=edits.sort_edits):
    """Of several entries for the same logit and kind the first counts alone."""
    keys, values, bad = sort_edits(request)
    keys[1:] = torch.where(keys[1:] == keys[:-1], edits._NONE, keys[1:])
    keys, order = torch.sort(keys, stable=True)
    return keys, values[order], bad


FAULTS = [
    ("noise keyed by tile", epilogue, "noise_words", words_keyed_by_tile, checks.check_tile_invariance),
    ("24-bit uniform", epilogue, "gumbel", gumbel_of_24_bits, checks.check_winning_tail),
    ("fp32 running sum", epilogue, "choose_member", choose_by_running_sum, checks.check_interval_widths),
    ("unmasked tail tile", tile, "mask_logits", no_mask, checks.check_ragged_tail),
    ("repeated seed", epilogue, "noise_words", words_of_one_seed, checks.check_rows_independent),
    ("mask bits reversed", tile, "mask_logits", mask_of_reversed_bits, checks.check_mask),
    ("mask of a large number", tile, "mask_logits", mask_by_a_large_number, checks.check_mask),
    ("edits after the mask", edits, "apply_edits", Relaunched(edits.apply_edits, allowed=None), checks.check_mask),
    ("repeated edits once", edits, "sort_edits", edits_without_repetitions, checks.check_edits),
    ("all ties kept", select, "_last_tie", all_ties, checks.check_ties),
    ("ties in no order", select, "_last_tie", first_ties_found, checks.check_ties),
    ("ties cut off", stored, "_keep", keep_strictly_above, checks.check_ties),
    ("nothing cut off", stored, "_keep", keep_all, checks.check_ties),
    ("top-p of all", select, "cut_rows", Relaunched(select.cut_rows, JOINT=True), checks.check_filter_orders),
    (
        "top-p before min-p", select, "cut_rows", Relaunched(select.cut_rows, MIN_P_FIRST=False),
        checks.check_filter_orders,
    ),
    ("candidates in registers only", select, "_candidates", candidates_in_registers, checks.check_candidate_groups),
]  # fmt: skip


@pytest.mark.parametrize("module, name, faulty, check", [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_planted_fault_is_caught(device, monkeypatch, module, name, faulty, check):
    check(device)
    monkeypatch.setattr(module, name, faulty)
    with pytest.raises((AssertionError, ValueError)):
        check(device)
