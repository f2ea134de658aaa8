"""What rounding explains, by hand: distances from fp32, choices of experts, tokens."""

import dataclasses
import math

import pytest
import torch

from megakernel import reference
from megakernel.bench import rounding
from megakernel.config import TINY

SMALL = dataclasses.replace(TINY, n_routed_experts=4, num_experts_per_tok=2)
PLAIN = [9.0, 5.0, 4.9, 0.0]


def test_distances_from_fp32():
    wide = torch.zeros(4, 2)
    found = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0], [math.nan, 0.0]])
    other = torch.tensor([[0.0, 2.5], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    times = rounding.times_as_far(found, other, wide)
    assert times[:3].tolist() == [2, 1, math.inf] and times[3].isnan()
    assert rounding.is_rounding(found, other, wide).tolist() == [True, True, False, False]


def status(theirs, ids=None, wide=None):
    logits = torch.tensor([theirs])
    chosen = reference.route(logits, SMALL)[0] if ids is None else torch.tensor([ids])
    exact = None if wide is None else torch.tensor([wide])
    return rounding.choices(SMALL, torch.tensor([PLAIN]), logits, chosen, exact).statuses()[0]


@pytest.mark.parametrize(
    ("theirs", "ids", "wide", "expected"),
    [
        (PLAIN, [1, 0], None, "equal"),
        ([9.0, 4.8, 5.0, 0.0], None, None, "near-tie"),
        ([9.0, 4.94, 4.96, 0.0], None, None, "both errors"),
        (PLAIN, [0, 2], None, "unexplained"),  # not what its own logits say
        ([9.4, 5.0, 4.9, 0.0], [0, 2], None, "unexplained"),  # the error is that of another logit
        ([9.0, 4.8, 5.0, 0.0], [0, 0], None, "unexplained"),
        ([9.0, 4.8, 5.0, 0.0], [2, 2], None, "unexplained"),
        ([9.0, 4.5, 5.0, 0.0], None, None, "unexplained"),  # 5 % of 9 is 0.45
        ([9.0, 4.5, 5.0, 0.0], None, [9.0, 4.7, 4.9, 0.0], "near-tie"),
        ([9.0, 4.5, 5.0, 0.0], None, PLAIN, "unexplained"),
        ([9.0, math.nan, 5.0, 0.0], [0, 2], [9.0, 4.7, 4.9, 0.0], "unexplained"),
    ],
)
def test_choices_of_experts(theirs, ids, wide, expected):
    assert status(theirs, ids, wide) == expected


def test_positions_are_judged_each_by_itself():
    mine = torch.tensor([PLAIN, PLAIN, [9.0, 4.9, 5.0, 0.0]])
    theirs = torch.tensor([[9.0, 4.8, 5.0, 0.0], PLAIN, [9.0, 3.0, 5.0, 0.0]])
    found = rounding.choices(SMALL, mine, theirs, torch.tensor([[0, 2], [0, 1], [0, 1]]))
    assert found.statuses() == ["near-tie", "equal", "unexplained"]
    assert found.count.tolist() == [1, 0, 1]
    assert found.margin.tolist() == pytest.approx([0.1, -math.inf, 0.1], rel=1e-5)
    assert found.error.tolist() == pytest.approx([0.2, 0, 1.9], rel=1e-5)
    assert found.both.tolist()[0] == pytest.approx(0.3, rel=1e-5)


def logits(largest, other, seed):
    """500 logits: two large ones, noise for the others."""
    generator = torch.Generator().manual_seed(seed)
    base = 10 * torch.randn(500, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)
    base += torch.randn(500, generator=generator)
    base[:2] = torch.tensor([largest, other])
    return base[None]


WIDE = logits(50.0, 47.0, 1)


def judged(found, expected=None, token=1):
    expected = logits(52.0, 45.0, 2) if expected is None else expected
    return rounding.tokens(found, expected, torch.tensor([token]), WIDE)


def test_two_logits_that_err_in_opposite_directions():
    """The reference holds the token further behind than any logit differs, yet both are as close to fp32."""
    found = judged(logits(48.0, 48.5, 3))
    assert (found.behind.item(), found.error.item() < 7, found.both.item()) == (7, True, 7.5)
    assert found.own.item() == 2 and found.usual.item() >= 2 and found.times.item() == pytest.approx(1, abs=0.2)
    assert found.explained().item()


@pytest.mark.parametrize(
    ("found", "token"),
    [
        (logits(48.0, 90.0, 3), 1),  # one wrong logit, which hardly moves the distance of all
        (2 * logits(48.0, 48.5, 3), 1),
        (WIDE + 4 * (logits(48.5, 48.75, 3) - WIDE), 1),  # right in its two logits only
        (logits(48.0, math.nan, 3), 1),
        (logits(48.0, 48.5, 3), 7),  # not the largest of its logits
    ],
    ids=["one logit", "scaled", "far", "nan", "another"],
)
def test_what_is_no_rounding(found, token):
    assert not judged(found, token=token).explained().item()


def test_the_same_token_needs_rounding_only():
    assert judged(logits(52.0, 45.0, 3), token=0).explained().item()
    assert not judged(WIDE + 4 * (logits(52.0, 45.0, 3) - WIDE), token=0).explained().item()


def test_full_precision_is_local():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with rounding.full_precision():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
