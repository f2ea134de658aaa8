"""The graph of a token as flat arrays that a launch reads, and where its tensors lie in memory.

`layout` places every tensor of a graph in one of three arenas: weights (constant), caches (kept from token to token)
and work (activations of a token). `fill` copies a checkpoint's weights into theirs. `pack` turns a graph into the
records of `megakernel.abi`, which the device code and the interpreter (`megakernel.vm`) both execute.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch

from megakernel import abi
from megakernel.config import ModelConfig
from megakernel.schedule import Schedule
from megakernel.tagged import Order, short_name, tagged
from megakernel.tasks import ITEM_BYTES, Graph, Op, Task, Tensor
from megakernel.weights import check as check_weights

ALIGNMENT = 256
"""Of every tensor in its arena, in bytes; asynchronous copies need 16."""
COPY_BYTES = 16

CODE_OF_OP = {
    "EMBEDDING": "embedding",
    "RMS_NORM": "rms_norm",
    "Q_PROJ": "gemv",
    "KVA_PROJ": "gemv",
    "QKV_PROJ": "gemv",
    "MLA_PREP": "mla_prep",
    "ABSORB_Q": "gemv",
    "KV_B_PROJ": "gemv",
    "ATTN_CHUNK": "attn_chunk",
    "ATTN_MERGE": "attn_merge",
    "ABSORB_OUT": "gemv",
    "O_PROJ_RESIDUAL": "gemv_res",
    "GATE_UP_SILU": "gemv_silu",
    "DOWN_SPLITK": "gemv_splitk",
    "REDUCE_RESIDUAL": "splitk_reduce",
    "MOE_GATE_TOPK": "moe_gate_topk",
    "MOE_GATE": "gemv",
    "MOE_TOPK": "moe_topk",
    "EXPERT_W13_SHARED": "gemv_silu",
    "EXPERT_W2_SHARED": "gemv",
    "EXPERT_W13_SILU": "gemv_silu",
    "EXPERT_W2": "gemv",
    "MOE_COMBINE_RESIDUAL": "moe_combine",
    "LM_HEAD": "gemv",
    "ARGMAX_PARTIAL": "argmax_partial",
    "ARGMAX_REDUCE": "argmax_reduce",
}
"""What the tasks of an op do."""


# -------------------------------------------------------------------------------------------------------------- layout


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each tensor of a graph lies: byte offsets into the arena of its kind, and the arenas' sizes in bytes."""

    weights: Mapping[str, int]
    cache: Mapping[str, int]
    work: Mapping[str, int]
    weights_bytes: int
    cache_bytes: int
    work_bytes: int


def bytes_of(config: ModelConfig, tensor: Tensor) -> int:
    """Bytes that a tensor takes: bf16 but for what is accumulated further, which is fp32, and for records."""
    name = short_name(tensor)
    items = tensor.count * tensor.rows * tensor.cols
    if name == "attn_partials":
        # of each chunk and head the output, its largest score and its sum
        return 4 * tensor.rows * (tensor.cols + config.num_attention_heads * abi.PARTIAL_STATS)
    if name == "mlp.routing":
        logits = abi.TAGGED_FP32 * config.n_routed_experts
        return tensor.rows * abi.dtype("Routing").itemsize + logits
    if name == "argmax_partials":
        return items * abi.dtype("Partial").itemsize
    if name in ("mlp.partials", "logits", "token"):
        return 4 * items
    if name == "mlp.router_logits":
        return abi.TAGGED_FP32 * items
    return items * (abi.TAGGED_BF16 if tagged(tensor) else ITEM_BYTES)


def layout(graph: Graph) -> Layout:
    """Places the tensors of a graph, in the order in which it made them."""
    offsets: dict[str, dict[str, int]] = {"weights": {}, "cache": {}, "work": {}}
    ends = dict.fromkeys(offsets, 0)
    arenas = {"matrix": "weights", "vector": "weights", "cache": "cache", "activation": "work"}
    for name, tensor in graph.tensors.items():
        arena = arenas[tensor.kind]
        if name.endswith(".mlp.router_logits"):  # they have room behind the layer's records
            routing = name.removesuffix("router_logits") + "routing"
            behind = graph.tensors[routing].rows * abi.dtype("Routing").itemsize
            offsets[arena][name] = offsets[arena][routing] + behind
            continue
        # an op over the rows of both reads them as one matrix, and writes them as one vector
        follows = name.endswith((".kv_a_proj_with_mqa", ".kva"))
        start = ends[arena] if follows else -(-ends[arena] // ALIGNMENT) * ALIGNMENT
        offsets[arena][name] = start
        ends[arena] = start + bytes_of(graph.config, tensor)
    sizes = {f"{arena}_bytes": -(-end // ALIGNMENT) * ALIGNMENT for arena, end in ends.items()}
    return Layout(**offsets, **sizes)


def _sources(config: ModelConfig, tensor: Tensor, weights: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """The checkpoint's tensors that make up one of the graph, in order."""
    name = f"model.{tensor.name}" if tensor.name != "lm_head" else "lm_head"
    name = name.removesuffix(".weight")
    if ".kv_b_proj." in name:
        name, half = name.rsplit(".", 1)
        heads = weights[f"{name}.weight"].unflatten(0, (config.num_attention_heads, -1))
        nope = config.qk_nope_head_dim
        yield heads[:, :nope].transpose(1, 2) if half == "k_transposed" else heads[:, nope:]
    elif ".experts." in name:
        prefix, matrix = name.rsplit(".", 1)
        for expert in range(tensor.count):
            yield weights[f"{prefix}.{expert}.{matrix}.weight"]
    else:
        yield weights[f"{name}.weight"]


def fill(graph: Graph, place: Layout, weights: Mapping[str, torch.Tensor], arena: torch.Tensor) -> None:
    """Copies the weights of a checkpoint to where the layout says.

    Args:
        weights: by Hugging Face name, see `megakernel.weights`; bf16.
        arena: uint8 [place.weights_bytes], on any device.

    Raises:
        ValueError: a weight is missing, unknown, not bf16 or of another shape than the model's, or the arena has
            another size or type.
    """
    check_weights(weights, graph.config)
    if arena.dtype != torch.uint8 or arena.shape != (place.weights_bytes,):
        found = f"{arena.dtype} {list(arena.shape)}"
        raise ValueError(f"arena: expected a torch.uint8 tensor of shape [{place.weights_bytes}], got {found}")
    flat = arena.view(torch.bfloat16)
    for name, start in place.weights.items():
        at = start // 2
        for source in _sources(graph.config, graph.tensors[name], weights):
            if source.dtype != torch.bfloat16:
                raise ValueError(f"weights: expected torch.bfloat16, got {source.dtype} for {name}")
            flat[at : at + source.numel()].view(source.shape).copy_(source)
            at += source.numel()


# --------------------------------------------------------------------------------------------------------------- table


@dataclasses.dataclass(frozen=True)
class Table:
    """The arrays of a launch, see `megakernel.abi` for the records. All are little-endian and contiguous."""

    graph: Graph
    place: Layout
    workers: int
    dynamic: bool
    """Whether workers take tasks from a queue of ready ones, or run lists of their own."""
    tasks: np.ndarray
    args: np.ndarray
    waits: np.ndarray
    triggers: np.ndarray
    thresholds: np.ndarray
    list_first: np.ndarray
    lists: np.ndarray
    consumer_first: np.ndarray
    consumers: np.ndarray
    launch_event: int

    ARRAYS = (
        "tasks",
        "args",
        "waits",
        "triggers",
        "thresholds",
        "list_first",
        "lists",
        "consumer_first",
        "consumers",
    )
    """Names of the arrays, which are also the fields of Params that point to them."""


def check_model(config: ModelConfig) -> None:
    """Raises ValueError for a model whose rows can't be copied in pieces of 16 bytes, or whose words are too few."""
    widths = "hidden_size", "intermediate_size", "moe_intermediate_size", "qk_nope_head_dim", "v_head_dim"
    for name in (*widths, "qk_rope_head_dim", "kv_lora_rank"):
        if getattr(config, name) % 8:
            raise ValueError(f"{name} must be a multiple of 8 to be decoded, not {getattr(config, name)}")


def pack(graph: Graph, schedule: Schedule | None = None, *, workers: int | None = None) -> Table:
    """The table of a graph.

    Args:
        schedule: whose lists the workers run; None gives them a queue of ready tasks.
        workers: how many take from the queue; without a schedule only. None is what the knobs say.

    Raises:
        ValueError: the model can't be decoded (`check_model`), or the schedule is not one of this graph.
    """
    check_model(graph.config)
    if schedule is not None:
        if workers is not None:
            raise ValueError("workers: a schedule has its own; leave one of them out")
        schedule.check(graph)
        workers, lists = len(schedule.lists), schedule.lists
    else:
        workers = graph.knobs.workers if workers is None else workers
        lists = ()
    place = layout(graph)
    builder = _Args(graph, place)
    appending = [task.index for task in graph.tasks if task.op >= 0 and builder.writes_cache(graph.ops[task.op], task)]
    order = None if schedule is None else Order(graph, schedule, appending)
    tasks = np.zeros(len(graph.tasks), abi.dtype("Task"))

    def activations(task: int) -> set[str]:
        read = (part.tensor for part in graph.tasks[task].reads)
        return {name for name in read if graph.tensors[name].kind == "activation"}

    waits, triggers = _Flat(), _Flat()
    seen = {op.layer: activations(op.tasks[0]) for op in graph.ops if op.name in ("MOE_GATE", "MOE_GATE_TOPK")}
    for task in graph.tasks:
        record = tasks[task.index]
        op = graph.ops[task.op] if task.op >= 0 else None
        record["op"], record["tile"] = task.op, task.tile
        record["rows"], record["chunk"] = task.rows, task.chunk or (0, 0)
        record["wait_first"], record["wait_count"] = waits.add(graph.waits[task.index])
        record["trigger_first"], record["trigger_count"] = triggers.add(graph.triggers[task.index])
        if op is None:
            record["code"] = abi.code("terminate" if task.type == "TERMINATE" else "nothing")
            continue
        record["code"] = abi.code(CODE_OF_OP[op.name])
        routed = task.expert is not None or task.slot is not None
        if routed and activations(task.index) == seen[op.layer] | {builder.name(op, "mlp.routing")}:
            record["flags"] = abi.ROUTERS_INPUT
        if task.expert is not None:
            record["by"], record["at"] = abi.value("By", "expert"), task.expert
        elif task.slot is not None:
            record["by"], record["at"] = abi.value("By", "slot"), task.slot
        elif op.name in ("DOWN_SPLITK", "ATTN_CHUNK"):
            record["at"] = task.writes[0].rows[0]
        elif op.name == "ARGMAX_PARTIAL":
            record["at"] = task.tile
        if builder.appends(op, task):
            record["flags"] |= abi.APPENDS
        record["args"] = builder.of(op, task)
        if order is not None:
            record["flags"] |= abi.TAGGED * (task.index in order.free) | abi.BY_TAGS * order.by_tags(task)

    list_first, list_items = _csr(lists) if lists else (np.zeros(workers + 1, np.int32), np.zeros(0, np.int32))
    consumer_first, consumers = _csr(event.consumers for event in graph.events)
    return Table(
        graph,
        place,
        workers,
        schedule is None,
        tasks,
        builder.array(),
        waits.array(),
        triggers.array(),
        np.array([event.threshold for event in graph.events], np.int32),
        list_first,
        list_items,
        consumer_first,
        consumers,
        next(event.index for event in graph.events if event.from_host),
    )


class _Flat:
    """Short lists laid end to end, each distinct one once."""

    def __init__(self):
        self.items: list[int] = []
        self.known: dict[tuple[int, ...], int] = {}

    def add(self, values: tuple[int, ...]) -> tuple[int, int]:
        """Where the list begins and how long it is."""
        if values not in self.known:
            self.known[values] = len(self.items)
            self.items += values
        return self.known[values], len(values)

    def array(self) -> np.ndarray:
        return np.array(self.items, np.int32)


def _csr(lists: Iterable[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    lists = [list(items) for items in lists]
    first = np.array([0, *itertools.accumulate(map(len, lists))], np.int32)
    return first, np.array([item for items in lists for item in items], np.int32)


class _Args:
    """The Args records of a graph, each distinct one once."""

    def __init__(self, graph: Graph, place: Layout):
        self.graph, self.place = graph, place
        self.config, self.knobs = graph.config, graph.knobs
        self.known: dict[tuple, int] = {}
        self.records: list[dict[str, int]] = []

    def array(self) -> np.ndarray:
        array = np.zeros(len(self.records), abi.dtype("Args"))
        for number, record in enumerate(self.records):
            for name, value in record.items():
                array[number][name] = value
        return array

    def of(self, op: Op, task: Task) -> int:
        """The number of the record that a task shares with others of its op."""
        record = getattr(self, CODE_OF_OP[op.name])(op, task)
        key = tuple(sorted(record.items()))
        if key not in self.known:
            self.known[key] = len(self.records)
            self.records.append(record)
        return self.known[key]

    def appends(self, op: Op, task: Task) -> bool:
        """Whether a task may have to append to the cache what another op computed.

        The task of the graph's last chunk is the one that is proven to do so; a launch that ends earlier has its last
        position in another chunk, whose task waits for the same events and appends in its place.
        """
        if op.name == "MLA_PREP":
            return True
        if not self.knobs.fold_mla_prep:
            return False
        return (op.name == "KV_B_PROJ" and task.tile == 0) or (
            op.name == "ATTN_CHUNK" and self.knobs.mla == "absorbed" and task.rows[0] == 0
        )

    def writes_cache(self, op: Op, task: Task) -> bool:
        """Whether a task may write rows of a cache."""
        return self.appends(op, task) or any(self.graph.tensors[part.tensor].kind == "cache" for part in task.writes)

    # -------------------------------------------------------------------------------------------------------- offsets

    def name(self, op: Op, tensor: str) -> str:
        return tensor if op.layer is None else f"layers.{op.layer}.{tensor}"

    def work(self, op: Op, tensor: str) -> int:
        return self.place.work[self.name(op, tensor)]

    def cache(self, op: Op, tensor: str) -> int:
        return self.place.cache[self.name(op, tensor)]

    def matrices(self, task: Task) -> list[str]:
        return [part.tensor for part in task.reads if self.graph.tensors[part.tensor].kind == "matrix"]

    def state(self, task: Task) -> dict[str, int]:
        """What a task reads first: a state and the weight of its norm, or a vector as it is."""
        first = task.reads[0].tensor
        record = dict(input=self.place.work[first], input_kind=abi.value("Input", "plain"))
        second = task.reads[1].tensor if len(task.reads) > 1 else first
        if self.graph.tensors[second].kind == "vector":
            record.update(norm=self.place.weights[second], input_kind=abi.value("Input", "norm"))
        return record

    def attended(self, op: Op) -> dict[str, int]:
        """The output of attention, merged already or in chunks."""
        lora, v = self.config.kv_lora_rank, self.config.v_head_dim
        width = lora if self.knobs.mla == "absorbed" else v
        record = dict(head_stride=width)
        if self.knobs.fold_merge:
            partials = self.graph.tensors[self.name(op, "attn_partials")]
            kind = abi.value("Input", "merge")
            return dict(record, input=self.work(op, "attn_partials"), input_kind=kind, chunks=partials.rows)
        return dict(record, input=self.work(op, "attn_merged"), input_kind=abi.value("Input", "plain"))

    # ------------------------------------------------------------------------------------------------ one for each code

    def embedding(self, op: Op, task: Task) -> dict[str, int]:
        return dict(
            weight=self.place.weights["embed_tokens"],
            input=self.work(op, "token"),
            out=self.work(op, "embedded"),
            cols=self.config.hidden_size,
        )

    def rms_norm(self, op: Op, task: Task) -> dict[str, int]:
        return dict(self.state(task), out=self.place.work[task.writes[0].tensor], cols=self.config.hidden_size)

    def gemv(self, op: Op, task: Task) -> dict[str, int]:
        c, name = self.config, self.matrices(task)[0]
        if op.name == "QKV_PROJ":  # over the rows of both, which follow each other
            name = self.name(op, "self_attn.q_proj")
        matrix = self.graph.tensors[name]
        record = dict(
            weight=self.place.weights[name], matrix_bytes=2 * matrix.rows * matrix.cols, cols=matrix.cols, kv_eps=0
        )
        if op.name == "ABSORB_Q":
            record.update(input=self.work(op, "q"), head_rows=c.kv_lora_rank, head_stride=c.qk_head_dim)
        elif op.name == "ABSORB_OUT":
            record.update(self.attended(op), head_rows=c.v_head_dim)
        elif op.name in ("EXPERT_W2", "EXPERT_W2_SHARED"):
            record.update(input=self.place.work[task.reads[0].tensor], input_bytes=abi.TAGGED_BF16 * matrix.cols)
        elif op.name == "O_PROJ_RESIDUAL":
            if self.knobs.mla == "absorbed":
                record.update(input=self.work(op, "attn_out"))
            else:
                record.update(self.attended(op))
        else:
            record.update(self.state(task))
        if op.name == "KV_B_PROJ":
            record.update(
                out_kind=abi.value("Out", "kv_cache"),
                out=self.cache(op, "kv_cache"),
                cache_pitch=self.graph.tensors[self.name(op, "kv_cache")].cols,
                rope_cache=self.cache(op, "rope_cache"),
                kva=self.work(op, "kva"),
                kv_eps=1,
            )
        elif op.name == "LM_HEAD":
            record.update(out_kind=abi.value("Out", "logits"), out=self.work(op, "logits"))
        elif op.name == "MOE_GATE":
            record.update(out_kind=abi.value("Out", "fp32"), out=self.work(op, "mlp.router_logits"))
        else:
            out = self.name(op, "q") if op.name == "QKV_PROJ" else task.writes[0].tensor
            record.update(out=self.place.work[out], out_bytes=abi.TAGGED_BF16 * self.graph.tensors[out].rows)
        if task.expert is not None or task.slot is not None:
            record.update(routing=self.work(op, "mlp.routing"))
        return record

    def gemv_res(self, op: Op, task: Task) -> dict[str, int]:
        residual = next(p.tensor for p in reversed(task.reads) if self.graph.tensors[p.tensor].kind == "activation")
        return dict(self.gemv(op, task), residual=self.place.work[residual])

    def gemv_silu(self, op: Op, task: Task) -> dict[str, int]:
        gate, up = self.matrices(task)
        return dict(self.gemv(op, task), weight=self.place.weights[gate], weight2=self.place.weights[up])

    def gemv_splitk(self, op: Op, task: Task) -> dict[str, int]:
        matrix = self.graph.tensors[self.matrices(task)[0]]
        return dict(
            weight=self.place.weights[matrix.name],
            cols=matrix.cols,
            input=self.place.work[task.reads[0].tensor],
            out=self.work(op, "mlp.partials"),
            out_bytes=4 * matrix.rows,
        )

    def splitk_reduce(self, op: Op, task: Task) -> dict[str, int]:
        partials = self.graph.tensors[task.reads[0].tensor]
        return dict(
            input=self.place.work[partials.name],
            chunks=partials.rows,
            residual=self.place.work[task.reads[1].tensor],
            out=self.place.work[task.writes[0].tensor],
            cols=self.config.hidden_size,
        )

    def latent(self, op: Op) -> dict[str, int]:
        """Where queries, the latent and the caches are found, for what rotates and norms them."""
        absorbed = self.knobs.mla == "absorbed"
        cache = self.name(op, "latent_cache" if absorbed else "kv_cache")
        record = dict(
            query=self.work(op, "q"),
            kva=self.work(op, "kva"),
            norm=self.place.weights[self.name(op, "self_attn.kv_a_layernorm.weight")],
            rotated=-1,
            latent=-1,
            absorbed=self.work(op, "q_absorbed") if absorbed else -1,
            cache=self.place.cache[cache],
            cache_pitch=self.graph.tensors[cache].cols,
            rope_cache=-1 if absorbed else self.cache(op, "rope_cache"),
        )
        if not self.knobs.fold_mla_prep:
            record.update(rotated=self.work(op, "q_rotated"))
            if not absorbed:
                record.update(latent=self.work(op, "latent"))
        return record

    def mla_prep(self, op: Op, task: Task) -> dict[str, int]:
        return self.latent(op)

    def attn_chunk(self, op: Op, task: Task) -> dict[str, int]:
        partials = self.graph.tensors[self.name(op, "attn_partials")]
        width = partials.cols // self.config.num_attention_heads
        each = 4 * self.config.num_attention_heads * (width + abi.PARTIAL_STATS)
        return dict(self.latent(op), out=self.place.work[partials.name], out_bytes=each, head_stride=width)

    def attn_merge(self, op: Op, task: Task) -> dict[str, int]:
        partials = self.graph.tensors[task.reads[0].tensor]
        return dict(
            input=self.place.work[partials.name],
            chunks=partials.rows,
            head_stride=partials.cols // self.config.num_attention_heads,
            out=self.place.work[task.writes[0].tensor],
        )

    def moe_gate_topk(self, op: Op, task: Task) -> dict[str, int]:
        return dict(
            self.state(task),
            weight=self.place.weights[self.matrices(task)[0]],
            cols=self.config.hidden_size,
            routing=self.work(op, "mlp.routing"),
        )

    def moe_topk(self, op: Op, task: Task) -> dict[str, int]:
        return dict(routing=self.work(op, "mlp.routing"))

    def moe_combine(self, op: Op, task: Task) -> dict[str, int]:
        return dict(
            input=self.work(op, "mlp.experts.out"),
            input_bytes=abi.TAGGED_BF16 * self.config.hidden_size,
            shared=self.work(op, "mlp.shared_experts.out"),
            routing=self.work(op, "mlp.routing"),
            residual=self.place.work[task.reads[-1].tensor],
            out=self.place.work[task.writes[0].tensor],
            cols=self.config.hidden_size,
            slots=int(self.knobs.experts == "slots"),
        )

    def argmax_partial(self, op: Op, task: Task) -> dict[str, int]:
        return dict(input=self.work(op, "logits"), out=self.work(op, "argmax_partials"))

    def argmax_reduce(self, op: Op, task: Task) -> dict[str, int]:
        partials = self.graph.tensors["argmax_partials"]
        return dict(input=self.work(op, "argmax_partials"), parts=partials.rows, out=self.work(op, "token"))
