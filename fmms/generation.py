"""Decoding a Hugging Face causal language model with the fused head.

`generate` runs the model's backbone with its key-value cache and hands each last hidden state to `fmms.sample`, so on
a GPU the logits of a step are not written out unless a control needs them. The head itself is described and checked in
`fmms.lm_head`, arguments and GenerationConfig become controls in `fmms.generation_settings`; loading models and turning
text into token ids is left to transformers and `fmms.models`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fmms import arguments, generation_settings
from fmms.generation_settings import StepControls
from fmms.lm_head import Backbone, LMHead, find_lm_head, verify_lm_head
from fmms.noise import row_seeds
from fmms.sampling import sample

# On a GPU, asking whether every sequence has ended stops the host until the step is done, so it is asked rarely; the
# superfluous tokens are cut off afterwards.
_STEPS_PER_STOP_CHECK = 16

# Room for new tokens is made for this many at first and doubled when it is full.
_FIRST_ROOM = 128

# Fed to the model after the end of a sequence: unlike the pad token, an id that every vocabulary has.
_FILLER = 0

# Tables of learned positions, by the names that transformers' models give them.
_POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings", "positions_embed")

# What is kept of each step, by its name in the results, and what stands in place of it after the end of a sequence.
_AFTER_THE_END = {
    "logprobs": 0.0,
    "raw_logprobs": 0.0,
    "final_logprobs": 0.0,
    "entropy": 0.0,
    "top_ids": -1,
    "top_logprobs": 0.0,
}


@dataclasses.dataclass(frozen=True)
class GenerateStep:
    """What one decoding step drew, on the CPU.

    Attributes:
        step: index of the new token, from 0.
        ids: int64 `[B]`; the pad token for sequences that ended before this step.
        logprobs: float32 `[B]`, 0 for those; None unless asked for.
        finished: bool `[B]`, including those that end with this token.
    """

    step: int
    ids: torch.Tensor
    logprobs: torch.Tensor | None
    finished: torch.Tensor


@dataclasses.dataclass(frozen=True)
class GenerateOutput:
    """Token sequences, on the device of `input_ids`. n is the length of the longest continuation.

    After the end of a sequence floats are 0, so that a row of `logprobs` sums to that of the whole continuation. The
    results other than tokens are None unless asked for, and mean what they mean in `fmms.SampleOutput`.

    Attributes:
        sequences: int64 `[B, P + n]`: the prompts as given, then `new_tokens`.
        new_tokens: int64 `[B, n]`, the pad token after the end of a sequence.
        logprobs: float32 `[B, n]`, the log-probability of each new token at its temperature (at temperature 1 for
            greedy prompts), after biases, penalties and masks, before truncation.
        lengths: int64 `[B]`: new tokens of each sequence, the end-of-sequence token included.
        valid: bool `[B]`: False where the logits became NaN or +inf, where every token was banned, or where a control
            in a tensor was out of its range; that sequence ends before the token it spoilt.
        raw_logprobs: float32 `[B, n]`, in the model's own distribution at temperature 1; a bias of the head counts as a
            logit bias, so it isn't part of that.
        final_logprobs: float32 `[B, n]`, in the distribution drawn from, after truncation.
        entropy: float32 `[B, n]`, nats, of the distribution of `logprobs`.
        top_ids: int64 `[B, n, top_logprobs]`: the most likely tokens of each step; -1 after the end of a sequence.
        top_logprobs: float32 `[B, n, top_logprobs]`: their `logprobs`.
    """

    sequences: torch.Tensor
    new_tokens: torch.Tensor
    logprobs: torch.Tensor | None
    lengths: torch.Tensor
    valid: torch.Tensor
    raw_logprobs: torch.Tensor | None = None
    final_logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None


def generate(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    max_new_tokens: int = generation_settings.DEFAULT_NEW_TOKENS,
    min_new_tokens: int = generation_settings.NO_MINIMUM,
    temperature: float | torch.Tensor = generation_settings.DEFAULT_TEMPERATURE,
    top_k: int | torch.Tensor | None = generation_settings.NO_FILTER,
    top_p: float | torch.Tensor | None = generation_settings.NO_FILTER,
    min_p: float | torch.Tensor | None = generation_settings.NO_FILTER,
    filter_order: str = "top_k_first",
    repetition_penalty: float | torch.Tensor = generation_settings.NO_REPETITION_PENALTY,
    frequency_penalty: float | torch.Tensor = 0.0,
    presence_penalty: float | torch.Tensor = 0.0,
    logit_bias: Mapping[int, float] | torch.Tensor | None = None,
    allowed_mask: torch.Tensor | Callable[[int, torch.Tensor], torch.Tensor | None] | None = None,
    seed: int | torch.Tensor | None = None,
    eos_token_id: int | Sequence[int] | str | None = generation_settings.FROM_MODEL,
    pad_token_id: int | str | None = generation_settings.FROM_MODEL,
    generation_config: Any = None,
    noise_scheme: str = "group",
    impl: str = "auto",
    return_logprobs: bool = False,
    return_raw_logprobs: bool = False,
    return_final_logprobs: bool = False,
    return_entropy: bool = False,
    top_logprobs: int = 0,
    callback: Callable[[GenerateStep], bool | None] | None = None,
    head: LMHead | None = None,
) -> GenerateOutput:
    """Continue prompts with a transformers causal language model, sampling by `fmms.sample`.

    At temperature 0 the tokens are those of `model.generate(do_sample=False)`, except that transformers rounds logits
    to the model's dtype first, which in bfloat16 makes ties of tokens that differ. The first call for a model compares
    its head, as described by `fmms.lm_head.find_lm_head`, with the model's own logits.

    Without `generation_config`, only the end-of-sequence and pad tokens are taken from the model's generation_config;
    a repetition penalty, top_p with do_sample or another setting that would change the result is not applied, and
    warned of. A setting counts as overridden where its argument isn't the default.

    A prompt gets the same noise alone and in a batch, whatever its padding, when `seed` is a tensor: noise depends on
    the prompt's seed and the index of the new token only. So it gets the same tokens, under the same controls.

    Args:
        model: decoder-only causal language model from transformers, in eval mode.
        input_ids: integer `[B, P]`, P >= 1, on the device of the model's embeddings.
        attention_mask: bool or integer `[B, P]`, 0 at padding, which must be on the left; None means no padding.
        max_new_tokens: most tokens to add, >= 0; a model with learned positions needs one for each token it reads.
        min_new_tokens: end-of-sequence tokens are banned until there are that many new tokens.
        temperature: number or floating `[B]`, >= 0, infinity included; 0 is greedy.
        top_k, top_p, min_p: truncation as in `fmms.sample`: a number, a tensor `[B]` (integer for top_k), or None.
        filter_order: as in `fmms.sample`; "top_k_first" is that of transformers.
        repetition_penalty: number > 0 or floating `[B]`, 1 for none; divides positive logits of the tokens in the
            prompt (padding aside) and the continuation, multiplies negative ones.
        frequency_penalty, presence_penalty: number or floating `[B]`, 0 for none; subtracted from the logits of tokens
            in the continuation, for each occurrence or once.
        logit_bias: added to the logits of every prompt, before the penalties: {token id: number} or floating `[V]`;
            -inf bans a token.
        allowed_mask: int32 `[B, at least ceil(V / 32)]`, the tokens allowed at every step (`fmms.pack_mask` makes it);
            or a function that is called before each step with the step and the new tokens so far (int64 `[B, step]`,
            the pad token after the end of a sequence), and returns such a mask, or None to allow all. If its mask is
            not on the head's device, the host waits for the copy.
        seed: None draws a fresh seed per prompt from torch's generator (obeys `torch.manual_seed`); an int in
            [-2**63, 2**64) gives each row a seed derived from it; int64 `[B]` is used as it is.
        eos_token_id: token or tokens that end a sequence; None for no end; "model" takes the model's
            generation_config.
        pad_token_id: fills sequences after their end, and may lie outside the vocabulary; "model" takes the model's
            generation_config. Where there is none, the first end-of-sequence token, or else 0.
        generation_config: a transformers GenerationConfig, or "model" for the model's own. Arguments left out are taken
            from it as transformers takes them: max_new_tokens or max_length, min_new_tokens or min_length, do_sample,
            temperature, top_k, top_p, min_p (the last four only with do_sample; else temperature is 0, and top_k is 50
            where it says None), repetition_penalty, eos_token_id, pad_token_id; suppress_tokens and
            begin_suppress_tokens come on top of logit_bias. What a given object leaves None is looked up in the model's
            own. There are no warnings then: a setting that can't be applied is an error.
        noise_scheme: "group" or "token", as in `fmms.sample`.
        impl: as in `fmms.sample`.
        return_logprobs, return_raw_logprobs, return_final_logprobs, return_entropy: also return these of each step.
        top_logprobs: how many of the most likely tokens of each step to return, with their log-probabilities.
        callback: called with a `GenerateStep` after every step; returning True stops. It makes the host wait for
            each step.
        head: the head, where `find_lm_head` can't know it; checked against the model all the same.

    Raises:
        ValueError: bad arguments, a setting of generation_config that can't be applied, or a model that can't be
            decoded exactly with a fused head; the message says which.
    """
    head = head if head is not None else find_lm_head(model)
    if model.training:
        raise ValueError("model: it is in training mode, where dropout changes every step; call model.eval() first")
    ids, mask = _prompts(model, input_ids, attention_mask)
    batch, prompt_length = ids.shape
    device, head_device = ids.device, head.weight.device
    given = {
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": min_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
    }
    settings = generation_settings.resolve(model, generation_config, prompt_length, given)
    limit, eos, pad = settings.max_new_tokens, settings.eos, settings.pad
    if batch and limit:
        longest = prompt_length if mask is None else int(mask.sum(dim=-1).max())
        _check_positions(model, longest, limit)
        head = verify_lm_head(model, head, ids[0] if mask is None else ids[0][mask[0] != 0])
    controls = StepControls(
        head,
        settings,
        ids if mask is None else ids.masked_fill(mask == 0, -1),
        filter_order=filter_order,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        logit_bias=logit_bias,
        allowed_mask=allowed_mask,
        top_logprobs=top_logprobs,
    )
    seeds = _seeds(seed, batch, head_device)
    if generation_config is None:
        generation_settings.warn_of_settings(model, prompt_length, settings)

    room = min(limit, _FIRST_ROOM)
    # What the model reads; the pad token is put in afterwards.
    sequences = _widen(ids, room, _FILLER)
    wanted = {
        "return_logprobs": return_logprobs,
        "return_raw_logprobs": return_raw_logprobs,
        "return_final_logprobs": return_final_logprobs,
        "return_entropy": return_entropy,
    }
    results = {}
    for name in (name.removeprefix("return_") for name, value in wanted.items() if value):
        results[name] = torch.zeros((batch, room), dtype=torch.float32, device=device)
    if top_logprobs:
        results["top_ids"] = torch.zeros((batch, room, top_logprobs), dtype=torch.int64, device=device)
        results["top_logprobs"] = results["top_ids"].float()
    lengths = torch.zeros(batch, dtype=torch.int64, device=device)
    valid = torch.ones(batch, dtype=torch.bool, device=device)
    finished = torch.zeros(batch, dtype=torch.bool, device=device)
    eos_tensor = torch.tensor(eos, dtype=torch.int64, device=device)

    def shown(count: int) -> torch.Tensor:
        """The first `count` new tokens of each sequence, the pad token after its end."""
        kept = torch.arange(count, device=device) < lengths[:, None]
        return torch.where(kept, sequences[:, prompt_length : prompt_length + count], pad)

    if batch and limit:
        backbone = Backbone(model)
        if mask is None:
            positions = torch.arange(prompt_length, device=device).expand(batch, -1)
        else:
            positions = (mask.cumsum(dim=-1) - 1).clamp_min(0)
            mask = _widen(mask, room, 1)
        cache = None

        with torch.no_grad():
            for step in range(limit):
                length = prompt_length + step
                if step == room:
                    more = min(room, limit - room)
                    room += more
                    sequences = _widen(sequences, more, _FILLER)
                    mask = None if mask is None else _widen(mask, more, 1)
                    results = {name: _widen(kept, more, 0) for name, kept in results.items()}
                step_mask = None if mask is None else mask[:, :length]
                hidden, cache = backbone(sequences[:, :length], step_mask, positions, cache)
                drawn = sample(
                    hidden[:, -1].to(head_device, head.weight.dtype),
                    head.weight,
                    seed=seeds,
                    position=step,
                    noise_scheme=noise_scheme,
                    impl=impl,
                    **wanted,
                    **controls.at(step, sequences[:, prompt_length:length], shown),
                )
                # Nothing below may depend on a value on the host: that would make it wait for the GPU.
                drawn_valid = drawn.valid.to(device)
                going = ~finished & drawn_valid
                step_tokens = torch.where(going, drawn.ids.to(device), _FILLER)
                sequences[:, length] = step_tokens
                of_step = {
                    name: _where(going, getattr(drawn, name).to(device), _AFTER_THE_END[name]) for name in results
                }
                for name, value in of_step.items():
                    results[name][:, step] = value
                lengths += going
                valid &= drawn_valid | finished
                # A new tensor each time: the callback may keep the old one.
                finished = finished | ~drawn_valid | (step_tokens[:, None] == eos_tensor).any(dim=-1)

                if callback is not None:
                    logprobs = of_step["logprobs"].cpu() if return_logprobs else None
                    ids_of_step = torch.where(going, step_tokens, pad).cpu()
                    if callback(GenerateStep(step, ids_of_step, logprobs, finished.cpu())):
                        break
                ask = device.type == "cpu" or callback is not None or (eos and (step + 1) % _STEPS_PER_STOP_CHECK == 0)
                if ask and bool(finished.all()):
                    break
                positions = positions[:, -1:] + 1

    new_tokens = shown(int(lengths.max()) if batch else 0)
    return GenerateOutput(
        sequences=torch.cat([ids, new_tokens], dim=-1),
        new_tokens=new_tokens,
        lengths=lengths,
        valid=valid,
        **{name: results[name][:, : new_tokens.shape[1]] if name in results else None for name in _AFTER_THE_END},
    )


def _widen(tensor: torch.Tensor, columns: int, value: float) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_full((len(tensor), columns, *tensor.shape[2:]), value)], dim=1)


def _where(rows: torch.Tensor, value: torch.Tensor, other: float) -> torch.Tensor:
    """`value` `[B]` or `[B, k]` in the rows that `rows` `[B]` names, `other` elsewhere."""
    return torch.where(rows if value.dim() == 1 else rows[:, None], value, other)


def _check_positions(model: torch.nn.Module, prompt: int, new: int) -> None:
    """Refuse what would run past a table of learned positions; rotary models have none, and go on."""
    for name, table in Backbone(model).module.named_modules():
        if name.rpartition(".")[2] not in _POSITION_TABLES or not isinstance(table, torch.nn.Embedding):
            continue
        limit = table.num_embeddings - getattr(table, "offset", 0)
        # The last new token is not read.
        if prompt + new - 1 > limit:
            raise ValueError(
                f"max_new_tokens: {new} new tokens after a prompt of {prompt} need {prompt + new - 1} positions, but "
                f"{type(model).__name__} has learned {limit}; at most {max(limit - prompt + 1, 0)} tokens can follow"
            )


def _prompts(
    model: torch.nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """int64 ids `[B, P]` and int64 mask `[B, P]`, None where nothing is padded."""
    _integers(input_ids, "input_ids")
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids: expected shape [B, P] with P >= 1, got {list(input_ids.shape)}")
    embedding = model.get_input_embeddings().weight
    # A model that accelerate has spread over devices moves its inputs itself.
    if not hasattr(model, "hf_device_map") and embedding.device != input_ids.device:
        raise ValueError(
            f"input_ids: on {input_ids.device}, but the model's embeddings are on {embedding.device}; move one of them"
        )
    ids = input_ids.to(torch.int64)
    if ids.numel():
        # Looked at here, because on a GPU an id without an embedding ends the process's use of the device.
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= len(embedding):
            raise ValueError(f"input_ids: expected token ids from 0 to {len(embedding) - 1}, got {low} to {high}")
    if attention_mask is None:
        return ids, None
    _integers(attention_mask, "attention_mask", bool_too=True)
    if attention_mask.shape != ids.shape or attention_mask.device != ids.device:
        raise ValueError(
            f"attention_mask: expected the shape {list(ids.shape)} and device {ids.device} of input_ids, got "
            f"{list(attention_mask.shape)} on {attention_mask.device}"
        )
    mask = (attention_mask != 0).to(torch.int64)
    if not bool(mask[:, -1].all()):
        raise ValueError(
            "attention_mask: a prompt ends in padding; pad on the left (tokenizer.padding_side = 'left'), because new "
            "tokens follow the last column"
        )
    # Without padding the mask is dropped: models then take their faster attention paths.
    return ids, None if bool(mask.all()) else mask


def _integers(tensor: Any, name: str, bool_too: bool = False) -> None:
    allowed = (torch.int64, torch.int32) + ((torch.bool,) if bool_too else ())
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(
            f"{name}: expected a tensor, got {type(tensor).__name__}; of a tokenizer's output "
            "(return_tensors='pt') pass .input_ids and .attention_mask"
        )
    if tensor.dtype not in allowed:
        raise ValueError(f"{name}: expected dtype {', '.join(str(d) for d in allowed)}, got {tensor.dtype}")


def _seeds(seed: Any, batch: int, device: torch.device) -> torch.Tensor:
    # Fresh seeds are drawn once per call: `position` already makes the steps differ.
    given = seed.to(device) if isinstance(seed, torch.Tensor) else seed
    per_row, value = arguments.check_seed(given, batch, device)
    return row_seeds(value, batch, device) if per_row is None else per_row
