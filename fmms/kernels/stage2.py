"""Stage 2 of the portable kernel: reduces tile results to one token id per row and draw, and to each row's statistics.

A few tens of bytes per tile and row, read twice; the decision is a maximum with ties to the lowest id, so it does not
depend on how the vocabulary was cut into tiles.
"""

import triton
import triton.language as tl

from fmms.kernels import epilogue as ep
from fmms.kernels import tile as on_tile


@triton.jit
def _largest(tile_max, row, live, H, n_tiles, BLOCK_DRAWS: tl.constexpr, BLOCK_TILES: tl.constexpr):
    """Maximum of each row over its tiles."""
    lane = tl.arange(0, BLOCK_TILES)[None, :]
    m = tl.full((BLOCK_DRAWS, BLOCK_TILES), float("-inf"), tl.float32)
    for start in range(0, n_tiles, BLOCK_TILES):
        tile = (start + lane).to(tl.int64)
        here = live[:, None] & (tile < n_tiles)
        m = tl.maximum(m, tl.load(tile_max + tile * H + row[:, None], mask=here, other=float("-inf")))
    return tl.max(m, 1)


@triton.jit
def _statistics(
    tile_max, tile_sum, row, live, inv_t, H, n_tiles, BLOCK_DRAWS: tl.constexpr, BLOCK_TILES: tl.constexpr
):  # fmt: skip
    """Each row's maximum (fp32) and sum of exponentials relative to it (fp64)."""
    lane = tl.arange(0, BLOCK_TILES)[None, :]
    largest = _largest(tile_max, row, live, H, n_tiles, BLOCK_DRAWS, BLOCK_TILES)
    total = tl.zeros((BLOCK_DRAWS, BLOCK_TILES), tl.float64)
    for start in range(0, n_tiles, BLOCK_TILES):
        tile = (start + lane).to(tl.int64)
        here = live[:, None] & (tile < n_tiles)
        at = tile * H + row[:, None]
        m = tl.load(tile_max + at, mask=here, other=float("-inf"))
        s = tl.load(tile_sum + at, mask=here, other=0.0)
        total += (s * ep.exp_weights(m, largest[:, None], inv_t[:, None])).to(tl.float64)
    return largest, tl.sum(total, 1)


@triton.jit
def _weighted_logits(
    tile_max, tile_sum, tile_dot, largest, row, live, inv_t, H, n_tiles,
    BLOCK_DRAWS: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """Each row's sum of w * (x - largest) / T over the tokens, fp64."""
    lane = tl.arange(0, BLOCK_TILES)[None, :]
    dot = tl.zeros((BLOCK_DRAWS, BLOCK_TILES), tl.float64)
    for start in range(0, n_tiles, BLOCK_TILES):
        tile = (start + lane).to(tl.int64)
        here = live[:, None] & (tile < n_tiles)
        at = tile * H + row[:, None]
        m = tl.load(tile_max + at, mask=here, other=float("-inf"))
        s = tl.load(tile_sum + at, mask=here, other=0.0)
        w = ep.exp_weights(m, largest[:, None], inv_t[:, None])
        y = (m.to(tl.float64) - ep.finite_or_zero(largest).to(tl.float64)[:, None]) * inv_t[:, None]
        d = tl.load(tile_dot + at, mask=here, other=0.0).to(tl.float64) + y * s
        dot += tl.where(w > 0.0, w * d, 0.0)
    return tl.sum(dot, 1)


@triton.jit(do_not_specialize=["H", "S", "n_tiles", "n_row_tiles", "n_raw_tiles", "features"])
def reduce_tiles(
    features, in_key, in_id, in_logit, in_raw, in_max, in_sum, row_max, row_sum, row_dot, raw_max, raw_sum, raw, bad,
    banned, temperature, temperature_value, ids, logprobs, lse, max_logit, valid, raw_logprobs, final_logprobs,
    log_total, entropy, H, V, S, n_tiles, n_row_tiles, n_raw_tiles,
    BLOCK_DRAWS: tl.constexpr, BLOCK_TILES: tl.constexpr, GENERAL: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of draws,), a draw being a (row, sample) pair.

    in_*: tile results of the draw, as stage 1 writes them, of n_tiles tiles; temperature fp32 [H] or None. If STORED,
    row_max and row_sum, of n_row_tiles tiles, are the statistics of the distribution before truncation. Written: ids
    int64 and logprobs fp32 [H, S]; lse and max_logit fp32, valid bool [H].

    If GENERAL, as far as the bits of features (`tile.py`) ask for it: row_dot, of the tiles of the statistics; raw_max
    and raw_sum, of n_raw_tiles tiles, with the raw logit of a draw in raw [H, V] if STORED and in in_raw if not; bad
    bool [H], rows found invalid before; banned int64 [H]. Written then: raw_logprobs and final_logprobs fp32 [H, S],
    log_total (lse less the largest logit / T) and entropy fp32 [H].
    """
    draw = tl.program_id(0) * BLOCK_DRAWS + tl.arange(0, BLOCK_DRAWS)
    live = draw < H * S
    row, sample = draw // S, draw % S
    first = live & (sample == 0)
    if temperature is None:
        t = tl.full((BLOCK_DRAWS,), temperature_value, tl.float32)
    else:
        t = tl.load(temperature + row, mask=live, other=1.0)
    inv_t = ep.inverse_temperature(t)
    lane = tl.arange(0, BLOCK_TILES)[None, :]
    if STORED:
        largest, total = _statistics(row_max, row_sum, row, live, inv_t, H, n_row_tiles, BLOCK_DRAWS, BLOCK_TILES)
        # truncation keeps the largest logit, so both sums are relative to the same number
        _, left = _statistics(in_max, in_sum, row, live, inv_t, H, n_tiles, BLOCK_DRAWS, BLOCK_TILES)
    else:
        largest, total = _statistics(in_max, in_sum, row, live, inv_t, H, n_tiles, BLOCK_DRAWS, BLOCK_TILES)
        left = total
    reference = ep.finite_or_zero(largest).to(tl.float64)

    key = tl.full((BLOCK_DRAWS, BLOCK_TILES), float("-inf"), tl.float64)
    token = tl.full((BLOCK_DRAWS, BLOCK_TILES), ep.NO_TOKEN, tl.int32)
    logit = tl.zeros((BLOCK_DRAWS, BLOCK_TILES), tl.float32)
    where = tl.zeros((BLOCK_DRAWS, BLOCK_TILES), tl.int64)
    for start in range(0, n_tiles, BLOCK_TILES):
        tile = (start + lane).to(tl.int64)
        here = live[:, None] & (tile < n_tiles)
        at = (tile * S + sample[:, None]) * H + row[:, None]
        # stage 1 keeps keys relative to the tile's maximum; here they meet, relative to the row's
        tile_max = tl.load(in_max + tile * H + row[:, None], mask=here, other=float("-inf"))
        new_key = tl.load(in_key + at, mask=here, other=float("-inf"))
        new_key += (tile_max.to(tl.float64) - reference[:, None]) * inv_t[:, None]
        new_token = tl.load(in_id + at, mask=here, other=ep.NO_TOKEN)
        better = (new_key > key) | ((new_key == key) & (new_token < token))
        key = tl.where(better, new_key, key)
        token = tl.where(better, new_token, token)
        logit = tl.where(better, tl.load(in_logit + at, mask=here, other=0.0), logit)
        where = tl.where(better, at, where)
    _, chosen = ep.best_of(key, token)
    is_chosen = token == chosen[:, None]
    chosen_logit = tl.sum(tl.where(is_chosen, logit, 0.0), 1)
    log_sum = tl.log(total)

    # a NaN or +inf logit made a sum NaN; a row without a finite logit has maximum -inf; a NaN temperature fails t >= 0;
    # a row of which truncation left nothing (an invalid control) has no token chosen, nor has one whose injected noise
    # is NaN
    good = (
        (chosen != ep.NO_TOKEN)
        & (log_sum < float("inf"))
        & (largest > float("-inf"))
        & (largest < float("inf"))
        & (left > 0.0)
        & (t >= 0.0)
    )
    if GENERAL:
        if (features & on_tile.BAD) != 0:
            good = good & (tl.load(bad + row, mask=live, other=0) == 0)
        if (features & on_tile.BANNED) != 0:
            never = tl.load(banned + row, mask=live, other=-1)
            good = good & (never >= -1) & (never < V)
    nan = float("nan")
    relative = (chosen_logit - largest).to(tl.float64) * inv_t
    lse_value = largest.to(tl.float64) * inv_t + log_sum
    tl.store(ids + draw, tl.where(good, chosen, -1).to(tl.int64), mask=live)
    tl.store(logprobs + draw, tl.where(good, (relative - log_sum).to(tl.float32), nan), mask=live)
    tl.store(lse + row, tl.where(good, lse_value.to(tl.float32), nan), mask=first)
    tl.store(max_logit + row, tl.where(good, largest, nan), mask=first)
    tl.store(valid + row, good, mask=first)
    if GENERAL:
        final = relative - tl.log(left)
        tl.store(final_logprobs + draw, tl.where(good, final.to(tl.float32), nan), mask=live)
        tl.store(log_total + row, log_sum.to(tl.float32), mask=first)
        if (features & on_tile.ENTROPY) != 0:
            if STORED:
                dot = _weighted_logits(
                    row_max, row_sum, row_dot, largest, row, live, inv_t, H, n_row_tiles, BLOCK_DRAWS, BLOCK_TILES
                )
            else:
                dot = _weighted_logits(
                    in_max, in_sum, row_dot, largest, row, live, inv_t, H, n_tiles, BLOCK_DRAWS, BLOCK_TILES
                )
            tl.store(entropy + row, tl.where(good, (log_sum - dot / total).to(tl.float32), nan), mask=first)
        if (features & on_tile.RAW) != 0:
            one = tl.full((BLOCK_DRAWS,), 1.0, tl.float64)
            raw_largest, raw_total = _statistics(
                raw_max, raw_sum, row, live, one, H, n_raw_tiles, BLOCK_DRAWS, BLOCK_TILES
            )
            if STORED:
                chosen_raw = tl.load(raw + row.to(tl.int64) * V + chosen, mask=live & good, other=0.0)
            else:
                at = tl.sum(tl.where(is_chosen, where, 0), 1)
                chosen_raw = tl.load(in_raw + at, mask=live & good, other=0.0)
            found = (chosen_raw - raw_largest).to(tl.float64) - tl.log(raw_total)
            tl.store(raw_logprobs + draw, tl.where(good, found.to(tl.float32), nan), mask=live)
