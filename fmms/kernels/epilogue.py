"""What is done to a tile of logits while it is still in registers: noise, the draw inside groups, tile maxima.

Device functions shared by every portable kernel. They repeat, in fp32 with fp64 only for the few numbers per group
that decide, what `fmms/noise.py` and `fmms/reference.py` define; the tests hold the two together. Nothing here knows
about tiles of the matmul: ids and units are global.
"""

import triton
import triton.language as tl

from fmms import noise, reference

_PURPOSE_TOKEN = tl.constexpr(noise.PURPOSE_TOKEN << 24)
_PURPOSE_GROUP = tl.constexpr(noise.PURPOSE_GROUP << 24)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_A = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_B = tl.constexpr(0x94D049BB133111EB)
_SIDE_RATIO = tl.constexpr(reference.SIDE_RATIO)
_MIN_SCALE = tl.constexpr(reference.MIN_SCALE)
_MAX_SCALE = tl.constexpr(reference.MAX_SCALE)
_LOG2E = tl.constexpr(1.4426950408889634)
NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def row_seed(seed, row):
    """Seed of a row from one integer: output `row` of SplitMix64 (`fmms.noise.row_seeds`)."""
    z = seed.to(tl.uint64) + (row + 1).to(tl.uint64) * _GOLDEN
    z = (z ^ (z >> 30)) * _MIX_A
    z = (z ^ (z >> 27)) * _MIX_B
    return z ^ (z >> 31)


@triton.jit
def noise_words(seed, position, unit, sample, PURPOSE: tl.constexpr):
    """Philox words `[rows, units]` of each (row, unit); seed and position: 64-bit `[rows, 1]`, unit: `[1, units]`."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    unit, low = tl.broadcast(unit.to(tl.uint32), low)
    _, high = tl.broadcast(unit, high)
    which = (tl.zeros_like(unit) + sample) | PURPOSE
    return tl.philox(seed, unit, which, low, high)


@triton.jit
def uniform_parts(low, high):
    """The uniform (x + 0.5) * 2**-64 as fp64 coarse + fine, nothing rounded: the 26 leading bits of x, and the rest."""
    coarse = (high >> 6).to(tl.float64) * 1.4901161193847656e-08
    fine = ((high & 63).to(tl.float64) * 4294967296.0 + low.to(tl.float64) + 0.5) * 5.421010862427522e-20
    return coarse, fine


@triton.jit
def split_uniform(u):
    """The same parts of an injected uniform: a float, or an int64 that holds x."""
    if u.dtype == tl.int64:
        coarse, fine = uniform_parts((u & 0xFFFFFFFF).to(tl.uint32), ((u >> 32) & 0xFFFFFFFF).to(tl.uint32))
    else:
        coarse = tl.floor(u.to(tl.float64) * 67108864.0) * 1.4901161193847656e-08
        fine = u.to(tl.float64) - coarse
    return coarse, fine


@triton.jit
def gumbel(low, high):
    """fp32 standard Gumbel of a 64-bit word, within 2**-21 * (1 + |g|) of the exact value.

    Both tails are resolved: below one half u itself is small and exact, above it 1 - u comes from the complement.
    """
    upper = (high >> 31) != 0
    high = tl.where(upper, high ^ 0xFFFFFFFF, high)
    low = tl.where(upper, low ^ 0xFFFFFFFF, low)
    v = high.to(tl.float32) * 2.3283064365386963e-10 + (low.to(tl.float32) + 0.5) * 5.421010862427522e-20
    rest = 1.0 - v
    logarithm = tl.log(tl.where(upper, v, rest))
    # log1p(-v) = log(1 - v) * v / (1 - (1 - v)) with the rounded 1 - v (Kahan); there is no portable log1p
    ratio = v / tl.where(rest == 1.0, 1.0, 1.0 - rest)
    exponential = tl.where(upper, -logarithm, tl.where(rest == 1.0, v, -logarithm * ratio))
    return -tl.log(exponential)


@triton.jit
def inverse_temperature(temperature):
    """fp64 1 / T per row, at 1 for greedy and invalid rows; T is held where T and 1 / T are normal fp32 numbers."""
    t = tl.where(temperature > 0.0, temperature, 1.0)
    return 1.0 / tl.minimum(tl.maximum(t, _MIN_SCALE), _MAX_SCALE).to(tl.float64)


@triton.jit
def tanh(y):
    """tanh in fp32, within a few ulp; there is no portable one. Small arguments by the Taylor series, since
    1 - 2 / (exp(2 |y|) + 1) would cancel there."""
    size = tl.abs(y)
    square = y * y
    series = size * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    large = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    value = tl.where(size < 0.25, series, large)
    return tl.where(y < 0.0, -value, value)


@triton.jit
def finite_or_zero(m):
    """A maximum made safe to subtract: -inf (everything masked) would turn -inf - -inf into NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def exp_weights(x, m, inv_t):
    """exp((x - m) / T) in fp32: the difference is taken first, so large common offsets cost no precision."""
    return tl.exp2((x - finite_or_zero(m)) * (inv_t.to(tl.float32) * _LOG2E))


@triton.jit
def to_groups(x):
    """`[rows, ids]` -> `[rows, groups, 32]`, members in ascending id; the number of ids is a multiple of 128."""
    ROWS: tl.constexpr = x.shape[0]
    BLOCKS: tl.constexpr = x.shape[1] // 128
    x = tl.reshape(x, (ROWS, BLOCKS, 16, 4, 2))
    return tl.reshape(tl.permute(x, (0, 1, 3, 2, 4)), (ROWS, BLOCKS * 4, 32))


@triton.jit
def member_id(unit, member):
    """Token id of a member of a group: the inverse of `to_groups`."""
    return (unit >> 2) * 128 + (member >> 1) * 8 + (unit & 3) * 2 + (member & 1)


@triton.jit
def _pairs(x):
    """Splits the last axis into its even and odd elements."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // 2, 2)))


@triton.jit
def _halves(x):
    """Splits the last axis into its first and second half."""
    x = tl.reshape(x, (x.shape[0], x.shape[1], 2, x.shape[2] // 2))
    return tl.split(tl.permute(x, (0, 1, 3, 2)))


@triton.jit
def _only(x):
    """Drops a last axis of length 1."""
    return tl.reshape(x, (x.shape[0], x.shape[1]))


@triton.jit
def _keep_half(x, right):
    """The half of the last axis on the chosen side."""
    first, second = _halves(x)
    return tl.where(tl.expand_dims(right, 2), second, first)


@triton.jit
def _step(left, right, high, low, index):
    """One step of the descent: `fmms.reference.descend` has the reasoning. high + low is what is left of the uniform,
    fp64; the sums are fp32."""
    right_first = right < left * _SIDE_RATIO
    first = tl.where(right_first, right, left).to(tl.float64)
    rest = high - first
    rest_low = low + ((high - rest) - first)
    in_first = rest + rest_low < 0.0
    went_right = in_first == right_first
    high, low = tl.where(in_first, high, rest), tl.where(in_first, low, rest_low)
    return high, low, index * 2 + went_right.to(tl.int32), went_right


@triton.jit
def _tree(p):
    """Left and right sums of every node of the tree over the members, the root first, and the group's total.

    The order of the additions is written out: a reduction's order may follow the tile, and the ids must not."""
    l4, r4 = _pairs(p)
    s4 = l4 + r4
    l3, r3 = _pairs(s4)
    s3 = l3 + r3
    l2, r2 = _pairs(s3)
    s2 = l2 + r2
    l1, r1 = _pairs(s2)
    s1 = l1 + r1
    l0, r0 = _pairs(s1)
    l0, r0 = _only(l0), _only(r0)
    return l0, r0, l1, r1, l2, r2, l3, r3, l4, r4, l0 + r0


@triton.jit
def scattered_max(g):
    """Largest logit `[rows, groups]` of each group `[rows, groups, 32]` made by `to_groups`, whichever lanes it is in.

    Where a tile is stored as well, Triton may hold a group in lanes that are not consecutive, and before 3.8 reduces
    over wrong ones then (docs/decisions.md). Neither way below needs such a reduction. In tiles of more than 16 rows
    the first takes fewer instructions and spills less, in the others the second.
    """
    if g.shape[0] > 16:
        for _ in tl.static_range(5):
            left, right = _pairs(g)
            g = tl.maximum(left, right)
        return _only(g)
    else:
        # bit 0 of an id and its bits 3 to 6 say which member of its group it is: consecutive lanes, each by itself
        return tl.max(tl.max(tl.reshape(g, (g.shape[0], g.shape[1], 16, 2)), 3), 2)


@triton.jit
def group_total(p):
    """Sum of the weights `[rows, groups, 32]` of each group."""
    return _tree(p)[10]


@triton.jit
def choose_member(p, coarse, fine):
    """Index of the member that a uniform (its fp64 parts) picks in each group of weights p `[rows, groups, 32]`."""
    l0, r0, l1, r1, l2, r2, l3, r3, l4, r4, total = _tree(p)
    # coarse * total is exact: 26 + 24 bits
    total = total.to(tl.float64)
    high, low, index, right = _step(l0, r0, coarse * total, fine * total, tl.zeros_like(l0).to(tl.int32))
    l1, r1 = _keep_half(l1, right), _keep_half(r1, right)
    l2, r2 = _keep_half(l2, right), _keep_half(r2, right)
    l3, r3 = _keep_half(l3, right), _keep_half(r3, right)
    l4, r4 = _keep_half(l4, right), _keep_half(r4, right)
    high, low, index, right = _step(_only(l1), _only(r1), high, low, index)
    l2, r2 = _keep_half(l2, right), _keep_half(r2, right)
    l3, r3 = _keep_half(l3, right), _keep_half(r3, right)
    l4, r4 = _keep_half(l4, right), _keep_half(r4, right)
    high, low, index, right = _step(_only(l2), _only(r2), high, low, index)
    l3, r3 = _keep_half(l3, right), _keep_half(r3, right)
    l4, r4 = _keep_half(l4, right), _keep_half(r4, right)
    high, low, index, right = _step(_only(l3), _only(r3), high, low, index)
    l4, r4 = _keep_half(l4, right), _keep_half(r4, right)
    high, low, index, right = _step(_only(l4), _only(r4), high, low, index)
    return index


@triton.jit
def best_of(key, ids):
    """Largest key of each row and its id; the lowest id wins a tie, so the order of groups and tiles cannot matter."""
    best = tl.max(key, 1)
    return best, tl.min(tl.where(key == best[:, None], ids, NO_TOKEN), 1)


@triton.jit
def value_at(x, first_id, ids):
    """x at the given id of each row (0 where the id lies outside the tile)."""
    columns = first_id + tl.arange(0, x.shape[1])
    return tl.sum(tl.where(columns[None, :] == ids[:, None], x, 0.0), 1)
