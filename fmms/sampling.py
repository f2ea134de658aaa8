"""The public call, `fmms.sample`: arguments in, one operator, a named result out.

The operator and the choice of implementation are in `fmms/op.py`, the checks in `fmms/arguments.py`, what is computed
in `fmms/reference.py` and, fused, in `fmms/kernels/`.
"""

from typing import NamedTuple

import torch

from fmms import arguments
from fmms import op as _op  # registers torch.ops.fmms.sample
from fmms.noise import MAX_SAMPLES, group_count


class SampleOutput(NamedTuple):
    """Result of `fmms.sample` for H rows; the draws are [H], or [H, num_samples] if num_samples was given."""

    ids: torch.Tensor
    """int64; -1 in rows that are not valid."""
    logprobs: torch.Tensor | None
    """fp32 of the shape of ids, if asked for: log-softmax of logits / T at the drawn ids (greedy rows: at T = 1)."""
    lse: torch.Tensor
    """fp32 [H]: log-sum-exp of logits / T, the normaliser of `logprobs`; infinite where logits / T exceed fp32."""
    max_logit: torch.Tensor
    """fp32 [H]: largest logit, before temperature."""
    valid: torch.Tensor
    """bool [H]: False where a logit is NaN or +inf, no logit is finite, or a temperature is negative or NaN."""
    logits: torch.Tensor | None
    """fp32 [H, V], if asked for: after scale, softcap and bias, before temperature."""


def sample(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    *,
    seed: int | torch.Tensor | None = None,
    position: int | torch.Tensor = 0,
    num_samples: int | None = None,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | None = None,
    vocab_size: int | None = None,
    return_logprobs: bool = False,
    return_logits: bool = False,
    noise_scheme: str = "group",
    noise=None,
    impl: str = "auto",
) -> SampleOutput:
    """Draws token ids from softmax(logits / temperature); the Triton kernels never store the logits [H, V].

    The logits are `hidden @ weight.T`, times `logit_scale`, then `softcap * tanh(x / softcap)`, then plus `bias`.
    A draw is a function of its row's logits, temperature, seed, position and sample index alone.

    Args:
        hidden: [H, D], bfloat16, float16 or float32 (float32 is multiplied in IEEE fp32, never TF32).
        weight: [V, D] of the same dtype and device; any row stride, contiguous along D.
        temperature: number >= 0 or float tensor [H]; 0 takes the largest logit, the lowest id on a tie.
        seed: None, a fresh seed per row from PyTorch's generator of the device; an int, from which every row gets its
            own by SplitMix64; or an int64 tensor [H], used as it is and so independent of the batch slot.
        position: decode step, int or integer tensor [H]; another position is other noise.
        num_samples: independent draws per row; None returns ids [H], a number [H, num_samples].
        bias: [V], added to the logits.
        softcap: bound of the tanh that Gemma puts on its logits.
        logit_scale: factor of the logits.
        vocab_size: rows of weight at or past it are padding and never drawn.
        return_logprobs, return_logits: also return these.
        noise_scheme: "group" (one Gumbel for 32 tokens) or "token" (one per token); docs/noise.md.
        noise: noise to use in place of the generator's, for tests: Gumbels [H, S, V] for "token", or a pair of
            Gumbels and uniforms, each [H, S, G] with G = 4 * ceil(V / 128), for "group"; int64 uniforms are the 64
            bits of x.
        impl: "auto", "triton" (GPU; on a CPU in Triton's interpreter) or "torch" (any device).

    Returns:
        A `SampleOutput`. Nothing in it carries a gradient.

    Raises:
        ValueError: an argument has the wrong type, shape, dtype, device or value; the message names it.
    """
    arguments.check_problem(hidden, weight)
    rows, device = hidden.shape[0], hidden.device
    if vocab_size is not None:
        padded = weight.shape[0]
        weight = weight[: arguments.check_count("vocab_size", vocab_size, 1, padded)]
        if bias is not None and bias.shape == (padded,):
            bias = bias[:vocab_size]
    vocab = weight.shape[0]
    temperatures, temperature_value = arguments.check_temperature(temperature, rows, device)
    positions, position_value = arguments.check_position(position, rows, device)
    samples = 1 if num_samples is None else arguments.check_count("num_samples", num_samples, 1, MAX_SAMPLES)
    if bias is not None:
        bias = arguments.check_bias(bias, vocab, device)
    softcap_value = 0.0 if softcap is None else arguments.check_fp32("softcap", softcap, positive=True)
    scale_value = 1.0 if logit_scale is None else arguments.check_fp32("logit_scale", logit_scale)
    if noise_scheme not in ("group", "token"):
        arguments.fail("noise_scheme", "'group' or 'token'", noise_scheme)
    if impl not in _op.IMPLEMENTATIONS:
        arguments.fail("impl", f"one of {', '.join(_op.IMPLEMENTATIONS)}", impl)
    gumbels = uniforms = None
    if noise is not None:
        units = vocab if noise_scheme == "token" else group_count(vocab)
        gumbels, uniforms = arguments.check_noise(noise, noise_scheme, (rows, samples, units), device)
    # last, so that a refused call leaves PyTorch's generator where it was
    seeds, seed_value = arguments.check_seed(seed, rows, device)

    with torch.no_grad():
        ids, logprobs, lse, max_logit, valid, logits = torch.ops.fmms.sample(
            hidden, weight, temperatures, temperature_value, seeds, seed_value, positions, position_value, samples,
            noise_scheme, gumbels, uniforms, scale_value, softcap_value, bias, return_logprobs, return_logits, impl,
        )  # fmt: skip
    if num_samples is None:
        ids = ids[:, 0]
        logprobs = logprobs[:, 0] if return_logprobs else None
    elif not return_logprobs:
        logprobs = None
    return SampleOutput(ids, logprobs, lse, max_logit, valid, logits if return_logits else None)
