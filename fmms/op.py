"""`torch.ops.fmms.sample`: the call as PyTorch's compiler sees it, one opaque operator with a fake.

Registered with the low-level library interface: the operator has no autograd formula, and the convenience wrapper
would cost more host time per call than the launch itself. What was not asked for comes back empty, because an operator
returns tensors only.
"""

import importlib.util
from functools import cache

import torch

from fmms import noise, reference
from fmms.kernels import launch_module

IMPLEMENTATIONS = ("auto", "triton", "torch")

_library = torch.library.Library("fmms", "FRAGMENT")
_library.define(
    "sample(Tensor hidden, Tensor weight, Tensor? temperature, float temperature_value, Tensor? seeds, int seed_value,"
    " Tensor? positions, int position_value, int samples, str scheme, Tensor? gumbels, Tensor? uniforms,"
    " float logit_scale, float softcap, Tensor? bias, bool want_logprobs, bool want_logits, str impl)"
    " -> (Tensor ids, Tensor logprobs, Tensor lse, Tensor max_logit, Tensor valid, Tensor logits)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def resolve(impl: str, device: torch.device) -> str:
    """The implementation that `auto` stands for: Triton's kernels on a GPU, PyTorch elsewhere."""
    if impl != "auto":
        return impl
    return "triton" if device.type == "cuda" and _triton_installed() else "torch"


@torch.library.impl(_library, "sample", "CompositeExplicitAutograd")
def _sample(
    hidden, weight, temperature, temperature_value, seeds, seed_value, positions, position_value, samples, scheme,
    gumbels, uniforms, logit_scale, softcap, bias, want_logprobs, want_logits, impl,
):  # fmt: skip
    rows, vocab, device = hidden.shape[0], weight.shape[0], hidden.device
    if rows == 0:
        return _empty_results(hidden, vocab, samples, want_logprobs, want_logits)
    if hidden.stride(1) != 1:
        hidden = hidden.contiguous()
    if resolve(impl, device) == "triton":
        ids, logprobs, lse, max_logit, valid, logits = launch_module(device).sample(
            hidden, weight, temperature, temperature_value, seeds, seed_value, positions, position_value,
            samples, scheme, gumbels, uniforms, logit_scale, softcap, bias, want_logprobs, want_logits,
        )  # fmt: skip
    else:
        if temperature is None:
            temperature = torch.full((rows,), temperature_value, dtype=torch.float32, device=device)
        if seeds is None:
            seeds = noise.row_seeds(seed_value, rows, device)
        if positions is None:
            positions = torch.full((rows,), position_value, dtype=torch.int64, device=device)
        injected = None if gumbels is None else (gumbels, uniforms)
        # a caller's autocast would turn the fp32 products into bf16 ones
        with torch.autocast(device.type, enabled=False):
            ids, logprobs, lse, max_logit, valid, logits = reference.sample(
                hidden, weight, temperature, seeds, positions, samples, scheme, injected, logit_scale, softcap, bias
            )
    if not want_logprobs:
        logprobs = hidden.new_empty((rows, 0), dtype=torch.float32)
    if not want_logits:
        logits = hidden.new_empty((rows, 0), dtype=torch.float32)
    return ids, logprobs, lse, max_logit, valid, logits


@torch.library.register_fake("fmms::sample", lib=_library)
def _sample_fake(
    hidden, weight, temperature, temperature_value, seeds, seed_value, positions, position_value, samples, scheme,
    gumbels, uniforms, logit_scale, softcap, bias, want_logprobs, want_logits, impl,
):  # fmt: skip
    return _empty_results(hidden, weight.shape[0], samples, want_logprobs, want_logits)


def _empty_results(hidden, vocab: int, samples: int, want_logprobs: bool, want_logits: bool):
    """Uninitialised results in the shapes and dtypes of the operator."""
    rows = hidden.shape[0]

    def empty(*shape, dtype=torch.float32):
        return hidden.new_empty(shape, dtype=dtype)

    return (
        empty(rows, samples, dtype=torch.int64),
        empty(rows, samples if want_logprobs else 0),
        empty(rows),
        empty(rows),
        empty(rows, dtype=torch.bool),
        empty(rows, vocab if want_logits else 0),
    )
