"""What `fmms.generate` is asked for: its arguments, transformers' GenerationConfig, and the controls of each step.

For each setting, `resolve` takes what the caller, a GenerationConfig or the default says, in this order;
`warn_of_settings` names what a model's own generation_config asks for in vain; `StepControls` makes the arguments of
`fmms.sample` out of the outcome. Nothing here imports transformers: a GenerationConfig is read by its attributes.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fmms import arguments
from fmms.controls import history_edits
from fmms.lm_head import LMHead
from fmms.request import FILTER_ORDERS

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclasses.dataclass(frozen=True)
class Default:
    """The default of an argument, told from the same value given by the caller; it is shown as that value."""

    value: Any

    def __repr__(self) -> str:
        return repr(self.value)


DEFAULT_NEW_TOKENS: Any = Default(20)
DEFAULT_TEMPERATURE: Any = Default(1.0)
NO_FILTER: Any = Default(None)
NO_REPETITION_PENALTY: Any = Default(1.0)
NO_MINIMUM: Any = Default(0)
FROM_MODEL: Any = Default("model")

# Settings of a GenerationConfig that change what transformers' generate draws, with their neutral values: those that
# `generate` never applies, and those that it applies where generation_config is given.
_UNSUPPORTED_SETTINGS = {
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None,),
    "sequence_bias": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
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
_APPLIED_SETTINGS = {
    "repetition_penalty": (None, 1.0),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
}
# The same for those that only count where do_sample is on. transformers takes a top_k of None as 50.
_UNSUPPORTED_SAMPLING_SETTINGS = {
    "top_h": (None, 1.0),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
}
_APPLIED_SAMPLING_SETTINGS = {
    "top_k": (0,),
    "top_p": (None, 1.0),
    "min_p": (None, 0.0),
}
_TRANSFORMERS_TOP_K = 50


@dataclasses.dataclass(frozen=True)
class Settings:
    """What holds for one call of `generate`, not yet checked where the comment says so."""

    max_new_tokens: int
    min_new_tokens: int
    # As the caller or the config gave them:
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    repetition_penalty: Any
    # Token ids >= 0; `pad` and `eos` may lie outside the vocabulary.
    eos: list[int]
    pad: int
    suppressed: list[int]
    suppressed_at_first: list[int]


def resolve(model: torch.nn.Module, generation_config: Any, prompt_length: int, given: Mapping[str, Any]) -> Settings:
    """The settings of a call: what the caller gave, else what the GenerationConfig says, else the defaults.

    Args:
        model: its generation_config and config name the end-of-sequence and pad tokens.
        generation_config: None, "model" or a GenerationConfig, as `generate` takes it.
        prompt_length: P, which max_length and min_length of a GenerationConfig count in.
        given: max_new_tokens, min_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, eos_token_id and
            pad_token_id; those that the caller left alone are instances of `Default`.

    Raises:
        ValueError: no GenerationConfig, one that asks for what can't be done, or a bad token or number of tokens.
    """
    values = {name: value.value if isinstance(value, Default) else value for name, value in given.items()}
    model_configs = [c for c in (getattr(model, "generation_config", None), model.config) if c is not None]
    sources = {"eos_token_id": model_configs, "pad_token_id": model_configs}
    suppressed, suppressed_at_first = [], []
    if generation_config is not None:
        configs = _configs(model, generation_config)
        asked = _asked_for(configs, prompt_length)
        values |= {name: asked[name] for name, value in given.items() if isinstance(value, Default) and name in asked}
        if isinstance(given["max_new_tokens"], Default):
            values["max_new_tokens"] = _new_tokens(configs, prompt_length)
        _refuse_unsupported(configs, values["temperature"])
        suppressed = _token_list(configs, "suppress_tokens")
        suppressed_at_first = _token_list(configs, "begin_suppress_tokens")
        sources = {n: [*configs, model.config] if isinstance(given[n], Default) else sources[n] for n in sources}
    eos = _eos_tokens(values.pop("eos_token_id"), sources["eos_token_id"])
    pad = _pad_token(values.pop("pad_token_id"), sources["pad_token_id"], eos)
    for name in ("max_new_tokens", "min_new_tokens"):
        values[name] = count(values[name], name)
    return Settings(eos=eos, pad=pad, suppressed=suppressed, suppressed_at_first=suppressed_at_first, **values)


def count(value: Any, name: str) -> int:
    """`value` if it is an integer from 0 to 2**63 - 1, else a ValueError that names it."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{name}: expected an integer >= 0, got {value!r}")
    return value


def _configs(model: torch.nn.Module, generation_config: Any) -> list[Any]:
    """Where to look for a setting, first to last: transformers too fills what is None from the model's own."""
    own = getattr(model, "generation_config", None)
    if isinstance(generation_config, str) and generation_config == "model":
        if own is None:
            raise ValueError(f"generation_config: {type(model).__name__} has none of its own")
        return [own]
    if not hasattr(generation_config, "do_sample") or not hasattr(generation_config, "max_new_tokens"):
        arguments.fail("generation_config", "None, 'model' or a transformers GenerationConfig", generation_config)
    return [generation_config] if own is None else [generation_config, own]


def _look_up(configs: list[Any], name: str, default: Any = None) -> Any:
    found = (getattr(config, name, None) for config in configs)
    return next((value for value in found if value is not None), default)


def _asked_for(configs: list[Any], prompt_length: int) -> dict[str, Any]:
    """The arguments of `generate` that the configs stand for, max_new_tokens and the tokens that end and fill aside."""
    asked = {"repetition_penalty": _look_up(configs, "repetition_penalty", 1.0), "temperature": 0.0}
    if _look_up(configs, "do_sample"):
        asked["temperature"] = _look_up(configs, "temperature", 1.0)
        asked["top_k"] = _look_up(configs, "top_k", _TRANSFORMERS_TOP_K)
        asked["top_p"], asked["min_p"] = _look_up(configs, "top_p"), _look_up(configs, "min_p")
    least = _look_up(configs, "min_new_tokens")
    asked["min_new_tokens"] = max(_look_up(configs, "min_length", 0) - prompt_length, 0) if least is None else least
    return asked


def _new_tokens(configs: list[Any], prompt_length: int) -> int:
    new, length = _look_up(configs, "max_new_tokens"), _look_up(configs, "max_length")
    if new is not None or length is None:
        return DEFAULT_NEW_TOKENS.value if new is None else new
    if count(length, "generation_config.max_length") <= prompt_length:
        raise ValueError(
            f"generation_config: its max_length of {length} leaves no room after a prompt of {prompt_length} tokens; "
            "pass max_new_tokens"
        )
    return length - prompt_length


def _refuse_unsupported(configs: list[Any], temperature: Any) -> None:
    neutral = dict(_UNSUPPORTED_SETTINGS)
    if _look_up(configs, "do_sample") and (isinstance(temperature, torch.Tensor) or temperature != 0):
        neutral |= _UNSUPPORTED_SAMPLING_SETTINGS
    found = [name for name, values in neutral.items() if _look_up(configs, name) not in values]
    if found:
        raise ValueError(
            f"generation_config: fmms.generate cannot apply {', '.join(found)}; set them to None, or pass the other "
            "settings as arguments"
        )


def _token_list(configs: list[Any], name: str) -> list[int]:
    return [count(token, f"generation_config.{name}") for token in _look_up(configs, name, [])]


def _eos_tokens(value: Any, configs: list[Any]) -> list[int]:
    value = _look_up(configs, "eos_token_id") if isinstance(value, str) and value == "model" else value
    if value is None:
        return []
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    return [count(v, "eos_token_id") for v in values]


def _pad_token(value: Any, configs: list[Any], eos: list[int]) -> int:
    if isinstance(value, str) and value == "model":
        value = _look_up(configs, "pad_token_id")
        # Some configs say -1 for "none".
        value = None if value == -1 else value
    if value is None:
        return eos[0] if eos else 0
    return count(value, "pad_token_id")


def warn_of_settings(model: torch.nn.Module, prompt_length: int, settings: Settings) -> None:
    """Name the settings of the model's generation_config that change what transformers draws and aren't applied.

    An argument that isn't the default overrides its setting, as it would in transformers. To be called by `generate`
    itself, so that the warning points at its caller.
    """
    config = getattr(model, "generation_config", None)
    if config is None:
        return
    neutral = _APPLIED_SETTINGS | _UNSUPPORTED_SETTINGS
    temperature = settings.temperature
    if getattr(config, "do_sample", None) and (isinstance(temperature, torch.Tensor) or temperature > 0):
        neutral |= _APPLIED_SAMPLING_SETTINGS | _UNSUPPORTED_SAMPLING_SETTINGS | {"temperature": (None, 1.0)}
    new_tokens = settings.max_new_tokens
    neutral["max_new_tokens"] = (None, new_tokens)
    if getattr(config, "max_new_tokens", None) is None:
        neutral["max_length"] = (None, DEFAULT_NEW_TOKENS.value, prompt_length + new_tokens)
    defaults = {
        "temperature": DEFAULT_TEMPERATURE,
        "top_k": NO_FILTER,
        "top_p": NO_FILTER,
        "min_p": NO_FILTER,
        "repetition_penalty": NO_REPETITION_PENALTY,
        "min_new_tokens": NO_MINIMUM,
        "max_new_tokens": DEFAULT_NEW_TOKENS,
    }
    for name, default in defaults.items():
        value = getattr(settings, name)
        if isinstance(value, torch.Tensor) or value != default.value:
            for setting in (name, {"min_new_tokens": "min_length", "max_new_tokens": "max_length"}.get(name)):
                neutral.pop(setting, None)
    found = [n for n, values in neutral.items() if getattr(config, n, None) not in values]
    if found:
        warnings.warn(
            f"fmms.generate does not apply these settings of the model's generation_config: {', '.join(found)}",
            stacklevel=3,
        )


class StepControls:
    """The arguments of `fmms.sample` at each step, made without waiting for the device."""

    def __init__(
        self,
        head: LMHead,
        settings: Settings,
        prompt: torch.Tensor,
        *,
        filter_order: str,
        frequency_penalty: Any,
        presence_penalty: Any,
        logit_bias: Any,
        allowed_mask: Any,
        top_logprobs: int,
    ):
        """Args:
            head: the verified head; everything goes to its device.
            settings: from `resolve`.
            prompt: int64 `[B, P]`, -1 at padding.
            filter_order, frequency_penalty, presence_penalty, logit_bias, allowed_mask, top_logprobs: as in `generate`.

        Raises:
            ValueError: an argument has the wrong type, shape, dtype or value; the message names it.
        """
        batch, device = len(prompt), head.weight.device
        self._device, self._batch = device, batch
        self._vocab = len(head.weight) if head.vocab_size is None else head.vocab_size

        def per_row(value, check, *more, **options):
            value = value.to(device) if isinstance(value, torch.Tensor) else value
            tensor, number = check(*more, value, batch, device, **options)
            return number if tensor is None else tensor

        if filter_order not in FILTER_ORDERS:
            arguments.fail("filter_order", f"one of {', '.join(FILTER_ORDERS)}", filter_order)
        self._fixed = head.sample_arguments() | {
            "temperature": per_row(settings.temperature, arguments.check_temperature),
            "top_k": per_row(settings.top_k, arguments.check_top_k),
            "top_p": per_row(settings.top_p, arguments.check_share, "top_p", off=1.0),
            "min_p": per_row(settings.min_p, arguments.check_share, "min_p", off=0.0),
            "filter_order": filter_order,
            "top_logprobs": arguments.check_count("top_logprobs", top_logprobs, 0, self._vocab),
        }
        self._penalties = {
            name: self._penalty(name, value)
            for name, value in (
                ("repetition_penalty", settings.repetition_penalty),
                ("frequency_penalty", frequency_penalty),
                ("presence_penalty", presence_penalty),
            )
        }
        prompt = prompt.to(device)
        # An embedding may have more rows than the head: such a token has no logit that could be penalised.
        self._prompt = prompt.masked_fill(prompt >= self._vocab, -1)
        # Only checked; what is neutral leaves no edits.
        self._penalised = bool(history_edits(self._prompt[:, :0], self._prompt, **self._penalties))

        bias = _ban(_dense_bias(head, logit_bias, self._vocab), settings.suppressed, self._vocab, device)
        early = _ban(bias, settings.eos, self._vocab, device) if settings.min_new_tokens else bias
        first = _ban(early, settings.suppressed_at_first, self._vocab, device)
        self._biases, self._min_new_tokens = (first, early, bias), settings.min_new_tokens

        if isinstance(allowed_mask, torch.Tensor):
            allowed_mask = arguments.check_allowed_mask(allowed_mask.to(device), batch, self._vocab, device)
        elif allowed_mask is not None and not callable(allowed_mask):
            expected = "None, an int32 tensor [B, words], or a callable (step, new_tokens) -> int32 tensor or None"
            arguments.fail("allowed_mask", expected, allowed_mask)
        self._allowed_mask = allowed_mask

    def _penalty(self, name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        tensor = arguments.check_row_tensor(name, value.to(self._device), self._batch, self._device, _FLOATS)
        return tensor.to(torch.float32)

    def at(self, step: int, new_tokens: torch.Tensor, shown: Callable[[int], torch.Tensor]) -> dict[str, Any]:
        """Keyword arguments of `fmms.sample` for one step, temperature included.

        Args:
            step: index of the token to draw.
            new_tokens: int64 `[B, step]`, what was drawn so far; a sequence that has ended may hold any token.
            shown: of `step` makes the same with the pad token after the end of a sequence, for a callable allowed_mask.

        Raises:
            ValueError: the callable returned something else than a mask.
        """
        bias = self._biases[0 if step == 0 else 1 if step < self._min_new_tokens else 2]
        mask = self._allowed_mask
        if callable(mask):
            mask = mask(step, shown(step))
            mask = mask.to(self._device) if isinstance(mask, torch.Tensor) else mask
        edits = history_edits(new_tokens.to(self._device), self._prompt, **self._penalties) if self._penalised else {}
        return self._fixed | {"bias": bias, "allowed_mask": mask} | edits


def _dense_bias(head: LMHead, logit_bias: Any, vocab: int) -> torch.Tensor | None:
    """The head's bias plus `logit_bias`, float32 `[vocab]`; the head's own as it is where there is no `logit_bias`."""
    own = None if head.bias is None else head.bias[:vocab]
    if logit_bias is None:
        return own
    device = head.weight.device
    if isinstance(logit_bias, Mapping):
        tokens = f"token ids from 0 to {vocab - 1} as keys"
        ids = [arguments.check_integer("logit_bias", token, 0, vocab - 1, tokens) for token in logit_bias]
        values = [_bias_value(value) for value in logit_bias.values()]
        added = torch.zeros(vocab, dtype=torch.float32)
        added[torch.tensor(ids, dtype=torch.int64)] = torch.tensor(values, dtype=torch.float32)
        added = added.to(device)
    else:
        # The whole height of the weight is fine too, as it is for the bias of `fmms.sample`.
        shapes = [(vocab,), (len(head.weight),)]
        if (
            not isinstance(logit_bias, torch.Tensor)
            or logit_bias.shape not in shapes
            or logit_bias.dtype not in _FLOATS
        ):
            arguments.fail(
                "logit_bias", f"a dict {{token id: number}} or a float tensor of shape [{vocab}]", logit_bias
            )
        added = logit_bias[:vocab].to(device, torch.float32)
    return added if own is None else added + own.float()


def _bias_value(value: Any) -> float:
    expected = "numbers that fp32 holds, or -inf, as values"
    number = arguments.check_number("logit_bias", value, expected)
    if number != -math.inf and not abs(number) <= torch.finfo(torch.float32).max:
        arguments.fail("logit_bias", expected, value)
    return number


def _ban(bias: torch.Tensor | None, tokens: Sequence[int], vocab: int, device: torch.device) -> torch.Tensor | None:
    """`bias` with -inf at `tokens`; tokens outside the vocabulary can't be drawn anyway."""
    inside = [token for token in tokens if token < vocab]
    if not inside:
        return bias
    banned = (
        torch.zeros(vocab, dtype=torch.float32, device=device) if bias is None else bias.to(torch.float32, copy=True)
    )
    banned[torch.tensor(inside, device=device)] = -torch.inf
    return banned
