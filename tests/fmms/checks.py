"""What a user relies on, as functions that raise AssertionError: the tests run them on the kernels as they are, and
`test_faults.py` runs them on kernels with a planted fault, where each must fail."""

import math

import torch

import fmms
from fmms import kernels, noise, reference, testing
from fmms.request import Request

ROUNDING_NATS = 2e-5
"""Stated bound on what fp32 transcendentals add to a decision, for exact logits of size up to about 30."""


def run_tiles(hidden, weight, temperature, seeds, positions, tiles=None, samples=1, scheme="group"):
    """Portable kernel with tile sizes of the caller's choice; returns ids [H, S]."""
    request = Request(
        hidden, weight, temperature=temperature, seeds=seeds, positions=positions, samples=samples, scheme=scheme
    )
    return kernels.launch_module(hidden.device).sample(request, tiles).ids


def tiles_of(block_h, block_v, block_d, vocab_on_m=False):
    from fmms.kernels.launch import Tiles

    return Tiles(block_h, block_v, block_d, vocab_on_m, num_warps=4, num_stages=2)


def check_equals_reference(device, rows, vocab, width, scheme, samples=1, dtype=torch.float32, temperatures=(1.0,)):
    """Ids equal the reference's on exact logits, but for draws whose margin lies under the rounding bound; those are
    as rare as the bound says."""
    hidden, weight = testing.integer_problem(rows, vocab, width, dtype, device, generator_seed=rows + vocab)
    temperature = torch.tensor([temperatures[r % len(temperatures)] for r in range(rows)], device=device)
    seeds = noise.row_seeds(vocab, rows, device)
    positions = torch.arange(rows, device=device) * 3 + (1 << 33)
    options = dict(seed=seeds, position=positions, num_samples=samples, noise_scheme=scheme, return_logprobs=True)
    with testing.poisoned_memory():
        got = fmms.sample(hidden, weight, temperature, impl="triton", return_logits=True, **options)
    want = fmms.sample(hidden, weight, temperature, impl="torch", return_logits=True, **options)
    assert torch.equal(got.logits, want.logits)
    assert got.valid.all()
    assert ((got.ids >= 0) & (got.ids < vocab)).all()
    differs = got.ids != want.ids
    margin = testing.decision_margin(want.logits, temperature, seeds, positions, samples, scheme)
    scale = torch.where(temperature == 0, 1.0, temperature)[:, None]
    bound = ROUNDING_NATS * torch.ones_like(scale)
    assert not (differs & (margin > bound)).any(), f"unexplained draws at margins {margin[differs].tolist()}"
    assert differs.sum() <= 2 + 20 * ROUNDING_NATS * differs.numel()
    same = ~differs
    torch.testing.assert_close(got.logprobs[same], want.logprobs[same], rtol=2e-6, atol=5e-6)
    torch.testing.assert_close(got.lse, want.lse, rtol=2e-6, atol=5e-6)
    assert torch.equal(got.max_logit, want.max_logit)


def check_tile_invariance(device, scheme="group"):
    """The same ids for every tile size and either operand order."""
    rows, vocab, width = 5, 900, 32
    hidden, weight = testing.integer_problem(rows, vocab, width, device=device)
    temperature = torch.tensor([1.0, 0.3, 0.0, 2.0, 1.0], device=device)
    seeds, positions = noise.row_seeds(1, rows, device), torch.full((rows,), 9, device=device)
    shapes = [(16, 128, 16, False), (16, 256, 32, True), (32, 512, 32, False)]
    results = [run_tiles(hidden, weight, temperature, seeds, positions, tiles_of(*s), 4, scheme) for s in shapes]
    for other in results[1:]:
        assert torch.equal(results[0], other)


def check_ragged_tail(device):
    """A vocabulary that ends inside a tile: ids past it are never drawn, though every real logit is far below 0."""
    for vocab in (1, 17, 130, 999):
        hidden = torch.ones(64, 16, device=device)
        weight = torch.full((vocab, 16), -4.0, device=device)
        ids = fmms.sample(hidden, weight, seed=3, impl="triton").ids
        assert ((ids >= 0) & (ids < vocab)).all()
        assert (fmms.sample(hidden, weight, 0.0, seed=3, impl="triton").ids == 0).all()


# (seed, scheme): at position 0 the Gumbel of unit 1 lies above 17.4, the largest that a 24-bit uniform can give
EXTREME_SEEDS = {"group": (45018184, 80195911), "token": (28125412, 93126281)}


def check_winning_tail(device, scheme="group"):
    """A token far below the peak wins where the noise says so: the tail of the Gumbel is resolved past 17.4 nats."""
    for seed in EXTREME_SEEDS[scheme]:
        seeds, positions = torch.tensor([seed], device=device), torch.zeros(1, dtype=torch.int64, device=device)
        vocab = 128 if scheme == "group" else 2
        gumbels, _ = reference.make_noise(scheme, seeds, positions, 1, vocab)
        peak, tail = gumbels[0, 0, 0].item(), gumbels[0, 0, 1].item()
        assert tail > 17.6
        # the tail token is ahead of the peak by 0.1, and behind it if its Gumbel is cut off at 17.4
        weight = torch.full((vocab, 1), -math.inf, device=device)
        weight[0], weight[2 if scheme == "group" else 1] = 0.0, -(tail - peak - 0.1)
        hidden = torch.ones(1, 1, device=device)
        assert fmms.sample(hidden, weight, seed=seeds, noise_scheme=scheme, impl="triton").ids.item() in (1, 2)
        weight[2 if scheme == "group" else 1] -= 0.2
        assert fmms.sample(hidden, weight, seed=seeds, noise_scheme=scheme, impl="triton").ids.item() == 0


def check_interval_widths(device):
    """Every token's interval inside its group has the width of its probability within 1e-3, down to 30 nats."""
    found, wanted = testing.interval_widths(testing.hard_groups(), impl="triton", device=device)
    error = (found / wanted - 1).abs().max().item()
    assert error < 1e-3, f"an interval's width is off by {error:.2e}"


def check_rows_independent(device):
    """Rows and steps of one call do not repeat each other's noise."""

    def sampler(hidden, weight, temperature, seeds, positions):
        # the integer form of the seed: rows get theirs on the device
        return fmms.sample(hidden, weight, temperature, seed=11, position=positions, impl="triton").ids

    testing.check_independence(sampler, pairs=2048, device=device)
