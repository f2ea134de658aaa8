"""A token that a launch decoded, layer by layer against `megakernel.reference` on the same token and cache.

Errors of earlier layers count here, so these gates say what the whole chain of ops comes to. A choice of experts that
rounding turned moves everything after it; such a choice has to be explained by its margin, and what follows it is
judged by the reference along the same path, with the experts that the launch chose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megakernel import reference
from megakernel.bench import rounding
from megakernel.bench.rounding import NEAR_TIE, ROUNDING, Wide
from megakernel.config import ModelConfig
from megakernel.memory import Memory

LAYER_ERROR, LAYER_COSINE = 0.05, 0.999
"""Of what leaves a layer: largest error over the largest entry, and least cosine."""
ROW_ERROR = 0.02
"""Of the token's rows of the cache: largest error over the largest entry."""
LOGIT_COSINE = 0.9995
"""Least cosine of the logits; another token is no surprise at a margin of the two largest under NEAR_TIE."""

LAYER_COLUMNS = (
    "layer", "result", "max_error", "max_reference", "rel", "bound", "cosine", "path_rel", "path_cosine", "own_rms",
    "reference_rms", "status",
)  # fmt: skip
"""rel: largest error over the largest entry, against the reference as it chooses by itself. path_rel, path_cosine:
along the launch's path, with its experts; the same where no choice differs. own_rms, reference_rms: how far the launch
and the bf16 reference are from the reference in fp32 along that path, root mean square of the difference over that of
the fp32 result; of the cache all that the layer puts there together. status: one of STATUSES."""
ROUTING_COLUMNS = (
    "layer", "experts", "reference_experts", "dropped", "added", "margin", "error", "own_rms", "reference_rms",
    "status",
)  # fmt: skip
"""experts, reference_experts: ids, most likely first. dropped, added: ids that differ along the launch's path; margin:
the distance of their router logits in the reference; error: the largest of a router logit there; own_rms,
reference_rms: of the router logits, as of layers. status: see `routing_status`."""
LOGIT_COLUMNS = (
    "max_error", "max_reference", "cosine", "path_cosine", "token", "reference_token", "margin", "own_rms",
    "reference_rms", "status",
)  # fmt: skip
"""token: of the largest logit of the launch, reference_token: of the reference; margin: of the reference's two largest
logits; own_rms, reference_rms and status as of layers. Rounding explains another token only where along the launch's
path the reference holds it less than NEAR_TIE behind its own, or `rounding.Tokens.explained` says so."""

STATUSES = {
    "passed": "within the bound",
    "routing": "not within it, but along the launch's path, after choices of experts that are explained",
    "rounding": "not within it, but no further from fp32 than ROUNDING times what the bf16 reference is",
    "both errors": "as rounding, but of logits, with another token that only the errors of two logits together explain",
    "failed": "none of these",
}
ROUTING_STATUSES = rounding.STATUSES | {"downstream": "others, but those of the reference along the launch's path"}
BAD = "failed", "unexplained"


@dataclass(frozen=True)
class Comparison:
    """What is said of one token."""

    layers: list[dict]
    """Rows of LAYER_COLUMNS: for each layer its rows of the cache, then the residual stream that leaves it."""
    routing: list[dict]
    """Rows of ROUTING_COLUMNS, one for each layer with experts."""
    logits: dict
    """A row of LOGIT_COLUMNS."""

    @property
    def failed(self) -> list[dict]:
        """The rows of gates that did not pass and are not explained."""
        return [row for row in (*self.layers, *self.routing, self.logits) if row["status"] in BAD]


def cache_of(memory: Memory, weights: Mapping[str, torch.Tensor], length: int) -> reference.Cache:
    """The first positions of a memory's cache as the reference takes them.

    Of a decompressed cache the latents are 0: attention doesn't read them.

    Args:
        weights: by Hugging Face name; an absorbed cache is expanded with kv_b_proj.
        length: how many positions.
    """
    c, layers = memory.graph.config, []
    for layer in range(c.num_hidden_layers):
        prefix = f"layers.{layer}"
        if memory.graph.knobs.mla == "absorbed":
            rows = memory.tensor(f"{prefix}.latent_cache")[:length]
            latent, key = rows.split([c.kv_lora_rank, c.qk_rope_head_dim], 1)
            matrix = weights[f"model.{prefix}.self_attn.kv_b_proj.weight"]
            layers.append(reference.LayerCache(latent, key, *reference.kv_b_proj(latent, key, matrix, c)))
            continue
        key = memory.tensor(f"{prefix}.rope_cache")[:length]
        rows = memory.tensor(f"{prefix}.kv_cache")[:length].unflatten(1, (c.num_attention_heads, -1))
        plain, values = rows.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        keys = torch.cat((plain, key[:, None].expand(-1, c.num_attention_heads, -1)), -1)
        layers.append(reference.LayerCache(key.new_zeros(length, c.kv_lora_rank), key, keys, values))
    return tuple(layers)


def compare(
    memory: Memory, token: int, position: int, *, weights: Mapping[str, torch.Tensor] | None = None
) -> Comparison:
    """Compares the last token that a launch decoded with the reference's, on the memory's own cache before it.

    Args:
        memory: after a launch.
        token: the id that was read.
        position: where it stands: how many positions were in the cache before.
        weights: by Hugging Face name; None is what the memory holds.

    Raises:
        ValueError: no launch has decoded a token into this memory.
    """
    if not memory.has_token():
        raise ValueError("memory: expected one into which a launch has decoded a token")
    weights = memory.named_weights() if weights is None else weights
    config = memory.graph.config
    cache = cache_of(memory, weights, position)

    def run(weights, cache, forced=None):
        trace: dict = {}
        logits, _ = reference.decode_step(weights, config, token, position, cache, forced=forced, trace=trace)
        return trace | {"logits": logits}

    free = run(weights, cache)
    routings = {layer: memory.routing(layer) for layer in range(config.num_hidden_layers) if config.is_moe(layer)}
    count = config.n_routed_experts
    valid = all(((each.ids >= 0) & (each.ids < count)).all() for each in routings.values())
    chosen = {layer: each.ids.long()[None] for layer, each in routings.items()} if valid else {}
    differs = {layer: _set(ids) != _set(free[layer]["expert_ids"]) for layer, ids in chosen.items()}
    path = run(weights, cache, chosen) if any(differs.values()) else free
    wide = run(Wide(weights), tuple(reference.LayerCache(*(part.float() for part in each)) for each in cache), chosen)

    routing: list[dict] = []
    layers: list[dict] = []
    before = _Path()
    for layer in range(config.num_hidden_layers):
        traces = Along(*(trace[layer] for trace in (free, path, wide)))
        rows = _cache_rows(memory, layer, position, traces)
        # rounding is judged by all that the layer caches: a rotary key alone may have a handful of entries
        rms = _rms(*(torch.cat([part.flatten() for part in parts]) for parts in zip(*rows.values(), strict=True)))
        for result, (found, *expected) in rows.items():
            layers.append({"layer": layer, **_layer_row(result, found, Along(*expected), ROW_ERROR, None, rms, before)})
        if layer in routings:
            if valid:
                status = routing_status(config, routings[layer].logits, chosen[layer][0], traces, before)
            else:
                status = {"status": "unexplained"}
            before.add(status["status"])
            ids = {"experts": routings[layer].ids, "reference_experts": free[layer]["expert_ids"][0]}
            routing.append({"layer": layer, **{name: _words(each.tolist()) for name, each in ids.items()}, **status})
        out = memory.tensor(f"layers.{layer}.mlp_residual")
        expected = Along(*(trace["out"][0] for trace in traces))
        rms = _rms(out, *expected)
        layers.append({"layer": layer, **_layer_row("residual", out, expected, LAYER_ERROR, LAYER_COSINE, rms, before)})
    expected = Along(*(trace["logits"] for trace in (free, path, wide)))
    return Comparison(layers, routing, _logit_row(memory.tensor("logits"), expected, before))


class Along(NamedTuple):
    """The same thing of the reference: as it chooses experts by itself, with the launch's, and with these in fp32."""

    free: Any
    path: Any
    wide: Any


# ------------------------------------------------------------------------------------------------------------- routing


class _Path:
    """The choices of experts that a token has come by."""

    def __init__(self):
        self.differs, self.explained = False, True

    def add(self, status: str) -> None:
        self.differs |= status != "equal"
        self.explained &= status != "unexplained"


def routing_status(
    config: ModelConfig, logits: torch.Tensor, chosen: torch.Tensor, traces: Along, before: _Path
) -> dict:
    """Whether the experts that a launch chose in a layer are the reference's, or why not.

    - "equal": the same experts, in any order, as of the reference by itself, and along the launch's path.
    - "near-tie", "both errors": along the launch's path the reference chooses others, but rounding bridges the margin,
      see `rounding.Choices.statuses`.
    - "downstream": the reference by itself chooses others, but along the launch's path the same; all differences
      before are explained.
    - "unexplained": anything else.

    Args:
        logits: fp32 [n_routed_experts] of the launch.
        chosen: int64 [k] of the launch.
        traces: of the layer.
        before: the layers before.

    Returns:
        Columns of ROUTING_COLUMNS from `dropped` on.
    """
    mine, wide = traces.path["router_logits"], traces.wide["router_logits"]
    found = rounding.choices(config, mine, logits[None], chosen[None], wide)
    rms = _rms(logits, *(trace["router_logits"][0] for trace in traces))
    dropped, added = (each[0].nonzero()[:, 0].tolist() for each in (found.dropped, found.added))
    row = dict(dropped=_words(dropped), added=_words(added), margin=None, error=found.error.item(), **rms)
    if not dropped and _set(chosen) == _set(traces.free["expert_ids"]):
        status = "equal"
    elif len(dropped) != len(added) or not before.explained:  # or an expert was chosen twice
        status = "unexplained"
    elif not dropped:
        status = "downstream"
    else:
        (status,), row["margin"] = found.statuses(), found.margin.item()
    return row | {"status": status}


# --------------------------------------------------------------------------------------------------------------- layers


def _cache_rows(memory: Memory, layer: int, position: int, traces: Along) -> dict[str, tuple]:
    """What a layer has put into the cache: by name what the launch has, then what each trace has."""
    c, prefix = memory.graph.config, f"layers.{layer}"
    if memory.graph.knobs.mla == "absorbed":
        row = memory.tensor(f"{prefix}.latent_cache")[position]
        latent, key = row.split([c.kv_lora_rank, c.qk_rope_head_dim])
        names = {"latent": ("latent", latent), "rotary key": ("rotary_key", key)}
    else:
        row = memory.tensor(f"{prefix}.kv_cache")[position].unflatten(0, (c.num_attention_heads, -1))
        plain, values = row.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        key = memory.tensor(f"{prefix}.rope_cache")[position].expand(c.num_attention_heads, -1)
        names = {"keys": ("keys", torch.cat((plain, key), -1)), "values": ("values", values)}
    return {result: (found, *(trace[name][0] for trace in traces)) for result, (name, found) in names.items()}


def _layer_row(
    result: str, found: torch.Tensor, expected: Along, bound: float, least: float | None, rms: dict, before: _Path
) -> dict:
    """A row of LAYER_COLUMNS without its layer."""

    def passes(error, most, cosine):  # a NaN does not
        return error <= bound * most and (least is None or cosine >= least)

    free, path = _error(found, expected.free), _error(found, expected.path)
    return dict(
        result=result,
        max_error=free[0],
        max_reference=free[1],
        rel=_over(*free[:2]),
        bound=bound,
        cosine=free[2],
        path_rel=_over(*path[:2]),
        path_cosine=path[2],
        **rms,
        status=_status(passes(*free), passes(*path), "rounding" if _is_rounding(rms) else "", before),
    )


def _logit_row(found: torch.Tensor, expected: Along, before: _Path) -> dict:
    """A row of LOGIT_COLUMNS; all [V]."""

    def passes(logits, cosine):
        top = logits.float().topk(2).values
        same = found.argmax() == logits.argmax() or top[0] - top[1] < NEAR_TIE
        return bool(cosine >= LOGIT_COSINE and same)

    free, path, rms = _error(found, expected.free), _error(found, expected.path), _rms(found, *expected)
    verdicts = [passes(expected.free, free[2]), passes(expected.path, path[2])]
    token = rounding.tokens(found[None], expected.path[None], found.argmax()[None], expected.wide[None])
    by_rounding = ""
    if _is_rounding(rms) and (token.behind.item() < NEAR_TIE or token.explained().item()):
        by_rounding = "rounding" if token.behind.item() < max(NEAR_TIE, path[0]) else "both errors"
    top = expected.free.float().topk(2).values
    return dict(
        max_error=free[0],
        max_reference=free[1],
        cosine=free[2],
        path_cosine=path[2],
        token=int(found.argmax()),
        reference_token=int(expected.free.argmax()),
        margin=(top[0] - top[1]).item(),
        **rms,
        status=_status(*verdicts, by_rounding, before),
    )


def _status(free: bool, path: bool, by_rounding: str, before: _Path) -> str:
    """One of STATUSES, from what passed; by_rounding: that of rounding, if it explains the rest, else empty."""
    if free:
        return "passed"
    if before.differs and before.explained and path:
        return "routing"
    return by_rounding if before.explained and by_rounding else "failed"


def _is_rounding(rms: Mapping[str, float]) -> bool:
    return rms["own_rms"] <= ROUNDING * rms["reference_rms"]  # a NaN is not


def _set(ids: torch.Tensor) -> set[int]:
    return set(ids.flatten().tolist())


def _words(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def _over(error: float, most: float) -> float:
    return error / max(most, 1e-30)


def _error(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float, float]:
    """Largest difference, largest entry of `expected`, cosine."""
    found, expected = found.double().flatten(), expected.double().flatten()
    error, most = (found - expected).abs().max().item(), expected.abs().max().item()
    return error, most, torch.cosine_similarity(found, expected, 0).item()


def _rms(found: torch.Tensor, free, path: torch.Tensor, wide: torch.Tensor) -> dict[str, float]:
    """How far a launch and the bf16 reference are from fp32."""
    exact = wide.double().flatten()
    most = max(exact.norm().item(), 1e-30)
    own, usual = ((each.double().flatten() - exact).norm().item() / most for each in (found, path))
    return dict(own_rms=own, reference_rms=usual)
