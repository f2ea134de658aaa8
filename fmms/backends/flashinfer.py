"""FlashInfer's samplers on stored logits. Its kernels are compiled at their first call, which can take minutes."""

import inspect

import torch

from fmms.backends.registry import register

TOP_K, TOP_P = 50, 0.9
_INSTALL = "pip install flashinfer-python"


def _scaled(hidden, weight, temperature):
    return (hidden @ weight.T).float().div_(temperature[:, None])


def _build_from_logits(sample):
    takes_seed = "seed" in inspect.signature(sample).parameters

    def draw(hidden, weight, temperature, seeds):
        scaled = _scaled(hidden, weight, temperature)
        # By default it advances PyTorch's generator on the host, which a graph cannot hold: under capture the seed is
        # fixed, so replays repeat their noise. That changes no time.
        if takes_seed and scaled.is_cuda and torch.cuda.is_current_stream_capturing():
            return sample(scaled, seed=0, offset=0)
        return sample(scaled)

    return draw


def _top_k_top_p(hidden, weight, temperature, seeds, sample):
    return sample(_scaled(hidden, weight, temperature), TOP_K, TOP_P, filter_apply_order="top_k_first")


def _candidates(attribute: str) -> list[tuple[str, str]]:
    return [("flashinfer.sampling", attribute), ("flashinfer", attribute)]


register(
    "flashinfer-logits",
    build=_build_from_logits,
    requires={"sample": _candidates("sampling_from_logits")},
    install=_INSTALL,
    devices=("cuda",),
    about="logits stored, flashinfer.sampling.sampling_from_logits(logits / T)",
    graph=True,
)
register(
    "flashinfer-topk-topp",
    _top_k_top_p,
    requires={"sample": _candidates("top_k_top_p_sampling_from_logits")},
    install=_INSTALL,
    devices=("cuda",),
    about=f"logits stored, flashinfer.sampling.top_k_top_p_sampling_from_logits with k = {TOP_K}, then p = {TOP_P}",
    exact=False,
    top_k=TOP_K,
    top_p=TOP_P,
)
