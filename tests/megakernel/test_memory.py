"""Views of a decode's memory: every byte of every tensor, caches of the reference, and what a fresh memory holds."""

import dataclasses

import pytest
import torch
from variants import SMALL, VARIANTS

from megakernel import reference
from megakernel.config import TINY
from megakernel.graph import build
from megakernel.knobs import Knobs
from megakernel.memory import Memory
from megakernel.table import bytes_of, pack
from megakernel.tagged import tagged
from megakernel.weights import random as random_weights


@pytest.fixture(scope="module")
def weights():
    return random_weights(TINY, 1)


def memory_of(weights, **changes):
    return Memory.of(pack(build(TINY, Knobs(**{**SMALL, **changes}))), weights)


@pytest.mark.parametrize(
    "changes", [*VARIANTS[:14], dict(experts="slots", split_shared=False), dict(router_rows=3)], ids=str
)
def test_views_are_the_tensors_and_nothing_else(changes, weights):
    memory = memory_of(weights, **changes)
    arenas = {"matrix": "weights", "vector": "weights", "cache": "cache", "activation": "work"}
    seen = {name: torch.zeros_like(getattr(memory, name)) for name in ("weights", "cache", "work")}
    for name, tensor in memory.graph.tensors.items():
        view = memory.tensor(name)
        arena = getattr(memory, arenas[tensor.kind])
        start = view.data_ptr() - arena.data_ptr()
        size = view.numel() * view.itemsize
        if tagged(tensor) and not name.endswith("mlp.routing"):  # the upper halves of words
            assert view.stride()[-1] == 2
            start, size = start - view.itemsize, 2 * size
        else:
            assert view.is_contiguous()
        assert start >= 0 and start + size <= len(arena)
        expected = bytes_of(TINY, tensor)
        if name.endswith("mlp.router_logits"):  # a part of the routing that has a name of its own
            logits = memory.routing(int(name.split(".")[1])).logits
            assert (view.data_ptr(), view.shape, view.dtype) == (logits.data_ptr(), logits.shape, logits.dtype)
            assert size == expected
            continue
        if name.endswith("mlp.routing"):
            routing = memory.routing(int(name.split(".")[1]))
            assert routing.logits.data_ptr() == view.data_ptr() + size + 4
            assert routing.ids.shape == routing.weights.shape == (3,) and routing.logits.shape == (8,)
            size += 8 * routing.logits.numel()
        assert size == expected, name
        seen[arenas[tensor.kind]][start : start + size] += 1
    assert all(counts.max() == 1 for counts in seen.values())


def test_shapes(weights):
    memory = memory_of(weights, experts="slots")
    shapes = {
        "embed_tokens": (torch.bfloat16, (600, 64)),
        "norm.weight": (torch.bfloat16, (64,)),
        "layers.0.q": (torch.bfloat16, (96,)),
        "layers.0.kv_cache": (torch.bfloat16, (100, 128)),
        "layers.0.attn_partials": (torch.float32, (4, 4, 20)),
        "layers.0.mlp.partials": (torch.float32, (4, 64)),
        "layers.1.mlp.experts.gate_proj": (torch.bfloat16, (8, 32, 64)),
        "layers.1.mlp.experts.hidden": (torch.bfloat16, (3, 32)),
        "layers.1.mlp.routing": (torch.uint8, (3, 8)),
        "logits": (torch.float32, (600,)),
        "argmax_partials": (torch.uint8, (5, 24)),
        "token": (torch.int32, (1,)),
    }
    for name, (dtype, shape) in shapes.items():
        assert (memory.tensor(name).dtype, memory.tensor(name).shape) == (dtype, shape)
    assert memory.capacity == 100 and memory.rotary.shape == (100, 4, 2)
    with pytest.raises(KeyError, match=r"no tensor 'layers\.9\.q' in this graph"):
        memory.tensor("layers.9.q")
    with pytest.raises(KeyError):
        memory.routing(0)


def test_weights_are_where_they_belong(weights):
    memory = memory_of(weights, mla="absorbed")
    experts = memory.tensor("layers.2.mlp.experts.down_proj")
    assert torch.equal(experts[5], weights["model.layers.2.mlp.experts.5.down_proj.weight"])
    assert torch.equal(memory.tensor("lm_head"), weights["lm_head.weight"])
    full = weights["model.layers.1.self_attn.kv_b_proj.weight"].view(4, 32, 32)
    assert torch.equal(memory.tensor("layers.1.self_attn.kv_b_proj.v").view(4, 16, 32), full[:, 16:])
    transposed = memory.tensor("layers.1.self_attn.kv_b_proj.k_transposed").view(4, 32, 16)
    assert torch.equal(transposed, full[:, :16].transpose(1, 2))


def test_fresh_memory_is_poisoned_and_has_no_token(weights):
    memory = memory_of(weights)
    assert not memory.has_token()
    memory.tensor("token").fill_(3)
    memory.tensor("layers.0.q").fill_(1)
    assert memory.has_token()
    memory.reset()
    assert not memory.has_token()
    assert memory.tensor("layers.0.q").isnan().all() and memory.tensor("logits").isnan().all()
    assert memory.tensor("layers.2.kv_cache").isnan().all()


@pytest.mark.parametrize("mla", ["decompressed", "absorbed"])
def test_cache_of_the_reference(mla, weights):
    memory = memory_of(weights, mla=mla)
    _, cache = reference.prefill(weights, TINY, list(range(7)))
    memory.cache.zero_()
    memory.load_cache(cache)
    for layer, expected in enumerate(cache):
        if mla == "absorbed":
            found = memory.tensor(f"layers.{layer}.latent_cache")
            assert torch.equal(found[:7], torch.cat((expected.latent, expected.rotary_key), 1))
        else:
            found = memory.tensor(f"layers.{layer}.kv_cache")
            heads = found[:7].view(7, 4, 32)
            assert torch.equal(heads[..., :16], expected.keys[..., :16]) and torch.equal(
                heads[..., 16:], expected.values
            )
            keys = memory.tensor(f"layers.{layer}.rope_cache")
            assert torch.equal(keys[:7], expected.rotary_key) and keys[7:].isnan().all()
        assert found[7:].isnan().all()


def test_caches_that_do_not_fit(weights):
    memory = memory_of(weights, tokens=5)
    cache = reference.prefill(weights, TINY, list(range(6)))[1]
    before = memory.cache.clone()
    with pytest.raises(ValueError, match=r"^cache: expected at most 5 positions \(the knob `tokens`\), got 6"):
        memory.load_cache(cache)
    with pytest.raises(ValueError, match=r"^cache: expected torch\.bfloat16, got torch\.float32"):
        memory.load_cache(reference.empty_cache(TINY, torch.float32))
    with pytest.raises(ValueError, match=r"^cache: expected 3 layers, got 2"):
        memory.load_cache(cache[:2])
    assert torch.equal(memory.cache, before)


def test_other_types_of_weights(weights):
    wide = {name: tensor.float() for name, tensor in weights.items()}
    with pytest.raises(ValueError, match=r"^weights: expected torch\.bfloat16, got torch\.float32"):
        memory_of(wide)


def test_rotations_are_those_of_the_reference(weights):
    memory = memory_of(weights)
    for table, part in zip(reference.rotary_table(TINY, torch.arange(100)), memory.rotary.unbind(-1), strict=True):
        assert torch.equal(table, part)


def test_memory_is_shared_by_tables_of_a_graph_only(weights):
    graph = build(TINY, Knobs(**SMALL))
    memory = Memory.of(pack(graph), weights)
    memory.check(pack(graph, workers=3))
    memory.check(pack(build(TINY, Knobs(**{**SMALL, "gemv_rows": 8}))))  # the same tensors in other tiles
    other = dataclasses.replace(TINY, rms_norm_eps=1e-5)
    for wrong in (build(TINY, Knobs(**{**SMALL, "mla": "absorbed"})), build(other, Knobs(**SMALL))):
        with pytest.raises(ValueError, match=r"^memory: expected one made for this table"):
            memory.check(pack(wrong))
