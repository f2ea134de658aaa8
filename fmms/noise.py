"""The random numbers of the package, defined once in plain integers and plain PyTorch.

Every implementation draws from this definition: the Triton kernels repeat it on the device (`fmms/kernels/epilogue.py`)
and must agree bit for bit in the integers. What is done with the numbers (the two noise schemes) is in
`fmms/reference.py`; docs/noise.md states both for a third implementation.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011) is a counter-based
generator: four words of noise are a pure function of a key and a counter, so a draw depends on who asks for it and
never on which thread, tile or GPU computes it.

    key     = (seed low word, seed high word)                      one 64-bit seed per row
    counter = (unit, sample | purpose << 24, position low, position high)
"""

import torch

NOISE_VERSION = 1
"""Names the definition below. It changes whenever the same arguments would draw a different token."""

PURPOSE_TOKEN, PURPOSE_GROUP = 0, 1
"""Counter purposes in use; 2 acceptance, 3 replacement and 4 draft are reserved for speculative verification."""

MAX_SAMPLES = 1 << 24
GROUP_SIZE = 32
BLOCK_SIZE = 128
GROUPS_PER_BLOCK = BLOCK_SIZE // GROUP_SIZE

_MASK32 = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85
_GOLDEN = 0x9E3779B97F4A7C15


def _signed(x: int) -> int:
    """The int64 with the same 64 bits as the unsigned integer `x` (torch multiplies int64 modulo 2**64)."""
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x


def philox4x32(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Philox4x32-10.

    Args:
        counter: four int64 tensors that hold 32-bit words (0 <= word < 2**32), of broadcastable shapes.
        key: two of the same kind.

    Returns:
        Four int64 tensors of the broadcast shape, each holding 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap modulo 2**64, so their bits are those of the unsigned product
        p0, p2 = c0 * _ROUND_A, c2 * _ROUND_B
        c0, c2 = ((p2 >> 32) & _MASK32) ^ c1 ^ k0, ((p0 >> 32) & _MASK32) ^ c3 ^ k1
        c1, c3 = p2 & _MASK32, p0 & _MASK32
        k0, k1 = (k0 + _WEYL_A) & _MASK32, (k1 + _WEYL_B) & _MASK32
    return c0, c1, c2, c3


def words(seeds: torch.Tensor, positions: torch.Tensor, units: torch.Tensor, samples: torch.Tensor, purpose: int):
    """The four Philox words of each (row, sample, unit).

    Args:
        seeds: int64 [H], one 64-bit key per row.
        positions: int64 [H], the decode step of each row.
        units: int64 [U], what is drawn for: a token id or a group.
        samples: int64 [S], indices of independent draws, below 2**24.
        purpose: PURPOSE_TOKEN or PURPOSE_GROUP.

    Returns:
        Four int64 tensors [H, S, U] of 32-bit words.
    """
    row = (slice(None), None, None)
    seeds, positions = seeds[row], positions[row]
    counter = (
        units[None, None, :],
        (samples | purpose << 24)[None, :, None],
        positions & _MASK32,
        (positions >> 32) & _MASK32,
    )
    return philox4x32(counter, (seeds & _MASK32, (seeds >> 32) & _MASK32))


def uniform(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """The fp64 uniform (x + 0.5) * 2**-64 of the 64-bit integer x = low + 2**32 * high; never 0, 1 only by rounding."""
    return ((high.double() * 2.0**32 + low.double()) + 0.5) * 2.0**-64


COARSE_BITS = 26
"""Bits of a uniform in its coarse part: times a 24-bit weight that product is exact in fp64."""


def uniform_parts(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The uniform (x + 0.5) * 2**-64, unrounded, as fp64 coarse + fine: the 26 leading bits of x, and the rest."""
    shift = 32 - COARSE_BITS
    coarse = (high >> shift).double() * 2.0**-COARSE_BITS
    fine = ((high & ((1 << shift) - 1)).double() * 2.0**32 + low.double() + 0.5) * 2.0**-64
    return coarse, fine


def split_uniform(uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same parts of an injected uniform: an fp64 or fp32 number in [0, 1], or int64 for the 64 bits of x."""
    if uniform.dtype == torch.int64:
        return uniform_parts(uniform & _MASK32, (uniform >> 32) & _MASK32)
    coarse = torch.floor(uniform.double() * 2.0**COARSE_BITS) * 2.0**-COARSE_BITS
    return coarse, uniform.double() - coarse


def gumbel(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """The standard Gumbel variate of a 64-bit word, in fp64: -log(-log1p(-u)) with u = (x + 0.5) * 2**-64.

    Small u give the large variates, and u has its full relative precision there: the winning tail reaches 45 nats.
    Above one half, 1 - u is taken from the complement of the bits, so that no variate is infinite.
    """
    upper = high >= 1 << 31
    complement = uniform(low ^ _MASK32, high ^ _MASK32)
    exponential = torch.where(upper, -torch.log(complement), -torch.log1p(-uniform(low, high)))
    return -torch.log(exponential)


def row_seeds(seed: int, rows: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """One 64-bit seed per row from a single integer: row r gets output r of SplitMix64 started at `seed`.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.

    Args:
        seed: any integer; its low 64 bits count.
        rows: number of rows.

    Returns:
        int64 [rows] on `device`.
    """
    z = torch.arange(1, rows + 1, device=device) * _signed(_GOLDEN) + _signed(seed)
    z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift_right(z, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of an int64 tensor."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def group_count(vocab_size: int) -> int:
    """Number of groups (including those whose members are all absent) that a vocabulary of this size spans."""
    return GROUPS_PER_BLOCK * -(-vocab_size // BLOCK_SIZE)


def group_token_ids(vocab_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The partition of the vocabulary into groups: token id of each member, ascending; int64 [G, 32].

    A group is fixed by global id: the ids of an aligned block of 128 with equal (id >> 1) & 3. On Hopper's matrix
    units those 32 logits of a row are the accumulators of a single thread. Ids at or past `vocab_size` are absent.
    """
    unit = torch.arange(group_count(vocab_size), device=device)[:, None]
    member = torch.arange(GROUP_SIZE, device=device)[None, :]
    block, lane = unit // GROUPS_PER_BLOCK, unit % GROUPS_PER_BLOCK
    return block * BLOCK_SIZE + (member >> 1) * 8 + lane * 2 + (member & 1)
