"""What Python and the device code agree on: records, codes of tasks, and the meaning of each argument.

This file is the only place where the layout is written down. `header()` turns it into `csrc/abi.h`, which is committed
so that the device code can be read and edited without running anything; a test compares the file with `header()`, and
each build reports the sizes and offsets that its compiler chose (`layout()`), which are compared with these.

    python -m megakernel.abi      writes csrc/abi.h

All records are made of 4-byte and 8-byte words, 8-byte words first, so that every compiler lays them out the same.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

HEADER = Path(__file__).parent / "csrc" / "abi.h"

VERSION = 4
"""Goes up whenever a record or the meaning of an argument changes."""

CODES = (
    "nothing",
    "terminate",
    "embedding",
    "rms_norm",
    "gemv",
    "gemv_res",
    "gemv_silu",
    "gemv_splitk",
    "splitk_reduce",
    "mla_prep",
    "attn_chunk",
    "attn_merge",
    "moe_gate_topk",
    "moe_topk",
    "moe_combine",
    "argmax_partial",
    "argmax_reduce",
)
"""What a task does; its number is its place here. Several types of the graph share a code."""

ENUMS = {
    "Input": ("plain", "norm", "merge"),
    "Out": ("bf16", "fp32", "logits", "kv_cache"),
    "By": ("all", "expert", "slot"),
    "State": (
        "idle",  # has not begun
        "waiting",  # for the event of a task
        "streaming",  # for weights or for room in the ring
        "routing",  # the producer, for the routing that decides which weights to read
        "queue",  # for a task that is ready
        "done",
    ),
}


class Field(NamedTuple):
    """A word of a record."""

    name: str
    type: str
    """i32, u32, f32, i64, or ptr (8 bytes)."""
    doc: str
    count: int = 1


TASK = (
    Field("code", "i32", "a Code"),
    Field("op", "i32", "number of the op, -1 for control; for messages only"),
    Field("args", "i32", "which Args"),
    Field("tile", "i32", "number in the op"),
    Field("rows", "i32", "output rows [first, end)", 2),
    Field("chunk", "i32", "columns of a split matrix or positions [first, end); both 0 if there is none", 2),
    Field("by", "i32", "a By: whether the expert `at` must be chosen, or slot `at` says which expert"),
    Field("at", "i32", "number of the expert or slot, of the split, or of the chunk of positions; else 0"),
    Field("wait_first", "i32", "its events in `waits`"),
    Field("wait_count", "i32", ""),
    Field("trigger_first", "i32", "the events that it counts up, in `triggers`"),
    Field("trigger_count", "i32", ""),
    Field(
        "flags",
        "i32",
        "bits: APPENDS this position's row of the cache; what it writes is TAGGED; it goes BY_TAGS of what it reads; "
        "it multiplies the ROUTERS_INPUT",
    ),
    Field("pad", "i32", ""),
)
"""64 bytes; a worker reads one for each task it runs."""

ARGS = (
    Field("weight", "i64", "matrix whose rows are multiplied, bytes into `weights`; -1 if none"),
    Field("weight2", "i64", "gemv_silu: that of up_proj"),
    Field("matrix_bytes", "i64", "bytes from one expert's matrix to the next one's"),
    Field("norm", "i64", "weight of the norm of the input, bytes into `weights`"),
    Field("input", "i64", "bytes into `work`"),
    Field("input_bytes", "i64", "bytes from one expert's or slot's input to the next one's"),
    Field("out", "i64", "bytes into `work`, for Out kv_cache into `cache`"),
    Field("out_bytes", "i64", "bytes from one expert's, slot's, or split's output to the next one's"),
    Field("residual", "i64", "bytes into `work`"),
    Field("routing", "i64", "the layer's Routing records, bytes into `work`"),
    Field("kva", "i64", "output of kv_a_proj_with_mqa [lora + rope], bytes into `work`"),
    Field("latent", "i64", "normed latent [lora], bytes into `work`; -1: norm that of kva"),
    Field("query", "i64", "output of q_proj [heads, nope + rope], bytes into `work`"),
    Field("rotated", "i64", "rotated parts of the queries [heads, rope], bytes into `work`; -1: rotate those of query"),
    Field("absorbed", "i64", "absorbed queries [heads, lora], bytes into `work`; -1: decompressed attention"),
    Field("cache", "i64", "kv cache or latent cache, bytes into `cache`"),
    Field("rope_cache", "i64", "rotated keys (decompressed only), bytes into `cache`"),
    Field("shared", "i64", "moe_combine: output of the shared experts, bytes into `work`"),
    Field("cols", "i32", "row length of the matrices, or elements that a small op works on"),
    Field("input_kind", "i32", "an Input: take it as it is, norm it, or merge the chunks of attention"),
    Field("out_kind", "i32", "an Out; logits are fp32, too, and go to the trace as well"),
    Field("head_rows", "i32", "rows for each head where heads have an input of their own; else 0"),
    Field("head_stride", "i32", "elements from one head's input to the next one's; merge: width of a head's output"),
    Field("chunks", "i32", "chunks of positions that a merge merges, or splits that a reduction adds"),
    Field("cache_pitch", "i32", "elements from one position of the cache to the next"),
    Field("kv_eps", "i32", "1 if the norm is that of the latent"),
    Field("slots", "i32", "moe_combine: 1 if outputs are by slot, 0 if by expert"),
    Field("parts", "i32", "argmax: number of partials"),
)
"""What the tasks of an op have in common. An argument that an op does not name below is not read."""

ROUTING = (
    Field("expert", "u32", "its number in the upper half, the tag in the lower"),
    Field("weight", "f32", "softmax probability times routed_scaling"),
)
"""k of them for each layer, most likely first; tagged router logits [n_routed_experts] follow."""

PARTIAL = (
    Field("key", "f64", "of its best group, relative to `largest`"),
    Field("largest", "f32", "logit of its share of the vocabulary; NaN if that holds a NaN or +inf"),
    Field("argmax", "i32", "its lowest id with that logit"),
    Field("drawn", "i32", "the token drawn in its best group"),
    Field("pad", "i32", ""),
)

DUMP = (
    Field("state", "i32", "a State, of the threads that compute"),
    Field("iteration", "i32", "which token of the launch"),
    Field("task", "i32", "-1 before the first"),
    Field("event", "i32", "that it waits for, or -1"),
    Field("value", "u32", "of the event's counter"),
    Field("threshold", "u32", "that it waits for"),
    Field("producer_state", "i32", "a State, of the threads that fetch weights"),
    Field("producer_task", "i32", ""),
)
"""What a worker was doing when the launch was aborted."""

PARAMS = (
    Field("weights", "ptr", "arena of bf16 matrices and vectors"),
    Field("cache", "ptr", "arena of bf16 caches"),
    Field("work", "ptr", "arena of activations"),
    Field("rotary", "ptr", "fp32 [capacity, rope / 2, 2]: cosine and sine of each pair at each position"),
    Field("tasks", "ptr", "Task [num_tasks]"),
    Field("args", "ptr", "Args []"),
    Field("waits", "ptr", "i32 []: events"),
    Field("triggers", "ptr", "i32 []: events"),
    Field("thresholds", "ptr", "i32 [num_events]: for one token"),
    Field("list_first", "ptr", "i32 [workers + 1]: each worker's part of lists (static)"),
    Field("lists", "ptr", "i32 [num_tasks]: tasks"),
    Field("consumer_first", "ptr", "i32 [num_events + 1]: each event's part of consumers (dynamic)"),
    Field("consumers", "ptr", "i32 []: tasks"),
    Field("counters", "ptr", "u32 [num_events]: how often each event was counted up in this launch; zeroed before it"),
    Field("arrived", "ptr", "u32 [num_tasks]: how many of its events have fired (dynamic); zeroed"),
    Field("queue", "ptr", "i64 [num_tasks]: ring of ready tasks, task + (1 + tokens before) * 2**32 (dynamic); zeroed"),
    Field("queue_ends", "ptr", "u32 [2]: how many tasks were taken and put (dynamic); zeroed"),
    Field("forced", "ptr", "i32 [iterations]: token to read in place of the one sampled before, -1: that one"),
    Field("tokens", "ptr", "i32 [iterations]: the token sampled by each; -1 if a logit was NaN or +inf"),
    Field("times", "ptr", "i64 [iterations]: nanoseconds of the device's clock when each was sampled"),
    Field("trace", "ptr", "null or fp32 [iterations, vocab_size]: takes the logits"),
    Field("timeline", "ptr", "null or i64 [num_tasks, 4], TIMELINE of each task for the last token"),
    Field("abort", "ptr", "u32: not 0 ends the launch; zeroed"),
    Field("dump", "ptr", "Dump [workers]"),
    Field("spin_budget", "i64", "polls without progress after which a wait gives the launch up"),
    Field("seed", "i64", "of the sampling noise"),
    Field("noise_position", "i64", "position of the noise of the first token, as in fmms.sample"),
    Field("num_tasks", "i32", ""),
    Field("num_events", "i32", ""),
    Field("workers", "i32", "blocks of the launch"),
    Field("dynamic", "i32", "0: lists, 1: ready queue"),
    Field("iterations", "i32", "tokens to decode"),
    Field("position", "i32", "of the first token that is read: positions already in the cache"),
    Field("launch_event", "i32", "counted up by the host and by the end of each token but the last"),
    Field("hidden", "i32", "hidden_size"),
    Field("heads", "i32", "num_attention_heads"),
    Field("nope", "i32", "qk_nope_head_dim"),
    Field("rope", "i32", "qk_rope_head_dim"),
    Field("v", "i32", "v_head_dim"),
    Field("lora", "i32", "kv_lora_rank"),
    Field("experts", "i32", "n_routed_experts"),
    Field("topk", "i32", "num_experts_per_tok"),
    Field("vocab", "i32", "vocab_size"),
    Field("eps", "f32", "rms_norm_eps"),
    Field("kv_eps", "f32", "of the norm of the latent"),
    Field("softmax_scale", "f32", "what attention scores are multiplied by"),
    Field("routed_scale", "f32", "routed_scaling_factor"),
    Field("temperature", "f32", "0: greedy"),
    Field("pad", "i32", ""),
)

RECORDS = {"Task": TASK, "Args": ARGS, "Routing": ROUTING, "Partial": PARTIAL, "Dump": DUMP, "Params": PARAMS}

APPENDS, TAGGED, BY_TAGS, ROUTERS_INPUT = 1, 2, 4, 8
"""Bits of Task.flags."""

TAGGED_BF16, TAGGED_FP32 = 4, 8
"""Bytes of a word that has a value in its upper half and a tag, the number of its token in the launch, in its lowest 16
bits; csrc/tagged.h says what for."""

MOST_ITERATIONS = 65_534
"""Tokens of a launch: tags begin with 1, and fresh memory holds 65,535."""

TIMELINE = ("worker", "taken", "ready", "done")
"""Of a task: the worker, then nanoseconds of the device's clock: when its consumers took it, when what it waits for was
there, and when they were done."""

PARTIAL_STATS = 4
"""fp32 words after each head's output in a chunk of attention: largest score, sum, and two of padding."""

ALONE_CHUNKS = 64
"""Up to so many chunks of positions, each wave works out for itself how the chunks of a single head are merged."""

_TYPES = {
    "i32": ("int32_t", np.int32),
    "u32": ("uint32_t", np.uint32),
    "f32": ("float", np.float32),
    "i64": ("int64_t", np.int64),
    "f64": ("double", np.float64),
    "ptr": ("uint64_t", np.uint64),
}


def dtype(record: str) -> np.dtype:
    """The NumPy structure of a record."""
    return np.dtype(
        [(field.name, _TYPES[field.type][1], *([field.count] if field.count > 1 else [])) for field in RECORDS[record]],
        align=True,
    )


def code(name: str) -> int:
    """The number of a code."""
    return CODES.index(name)


def value(enum: str, name: str) -> int:
    """The number of a name of ENUMS."""
    return ENUMS[enum].index(name)


def layout() -> list[int]:
    """VERSION, then for each record its size and the offsets of its fields, in bytes: what `mk_layout` returns too."""
    numbers = [VERSION]
    for record, fields in RECORDS.items():
        structure = dtype(record)
        numbers += [structure.itemsize, *(structure.fields[field.name][1] for field in fields)]
    return numbers


def header() -> str:
    """The text of csrc/abi.h."""
    lines = [
        "// Written by megakernel/abi.py, which explains each word; change that and run `python -m megakernel.abi`.",
        "#pragma once",
        "",
        "#include <stddef.h>",
        "#include <stdint.h>",
        "",
        "namespace mk {",
        "",
        "enum class Code : int32_t {",
        *(f"  {name} = {number}," for number, name in enumerate(CODES)),
        "};",
        "",
    ]
    for enum, names in ENUMS.items():
        body = ", ".join(f"{name} = {number}" for number, name in enumerate(names))
        lines += [f"enum class {enum} : int32_t {{ {body} }};", ""]
    lines += [
        f"constexpr int32_t ABI_VERSION = {VERSION};",
        f"constexpr int32_t APPENDS = {APPENDS}, TAGGED = {TAGGED}, BY_TAGS = {BY_TAGS};",
        f"constexpr int32_t ROUTERS_INPUT = {ROUTERS_INPUT};",
        f"constexpr int PARTIAL_STATS = {PARTIAL_STATS};",
        f"constexpr int ALONE_CHUNKS = {ALONE_CHUNKS};",
        f"constexpr int TIMELINE_WORDS = {len(TIMELINE)};",
        "",
    ]
    for record, fields in RECORDS.items():
        lines.append(f"struct {record} {{")
        for field in fields:
            count = f"[{field.count}]" if field.count > 1 else ""
            comment = f"  // {field.doc}" if field.doc else ""
            lines.append(f"  {_TYPES[field.type][0]} {field.name}{count};{comment}")
        lines += ["};", ""]
    lines.append("// As megakernel.abi.layout(), by this compiler.")
    lines.append("constexpr int32_t LAYOUT[] = {")
    lines.append("  ABI_VERSION,")
    for record, fields in RECORDS.items():
        offsets = ", ".join(f"(int32_t)offsetof({record}, {field.name})" for field in fields)
        lines.append(f"  (int32_t)sizeof({record}), {offsets},")
    lines += ["};", "", "}  // namespace mk", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    HEADER.write_text(header(), encoding="utf-8")
    sys.stdout.write(f"wrote {HEADER}\n")
