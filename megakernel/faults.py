"""Faults planted into a sound graph, to see that the validator finds them.

First the means to change one thing about a graph, each of which returns a new one; then `FAULTS`, one of each kind.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from megakernel.tasks import Event, Graph, Op, Range, Task

# ------------------------------------------------------------------------------------------------------- where to plant


def find_op(graph: Graph, name: str, layer: int | None = None) -> Op:
    """The op of that name, in that layer or in the first that has one.

    Raises:
        KeyError: there is none.
    """
    for op in graph.ops:
        if op.name == name and layer in (None, op.layer):
            return op
    raise KeyError(f"no op {name}" + ("" if layer is None else f" in layer {layer}"))


def find_task(graph: Graph, name: str, layer: int | None = None, tile: int = 0) -> Task:
    """A tile of the op that `find_op` finds, counted from the end if it is negative.

    Raises:
        KeyError: there is no such op.
        IndexError: it has fewer tasks.
    """
    return graph.tasks[find_op(graph, name, layer).tasks[tile]]


def event_after(graph: Graph, name: str, layer: int | None = None) -> Event:
    """The first event that the first task of an op counts up."""
    return graph.events[graph.triggers[find_op(graph, name, layer).tasks[0]][0]]


# ---------------------------------------------------------------------------------------------------- events and counts


def with_event(graph: Graph, event: int, **fields) -> Graph:
    """Another event in this place, while tasks wait and count as before: the two sides may disagree."""
    events = list(graph.events)
    events[event] = events[event]._replace(**fields)
    return dataclasses.replace(graph, events=tuple(events))


def rewired(graph: Graph, changed: dict[int, dict]) -> Graph:
    """Other fields for some events by number, and the waits and triggers of all tasks following from the events."""
    events = [event._replace(**changed.get(event.index, {})) for event in graph.events]
    waits: list[list[int]] = [[] for _ in graph.tasks]
    triggers: list[list[int]] = [[] for _ in graph.tasks]
    for event in events:
        for task in event.consumers:
            waits[task].append(event.index)
        for task in event.producers:
            triggers[task].append(event.index)
    return dataclasses.replace(
        graph, events=tuple(events), waits=tuple(map(tuple, waits)), triggers=tuple(map(tuple, triggers))
    )


def shifted_threshold(graph: Graph, event: int, by: int) -> Graph:
    """An event that fires `by` counts later; earlier if negative."""
    return rewired(graph, {event: dict(threshold=graph.events[event].threshold + by)})


def added_wait(graph: Graph, task: int, event: int) -> Graph:
    """A task that waits for one more event."""
    return rewired(graph, {event: dict(consumers=(*graph.events[event].consumers, task))})


def moved_wait(graph: Graph, task: int, event: int | None) -> Graph:
    """A task that waits for this event instead of all that it waited for; for nothing if it is None."""
    changed = {}
    for before in graph.waits[task]:
        changed[before] = dict(consumers=tuple(each for each in graph.events[before].consumers if each != task))
    if event is not None:
        changed[event] = dict(consumers=(*changed.get(event, {}).get("consumers", graph.events[event].consumers), task))
    return rewired(graph, changed)


def moved_count(graph: Graph, task: int, event: int) -> Graph:
    """A task that counts up this event instead of its own, with thresholds that agree."""
    (before,) = graph.triggers[task]
    producers = tuple(each for each in graph.events[before].producers if each != task)
    more = (*graph.events[event].producers, task)
    return rewired(
        graph,
        {
            before: dict(producers=producers, threshold=graph.events[before].threshold - 1),
            event: dict(producers=more, threshold=graph.events[event].threshold + 1),
        },
    )


# ---------------------------------------------------------------------------------------------------- reads and writes


def retasked(graph: Graph, task: int, **fields) -> Graph:
    """A task with other fields."""
    tasks = list(graph.tasks)
    tasks[task] = tasks[task]._replace(**fields)
    return dataclasses.replace(graph, tasks=tuple(tasks))


def shifted_write(graph: Graph, task: int, by: int) -> Graph:
    """A task whose first range that it writes starts `by` rows later; earlier if negative."""
    first, *rest = graph.tasks[task].writes
    return retasked(graph, task, writes=(_later(first, by), *rest))


def shifted_read(graph: Graph, task: int, by: int) -> Graph:
    """A task whose first range of a matrix starts `by` rows later, or columns if its op splits those; earlier if
    negative."""
    reads = list(graph.tasks[task].reads)
    at = next(at for at, part in enumerate(reads) if graph.tensors[part.tensor].kind == "matrix")
    columns = graph.ops[graph.tasks[task].op].type == "gemv_splitk"
    reads[at] = _later(reads[at], by, "cols" if columns else "rows")
    return retasked(graph, task, reads=tuple(reads))


def reread(graph: Graph, task: int, change: Callable[[Range], Range | None]) -> Graph:
    """A task with each range that it reads changed, or left out where `change` returns None."""
    found = (change(part) for part in graph.tasks[task].reads)
    return retasked(graph, task, reads=tuple(part for part in found if part is not None))


def other_expert(graph: Graph, task: int, at: int) -> Graph:
    """A task of a routed expert, or slot, that reads the matrices of number `at`."""
    return reread(graph, task, lambda part: part._replace(at=at) if part.by in ("expert", "slot") else part)


def without_routing(graph: Graph, task: int) -> Graph:
    """A task of a routed expert, or slot, that does not read which experts were chosen."""
    return reread(graph, task, lambda part: None if part.tensor.endswith(".routing") else part)


def dropped_result(graph: Graph, layer: int, at: int) -> Graph:
    """A combine that leaves out the result of routed expert, or slot, number `at`."""
    lost = f"layers.{layer}.mlp.experts.out", at
    task = find_task(graph, "MOE_COMBINE_RESIDUAL", layer)
    return reread(graph, task.index, lambda part: None if (part.tensor, part.at) == lost else part)


def _later(part: Range, by: int, side: str = "rows") -> Range:
    first, end = getattr(part, side)
    return part._replace(**{side: (first + by, end)})


# -------------------------------------------------------------------------------------------------------- one of a kind


class Fault(NamedTuple):
    """A way to break a sound graph."""

    name: str
    planted: str
    """What was changed."""
    plant: Callable[[Graph, int], Graph]
    """Takes a graph and the number of a MoE layer; returns the graph with the fault."""
    named: tuple[str, ...]
    """What the validator's message has to contain."""


def _without_first_consumer(graph: Graph, layer: int) -> Graph:
    event = event_after(graph, "O_PROJ_RESIDUAL", layer)
    return with_event(graph, event.index, consumers=event.consumers[1:])


def _counted_too_late(graph: Graph, layer: int) -> Graph:
    task, router = find_task(graph, "O_PROJ_RESIDUAL", layer), graph.router(layer)
    event = event_after(graph, router.name, layer)
    return moved_count(graph, task.index, event.index)


def _started_too_early(graph: Graph, layer: int) -> Graph:
    task, attention = find_task(graph, "O_PROJ_RESIDUAL", layer, -1), find_task(graph, "ATTN_CHUNK", layer)
    return moved_wait(graph, task.index, graph.waits[attention.index][0])


def _cycle(graph: Graph, layer: int) -> Graph:
    task, event = find_task(graph, "ATTN_CHUNK", layer), event_after(graph, "O_PROJ_RESIDUAL", layer)
    return added_wait(graph, task.index, event.index)


def _threshold(graph: Graph, layer: int, by: int) -> Graph:
    return shifted_threshold(graph, event_after(graph, "O_PROJ_RESIDUAL", layer).index, by)


def _write(graph: Graph, layer: int, by: int) -> Graph:
    return shifted_write(graph, find_task(graph, "O_PROJ_RESIDUAL", layer, -1).index, by)


FAULTS: tuple[Fault, ...] = (
    Fault(
        "edge missing on one side",
        "the event after O_PROJ_RESIDUAL no longer lists its first consumer, which still waits for it",
        _without_first_consumer,
        ("missing edge", "consumers"),
    ),
    Fault(
        "edge missing on both sides",
        "the first O_PROJ_RESIDUAL task counts up a later event; both thresholds agree",
        _counted_too_late,
        ("before its writer", "O_PROJ_RESIDUAL tile 0"),
    ),
    Fault(
        "wait left out",
        "the first ATTN_CHUNK task waits for no event",
        lambda graph, layer: moved_wait(graph, find_task(graph, "ATTN_CHUNK", layer).index, None),
        ("ATTN_CHUNK tile 0", "waits for no event"),
    ),
    Fault(
        "wait for an event too early",
        "the last O_PROJ_RESIDUAL task starts as early as ATTN_CHUNK",
        _started_too_early,
        ("O_PROJ_RESIDUAL", "before its writer"),
    ),
    Fault(
        "threshold too high",
        "the event after O_PROJ_RESIDUAL expects one count more than it has producers",
        lambda graph, layer: _threshold(graph, layer, 1),
        ("too high", "never fires"),
    ),
    Fault(
        "threshold too low",
        "the event after O_PROJ_RESIDUAL expects one count less",
        lambda graph, layer: _threshold(graph, layer, -1),
        ("too low", "fires early"),
    ),
    Fault(
        "cycle",
        "the first ATTN_CHUNK task also waits for O_PROJ_RESIDUAL, which waits for it",
        _cycle,
        ("cycle", "ATTN_CHUNK tile 0", "O_PROJ_RESIDUAL"),
    ),
    Fault(
        "two unordered writers",
        "the last O_PROJ_RESIDUAL task also writes the last row of the one before",
        lambda graph, layer: _write(graph, layer, -1),
        ("unordered writers", "O_PROJ_RESIDUAL"),
    ),
    Fault(
        "row that nobody writes",
        "the last O_PROJ_RESIDUAL task leaves out its first row",
        lambda graph, layer: _write(graph, layer, 1),
        ("attn_residual", "nobody writes"),
    ),
    Fault(
        "result that nobody reads",
        "MOE_COMBINE_RESIDUAL leaves out the result of one expert",
        lambda graph, layer: dropped_result(graph, layer, 1),
        ("EXPERT_W2", "experts.out at 1", "nobody reads"),
    ),
    Fault(
        "matrix byte read twice",
        "the second EXPERT_W2 task also reads the last row of the first",
        lambda graph, layer: shifted_read(graph, find_task(graph, "EXPERT_W2", layer, 1).index, -1),
        ("experts.down_proj", "read 2 times", "expected once"),
    ),
    Fault(
        "matrix byte never read",
        "the second LM_HEAD task leaves out its first row",
        lambda graph, _: shifted_read(graph, find_task(graph, "LM_HEAD", None, 1).index, 1),
        ("lm_head", "never read", "expected once"),
    ),
    Fault(
        "another expert's matrix",
        "the first EXPERT_W2 task reads the matrix of expert 1 (or of slot 1) for number 0",
        lambda graph, layer: other_expert(graph, find_task(graph, "EXPERT_W2", layer).index, 1),
        ("EXPERT_W2 tile 0", "but the task is that of"),
    ),
    Fault(
        "expert not looked up",
        "the first EXPERT_W13_SILU task does not read which experts were chosen",
        lambda graph, layer: without_routing(graph, find_task(graph, "EXPERT_W13_SILU", layer).index),
        ("EXPERT_W13_SILU tile 0", "without reading the layer's routing"),
    ),
)
"""One of each kind. Each op named here needs two tasks or more, except the router and the combine."""
