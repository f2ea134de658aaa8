"""The reference, checked in fp64 against what it does not use: softmax, exact probabilities, closed forms."""

import pytest
import torch

from fmms import noise, reference, testing


def exact_group_draw_probabilities(logits):
    """Probability of each token under the group scheme by its own factorisation, P(group) * P(token | group), fp64."""
    ids = noise.group_token_ids(len(logits))
    padded = torch.cat([logits, torch.full((ids.numel() - len(logits),), -torch.inf, dtype=torch.float64)])
    members = padded[ids]
    group = torch.softmax(torch.logsumexp(members, -1), -1)
    inside = torch.softmax(members, -1).nan_to_num()
    return torch.zeros(ids.numel(), dtype=torch.float64).index_add_(
        0, ids.flatten(), (group[:, None] * inside).flatten()
    )


def test_group_scheme_factorises_softmax():
    logits = 3 * torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = exact_group_draw_probabilities(logits)[:1000]
    torch.testing.assert_close(got, torch.softmax(logits, -1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("scheme", ["group", "token"])
def test_draws_follow_softmax(scheme):
    """Chi-square over the whole vocabulary, 20,000 draws at a temperature; false-alarm rate 1e-6."""
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(1, 300, generator=generator)
    temperature = torch.tensor([0.7])
    ids = reference.sample_from_logits(
        logits, temperature, torch.tensor([5]), torch.tensor([0]), samples=20_000, scheme=scheme
    )[0]
    probabilities = torch.softmax(logits[0].double() / 0.7, -1)
    assert testing.chi_square(testing.draws_histogram(ids, 300), probabilities) > 1e-6


@pytest.mark.parametrize("scheme, vocab, depth, draws", [("group", 50_000, 14.0, 3_000), ("token", 5_000, 11.0, 1_500)])
def test_heavy_tail(scheme, vocab, depth, draws):
    """Tokens far below one peak, together a few percent, are drawn as often as they should be (false alarms 1e-6)."""
    logits = torch.full((1, vocab), -depth)
    logits[0, 1234] = 0.0
    tail = 1 - torch.softmax(logits[0].double(), -1)[1234].item()
    hits = 0
    for position in range(draws // 100):
        ids = reference.sample_from_logits(
            logits, torch.ones(1), torch.tensor([9]), torch.tensor([position]), samples=100, scheme=scheme
        )[0]
        hits += int((ids != 1234).sum())
    assert testing.binomial_tail(hits, draws, tail) > 1e-6


def test_logprobs_lse_and_max_logit_in_closed_form():
    generator = torch.Generator().manual_seed(2)
    logits = 4 * torch.randn(6, 500, generator=generator)
    temperature = torch.tensor([0.0, 0.5, 1.0, 2.0, 1e-3, 1.0])
    ids, logprobs, lse, max_logit, valid = reference.sample_from_logits(
        logits, temperature, noise.row_seeds(0, 6), torch.zeros(6, dtype=torch.int64)
    )
    t = torch.where(temperature == 0, 1.0, temperature).double()[:, None]
    want = torch.log_softmax(logits.double() / t, -1).gather(1, ids)
    torch.testing.assert_close(logprobs.double(), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), torch.logsumexp(logits.double() / t, -1), rtol=1e-6, atol=1e-6)
    assert torch.equal(max_logit, logits.amax(-1)) and valid.all()
    assert ids[0, 0] == logits[0].argmax()


def test_descent_is_inversion_of_a_uniform():
    """Averaged over a fine grid of uniforms, each member is chosen as often as its weight says."""
    weights = torch.rand(20, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) ** 4
    grid = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    parts = (part.expand(20, len(grid)) for part in noise.split_uniform(grid))
    chosen = reference.descend(weights[:, None, :].expand(20, len(grid), 32), *parts)
    share = torch.nn.functional.one_hot(chosen, 32).double().mean(1)
    assert (share - weights / weights.sum(-1, keepdim=True)).abs().max() < 32 / 20_000


def test_first_argmax_takes_the_lowest_index():
    x = torch.tensor([[1.0, 3.0, 3.0], [-torch.inf] * 3, [2.0, 2.0, 2.0]])
    assert reference.first_argmax(x).tolist() == [1, 0, 0]


def test_fp32_product_ignores_reduced_precision_switches():
    a, b = torch.full((1, 2), 1.0 + 2.0**-20), torch.ones(2, 1)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert reference.ieee_matmul(a, b).item() == 2 * (1.0 + 2.0**-20)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("scheme", ["group", "token"])
def test_chunks_of_rows_and_draws_do_not_change_the_result(monkeypatch, scheme):
    hidden, weight = testing.integer_problem(7, 100, 8)
    units = 100 if scheme == "token" else 4
    gumbels, uniforms = torch.randn(7, 9, units), torch.rand(7, 9, units)
    for injected in (None, (gumbels, uniforms if scheme == "group" else None)):
        arguments = (hidden, weight, torch.ones(7), noise.row_seeds(1, 7), torch.arange(7), 9, scheme, injected)
        whole = reference.sample(*arguments, 1.0, 0.0, None)
        for size in (300, 30, 1):
            monkeypatch.setattr(reference, "CHUNK_ELEMENTS", size)
            for a, b in zip(whole, reference.sample(*arguments, 1.0, 0.0, None), strict=True):
                assert torch.equal(a, b)
        monkeypatch.undo()
