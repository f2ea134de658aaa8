"""Inputs for sampling kernels: logits known without rounding, offsets, awkward layouts, memory full of garbage."""

import contextlib

import numpy as np
import torch


def integer_problem(rows: int, vocab: int, width: int, dtype=torch.float32, device="cpu", generator_seed: int = 0):
    """hidden [H, D] and weight [V, D] of small multiples of a power of two: every order of summation gives the same
    fp32 logits, so implementations can be compared draw by draw. Logits have a standard deviation near 2."""
    generator = torch.Generator().manual_seed(generator_seed)
    step = 2.0 ** -round(0.5 * np.log2(width * 4.0))
    hidden = torch.randint(-2, 3, (rows, width), generator=generator) * step
    weight = torch.randint(-2, 3, (vocab, width), generator=generator) * 1.0
    return hidden.to(device, dtype), weight.to(device, dtype)


def known_logits(logits: torch.Tensor, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [H, H] and weight [V, H] whose product is exactly `logits`: row r of hidden is the unit vector r.

    Args:
        logits: [H, V], finite and representable in `dtype`.

    Raises:
        ValueError: a logit is not finite (0 * inf is NaN in the other rows) or changes when cast to `dtype`.
    """
    cast = logits.to(dtype)
    if not torch.isfinite(cast).all() or not torch.equal(cast.double(), logits.double()):
        raise ValueError(f"logits: expected finite values that {dtype} represents exactly")
    return torch.eye(logits.shape[0], dtype=dtype, device=logits.device), cast.T.contiguous()


def with_offset(hidden: torch.Tensor, weight: torch.Tensor, offset) -> tuple[torch.Tensor, torch.Tensor]:
    """The same problem with every logit of a row shifted by `offset`, through one more column; no draw may change.

    The last column of the new weight is 1 and that of the new hidden is the offset, so the entries of the old weight
    are untouched. In low precision choose an offset that the dtype represents and that leaves the logits exact.

    Args:
        hidden: [H, D]; weight: [V, D]; offset: number or [H].

    Returns:
        hidden [H, D + 1] and weight [V, D + 1].
    """
    column = torch.as_tensor(offset, dtype=hidden.dtype, device=hidden.device).expand(hidden.shape[0])[:, None]
    ones = torch.ones(weight.shape[0], 1, dtype=weight.dtype, device=weight.device)
    return torch.cat([hidden, column], 1), torch.cat([weight, ones], 1)


def pad_width(hidden: torch.Tensor, weight: torch.Tensor, to_bytes: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """The same problem with D padded by zeros until a row takes a multiple of `to_bytes` bytes (the rule of Hopper's
    tensor copy engine); the logits do not change."""
    elements = to_bytes // hidden.element_size()
    missing = -hidden.shape[1] % elements
    return tuple(torch.nn.functional.pad(x, (0, missing)) for x in (hidden, weight))


def strided_copy(x: torch.Tensor, extra: int, shift: int) -> torch.Tensor:
    """A copy of a matrix with `extra` NaN columns between rows and a base address `shift` elements off: a kernel that
    reads outside its rows, or assumes alignment, shows."""
    rows, width = x.shape
    memory = torch.full((rows * (width + extra) + shift,), torch.nan, dtype=x.dtype, device=x.device)
    view = memory[shift:].view(rows, width + extra)[:, :width]
    return view.copy_(x)


@contextlib.contextmanager
def poisoned_memory(byte: int = 0x7F):
    """Fills what `torch.empty` and its kin return with garbage: an element that a kernel forgets to write shows.

    The pattern is 0x7F in every byte: a NaN-like or huge float, a large integer, True.
    """
    originals = {name: getattr(torch, name) for name in ("empty", "empty_like", "empty_strided")}

    def poisoning(original):
        def allocate(*args, **kwargs):
            result = original(*args, **kwargs)
            if result.numel() and result.is_contiguous():
                result.view(-1).view(torch.uint8).fill_(byte)
            return result

        return allocate

    try:
        for name, original in originals.items():
            setattr(torch, name, poisoning(original))
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)
