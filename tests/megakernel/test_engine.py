"""The engine as a user calls it, on the host build."""

import copy
import dataclasses
import json
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import fmms
from megakernel import DecodeEngine, reference
from megakernel import weights as weights_of
from megakernel.config import TINY
from megakernel.knobs import PRESETS
from megakernel.launch import Deadlock

PROMPT = list(range(20, 40))


@pytest.fixture(scope="module")
def weights():
    return weights_of.random(TINY, 3)


@pytest.fixture(scope="module")
def engine(weights):
    return DecodeEngine(TINY, weights, capacity=80)


def test_greedy_tokens_are_those_of_the_reference(engine, weights):
    engine.prefill(PROMPT)
    found = engine.decode(24).tokens
    expected, logits = reference.greedy(weights, TINY, PROMPT, 24)
    top = logits.float().topk(2).values
    for ours, theirs, margin in zip(found.tolist(), expected, (top[:, 0] - top[:, 1]).tolist(), strict=True):
        if ours != theirs:  # after a near-tie another text follows
            assert margin < 0.1
            break


@pytest.mark.parametrize("knobs", PRESETS)
@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_presets_and_schedules_decode_the_same(knobs, schedule, engine, weights):
    other = DecodeEngine(TINY, weights, knobs=PRESETS[knobs], capacity=60, workers=3, schedule=schedule)
    for each in (engine, other):
        each.prefill(PROMPT)
    assert torch.equal(other.decode(8).tokens, engine.decode(8).tokens)


def test_samples_are_those_that_fmms_draws_from_the_last_state(engine, weights):
    engine.prefill(PROMPT)
    for step in range(6):
        token = engine.decode(1, temperature=0.9, seed=5).tokens
        state = reference.rms_norm(
            engine.memory.tensor(f"layers.{TINY.num_hidden_layers - 1}.mlp_residual")[None],
            weights["model.norm.weight"],
            TINY.rms_norm_eps,
        )
        expected = fmms.sample(state, weights["lm_head.weight"], 0.9, seed=5, position=step, impl="torch").ids
        assert token.item() == expected.item()


def test_a_launch_of_many_tokens_is_many_launches_of_one(engine):
    engine.prefill(PROMPT)
    together = engine.decode(10, temperature=1.0, seed=9, return_logits=True)
    engine.prefill(PROMPT)
    alone = [engine.decode(1, temperature=1.0, seed=9, return_logits=True) for _ in range(10)]
    assert torch.equal(torch.cat([each.tokens for each in alone]), together.tokens)
    assert torch.equal(torch.cat([each.logits for each in alone]), together.logits)
    assert together.tokens.dtype == torch.int64 and together.logits.shape == (10, TINY.vocab_size)


def test_seeds(engine):
    def tokens(seed):
        engine.prefill(PROMPT)
        return engine.decode(12, temperature=1.5, seed=seed).tokens

    assert torch.equal(tokens(1), tokens(1))
    assert not torch.equal(tokens(1), tokens(2))
    assert torch.equal(tokens(1), tokens(fmms.noise.row_seeds(1, 1)))
    torch.manual_seed(0)
    first = tokens(None)
    assert not torch.equal(first, tokens(None))
    torch.manual_seed(0)
    assert torch.equal(first, tokens(None))


def test_forced_tokens_are_read(engine, weights):
    text = [7, 300, 12, 44]
    engine.prefill(PROMPT)
    found = engine.decode(5, forced=text, return_logits=True).logits
    expected, _ = reference.prefill(weights, TINY, [*PROMPT, *text])
    for ours, theirs in zip(found, expected[len(PROMPT) - 1 :].float(), strict=True):
        assert torch.cosine_similarity(ours, theirs, 0) >= 0.999  # of another text's logits it is below 0.5


def test_a_prompt_replaces_what_was_there(engine):
    engine.prefill([3])
    first = engine.decode(4).tokens
    engine.prefill(PROMPT)
    engine.decode(4)
    engine.prefill([3])
    assert torch.equal(engine.decode(4).tokens, first)
    engine.reset()
    with pytest.raises(ValueError, match="call prefill"):
        engine.decode(1)
    with pytest.raises(ValueError, match="no prompt to go back to: call prefill"):
        engine.rewind()


def test_a_prompt_is_continued_again(engine):
    engine.prefill(PROMPT)
    greedy, sampled = engine.decode(6).tokens, None
    for _ in range(2):
        engine.rewind()
        assert (engine.length, engine.step) == (len(PROMPT) - 1, 0)
        again = engine.decode(4, temperature=1.0, seed=3).tokens
        assert sampled is None or torch.equal(again, sampled), "the noise begins again, too"
        sampled = again
    engine.rewind()
    assert torch.equal(torch.cat([engine.decode(1).tokens for _ in range(6)]), greedy)


def test_folder_of_a_checkpoint(tmp_path, weights, engine):
    save_file = pytest.importorskip("safetensors.torch").save_file
    (tmp_path / "config.json").write_text(json.dumps(TINY.to_dict()))
    save_file(weights, tmp_path / "model.safetensors")
    loaded = DecodeEngine.from_pretrained(tmp_path, capacity=40)
    assert loaded.config == TINY
    for each in (loaded, engine):
        each.prefill(PROMPT)
    assert torch.equal(loaded.decode(6).tokens, engine.decode(6).tokens)


@pytest.mark.parametrize("preset", PRESETS)
def test_weights_by_name_are_those_that_were_given(preset, weights):
    found = DecodeEngine(TINY, weights, knobs=PRESETS[preset], capacity=8).weights
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_random_weights_are_those_of_the_seed():
    one, other = (DecodeEngine.random(dataclasses.replace(TINY, num_hidden_layers=1), seed) for seed in (1, 2))
    assert not torch.equal(one.weights["lm_head.weight"], other.weights["lm_head.weight"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda engine: engine.prefill([]), "ids: expected one or more token ids"),
        (lambda engine: engine.prefill([1, 600]), "ids: expected token ids from 0 to 599, got int 600"),
        (lambda engine: engine.prefill([1] * 81), r"ids: expected at most 80 \(the capacity\), got 81"),
        (lambda engine: engine.decode(0), "n: expected a positive integer, got int 0"),
        (lambda engine: engine.decode(2, temperature=-1), "temperature: expected a number, 0 or more"),
        (lambda engine: engine.decode(2, seed=1.5), "seed: expected"),
        (lambda engine: engine.decode(2, forced=[1, 2]), "forced: expected at most n - 1 = 1 token ids"),
        (lambda engine: engine.decode(2, forced=[1.9]), "forced: expected .* got float 1.9"),
        (lambda engine: engine.decode(3, forced="12"), "forced: expected"),
        (lambda engine: engine.decode(2, forced=[600]), "forced: expected"),
        (lambda engine: engine.decode(99), "n: expected at most 61, because 19 of the 80 positions are taken, got 99"),
        (lambda engine: engine.prefill([1.7, 2.0]), "ids: expected token ids from 0 to 599, got float 1.7"),
        (lambda engine: engine.prefill("hello"), "ids: expected token ids"),
        (lambda engine: engine.prefill(torch.ones(3)), "ids: expected one or more token ids"),
    ],
)
def test_bad_arguments_are_named(call, message, engine):
    engine.prefill(PROMPT)
    with pytest.raises(ValueError, match=message):
        call(engine)


def test_options_that_are_refused(weights):
    with pytest.raises(ValueError, match="schedule must be one of static, dynamic, not 'both'"):
        DecodeEngine(TINY, weights, schedule="both")
    with pytest.raises(ValueError, match="workers must be a positive integer, not 0"):
        DecodeEngine(TINY, weights, workers=0)
    with pytest.raises(ValueError, match=r"expected torch.bfloat16, got torch.float32"):
        DecodeEngine(TINY, {name: each.float() for name, each in weights.items()})


@pytest.mark.parametrize("change", [lambda w: w[1:], lambda w: torch.cat((w, w[:1])), lambda w: w.T.contiguous()])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.self_attn.q_proj.weight"])
def test_weights_of_another_shape_are_refused(name, change, weights):
    with pytest.raises(ValueError, match=f"tensor {name}: expected shape"):
        DecodeEngine(TINY, weights | {name: change(weights[name])})


def test_weights_that_are_missing_or_unknown_are_refused(weights):
    with pytest.raises(ValueError, match=r"tensor lm_head.weight: expected shape .* found no such tensor"):
        DecodeEngine(TINY, {name: each for name, each in weights.items() if name != "lm_head.weight"})
    with pytest.raises(ValueError, match="tensor bias: expected no such tensor"):
        DecodeEngine(TINY, weights | {"bias": weights["model.norm.weight"]})


def test_knobs_devices_and_folders_that_are_refused(weights, tmp_path):
    for knobs in ("h100", dict(splits=3)):
        with pytest.raises(ValueError, match="knobs must be a Knobs or one of h200, mi300x, mi300x_chain, not"):
            DecodeEngine(TINY, weights, knobs=knobs)
    with pytest.raises(ValueError, match="capacity: expected 1 to 2560 positions"):
        DecodeEngine(TINY, weights, capacity=0)
    for device in ("mps", "nowhere") if torch.cuda.is_available() else ("mps", "nowhere", "cuda"):
        with pytest.raises(ValueError, match="device: "):
            DecodeEngine.random(TINY, device=device)
    with pytest.raises(FileNotFoundError, match="download the checkpoint first"):
        DecodeEngine.from_pretrained(tmp_path / "none")


def test_a_launch_that_is_given_up_can_be_followed_by_others(engine):
    engine.prefill(PROMPT)
    expected = engine.decode(4).tokens
    engine.rewind()
    with pytest.raises(Deadlock, match="workers wait forever"):
        engine.decode(4, spin_budget=0)
    with pytest.raises(ValueError, match="did not end as it should"):
        engine.decode(4)
    engine.rewind()
    assert torch.equal(engine.decode(4).tokens, expected)


def test_an_interrupted_launch_is_not_gone_on_from(engine, monkeypatch):
    def interrupted(**launch):
        raise KeyboardInterrupt

    engine.prefill(PROMPT)
    with monkeypatch.context() as patched:
        patched.setattr(engine.launcher, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.decode(3)
    with pytest.raises(ValueError, match="did not end as it should"):
        engine.decode(3)


def test_engines_in_threads(weights, engine):
    engine.prefill(PROMPT)
    expected = engine.decode(12).tokens
    engines = [DecodeEngine(TINY, weights, capacity=60) for _ in range(2)]

    def decode(each):
        each.prefill(PROMPT)
        return each.decode(12).tokens

    with ThreadPoolExecutor(2) as pool:
        assert all(torch.equal(tokens, expected) for tokens in pool.map(decode, engines))


@pytest.mark.parametrize(
    "changes",
    [
        dict(n_routed_experts=1, num_experts_per_tok=1),
        dict(n_routed_experts=70, num_experts_per_tok=66),  # more than there are threads that compute
        dict(num_attention_heads=1, num_hidden_layers=1, first_k_dense_replace=1),
        dict(vocab_size=2, eos_token_id=1),
    ],
    ids=str,
)
def test_other_shapes_of_the_model(changes):
    config = dataclasses.replace(TINY, **changes)
    engine = DecodeEngine.random(config, 1, capacity=12)
    prompt = [1, 0, 1, 1, 0]
    engine.prefill(prompt)
    found = engine.decode(1, return_logits=True).logits[0]
    expected = reference.prefill(engine.weights, config, prompt)[0][-1].float()
    assert torch.cosine_similarity(found, expected, 0) >= 0.999


def test_capacity_is_what_the_model_allows(weights):
    short = dataclasses.replace(TINY, max_position_embeddings=64)
    assert DecodeEngine(short, weights).memory.capacity == 64
    with pytest.raises(
        ValueError, match=r"capacity: expected 1 to 64 positions \(max_position_embeddings\), got int 65"
    ):
        DecodeEngine(short, weights, capacity=65)


def test_copies_are_refused(engine):
    for copy_of in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="can't be copied or pickled"):
            copy_of(engine)
