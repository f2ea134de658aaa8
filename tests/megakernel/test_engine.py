"""The engine as a user calls it, on the host build."""

import dataclasses
import json

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
        (lambda engine: engine.decode(2, forced=[1, 2]), "forced: expected at most 2 token ids"),
        (lambda engine: engine.decode(2, forced=[600]), "forced: expected"),
        (lambda engine: engine.decode(99), "iterations: expected at most 61"),
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


def test_a_launch_that_is_given_up_can_be_followed_by_others(engine):
    engine.prefill(PROMPT)
    with pytest.raises(Deadlock, match="workers wait forever"):
        engine.decode(4, spin_budget=0)
    engine.prefill(PROMPT)
    assert (engine.decode(4).tokens >= 0).all()
