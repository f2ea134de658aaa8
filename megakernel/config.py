"""The shape of the model that is decoded: DeepSeek-V2-Lite, and a tiny one that has every feature of it.

Fields carry the names of the Hugging Face config (`DeepseekV2Config`); those of its `rope_scaling` start with `rope_`.
What differs between checkpoints is a field; what this decoder supports in one form only (softmax router, greedy top-k,
no query LoRA, ...) is checked when a config is read and has no field.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

KV_NORM_EPS = 1e-6
"""Epsilon of the norm of the latent: a constant of the architecture, `rms_norm_eps` is that of all other norms."""

ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
}
"""Fields that are supported with one value. Left out of a config, or None, they have it."""

ROPE = {
    "factor": "rope_factor",
    "beta_fast": "rope_beta_fast",
    "beta_slow": "rope_beta_slow",
    "mscale": "rope_mscale",
    "mscale_all_dim": "rope_mscale_all_dim",
    "original_max_position_embeddings": "rope_original_max_position_embeddings",
}
"""Keys of the Hugging Face `rope_scaling` and the fields that hold them."""

ROPE_ONLY = {"truncate": True, "partial_rotary_factor": 1.0, "attention_factor": None}


@dataclass(frozen=True)
class ModelConfig:
    """What a decode has to know of a DeepSeek-V2 model without query LoRA.

    Raises:
        ValueError: a field has the wrong type, is out of range, or disagrees with another; the message names it, what
            was expected and what was found.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the dense MLP in the first layers."""
    moe_intermediate_size: int
    """Width of one expert."""
    num_hidden_layers: int
    first_k_dense_replace: int
    """How many of the first layers have a dense MLP in place of experts."""
    num_attention_heads: int
    qk_nope_head_dim: int
    """Width of the part of a query or key head that is not rotated."""
    qk_rope_head_dim: int
    """Width of the rotated part; keys share one among all heads."""
    v_head_dim: int
    kv_lora_rank: int
    """Width of the latent that keys and values are expanded from."""
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_factor: float
    rope_beta_fast: float
    rope_beta_slow: float
    rope_mscale: float
    rope_mscale_all_dim: float
    rope_original_max_position_embeddings: int
    initializer_range: float
    bos_token_id: int
    eos_token_id: int

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            whole = field.type == "int"
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise _error(field.name, "a whole number" if whole else "a number", value)
            least = 0 if field.name in {"first_k_dense_replace", "bos_token_id", "eos_token_id"} else None
            if least is None and not (value > 0 and math.isfinite(value)):
                raise _error(field.name, "a positive number", value)
            if least == 0 and value < 0:
                raise _error(field.name, "0 or more", value)
        for name, most, what in (
            ("num_experts_per_tok", self.n_routed_experts, "n_routed_experts"),
            ("first_k_dense_replace", self.num_hidden_layers, "num_hidden_layers"),
            ("bos_token_id", self.vocab_size - 1, "vocab_size - 1"),
            ("eos_token_id", self.vocab_size - 1, "vocab_size - 1"),
        ):
            if getattr(self, name) > most:
                raise _error(name, f"at most {what} = {most}", getattr(self, name))
        if self.qk_rope_head_dim % 2:
            raise _error("qk_rope_head_dim", "an even number, dimensions are rotated in pairs", self.qk_rope_head_dim)
        if self.hidden_size % self.num_attention_heads:
            expected = f"a multiple of num_attention_heads = {self.num_attention_heads}"
            raise _error("hidden_size", expected, self.hidden_size)
        if self.rope_theta <= 1:
            raise _error("rope_theta", "more than 1", self.rope_theta)
        if self.rope_beta_fast <= self.rope_beta_slow:
            raise _error("rope_beta_fast", f"more than rope_beta_slow = {self.rope_beta_slow}", self.rope_beta_fast)

    # ------------------------------------------------------------------------------------------------- reading, writing

    @classmethod
    def from_dict(cls, hf_config: Mapping[str, Any]) -> ModelConfig:
        """The config of a Hugging Face `config.json`, with its rotary part in `rope_scaling` or `rope_parameters`.

        Raises:
            ValueError: a field is missing, unsupported or out of range; the message names it, what was expected and
                what was found.
        """
        if hf_config.get("model_type", "deepseek_v2") != "deepseek_v2":
            raise _error("model_type", "'deepseek_v2'", hf_config["model_type"])
        # the class default of transformers is 1536, so a config that leaves it out has a query LoRA
        if "q_lora_rank" not in hf_config or hf_config["q_lora_rank"] is not None:
            raise _error("q_lora_rank", "None", hf_config.get("q_lora_rank", "no such field"))
        for name, value in ONLY.items():
            found = hf_config.get(name)
            if found is not None and found != value:
                raise _error(name, repr(value), found)
        heads = hf_config.get("num_attention_heads")
        if hf_config.get("num_key_value_heads") not in (None, heads):
            raise _error("num_key_value_heads", f"num_attention_heads = {heads}", hf_config["num_key_value_heads"])

        rope_name = "rope_parameters" if hf_config.get("rope_parameters") else "rope_scaling"
        rope = hf_config.get(rope_name)
        if not isinstance(rope, Mapping):
            raise _error(rope_name, "a dictionary of type 'yarn'", rope)
        kind = rope.get("rope_type", rope.get("type"))
        if kind != "yarn":
            raise _error(f"{rope_name}.type", "'yarn'", kind)
        for name, value in ROPE_ONLY.items():
            if rope.get(name, value) != value:
                raise _error(f"{rope_name}.{name}", repr(value), rope[name])

        values = {}
        for field in dataclasses.fields(cls):
            source, key = hf_config, field.name
            if field.name in ROPE.values():
                source, key = rope, next(key for key, name in ROPE.items() if name == field.name)
            elif field.name == "rope_theta" and "rope_theta" not in hf_config:
                source = rope
            if key not in source:
                label = key if source is hf_config else f"{rope_name}.{key}"
                raise _error(label, "a whole number" if field.type == "int" else "a number", "no such field")
            values[field.name] = source[key]
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        """`from_dict` of a JSON file, or of `config.json` in a folder.

        Raises:
            OSError: it can't be read.
            ValueError: it holds no JSON object, or as for `from_dict`; the message starts with the path.
        """
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(config, dict):
                raise ValueError(f"expected a JSON object, found {type(config).__name__}")
            return cls.from_dict(config)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The Hugging Face config as a dictionary; `from_dict` reads it back."""
        values = dataclasses.asdict(self)
        rope = {key: values.pop(name) for key, name in ROPE.items()}
        return {
            "model_type": "deepseek_v2",
            "architectures": ["DeepseekV2ForCausalLM"],
            **values,
            **ONLY,
            "q_lora_rank": None,
            "num_key_value_heads": self.num_attention_heads,
            "rope_scaling": {"type": "yarn", **rope},
        }

    def to_hf(self) -> Any:
        """The `DeepseekV2Config` of transformers, with every field set: its class defaults are another model's.

        Attention and experts are set to their eager implementations, those the reference is compared with.

        Raises:
            ImportError: transformers is not installed.
        """
        from transformers import DeepseekV2Config

        values = self.to_dict()
        rope = values.pop("rope_scaling")
        rope = {"rope_type": rope.pop("type"), "rope_theta": values.pop("rope_theta"), **rope}
        del values["model_type"]
        return DeepseekV2Config(
            **values,
            rope_parameters={name: _as_float(name, value) for name, value in rope.items()},
            pad_token_id=None,
            pretraining_tp=1,
            attention_dropout=0.0,
            use_cache=True,
            output_router_logits=False,
            attn_implementation="eager",
            experts_implementation="eager",
        )

    # ---------------------------------------------------------------------------------------------------------- derived

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def shared_width(self) -> int:
        """Width of the shared experts, which are one SwiGLU."""
        return self.n_shared_experts * self.moe_intermediate_size

    @property
    def softmax_scale(self) -> float:
        """What attention scores are multiplied by: qk_head_dim^-1/2 m^2, m = 0.1 mscale_all_dim ln(factor) + 1.

        YaRN's temperature (Peng et al., "YaRN", 2023, section 3.4), with the mscale_all_dim of DeepSeek-V2's code.
        """
        return self.qk_head_dim**-0.5 * _mscale(self.rope_factor, self.rope_mscale_all_dim) ** 2

    @property
    def rotary_scale(self) -> float:
        """What cosines and sines are multiplied by: 1 where mscale equals mscale_all_dim, as in DeepSeek-V2."""
        return _mscale(self.rope_factor, self.rope_mscale) / _mscale(self.rope_factor, self.rope_mscale_all_dim)

    def inverse_frequencies(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Radians per position of each rotated pair: fp32 [qk_rope_head_dim / 2].

        "NTK-by-parts" of YaRN (Peng et al., 2023, section 3.2): pairs that turn more than beta_fast times in the
        original context keep their frequency, those that turn less than beta_slow times are slowed by the factor, with
        a linear ramp between. The arithmetic is that of transformers, to the bit.
        """
        width, base = self.qk_rope_head_dim, self.rope_theta
        powers = base ** (torch.arange(0, width, 2).float() / width)

        def turning(times):
            """The (fractional) pair that turns `times` times in the original context."""
            context = self.rope_original_max_position_embeddings
            return width * math.log(context / (times * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(turning(self.rope_beta_fast)), 0)
        high = min(math.ceil(turning(self.rope_beta_slow)), width - 1)
        span = 0.001 if low == high else high - low  # no division by 0
        ramp = ((torch.arange(width // 2).float() - low) / span).clamp(0, 1)
        kept = 1 - ramp
        return ((1.0 / (self.rope_factor * powers)) * (1 - kept) + (1.0 / powers) * kept).to(device)

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts. Raises IndexError for a layer outside [0, num_hidden_layers)."""
        if not 0 <= layer < self.num_hidden_layers:
            raise IndexError(f"layer {layer} of a model of {self.num_hidden_layers}")
        return layer >= self.first_k_dense_replace

    def weights_per_token(self) -> int:
        """How many weights one token of batch 1 touches: every matrix once, of the routed experts those chosen, one row
        of the embedding, and the norms."""
        hidden, heads = self.hidden_size, self.num_attention_heads
        attention = (
            hidden * heads * self.qk_head_dim
            + hidden * (self.kv_lora_rank + self.qk_rope_head_dim)
            + self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
            + heads * self.v_head_dim * hidden
        )
        norms = 2 * hidden + self.kv_lora_rank
        dense = 3 * hidden * self.intermediate_size
        routed = self.num_experts_per_tok * self.moe_intermediate_size
        experts = self.n_routed_experts * hidden + 3 * hidden * (routed + self.shared_width)
        moe_layers = self.num_hidden_layers - self.first_k_dense_replace
        layers = self.num_hidden_layers * (attention + norms) + self.first_k_dense_replace * dense
        return layers + moe_layers * experts + hidden + hidden + self.vocab_size * hidden

    def weight_bytes(self, itemsize: int = 2) -> int:
        """Bytes of weights that one token of batch 1 touches; `itemsize` bytes each (bf16: 2)."""
        return self.weights_per_token() * itemsize

    def cache_bytes(self, length: int, *, latent: bool = False, itemsize: int = 2) -> int:
        """Bytes of cache that attention over `length` positions reads in all layers, for one token.

        `latent` counts the compressed cache (kv_lora_rank + qk_rope_head_dim per position), otherwise the keys and
        values of all heads count.
        """
        expanded = self.num_attention_heads * (self.qk_head_dim + self.v_head_dim)
        row = self.kv_lora_rank + self.qk_rope_head_dim if latent else expanded
        return self.num_hidden_layers * length * row * itemsize


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _as_float(name: str, value: Any) -> Any:
    """transformers warns about whole numbers where it declares floats."""
    return float(value) if isinstance(value, int) and name != "original_max_position_embeddings" else value


def _error(name: str, expected: str, found: Any) -> ValueError:
    return ValueError(f"config field {name}: expected {expected}, found {found!r}")


V2_LITE = ModelConfig(
    vocab_size=102400,
    hidden_size=2048,
    intermediate_size=10944,
    moe_intermediate_size=1408,
    num_hidden_layers=27,
    first_k_dense_replace=1,
    num_attention_heads=16,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    kv_lora_rank=512,
    n_routed_experts=64,
    n_shared_experts=2,
    num_experts_per_tok=6,
    routed_scaling_factor=1.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=163840,
    rope_theta=10000,
    rope_factor=40,
    rope_beta_fast=32,
    rope_beta_slow=1,
    rope_mscale=0.707,
    rope_mscale_all_dim=0.707,
    rope_original_max_position_embeddings=4096,
    initializer_range=0.02,
    bos_token_id=100000,
    eos_token_id=100001,
)
"""deepseek-ai/DeepSeek-V2-Lite."""

TINY = dataclasses.replace(
    V2_LITE,
    vocab_size=600,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    kv_lora_rank=32,
    n_routed_experts=8,
    num_experts_per_tok=3,
    max_position_embeddings=2560,
    rope_original_max_position_embeddings=64,
    initializer_range=0.125,
    bos_token_id=0,
    eos_token_id=1,
)
"""Every feature of V2-Lite, its frequencies kept, ramped and slowed included, small enough for tests on a CPU.

`initializer_range` is hidden_size^-1/2, so that each op matters as much as in V2-Lite (where it is 0.9 of that)."""
