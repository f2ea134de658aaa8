"""`megakernel.reference` against transformers on a saved checkpoint, and each op against its formula."""

import dataclasses
import inspect

import pytest
import torch

from megakernel import reference, weights
from megakernel.config import TINY

PROMPT = [3, 200, 17, 17, 99, 254, 1, 60, 128]
STEPS = 32


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folder and model of transformers per dtype; the model was given random weights and saved them."""
    transformers = pytest.importorskip("transformers")
    made = {}
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path_factory.mktemp("checkpoint")
        model = _fill(transformers, folder, dtype)
        made[dtype] = folder, model
    return made


def _fill(transformers, folder, dtype):
    """A model whose checkpoint is written, and which is then read back by transformers."""
    drawn = weights.random(TINY, 3, dtype)  # its routing and its decode have no near-tie
    source = transformers.DeepseekV2ForCausalLM(TINY.to_hf()).to(dtype)
    state = {}
    for name, tensor in source.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix(".gate_up_proj")
            parts = [[drawn[f"{prefix}.{e}.{p}_proj.weight"] for p in ("gate", "up")] for e in range(len(tensor))]
            state[name] = torch.stack([torch.cat(part) for part in parts])
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix(".down_proj")
            state[name] = torch.stack([drawn[f"{prefix}.{e}.down_proj.weight"] for e in range(len(tensor))])
        else:
            state[name] = drawn[name]
    source.load_state_dict(state)
    source.save_pretrained(folder, max_shard_size="200KB")
    return transformers.DeepseekV2ForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def theirs(model, tokens):
    """Logits [N, V] of transformers, and what leaves each layer and the final norm, [N, hidden_size]."""
    kept, handles = {}, []
    parts = {**dict(enumerate(model.model.layers)), "norm": model.model.norm}
    for name, module in parts.items():

        def keep(_, __, out, name=name):
            kept[name] = out[0] if out.dim() == 3 else out

        handles.append(module.register_forward_hook(keep))
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    for handle in handles:
        handle.remove()
    return logits, kept


def decode_theirs(model, prompt, count):
    """Greedy ids and logits [count, V] of transformers with its own cache."""
    # earlier releases of transformers call the cache past_key_values
    cache = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    given, earlier, ids, logits = prompt, {}, [], []
    for _ in range(count):
        with torch.no_grad():
            out = model(torch.tensor([given]), use_cache=True, **earlier)
        earlier = {cache: out[cache]}
        logits.append(out.logits[0, -1])
        ids.append(int(logits[-1].argmax()))
        given = ids[-1:]
    return ids, torch.stack(logits)


def relative(got, expected):
    """Largest difference over the largest number."""
    return ((got.float() - expected.float()).abs().max() / expected.float().abs().max()).item()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=["fp32", "bf16"])
def test_every_layer_is_that_of_transformers(dtype, bound, checkpoints):
    """Only the order of sums may differ. In bf16 that lets a result round the other way, by 2^-8 of it; the bound is
    five of these, and on x86 the bits are the same."""
    folder, model = checkpoints[dtype]
    loaded = weights.load(folder, TINY)
    tokens = torch.randint(TINY.vocab_size, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    expected, layers = theirs(model, tokens)
    trace = {}
    logits, cache = reference.prefill(loaded, TINY, tokens, trace=trace)
    assert logits.dtype == expected.dtype == dtype
    for layer in range(TINY.num_hidden_layers):
        assert relative(trace[layer]["out"], layers[layer]) <= bound
    assert relative(trace["norm"], layers["norm"]) <= bound
    assert relative(logits, expected) <= bound
    assert len(cache) == 3 and {len(part) for layer in cache for part in layer} == {90}


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=["fp32", "bf16"])
def test_cached_greedy_decode_is_that_of_transformers(dtype, bound, checkpoints):
    folder, model = checkpoints[dtype]
    assert (folder / weights.INDEX).is_file(), "several shards were meant"
    loaded = weights.load(folder, TINY)
    expected_ids, expected = decode_theirs(model, PROMPT, STEPS)
    ids, logits = reference.greedy(loaded, TINY, PROMPT, STEPS)
    assert ids == expected_ids
    assert relative(logits, expected) <= bound
    assert len(set(ids)) >= 8, "a decode that repeats itself would prove little"


def test_every_feature_matters(checkpoints):
    """The comparison would notice a wrong scale, table, expert count, norm or shared expert."""
    folder, model = checkpoints[torch.float32]
    loaded = weights.load(folder, TINY)
    expected, _ = theirs(model, PROMPT)
    for change in (
        {"rope_mscale_all_dim": 0.5, "rope_mscale": 0.5},
        {"rope_mscale": 1.0},
        {"rope_factor": 39.0},
        {"rope_beta_slow": 4},
        {"rope_theta": 9000.0},
        {"num_experts_per_tok": 4},
        {"routed_scaling_factor": 1.01},
        {"rms_norm_eps": 1e-3},
    ):
        logits, _ = reference.prefill(loaded, dataclasses.replace(TINY, **change), PROMPT)
        assert relative(logits, expected) > 1e-4, change
    for part in ("kv_a_layernorm", "shared_experts.down_proj", "mlp.gate", "post_attention_layernorm"):
        other = {name: tensor * (0.9 if part in name else 1) for name, tensor in loaded.items()}
        logits, _ = reference.prefill(other, TINY, PROMPT)
        assert relative(logits, expected) > 1e-4, part


# ---------------------------------------------------------------------------------------------------- steps and caches


@pytest.fixture(scope="module")
def drawn():
    return weights.random(TINY, 5, torch.float32)


def test_steps_equal_a_prefill(drawn):
    expected, whole = reference.prefill(drawn, TINY, PROMPT)
    cache = reference.empty_cache(TINY, torch.float32)
    for position, token in enumerate(PROMPT):
        before = cache
        logits, cache = reference.decode_step(drawn, TINY, token, position, cache)
        assert logits.shape == (TINY.vocab_size,)
        assert relative(logits, expected[position]) < 1e-5
        assert {len(part) for layer in before for part in layer} == {position}, "the old cache stays"
    for got, want in zip(cache, whole, strict=True):
        assert all(relative(*pair) < 1e-5 for pair in zip(got, want, strict=True))
    _, half = reference.prefill(drawn, TINY, PROMPT[:4])
    rest, _ = reference.prefill(drawn, TINY, torch.tensor(PROMPT[4:]), half)
    assert relative(rest, expected[4:]) < 1e-5


def test_the_cache_is_expanded_from_its_latents(drawn):
    _, cache = reference.prefill(drawn, TINY, PROMPT)
    for layer, kept in enumerate(cache):
        assert [tuple(part.shape) for part in kept] == [(9, 32), (9, 8), (9, 4, 24), (9, 4, 16)]
        weight = drawn[f"model.layers.{layer}.self_attn.kv_b_proj.weight"]
        keys, values = reference.kv_b_proj(kept.latent, kept.rotary_key, weight, TINY)
        assert torch.allclose(keys, kept.keys, atol=1e-5)
        assert torch.allclose(values, kept.values, atol=1e-5)


def test_forced_routing(drawn):
    trace, again, other = {}, {}, {}
    expected, _ = reference.prefill(drawn, TINY, PROMPT, trace=trace)
    routing = {layer: trace[layer]["expert_ids"] for layer in (1, 2)}
    assert "expert_ids" not in trace[0]
    logits, _ = reference.prefill(drawn, TINY, PROMPT, forced=routing, trace=again)
    assert torch.equal(logits, expected)
    swapped = {1: routing[1].flip(1)}  # the same experts in another order
    logits, _ = reference.prefill(drawn, TINY, PROMPT, forced=swapped)
    assert relative(logits, expected) < 1e-6
    elsewhere = {2: (routing[2] + 1) % TINY.n_routed_experts}
    logits, _ = reference.prefill(drawn, TINY, PROMPT, forced=elsewhere, trace=other)
    assert torch.equal(other[2]["expert_ids"], elsewhere[2])
    assert torch.equal(other[1]["out"], trace[1]["out"])
    assert relative(logits, expected) > 1e-3


def test_forced_routing_with_weights(drawn):
    trace, again, half = {}, {}, {}
    expected, _ = reference.prefill(drawn, TINY, PROMPT, trace=trace)
    routing = {layer: (trace[layer]["expert_ids"], trace[layer]["expert_weights"]) for layer in (1, 2)}
    logits, _ = reference.prefill(drawn, TINY, PROMPT, forced=routing)
    assert torch.equal(logits, expected)
    ids, factors = routing[1]
    reordered = {1: (ids.flip(1), factors.flip(1))}  # the same experts with the same weights in another order
    logits, _ = reference.prefill(drawn, TINY, PROMPT, forced=reordered)
    assert relative(logits, expected) < 1e-6
    # weights with which routed_scaling_factor has been multiplied: the factor is not applied again
    other = dataclasses.replace(TINY, routed_scaling_factor=2.0)
    logits, _ = reference.prefill(drawn, other, PROMPT, forced=routing, trace=again)
    assert torch.equal(logits, expected)
    assert torch.equal(again[1]["expert_weights"], factors)
    # each layer by itself: the other one routes as ever
    logits, _ = reference.prefill(drawn, TINY, PROMPT, forced={2: (routing[2][0], routing[2][1] / 2)}, trace=half)
    assert torch.equal(half[1]["out"], trace[1]["out"])
    assert torch.allclose(half[2]["routed"], trace[2]["routed"] / 2, atol=1e-6)


@pytest.mark.parametrize("change", [lambda x: x.bfloat16(), lambda x: x[:, :2], lambda x: x[0]])
def test_forced_weights_of_another_kind_are_refused(change, drawn):
    trace = {}
    reference.prefill(drawn, TINY, PROMPT, trace=trace)
    ids, factors = trace[1]["expert_ids"], trace[1]["expert_weights"]
    with pytest.raises(ValueError, match=r"forced: expected weights of torch.float32 \[9, 3\], found"):
        reference.prefill(drawn, TINY, PROMPT, forced={1: (ids, change(factors))})


def test_what_is_refused(drawn):
    cache = reference.empty_cache(TINY, torch.float32)
    with pytest.raises(ValueError, match="position: expected 0, the length of the cache, found 1"):
        reference.decode_step(drawn, TINY, 3, 1, cache)
    for token in (-1, TINY.vocab_size):
        with pytest.raises(ValueError, match=rf"expected ids in \[0, 600\), found {token}"):
            reference.decode_step(drawn, TINY, token, 0, cache)
    for tokens in ([], [[1]]):
        with pytest.raises(ValueError, match="expected one or more ids"):
            reference.prefill(drawn, TINY, tokens)
    with pytest.raises(ValueError, match="max_position_embeddings = 4 positions, found 9"):
        reference.prefill(drawn, dataclasses.replace(TINY, max_position_embeddings=4), PROMPT)


# ------------------------------------------------------------------------------------------------------------------ ops


def test_rms_norm_rounds_before_the_weight():
    x = torch.tensor([[3.0, 4.0]])
    assert torch.allclose(reference.rms_norm(x, torch.tensor([1.0, 2.0]), 0.0), torch.tensor([[3.0, 8.0]]) / 12.5**0.5)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.full((64,), 1.1).bfloat16()
    wide = x.float() / (x.float().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.equal(reference.rms_norm(x, weight, 1e-6), wide.bfloat16() * weight)


def test_rotation_is_of_interleaved_pairs():
    x = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    cos, sin = torch.tensor([[0.0, 0.6]]), torch.tensor([[1.0, 0.8]])
    assert torch.allclose(reference.rotate(x, cos, sin), torch.tensor([[0.0, 1.0, -0.8, 0.6]]))
    heads = torch.stack((x, 2 * x), dim=1)
    assert torch.allclose(reference.rotate(heads, cos, sin)[:, 1], 2 * reference.rotate(x, cos, sin))
    cos, sin = reference.rotary_table(TINY, torch.tensor([0, 5]))
    assert cos[0].tolist() == [1] * 4 and sin[0].tolist() == [0] * 4
    assert torch.allclose(cos[1], (5 * TINY.inverse_frequencies()).cos())


def test_attention_by_loops():
    generator = torch.Generator().manual_seed(0)
    q, keys, values = (torch.randn(shape, generator=generator) for shape in ((2, 3, 8), (5, 3, 8), (5, 3, 4)))
    got = reference.attention(q, keys, values, 0.3).view(2, 3, 4)
    for row in range(2):
        for head in range(3):
            seen = 4 + row
            p = (keys[:seen, head] @ q[row, head] * 0.3).softmax(0)
            assert torch.allclose(got[row, head], p @ values[:seen, head], atol=1e-6)


def test_routing_is_greedy_and_not_normalised():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, -1.0, 1.0, 0.0, 0.0]])
    ids, factors = reference.route(logits, dataclasses.replace(TINY, routed_scaling_factor=2.0))
    assert ids.tolist() == [[1, 3, 2]]  # the lowest id first on a tie, also at the edge
    assert torch.allclose(factors, 2 * logits.softmax(-1)[:, [1, 3, 2]])
    assert factors.dtype == torch.float32
    x, weight = torch.randn(2, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    assert torch.equal(reference.router_logits(x, weight), x.float() @ weight.float().T)


def test_experts_and_combine_by_loops(drawn):
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    ids = torch.tensor([[0, 3, 7], [3, 1, 0], [7, 6, 5], [2, 4, 3]])
    factors = torch.rand(4, 3, generator=torch.Generator().manual_seed(3))
    names = ("gate", "up", "down")
    matrices = {e: tuple(drawn[f"model.layers.1.mlp.experts.{e}.{n}_proj.weight"] for n in names) for e in range(8)}
    got = reference.experts(x, ids, factors, matrices)
    for row in range(4):
        want = torch.zeros(64)
        for slot in range(3):
            gate, up, down = matrices[ids[row, slot].item()]
            h = gate @ x[row]
            want += factors[row, slot] * (down @ (h * h.sigmoid() * (up @ x[row])))
        assert torch.allclose(got[row], want, atol=1e-5)
    assert torch.equal(reference.combine(got, x, 2 * x), 2 * x + (got + x))
