"""Controls of `fmms.generate`: as arguments and from a GenerationConfig, against transformers and plain loops."""

import inspect
import math
import warnings

import pytest
import torch

import fmms
from fmms.generation_settings import Default, StepControls, resolve
from fmms.lm_head import LMHead
from fmms.testing import chi_square, draws_histogram

transformers = pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")

NEW = 12
FALSE_ALARM = 1e-6  # probability that a correct sampler fails one of the chi-square tests; the seeds are fixed
PADDING = (0, 3, 7, 9)
VOCAB = tiny_models.VOCAB
IDS, MASK = tiny_models.prompts(PADDING)
SEEDS = torch.tensor([11, -5, 2**62, 0])


@pytest.fixture(scope="module")
def llama():
    return tiny_models.build("llama", transformers)


def _config(**settings):
    return transformers.GenerationConfig(**settings)


def _last_logits(model, ids):
    """Logits [V] after the tokens `ids`, a list, on their own: no padding, no cache."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1]


def _warpers(temperature=1.0, top_k=0, top_p=1.0, min_p=None):
    """The warpers of transformers, in the order in which its generate applies them."""
    warpers = [transformers.TemperatureLogitsWarper(temperature)]
    warpers += [transformers.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [transformers.TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [transformers.MinPLogitsWarper(min_p)] if min_p is not None else []
    return transformers.LogitsProcessorList(warpers)


def _every_control(rows=slice(None)):
    """Every control at once, per prompt where that is possible; the same for a prompt alone."""
    tokens = torch.arange(VOCAB)
    allowed = torch.stack([tokens % 11 != row for row in range(4)])
    return {
        "temperature": torch.tensor([0.7, 2.0, 0.0, 5.0])[rows],
        "top_k": torch.tensor([40, 0, 7, 60])[rows],
        "top_p": torch.tensor([1.0, 0.9, 0.5, 0.95])[rows],
        "min_p": torch.tensor([0.0, 0.01, 0.2, 0.001])[rows],
        "filter_order": "min_p_first",
        "repetition_penalty": torch.tensor([1.0, 1.5, 0.9, 2.0])[rows],
        "frequency_penalty": torch.tensor([0.0, 0.3, 0.5, -0.4])[rows],
        "presence_penalty": torch.tensor([0.6, 0.0, 0.2, 1.0])[rows],
        "logit_bias": {5: 2.0, 17: -math.inf, 60: -1.5},
        "allowed_mask": lambda step, _: fmms.pack_mask(allowed[rows]) if step % 2 else None,
        "seed": SEEDS[rows],
        "min_new_tokens": 3,
        "return_logprobs": True,
        "return_raw_logprobs": True,
        "return_final_logprobs": True,
        "return_entropy": True,
        "top_logprobs": 4,
    }


# ------------------------------------------------------------------------------------------- greedy, as transformers


@pytest.mark.parametrize("name", sorted(tiny_models.ARCHITECTURES))
def test_greedy_tokens_under_penalties_bans_and_lengths_are_those_of_transformers(name):
    model = tiny_models.build(name, transformers)
    free = fmms.generate(model, IDS, MASK, max_new_tokens=NEW, temperature=0, eos_token_id=None).new_tokens
    eos, suppressed, at_first = int(free[0, 1]), [int(free[1, 2]), int(free[3, 4])], [int(free[2, 0]), 5000]
    # some releases of transformers put the penalty on the padding's token as well: let it be one that can't be drawn
    ids = torch.where(MASK != 0, IDS, suppressed[0])
    settings = {
        "do_sample": False,
        "repetition_penalty": 1.4,
        "suppress_tokens": suppressed,
        "min_new_tokens": 4,
        "eos_token_id": [eos, 3],
        "pad_token_id": 0,
        "max_new_tokens": NEW,
    }
    expected = model.generate(ids, attention_mask=MASK, generation_config=_config(**settings))
    assert not torch.equal(expected[:, ids.shape[1] :], free)
    out = fmms.generate(
        model,
        ids,
        MASK,
        max_new_tokens=NEW,
        min_new_tokens=4,
        temperature=0,
        repetition_penalty=1.4,
        logit_bias=dict.fromkeys(suppressed, -math.inf),
        eos_token_id=[eos, 3],
        pad_token_id=0,
    )
    assert torch.equal(out.sequences, expected)
    assert out.lengths.min() > 4
    assert torch.equal(fmms.generate(model, ids, MASK, generation_config=_config(**settings)).sequences, expected)

    settings |= {"begin_suppress_tokens": at_first, "min_new_tokens": None, "min_length": 13, "max_length": 20}
    settings["max_new_tokens"] = None
    expected = model.generate(ids, attention_mask=MASK, generation_config=_config(**settings))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = fmms.generate(model, ids, MASK, generation_config=_config(**settings))
        assert torch.equal(out.sequences, expected)
        for setting, value in settings.items():
            setattr(model.generation_config, setting, value)
        out = fmms.generate(model, ids, MASK, generation_config="model")
    assert torch.equal(out.sequences, expected)


def test_history_penalties_follow_a_plain_loop(llama):
    penalties = {
        "repetition_penalty": [1.0, 1.3, 0.8, 1.1],
        "frequency_penalty": [0.5, 0.0, 2.0, -0.3],
        "presence_penalty": [0.0, 1.5, 0.25, 0.7],
    }
    out = fmms.generate(
        llama, IDS, MASK, max_new_tokens=NEW, temperature=0, eos_token_id=None,
        **{name: torch.tensor(values) for name, values in penalties.items()},
    )  # fmt: skip
    for row, padding in enumerate(PADDING):
        prompt, new = IDS[row, padding:].tolist(), []
        r, f, p = (values[row] for values in penalties.values())
        for _ in range(NEW):
            logits = _last_logits(llama, prompt + new).tolist()
            for token in set(prompt + new):
                logits[token] = logits[token] / r if logits[token] > 0 else logits[token] * r
            for token in set(new):
                logits[token] -= f * new.count(token) + p
            new.append(max(range(VOCAB), key=logits.__getitem__))
        assert out.new_tokens[row].tolist() == new


def test_one_penalty_at_a_time_and_for_all_rows(llama):
    arguments = {"max_new_tokens": NEW, "temperature": 0, "eos_token_id": None}
    free = fmms.generate(llama, IDS, MASK, **arguments).new_tokens
    for name, value in (("repetition_penalty", 1.5), ("frequency_penalty", 3.0), ("presence_penalty", 3)):
        one = fmms.generate(llama, IDS, MASK, **arguments, **{name: value}).new_tokens
        rows = fmms.generate(llama, IDS, MASK, **arguments, **{name: torch.full((4,), value).double()}).new_tokens
        assert torch.equal(one, rows)
        assert not torch.equal(one, free)
        # A penalty on new tokens has nothing to act on at first.
        assert (name == "repetition_penalty") or torch.equal(one[:, 0], free[:, 0])


# ----------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 12},
        {"top_k": 0, "top_p": 0.8, "temperature": 2.0},
        {"top_k": 0, "min_p": 0.4, "temperature": 3.0},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "temperature": 1.5},
    ],
    ids=lambda filters: "-".join(filters),
)
def test_truncated_draws_are_distributed_as_by_the_warpers_of_transformers(llama, filters):
    ids = tiny_models.prompts()[0].expand(6000, -1)
    out = fmms.generate(llama, ids, max_new_tokens=1, seed=torch.arange(6000), eos_token_id=None, **filters)
    scores = _warpers(**filters)(None, _last_logits(llama, ids[0].tolist())[None])[0]
    probabilities = scores.double().softmax(-1).numpy()
    counts = draws_histogram(out.new_tokens, VOCAB)
    assert chi_square(counts, probabilities) > FALSE_ALARM
    by_config = fmms.generate(
        llama, ids, seed=torch.arange(6000), eos_token_id=None,
        generation_config=_config(do_sample=True, max_new_tokens=1, **filters),
    )  # fmt: skip
    assert torch.equal(by_config.new_tokens, out.new_tokens)
    # The test can fail: without truncation it does.
    bare = _warpers(filters.get("temperature", 1.0))(None, _last_logits(llama, ids[0].tolist())[None])[0]
    assert chi_square(counts, bare.double().softmax(-1).numpy()) < FALSE_ALARM

    # Later steps: a token outside the support would have -inf in place of its log-probability.
    out = fmms.generate(
        llama, IDS, MASK, max_new_tokens=NEW, seed=1, eos_token_id=None, return_final_logprobs=True, **filters
    )
    for row, padding in enumerate(PADDING):
        tokens = IDS[row, padding:].tolist()
        for token, logprob in zip(out.new_tokens[row].tolist(), out.final_logprobs[row].tolist(), strict=True):
            left = _warpers(**filters)(None, _last_logits(llama, tokens)[None])[0].log_softmax(-1)
            assert logprob == pytest.approx(float(left[token]), abs=1e-4)
            tokens.append(token)


def test_a_prompt_gets_the_same_tokens_alone_and_in_a_batch_under_every_control(llama):
    together = fmms.generate(llama, IDS, MASK, max_new_tokens=NEW, **_every_control())
    assert together.valid.all()
    assert together.lengths.min() >= 4
    for row, padding in enumerate(PADDING):
        rows = slice(row, row + 1)
        alone = fmms.generate(llama, IDS[rows, padding:], max_new_tokens=NEW, **_every_control(rows))
        length = int(alone.lengths)
        assert length == together.lengths[row]
        assert torch.equal(alone.new_tokens[0], together.new_tokens[row, :length])
        assert torch.equal(alone.top_ids[0], together.top_ids[row, :length])
        torch.testing.assert_close(alone.final_logprobs[0], together.final_logprobs[row, :length], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "phi"])
@pytest.mark.parametrize("controls", ["every", "frequency"])
def test_the_kernels_draw_the_tokens_of_the_reference(name, controls, device):
    model = tiny_models.build(name, transformers).to(device)
    # A penalty without a prompt has no entries at the first step.
    settings = _every_control() if controls == "every" else {"seed": SEEDS, "frequency_penalty": 0.5}
    ids, mask = IDS.to(device), MASK.to(device)
    torch_out, triton_out = (
        fmms.generate(model, ids, mask, max_new_tokens=5, eos_token_id=None, impl=impl, **settings)
        for impl in ("torch", "triton")
    )
    assert torch_out.valid.all()
    assert torch.equal(torch_out.new_tokens, triton_out.new_tokens)
    if controls == "every":
        assert torch.equal(torch_out.top_ids, triton_out.top_ids)
        for result in ("logprobs", "raw_logprobs", "final_logprobs", "entropy", "top_logprobs"):
            torch.testing.assert_close(getattr(torch_out, result), getattr(triton_out, result), rtol=0, atol=1e-4)


# -------------------------------------------------------------------------------------------------------- the results


def test_results_of_every_step(llama):
    free = fmms.generate(llama, IDS, MASK, max_new_tokens=NEW, seed=SEEDS, temperature=1.5, eos_token_id=None)
    assert free.logprobs is free.raw_logprobs is free.final_logprobs is free.entropy is None
    assert free.top_ids is free.top_logprobs is None
    eos = int(free.new_tokens[0, 4])
    arguments = _every_control()
    arguments |= {"temperature": 1.5, "eos_token_id": eos, "min_new_tokens": 0, "filter_order": "top_k_first"}
    out = fmms.generate(llama, IDS, MASK, max_new_tokens=NEW, **arguments)
    rows, n = out.new_tokens.shape
    ended = torch.arange(n) >= out.lengths[:, None]
    for name in ("logprobs", "raw_logprobs", "final_logprobs", "entropy"):
        value = getattr(out, name)
        assert value.shape == (rows, n)
        assert value.dtype == torch.float32
        assert (value[ended] == 0).all()
        assert ((value[~ended] <= 0) if name != "entropy" else (value[~ended] > 0)).all()
    assert out.top_ids.shape == out.top_logprobs.shape == (rows, n, 4)
    assert (out.top_ids[ended] == -1).all()
    assert (out.top_logprobs[ended] == 0).all()
    assert (out.final_logprobs >= out.logprobs - 1e-6).all()
    assert (out.top_logprobs[..., 0] >= out.logprobs - 1e-6).all()
    among = (out.top_ids == out.new_tokens[:, :, None]) & ~ended[:, :, None]
    assert among.any()
    listed = out.logprobs[:, :, None].expand_as(among)[among]
    torch.testing.assert_close(out.top_logprobs[among], listed, rtol=0, atol=1e-5)


def test_results_are_those_of_the_models_logits(llama):
    out = fmms.generate(
        llama, IDS, MASK, max_new_tokens=NEW, temperature=0, eos_token_id=None, logit_bias={7: 3.0},
        return_logprobs=True, return_raw_logprobs=True, return_entropy=True, top_logprobs=VOCAB,
    )  # fmt: skip
    assert torch.equal(out.top_ids[:, :, 0], out.new_tokens)
    for row, padding in enumerate(PADDING):
        tokens = IDS[row, padding:].tolist()
        for step, token in enumerate(out.new_tokens[row].tolist()):
            raw = _last_logits(llama, tokens)
            biased = raw.clone()
            biased[7] += 3.0
            logprobs = biased.log_softmax(-1)
            torch.testing.assert_close(out.raw_logprobs[row, step], raw.log_softmax(-1)[token], rtol=0, atol=1e-4)
            torch.testing.assert_close(out.logprobs[row, step], logprobs[token], rtol=0, atol=1e-4)
            torch.testing.assert_close(out.top_logprobs[row, step], logprobs[out.top_ids[row, step]], rtol=0, atol=1e-4)
            entropy = -(logprobs.exp() * logprobs).sum()
            torch.testing.assert_close(out.entropy[row, step], entropy, rtol=0, atol=1e-4)
            tokens.append(token)


def test_results_of_small_shapes_and_growing_room(llama, monkeypatch):
    none = fmms.generate(llama, IDS, MASK, max_new_tokens=0, return_entropy=True, top_logprobs=3)
    assert none.entropy.shape == (4, 0)
    assert none.top_ids.shape == none.top_logprobs.shape == (4, 0, 3)
    empty = fmms.generate(
        llama, IDS[:0], repetition_penalty=1.5, top_k=torch.ones(0, dtype=torch.int64), top_logprobs=3
    )
    assert empty.top_ids.shape == (0, 0, 3)
    whole = fmms.generate(llama, IDS, MASK, max_new_tokens=NEW, **_every_control())
    monkeypatch.setattr("fmms.generation._FIRST_ROOM", 1)
    out = fmms.generate(llama, IDS, MASK, max_new_tokens=NEW, **_every_control())
    for name in ("sequences", "logprobs", "raw_logprobs", "final_logprobs", "entropy", "top_ids", "top_logprobs"):
        assert torch.equal(getattr(out, name), getattr(whole, name))


# --------------------------------------------------------------------------------------------------- biases and masks


@pytest.mark.parametrize("name", ["llama", "phi"])
def test_logit_bias_as_a_dict_and_as_a_tensor(name):
    model = tiny_models.build(name, transformers)
    dense = torch.zeros(VOCAB)
    dense[[4, 90]] = torch.tensor([1.5, -math.inf])
    arguments = {"max_new_tokens": NEW, "seed": SEEDS, "temperature": 3.0, "eos_token_id": None}
    free = fmms.generate(model, IDS, MASK, **arguments)
    out = fmms.generate(model, IDS, MASK, logit_bias={4: 1.5, 90: -math.inf}, return_logprobs=True, **arguments)
    assert torch.equal(out.new_tokens, fmms.generate(model, IDS, MASK, logit_bias=dense, **arguments).new_tokens)
    assert torch.equal(fmms.generate(model, IDS, MASK, logit_bias={}, **arguments).new_tokens, free.new_tokens)
    expected = ((_last_logits(model, IDS[0].tolist()) + dense) / 3.0).log_softmax(-1)[out.new_tokens[0, 0]]
    torch.testing.assert_close(out.logprobs[0, 0], expected, rtol=0, atol=1e-4)
    only = fmms.generate(model, IDS, MASK, logit_bias={9: 1e6}, **arguments)
    assert (only.new_tokens == 9).all()


def test_a_fixed_mask_holds_at_every_step(llama):
    allowed = torch.arange(VOCAB) % 4 == torch.arange(4)[:, None]
    out = fmms.generate(
        llama, IDS, MASK, max_new_tokens=NEW, seed=0, temperature=4.0, eos_token_id=None,
        allowed_mask=fmms.pack_mask(allowed),
    )  # fmt: skip
    assert torch.equal(out.new_tokens % 4, torch.arange(4)[:, None].expand(-1, NEW))


def test_a_mask_function_sees_the_tokens_so_far(llama):
    """A grammar: after an even token comes an odd one, and the other way round; the first is free."""
    calls = []

    def mask(step, new_tokens):
        calls.append((step, new_tokens.clone()))
        if step == 0:
            return None
        return fmms.pack_mask(torch.arange(VOCAB) % 2 != new_tokens[:, -1:] % 2)

    arguments = {"max_new_tokens": NEW, "seed": SEEDS, "temperature": 4.0, "allowed_mask": mask}
    out = fmms.generate(llama, IDS, MASK, eos_token_id=None, **arguments)
    assert ((out.new_tokens[:, 1:] + out.new_tokens[:, :-1]) % 2 == 1).all()
    assert [step for step, _ in calls] == list(range(NEW))
    for step, seen in calls:
        assert torch.equal(seen, out.new_tokens[:, :step])

    calls.clear()
    ended = fmms.generate(llama, IDS, MASK, eos_token_id=int(out.new_tokens[2, 3]), pad_token_id=2000, **arguments)
    assert ended.lengths.min() < NEW
    assert all(torch.equal(seen, ended.new_tokens[:, :step]) for step, seen in calls)


def test_the_end_waits_for_min_new_tokens(llama):
    free = fmms.generate(llama, IDS, MASK, max_new_tokens=NEW, temperature=0, eos_token_id=None).new_tokens
    eos = free[:, 0].tolist()
    arguments = {"max_new_tokens": NEW, "temperature": 0, "eos_token_id": [*eos, 5000]}
    assert fmms.generate(llama, IDS, MASK, **arguments).lengths.tolist() == [1] * 4
    out = fmms.generate(llama, IDS, MASK, min_new_tokens=6, logit_bias=dict.fromkeys(eos, 50.0), **arguments)
    assert out.lengths.tolist() == [7] * 4
    assert not torch.isin(out.new_tokens[:, :6], torch.tensor(eos)).any()
    longer = fmms.generate(llama, IDS, MASK, min_new_tokens=100, **arguments)
    assert longer.lengths.tolist() == [NEW] * 4


def test_a_row_without_an_allowed_token_or_with_a_bad_control_ends_alone(llama):
    good = fmms.generate(llama, IDS, MASK, max_new_tokens=3, temperature=0, eos_token_id=None)
    allowed = torch.ones(4, VOCAB, dtype=torch.bool)
    allowed[1] = False
    bad = {
        "allowed_mask": fmms.pack_mask(allowed),
        "top_p": torch.tensor([1.0, 1.5, 1.0, 1.0]),
        "repetition_penalty": torch.tensor([1.0, -1.0, 1.0, 1.0]),
    }
    for name, value in bad.items():
        out = fmms.generate(llama, IDS, MASK, max_new_tokens=3, temperature=0, eos_token_id=None, **{name: value})
        assert out.valid.tolist() == [True, False, True, True]
        assert out.lengths.tolist() == [3, 0, 3, 3]
        assert torch.equal(out.new_tokens[[0, 2, 3]], good.new_tokens[[0, 2, 3]])


def test_prompt_tokens_that_have_no_logit_are_not_penalised():
    head = LMHead(torch.zeros(10, 4), vocab_size=8)
    given = {
        "max_new_tokens": 5, "min_new_tokens": 0, "temperature": 1.0, "top_k": None, "top_p": None, "min_p": None,
        "repetition_penalty": 1.5, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    model = torch.nn.Module()
    model.config = None
    settings = resolve(model, None, 3, given)
    controls = StepControls(
        head, settings, torch.tensor([[-1, 9, 3]]), filter_order="joint", frequency_penalty=0.0, presence_penalty=0.0,
        logit_bias=None, allowed_mask=None, top_logprobs=0,
    )  # fmt: skip
    _, tokens, _ = controls.at(1, torch.tensor([[7]]), lambda step: None)["repetition_penalty"]
    assert sorted(tokens.tolist()) == [-1, -1, 3, 7]


# --------------------------------------------------------------------------------------------------- GenerationConfig

SAMPLED = {"do_sample": True, "temperature": 0.6, "top_k": 5, "top_p": 0.9, "min_p": 0.1}


@pytest.mark.parametrize(
    ("settings", "arguments", "expected"),
    [
        ({}, {}, {"temperature": 0.0, "top_k": None, "max_new_tokens": 20, "eos": [2], "pad": 0}),
        (SAMPLED, {}, {"temperature": 0.6, "top_k": 5, "top_p": 0.9, "min_p": 0.1}),
        ({**SAMPLED, "do_sample": False}, {}, {"temperature": 0.0, "top_k": None, "top_p": None, "min_p": None}),
        ({"do_sample": True}, {}, {"temperature": 1.0, "top_k": 50, "top_p": None, "repetition_penalty": 1.0}),
        (SAMPLED, {"temperature": 1.0, "top_k": None, "top_p": 1.0}, {"temperature": 1.0, "top_k": None, "top_p": 1.0}),
        ({"do_sample": False}, {"temperature": 0.8}, {"temperature": 0.8, "top_k": None}),
        ({"repetition_penalty": 1.3}, {}, {"repetition_penalty": 1.3}),
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.0}, {"repetition_penalty": 1.0}),
        ({"max_new_tokens": 7, "max_length": 30}, {}, {"max_new_tokens": 7}),
        ({"max_length": 30}, {}, {"max_new_tokens": 20}),
        ({"max_length": 30}, {"max_new_tokens": 3}, {"max_new_tokens": 3}),
        ({"max_length": 5}, {"max_new_tokens": 20}, {"max_new_tokens": 20}),
        ({"min_length": 14}, {}, {"min_new_tokens": 4}),
        ({"min_length": 4}, {}, {"min_new_tokens": 0}),
        ({"min_length": 14, "min_new_tokens": 2}, {}, {"min_new_tokens": 2}),
        ({"min_new_tokens": 2}, {"min_new_tokens": 0}, {"min_new_tokens": 0}),
        ({"eos_token_id": [5, 6], "pad_token_id": 9}, {}, {"eos": [5, 6], "pad": 9}),
        ({"eos_token_id": 5, "pad_token_id": 9}, {"eos_token_id": None, "pad_token_id": 1}, {"eos": [], "pad": 1}),
        ({"eos_token_id": 5, "pad_token_id": 9}, {"eos_token_id": "model", "pad_token_id": "model"}, {"eos": [2]}),
        ({"suppress_tokens": [4], "begin_suppress_tokens": [6]}, {}, {"suppressed": [4], "suppressed_at_first": [6]}),
    ],
)
def test_arguments_go_before_the_config_and_that_before_defaults(llama, settings, arguments, expected):
    names = "max_new_tokens min_new_tokens temperature top_k top_p min_p repetition_penalty eos_token_id pad_token_id"
    defaults = {name: inspect.signature(fmms.generate).parameters[name].default for name in names.split()}
    assert all(isinstance(value, Default) for value in defaults.values())
    found = resolve(llama, _config(**settings), 10, defaults | arguments)
    assert {name: getattr(found, name) for name in expected} == expected


def test_what_a_config_leaves_open_is_the_models_own():
    model = tiny_models.build("llama", transformers)
    model.generation_config.repetition_penalty = 1.4
    model.generation_config.max_length = 15
    config = _config(suppress_tokens=[5])
    expected = model.generate(IDS, attention_mask=MASK, generation_config=config)
    assert torch.equal(fmms.generate(model, IDS, MASK, generation_config=config).sequences, expected)
    assert config.to_diff_dict().keys() <= {"suppress_tokens", "transformers_version"}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_beams": 3}, "num_beams"),
        ({"no_repeat_ngram_size": 2, "stop_strings": ["."]}, "no_repeat_ngram_size, stop_strings"),
        ({"encoder_no_repeat_ngram_size": 2}, "encoder_no_repeat_ngram_size"),
        ({"do_sample": True, "typical_p": 0.9, "eta_cutoff": 0.1}, "typical_p, eta_cutoff"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused(settings, named):
    model = tiny_models.build("llama", transformers)
    with pytest.raises(ValueError, match=rf"^generation_config: fmms.generate cannot apply {named};"):
        fmms.generate(model, IDS, MASK, generation_config=_config(**settings))
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    with pytest.raises(ValueError, match=rf"cannot apply {named};"):
        fmms.generate(model, IDS, MASK, generation_config="model")
    with pytest.warns(UserWarning, match=f"does not apply .*: (top_k, )?{named}"):
        fmms.generate(model, IDS, MASK, max_new_tokens=1)
    if "typical_p" in settings:
        # Without sampling it would do nothing.
        fmms.generate(model, IDS, MASK, max_new_tokens=1, temperature=0, generation_config="model")


def test_arguments_override_settings_that_would_be_warned_of():
    model = tiny_models.build("llama", transformers)
    settings = SAMPLED | {"repetition_penalty": 1.3, "min_length": 4, "min_new_tokens": 4, "max_new_tokens": 50}
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    given = {"temperature": 0.5, "top_k": 0, "top_p": 0.5, "min_p": torch.zeros(4), "repetition_penalty": 1.2}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fmms.generate(model, IDS, MASK, max_new_tokens=2, min_new_tokens=1, **given)
        fmms.generate(model, IDS, MASK, max_new_tokens=2, generation_config="model")
    del given["top_k"], given["repetition_penalty"]
    with pytest.warns(UserWarning, match=r"generation_config: repetition_penalty, min_length, min_new_tokens, top_k$"):
        fmms.generate(model, IDS, MASK, max_new_tokens=2, **given)


# ------------------------------------------------------------------------------------------------------------- errors


def _mask(*shape, dtype=torch.int32):
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_new_tokens": -1}, "min_new_tokens: expected an integer >= 0, got -1"),
        ({"top_k": -2}, "top_k: expected .* got int -2"),
        ({"top_k": 3.5}, r"top_k: .* got float 3\.5"),
        ({"top_k": torch.ones(4)}, r"top_k: .* got .*torch\.float32"),
        ({"top_p": 1.2}, r"top_p: expected a number from 0 to 1.* got float 1\.2"),
        ({"top_p": torch.ones(3)}, r"top_p: .*shape \[4\].* got .*\[3\]"),
        ({"min_p": "some"}, "min_p: .* got str 'some'"),
        ({"filter_order": "best_first"}, "filter_order: .* got str 'best_first'"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty: .* got float 0\.0"),
        ({"repetition_penalty": None}, "repetition_penalty: .* got NoneType"),
        ({"repetition_penalty": torch.ones(4, 1)}, r"repetition_penalty: .* got .*\[4, 1\]"),
        ({"frequency_penalty": math.nan}, "frequency_penalty: .* got float nan"),
        ({"frequency_penalty": torch.ones(4, dtype=torch.int64)}, "frequency_penalty: .* got .*int64"),
        ({"presence_penalty": True}, "presence_penalty: .* got bool True"),
        ({"logit_bias": {97: 1.0}}, "logit_bias: expected token ids from 0 to 96.* got int 97"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: expected token ids from 0 to 96.* got int -1"),
        ({"logit_bias": {"the": 1.0}}, "logit_bias: .* got str 'the'"),
        ({"logit_bias": {5: math.inf}}, "logit_bias: .* got float inf"),
        ({"logit_bias": {5: "much"}}, "logit_bias: .* got str 'much'"),
        ({"logit_bias": torch.zeros(96)}, r"logit_bias: .*shape \[97\], got .*\[96\]"),
        ({"logit_bias": [1.0]}, "logit_bias: expected a dict .* got list"),
        ({"allowed_mask": [[1]]}, "allowed_mask: expected None, an int32 tensor .* got list"),
        ({"allowed_mask": _mask(4, 3)}, r"allowed_mask: expected an int32 tensor \[4, 4\].* got .*\[4, 3\]"),
        ({"allowed_mask": _mask(4, 4, dtype=torch.int64)}, "allowed_mask: .* got .*int64"),
        ({"allowed_mask": lambda step, new: _mask(3, 4)}, r"allowed_mask: .* got .*\[3, 4\]"),
        ({"allowed_mask": lambda step, new: [1]}, "allowed_mask: .* got list"),
        ({"top_logprobs": 98}, "top_logprobs: expected an int from 0 to 97, got int 98"),
        ({"top_logprobs": True}, "top_logprobs: .* got bool True"),
        ({"generation_config": "theirs"}, "generation_config: expected None, 'model' or .* got str 'theirs'"),
        ({"generation_config": {"top_k": 5}}, "generation_config: .* got dict"),
        ({"generation_config": _config(max_length=10)}, "generation_config: its max_length of 10 .* prompt of 10 "),
        ({"generation_config": _config(max_new_tokens=1, eos_token_id=-3)}, "eos_token_id: .* got -3"),
        ({"generation_config": _config(suppress_tokens=["a"])}, r"generation_config\.suppress_tokens: .* got 'a'"),
    ],
)
def test_bad_controls_are_named(llama, arguments, message):
    with pytest.raises(ValueError, match=message):
        fmms.generate(llama, IDS, MASK, **arguments)


def test_a_model_without_a_generation_config_has_none_to_apply():
    model = tiny_models.build("llama", transformers)
    model.generation_config = None
    with pytest.raises(ValueError, match="generation_config: LlamaForCausalLM has none of its own"):
        fmms.generate(model, IDS, MASK, generation_config="model")
    fmms.generate(model, IDS, MASK, max_new_tokens=1, generation_config=_config(do_sample=True))


def test_the_signature_shows_the_defaults():
    shown = str(inspect.signature(fmms.generate))
    assert "max_new_tokens: 'int' = 20" in shown
    assert "temperature: 'float | torch.Tensor' = 1.0" in shown
    assert "eos_token_id: 'int | Sequence[int] | str | None' = 'model'" in shown
