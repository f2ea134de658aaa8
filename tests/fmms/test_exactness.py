"""The distribution of drawn ids, at small size, and tests of these tests: a planted bias must be caught.

Seeds are fixed, so the outcome is too. The false-alarm rate of each statistical check is 1e-6: with other seeds an
exact sampler would fail one of the checks below in about one of 20,000 runs. Planted faults must reach p < 1e-6.
Faults are planted in the torch implementation, whose functions can be replaced while it runs.
"""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("scipy")

import fmms
from fmms import noise, reference, testing
from fmms.bench import exactness, invariance

RATE = 1e-6
SCHEMES = exactness.SCHEMES


def assert_passed(*rows):
    exactness.require(rows)


def assert_caught(*rows):
    with pytest.raises(AssertionError, match="not exact"):
        exactness.require(rows)


# --- the samplers are exact ---


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("case", ["flat", "zipf", "peaked"])
def test_whole_vocabulary(scheme, case):
    logits = exactness.distributions(300)[case]
    check, bins = exactness.whole_vocabulary(logits, case, 30000, scheme, "torch")
    assert_passed(check)
    assert sum(row["tokens"] for row in bins) == 300
    assert math.isclose(sum(row["tokens"] * row["observed"] for row in bins), check["n"])
    assert math.isclose(sum(row["tokens"] * row["expected"] for row in bins), check["n"], rel_tol=1e-9)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_heavy_tail_narrow_vocabulary_and_neighbours_of_the_peak(scheme):
    draws = {"group": 20000, "token": 2000}[scheme]
    tail = exactness.heavy_tail(4095, draws, scheme, "torch")
    assert 35 < tail["expected"] < 45
    narrow, tokens = exactness.narrow_vocabulary(200000, scheme, "torch")
    assert narrow["observed"] == max(abs(row["ratio"] - 1) for row in tokens) < narrow["high"] < 0.1
    beside = exactness.beside_the_peak([5.0, 7.0], 10 * draws, scheme, "torch")
    assert_passed(tail, narrow, *beside)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", exactness.CONTROLS)
def test_truncated_masked_and_penalised_draws(scheme, kind):
    logits = exactness.distributions(300)["zipf"]
    check, bins = exactness.whole_vocabulary(logits, kind, 10000, scheme, "torch", kinds=[kind])
    assert_passed(check)
    assert check["outside"] == 0
    assert sum(row["tokens"] for row in bins) == check["kept"]
    assert (check["kept"] == 300) == (kind == "penalised")
    assert math.isclose(sum(row["tokens"] * row["observed"] for row in bins), check["n"])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_narrow_vocabulary_with_all_controls(scheme):
    check, tokens = exactness.narrow_vocabulary(100000, scheme, "torch", kinds=exactness.CONTROLS)
    assert_passed(check)
    assert check["outside"] == 0 and check["kept"] == len(tokens) < 16
    assert sum(row["probability"] for row in tokens) == pytest.approx(1)


def test_controlled_probabilities_are_those_of_the_sampler():
    logits = exactness.distributions(200)["zipf"]
    for kinds in ((), *((kind,) for kind in exactness.CONTROLS), exactness.CONTROLS):
        out = fmms.sample(
            torch.ones(2, 1), logits[:, None], seed=0, num_samples=50, return_final_logprobs=True, impl="torch",
            **exactness.control_arguments(kinds, 200, rows=2),
        )  # fmt: skip
        probability = torch.from_numpy(exactness.controlled_softmax(logits, kinds))
        torch.testing.assert_close(out.final_logprobs.double(), probability.log()[out.ids], rtol=0, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_p_values_are_uniform(scheme):
    check, rows = exactness.repeated_p_values(150, 500, scheme, "torch")
    assert len(rows) == 150
    assert_passed(check)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_draws_are_invariant_and_independent(scheme):
    rows = invariance.changed_ids(scheme, "torch") + invariance.independence(10000, scheme, "torch")
    assert len(rows) == 8
    assert_passed(*rows)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_kernels_at_small_size(device, scheme):
    pytest.importorskip("triton")
    device = str(device)
    check, _ = exactness.whole_vocabulary(
        exactness.distributions(200)["peaked"], "peaked", 2048, scheme, "triton", device
    )
    tail = exactness.heavy_tail(1023, 1024, scheme, "triton", device)
    narrow, _ = exactness.narrow_vocabulary(4096, scheme, "triton", device)
    logits, kinds = exactness.distributions(100)["zipf"], exactness.CONTROLS
    controlled, _ = exactness.whole_vocabulary(logits, "all", 64, scheme, "triton", device, kinds=kinds)
    assert_passed(check, tail, narrow, controlled, *invariance.independence(1024, scheme, "triton", device))
    assert_passed(*invariance.changed_ids(scheme, "triton", device, rows=4, vocab_size=700, samples=1, alone=2))


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_intervals_are_as_wide_as_the_probabilities(device, impl):
    if impl == "triton":
        pytest.importorskip("triton")
    check, tokens = exactness.interval_widths(impl, str(device))
    assert len(tokens) == check["n"] == testing.hard_groups().numel()
    assert_passed(check)


# --- planted faults are caught ---


def test_wrong_temperature_is_caught(monkeypatch):
    exact = fmms.sample
    monkeypatch.setattr(fmms, "sample", lambda h, w, **options: exact(h, w, 1.05, **options))
    logits = exactness.distributions(300)["zipf"]
    assert_caught(exactness.whole_vocabulary(logits, "zipf", 100000, "group", "torch")[0])
    assert_caught(exactness.narrow_vocabulary(300000, "group", "torch")[0])
    # 150 repetitions of 2000 draws: no single one need see it, their p-values do
    assert_caught(exactness.repeated_p_values(150, 2000, "group", "torch")[0])


def test_draws_of_removed_tokens_are_caught(monkeypatch):
    exact = fmms.sample
    monkeypatch.setattr(fmms, "sample", lambda *a, top_k=None, **options: exact(*a, **options))
    logits = exactness.distributions(300)["zipf"]
    check, _ = exactness.whole_vocabulary(logits, "truncated", 30000, "group", "torch", kinds=["truncated"])
    assert check["outside"] > 0
    assert_caught(check)


def test_forgotten_penalties_are_caught(monkeypatch):
    exact = fmms.sample
    monkeypatch.setattr(fmms, "sample", lambda *a, presence_penalty=None, **options: exact(*a, **options))
    assert_caught(exactness.narrow_vocabulary(100000, "group", "torch", kinds=exactness.CONTROLS)[0])


def coarse_noise(monkeypatch, bits):
    """Gumbels from uniforms of so few bits, as capped noise has them."""

    def make_noise(scheme, seeds, positions, samples, vocab_size):
        w = noise.words(seeds, positions, torch.arange(vocab_size), torch.tensor(samples), noise.PURPOSE_TOKEN)
        uniform = ((w[1] >> (32 - bits)) + 0.5) / 2**bits
        return -torch.log(-torch.log1p(-uniform)), None

    monkeypatch.setattr(reference, "make_noise", make_noise)


def test_capped_noise_is_caught_and_as_rare_as_computed(monkeypatch):
    coarse_noise(monkeypatch, 8)
    row = exactness.heavy_tail(500, 10000, "token", "torch", deepest=8.0)
    assert row["expected"] > 1000
    assert_caught(row)
    capped = exactness.capped_noise_probability(500, 8.0, bits=8)
    assert testing.binomial_tail(row["observed"], row["n"], capped) > RATE
    # the resolved noise of the real sampler is not that of 8 bits
    assert testing.binomial_tail(round(row["expected"]), row["n"], capped) < RATE
    # with bits enough, nothing is lost
    fine = exactness.capped_noise_probability(500, 8.0, bits=24)
    assert math.isclose(fine, row["expected"] / row["n"], rel_tol=1e-3)


def test_groups_that_share_noise_are_caught(monkeypatch):
    exact = reference.make_noise

    def make_noise(*args):
        gumbels, uniforms = exact(*args)
        gumbels[..., 1] = gumbels[..., 0]
        return gumbels, uniforms

    monkeypatch.setattr(reference, "make_noise", make_noise)
    assert_caught(exactness.narrow_vocabulary(50000, "group", "torch")[0])


def test_running_sum_in_the_group_is_caught(monkeypatch):
    def descend(weights, coarse, fine):
        edges = torch.cumsum(weights.float(), -1)
        return (edges <= ((coarse + fine) * edges[..., -1]).float()[..., None]).sum(-1).clamp(max=31)

    monkeypatch.setattr(reference, "descend", descend)
    width, wanted = testing.interval_widths(testing.hard_groups(), "torch")
    assert ((width / wanted - 1).abs() > exactness.WIDTH_BOUND).any()
    assert_caught(exactness.interval_widths("torch")[0])


def test_biased_neighbour_of_the_peak_is_caught(monkeypatch):
    exact = reference.descend
    # weights below 1/200 of the peak never win, as with sums of too few bits
    monkeypatch.setattr(reference, "descend", lambda w, *u: exact(torch.where(w < 5e-3, 0.0, w), *u))
    assert_caught(*exactness.beside_the_peak([6.0, 7.0], 100000, "group", "torch"))


def repeated_noise(monkeypatch, seeds_of):
    exact = reference.make_noise
    monkeypatch.setattr(reference, "make_noise", lambda scheme, s, p, n, v: exact(scheme, *seeds_of(s, p), n, v))


def test_repetitions_that_share_a_seed_are_caught(monkeypatch):
    repeated_noise(monkeypatch, lambda seeds, positions: (seeds * 0 + 3, positions))
    assert_caught(exactness.repeated_p_values(100, 500, "group", "torch")[0])


def test_noise_of_the_batch_slot_is_caught(monkeypatch):
    repeated_noise(monkeypatch, lambda seeds, positions: (torch.arange(len(seeds)), positions))
    rows = invariance.changed_ids("group", "torch")
    changed = {row["case"]: row["observed"] for row in rows}
    assert changed["batch slot: rows permuted"] and changed["batch size: a row alone"]
    assert_caught(*rows)


@pytest.mark.parametrize(
    "case, seeds_of",
    [
        ("consecutive steps", lambda seeds, positions: (seeds, positions * 0)),
        ("neighbouring rows", lambda seeds, positions: (seeds[torch.arange(len(seeds)) // 2 * 2], positions)),
        ("consecutive seeds", lambda seeds, positions: (seeds >> 1 << 1, positions)),
    ],
)
def test_repeated_noise_is_caught(monkeypatch, case, seeds_of):
    repeated_noise(monkeypatch, seeds_of)
    failed = [row["case"] for row in invariance.independence(2000, "group", "torch") if not row["passed"]]
    assert case in failed


# --- statistics and bookkeeping ---


def test_binomial_interval_covers_and_excludes():
    low, high = testing.binomial_interval([0, 10, 100], 100)
    assert low[0] == 0.0 and high[2] == 1.0
    # known values: 0 of n ends at 1 - (alpha/2)**(1/n); 10 of 100 from Clopper and Pearson's method
    assert math.isclose(high[0], 1 - 0.025**0.01, rel_tol=1e-9)
    assert low[1] == pytest.approx(0.0490, abs=5e-5) and high[1] == pytest.approx(0.1762, abs=5e-5)
    counts = np.random.default_rng(0).binomial(1000, 0.003, 20000)
    low, high = testing.binomial_interval(counts, 1000)
    assert ((low <= 0.003) & (high >= 0.003)).mean() > 0.95
    assert ((low <= 0.01) & (high >= 0.01)).mean() < 0.5


def test_ecdf_band_covers_and_excludes():
    generator = np.random.default_rng(0)

    def outside(values):
        ordered = np.sort(values, 1)
        steps = np.arange(1, 101) / 100
        return np.maximum(np.abs(ordered - steps), np.abs(ordered - steps + 0.01)).max(1) > testing.ecdf_band(100)

    values = generator.random((2000, 100))
    assert outside(values).mean() < 0.05
    assert outside(values**2).mean() > 0.9


def test_group_intervals_tile_the_unit_interval():
    for logits in testing.hard_groups():
        start, length = testing.group_intervals(logits)
        order = torch.argsort(start)
        assert torch.allclose(start[order][1:], (start + length)[order][:-1], rtol=0, atol=1e-12)
        assert torch.allclose(length, torch.softmax(logits.double(), 0), rtol=1e-12)


def test_two_experiments_never_share_seeds():
    seeds = {exactness.experiment_seed(1, name, scheme) for name in "abc" for scheme in SCHEMES}
    assert len(seeds) == 6 and exactness.experiment_seed(2, "a", "group") not in seeds


def test_failures_are_told_in_words():
    good = exactness.check_row("tail", "deep", "group", "torch", 100, 0.5, RATE)
    bad = exactness.check_row("tail", "deep", "token", "torch", 100, 1e-9, RATE)
    wrong = exactness.exact_row("ids that change", "slot", "group", "torch", 64, 3, 0)
    exactness.require([good])
    with pytest.raises(AssertionError) as error:
        exactness.require([good, bad, wrong])
    text = str(error.value)
    assert "2 of 3 checks" in text and "p = 1e-09 over n = 100" in text and "3 where at most 0" in text
    assert "1 of 3 checks passed" in exactness.summary([good, bad, wrong]) and "2e-06" in exactness.summary([good, bad])
    nan = exactness.check_row("tail", "deep", "group", "torch", 100, math.nan, RATE)
    assert not nan["passed"]


def test_invalid_rows_are_an_error():
    with pytest.raises(RuntimeError, match="not valid"):
        exactness.histogram([math.nan, 0.0], 10, "group", "torch")
