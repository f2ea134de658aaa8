"""The model's configuration: V2-Lite's published numbers, what is refused, and agreement with transformers."""

import dataclasses
import json
import math

import pytest
import torch

from megakernel.config import ONLY, TINY, V2_LITE, ModelConfig
from megakernel.weights import expected_shapes

SHAPES = {"v2_lite": V2_LITE, "tiny": TINY}

PUBLISHED = json.loads(
    """{"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "attention_bias": false,
    "attention_dropout": 0.0, "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 1408, "moe_layer_freq": 1,
    "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": false, "num_attention_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": null,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32,
    "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
    "type": "yarn"}, "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
    "tie_word_embeddings": false, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16",
    "use_cache": true, "v_head_dim": 128, "vocab_size": 102400}"""
)
"""config.json of deepseek-ai/DeepSeek-V2-Lite."""


def changed(**fields):
    return {**PUBLISHED, **fields}


def with_rope(**fields):
    return changed(rope_scaling={**PUBLISHED["rope_scaling"], **fields})


def without(name):
    return {key: value for key, value in PUBLISHED.items() if key != name}


def test_published_config_is_v2_lite():
    assert ModelConfig.from_dict(PUBLISHED) == V2_LITE


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_files_round_trip(config, tmp_path):
    assert ModelConfig.from_dict(config.to_dict()) == config
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    assert ModelConfig.from_file(path) == ModelConfig.from_file(tmp_path) == config


def test_new_rope_parameters_are_read():
    rope = {**PUBLISHED["rope_scaling"], "rope_type": "yarn", "rope_theta": 10000.0}
    config = {key: value for key, value in PUBLISHED.items() if not key.startswith("rope_")}
    assert ModelConfig.from_dict({**config, "rope_parameters": rope}) == V2_LITE


def test_derived_numbers():
    assert V2_LITE.qk_head_dim == 192
    assert V2_LITE.shared_width == 2816
    assert V2_LITE.softmax_scale == pytest.approx(192**-0.5 * 1.2608037**2, rel=1e-6)
    assert V2_LITE.softmax_scale == pytest.approx(0.114721, abs=5e-7)
    assert V2_LITE.rotary_scale == 1.0
    other = dataclasses.replace(V2_LITE, rope_mscale=1.0)
    assert other.rotary_scale == pytest.approx((0.1 * math.log(40) + 1) / (0.0707 * math.log(40) + 1))
    assert other.softmax_scale == V2_LITE.softmax_scale
    assert dataclasses.replace(V2_LITE, rope_factor=0.5).softmax_scale == 192**-0.5
    assert [layer for layer in range(27) if not V2_LITE.is_moe(layer)] == [0]
    for layer in (-1, 27):
        with pytest.raises(IndexError):
            V2_LITE.is_moe(layer)


def test_bytes_per_token():
    assert V2_LITE.weight_bytes() / 1e9 == pytest.approx(4.903, abs=5e-4)
    assert V2_LITE.cache_bytes(1056) / 1e9 == pytest.approx(0.292, abs=5e-4)
    assert V2_LITE.cache_bytes(1056, latent=True) / 1e9 == pytest.approx(0.033, abs=5e-4)
    assert V2_LITE.weight_bytes(itemsize=4) == 2 * V2_LITE.weight_bytes()


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_weights_per_token_are_those_of_the_checkpoint(config):
    """All tensors, less the experts that are not chosen and the other rows of the embedding."""
    sizes = {name: math.prod(shape) for name, shape in expected_shapes(config).items()}
    unused = tuple(f".experts.{n}." for n in range(config.num_experts_per_tok, config.n_routed_experts))
    used = sum(size for name, size in sizes.items() if not any(part in name for part in unused))
    assert config.weights_per_token() == used - (config.vocab_size - 1) * config.hidden_size


def test_frequencies_are_kept_ramped_and_slowed():
    """By the formula in fp64; TINY has a pair of every kind."""
    for config, ramp in ((V2_LITE, (10, 23)), (TINY, (0, 2))):
        got = config.inverse_frequencies()
        width = config.qk_rope_head_dim
        assert got.dtype == torch.float32
        for pair, value in enumerate(got.tolist()):
            plain = config.rope_theta ** (-2 * pair / width)
            slowed = min(max((pair - ramp[0]) / (ramp[1] - ramp[0]), 0), 1)
            assert value == pytest.approx(plain * (1 - slowed) + plain / config.rope_factor * slowed, rel=1e-5)
    assert {"kept", "ramped", "slowed"} == {
        "kept" if value == plain else "slowed" if value == pytest.approx(plain / 40) else "ramped"
        for value, plain in zip(TINY.inverse_frequencies().tolist(), (1, 0.1, 0.01, 0.001), strict=True)
    }


def test_a_ramp_without_width():
    config = dataclasses.replace(TINY, qk_rope_head_dim=2, rope_original_max_position_embeddings=6)
    assert config.inverse_frequencies().tolist() == [1.0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed(model_type="llama"), "model_type: expected 'deepseek_v2', found 'llama'"),
        (changed(q_lora_rank=1536), "q_lora_rank: expected None, found 1536"),
        (without("q_lora_rank"), "q_lora_rank: expected None, found 'no such field'"),
        (changed(topk_method="group_limited_greedy"), "topk_method: expected 'greedy', found 'group_limited_greedy'"),
        (changed(scoring_func="sigmoid"), "scoring_func: expected 'softmax', found 'sigmoid'"),
        (changed(norm_topk_prob=True), "norm_topk_prob: expected False, found True"),
        (changed(attention_bias=True), "attention_bias: expected False, found True"),
        (changed(mlp_bias=True), "mlp_bias: expected False, found True"),
        (changed(tie_word_embeddings=True), "tie_word_embeddings: expected False, found True"),
        (changed(hidden_act="gelu"), "hidden_act: expected 'silu', found 'gelu'"),
        (changed(moe_layer_freq=2), "moe_layer_freq: expected 1, found 2"),
        (changed(n_group=8), "n_group: expected 1, found 8"),
        (changed(num_key_value_heads=4), "num_key_value_heads: expected num_attention_heads = 16, found 4"),
        (changed(rope_scaling=None), "rope_scaling: expected a dictionary of type 'yarn', found None"),
        (with_rope(type="linear"), "rope_scaling.type: expected 'yarn', found 'linear'"),
        (with_rope(truncate=False), "rope_scaling.truncate: expected True, found False"),
        (with_rope(attention_factor=1.5), "rope_scaling.attention_factor: expected None, found 1.5"),
        (with_rope(mscale=None), "rope_mscale: expected a number, found None"),
        (with_rope(factor=-1), "rope_factor: expected a positive number, found -1"),
        (with_rope(beta_fast=1), "rope_beta_fast: expected more than rope_beta_slow = 1, found 1"),
        (changed(rope_scaling={"type": "yarn"}), "rope_scaling.factor: expected a number, found 'no such field'"),
        (without("hidden_size"), "hidden_size: expected a whole number, found 'no such field'"),
        (changed(hidden_size="2048"), "hidden_size: expected a whole number, found '2048'"),
        (changed(hidden_size=2048.0), "hidden_size: expected a whole number, found 2048.0"),
        (changed(hidden_size=True), "hidden_size: expected a whole number, found True"),
        (changed(hidden_size=2050), "hidden_size: expected a multiple of num_attention_heads = 16, found 2050"),
        (changed(num_experts_per_tok=65), "num_experts_per_tok: expected at most n_routed_experts = 64, found 65"),
        (changed(first_k_dense_replace=28), "first_k_dense_replace: expected at most num_hidden_layers = 27, found 28"),
        (changed(first_k_dense_replace=-1), "first_k_dense_replace: expected 0 or more, found -1"),
        (changed(qk_rope_head_dim=63), "qk_rope_head_dim: expected an even number"),
        (changed(rms_norm_eps=0), "rms_norm_eps: expected a positive number, found 0"),
        (changed(rope_theta=math.inf), "rope_theta: expected a positive number, found inf"),
        (changed(rope_theta=1), "rope_theta: expected more than 1, found 1"),
        (changed(eos_token_id=102400), "eos_token_id: expected at most vocab_size - 1 = 102399, found 102400"),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_what_is_refused(config, message):
    with pytest.raises(ValueError, match="config field ") as error:
        ModelConfig.from_dict(config)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ONLY)
def test_fields_of_one_value_may_be_left_out(name):
    assert ModelConfig.from_dict(without(name)) == ModelConfig.from_dict(changed(**{name: None})) == V2_LITE


def test_bad_files_name_themselves(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(OSError):
        ModelConfig.from_file(path)
    for text in ("{", "[]", json.dumps(changed(n_group=8))):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"config\.json: "):
            ModelConfig.from_file(path)


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_transformers_agrees(config):
    pytest.importorskip("transformers")
    from transformers import DeepseekV2Config
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as theirs

    hf = config.to_hf()
    rotary = theirs.DeepseekV2RotaryEmbedding(hf)
    assert torch.equal(rotary.inv_freq, config.inverse_frequencies())
    assert rotary.attention_scaling == config.rotary_scale
    scale = theirs.yarn_apply_mscale(hf.rope_parameters, config.qk_head_dim**-0.5)
    assert scale == pytest.approx(config.softmax_scale, rel=1e-12)
    assert (hf._attn_implementation, hf._experts_implementation) == ("eager", "eager")
    # no field is left to its class default: each was passed, or is computed by the class itself
    given = {*config.to_dict(), "pad_token_id", "pretraining_tp", "attention_dropout", "use_cache", "rope_parameters"}
    own = {name for name in DeepseekV2Config.__annotations__ if not name.startswith(("base_model", "_", "attribute"))}
    own -= {"model_type", "keys_to_ignore_at_inference", "head_dim", "output_router_logits"}
    assert own <= given
    assert hf.head_dim == config.qk_rope_head_dim
    read = ModelConfig.from_dict(hf.to_dict())
    assert read == config
