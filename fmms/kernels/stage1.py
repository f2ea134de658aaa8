"""Stage 1 of the portable kernel: LM-head matmul over vocabulary tiles, the draw inside each tile, tile results out.

Each program walks over tiles of `BLOCK_V` token ids for one tile of `BLOCK_H` hidden rows. Without truncation and
sparse edits a tile's logits live in registers only; what leaves the chip per tile and row is the best key with its id
and logit, and the tile's maximum and sum of exponentials (24 bytes). With them (`DRAW` off) the processed logits and a
summary of each group leave instead, for `select.py` and `stored.py`. What is done with a tile is in `tile.py`, the
reduction of the tile results in `stage2.py`, the launch in `launch.py`.
"""

import triton
import triton.language as tl

from fmms.kernels import epilogue as ep
from fmms.kernels import tile as on_tile


@triton.jit
def _load_operand(
    operand, first, rows, n_rows, stride, start, D,
    BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A `[rows, BLOCK_D]` operand tile; rows past the end and columns past D read as 0."""
    if TMA:
        tile = operand.load([first, start])
    else:
        k = start + tl.arange(0, BLOCK_D)
        mask = (rows < n_rows)[:, None]
        if not EVEN_D:
            mask = mask & (k < D)[None, :]
        tile = tl.load(operand + rows.to(tl.int64)[:, None] * stride + k[None, :], mask=mask, other=0.0)
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def raw_logits(
    hidden, weight, first_row, rows, first_id, tokens, H, V, D, stride_h, stride_w, logit_scale, softcap,
    BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr, TMA: tl.constexpr, VOCAB_ON_M: tl.constexpr, UPCAST: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Logits `[rows, tokens]` in fp32 after scale and softcap; ids that are no tokens hold anything."""
    if VOCAB_ON_M:
        acc = tl.zeros((tokens.shape[0], rows.shape[0]), tl.float32)
    else:
        acc = tl.zeros((rows.shape[0], tokens.shape[0]), tl.float32)
    for start in range(0, D, BLOCK_D):
        w = _load_operand(weight, first_id, tokens, V, stride_w, start, D, BLOCK_D, EVEN_D, TMA, UPCAST)
        h = _load_operand(hidden, first_row, rows, H, stride_h, start, D, BLOCK_D, EVEN_D, TMA, UPCAST)
        if VOCAB_ON_M:
            acc = tl.dot(w, tl.trans(h), acc, input_precision="ieee")
        else:
            acc = tl.dot(h, tl.trans(w), acc, input_precision="ieee")
    x = tl.trans(acc) if VOCAB_ON_M else acc
    x *= logit_scale
    if SOFTCAP:
        x = softcap * ep.tanh(x / softcap)
    return x


# arguments that change from call to call must not select another compilation by being 1 or a multiple of 16
@triton.jit(
    do_not_specialize=[
        "H", "n_tiles", "noise_width", "seed_value", "position_value", "first_sample", "n_groups", "features",
        "stride_allowed",
    ]
)  # fmt: skip
def fused_head(
    hidden, weight, features, bias, allowed, banned, temperature, seeds, positions, gumbels, uniforms,
    logits, raw, group_max, group_sum, out_max, out_sum, out_dot, raw_max, raw_sum,
    out_key, out_id, out_logit, out_raw,
    H, V, D, S, stride_h, stride_w, stride_allowed, noise_width, n_groups, n_tiles,
    temperature_value, seed_value: tl.int64, position_value: tl.int64, first_sample, logit_scale, softcap,
    BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr,
    TMA: tl.constexpr, VOCAB_ON_M: tl.constexpr, GROUPED: tl.constexpr, UPCAST: tl.constexpr, SOFTCAP: tl.constexpr,
    DRAW: tl.constexpr, GENERAL: tl.constexpr,
):  # fmt: skip
    """Grid: (programs * hidden tiles,), the hidden tiles of a program side by side so that they share weight tiles in
    the cache.

    hidden [H, D], weight [V, D] (pointers, or tensor descriptors if TMA); temperature fp32 [H], seeds and positions
    int64 [H], or None: then the scalar holds for all rows (a seed through SplitMix64); gumbels, uniforms: None or
    injected noise [H, S, noise_width]. Written: out_max, out_sum fp32 [n_tiles, H]; if DRAW out_key fp64 (relative to
    out_max), out_id int32 and out_logit fp32 [n_tiles, S, H]; if not DRAW logits (processed) fp32 [H, V], group_max and
    group_sum fp32 [H, n_groups].

    If GENERAL, as far as the bits of features (`tile.py`) ask for it: bias fp32 [V], allowed int32 [H, words], banned
    int64 [H]; written: out_dot, raw_max and raw_sum fp32 [n_tiles, H]; if DRAW out_raw fp32 [n_tiles, S, H] and logits,
    if not DRAW raw (before bias and masks) fp32 [H, V].
    """
    hidden_tiles = tl.cdiv(H, BLOCK_H)
    first_row = (tl.program_id(0) % hidden_tiles) * BLOCK_H
    rows = first_row + tl.arange(0, BLOCK_H)
    live = rows < H
    inv_t, greedy, drawn, seed, position = on_tile.row_controls(
        rows, live, temperature, temperature_value, seeds, seed_value, positions, position_value
    )
    any_greedy = tl.max(greedy.to(tl.int32), 0) > 0
    any_drawn = tl.max(drawn.to(tl.int32), 0) > 0

    for tile in range(tl.program_id(0) // hidden_tiles, n_tiles, tl.num_programs(0) // hidden_tiles):
        first_id = tile * BLOCK_V
        tokens = first_id + tl.arange(0, BLOCK_V)
        r = raw_logits(
            hidden, weight, first_row, rows, first_id, tokens, H, V, D, stride_h, stride_w, logit_scale, softcap,
            BLOCK_D, EVEN_D, TMA, VOCAB_ON_M, UPCAST, SOFTCAP,
        )  # fmt: skip
        x = r
        if GENERAL:
            if (features & on_tile.BIAS) != 0:
                x += tl.load(bias + tokens, mask=tokens < V, other=0.0)[None, :]
        x = on_tile.mask_logits(x, rows, live, tokens, V, features, allowed, stride_allowed, banned, GENERAL)
        where = rows.to(tl.int64)[:, None] * V + tokens[None, :]
        inside = live[:, None] & (tokens < V)[None, :]
        if not DRAW:
            tl.store(logits + where, x, mask=inside)
        if GENERAL:
            if DRAW:
                if (features & on_tile.LOGITS) != 0:
                    tl.store(logits + where, x, mask=inside)
            if (features & on_tile.RAW) != 0:
                if not DRAW:
                    tl.store(raw + where, r, mask=inside)
                own = tl.where((tokens < V)[None, :], r, float("-inf"))
                one = tl.full(rows.shape, 1.0, tl.float64)
                own_max = tl.max(own, 1)
                own_sum = tl.sum(ep.exp_weights(own, own_max[:, None], one[:, None]), 1)
                on_tile.store_statistics(own_max, own_sum, tile, rows, live, H, raw_max, raw_sum)
        p, g_max, g_sum = x, x, x
        if GROUPED:
            p, g_max, g_sum = on_tile.summarise_groups(ep.to_groups(x), inv_t, SCATTERED=GENERAL)
            m, total = on_tile.summarise_tile(g_max, g_sum, inv_t)
        else:
            m = tl.max(x, 1)
            total = tl.sum(ep.exp_weights(x, m[:, None], inv_t[:, None]), 1)
        on_tile.store_statistics(m, total, tile, rows, live, H, out_max, out_sum)
        if GENERAL:
            if (features & on_tile.ENTROPY) != 0:
                on_tile.store_dot(x, m, inv_t, tile, rows, live, H, out_dot)
        if DRAW:
            on_tile.store_draws(
                x, p, g_max, g_sum, m, tile, first_id, tokens, rows, live, inv_t, greedy, any_greedy, any_drawn, seed,
                position, first_sample, gumbels, uniforms, noise_width, features, r, out_key, out_id, out_logit,
                out_raw, H, V, S, GROUPED, GENERAL,
            )  # fmt: skip
        else:
            on_tile.store_groups(g_max, g_sum, first_id, rows, live, n_groups, group_max, group_sum)
