"""Runs a table of tasks in Python: the executable specification of the device code.

A launch decodes some tokens. Its tasks are the records of `megakernel.abi` and nothing else: what they compute and what
they wait for is read from the table; the graph behind it only lends names to messages. Arithmetic rounds where
`megakernel.reference` rounds, except that attention stays in fp32 from the scores to the merged output, and logits are
not rounded. Sums run in an order of their own, so device code agrees within rounding, not bit for bit.

Counters are never reset in a launch: for token i (from 0 on) of it, a task may start when each event that it waits for
was counted up to i + 1 times its threshold. The launch event is counted up before the launch, and by `terminate` for
each further token.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace

import numpy as np
import torch
from torch.nn.functional import silu

from fmms import controls, noise
from fmms.reference import descend, ieee_matmul
from megakernel import abi
from megakernel.config import KV_NORM_EPS
from megakernel.launch import Deadlock, Launch, Result, Worker
from megakernel.memory import Memory
from megakernel.reference import rms_norm, rotate
from megakernel.table import Table

ORDERS = "list", "random"

PLAIN, NORM, MERGE = range(len(abi.ENUMS["Input"]))
BF16, FP32, LOGITS, KV_CACHE = range(len(abi.ENUMS["Out"]))
ALL, EXPERT, SLOT = range(len(abi.ENUMS["By"]))


def run(table: Table, memory: Memory, **launch) -> Result:
    """One launch of a table; arguments, results and errors are those of `Machine.run`."""
    return Machine(table, memory).run(**launch)


class Machine:
    """A table and the memory that its tasks work on.

    Raises:
        ValueError: the memory was made for another graph.
    """

    def __init__(self, table: Table, memory: Memory):
        memory.check(table)
        self.table, self.memory = table, memory
        self.config = table.graph.config
        self.device = memory.work.device
        self.tasks = _records("Task", table.tasks)
        args = _records("Args", table.args)
        waits, triggers = table.waits.tolist(), table.triggers.tolist()
        for task in self.tasks:
            # control tasks have no arguments, and the number of their record means nothing
            task.args = args[task.args] if abi.CODES[task.code] not in ("nothing", "terminate") else None
            task.waits = waits[task.wait_first : task.wait_first + task.wait_count]
            task.triggers = triggers[task.trigger_first : task.trigger_first + task.trigger_count]
        self.codes: list[Callable] = [getattr(self, f"_{name}") for name in abi.CODES]
        # each arena as the types that are read from it; arenas are aligned for all of them
        self.weights, self.cache = memory.weights.view(torch.bfloat16), memory.cache.view(torch.bfloat16)
        self.halves, self.floats = memory.work.view(torch.bfloat16), memory.work.view(torch.float32)
        self.ints, self.shorts = memory.work.view(torch.int32), memory.work.view(torch.int16)
        self.launch: Launch | None = None
        self.tokens = self.trace = None

    @torch.no_grad()
    def run(
        self,
        *,
        iterations: int,
        position: int = 0,
        forced: Sequence[int] | torch.Tensor | None = None,
        temperature: float = 0.0,
        seed: int = 0,
        noise_position: int = 0,
        order: str = "list",
        order_seed: int = 0,
        trace: bool = False,
    ) -> Result:
        """Decodes tokens; the cache then holds `position + iterations` positions.

        Args:
            iterations, position, forced, temperature, seed, noise_position: as for `Launch.of`.
            order: "list": workers take turns at their lists, or tasks leave the queue as they came; "random": whatever
                could run next, drawn with `order_seed`. The result is the same.
            trace: whether to return the logits.

        Raises:
            ValueError: an argument has the wrong type or value; the message names it.
            Deadlock: no task can run, and not all have.
        """
        if order not in ORDERS:
            raise ValueError(f"order: expected one of {', '.join(ORDERS)}, got {order!r}")
        self.launch = Launch.of(
            self.config,
            self.memory.capacity,
            iterations=iterations,
            position=position,
            forced=forced,
            temperature=temperature,
            seed=seed,
            noise_position=noise_position,
            has_token=self.memory.has_token(),
        )
        self.forced = self.launch.forced.tolist()
        self.tokens = torch.full((iterations,), -1, dtype=torch.int32)
        shape = iterations, self.config.vocab_size
        self.trace = torch.full(shape, torch.nan, device=self.device) if trace else None
        work = (_Queue if self.table.dynamic else _Lists)(self, iterations)
        draw = random.Random(order_seed) if order == "random" else None
        work.count(self.table.launch_event)
        while work.ready:
            if draw is not None:
                work.ready.rotate(draw.randrange(len(work.ready)))
            entry = work.ready.popleft()
            index, step = work.start(entry)
            task = self.tasks[index]
            self.codes[task.code](task, task.args, step)
            for event in task.triggers:
                work.count(event)
            if abi.CODES[task.code] == "terminate" and step + 1 < iterations:
                work.count(self.table.launch_event)
            work.finish(entry)
        work.check()
        return Result(self.tokens, self.trace)

    # -------------------------------------------------------------------------------------------- what records point to

    def half(self, start: int, *shape: int) -> torch.Tensor:
        """bf16 activations, `start` bytes into `work`; their tags are nobody's business here."""
        return self.halves[start // 2 + 1 : start // 2 + 2 * _items(shape) : 2].view(shape)

    def single(self, start: int, *shape: int) -> torch.Tensor:
        """fp32 activations, `start` bytes into `work`."""
        return self.floats[start // 4 : start // 4 + _items(shape)].view(shape)

    def tagged_single(self, start: int, count: int) -> torch.Tensor:
        """Tagged fp32 activations, `start` bytes into `work`."""
        return self.floats[start // 4 + 1 : start // 4 + 2 * count : 2]

    def weight(self, start: int, *shape: int) -> torch.Tensor:
        """bf16 weights, `start` bytes into `weights`."""
        return self.weights[start // 2 : start // 2 + _items(shape)].view(shape)

    def rows(self, start: int, pitch: int, first: int, end: int) -> torch.Tensor:
        """bf16 [end - first, pitch]: positions of a cache that begins `start` bytes into `cache`."""
        return self.cache[start // 2 + first * pitch : start // 2 + end * pitch].view(end - first, pitch)

    def eps(self, args) -> float:
        return KV_NORM_EPS if args.kv_eps else self.config.rms_norm_eps

    def rotation(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines at a position, fp32 [1, rope / 2] each."""
        return self.memory.rotary[position, None, :, 0], self.memory.rotary[position, None, :, 1]

    def expert(self, task, args) -> int:
        """Whose matrix a task multiplies: 0 if there is one only, -1 if that expert was not chosen."""
        if task.by == ALL:
            return 0
        chosen = self.routing(args)[0].tolist()
        if task.by == SLOT:
            return chosen[task.at]
        return task.at if task.at in chosen else -1

    def input(self, args, at: int = 0) -> torch.Tensor:
        """The vector that a matrix is multiplied with, bf16; that of all heads if they differ."""
        if args.input_kind == MERGE:
            return self.merged(args)
        size = args.head_stride * self.config.num_attention_heads if args.head_rows else args.cols
        x = self.half(args.input + args.input_bytes * at, size)
        return rms_norm(x, self.weight(args.norm, size), self.eps(args)) if args.input_kind == NORM else x

    def merged(self, args, heads: slice = slice(None)) -> torch.Tensor:
        """Attention outputs of some heads, bf16 [heads * head_stride], from those of chunks of positions."""
        width = args.head_stride
        parts = self.single(args.input, args.chunks, self.config.num_attention_heads, width + abi.PARTIAL_STATS)
        parts = parts[:, heads]
        largest, total = parts[..., width], parts[..., width + 1]
        scale = torch.exp(largest - largest.amax(0))
        out = (scale[..., None] * parts[..., :width]).sum(0) / (scale * total).sum(0)[:, None]
        return out.to(torch.bfloat16).flatten()

    def product(self, task, args, weight: int, x: torch.Tensor) -> torch.Tensor:
        """fp32 products of the rows of a task with the input, or with that of each row's head."""
        first, end = task.rows
        matrix = self.weight(weight + 2 * first * args.cols, end - first, args.cols)
        if not args.head_rows:
            return ieee_matmul(matrix, x)
        parts = []
        for head in range(first // args.head_rows, -(-end // args.head_rows)):
            low, high = max(first, head * args.head_rows), min(end, (head + 1) * args.head_rows)
            start = head * args.head_stride
            parts.append(ieee_matmul(matrix[low - first : high - first], x[start : start + args.cols]))
        return torch.cat(parts)

    def append_rotated_key(self, args, position: int) -> None:
        """The key that all heads share goes to its own cache."""
        c = self.config
        key = self.half(args.kva + abi.TAGGED_BF16 * c.kv_lora_rank, 1, c.qk_rope_head_dim)
        rows = self.rows(args.rope_cache, c.qk_rope_head_dim, position, position + 1)
        rows.copy_(rotate(key, *self.rotation(position)))

    def latent_row(self, args, position: int) -> torch.Tensor:
        """bf16 [1, lora + rope]: the row of the latent cache of the position that is decoded."""
        c = self.config
        kva = self.half(args.kva, 1, c.kv_lora_rank + c.qk_rope_head_dim)
        latent, key = kva.split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        normed = rms_norm(latent, self.weight(args.norm, c.kv_lora_rank), KV_NORM_EPS)
        return torch.cat((normed, rotate(key, *self.rotation(position))), -1)

    def rotated_queries(self, args, position: int) -> torch.Tensor:
        """bf16 [heads, rope]."""
        c = self.config
        queries = self.half(args.query, c.num_attention_heads, c.qk_head_dim)
        return rotate(queries[:, c.qk_nope_head_dim :], *self.rotation(position))

    # ------------------------------------------------------------------------------------------------ one for each code

    def _nothing(self, task, args, step: int) -> None:
        pass

    _terminate = _nothing  # what it counts up is the business of `run`

    def _embedding(self, task, args, step: int) -> None:
        token = self.forced[step]
        if token < 0:
            token = self.ints[args.input // 4].item()
        self.half(args.out, args.cols).copy_(self.weight(args.weight + 2 * token * args.cols, args.cols))

    def _rms_norm(self, task, args, step: int) -> None:
        self.half(args.out, args.cols).copy_(self.input(args))

    def _gemv(self, task, args, step: int) -> None:
        expert = self.expert(task, args)
        if expert < 0:
            return
        first, end = task.rows
        x = self.input(args, task.at)
        out = self.product(task, args, args.weight + expert * args.matrix_bytes, x)
        if args.out_kind == BF16:
            self.half(args.out + args.out_bytes * task.at + abi.TAGGED_BF16 * first, end - first).copy_(out)
        elif args.out_kind == FP32:
            self.tagged_single(args.out + abi.TAGGED_FP32 * first, end - first).copy_(out)
        elif args.out_kind == LOGITS:
            self.single(args.out + 4 * first, end - first).copy_(out)
            if self.trace is not None:
                self.trace[step, first:end] = out
        else:
            position = self.launch.position + step
            self.rows(args.out, args.cache_pitch, position, position + 1)[0, first:end] = out
            if task.flags & abi.APPENDS:
                self.append_rotated_key(args, position)

    def _gemv_res(self, task, args, step: int) -> None:
        first, end = task.rows
        out = self.product(task, args, args.weight, self.input(args)).to(torch.bfloat16)
        residual = self.half(args.residual + abi.TAGGED_BF16 * first, end - first)
        self.half(args.out + abi.TAGGED_BF16 * first, end - first).copy_(residual + out)

    def _gemv_silu(self, task, args, step: int) -> None:
        expert = self.expert(task, args)
        if expert < 0:
            return
        first, end = task.rows
        x = self.input(args, task.at)
        gate, up = (
            self.product(task, args, weight + expert * args.matrix_bytes, x).to(torch.bfloat16)
            for weight in (args.weight, args.weight2)
        )
        self.half(args.out + args.out_bytes * task.at + abi.TAGGED_BF16 * first, end - first).copy_(silu(gate) * up)

    def _gemv_splitk(self, task, args, step: int) -> None:
        (first, end), (low, high) = task.rows, task.chunk
        matrix = self.weight(args.weight + 2 * first * args.cols, end - first, args.cols)[:, low:high]
        out = ieee_matmul(matrix, self.half(args.input + abi.TAGGED_BF16 * low, high - low))
        self.single(args.out + args.out_bytes * task.at + 4 * first, end - first).copy_(out)

    def _splitk_reduce(self, task, args, step: int) -> None:
        parts = self.single(args.input, args.chunks, args.cols)
        total = parts[0]
        for part in parts[1:]:  # one after the other, so that the sum is defined to the bit
            total = total + part
        self.half(args.out, args.cols).copy_(self.half(args.residual, args.cols) + total.to(torch.bfloat16))

    def _mla_prep(self, task, args, step: int) -> None:
        c, position = self.config, self.launch.position + step
        if args.rotated >= 0:
            queries = self.half(args.rotated, c.num_attention_heads, c.qk_rope_head_dim)
            queries.copy_(self.rotated_queries(args, position))
        if args.absorbed >= 0:
            row = self.latent_row(args, position)
            self.rows(args.cache, args.cache_pitch, position, position + 1).copy_(row)
            return
        kva, norm = self.half(args.kva, c.kv_lora_rank), self.weight(args.norm, c.kv_lora_rank)
        self.half(args.latent, c.kv_lora_rank).copy_(rms_norm(kva, norm, KV_NORM_EPS))
        self.append_rotated_key(args, position)

    def _attn_chunk(self, task, args, step: int) -> None:
        c, position, width = self.config, self.launch.position + step, args.head_stride
        first, end = task.chunk[0], min(task.chunk[1], position + 1)
        heads = slice(task.rows[0] // width, task.rows[1] // width)
        start = args.out + args.out_bytes * task.at
        out = self.single(start, c.num_attention_heads, width + abi.PARTIAL_STATS)[heads]
        if first >= end:
            out[:, :width] = 0
            out[:, width], out[:, width + 1] = -torch.inf, 0
            return
        if args.rotated >= 0:
            rotated = self.half(args.rotated, c.num_attention_heads, c.qk_rope_head_dim)[heads]
        else:
            rotated = self.rotated_queries(args, position)[heads]
        if args.absorbed >= 0:
            # with rotated queries in memory, the new row is in the cache
            own_row = args.rotated < 0 and end == position + 1
            cached = self.rows(args.cache, args.cache_pitch, first, end - own_row)
            if own_row:
                row = self.latent_row(args, position)
                cached = torch.cat((cached, row))
                if task.flags & abi.APPENDS:
                    self.rows(args.cache, args.cache_pitch, position, position + 1).copy_(row)
            latent, shared = cached.split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
            query = self.half(args.absorbed, c.num_attention_heads, c.kv_lora_rank)[heads]
            scores = ieee_matmul(query, latent.T)
            values = latent
        else:
            cached = self.rows(args.cache, args.cache_pitch, first, end).unflatten(1, (c.num_attention_heads, -1))
            keys, values = cached[:, heads].transpose(0, 1).split([c.qk_nope_head_dim, c.v_head_dim], -1)
            query = self.half(args.query, c.num_attention_heads, c.qk_head_dim)[heads, : c.qk_nope_head_dim]
            scores = ieee_matmul(keys, query[..., None])[..., 0]
            shared = self.rows(args.rope_cache, c.qk_rope_head_dim, first, end)
        scores = (scores + ieee_matmul(rotated, shared.T)) * c.softmax_scale
        largest = scores.amax(1)
        weights = torch.exp(scores - largest[:, None])
        if args.absorbed >= 0:
            out[:, :width] = ieee_matmul(weights, values)
        else:
            out[:, :width] = ieee_matmul(weights[:, None], values)[:, 0]
        out[:, width], out[:, width + 1] = largest, weights.sum(1)

    def _attn_merge(self, task, args, step: int) -> None:
        first, end = task.rows
        heads = slice(first // args.head_stride, end // args.head_stride)
        self.half(args.out + abi.TAGGED_BF16 * first, end - first).copy_(self.merged(args, heads))

    def _moe_gate_topk(self, task, args, step: int) -> None:
        experts = self.config.n_routed_experts
        logits = ieee_matmul(self.weight(args.weight, experts, args.cols), self.input(args))
        self.router_logits(args).copy_(logits)
        self.choose(args)

    def _moe_topk(self, task, args, step: int) -> None:
        self.choose(args)

    def routing(self, args) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of a layer's routing, int16 [k], most likely first, and what each is multiplied by, fp32 [k]."""
        start, k = args.routing // 4, self.config.num_experts_per_tok
        return self.shorts[2 * start + 1 : 2 * (start + 2 * k) : 4], self.floats[start + 1 : start + 2 * k : 2]

    def router_logits(self, args) -> torch.Tensor:
        """fp32 [n_routed_experts], behind the records of a layer's routing."""
        records = self.config.num_experts_per_tok * abi.dtype("Routing").itemsize
        return self.tagged_single(args.routing + records, self.config.n_routed_experts)

    def choose(self, args) -> None:
        """Writes the records of a layer's routing, which follow from its router's logits."""
        c = self.config
        k = c.num_experts_per_tok
        # a stable sort, so that the lowest number comes first on a tie
        likely, order = self.router_logits(args).softmax(0).sort(descending=True, stable=True)
        chosen, factors = self.routing(args)
        chosen.copy_(order[:k])
        factors.copy_(likely[:k] * c.routed_scaling_factor)

    def _moe_combine(self, task, args, step: int) -> None:
        chosen, factors = self.routing(args)
        first, end = task.rows
        own = slice(first, end)
        routed = torch.zeros(end - first, dtype=torch.bfloat16, device=self.device)
        for expert, slot in sorted(zip(chosen.tolist(), range(len(chosen)), strict=True)):
            part = self.half(args.input + args.input_bytes * (slot if args.slots else expert), args.cols)[own]
            routed = routed + (part.float() * factors[slot]).to(torch.bfloat16)
        both = routed + self.half(args.shared, args.cols)[own]
        self.half(args.out, args.cols)[own] = self.half(args.residual, args.cols)[own] + both

    def _argmax_partial(self, task, args, step: int) -> None:
        first, end = task.chunk
        logits = self.single(args.input + 4 * first, end - first).double()
        largest = logits.max()  # NaN if there is one
        partial = np.zeros(1, abi.dtype("Partial"))
        partial["key"], partial["argmax"], partial["drawn"] = -np.inf, first, first
        if largest.isnan() or largest == torch.inf:
            partial["largest"] = np.nan
        else:
            best = first + torch.nonzero(logits == largest)[0].item()
            partial["largest"], partial["argmax"], partial["drawn"] = largest.item(), best, best
            if self.launch.temperature > 0 and largest > -torch.inf:
                partial["key"], partial["drawn"] = self.drawn(logits, largest, first, step)
        size = partial.dtype.itemsize
        at = args.out + size * task.at
        self.memory.work[at : at + size] = torch.from_numpy(partial.view(np.uint8)).to(self.device)

    def drawn(self, logits: torch.Tensor, largest: torch.Tensor, first: int, step: int) -> tuple[float, int]:
        """The key of the best group of a share of the vocabulary, relative to its largest logit, and the token drawn.

        Args:
            logits: fp64 [n], of tokens from `first` on, which is a multiple of 128.
            largest: fp64 [], finite, no logit is larger.
        """
        members = noise.group_token_ids(len(logits), self.device)
        padded = torch.full((members.numel(),), -torch.inf, dtype=torch.float64, device=self.device)
        padded[: len(logits)] = (logits - largest) / self.divisor
        scaled = padded[members]
        top = scaled.amax(1, keepdim=True)
        weights = torch.exp(scaled - top.nan_to_num(neginf=0.0))
        units = torch.arange(len(members), device=self.device) + first // noise.GROUP_SIZE
        seed, position = (
            torch.tensor([number], device=self.device)
            for number in (self.launch.seed, _int64(self.launch.noise_position + step))
        )
        sample = torch.zeros(1, dtype=torch.int64, device=self.device)
        words = [word.flatten() for word in noise.words(seed, position, units, sample, noise.PURPOSE_GROUP)]
        keys = top[:, 0] + torch.log(weights.sum(1)) + noise.gumbel(words[0], words[1])
        group = torch.nonzero(keys == keys.max())[0].item()
        coarse, fine = noise.uniform_parts(words[2][group], words[3][group])
        return keys[group].item(), first + members[group, descend(weights[group], coarse, fine)].item()

    @property
    def divisor(self) -> float:
        """What logits are divided by."""
        return min(max(self.launch.temperature, controls.MIN_SCALE), controls.MAX_SCALE)

    def _argmax_reduce(self, task, args, step: int) -> None:
        record = abi.dtype("Partial")
        found = self.memory.work[args.input : args.input + args.parts * record.itemsize]
        partials = found.cpu().numpy().view(record)
        largest = partials["largest"].astype(np.float64)
        token, top = -1, largest.max()  # NaN if there is one
        if np.isfinite(top):
            if self.launch.temperature > 0:
                keys = partials["key"] + (largest - top) / self.divisor
                token = int(partials["drawn"][keys.argmax()])
            else:
                token = int(partials["argmax"][largest.argmax()])
        self.tokens[step] = token
        # the next token is looked up whatever happened; the caller learns of it from `tokens`
        self.ints[args.out // 4] = max(token, 0)


# --------------------------------------------------------------------------------------------------- who runs what next


class _Lists:
    """Workers with a list of tasks each, which they run once for each token. An entry of `ready` is a worker."""

    def __init__(self, machine: Machine, iterations: int):
        table = machine.table
        self.machine, self.iterations = machine, iterations
        self.thresholds = table.thresholds.tolist()
        self.value = [0] * len(self.thresholds)
        first, lists = table.list_first.tolist(), table.lists.tolist()
        self.lists = [lists[first[worker] : first[worker + 1]] for worker in range(table.workers)]
        self.done = [0] * table.workers
        """How many tasks each has run."""
        self.blocked: dict[int, list[int]] = collections.defaultdict(list)
        """Workers by the event that they wait for."""
        self.ready: collections.deque[int] = collections.deque()
        for worker in range(table.workers):
            self.look(worker)

    def next(self, worker: int) -> tuple[int, int] | None:
        """The task that a worker is at, and for which token; None at the end."""
        tasks = self.lists[worker]
        if self.done[worker] == len(tasks) * self.iterations:
            return None
        step, place = divmod(self.done[worker], len(tasks))
        return tasks[place], step

    def missing(self, task: int, step: int) -> int:
        """An event that a task waits for, -1 if all have fired."""
        for event in self.machine.tasks[task].waits:
            if self.value[event] < self.thresholds[event] * (step + 1):
                return event
        return -1

    def look(self, worker: int) -> None:
        """A worker is at a new task, or an event that it waited for was counted up."""
        at = self.next(worker)
        if at is None:
            return
        event = self.missing(*at)
        if event < 0:
            self.ready.append(worker)
        else:
            self.blocked[event].append(worker)

    def count(self, event: int) -> None:
        self.value[event] += 1
        if self.value[event] % self.thresholds[event] == 0:  # nobody waits for anything in between
            for worker in self.blocked.pop(event, ()):
                self.look(worker)

    def start(self, worker: int) -> tuple[int, int]:
        return self.next(worker)

    def finish(self, worker: int) -> None:
        self.done[worker] += 1
        self.look(worker)

    def check(self) -> None:
        """Raises Deadlock unless all is done."""
        states = []
        for worker in range(len(self.lists)):
            at = self.next(worker)
            if at is None:
                states.append(Worker("done", self.iterations - 1))
                continue
            event = self.missing(*at)
            threshold = self.thresholds[event] * (at[1] + 1)
            states.append(Worker("waiting", at[1], at[0], event, self.value[event], threshold))
        if any(state.state == "waiting" for state in states):
            raise Deadlock(self.machine.table.graph, states)


class _Queue:
    """A queue of ready tasks. An entry of `ready` is a task and for which token it runs."""

    def __init__(self, machine: Machine, iterations: int):
        table = machine.table
        self.machine, self.iterations = machine, iterations
        self.thresholds = table.thresholds.tolist()
        self.value = [0] * len(self.thresholds)
        first, consumers = table.consumer_first.tolist(), table.consumers.tolist()
        self.consumers = [consumers[first[event] : first[event + 1]] for event in range(len(self.value))]
        self.arrived = [0] * len(machine.tasks)
        """How many events that each task waits for have fired."""
        self.done = [0] * len(machine.tasks)
        self.ready: collections.deque[tuple[int, int]] = collections.deque()

    def count(self, event: int) -> None:
        self.value[event] += 1
        if self.value[event] % self.thresholds[event]:
            return  # it has not fired for another token
        for task in self.consumers[event]:
            self.arrived[task] += 1
            tokens, left = divmod(self.arrived[task], self.machine.tasks[task].wait_count)
            if not left:
                self.ready.append((task, tokens - 1))

    def start(self, entry: tuple[int, int]) -> tuple[int, int]:
        return entry

    def finish(self, entry: tuple[int, int]) -> None:
        self.done[entry[0]] += 1

    def check(self) -> None:
        """Raises Deadlock unless all is done."""
        stuck = [task for task, tokens in enumerate(self.done) if tokens < self.iterations]
        if stuck:
            states = [Worker("queue", self.done[stuck[0]])] * self.machine.table.workers
            raise Deadlock(self.machine.table.graph, states, self.waiting(stuck))

    def waiting(self, tasks: Iterable[int]) -> Iterable[Worker]:
        for task in tasks:
            step = self.done[task]
            waits = self.machine.tasks[task].waits
            event = next((e for e in waits if self.value[e] < self.thresholds[e] * (step + 1)), -1)
            threshold = self.thresholds[event] * (step + 1)
            yield Worker("waiting", step, task, event, self.value[event], threshold)


def _records(name: str, array: np.ndarray) -> list[SimpleNamespace]:
    """The records of an array with Python numbers, which are read much faster than NumPy's."""
    columns = {field.name: array[field.name].tolist() for field in abi.RECORDS[name]}
    return [SimpleNamespace(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def _items(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _int64(number: int) -> int:
    """Wrapped to 64 bits, as positions of the noise are."""
    return (number + 2**63) % 2**64 - 2**63
