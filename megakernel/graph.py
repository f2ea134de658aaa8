"""The work of one token as a graph: ops, the tasks (tiles) they are cut into, and the counters that order them.

`build` walks the model layer by layer; every op says which ranges of which tensors its tasks read and write, and the
events follow from that. Nothing else knows how many tasks or events there are: counts are sums over what was built.

    python -m megakernel.graph --preset mi300x

prints the tasks of a token by type, as CSV.
"""

import argparse
import csv
import dataclasses
import gc
import itertools
import sys
from collections.abc import Iterable, Iterator

from megakernel.config import TINY, V2_LITE, ModelConfig
from megakernel.knobs import CHOICES, PRESETS, Knobs
from megakernel.tasks import COLUMNS, Event, Graph, Op, Range, Span, Task, Tensor

COPY_ITEMS = 8
"""bf16 values in the 16 bytes that asynchronous copies move at least; shares of columns are multiples of it."""
NOISE_BLOCK = 128
"""Tokens whose groups of `fmms.noise` lie together; `fmms.noise.BLOCK_SIZE`, which a test holds this to."""
MAX_TASKS = 2_000_000
"""More tasks than a launch can hold; tile sizes that would make them are refused rather than built for minutes."""


# --------------------------------------------------------------------------------------------------------------- tiles


def steps(total: int, size: int, what: str) -> list[Span]:
    """[0, total) in spans of `size`, the last maybe shorter."""
    _limit(-(-total // size), what)
    return [(start, min(start + size, total)) for start in range(0, total, size)]


def shares(total: int, count: int, unit: int = 1) -> list[Span]:
    """[0, total) in `count` spans as even as multiples of `unit` can be, or in one for each unit if these are fewer."""
    units = -(-total // unit)
    count = min(count, units)
    return [(units * i // count * unit, min(units * (i + 1) // count * unit, total)) for i in range(count)]


def _limit(tasks: int, what: str) -> None:
    if tasks > MAX_TASKS:
        raise ValueError(f"{what} is too small: it makes more than {MAX_TASKS:,} tasks")


# --------------------------------------------------------------------------------------------------------------- build


def build(config: ModelConfig, knobs: Knobs) -> Graph:
    """The graph of one token.

    Raises:
        ValueError: the model does not allow these knobs; the message names the knob.
    """
    if knobs.tokens > config.max_position_embeddings:
        most = config.max_position_embeddings
        raise ValueError(f"tokens must be at most the model's max_position_embeddings = {most}, not {knobs.tokens}")
    # nothing here is garbage, and looking for some takes two thirds of the time
    collecting = gc.isenabled()
    gc.disable()
    try:
        builder = _Builder(config, knobs)
        builder.model()
        graph = builder.finish()
        for _ in graph:  # raises if a task could never start
            pass
    finally:
        if collecting:
            gc.enable()
    return graph


class _Builder:
    """Collects ops in an order in which they could run: an op may read what an earlier one wrote, nothing else."""

    def __init__(self, config: ModelConfig, knobs: Knobs):
        self.config, self.knobs = config, knobs
        self.tensors: dict[str, Tensor] = {}
        self.tasks = [Task(0, -1, "BEGIN_TASK_GRAPH", 0, (0, 0))]
        self.ops: list[Op] = []
        self.writers: dict[str, set[int]] = {}
        self.before: list[set[int]] = []
        self.layer: int | None = None

    # ------------------------------------------------------------------------------------------------- tensors and ops

    def tensor(self, name: str, kind: str, rows: int, cols: int = 1, count: int = 1) -> str:
        """A new tensor of this layer; returns its full name."""
        name = name if self.layer is None else f"layers.{self.layer}.{name}"
        if name in self.tensors:
            raise AssertionError(f"{name} is there already")
        self.tensors[name] = Tensor(name, kind, rows, cols, count)
        return name

    def part(self, name: str, rows: Span | None = None, cols: Span | None = None, at: int = 0, by: str = "") -> Range:
        """A range of a tensor, all rows and columns unless they are given."""
        tensor = self.tensors[name]
        return Range(name, rows or (0, tensor.rows), cols or (0, tensor.cols), at, by)

    def op(self, name: str, kind: str, type: str, rows: int, tiles: Iterable[dict], by_range: bool = False) -> None:
        """Adds an op; each tile is the `Task` fields that it has of its own."""
        index, first = len(self.ops), len(self.tasks)
        before: set[int] = set()
        written: set[str] = set()
        for number, tile in enumerate(tiles):
            self.tasks.append(Task(len(self.tasks), index, type, number, **tile))
            written.update(part.tensor for part in tile["writes"])
            for part in tile["reads"]:
                if self.tensors[part.tensor].kind == "activation" and part.tensor not in self.writers:
                    raise AssertionError(f"{name} reads {part.tensor}, which nothing has written")
                before |= self.writers.get(part.tensor, set())
        _limit(len(self.tasks), f"a tile size of {name}")
        for tensor in written:
            self.writers.setdefault(tensor, set()).add(index)
        self.before.append({index - 1} - {-1} if self.knobs.dependencies == "chain" else before)
        self.ops.append(Op(index, name, self.layer, kind, type, rows, tuple(range(first, len(self.tasks))), by_range))

    def single(self, name: str, type: str, rows: int, reads: Iterable[Range], writes: Iterable[Range]) -> None:
        """An op of one task."""
        self.op(name, "small", type, rows, [dict(rows=(0, rows), reads=tuple(reads), writes=tuple(writes))])

    def normalised(self, state: str, norm: str) -> list[Range]:
        """What to read for the normalised state: the state and the norm, or the output of a RMS_NORM op."""
        size = self.tensors[state].rows
        weight = self.tensor(f"{norm}.weight", "vector", size)
        reads = [self.part(state), self.part(weight)]
        if self.knobs.fold_norm:
            return reads
        out = self.tensor(f"{norm}.out", "activation", size)
        self.single("RMS_NORM", "rms_norm", size, reads, [self.part(out)])
        return [self.part(out)]

    def gemv(self, name: str, type: str, weights: list[str], outs: list[str], inputs: Iterable[Range], size: int, what):
        """An op over the rows of matrices stacked on one another, each with an output of its own."""
        inputs = tuple(inputs)
        starts = list(itertools.accumulate((self.tensors[weight].rows for weight in weights), initial=0))
        tiles = []
        for low, high in steps(starts[-1], size, what):
            reads, writes = list(inputs), []
            for start, weight, out in zip(starts, weights, outs, strict=False):
                inside = max(low - start, 0), min(high - start, self.tensors[weight].rows)
                if inside[0] < inside[1]:
                    reads.append(self.part(weight, inside))
                    writes.append(self.part(out, inside))
            tiles.append(dict(rows=(low, high), reads=tuple(reads), writes=tuple(writes)))
        self.op(name, "gemv", type, starts[-1], tiles)

    # ------------------------------------------------------------------------------------------------------- the model

    def model(self) -> None:
        c, k = self.config, self.knobs
        table = self.tensor("embed_tokens", "matrix", c.vocab_size, c.hidden_size)
        x = self.tensor("embedded", "activation", c.hidden_size)
        self.single("EMBEDDING", "embedding", c.hidden_size, [self.part(table, (0, 1), by="token")], [self.part(x)])
        for layer in range(c.num_hidden_layers):
            self.layer = layer
            x = self.attention(x)
            x = self.experts(x) if c.is_moe(layer) else self.dense(x)
        self.layer = None

        inputs = self.normalised(x, "norm")
        head = self.tensor("lm_head", "matrix", c.vocab_size, c.hidden_size)
        logits = self.tensor("logits", "activation", c.vocab_size)
        self.gemv("LM_HEAD", "gemv_bf16", [head], [logits], inputs, k.lm_head_rows, "lm_head_rows")
        # the sampling noise belongs to groups of tokens that lie in aligned blocks, which no task may split
        parts = shares(c.vocab_size, k.argmax_partials, NOISE_BLOCK)
        largest = self.tensor("argmax_partials", "activation", len(parts))
        tiles = [
            dict(
                rows=(i, i + 1), chunk=rows, reads=(self.part(logits, rows),), writes=(self.part(largest, (i, i + 1)),)
            )
            for i, rows in enumerate(parts)
        ]
        # a partial needs its share of the logits only, so it need not wait for the slowest of all LM-head tasks
        self.op("ARGMAX_PARTIAL", "small", "argmax_partial", len(parts), tiles, by_range=True)
        token = self.tensor("token", "activation", 1)
        self.single("ARGMAX_REDUCE", "argmax_reduce", 1, [self.part(largest)], [self.part(token)])

    def attention(self, x: str) -> str:
        """Attention and its residual; returns the state after it."""
        c, k = self.config, self.knobs
        heads, lora, rope, last = c.num_attention_heads, c.kv_lora_rank, c.qk_rope_head_dim, (k.tokens - 1, k.tokens)
        absorbed = k.mla == "absorbed"
        inputs = self.normalised(x, "input_layernorm")
        weights = [
            self.tensor("self_attn.q_proj", "matrix", heads * c.qk_head_dim, c.hidden_size),
            self.tensor("self_attn.kv_a_proj_with_mqa", "matrix", lora + rope, c.hidden_size),
        ]
        q, kva = outs = [
            self.tensor("q", "activation", heads * c.qk_head_dim),
            self.tensor("kva", "activation", lora + rope),
        ]
        if k.split_qkv:
            for name, weight, out in zip(("Q_PROJ", "KVA_PROJ"), weights, outs, strict=True):
                self.gemv(name, "gemv_bf16", [weight], [out], inputs, k.qkv_rows, "qkv_rows")
        else:
            self.gemv("QKV_PROJ", "gemv_bf16", weights, outs, inputs, k.qkv_rows, "qkv_rows")

        norm = self.tensor("self_attn.kv_a_layernorm.weight", "vector", lora)
        latent_reads = [self.part(kva), self.part(norm)]
        query_reads = [self.part(q)]
        if absorbed:
            cache = self.tensor("latent_cache", "cache", k.tokens, lora + rope)
            new_rows = [self.part(cache, last)]
        else:
            cache = self.tensor("kv_cache", "cache", k.tokens, heads * (c.qk_nope_head_dim + c.v_head_dim))
            rope_cache = self.tensor("rope_cache", "cache", k.tokens, rope)
            new_rows = [self.part(rope_cache, last)]
        if not k.fold_mla_prep:
            rotated = self.tensor("q_rotated", "activation", heads * rope)
            writes = [self.part(rotated), *new_rows]
            if not absorbed:
                latent = self.tensor("latent", "activation", lora)
                writes.append(self.part(latent))
            self.single("MLA_PREP", "mla_prep", lora + rope, [*query_reads, *latent_reads], writes)
            query_reads.append(self.part(rotated))
            if not absorbed:
                latent_reads = [self.part(latent)]

        if absorbed:
            # W_UK is kept transposed, so that the rows of a task are contiguous in it
            weight = self.tensor("self_attn.kv_b_proj.k_transposed", "matrix", heads * lora, c.qk_nope_head_dim)
            out = self.tensor("q_absorbed", "activation", heads * lora)
            self.gemv("ABSORB_Q", "gemv_bf16", [weight], [out], [self.part(q)], k.absorb_rows, "absorb_rows")
            query_reads.append(self.part(out))
        else:
            weight = self.tensor("self_attn.kv_b_proj", "matrix", self.tensors[cache].cols, lora)
            tiles = []
            for rows in steps(self.tensors[weight].rows, k.gemv_rows, "gemv_rows"):
                writes = [self.part(cache, last, rows)]
                if k.fold_mla_prep and not tiles:  # the first task appends the rotated key that all heads share
                    writes += new_rows
                reads = (*latent_reads, self.part(weight, rows))
                tiles.append(dict(rows=rows, reads=reads, writes=tuple(writes)))
            self.op("KV_B_PROJ", "gemv", "gemv_bf16", self.tensors[weight].rows, tiles)

        # a chunk leaves an unscaled output with its largest score and sum, which are not worth a tensor here
        width = lora if absorbed else c.v_head_dim
        chunks = steps(k.tokens, k.attn_rows, "attn_rows")
        partials = self.tensor("attn_partials", "activation", len(chunks), heads * width)
        head_spans = steps(heads, k.attn_heads, "attn_heads")
        _limit(len(chunks) * len(head_spans), "attn_rows")
        tiles = []
        for (first, end), (number, chunk) in itertools.product(head_spans, enumerate(chunks)):
            rows = first * width, end * width
            reads, writes = list(query_reads), [self.part(partials, (number, number + 1), rows)]
            if not absorbed:
                each = c.qk_nope_head_dim + c.v_head_dim
                reads += [self.part(cache, chunk, (first * each, end * each)), self.part(rope_cache, chunk)]
            else:
                # the current position is not in the cache yet unless an op before has put it there
                stop = min(chunk[1], last[0]) if k.fold_mla_prep else chunk[1]
                if chunk[0] < stop:
                    reads.append(self.part(cache, (chunk[0], stop)))
                if k.fold_mla_prep and chunk[1] == k.tokens:
                    reads += latent_reads
                    writes += new_rows if first == 0 else []
            tiles.append(dict(rows=rows, chunk=chunk, reads=tuple(reads), writes=tuple(writes)))
        sizes = (lora + rope, lora) if absorbed else (c.qk_head_dim, c.v_head_dim)
        self.op("ATTN_CHUNK", "attention", "attn_chunk_{}_{}".format(*sizes), heads * width, tiles)

        attended = [self.part(partials)]
        if not k.fold_merge:
            merged = self.tensor("attn_merged", "activation", heads * width)
            tiles = []
            for rows in steps(heads * width, width, "attn_heads"):
                tiles.append(
                    dict(rows=rows, reads=(self.part(partials, None, rows),), writes=(self.part(merged, rows),))
                )
            self.op("ATTN_MERGE", "small", "attn_merge", heads * width, tiles)
            attended = [self.part(merged)]
        if absorbed:
            weight = self.tensor("self_attn.kv_b_proj.v", "matrix", heads * c.v_head_dim, lora)
            out = self.tensor("attn_out", "activation", heads * c.v_head_dim)
            self.gemv("ABSORB_OUT", "gemv_bf16", [weight], [out], attended, k.gemv_rows, "gemv_rows")
            attended = [self.part(out)]
        weight = self.tensor("self_attn.o_proj", "matrix", c.hidden_size, heads * c.v_head_dim)
        out = self.tensor("attn_residual", "activation", c.hidden_size)
        reads = [*attended, self.part(x)]
        self.gemv("O_PROJ_RESIDUAL", "gemv_bf16_res", [weight], [out], reads, k.gemv_rows, "gemv_rows")
        return out

    def gate_up(self, name: str, prefix: str, width: int, inputs: Iterable[Range], size: int, what: str) -> str:
        """An op silu(gate) * up over the same rows of both matrices; returns its output."""
        inputs = tuple(inputs)
        weights = [
            self.tensor(f"{prefix}.{half}_proj", "matrix", width, self.config.hidden_size) for half in ("gate", "up")
        ]
        out = self.tensor(f"{prefix}.hidden", "activation", width)
        tiles = []
        for rows in steps(width, size, what):
            reads = (*inputs, *(self.part(weight, rows) for weight in weights))
            tiles.append(dict(rows=rows, reads=reads, writes=(self.part(out, rows),)))
        self.op(name, "gemv", "gemv_bf16_silu", width, tiles)
        return out

    def dense(self, x: str) -> str:
        """The MLP of a dense layer; returns the state after it."""
        c, k = self.config, self.knobs
        inputs = self.normalised(x, "post_attention_layernorm")
        hidden = self.gate_up("GATE_UP_SILU", "mlp", c.intermediate_size, inputs, k.dense_rows, "dense_rows")
        weight = self.tensor("mlp.down_proj", "matrix", c.hidden_size, c.intermediate_size)
        splits = shares(c.intermediate_size, k.splits, COPY_ITEMS)
        partials = self.tensor("mlp.partials", "activation", len(splits), c.hidden_size)
        row_spans = steps(c.hidden_size, k.gemv_rows, "gemv_rows")
        _limit(len(splits) * len(row_spans), "gemv_rows")
        tiles = []
        for rows, (number, chunk) in itertools.product(row_spans, enumerate(splits)):
            reads = self.part(hidden, chunk), self.part(weight, rows, chunk)
            writes = (self.part(partials, (number, number + 1), rows),)
            tiles.append(dict(rows=rows, chunk=chunk, reads=reads, writes=writes))
        self.op("DOWN_SPLITK", "gemv", "gemv_splitk", c.hidden_size, tiles)
        out = self.tensor("mlp_residual", "activation", c.hidden_size)
        reads = [self.part(partials), self.part(x)]
        self.single("REDUCE_RESIDUAL", "splitk_reduce_mi300", c.hidden_size, reads, [self.part(out)])
        return out

    def experts(self, x: str) -> str:
        """Router, routed and shared experts; returns the state after them."""
        c, k = self.config, self.knobs
        inputs = self.normalised(x, "post_attention_layernorm")
        gate = self.tensor("mlp.gate", "matrix", c.n_routed_experts, c.hidden_size)
        routing = self.tensor("mlp.routing", "activation", c.num_experts_per_tok, 2)
        if k.router_rows >= c.n_routed_experts:
            reads = [*inputs, self.part(gate)]
            self.single("MOE_GATE_TOPK", "moe_gate_topk", c.num_experts_per_tok, reads, [self.part(routing)])
        else:
            logits = self.tensor("mlp.router_logits", "activation", c.n_routed_experts)
            self.gemv("MOE_GATE", "gemv_bf16", [gate], [logits], inputs, k.router_rows, "router_rows")
            reads = [self.part(logits)]
            self.single("MOE_TOPK", "moe_topk", c.num_experts_per_tok, reads, [self.part(routing)])

        outs = []
        if k.split_shared:
            prefix = "mlp.shared_experts"
            hidden = self.gate_up("EXPERT_W13_SHARED", prefix, c.shared_width, inputs, k.shared_rows, "shared_rows")
            weight = self.tensor(f"{prefix}.down_proj", "matrix", c.hidden_size, c.shared_width)
            out = self.tensor(f"{prefix}.out", "activation", c.hidden_size)
            self.gemv("EXPERT_W2_SHARED", "gemv_bf16", [weight], [out], [self.part(hidden)], k.gemv_rows, "gemv_rows")
            outs.append(out)
        out = self.routed(inputs, routing)
        outs += out
        end = self.tensor("mlp_residual", "activation", c.hidden_size)
        tiles = []
        for rows in steps(c.hidden_size, k.combine_rows, "combine_rows"):
            results = [self.part(out, rows, at=at) for out in outs for at in range(self.tensors[out].count)]
            reads = (*results, self.part(routing), self.part(x, rows))
            tiles.append(dict(rows=rows, reads=reads, writes=(self.part(end, rows),)))
        self.op("MOE_COMBINE_RESIDUAL", "small", "moe_combine", c.hidden_size, tiles)
        return end

    def routed(self, inputs: list[Range], routing: str) -> list[str]:
        """The two ops of the routed experts, with the shared ones as one more unless they are split off."""
        c, k = self.config, self.knobs
        by = "expert" if k.experts == "superset" else "slot"
        count = c.n_routed_experts if by == "expert" else c.num_experts_per_tok
        groups = [("mlp.experts", c.moe_intermediate_size, c.n_routed_experts, count)]
        if not k.split_shared:
            groups.append(("mlp.shared_experts", c.shared_width, 1, 1))

        def own(group, at):
            """Fields of a task, and of its ranges of weights, that say whose it is."""
            routed = group == "mlp.experts"
            return ({by: at}, dict(at=at, by=by)) if routed else ({}, {})

        w13, w2, outs = [], [], []
        for group, width, matrices, present in groups:
            up = [
                self.tensor(f"{group}.{half}_proj", "matrix", width, c.hidden_size, matrices) for half in ("gate", "up")
            ]
            down = self.tensor(f"{group}.down_proj", "matrix", c.hidden_size, width, matrices)
            hidden = self.tensor(f"{group}.hidden", "activation", width, 1, present)
            out = self.tensor(f"{group}.out", "activation", c.hidden_size, 1, present)
            outs.append(out)
            for at in range(present):
                fields, whose = own(group, at)
                for rows in shares(width, k.expert_w13_tiles):
                    reads = (*inputs, self.part(routing), *(self.part(weight, rows, **whose) for weight in up))
                    w13.append(dict(rows=rows, reads=reads, writes=(self.part(hidden, rows, at=at),), **fields))
                for rows in shares(c.hidden_size, k.expert_w2_tiles):
                    reads = self.part(hidden, at=at), self.part(routing), self.part(down, rows, **whose)
                    w2.append(dict(rows=rows, reads=reads, writes=(self.part(out, rows, at=at),), **fields))
        width = max(group[1] for group in groups)
        self.op("EXPERT_W13_SILU", "gemv", "moe_expert_w13_silu", width, w13)
        self.op("EXPERT_W2", "gemv", "moe_expert_w2", c.hidden_size, w2)
        return outs

    # ---------------------------------------------------------------------------------------------------------- events

    def needed(self) -> list[set[int]]:
        """For each op, the ops that it has to wait for itself: not those that another of them has waited for."""
        above: list[int] = []  # bit sets of everything before an op
        needed = []
        for before in self.before:
            seen = 0
            for op in before:
                seen |= above[op]
            needed.append({op for op in before if not seen >> op & 1})
            for op in before:
                seen |= 1 << op
            above.append(seen)
        return needed

    def finish(self) -> Graph:
        """Turns what ops wait for into counters.

        Ops that the same ops wait for share a counter, because nobody could use the difference. Where an op waits by
        range, the counter of its only producer falls into one for each group of tasks with ranges in common.
        """
        needed = self.needed()
        consumers: list[set[int]] = [set() for _ in self.ops]
        for op, before in enumerate(needed):
            for producer in before:
                consumers[producer].add(op)
        groups: dict[frozenset[int], list[Op]] = {}
        for op in self.ops:
            groups.setdefault(frozenset(consumers[op.index]), []).append(op)
        first = [task for op in self.ops if not needed[op.index] for task in op.tasks]
        terminate = len(self.tasks)
        self.tasks.append(Task(terminate, -1, "TERMINATE", 0, (0, 0)))

        events: list[Event] = []

        def event(name: str, producers: Iterable[int], waiting: Iterable[int], **host: bool) -> None:
            producers, waiting = tuple(producers), tuple(waiting)
            threshold = len(producers) + host.get("from_host", False)
            events.append(Event(len(events), name, producers, waiting, threshold, **host))

        event("LAUNCH", (), (0,), from_host=True)
        event("BEGIN", (0,), first)
        for waiting, ops in groups.items():
            name = " + ".join(op.name if op.layer is None else f"{op.layer}.{op.name}" for op in ops)
            readers = [self.ops[op] for op in sorted(waiting)]
            if len(ops) == len(readers) == 1 and readers[0].by_range and needed[readers[0].index] == {ops[0].index}:
                for number, (producers, tasks) in enumerate(self.in_common(ops[0], readers[0])):
                    event(f"{name}[{number}]", producers, tasks)
                continue
            tasks = [task for op in readers for task in op.tasks] or [terminate]
            event(name, (task for op in ops for task in op.tasks), tasks)
        event("TERMINATED", (terminate,), (), to_host=True)

        waits: list[list[int]] = [[] for _ in self.tasks]
        triggers: list[list[int]] = [[] for _ in self.tasks]
        for each in events:
            for task in each.consumers:
                waits[task].append(each.index)
            for task in each.producers:
                triggers[task].append(each.index)
        return Graph(
            self.config,
            self.knobs,
            self.tensors,
            tuple(self.ops),
            tuple(self.tasks),
            tuple(events),
            tuple(map(tuple, waits)),
            tuple(map(tuple, triggers)),
            tuple(tuple(sorted(before)) for before in needed),
        )

    def in_common(self, producer: Op, consumer: Op) -> Iterator[tuple[list[int], list[int]]]:
        """Tasks of both ops in groups, such that no task reads rows that another group writes.

        Both ops go through the rows of one tensor in order, so a group ends where both have a boundary.
        """
        written = {self.tasks[task].writes[0].rows[1]: task for task in producer.tasks}
        read = {self.tasks[task].reads[0].rows[1]: task for task in consumer.tasks}
        first, second = producer.tasks[0], consumer.tasks[0]
        for end in sorted(written.keys() & read.keys()):
            yield list(range(first, written[end] + 1)), list(range(second, read[end] + 1))
            first, second = written[end] + 1, read[end] + 1


# ---------------------------------------------------------------------------------------------------------------- CLI


def main(arguments: list[str] | None = None) -> int:
    """Prints the tasks of a token by type, as CSV."""
    parser = argparse.ArgumentParser(prog="python -m megakernel.graph", description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="mi300x", help="knobs to start from (%(default)s)")
    models = {"v2-lite": V2_LITE, "tiny": TINY}
    parser.add_argument("--model", choices=models, default="v2-lite", help="config of the model (%(default)s)")
    for field in dataclasses.fields(Knobs):
        flag = f"--{field.name.replace('_', '-')}"
        if field.type is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None)
        elif field.type is int:
            parser.add_argument(flag, type=int, metavar="N")
        else:
            parser.add_argument(flag, choices=CHOICES[field.name])
    options = vars(parser.parse_args(arguments))
    preset, model = PRESETS[options.pop("preset")], models[options.pop("model")]
    changes = {name: value for name, value in options.items() if value is not None}
    try:
        graph = build(model, dataclasses.replace(preset, **changes))
    except ValueError as error:
        parser.error(str(error))
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(graph.table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
