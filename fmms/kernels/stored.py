"""Work on stored logits: summaries after sparse edits, and the draw from what truncation left.

The same tile routines (`tile.py`) as in the fused kernel, on tiles that are loaded instead of multiplied, so a row
draws the same token here and there.
"""

import triton
import triton.language as tl

from fmms.kernels import tile as on_tile


@triton.jit
def _load_tile(logits, rows, live, tokens, V):
    where = logits + rows.to(tl.int64)[:, None] * V + tokens[None, :]
    return tl.load(where, mask=live[:, None] & (tokens < V)[None, :], other=float("-inf"))


@triton.jit(do_not_specialize=["H", "n_groups"])
def summarise(
    logits, temperature, temperature_value, group_max, group_sum, out_max, out_sum, out_dot, H, V, n_groups,
    BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles, blocks of rows). From logits fp32 [H, V]: out_max, out_sum and (if not None) out_dot fp32
    [n_tiles, H], and, if not None, group_max and group_sum fp32 [H, n_groups]."""
    tile = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    live = rows < H
    inv_t, _, _, _, _ = on_tile.row_controls(rows, live, temperature, temperature_value, None, 0, None, 0)
    first_id = tile * BLOCK_V
    x = _load_tile(logits, rows, live, first_id + tl.arange(0, BLOCK_V), V)
    _, g_max, g_sum = on_tile.summarise_groups(x, inv_t)
    m, total = on_tile.summarise_tile(g_max, g_sum, inv_t)
    on_tile.store_statistics(x, m, total, inv_t, tile, rows, live, H, out_max, out_sum, out_dot)
    if group_max is not None:
        on_tile.store_groups(g_max, g_sum, first_id, rows, live, n_groups, group_max, group_sum)


@triton.jit(do_not_specialize=["H", "S", "noise_width", "seed_value", "position_value", "first_sample"])
def draw(
    logits, threshold, last_tie, temperature, seeds, positions, gumbels, uniforms,
    out_max, out_sum, out_key, out_id, out_logit,
    H, V, S, noise_width, temperature_value, seed_value: tl.int64, position_value: tl.int64, first_sample,
    BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles, blocks of rows). Draws from logits fp32 [H, V], of which, unless threshold is None, only those
    above threshold fp32 [H] are left, and those equal to it up to the id last_tie int32 [H]. Written as by
    `stage1.fused_head`, of what is left."""
    tile = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    live = rows < H
    inv_t, greedy, drawn, seed, position = on_tile.row_controls(
        rows, live, temperature, temperature_value, seeds, seed_value, positions, position_value
    )
    first_id = tile * BLOCK_V
    tokens = first_id + tl.arange(0, BLOCK_V)
    x = _load_tile(logits, rows, live, tokens, V)
    if threshold is not None:
        least = tl.load(threshold + rows, mask=live, other=0.0)[:, None]
        last = tl.load(last_tie + rows, mask=live, other=0)[:, None]
        x = tl.where((x > least) | ((x == least) & (tokens[None, :] <= last)), x, float("-inf"))
    p, g_max, g_sum = on_tile.summarise_groups(x, inv_t)
    m, total = on_tile.summarise_tile(g_max, g_sum, inv_t)
    on_tile.store_statistics(x, m, total, inv_t, tile, rows, live, H, out_max, out_sum, None)
    # most tiles have nothing left after truncation, and no noise to compute (m is NaN only if something is left)
    alive = (m != float("-inf")) & live
    any_greedy = tl.max((greedy & alive).to(tl.int32), 0) > 0
    any_drawn = tl.max((drawn & alive).to(tl.int32), 0) > 0
    on_tile.store_draws(
        x, p, g_max, g_sum, m, tile, first_id, tokens, rows, live, inv_t, greedy, any_greedy, any_drawn, seed, position,
        first_sample, gumbels, uniforms, noise_width, x, out_key, out_id, out_logit, None, H, V, S, GROUPED,
    )  # fmt: skip
