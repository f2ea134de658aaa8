"""Proves a task graph sound before anything runs it: counters, order of reads and writes, and weights read once.

`validate` is static: it argues over every possible execution. `simulate` executes the counters under random latencies.

Why the order is proven by sets: once the thresholds are known to be what all producers together deliver, an event that
has fired says that all of its producers are done, and so is everything that these waited for. Tasks with the same waits
have the same set of tasks done before them, so there are about as many sets as events, each a Python int with a bit per
task. "Done before" is then a bit, and a range is proven ordered for all tasks of a wait at once. A read must come after
all writers of its bytes, so nothing that has been read is overwritten in the same token either.

Why the weights are right for any routing: the tasks are the same whatever the router says; only which expert's matrix a
range stands for varies. With a task per expert, the ranges of each expert are shown to cover its matrix exactly once;
they are read if and only if it is chosen. With a task per slot, the ranges of each slot cover one matrix exactly once,
there are as many slots as choices, and choices differ, so no expert is read by two slots. Random routings are counted
as well, as a check of this argument.
"""

import collections
import functools
import heapq
import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from megakernel.schedule import Counters, Run, check_workers, label, run_ready
from megakernel.tasks import ITEM_BYTES, Event, Graph, Range, Task

ORDERS = ("random", "first", "last", "newest")
"""Which of the ready tasks `simulate` starts: any, the lowest number, the highest, the one that became ready last."""


class InvalidGraph(ValueError):
    """The graph could compute something wrong or never end; the message names what is concerned."""


class Report(NamedTuple):
    """How much was proven."""

    tasks: int
    events: int
    orders: int
    """Pairs of a range that is read and the waits of its readers, all shown to be after the range's writers."""
    matrices: int
    """Matrices shown to be read exactly once, those of each expert or slot counted."""
    routings: int
    schedules: int


def validate(graph: Graph, routings: int = 2, seed: int = 0) -> Report:
    """Proves a graph; see the module for the arguments.

    Args:
        routings: how many random choices of experts to count the bytes of.
        seed: for these, and for the random executions.

    Raises:
        InvalidGraph: with the first fault found.
        ValueError: `routings` is no whole number from 0 on.
    """
    if isinstance(routings, bool) or not isinstance(routings, int) or routings < 0:
        raise ValueError(f"routings must be a whole number from 0 on, not {routings!r}")
    _edges(graph)
    for event in graph.events:
        _threshold(graph, event)
    _ranges(graph)
    orders = _reads_and_writes(graph, _done_before(graph))
    matrices = _matrices(graph)
    draw = random.Random(seed)
    for _ in range(routings):
        _routing(graph, draw)
    schedules = [(graph.knobs.workers, "random"), (graph.knobs.workers, "last"), (3, "newest"), (1, "random")]
    for number, (workers, order) in enumerate(schedules):
        simulate(graph, workers, seed + number, order)
    return Report(len(graph.tasks), len(graph.events), orders, matrices, routings, len(schedules))


def simulate(graph: Graph, workers: int, seed: int = 0, order: str = "random") -> Run:
    """Executes the counters on workers, with latencies of which few are very long, and checks that all tasks end.

    Raises:
        InvalidGraph: a task never starts, or an event counts past its threshold.
        ValueError: `workers` is no positive integer or `order` is none of ORDERS.
    """
    check_workers(workers)
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, not {order!r}")
    draw = random.Random(seed)
    run = run_ready(graph, workers, *_queue(order, draw), lambda _: min(draw.paretovariate(1), 1000))
    if len(run.started) != len(graph.tasks):
        stuck = sorted(set(range(len(graph.tasks))) - set(run.started))
        message = f"{len(stuck)} of {len(graph.tasks)} tasks never start, first {label(graph, stuck[0])}"
        raise InvalidGraph(f"{message}, which waits for {run.counters.waiting(stuck[0])}")
    for event, value in zip(graph.events, run.counters.value, strict=True):
        if value != event.threshold:
            raise InvalidGraph(f"{_event(event)}: ended at {value}, its threshold is {event.threshold}")
    return run


def _queue(order: str, draw: random.Random) -> tuple[Callable[[int], None], Callable[[], int | None]]:
    """How to add a ready task, and how to take the next one in this order: neither looks through all that are ready."""
    ready: list[int] = []
    if order in ("first", "last"):
        sign = 1 if order == "first" else -1
        return lambda task: heapq.heappush(ready, sign * task), lambda: sign * heapq.heappop(ready) if ready else None

    def pop() -> int | None:
        if not ready:
            return None
        if order == "random":  # which place a task has does not matter then
            at = draw.randrange(len(ready))
            ready[at], ready[-1] = ready[-1], ready[at]
        return ready.pop()

    return ready.append, pop


# -------------------------------------------------------------------------------------------------------------- events


def _event(event: Event) -> str:
    return f"event {event.index} ({event.name})"


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _edges(graph: Graph) -> None:
    """Tasks and events must agree on who waits for and who counts up what."""
    tasks = len(graph.tasks)
    for name, of_tasks in (("waits", graph.waits), ("triggers", graph.triggers)):
        if len(of_tasks) != tasks:
            raise InvalidGraph(f"{name} has {len(of_tasks)} entries, expected one for each of the {tasks} tasks")
        field, word = ("consumers", "waits for") if name == "waits" else ("producers", "counts up")
        edges = set()
        for task, events in enumerate(of_tasks):
            if not events:
                what = "it would start before the launch" if name == "waits" else "nobody could know that it is done"
                raise InvalidGraph(f"{label(graph, task)} {word} no event: {what}")
            for event in events:
                if not 0 <= event < len(graph.events):
                    there = f"there are {len(graph.events)} events"
                    raise InvalidGraph(f"{label(graph, task)} {word} event {event}, which does not exist: {there}")
                if (task, event) in edges:
                    raise InvalidGraph(f"{label(graph, task)} {word} {_event(graph.events[event])} twice")
                edges.add((task, event))
        for number, event in enumerate(graph.events):
            if event.index != number:
                raise InvalidGraph(f"event {number} ({event.name}) says that it is number {event.index}")
            listed = getattr(event, field)
            for task in listed:
                if (task, number) not in edges:
                    who = label(graph, task) if 0 <= task < tasks else f"task {task}"
                    raise InvalidGraph(f"{_event(event)} has {who} among its {field}, but not the other way round")
            if len(set(listed)) != len(listed):
                raise InvalidGraph(f"{_event(event)} has a task twice among its {field}")
            edges -= {(task, number) for task in listed}
        if edges:
            task, event = min(edges)
            which = _event(graph.events[event])
            raise InvalidGraph(f"missing edge: {label(graph, task)} {word} {which}, which does not list it in {field}")


def _threshold(graph: Graph, event: Event) -> None:
    most = len(event.producers) + event.from_host
    by = f"its {len(event.producers)} producers{' and the host' if event.from_host else ''} count to {most}"
    if most == 0:
        raise InvalidGraph(f"{_event(event)} has no producers: it never fires")
    if event.threshold > most:
        raise InvalidGraph(f"{_event(event)}: threshold {event.threshold} is too high, {by}: it never fires")
    if event.threshold < most:
        raise InvalidGraph(f"{_event(event)}: threshold {event.threshold} is too low, {by}: it fires early")
    if not event.consumers and not event.to_host:
        raise InvalidGraph(f"{_event(event)}: nobody waits for it, neither a task nor the host")


# --------------------------------------------------------------------------------------------------------------- order


def _bits(tasks, count: int) -> int:
    flags = np.zeros(count, bool)
    flags[list(tasks)] = True
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


def _done_before(graph: Graph) -> dict[tuple[int, ...], int]:
    """For each set of events that tasks wait for, the tasks that are done before them, as bits; refuses cycles.

    Without cycles, what each task counts up leads on to the host in the end: every event has consumers or goes there.
    So nothing still runs when all events of the host have fired.
    """
    counters = Counters(graph)
    # an event fires with the last of its producers, so their sets are known by then
    fired: dict[int, int] = {}
    done: dict[tuple[int, ...], int] = {}

    def before(waits: tuple[int, ...]) -> int:
        if waits not in done:
            done[waits] = 0
            for event in waits:
                done[waits] |= fired[event]
        return done[waits]

    def fire(event: Event) -> None:
        fired[event.index] = _bits(event.producers, len(graph.tasks))
        for waits in {graph.waits[task] for task in event.producers}:
            fired[event.index] |= before(waits)

    for event in graph.events:
        if counters.value[event.index] == event.threshold:
            fire(event)
    ready, started = list(counters.first), 0
    while ready:
        task = ready.pop()
        started += 1
        ready += counters.finish(task)
        for event in graph.triggers[task]:
            if counters.value[event] == graph.events[event].threshold:
                fire(graph.events[event])
    if started != len(graph.tasks):
        raise InvalidGraph(_cycle(graph, counters))
    for waits in graph.waits:
        before(waits)
    return done


def _cycle(graph: Graph, counters: Counters) -> str:
    """Walks back from a task that cannot start, always to something that it waits for, until one comes again."""
    task = next(task for task, missing in enumerate(counters.missing) if missing > 0)
    path: dict[int, Event] = {}
    while task not in path:
        waits = (graph.events[event] for event in graph.waits[task])
        path[task] = event = next(event for event in waits if counters.value[event.index] < event.threshold)
        task = next(task for task in event.producers if counters.missing[task] > 0)
    steps = list(path.items())[list(path).index(task) :]
    chain = ", ".join(f"{label(graph, each)} waits for {_event(event)}" for each, event in steps)
    return f"cycle: {chain}, which {label(graph, task)} counts up"


# ------------------------------------------------------------------------------------------------------------ the bytes


def _where(graph: Graph, task: Task, verb: str, part: Range) -> str:
    return f"{label(graph, task.index)} {verb} {part.tensor}"


def _ranges(graph: Graph) -> None:
    """Ranges must lie in tensors that exist, and be of a kind that can be read or written so."""
    slots = graph.config.num_experts_per_tok
    for task in graph.tasks:
        for verb, parts in (("reads", task.reads), ("writes", task.writes)):
            for part in parts:
                tensor = graph.tensors.get(part.tensor)
                where = functools.partial(_where, graph, task, verb, part)
                if tensor is None:
                    raise InvalidGraph(f"{where()}, which does not exist")
                count = slots if part.by == "slot" else tensor.count
                (low, high), (left, right) = part.rows, part.cols
                inside = 0 <= low < high <= tensor.rows and 0 <= left < right <= tensor.cols and 0 <= part.at < count
                if not inside:
                    size = f"[{count}, {tensor.rows}, {tensor.cols}]"
                    raise InvalidGraph(
                        f"{where()} at {part.at}, rows {part.rows}, columns {part.cols}, outside of {size}"
                    )
                if verb == "writes" and tensor.kind not in ("activation", "cache"):
                    raise InvalidGraph(f"{where()}, a {tensor.kind}: those are constant")
                if verb == "writes" and tensor.kind == "cache" and low != tensor.rows - 1:
                    raise InvalidGraph(
                        f"{where()} from row {low} on: only the last row, {tensor.rows - 1}, is this token's"
                    )
                if part.by and tensor.kind != "matrix":
                    raise InvalidGraph(f"{where()} by {part.by}: only matrices are looked up")
                if part.by in ("expert", "slot"):
                    if getattr(task, part.by) != part.at:
                        own = getattr(task, part.by)
                        raise InvalidGraph(f"{where()} of {part.by} {part.at}, but the task is that of {part.by} {own}")
                    if not any(each.tensor.endswith(".routing") for each in task.reads):
                        raise InvalidGraph(f"{where()} of a chosen expert without reading the layer's routing")


def _grid(boxes: np.ndarray, rows: tuple[int, int], cols: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How many of the boxes (first row, end, first column, end) cover each part of a range, and where parts begin."""
    boxes = np.concatenate([np.clip(boxes[:, :2], *rows), np.clip(boxes[:, 2:], *cols)], 1)
    row_edges, col_edges = np.unique(np.append(boxes[:, :2], rows)), np.unique(np.append(boxes[:, 2:], cols))
    low, high = np.searchsorted(row_edges, boxes[:, 0]), np.searchsorted(row_edges, boxes[:, 1])
    left, right = np.searchsorted(col_edges, boxes[:, 2]), np.searchsorted(col_edges, boxes[:, 3])
    counts = np.zeros((len(row_edges), len(col_edges)), np.int32)
    for row, col, sign in ((low, left, 1), (high, right, 1), (low, right, -1), (high, left, -1)):
        np.add.at(counts, (row, col), sign)
    return counts.cumsum(0).cumsum(1)[:-1, :-1], row_edges, col_edges


def _shared_area(boxes: np.ndarray, rows: tuple[int, int], cols: tuple[int, int]) -> np.ndarray:
    """How many elements of a range each of the boxes covers: int64, one for each box."""
    high = np.minimum(boxes[:, 1], rows[1]) - np.maximum(boxes[:, 0], rows[0])
    wide = np.minimum(boxes[:, 3], cols[1]) - np.maximum(boxes[:, 2], cols[0])
    return np.maximum(high, 0) * np.maximum(wide, 0)


def _boxes(parts) -> np.ndarray:
    return np.array([(*part.rows, *part.cols) for part in parts], np.int64).reshape(-1, 4)


def _reads_and_writes(graph: Graph, done: dict[tuple[int, ...], int]) -> int:
    """No two unordered writers, no read that is not after all writers of its bytes; returns how many were shown."""
    writes: dict[tuple[str, int], list[tuple[int, Range]]] = collections.defaultdict(list)
    readers: dict[Range, dict[tuple[int, ...], int]] = collections.defaultdict(dict)
    for task in graph.tasks:
        for part in task.writes:
            writes[part.tensor, part.at].append((task.index, part))
        for part in task.reads:
            if graph.tensors[part.tensor].kind in ("activation", "cache"):
                readers[part].setdefault(graph.waits[task.index], task.index)

    empty = np.zeros((0, 4), np.int64)
    writers: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]] = {}
    overlapping: set[tuple[str, int]] = set()
    for (name, at), found in writes.items():
        tensor = graph.tensors[name]
        tasks, boxes = np.array([task for task, _ in found]), _boxes(part for _, part in found)
        writers[name, at] = tasks, boxes
        if _grid(boxes, (0, tensor.rows), (0, tensor.cols))[0].max() > 1:
            overlapping.add((name, at))
            _writers_ordered(graph, done, name, tasks, boxes)
    for name, tensor in graph.tensors.items():
        if tensor.kind == "cache":
            _, boxes = writers.get((name, 0), (None, empty))
            if _grid(boxes, (tensor.rows - 1, tensor.rows), (0, tensor.cols))[0].min() < 1:
                raise InvalidGraph(f"{name}: nobody writes all of row {tensor.rows - 1}, which later tokens read")

    read: dict[tuple[str, int], list[Range]] = collections.defaultdict(list)
    for part in readers:
        read[part.tensor, part.at].append(part)
    control = {event.index for event in graph.events if any(graph.tasks[task].op < 0 for task in event.consumers)}
    for (name, at), found in writes.items():
        # the token itself goes to the host; any other result was made to be read, so a read was left out
        if graph.tensors[name].kind == "activation" and not control & {*graph.triggers[found[0][0]]}:
            _all_read(graph, name, at, found, read[name, at])

    orders = 0
    for part, cohorts in readers.items():
        tensor = graph.tensors[part.tensor]
        tasks, boxes = writers.get((part.tensor, part.at), (np.zeros(0, int), empty))
        fresh = max(part.rows[0], tensor.rows - 1) if tensor.kind == "cache" else part.rows[0]
        if fresh < part.rows[1]:  # rows before are those of earlier tokens
            # ranges that nobody else writes, too, cover a range if and only if their shares of it add up to it
            area = (part.rows[1] - fresh) * (part.cols[1] - part.cols[0])
            written = _shared_area(boxes, (fresh, part.rows[1]), part.cols).sum()
            if (part.tensor, part.at) in overlapping or written != area:
                counts, rows, cols = _grid(boxes, (fresh, part.rows[1]), part.cols)
                if counts.min() < 1:
                    row, col = np.argwhere(counts < 1)[0]
                    where = f"{part.tensor} at {part.at}, row {rows[row]}, column {cols[col]}"
                    reader = label(graph, next(iter(cohorts.values())))
                    raise InvalidGraph(f"{reader} reads {where}, which nobody writes")
        needed = _bits(tasks[_shared_area(boxes, part.rows, part.cols) > 0], len(graph.tasks))
        for waits, task in cohorts.items():
            orders += 1
            missing = needed & ~done[waits]
            if missing:
                names = ", ".join(_event(graph.events[event]) for event in waits)
                what = f"reads {part.tensor} at {part.at}, rows {part.rows}, before its writer"
                writer = label(graph, _lowest(missing))
                raise InvalidGraph(f"{label(graph, task)} {what} {writer} is certainly done: it waits only for {names}")
    return orders


def _all_read(graph: Graph, name: str, at: int, writes: list[tuple[int, Range]], reads: list[Range]) -> None:
    """Everything that is written into a tensor is read by some task."""
    unread = np.zeros((graph.tensors[name].rows, graph.tensors[name].cols), bool)
    for _, part in writes:
        unread[slice(*part.rows), slice(*part.cols)] = True
    for part in reads:
        unread[slice(*part.rows), slice(*part.cols)] = False
    if unread.any():
        row, col = np.argwhere(unread)[0].tolist()
        writer = next(
            task for task, part in writes
            if part.rows[0] <= row < part.rows[1] and part.cols[0] <= col < part.cols[1]
        )  # fmt: skip
        where = f"row {row}, column {col} of {name} at {at}"
        raise InvalidGraph(f"{label(graph, writer)} writes {where}, which nobody reads")


def _writers_ordered(graph: Graph, done: dict, name: str, tasks: np.ndarray, boxes: np.ndarray) -> None:
    for at in range(len(tasks)):
        rest, box = boxes[at + 1 :], boxes[at]
        meet = (rest[:, 0] < box[1]) & (box[0] < rest[:, 1]) & (rest[:, 2] < box[3]) & (box[2] < rest[:, 3])
        for other in np.flatnonzero(meet) + at + 1:
            first, second = int(tasks[at]), int(tasks[other])
            if not (done[graph.waits[second]] >> first | done[graph.waits[first]] >> second) & 1:
                both = f"{label(graph, first)} and {label(graph, second)}"
                raise InvalidGraph(f"unordered writers: {both} write the same bytes of {name}")


# ------------------------------------------------------------------------------------------------------------- weights


def _covered_once(name: str, tensor, parts: list[Range], known: set) -> None:
    """Whether ranges cover a matrix exactly once; `known` keeps what has been proven for others of the same shape."""
    key = tensor.rows, tensor.cols, tuple(sorted((part.rows, part.cols) for part in parts))
    if key in known:
        return
    counts, rows, cols = _grid(_boxes(parts), (0, tensor.rows), (0, tensor.cols))
    wrong = np.argwhere(counts != 1)
    if len(wrong):
        row, col = wrong[0]
        where = f"row {rows[row]}, column {cols[col]} (byte {(rows[row] * tensor.cols + cols[col]) * ITEM_BYTES})"
        times = "never read" if counts[row, col] == 0 else f"read {counts[row, col]} times"
        raise InvalidGraph(f"{name}: {where} is {times}, expected once")
    known.add(key)


def _matrices(graph: Graph) -> int:
    """Every matrix is read once: for a fixed one, each expert or each slot; returns how many that are."""
    found: dict[str, dict[str, dict[int, list[Range]]]] = collections.defaultdict(dict)
    for task in graph.tasks:
        for part in task.reads:
            if graph.tensors[part.tensor].kind == "matrix":
                found[part.tensor].setdefault(part.by, {}).setdefault(part.at, []).append(part)
    known: set = set()
    shown = 0
    for name, tensor in graph.tensors.items():
        if tensor.kind != "matrix":
            continue
        ways = found.get(name) or {"": {}}
        if len(ways) > 1:
            raise InvalidGraph(f"{name} is read in several ways ({', '.join(map(repr, ways))}), expected one")
        ((by, parts),) = ways.items()
        if by == "token":
            all_parts = [part for each in parts.values() for part in each]
            if [(part.rows[1] - part.rows[0], part.cols) for part in all_parts] != [(1, (0, tensor.cols))]:
                raise InvalidGraph(f"{name}: expected one read of the token's whole row, found {all_parts}")
            shown += 1
            continue
        if by == "" and tensor.count > 1:
            raise InvalidGraph(
                f"{name} has {tensor.count} matrices, but its readers do not say of which expert or slot"
            )
        for at in range(graph.config.num_experts_per_tok if by == "slot" else tensor.count):
            _covered_once(f"{name}, {by} {at}" if by else name, tensor, parts.get(at, []), known)
            shown += 1
    return shown


def _routing(graph: Graph, draw: random.Random) -> None:
    """Counts what one token with random experts reads."""
    config = graph.config
    layers = {op.layer for op in graph.ops if op.layer is not None}
    choice = {layer: draw.sample(range(config.n_routed_experts), config.num_experts_per_tok) for layer in layers}
    found: dict[tuple[str, int], list[Range]] = collections.defaultdict(list)
    routed: dict[str, int | None] = {}
    for task, part in graph.reads(choice):
        found[part.tensor, part.at].append(part)
        routed[part.tensor] = graph.ops[task.op].layer if task.expert is not None or task.slot is not None else None
    known: set = set()
    for name, tensor in graph.tensors.items():
        if tensor.kind != "matrix" or any(part.by == "token" for part in found.get((name, 0), ())):
            continue
        wanted = range(tensor.count) if routed.get(name) is None else choice[routed[name]]
        for at in wanted:
            _covered_once(f"{name}, matrix {at}, experts {choice}", tensor, found.pop((name, at), []), known)
        extra = [at for other, at in found if other == name]
        if extra:
            raise InvalidGraph(f"{name}: matrix {extra[0]} is read, but the token does not choose it")
