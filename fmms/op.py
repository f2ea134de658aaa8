"""`torch.ops.fmms.sample`: the call as PyTorch's compiler sees it, one opaque operator with a fake.

Its arguments are a `fmms.request.Request` and the implementation, its results those of `Results`.
Registered with the low-level library interface: the operator has no autograd formula, and the convenience wrapper
would cost more host time per call than the launch itself. What was not asked for comes back empty, because an operator
returns tensors only.
"""

import importlib.util
from functools import cache

import torch

from fmms import reference
from fmms.kernels import launch_module
from fmms.request import Request, Results

IMPLEMENTATIONS = ("auto", "triton", "torch")

_TYPES = {
    torch.Tensor: "Tensor", torch.Tensor | None: "Tensor?", float: "float", int: "int", str: "str", bool: "bool",
}  # fmt: skip
_library = torch.library.Library("fmms", "FRAGMENT")
_library.define(
    f"sample({', '.join(f'{_TYPES[kind]} {name}' for name, kind in Request.__annotations__.items())}, str impl)"
    f" -> ({', '.join(f'Tensor {name}' for name in Results._fields)})",
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
def _sample(*arguments):
    request, impl = Request(*arguments[:-1]), arguments[-1]
    if request.rows == 0:
        return _results(request, None)
    if request.hidden.stride(1) != 1:
        request = request._replace(hidden=request.hidden.contiguous())
    if resolve(impl, request.device) == "triton":
        found = launch_module(request.device).sample(request)
    else:
        # a caller's autocast would turn the fp32 products into bf16 ones
        with torch.autocast(request.device.type, enabled=False):
            found = reference.sample(request)
    return _results(request, found)


@torch.library.register_fake("fmms::sample", lib=_library)
def _sample_fake(*arguments):
    return _results(Request(*arguments[:-1]), None)


def _results(request: Request, found: Results | None) -> tuple[torch.Tensor, ...]:
    """What was found; empty tensors for what was not asked for, uninitialised ones where nothing was found."""
    rows, vocab = request.rows, request.vocab
    shapes = {
        "ids": (True, request.samples, torch.int64),
        "logprobs": (request.want_logprobs, request.samples, torch.float32),
        "raw_logprobs": (request.want_raw_logprobs, request.samples, torch.float32),
        "final_logprobs": (request.want_final_logprobs, request.samples, torch.float32),
        "lse": (True, None, torch.float32),
        "max_logit": (True, None, torch.float32),
        "valid": (True, None, torch.bool),
        "entropy": (request.want_entropy, None, torch.float32),
        "top_ids": (request.top_logprobs > 0, request.top_logprobs, torch.int64),
        "top_logprobs": (request.top_logprobs > 0, request.top_logprobs, torch.float32),
        "logits": (request.want_logits, vocab, torch.float32),
    }
    given = []
    for name, (wanted, columns, dtype) in shapes.items():
        if wanted and found is not None:
            given.append(getattr(found, name))
        else:
            shape = (rows,) if columns is None else (rows, columns)
            given.append(request.hidden.new_empty(shape if wanted else (0,), dtype=dtype))
    return tuple(given)
