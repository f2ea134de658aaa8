"""Checks of a whole sampler, this package's or yours, given as a function.

A sampler is `sampler(hidden, weight, temperature, seeds, positions) -> ids`: hidden [H, D], weight [V, D], temperature
fp32 [H], seeds and positions int64 [H], ids int64 [H]. A check raises AssertionError with what it saw.
"""

from collections.abc import Callable

import torch

from fmms import noise
from fmms.testing.inputs import integer_problem, with_offset
from fmms.testing.statistics import binomial_tail, chi_square, draws_histogram, independence

Sampler = Callable[..., torch.Tensor]


def draw_many(
    sampler: Sampler, logits, draws: int, temperature: float = 1.0, seed: int = 0, batch: int = 4096, device="cpu"
) -> torch.Tensor:
    """`draws` draws from one row of logits [V], each a row with its own seed; int64 [draws] on the CPU.

    The weight is the column of logits and hidden is 1, so fp32 logits reach the sampler exactly. The cost is that of
    the sampler at `batch` rows, times draws / batch.

    Raises:
        TypeError: the sampler returned something else than int64 ids [H].
    """
    logits = torch.as_tensor(logits)
    weight = logits.float()[:, None].to(device)
    parts = []
    for start in range(0, draws, batch):
        rows = min(batch, draws - start)
        seeds = noise.row_seeds(seed, start + rows, device)[start:]
        ones = torch.ones(rows, 1, device=device)
        positions = torch.zeros(rows, dtype=torch.int64, device=device)
        ids = sampler(ones, weight, temperature * ones[:, 0], seeds, positions)
        if not isinstance(ids, torch.Tensor) or ids.dtype != torch.int64 or ids.shape != (rows,):
            got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
            raise TypeError(f"sampler: expected int64 ids [{rows}], got {got}")
        parts.append(ids.cpu())
    return torch.cat(parts)


def check_distribution(
    sampler: Sampler, logits, draws: int, temperatures=(0.5, 1.0, 2.0), rate: float = 1e-6, **options
) -> float:
    """Chi-square of draws from softmax(logits / T) over the whole vocabulary, at each temperature.

    Returns:
        The smallest p-value. Each must exceed `rate`, the false-alarm rate. `options` go to `draw_many`.
    """
    logits, smallest = torch.as_tensor(logits), 1.0
    for temperature in temperatures:
        ids = draw_many(sampler, logits, draws, temperature, **options)
        probabilities = torch.softmax(logits.double() / temperature, -1).cpu()
        p = chi_square(draws_histogram(ids, len(logits)), probabilities)
        assert p > rate, f"{draws} draws at temperature {temperature:g} do not follow the softmax: p = {p:.2g}"
        smallest = min(smallest, p)
    return smallest


def check_heavy_tail(
    sampler: Sampler, tail_tokens: int, depth: float, draws: int, rate: float = 1e-6, **options
) -> float:
    """Tokens `depth` nats below one peak are drawn as often as they should be, all together; returns the p-value.

    Noise from 24-bit uniforms is cut off near 16.6 nats: then tokens deeper than that (deeper by 3.5 nats with noise
    per group) hardly ever appear. Choose the draws so that a few tens of tail tokens are expected.
    """
    logits = torch.full((tail_tokens + 1,), -float(depth))
    peak = tail_tokens // 3
    logits[peak] = 0.0
    tail = 1 - torch.softmax(logits.double(), -1)[peak].item()
    hits = int((draw_many(sampler, logits, draws, **options) != peak).sum())
    p = binomial_tail(hits, draws, tail)
    assert p > rate, f"{hits} of {draws} draws lie in the tail, {tail * draws:.1f} expected: p = {p:.2g}"
    return p


def check_invariance(sampler: Sampler, vocab_size: int = 1500, rows: int = 12, device="cpu", offset: float = 64.0):
    """A row's draw depends on its own logits, temperature, seed and position: not on its slot, on the other rows, on
    how many there are, nor on an offset common to its logits. Rows at temperature 0 take the largest logit."""
    hidden, weight = integer_problem(rows, vocab_size, 40, device=device)
    temperature = torch.tensor([1.0, 0.0, 0.4, 2.0], device=device).repeat(rows // 4 + 1)[:rows]
    seeds = noise.row_seeds(3, rows, device)
    positions = torch.arange(rows, device=device) * 5
    whole = sampler(hidden, weight, temperature, seeds, positions)
    greedy = temperature == 0
    best = (hidden.double() @ weight.double().T).max(-1, keepdim=True)
    taken = (hidden.double() @ weight.double().T).gather(1, whole[:, None])
    assert (taken == best.values)[greedy].all(), "a row at temperature 0 does not take the largest logit"

    def again(index):
        return sampler(hidden[index], weight, temperature[index], seeds[index], positions[index])

    order = torch.arange(rows - 1, -1, -1, device=device)
    moved = int((again(order) != whole[order]).sum())
    assert moved == 0, f"{moved} of {rows} draws change with the order of the rows (is the noise taken from `seeds`?)"
    for row in range(0, rows, max(1, rows // 4)):
        assert again(slice(row, row + 1))[0] == whole[row], f"row {row} draws another token alone than in the batch"
    shifted = sampler(*with_offset(hidden, weight, offset), temperature, seeds, positions)
    changed = int((shifted != whole).sum())
    assert changed == 0, f"{changed} of {rows} draws change when {offset:g} is added to all logits of a row"


def check_independence(sampler: Sampler, pairs: int = 4096, rate: float = 1e-6, device="cpu"):
    """Rows, and steps of a row, do not repeat each other's noise: chi-square tests on pairs of draws, each at the
    false-alarm rate given."""
    vocab = 8
    weight, hidden = torch.zeros(vocab, 1, device=device), torch.ones(2 * pairs, 1, device=device)
    temperature, seeds = hidden[:, 0], noise.row_seeds(11, 2 * pairs, device)
    first, later = (sampler(hidden, weight, temperature, seeds, torch.full_like(seeds, step)).cpu() for step in (0, 1))
    p = independence(first[:pairs], first[pairs:], vocab)
    assert p > rate, f"rows of one call are not independent: p = {p:.2g}"
    p = independence(first, later, vocab)
    assert p > rate, f"steps are not independent: p = {p:.2g}"
    p = chi_square(draws_histogram(first, vocab), [1 / vocab] * vocab)
    assert p > rate, f"equal logits are not drawn equally often: p = {p:.2g}"
