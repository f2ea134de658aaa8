"""Stage 1 of the portable kernel: LM-head matmul over vocabulary tiles, the draw inside each tile, tile results out.

Each program walks over tiles of `BLOCK_V` token ids for one tile of `BLOCK_H` hidden rows. A tile's logits live in
registers only; what leaves the chip per tile and row is the best key with its id and logit, and the tile's maximum
and sum of exponentials (24 bytes). Stage 2 (`fmms/kernels/stage2.py`) reduces those. The arithmetic of the draw is in
`fmms/kernels/epilogue.py`, the launch in `fmms/kernels/launch.py`.
"""

import triton
import triton.language as tl

from fmms.kernels import epilogue as ep


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
def tile_logits(
    hidden, weight, bias, first_row, rows, first_id, tokens, H, V, D, stride_h, stride_w, logit_scale, softcap,
    BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr, TMA: tl.constexpr, VOCAB_ON_M: tl.constexpr, UPCAST: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Logits `[rows, tokens]` in fp32: scale, softcap, bias, and -inf for tokens past the vocabulary."""
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
    if bias is not None:
        x += tl.load(bias + tokens, mask=tokens < V, other=0.0).to(tl.float32)[None, :]
    return mask_tail(x, tokens, V)


@triton.jit
def mask_tail(x, tokens, V):
    """-inf for the ids of the last tile that are no tokens."""
    return tl.where((tokens < V)[None, :], x, float("-inf"))


@triton.jit
def summarise_groups(x, inv_t):
    """Weights `[rows, groups, 32]` of the members relative to the group's maximum; maxima and sums `[rows, groups]`."""
    g = ep.to_groups(x)
    m = tl.max(g, 2)
    p = ep.exp_weights(g, tl.expand_dims(m, 2), tl.expand_dims(tl.expand_dims(inv_t, 1), 2))
    return p, m, ep.group_total(p)


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


# arguments that change from call to call must not select another compilation by being 1 or a multiple of 16
@triton.jit(do_not_specialize=["H", "n_tiles", "noise_width", "seed_value", "position_value", "first_sample"])
def fused_head(
    hidden, weight, bias, temperature, seeds, positions, gumbels, uniforms,
    logits, out_key, out_id, out_logit, out_max, out_sum,
    H, V, D, S, stride_h, stride_w, noise_width, n_tiles,
    temperature_value, seed_value: tl.int64, position_value: tl.int64, first_sample, logit_scale, softcap,
    BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr,
    TMA: tl.constexpr, VOCAB_ON_M: tl.constexpr, GROUPED: tl.constexpr, UPCAST: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Grid: (programs * hidden tiles,), the hidden tiles of a program side by side so that they share weight tiles in
    the cache. A pointer that is None is a control that was not asked for.

    hidden [H, D], weight [V, D] (pointers, or tensor descriptors if TMA), bias [V]; temperature fp32 [H], seeds and
    positions int64 [H], or None: then the scalar holds for all rows (a seed through SplitMix64). gumbels, uniforms:
    injected noise [H, S, noise_width]. Written: logits fp32 [H, V]; out_key fp64 (relative to out_max), out_id int32,
    out_logit fp32 [n_tiles, S, H]; out_max, out_sum fp32 [n_tiles, H].
    """
    hidden_tiles = tl.cdiv(H, BLOCK_H)
    first_row = (tl.program_id(0) % hidden_tiles) * BLOCK_H
    rows = first_row + tl.arange(0, BLOCK_H)
    live = rows < H
    if temperature is None:
        t = tl.full((BLOCK_H,), temperature_value, tl.float32)
    else:
        t = tl.load(temperature + rows, mask=live, other=1.0)
    if seeds is None:
        seed = ep.row_seed(tl.full((BLOCK_H,), seed_value, tl.int64), rows)
    else:
        seed = tl.load(seeds + rows, mask=live, other=0).to(tl.uint64)
    if positions is None:
        position = tl.full((BLOCK_H,), position_value, tl.int64)
    else:
        position = tl.load(positions + rows, mask=live, other=0)
    inv_t = ep.inverse_temperature(t)
    greedy = (t == 0.0) & live
    any_greedy = tl.max(greedy.to(tl.int32), 0) > 0
    any_drawn = tl.max(((t > 0.0) & live).to(tl.int32), 0) > 0

    for tile in range(tl.program_id(0) // hidden_tiles, n_tiles, tl.num_programs(0) // hidden_tiles):
        first_id = tile * BLOCK_V
        tokens = first_id + tl.arange(0, BLOCK_V)
        x = tile_logits(
            hidden, weight, bias, first_row, rows, first_id, tokens, H, V, D, stride_h, stride_w, logit_scale, softcap,
            BLOCK_D, EVEN_D, TMA, VOCAB_ON_M, UPCAST, SOFTCAP,
        )  # fmt: skip
        if logits is not None:
            where = logits + rows.to(tl.int64)[:, None] * V + tokens[None, :]
            tl.store(where, x, mask=live[:, None] & (tokens < V)[None, :])
        if GROUPED:
            p, group_max, group_sum = summarise_groups(x, inv_t)
            m = tl.max(group_max, 1)
            total = tl.sum(group_sum * ep.exp_weights(group_max, m[:, None], inv_t[:, None]), 1)
        else:
            m = tl.max(x, 1)
            total = tl.sum(ep.exp_weights(x, m[:, None], inv_t[:, None]), 1)
        # int64 from here on: tiles * samples * rows can pass 2**31
        tile64 = tl.zeros_like(rows).to(tl.int64) + tile
        tl.store(out_max + tile64 * H + rows, m, mask=live)
        tl.store(out_sum + tile64 * H + rows, total, mask=live)
        for s in range(S):
            key = tl.full((BLOCK_H,), float("-inf"), tl.float64)
            best_id = tl.full((BLOCK_H,), ep.NO_TOKEN, tl.int32)
            if any_drawn:
                noise_row = (rows.to(tl.int64) * S + s) * noise_width
                if GROUPED:
                    key, best_id = draw_groups(
                        p, group_max, group_sum, m, first_id, inv_t, seed, position, first_sample + s, gumbels,
                        uniforms, noise_row, live, noise_width,
                    )  # fmt: skip
                else:
                    key, best_id = draw_tokens(
                        x, m, first_id, inv_t, seed, position, first_sample + s, gumbels, noise_row, live, V
                    )
            if any_greedy:
                first_max = tl.min(tl.where(x == m[:, None], tokens[None, :], ep.NO_TOKEN), 1)
                key = tl.where(greedy, 0.0, key)
                best_id = tl.where(greedy, first_max, best_id)
            out = (tile64 * S + s) * H + rows
            tl.store(out_key + out, key, mask=live)
            tl.store(out_id + out, best_id, mask=live)
            tl.store(out_logit + out, ep.value_at(x, first_id, best_id), mask=live)
