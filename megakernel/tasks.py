"""The vocabulary of the task graph: tensors and ranges of them, tasks, ops, events, and the graph that holds them.

`graph.py` builds it; schedules, the interpreter and the validator read it.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from megakernel.config import ModelConfig
from megakernel.knobs import Knobs

ITEM_BYTES = 2
"""Weights and caches are bf16."""
COLUMNS = ("task_type", "kernel_owner", "ops_per_token", "tasks_per_token", "graph_ops")

FLEET_TYPES = frozenset({"embedding", "argmax_partial", "argmax_reduce", "splitk_reduce_mi300"})
"""Types whose kernels came with the Fleet runtime in the published MI300X decoder; the others are that project's own.
All names of types are those published there, but for moe_topk, half of an op that it does not split."""
ROUTERS = frozenset({"MOE_GATE_TOPK", "MOE_TOPK"})
"""Ops after which a layer's routing can be read, one or the other of them."""

Span = tuple[int, int]
"""Half-open: first, and one past the last."""


class Tensor(NamedTuple):
    """A matrix [count, rows, cols] that tasks read or write. Vectors have one column."""

    name: str
    kind: str
    """"matrix" and "vector" are weights, "cache" outlives the token, "activation" has one writer in the token."""
    rows: int
    cols: int = 1
    count: int = 1


class Range(NamedTuple):
    """The part of a tensor that one task reads or writes."""

    tensor: str
    rows: Span
    cols: Span
    at: int = 0
    """Which of the tensor's matrices: its number, or the slot that holds the number when the token runs."""
    by: str = ""
    """"": `at` and `rows` are what they say. "expert": read only if the token chose expert `at`. "slot": of the expert
    that is the token's choice number `at`. "token": the one row of the token id, wherever it is."""

    @property
    def size(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.cols[1] - self.cols[0])


class Task(NamedTuple):
    """A tile of an op: what one worker does without waiting."""

    index: int
    op: int
    """-1 for control."""
    type: str
    tile: int
    """Its number in the op."""
    rows: Span
    """Rows of the op's output."""
    chunk: Span | None = None
    """Columns of a split matrix, or positions of attention."""
    expert: int | None = None
    """Routed expert, for which the task does nothing unless it is chosen."""
    slot: int | None = None
    """Number of the chosen expert."""
    reads: tuple[Range, ...] = ()
    writes: tuple[Range, ...] = ()


class Op(NamedTuple):
    index: int
    name: str
    layer: int | None
    """None outside the layers."""
    kind: str
    """Whether weights, caches or neither bound it: "gemv", "attention" or "small"."""
    type: str
    rows: int
    """Of its output; the tasks' rows partition them (for each expert, slot and chunk)."""
    tasks: tuple[int, ...]
    by_range: bool = False
    """Whether a task waits for the tasks whose ranges it reads only, rather than for whole ops."""


class Event(NamedTuple):
    """A counter: each producer adds one when it is done, consumers start when it reaches the threshold."""

    index: int
    name: str
    producers: tuple[int, ...]
    consumers: tuple[int, ...]
    threshold: int
    from_host: bool = False
    """The host adds one, too."""
    to_host: bool = False


@dataclasses.dataclass(frozen=True)
class Graph:
    """What `build` made. Tasks are numbered in an order in which they could run: BEGIN_TASK_GRAPH first."""

    config: ModelConfig
    knobs: Knobs
    tensors: Mapping[str, Tensor]
    ops: tuple[Op, ...]
    """Without the two control tasks, which belong to no op."""
    tasks: tuple[Task, ...]
    events: tuple[Event, ...]
    waits: tuple[tuple[int, ...], ...]
    """The events that each task waits for."""
    triggers: tuple[tuple[int, ...], ...]
    """The events that each task counts up."""
    predecessors: tuple[tuple[int, ...], ...]
    """The ops that each op waits for."""

    # ----------------------------------------------------------------------------------------------------------- counts

    def tasks_by_type(self) -> dict[str, int]:
        """How many tasks there are of each type, the two control tasks included."""
        return _tally(task.type for task in self.tasks)

    def tasks_by_op(self) -> dict[str, int]:
        """How many tasks there are under each op name, over all layers."""
        counts: dict[str, int] = {}
        for op in self.ops:
            counts[op.name] = counts.get(op.name, 0) + len(op.tasks)
        return counts

    def ops_by_name(self) -> dict[str, int]:
        """How many ops there are of each name."""
        return _tally(op.name for op in self.ops)

    def router(self, layer: int) -> Op:
        """The op that writes which experts a layer chooses. Raises KeyError for a layer without experts."""
        for op in self.ops:
            if op.layer == layer and op.name in ROUTERS:
                return op
        raise KeyError(f"no router in layer {layer}")

    # ------------------------------------------------------------------------------------------------------------ bytes

    def task_bytes(self, task: Task, kinds: Iterable[str] = ("matrix",)) -> int:
        """Bytes that a task reads from tensors of these kinds if it has work to do; "matrix": weights."""
        kinds = tuple(kinds)
        return ITEM_BYTES * sum(part.size for part in task.reads if self.tensors[part.tensor].kind in kinds)

    def reads(self, choice: Mapping[int, Iterable[int]]) -> Iterator[tuple[Task, Range]]:
        """What the tasks of one token read from matrices, with the experts that each layer chose.

        Args:
            choice: for each MoE layer, its chosen experts in the order of their slots.
        """
        chosen = {layer: tuple(experts) for layer, experts in choice.items()}
        for task in self.tasks:
            for part in task.reads:
                if self.tensors[part.tensor].kind != "matrix":
                    continue
                if part.by in ("expert", "slot"):
                    experts = chosen[self.ops[task.op].layer]
                    if part.by == "expert" and part.at not in experts:
                        continue
                    part = part._replace(at=part.at if part.by == "expert" else experts[part.at], by="")
                yield task, part

    def token_bytes(self) -> int:
        """Bytes of matrices that one token reads, whichever experts it chooses: all have the same size."""
        first = range(self.config.num_experts_per_tok)
        choice = {op.layer: first for op in self.ops if op.layer is not None}
        return ITEM_BYTES * sum(part.size for _, part in self.reads(choice))

    # ------------------------------------------------------------------------------------------------------------ order

    def critical_path(self) -> tuple[Op, ...]:
        """The longest chain of ops that wait for one another: its length is the number of hops of a token."""
        longest: list[tuple[int, int | None]] = []
        for before in self.predecessors:
            hops, previous = max(((longest[op][0], op) for op in before), default=(0, None))
            longest.append((hops + 1, previous))
        path, at = [], max(range(len(longest)), key=lambda op: longest[op][0])
        while at is not None:
            path.append(self.ops[at])
            at = longest[at][1]
        return tuple(reversed(path))

    def __iter__(self) -> Iterator[Task]:
        """Tasks in an order that the events allow, found by counting; of those ready at once the lowest number first.

        Raises:
            ValueError: some tasks can never start.
        """
        count = [int(event.from_host) for event in self.events]
        missing = [len(waits) for waits in self.waits]
        ready, started = [], 0

        def reached(event: Event) -> None:
            for consumer in event.consumers:
                missing[consumer] -= 1
                if not missing[consumer]:
                    ready.append(consumer)

        for event in self.events:
            if count[event.index] == event.threshold:
                reached(event)
        while ready:
            batch, ready[:] = sorted(ready), []
            for index in batch:
                started += 1
                yield self.tasks[index]
                for trigger in self.triggers[index]:
                    count[trigger] += 1
                    if count[trigger] == self.events[trigger].threshold:
                        reached(self.events[trigger])
        if started != len(self.tasks):
            raise ValueError(f"{len(self.tasks) - started} of {len(self.tasks)} tasks can never start")

    # ------------------------------------------------------------------------------------------------------------ table

    def table(self) -> list[tuple]:
        """Rows of `COLUMNS`: each task type, most tasks first, then control and the total."""
        types = {op.type: [each for each in self.ops if each.type == op.type] for op in self.ops}
        rows = []
        for name, ops in types.items():
            tasks = sum(len(op.tasks) for op in ops)
            owner = "Fleet" if name in FLEET_TYPES else "project"
            rows.append((name, owner, len(ops), tasks, "; ".join(dict.fromkeys(op.name for op in ops))))
        rows.sort(key=lambda row: -row[3])
        control = [task for task in self.tasks if task.op < 0]
        names = ", ".join(task.type for task in reversed(control))
        rows.append((names, "Fleet runtime (control)", "", len(control), ""))
        rows.append(("total", "", len(self.ops), len(self.tasks), ""))
        return rows


def _tally(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts
