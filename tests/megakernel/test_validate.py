"""The validator accepts every graph that is built, and names each planted fault."""

import collections
import dataclasses
import itertools
import re

import pytest

from megakernel.config import TINY, V2_LITE
from megakernel.graph import build
from megakernel.knobs import CHOICES, PRESETS, Knobs
from megakernel.validate import ORDERS, InvalidGraph, simulate, validate

FOLDS = [field.name for field in dataclasses.fields(Knobs) if field.type is bool]
SMALL = dict(gemv_rows=16, dense_rows=32, shared_rows=24, lm_head_rows=32, attn_rows=32, tokens=100, argmax_partials=12)
SMALL |= dict(absorb_rows=48, workers=9)


def tiny(**changes):
    return build(TINY, dataclasses.replace(Knobs(), **{**SMALL, **changes}))


@pytest.fixture(scope="module")
def graph():
    return tiny()


def rewired(graph, changed):
    """The graph with other events, and the waits and triggers of its tasks following from them."""
    events = [event._replace(**changed.get(event.index, {})) for event in graph.events]
    waits, triggers = [[] for _ in graph.tasks], [[] for _ in graph.tasks]
    for event in events:
        for task in event.consumers:
            waits[task].append(event.index)
        for task in event.producers:
            triggers[task].append(event.index)
    return dataclasses.replace(
        graph, events=tuple(events), waits=tuple(map(tuple, waits)), triggers=tuple(map(tuple, triggers))
    )


def retasked(graph, index, **fields):
    tasks = list(graph.tasks)
    tasks[index] = tasks[index]._replace(**fields)
    return dataclasses.replace(graph, tasks=tuple(tasks))


def op(graph, name, layer=None):
    return next(each for each in graph.ops if each.name == name and layer in (None, each.layer))


def event_after(graph, name, layer=None):
    return graph.events[graph.triggers[op(graph, name, layer).tasks[0]][0]]


def refused(graph, *words):
    with pytest.raises(InvalidGraph) as caught:
        validate(graph)
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


# --------------------------------------------------------------------------------------------------------- sound graphs


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_on_the_real_model(preset):
    graph = build(V2_LITE, PRESETS[preset])
    report = validate(graph, routings=1)
    assert (report.tasks, report.events) == (len(graph.tasks), len(graph.events))
    each = 64 if graph.knobs.experts == "superset" else 6
    attention = 5 if graph.knobs.mla == "absorbed" else 4
    assert report.matrices == 2 + 27 * attention + 3 + 26 * (1 + 3 + 3 * each)
    assert report.schedules == 4 and report.routings == 1
    for workers in {132, 296} - {graph.knobs.workers}:
        assert len(simulate(graph, workers, 1).started) == len(graph.tasks)


@pytest.mark.parametrize("words", list(itertools.product(*CHOICES.values())), ids="-".join)
def test_all_combinations_of_words_and_folds(words):
    for folds in itertools.product((True, False), repeat=len(FOLDS)):
        validate(tiny(**dict(zip(CHOICES, words, strict=True)), **dict(zip(FOLDS, folds, strict=True))), routings=1)


@pytest.mark.parametrize("mla", CHOICES["mla"])
@pytest.mark.parametrize(
    "changes",
    [
        dict(tokens=1),
        dict(tokens=129, attn_rows=64),
        dict(tokens=130, attn_rows=7, attn_heads=3),
        dict(gemv_rows=5, absorb_rows=3),
        dict(gemv_rows=5, split_qkv=False),
        dict(lm_head_rows=7, argmax_partials=9),
        dict(lm_head_rows=1, argmax_partials=1),
        dict(dense_rows=9, shared_rows=9, splits=7),
        dict(expert_w13_tiles=5, expert_w2_tiles=1000),
        dict(expert_w13_tiles=1000, expert_w2_tiles=5, experts="slots"),
        dict(workers=1),
    ],
    ids=str,
)
def test_tile_sizes(changes, mla):
    validate(tiny(mla=mla, **changes))


@pytest.mark.parametrize("dense", [0, 1, 3])
@pytest.mark.parametrize("preset", PRESETS)
def test_layer_kinds(preset, dense):
    validate(build(dataclasses.replace(TINY, first_k_dense_replace=dense), PRESETS[preset]), routings=5)


def test_one_expert_of_which_one_is_chosen():
    config = dataclasses.replace(TINY, n_routed_experts=1, num_experts_per_tok=1)
    for experts in CHOICES["experts"]:
        validate(build(config, Knobs(experts=experts)))


def test_combine_reads_all_results_of_experts(graph):
    task = graph.tasks[op(graph, "MOE_COMBINE_RESIDUAL").tasks[0]]
    assert collections.Counter(part.tensor.split(".")[-2] for part in task.reads)["experts"] == TINY.n_routed_experts


# --------------------------------------------------------------------------------------------------------------- events


def test_edge_missing_on_one_side(graph):
    event = event_after(graph, "O_PROJ_RESIDUAL", 1)
    events = list(graph.events)
    events[event.index] = event._replace(consumers=event.consumers[1:])
    refused(
        dataclasses.replace(graph, events=tuple(events)),
        "missing edge",
        f"event {event.index}",
        "MOE_GATE",
        "consumers",
    )
    events[event.index] = event._replace(producers=event.producers[:-1])
    refused(dataclasses.replace(graph, events=tuple(events)), "missing edge", "1.O_PROJ_RESIDUAL", "producers")


def test_edge_missing_on_the_other_side(graph):
    task = op(graph, "MOE_GATE_TOPK").tasks[0]
    begin = graph.events[1]
    waits = list(graph.waits)
    waits[task] = (begin.index,)
    refused(dataclasses.replace(graph, waits=tuple(waits)), "MOE_GATE_TOPK", "not the other way round")


def test_edge_missing_altogether(graph):
    """Producer and threshold agree that one task need not be waited for."""
    event = event_after(graph, "O_PROJ_RESIDUAL", 1)
    other = event_after(graph, "MOE_GATE_TOPK", 1)
    changed = {
        event.index: dict(producers=event.producers[1:], threshold=event.threshold - 1),
        other.index: dict(producers=(*other.producers, event.producers[0]), threshold=other.threshold + 1),
    }
    refused(
        rewired(graph, changed),
        "MOE_GATE_TOPK",
        "before its writer",
        "1.O_PROJ_RESIDUAL tile 0",
        f"event {event.index}",
    )


@pytest.mark.parametrize("words", [dict(), dict(mla="absorbed", experts="slots")], ids=str)
def test_every_edge_matters(words):
    """A task that starts right after the launch is found, and so is one that only the end of the token waits for."""
    graph = tiny(**words)
    begin, end = graph.events[1], graph.events[-2]
    tried = 0
    for task in range(1, len(graph.tasks) - 1, 3):
        (waits,), (counts,) = graph.waits[task], graph.triggers[task]
        others = tuple(each for each in graph.events[waits].consumers if each != task)
        if waits != begin.index and others:
            changed = {waits: dict(consumers=others), begin.index: dict(consumers=(*begin.consumers, task))}
            refused(rewired(graph, changed), f"task {task} (", "before its writer")
            tried += 1
        others = tuple(each for each in graph.events[counts].producers if each != task)
        if others:
            changed = {
                counts: dict(producers=others, threshold=len(others)),
                end.index: dict(producers=(*end.producers, task), threshold=len(end.producers) + 1),
            }
            refused(rewired(graph, changed), f"its writer task {task} (")
            tried += 1
    assert tried > 100


@pytest.mark.parametrize(
    "change, words", [(1, ("too high", "never fires")), (-1, ("too low", "fires early")), (-99, ("too low",))]
)
def test_wrong_threshold(graph, change, words):
    for event in graph.events[1], event_after(graph, "Q_PROJ", 1), graph.events[-1]:
        wrong = rewired(graph, {event.index: dict(threshold=event.threshold + change)})
        refused(wrong, f"event {event.index} ({event.name})", *words)


def test_event_that_nobody_waits_for(graph):
    event = graph.events[-1]
    refused(rewired(graph, {event.index: dict(to_host=False)}), f"event {event.index} (TERMINATED): nobody waits")
    extra = event._replace(index=len(graph.events), name="EXTRA", producers=(5,), threshold=1, to_host=False)
    wrong = rewired(dataclasses.replace(graph, events=(*graph.events, extra)), {})
    refused(wrong, "EXTRA", "nobody waits for it")


def test_event_without_producers(graph):
    refused(rewired(graph, {0: dict(from_host=False, threshold=0)}), "event 0 (LAUNCH)", "no producers")


def test_event_that_does_not_exist(graph):
    waits = [*graph.waits[:-1], (len(graph.events),)]
    refused(dataclasses.replace(graph, waits=tuple(waits)), "TERMINATE", f"event {len(graph.events)}", "not exist")


def test_task_that_waits_for_nothing(graph):
    event = event_after(graph, "EMBEDDING")
    wrong = rewired(graph, {event.index: dict(consumers=event.consumers[1:])})
    refused(wrong, f"task {event.consumers[0]} (0.Q_PROJ tile 0)", "no event", "before the launch")


def test_cycle(graph):
    """Attention of layer 1 has to wait for its own output projection as well."""
    event = event_after(graph, "O_PROJ_RESIDUAL", 1)
    task = op(graph, "ATTN_CHUNK", 1).tasks[0]
    wrong = rewired(graph, {event.index: dict(consumers=(*event.consumers, task))})
    refused(wrong, "cycle", "1.ATTN_CHUNK tile 0", f"event {event.index}", "1.O_PROJ_RESIDUAL")


# ----------------------------------------------------------------------------------------------------- reads and writes


def test_read_before_its_writer(graph):
    """One output projection starts with the attention instead of after it."""
    attention, output = event_after(graph, "Q_PROJ", 1), event_after(graph, "ATTN_CHUNK", 1)
    task = output.consumers[2]
    changed = {
        attention.index: dict(consumers=(*attention.consumers, task)),
        output.index: dict(consumers=tuple(each for each in output.consumers if each != task)),
    }
    wrong = rewired(graph, changed)
    refused(wrong, f"task {task} (1.O_PROJ_RESIDUAL tile 2)", "attn_partials", "before its writer", "1.ATTN_CHUNK")


def test_cache_row_read_before_its_writer(graph):
    """Only the attention tasks of the last chunk read what this token writes, so only those have to wait for it."""
    both, before = event_after(graph, "KV_B_PROJ", 1), event_after(graph, "KVA_PROJ", 1)
    queries = op(graph, "Q_PROJ", 1).tasks
    rest = tuple(task for task in both.producers if task not in queries)
    for tile, sound in ((0, True), (2, True), (3, False)):
        task = op(graph, "ATTN_CHUNK", 1).tasks[tile]
        others = tuple(each for each in both.consumers if each != task)
        producers = (*before.producers, *queries)
        changed = {
            both.index: dict(producers=rest, threshold=len(rest), consumers=others),
            before.index: dict(producers=producers, threshold=len(producers), consumers=(*before.consumers, task)),
        }
        if sound:
            validate(rewired(graph, changed))
        else:
            refused(rewired(graph, changed), "1.ATTN_CHUNK tile 3", "_cache", "before its writer", "1.KV_B_PROJ")


def test_unordered_writers(graph):
    task = graph.tasks[op(graph, "O_PROJ_RESIDUAL", 1).tasks[1]]
    (part,) = task.writes
    wider = part._replace(rows=(part.rows[0] - 1, part.rows[1]))
    wrong = retasked(graph, task.index, writes=(wider,))
    refused(wrong, "unordered writers", "1.O_PROJ_RESIDUAL tile 0", "1.O_PROJ_RESIDUAL tile 1", "attn_residual")


def test_ordered_writers_are_allowed(graph):
    """A later op may write again; everything that reads must then be after it, too."""
    again = graph.tasks[op(graph, "O_PROJ_RESIDUAL", 1).tasks[0]].writes
    first = graph.tasks[op(graph, "Q_PROJ", 1).tasks[0]]
    validate(retasked(graph, first.index, writes=(*first.writes, *again)))
    late = graph.tasks[op(graph, "EXPERT_W13_SILU", 1).tasks[0]]
    refused(retasked(graph, late.index, writes=(*late.writes, *again)), "MOE_GATE_TOPK", "before its writer")


def test_bytes_that_nobody_writes(graph):
    task = graph.tasks[op(graph, "Q_PROJ", 1).tasks[0]]
    (part,) = task.writes
    wrong = retasked(graph, task.index, writes=(part._replace(rows=(1, part.rows[1])),))
    refused(wrong, "ATTN_CHUNK", "layers.1.q at 0, row 0, column 0", "nobody writes")
    task = graph.tasks[op(graph, "KV_B_PROJ", 1).tasks[1]]
    refused(retasked(graph, task.index, writes=()), "layers.1.kv_cache", "row 99")


def test_result_that_nobody_reads(graph):
    task = graph.tasks[op(graph, "MOE_COMBINE_RESIDUAL", 1).tasks[0]]
    reads = tuple(part for part in task.reads if part.at != 5)
    refused(retasked(graph, task.index, reads=reads), "EXPERT_W2", "experts.out at 5", "nobody reads")


# ------------------------------------------------------------------------------------------------------------- matrices


@pytest.mark.parametrize("experts", CHOICES["experts"])
@pytest.mark.parametrize("name", ["Q_PROJ", "DOWN_SPLITK", "EXPERT_W13_SILU", "EXPERT_W2", "LM_HEAD"])
def test_matrix_bytes_read_twice_or_never(experts, name):
    graph = tiny(experts=experts)
    task = graph.tasks[op(graph, name).tasks[1]]
    at = next(i for i, part in enumerate(task.reads) if graph.tensors[part.tensor].kind == "matrix")
    part = task.reads[at]
    for shift, word in ((-1, "is read 2 times"), (1, "is never read")):
        if name == "DOWN_SPLITK":
            moved = part._replace(cols=(part.cols[0] + shift, part.cols[1]))
        else:
            moved = part._replace(rows=(part.rows[0] + shift, part.rows[1]))
        wrong = retasked(graph, task.index, reads=(*task.reads[:at], moved, *task.reads[at + 1 :]))
        refused(wrong, part.tensor, word, "byte", "expected once", part.by)


def test_matrix_that_is_never_read(graph):
    task = graph.tasks[op(graph, "MOE_GATE_TOPK", 1).tasks[0]]
    reads = tuple(part for part in task.reads if part.tensor != "layers.1.mlp.gate")
    refused(retasked(graph, task.index, reads=reads), "layers.1.mlp.gate", "never read")


def test_experts_of_another_task(graph):
    task = graph.tasks[op(graph, "EXPERT_W2", 1).tasks[0]]
    reads = tuple(part._replace(at=1) if part.by else part for part in task.reads)
    refused(retasked(graph, task.index, reads=reads), "of expert 1", "task is that of expert 0")
    reads = tuple(part._replace(by="") for part in task.reads)
    refused(retasked(graph, task.index, reads=reads), "experts.down_proj", "several ways")
    reads = tuple(part for part in task.reads if not part.tensor.endswith(".routing"))
    refused(retasked(graph, task.index, reads=reads), "EXPERT_W2", "without reading the layer's routing")


def test_all_experts_read_whether_chosen_or_not(graph):
    tasks = tuple(
        task._replace(reads=tuple(part._replace(by="") if part.by == "expert" else part for part in task.reads))
        for task in graph.tasks
    )
    refused(dataclasses.replace(graph, tasks=tasks), "experts.gate_proj has 8 matrices", "which expert or slot")


def test_embedding_reads_one_row(graph):
    task = graph.tasks[op(graph, "EMBEDDING").tasks[0]]
    refused(retasked(graph, task.index, reads=(task.reads[0]._replace(rows=(0, 2)),)), "embed_tokens", "whole row")


@pytest.mark.parametrize(
    "change, word",
    [
        (dict(rows=(0, 10_000)), "outside of [1, 1, 1]"),
        (dict(rows=(1, 1)), "outside of"),
        (dict(at=1), "outside of"),
        (dict(tensor="nothing"), "does not exist"),
        (dict(tensor="lm_head"), "those are constant"),
        (dict(tensor="layers.0.kv_cache"), "only the last row, 99"),
        (dict(by="expert"), "only matrices are looked up"),
    ],
)
def test_impossible_ranges(graph, change, word):
    task = graph.tasks[op(graph, "ARGMAX_REDUCE").tasks[0]]
    refused(retasked(graph, task.index, writes=(task.writes[0]._replace(**change),)), "ARGMAX_REDUCE tile 0", word)


# ----------------------------------------------------------------------------------------------------------- simulation


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("workers", [1, 2, 9, 5000])
def test_simulation_ends(graph, order, workers):
    for seed in range(5):
        run = simulate(graph, workers, seed, order)
        assert (
            sorted(run.started)
            == sorted(task for tasks in run.lists for task in tasks)
            == list(range(len(graph.tasks)))
        )
        assert run.started[0] == 0 and run.started[-1] == len(graph.tasks) - 1 and run.time > 0
    assert simulate(graph, workers, 3, order).started == simulate(graph, workers, 3, order).started


def test_seeds_and_orders_differ(graph):
    assert len({simulate(graph, 3, seed).started for seed in range(5)}) == 5
    assert len({simulate(graph, 3, 0, order).started for order in ORDERS}) == len(ORDERS)


def test_simulation_finds_stuck_and_early_counters(graph):
    event = event_after(graph, "O_PROJ_RESIDUAL", 1)
    count = len(event.producers)
    high = rewired(graph, {event.index: dict(threshold=count + 1)})
    message = rf"MOE_GATE_TOPK tile 0\), which waits for event {event.index} .* value {count}, threshold {count + 1}"
    with pytest.raises(InvalidGraph, match=message):
        simulate(high, 4)
    low = rewired(graph, {event.index: dict(threshold=count - 1)})
    with pytest.raises(InvalidGraph, match=rf"event {event.index} .* ended at {count}, its threshold is {count - 1}"):
        simulate(low, 4)


def test_arguments_are_named(graph):
    for workers in (0, -1, 1.5, True, "4"):
        with pytest.raises(ValueError, match=r"^workers must be a positive integer, not " + re.escape(repr(workers))):
            simulate(graph, workers)
    with pytest.raises(ValueError, match=r"^order must be one of random, .*, not 'best'"):
        simulate(graph, 1, order="best")
    for routings in (-1, 0.5, True):
        with pytest.raises(ValueError, match=r"^routings must be"):
            validate(graph, routings=routings)
