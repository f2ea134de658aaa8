"""What is done with one tile of logits `[rows, ids]`, wherever it came from: masks, summaries, draws, tile results out.

`stage1.py` has its tiles from the matmul, `stored.py` from memory. The arithmetic of a draw is in `epilogue.py`.
"""

import triton
import triton.language as tl

from fmms.kernels import epilogue as ep

BIAS = tl.constexpr(1)
ALLOWED = tl.constexpr(2)
BANNED = tl.constexpr(4)
ENTROPY = tl.constexpr(8)
RAW = tl.constexpr(16)
LOGITS = tl.constexpr(32)
BAD = tl.constexpr(64)
"""Bits of `features`: what a general kernel is asked for at run time. A kernel for every combination would be compiled
for minutes; one with everything in it would be slower where nothing is asked for, which has kernels of its own."""


@triton.jit
def row_controls(
    rows, live, temperature, temperature_value, seeds, seed_value: tl.int64, positions, position_value: tl.int64,
):  # fmt: skip
    """1 / T fp64, greedy, seed uint64 and position int64 of each row; a pointer of None means the scalar holds."""
    if temperature is None:
        t = tl.full(rows.shape, temperature_value, tl.float32)
    else:
        t = tl.load(temperature + rows, mask=live, other=1.0)
    if seeds is None:
        seed = ep.row_seed(tl.full(rows.shape, seed_value, tl.int64), rows)
    else:
        seed = tl.load(seeds + rows, mask=live, other=0).to(tl.uint64)
    if positions is None:
        position = tl.full(rows.shape, position_value, tl.int64)
    else:
        position = tl.load(positions + rows, mask=live, other=0)
    return ep.inverse_temperature(t), (t == 0.0) & live, (t > 0.0) & live, seed, position


@triton.jit
def mask_logits(x, rows, live, tokens, V, features, allowed, stride_allowed, banned, GENERAL: tl.constexpr):
    """-inf for ids that are no tokens, that the row's bit mask doesn't allow, and for the row's banned token."""
    x = tl.where((tokens < V)[None, :], x, float("-inf"))
    if GENERAL:
        if (features & ALLOWED) != 0:
            where = allowed + rows.to(tl.int64)[:, None] * stride_allowed + (tokens >> 5)[None, :]
            word = tl.load(where, mask=live[:, None] & (tokens < V)[None, :], other=0)
            x = tl.where(((word >> (tokens & 31)[None, :]) & 1) != 0, x, float("-inf"))
        if (features & BANNED) != 0:
            never = tl.load(banned + rows, mask=live, other=-1)
            x = tl.where(tokens[None, :] != never[:, None], x, float("-inf"))
    return x


@triton.jit
def summarise_groups(g, inv_t, SCATTERED: tl.constexpr = False):
    """Of logits `[rows, groups, 32]`: weights of the members relative to the group's maximum, likewise; maxima and sums
    `[rows, groups]`. SCATTERED: a group's members may be in lanes that are not consecutive."""
    m = ep.scattered_max(g) if SCATTERED else tl.max(g, 2)
    p = ep.exp_weights(g, tl.expand_dims(m, 2), tl.expand_dims(tl.expand_dims(inv_t, 1), 2))
    return p, m, ep.group_total(p)


@triton.jit
def summarise_tile(group_max, group_sum, inv_t):
    """Maximum and sum of exponentials of each row from those of its groups."""
    m = tl.max(group_max, 1)
    return m, tl.sum(group_sum * ep.exp_weights(group_max, m[:, None], inv_t[:, None]), 1)


@triton.jit
def weighted_logits(x, m, inv_t):
    """Sum over the ids of w * (x - m) / T with w = exp((x - m) / T): what the entropy needs."""
    w = ep.exp_weights(x, m[:, None], inv_t[:, None])
    y = (x - ep.finite_or_zero(m)[:, None]) * inv_t.to(tl.float32)[:, None]
    return tl.sum(tl.where(w > 0.0, w * y, 0.0), 1)


@triton.jit
def store_statistics(m, total, tile, rows, live, H, out_max, out_sum):
    """A tile's maximum and sum of exponentials, fp32 [n_tiles, H] each."""
    # int64: tiles * rows can pass 2**31
    at = tl.zeros_like(rows).to(tl.int64) + tile
    tl.store(out_max + at * H + rows, m, mask=live)
    tl.store(out_sum + at * H + rows, total, mask=live)


@triton.jit
def store_dot(x, m, inv_t, tile, rows, live, H, out_dot):
    """A tile's weighted logits, fp32 [n_tiles, H]."""
    at = tl.zeros_like(rows).to(tl.int64) + tile
    tl.store(out_dot + at * H + rows, weighted_logits(x, m, inv_t), mask=live)


@triton.jit
def store_groups(group_max, group_sum, first_id, rows, live, n_groups, out_group_max, out_group_sum):
    """The summaries of a tile's groups, fp32 [H, n_groups] each."""
    unit = first_id // 32 + tl.arange(0, group_max.shape[1])[None, :]
    at = rows.to(tl.int64)[:, None] * n_groups + unit
    mask = live[:, None] & (unit < n_groups)
    tl.store(out_group_max + at, group_max, mask=mask)
    tl.store(out_group_sum + at, group_sum, mask=mask)


@triton.jit
def _relative(x, tile_max, inv_t):
    """(x - tile maximum) / T in fp64. Keys are kept relative to the tile's maximum, so that a Gumbel is resolved at any
    temperature and size of logit; in fp64, so that the choice of tile does not show in them."""
    return (x.to(tl.float64) - ep.finite_or_zero(tile_max).to(tl.float64)[:, None]) * inv_t[:, None]


@triton.jit
def draw_groups(
    p, m, total, tile_max, first_id, inv_t, seed, position, sample, gumbels, uniforms, noise_row, live, n_groups
):
    """Best key and token id of each row under the `group` scheme."""
    unit = first_id // 32 + tl.arange(0, m.shape[1])[None, :]
    if gumbels is None:
        w0, w1, w2, w3 = ep.noise_words(seed[:, None], position[:, None], unit, sample, ep._PURPOSE_GROUP)
        z = ep.gumbel(w0, w1)
        coarse, fine = ep.uniform_parts(w2, w3)
    else:
        mask = live[:, None] & (unit < n_groups)
        z = tl.load(gumbels + noise_row[:, None] + unit, mask=mask, other=0.0)
        coarse, fine = ep.split_uniform(tl.load(uniforms + noise_row[:, None] + unit, mask=mask, other=0))
    key = _relative(m, tile_max, inv_t) + (tl.log(total).to(tl.float64) + z.to(tl.float64))
    # unit and member in one number: between equal keys the lowest group wins, whichever of its tokens was drawn
    best, drawn = ep.best_of(key, unit * 32 + ep.choose_member(p, coarse, fine))
    return best, ep.member_id(drawn >> 5, drawn & 31)


@triton.jit
def draw_tokens(x, tile_max, first_id, inv_t, seed, position, sample, gumbels, noise_row, live, V):
    """Best key and token id of each row under the `token` scheme."""
    unit = first_id + tl.arange(0, x.shape[1])[None, :]
    if gumbels is None:
        w0, w1, _, _ = ep.noise_words(seed[:, None], position[:, None], unit, sample, ep._PURPOSE_TOKEN)
        z = ep.gumbel(w0, w1)
    else:
        z = tl.load(gumbels + noise_row[:, None] + unit, mask=live[:, None] & (unit < V), other=0.0)
    key = _relative(x, tile_max, inv_t) + z.to(tl.float64)
    return ep.best_of(key, unit)


@triton.jit
def store_draws(
    x, p, group_max, group_sum, m, tile, first_id, tokens, rows, live, inv_t, greedy, any_greedy, any_drawn, seed,
    position, first_sample, gumbels, uniforms, noise_width, features, raw, out_key, out_id, out_logit, out_raw,
    H, V, S, GROUPED: tl.constexpr, GENERAL: tl.constexpr,
):  # fmt: skip
    """The best key of each row and draw in this tile with its id, logit and (if RAW is among the features) raw logit,
    [n_tiles, S, H] each."""
    # two loops that write their own rows, not one with branches that yield values: those Triton 3.6 does not compile
    # for AMD inside a loop. A row of invalid temperature may stay unwritten; stage 2 goes by its temperature.
    if any_drawn:
        for s in range(S):
            noise_row = (rows.to(tl.int64) * S + s) * noise_width
            if GROUPED:
                key, best_id = draw_groups(
                    p, group_max, group_sum, m, first_id, inv_t, seed, position, first_sample + s, gumbels, uniforms,
                    noise_row, live, noise_width,
                )  # fmt: skip
            else:
                key, best_id = draw_tokens(
                    x, m, first_id, inv_t, seed, position, first_sample + s, gumbels, noise_row, live, V
                )
            _store_draw(
                x, raw, key, best_id, tile, s, first_id, rows, live & (greedy == 0), features, out_key, out_id,
                out_logit, out_raw, H, S, GENERAL,
            )  # fmt: skip
    if any_greedy:
        first_max = tl.min(tl.where(x == m[:, None], tokens[None, :], ep.NO_TOKEN), 1)
        for s in range(S):
            _store_draw(
                x, raw, tl.zeros_like(m).to(tl.float64), first_max, tile, s, first_id, rows, greedy, features, out_key,
                out_id, out_logit, out_raw, H, S, GENERAL,
            )  # fmt: skip


@triton.jit
def _store_draw(
    x, raw, key, best_id, tile, sample, first_id, rows, mask, features, out_key, out_id, out_logit, out_raw, H, S,
    GENERAL: tl.constexpr,
):  # fmt: skip
    at = ((tl.zeros_like(rows).to(tl.int64) + tile) * S + sample) * H + rows
    tl.store(out_key + at, key, mask=mask)
    tl.store(out_id + at, best_id, mask=mask)
    tl.store(out_logit + at, ep.value_at(x, first_id, best_id), mask=mask)
    if GENERAL:
        if (features & RAW) != 0:
            tl.store(out_raw + at, ep.value_at(raw, first_id, best_id), mask=mask)
