"""Every op on its own inputs: right ones pass under every knob, a fault is named by its own op and by no other."""

import dataclasses

import pytest
import torch
from faulty import Faulty, another_argmax, another_token, choose, scale
from variants import SMALL, VARIANTS

from megakernel import DecodeEngine, vm
from megakernel import weights as weights_of
from megakernel.bench import op_gates
from megakernel.config import TINY
from megakernel.graph import build
from megakernel.knobs import PRESETS, Knobs
from megakernel.memory import Memory
from megakernel.table import pack

PROMPT = torch.randint(TINY.vocab_size, (40,), generator=torch.Generator().manual_seed(5)).tolist()
UNFOLDED = dict(SMALL, fold_norm=False, fold_merge=False, fold_mla_prep=False, splits=3)
SPOILS = {
    "MOE_GATE_TOPK": choose([0, 1, 3]),
    "MOE_TOPK": choose([0, 1, 3]),
    "ARGMAX_PARTIAL": another_argmax,
    "ARGMAX_REDUCE": another_token,
}


@pytest.fixture(scope="module")
def weights():
    return weights_of.random(TINY, 3)


@pytest.fixture(scope="module")
def engine(weights):
    return DecodeEngine(TINY, weights, capacity=64)


def failed(rows):
    return {(row["layer"], row["op"]) for row in rows if not row["passed"]}


def table_of(knobs):
    return pack(build(TINY, knobs), workers=5)


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_pass(preset, schedule, weights):
    engine = DecodeEngine(TINY, weights, knobs=PRESETS[preset], capacity=64, schedule=schedule)
    engine.prefill(PROMPT)
    read = PROMPT[-1]
    for position in (39, 40):
        following = engine.decode(1).tokens.item()
        rows = op_gates.check(engine.memory, read, position, weights=engine.weights)
        assert all(row["passed"] and row["share"] <= 0.5 for row in rows)
        assert all(row["cosine"] is None or row["cosine"] > 0.9999 for row in rows)
        assert {row["layer"] for row in rows} == {None, 0, 1, 2} and rows[0].keys() == set(op_gates.COLUMNS)
        read = following
    # each op of the graph has a result, and says so
    assert {(row["layer"], row["op"]) for row in rows} == {(op.layer, op.name) for op in engine.graph.ops}
    assert op_gates.check(engine.memory, PROMPT[-1], 40) != rows  # it was another token that was read


@pytest.mark.parametrize("changes", VARIANTS[::4], ids=str)
def test_knobs_pass(changes, weights):
    knobs = Knobs(**{**SMALL, **changes})
    memory = Memory.of(table := table_of(knobs), weights)
    count = min(3, knobs.tokens)
    vm.run(table, memory, iterations=count, forced=PROMPT[:count])
    rows = op_gates.check(memory, PROMPT[count - 1], count - 1)
    assert not failed(rows)
    assert {(row["layer"], row["op"]) for row in rows} == {(op.layer, op.name) for op in table.graph.ops}


@pytest.mark.parametrize(
    "knobs",
    [
        dataclasses.replace(PRESETS["h200"], tokens=20),
        Knobs(**{**UNFOLDED, "mla": "absorbed", "experts": "slots"}),
        Knobs(**{**UNFOLDED, "split_qkv": False, "split_shared": False}),
    ],
    ids=["h200", "absorbed", "decompressed"],
)
def test_a_fault_in_an_op_is_named_by_that_op_alone(knobs, weights):
    table = table_of(knobs)
    memory = Memory.of(table, weights)
    for op in table.graph.ops:
        if op.layer == 2:  # layer 1 has the same ops
            continue
        memory.reset()
        machine = Faulty(table, memory, op, SPOILS.get(op.name, scale))
        machine.run(iterations=3, forced=PROMPT[:3])
        assert failed(op_gates.check(memory, PROMPT[2], 2, weights=weights)) == {(op.layer, op.name)}


def test_a_wrong_weight_is_named_by_the_ops_that_read_it(engine, weights):
    for name, tensor in engine.graph.tensors.items():
        if tensor.kind not in ("matrix", "vector") or name.startswith("layers.2"):
            continue
        readers = {
            (op.layer, op.name)
            for op in engine.graph.ops
            if any(part.tensor == name for task in op.tasks for part in engine.graph.tasks[task].reads)
        }
        view = engine.memory.tensor(name)
        kept = view.clone()
        view *= 1.5
        engine.prefill(PROMPT[:3])
        engine.decode(1)
        assert failed(op_gates.check(engine.memory, PROMPT[2], 2, weights=weights)) == readers, name
        view.copy_(kept)


def test_a_large_stream_hides_no_addition(weights):
    large = dict(weights, **{"model.embed_tokens.weight": weights["model.embed_tokens.weight"] * 1000})
    engine = DecodeEngine(TINY, large, capacity=20)
    engine.memory.tensor("layers.0.self_attn.o_proj").mul_(2)
    engine.prefill(PROMPT[:3])
    engine.decode(1)
    rows = {
        row["result"]: row for row in op_gates.check(engine.memory, PROMPT[2], 2, weights=large) if row["layer"] == 0
    }
    assert rows["o_proj + residual"]["passed"] and not rows["o_proj alone"]["passed"]


def test_choices_of_experts(engine):
    """The routing is edited after the launch: its own gate fails, and those of what was computed with the old one."""
    engine.prefill(PROMPT)
    engine.decode(1)
    routing = engine.memory.routing(1)
    ids = routing.ids.clone()

    def wrong(*changed):
        routing.ids.copy_(torch.tensor(changed))
        rows = op_gates.check(engine.memory, PROMPT[-1], 39, weights=engine.weights)
        routing.ids.copy_(ids)
        return {row["result"]: row for row in rows if row["layer"] == 1}

    first, second, third = ids.tolist()
    other = next(expert for expert in range(TINY.n_routed_experts) if expert not in (first, second, third))
    assert wrong(first, second, third)["top-k ids"]["max_error"] == 0
    assert wrong(second, first, third)["top-k ids"]["max_error"] == 2
    assert wrong(first, second, other)["top-k ids"]["max_error"] == 1
    assert wrong(first, second, second)["top-k ids"]["max_error"] == 2
    for none in (-1, TINY.n_routed_experts):
        rows = wrong(first, none, third)
        for result in ("top-k ids", "top-k weights", "routed w13", "routed w2", "combine alone"):
            assert not rows[result]["passed"], result


def test_ties_of_experts_go_to_the_lowest_number(engine):
    engine.prefill(PROMPT)
    engine.decode(1)
    routing = engine.memory.routing(1)

    def wrong(logits, *ids):
        routing.logits.copy_(torch.tensor(logits))
        routing.ids.copy_(torch.tensor(ids))
        rows = op_gates.check(engine.memory, PROMPT[-1], 39, weights=engine.weights)
        return next(row["max_error"] for row in rows if row["layer"] == 1 and row["result"] == "top-k ids")

    tied = [0.0, 3.0, 3.0, 2.0, 2.0, 1.0, 1.0, 1.0]
    assert wrong(tied, 1, 2, 3) == 0
    assert wrong(tied, 2, 1, 3) == 2
    assert wrong(tied, 1, 2, 4) == 1
    close = [0.0, 3.0, 3.0, 2.0, 2.0 + 2e-7, 1.0, 1.0, 1.0]  # another exp may round them the other way
    assert wrong(close, 1, 2, 4) == 0 and wrong(close, 1, 2, 3) == 0


def test_nan_passes_nothing(engine):
    engine.prefill(PROMPT)
    engine.decode(1)
    engine.memory.tensor("layers.1.q")[5] = torch.nan
    rows = op_gates.check(engine.memory, PROMPT[-1], 39, weights=engine.weights)
    assert (1, "Q_PROJ") in failed(rows)
    worst = {row["result"]: row for row in op_gates.worst(rows)}
    assert (worst["q"]["layer"], worst["q"]["n"], worst["q"]["failed"]) == (1, 3, 1)
    assert worst["kv_a"]["failed"] == 0


def test_memory_without_a_token(weights):
    memory = Memory.of(table_of(Knobs(**SMALL)), weights)
    with pytest.raises(ValueError, match="memory: expected one into which a launch has decoded a token"):
        op_gates.check(memory, 0, 0)
