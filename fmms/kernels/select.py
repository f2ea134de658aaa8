"""Truncation: where each row's sorted order is cut by top-k, top-p and min-p, exactly, without sorting.

Every filter keeps a prefix of the order (logit descending, id ascending), so what is left of a row is told by the
least logit kept and the last id kept among those equal to it. Cuts are found by bisection over the bits of the logit,
counting tokens or summing weights. The maxima of the groups bound the cuts from below (k groups with a maximum of at
least c hold k tokens of at least c), so only groups that can matter are read: some dozens for a language model's
distribution, all of them for a flat one. There is no limit on candidates. `fmms.controls.allowed_set` is the
definition.
"""

import triton
import triton.language as tl

from fmms.kernels import epilogue as ep


@triton.jit
def order_key(x):
    """int32 that orders as the fp32 number does; -0.0 and 0.0 are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def from_order_key(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _candidates(row_logits, units, n_units, start, V, BLOCK_U: tl.constexpr):
    """Order keys, ids and logits `[BLOCK_U, 32]` of the members of the listed groups from the start-th on; -inf past
    their end."""
    at = start + tl.arange(0, BLOCK_U)
    here = at < n_units
    unit = tl.load(units + at, mask=here, other=0)
    ids = ep.member_id(unit[:, None], tl.arange(0, 32)[None, :])
    x = tl.load(row_logits + ids, mask=here[:, None] & (ids < V), other=float("-inf"))
    return order_key(x), ids, x


@triton.jit
def _sum(x):
    """Sum of a vector or a matrix."""
    return tl.sum(tl.sum(x, 1), 0) if len(x.shape) == 2 else tl.sum(x, 0)


@triton.jit
def _measure(key, weight, least, COUNT: tl.constexpr):
    """Number or weight (fp64 both) of the tokens whose key is at least `least`."""
    least = least.to(tl.int32)
    if COUNT:
        found = _sum((key >= least).to(tl.int32)).to(tl.float64)
    else:
        found = _sum(tl.where(key >= least, weight, 0.0).to(tl.float64))
    return found


@triton.jit
def _bisect(
    row_logits, units, n_units, V, largest, inv_t, key, weight, low, high, target,
    COUNT: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    """Largest key in [low, high) of which at least `target` (a number or weight) lies at or above; `low` if none is.
    The first BLOCK_U groups are in registers, later ones are read again at each step."""
    while high - low > 1:
        middle = (low + high) >> 1
        found = _measure(key, weight, middle, COUNT)
        for start in range(BLOCK_U, n_units, BLOCK_U):
            k, _, x = _candidates(row_logits, units, n_units, start, V, BLOCK_U)
            found += _measure(k, ep.exp_weights(x, largest, inv_t), middle, COUNT)
        enough = found >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _at(row_logits, units, n_units, V, largest, inv_t, key, weight, cut, BLOCK_U: tl.constexpr):
    """Of the tokens above the key `cut` the number and weight, and the number of those equal to it (fp64)."""
    above = _measure(key, weight, cut + 1, True)
    equal = _measure(key, weight, cut, True)
    mass = _measure(key, weight, cut + 1, False)
    for start in range(BLOCK_U, n_units, BLOCK_U):
        k, _, x = _candidates(row_logits, units, n_units, start, V, BLOCK_U)
        w = ep.exp_weights(x, largest, inv_t)
        above += _measure(k, w, cut + 1, True)
        equal += _measure(k, w, cut, True)
        mass += _measure(k, w, cut + 1, False)
    return above, mass, equal - above


@triton.jit
def _last_tie(row_logits, units, n_units, V, key, ids, cut, wanted, equal, BLOCK_U: tl.constexpr):
    """Id of the `wanted`-th token of those equal to `cut`, in ascending id; the last of all where none is left out."""
    low = tl.zeros_like(cut) - 1
    high = low + V
    if wanted < equal:
        while high - low > 1:
            middle = (low + high) >> 1
            found = _sum(((key == cut) & (ids <= middle)).to(tl.int32))
            for start in range(BLOCK_U, n_units, BLOCK_U):
                k, i, _ = _candidates(row_logits, units, n_units, start, V, BLOCK_U)
                found += _sum(((k == cut) & (i <= middle)).to(tl.int32))
            enough = found.to(tl.float64) >= wanted
            high = tl.where(enough, middle, high)
            low = tl.where(enough, low, middle)
    return high


TOP_K, TOP_P, MIN_P = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
"""Bits of `given`: which controls come per row."""


@triton.jit(do_not_specialize=["top_k_value", "n_groups", "given"])
def cut_rows(
    logits, group_max, group_sum, temperature, given, top_k, top_p, min_p, units, threshold, last_tie,
    V, n_groups, temperature_value, top_k_value, top_p_value, min_p_value,
    MIN_P_FIRST: tl.constexpr, JOINT: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    """Grid: (rows,). From logits fp32 [H, V] and the summaries fp32 [H, n_groups] of their groups, with controls per
    row (temperature unless it is None, top_k int32 [H], top_p and min_p fp32 [H] as the bits of given say) or as
    scalars: threshold fp32 [H], the least logit kept (NaN if a control is invalid), and last_tie int32 [H], the last id
    kept among logits equal to it. units int32 [H, n_groups] is scratch."""
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * V
    units += row * n_groups
    t = (row * 0 + temperature_value).to(tl.float32)  # tensors, whatever the caller's numbers are
    k = (row * 0 + top_k_value).to(tl.int32)
    p = (row * 0 + top_p_value).to(tl.float32)
    least_p = (row * 0 + min_p_value).to(tl.float32)
    if temperature is not None:
        t = tl.load(temperature + row)
    if (given & TOP_K) != 0:
        k = tl.load(top_k + row)
    if (given & TOP_P) != 0:
        p = tl.load(top_p + row)
    if (given & MIN_P) != 0:
        least_p = tl.load(min_p + row)
    inv_t = ep.inverse_temperature(t)
    bad = (k < -1) | ~((p >= 0.0) & (p <= 1.0)) | ~((least_p >= 0.0) & (least_p <= 1.0))
    by_count, by_mass, by_weight = (k > 0) & (k < V), p < 1.0, least_p > 0.0

    group = tl.arange(0, BLOCK_G)
    in_row = group < n_groups
    g_max = tl.load(group_max + row * n_groups + group, mask=in_row, other=float("-inf"))
    g_key = order_key(g_max)
    largest = ep.finite_or_zero(tl.max(g_max, 0))
    top = order_key(largest).to(tl.int64)
    bottom = tl.zeros_like(top) - 2139095041  # the key of -inf

    # the key from which min-p keeps: that of the smallest fp32 number at or above max + T * log(min_p)
    wanted = largest.to(tl.float64) + tl.log(tl.where(by_weight, least_p, 1.0).to(tl.float64)) / inv_t
    rounded = wanted.to(tl.float32)
    weight_cut = order_key(rounded).to(tl.int64) + (rounded.to(tl.float64) < wanted).to(tl.int64)
    weight_cut = tl.where(by_weight, tl.minimum(tl.maximum(weight_cut, bottom), top), bottom)

    cut, tie = weight_cut, tl.zeros_like(top) + V - 1
    if (by_count | by_mass) & ~bad:
        # a lower bound of the cut from the groups' maxima alone
        low = bottom
        g_weight = ep.exp_weights(g_max, largest, inv_t)
        mass = tl.sum(
            (tl.load(group_sum + row * n_groups + group, mask=in_row, other=0.0) * g_weight).to(tl.float64), 0
        )
        if by_count:
            low = _bisect(
                row_logits,
                units,
                0,
                V,
                largest,
                inv_t,
                g_key,
                g_weight,
                bottom,
                top + 1,
                k.to(tl.float64),
                True,
                BLOCK_U,
            )
        else:
            if MIN_P_FIRST & by_weight:
                low = weight_cut
            else:
                low = _bisect(
                    row_logits, units, 0, V, largest, inv_t, g_key, g_weight, bottom, top + 1, p * mass, False, BLOCK_U
                )
        chosen = in_row & (g_key >= low)
        n_units = tl.sum(chosen.to(tl.int32), 0)
        tl.store(units + tl.cumsum(chosen.to(tl.int32), 0) - 1, group, mask=chosen)
        tl.debug_barrier()  # the list is read by other threads than those that wrote it
        key, ids, x = _candidates(row_logits, units, n_units, 0, V, BLOCK_U)
        weight = ep.exp_weights(x, largest, inv_t)

        count_cut, count_tie = bottom, tie
        if by_count:
            count_cut = _bisect(
                row_logits,
                units,
                n_units,
                V,
                largest,
                inv_t,
                key,
                weight,
                low,
                top + 1,
                k.to(tl.float64),
                True,
                BLOCK_U,
            )
            above, _, equal = _at(row_logits, units, n_units, V, largest, inv_t, key, weight, count_cut, BLOCK_U)
            count_tie = _last_tie(row_logits, units, n_units, V, key, ids, count_cut, k - above, equal, BLOCK_U)
        # the prefix whose mass top-p divides: what top-k left, or min-p as well, or all
        base_cut, base_tie = count_cut, count_tie
        if MIN_P_FIRST:
            base_tie = tl.where(weight_cut > count_cut, V - 1, count_tie)
            base_cut = tl.maximum(weight_cut, count_cut)
        cut, tie = base_cut, base_tie
        if by_mass:
            if (not JOINT) & (base_cut > bottom):
                above, mass, equal = _at(row_logits, units, n_units, V, largest, inv_t, key, weight, base_cut, BLOCK_U)
                kept = _sum(((key == base_cut) & (ids <= base_tie)).to(tl.int32)).to(tl.float64)
                for start in range(BLOCK_U, n_units, BLOCK_U):
                    more, i, _ = _candidates(row_logits, units, n_units, start, V, BLOCK_U)
                    kept += _sum(((more == base_cut) & (i <= base_tie)).to(tl.int32)).to(tl.float64)
                mass += kept * ep.exp_weights(from_order_key(base_cut.to(tl.int32)), largest, inv_t).to(tl.float64)
            target = p * mass
            mass_cut = _bisect(
                row_logits, units, n_units, V, largest, inv_t, key, weight, low, top + 1, target, False, BLOCK_U
            )
            mass_cut = tl.minimum(mass_cut, top)  # p = 0 keeps one token
            above, mass_above, equal = _at(
                row_logits, units, n_units, V, largest, inv_t, key, weight, mass_cut, BLOCK_U
            )
            each = ep.exp_weights(from_order_key(mass_cut.to(tl.int32)), largest, inv_t).to(tl.float64)
            # never fewer than one; a weight of 0 is what rounding left of the target, and then all ties stay
            need = tl.where(each > 0.0, tl.maximum(tl.ceil((target - mass_above) / each), 1.0), equal)
            mass_tie = _last_tie(row_logits, units, n_units, V, key, ids, mass_cut, need, equal, BLOCK_U)
            tie = tl.where(
                mass_cut > base_cut, mass_tie, tl.where(mass_cut == base_cut, tl.minimum(mass_tie, base_tie), base_tie)
            )
            cut = tl.maximum(mass_cut, base_cut)
        tie = tl.where(weight_cut > cut, tl.zeros_like(tie) + V - 1, tie)
        cut = tl.maximum(cut, weight_cut)
    least = from_order_key(cut.to(tl.int32))
    tl.store(threshold + row, tl.where(bad, float("nan"), least))
    tl.store(last_tie + row, tie.to(tl.int32))
