"""Tests of the tests: each planted fault is one that a sampler has shipped with, and the check meant for it must fail.

A fault replaces a device function of the kernels. That works in Triton's interpreter, which looks names up when it
runs; compiled kernels would keep the old function.
"""

import checks
import pytest

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from fmms.kernels import epilogue, tile  # noqa: E402

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
def no_mask(x, rows, live, tokens, V, allowed, stride_allowed, banned):
    return x


FAULTS = [
    ("noise keyed by tile", epilogue, "noise_words", words_keyed_by_tile, checks.check_tile_invariance),
    ("24-bit uniform", epilogue, "gumbel", gumbel_of_24_bits, checks.check_winning_tail),
    ("fp32 running sum", epilogue, "choose_member", choose_by_running_sum, checks.check_interval_widths),
    ("unmasked tail tile", tile, "mask_logits", no_mask, checks.check_ragged_tail),
    ("repeated seed", epilogue, "noise_words", words_of_one_seed, checks.check_rows_independent),
]


@pytest.mark.parametrize("module, name, faulty, check", [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_planted_fault_is_caught(device, monkeypatch, module, name, faulty, check):
    check(device)
    monkeypatch.setattr(module, name, faulty)
    with pytest.raises((AssertionError, ValueError)):
        check(device)
