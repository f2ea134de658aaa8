"""Is a histogram of draws the distribution it should be? p-values, intervals and bands; the caller states the rate.

SciPy does the statistics (`pip install -e '.[notebooks]'`).
"""

import numpy as np
import torch


def _stats():
    try:
        from scipy import stats
    except ImportError as error:
        raise ImportError("the statistical checks need scipy: pip install -e '.[notebooks]'") from error
    return stats


def draws_histogram(ids: torch.Tensor, vocab_size: int) -> np.ndarray:
    """How often each token was drawn: int64 [vocab_size]. Raises ValueError for an id outside the vocabulary."""
    ids = ids.reshape(-1)
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
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


def binomial_interval(successes, trials: int, confidence: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Clopper-Pearson interval of a probability from its frequency: exact, so it covers at least as often as it says.

    Args:
        successes: count or array of counts, 0 to `trials`; confidence: two-sided, of each interval by itself.

    Returns:
        Lower and upper ends, of the shape of `successes`.
    """
    k = np.asarray(successes, dtype=np.float64)
    beta, tail = _stats().beta, (1 - confidence) / 2
    low = np.where(k > 0, beta.ppf(tail, np.maximum(k, 1), trials - k + 1), 0.0)
    high = np.where(k < trials, beta.isf(tail, k + 1, np.maximum(trials - k, 1)), 1.0)
    return low, high


def ecdf_band(n: int, confidence: float = 0.95) -> float:
    """Half-width of the Dvoretzky-Kiefer-Wolfowitz band: with this confidence the empirical distribution function of n
    independent values lies nowhere further than that from the true one (Massart's constant)."""
    return float(np.sqrt(np.log(2 / (1 - confidence)) / (2 * n)))


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
