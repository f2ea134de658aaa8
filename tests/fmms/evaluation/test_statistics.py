"""fmms.evaluation.statistics: agrees with SciPy, covers and rejects as often as it says, is even-handed and repeatable.

False-alarm rates: every simulated share is compared with its bound by an exact binomial test at RATE, with fixed seeds,
so that a correct implementation fails with at most that chance, once, when a seed is changed.
"""

import itertools
import math

import numpy as np
import pytest

stats = pytest.importorskip("scipy.stats")

from fmms.evaluation import statistics  # noqa: E402

RATE = 1e-5


def at_least(hits, trials, share):
    """Whether so few hits would be rarer than RATE if each had at least this probability."""
    return stats.binomtest(int(hits), trials, share, alternative="less").pvalue > RATE


def at_most(hits, trials, share):
    return stats.binomtest(int(hits), trials, share, alternative="greater").pvalue > RATE


@pytest.mark.parametrize("n, right", [(100, 60), (1319, 1100), (40, 29)])
def test_mean_interval_is_scipys_percentile_bootstrap(n, right):
    found = statistics.mean_interval([1] * right + [0] * (n - right))
    data = (np.repeat([1.0, 0.0], [right, n - right]),)
    drawn = stats.bootstrap(data, np.mean, n_resamples=9999, method="percentile", random_state=1).confidence_interval
    assert found.method == "bootstrap"
    assert found.estimate == pytest.approx(100 * right / n)
    # two counts of the sum: what 9,999 resamples leave open at a quantile
    assert found.low == pytest.approx(100 * drawn.low, abs=200 / n + 1e-9)
    assert found.high == pytest.approx(100 * drawn.high, abs=200 / n + 1e-9)


@pytest.mark.parametrize("right", [0, 3, 50 - 3, 50])
def test_mean_interval_is_exact_where_the_bootstrap_collapses(right):
    found = statistics.mean_interval(np.arange(50) < right)
    exact = stats.binomtest(right, 50).proportion_ci(method="exact")
    assert found.method == "Clopper-Pearson"
    assert (found.low, found.high) == pytest.approx((100 * exact.low, 100 * exact.high))
    assert found.high - found.low > 5


@pytest.mark.parametrize("n", [20, 100, 1319])
def test_mean_interval_covers(n):
    """Exactly, by listing all counts: at least 92 % at any accuracy (discreteness costs most at small n), and 95 %
    where Clopper-Pearson takes over."""
    intervals = [statistics.mean_interval(np.arange(n) < k) for k in range(n + 1)]
    low, high = (np.array([getattr(one, end) / 100 for one in intervals]) for end in ("low", "high"))
    for accuracy in (0.01, 0.05, 0.2, 0.5, 0.77, 0.9, 0.99, 0.999):
        inside = (low <= accuracy) & (accuracy <= high)
        coverage = stats.binom.pmf(np.arange(n + 1), n, accuracy)[inside].sum()
        assert coverage >= (0.95 if n * min(accuracy, 1 - accuracy) < 2 else 0.92), accuracy


def test_mean_interval_covers_by_simulation():
    rng = np.random.default_rng(1)
    drawn = rng.random((2000, 200)) < 0.8
    found = [statistics.mean_interval(sample) for sample in drawn]
    assert at_least(sum(one.low <= 80 <= one.high for one in found), 2000, 0.93)


def test_mean_interval_of_repeated_runs_resamples_questions():
    """Three runs of each question are no three questions: the interval is that of the questions' means."""
    rng = np.random.default_rng(2)
    hard = rng.random(300) < 0.4
    means = np.where(hard, rng.binomial(3, 0.1, 300), rng.binomial(3, 0.9, 300)) / 3
    found = statistics.mean_interval(means, seed=3)
    half = 1.96 * means.std(ddof=1) / math.sqrt(300) * 100
    assert found.high - found.low == pytest.approx(2 * half, rel=0.08)
    assert found == statistics.mean_interval(means, seed=3) != statistics.mean_interval(means, seed=4)
    alike = statistics.mean_interval([0.5] * 30)
    assert (alike.low, alike.high) == (0, 100)


@pytest.mark.parametrize("bad", [[], [0.5, 1.2], [math.nan, 1], [[1, 0]]])
def test_scores_outside_the_range_are_refused(bad):
    with pytest.raises(ValueError, match="expected"):
        statistics.mean_interval(bad)


def pair(a_only, b_only, both, neither):
    a = np.repeat([1, 0, 1, 0], [a_only, b_only, both, neither])
    b = np.repeat([0, 1, 1, 0], [a_only, b_only, both, neither])
    return a, b


def test_paired_test_beside_scipy():
    a, b = pair(40, 22, 100, 38)
    found = statistics.paired_test(a, b)
    assert found.difference == pytest.approx(9.0)
    assert (found.a_only, found.b_only, found.n, found.method) == (40, 22, 200, "bootstrap")
    drawn = stats.bootstrap(((a - b).astype(float),), np.mean, n_resamples=9999, method="percentile", random_state=1)
    assert (found.low, found.high) == pytest.approx([100 * end for end in drawn.confidence_interval], abs=1.0)
    assert found.mcnemar_p == pytest.approx(stats.binomtest(40, 62).pvalue)
    assert found.p_value == pytest.approx(found.mcnemar_p, abs=0.02)
    swapped = statistics.paired_test(b, a)
    assert swapped.difference == -found.difference
    assert swapped.p_value == pytest.approx(found.p_value, abs=0.01)
    assert found == statistics.paired_test(a, b)


def test_paired_test_without_differences():
    """Equal answers to 100 questions leave a difference of some points open."""
    found = statistics.paired_test(*pair(0, 0, 60, 40))
    assert (found.difference, found.p_value, found.mcnemar_p, found.method) == (0, 1, 1, "exact")
    assert found.low == -found.high
    assert 3 < found.high < 6


def test_paired_test_where_all_differ_alike():
    """A bootstrap of 30 equal differences is a point; the interval must not be."""
    found = statistics.paired_test(*pair(30, 0, 0, 0))
    assert (found.difference, found.high, found.method) == (100, 100, "exact")
    assert 70 < found.low < 95
    assert found.p_value == pytest.approx(2**-29)


@pytest.mark.parametrize("a_only, b_only", [(1, 0), (5, 0), (6, 3), (0, 9)])
def test_few_differences_get_the_exact_p_value(a_only, b_only):
    found = statistics.paired_test(*pair(a_only, b_only, 50, 50))
    assert found.method == "exact"
    assert found.p_value == pytest.approx(found.mcnemar_p)
    assert found.low < found.difference < found.high


@pytest.mark.parametrize("n, share", [(100, 0.04), (100, 0.3), (400, 0.15)])
def test_paired_test_has_its_false_alarm_rate(n, share):
    """Equal variants: p <= 0.05 in at most 6.5 % (bootstrap) and 5 % (McNemar); the interval holds 0 in 93 %."""
    rng = np.random.default_rng(n)
    tables = rng.multinomial(n, [share / 2, share / 2, 1 - share], size=800)
    found = [
        statistics.paired_test(*pair(x, y, same, 0), resamples=1999, seed=i) for i, (x, y, same) in enumerate(tables)
    ]
    assert at_most(sum(one.p_value <= 0.05 for one in found), 800, 0.065)
    assert at_most(sum(one.mcnemar_p <= 0.05 for one in found), 800, 0.05)
    assert at_least(sum(one.low <= 0 <= one.high for one in found), 800, 0.93)


def test_paired_interval_covers_a_true_difference():
    rng = np.random.default_rng(5)
    tables = rng.multinomial(300, [0.12, 0.05, 0.83], size=800)
    found = [
        statistics.paired_test(*pair(x, y, same, 0), resamples=1999, seed=i) for i, (x, y, same) in enumerate(tables)
    ]
    assert at_least(sum(one.low <= 7 <= one.high for one in found), 800, 0.93)


def test_fractional_scores_are_paired_too():
    rng = np.random.default_rng(6)
    a = rng.integers(0, 4, 100) / 3
    b = np.clip(a - (rng.random(100) < 0.3) / 3, 0, 1)
    found = statistics.paired_test(a, b, seed=1)
    assert math.isnan(found.mcnemar_p)
    assert 0 < found.low < found.difference < found.high
    few = statistics.paired_test([1 / 3, 1, 1, 0.5], [0, 1, 1, 1])
    assert few.method == "exact"
    assert few.p_value == 1.0  # all four ways to flip the signs of 1/3 and -1/2 give a sum of at least 1/6
    assert few.low < few.difference < few.high


def test_paired_test_needs_the_same_questions():
    with pytest.raises(ValueError, match="same questions"):
        statistics.paired_test([1, 0], [1, 0, 1])


def test_holm():
    """The example of p.adjust in R: p.adjust(c(0.01, 0.02, 0.03, 0.04, 0.05), "holm")."""
    assert statistics.holm([0.01, 0.02, 0.03, 0.04, 0.05]) == pytest.approx([0.05, 0.08, 0.09, 0.09, 0.09])
    assert statistics.holm([0.9, 0.001, 0.8]) == pytest.approx([1.0, 0.003, 1.0])
    assert len(statistics.holm([])) == 0
    with pytest.raises(ValueError, match="0 to 1"):
        statistics.holm([0.5, math.nan])


def test_holm_keeps_the_family_wise_rate():
    """Four equal variants, six tests: any rejection at all in at most 6 % of 400 experiments."""
    rng = np.random.default_rng(7)
    alarms = 0
    for number in range(400):
        common = rng.random(120) < 0.5
        variants = {name: np.where(rng.random(120) < 0.7, common, rng.random(120) < 0.5) for name in "abcd"}
        found = statistics.pairwise(
            {name: one.astype(float) for name, one in variants.items()}, resamples=999, seed=number
        )
        alarms += min(row["p_holm"] for row in found) <= 0.05
    assert at_most(alarms, 400, 0.06)


def test_pairwise_lists_every_pair():
    a, b = pair(30, 10, 40, 20)
    found = statistics.pairwise({"x": a, "y": b, "z": a})
    assert [(row["a"], row["b"]) for row in found] == list(itertools.combinations("xyz", 2))
    assert found[0]["p_holm"] == pytest.approx(min(1, 3 * found[0]["p_value"]))
    assert found[0]["mcnemar_holm"] == pytest.approx(3 * found[0]["mcnemar_p"])
    assert statistics.pairwise({"x": a}) == []


@pytest.mark.parametrize("n, method", [(3, "Student's t"), (5, "Student's t"), (12, "bootstrap"), (40, "bootstrap")])
def test_speedup_interval_covers(n, method):
    """True ratio 1.2, log-normal machine state shared within a trial and thrice as large as a run's noise."""
    rng = np.random.default_rng(n)
    state = rng.normal(0, 0.03, (1000, n))
    slow, fast = (np.exp(state + rng.normal(0, 0.01, (1000, n)) + shift) for shift in (math.log(1.2), 0))
    found = [
        statistics.speedup_interval(x, y, resamples=999, seed=i)
        for i, (x, y) in enumerate(zip(slow, fast, strict=True))
    ]
    assert {one.method for one in found} == {method}
    assert at_least(sum(one.low <= 1.2 <= one.high for one in found), 1000, 0.93)
    assert at_most(sum(one.low <= 1.2 <= one.high for one in found), 1000, 0.97)


def test_speedup_is_the_inverse_when_exchanged():
    slow, fast = [2.0, 3.0, 5.0], [1.0, 2.0, 2.0]
    one, other = statistics.speedup_interval(slow, fast), statistics.speedup_interval(fast, slow)
    assert one.estimate == pytest.approx((2 * 1.5 * 2.5) ** (1 / 3))
    assert one.estimate * other.estimate == pytest.approx(1)
    assert one.low * other.high == pytest.approx(1)


def test_one_trial_has_no_interval():
    found = statistics.speedup_interval([2.0], [1.0])
    assert found.estimate == pytest.approx(2)
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    with pytest.raises(ValueError, match="same trials"):
        statistics.speedup_interval([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="positive"):
        statistics.speedup_interval([1.0, 0.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="finite"):
        statistics.trial_interval([])


def test_power_grows_with_questions_and_agreement():
    few, more = (statistics.power(n, 0.8, 0.7, 0.2, simulations=400) for n in (100, 400))
    assert few.high < more.low
    assert statistics.power(200, 0.8, 0.7, 0.32, simulations=400).high < statistics.power(200, 0.8, 0.7, 0.12).low
    assert few == statistics.power(100, 0.8, 0.7, 0.2, simulations=400)
    assert few.low < few.power < few.high


def test_power_without_a_difference_is_the_false_alarm_rate():
    found = statistics.power(300, 0.75, 0.75, simulations=2000)
    assert at_most(round(found.power * 2000), 2000, 0.06)
    assert statistics.power(300, 0.75, 0.75, simulations=2000, test="mcnemar").low <= 0.05


def test_power_of_mcnemar_beside_the_exact_sum():
    """Over all counts of the two kinds of differing questions: sums of the trinomial's probabilities."""
    n, only_a, only_b = 60, 0.25, 0.05
    total = sum(
        stats.multinomial.pmf([x, y, n - x - y], n, [only_a, only_b, 1 - only_a - only_b])
        for x in range(n + 1)
        for y in range(n + 1 - x)
        if statistics.mcnemar_exact(x, y) <= 0.05
    )
    found = statistics.power(n, 0.7, 0.5, only_a + only_b, test="mcnemar", simulations=2000)
    assert stats.binomtest(round(found.power * 2000), 2000, total).pvalue > RATE


def test_power_refuses_what_cannot_be():
    with pytest.raises(ValueError, match="allow"):
        statistics.power(100, 0.9, 0.5, 0.1)
    with pytest.raises(ValueError, match="bootstrap"):
        statistics.power(100, 0.9, 0.5, test="t")
    with pytest.raises(ValueError, match="accuracies"):
        statistics.power(100, 1.9, 0.5)
