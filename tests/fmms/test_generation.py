"""Decoding with the fused head: the tokens of transformers when greedy, the model's distribution when not."""

import warnings

import pytest
import torch

import fmms
from fmms.testing import chi_square, draws_histogram

transformers = pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")

NEW = 16
FALSE_ALARM = 1e-6  # probability that a correct sampler fails one of the chi-square tests; the seeds are fixed
PADDING = (0, 3, 7, 9)


@pytest.fixture(scope="module")
def llama():
    return tiny_models.build("llama", transformers)


def _reference(model, ids, mask, eos, **arguments):
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=eos, pad_token_id=0, **arguments
    )


@pytest.mark.parametrize("padding", [(0,), PADDING], ids=["single", "padded batch"])
@pytest.mark.parametrize("name", sorted(tiny_models.ARCHITECTURES))
def test_greedy_tokens_and_their_logprobs_are_those_of_transformers(name, padding):
    model = tiny_models.build(name, transformers)
    ids, mask = tiny_models.prompts(padding)
    free = _reference(model, ids, mask, None, return_dict_in_generate=True, output_logits=True)
    out = fmms.generate(model, ids, mask, max_new_tokens=NEW, temperature=0, eos_token_id=None, return_logprobs=True)
    assert torch.equal(out.sequences, free.sequences)
    assert torch.equal(out.new_tokens, out.sequences[:, ids.shape[1] :])
    assert out.lengths.tolist() == [NEW] * len(ids)
    assert out.valid.all()
    # Greedy tokens don't see a scale or a softcap; log-probabilities do.
    expected = torch.stack(free.logits, dim=1).log_softmax(dim=-1).gather(2, out.new_tokens[:, :, None])[:, :, 0]
    torch.testing.assert_close(out.logprobs, expected, rtol=1e-4, atol=1e-4)

    # A token that the first prompt reaches early ends sequences at different lengths.
    eos = int(out.new_tokens[0, 4])
    ended = fmms.generate(model, ids, mask, max_new_tokens=NEW, temperature=0, eos_token_id=eos)
    assert torch.equal(ended.sequences, _reference(model, ids, mask, eos))
    assert ended.lengths[0] <= 5


def test_greedy_in_bfloat16():
    model = tiny_models.build("llama", transformers).to(torch.bfloat16)
    ids, mask = tiny_models.prompts(PADDING)
    out = fmms.generate(model, ids, mask, max_new_tokens=4, temperature=0, eos_token_id=None)
    with torch.no_grad():
        logits = model(out.sequences, attention_mask=torch.cat([mask, torch.ones(4, 4, dtype=mask.dtype)], 1)).logits
    steps = logits[:, ids.shape[1] - 1 : -1].float()
    drawn = steps.gather(2, out.new_tokens[:, :, None])[:, :, 0]
    # transformers rounds logits to bfloat16, where ties are common: ours must be within two roundings of its largest.
    assert (steps.amax(dim=-1) - drawn <= 2**-7 * steps.abs().amax(dim=-1)).all()


@pytest.mark.parametrize(("name", "scheme"), [("granite", "group"), ("gemma2", "token"), ("phi", "group")])
def test_first_tokens_follow_the_models_softmax(name, scheme):
    model = tiny_models.build(name, transformers)
    ids, _ = tiny_models.prompts()
    with torch.no_grad():
        probabilities = model(ids).logits[0, -1].double().softmax(dim=-1)
    seeds = torch.arange(8000)
    out = fmms.generate(
        model, ids.expand(len(seeds), -1), max_new_tokens=1, seed=seeds, noise_scheme=scheme, eos_token_id=None
    )
    p = chi_square(draws_histogram(out.new_tokens, tiny_models.VOCAB), probabilities.numpy())
    assert p > FALSE_ALARM
    # The test can fail: against the softmax without the scale, softcap or bias it does.
    with torch.no_grad():
        bare = (model.base_model(ids).last_hidden_state[0, -1] @ model.lm_head.weight.T).double().softmax(dim=-1)
    assert chi_square(draws_histogram(out.new_tokens, tiny_models.VOCAB), bare.numpy()) < FALSE_ALARM


def test_second_tokens_follow_the_softmax_given_the_first(llama):
    """Needs the cache, the positions and a fresh draw per step to be right."""
    ids, _ = tiny_models.prompts()
    out = fmms.generate(
        llama, ids.expand(6000, -1), max_new_tokens=2, seed=torch.arange(6000), temperature=2.0, eos_token_id=None
    )
    first, second = out.new_tokens.T
    most_common = int(first.mode().values)
    with torch.no_grad():
        logits = llama(torch.cat([ids, torch.tensor([[most_common]])], dim=1)).logits[0, -1]
    counts = draws_histogram(second[first == most_common], tiny_models.VOCAB)
    assert counts.sum() > 300
    assert chi_square(counts, (logits.double() / 2.0).softmax(dim=-1).numpy()) > FALSE_ALARM


def test_a_prompt_gets_the_same_tokens_alone_and_in_a_batch(llama):
    ids, mask = tiny_models.prompts(PADDING)
    seeds = torch.tensor([11, -5, 2**62, 0])
    together = fmms.generate(llama, ids, mask, max_new_tokens=NEW, seed=seeds, eos_token_id=None)
    for row, padding in enumerate(PADDING):
        alone = fmms.generate(
            llama, ids[row : row + 1, padding:], max_new_tokens=NEW, seed=seeds[row : row + 1], eos_token_id=None
        )
        assert torch.equal(alone.new_tokens[0], together.new_tokens[row])
    shuffled = torch.tensor([2, 0, 3, 1])
    moved = fmms.generate(
        llama, ids[shuffled], mask[shuffled], max_new_tokens=NEW, seed=seeds[shuffled], eos_token_id=None
    )
    assert torch.equal(moved.new_tokens, together.new_tokens[shuffled])


def test_seeds(llama):
    ids = tiny_models.prompts()[0].expand(3, -1)

    def draw(seed):
        return fmms.generate(llama, ids, max_new_tokens=8, temperature=3.0, seed=seed, eos_token_id=None).new_tokens

    assert torch.equal(draw(7), draw(7))
    assert torch.equal(draw(7), draw(fmms.noise.row_seeds(7, 3)))
    assert not torch.equal(draw(7), draw(8))
    assert len({tuple(row) for row in draw(7).tolist()}) == 3
    torch.manual_seed(3)
    first, second = draw(None), draw(None)
    torch.manual_seed(3)
    assert torch.equal(draw(None), first)
    assert not torch.equal(first, second)


def test_temperature_per_prompt(llama):
    ids = tiny_models.prompts()[0].expand(3, -1)
    seeds = torch.full((3,), 5)
    out = fmms.generate(
        llama, ids, max_new_tokens=NEW, temperature=torch.tensor([0.0, 1.0, 4.0]), seed=seeds, eos_token_id=None
    )
    for row, temperature in enumerate((0.0, 1.0, 4.0)):
        one = fmms.generate(
            llama, ids[:1], max_new_tokens=NEW, temperature=temperature, seed=seeds[:1], eos_token_id=None
        )
        assert torch.equal(out.new_tokens[row], one.new_tokens[0])


def test_end_of_sequence_forms(llama):
    ids, mask = tiny_models.prompts(PADDING)
    free = fmms.generate(llama, ids, mask, max_new_tokens=NEW, temperature=0, eos_token_id=None).new_tokens
    several = [int(free[0, 2]), int(free[1, 5])]
    out = fmms.generate(
        llama, ids, mask, max_new_tokens=NEW, temperature=0, eos_token_id=several, pad_token_id=1, return_logprobs=True
    )
    for row, length in enumerate(out.lengths.tolist()):
        assert torch.equal(out.new_tokens[row, :length], free[row, :length])
        assert (out.new_tokens[row, length:] == 1).all()
        assert (out.logprobs[row, length:] == 0).all()
        assert not torch.isin(free[row, : length - 1], torch.tensor(several)).any()
    assert out.new_tokens.shape[1] == out.lengths.max()

    llama.generation_config.eos_token_id = several
    try:
        by_model = fmms.generate(llama, ids, mask, max_new_tokens=NEW, temperature=0)
    finally:
        llama.generation_config.eos_token_id = 2
    assert torch.equal(by_model.lengths, out.lengths)


def test_all_ended_stops_early(llama):
    ids, _ = tiny_models.prompts()
    first = int(fmms.generate(llama, ids, max_new_tokens=1, temperature=0).new_tokens)
    steps = []
    fmms.generate(llama, ids, max_new_tokens=NEW, temperature=0, eos_token_id=first, callback=steps.append)
    assert len(steps) == 1


def test_streaming_callback(llama):
    ids, mask = tiny_models.prompts(PADDING)
    arguments = {"max_new_tokens": NEW, "seed": 3, "return_logprobs": True}
    quiet = fmms.generate(llama, ids, mask, **arguments)
    steps = []
    streamed = fmms.generate(llama, ids, mask, callback=steps.append, **arguments)
    assert torch.equal(streamed.sequences, quiet.sequences)
    assert [s.step for s in steps] == list(range(quiet.new_tokens.shape[1]))
    assert torch.equal(torch.stack([s.ids for s in steps], dim=1), quiet.new_tokens)
    assert torch.equal(torch.stack([s.logprobs for s in steps], dim=1), quiet.logprobs)
    ends = torch.where((quiet.new_tokens == 2).any(dim=1), quiet.lengths, NEW + 1)
    assert (ends < NEW).any()
    for s in steps:
        assert torch.equal(s.finished, ends <= s.step + 1)

    stopped = fmms.generate(llama, ids, mask, callback=lambda s: s.step == 2, eos_token_id=None, **arguments)
    assert stopped.lengths.tolist() == [3] * 4
    assert stopped.new_tokens.shape == (4, 3)


def test_the_full_head_runs_in_the_check_only(llama):
    calls = []
    handle = llama.lm_head.register_forward_hook(lambda *_: calls.append(1))
    ids, _ = tiny_models.prompts()
    try:
        fmms.generate(llama, ids, max_new_tokens=1)
        calls.clear()
        fmms.generate(llama, ids, max_new_tokens=4)
    finally:
        handle.remove()
    assert not calls


def test_a_row_whose_logits_break_ends_there_and_alone(llama):
    """Token 50's embedding is NaN: the prompt that holds it is flagged, its neighbour is untouched."""
    model = tiny_models.build("llama", transformers)
    with torch.no_grad():
        model.model.embed_tokens.weight[50] = float("nan")
    ids, _ = tiny_models.prompts((0, 0))
    ids[ids == 50] = 51
    good = fmms.generate(model, ids, max_new_tokens=3, temperature=0, eos_token_id=None)
    ids[1, -1] = 50
    out = fmms.generate(model, ids, max_new_tokens=3, temperature=0, eos_token_id=None, pad_token_id=9)
    assert out.valid.tolist() == [True, False]
    assert out.lengths.tolist() == [3, 0]
    assert torch.equal(out.new_tokens[0], good.new_tokens[0])
    assert (out.new_tokens[1] == 9).all()


def test_small_shapes(llama):
    ids, _ = tiny_models.prompts((0, 0))
    none = fmms.generate(llama, ids, max_new_tokens=0, return_logprobs=True)
    assert torch.equal(none.sequences, ids)
    assert none.new_tokens.shape == none.logprobs.shape == (2, 0)
    assert none.lengths.tolist() == [0, 0]
    empty = fmms.generate(llama, ids[:0], max_new_tokens=5)
    assert empty.sequences.shape == (0, ids.shape[1])
    assert empty.valid.shape == (0,)
    short = fmms.generate(llama, ids[:, :1].to(torch.int32), max_new_tokens=5, temperature=0, eos_token_id=None)
    assert torch.equal(short.sequences, _reference(llama, ids[:, :1], torch.ones(2, 1), None)[:, :6])


def test_leaves_the_model_as_it_was(llama):
    ids, mask = tiny_models.prompts(PADDING)
    before = {name: parameter.clone() for name, parameter in llama.named_parameters()}
    out = fmms.generate(llama, ids, mask, max_new_tokens=4, seed=0, return_logprobs=True)
    assert not llama.training
    assert not out.logprobs.requires_grad
    assert all(torch.equal(before[name], parameter) for name, parameter in llama.named_parameters())
    assert not llama._forward_hooks
    assert not llama.model._forward_hooks
    llama(ids).logits.sum().backward()
    llama.zero_grad()


def test_training_mode_is_refused(llama):
    llama.train()
    try:
        with pytest.raises(ValueError, match=r"model\.eval\(\)"):
            fmms.generate(llama, tiny_models.prompts()[0])
        assert llama.training
    finally:
        llama.eval()


@pytest.mark.parametrize(
    ("settings", "temperature", "named"),
    [
        ({}, 1.0, ""),
        ({"do_sample": False, "top_k": 5, "num_beams": 1, "max_length": 20}, 1.0, ""),
        ({"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 0.6}, 0.7, ""),
        ({"do_sample": True, "top_k": 5, "top_p": 0.9}, 0, ""),
        ({"do_sample": True, "top_k": 5, "min_p": 0.1, "temperature": 0.6}, 1.0, "top_k, min_p, temperature"),
        ({"do_sample": True, "top_k": 0, "top_p": 0.9, "typical_p": 0.9}, 1.0, "top_p, typical_p"),
        ({"do_sample": True}, 0.5, "top_k"),
        ({"num_beams": 3, "penalty_alpha": 0.6, "stop_strings": ["."]}, 0, "num_beams, penalty_alpha, stop_strings"),
        ({"repetition_penalty": 1.3, "max_length": 64}, 0, "repetition_penalty, max_length"),
        ({"max_new_tokens": 64, "max_length": 64}, 0, "max_new_tokens"),
    ],
)
def test_settings_that_would_change_the_result_are_named_and_others_not(settings, temperature, named):
    model = tiny_models.build("llama", transformers)
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fmms.generate(model, tiny_models.prompts()[0], temperature=temperature)
    ours = [str(w.message) for w in caught if "fmms.generate" in str(w.message)]
    assert [m.rpartition(": ")[2] for m in ours] == ([named] if named else [])


@pytest.mark.parametrize("source", ["argument", "config", "end of sequence"])
def test_a_pad_token_outside_the_vocabulary_fills_but_is_not_fed(source):
    model = tiny_models.build("llama", transformers)
    ids, mask = tiny_models.prompts(PADDING)
    arguments = {"max_new_tokens": NEW, "temperature": 0}
    free = fmms.generate(model, ids, mask, eos_token_id=None, **arguments).new_tokens
    eos = int(free[0, 4])
    expected = fmms.generate(model, ids, mask, eos_token_id=eos, **arguments)
    if source != "argument":
        model.generation_config.pad_token_id = 5000 if source == "config" else None
        model.config.pad_token_id = None
    chosen = {"pad_token_id": 5000} if source == "argument" else {}
    steps = []
    eos = [5000, eos] if source == "end of sequence" else eos
    out = fmms.generate(model, ids, mask, eos_token_id=eos, callback=steps.append, **arguments, **chosen)
    ended = torch.arange(out.new_tokens.shape[1]) >= out.lengths[:, None]
    assert ended.any()
    assert torch.equal(out.new_tokens, expected.new_tokens.masked_fill(ended, 5000))
    assert torch.equal(torch.stack([s.ids for s in steps], dim=1), out.new_tokens)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_learned_positions_limit_the_length(name):
    model = tiny_models.build(name, transformers)
    ids, mask = tiny_models.prompts((0, 3))
    out = fmms.generate(model, ids, mask, max_new_tokens=119, temperature=0, eos_token_id=None)
    assert out.lengths.tolist() == [119, 119]
    with pytest.raises(ValueError, match=r"120 new tokens after a prompt of 10 .* learned 128; at most 119"):
        fmms.generate(model, ids, mask, max_new_tokens=120)


def test_room_grows_with_the_sequence_and_not_with_the_limit(llama, monkeypatch):
    ids, mask = tiny_models.prompts(PADDING)
    arguments = {"temperature": 0, "eos_token_id": None, "return_logprobs": True}
    # Rotary positions go on past max_position_embeddings.
    whole = fmms.generate(llama, ids, mask, max_new_tokens=125, **arguments)
    monkeypatch.setattr("fmms.generation._FIRST_ROOM", 3)
    out = fmms.generate(llama, ids, mask, max_new_tokens=10**12, callback=lambda s: s.step == 124, **arguments)
    assert torch.equal(out.sequences, whole.sequences)
    assert torch.equal(out.logprobs, whole.logprobs)


def test_temperatures_and_seeds_are_those_of_sample(llama):
    ids = tiny_models.prompts()[0]
    arguments = {"max_new_tokens": 4, "eos_token_id": None}
    hot = fmms.generate(llama, ids, temperature=float("inf"), seed=2**64 - 1, **arguments)
    assert hot.valid.all()
    assert torch.equal(hot.new_tokens, fmms.generate(llama, ids, temperature=1e38, seed=-1, **arguments).new_tokens)


IDS, MASK = tiny_models.prompts(PADDING)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": IDS[0]}, r"input_ids: expected shape \[B, P\] with P >= 1, got \[10\]"),
        ({"input_ids": IDS[:, :0]}, r"input_ids: expected shape .* got \[4, 0\]"),
        ({"input_ids": IDS.float()}, r"input_ids: expected dtype torch\.int64.*got torch\.float32"),
        ({"input_ids": IDS.tolist()}, "input_ids: expected a tensor, got list"),
        ({"input_ids": IDS + 90}, "input_ids: expected token ids from 0 to 96"),
        ({"input_ids": IDS - 1}, "input_ids: expected token ids from 0 to 96, got -1"),
        ({"attention_mask": MASK.flip(1)}, "attention_mask: a prompt ends in padding; pad on the left"),
        ({"attention_mask": torch.zeros_like(MASK)}, "attention_mask: a prompt ends in padding"),
        ({"attention_mask": MASK[:, 1:]}, r"attention_mask: expected the shape \[4, 10\].*got \[4, 9\]"),
        ({"attention_mask": MASK.float()}, r"attention_mask: expected dtype .*torch\.bool, got torch\.float32"),
        ({"max_new_tokens": -1}, "max_new_tokens: expected an integer >= 0, got -1"),
        ({"max_new_tokens": 2.0}, r"max_new_tokens: .* got 2\.0"),
        ({"temperature": -0.5}, r"temperature: expected a number >= 0 .*got .*-0\.5"),
        ({"temperature": True}, "temperature: .* got .*True"),
        ({"temperature": float("nan")}, "temperature: .* got .*nan"),
        ({"temperature": "hot"}, "temperature: .* got .*'hot'"),
        ({"temperature": torch.ones(3)}, r"temperature: .* shape \[4\].*got .*torch\.float32 .*\[3\]"),
        ({"temperature": torch.ones(4, dtype=torch.int64)}, "temperature: expected .*dtype float32.* got"),
        ({"seed": torch.zeros(4)}, r"seed: expected .*int64.* got .*torch\.float32"),
        ({"seed": torch.zeros(1, dtype=torch.int64)}, r"seed: .* got .*torch\.int64 .*\[1\]"),
        ({"seed": 1.5}, "seed: .* got float"),
        ({"seed": 2**70}, "seed: .* got"),
        ({"pad_token_id": 2**63}, "pad_token_id: expected an integer >= 0"),
        ({"pad_token_id": 1.0}, "pad_token_id: expected an integer >= 0"),
        ({"eos_token_id": "end"}, "eos_token_id: expected an integer >= 0, got 'end'"),
        ({"eos_token_id": [2, -1]}, "eos_token_id: expected an integer >= 0, got -1"),
        ({"pad_token_id": -1}, "pad_token_id: expected an integer >= 0, got -1"),
        ({"noise_scheme": "cauchy"}, "noise_scheme"),
        ({"impl": "abacus"}, "impl"),
    ],
)
def test_bad_arguments_are_named(llama, arguments, message):
    with pytest.raises(ValueError, match=message):
        fmms.generate(llama, **({"input_ids": IDS} | arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("every_control", [False, True], ids=["plain", "every control"])
def test_no_host_synchronisation_per_step(every_control):
    model = tiny_models.build("llama", transformers).to("cuda")
    # without padding: with a mask transformers itself looks at its values at every step
    ids, mask = tiny_models.prompts((0, 0))[0].to("cuda"), None
    arguments = {"temperature": 0.7, "seed": 1, "eos_token_id": None}
    if every_control:
        allowed = fmms.pack_mask(torch.arange(tiny_models.VOCAB, device="cuda").expand(2, -1) > 5)
        arguments |= {"temperature": torch.tensor([0.7, 0.0], device="cuda"), "top_p": torch.full((2,), 0.9).cuda()}
        arguments |= {"top_k": 40, "min_p": 0.01, "min_new_tokens": 5, "eos_token_id": 2000, "logit_bias": {7: -1.0}}
        arguments |= {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "presence_penalty": torch.ones(2).cuda()}
        arguments |= {"return_logprobs": True, "return_raw_logprobs": True, "return_final_logprobs": True}
        arguments |= {"return_entropy": True, "top_logprobs": 3, "allowed_mask": lambda step, new: allowed}
    fmms.generate(model, ids, mask, max_new_tokens=8, **arguments)

    def synchronisations(tokens):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            fmms.generate(model, ids, mask, max_new_tokens=tokens, **arguments)
        counts = {event.key: event.count for event in profile.key_averages()}
        return [counts.get(f"aten::{name}", 0) for name in ("_local_scalar_dense", "nonzero", "masked_select")]

    # Short of the step at which sequences that may end are asked whether they have.
    assert synchronisations(3) == synchronisations(15)
    if not every_control:
        assert synchronisations(8) == synchronisations(40)


@pytest.mark.gpu
def test_a_gpu_gives_the_tokens_of_the_cpu(llama):
    ids, mask = tiny_models.prompts(PADDING)
    here = fmms.generate(llama, ids, mask, max_new_tokens=40, temperature=0)
    model = tiny_models.build("llama", transformers).to("cuda")
    there = fmms.generate(model, ids.to("cuda"), mask.to("cuda"), max_new_tokens=40, temperature=0)
    assert torch.equal(there.sequences.cpu(), here.sequences)
    assert there.sequences.is_cuda

    controls = {"repetition_penalty": torch.tensor([1.3, 1.0, 0.9, 2.0]), "frequency_penalty": 0.2, "top_logprobs": 2}
    controls |= {"logit_bias": {5: 2.0}, "min_new_tokens": 20, "top_k": torch.tensor([3, 0, 9, 5]), "temperature": 0}
    here = fmms.generate(llama, ids, mask, max_new_tokens=40, **controls)
    there = fmms.generate(model, ids.to("cuda"), mask.to("cuda"), max_new_tokens=40, **controls)
    assert torch.equal(there.sequences.cpu(), here.sequences)
    assert torch.equal(there.top_ids.cpu()[..., 0], here.top_ids[..., 0])
