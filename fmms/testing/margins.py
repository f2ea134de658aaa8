"""How finely an implementation resolves its decisions: margins of draws and truncation, interval widths in a group."""

import torch

from fmms import controls, noise, reference


def decision_margin(logits, temperature, seeds, positions, samples: int = 1, scheme: str = "group") -> torch.Tensor:
    """How far each reference draw is from going another way, in nats of error on every logit / T; fp64 [H, S].

    Two implementations that agree on the noise can draw different tokens only where their logits / T and their
    transcendental functions differ by at least this much. A decision is either between two groups (or tokens), whose
    keys move against each other by at most twice the error, or a step of the descent inside the winning group, where
    errors of relative size e move t - first and the comparison of the two sides by a few e.
    """
    x = logits.double()
    t = torch.where(temperature == 0, 1.0, temperature).double()[:, None]
    scaled = (x - x.amax(-1, keepdim=True)) / t
    gumbels, uniforms = reference.make_noise(scheme, seeds, positions, samples, x.shape[-1])
    if scheme == "token":
        top = (scaled[:, None, :] + gumbels).topk(min(2, x.shape[-1]), -1).values
        margin = top[..., 0] - top[..., -1] if x.shape[-1] > 1 else torch.full_like(top[..., 0], torch.inf)
        margin = margin / 2
    else:
        margin = _group_margin(scaled, gumbels, uniforms)
    top = x.topk(min(2, x.shape[-1]), -1).values
    gap = (top[:, 0] - top[:, -1]) / 2 if x.shape[-1] > 1 else torch.full_like(top[:, 0], torch.inf)
    gap = torch.where(gap == 0, torch.inf, gap)  # an exact tie goes to the lowest id in every implementation
    return torch.where((temperature == 0)[:, None], gap[:, None], margin)


def _group_margin(scaled, gumbels, uniforms):
    rows = torch.arange(scaled.shape[0], device=scaled.device)[:, None]
    ids = noise.group_token_ids(scaled.shape[1], scaled.device)
    padded = torch.nn.functional.pad(scaled, (0, ids.numel() - scaled.shape[1]), value=-torch.inf)[:, ids]
    keys = torch.logsumexp(padded, -1)[:, None, :] + gumbels
    top = keys.topk(2, -1)
    margin = (top.values[..., 0] - top.values[..., 1]) / 2
    group = top.indices[..., 0]
    members = padded[rows, group]
    weights = torch.exp(members - members.amax(-1, keepdim=True))
    levels, sums = [], weights
    while sums.shape[-1] > 1:
        levels.append((sums[..., 0::2], sums[..., 1::2]))
        sums = levels[-1][0] + levels[-1][1]
    t = (uniforms[0] + uniforms[1]).gather(-1, group[..., None])[..., 0] * sums[..., 0]
    spread = t.clone()
    index = torch.zeros_like(t, dtype=torch.int64)
    for left, right in reversed(levels):
        left, right = (side.gather(-1, index[..., None])[..., 0] for side in (left, right))
        right_first = right < reference.SIDE_RATIO * left
        first = torch.where(right_first, right, left)
        side = (right - reference.SIDE_RATIO * left).abs() / (right + left).clamp(min=1e-300)
        spread = spread + first
        step = (t - first).abs() / spread.clamp(min=1e-300)
        margin = torch.minimum(margin, torch.minimum(side, step) / 4)
        in_first = t < first
        t = torch.where(in_first, t, t - first)
        index = 2 * index + (in_first == right_first)
    return margin


def filter_margin(
    logits, temperature, top_k=None, top_p=None, min_p=None, filter_order: str = "top_k_first"
) -> torch.Tensor:
    """How far each row's `fmms.controls.allowed_set` is from changing: the least relative error of the masses that
    could add a token to it or remove one; arguments as there, fp64 [H].

    - top-p: |cumulative mass - p * M| / M at the prefix it keeps and at the one before. A prefix that another filter
      cuts off does not count; where the other filter is the shorter one, top-p would have to cut before it.
    - min-p: |x - threshold| / T, in nats, of the last token it keeps and of the first it removes, likewise. Tokens that
      tie for the largest logit are kept in any arithmetic.
    - top-k compares logits only and is exact.

    Infinite where nothing can change. Under "min_p_first" M depends on what min-p keeps, so its decisions count whether
    or not top-p cuts before them. For a draw from what is left, `decision_margin` takes `fmms.controls.filter_logits`.
    """
    found = controls.prefixes(logits, temperature, top_k, top_p, min_p, filter_order)

    def last(values, length):
        """What values [H, V] say of the last token of each row's prefix."""
        return values.gather(-1, (length.clamp(1, values.shape[-1]) - 1)[:, None])[:, 0]

    others = torch.minimum(found.top_k, found.min_p)
    shorter = torch.minimum(found.top_p, others) - 1  # the longest prefix that would cut more than now
    cut = torch.where(shorter >= 1, found.wanted - last(found.cumulative, shorter), torch.inf)
    grow = torch.where(found.top_p < others, last(found.cumulative, found.top_p) - found.wanted, torch.inf)
    by_top_p = torch.where(found.wanted < found.mass, torch.minimum(cut, grow) / found.mass, torch.inf)

    others = found.top_k if filter_order == "min_p_first" else torch.minimum(found.top_k, found.top_p)
    kept = last(found.values, torch.minimum(found.min_p, others))
    cut = torch.where(kept < found.values[:, 0], kept - found.threshold, torch.inf)
    removed = last(found.values, found.min_p + 1)
    grow = torch.where(found.min_p < others, found.threshold - removed, torch.inf)
    by_min_p = torch.where(found.threshold > -torch.inf, torch.minimum(cut, grow) / found.divisor, torch.inf)
    return torch.minimum(by_top_p, by_min_p)


def hard_groups(depth: float = 30.0) -> torch.Tensor:
    """Logits of single groups that are hard to draw from, fp32 [P, 32]: tails down to `depth` nats beside peaks, and
    light members behind many heavy ones."""
    generator = torch.Generator().manual_seed(5)
    size = noise.GROUP_SIZE
    ladder = -torch.arange(size) * (depth / (size - 1))
    rows = [ladder, ladder.flip(0), torch.zeros(size)]
    for member in (0, 7, 30, 31):
        rows.append(torch.where(torch.arange(size) == member, 0.0, -depth))
        rows.append(torch.where(torch.arange(size) == member, -depth, 0.0))
    rows.append(torch.where(torch.arange(size) % 2 == 0, 0.0, -depth))
    rows.append(torch.where(torch.rand(size, generator=generator) < 0.5, 0.0, -depth))
    for peak in (0, 1, 15, 16, 31):
        row = -depth * torch.rand(size, generator=generator)
        row[peak] = 0.0
        rows.append(row)
    return torch.stack(rows)


def group_intervals(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the uniform of the `group` scheme must lie for each member to be drawn, by the definition of the descent.

    Args:
        logits: [32], of one group.

    Returns:
        Start of each member's interval on the unit interval and its length (the probability), fp64 [32] each.
    """
    weights = torch.exp(logits.double() - logits.max())
    start = torch.zeros_like(weights)

    def place(members, offset):
        if len(members) == 1:
            start[members[0]] = offset
            return
        left, right = members[: len(members) // 2], members[len(members) // 2 :]
        first, second = left, right
        if weights[right].sum() < reference.SIDE_RATIO * weights[left].sum():
            first, second = right, left
        place(first, offset)
        place(second, offset + weights[first].sum())

    place(list(range(len(logits))), torch.zeros((), dtype=torch.float64))
    return start / weights.sum(), weights / weights.sum()


def interval_widths(logits: torch.Tensor, impl: str = "auto", device="cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Length of the interval of uniforms that draws each member of a group, found by bisection over injected uniforms.

    The length is the probability that an implementation really gives the member. Statistics cannot resolve one of
    1e-13; bisection can. A member that no uniform reaches has length 0.

    Args:
        logits: fp32 [P, 32], P groups, finite.

    Returns:
        Lengths found and lengths wanted (the probabilities), fp64 [P, 32] each.
    """
    from fmms.sampling import sample

    patterns, size = logits.shape
    ids = noise.group_token_ids(noise.BLOCK_SIZE)[0]
    exact = [group_intervals(row) for row in logits]
    orders = torch.stack([torch.argsort(start, stable=True) for start, _ in exact])
    wanted = torch.stack([probability for _, probability in exact])
    rank = torch.empty_like(orders).scatter_(1, orders, torch.arange(size).expand(patterns, size))
    # one row of the call for each edge between neighbours on the unit interval
    pattern, edge = torch.arange(patterns).repeat_interleave(size - 1), torch.arange(size - 1).repeat(patterns)
    rows = len(edge)
    hidden = torch.nn.functional.one_hot(pattern, patterns).float().to(device)
    weight = torch.zeros(noise.BLOCK_SIZE, patterns)
    weight[ids] = logits.T.float()
    weight = weight.to(device)
    gumbels = torch.full((rows, 1, noise.GROUPS_PER_BLOCK), -1e6, device=device)
    gumbels[:, 0, 0] = 0.0  # the group under test wins

    # over the 62 leading bits of the uniform: an fp64 uniform would be too coarse for an interval of 1e-15
    low, high = torch.zeros(rows, dtype=torch.int64), torch.full((rows,), 1 << 62)
    for _ in range(62):
        middle = (low + high) >> 1
        uniforms = (middle << 2)[:, None, None].expand(rows, 1, noise.GROUPS_PER_BLOCK).contiguous().to(device)
        drawn = sample(hidden, weight, impl=impl, noise=(gumbels, uniforms), seed=0).ids.cpu()
        member = (drawn[:, None] == ids).int().argmax(-1)
        below = rank[pattern, member] <= edge
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    edges = torch.nn.functional.pad(high.reshape(patterns, size - 1), (1, 1))
    edges[:, -1] = 1 << 62
    return torch.diff(edges, dim=1).gather(1, rank) * 2.0**-62, wanted
