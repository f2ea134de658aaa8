"""The task graph of a token: published counts, what its tasks read and write, and that its events order all of it."""

import collections
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from variants import SMALL, VARIANTS

from megakernel import graph as graphs
from megakernel.config import TINY, V2_LITE
from megakernel.graph import build
from megakernel.knobs import PRESETS, Knobs

REFERENCE = Path(__file__).parents[2] / "data" / "reference" / "mi300x_task_counts.csv"


def tiny(**changes):
    return build(TINY, dataclasses.replace(Knobs(), **changes))


def published(**changes):
    return build(V2_LITE, dataclasses.replace(PRESETS["mi300x"], **changes))


@pytest.fixture(scope="module")
def mi300x():
    return published()


# --------------------------------------------------------------------------------------------------- published numbers


def test_printed_table_is_the_published_one(capsys):
    assert graphs.main(["--preset", "mi300x"]) == 0
    assert capsys.readouterr().out == REFERENCE.read_text(encoding="utf-8")


def test_published_size(mi300x):
    assert mi300x.knobs.workers == 296
    assert (len(mi300x.ops), len(mi300x.events), len(mi300x.tasks)) == (298, 347, 20494)
    assert [task.type for task in mi300x.tasks if task.op < 0] == ["BEGIN_TASK_GRAPH", "TERMINATE"]
    assert sum(mi300x.tasks_by_op().values()) + 2 == sum(mi300x.tasks_by_type().values()) == 20494
    assert sum(mi300x.ops_by_name().values()) == 298


def test_other_published_event_counts():
    """One op after the other; with the preparation of the latents as an op too; that with 320 LM-head tiles."""
    chain = PRESETS["mi300x_chain"]
    for changes, ops, events in (
        (dict(), 301, 403),
        (dict(fold_mla_prep=False), 328, 430),
        (dict(fold_mla_prep=False, lm_head_rows=320), 328, 350),
    ):
        graph = build(V2_LITE, dataclasses.replace(chain, **changes))
        assert (len(graph.ops), len(graph.events)) == (ops, events)


def test_published_tasks_of_each_op_in_the_chain():
    graph = build(V2_LITE, PRESETS["mi300x_chain"])
    found = {op.name: len(op.tasks) for op in graph.ops}
    assert all(len(op.tasks) == found[op.name] for op in graph.ops)
    instances = graph.ops_by_name()
    assert {name: (found[name], instances[name]) for name in found} == {
        "EXPERT_W13_SILU": (224, 26),
        "EXPERT_W2": (224, 26),
        "MOE_GATE_TOPK": (1, 26),
        "ATTN_CHUNK": (144, 27),
        "QKV_PROJ": (57, 27),
        "O_PROJ_RESIDUAL": (32, 27),
        "KV_B_PROJ": (64, 27),
        "RMS_NORM": (1, 55),
        "MOE_COMBINE_RESIDUAL": (1, 26),
        "LM_HEAD": (200, 1),
        "ATTN_MERGE": (16, 27),
        "GATE_UP_SILU": (342, 1),
        "DOWN_SPLITK": (128, 1),
        "EMBEDDING": (1, 1),
        "REDUCE_RESIDUAL": (1, 1),
        "ARGMAX_PARTIAL": (100, 1),
        "ARGMAX_REDUCE": (1, 1),
    }


def test_counts_follow_the_knobs(mi300x):
    longer = published(tokens=2048)
    assert longer.tasks_by_op()["ATTN_CHUNK"] == 27 * 16 * 16
    smaller = published(lm_head_rows=64)
    assert len(smaller.tasks) - len(mi300x.tasks) == 1400
    assert len(smaller.events) == 347
    assert published(experts="slots").tasks_by_op()["EXPERT_W2"] == 26 * 6 * 3


def test_shared_counters_are_the_two_joins(mi300x):
    kinds = collections.Counter(
        tuple(sorted({mi300x.ops[mi300x.tasks[task].op].name for task in event.producers}))
        for event in mi300x.events
        if len({mi300x.tasks[task].op for task in event.producers}) > 1
    )
    assert kinds == {("KV_B_PROJ", "Q_PROJ"): 27, ("EXPERT_W2", "EXPERT_W2_SHARED"): 26}


def test_hops(mi300x):
    path = [op.name for op in mi300x.critical_path() if op.layer == 5]
    assert path == [
        *("KVA_PROJ", "KV_B_PROJ", "ATTN_CHUNK", "O_PROJ_RESIDUAL"),
        *("MOE_GATE_TOPK", "EXPERT_W13_SILU", "EXPERT_W2", "MOE_COMBINE_RESIDUAL"),
    ]
    assert len(mi300x.critical_path()) == 1 + 7 + 26 * 8 + 3
    assert len(build(V2_LITE, PRESETS["mi300x_chain"]).critical_path()) == 301


def test_absorbed_ops():
    names = [op.name for op in build(TINY, PRESETS["h200"]).ops if op.layer == 1]
    assert names == [
        *("Q_PROJ", "KVA_PROJ", "ABSORB_Q", "ATTN_CHUNK", "ABSORB_OUT", "O_PROJ_RESIDUAL", "MOE_GATE", "MOE_TOPK"),
        *("EXPERT_W13_SHARED", "EXPERT_W2_SHARED", "EXPERT_W13_SILU", "EXPERT_W2", "MOE_COMBINE_RESIDUAL"),
    ]


@pytest.mark.parametrize("rows, tasks", [(63, [63, 1]), (24, [24, 24, 16]), (4, [4] * 16), (1, [1] * 64)])
def test_a_router_of_several_tasks(rows, tasks, mi300x):
    graph = published(router_rows=rows)
    sizes = len(graph.ops), len(graph.events), len(graph.tasks)
    assert sizes == (298 + 26, 347 + 26, 20494 + 26 * len(tasks))
    by_type, before = graph.tasks_by_type(), mi300x.tasks_by_type()
    assert "moe_gate_topk" not in by_type and by_type["moe_topk"] == 26
    assert by_type["gemv_bf16"] == before["gemv_bf16"] + 26 * len(tasks)
    for layer in range(1, 27):
        ops = {op.name: op for op in graph.ops if op.layer == layer}
        gate = ops["MOE_GATE"]
        assert [graph.tasks[task].rows[1] - graph.tasks[task].rows[0] for task in gate.tasks] == tasks
        assert graph.router(layer) == ops["MOE_TOPK"] and len(ops["MOE_TOPK"].tasks) == 1
        waits = {name: {graph.ops[before].name for before in graph.predecessors[op.index]} for name, op in ops.items()}
        assert waits["MOE_GATE"] == waits["EXPERT_W13_SHARED"] == {"O_PROJ_RESIDUAL"}
        assert waits["MOE_TOPK"] == {"MOE_GATE"} and waits["EXPERT_W13_SILU"] == {"MOE_TOPK"}
        assert waits["EXPERT_W2_SHARED"] == {"EXPERT_W13_SHARED"}


def test_a_router_of_one_task(mi300x):
    for rows in (64, 65, 1000):
        graph = published(router_rows=rows)
        assert (graph.tasks, graph.events) == (mi300x.tasks, mi300x.events)
    assert mi300x.router(1).name == "MOE_GATE_TOPK"
    for layer in (0, 27):
        with pytest.raises(KeyError, match=f"no router in layer {layer}"):
            mi300x.router(layer)


def test_size_of_the_graph_for_an_h200():
    graph = build(V2_LITE, PRESETS["h200"])
    assert (len(graph.ops), len(graph.events), len(graph.tasks)) == (351, 302, 31820)


# -------------------------------------------------------------------------------------------------- any graph is sound


def exactly_once(tensor, parts):
    """Whether ranges cover one matrix of a tensor without overlap."""
    columns = collections.defaultdict(list)
    for part in parts:
        columns[part.cols].append(part.rows)
    rows = collections.defaultdict(list)
    for cols, spans in columns.items():
        rows[tuple(sorted(spans))].append(cols)

    def partition(spans, total):
        ends = [0, *(end for _, end in sorted(spans))]
        return [start for start, _ in sorted(spans)] == ends[:-1] and ends[-1] == total

    # every group of columns is cut into the same rows or, where rows are cut first, the other way round
    if len(rows) == 1 and partition(columns, tensor.cols) and partition(next(iter(rows)), tensor.rows):
        return True
    return sum(part.size for part in parts) == tensor.rows * tensor.cols and not any(
        a.rows[0] < b.rows[1] and b.rows[0] < a.rows[1] and a.cols[0] < b.cols[1] and b.cols[0] < a.cols[1]
        for i, a in enumerate(parts)
        for b in parts[:i]
    )


def check_weights(graph, choice):
    """Every matrix that the token uses is read exactly once, and no other."""
    found = collections.defaultdict(list)
    for _, part in graph.reads(choice):
        found[part.tensor, part.at].append(part)
    wanted = set()
    for tensor in graph.tensors.values():
        if tensor.kind != "matrix":
            continue
        routed = ".mlp.experts." in tensor.name
        layer = int(tensor.name.split(".")[1]) if routed else None
        for at in choice[layer] if routed else range(tensor.count):
            wanted.add((tensor.name, at))
            parts = found[tensor.name, at]
            if tensor.name == "embed_tokens":
                assert [part.size for part in parts] == [tensor.cols]
            else:
                assert exactly_once(tensor, parts), tensor
    assert set(found) == wanted


def check_writes(graph):
    """Every activation is written exactly once, of a cache the current position."""
    found = collections.defaultdict(list)
    for task in graph.tasks:
        for part in task.writes:
            found[part.tensor, part.at].append(part)
    for tensor in graph.tensors.values():
        for at in range(tensor.count):
            parts = found.pop((tensor.name, at), [])
            if tensor.kind == "cache":
                assert {part.rows for part in parts} == {(tensor.rows - 1, tensor.rows)}, tensor
                parts = [part._replace(rows=(0, 1)) for part in parts]
                tensor = tensor._replace(rows=1)
            assert exactly_once(tensor, parts) if tensor.kind in ("activation", "cache") else not parts, tensor
    assert not found


def check_op_rows(graph):
    """The rows of an op's tasks partition its output for each expert, slot and chunk."""
    for op in graph.ops:
        groups = collections.defaultdict(list)
        for index in op.tasks:
            task = graph.tasks[index]
            assert task.op == op.index and task.tile == index - op.tasks[0]
            whose = None if op.by_range else task.chunk
            groups[task.expert, task.slot, whose].append(task.rows)
        for whose, spans in groups.items():
            if op.name in ("EXPERT_W13_SILU", "EXPERT_W2") and whose[:2] == (None, None):
                continue  # the shared experts are wider: their writes are checked
            spans.sort()
            assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])], op
            wide = op.name != "EXPERT_W13_SILU" or graph.knobs.split_shared
            assert spans[-1][1] == (op.rows if wide else graph.config.moe_intermediate_size), op


def check_order(graph):
    """All tasks run, each after everything that wrote what it reads, by events alone."""
    order = [task.index for task in graph]
    assert sorted(order) == list(range(len(graph.tasks))) and order[-1] == len(order) - 1
    for event in graph.events:
        assert event.threshold == len(event.producers) + event.from_host > 0
        assert event.consumers or event.to_host
        assert not set(event.producers) & set(event.consumers)
    assert all(graph.waits) and all(len(triggers) == 1 for triggers in graph.triggers)

    # what has certainly run when a task starts, as a bit set
    done, reached = {}, {}
    for index in order:
        seen = 0
        for wait in graph.waits[index]:
            if wait not in reached:
                reached[wait] = 0
                for producer in graph.events[wait].producers:
                    reached[wait] |= done[producer] | 1 << producer
            seen |= reached[wait]
        done[index] = seen
    assert done[order[-1]] == (1 << (len(order) - 1)) - 1  # nothing is left when the token ends
    writers = collections.defaultdict(list)
    for task in graph.tasks:
        for part in task.writes:
            writers[part.tensor, part.at].append((part, task.index))
    for task in graph.tasks:
        for part in task.reads:
            for other, writer in writers[part.tensor, part.at]:
                rows = part.rows[0] < other.rows[1] and other.rows[0] < part.rows[1]
                if rows and part.cols[0] < other.cols[1] and other.cols[0] < part.cols[1]:
                    assert done[task.index] >> writer & 1, (task, graph.tasks[writer])
    for task in graph.tasks:
        for part in (*task.reads, *task.writes):
            tensor = graph.tensors[part.tensor]
            assert 0 <= part.rows[0] < part.rows[1] <= tensor.rows
            assert 0 <= part.cols[0] < part.cols[1] <= tensor.cols


def check(graph, choice):
    check_weights(graph, choice)
    check_writes(graph)
    check_op_rows(graph)
    check_order(graph)
    norms = sum(tensor.rows for tensor in graph.tensors.values() if tensor.kind == "vector")
    assert graph.token_bytes() == graph.config.weight_bytes() - 2 * norms


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_every_knob(changes):
    graph = tiny(**{**SMALL, **changes})
    check(graph, {1: (7, 0, 3), 2: (1, 2, 4)})


def test_variants_set_every_knob():
    assert {name for changes in VARIANTS for name in changes} == {field.name for field in dataclasses.fields(Knobs)}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dense", [0, 1, 3])
def test_presets_and_layer_kinds(preset, dense):
    graph = build(dataclasses.replace(TINY, first_k_dense_replace=dense), PRESETS[preset])
    check(graph, dict.fromkeys(range(dense, 3), (5, 6, 2)))


def test_weights_of_the_real_model(mi300x):
    choice = {layer: range(layer, layer + 6) for layer in range(1, 27)}
    check_weights(mi300x, choice)
    check_writes(mi300x)
    norms = sum(tensor.rows for tensor in mi300x.tensors.values() if tensor.kind == "vector")
    assert mi300x.token_bytes() == V2_LITE.weight_bytes() - 2 * norms


def test_bytes_of_a_task(mi300x):
    head = next(op for op in mi300x.ops if op.name == "LM_HEAD")
    task = mi300x.tasks[head.tasks[0]]
    assert mi300x.task_bytes(task) == 512 * 2048 * 2
    assert mi300x.task_bytes(task, ("matrix", "vector")) == 513 * 2048 * 2
    assert mi300x.task_bytes(mi300x.tasks[0]) == 0


def test_argmax_waits_for_its_share():
    graph = tiny(lm_head_rows=16, argmax_partials=12)  # 8 tiles for each block of 128 tokens, 600 tokens in all
    events = [event for event in graph.events if "LM_HEAD" in event.name]
    assert [(len(event.producers), len(event.consumers)) for event in events] == [(8, 1)] * 4 + [(6, 1)]


def test_deadlock_is_found(mi300x):
    graph = tiny()
    event = graph.events[5]
    events = [*graph.events[:5], event._replace(threshold=event.threshold + 1), *graph.events[6:]]
    with pytest.raises(ValueError, match="never start"):
        list(dataclasses.replace(graph, events=tuple(events)))


# -------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("field", dataclasses.fields(Knobs), ids=lambda field: field.name)
def test_bad_knobs_are_named(field):
    for value in (0, -1, 1.5, None, "no", 3 if field.type is not int else True):
        with pytest.raises(ValueError, match=rf"^{field.name} must be"):
            Knobs(**{field.name: value})


def test_knobs_that_the_model_does_not_allow():
    with pytest.raises(ValueError, match=r"^tokens must be at most"):
        tiny(tokens=TINY.max_position_embeddings + 1)
    with pytest.raises(ValueError, match=r"^attn_rows is too small"):
        published(tokens=163840, attn_rows=1)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tokens", "0"], "tokens must be a positive integer, not 0"),
        (["--tokens", "163841"], "tokens must be at most"),
        (["--lm-head-rows", "x"], "invalid int value"),
        (["--mla", "none"], "invalid choice"),
        (["--preset", "b200"], "invalid choice"),
        (["--token", "5"], "unrecognized"),
    ],
)
def test_bad_options_end_in_a_message(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        graphs.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_options_override_the_preset(capsys):
    assert graphs.main(["--tokens", "2048", "--lm-head-rows", "64", "--no-split-qkv", "--mla", "absorbed"]) == 0
    out = capsys.readouterr().out
    assert "attn_chunk_576_512,project,27,6912,ATTN_CHUNK\n" in out and "QKV_PROJ; ABSORB_Q; ABSORB_OUT" in out


def test_module_runs():
    command = [sys.executable, "-m", "megakernel.graph", "--model", "tiny", "--preset", "h200"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.splitlines()[-1] == f"total,,39,{len(build(TINY, PRESETS['h200']).tasks)},"
