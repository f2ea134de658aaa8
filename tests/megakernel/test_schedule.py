"""Schedules run every task once, cannot deadlock, and spread the bytes evenly."""

import dataclasses

import pytest

from megakernel.config import TINY, V2_LITE
from megakernel.graph import build
from megakernel.knobs import PRESETS, Knobs
from megakernel.schedule import dynamic, label, levels, static, streamed_bytes


@pytest.fixture(scope="module")
def graph():
    return build(TINY, Knobs(qkv_rows=16, gemv_rows=16, lm_head_rows=32, attn_rows=32, tokens=100, argmax_partials=12))


@pytest.fixture(scope="module", params=PRESETS)
def real(request):
    return build(V2_LITE, PRESETS[request.param])


def both(graph, workers):
    return {"static": static(graph, workers), "dynamic": dynamic(graph, workers, 7)}


# ---------------------------------------------------------------------------------------------------------- good ones


@pytest.mark.parametrize("workers", [1, 2, 7, 132, 296, 5000])
def test_tiny(graph, workers):
    for schedule in both(graph, workers).values():
        schedule.check(graph)
        assert len(schedule.lists) == len(schedule.bytes) == workers
        assert sum(map(len, schedule.lists)) == len(graph.tasks)
        assert schedule.balance().mean * workers == pytest.approx(sum(schedule.bytes))


def test_one_worker_reads_everything():
    graph = build(TINY, Knobs(experts="slots", tokens=100))
    cache = sum(graph.task_bytes(task, ("cache",)) for task in graph.tasks)
    for schedule in both(graph, 1).values():
        assert schedule.balance() == (graph.token_bytes() + cache,) * 3


def test_experts_count_as_often_as_they_are_chosen(graph):
    cache = sum(graph.task_bytes(task, ("cache",)) for task in graph.tasks)
    assert sum(static(graph, 5).bytes) == pytest.approx(graph.token_bytes() + cache)


def test_a_token_reads_the_experts_that_it_chose(graph):
    choice = {layer: {0, 3, 7} for layer in range(1, TINY.num_hidden_layers)}
    cache = sum(graph.task_bytes(task, ("cache",)) for task in graph.tasks)
    sizes = [streamed_bytes(graph, task, choice) for task in graph.tasks]
    assert sum(sizes) == graph.token_bytes() + cache
    assert all(
        (size == 0) == (task.expert not in (0, 3, 7))
        for task, size in zip(graph.tasks, sizes, strict=True)
        if task.expert is not None
    )
    schedule = dynamic(graph, 5, 1, choice)
    schedule.check(graph)
    assert sum(schedule.bytes) == sum(sizes)
    assert schedule.bytes == tuple(sum(sizes[task] for task in tasks) for tasks in schedule.lists)
    assert dynamic(graph, 5, 1).lists != schedule.lists


def test_levels_wait_only_for_levels_before(graph):
    found = levels(graph)
    level = {task: number for number, tasks in enumerate(found) for task in tasks}
    assert sorted(level) == list(range(len(graph.tasks)))
    for task, events in enumerate(graph.waits):
        before = [level[each] for event in events for each in graph.events[event].producers]
        assert level[task] == max(before, default=-1) + 1


def test_more_workers_than_tasks(graph):
    workers = len(graph.tasks) + 3
    for schedule in both(graph, workers).values():
        schedule.check(graph)
        assert schedule.balance().min == 0


@pytest.mark.parametrize("workers", [132, 296])
def test_real_model(real, workers):
    schedule = static(real, workers)
    schedule.check(real)
    least, mean, most = schedule.balance()
    # the tiles of h200 are those of 132 workers: one of the LM head for each, which 296 can't share evenly
    share = 1.12 if (real.knobs.workers, workers) == (132, 296) else 1.07
    assert 0.9 * mean < least <= mean <= most < share * mean
    dynamic(real, workers, 1).check(real)


def test_large_ops_go_round(real):
    """No worker gets two of an op's equal tasks while another that could take one has none."""
    schedule = static(real, 132)
    worker = {task: number for number, tasks in enumerate(schedule.lists) for task in tasks}
    for op in real.ops:
        if op.name == "LM_HEAD":
            counts = [sum(worker[task] == number for task in op.tasks) for number in range(132)]
            assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("workers", [132, 296])
def test_the_router_is_behind_nothing_that_could_wait(workers):
    """Between attention and the choice of experts, its workers have nothing but the router's own tasks."""
    graph = build(V2_LITE, PRESETS["h200"])
    lists = [[graph.tasks[task] for task in tasks] for tasks in static(graph, workers).lists]
    names = [[(graph.ops[task.op].layer, graph.ops[task.op].name) for task in tasks] for tasks in lists]
    for layer in range(1, 27):
        gates = [each for each in names if (layer, "MOE_GATE") in each]
        assert len(gates) == 10  # a worker for each task
        for each in gates:
            before = {name for at, name in each[: each.index((layer, "MOE_GATE"))] if at == layer}
            assert not before & {"EXPERT_W13_SHARED", "EXPERT_W2_SHARED", "MOE_TOPK"}
        (chooses,) = [each for each in names if (layer, "MOE_TOPK") in each]
        before = {name for at, name in chooses[: chooses.index((layer, "MOE_TOPK"))] if at == layer}
        assert not before & {"EXPERT_W13_SHARED", "EXPERT_W2_SHARED"}


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("changes", [dict(), dict(dependencies="chain"), dict(split_shared=False)], ids=str)
def test_urgent_tasks_leave_lists_sound(changes, workers):
    """Also where there are fewer workers than tasks of the router, or nothing beside them."""
    graph = build(TINY, dataclasses.replace(PRESETS["h200"], tokens=100, router_rows=1, **changes))
    schedule = static(graph, workers)
    schedule.check(graph)
    level = {task: number for number, tasks in enumerate(levels(graph)) for task in tasks}
    for tasks in schedule.lists:
        places = [(level[task], task) for task in tasks]
        assert places == sorted(places)


def test_repeatable(graph):
    assert static(graph, 7) == static(graph, 7)
    assert dynamic(graph, 7, 1) == dynamic(graph, 7, 1) != dynamic(graph, 7, 2)


@pytest.mark.parametrize("experts", ["superset", "slots"])
def test_late_tasks_are_those_whose_weights_are_looked_up(experts):
    graph = build(TINY, Knobs(experts=experts, split_shared=False))
    late = static(graph, 3).late
    names = {graph.ops[task.op].name for task in graph.tasks if late[task.index]}
    assert names == {"EMBEDDING", "EXPERT_W13_SILU", "EXPERT_W2"}
    for task in graph.tasks:
        routed = task.expert is not None or task.slot is not None
        assert late[task.index] == (routed or task.type == "embedding")


def test_dynamic_starts_the_earliest_op_first(graph):
    (order,) = dynamic(graph, 1, 0).lists
    assert order == tuple(range(len(graph.tasks)))


# ----------------------------------------------------------------------------------------------------------- bad ones


def test_deadlock_shows_every_stuck_worker(graph):
    """Two workers, each with a task first that needs what the other has behind its own."""
    query = graph.ops[1]
    attention = next(op for op in graph.ops if op.name == "ATTN_CHUNK")
    output = next(op for op in graph.ops if op.name == "O_PROJ_RESIDUAL")
    chunk, out, last = attention.tasks[0], output.tasks[0], len(graph.tasks) - 1
    order = [task for task in range(last) if task not in (chunk, out, query.tasks[0])]
    lists = (0, 1, chunk, query.tasks[0], last), (out, *order[2:]), ()
    good = static(graph, 3)
    with pytest.raises(ValueError) as caught:
        dataclasses.replace(good, lists=lists).check(graph)
    lines = str(caught.value).splitlines()
    ready, done = (graph.events[graph.waits[task][0]] for task in (chunk, out))
    assert lines == [
        "deadlock: 2 of 3 workers wait forever",
        f"  worker 0: {label(graph, chunk)} waits for event {ready.index} ({ready.name}) with value 0, "
        f"threshold {ready.threshold}",
        f"  worker 1: {label(graph, out)} waits for event {done.index} ({done.name}) with value 0, "
        f"threshold {done.threshold}",
    ]


def test_deadlock_shows_how_far_a_counter_came(graph):
    tasks = [*range(len(graph.tasks))]
    query = graph.ops[1].tasks
    attention = next(op for op in graph.ops if op.name == "ATTN_CHUNK").tasks[0]
    tasks.remove(query[-1])
    tasks.append(query[-1])
    event = graph.events[graph.waits[attention][0]]
    with pytest.raises(ValueError, match=rf"value {event.threshold - 1}, threshold {event.threshold}$") as caught:
        dataclasses.replace(static(graph, 1), lists=(tuple(tasks),)).check(graph)
    assert f"worker 0: task {attention} (0.ATTN_CHUNK tile 0)" in str(caught.value)


def test_tasks_lost_doubled_or_unknown(graph):
    good = static(graph, 2)
    first, second = good.lists

    def refused(lists, message):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(good, lists=lists).check(graph)

    refused((first[:-1], second), r"^lists: no worker has task \d+ \(.*\)$")
    refused((first[:-5], second), r"^lists: no worker has task \d+ .*, nor 4 others$")
    refused(
        (first, (*second, first[0])), r"^lists: task 0 \(BEGIN_TASK_GRAPH\) is there twice, .* worker 0 and worker 1$"
    )
    refused(((*first, first[0]), second), r"is there twice, in the list of worker 0$")
    refused((first, (*second, 10**6)), r"^lists: worker 1 has task 1000000, but there are \d+ tasks$")
    refused((first, (*second, -1)), r"^lists: worker 1 has task -1")
    with pytest.raises(ValueError, match=r"^late must have one entry"):
        dataclasses.replace(good, late=()).check(graph)


def test_graph_that_cannot_run(graph):
    event = graph.events[5]
    events = [*graph.events[:5], event._replace(threshold=event.threshold + 1), *graph.events[6:]]
    wrong = dataclasses.replace(graph, events=tuple(events))
    message = rf"^graph: task \d+ \(.*\) can never start, it waits for event 5 .* threshold {event.threshold + 1}$"
    with pytest.raises(ValueError, match=message):
        static(wrong, 4)
    with pytest.raises(ValueError, match=message):
        dynamic(wrong, 4, 0)


def test_arguments_are_named(graph):
    for workers in (0, -3, 2.0, True, None):
        with pytest.raises(ValueError, match=r"^workers must be a positive integer, not"):
            static(graph, workers)
        with pytest.raises(ValueError, match=r"^workers must be a positive integer, not"):
            dynamic(graph, workers, 0)
    for seed in (None, 1.5, True):
        with pytest.raises(ValueError, match=r"^seed must be an integer, not"):
            dynamic(graph, 2, seed)
