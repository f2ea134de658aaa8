"""What can be varied about a token's task graph without changing its result, and the settings that ship as presets.

Tile sizes decide how evenly work spreads over the workers; the folds and `dependencies` decide how many steps wait for
one another. None is right for every machine, so each is a number or a word to set and to measure again.
"""

import dataclasses
from dataclasses import dataclass

CHOICES = {
    "dependencies": ("dag", "chain"),
    "experts": ("superset", "slots"),
    "mla": ("decompressed", "absorbed"),
}
"""The words that a knob of that name may be."""


@dataclass(frozen=True)
class Knobs:
    """Settings of `megakernel.graph.build`; the defaults are the preset `mi300x`.

    Knobs that count tiles, splits or partials are upper bounds: a matrix of fewer rows gets one tile for each row.

    Raises:
        ValueError: a value is of the wrong type or out of range; the message names the knob.
    """

    workers: int = 296
    """Workers that execute tasks. The graph does not depend on it; what deals the tasks out does."""
    tokens: int = 1056
    """T, positions that attention reads, the one of the current token included."""
    dependencies: str = "dag"
    """"dag": an op waits for those that write what it reads; "chain": for the op before it, whatever that computes."""
    experts: str = "superset"
    """"superset": tasks for every routed expert, those of experts not chosen return at once; "slots": tasks for as many
    experts as a token chooses, which look up their expert when they run."""
    mla: str = "decompressed"
    """"decompressed": kv_b_proj makes keys and values, which are cached; "absorbed": queries and outputs go through the
    halves of kv_b_proj instead, and the latents are cached."""

    qkv_rows: int = 64
    """Rows per task of q_proj and kv_a_proj_with_mqa."""
    gemv_rows: int = 64
    """Rows per task of the attention's other projections and of the down_proj of dense layers and shared experts."""
    lm_head_rows: int = 512
    dense_rows: int = 32
    """Rows of gate_proj and as many of up_proj per task, in the dense layers."""
    shared_rows: int = 88
    """Likewise, in the shared experts."""
    expert_w13_tiles: int = 3
    """Tasks per routed expert for gate_proj and up_proj."""
    expert_w2_tiles: int = 3
    """Tasks per routed expert for down_proj."""
    router_rows: int = 64
    """Rows of the router, one for each routed expert, per task. All of them: one task that also chooses the experts
    (MOE_GATE_TOPK); fewer: tasks that leave logits (MOE_GATE), and one that chooses when all are there (MOE_TOPK)."""
    combine_rows: int = 2048
    """Rows of the state per task that adds up the experts."""
    attn_rows: int = 128
    """Positions per attention task."""
    attn_heads: int = 1
    """Heads per attention task. Absorbed heads share the cached latents, so that more of them read the cache less."""
    absorb_rows: int = 512
    """Rows per task of the transposed key half of kv_b_proj; absorbed only."""
    splits: int = 4
    """Shares of the columns in the dense layers' down_proj."""
    argmax_partials: int = 100

    fold_norm: bool = True
    """Each reader of a normalised state normalises it itself; otherwise one op does."""
    fold_merge: bool = True
    """What reads the attention output merges its chunks; otherwise an op with a task per head does."""
    fold_mla_prep: bool = True
    """The norm of the latents and the rotary embedding are part of their readers; otherwise one op does them."""
    split_qkv: bool = True
    """q_proj and kv_a_proj_with_mqa are two ops; otherwise one over the rows of both."""
    split_shared: bool = True
    """The shared experts have ops of their own; otherwise they are one more expert in the ops of the routed ones."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in CHOICES:
                if not isinstance(value, str) or value not in CHOICES[name]:
                    raise ValueError(f"{name} must be one of {', '.join(CHOICES[name])}, not {value!r}")
            elif field.type is bool:
                if not isinstance(value, bool):
                    raise ValueError(f"{name} must be True or False, not {value!r}")
            elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, not {value!r}")


PRESETS = {
    "mi300x": Knobs(),
    # the same machine before its ops overlapped
    "mi300x_chain": Knobs(
        dependencies="chain",
        experts="slots",
        expert_w13_tiles=32,
        expert_w2_tiles=32,
        fold_norm=False,
        fold_merge=False,
        split_qkv=False,
        split_shared=False,
    ),
    # one wave of tasks for each large op, where the sizes allow
    "h200": Knobs(
        workers=132,
        experts="slots",
        mla="absorbed",
        qkv_rows=28,
        gemv_rows=16,
        lm_head_rows=776,
        dense_rows=83,
        shared_rows=24,
        expert_w13_tiles=22,
        expert_w2_tiles=22,
        router_rows=7,
        combine_rows=128,
        attn_rows=66,
        attn_heads=2,
        absorb_rows=64,
        splits=1,
    ),
}
"""`mi300x` gives the published graph of DeepSeek-V2-Lite at T = 1056 (298 ops, 347 events, 20,494 tasks);
`mi300x_chain` the one published before it (301 ops, 403 events); `h200` is where measurements there start from."""
