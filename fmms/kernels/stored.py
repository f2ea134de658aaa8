"""Work on stored logits: summaries after sparse edits, and the draw from what truncation left.

The same tile routines (`tile.py`) as in the fused kernel, on tiles that are loaded instead of multiplied, so a row
draws the same token here and there. Groups are loaded as groups: rearranged from a tile of ids, they would lie in
registers in a way that Triton before 3.8 reduces wrongly (docs/decisions.md).
"""

import triton
import triton.language as tl

from fmms.kernels import epilogue as ep
from fmms.kernels import tile as on_tile


@triton.jit
def _load_ids(logits, rows, live, tokens, V):
    """Logits `[rows, ids]`; -inf where there are none."""
    where = logits + rows.to(tl.int64)[:, None] * V + tokens[None, :]
    return tl.load(where, mask=live[:, None] & (tokens < V)[None, :], other=float("-inf"))


@triton.jit
def _load_groups(logits, rows, live, first_id, V, BLOCK_V: tl.constexpr):
    """Ids `[1, groups, 32]` and logits `[rows, groups, 32]` of the groups from first_id on."""
    unit = first_id // 32 + tl.arange(0, BLOCK_V // 32)
    ids = ep.member_id(unit[None, :, None], tl.arange(0, 32)[None, None, :])
    where = logits + rows.to(tl.int64)[:, None, None] * V + ids
    return ids, tl.load(where, mask=live[:, None, None] & (ids < V), other=float("-inf"))


@triton.jit
def _keep(x, ids, least, last):
    """What is above the threshold, or equal to it with an id up to the last."""
    return tl.where((x > least) | ((x == least) & (ids <= last)), x, float("-inf"))


@triton.jit(do_not_specialize=["H", "n_groups"])
def summarise(
    logits, temperature, temperature_value, group_max, group_sum, out_max, out_sum, out_dot, H, V, n_groups,
    BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles * blocks of rows,), the tiles of a block side by side. From logits fp32 [H, V]: out_max, out_sum and
    out_dot fp32 [n_tiles, H], group_max and group_sum fp32 [H, n_groups]."""
    n_tiles = tl.cdiv(V, BLOCK_V)
    tile = tl.program_id(0) % n_tiles
    rows = (tl.program_id(0) // n_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)
    live = rows < H
    inv_t, _, _, _, _ = on_tile.row_controls(rows, live, temperature, temperature_value, None, 0, None, 0)
    first_id = tile * BLOCK_V
    x = _load_ids(logits, rows, live, first_id + tl.arange(0, BLOCK_V), V)
    _, g = _load_groups(logits, rows, live, first_id, V, BLOCK_V)
    _, g_max, g_sum = on_tile.summarise_groups(g, inv_t)
    m, total = on_tile.summarise_tile(g_max, g_sum, inv_t)
    on_tile.store_statistics(m, total, tile, rows, live, H, out_max, out_sum)
    on_tile.store_dot(x, m, inv_t, tile, rows, live, H, out_dot)
    on_tile.store_groups(g_max, g_sum, first_id, rows, live, n_groups, group_max, group_sum)


@triton.jit(do_not_specialize=["H", "S", "noise_width", "seed_value", "position_value", "first_sample", "n_groups"])
def draw(
    logits, group_max, threshold, last_tie, temperature, seeds, positions, gumbels, uniforms,
    out_max, out_sum, out_key, out_id, out_logit,
    H, V, S, n_groups, noise_width, temperature_value, seed_value: tl.int64, position_value: tl.int64, first_sample,
    BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles * blocks of rows,). Draws from logits fp32 [H, V], of which, unless threshold is None, only those
    above threshold fp32 [H] are left, and those equal to it up to the id last_tie int32 [H]; group_max fp32
    [H, n_groups] are the maxima of the groups before. Written as by `stage1.fused_head`, of what is left."""
    n_tiles = tl.cdiv(V, BLOCK_V)
    tile = tl.program_id(0) % n_tiles
    rows = (tl.program_id(0) // n_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)
    live = rows < H
    first_id = tile * BLOCK_V
    least = tl.full(rows.shape, float("-inf"), tl.float32)
    last = tl.full(rows.shape, 0x7FFFFFFF, tl.int32)
    left = live
    if threshold is not None:
        least = tl.load(threshold + rows, mask=live, other=0.0)
        last = tl.load(last_tie + rows, mask=live, other=0)
        unit = first_id // 32 + tl.arange(0, BLOCK_V // 32)
        where = group_max + rows.to(tl.int64)[:, None] * n_groups + unit[None, :]
        largest = tl.load(where, mask=live[:, None] & (unit < n_groups)[None, :], other=float("-inf"))
        left = live & (tl.max(largest, 1) >= least)
    if tl.max(left.to(tl.int32), 0) > 0:
        _draw_tile(
            logits, least, last, temperature, seeds, positions, gumbels, uniforms, out_max, out_sum, out_key, out_id,
            out_logit, tile, first_id, rows, live, H, V, S, noise_width, temperature_value, seed_value, position_value,
            first_sample, BLOCK_V, GROUPED,
        )  # fmt: skip
    else:
        # most tiles have nothing left after truncation: nothing to load and no noise to compute
        nothing = tl.full(rows.shape, float("-inf"), tl.float32)
        on_tile.store_statistics(nothing, tl.zeros_like(nothing), tile, rows, live, H, out_max, out_sum)
        for s in range(S):
            at = ((tl.zeros_like(rows).to(tl.int64) + tile) * S + s) * H + rows
            tl.store(out_key + at, nothing.to(tl.float64), mask=live)
            tl.store(out_id + at, tl.full(rows.shape, ep.NO_TOKEN, tl.int32), mask=live)
            tl.store(out_logit + at, tl.zeros_like(nothing), mask=live)


@triton.jit
def _draw_tile(
    logits, least, last, temperature, seeds, positions, gumbels, uniforms, out_max, out_sum, out_key, out_id, out_logit,
    tile, first_id, rows, live, H, V, S, noise_width, temperature_value, seed_value, position_value, first_sample,
    BLOCK_V: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    inv_t, greedy, drawn, seed, position = on_tile.row_controls(
        rows, live, temperature, temperature_value, seeds, seed_value, positions, position_value
    )
    tokens = first_id + tl.arange(0, BLOCK_V)
    x = _load_ids(logits, rows, live, tokens, V)
    x = _keep(x, tokens[None, :], least[:, None], last[:, None])
    p, g_max, g_sum = x, x, x
    if GROUPED:
        ids, g = _load_groups(logits, rows, live, first_id, V, BLOCK_V)
        g = _keep(g, ids, least[:, None, None], last[:, None, None])
        p, g_max, g_sum = on_tile.summarise_groups(g, inv_t)
        m, total = on_tile.summarise_tile(g_max, g_sum, inv_t)
    else:
        m = tl.max(x, 1)
        total = tl.sum(ep.exp_weights(x, m[:, None], inv_t[:, None]), 1)
    on_tile.store_statistics(m, total, tile, rows, live, H, out_max, out_sum)
    any_greedy = tl.max(greedy.to(tl.int32), 0) > 0
    any_drawn = tl.max(drawn.to(tl.int32), 0) > 0
    on_tile.store_draws(
        x, p, g_max, g_sum, m, tile, first_id, tokens, rows, live, inv_t, greedy, any_greedy, any_drawn, seed, position,
        first_sample, gumbels, uniforms, noise_width, 0, x, out_key, out_id, out_logit, None, H, V, S, GROUPED, False,
    )  # fmt: skip
