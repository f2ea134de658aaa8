"""Knobs that tests of the graph and of what runs it share."""

import dataclasses

from megakernel.knobs import CHOICES, Knobs

FOLDS = [field.name for field in dataclasses.fields(Knobs) if field.type is bool]

VARIANTS = [
    {},
    *({name: word} for name, words in CHOICES.items() for word in words),
    *({name: False} for name in FOLDS),
    *(dict(mla="absorbed", **{name: False}) for name in FOLDS),
    dict.fromkeys(FOLDS, False),
    dict(dict.fromkeys(FOLDS, False), mla="absorbed", experts="slots", dependencies="chain"),
    dict(experts="slots", split_shared=False),
    dict(tokens=1),
    dict(tokens=1, mla="absorbed"),
    dict(tokens=129, attn_rows=64, mla="absorbed"),
    dict(tokens=130, attn_rows=7),
    dict(qkv_rows=5, gemv_rows=5),
    dict(qkv_rows=5, gemv_rows=5, mla="absorbed", absorb_rows=3, split_qkv=False),
    dict(lm_head_rows=7, argmax_partials=9),
    dict(lm_head_rows=64, argmax_partials=2),
    dict(lm_head_rows=1),
    dict(argmax_partials=1),
    dict(dense_rows=9),
    dict(shared_rows=9),
    dict(expert_w13_tiles=5),
    dict(expert_w13_tiles=1000),
    dict(expert_w2_tiles=5, experts="slots"),
    dict(router_rows=1),
    dict(router_rows=3, mla="absorbed", experts="slots"),
    dict(router_rows=4, dependencies="chain", fold_norm=False, split_shared=False),
    dict(attn_heads=3),
    dict(attn_heads=3, mla="absorbed"),
    dict(splits=1),
    dict(combine_rows=24),
    dict(splits=7),
    dict(workers=1),
]
"""Changes of Knobs that set each of them to something else at least once."""

SMALL = dict(
    qkv_rows=16,
    gemv_rows=16,
    dense_rows=32,
    shared_rows=24,
    lm_head_rows=32,
    attn_rows=32,
    tokens=100,
    argmax_partials=12,
)
"""Sizes that cut the tiny model into several tiles, for the knobs that a variant leaves alone."""
