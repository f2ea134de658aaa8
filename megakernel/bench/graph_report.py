"""What there is to say about a token's task graph before anything runs it, as rows: its sizes, its proof, planted
faults, and one layer as it is drawn in megakernel.bench.graph_figures. Its balance is megakernel.bench.graph_balance's.

All counts are sums over graphs that `megakernel.graph.build` made; the published ones are read for comparison only.
"""

import csv
import dataclasses
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from fmms import paths
from megakernel.config import ModelConfig
from megakernel.faults import FAULTS
from megakernel.graph import build
from megakernel.knobs import PRESETS, Knobs
from megakernel.schedule import streamed_bytes
from megakernel.tasks import FLEET_TYPES, Graph, Op
from megakernel.validate import InvalidGraph, simulate, validate

CONTROL = "control"
"""In place of a task type: the two tasks that begin and end a token, and the events of the host."""
TOTAL = "total"
PUBLISHED_TYPES = "mi300x_task_counts.csv"
"""Published ops and tasks by type of the graph that the preset mi300x must give; in data/reference/."""
PUBLISHED_SIZES = "mi300x_graph_sizes.csv"
"""Published sizes of that graph and of earlier ones, with the knobs that give them."""
MEGABYTE = 1e6

# ------------------------------------------------------------------------------------------------------------- sizes


def changed(preset: str, change: str = "") -> Knobs:
    """The knobs of a preset with some of them changed, as in "tokens 2048" or "fold_norm False, experts slots".

    Raises:
        ValueError: an unknown preset or knob, or a value that the knob cannot have; the message names it.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, not {preset!r}")
    known = {field.name: field.type for field in dataclasses.fields(Knobs)}
    values = {}
    for part in filter(None, (part.strip() for part in change.split(","))):
        name, _, word = part.partition(" ")
        if name not in known:
            raise ValueError(f"{part!r}: there is no knob {name!r}, expected one of {', '.join(known)} and a value")
        word = word.strip()
        if known[name] is int and re.fullmatch(r"\d+", word):
            values[name] = int(word)
        else:
            values[name] = {"True": True, "False": False}.get(word, word) if known[name] is bool else word
    return dataclasses.replace(PRESETS[preset], **values)


def count(graph: Graph, preset: str, change: str = "") -> list[dict]:
    """A row for each task type, for control, and for the total.

    `ops`, `tasks`; `events` that tasks of the type count up, of which `shared_events` are counted up by another type,
    too; `read_mb`, the 1e6 bytes of weights and caches that a token reads, of the routed experts those of the chosen.
    """
    types: dict[str, dict] = {}
    for op in graph.ops:
        row = types.setdefault(op.type, {"names": {}, "ops": 0, "tasks": 0, "bytes": 0.0})
        row["names"][op.name] = None
        row["ops"] += 1
        row["tasks"] += len(op.tasks)
        row["bytes"] += op_bytes(graph, op)
    counted = [sorted({_type(graph, task) for task in event.producers}) or [CONTROL] for event in graph.events]
    start = {"preset": preset, "change": change, "workers": graph.knobs.workers, "tokens": graph.knobs.tokens}
    rows = [
        {
            **start,
            "task_type": name,
            "kernel_owner": "Fleet" if name in FLEET_TYPES else "project",
            "graph_ops": "; ".join(row["names"]),
            "ops": row["ops"],
            "tasks": row["tasks"],
            "events": sum(name in types_of for types_of in counted),
            "shared_events": sum(name in types_of and len(types_of) > 1 for types_of in counted),
            "read_mb": row["bytes"] / MEGABYTE,
        }
        for name, row in sorted(types.items(), key=lambda item: -item[1]["tasks"])
    ]
    control = [task.type for task in graph.tasks if task.op < 0]
    end = {"ops": None, "tasks": len(control), "events": counted.count([CONTROL]), "shared_events": 0, "read_mb": 0.0}
    rows.append({**start, "task_type": CONTROL, "graph_ops": "; ".join(control), **end})
    sizes = {"ops": len(graph.ops), "tasks": len(graph.tasks), "events": len(graph.events)}
    sizes |= {"shared_events": sum(len(types_of) > 1 for types_of in counted)}
    rows.append({**start, "task_type": TOTAL, **sizes, "read_mb": sum(row["read_mb"] for row in rows)})
    return rows


def count_changes(config: ModelConfig, preset: str, changes: Iterable[str]) -> list[dict]:
    """The rows of `count` of a preset with each of these changes in turn (see `changed`)."""
    return [row for change in changes for row in count(build(config, changed(preset, change)), preset, change)]


def by_change(rows: Sequence[Mapping]) -> list[dict]:
    """Sizes of each changed graph in `rows` of `count`, and by how many tasks each type differs from its preset's."""
    graphs: dict[tuple[str, str], dict[str, Mapping]] = {}
    for row in rows:
        graphs.setdefault((row["preset"], row["change"] or ""), {})[row["task_type"]] = row
    found = []
    for (preset, change), types in graphs.items():
        base = graphs.get((preset, ""), {})
        tasks = {name: row["tasks"] - (base[name]["tasks"] if name in base else 0) for name, row in types.items()}
        tasks |= {name: -row["tasks"] for name, row in base.items() if name not in types}
        moved = [f"{name} {by:+,}" for name, by in tasks.items() if by and name != TOTAL]
        total = types[TOTAL]
        sizes = {name: total[name] for name in ("ops", "events", "tasks")}
        more = {"more_tasks": tasks[TOTAL], "types": "; ".join(moved), "read_mb": total["read_mb"]}
        found.append({"preset": preset, "change": change, **sizes, **more})
    return found


def by_type(rows: Sequence[Mapping]):
    """The rows of `count` of unchanged presets as a table (a pandas DataFrame): a line for each task type, with ops,
    tasks and events of each preset."""
    import pandas as pd

    frame = pd.DataFrame([row for row in rows if not row["change"]])
    wide = frame.pivot(index="task_type", columns="preset", values=["ops", "tasks", "events"]).swaplevel(axis=1)
    last = [CONTROL, TOTAL]
    order = [name for name in frame["task_type"].unique() if name not in last] + last
    columns = [(preset, name) for preset in frame["preset"].unique() for name in ("ops", "tasks", "events")]
    wide = wide.loc[order, columns]
    wide.columns = [f"{preset}: {name}" for preset, name in wide.columns]
    names = frame.dropna(subset="graph_ops").groupby("task_type")["graph_ops"]
    wide["ops of this type"] = names.agg(lambda each: "; ".join(dict.fromkeys("; ".join(each).split("; "))))
    return wide.rename_axis("task type").reset_index()


def op_bytes(graph: Graph, op: Op) -> float:
    """Bytes of weights and caches that an op reads for one token, of the routed experts those of the chosen."""
    return sum(streamed_bytes(graph, graph.tasks[task]) for task in op.tasks)


def _type(graph: Graph, task: int) -> str:
    return graph.tasks[task].type if graph.tasks[task].op >= 0 else CONTROL


# --------------------------------------------------------------------------------------------------------- published


def published_types(rows: Sequence[Mapping], preset: str = "mi300x") -> list[dict]:
    """Ops and tasks of the unchanged `preset` in `rows` of `count`, beside the published ones, type by type."""
    built = {row["task_type"]: row for row in rows if (row["preset"], row["change"] or "") == (preset, "")}
    found = []
    for row in _reference(PUBLISHED_TYPES):
        name = CONTROL if "BEGIN_TASK_GRAPH" in row["task_type"] else row["task_type"]
        ours = built.pop(name, {})
        found.append(_compared(row["task_type"], row, ours, {"ops": "ops_per_token", "tasks": "tasks_per_token"}))
    # a type that the published table lacks
    return found + [_compared(name, {}, ours, {"ops": "ops", "tasks": "tasks"}) for name, ours in built.items()]


def published_sizes(config: ModelConfig) -> list[dict]:
    """Ops, events and tasks of each published graph beside those of the graph that its knobs give."""
    found = []
    for row in _reference(PUBLISHED_SIZES):
        graph = build(config, changed(row["preset"], row["change"]))
        sizes = {"ops": len(graph.ops), "events": len(graph.events), "tasks": len(graph.tasks)}
        found.append(_compared(row["graph"], row, sizes, {name: name for name in sizes}))
    return found


def _compared(name: str, published: Mapping, built: Mapping, columns: Mapping[str, str]) -> dict:
    row = {"name": name}
    for quantity, column in columns.items():
        stated = published.get(column)
        row[quantity], row[f"published_{quantity}"] = built.get(quantity), int(stated) if stated else None
    equal = (row[quantity] == row[f"published_{quantity}"] for quantity in columns if published.get(columns[quantity]))
    return {**row, "equal": bool(published) and bool(built) and all(equal)}


def _reference(name: str) -> list[dict]:
    with open(paths.reference_dir() / name, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def require_published(*tables: Iterable[Mapping]) -> None:
    """AssertionError that lists the rows of `published_types` or `published_sizes` that differ, if any do."""
    lines = [f"- {row}" for table in tables for row in table if not row["equal"]]
    if lines:
        raise AssertionError("the graph is not the published one:\n" + "\n".join(lines))


# ------------------------------------------------------------------------------------------------------------- proof


def prove(graph: Graph, preset: str, routings: int = 2, seed: int = 0) -> dict:
    """What `validate` has proven, and the `seconds` it took here.

    Raises:
        InvalidGraph: the graph has a fault.
    """
    start = time.perf_counter()
    report = validate(graph, routings, seed)
    return {"preset": preset, **report._asdict(), "seconds": time.perf_counter() - start}


def plant(graph: Graph, preset: str, layer: int, seed: int = 0) -> list[dict]:
    """A row for each fault of `megakernel.faults`, planted into this layer.

    `message` of the validator, and whether it `rejected` the graph and `named` the fault; `a_run_shows`, what a single
    random execution of the counters tells of it: often "nothing".
    """
    rows = []
    for fault in FAULTS:
        wrong = fault.plant(graph, layer)
        message = _refusal(lambda wrong=wrong: validate(wrong, seed=seed))
        run = _refusal(lambda wrong=wrong: simulate(wrong, wrong.knobs.workers, seed))
        rows.append(
            {
                "preset": preset,
                "fault": fault.name,
                "planted": fault.planted,
                "rejected": message is not None,
                "named": message is not None and all(words in message for words in fault.named),
                "message": message or "accepted",
                "a_run_shows": "nothing" if run is None else _run(run),
            }
        )
    return rows


def _refusal(check: Callable) -> str | None:
    try:
        check()
    except InvalidGraph as error:
        return str(error)
    return None


def _run(message: str) -> str:
    return "it never ends" if "never start" in message else "a counter past its threshold"


def require_rejected(rows: Iterable[Mapping]) -> None:
    """AssertionError that lists the planted faults that were accepted or refused for another reason, if any were."""
    lines = [f"- {row['preset']}, {row['fault']}: {row['message']}" for row in rows if not row["named"]]
    if lines:
        raise AssertionError("faults that the validator did not find:\n" + "\n".join(lines))


# ------------------------------------------------------------------------------------------------------------- layer


def layer_rows(graph: Graph, preset: str, layer: int) -> list[dict]:
    """The ops and events of one layer, as a drawing needs them.

    An op (`item` "op") has its `kind`, `tasks`, `mb` as in `op_bytes` (1e6 bytes), `depth` (the number of ops on the
    longest way to it in this layer, itself included) and `critical`, whether it lies on the token's longest chain of
    ops. An event has its `threshold`, its `producers` and `consumers` (names of ops of this layer, joined by "; "), and
    in `outside` "from" or "to" if ops of other layers count it up or wait for it. The second op of a name is "NAME #2".

    Raises:
        ValueError: the model has no such layer.
    """
    ops = [op for op in graph.ops if op.layer == layer]
    if not ops:
        raise ValueError(f"layer must be in [0, {graph.config.num_hidden_layers}), not {layer!r}")
    critical = {op.index for op in graph.critical_path()}
    depth: dict[int, int] = {}
    for op in ops:
        depth[op.index] = 1 + max(
            (depth[before] for before in graph.predecessors[op.index] if before in depth), default=0
        )
    names: dict[int, str] = {}
    for op in ops:
        same = sum(graph.ops[other].name == op.name for other in names)
        names[op.index] = f"{op.name} #{same + 1}" if same else op.name
    start = {"preset": preset, "layer": layer}
    rows = [
        {
            **start,
            "item": "op",
            "name": names[op.index],
            "kind": op.kind,
            "tasks": len(op.tasks),
            "mb": op_bytes(graph, op) / MEGABYTE,
            "depth": depth[op.index],
            "critical": op.index in critical,
        }
        for op in ops
    ]
    for event in graph.events:
        sides = [_ops_of(graph, tasks) for tasks in (event.producers, event.consumers)]
        inside = [[names[op] for op in side if op in names] for side in sides]
        if not any(inside):
            continue
        outside = [word for word, side, own in zip(("from", "to"), sides, inside, strict=True) if len(side) > len(own)]
        rows.append(
            {
                **start,
                "item": "event",
                "name": event.name,
                "threshold": event.threshold,
                "producers": "; ".join(inside[0]),
                "consumers": "; ".join(inside[1]),
                "outside": "; ".join(outside),
            }
        )
    return rows


def _ops_of(graph: Graph, tasks: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(graph.tasks[task].op for task in tasks))
