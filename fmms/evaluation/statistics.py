"""Intervals and tests for scores of questions and for times of trials: every estimate with its error, by seed.

The unit that is resampled is what was drawn independently: the question, or the trial. SciPy gives the distributions
(`pip install -e '.[notebooks]'`). Tests of samplers' distributions are in fmms.testing.statistics.
"""

import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 9999
FEW = 10
"""With fewer right answers, wrong answers, differing questions or trials than this the bootstrap is too narrow and
another method takes its place; `method` of each result says which was used."""


class Interval(NamedTuple):
    """An estimate with its two-sided confidence interval, all in one unit; NaN ends where n allows none."""

    estimate: float
    low: float
    high: float
    n: int
    method: str


class PairedTest(NamedTuple):
    """a against b on the same n questions. difference, low, high: mean of a minus mean of b in percentage points.

    p_value: two-sided, by `method`. mcnemar_p: exact McNemar, NaN where scores are not 0 or 1. a_only, b_only:
    questions on which a or b has the higher score.
    """

    difference: float
    low: float
    high: float
    p_value: float
    mcnemar_p: float
    a_only: int
    b_only: int
    n: int
    method: str


class Power(NamedTuple):
    """Share of simulated experiments in which the test rejects, with its exact 95 % interval; all from 0 to 1."""

    power: float
    low: float
    high: float
    simulations: int


def mean_interval(correct, confidence: float = CONFIDENCE, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Confidence interval of the mean of right and wrong answers, in percent.

    The percentile bootstrap over questions. For 0s and 1s the bootstrap distribution of the sum is Binomial(n, k/n),
    so its percentiles are taken exactly and no seed matters. With fewer than 10 right or fewer than 10 wrong answers it
    covers too seldom, and with none it collapses to a point; there the exact Clopper-Pearson interval is returned,
    which covers at least as often as it says.

    Args:
        correct: [n] bool or numbers from 0 to 1, one per question. For several runs of each question pass the mean over
            its runs: questions are independent, runs of one question are not.
        resamples, seed: of the bootstrap where values lie between 0 and 1.

    Returns:
        Interval in percent; method "bootstrap" or "Clopper-Pearson".

    Raises:
        ValueError: no values, values outside [0, 1], NaN.
    """
    scores, tail = _scores(correct, "correct"), _tail(confidence)
    n, mean = len(scores), float(scores.mean())
    right, wrong = int((scores > 0).sum()), int((scores < 1).sum())
    binary = right + wrong == n
    if min(right, wrong) < FEW or scores.min() == scores.max():
        # a fractional score counts as right for the upper end and as wrong for the lower one: never too narrow
        low, high = _clopper_pearson(n - wrong, n, tail)[0], _clopper_pearson(right, n, tail)[1]
        return Interval(100 * mean, 100 * low, 100 * high, n, "Clopper-Pearson")
    if binary:
        low, high = _stats().binom.ppf([tail, 1 - tail], n, right / n) / n
    else:
        low, high = np.quantile(_resampled_means(scores, resamples, seed), [tail, 1 - tail])
    return Interval(100 * mean, 100 * float(low), 100 * float(high), n, "bootstrap")


def paired_test(a, b, confidence: float = CONFIDENCE, resamples: int = RESAMPLES, seed: int = 0) -> PairedTest:
    """Do two variants that answered the same questions differ? Difference, interval and two-sided p-value.

    Questions are resampled, each with both its answers, so what makes a question hard for both cancels. Interval:
    percentiles. p-value: how often resampled differences, centred on no difference, lie at least as far out as the
    observed one, (1 + count) / (1 + resamples) (Efron and Tibshirani, An Introduction to the Bootstrap, section 16.4).

    When all but fewer than 10 questions have the same difference (mostly none), both are replaced: the p-value by the
    exact sign-flip test, which for 0s and 1s is McNemar's, the interval by bounds on the two rates of differing
    questions (Clopper-Pearson, each at half the error). Those cover at least as often as they say, also when no
    question differs.

    Args:
        a, b: [n] bool or numbers from 0 to 1 in the same order of questions; means over runs as in `mean_interval`.

    Raises:
        ValueError: lengths differ, no values, values outside [0, 1].
    """
    a, b = _scores(a, "a"), _scores(b, "b")
    if len(a) != len(b):
        raise ValueError(f"a has {len(a)} questions and b {len(b)}; pairing needs the same questions in one order")
    tail, n, change = _tail(confidence), len(a), a - b
    a_only, b_only = int((change > 0).sum()), int((change < 0).sum())
    binary = bool(np.isin(change, (-1, 0, 1)).all() and np.isin(a, (0, 1)).all())
    mcnemar = mcnemar_exact(a_only, b_only) if binary else math.nan
    difference = float(change.mean())
    if n - int(np.unique(change, return_counts=True)[1].max()) < FEW:
        gain, loss = _clopper_pearson(a_only, n, tail / 2), _clopper_pearson(b_only, n, tail / 2)
        if not binary:  # a positive change may be as small as one likes
            gain, loss = (0.0, gain[1]), (0.0, loss[1])
        low, high = gain[0] - loss[1], gain[1] - loss[0]
        p_value, method = _sign_flip(change), "exact"
    else:
        if binary:
            means = _resampled_differences(a_only, b_only, n, resamples, seed)
        else:
            means = _resampled_means(change, resamples, seed)
        low, high = (float(end) for end in np.quantile(means, [tail, 1 - tail]))
        p_value, method = _centred_p(means, difference), "bootstrap"
    ends = (100 * end for end in (difference, low, high))
    return PairedTest(*ends, p_value, mcnemar, a_only, b_only, n, method)


def mcnemar_exact(a_only: int, b_only: int) -> float:
    """Exact two-sided McNemar p-value: of the questions that only one of two variants got right, is each as likely to
    be a's as b's? Binomial with probability 1/2; 1.0 where there is none (McNemar 1947; the exact form is the sign
    test)."""
    if min(a_only, b_only) < 0:
        raise ValueError(f"a_only and b_only are counts; got {a_only} and {b_only}")
    total = a_only + b_only
    return float(_stats().binomtest(int(a_only), int(total), 0.5).pvalue) if total else 1.0


def holm(p_values) -> np.ndarray:
    """p-values adjusted by Holm's step-down method: float64 of the same length and order, at most 1.

    Rejecting those at most alpha keeps the chance of any false rejection among all tests at alpha, whatever their
    dependence (Holm 1979, Scandinavian Journal of Statistics 6). ValueError for values outside [0, 1] or NaN.
    """
    p_values = np.asarray(p_values, dtype=np.float64)
    if p_values.ndim != 1 or not ((p_values >= 0) & (p_values <= 1)).all():
        raise ValueError(f"p_values: expected a list of numbers from 0 to 1, got {p_values.tolist()}")
    order = np.argsort(p_values, kind="stable")
    steps = p_values[order] * np.arange(len(p_values), 0, -1)
    adjusted = np.empty_like(p_values)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted


def pairwise(
    scores: Mapping[str, object], confidence: float = CONFIDENCE, resamples: int = RESAMPLES, seed: int = 0
) -> list[dict]:
    """Every pair of variants tested on the same questions, with Holm's correction over all of them.

    Args:
        scores: variant -> [n] scores as in `paired_test`, the same questions in the same order for each.

    Returns:
        One dict for each pair: a, b, then the fields of PairedTest (percentage points), p_holm and mcnemar_holm (None
        unless every pair has one). The intervals are of each pair by itself. [] for fewer than two variants.
    """
    pairs = list(itertools.combinations(scores, 2))
    tests = [paired_test(scores[a], scores[b], confidence, resamples, seed) for a, b in pairs]
    corrected = holm([test.p_value for test in tests])
    exact = [test.mcnemar_p for test in tests]
    exact = holm(exact) if not np.isnan(exact).any() else [None] * len(tests)
    return [
        {"a": a, "b": b, **test._asdict(), "p_holm": float(p), "mcnemar_holm": None if q is None else float(q)}
        for (a, b), test, p, q in zip(pairs, tests, corrected, exact, strict=True)
    ]


def trial_interval(values, confidence: float = CONFIDENCE, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Mean over independent trials with its confidence interval, in the unit of `values`.

    From 10 trials on the bootstrap's percentiles, moved outward so that they are as wide as Student's t for this n
    (Hesterberg 2015, The American Statistician 69(4), "expanded percentile"); plain ones cover too seldom at such n.
    With fewer trials Student's t; with one the ends are NaN: a single trial says nothing about the spread.

    Args:
        values: [n] finite numbers, one per trial.
    """
    values = np.asarray(values, dtype=np.float64).reshape(-1)
    if not len(values) or not np.isfinite(values).all():
        raise ValueError(f"values: expected finite numbers, one per trial, got {values.tolist()}")
    tail, n, mean = _tail(confidence), len(values), float(values.mean())
    if n == 1:
        return Interval(mean, math.nan, math.nan, n, "one trial")
    quantile = float(_stats().t.isf(tail, n - 1))
    if n < FEW:
        half = quantile * float(values.std(ddof=1)) / math.sqrt(n)
        return Interval(mean, mean - half, mean + half, n, "Student's t")
    outward = float(_stats().norm.sf(quantile * math.sqrt(n / (n - 1))))
    low, high = np.quantile(_resampled_means(values, resamples, seed), [outward, 1 - outward])
    return Interval(mean, float(low), float(high), n, "bootstrap")


def speedup_interval(
    baseline, system, confidence: float = CONFIDENCE, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """How many times faster the system is than the baseline, from times of the same trials, with its interval.

    The geometric mean of the trials' ratios baseline / system: `trial_interval` of their logarithms. Each ratio is
    taken inside one trial, so a slow machine or a warm GPU cancels; a ratio of medians would throw that pairing away.
    And it is even-handed: exchanging the two gives exactly the inverse, which a mean of ratios does not.

    Args:
        baseline, system: [n] positive times in one unit, the same trials in the same order.

    Returns:
        Interval of a ratio without unit: 1 is equal, 2 is half the time.
    """
    baseline, system = (np.asarray(times, dtype=np.float64).reshape(-1) for times in (baseline, system))
    if len(baseline) != len(system):
        raise ValueError(f"baseline has {len(baseline)} trials and system {len(system)}; ratios need the same trials")
    times = np.concatenate([baseline, system])
    if not (np.isfinite(times) & (times > 0)).all():
        raise ValueError("times: expected positive finite numbers")
    found = trial_interval(np.log(baseline) - np.log(system), confidence, resamples, seed)
    return found._replace(estimate=math.exp(found.estimate), low=math.exp(found.low), high=math.exp(found.high))


def power(
    n: int,
    accuracy_a: float,
    accuracy_b: float,
    disagreement: float | None = None,
    alpha: float = 0.05,
    test: str = "bootstrap",
    simulations: int = 1000,
    resamples: int = 1999,
    seed: int = 0,
) -> Power:
    """How often the paired test on n questions finds that two variants differ, by simulation.

    Args:
        n: questions. accuracy_a, accuracy_b: true shares of right answers, 0 to 1.
        disagreement: share of questions that exactly one of the two gets right, at least |a - b|; by default that of
            variants which err independently, a(1 - b) + b(1 - a). Variants of one model agree more, which raises the
            power, so measure it where you can.
        alpha: rejects at p <= alpha. For m tests under Holm's correction alpha / m is a lower bound.
        test: "bootstrap" (`paired_test`, exact where few questions differ) or "mcnemar".
        simulations: experiments drawn; resamples: of each bootstrap.

    Raises:
        ValueError: probabilities that no pair of variants can have.
    """
    if test not in ("bootstrap", "mcnemar"):
        raise ValueError(f"test is {test!r}; expected 'bootstrap' or 'mcnemar'")
    if n < 1 or not (0 <= accuracy_a <= 1 and 0 <= accuracy_b <= 1):
        raise ValueError(f"expected n >= 1 and accuracies from 0 to 1, got {n}, {accuracy_a}, {accuracy_b}")
    if disagreement is None:
        disagreement = accuracy_a * (1 - accuracy_b) + accuracy_b * (1 - accuracy_a)
    least, most = abs(accuracy_a - accuracy_b), min(accuracy_a + accuracy_b, 2 - accuracy_a - accuracy_b)
    if not least - 1e-12 <= disagreement <= most + 1e-12:
        raise ValueError(f"disagreement is {disagreement:g}; these accuracies allow {least:g} to {most:g}")
    only_a = max(0.0, (disagreement + accuracy_a - accuracy_b) / 2)
    only_b = max(0.0, (disagreement - accuracy_a + accuracy_b) / 2)
    rng = np.random.default_rng(seed)
    tables = rng.multinomial(n, [only_a, only_b, max(0.0, 1 - only_a - only_b)], size=simulations)[:, :2]
    distinct, repeats = np.unique(tables, axis=0, return_counts=True)
    rejected = 0
    for (a_only, b_only), count in zip(distinct.tolist(), repeats.tolist(), strict=True):
        if test == "mcnemar" or n - max(a_only, b_only, n - a_only - b_only) < FEW:
            p_value = mcnemar_exact(a_only, b_only)
        else:
            means = _resampled_differences(a_only, b_only, n, resamples, int(rng.integers(2**62)))
            p_value = _centred_p(means, (a_only - b_only) / n)
        rejected += count * (p_value <= alpha)
    return Power(rejected / simulations, *_clopper_pearson(rejected, simulations, 0.025), simulations)


def _stats():
    try:
        from scipy import stats
    except ImportError as error:
        raise ImportError("the statistics need scipy: pip install -e '.[notebooks]'") from error
    return stats


def _scores(values, name: str) -> np.ndarray:
    scores = np.asarray(values, dtype=np.float64)
    if scores.ndim != 1 or not len(scores):
        raise ValueError(f"{name}: expected one score for each question, got shape {list(scores.shape)}")
    if not ((scores >= 0) & (scores <= 1)).all():
        raise ValueError(f"{name}: expected scores from 0 (wrong) to 1 (right); some lie outside or are NaN")
    return scores


def _tail(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; expected a share such as 0.95")
    return (1 - confidence) / 2


def _clopper_pearson(successes: int, trials: int, tail: float) -> tuple[float, float]:
    """Exact bounds of a probability, each with error `tail` (Clopper and Pearson 1934, Biometrika 26)."""
    beta = _stats().beta
    low = float(beta.ppf(tail, successes, trials - successes + 1)) if successes else 0.0
    high = float(beta.isf(tail, successes + 1, trials - successes)) if successes < trials else 1.0
    return low, high


def _resampled_means(values: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Means of `resamples` samples of len(values) values drawn with replacement: float64 [resamples]."""
    rng, n = np.random.default_rng(seed), len(values)
    block = max(1, 2_000_000 // n)  # values in memory at once
    parts = [
        values[rng.integers(n, size=(min(block, resamples - start), n))].mean(1) for start in range(0, resamples, block)
    ]
    return np.concatenate(parts)


def _resampled_differences(a_only: int, b_only: int, n: int, resamples: int, seed: int) -> np.ndarray:
    """Mean differences of resampled questions where each is -1, 0 or 1: the counts are multinomial."""
    shares = [a_only / n, b_only / n, max(0.0, 1 - (a_only + b_only) / n)]
    counts = np.random.default_rng(seed).multinomial(n, shares, size=resamples)
    return (counts[:, 0] - counts[:, 1]) / n


def _centred_p(means: np.ndarray, difference: float) -> float:
    """How often centred resampled means lie at least as far from 0 as the observed difference."""
    further = np.abs(means - difference) >= abs(difference) - 1e-9  # the sums are of hundredths and the like
    return float((1 + further.sum()) / (1 + len(means)))


def _sign_flip(change: np.ndarray) -> float:
    """Exact p-value that the signs of changes are random: all flips of fewer than 10 changes are listed; of more, which
    then are nearly all alike, the signs alone are tested."""
    change = change[change != 0]
    if len(change) >= FEW:
        return mcnemar_exact(int((change > 0).sum()), int((change < 0).sum()))
    if not len(change):
        return 1.0
    signs = np.array(list(itertools.product((1, -1), repeat=len(change))))
    return float((np.abs(signs @ change) >= abs(change.sum()) - 1e-9).mean())
