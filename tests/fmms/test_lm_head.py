"""Heads of Hugging Face models: described as the model computes them, or refused."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from fmms.lm_head import Backbone, LMHead, find_lm_head, verify_lm_head

transformers = pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")

PROMPT = tiny_models.prompts()[0][0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", {}),
        ("gpt2", {}),
        ("phi", {"bias"}),
        ("gemma2", {"softcap": 5.0}),
        ("cohere", {"logit_scale": 0.25}),
        ("granite", {"logit_scale": 1 / 3}),
    ],
)
def test_describes_what_the_model_does_to_its_logits(name, expected):
    arguments = find_lm_head(tiny_models.build(name, transformers)).sample_arguments()
    assert set(arguments) == set(expected)
    for field in set(expected) - {"bias"}:
        assert arguments[field] == pytest.approx(expected[field])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", sorted(tiny_models.ARCHITECTURES))
def test_a_described_head_passes_verification(name, dtype):
    model = tiny_models.build(name, transformers).to(dtype)
    head = verify_lm_head(model, find_lm_head(model), PROMPT)
    assert head.weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()


def test_the_opposite_meaning_of_logits_scaling():
    """HyperCLOVA X multiplies by the field that Granite divides by."""
    config = transformers.HyperCLOVAXConfig(**tiny_models.GROUPED, **tiny_models.SPECIAL, logits_scaling=3.0)
    model = transformers.HyperCLOVAXForCausalLM(config).eval()
    assert verify_lm_head(model, find_lm_head(model), PROMPT).logit_scale == pytest.approx(3.0)


def test_a_scale_before_the_head_counts_as_well():
    """MiniCPM3 divides the hidden state, not the logits."""
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8}
    sizes = tiny_models.SIZES | {"num_key_value_heads": 4}
    config = transformers.MiniCPM3Config(**sizes, **tiny_models.SPECIAL, **latent, dim_model_base=16)
    model = transformers.MiniCPM3ForCausalLM(config).eval()
    assert verify_lm_head(model, find_lm_head(model), PROMPT).logit_scale == pytest.approx(0.5)


class _Unknown(transformers.LlamaForCausalLM):
    """A head whose logits get `change`, which no config field tells."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output["logits"] = self.change(output["logits"])
        return output


def _unknown(change):
    torch.manual_seed(0)
    # Small weights: the logits are far below 1, where a softcap of 30 hides in the rounding.
    special = tiny_models.SPECIAL | {"initializer_range": 0.02}
    model = _Unknown(transformers.LlamaConfig(**tiny_models.GROUPED, **special)).eval()
    model.change = change
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits * 1.1,
        lambda logits: 30 * torch.tanh(logits / 30),
        lambda logits: logits + torch.linspace(0, 0.1, logits.shape[-1], dtype=logits.dtype),
        lambda logits: torch.where(logits > 0, logits, 0.5 * logits),
        lambda logits: logits.roll(1, dims=-1),
    ],
    ids=["scale", "softcap", "bias", "kink", "order"],
)
def test_an_unknown_change_of_the_logits_is_refused(change, dtype):
    model = _unknown(change).to(dtype)
    with pytest.raises(ValueError, match=r"_Unknown .* differs from the model's own logits by [\d.]+"):
        verify_lm_head(model, find_lm_head(model), PROMPT)


def test_a_head_written_by_hand_is_taken_if_it_is_right():
    model = _unknown(lambda logits: logits * 1.1)
    right = LMHead(model.lm_head.weight.detach(), logit_scale=1.1)
    assert verify_lm_head(model, right, PROMPT).logit_scale == 1.1
    with pytest.raises(ValueError, match="differs"):
        verify_lm_head(model, LMHead(right.weight, logit_scale=1.2), PROMPT)


def test_rows_without_a_logit_are_outside_the_vocabulary():
    model = _unknown(lambda logits: logits[..., :90])
    head = verify_lm_head(model, find_lm_head(model), PROMPT)
    assert head.vocab_size == 90
    assert head.sample_arguments() == {"vocab_size": 90}
    assert head.logits(torch.zeros(2, 32)).shape == (2, 90)


def test_verification_runs_once_per_model_and_weights():
    model = tiny_models.build("llama", transformers)
    runs = []
    model.register_forward_hook(lambda *_: runs.append(1))
    for _ in range(3):
        verify_lm_head(model, find_lm_head(model), PROMPT)
    assert len(runs) == 1
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    verify_lm_head(model, find_lm_head(model), PROMPT)
    assert len(runs) == 2


class _Negated(torch.nn.Linear):
    def forward(self, hidden):
        return -super().forward(hidden)


def _negate(output):
    output["logits"] = -output["logits"]
    return output


def _patch_forward(model):
    forward = model.forward
    model.forward = lambda *args, **kwargs: _negate(forward(*args, **kwargs))


def _patch_head_forward(model):
    forward = model.lm_head.forward
    model.lm_head.forward = lambda hidden: -forward(hidden)


def _replace_head(model):
    weight = model.lm_head.weight
    model.lm_head = _Negated(32, 97, bias=False)
    model.lm_head.weight = weight


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.lm_head.register_forward_hook(lambda module, args, output: -output),
        lambda model: model.lm_head.register_forward_pre_hook(lambda module, args: (-args[0],)),
        lambda model: model.register_forward_hook(lambda module, args, output: _negate(output)),
        _patch_forward,
        _patch_head_forward,
        _replace_head,
    ],
    ids=["head hook", "head pre-hook", "model hook", "model forward", "head forward", "head"],
)
def test_a_change_after_verification_is_seen(change):
    model = tiny_models.build("llama", transformers)
    verify_lm_head(model, find_lm_head(model), PROMPT)
    change(model)
    with pytest.raises(ValueError, match="differs"):
        verify_lm_head(model, find_lm_head(model), PROMPT)


def test_a_verified_model_is_not_kept_alive():
    model = tiny_models.build("llama", transformers)
    verify_lm_head(model, find_lm_head(model), PROMPT)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_logits_that_are_not_finite_are_refused():
    model = tiny_models.build("llama", transformers)
    with torch.no_grad():
        model.lm_head.weight[5, 5] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        verify_lm_head(model, find_lm_head(model), PROMPT)


def test_logits_in_order_scale_softcap_bias():
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(3, 8), torch.randn(40, 8), torch.randn(40)
    head = LMHead(weight, bias=bias, logit_scale=0.5, softcap=2.0, vocab_size=33)
    expected = (2.0 * torch.tanh(0.5 * F.linear(hidden, weight) / 2.0) + bias)[:, :33]
    torch.testing.assert_close(head.logits(hidden), expected)


def test_refuses_encoder_decoders():
    config = transformers.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder"):
        find_lm_head(transformers.T5ForConditionalGeneration(config))


def test_refuses_models_without_a_head():
    model = tiny_models.build("llama", transformers)
    with pytest.raises(ValueError, match=r"LlamaModel has no output embeddings.*AutoModelForCausalLM"):
        find_lm_head(model.model)
    with pytest.raises(ValueError, match="expected a transformers causal language model, got Linear"):
        find_lm_head(torch.nn.Linear(2, 2))


def test_refuses_heads_that_are_no_plain_matrix():
    model = tiny_models.build("llama", transformers)
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(97, 32, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"torch\.int8; expected a weight of dtype float32.*quantisation"):
        find_lm_head(model)
    model.lm_head = torch.nn.Embedding(97, 32)
    with pytest.raises(ValueError, match=r"is a Embedding, expected a torch\.nn\.Linear"):
        find_lm_head(model)
    model.lm_head = torch.nn.Linear(32, 97, device="meta")
    with pytest.raises(ValueError, match="meta device"):
        find_lm_head(model)


def test_refuses_a_backbone_without_cache():
    config = transformers.OpenAIGPTConfig(vocab_size=97, n_embd=32, n_layer=1, n_head=4, n_positions=64)
    with pytest.raises(ValueError, match="OpenAIGPTLMHeadModel has no backbone that takes a key-value cache"):
        Backbone(transformers.OpenAIGPTLMHeadModel(config))
