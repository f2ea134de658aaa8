"""The executable reference: exact sampling in plain PyTorch, on any device, fp64 wherever it decides.

`sample` is what `impl="torch"` runs and what every kernel is compared with. It materialises the logits, so it is slow
and large; it is meant to be read. The random numbers come from `fmms/noise.py`, edits, masks and truncation from
`fmms/controls.py`; argument checks and defaults are in `fmms/sampling.py`.
"""

from typing import NamedTuple

import torch

from fmms import controls, noise
from fmms.controls import MAX_SCALE as MAX_SCALE
from fmms.controls import MIN_SCALE as MIN_SCALE
from fmms.request import Request, Results

SIDE_RATIO = 0.61803400516510009765625
"""0.618034 rounded to fp32, close to (sqrt(5) - 1) / 2. In a descent step the right side is tested first if it is
lighter than this times the left one. No ratio of two small integers lies near it, so sides made of equally likely
tokens never sit on the edge of the decision, and implementations that round differently take the same way down."""

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


class Softmax(NamedTuple):
    """Rows of logits over temperature, in fp64."""

    scaled: torch.Tensor
    """[H, V]: (x - largest) / T."""
    largest: torch.Tensor
    """[H]"""
    log_total: torch.Tensor
    """[H]: log-sum-exp of scaled."""
    lse: torch.Tensor
    """[H]: log-sum-exp of x / T."""
    usable: torch.Tensor
    """bool [H]: no NaN or +inf among the logits, a finite one, T neither negative nor NaN."""

    def logprobs(self, ids: torch.Tensor) -> torch.Tensor:
        """fp64 [H, n] at ids [H, n]."""
        return self.scaled.gather(-1, ids) - self.log_total[:, None]

    def entropy(self) -> torch.Tensor:
        """fp64 [H], in nats."""
        return torch.special.entr(torch.exp(self.scaled - self.log_total[:, None])).sum(-1)


def softmax_rows(logits: torch.Tensor, temperature: torch.Tensor) -> Softmax:
    """The softmax at T (1 in greedy rows) of logits [H, V]; temperature fp32 [H]."""
    x, divisor = logits.double(), controls.divisors(temperature)
    largest = x.amax(-1)
    # subtracting the maximum first keeps masked tokens at -inf and small differences exact at any temperature
    scaled = (x - largest[:, None]) / divisor[:, None]
    log_total = torch.logsumexp(scaled, -1)
    usable = torch.isfinite(log_total) & torch.isfinite(largest) & (temperature >= 0)
    return Softmax(scaled, largest, log_total, largest / divisor + log_total, usable)


def noise_is_nan(injected, temperature: torch.Tensor) -> torch.Tensor:
    """bool [H]: whether a row's injected Gumbels hold a NaN; greedy rows use none of them. injected: as in
    `sample_from_logits`."""
    if injected is None:
        return torch.zeros_like(temperature, dtype=torch.bool)
    return injected[0].isnan().flatten(1).any(1) & (temperature != 0)


def draw(scaled, greedy, seeds, positions, samples: int | range, scheme: str, injected=None) -> torch.Tensor:
    """Ids int64 [H, S] from softmax(scaled), the largest in greedy rows.

    Args:
        scaled: fp64 [H, V], logits over temperature relative to the largest, -inf where a token must not be drawn; at
            least one finite value in each row, no NaN.
        greedy: bool [H]; seeds, positions: int64 [H].
        samples, scheme, injected: as in `sample_from_logits`.
    """
    if injected:
        gumbels, uniforms = injected
        uniforms = None if uniforms is None else noise.split_uniform(uniforms)
    else:
        gumbels, uniforms = make_noise(scheme, seeds, positions, samples, scaled.shape[-1])
    drawn = token_draw(scaled, gumbels) if scheme == "token" else group_draw(scaled, gumbels, uniforms)
    return torch.where(greedy[:, None], first_argmax(scaled)[:, None], drawn)


def blank(value: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """A result as it is returned: fp32 or int64, NaN or -1 in rows that are not valid."""
    fill, dtype = (torch.nan, torch.float32) if value.is_floating_point() else (-1, torch.int64)
    return torch.where(valid if value.dim() == 1 else valid[:, None], value.to(dtype), fill)


def sample_from_logits(logits, temperature, seeds, positions, samples=1, scheme="group", injected=None, allowed=None):
    """Draws token ids from softmax(logits / T), row by row.

    Args:
        logits: fp32 or fp64 [H, V], before temperature; -inf is probability 0.
        temperature: fp32 [H], 0 = greedy (the log-probabilities of greedy rows are those at T = 1).
        seeds, positions: int64 [H].
        samples: independent draws per row: their number S, or the range of their indices.
        scheme: "group" or "token".
        injected: None, or Gumbels and uniforms (None for "token") to use in place of the generator's; the uniforms
            fp64, fp32 or int64 (all 64 bits), [H, S, G].
        allowed: None for all, or bool [H, V], the tokens that truncation left (`fmms.controls.allowed_set`); they
            change the ids and no other definition. The row's largest logit must be among them.

    Returns:
        ids int64 [H, S], logprobs fp32 [H, S], lse fp32 [H] (of logits / T), max_logit fp32 [H], valid bool [H].
        A row with a NaN or +inf logit, with no finite logit, with a temperature that is negative or NaN, or with no
        allowed token is invalid: its ids are -1, the rest NaN.
    """
    rows = softmax_rows(logits, temperature)
    valid = rows.usable & ~noise_is_nan(injected, temperature)
    if allowed is not None:
        valid = valid & allowed.any(-1)
    safe = truncated(rows.scaled, allowed, valid)
    ids = draw(safe, temperature == 0, seeds, positions, samples, scheme, injected)
    ids = torch.where(valid[:, None], ids, 0)  # NaN noise can point past the vocabulary
    results = ids, rows.logprobs(ids), rows.lse, rows.largest
    return (*(blank(value, valid) for value in results), valid)


def truncated(scaled: torch.Tensor, allowed: torch.Tensor | None, valid: torch.Tensor) -> torch.Tensor:
    """scaled [H, V] with -inf outside the allowed tokens, and harmless zeros in rows that are not valid."""
    if allowed is not None:
        scaled = torch.where(allowed, scaled, -torch.inf)
    return torch.where(valid[:, None], scaled, 0.0)


def request_logits(request: Request) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The logits of a request, before temperature.

    Returns:
        Raw logits fp32 [H, V] (scaled and softcapped), processed ones fp32 [H, V] (then bias, edits, masks), and bool
        [H], true where edits or a banned id make the row invalid.
    """
    raw = compute_logits(request.hidden, request.weight, request.logit_scale, request.softcap)
    logits = raw if request.bias is None else raw + request.bias.float()
    wrong = torch.zeros(request.rows, dtype=torch.bool, device=request.device)
    if request.edits:
        edits = request.edit_rows, request.edit_tokens, request.edit_values, request.edit_kinds
        logits, bad = controls.apply_edits(logits, *edits)
        wrong = wrong | bad
    logits, bad = controls.mask_logits(logits, request.allowed_mask, request.banned_ids)
    return raw, logits, wrong | bad


def sample(request: Request) -> Results:
    """`fmms.sample` without kernels. Rows and draws are worked on in chunks of CHUNK_ELEMENTS, which changes no result.

    raw_logprobs of a valid row are NaN only where the raw logits are no distribution: a NaN or +inf that a mask hid.
    `logits` are returned as they are in rows that are not valid too.
    """
    raw, logits, wrong = request_logits(request)
    units = request.vocab if request.scheme == "token" else noise.group_count(request.vocab)
    sample_chunk = max(1, min(request.samples, CHUNK_ELEMENTS // units))
    row_chunk = max(1, CHUNK_ELEMENTS // max(request.vocab, sample_chunk * units))
    seeds = request.seeds
    if seeds is None:
        seeds = noise.row_seeds(request.seed_value, request.rows, request.device)
    temperature, positions = request.per_row("temperature"), request.per_row("positions")
    injected = None if request.gumbels is None else (request.gumbels, request.uniforms)

    parts = []
    for start in range(0, max(request.rows, 1), row_chunk):
        at = slice(start, start + row_chunk)
        rows = softmax_rows(logits[at], temperature[at])
        own_noise = None if injected is None else tuple(None if part is None else part[at] for part in injected)
        valid = rows.usable & ~wrong[at] & ~noise_is_nan(own_noise, temperature[at])
        allowed = None
        if request.filters:
            filters = (
                getattr(request, f"{name}_value") if tensor is None else tensor[at]
                for name, tensor in (("top_k", request.top_k), ("top_p", request.top_p), ("min_p", request.min_p))
            )
            allowed = controls.allowed_set(logits[at], temperature[at], *filters, request.filter_order)
            valid = valid & allowed.any(-1)
        left = truncated(rows.scaled, allowed, valid)

        ids = []
        for first in range(0, request.samples, sample_chunk):
            draws = range(first, min(first + sample_chunk, request.samples))
            used = None
            if own_noise:
                used = tuple(None if part is None else part[:, first : draws.stop] for part in own_noise)
            ids.append(draw(left, temperature[at] == 0, seeds[at], positions[at], draws, request.scheme, used))
        ids = torch.where(valid[:, None], torch.cat(ids, 1), 0)

        raw_logprobs = final_logprobs = entropy = top_ids = top_logprobs = None
        if request.want_raw_logprobs:
            raw_logprobs = torch.log_softmax(raw[at].double(), -1).gather(-1, ids)
        if request.want_final_logprobs:
            final_logprobs = left.gather(-1, ids) - torch.logsumexp(left, -1, keepdim=True)
        if request.want_entropy:
            entropy = rows.entropy()
        if request.top_logprobs:
            top_ids = controls.descending(logits[at])[1][:, : request.top_logprobs]
            top_logprobs = rows.logprobs(top_ids)
        results = Results(
            ids=ids,
            logprobs=rows.logprobs(ids) if request.want_logprobs else None,
            raw_logprobs=raw_logprobs,
            final_logprobs=final_logprobs,
            lse=rows.lse,
            max_logit=rows.largest,
            valid=valid,
            entropy=entropy,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            logits=None,
        )
        shown = {k: blank(v, valid) for k, v in results._asdict().items() if v is not None and k != "valid"}
        parts.append(results._replace(**shown))
    columns = [None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)]
    return Results(*columns)._replace(logits=logits if request.want_logits else None)
