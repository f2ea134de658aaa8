"""What a launch is asked for, what it returns, and how it fails: the same for the interpreter and for device code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from fmms.arguments import check_integer, check_number, fail
from megakernel import abi
from megakernel.config import ModelConfig
from megakernel.schedule import label
from megakernel.tasks import Graph

_INTEGERS = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8


class Launch(NamedTuple):
    """Checked arguments of a launch."""

    iterations: int
    """Tokens to decode."""
    position: int
    """Of the first token that is read: how many positions the cache holds."""
    forced: torch.Tensor
    """int32 [iterations] on the CPU: the token to read; -1 for the one sampled before."""
    temperature: float
    """A number that fp32 holds; 0 is greedy."""
    seed: int
    noise_position: int

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        capacity: int,
        *,
        iterations: int,
        position: int,
        forced: Sequence[int] | torch.Tensor | None,
        temperature: float,
        seed: int,
        noise_position: int,
        has_token: bool,
        most: int = abi.MOST_ITERATIONS,
    ) -> Launch:
        """Checks the arguments of a launch.

        Args:
            capacity: positions that the cache has room for.
            iterations: tokens to decode, at least one.
            position: how many positions the cache holds.
            forced: ids to read by the first tokens of the launch, -1 for what the token before sampled; at most
                `iterations`. Later tokens read what was sampled.
            temperature: of the softmax that is sampled from, rounded to fp32; 0 takes the largest logit.
            seed: int64, of the sampling noise, used as it is (`fmms.sample` with a tensor of seeds).
            noise_position: int64, position of the noise of the first token.
            has_token: whether a launch before has left a token to read.
            most: tokens of a launch.

        Raises:
            ValueError: an argument has the wrong type or value; the message names it.
        """
        iterations = check_integer("iterations", iterations, 1, 2**31 - 1, "a positive integer")
        position = check_integer("position", position, 0, 2**31 - 1, "an integer, 0 or more")
        if position + iterations > capacity:
            raise ValueError(
                f"iterations: expected at most {max(capacity - position, 0)}, because {position} positions of the "
                f"{capacity} that the cache has room for (the knob `tokens`) are taken, got {iterations}"
            )
        if iterations > most:
            raise ValueError(f"iterations: expected at most {most} in one launch, got {iterations}")
        seed = check_integer("seed", seed, -(2**63), 2**63 - 1, "an int64")
        noise_position = check_integer("noise_position", noise_position, -(2**63), 2**63 - 1, "an int64")
        temperature = check_number("temperature", temperature, "a number, 0 or more")
        if not temperature >= 0:
            fail("temperature", "a number, 0 or more", temperature)
        # as in fmms.sample, where a temperature too small for fp32 is greedy too
        temperature = torch.tensor(temperature, dtype=torch.float64).float().item()
        ids = _forced(forced, iterations, config.vocab_size)
        if ids[0] < 0 and not has_token:
            raise ValueError(
                "forced: expected an id for the first token, because no launch before has left one to read"
            )
        return cls(iterations, position, ids, temperature, seed, noise_position)


def _forced(forced, iterations: int, vocab: int) -> torch.Tensor:
    expected = f"at most {iterations} token ids from 0 to {vocab - 1}, or -1 for the one sampled before"
    if forced is None:
        forced = []
    if not isinstance(forced, torch.Tensor):
        for number in forced:
            check_integer("forced", number, -1, vocab - 1, expected)
        forced = torch.tensor([int(number) for number in forced], dtype=torch.int64)
    if forced.dtype not in _INTEGERS or forced.dim() != 1 or len(forced) > iterations:
        fail("forced", expected, forced)
    forced = forced.to("cpu", torch.int64)
    wrong = forced[(forced < -1) | (forced >= vocab)]
    if len(wrong):
        fail("forced", expected, wrong[0].item())
    return torch.nn.functional.pad(forced.int(), (0, iterations - len(forced)), value=-1)


class Result(NamedTuple):
    """What a launch returns."""

    tokens: torch.Tensor
    """int32 [iterations]: the token sampled after each one read; -1 if a logit was NaN or +inf, or none was finite."""
    logits: torch.Tensor | None
    """fp32 [iterations, vocab_size], if asked for."""
    times: torch.Tensor | None = None
    """int64 [iterations], nanoseconds of the device's clock when each token was sampled; None from the interpreter."""
    timeline: torch.Tensor | None = None
    """int64 [num_tasks, 4], the columns of `abi.TIMELINE` for each task of the last token, if asked for."""


# ------------------------------------------------------------------------------------------------------------- deadlock


class Worker(NamedTuple):
    """What a worker was doing when its launch was given up; the words of `abi.DUMP`."""

    state: str
    """One of `abi.ENUMS["State"]`."""
    iteration: int
    """Which token of the launch."""
    task: int = -1
    event: int = -1
    """That it waits for."""
    value: int = 0
    """Of the event's counter."""
    threshold: int = 0
    """That it waits for: the one for a token times the number of tokens begun."""
    producer_state: str = "idle"
    producer_task: int = -1


class Deadlock(RuntimeError):
    """A launch was given up because nothing went on."""

    MAX_TASKS = 8
    """Most tasks of a ready queue that a message shows."""

    def __init__(self, graph: Graph, workers: Iterable[Worker], tasks: Iterable[Worker] = ()):
        """
        Args:
            graph: for names.
            workers: the state of each.
            tasks: with a ready queue, tasks that have not become ready, the lowest number first; state "waiting".
        """
        self.workers = list(workers)
        self.tasks = list(tasks)
        stuck = [(number, worker) for number, worker in enumerate(self.workers) if worker.state != "done"]
        lines = [f"deadlock: {len(stuck)} of {len(self.workers)} workers wait forever"]
        if self.tasks:
            lines[0] += f", and {len(self.tasks)} tasks have not become ready"
        lines += [f"  worker {number}: {_activity(graph, worker)}" for number, worker in stuck]
        lines += [f"  {_activity(graph, task)}" for task in self.tasks[: self.MAX_TASKS]]
        if len(self.tasks) > self.MAX_TASKS:
            lines.append(f"  and {len(self.tasks) - self.MAX_TASKS} more tasks")
        super().__init__("\n".join(lines))


def _activity(graph: Graph, worker: Worker) -> str:
    if worker.state == "queue":
        # a producer takes the tasks, from a queue or a list
        text = (
            "waits for a task that is ready" if worker.producer_state in ("idle", "queue") else "waits for its producer"
        )
    else:
        text = f"{label(graph, worker.task)} of token {worker.iteration}" if worker.task >= 0 else "no task"
        if worker.event >= 0:
            event = graph.events[worker.event]
            text += (
                f" waits for event {event.index} ({event.name}) with value {worker.value}, threshold {worker.threshold}"
            )
        else:
            text += f", {worker.state}"
    if worker.producer_task >= 0:
        text += f"; its producer is {worker.producer_state} at {label(graph, worker.producer_task)}"
        if worker.producer_state == "routing":
            router = graph.router(graph.ops[graph.tasks[worker.producer_task].op].layer)
            event = graph.events[graph.triggers[router.tasks[0]][0]]
            text += f", for what event {event.index} ({event.name}) stands for"
    return text
