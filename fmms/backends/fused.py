"""`fmms.sample` with its Triton kernels: either noise scheme, or truncated; log-probabilities included."""

import functools

import torch

from fmms.backends.registry import register
from fmms.kernels import launch_module
from fmms.sampling import sample

TOP_K, TOP_P = 50, 0.9


def _check(device: torch.device) -> str | None:
    try:
        launch_module(device)
    except (ValueError, ImportError) as error:
        return str(error)
    return None


@functools.lru_cache(maxsize=256)
def _per_row(name: str, value: float, rows: int, device: torch.device) -> torch.Tensor:
    """A control in every row. Kept, as those of a server are: filling it is no part of the call."""
    return torch.full((rows,), value, dtype=torch.int32 if name == "top_k" else torch.float32, device=device)


def fused_ids(hidden, weight, temperature, seeds, scheme: str = "group", **controls):
    """Ids [H] of `fmms.sample` by its kernels, which work out the log-probabilities as well. The numbers top_k, top_p
    and min_p among `controls` go to it in a tensor [H], as a server passes them."""
    rows = {name: _per_row(name, value, hidden.shape[0], hidden.device) for name, value in controls.items()}
    # "auto" would take the plain PyTorch implementation for CPU tensors
    impl = "auto" if hidden.is_cuda else "triton"
    return sample(
        hidden, weight, temperature, seed=seeds, noise_scheme=scheme, return_logprobs=True, impl=impl, **rows
    ).ids  # fmt: skip


_ABOUT = "fmms.sample, {} noise, ids and log-probabilities; the logits are never stored"
for _name, _scheme in (("fmms", "group"), ("fmms-token", "token")):
    register(
        _name,
        functools.partial(fused_ids, scheme=_scheme),
        about=_ABOUT.format(_scheme),
        check=_check,
        seeded=True,
        graph=True,
        scheme=_scheme,
    )
register(
    "fmms-topk-topp",
    functools.partial(fused_ids, top_k=TOP_K, top_p=TOP_P),
    about=f"fmms.sample with k = {TOP_K}, then p = {TOP_P} per row, ids and log-probabilities; the logits are stored",
    check=_check,
    exact=False,
    seeded=True,
    graph=True,
    scheme="group",
    top_k=TOP_K,
    top_p=TOP_P,
)
