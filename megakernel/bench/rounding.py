"""What rounding can explain: another choice of experts, another token, a result past its bound.

Two right implementations in bf16 differ by the rounding of both, which grows with depth and with the weights: no fixed
bound tells it from a fault. The reference in fp32 (`Wide`) along the same path does: what is no further from it than
ROUNDING times what the reference in bf16 is, is rounding (`is_rounding`). A fault of the reference is in its fp32 run,
too, and makes the other look far; one of its bf16 only makes the other look near. So where the reference is what is
tested, neither may be further than ROUNDING times the other (`reference_run.compare`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from megakernel import reference
from megakernel.config import ModelConfig

ROUNDING = 2.0
"""How many times as far from fp32 as another implementation in bf16 one may be for its error to be rounding. They round
apart from each other, so either may come off better; it is the distances of whole vectors that are compared."""
ROUTER_ERROR = 0.05
"""Error of a router logit, over the largest one, that can explain a choice whatever fp32 says."""
LOGIT_ERROR = 0.05
"""Error of a logit, over the largest one, that can explain another token whatever fp32 says."""
NEAR_TIE = 0.1
"""Distance of the two largest logits under which another token is no surprise in bf16."""
TIE = 1e-6
"""Distance of two router logits that may have the same probability in fp32, whose exp is not the same everywhere."""

STATUSES = {
    "equal": "the reference's experts",
    "near-tie": "others, closer than the error of a router logit",
    "both errors": "others, closer than the errors of these two router logits together",
    "unexplained": "anything else",
}
"""Of a choice of experts, as `Choices.statuses` gives them."""


class Wide(Mapping):
    """Weights in fp32, each converted when it is read: all of them at once would be twice as large as the model."""

    def __init__(self, weights: Mapping[str, torch.Tensor]):
        self.weights = weights

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.weights[name].float()

    def __iter__(self):
        return iter(self.weights)

    def __len__(self):
        return len(self.weights)


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Products of fp32 matrices in fp32, without TF32, whatever was set before."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def times_as_far(found: torch.Tensor, other: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """How many times as far from fp32 as another implementation something is: fp64 [n], of rows [n, ...] each.

    1 where both are fp32's, inf where only the other is; a NaN stays one.
    """
    wide = wide.double().flatten(1)
    own, usual = ((each.double().flatten(1) - wide).norm(dim=-1) for each in (found, other))
    return torch.where((own == 0) & (usual == 0), 1.0, own / usual)


def is_rounding(found: torch.Tensor, other: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """Whether each row is at most ROUNDING times as far from fp32 as the other implementation's: bool [n]."""
    return times_as_far(found, other, wide) <= ROUNDING  # a NaN is not


# ------------------------------------------------------------------------------------------------------------- experts


@dataclass(frozen=True)
class Choices:
    """A layer's choices of experts at n positions beside those of the reference on the same path; tensors."""

    dropped: torch.Tensor
    """bool [n, n_routed_experts]: experts of the reference that were not chosen."""
    added: torch.Tensor
    """The same: experts that were chosen instead."""
    count: torch.Tensor
    """[n], how many experts differ."""
    margin: torch.Tensor
    """fp64 [n], distance of the reference's router logits between the likeliest dropped and the least likely added
    expert; -inf without any."""
    error: torch.Tensor
    """fp64 [n], largest error of a router logit."""
    both: torch.Tensor
    """fp64 [n], the errors of these two experts' logits together."""
    rounding: torch.Tensor
    """bool [n], whether the error can be rounding: at most ROUTER_ERROR of the largest router logit, or by fp32."""

    def statuses(self) -> list[str]:
        """One of STATUSES for each position.

        A choice is explained where the error can be rounding and the errors of the dropped and the added expert's
        logits together can bridge their margin: two logits can err in opposite directions. It is a "near-tie" if the
        margin is also below the largest error of one router logit, else "both errors".
        """
        # written so that a NaN explains nothing
        bridged = self.rounding & (self.margin <= self.both + TIE)
        near = self.margin < self.error
        rows = zip(self.count.tolist(), bridged.tolist(), near.tolist(), strict=True)
        return [
            "equal" if not count else "unexplained" if not explained else "near-tie" if close else "both errors"
            for count, explained, close in rows
        ]


def choices(
    config: ModelConfig, mine: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor, wide: torch.Tensor | None = None
) -> Choices:
    """Compares the experts that another implementation chose with those of the reference on the same path.

    Args:
        mine: the reference's router logits, fp32 [n, n_routed_experts].
        logits: the other's, of the same positions.
        ids: of its experts, int64 [n, k].
        wide: as `mine`, of the reference in fp32. Where it says that the other's logits are rounding (`is_rounding`), a
            larger error than ROUTER_ERROR is rounding, too.
    """
    own = torch.zeros_like(mine, dtype=torch.bool).scatter_(1, reference.route(mine, config)[0], True)
    other = torch.zeros_like(own).scatter_(1, ids, True)
    dropped, added = own & ~other, other & ~own
    exact = mine.double()
    wrong = (exact - logits.double()).abs()
    last, at = exact.masked_fill(~dropped, -torch.inf).max(-1)
    first, to = exact.masked_fill(~added, torch.inf).min(-1)
    # written so that a NaN is no rounding
    error = wrong.amax(-1)
    rounding = error <= ROUTER_ERROR * exact.abs().amax(-1)
    if wide is not None:
        rounding |= is_rounding(logits, mine, wide)
    # an expert that was chosen twice leaves fewer of the others than were dropped
    counts = dropped.sum(-1), added.sum(-1)
    return Choices(
        dropped,
        added,
        torch.maximum(*counts),
        last - first,
        error,
        (wrong.gather(1, at[:, None]) + wrong.gather(1, to[:, None]))[:, 0],
        rounding & (counts[0] == counts[1]),
    )


# -------------------------------------------------------------------------------------------------------------- tokens


@dataclass(frozen=True)
class Tokens:
    """Tokens of n positions beside the reference's logits on the same path; fp64 tensors [n]."""

    behind: torch.Tensor
    """How far the reference holds the token behind its own."""
    error: torch.Tensor
    """Largest difference of a logit."""
    largest: torch.Tensor
    """The reference's largest logit, by its absolute value."""
    both: torch.Tensor
    """The errors of the logits of these two tokens together. They always bridge `behind` where the token is the largest
    of its own logits, so whether that is rounding is for fp32 to say."""
    times: torch.Tensor | None = None
    """How many times as far from fp32 as the reference the logits are, if fp32 was asked."""
    own: torch.Tensor | None = None
    """The larger error of these two logits against fp32."""
    usual: torch.Tensor | None = None
    """The largest error of a logit of the reference against fp32."""

    def explained(self) -> torch.Tensor:
        """bool [n]: whether fp32 says that the logits are rounding, and if the token is another, that its two logits
        are, which a distance of whole vectors would not show, and that their errors bridge what it is behind."""
        # written so that a NaN explains nothing
        other = (self.behind <= self.both) & (self.own <= ROUNDING * self.usual)
        return (self.times <= ROUNDING) & ((self.behind == 0) | other)


def tokens(
    found: torch.Tensor, expected: torch.Tensor, chosen: torch.Tensor, wide: torch.Tensor | None = None
) -> Tokens:
    """Compares logits and tokens with the reference's on the same path.

    Args:
        found: logits [n, V] of another implementation.
        expected: of the reference.
        chosen: int64 [n], tokens of the other implementation.
        wide: as `expected`, of the reference in fp32.
    """
    found, expected = found.double(), expected.double()
    top, at = expected.max(-1)
    two = torch.stack((at, chosen), 1)
    wrong = (found - expected).abs()
    # one logit, where both are of the same token
    both = wrong.gather(1, two).sum(-1)
    given = {}
    if wide is not None:
        wide = wide.double()
        given["times"] = times_as_far(found, expected, wide)
        given["own"] = (found - wide).gather(1, two).abs().amax(-1)
        given["usual"] = (expected - wide).abs().amax(-1)
    behind = top - expected.gather(1, chosen[:, None])[:, 0]
    return Tokens(behind, wrong.amax(-1), expected.abs().amax(-1), both, **given)
