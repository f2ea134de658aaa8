"""Stage 2 of the portable kernel: reduces the tile results of stage 1 to one token id per row and draw.

A few tens of bytes per tile and row, read twice; the decision is a maximum with ties to the lowest id, so it does not
depend on how the vocabulary was cut into tiles.
"""

import triton
import triton.language as tl

from fmms.kernels import epilogue as ep


@triton.jit(do_not_specialize=["H", "S", "n_tiles"])
def reduce_tiles(
    in_key, in_id, in_logit, in_max, in_sum, temperature, temperature_value,
    ids, logprobs, lse, max_logit, valid, H, S, n_tiles,
    BLOCK_DRAWS: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of draws,), a draw being a (row, sample) pair. Inputs as stage 1 writes them. Written: ids int64
    and logprobs fp32 [H, S] (logprobs may be None), lse and max_logit fp32 [H], valid bool [H]."""
    draw = tl.program_id(0) * BLOCK_DRAWS + tl.arange(0, BLOCK_DRAWS)
    live = draw < H * S
    row, sample = draw // S, draw % S
    if temperature is None:
        t = tl.full((BLOCK_DRAWS,), temperature_value, tl.float32)
    else:
        t = tl.load(temperature + row, mask=live, other=1.0)
    inv_t = ep.inverse_temperature(t)
    lane = tl.arange(0, BLOCK_TILES)[None, :]

    m = tl.full((BLOCK_DRAWS, BLOCK_TILES), float("-inf"), tl.float32)
    for start in range(0, n_tiles, BLOCK_TILES):
        tile = (start + lane).to(tl.int64)
        here = live[:, None] & (tile < n_tiles)
        m = tl.maximum(m, tl.load(in_max + tile * H + row[:, None], mask=here, other=float("-inf")))
    largest = tl.max(m, 1)
    reference = ep.finite_or_zero(largest).to(tl.float64)

    key = tl.full((BLOCK_DRAWS, BLOCK_TILES), float("-inf"), tl.float64)
    token = tl.full((BLOCK_DRAWS, BLOCK_TILES), ep.NO_TOKEN, tl.int32)
    logit = tl.zeros((BLOCK_DRAWS, BLOCK_TILES), tl.float32)
    total = tl.zeros((BLOCK_DRAWS, BLOCK_TILES), tl.float64)
    for start in range(0, n_tiles, BLOCK_TILES):
        tile = (start + lane).to(tl.int64)
        here = live[:, None] & (tile < n_tiles)
        tile_max = tl.load(in_max + tile * H + row[:, None], mask=here, other=float("-inf"))
        tile_sum = tl.load(in_sum + tile * H + row[:, None], mask=here, other=0.0)
        total += (tile_sum * ep.exp_weights(tile_max, largest[:, None], inv_t[:, None])).to(tl.float64)
        at = (tile * S + sample[:, None]) * H + row[:, None]
        # stage 1 keeps keys relative to the tile's maximum; here they meet, relative to the row's
        new_key = tl.load(in_key + at, mask=here, other=float("-inf"))
        new_key += (tile_max.to(tl.float64) - reference[:, None]) * inv_t[:, None]
        new_token = tl.load(in_id + at, mask=here, other=ep.NO_TOKEN)
        new_logit = tl.load(in_logit + at, mask=here, other=0.0)
        better = (new_key > key) | ((new_key == key) & (new_token < token))
        key = tl.where(better, new_key, key)
        token = tl.where(better, new_token, token)
        logit = tl.where(better, new_logit, logit)
    _, chosen = ep.best_of(key, token)
    chosen_logit = tl.sum(tl.where(token == chosen[:, None], logit, 0.0), 1)
    log_total = tl.log(tl.sum(total, 1))

    # a NaN or +inf logit made a sum NaN; a row without a finite logit has maximum -inf; a NaN temperature fails t >= 0
    # (injected noise that is NaN leaves no token chosen)
    good = (
        (chosen != ep.NO_TOKEN)
        & (log_total < float("inf"))
        & (largest > float("-inf"))
        & (largest < float("inf"))
        & (t >= 0.0)
    )
    nan = float("nan")
    tl.store(ids + draw, tl.where(good, chosen, -1).to(tl.int64), mask=live)
    if logprobs is not None:
        relative = (chosen_logit - largest).to(tl.float64) * inv_t - log_total
        tl.store(logprobs + draw, tl.where(good, relative.to(tl.float32), nan), mask=live)
    first = live & (sample == 0)
    tl.store(lse + row, tl.where(good, (largest.to(tl.float64) * inv_t + log_total).to(tl.float32), nan), mask=first)
    tl.store(max_logit + row, tl.where(good, largest, nan), mask=first)
    tl.store(valid + row, good, mask=first)
