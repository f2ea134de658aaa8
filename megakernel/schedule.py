"""Deals the tasks of a graph out to workers: lists fixed before the launch, or a simulation of ready queues.

`static` gives each worker a list that it runs from the first to the last entry, waiting where an event has not fired
yet. `dynamic` shows what a scheduler would do that hands ready tasks to free workers. Both are checked the same way.
"""

import dataclasses
import heapq
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from megakernel.tasks import Graph, Task

VISIT_BYTES = 8192
"""What a worker could have read in the time that a task costs it whatever its size. Only the dealing uses it: without
it, tasks without weights would look free and pile up on one worker."""


def label(graph: Graph, index: int) -> str:
    """A task as messages show it: its number, layer, op and tile."""
    task = graph.tasks[index]
    if not 0 <= task.op < len(graph.ops):
        return f"task {index} ({task.type})"
    op = graph.ops[task.op]
    name = op.name if op.layer is None else f"{op.layer}.{op.name}"
    return f"task {index} ({name} tile {task.tile})"


def check_workers(workers: int) -> None:
    """Raises ValueError unless it is a possible number of workers."""
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ValueError(f"workers must be a positive integer, not {workers!r}")


class Counters:
    """The events while tasks run: their values, and which tasks may start."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.value = [int(event.from_host) for event in graph.events]
        self.missing = [len(waits) for waits in graph.waits]
        """How many events each task still waits for."""
        self.first = [task for task, missing in enumerate(self.missing) if not missing]
        """Tasks that may start at once."""
        for event in graph.events:
            if self.value[event.index] == event.threshold:
                self.first += self._fired(event.index)

    def _fired(self, event: int) -> list[int]:
        ready = []
        for task in self.graph.events[event].consumers:
            self.missing[task] -= 1
            if not self.missing[task]:
                ready.append(task)
        return ready

    def finish(self, task: int) -> list[int]:
        """Counts up what a task triggers; returns the tasks that may start now and could not before."""
        ready = []
        for event in self.graph.triggers[task]:
            self.value[event] += 1
            if self.value[event] == self.graph.events[event].threshold:
                ready += self._fired(event)
        return ready

    def waiting(self, task: int) -> str:
        """Which events a task still waits for, with their values and thresholds."""
        events = [self.graph.events[event] for event in self.graph.waits[task]]
        short = [event for event in events if self.value[event.index] < event.threshold] or events
        return " and ".join(
            f"event {event.index} ({event.name}) with value {self.value[event.index]}, threshold {event.threshold}"
            for event in short
        )


class Balance(NamedTuple):
    """Bytes of weights and caches per worker."""

    min: float
    mean: float
    max: float


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which worker runs which tasks, in which order."""

    lists: tuple[tuple[int, ...], ...]
    """For each worker, numbers of tasks in the order in which it runs them."""
    late: tuple[bool, ...]
    """For each task, whether values that are computed decide which weights it reads: those of a routed expert, or the
    embedding of a token that has just been sampled. All other weights may be fetched before the task's wait."""
    bytes: tuple[float, ...]
    """For each worker, bytes of weights and caches that its tasks read; those of a routed expert count with the share
    of the tokens that choose it if all experts are as likely, unless the schedule was made for one choice."""

    def balance(self) -> Balance:
        """Least, mean and most bytes per worker."""
        return Balance(min(self.bytes), sum(self.bytes) / len(self.bytes), max(self.bytes))

    def check(self, graph: Graph) -> None:
        """Proves that each task runs once, and that none waits forever when every worker runs its list in order.

        A worker that waits does nothing else, and an event that has fired stays so. So what can run at all does not
        depend on who is faster, and trying one interleaving decides for all.

        Raises:
            ValueError: a task is missing, unknown or there twice, or workers are stuck; the message lists all of these
                workers with their next task and what it waits for.
        """
        if len(self.late) != len(graph.tasks):
            raise ValueError(f"late must have one entry for each of the {len(graph.tasks)} tasks, not {len(self.late)}")
        seen: dict[int, int] = {}
        for worker, tasks in enumerate(self.lists):
            for task in tasks:
                if not 0 <= task < len(graph.tasks):
                    raise ValueError(f"lists: worker {worker} has task {task}, but there are {len(graph.tasks)} tasks")
                if task in seen:
                    where = f"worker {seen[task]} and worker {worker}" if seen[task] != worker else f"worker {worker}"
                    raise ValueError(f"lists: {label(graph, task)} is there twice, in the list of {where}")
                seen[task] = worker
        if len(seen) != len(graph.tasks):
            lost = next(task for task in range(len(graph.tasks)) if task not in seen)
            more = len(graph.tasks) - len(seen) - 1
            raise ValueError(f"lists: no worker has {label(graph, lost)}" + (f", nor {more} others" if more else ""))

        counters = Counters(graph)
        next_entry = [0] * len(self.lists)
        awake = list(range(len(self.lists)))
        while awake:
            worker = awake.pop()
            tasks = self.lists[worker]
            while next_entry[worker] < len(tasks) and counters.missing[tasks[next_entry[worker]]] <= 0:
                task = tasks[next_entry[worker]]
                next_entry[worker] += 1
                for ready in counters.finish(task):
                    # only a worker that is at this very task can go on; the others come to it later
                    other = seen[ready]
                    if other != worker and self.lists[other][next_entry[other]] == ready:
                        awake.append(other)
        stuck = [worker for worker, tasks in enumerate(self.lists) if next_entry[worker] < len(tasks)]
        if stuck:
            lines = [f"deadlock: {len(stuck)} of {len(self.lists)} workers wait forever"]
            for worker in stuck:
                task = self.lists[worker][next_entry[worker]]
                lines.append(f"  worker {worker}: {label(graph, task)} waits for {counters.waiting(task)}")
            raise ValueError("\n".join(lines))


def streamed_bytes(graph: Graph, task: Task, choice: Mapping[int, Collection[int]] | None = None) -> float:
    """Bytes of weights and caches that a task reads.

    Args:
        choice: for each MoE layer, the experts that the token chose; by default the mean over all choices.
    """
    size = graph.task_bytes(task, ("matrix", "cache"))
    if task.expert is None:
        return size
    if choice is None:
        return size * graph.config.num_experts_per_tok / graph.config.n_routed_experts
    return size if task.expert in choice[graph.ops[task.op].layer] else 0


def _schedule(graph: Graph, lists: Iterable[Sequence[int]], size: Sequence[float]) -> Schedule:
    lists = tuple(tuple(tasks) for tasks in lists)
    late = tuple(
        any(part.by and graph.tensors[part.tensor].kind == "matrix" for part in task.reads) for task in graph.tasks
    )
    return Schedule(lists, late, tuple(float(sum(size[task] for task in tasks)) for tasks in lists))


def levels(graph: Graph) -> list[list[int]]:
    """Tasks by the number of tasks that must have run one after the other before they can start.

    Raises:
        ValueError: tasks of `graph` can never start.
    """
    counters = Counters(graph)
    found, ready, count = [], counters.first, 0
    while ready:
        found.append(sorted(ready))
        count += len(ready)
        ready = [task for before in found[-1] for task in counters.finish(before)]
    if count != len(graph.tasks):
        stuck = next(task for task, missing in enumerate(counters.missing) if missing > 0)
        raise ValueError(f"graph: {label(graph, stuck)} can never start, it waits for {counters.waiting(stuck)}")
    return found


def _urgent(graph: Graph, cost: Mapping[int, float], to_come: Sequence[int], workers: int) -> list[int]:
    """The tasks of a level with the longest chain of ops behind them, largest first, if the workers can take one each.

    None if there is a larger one of them than of the others: largest first, they are not behind those anyway.

    Args:
        cost: of each task of the level.
        to_come: for each op, the length of the longest chain of ops that begins with it.
    """
    length = {task: to_come[graph.tasks[task].op] if graph.tasks[task].op >= 0 else 0 for task in cost}
    longest = max(length.values())
    found = sorted((task for task in cost if length[task] == longest), key=lambda task: (-cost[task], task))
    others = max((cost[task] for task in cost if length[task] < longest), default=0)
    return found if cost[found[0]] < others and len(found) <= workers else []


def _to_come(graph: Graph) -> list[int]:
    """For each op, the length of the longest chain of ops that wait for one another and begin with it."""
    lengths = [1] * len(graph.ops)
    for op in reversed(graph.ops):  # what waits for an op comes after it
        for before in graph.predecessors[op.index]:
            lengths[before] = max(lengths[before], lengths[op.index] + 1)
    return lengths


def static(graph: Graph, workers: int) -> Schedule:
    """A list of tasks for each worker, the same for each call.

    Tasks are taken level by level: those of a level never wait for one another, and only for levels before. Each list
    has its tasks in the order of levels, so of the tasks that are not done, one of the lowest level can always run:
    everything that it waits for and everything before it in its list is done. No list can block another forever.

    Within a level, the largest task goes first to the worker with the fewest bytes in this level; if there are several,
    to the one with the fewest in all. So no level has a straggler that another deal would avoid by much, and workers
    that go without work in one level come first in the next.

    Before that, tasks of the op with the longest chain of ops behind it, if they are the smaller ones (the router's,
    beside those of the shared experts), go to a worker each, to those with the fewest bytes in the level before. So
    what the rest of the token waits for is not behind work that could wait.

    Raises:
        ValueError: `workers` is no positive integer, or tasks of `graph` can never start.
    """
    check_workers(workers)
    lists: list[list[int]] = [[] for _ in range(workers)]
    total = [0.0] * workers
    size = [streamed_bytes(graph, task) for task in graph.tasks]
    to_come = _to_come(graph)
    load = [0.0] * workers
    for level in levels(graph):
        cost = {task: VISIT_BYTES + size[task] for task in level}
        dealt: list[tuple[int, int]] = []
        first = _urgent(graph, cost, to_come, workers)
        free = heapq.nsmallest(len(first), range(workers), key=lambda worker: (load[worker], total[worker], worker))
        load = [0.0] * workers
        for task, worker in zip(first, free, strict=True):
            load[worker] = cost[task]
            total[worker] += cost[task]
            dealt.append((task, worker))
        queue = [(load[worker], before, worker) for worker, before in enumerate(total)]
        heapq.heapify(queue)
        for task in sorted(set(level) - set(first), key=lambda task: (-cost[task], task)):
            here, before, worker = queue[0]
            load[worker] = here + cost[task]
            heapq.heapreplace(queue, (here + cost[task], before + cost[task], worker))
            total[worker] += cost[task]
            dealt.append((task, worker))
        for task, worker in sorted(dealt):  # earlier ops first: more waits for them
            lists[worker].append(task)
    return _schedule(graph, lists, size)


class Run(NamedTuple):
    """What happened when tasks ran as soon as they were ready and a worker was free."""

    lists: tuple[tuple[int, ...], ...]
    """For each worker, its tasks in the order in which it started them."""
    started: tuple[int, ...]
    """All tasks in the order in which they started."""
    time: float
    """When the last one ended."""
    counters: Counters


def run_ready(
    graph: Graph, workers: int, push: Callable[[int], None], pop: Callable[[], int | None], latency: Callable
) -> Run:
    """Runs tasks on workers: `push` gets each task that becomes ready, a free worker starts the one that `pop` gives.

    Ends when nothing runs and nothing is ready, which may be before all tasks have run: the caller has to look.
    """
    counters = Counters(graph)
    lists: list[list[int]] = [[] for _ in range(workers)]
    free, started, now = list(range(workers)), [], 0.0
    running: list[tuple[float, int, int]] = []
    for task in counters.first:
        push(task)
    while True:
        while free and (task := pop()) is not None:
            worker = heapq.heappop(free)
            lists[worker].append(task)
            started.append(task)
            heapq.heappush(running, (now + latency(task), task, worker))
        if not running:
            return Run(tuple(map(tuple, lists)), tuple(started), now, counters)
        now, task, worker = heapq.heappop(running)
        heapq.heappush(free, worker)
        for ready in counters.finish(task):
            push(ready)


def dynamic(graph: Graph, workers: int, seed: int, choice: Mapping[int, Collection[int]] | None = None) -> Schedule:
    """The lists that come out when a scheduler hands ready tasks to free workers.

    The policy: of the tasks that are ready, the one with the lowest number (the earliest op, then the lowest tile), to
    the free worker with the lowest number. A worker holds one task at a time. A task takes as long as its bytes and its
    fixed cost say, stretched by a random factor between 1 and 1.5, so that workers overtake each other as they do on a
    machine; `seed` decides the factors. With the experts that a token chose (`choice`, for each MoE layer), tasks of
    all others take their fixed cost only; without, tasks of routed experts take their mean over all choices.

    Every list is in the order of time, so workers that run these lists again cannot deadlock either.

    Raises:
        ValueError: `workers` is no positive integer, `seed` is no integer, or tasks of `graph` can never start.
    """
    check_workers(workers)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be an integer, not {seed!r}")
    draw = random.Random(seed)
    size = [streamed_bytes(graph, task, choice) for task in graph.tasks]
    ready: list[int] = []
    run = run_ready(
        graph,
        workers,
        lambda task: heapq.heappush(ready, task),
        lambda: heapq.heappop(ready) if ready else None,
        lambda task: (VISIT_BYTES + size[task]) * draw.uniform(1, 1.5),
    )
    if len(run.started) != len(graph.tasks):
        stuck = next(task for task, missing in enumerate(run.counters.missing) if missing > 0)
        raise ValueError(f"graph: {label(graph, stuck)} can never start, it waits for {run.counters.waiting(stuck)}")
    return _schedule(graph, run.lists, size)
