"""Small calls through every path of the compiled kernels, for compute-sanitizer: `test_sanitizer.py` runs this file.

compute-sanitizer --tool racecheck python tests/fmms/sanitizer_calls.py bfloat16 group
"""

import sys

import torch

import fmms
from fmms import noise


def main(dtype: torch.dtype, scheme: str) -> None:
    torch.manual_seed(0)
    calls = 0
    for rows, vocab, width, samples in ((1, 130, 64, 1), (17, 999, 40, 2), (64, 700, 128, 1), (130, 257, 33, 1)):
        hidden = torch.randn(rows, width, device="cuda").to(dtype)
        weight = torch.randn(vocab, width, device="cuda").to(dtype)
        temperature = torch.rand(rows, device="cuda")
        temperature[0] = 0
        units = vocab if scheme == "token" else noise.group_count(vocab)
        gumbels = torch.randn(rows, samples, units, device="cuda")
        uniforms = torch.rand(rows, samples, units, device="cuda", dtype=torch.float64)
        bias = torch.randn(vocab, device="cuda").to(dtype)
        injected = gumbels if scheme == "token" else (gumbels, uniforms)
        for controls in ({}, {"bias": bias, "softcap": 5.0, "return_logits": True, "noise": injected}):
            out = fmms.sample(
                hidden, weight, temperature, seed=1, num_samples=samples, noise_scheme=scheme, return_logprobs=True,
                **controls,
            )  # fmt: skip
            assert out.valid.all() and (out.ids >= 0).all() and (out.ids < vocab).all()
            calls += 1
    print(f"{calls} calls returned valid ids")


if __name__ == "__main__":
    main(getattr(torch, sys.argv[1]), sys.argv[2])
