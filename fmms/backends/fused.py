"""`fmms.sample` with its Triton kernels and either noise scheme, log-probabilities included."""

import functools

import torch

from fmms.backends.registry import register
from fmms.kernels import launch_module
from fmms.sampling import sample


def _check(device: torch.device) -> str | None:
    try:
        launch_module(device)
    except (ValueError, ImportError) as error:
        return str(error)
    return None


def _draw(hidden, weight, temperature, seeds, scheme):
    # "auto" would take the plain PyTorch implementation for CPU tensors
    impl = "auto" if hidden.is_cuda else "triton"
    return sample(
        hidden, weight, temperature, seed=seeds, noise_scheme=scheme, return_logprobs=True, impl=impl
    ).ids  # fmt: skip


_ABOUT = "fmms.sample, {} noise, ids and log-probabilities; the logits are never stored"
for _name, _scheme in (("fmms", "group"), ("fmms-token", "token")):
    register(
        _name,
        functools.partial(_draw, scheme=_scheme),
        about=_ABOUT.format(_scheme),
        check=_check,
        seeded=True,
        graph=True,
        scheme=_scheme,
    )
