"""How evenly the bytes of a token fall on the workers: in all, and among the tasks that can run at the same time.

What a task of a routed expert reads depends on the token, so every value is a mean over random routings, not the value
of a mean routing: that would spread the bytes of a few chosen experts over the tasks of all.
"""

import random
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from megakernel.knobs import PRESETS
from megakernel.schedule import Schedule, dynamic, levels, static, streamed_bytes
from megakernel.tasks import Graph

SCHEDULES = ("static", "dynamic")


def choices(graph: Graph, number: int, seed: int) -> list[dict[int, frozenset[int]]]:
    """`number` random routings: for each MoE layer, the experts that a token chose, all as likely."""
    draw, config = random.Random(seed), graph.config
    moe = [layer for layer in range(config.num_hidden_layers) if config.is_moe(layer)]
    return [
        {layer: frozenset(draw.sample(range(config.n_routed_experts), config.num_experts_per_tok)) for layer in moe}
        for _ in range(number)
    ]


def balance(graph: Graph, preset: str, workers: int, routings: int, seed: int) -> tuple[list[dict], list[dict]]:
    """How evenly a token's bytes of weights and caches fall on the workers, as means over random routings.

    Static lists are the same for all routings; dynamic ones are made for each, because a worker that finds no work to
    do is free again at once. All values are 1e6 bytes.

    Returns:
        A row for each schedule and `rank`, 0 being the worker with the fewest bytes: its `mb`, and the `mean_mb`. And a
        row for each schedule and kind of level (tasks that have the same number of tasks before them; see
        `schedule.levels`), named by its ops, summed over the token: `even_mb`, bytes per worker if all had the same;
        `busiest_mb`, those of the worker that has most; `task_mb`, those of the largest task, below which no schedule
        gets; `levels`, how many there are.

    Raises:
        ValueError: `workers` or `routings` is no positive integer.
    """
    if isinstance(routings, bool) or not isinstance(routings, int) or routings < 1:
        raise ValueError(f"routings must be a positive integer, not {routings!r}")
    found = levels(graph)
    level_of = np.empty(len(graph.tasks), np.int64)
    for number, tasks in enumerate(found):
        level_of[tasks] = number
    names = [_level_name(graph, tasks) for tasks in found]
    ranks = {kind: np.zeros(workers) for kind in SCHEDULES}
    busiest = {kind: np.zeros(len(found)) for kind in SCHEDULES}
    total, largest = np.zeros(len(found)), np.zeros(len(found))
    fixed = static(graph, workers)
    for number, choice in enumerate(choices(graph, routings, seed)):
        size = np.array([streamed_bytes(graph, task, choice) for task in graph.tasks])
        total += np.bincount(level_of, size, len(found))
        most = np.zeros(len(found))
        np.maximum.at(most, level_of, size)
        largest += most
        for kind, schedule in zip(SCHEDULES, (fixed, dynamic(graph, workers, seed + number, choice)), strict=True):
            owner = _owners(schedule, len(graph.tasks))
            ranks[kind] += np.sort(np.bincount(owner, size, workers))
            each = np.bincount(level_of * workers + owner, size, len(found) * workers).reshape(len(found), workers)
            busiest[kind] += each.max(1)
    scale = 1 / (routings * 1e6)
    start = {"preset": preset, "workers": workers, "routings": routings}
    by_worker = [
        {**start, "schedule": kind, "rank": rank, "mb": mb, "mean_mb": total.sum() * scale / workers}
        for kind in SCHEDULES
        for rank, mb in enumerate((ranks[kind] * scale).tolist())
    ]
    by_level = []
    for kind in SCHEDULES:
        rows: dict[str, dict] = {}
        for level, name in enumerate(names):
            row = rows.setdefault(name, {"levels": 0, "tasks": 0, "even_mb": 0.0, "busiest_mb": 0.0, "task_mb": 0.0})
            row["levels"] += 1
            row["tasks"] += len(found[level])
            row["even_mb"] += total[level] * scale / workers
            row["busiest_mb"] += busiest[kind][level] * scale
            row["task_mb"] += largest[level] * scale
        by_level += [{**start, "schedule": kind, "ops": name, **row} for name, row in rows.items()]
    return by_worker, by_level


def _owners(schedule: Schedule, tasks: int) -> np.ndarray:
    """The worker of each task: int64 [tasks]."""
    owner = np.empty(tasks, np.int64)
    for worker, numbers in enumerate(schedule.lists):
        owner[list(numbers)] = worker
    return owner


def _level_name(graph: Graph, tasks: Sequence[int]) -> str:
    ones = (graph.tasks[task] for task in tasks)
    return " + ".join(dict.fromkeys(graph.ops[task.op].name if task.op >= 0 else task.type for task in ones))


def summary(by_worker: Sequence[Mapping], by_level: Sequence[Mapping]) -> list[dict]:
    """A row for each preset, number of workers and schedule in the rows of `balance`.

    `min_mb`, `mean_mb`, `max_mb` per worker; `max_over_mean`; and `levels_over_mean`, the bytes of the busiest workers
    of all levels over the mean: how many times the even share is on the way if every level waits for its last worker.
    """
    found: dict[tuple, dict] = {}
    keys = "preset", "workers", "schedule"
    for row in by_worker:
        one = found.setdefault(tuple(row[key] for key in keys), {"mb": [], "mean": row["mean_mb"], "busiest": 0.0})
        one["mb"].append(row["mb"])
    for row in by_level:
        found[tuple(row[key] for key in keys)]["busiest"] += row["busiest_mb"]
    return [
        {
            **dict(zip(keys, key, strict=True)),
            "min_mb": min(one["mb"]),
            "mean_mb": one["mean"],
            "max_mb": max(one["mb"]),
            "max_over_mean": max(one["mb"]) / one["mean"],
            "levels_over_mean": one["busiest"] / one["mean"],
        }
        for key, one in found.items()
    ]


def own_workers(preset: str, counts: Iterable[int]) -> int:
    """The preset's own number of workers if it is among `counts`, else the least of them."""
    counts = {*counts}
    return PRESETS[preset].workers if PRESETS[preset].workers in counts else min(counts)


def reading(rows: Sequence[Mapping]) -> str:
    """What the rows of `summary` say, in sentences of HTML; static lists on each preset's own number of workers."""
    parts, counts = [], {row["workers"] for row in rows}
    for row in rows:
        if row["schedule"] == "static" and row["workers"] == own_workers(row["preset"], counts):
            parts.append(
                f"{row['preset']} on {row['workers']} workers: the worker with the most bytes reads "
                f"{row['max_over_mean']:.2f} times the mean, and the busiest workers of all levels together "
                f"{row['levels_over_mean']:.1f} times."
            )
    return f"<p>Static lists. {' '.join(parts)}</p>"
