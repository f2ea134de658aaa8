"""One decode step in plain PyTorch, op by op: what every op of the megakernel is compared with.

Equal to `DeepseekV2ForCausalLM` of transformers with eager attention and eager experts, rounding included: activations
have the dtype of the weights, norms, softmaxes and the rotation work in fp32 and round once. Ops take N rows (1 in a
decode step, a prompt's tokens in a prefill), so that both share them. Shapes: N rows, T positions in the cache, H
heads, k experts per token, V the vocabulary; widths carry the names of the config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear, silu

from megakernel.config import KV_NORM_EPS, ModelConfig


class LayerCache(NamedTuple):
    """What one layer keeps of T positions, both as it is compressed and expanded; in the dtype of the weights."""

    latent: torch.Tensor
    """[T, kv_lora_rank], normed."""
    rotary_key: torch.Tensor
    """[T, qk_rope_head_dim], rotated, of all heads."""
    keys: torch.Tensor
    """[T, H, qk_head_dim]."""
    values: torch.Tensor
    """[T, H, v_head_dim]."""


Cache = tuple[LayerCache, ...]
"""One per layer. A step returns a new cache and leaves the one it was given as it is."""

Forced = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Experts in place of the router's: int64 [N, k], or a pair of these and of their weights, fp32 [N, k], with which
routed_scaling_factor has been multiplied."""


def empty_cache(config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> Cache:
    """The cache before the first token."""
    heads = config.num_attention_heads
    widths = (config.kv_lora_rank,), (config.qk_rope_head_dim,), (heads, config.qk_head_dim), (heads, config.v_head_dim)
    layer = LayerCache(*(torch.empty((0, *width), dtype=dtype, device=device) for width in widths))
    return (layer,) * config.num_hidden_layers


# ------------------------------------------------------------------------------------------------------------------ ops


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) in fp32, rounded to the dtype of x, then times the weight (Zhang and Sennrich, 2019).

    Args:
        x: [N, D].
        weight: [D].
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def rotary_table(config: ModelConfig, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the angles that pairs are rotated by: fp32 [N, qk_rope_head_dim / 2] each.

    Args:
        positions: int64 [N].
    """
    angles = positions[:, None].float() * config.inverse_frequencies(positions.device)
    return angles.cos() * config.rotary_scale, angles.sin() * config.rotary_scale


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x[2i], x[2i + 1]) in fp32 and leave them where they were (RoFormer, Su et al., 2021, eq. 34).

    Args:
        x: [N, qk_rope_head_dim] or [N, H, qk_rope_head_dim].
        cos, sin: fp32 [N, qk_rope_head_dim / 2].

    Returns:
        Of the shape and dtype of x.
    """
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    even, odd = x.float()[..., 0::2], x.float()[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


def q_proj(x, weight, config: ModelConfig, cos, sin) -> torch.Tensor:
    """Queries with their last qk_rope_head_dim dimensions rotated.

    Args:
        x: [N, hidden_size], normed.
        weight: [H * qk_head_dim, hidden_size].
        cos, sin: of `rotary_table`.

    Returns:
        [N, H, qk_head_dim].
    """
    q = linear(x, weight).view(len(x), config.num_attention_heads, config.qk_head_dim)
    plain, rotary = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
    return torch.cat((plain, rotate(rotary, cos, sin)), dim=-1)


def kv_a_proj(x, weight, norm_weight, config: ModelConfig, cos, sin) -> tuple[torch.Tensor, torch.Tensor]:
    """The normed latent and the rotated key that all heads share: what a compressed cache holds.

    Args:
        x: [N, hidden_size], normed.
        weight: [kv_lora_rank + qk_rope_head_dim, hidden_size].
        norm_weight: [kv_lora_rank].
        cos, sin: of `rotary_table`.

    Returns:
        [N, kv_lora_rank] and [N, qk_rope_head_dim].
    """
    latent, rotary_key = linear(x, weight).split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
    return rms_norm(latent, norm_weight, KV_NORM_EPS), rotate(rotary_key, cos, sin)


def kv_b_proj(latent, rotary_key, weight, config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all heads (DeepSeek-V2, 2024, eqs. 10, 11, 15 to 17): what a decompressed cache holds.

    Args:
        latent: [N, kv_lora_rank].
        rotary_key: [N, qk_rope_head_dim].
        weight: [H * (qk_nope_head_dim + v_head_dim), kv_lora_rank]; of each head first the rows of its key.

    Returns:
        [N, H, qk_head_dim] and [N, H, v_head_dim].
    """
    rows, heads = len(latent), config.num_attention_heads
    expanded = linear(latent, weight).view(rows, heads, config.qk_nope_head_dim + config.v_head_dim)
    plain, values = expanded.split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
    shared = rotary_key[:, None].expand(rows, heads, config.qk_rope_head_dim)
    return torch.cat((plain, shared), dim=-1), values


def attention(q, keys, values, scale: float) -> torch.Tensor:
    """Causal attention of the last N of T positions; the softmax is fp32 and rounded to the dtype of q.

    Args:
        q: [N, H, qk_head_dim]; row n is at position T - N + n and sees the keys up to there.
        keys: [T, H, qk_head_dim].
        values: [T, H, v_head_dim].
        scale: `ModelConfig.softmax_scale`.

    Returns:
        [N, H * v_head_dim].
    """
    rows, length = len(q), len(keys)
    scores = torch.matmul(q.transpose(0, 1), keys.permute(1, 2, 0)) * scale
    if rows > 1:
        future = torch.ones(rows, length, dtype=torch.bool, device=q.device).triu(length - rows + 1)
        scores = scores.masked_fill(future, -torch.inf)
    probabilities = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(probabilities, values.transpose(0, 1)).transpose(0, 1).reshape(rows, -1)


def o_proj(x, weight, residual) -> torch.Tensor:
    """residual + weight x: [N, hidden_size] of x [N, H * v_head_dim] and weight [hidden_size, H * v_head_dim]."""
    return residual + linear(x, weight)


def router_logits(x, weight) -> torch.Tensor:
    """fp32 [N, n_routed_experts] of x [N, hidden_size] and weight [n_routed_experts, hidden_size], all in fp32."""
    return linear(x.float(), weight.float())


def route(logits, config: ModelConfig, forced: Forced | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most likely experts of each row and their softmax probabilities, times routed_scaling_factor.

    Args:
        logits: fp32 [N, n_routed_experts].
        forced: experts to use instead; without weights of their own, these still follow from the logits.

    Returns:
        ids int64 [N, k], most likely first, the lowest id first on a tie (or those of `forced`), and weights fp32
        [N, k], which are not normalised to 1.

    Raises:
        ValueError: the weights of `forced` are not fp32, or of another shape than the ids.
    """
    if isinstance(forced, tuple):
        ids, weights = forced
        if weights.dtype != torch.float32 or weights.shape != ids.shape:
            found = f"{weights.dtype} {list(weights.shape)}"
            raise ValueError(f"forced: expected weights of torch.float32 {list(ids.shape)}, found {found}")
        return ids, weights
    scores = logits.softmax(dim=-1, dtype=torch.float32)
    if forced is None:
        ids = scores.sort(dim=-1, descending=True, stable=True).indices[:, : config.num_experts_per_tok]
    else:
        ids = forced
    return ids, scores.gather(1, ids) * config.routed_scaling_factor


def swiglu(x, gate, up, down) -> torch.Tensor:
    """down (silu(gate x) * up x) (Shazeer, 2020): the dense MLP, the shared experts, and one routed expert.

    Args:
        x: [N, hidden_size].
        gate, up: [width, hidden_size].
        down: [hidden_size, width].

    Returns:
        [N, hidden_size].
    """
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def experts(x, ids, weights, matrices: Mapping[int, tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """The weighted sum of each row's experts, added in the order of their ids, in the dtype of x.

    Args:
        x: [N, hidden_size].
        ids: int64 [N, k].
        weights: fp32 [N, k].
        matrices: gate, up and down of each expert, as `swiglu` takes them; only those of `ids` are looked up.

    Returns:
        [N, hidden_size].
    """
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        rows, slots = torch.where(ids == expert)
        # an fp32 product, rounded before it is added: the order and rounding of transformers
        part = swiglu(x[rows], *matrices[expert]) * weights[rows, slots, None]
        out.index_add_(0, rows, part.to(out.dtype))
    return out


def combine(routed, shared, residual) -> torch.Tensor:
    """residual + (routed + shared), [N, hidden_size] each."""
    return residual + (routed + shared)


def lm_head(x, weight) -> torch.Tensor:
    """Logits [N, V] of x [N, hidden_size], normed, and weight [V, hidden_size]."""
    return linear(x, weight)


# ---------------------------------------------------------------------------------------------------------------- model


class _Experts(Mapping):
    """The experts of one layer, by id, as `experts` takes them."""

    def __init__(self, weights: Mapping[str, torch.Tensor], prefix: str, count: int):
        self.weights, self.prefix, self.count = weights, prefix, count

    def __getitem__(self, expert: int) -> tuple[torch.Tensor, ...]:
        return _swiglu_weights(self.weights, f"{self.prefix}.{expert}")

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter(range(self.count))


def _swiglu_weights(weights, prefix) -> tuple[torch.Tensor, ...]:
    return tuple(weights[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))


def layer_step(
    weights: Mapping[str, torch.Tensor],
    config: ModelConfig,
    layer: int,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: LayerCache,
    *,
    forced: Forced | None = None,
    trace: dict[str, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, LayerCache]:
    """One decoder layer.

    Args:
        weights: by Hugging Face name, see `megakernel.weights`.
        layer: its number.
        x: [N, hidden_size], the residual stream.
        cos, sin: of `rotary_table` at the N positions that follow those of the cache.
        cache: of this layer.
        forced: experts to use instead of the router's.
        trace: takes the result of each op, by the names used in this function.

    Returns:
        The residual stream after the layer and the cache with N more positions.
    """
    prefix = f"model.layers.{layer}"
    own = {} if trace is None else trace

    def w(name):
        return weights[f"{prefix}.{name}.weight"]

    eps = config.rms_norm_eps
    own["attention_norm"] = normed = rms_norm(x, w("input_layernorm"), eps)
    own["q"] = q = q_proj(normed, w("self_attn.q_proj"), config, cos, sin)
    norm_weight = w("self_attn.kv_a_layernorm")
    latent, rotary_key = kv_a_proj(normed, w("self_attn.kv_a_proj_with_mqa"), norm_weight, config, cos, sin)
    keys, values = kv_b_proj(latent, rotary_key, w("self_attn.kv_b_proj"), config)
    own.update(latent=latent, rotary_key=rotary_key, keys=keys, values=values)
    pairs = zip(cache, (latent, rotary_key, keys, values), strict=True)
    cache = LayerCache(*(torch.cat(pair) for pair in pairs))
    own["attention"] = attended = attention(q, cache.keys, cache.values, config.softmax_scale)
    own["o"] = x = o_proj(attended, w("self_attn.o_proj"), x)

    own["mlp_norm"] = normed = rms_norm(x, w("post_attention_layernorm"), eps)
    if config.is_moe(layer):
        own["router_logits"] = logits = router_logits(normed, w("mlp.gate"))
        ids, factors = route(logits, config, forced)
        own.update(expert_ids=ids, expert_weights=factors)
        matrices = _Experts(weights, f"{prefix}.mlp.experts", config.n_routed_experts)
        own["routed"] = routed = experts(normed, ids, factors, matrices)
        own["shared"] = shared = swiglu(normed, *_swiglu_weights(weights, f"{prefix}.mlp.shared_experts"))
        own["out"] = x = combine(routed, shared, x)
    else:
        own["mlp"] = dense = swiglu(normed, *_swiglu_weights(weights, f"{prefix}.mlp"))
        own["out"] = x = x + dense
    return x, cache


@torch.no_grad()
def prefill(
    weights: Mapping[str, torch.Tensor],
    config: ModelConfig,
    tokens: Sequence[int] | torch.Tensor,
    cache: Cache | None = None,
    *,
    forced: Mapping[int, Forced] | None = None,
    trace: dict[Any, Any] | None = None,
) -> tuple[torch.Tensor, Cache]:
    """Logits after each of N tokens, and the cache that they leave.

    Args:
        weights: by Hugging Face name, see `megakernel.weights`; their dtype is computed in.
        tokens: N ids, at least one.
        cache: what came before; None is nothing.
        forced: by layer, experts to use instead of the router's, for re-running another implementation's routing.
            Layers left out route by themselves.
        trace: takes, by layer, the dictionary of that layer's results (`layer_step`), and under "embedding" and "norm"
            what surrounds the layers.

    Returns:
        Logits [N, V] in the dtype of the weights, and the cache, N positions longer.

    Raises:
        ValueError: no token, an id outside the vocabulary, or more positions than max_position_embeddings; `forced` as
            for `route`.
    """
    embedding = weights["model.embed_tokens.weight"]
    device = embedding.device
    tokens = torch.as_tensor(tokens, dtype=torch.int64, device=device)
    if tokens.dim() != 1 or not len(tokens):
        raise ValueError(f"tokens: expected one or more ids, found shape {tuple(tokens.shape)}")
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        wrong = tokens[(tokens < 0) | (tokens >= config.vocab_size)][0].item()
        raise ValueError(f"tokens: expected ids in [0, {config.vocab_size}), found {wrong}")
    if cache is None:
        cache = empty_cache(config, embedding.dtype, device)
    start = len(cache[0].latent)
    if start + len(tokens) > config.max_position_embeddings:
        raise ValueError(
            f"tokens: expected at most max_position_embeddings = {config.max_position_embeddings} positions, "
            f"found {start + len(tokens)}"
        )
    cos, sin = rotary_table(config, torch.arange(start, start + len(tokens), device=device))
    x = embedding[tokens]
    if trace is not None:
        trace["embedding"] = x
    layers = []
    for layer in range(config.num_hidden_layers):
        own = None if trace is None else trace.setdefault(layer, {})
        ids = None if forced is None else forced.get(layer)
        x, grown = layer_step(weights, config, layer, x, cos, sin, cache[layer], forced=ids, trace=own)
        layers.append(grown)
    x = rms_norm(x, weights["model.norm.weight"], config.rms_norm_eps)
    if trace is not None:
        trace["norm"] = x
    return lm_head(x, weights["lm_head.weight"]), tuple(layers)


def decode_step(
    weights: Mapping[str, torch.Tensor],
    config: ModelConfig,
    token: int,
    position: int,
    cache: Cache,
    *,
    forced: Mapping[int, Forced] | None = None,
    trace: dict[Any, Any] | None = None,
) -> tuple[torch.Tensor, Cache]:
    """Logits [V] after one token, and the cache with it.

    Args:
        token: its id.
        position: where it stands: how many positions the cache holds.
        cache: of `prefill`, an earlier step, or `empty_cache`.
        weights, forced, trace: as for `prefill`; N is 1.

    Raises:
        ValueError: as for `prefill`, or the cache doesn't end before `position`.
    """
    length = len(cache[0].latent)
    if position != length:
        raise ValueError(f"position: expected {length}, the length of the cache, found {position}")
    logits, cache = prefill(weights, config, [int(token)], cache, forced=forced, trace=trace)
    return logits[0], cache


def greedy(
    weights: Mapping[str, torch.Tensor], config: ModelConfig, prompt: Sequence[int] | torch.Tensor, count: int
) -> tuple[list[int], torch.Tensor]:
    """Decode `count` tokens after a prompt, each the one of the largest logit; no token ends the decode.

    Returns:
        The ids and the logits [count, V] that they are the largest of.
    """
    logits, cache = prefill(weights, config, prompt)
    step, ids, kept = logits[-1], [], []
    for number in range(count):
        if number:
            step, cache = decode_step(weights, config, ids[-1], len(cache[0].latent), cache)
        ids.append(int(step.argmax()))
        kept.append(step)
    return ids, torch.stack(kept)
