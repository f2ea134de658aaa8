"""What happens to logits between the LM head and the draw, in plain PyTorch: edits, masks, truncation.

These functions are the definition of every control; `fmms/reference.py` applies them in this order, and the kernels are
compared with it. fp64 decides wherever rounding could. They run on any device and never wait for it, so those of a
static shape can be captured in a CUDA graph. Masks have the layout of xgrammar's token bitmask.
"""

import math
import numbers
from typing import NamedTuple

import torch

from fmms import arguments
from fmms.request import FILTER_ORDERS, FREQUENCY, LOGIT_BIAS, PRESENCE, REPETITION

MIN_SCALE, MAX_SCALE = 2.0**-126, 2.0**126
"""Bounds of a positive temperature: within them T and 1 / T are normal fp32 numbers. A smaller T samples evenly among
the largest logits, a larger one (infinity included) evenly among all tokens of finite logit."""


def divisors(temperature: torch.Tensor) -> torch.Tensor:
    """What the logits of each row are divided by: T within its bounds, 1 in greedy rows (T = 0).

    Args:
        temperature: fp32 [H].

    Returns:
        fp64 [H]; meaningless where the temperature is negative, NaN where it is NaN.
    """
    return torch.where(temperature == 0, 1.0, temperature).double().clamp(MIN_SCALE, MAX_SCALE)


def descending(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids in the order that truncation and top-n results follow: by logit, the lowest id first on a tie.

    Args:
        logits: [H, V], fp32 or fp64.

    Returns:
        The values [H, V] and int64 ids [H, V].
    """
    # + 0.0 makes one zero of the two, which a sort by bits would tell apart
    return torch.sort(logits + 0.0, dim=-1, descending=True, stable=True)


# ---------------------------------------------------------------------------------------------------- edits and masks


def apply_edits(logits, rows, tokens, values, kinds) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits after sparse edits, in fp64 and rounded to fp32 once.

    With B, F and P the sums of a logit's LOGIT_BIAS, FREQUENCY and PRESENCE values and r the product of its REPETITION
    values (1 if there are none), x becomes

        x1 = x + B;  x2 = x1 / r if x1 > 0 else x1 * r;  x3 = x2 - F - P

    which is the repetition penalty of Keskar et al., "CTRL" (2019), as Hugging Face and vLLM compute it, followed by
    the frequency and presence penalties of OpenAI's API. -inf stays -inf under every r. A logit without an edit keeps
    its bits.

    Args:
        logits: fp32 [H, V].
        rows, tokens: int64 [N], in any order. An entry whose row or token is -1 is padding, one whose row lies outside
            [0, H) is ignored too.
        values: fp32 [N].
        kinds: int64 [N], of `fmms.request`: LOGIT_BIAS, REPETITION, FREQUENCY or PRESENCE.

    Returns:
        fp32 [H, V], and bool [H], true where an edit makes the row invalid: its token lies outside [0, V), its kind is
        none of the four, or it is a REPETITION that is not positive and finite. Such an edit changes no logit.
    """
    height, vocab = logits.shape
    counted = (rows >= 0) & (rows < height) & (tokens != -1)
    penalty = kinds == REPETITION
    wrong = (tokens < 0) | (tokens >= vocab) | (kinds < LOGIT_BIAS) | (kinds > PRESENCE)
    wrong = wrong | (penalty & ~((values > 0) & torch.isfinite(values)))
    flags = torch.zeros(height + 1, dtype=torch.int32, device=logits.device)
    flags.index_add_(0, torch.where(counted & wrong, rows, height), torch.ones_like(rows, dtype=torch.int32))

    # one place past the logits takes what is padding, ignored or wrong
    key = torch.where(counted & ~wrong, rows * vocab + tokens, height * vocab)
    key, order = torch.sort(key, stable=True)
    value, kind = values.double()[order], kinds[order]
    first = torch.nn.functional.pad(key[1:] != key[:-1], (1, 0), value=True)
    # entries of one logit share a slot, where they are added or multiplied; each then writes the same result
    slot = (first[: len(key)].cumsum(0) - 1).clamp(min=0)

    def total(wanted):
        return torch.zeros_like(value).index_add_(0, slot, torch.where(kind == wanted, value, 0.0))[slot]

    factors = torch.where(kind == REPETITION, value, 1.0)
    r = torch.ones_like(value).scatter_reduce_(0, slot, factors, "prod")[slot]
    edited = torch.nn.functional.pad(logits.flatten(), (0, 1))
    x = edited[key].double() + total(LOGIT_BIAS)
    scaled = torch.where(x > 0, x / r, x * r)
    x = torch.where(x == -torch.inf, x, scaled)  # a product that underflows would make NaN of it
    x = x - total(FREQUENCY) - total(PRESENCE)
    edited[key] = x.float()
    return edited[:-1].view(height, vocab), flags[:height] > 0


def allowed_by_mask(mask: torch.Tensor, vocab: int) -> torch.Tensor:
    """The tokens that a packed mask allows: bit i % 32 of word i // 32 is token i (xgrammar's token bitmask).

    Args:
        mask: int32 [H, W], W at least ceil(vocab / 32); bits past the vocabulary are ignored.
        vocab: V.

    Returns:
        bool [H, V].
    """
    token = torch.arange(vocab, device=mask.device)
    return (mask[:, token // 32] >> (token % 32).int()) & 1 == 1


def pack_mask(allowed: torch.Tensor) -> torch.Tensor:
    """The packed mask of bool [H, V] in the layout of `allowed_by_mask`: int32 [H, ceil(V / 32)].

    Raises:
        ValueError: `allowed` is no bool tensor of two dimensions.
    """
    if not isinstance(allowed, torch.Tensor) or allowed.dtype != torch.bool or allowed.dim() != 2:
        arguments.fail("allowed", "a bool tensor [H, V], true where a token may be drawn", allowed)
    height, vocab = allowed.shape
    words = -(-vocab // 32)
    bits = torch.nn.functional.pad(allowed.to(torch.int64), (0, 32 * words - vocab)).view(height, words, 32)
    packed = (bits << torch.arange(32, device=allowed.device)).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def mask_logits(logits, allowed_mask=None, banned_ids=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits with -inf at every token that must not be drawn, whatever was there: a NaN under the mask is gone too.

    Args:
        logits: [H, V].
        allowed_mask: int32 [H, at least ceil(V / 32)] as `allowed_by_mask` reads it, or None.
        banned_ids: int64 [H], one token per row, -1 for none; or None.

    Returns:
        [H, V] of the same dtype, and bool [H], true where the banned id is neither -1 nor in [0, V).
    """
    height, vocab = logits.shape
    bad = torch.zeros(height, dtype=torch.bool, device=logits.device)
    if allowed_mask is not None:
        logits = logits.where(allowed_by_mask(allowed_mask, vocab), -torch.inf)
    if banned_ids is not None:
        bad = (banned_ids < -1) | (banned_ids >= vocab)
        banned = banned_ids[:, None] == torch.arange(vocab, device=logits.device)
        logits = logits.masked_fill(banned, -torch.inf)
    return logits, bad


# ----------------------------------------------------------------------------------------------------------- truncation


def _row_control(value, off: float, rows: int, device) -> torch.Tensor:
    """top_p or min_p as fp32 [H]; a scalar outside [0, 1] becomes NaN, which fp32 is sure to hold."""
    if isinstance(value, torch.Tensor):
        return value.to(torch.float32).expand(rows)
    value = off if value is None else value
    return torch.full((rows,), value if 0 <= value <= 1 else math.nan, dtype=torch.float32, device=device)


def _row_controls(logits, temperature, top_k, top_p, min_p):
    """The controls of each row: T fp64 [H], k int64 [H] in 1..V, p and min-p fp64 [H], usable bool [H]."""
    (rows, vocab), device = logits.shape, logits.device
    if not isinstance(temperature, torch.Tensor):
        limit = torch.finfo(torch.float32).max
        temperature = torch.full((rows,), min(temperature, limit), dtype=torch.float32, device=device)
    if not isinstance(top_k, torch.Tensor):
        top_k = torch.full((rows,), min(max(top_k or 0, -2), vocab), dtype=torch.int64, device=device)
    k = top_k.to(torch.int64).expand(rows)
    p, m = _row_control(top_p, 1.0, rows, device), _row_control(min_p, 0.0, rows, device)
    usable = (k >= -1) & (p >= 0) & (p <= 1) & (m >= 0) & (m <= 1)
    k = torch.where(k <= 0, vocab, k).clamp(max=vocab)
    return divisors(temperature.expand(rows)), k, p.double(), m.double(), usable


class Prefixes(NamedTuple):
    """How many tokens, in the order of `descending`, each filter keeps, and the masses that top-p compares."""

    values: torch.Tensor
    """fp64 [H, V], logits in that order."""
    ids: torch.Tensor
    """int64 [H, V], their tokens."""
    top_k: torch.Tensor
    """int64 [H]; V where the filter is off, as in the next two."""
    top_p: torch.Tensor
    min_p: torch.Tensor
    divisor: torch.Tensor
    """fp64 [H]: T (`divisors`)."""
    threshold: torch.Tensor
    """fp64 [H]: the logit from which min-p keeps; -inf where it is off."""
    cumulative: torch.Tensor
    """fp64 [H, V], cumulative weights."""
    mass: torch.Tensor
    """fp64 [H]: the weight M that top-p takes its share of."""
    wanted: torch.Tensor
    """fp64 [H]: that share, p * M."""
    usable: torch.Tensor
    """bool [H]: whether the row's controls are in their ranges."""


def prefixes(logits, temperature, top_k=None, top_p=None, min_p=None, filter_order: str = "top_k_first") -> Prefixes:
    """What each filter keeps by itself; arguments and errors as in `allowed_set`."""
    if filter_order not in FILTER_ORDERS:
        arguments.fail("filter_order", f"one of {', '.join(FILTER_ORDERS)}", filter_order)
    t, k, p, m, usable = _row_controls(logits, temperature, top_k, top_p, min_p)
    vocab = logits.shape[-1]
    values, ids = descending(logits.double())
    cumulative = torch.exp((values - values[:, :1]) / t[:, None]).cumsum(-1)
    threshold = values[:, 0] + t * torch.log(m)
    by_min_p = torch.where(m == 0, vocab, (values >= threshold[:, None]).sum(-1))
    base = {"top_k_first": k, "joint": torch.full_like(k, vocab), "min_p_first": torch.minimum(k, by_min_p)}
    mass = cumulative.gather(-1, (base[filter_order].clamp(min=1) - 1)[:, None])[:, 0]
    wanted = p * mass
    # the first prefix that is heavy enough; one token at least, also at p = 0
    by_top_p = (cumulative < wanted[:, None]).sum(-1).clamp(max=vocab - 1) + 1
    by_top_p = torch.where(p == 1, vocab, by_top_p)
    return Prefixes(values, ids, k, by_top_p, by_min_p, t, threshold, cumulative, mass, wanted, usable)


def allowed_set(logits, temperature, top_k=None, top_p=None, min_p=None, filter_order: str = "top_k_first"):
    """The tokens that top-k, top-p and min-p leave; the definition of this package.

    Tokens are ordered by (logit descending, id ascending), and every filter keeps a prefix of that order; a row is left
    with the shortest. Weights are w = exp((x - max) / T) in fp64; greedy rows have T = 1.

    - top-k keeps the first k tokens.
    - min-p keeps x >= max + T * log(min_p) (fp64), that is w >= min_p; 1 keeps all tokens that tie for the largest.
    - top-p keeps the shortest prefix, of one token at least, whose mass is at least p * M.

    `filter_order` says what the mass M is: "top_k_first", that of the k tokens top-k keeps (Hugging Face, vLLM);
    "joint", that of the whole row; "min_p_first", that of what both min-p and top-k keep.

    Args:
        logits: fp32 [H, V], processed, before temperature.
        temperature: fp32 [H], or a number.
        top_k: integer tensor [H], a number, or None; 0, -1 and everything from V on are off.
        top_p: float tensor [H], a number, or None; in [0, 1] and rounded to fp32; 1 is off.
        min_p: likewise; 0 is off.
        filter_order: as above.

    Returns:
        bool [H, V]. At least one token of each row, its largest logit of the lowest id; none in a row with a control
        outside its range or NaN. Unspecified in rows that hold a NaN or +inf or no finite logit.

    Raises:
        ValueError: unknown filter_order.
    """
    found = prefixes(logits, temperature, top_k, top_p, min_p, filter_order)
    count = torch.minimum(torch.minimum(found.top_k, found.top_p), found.min_p)
    count = torch.where(found.usable, count, 0)
    kept = torch.arange(logits.shape[-1], device=logits.device) < count[:, None]
    return torch.zeros_like(kept).scatter_(-1, found.ids, kept)


def filter_logits(logits, temperature, top_k=None, top_p=None, min_p=None, filter_order: str = "top_k_first"):
    """The logits with -inf outside `allowed_set`; arguments as there. Returns fp32 [H, V]."""
    allowed = allowed_set(logits, temperature, top_k, top_p, min_p, filter_order)
    return torch.where(allowed, logits, -torch.inf)


def single_softmax_filter(logits, temperature, top_k=None, top_p=None, min_p=None) -> torch.Tensor:
    """The usual form of truncation in PyTorch, all fp32: one sort, one softmax, thresholds, -inf scattered back.

    Something to compare with, and the "top_k_first" order of `allowed_set` wherever the rounding of fp32 does not
    decide: a token stays if it is among the first k, if the probability before it is under p (the probabilities being
    those of the first k) and if its own is at least min_p times the largest.

    Args:
        As in `allowed_set`.

    Returns:
        fp32 [H, V], the logits, -inf where a token is removed.
    """
    t, k, p, m, usable = _row_controls(logits, temperature, top_k, top_p, min_p)
    t, p, m = (x.float()[:, None] for x in (t, p, m))
    values, ids = descending(logits)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    keep = rank < k[:, None]
    # the maximum goes first: a small T would make infinities of the logits themselves
    probabilities = torch.softmax(((values - values[:, :1]) / t).where(keep, -torch.inf), -1)
    before = probabilities.cumsum(-1) - probabilities
    keep &= (before < p) | (p == 1) | (rank == 0)
    keep &= probabilities >= m * probabilities[:, :1]
    keep &= usable[:, None]
    return torch.full_like(logits, -torch.inf).scatter_(-1, ids, values.where(keep, -torch.inf))


# -------------------------------------------------------------------------------------------------------------- history


def history_edits(
    output_ids: torch.Tensor,
    prompt_ids: torch.Tensor | None = None,
    repetition_penalty: float | torch.Tensor = 1.0,
    frequency_penalty: float | torch.Tensor = 0.0,
    presence_penalty: float | torch.Tensor = 0.0,
) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Penalties on the tokens so far, as arguments of `fmms.sample`: `fmms.sample(..., **fmms.history_edits(...))`.

    As in vLLM: the repetition penalty meets each token of the prompt or the output once, the frequency penalty counts
    how often a token is in the output, the presence penalty asks whether it is. (Hugging Face's repetition penalty is
    the same.) Shapes depend on the shapes of the ids only, and nothing waits for the device, so the call can be part
    of a CUDA graph.

    Args:
        output_ids: int64 [H, L], what was generated; -1 anywhere is padding. Other ids outside the vocabulary make
            their row invalid in `fmms.sample`.
        prompt_ids: int64 [H, P] likewise, or None.
        repetition_penalty: positive number or fp32 tensor [H]; 1 is neutral.
        frequency_penalty, presence_penalty: finite number or fp32 tensor [H]; 0 is neutral.

    Returns:
        A dict of what is not neutral (a tensor never counts as neutral): under the name of the penalty a triple of
        rows int64 [N], tokens int64 [N] (-1: no edit) and values fp32 [N]. N is H * L; H * (P + L) for repetition.

    Raises:
        ValueError: an argument has the wrong type, shape, dtype, device or value; the message names it.
    """
    _check_ids("output_ids", output_ids)
    height, device = output_ids.shape[0], output_ids.device
    seen = output_ids
    if prompt_ids is not None:
        _check_ids("prompt_ids", prompt_ids)
        if prompt_ids.shape[0] != height or prompt_ids.device != device:
            arguments.fail("prompt_ids", f"{height} rows, as in output_ids, on {device}", prompt_ids)
        seen = torch.cat((prompt_ids, output_ids), 1)

    edits = {}
    for name, value, neutral, ids in (
        ("repetition_penalty", repetition_penalty, 1.0, seen),
        ("frequency_penalty", frequency_penalty, 0.0, output_ids),
        ("presence_penalty", presence_penalty, 0.0, output_ids),
    ):
        value = _check_penalty(name, value, height, device)
        if not isinstance(value, torch.Tensor):
            if value == neutral:
                continue
            value = torch.full((height,), value, dtype=torch.float32, device=device)
        # a frequency is the sum of one edit for each occurrence
        tokens = ids if name == "frequency_penalty" else _distinct(ids)
        rows = torch.arange(height, device=device)[:, None].expand_as(tokens)
        edits[name] = rows.flatten(), tokens.flatten(), value[:, None].expand(tokens.shape).flatten()
    return edits


def _distinct(ids: torch.Tensor) -> torch.Tensor:
    """The different ids of each row, in the shape of `ids`: sorted, with -1 in place of every repetition."""
    ids = ids.sort(-1).values
    repeated = torch.zeros_like(ids, dtype=torch.bool)
    repeated[:, 1:] = ids[:, 1:] == ids[:, :-1]
    return ids.masked_fill(repeated, -1)


def _check_ids(name: str, value) -> None:
    if not isinstance(value, torch.Tensor) or value.dim() != 2 or value.dtype != torch.int64:
        arguments.fail(name, "an int64 tensor of token ids with one row per sequence, padded with -1", value)


def _check_penalty(name: str, value, height: int, device) -> torch.Tensor | float:
    if isinstance(value, torch.Tensor):
        if value.shape != (height,) or value.dtype != torch.float32 or value.device != device:
            arguments.fail(name, f"a number, or a torch.float32 tensor of shape [{height}] on {device}", value)
        return value
    positive = name == "repetition_penalty"
    expected = f"a {'positive' if positive else 'finite'} number that fp32 holds, or a torch.float32 tensor [{height}]"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        arguments.fail(name, expected, value)
    limits = torch.finfo(torch.float32)
    if not (limits.tiny if positive else -limits.max) <= value <= limits.max:
        arguments.fail(name, expected, value)
    return float(value)
