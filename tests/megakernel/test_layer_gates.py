"""A token layer by layer: right ones pass, turned near-ties of experts are explained, anything wrong is not."""

import dataclasses

import pytest
import torch
from faulty import Faulty, choose, scale
from variants import SMALL

from megakernel import DecodeEngine, reference, vm
from megakernel import weights as weights_of
from megakernel.bench import layer_gates
from megakernel.bench.layer_gates import Along, routing_status
from megakernel.config import TINY
from megakernel.graph import build
from megakernel.knobs import PRESETS, Knobs
from megakernel.memory import Memory
from megakernel.table import pack

PROMPT = torch.randint(TINY.vocab_size, (40,), generator=torch.Generator().manual_seed(5)).tolist()
FIRST = 1
"""The first layer with experts."""


@pytest.fixture(scope="module")
def weights():
    return weights_of.random(TINY, 3)


def machine_parts(weights, knobs=None):
    table = pack(build(TINY, knobs or dataclasses.replace(PRESETS["h200"], tokens=20)), workers=5)
    return table, Memory.of(table, weights)


def op_of(table, name, layer):
    return next(op for op in table.graph.ops if (op.name, op.layer) == (name, layer))


def statuses(compared):
    return [row["status"] for row in compared.routing]


@pytest.mark.parametrize("preset", PRESETS)
def test_right_launches_pass(preset, weights):
    engine = DecodeEngine(TINY, weights, knobs=PRESETS[preset], capacity=64)
    engine.prefill(PROMPT)
    read = PROMPT[-1]
    for position in (39, 40):
        following = engine.decode(1).tokens.item()
        compared = layer_gates.compare(engine.memory, read, position)
        assert not compared.failed
        parts = ["latent", "rotary key"] if PRESETS[preset].mla == "absorbed" else ["keys", "values"]
        expected = [(layer, result) for layer in range(3) for result in (*parts, "residual")]
        assert [(row["layer"], row["result"]) for row in compared.layers] == expected
        assert all(row.keys() == set(layer_gates.LAYER_COLUMNS) for row in compared.layers)
        assert [row["layer"] for row in compared.routing] == [1, 2]
        assert all(row.keys() == set(layer_gates.ROUTING_COLUMNS) for row in compared.routing)
        assert compared.logits.keys() == set(layer_gates.LOGIT_COLUMNS) and compared.logits["token"] == following
        # the same input: no more than another order of sums
        assert all(row["rel"] < 0.01 for row in compared.layers[:2])
        read = following


@pytest.mark.parametrize("preset", ["h200", "mi300x"])
def test_cache_of_a_prompt_is_that_of_the_reference(preset, weights):
    engine = DecodeEngine(TINY, weights, knobs=PRESETS[preset], capacity=64)
    engine.prefill(PROMPT)
    _, expected = reference.prefill(weights, TINY, PROMPT[:-1])
    found = layer_gates.cache_of(engine.memory, weights, len(PROMPT) - 1)
    names = ("keys", "values") if preset == "mi300x" else reference.LayerCache._fields
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(getattr(mine, name), getattr(theirs, name)) for name in names)


# ------------------------------------------------------------------------------------------------------------- routing


def rerouted(weights, ranks, token, tie=False):
    """A token whose first layer with experts takes those of some ranks; with `tie` rank 2 and 3 have equal logits."""
    table, memory = machine_parts(weights)
    text = [token, (token * 7 + 3) % 600, (token * 13 + 1) % 600]
    vm.run(table, memory, iterations=2, forced=text[:2])
    if tie:
        trace = {}
        reference.decode_step(weights, TINY, text[2], 2, layer_gates.cache_of(memory, weights, 2), trace=trace)
        order = trace[FIRST]["router_logits"][0].sort(descending=True).indices
        name = f"model.layers.{FIRST}.mlp.gate.weight"
        gate = weights[name].clone()
        gate[order[3]] = gate[order[2]]
        weights = dict(weights, **{name: gate})
        memory.tensor(f"layers.{FIRST}.mlp.gate").copy_(gate)
    Faulty(table, memory, table.graph.router(FIRST), choose(ranks)).run(iterations=1, position=2, forced=text[2:])
    return layer_gates.compare(memory, text[2], 2, weights=weights)


def test_a_turned_near_tie_is_explained_and_what_follows_it(weights):
    found = set()
    for token in (5, 7, 11, 24):
        compared = rerouted(weights, [0, 1, 3], token, tie=True)
        assert not compared.failed
        near = compared.routing[0]
        assert near["status"] == "near-tie" and abs(near["margin"]) < 1e-5 < near["error"]
        assert len(near["dropped"].split()) == len(near["added"].split()) == 1
        assert near["added"] in near["experts"].split() and near["dropped"] in near["reference_experts"].split()
        found |= set(statuses(compared)) | {row["status"] for row in compared.layers}
        # nothing before it is excused
        assert {row["status"] for row in compared.layers if row["layer"] < FIRST} == {"passed"}
        for row in compared.layers:
            if row["status"] == "routing":
                assert row["path_rel"] <= row["bound"] and (row["rel"] > row["bound"] or row["cosine"] < 0.999)
    # with other experts in the first layer, the reference by itself goes another way in the next
    assert found >= {"near-tie", "downstream", "equal", "routing", "passed"}


@pytest.mark.parametrize("ranks", [[0, 1, 7], [7, 6, 5], [0, 1, 1]], ids=str)
def test_wrong_experts_are_not(ranks, weights):
    for token in (5, 8):
        compared = rerouted(weights, ranks, token)
        assert statuses(compared)[0] == "unexplained" and compared.routing[0] in compared.failed
        # after it, what is off has no excuse
        later = [row for row in compared.layers if (row["layer"], row["result"]) >= (FIRST, "residual")]
        assert {row["status"] for row in later} <= {"passed", "failed"}
        assert set(statuses(compared)) <= {"equal", "unexplained"}
    if ranks == [7, 6, 5]:
        assert "failed" in {row["status"] for row in later}


def test_the_same_experts_in_another_order_are_equal(weights):
    compared = rerouted(weights, [2, 0, 1], 5)
    assert statuses(compared) == ["equal", "equal"] and not compared.failed


def test_ids_that_are_none(weights):
    table, memory = machine_parts(weights)
    vm.run(table, memory, iterations=1, forced=[5])
    memory.routing(FIRST).ids[0] = 99
    compared = layer_gates.compare(memory, 5, 0)
    assert statuses(compared)[0] == "unexplained" and compared.routing[0]["experts"].startswith("99 ")


def synthetic(mine, theirs, chosen, wide=None, free=None, explained=True):
    """The status of a launch's router logits and experts beside the reference's."""
    tensors = [torch.tensor([each]) for each in (mine, wide or mine)]
    along = [{"router_logits": each} for each in (tensors[0], *tensors)]
    config = dataclasses.replace(TINY, n_routed_experts=len(mine), num_experts_per_tok=2)
    along[0]["expert_ids"] = torch.tensor([free]) if free else reference.route(tensors[0], config)[0]
    before = layer_gates._Path()
    before.add("near-tie" if explained else "unexplained")
    return routing_status(config, torch.tensor(theirs), torch.tensor(chosen), Along(*along), before)


def test_statuses_of_routing():
    mine = [3.0, 2.0, 1.9, 0.0]
    near = synthetic(mine, [3.0, 2.0, 2.02, 0.0], [0, 2])
    assert (near["status"], near["dropped"], near["added"]) == ("near-tie", "1", "2")
    assert near["margin"] == pytest.approx(0.1) and near["error"] == pytest.approx(0.12)
    assert synthetic(mine, [3.0, 1.94, 1.96, 0.0], [0, 2])["status"] == "both errors"
    assert synthetic(mine, [3.0, 2.0, 1.9, 0.0], [0, 2])["status"] == "unexplained"  # right logits, wrong choice
    assert synthetic(mine, [3.0, 1.94, 1.96, 0.0], [0, 3])["status"] == "unexplained"
    assert synthetic(mine, [3.0, 2.0, 2.02, 0.0], [0, 2], explained=False)["status"] == "unexplained"
    assert synthetic(mine, [3.0, 2.0, torch.nan, 0.0], [0, 2])["status"] == "unexplained"
    # a large error explains nothing, unless fp32 says that the reference is as far off
    assert synthetic(mine, [3.0, 2.0, 2.5, 0.0], [0, 2])["status"] == "unexplained"
    assert synthetic(mine, [3.0, 2.0, 2.5, 0.0], [0, 2], wide=[3.0, 2.0, 2.3, 0.0])["status"] == "near-tie"
    assert synthetic(mine, mine, [1, 0])["status"] == "equal"
    assert synthetic(mine, mine, [0, 1], free=[0, 3])["status"] == "downstream"
    assert synthetic(mine, mine, [0, 1], free=[0, 3], explained=False)["status"] == "unexplained"
    assert synthetic(mine, mine, [0, 1], explained=False)["status"] == "equal"


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("name", ["ATTN_CHUNK", "O_PROJ_RESIDUAL", "EXPERT_W2_SHARED", "MOE_COMBINE_RESIDUAL"])
def test_a_wrong_op_fails_its_layer_and_is_no_rounding(name, weights):
    table, memory = machine_parts(weights)
    Faulty(table, memory, op_of(table, name, FIRST), scale).run(iterations=3, forced=PROMPT[:3])
    compared = layer_gates.compare(memory, PROMPT[2], 2, weights=weights)
    failed = {(row["layer"], row["result"]) for row in compared.layers if row["status"] == "failed"}
    assert (FIRST, "residual") in failed
    assert all(row["status"] == "passed" for row in compared.layers if row["layer"] < FIRST)


def test_a_wrong_row_of_the_cache(weights):
    for knobs, name in ((None, "latent_cache"), (Knobs(**SMALL), "kv_cache"), (Knobs(**SMALL), "rope_cache")):
        table, memory = machine_parts(weights, knobs)
        vm.run(table, memory, iterations=3, forced=PROMPT[:3])
        memory.tensor(f"layers.2.{name}")[2] *= 1.1
        compared = layer_gates.compare(memory, PROMPT[2], 2)
        results = {"latent_cache": {"latent", "rotary key"}, "kv_cache": {"keys", "values"}, "rope_cache": {"keys"}}
        failed = {(row["layer"], row["result"]) for row in compared.failed}
        assert failed == {(2, result) for result in results[name]}


def test_logits_that_are_wrong(weights):
    table, memory = machine_parts(weights)
    vm.run(table, memory, iterations=3, forced=PROMPT[:3])
    logits = memory.tensor("logits")
    kept = logits.clone()
    assert layer_gates.compare(memory, PROMPT[2], 2).logits["status"] == "passed"
    for place in (int(logits.argmax()), 7):
        logits[place] = 0 if place != 7 else 2 * kept.max()
        found = layer_gates.compare(memory, PROMPT[2], 2)
        assert found.failed == [found.logits] and found.logits["token"] != found.logits["reference_token"]
        logits.copy_(kept)
    logits[7] = torch.nan
    assert layer_gates.compare(memory, PROMPT[2], 2).logits["status"] == "failed"


def constructed(largest, other, seed):
    """Two large logits, and noise that differs by the seed."""
    noise = torch.randn(500, generator=torch.Generator().manual_seed(seed))
    logits = 10 * torch.randn(500, generator=torch.Generator().manual_seed(0)).clamp(-3, 3) + noise
    logits[:2] = torch.tensor([largest, other])
    return logits


@pytest.mark.parametrize(
    ("largest", "other", "before", "expected"),
    [
        (52.0, 45.0, "equal", "rounding"),
        (47.5, 48.5, "equal", "both errors"),  # 7 behind, no logit differs by as much
        (47.5, 48.5, "unexplained", "failed"),
        (38.0, 48.5, "equal", "failed"),  # one of the two is more than twice as far from fp32 as any of the reference
        (47.5, 150.0, "equal", "failed"),
    ],
)
def test_another_token_of_logits_that_err_in_opposite_directions(largest, other, before, expected):
    path, wide = constructed(52.0, 45.0, 2), constructed(50.0, 47.0, 1)
    so_far = layer_gates._Path()
    so_far.add(before)
    row = layer_gates._logit_row(constructed(largest, other, 3), Along(path, path, wide), so_far)
    assert row["cosine"] < layer_gates.LOGIT_COSINE
    assert row["status"] == expected and expected in layer_gates.STATUSES


def test_memory_without_a_token(weights):
    _, memory = machine_parts(weights)
    with pytest.raises(ValueError, match="memory: expected one into which a launch has decoded a token"):
        layer_gates.compare(memory, 0, 0)
