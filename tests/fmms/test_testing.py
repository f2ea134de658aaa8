"""The helpers for testing samplers: right samplers pass, planted faults fail, inputs are what they say."""

import pytest
import torch

import fmms
from fmms import noise, reference, testing


def sampler_of(**options):
    def sampler(hidden, weight, temperature, seeds, positions):
        return fmms.sample(hidden, weight, temperature, seed=seeds, position=positions, impl="torch", **options).ids

    return sampler


@pytest.mark.parametrize("scheme", ["group", "token"])
def test_a_right_sampler_passes_every_check(scheme):
    sampler = sampler_of(noise_scheme=scheme)
    testing.check_invariance(sampler)
    testing.check_independence(sampler, pairs=1000)
    assert testing.check_distribution(sampler, torch.linspace(0, -6, 150), 3000) > 1e-6
    testing.check_heavy_tail(sampler, 2000, 10.0, 600)


def wrong_temperature(hidden, weight, temperature, seeds, positions):
    return sampler_of()(hidden, weight, 0.9 * temperature, seeds, positions)


def no_temperature(hidden, weight, temperature, seeds, positions):
    return sampler_of()(hidden, weight, torch.ones_like(temperature), seeds, positions)


def one_seed(hidden, weight, temperature, seeds, positions):
    return sampler_of()(hidden, weight, temperature, torch.full_like(seeds, 7), positions)


def seed_by_slot(hidden, weight, temperature, seeds, positions):
    return sampler_of()(hidden, weight, temperature, noise.row_seeds(1, len(seeds)), positions)


def frozen_position(hidden, weight, temperature, seeds, positions):
    return sampler_of()(hidden, weight, temperature, seeds, torch.zeros_like(positions))


def no_tail(hidden, weight, temperature, seeds, positions):
    logits = hidden @ weight.T
    cut = torch.where(logits > logits.amax(-1, keepdim=True) - 8, 0.0, -torch.inf)
    width = hidden.shape[1]
    parts = [
        sampler_of(bias=cut[r])(
            hidden[r : r + 1, :width], weight, temperature[r : r + 1], seeds[r : r + 1], positions[:1]
        )
        for r in range(len(hidden))
    ]
    return torch.cat(parts)


def rounded_logits(hidden, weight, temperature, seeds, positions):
    """Logits kept in bf16: an offset swallows their differences."""
    logits = (hidden @ weight.T).bfloat16().float()
    return sampler_of()(torch.eye(len(hidden)), logits.T.contiguous(), temperature, seeds, positions)


@pytest.mark.parametrize(
    "sampler, check",
    [
        (wrong_temperature, lambda s: testing.check_distribution(s, torch.linspace(0, -6, 150), 20_000)),
        (no_temperature, lambda s: testing.check_distribution(s, torch.linspace(0, -6, 150), 5000)),
        (no_temperature, testing.check_invariance),
        (no_tail, lambda s: testing.check_heavy_tail(s, 200, 9.0, 800)),
        (one_seed, testing.check_independence),
        (frozen_position, testing.check_independence),
        (seed_by_slot, testing.check_invariance),
        (rounded_logits, testing.check_invariance),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_wrong_sampler_fails_its_check(sampler, check):
    with pytest.raises(AssertionError):
        check(sampler)


@pytest.mark.parametrize("ids", [None, torch.zeros(5), torch.zeros(5, 1, dtype=torch.int64), 3])
def test_a_sampler_that_returns_no_ids_is_told_so(ids):
    with pytest.raises(TypeError, match="sampler: expected int64 ids"):
        testing.draw_many(lambda *arguments: ids, [0.0, 1.0], 5)


def test_known_logits_are_exact():
    logits = torch.randn(3, 40).bfloat16().float()
    for dtype in (torch.float32, torch.bfloat16):
        hidden, weight = testing.known_logits(logits, dtype)
        out = fmms.sample(hidden, weight, seed=0, return_logits=True)
        assert torch.equal(out.logits, logits)
    with pytest.raises(ValueError, match=r"^logits: expected finite"):
        testing.known_logits(torch.tensor([[1.0, -torch.inf]]))
    with pytest.raises(ValueError, match="represents exactly"):
        testing.known_logits(torch.tensor([[1.0 + 2.0**-20]]), torch.bfloat16)


def test_offset_padding_and_strides_leave_the_problem_alone():
    hidden, weight = testing.integer_problem(4, 60, 21, torch.bfloat16)
    logits = fmms.sample(hidden, weight, seed=0, return_logits=True).logits
    offset = torch.tensor([0.0, 8.0, -16.0, 64.0])
    shifted = fmms.sample(*testing.with_offset(hidden, weight, offset), seed=0, return_logits=True).logits
    assert torch.equal(shifted, logits + offset[:, None])
    padded = testing.pad_width(hidden, weight)
    assert padded[0].shape[1] == padded[1].shape[1] == 24
    assert torch.equal(fmms.sample(*padded, seed=0, return_logits=True).logits, logits)
    odd = testing.strided_copy(weight, 3, 1)
    assert odd.stride(0) == 24 and odd.data_ptr() % 4 == 2 and torch.equal(odd, weight)


def test_poisoned_memory_shows_an_element_that_was_not_written():
    with testing.poisoned_memory():
        values, flags = torch.empty(5), torch.empty(3, dtype=torch.bool)
    assert (values > 1e38).all() and flags.all()
    assert torch.empty is not None and not hasattr(torch.empty, "__wrapped__")


def test_chi_square_merges_the_tail_and_rejects_the_impossible():
    counts = [900, 80, 12, 5, 2, 1, 0, 0]
    probabilities = [0.9, 0.08, 0.012, 0.005, 0.002, 0.001, 0.0, 0.0]
    assert testing.chi_square(counts, probabilities) > 0.5
    assert testing.chi_square([*counts[:7], 1], probabilities) == 0.0
    assert testing.chi_square([10], [1.0]) == 1.0
    with pytest.raises(ValueError, match="expected the same"):
        testing.chi_square([1, 2], [1.0])
    with pytest.raises(ValueError, match=r"^ids: expected 0 to 3"):
        testing.draws_histogram(torch.tensor([0, 4]), 4)


def test_chi_square_p_values_are_uniform_under_the_null():
    """2,000 multinomial samples; KS test at 1e-4: Cochran's rule keeps the approximation that good."""
    probabilities = torch.softmax(torch.linspace(0, -5, 60, dtype=torch.float64), 0)
    generator = torch.Generator().manual_seed(0)
    draws = torch.multinomial(probabilities, 2000 * 1500, replacement=True, generator=generator).view(2000, 1500)
    p_values = [testing.chi_square(torch.bincount(d, minlength=60), probabilities, 10.0) for d in draws]
    assert testing.uniform_p_values(p_values) > 1e-4


def test_decision_margin_predicts_what_a_perturbation_can_change():
    """Draws with a margin above the size of a perturbation of the logits survive it."""
    hidden, weight = testing.integer_problem(400, 300, 24)
    seeds, positions = noise.row_seeds(0, 400), torch.zeros(400, dtype=torch.int64)
    temperature = torch.ones(400)
    for scheme in ("group", "token"):
        logits = hidden.double() @ weight.double().T
        margin = testing.decision_margin(logits, temperature, seeds, positions, 1, scheme)[:, 0]
        size = 0.02
        moved = logits + size * (2 * torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) - 1)
        before, after = (
            reference.sample_from_logits(x, temperature, seeds, positions, 1, scheme)[0][:, 0] for x in (logits, moved)
        )
        differs = before != after
        assert differs.any() and not (differs & (margin > size)).any()
