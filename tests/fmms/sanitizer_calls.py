"""Small calls through every path of the compiled kernels, for compute-sanitizer: `test_sanitizer.py` runs this file.

compute-sanitizer --tool racecheck python tests/fmms/sanitizer_calls.py bfloat16 group
"""

import sys

import torch

import fmms
from fmms import noise
from fmms.request import FILTER_ORDERS

SHAPES = ((1, 130, 64, 1), (17, 999, 40, 2), (64, 700, 128, 1), (130, 257, 33, 1))
"""Rows, vocabulary, width and samples of the calls without truncation."""
CUT_SHAPES = ((1, 130, 64, 2), (3, 999, 40, 1), (2, 4500, 33, 1))
"""Of those with it. 4,500 tokens are 144 groups, more than registers hold."""
RESULTS = dict(
    return_logprobs=True, return_raw_logprobs=True, return_final_logprobs=True, return_entropy=True,
    return_logits=True, top_logprobs=3,
)  # fmt: skip


def main(dtype: torch.dtype, scheme: str, device="cuda", shapes=SHAPES, cut_shapes=CUT_SHAPES) -> int:
    """Makes the calls and returns how many they were."""
    torch.manual_seed(0)
    calls = 0

    def problem(rows, vocab, width):
        hidden = torch.randn(rows, width, device=device).to(dtype)
        temperature = torch.rand(rows, device=device)
        temperature[0] = 0
        return hidden, torch.randn(vocab, width, device=device).to(dtype), temperature

    def call(vocab, samples, *arguments, **options):
        out = fmms.sample(*arguments, seed=1, num_samples=samples, noise_scheme=scheme, impl="triton", **options)
        assert out.valid.all() and (out.ids >= 0).all() and (out.ids < vocab).all()

    for rows, vocab, width, samples in shapes:
        arguments = problem(rows, vocab, width)
        units = vocab if scheme == "token" else noise.group_count(vocab)
        gumbels = torch.randn(rows, samples, units, device=device)
        uniforms = torch.rand(rows, samples, units, device=device, dtype=torch.float64)
        injected = gumbels if scheme == "token" else (gumbels, uniforms)
        everything = masks(rows, vocab, device) | RESULTS
        bias = {"bias": torch.randn(vocab, device=device).to(dtype), "softcap": 5.0}
        plain = {"return_logprobs": True}
        for options in (plain, plain | bias | {"return_logits": True, "noise": injected}, bias | everything):
            call(vocab, samples, *arguments, **options)
            calls += 1
        call(vocab, samples, *arguments, **(edits(rows, vocab, device) | masks(rows, vocab, device) | RESULTS))
        calls += 1
    for rows, vocab, width, samples in cut_shapes:
        hidden, weight, temperature = problem(rows, vocab, width)
        per_row = dict(
            top_k=torch.arange(rows, device=device) * 40 + 20, top_p=torch.full((rows,), 0.9, device=device),
            min_p=torch.full((rows,), 1e-3, device=device),
        )  # fmt: skip
        for order in FILTER_ORDERS:
            call(vocab, samples, hidden, weight, temperature, filter_order=order, **per_row)
            calls += 1
        flat = torch.zeros_like(hidden)  # every group is a candidate, and ties are counted
        for options in (dict(top_k=vocab - 30), dict(top_p=0.8)):
            call(vocab, samples, flat, weight, 1.0, **options)
            calls += 1
        everything = masks(rows, vocab, device) | edits(rows, vocab, device) | RESULTS
        call(vocab, samples, hidden, weight, temperature, **per_row, **everything)
        calls += 1
    return calls


def masks(rows, vocab, device) -> dict:
    """A mask that hides a third of the tokens, and a banned token in every second row."""
    allowed = torch.arange(rows * vocab, device=device).view(rows, vocab) % 3 > 0
    banned = torch.where(torch.arange(rows, device=device) % 2 > 0, vocab - 1, -1)
    return dict(allowed_mask=fmms.pack_mask(allowed), banned_ids=banned)


def edits(rows, vocab, device) -> dict:
    """Penalties on a history, and a logit bias with repetitions and padding."""
    history = torch.randint(-1, vocab, (rows, 20), device=device)
    index = torch.randint(-1, rows, (90,), device=device), torch.randint(-1, min(vocab, 40), (90,), device=device)
    bias = {"logit_bias": (*index, torch.randn(90, device=device))}
    return bias | fmms.history_edits(history, None, 1.2, 0.5, 0.25)


if __name__ == "__main__":
    print(f"{main(getattr(torch, sys.argv[1]), sys.argv[2])} calls returned valid ids")
