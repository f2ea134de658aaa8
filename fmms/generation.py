"""Decoding a Hugging Face causal language model with the fused head.

`generate` runs the model's backbone with its key-value cache and hands each last hidden state to `fmms.sample`, so on
a GPU the logits of a step are never written out. The head itself is described and checked in `fmms.lm_head`; loading
models and turning text into token ids is left to transformers and `fmms.models`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fmms import arguments
from fmms.lm_head import Backbone, LMHead, find_lm_head, verify_lm_head
from fmms.noise import row_seeds
from fmms.sampling import sample

# On a GPU, asking whether every sequence has ended stops the host until the step is done, so it is asked rarely; the
# superfluous tokens are cut off afterwards.
_STEPS_PER_STOP_CHECK = 16

_DEFAULT_NEW_TOKENS = 20
# Room for new tokens is made for this many at first and doubled when it is full.
_FIRST_ROOM = 128

# Fed to the model after the end of a sequence: unlike the pad token, an id that every vocabulary has.
_FILLER = 0

# Tables of learned positions, by the names that transformers' models give them.
_POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings", "positions_embed")

# Settings of a model's generation_config that change what transformers' generate draws, with their neutral values.
_UNSUPPORTED_SETTINGS = {
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None,),
    "sequence_bias": (None,),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "guidance_scale": (None, 1.0),
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "watermarking_config": (None,),
    "token_healing": (None, False),
    "stop_strings": (None, []),
    "max_time": (None,),
}
# The same for those that only count where do_sample is on. transformers takes a top_k of None as 50.
_UNSUPPORTED_SAMPLING_SETTINGS = {
    "top_k": (0,),
    "top_p": (None, 1.0),
    "top_h": (None, 1.0),
    "min_p": (None, 0.0),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
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

    Attributes:
        sequences: int64 `[B, P + n]`: the prompts as given, then `new_tokens`.
        new_tokens: int64 `[B, n]`, the pad token after the end of a sequence.
        logprobs: float32 `[B, n]`, the log-probability of each new token at its temperature (at temperature 1 for
            greedy prompts), 0 after the end, so that a row sums to that of the whole continuation; None unless asked
            for.
        lengths: int64 `[B]`: new tokens of each sequence, the end-of-sequence token included.
        valid: bool `[B]`: False where the logits became NaN or +inf; that sequence ends before the token it spoilt.
    """

    sequences: torch.Tensor
    new_tokens: torch.Tensor
    logprobs: torch.Tensor | None
    lengths: torch.Tensor
    valid: torch.Tensor


def generate(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    max_new_tokens: int = _DEFAULT_NEW_TOKENS,
    temperature: float | torch.Tensor = 1.0,
    seed: int | torch.Tensor | None = None,
    eos_token_id: int | Sequence[int] | str | None = "model",
    pad_token_id: int | str | None = "model",
    noise_scheme: str = "group",
    impl: str = "auto",
    return_logprobs: bool = False,
    callback: Callable[[GenerateStep], bool | None] | None = None,
    head: LMHead | None = None,
) -> GenerateOutput:
    """Continue prompts with a transformers causal language model, sampling by `fmms.sample`.

    At temperature 0 the tokens are those of `model.generate(do_sample=False)`, except that transformers rounds logits
    to the model's dtype first, which in bfloat16 makes ties of tokens that differ. Of the model's generation_config
    only the end-of-sequence and pad tokens are taken; a repetition penalty, top_p with do_sample or another setting
    that would change the result is not applied, and warned of. Its temperature, max_new_tokens and max_length count as
    overridden where the argument isn't the default. The first call for a model compares its head, as described by
    `fmms.lm_head.find_lm_head`, with the model's own logits.

    A prompt gets the same noise alone and in a batch, whatever its padding, when `seed` is a tensor: noise depends on
    the prompt's seed and the index of the new token only.

    Args:
        model: decoder-only causal language model from transformers, in eval mode.
        input_ids: integer `[B, P]`, P >= 1, on the device of the model's embeddings.
        attention_mask: bool or integer `[B, P]`, 0 at padding, which must be on the left; None means no padding.
        max_new_tokens: most tokens to add, >= 0; a model with learned positions needs one for each token it reads.
        temperature: number or floating `[B]`, >= 0, infinity included; 0 is greedy.
        seed: None draws a fresh seed per prompt from torch's generator (obeys `torch.manual_seed`); an int in
            [-2**63, 2**64) gives each row a seed derived from it; int64 `[B]` is used as it is.
        eos_token_id: token or tokens that end a sequence; None for no end; "model" takes the model's
            generation_config.
        pad_token_id: fills sequences after their end, and may lie outside the vocabulary; "model" takes the model's
            generation_config. Where there is none, the first end-of-sequence token, or else 0.
        noise_scheme: "group" or "token", as in `fmms.sample`.
        impl: as in `fmms.sample`.
        return_logprobs: also return the log-probability of each new token.
        callback: called with a `GenerateStep` after every step; returning True stops. It makes the host wait for
            each step.
        head: the head, where `find_lm_head` can't know it; checked against the model all the same.

    Raises:
        ValueError: bad arguments, or a model that can't be decoded exactly with a fused head; the message says why.
    """
    head = head if head is not None else find_lm_head(model)
    if model.training:
        raise ValueError("model: it is in training mode, where dropout changes every step; call model.eval() first")
    ids, mask = _prompts(model, input_ids, attention_mask)
    batch, prompt_length = ids.shape
    limit = _count(max_new_tokens, "max_new_tokens")
    device, head_device = ids.device, head.weight.device
    temperature = _temperature(temperature, batch, head_device)
    seeds = _seeds(seed, batch, head_device)
    eos = _eos_tokens(model, eos_token_id)
    pad = _pad_token(model, pad_token_id, eos)
    _warn_of_settings(model, prompt_length, limit, temperature)

    room = min(limit, _FIRST_ROOM)
    # What the model reads; the pad token is put in afterwards.
    sequences = _widen(ids, room, _FILLER)
    logprobs = torch.zeros((batch, room), dtype=torch.float32, device=device) if return_logprobs else None
    lengths = torch.zeros(batch, dtype=torch.int64, device=device)
    valid = torch.ones(batch, dtype=torch.bool, device=device)
    finished = torch.zeros(batch, dtype=torch.bool, device=device)
    eos_tensor = torch.tensor(eos, dtype=torch.int64, device=device)

    if batch and limit:
        longest = prompt_length if mask is None else int(mask.sum(dim=-1).max())
        _check_positions(model, longest, limit)
        first = ids[0] if mask is None else ids[0][mask[0] != 0]
        head = verify_lm_head(model, head, first)
        backbone = Backbone(model)
        if mask is None:
            positions = torch.arange(prompt_length, device=device).expand(batch, -1)
        else:
            positions = (mask.cumsum(dim=-1) - 1).clamp_min(0)
            mask = _widen(mask, room, 1)
        cache = None
        controls = head.sample_arguments() | {"noise_scheme": noise_scheme, "impl": impl}

        with torch.no_grad():
            for step in range(limit):
                length = prompt_length + step
                if step == room:
                    more = min(room, limit - room)
                    room += more
                    sequences = _widen(sequences, more, _FILLER)
                    mask = None if mask is None else _widen(mask, more, 1)
                    logprobs = None if logprobs is None else _widen(logprobs, more, 0.0)
                step_mask = None if mask is None else mask[:, :length]
                hidden, cache = backbone(sequences[:, :length], step_mask, positions, cache)
                drawn = sample(
                    hidden[:, -1].to(head_device, head.weight.dtype),
                    head.weight,
                    temperature,
                    seed=seeds,
                    position=step,
                    return_logprobs=return_logprobs,
                    **controls,
                )
                # Nothing below may depend on a value on the host: that would make it wait for the GPU.
                drawn_valid = drawn.valid.to(device)
                going = ~finished & drawn_valid
                step_tokens = torch.where(going, drawn.ids.to(device), _FILLER)
                step_logprobs = torch.where(going, drawn.logprobs.to(device), 0.0) if return_logprobs else None
                sequences[:, length] = step_tokens
                if logprobs is not None:
                    logprobs[:, step] = step_logprobs
                lengths += going
                valid &= drawn_valid | finished
                # A new tensor each time: the callback may keep the old one.
                finished = finished | ~drawn_valid | (step_tokens[:, None] == eos_tensor).any(dim=-1)

                if callback is not None:
                    on_cpu = None if step_logprobs is None else step_logprobs.cpu()
                    shown = torch.where(going, step_tokens, pad).cpu()
                    if callback(GenerateStep(step, shown, on_cpu, finished.cpu())):
                        break
                ask = device.type == "cpu" or callback is not None or (eos and (step + 1) % _STEPS_PER_STOP_CHECK == 0)
                if ask and bool(finished.all()):
                    break
                positions = positions[:, -1:] + 1

    used = int(lengths.max()) if batch else 0
    kept = torch.arange(used, device=device) < lengths[:, None]
    new_tokens = torch.where(kept, sequences[:, prompt_length : prompt_length + used], pad)
    return GenerateOutput(
        sequences=torch.cat([ids, new_tokens], dim=-1),
        new_tokens=new_tokens,
        logprobs=None if logprobs is None else logprobs[:, :used],
        lengths=lengths,
        valid=valid,
    )


def _widen(tensor: torch.Tensor, columns: int, value: float) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_full((len(tensor), columns), value)], dim=-1)


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


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{name}: expected an integer >= 0, got {value!r}")
    return value


def _temperature(temperature: Any, batch: int, device: torch.device) -> float | torch.Tensor:
    given = temperature.to(device) if isinstance(temperature, torch.Tensor) else temperature
    per_row, value = arguments.check_temperature(given, batch, device)
    return value if per_row is None else per_row


def _seeds(seed: Any, batch: int, device: torch.device) -> torch.Tensor:
    # Fresh seeds are drawn once per call: `position` already makes the steps differ.
    given = seed.to(device) if isinstance(seed, torch.Tensor) else seed
    per_row, value = arguments.check_seed(given, batch, device)
    return row_seeds(value, batch, device) if per_row is None else per_row


def _setting(model: torch.nn.Module, name: str) -> Any:
    value = getattr(getattr(model, "generation_config", None), name, None)
    return value if value is not None else getattr(model.config, name, None)


def _eos_tokens(model: torch.nn.Module, eos_token_id: Any) -> list[int]:
    value = _setting(model, "eos_token_id") if eos_token_id == "model" else eos_token_id
    if value is None:
        return []
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    return [_count(v, "eos_token_id") for v in values]


def _pad_token(model: torch.nn.Module, pad_token_id: Any, eos: list[int]) -> int:
    value = _setting(model, "pad_token_id") if pad_token_id == "model" else pad_token_id
    # Some configs say -1 for "none".
    if value is None or (pad_token_id == "model" and value == -1):
        return eos[0] if eos else 0
    return _count(value, "pad_token_id")


def _warn_of_settings(
    model: torch.nn.Module, prompt_length: int, new_tokens: int, temperature: float | torch.Tensor
) -> None:
    config = getattr(model, "generation_config", None)
    if config is None:
        return
    neutral = dict(_UNSUPPORTED_SETTINGS)
    if getattr(config, "do_sample", None) and (isinstance(temperature, torch.Tensor) or temperature > 0):
        neutral |= _UNSUPPORTED_SAMPLING_SETTINGS
        # An argument other than the default overrides the setting, as it would in transformers.
        if not isinstance(temperature, torch.Tensor) and temperature == 1.0:
            neutral["temperature"] = (None, 1.0)
    if new_tokens == _DEFAULT_NEW_TOKENS:
        neutral["max_new_tokens"] = (None, new_tokens)
        if getattr(config, "max_new_tokens", None) is None:
            neutral["max_length"] = (None, _DEFAULT_NEW_TOKENS, prompt_length + new_tokens)
    found = [n for n, values in neutral.items() if getattr(config, n, None) not in values]
    if found:
        warnings.warn(
            f"fmms.generate does not apply these settings of the model's generation_config: {', '.join(found)}",
            stacklevel=3,
        )
