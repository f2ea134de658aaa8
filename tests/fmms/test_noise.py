"""The definition of the noise: published known answers, golden draws, the partition into groups."""

import math

import pytest
import torch

import fmms
from fmms import noise, testing


def hex_words(*words):
    return tuple(torch.tensor([w]) for w in words)


@pytest.mark.parametrize(
    "counter, key, answer",
    [  # Random123's kat_vectors for philox4x32, 10 rounds
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, answer):
    assert tuple(int(w) for w in noise.philox4x32(hex_words(*counter), hex_words(*key))) == answer


def test_splitmix64_known_answers():
    want = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [int(s) % 2**64 for s in noise.row_seeds(1234567, 5)] == want


def test_counter_holds_unit_sample_purpose_and_position():
    seeds, positions = torch.tensor([(7 << 32) | 5]), torch.tensor([(3 << 32) | 9])
    got = noise.words(seeds, positions, torch.tensor([11]), torch.tensor([2]), noise.PURPOSE_GROUP)
    want = noise.philox4x32(hex_words(11, 2 | 1 << 24, 9, 3), hex_words(5, 7))
    assert [int(w) for w in got] == [int(w) for w in want]


def test_uniforms_and_gumbels_are_finite_at_both_ends():
    ends = hex_words(0, 0), hex_words(2**32 - 1, 2**32 - 1)
    for low, high in ends:
        assert 0 < noise.uniform(low, high).item() <= 1
        assert math.isfinite(noise.gumbel(low, high).item())
    assert noise.gumbel(*ends[0]).item() == pytest.approx(65 * math.log(2), rel=1e-12)  # u = 2**-65
    assert noise.gumbel(*ends[1]).item() == pytest.approx(-math.log(65 * math.log(2)), rel=1e-12)


def test_gumbel_quantiles():
    """P(g < x) = exp(-exp(-x)); a p-value of a KS test over 10**5 words, false-alarm rate 1e-6."""
    zeros = torch.zeros(100, dtype=torch.int64)
    words = noise.words(torch.arange(100), zeros, torch.arange(1000), zeros[:1], noise.PURPOSE_TOKEN)
    g = noise.gumbel(words[0], words[1]).flatten()
    assert testing.uniform_p_values(torch.exp(-torch.exp(-g)).numpy()) > 1e-6
    u = noise.uniform(words[2], words[3]).flatten()
    assert testing.uniform_p_values(u.numpy()) > 1e-6


@pytest.mark.parametrize("vocab", [1, 31, 128, 129, 1000])
def test_groups_partition_the_vocabulary(vocab):
    ids = noise.group_token_ids(vocab)
    assert ids.shape == (noise.group_count(vocab), 32)
    assert torch.equal(ids.flatten().sort().values, torch.arange(ids.numel()))
    assert (ids.diff(dim=1) > 0).all()
    assert ids.numel() - vocab < 128
    unit = 4 * (ids // 128) + ((ids >> 1) & 3)
    assert torch.equal(unit, torch.arange(len(ids))[:, None].expand_as(ids))


GOLDEN_IDS = {
    "group": [34, 885, 342, 819, 320, 88, 712, 123, 479, 448, 438, 381],
    "token": [573, 64, 907, 454, 317, 891, 0, 310, 852, 165, 663, 391],
}


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("scheme", ["group", "token"])
def test_golden_draws(device, scheme, impl):
    """What NOISE_VERSION 1 draws. If this fails, the definition changed: raise NOISE_VERSION and say so."""
    hidden, weight = testing.integer_problem(4, 1000, 32, generator_seed=42)
    seeds = torch.tensor([0, 1, -1, 2**62])
    positions = torch.tensor([0, 1, 2**31, 2**40])
    if impl == "triton":
        hidden, weight, seeds, positions = (x.to(device) for x in (hidden, weight, seeds, positions))
    ids = fmms.sample(
        hidden, weight, 0.8, seed=seeds, position=positions, num_samples=3, noise_scheme=scheme, impl=impl
    ).ids
    assert fmms.NOISE_VERSION == 1
    assert ids.flatten().tolist() == GOLDEN_IDS[scheme]
