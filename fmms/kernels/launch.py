"""Launches the portable kernel: tile sizes, grids, the buffer between the stages.

Arguments arrive checked (`fmms/arguments.py`); nothing here synchronises with the host or allocates in a way that a
CUDA graph cannot capture.
"""

import contextlib
import threading
import warnings
from dataclasses import dataclass

import numpy as np
import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from fmms import device as device_facts
from fmms.kernels import stage1, stage2

INTERPRETED = triton.knobs.runtime.interpret
_interpreter_lock = threading.Lock()
"""The interpreter patches triton.language while it runs a kernel, for all threads."""

TILE_RESULTS = 1 << 24
"""Most tile results (tiles x draws x rows, 16 bytes each) that are kept between the stages."""


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of stage 1. They change the speed of a call, never the ids that it returns."""

    block_h: int
    block_v: int
    block_d: int
    vocab_on_m: bool
    tma: bool = False
    num_warps: int = 4
    num_stages: int = 4
    programs_per_sm: int = 2


def tma_allowed(*operands: torch.Tensor) -> bool:
    """Whether Hopper's tensor copy engine can load these matrices: base address and row stride in whole 16 bytes."""
    device = operands[0].device
    if INTERPRETED or device.type != "cuda" or torch.version.hip or device_facts.facts(device).capability < (9, 0):
        return False
    return all(
        x.data_ptr() % 16 == 0
        and x.stride(1) == 1
        and x.stride(0) >= x.shape[1]
        and x.stride(0) * x.element_size() % 16 == 0
        for x in operands
    )


def choose_tiles(rows: int, vocab: int, width: int, itemsize: int, tma: bool = False) -> Tiles:
    """Tile sizes for a problem [rows, width] x [vocab, width] of elements of `itemsize` bytes."""
    block_h = max(16, triton.next_power_of_2(rows))
    if INTERPRETED:
        # NumPy's cost is per operation more than per element: few, large tiles, of at most 2**20 elements (Triton's
        # limit) and narrow along D (measured: 5 times faster than square ones at V = 49152, D = 576)
        block_h = min(512, block_h)
        block_v = min(1 << 14, (1 << 20) // block_h, max(128, triton.next_power_of_2(vocab)))
        return Tiles(block_h, block_v, min(64, max(16, triton.next_power_of_2(width))), vocab_on_m=False)
    block_h = min(128, block_h)
    if itemsize == 4:
        return Tiles(min(block_h, 32), 128, 32, False, tma, num_warps=4, num_stages=3)
    if block_h == 16:
        return Tiles(16, 128, 128, False, tma, num_warps=4, num_stages=3, programs_per_sm=2)
    # from 17 rows on in 64s, Hopper's matrix instruction: 32 rows on the older one spill registers and take longer
    return Tiles(max(64, block_h), 128, 64, False, tma, num_warps=8, num_stages=5, programs_per_sm=1)


STAGE2_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def stage1_options(tiles: Tiles) -> dict:
    """Compiler options of stage 1. No fused multiply-adds: several threads hold copies of one row's sum, each adding
    its own product last, and fused ones round differently from copy to copy, so which was stored would be chance."""
    return {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "enable_fp_fusion": False}


_thread = threading.local()


@contextlib.contextmanager
def _launch_context(device: torch.device):
    """Triton launches on the current device, which need not be the tensors'. The interpreter is NumPy, which warns of
    the log of an empty group's sum and of NaN inputs; both are handled in the kernels."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            if not getattr(_thread, "has_context", False):
                # a new thread has no CUDA context until some work gives it one, and tensor descriptors need it
                torch.zeros(1, device=device)
                _thread.has_context = True
            yield
    else:
        ignored = warnings.catch_warnings(action="ignore", category=RuntimeWarning)
        with _interpreter_lock, np.errstate(all="ignore"), ignored:
            yield


def sample(
    hidden, weight, temperature, temperature_value, seeds, seed_value, positions, position_value, samples, scheme,
    gumbels, uniforms, logit_scale, softcap, bias, want_logprobs, want_logits, tiles=None,
):  # fmt: skip
    """Runs both stages on the tensors' device.

    Per-row controls are tensors, or None and then the `_value` scalar holds for every row. `tiles` overrides the
    choice of tile sizes. Draws beyond TILE_RESULTS take further passes over the weight.

    Returns:
        ids int64 [H, S], logprobs fp32 [H, S] (or None), lse fp32 [H], max_logit fp32 [H], valid bool [H], logits
        fp32 [H, V] (or None).
    """
    rows, width = hidden.shape
    vocab = weight.shape[0]
    tiles = tiles or choose_tiles(rows, vocab, width, hidden.element_size(), tma_allowed(hidden, weight))
    at_once = max(1, TILE_RESULTS // (triton.cdiv(vocab, tiles.block_v) * rows))
    results = []
    for first in range(0, samples, at_once):
        count = min(at_once, samples - first)
        injected = (None if n is None else n[:, first : first + count].contiguous() for n in (gumbels, uniforms))
        one_pass = _both_stages(
            hidden, weight, temperature, temperature_value, seeds, seed_value, positions, position_value, first, count,
            scheme, *injected, logit_scale, softcap, bias, want_logprobs, want_logits and first == 0, tiles,
        )  # fmt: skip
        results.append(one_pass)
    if len(results) == 1:
        return results[0]
    ids = torch.cat([r[0] for r in results], 1)
    logprobs = torch.cat([r[1] for r in results], 1) if want_logprobs else None
    return ids, logprobs, *results[0][2:]


def _both_stages(
    hidden, weight, temperature, temperature_value, seeds, seed_value, positions, position_value, first_sample,
    samples, scheme, gumbels, uniforms, logit_scale, softcap, bias, want_logprobs, want_logits, tiles,
):  # fmt: skip
    """One pass over the weight: `sample` for the draws from `first_sample` on."""
    rows, width = hidden.shape
    vocab = weight.shape[0]
    n_tiles = triton.cdiv(vocab, tiles.block_v)
    device = hidden.device

    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device=device)

    key = empty(n_tiles, samples, rows, dtype=torch.float64)
    token = empty(n_tiles, samples, rows, dtype=torch.int32)
    logit = empty(n_tiles, samples, rows)
    tile_max, tile_sum = empty(n_tiles, rows), empty(n_tiles, rows)
    logits = empty(rows, vocab) if want_logits else None
    ids = empty(rows, samples, dtype=torch.int64)
    logprobs = empty(rows, samples) if want_logprobs else None
    lse, max_logit, valid = empty(rows), empty(rows), empty(rows, dtype=torch.bool)

    hidden_operand, weight_operand = hidden, weight
    if tiles.tma:
        hidden_operand = TensorDescriptor.from_tensor(hidden, [tiles.block_h, tiles.block_d])
        weight_operand = TensorDescriptor.from_tensor(weight, [tiles.block_v, tiles.block_d])
    hidden_tiles = triton.cdiv(rows, tiles.block_h)
    programs = n_tiles
    if device.type == "cuda":
        sm_count = device_facts.facts(device).sm_count
        programs = min(n_tiles, max(1, sm_count * tiles.programs_per_sm // hidden_tiles))
    options = {} if INTERPRETED else stage1_options(tiles)
    with _launch_context(device):
        # one dimension: the others end at 65,535, which 2 million rows exceed
        stage1.fused_head[(programs * hidden_tiles,)](
            hidden_operand, weight_operand, bias, temperature, seeds, positions, gumbels, uniforms,
            logits, key, token, logit, tile_max, tile_sum,
            rows, vocab, width, samples, hidden.stride(0), weight.stride(0),
            0 if gumbels is None else gumbels.shape[-1], n_tiles,
            temperature_value, seed_value, position_value, first_sample, logit_scale, softcap,
            BLOCK_H=tiles.block_h, BLOCK_V=tiles.block_v, BLOCK_D=tiles.block_d, EVEN_D=width % tiles.block_d == 0,
            TMA=tiles.tma, VOCAB_ON_M=tiles.vocab_on_m, GROUPED=scheme == "group", UPCAST=INTERPRETED,
            SOFTCAP=softcap != 0.0,
            **options,
        )  # fmt: skip
        draws = 512 if INTERPRETED else 1
        stage2.reduce_tiles[(triton.cdiv(rows * samples, draws),)](
            key, token, logit, tile_max, tile_sum, temperature, temperature_value,
            ids, logprobs, lse, max_logit, valid, rows, samples, n_tiles,
            BLOCK_DRAWS=draws, BLOCK_TILES=min(1024, max(16, triton.next_power_of_2(n_tiles))),
            **({} if INTERPRETED else STAGE2_OPTIONS),
        )  # fmt: skip
    return ids, logprobs, lse, max_logit, valid, logits
