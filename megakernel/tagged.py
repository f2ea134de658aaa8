"""Which activations carry the number of their token, and which tasks need no order with others because of it.

`csrc/tagged.h` says how such a value travels, docs/megakernel.md why what is not tagged stays ordered.
"""

from collections.abc import Iterable, Mapping

from megakernel.schedule import Schedule
from megakernel.tasks import Graph, Range, Task, Tensor

PLAIN = frozenset({"attn_partials", "mlp.partials", "logits", "argmax_partials", "token"})
"""Activations that are not tagged: each of their readers waits for all that write what it reads."""


def short_name(tensor: Tensor) -> str:
    """The name of a tensor without its layer."""
    return tensor.name.split(".", 2)[-1] if tensor.name.startswith("layers.") else tensor.name


def tagged(tensor: Tensor) -> bool:
    """Whether each value lies in a word with the number of its token, see `abi.TAGGED_BF16`."""
    return tensor.kind == "activation" and short_name(tensor) not in PLAIN


class Order:
    """Which tasks need no order with others, because what they write or read is tagged.

    What is not tagged has to be ordered by the counters. A task that reads such a thing must wait itself for all that
    write it: a way there over others would lead through tasks that count up in no order. Rows of a cache are read by
    the tokens to come as well: who may write one must lead to the end of the token through tasks that do order, or that
    come later in the list of its worker. And who reads a tag must have read it before the token can end, because the
    next one writes there: what is computed from it goes into the token, but for experts that may not be chosen, which
    need another task behind them in the list of their worker. Unless all this holds, every task orders what it writes,
    and waits for events.
    """

    def __init__(self, graph: Graph, schedule: Schedule, appending: Iterable[int]):
        """
        Args:
            appending: tasks that may write rows of a cache.
        """
        self.graph = graph
        writers: dict[str, list[tuple[Task, Range]]] = {}
        for task in graph.tasks:
            for part in task.writes:
                if not tagged(graph.tensors[part.tensor]):
                    writers.setdefault(part.tensor, []).append((task, part))
        self.before = [self._before(task, writers) for task in graph.tasks]
        """For each task, those that write what it reads, if that is not tagged."""
        appending = set(appending)
        free = {task.index for task in graph.tasks if task.writes} - appending
        free -= {task.index for found in writers.values() for task, _ in found}
        holds = appending <= self._ordered(schedule, free) and self._waits() and self._read_in_time(schedule)
        self.free = frozenset(free) if holds else frozenset()
        """Tasks that need not order what they write."""

    def by_tags(self, task: Task) -> bool:
        """Whether a task need not wait for its events, because there is a tag on all that others write and it reads."""
        return bool(self.free) and self._tags_only(task)

    def _tags_only(self, task: Task) -> bool:
        read = any(self.graph.tensors[part.tensor].kind == "activation" for part in task.reads)
        return read and not self.before[task.index]

    def _before(self, task: Task, writers: Mapping[str, list[tuple[Task, Range]]]) -> set[int]:
        """Any row of a cache counts, because a token may be at any."""
        found = set()
        for part in task.reads:
            cache = self.graph.tensors[part.tensor].kind == "cache"
            for writer, own in writers.get(part.tensor, ()):
                if writer.op != task.op if cache else _overlap(part, own):
                    found.add(writer.index)
        return found

    def _ordered(self, schedule: Schedule, free: set[int]) -> set[int]:
        """The tasks whose writes are visible to the end of the token."""
        graph = self.graph
        end = next(task.index for task in graph.tasks if task.type == "TERMINATE")
        previous = {}
        for tasks in schedule.lists:
            previous |= dict(zip(tasks[1:], tasks, strict=False))
        ordered, left = {end}, [end]
        while left:
            task = left.pop()
            waits = () if self._tags_only(graph.tasks[task]) else graph.waits[task]
            found = {p for event in waits for p in graph.events[event].producers if p not in free}
            found |= {previous[task]} if task in previous else set()
            left += found - ordered
            ordered |= found
        return ordered

    def _read_in_time(self, schedule: Schedule) -> bool:
        """Whether the last task of each worker is one without which no token ends: not of an expert."""
        last = (self.graph.tasks[tasks[-1]] for tasks in schedule.lists if tasks)
        return all(task.expert is None for task in last)

    def _waits(self) -> bool:
        """Whether all that read what is not tagged wait for its writers; the last token is there before the token."""
        known: dict[tuple[int, ...], set[int]] = {}
        for task, before in zip(self.graph.tasks, self.before, strict=True):
            if before and not any(part.tensor == "token" for part in task.reads):
                events = self.graph.waits[task.index]
                if events not in known:
                    known[events] = {p for event in events for p in self.graph.events[event].producers}
                if not before <= known[events]:
                    return False
        return True


def _overlap(one: Range, other: Range) -> bool:
    return all(a[0] < b[1] and b[0] < a[1] for a, b in ((one.rows, other.rows), (one.cols, other.cols)))
