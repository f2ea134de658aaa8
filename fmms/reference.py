"""The executable reference: exact sampling in plain PyTorch, on any device, fp64 wherever it decides.

`sample` is what `impl="torch"` runs and what every kernel is compared with. It materialises the logits, so it is slow
and large; it is meant to be read. The random numbers come from `fmms/noise.py`; argument checks and defaults are in
`fmms/sampling.py`.
"""

import torch

from fmms import noise

SIDE_RATIO = 0.61803400516510009765625
"""0.618034 rounded to fp32, close to (sqrt(5) - 1) / 2. In a descent step the right side is tested first if it is
lighter than this times the left one. No ratio of two small integers lies near it, so sides made of equally likely
tokens never sit on the edge of the decision, and implementations that round differently take the same way down."""

MIN_SCALE, MAX_SCALE = 2.0**-126, 2.0**126
"""Bounds of a positive temperature: within them T and 1 / T are normal fp32 numbers. A smaller T samples evenly among
the largest logits, a larger one (infinity included) evenly among all tokens of finite logit."""

CHUNK_ELEMENTS = 1 << 22
"""Most noise units or logits that are worked on at a time; a dozen fp64 or int64 tensors of that size are alive."""


def ieee_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in fp32 without TF32 or bf16 shortcuts, whatever PyTorch's global precision switches say; fp32 result."""
    if a.device.type == "cuda":
        fast = torch.backends.cuda.matmul.allow_tf32
    else:
        fast = torch.get_float32_matmul_precision() != "highest"
    dtype = torch.float64 if fast else torch.float32
    return torch.matmul(a.to(dtype), b.to(dtype)).float()


def compute_logits(hidden, weight, logit_scale: float = 1.0, softcap: float = 0.0, bias=None) -> torch.Tensor:
    """Logits of an LM head: scale, then softcap * tanh(x / softcap) (0 = none), then bias.

    Args:
        hidden: [H, D]; weight: [V, D]; bias: [V] or None.

    Returns:
        fp32 [H, V].
    """
    logits = ieee_matmul(hidden, weight.T) * logit_scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.float()
    return logits


def descend(weights: torch.Tensor, coarse: torch.Tensor, fine: torch.Tensor) -> torch.Tensor:
    """Chooses a member of each group with probability proportional to its weight, by a descent over pairwise sums.

    At each node the uniform, scaled to the node's sum, is compared with the side tested first: the left one, or the
    right one if it is lighter by SIDE_RATIO. Testing a light side first gives it the whole interval [0, weight), and
    the heavy side takes the rest with whatever the sums lost to rounding. A token of weight 0 is never reached.

    What is left of the uniform after a heavy side was passed must still resolve a light one behind it: 1e-13 of the
    sum, 30 nats down. So it is carried unrounded, as two fp64 numbers (Dekker, "A floating-point technique for
    extending the available precision", 1971).

    Args:
        weights: [..., 2**k], non-negative, not all 0.
        coarse, fine: [...], parts of a uniform in [0, 1] (`fmms.noise.uniform_parts`).

    Returns:
        int64 [...], index of the chosen member.
    """
    levels, sums = [], weights
    while sums.shape[-1] > 1:
        left, right = sums[..., 0::2], sums[..., 1::2]
        levels.append((left, right))
        sums = left + right
    total = sums[..., 0]
    leading = total.float().double()
    high, low = coarse * leading, coarse * (total - leading) + fine * total
    index = torch.zeros_like(total, dtype=torch.int64)
    for left, right in reversed(levels):
        left, right = (side.gather(-1, index[..., None])[..., 0] for side in (left, right))
        right_first = right < SIDE_RATIO * left
        first = torch.where(right_first, right, left)
        rest = high - first
        rest_low = low + ((high - rest) - first)
        # not high + low < first: that sum would be rounded before it is compared
        in_first = rest + rest_low < 0
        high, low = torch.where(in_first, high, rest), torch.where(in_first, low, rest_low)
        index = 2 * index + (in_first == right_first)
    return index


def token_draw(scaled: torch.Tensor, gumbels: torch.Tensor) -> torch.Tensor:
    """The `token` scheme: argmax over all tokens of logit / T + Gumbel; the lowest id wins a tie.

    Args:
        scaled: fp64 [H, V], logits over temperature; gumbels: [H, S, V].

    Returns:
        int64 [H, S].
    """
    return first_argmax(scaled[:, None, :] + gumbels.double())


def group_draw(scaled: torch.Tensor, gumbels: torch.Tensor, uniforms: tuple[torch.Tensor, torch.Tensor]):
    """The `group` scheme: argmax over groups of log-sum-exp + Gumbel, then one uniform picks a token inside the winner.

    A categorical distribution factorises over any partition, so this draws from softmax(scaled) with one Gumbel and
    one uniform for every 32 tokens.

    Args:
        scaled: fp64 [H, V]; gumbels: [H, S, G]; uniforms: their coarse and fine parts, [H, S, G] each.

    Returns:
        int64 [H, S].
    """
    rows, vocab = scaled.shape
    ids = noise.group_token_ids(vocab, scaled.device)
    padded = torch.nn.functional.pad(scaled, (0, ids.shape[0] * noise.GROUP_SIZE - vocab), value=-torch.inf)
    members = padded[:, ids]
    largest = members.amax(-1, keepdim=True)
    weights = torch.exp(members - largest.nan_to_num(neginf=0.0))
    group_lse = largest[..., 0] + torch.log(weights.sum(-1))
    keys = group_lse[:, None, :] + gumbels.double()
    # a group whose members are all masked has log-sum-exp -inf and can win only where the whole row is masked
    group = first_argmax(keys)
    row = torch.arange(rows, device=scaled.device)[:, None]
    coarse, fine = (part.gather(-1, group[..., None])[..., 0] for part in uniforms)
    return ids[group, descend(weights[row, group], coarse, fine)]


def first_argmax(x: torch.Tensor) -> torch.Tensor:
    """argmax over the last axis; the lowest index wins a tie (torch.argmax promises no order)."""
    best = x.amax(-1, keepdim=True)
    index = torch.arange(x.shape[-1], device=x.device)
    return torch.where(x == best, index, x.shape[-1]).amin(-1).clamp(max=x.shape[-1] - 1)


def make_noise(scheme: str, seeds, positions, samples: int | range, vocab_size: int):
    """The Gumbels and parts of uniforms that a scheme draws with: [H, S, V] and None, or [H, S, G] and a pair of
    [H, S, G]; all fp64. `samples` is their number, or the range of sample indices."""
    device = seeds.device
    draws = range(samples) if isinstance(samples, int) else samples
    sample_ids = torch.arange(draws.start, draws.stop, device=device)
    if scheme == "token":
        w = noise.words(seeds, positions, torch.arange(vocab_size, device=device), sample_ids, noise.PURPOSE_TOKEN)
        return noise.gumbel(w[0], w[1]), None
    units = torch.arange(noise.group_count(vocab_size), device=device)
    w = noise.words(seeds, positions, units, sample_ids, noise.PURPOSE_GROUP)
    return noise.gumbel(w[0], w[1]), noise.uniform_parts(w[2], w[3])


def sample_from_logits(logits, temperature, seeds, positions, samples=1, scheme="group", injected=None):
    """Draws token ids from softmax(logits / T), row by row.

    Args:
        logits: fp32 or fp64 [H, V], before temperature; -inf is probability 0.
        temperature: fp32 [H], 0 = greedy (the log-probabilities of greedy rows are those at T = 1).
        seeds, positions: int64 [H].
        samples: independent draws per row: their number S, or the range of their indices.
        scheme: "group" or "token".
        injected: None, or Gumbels and uniforms (None for "token") to use in place of the generator's; the uniforms
            fp64, fp32 or int64 (all 64 bits), [H, S, G].

    Returns:
        ids int64 [H, S], logprobs fp32 [H, S], lse fp32 [H] (of logits / T), max_logit fp32 [H], valid bool [H].
        A row with a NaN or +inf logit, with no finite logit, or with a temperature that is negative or NaN is
        invalid: its ids are -1, the rest NaN.
    """
    x = logits.double()
    greedy = temperature == 0
    divisor = torch.where(greedy, 1.0, temperature).double().clamp(MIN_SCALE, MAX_SCALE)[:, None]
    max_logit = x.amax(-1)
    # subtracting the maximum first keeps masked tokens at -inf and small differences exact at any temperature
    scaled = (x - max_logit[:, None]) / divisor
    log_total = torch.logsumexp(scaled, -1)
    lse = max_logit / divisor[:, 0] + log_total
    valid = torch.isfinite(log_total) & torch.isfinite(max_logit) & (temperature >= 0)
    if injected:
        valid = valid & ~(injected[0].isnan().flatten(1).any(1) & ~greedy)

    safe = torch.where(valid[:, None], scaled, 0.0)
    if injected:
        gumbels, uniforms = injected
        uniforms = None if uniforms is None else noise.split_uniform(uniforms)
    else:
        gumbels, uniforms = make_noise(scheme, seeds, positions, samples, x.shape[-1])
    drawn = token_draw(safe, gumbels) if scheme == "token" else group_draw(safe, gumbels, uniforms)
    ids = torch.where(greedy[:, None], first_argmax(torch.where(valid[:, None], x, 0.0))[:, None], drawn)
    ids = torch.where(valid[:, None], ids, 0)
    logprobs = scaled.gather(-1, ids) - log_total[:, None]

    def blank(value, fill):
        mask = valid if value.dim() == 1 else valid[:, None]
        return torch.where(mask, value, fill)

    return (
        blank(ids, -1),
        blank(logprobs.float(), torch.nan),
        blank(lse.float(), torch.nan),
        blank(max_logit.float(), torch.nan),
        valid,
    )


def sample(hidden, weight, temperature, seeds, positions, samples, scheme, injected, logit_scale, softcap, bias):
    """`fmms.sample` without kernels; arguments as in `sample_from_logits` and `compute_logits`.

    Returns:
        The five results of `sample_from_logits`, then the fp32 logits [H, V].
    """
    logits = compute_logits(hidden, weight, logit_scale, softcap, bias)
    rows, vocab = logits.shape
    units = vocab if scheme == "token" else noise.group_count(vocab)
    sample_chunk = max(1, min(samples, CHUNK_ELEMENTS // units))
    row_chunk = max(1, CHUNK_ELEMENTS // max(vocab, sample_chunk * units))
    row_parts = []
    for row in range(0, rows, row_chunk):
        at = slice(row, row + row_chunk)
        sample_parts = []
        for first in range(0, samples, sample_chunk):
            draws = range(first, min(first + sample_chunk, samples))
            own = tuple(None if n is None else n[at, first : draws.stop] for n in injected) if injected else None
            sample_parts.append(
                sample_from_logits(logits[at], temperature[at], seeds[at], positions[at], draws, scheme, own)
            )
        ids, logprobs = (torch.cat([part[i] for part in sample_parts], 1) for i in (0, 1))
        row_parts.append((ids, logprobs, *sample_parts[0][2:]))
    return (*(torch.cat(column) for column in zip(*row_parts, strict=True)), logits)
