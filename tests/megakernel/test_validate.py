"""The validator accepts every graph that is built, and names each planted fault."""

import collections
import dataclasses
import itertools
import re
import time

import pytest

from megakernel.config import TINY, V2_LITE
from megakernel.faults import (
    added_wait,
    dropped_result,
    event_after,
    find_op,
    find_task,
    moved_count,
    moved_wait,
    other_expert,
    reread,
    retasked,
    rewired,
    shifted_read,
    shifted_threshold,
    shifted_write,
    with_event,
    without_routing,
)
from megakernel.graph import build
from megakernel.knobs import CHOICES, PRESETS, Knobs
from megakernel.schedule import Counters
from megakernel.validate import ORDERS, InvalidGraph, simulate, validate

FOLDS = [field.name for field in dataclasses.fields(Knobs) if field.type is bool]
SMALL = dict(
    qkv_rows=16,
    gemv_rows=16,
    dense_rows=32,
    shared_rows=24,
    lm_head_rows=32,
    attn_rows=32,
    tokens=100,
    argmax_partials=12,
)
SMALL |= dict(absorb_rows=48, workers=9)


def tiny(**changes):
    return build(TINY, dataclasses.replace(Knobs(), **{**SMALL, **changes}))


@pytest.fixture(scope="module")
def graph():
    return tiny()


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
        dict(qkv_rows=5, gemv_rows=5, absorb_rows=3),
        dict(qkv_rows=5, gemv_rows=5, split_qkv=False),
        dict(lm_head_rows=7, argmax_partials=9),
        dict(lm_head_rows=1, argmax_partials=1),
        dict(dense_rows=9, shared_rows=9, splits=7),
        dict(expert_w13_tiles=5, expert_w2_tiles=1000),
        dict(expert_w13_tiles=1000, expert_w2_tiles=5, experts="slots"),
        dict(router_rows=1),
        dict(router_rows=3, experts="slots", fold_norm=False),
        dict(router_rows=7, dependencies="chain", split_shared=False),
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
    task = find_task(graph, "MOE_COMBINE_RESIDUAL")
    assert collections.Counter(part.tensor.split(".")[-2] for part in task.reads)["experts"] == TINY.n_routed_experts


# --------------------------------------------------------------------------------------------------------------- events


def test_edge_missing_on_one_side(graph):
    event = event_after(graph, "O_PROJ_RESIDUAL", 1)
    wrong = with_event(graph, event.index, consumers=event.consumers[1:])
    refused(wrong, "missing edge", f"event {event.index}", "MOE_GATE", "consumers")
    wrong = with_event(graph, event.index, producers=event.producers[:-1])
    refused(wrong, "missing edge", "1.O_PROJ_RESIDUAL", "producers")


def test_edge_missing_on_the_other_side(graph):
    task = find_task(graph, "MOE_GATE_TOPK")
    waits = list(graph.waits)
    waits[task.index] = (graph.events[1].index,)
    refused(dataclasses.replace(graph, waits=tuple(waits)), "MOE_GATE_TOPK", "not the other way round")


def test_edge_missing_altogether(graph):
    """Producer and threshold agree that one task need not be waited for."""
    event, other = event_after(graph, "O_PROJ_RESIDUAL", 1), event_after(graph, "MOE_GATE_TOPK", 1)
    wrong = moved_count(graph, event.producers[0], other.index)
    refused(wrong, "MOE_GATE_TOPK", "before its writer", "1.O_PROJ_RESIDUAL tile 0", f"event {event.index}")


@pytest.mark.parametrize(
    "words", [dict(), dict(mla="absorbed", experts="slots"), dict(router_rows=3, experts="slots")], ids=str
)
def test_every_edge_matters(words):
    """A task that starts right after the launch is found, and so is one that only the end of the token waits for."""
    graph = tiny(**words)
    begin, end = graph.events[1], graph.events[-2]
    tried = 0
    for task in range(1, len(graph.tasks) - 1, 3):
        (waits,), (counts,) = graph.waits[task], graph.triggers[task]
        if waits != begin.index and len(graph.events[waits].consumers) > 1:
            refused(moved_wait(graph, task, begin.index), f"task {task} (", "before its writer")
            tried += 1
        if len(graph.events[counts].producers) > 1:
            refused(moved_count(graph, task, end.index), f"its writer task {task} (")
            tried += 1
    assert tried > 100


@pytest.mark.parametrize(
    "change, words", [(1, ("too high", "never fires")), (-1, ("too low", "fires early")), (-99, ("too low",))]
)
def test_wrong_threshold(graph, change, words):
    for event in graph.events[1], event_after(graph, "Q_PROJ", 1), graph.events[-1]:
        wrong = shifted_threshold(graph, event.index, change)
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
    task = find_task(graph, "Q_PROJ", 0)
    refused(
        moved_wait(graph, task.index, None), f"task {task.index} (0.Q_PROJ tile 0)", "no event", "before the launch"
    )


def test_cycle(graph):
    """Attention of layer 1 has to wait for its own output projection as well."""
    event = event_after(graph, "O_PROJ_RESIDUAL", 1)
    wrong = added_wait(graph, find_task(graph, "ATTN_CHUNK", 1).index, event.index)
    refused(wrong, "cycle", "1.ATTN_CHUNK tile 0", f"event {event.index}", "1.O_PROJ_RESIDUAL")


# ----------------------------------------------------------------------------------------------------- reads and writes


def test_read_before_its_writer(graph):
    """One output projection starts with the attention instead of after it."""
    task = find_task(graph, "O_PROJ_RESIDUAL", 1, 2).index
    wrong = moved_wait(graph, task, event_after(graph, "Q_PROJ", 1).index)
    refused(wrong, f"task {task} (1.O_PROJ_RESIDUAL tile 2)", "attn_partials", "before its writer", "1.ATTN_CHUNK")


def test_cache_row_read_before_its_writer(graph):
    """Only the attention tasks of the last chunk read what this token writes, so only those have to wait for it."""
    both, before = event_after(graph, "KV_B_PROJ", 1), event_after(graph, "KVA_PROJ", 1)
    queries = find_op(graph, "Q_PROJ", 1).tasks
    rest = tuple(task for task in both.producers if task not in queries)
    for tile, sound in ((0, True), (2, True), (3, False)):
        task = find_op(graph, "ATTN_CHUNK", 1).tasks[tile]
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
    wrong = shifted_write(graph, find_task(graph, "O_PROJ_RESIDUAL", 1, 1).index, -1)
    refused(wrong, "unordered writers", "1.O_PROJ_RESIDUAL tile 0", "1.O_PROJ_RESIDUAL tile 1", "attn_residual")


def test_ordered_writers_are_allowed(graph):
    """A later op may write again; everything that reads must then be after it, too."""
    again = find_task(graph, "O_PROJ_RESIDUAL", 1).writes
    first = find_task(graph, "Q_PROJ", 1)
    validate(retasked(graph, first.index, writes=(*first.writes, *again)))
    late = find_task(graph, "EXPERT_W13_SILU", 1)
    refused(retasked(graph, late.index, writes=(*late.writes, *again)), "MOE_GATE_TOPK", "before its writer")


def test_bytes_that_nobody_writes(graph):
    wrong = shifted_write(graph, find_task(graph, "Q_PROJ", 1).index, 1)
    refused(wrong, "ATTN_CHUNK", "layers.1.q at 0, row 0, column 0", "nobody writes")
    wrong = retasked(graph, find_task(graph, "KV_B_PROJ", 1, 1).index, writes=())
    refused(wrong, "layers.1.kv_cache", "row 99")


def test_bytes_that_two_write_do_not_make_up_for_those_that_nobody_writes(graph):
    """As many elements are written as are read, but not the same ones."""
    query = find_task(graph, "Q_PROJ", 1)
    wrong = shifted_write(graph, query.index, 1)
    last = find_task(graph, "ATTN_CHUNK", 1)
    (part,) = query.writes
    again = part._replace(rows=(part.rows[1] - 1, part.rows[1]))
    wrong = retasked(wrong, last.index, writes=(*last.writes, again))  # after the first writer, so in order
    refused(wrong, "layers.1.q at 0, row 0, column 0", "nobody writes")


def test_result_that_nobody_reads(graph):
    refused(dropped_result(graph, 1, 5), "EXPERT_W2", "experts.out at 5", "nobody reads")


def test_part_of_a_result_that_nobody_reads():
    """Of the tasks of a combine only the first leaves an expert's result out: it is read, but not all of it."""
    graph = tiny(combine_rows=16)
    assert len(find_op(graph, "MOE_COMBINE_RESIDUAL", 1).tasks) > 1
    refused(dropped_result(graph, 1, 5), "row 0, column 0 of layers.1.mlp.experts.out at 5", "nobody reads")


# ------------------------------------------------------------------------------------------------------------- matrices


@pytest.mark.parametrize("experts", CHOICES["experts"])
@pytest.mark.parametrize("name", ["Q_PROJ", "DOWN_SPLITK", "EXPERT_W13_SILU", "EXPERT_W2", "LM_HEAD"])
def test_matrix_bytes_read_twice_or_never(experts, name):
    graph = tiny(experts=experts)
    task = find_task(graph, name, None, 1)
    part = next(part for part in task.reads if graph.tensors[part.tensor].kind == "matrix")
    for shift, word in ((-1, "is read 2 times"), (1, "is never read")):
        wrong = shifted_read(graph, task.index, shift)
        refused(wrong, part.tensor, word, "byte", "expected once", part.by)


def test_matrix_that_is_never_read(graph):
    task, gate = find_task(graph, "MOE_GATE_TOPK", 1), "layers.1.mlp.gate"
    wrong = reread(graph, task.index, lambda part: None if part.tensor == gate else part)
    refused(wrong, gate, "never read")


def test_experts_chosen_before_all_logits_are_there():
    graph = tiny(router_rows=3)
    chooses, gates = find_task(graph, "MOE_TOPK", 1), find_op(graph, "MOE_GATE", 1).tasks
    wrong = moved_wait(graph, chooses.index, graph.waits[gates[0]][0])
    wrong = rewired(wrong, {event_after(graph, "MOE_GATE", 1).index: dict(to_host=True)})
    refused(wrong, "MOE_TOPK tile 0", "router_logits", "before its writer", "MOE_GATE tile 0")
    refused(shifted_read(graph, gates[1], 1), "layers.1.mlp.gate", "never read")
    refused(reread(graph, chooses.index, lambda part: None), "MOE_GATE tile 0", "router_logits", "nobody reads")


def test_experts_of_another_task(graph):
    task = find_task(graph, "EXPERT_W2", 1).index
    refused(other_expert(graph, task, 1), "of expert 1", "task is that of expert 0")
    refused(reread(graph, task, lambda part: part._replace(by="")), "experts.down_proj", "several ways")
    refused(without_routing(graph, task), "EXPERT_W2", "without reading the layer's routing")


def test_all_experts_read_whether_chosen_or_not(graph):
    tasks = tuple(
        task._replace(reads=tuple(part._replace(by="") if part.by == "expert" else part for part in task.reads))
        for task in graph.tasks
    )
    refused(dataclasses.replace(graph, tasks=tasks), "experts.gate_proj has 8 matrices", "which expert or slot")


def test_embedding_reads_one_row(graph):
    wrong = reread(graph, find_task(graph, "EMBEDDING").index, lambda part: part._replace(rows=(0, 2)))
    refused(wrong, "embed_tokens", "whole row")


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
    task = find_task(graph, "ARGMAX_REDUCE")
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


def test_order_decides_among_the_ready_tasks(graph):
    """One worker: of all that is ready, the lowest number, the highest, or what became ready last."""
    assert simulate(graph, 1, 0, "first").started == tuple(range(len(graph.tasks)))
    for order in ("last", "newest"):
        counters = Counters(graph)
        ready = list(counters.first)
        for task in simulate(graph, 1, 0, order).started:
            assert task == (max(ready) if order == "last" else ready[-1])
            ready.remove(task)
            ready += counters.finish(task)


@pytest.fixture(scope="module")
def wide():
    """40,000 tasks of the LM head become ready at once."""
    return build(dataclasses.replace(TINY, vocab_size=40_000), Knobs(**SMALL | {"lm_head_rows": 1}))


@pytest.mark.parametrize("order", ORDERS)
def test_many_ready_tasks_are_not_looked_through(wide, order):
    """Looking through them for each task that starts took minutes."""
    start = time.process_time()
    assert len(simulate(wide, 9, 0, order).started) > 40_000
    assert time.process_time() - start < 5


def test_simulation_finds_stuck_and_early_counters(graph):
    event = event_after(graph, "O_PROJ_RESIDUAL", 1)
    count = len(event.producers)
    high = shifted_threshold(graph, event.index, 1)
    message = rf"MOE_GATE_TOPK tile 0\), which waits for event {event.index} .* value {count}, threshold {count + 1}"
    with pytest.raises(InvalidGraph, match=message):
        simulate(high, 4)
    low = shifted_threshold(graph, event.index, -1)
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
