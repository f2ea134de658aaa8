"""The last mile of a Hugging Face causal language model, described as `fmms.sample` needs it.

`find_lm_head` reads the head's weight, bias, logit scale and softcap off a model, `Backbone` runs everything before the
head, and `verify_lm_head` compares both with the model's own logits, because a model class that does something else to
its logits would otherwise be sampled from the wrong distribution without a sign. Nothing here imports transformers: the
models bring it along. Decoding is in `fmms.generation`, the sampling itself in `fmms.sampling`.
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from typing import Any

import torch

# Config fields by which transformers' models state a factor on the logits (or, linear all the same, on the hidden state
# just before the head), and whether the logits are multiplied or divided by it.
_SCALES = {
    "logit_scale": "multiply",  # Cohere, Cohere2
    "lm_head_multiplier": "multiply",  # Falcon-H1
    "output_multiplier": "multiply",
    "logits_scaling": "divide",  # Granite, MiniCPM3
    "logits_mup_width_multiplier": "divide",
}
# The same field with the opposite meaning.
_SCALE_EXCEPTIONS = {("hyperclovax", "logits_scaling"): "multiply"}
_SOFTCAPS = (
    "final_logit_softcapping",  # Gemma 2, 3, 4, NanoChat
    "logits_soft_cap",  # RecurrentGemma
    "output_logit_soft_cap",  # xLSTM
)
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # the argument's name by transformers release and model
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Largest difference from the model's own logits that rounding explains, relative to the row's largest |logit|: the
# model rounds after the product, after the scale and three times in the softcap.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
_TOLERANCE_TF32 = 3e-3
_PROBE_FACTORS = (1.0, 8.0, 64.0)
_PROBE_TOKENS = 16
_ROWS_PER_CHUNK = 16384

_verified: weakref.WeakKeyDictionary[torch.nn.Module, tuple[tuple, LMHead]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True, eq=False)
class LMHead:
    """A language-model head: logits = softcap(logit_scale * (hidden @ weight.T)) + bias.

    Attributes:
        weight: `[V, D]` float32, bfloat16 or float16; the model's own tensor, not a copy.
        bias: `[V]` or None.
        logit_scale: factor on the product, or None for 1.
        softcap: c in c * tanh(logit / c), or None.
        vocab_size: number of leading rows the model gives logits for, or None for all of them.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    logit_scale: float | None = None
    softcap: float | None = None
    vocab_size: int | None = None

    def sample_arguments(self) -> dict[str, Any]:
        """The keyword arguments of `fmms.sample` that this head asks for, `weight` aside."""
        fields = ("bias", "logit_scale", "softcap", "vocab_size")
        return {name: getattr(self, name) for name in fields if getattr(self, name) is not None}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 logits `[..., vocab_size]` of `hidden` `[..., D]`, at temperature 1, multiplied in float32.

        Written out in full, for checking heads and for small models: sampling never needs it.
        """
        rows = self.weight[: self.vocab_size]
        hidden = hidden.to(self.weight.device).float()
        # In pieces, because a float32 copy of a large head at once could be what no longer fits.
        parts = [hidden @ rows[i : i + _ROWS_PER_CHUNK].float().T for i in range(0, len(rows), _ROWS_PER_CHUNK)]
        logits = torch.cat(parts, dim=-1)
        if self.logit_scale is not None:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if self.bias is not None:
            logits = logits + self.bias[: self.vocab_size].float()
        return logits

    def _fingerprint(self) -> tuple:
        tensors = [t for t in (self.weight, self.bias) if t is not None]
        where = tuple((t.data_ptr(), tuple(t.shape), t.dtype, t.device) for t in tensors)
        return where, self.logit_scale, self.softcap, self.vocab_size


def find_lm_head(model: torch.nn.Module) -> LMHead:
    """Describe the head of a transformers causal language model.

    Args:
        model: a decoder-only `...ForCausalLM` (or the text side of a multimodal model).

    Raises:
        ValueError: the model is an encoder-decoder, has no head, or its head is not a plain floating-point matrix on a
            device (quantised, offloaded, wrapped by an adapter).
    """
    name = type(model).__name__
    if getattr(model, "config", None) is None or not hasattr(model, "get_output_embeddings"):
        raise ValueError(f"model: expected a transformers causal language model, got {name}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"model: {name} is an encoder-decoder; only decoder-only models can be decoded here")
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"model: {name} has no output embeddings (LM head); load it with AutoModelForCausalLM")
    weight = getattr(head, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dtype not in _WEIGHT_DTYPES:
        kind = f"{type(head).__name__} of dtype {getattr(weight, 'dtype', None)}"
        raise ValueError(
            f"model: the head of {name} is a {kind}; expected a weight of dtype float32, bfloat16 or float16. If the "
            "model is quantised, leave the head out of the quantisation"
        )
    if not isinstance(head, torch.nn.Linear):
        raise ValueError(
            f"model: the head of {name} is a {type(head).__name__}, expected a torch.nn.Linear; merge an adapter first"
        )
    if weight.is_meta:
        raise ValueError(f"model: the head of {name} is on the meta device (offloaded); keep lm_head on a real device")
    bias = head.bias
    return LMHead(
        weight=weight.detach(),
        bias=None if bias is None else bias.detach(),
        logit_scale=_logit_scale(model.config),
        softcap=next((float(v) for f in _SOFTCAPS if (v := _field(model.config, f)) is not None), None),
    )


class Backbone:
    """Everything of a model before its head: token ids in, final hidden states and the key-value cache out."""

    def __init__(self, model: torch.nn.Module):
        """Args:
            model: a transformers causal language model.

        Raises:
            ValueError: no module before the head was found, or it keeps no cache.
        """
        # The decoder first: some models call it directly, past the module that base_model names.
        candidates = [model.get_decoder()] if hasattr(model, "get_decoder") else []
        candidates += [getattr(model, "base_model", model), getattr(model, "model", model)]
        for module in candidates:
            cache_name = _cache_name(module.forward)
            if module is not model and cache_name is not None:
                break
        else:
            names = ", ".join(_CACHE_NAMES)
            raise ValueError(f"model: {type(model).__name__} has no backbone that takes a key-value cache ({names})")
        if not hasattr(model, "prepare_inputs_for_generation"):
            raise ValueError(f"model: {type(model).__name__} is not made for generation (no GenerationMixin)")
        self.module = module
        self._model = model
        self._parameters = inspect.signature(module.forward).parameters
        self._takes_any = any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())
        self._cache_name = _cache_name(model.prepare_inputs_for_generation) or cache_name

    def __call__(
        self,
        ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        cache: Any = None,
    ) -> tuple[torch.Tensor, Any]:
        """Run the tokens that are not yet in the cache: all of `ids` without one, the last with one.

        Args:
            ids: int64 `[B, L]`, the whole sequences.
            attention_mask: int64 `[B, L]`, or None when every token counts.
            position_ids: int64 `[B, L]` or `[B, 1]`, of the tokens to run; left out for models without explicit
                positions.
            cache: what the previous call returned, None at first.

        Returns:
            hidden states `[B, L or 1, D]` and the cache.
        """
        given: dict[str, Any] = {"use_cache": True, "is_first_iteration": cache is None}
        if cache is not None:
            given |= {self._cache_name: cache, "next_sequence_length": 1}
        if "position_ids" in self._parameters:
            given["position_ids"] = position_ids
        # The model's own preparation: some drop the mask once there is a cache, some number positions in several axes.
        prepared = self._model.prepare_inputs_for_generation(ids, attention_mask=attention_mask, **given)
        accepted = {k: v for k, v in prepared.items() if k in self._parameters or self._takes_any}
        accepted.pop("logits_to_keep", None)
        output = self.module(**accepted, return_dict=True)
        # Membership, not getattr: reading a renamed field warns.
        cache = next((output[n] for n in _CACHE_NAMES if n in output), None)
        if "last_hidden_state" not in output or cache is None:
            raise ValueError(
                f"model: {type(self.module).__name__} returned {', '.join(output)}; expected last_hidden_state and a "
                "cache. A BERT-like model needs is_decoder=True in its config; of a wrapper (PEFT), pass what it wraps"
            )
        return output["last_hidden_state"], cache


def verify_lm_head(model: torch.nn.Module, head: LMHead, input_ids: torch.Tensor) -> LMHead:
    """Check `head` against the model's own logits; once per model, later calls return at once.

    It is checked again once the weights lie elsewhere, or a module outside the backbone is replaced, gets another
    forward or gains or loses a hook.

    One short pass through the whole model, in which the backbone's last hidden state is also multiplied by 8 and 64: at
    the size of ordinary hidden states a softcap can hide inside the rounding.

    Args:
        model: the model `head` describes.
        head: from `find_lm_head`, or written by hand for a model that it doesn't know.
        input_ids: int64 `[L]`, real tokens without padding; the last 16 are used.

    Returns:
        `head`, with `vocab_size` set where the model gives fewer logits than the weight has rows.

    Raises:
        ValueError: the logits differ by more than rounding explains; names the model class and the difference.
    """
    backbone = Backbone(model)
    fingerprint = (head._fingerprint(), _surroundings(model, backbone.module))
    known = _verified.get(model)
    if known is not None and known[0] == fingerprint:
        return known[1]
    name = type(model).__name__
    tokens = input_ids[-_PROBE_TOKENS:].unsqueeze(0)
    positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
    with torch.no_grad():
        hidden = backbone(tokens, None, positions)[0][:, -1]
        probes, own = _probe(model, backbone.module, tokens)
        own = own.to(head.weight.device).float()
        checked = dataclasses.replace(head, vocab_size=own.shape[-1]) if own.shape[-1] < len(head.weight) else head
        # Large probes may overflow float16; the first row, the model's real logits, must not.
        usable = torch.isfinite(own).all(dim=-1)
        if not bool(usable[0]):
            raise ValueError(f"model: {name} gives logits that are not finite for the prompt; is it loaded correctly?")
        at_head = checked.logits(probes.to(head.weight.dtype))
        end_to_end = checked.logits(hidden.to(head.weight.dtype))
    tolerance = _tolerance(head.weight)
    for what, theirs, ours in (
        ("the head as described", own[usable], at_head[usable]),
        ("the backbone's hidden state", own[:1], end_to_end),
    ):
        size = theirs.abs().amax(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        # A NaN compares as unequal, so that it can't pass.
        difference = float(((ours - theirs).abs().amax(dim=-1) / size).nan_to_num(nan=float("inf")).max())
        if difference > tolerance:
            raise ValueError(
                f"model: {name} does something to its logits that is not known here. {what.capitalize()} "
                f"(logit_scale={head.logit_scale}, softcap={head.softcap}, "
                f"bias={'yes' if head.bias is not None else 'no'}) differs from the model's own logits by "
                f"{difference:.3g} of the largest, allowed {tolerance:.3g}. If the logits are a scaled, softcapped or "
                "biased product all the same, pass head=fmms.lm_head.LMHead(...)"
            )
    _verified[model] = (fingerprint, checked)
    return checked


def _surroundings(model: torch.nn.Module, backbone: torch.nn.Module) -> tuple:
    """What the modules outside the backbone, whose code decoding leaves out, are and run."""
    inside = set(backbone.modules())
    return tuple(
        # Hooks are numbered in the order in which they are registered, and no number is used twice.
        (_identity(m), _identity(type(m)), _code(m.forward), tuple(m._forward_hooks), tuple(m._forward_pre_hooks))
        for m in model.modules()
        if m not in inside
    )


def _code(function: Any) -> tuple:
    """Identity of a function; of a method, which is a new object at every look, those of its two parts."""
    return _identity(getattr(function, "__func__", function)), _identity(getattr(function, "__self__", None))


def _identity(thing: Any) -> Any:
    # Weak, so that a verified model isn't kept alive; an id alone could come back for another object.
    try:
        return weakref.ref(thing)
    except TypeError:
        return id(thing)


def _probe(
    model: torch.nn.Module, backbone: torch.nn.Module, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the whole model with scaled copies of its last hidden state in the backbone's output.

    Returns the copies `[3, D]` and the model's logits for them `[3, V]`.
    """
    seen: list[torch.Tensor] = []

    def replace(module, args, output):
        last = output["last_hidden_state"][0, -1]
        factors = torch.tensor(_PROBE_FACTORS, device=last.device)
        # The clamp keeps float16 finite.
        limit = torch.finfo(last.dtype).max / 16
        probes = (last.float() * factors[:, None]).clamp(-limit, limit).to(last.dtype)
        seen.append(probes)
        output["last_hidden_state"] = probes.unsqueeze(0)
        return output

    handle = backbone.register_forward_hook(replace)
    try:
        logits = model(input_ids=tokens, use_cache=False, return_dict=True)["logits"]
    finally:
        handle.remove()
    if len(seen) != 1 or logits.shape[:-1] != (1, len(_PROBE_FACTORS)):
        raise ValueError(
            f"model: {type(model).__name__} gave logits of shape {list(logits.shape)} for {len(_PROBE_FACTORS)} hidden "
            f"states, running its {type(backbone).__name__} {len(seen)} times; expected one row for each and one run"
        )
    return seen[0], logits[0]


def _cache_name(function: Any) -> str | None:
    parameters = inspect.signature(function).parameters
    return next((name for name in _CACHE_NAMES if name in parameters), None)


def _logit_scale(config: Any) -> float | None:
    scale = 1.0
    for field, how in _SCALES.items():
        value = _field(config, field)
        if not isinstance(value, int | float):
            continue
        for (family, exception), other in _SCALE_EXCEPTIONS.items():
            if exception == field and _text_config(config).model_type.startswith(family):
                how = other
        scale = scale * value if how == "multiply" else scale / value
    return None if scale == 1.0 else scale


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _field(config: Any, name: str) -> Any:
    value = getattr(config, name, None)
    return value if value is not None else getattr(_text_config(config), name, None)


def _tolerance(weight: torch.Tensor) -> float:
    if weight.dtype == torch.float32 and weight.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        return _TOLERANCE_TF32
    return _TOLERANCE[weight.dtype]
