"""The public call, `fmms.sample`: arguments in, one operator, a named result out.

The operator and the choice of implementation are in `fmms/op.py`, the checks in `fmms/arguments.py`, what is computed
in `fmms/reference.py` and `fmms/controls.py` and, fused, in `fmms/kernels/`.
"""

from typing import NamedTuple

import torch

from fmms import arguments
from fmms import op as _op  # registers torch.ops.fmms.sample
from fmms.noise import MAX_SAMPLES, group_count
from fmms.request import FILTER_ORDERS, FREQUENCY, LOGIT_BIAS, PRESENCE, REPETITION, Request, Results


class SampleOutput(NamedTuple):
    """Result of `fmms.sample` for H rows; what belongs to draws is [H], or [H, num_samples] if num_samples was given.
    None where it was not asked for. Rows that are not valid hold -1 and NaN; their logits are returned as they are.

    The processed logits are those after scale, softcap, bias, penalties and masks; greedy rows count as T = 1.
    """

    ids: torch.Tensor
    """int64, the drawn token ids."""
    logprobs: torch.Tensor | None
    """fp32 like ids: log-softmax of processed logits / T at the ids, before truncation."""
    lse: torch.Tensor
    """fp32 [H]: log-sum-exp of processed logits / T, the normaliser of `logprobs`; infinite where they exceed fp32."""
    max_logit: torch.Tensor
    """fp32 [H]: largest processed logit, before temperature."""
    valid: torch.Tensor
    """bool [H]: False where an unmasked logit is NaN or +inf, where no logit is finite (all tokens masked), or where a
    control in a tensor is out of its range."""
    logits: torch.Tensor | None
    """fp32 [H, V]: the processed logits, before temperature."""
    raw_logprobs: torch.Tensor | None
    """fp32 like ids: log-softmax at the ids of the model's own logits, after scale and softcap alone, at T = 1."""
    final_logprobs: torch.Tensor | None
    """fp32 like ids: log-probability in the distribution drawn from, after truncation."""
    entropy: torch.Tensor | None
    """fp32 [H], nats: entropy of softmax(processed logits / T), before truncation."""
    top_ids: torch.Tensor | None
    """int64 [H, top_logprobs]: the most likely tokens, the lowest id first on a tie."""
    top_logprobs: torch.Tensor | None
    """fp32 [H, top_logprobs]: their `logprobs`."""


def sample(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    *,
    top_k: int | torch.Tensor | None = None,
    top_p: float | torch.Tensor | None = None,
    min_p: float | torch.Tensor | None = None,
    filter_order: str = "top_k_first",
    seed: int | torch.Tensor | None = None,
    position: int | torch.Tensor = 0,
    num_samples: int | None = None,
    bias: torch.Tensor | None = None,
    logit_bias=None,
    repetition_penalty=None,
    frequency_penalty=None,
    presence_penalty=None,
    allowed_mask: torch.Tensor | None = None,
    banned_ids: torch.Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | None = None,
    vocab_size: int | None = None,
    return_logprobs: bool = False,
    return_raw_logprobs: bool = False,
    return_final_logprobs: bool = False,
    return_entropy: bool = False,
    return_logits: bool = False,
    top_logprobs: int = 0,
    noise_scheme: str = "group",
    noise=None,
    impl: str = "auto",
) -> SampleOutput:
    """Draws token ids from softmax(logits / temperature), truncated if asked for, exactly.

    The logits are `hidden @ weight.T`, times `logit_scale`, then `softcap * tanh(x / softcap)`, then plus `bias` and
    `logit_bias`, then the penalties (repetition, frequency, presence), then masked. Without truncation, penalties and
    `logit_bias` the Triton kernels never store the logits [H, V]. A draw is a function of its row's logits, controls,
    seed, position and sample index alone: each row gets what the same logits would get in a call of their own. (Another
    batch size can make the matmul round a logit differently, in fp32.)

    Args:
        hidden: [H, D], bfloat16, float16 or float32 (float32 is multiplied in IEEE fp32, never TF32).
        weight: [V, D] of the same dtype and device; any row stride, contiguous along D.
        temperature: number >= 0 or float tensor [H]; 0 takes the largest logit, the lowest id on a tie.
        top_k: keep the k largest logits, the lowest ids among equal ones; int or integer tensor [H]; None, 0, -1 and
            everything from V on keep all.
        top_p: keep the most likely tokens until their probability reaches p, at least one; number or float tensor [H]
            in [0, 1]; None and 1 keep all.
        min_p: keep tokens of at least min_p times the probability of the likeliest; number or float tensor [H] in
            [0, 1]; None and 0 keep all.
        filter_order: of which distribution top_p counts: "top_k_first" of what top-k left, "joint" of the whole one,
            "min_p_first" of what min-p and top-k left.
        seed: None, a fresh seed per row from PyTorch's generator of the device; an int, from which every row gets its
            own by SplitMix64; or an int64 tensor [H], used as it is and so independent of the batch slot.
        position: decode step, int or integer tensor [H]; another position is other noise.
        num_samples: independent draws per row; None returns ids [H], a number [H, num_samples].
        bias: [V], added to the logits of every row.
        logit_bias: triple (rows, tokens, values) of tensors [N]: values added to single logits.
        repetition_penalty, frequency_penalty, presence_penalty: triples likewise. A repetition value > 0 divides a
            positive logit and multiplies another; the other values are subtracted. Entries for the same logit add up
            (repetition: multiply); a row or token of -1 is padding. `fmms.history_edits` makes them of token ids.
        allowed_mask: int32 [H, ceil(V / 32)], bit i % 32 of word i // 32 allows token i; `fmms.pack_mask` makes it.
        banned_ids: integer [H], one token per row that is not drawn, -1 for none.
        softcap: bound of the tanh that Gemma puts on its logits.
        logit_scale: factor of the logits.
        vocab_size: rows of weight at or past it are padding and never drawn.
        return_logprobs, return_raw_logprobs, return_final_logprobs, return_entropy, return_logits: also return these.
        top_logprobs: how many of the most likely tokens to return, with their log-probabilities.
        noise_scheme: "group" (one Gumbel for 32 tokens) or "token" (one per token); docs/noise.md.
        noise: noise to use in place of the generator's, for tests: Gumbels [H, S, V] for "token", or a pair of
            Gumbels and uniforms, each [H, S, G] with G = 4 * ceil(V / 128), for "group"; int64 uniforms are the 64
            bits of x. Gumbels have to be finite and uniforms in [0, 1]; otherwise implementations may differ.
        impl: "auto", "triton" (GPU; on a CPU in Triton's interpreter) or "torch" (any device).

    Returns:
        A `SampleOutput`. Nothing in it carries a gradient.

    Raises:
        ValueError: an argument has the wrong type, shape, dtype, device or value; the message names it. What only a
            tensor's data can tell never raises; it makes `valid` False in the row it concerns.
    """
    arguments.check_problem(hidden, weight)
    rows, device = hidden.shape[0], hidden.device
    if vocab_size is not None:
        padded = weight.shape[0]
        weight = weight[: arguments.check_count("vocab_size", vocab_size, 1, padded)]
        if isinstance(bias, torch.Tensor) and bias.shape == (padded,):
            bias = bias[:vocab_size]
    vocab = weight.shape[0]
    controls = {}
    controls["temperature"], controls["temperature_value"] = arguments.check_temperature(temperature, rows, device)
    controls["top_k"], controls["top_k_value"] = arguments.check_top_k(top_k, rows, device)
    controls["top_p"], controls["top_p_value"] = arguments.check_share("top_p", top_p, rows, device, off=1.0)
    controls["min_p"], controls["min_p_value"] = arguments.check_share("min_p", min_p, rows, device, off=0.0)
    if filter_order not in FILTER_ORDERS:
        arguments.fail("filter_order", f"one of {', '.join(FILTER_ORDERS)}", filter_order)
    controls["positions"], controls["position_value"] = arguments.check_position(position, rows, device)
    samples = 1 if num_samples is None else arguments.check_count("num_samples", num_samples, 1, MAX_SAMPLES)
    if bias is not None:
        bias = arguments.check_bias(bias, vocab, device)
    edits = {
        LOGIT_BIAS: ("logit_bias", logit_bias),
        REPETITION: ("repetition_penalty", repetition_penalty),
        FREQUENCY: ("frequency_penalty", frequency_penalty),
        PRESENCE: ("presence_penalty", presence_penalty),
    }
    controls |= _merge_edits(edits, device)
    if allowed_mask is not None:
        allowed_mask = arguments.check_allowed_mask(allowed_mask, rows, vocab, device)
    if banned_ids is not None:
        banned_ids = arguments.check_banned_ids(banned_ids, rows, device)
    if noise_scheme not in ("group", "token"):
        arguments.fail("noise_scheme", "'group' or 'token'", noise_scheme)
    if impl not in _op.IMPLEMENTATIONS:
        arguments.fail("impl", f"one of {', '.join(_op.IMPLEMENTATIONS)}", impl)
    if noise is not None:
        units = vocab if noise_scheme == "token" else group_count(vocab)
        injected = arguments.check_noise(noise, noise_scheme, (rows, samples, units), device)
        controls["gumbels"], controls["uniforms"] = injected
    request = Request(
        hidden,
        weight,
        filter_order=filter_order,
        samples=samples,
        scheme=noise_scheme,
        logit_scale=1.0 if logit_scale is None else arguments.check_fp32("logit_scale", logit_scale),
        softcap=0.0 if softcap is None else arguments.check_fp32("softcap", softcap, positive=True),
        bias=bias,
        allowed_mask=allowed_mask,
        banned_ids=banned_ids,
        want_logprobs=arguments.check_flag("return_logprobs", return_logprobs),
        want_raw_logprobs=arguments.check_flag("return_raw_logprobs", return_raw_logprobs),
        want_final_logprobs=arguments.check_flag("return_final_logprobs", return_final_logprobs),
        want_entropy=arguments.check_flag("return_entropy", return_entropy),
        want_logits=arguments.check_flag("return_logits", return_logits),
        top_logprobs=arguments.check_count("top_logprobs", top_logprobs, 0, vocab),
        **controls,
        # last, so that a refused call leaves PyTorch's generator where it was
        **dict(zip(("seeds", "seed_value"), arguments.check_seed(seed, rows, device), strict=True)),
    )

    with torch.no_grad():
        found = Results(*torch.ops.fmms.sample(*request, impl))

    def given(wanted: bool, value: torch.Tensor, per_draw: bool = False):
        return (value[:, 0] if per_draw and num_samples is None else value) if wanted else None

    return SampleOutput(
        ids=given(True, found.ids, per_draw=True),
        logprobs=given(return_logprobs, found.logprobs, per_draw=True),
        lse=found.lse,
        max_logit=found.max_logit,
        valid=found.valid,
        logits=given(return_logits, found.logits),
        raw_logprobs=given(return_raw_logprobs, found.raw_logprobs, per_draw=True),
        final_logprobs=given(return_final_logprobs, found.final_logprobs, per_draw=True),
        entropy=given(return_entropy, found.entropy),
        top_ids=given(top_logprobs > 0, found.top_ids),
        top_logprobs=given(top_logprobs > 0, found.top_logprobs),
    )


def _merge_edits(edits: dict, device) -> dict:
    """The fields of a `Request` that hold the sparse edits {kind: (name of the argument, triple or None)}."""
    triples = {
        kind: arguments.check_triple(name, triple, device)
        for kind, (name, triple) in edits.items()
        if triple is not None
    }
    if not triples:
        return {}
    rows, tokens, values = (torch.cat(parts) for parts in zip(*triples.values(), strict=True))
    kinds = torch.cat([torch.full_like(triple[0], kind) for kind, triple in triples.items()])
    return {"edit_rows": rows, "edit_tokens": tokens, "edit_values": values, "edit_kinds": kinds}
