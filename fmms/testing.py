"""Checks for sampling kernels, this package's and yours: distributions, rounding margins, poisoned memory.

Each statistical check returns a p-value; the caller states the false-alarm rate it accepts. SciPy is needed for those
(`pip install 'fmms[notebooks]'`).
"""

import contextlib

import numpy as np
import torch

from fmms import noise, reference


def _stats():
    try:
        from scipy import stats
    except ImportError as error:
        raise ImportError("the statistical checks need scipy: pip install 'fmms[notebooks]'") from error
    return stats


def draws_histogram(ids: torch.Tensor, vocab_size: int) -> np.ndarray:
    """How often each token was drawn: int64 [vocab_size]. Raises ValueError for an id outside the vocabulary."""
    ids = ids.reshape(-1)
    if ids.numel() and not (0 <= int(ids.min()) and int(ids.max()) < vocab_size):
        raise ValueError(f"ids: expected 0 to {vocab_size - 1}, got {int(ids.min())} to {int(ids.max())}")
    return torch.bincount(ids, minlength=vocab_size).cpu().numpy()


def chi_square(counts, probabilities, min_expected: float = 5.0) -> float:
    """p-value of Pearson's chi-square test over the whole vocabulary.

    Tokens are merged from the rarest up until each cell expects at least `min_expected` draws, so that the whole tail
    counts and the chi-square approximation holds (Cochran's rule).

    Args:
        counts: [V], draws of each token; probabilities: [V], summing to 1.

    Returns:
        p-value; 0.0 if a token of probability 0 was drawn, 1.0 if a single cell remains.
    """
    counts, probabilities = np.asarray(counts, dtype=np.float64), np.asarray(probabilities, dtype=np.float64)
    if counts.shape != probabilities.shape or counts.ndim != 1:
        raise ValueError(f"counts and probabilities: expected the same [V], got {counts.shape}, {probabilities.shape}")
    if counts[probabilities == 0].any():
        return 0.0
    total = counts.sum()
    order = np.argsort(probabilities, kind="stable")
    expected, observed = total * probabilities[order], counts[order]
    # a cell closes where the running expectation passes the next multiple of min_expected; the last, heaviest tokens
    # are their own cells
    cell = np.floor(np.cumsum(expected) / min_expected).astype(np.int64)
    cell = np.concatenate([[0], np.cumsum(np.diff(cell) > 0)])
    expected, observed = np.bincount(cell, expected), np.bincount(cell, observed)
    if len(expected) > 1 and expected[0] < min_expected:
        expected[1], observed[1] = expected[1] + expected[0], observed[1] + observed[0]
        expected, observed = expected[1:], observed[1:]
    if len(expected) == 1:
        return 1.0
    return float(_stats().chi2.sf(((observed - expected) ** 2 / expected).sum(), len(expected) - 1))


def binomial_tail(successes: int, trials: int, probability: float) -> float:
    """Two-sided exact p-value that `successes` of `trials` has this probability: for rare events, such as a tail."""
    return float(_stats().binomtest(int(successes), int(trials), float(probability)).pvalue)


def uniform_p_values(p_values) -> float:
    """p-value of a Kolmogorov-Smirnov test that p-values of independent repetitions are uniform on [0, 1].

    A sampler that is off by less than one repetition can see still bends the distribution of its p-values; one whose
    repetitions share noise piles them up.
    """
    return float(_stats().kstest(np.asarray(p_values), "uniform").pvalue)


def independence(a: torch.Tensor, b: torch.Tensor, vocab_size: int) -> float:
    """p-value of a chi-square test that two paired sequences of draws are independent (contingency table)."""
    table = torch.bincount(a.reshape(-1) * vocab_size + b.reshape(-1), minlength=vocab_size**2).cpu().numpy()
    table = table.reshape(vocab_size, vocab_size)
    table = table[table.sum(1) > 0][:, table.sum(0) > 0]
    return float(_stats().chi2_contingency(table).pvalue)


def integer_problem(rows: int, vocab: int, width: int, dtype=torch.float32, device="cpu", generator_seed: int = 0):
    """hidden [H, D] and weight [V, D] of small multiples of a power of two: every order of summation gives the same
    fp32 logits, so implementations can be compared draw by draw. Logits have a standard deviation near 2."""
    generator = torch.Generator().manual_seed(generator_seed)
    step = 2.0 ** -round(0.5 * np.log2(width * 4.0))
    hidden = torch.randint(-2, 3, (rows, width), generator=generator) * step
    weight = torch.randint(-2, 3, (vocab, width), generator=generator) * 1.0
    return hidden.to(device, dtype), weight.to(device, dtype)


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
    t = uniforms.gather(-1, group[..., None])[..., 0] * sums[..., 0]
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


@contextlib.contextmanager
def poisoned_memory(byte: int = 0x7F):
    """Fills what `torch.empty` and its kin return with garbage: an element that a kernel forgets to write shows.

    The pattern is 0x7F in every byte: a NaN-like or huge float, a large integer, True.
    """
    originals = {name: getattr(torch, name) for name in ("empty", "empty_like", "empty_strided")}

    def poisoning(original):
        def allocate(*args, **kwargs):
            result = original(*args, **kwargs)
            if result.numel() and result.is_contiguous():
                result.view(-1).view(torch.uint8).fill_(byte)
            return result

        return allocate

    try:
        for name, original in originals.items():
            setattr(torch, name, poisoning(original))
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)
