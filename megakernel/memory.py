"""The memory of a decode: weights, caches and activations in three arenas, and views of what lies in them.

Device code and the interpreter (`megakernel.vm`) work on the same `Memory`; `megakernel.table.layout` says what lies
where.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import torch

from megakernel import abi
from megakernel.reference import Cache, rotary_table
from megakernel.table import Layout, Table, fill
from megakernel.tagged import short_name, tagged
from megakernel.tasks import Graph

POISON = 0xFF
"""Each byte of caches and activations before they are written: NaN in bf16 and fp32, -1 as an integer, so that what is
read too early shows."""


class Routing(NamedTuple):
    """The experts that the last token chose in a layer."""

    ids: torch.Tensor
    """int16 [k], most likely first."""
    weights: torch.Tensor
    """fp32 [k]: probabilities times routed_scaling_factor."""
    logits: torch.Tensor
    """fp32 [n_routed_experts]."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Three arenas, uint8, and the table of rotations, all on one device. Tables of the same graph can share one."""

    graph: Graph
    place: Layout
    weights: torch.Tensor
    """uint8 [place.weights_bytes]."""
    cache: torch.Tensor
    """uint8 [place.cache_bytes]; kept from launch to launch."""
    work: torch.Tensor
    """uint8 [place.work_bytes]; of it only the last token is kept from launch to launch."""
    rotary: torch.Tensor
    """fp32 [capacity, qk_rope_head_dim / 2, 2]: cosine and sine of each pair at each position."""

    @classmethod
    def of(cls, table: Table, weights: Mapping[str, torch.Tensor], device: torch.device | str | None = None) -> Memory:
        """Memory for a table, with a checkpoint's weights and no position in the cache.

        Args:
            weights: by Hugging Face name, bf16; see `megakernel.weights`.
            device: where it is; None is where the weights are.

        Raises:
            ValueError: a weight is not bf16.
        """
        graph, place = table.graph, table.place
        device = torch.device(weights["lm_head.weight"].device if device is None else device)
        arenas = [
            torch.empty(size, dtype=torch.uint8, device=device)
            for size in (place.weights_bytes, place.cache_bytes, place.work_bytes)
        ]
        fill(graph, place, weights, arenas[0])
        angles = rotary_table(graph.config, torch.arange(graph.knobs.tokens, device=device))
        memory = cls(graph, place, *arenas, torch.stack(angles, -1).contiguous())
        memory.reset()
        return memory

    @property
    def capacity(self) -> int:
        """Positions that the cache has room for: the knob `tokens`."""
        return self.graph.knobs.tokens

    def reset(self) -> None:
        """Forgets all positions and the last token."""
        self.cache.fill_(POISON)
        self.work.fill_(POISON)

    def begin(self) -> None:
        """Forgets all activations but the last token, so that whatever has a tag is of the launch that begins."""
        token = self.tensor("token")
        last = token.clone()
        self.work.fill_(POISON)
        token.copy_(last)

    def check(self, table: Table) -> None:
        """Raises ValueError unless a table's tensors lie where this memory has them."""
        if (table.place, table.graph.config) != (self.place, self.graph.config):
            raise ValueError("memory: expected one made for this table or for another of the same graph")

    def has_token(self) -> bool:
        """Whether a launch has left a token to read. Waits for the device."""
        return self.tensor("token").item() >= 0

    # ----------------------------------------------------------------------------------------------------------- views

    def tensor(self, name: str) -> torch.Tensor:
        """A view of a tensor of the graph by its name there, such as "layers.1.q".

        Returns:
            bf16 [count, rows, cols] without the dimensions of size 1 that the graph leaves out: weights of all experts
            are [n_routed_experts, rows, cols], activations of slots [k, rows]. fp32 are "logits" [V],
            "mlp.router_logits" [n_routed_experts] and "mlp.partials" [splits, hidden_size], "attn_partials" [chunks, H,
            width + abi.PARTIAL_STATS] as well (output, largest score, sum, padding). "token" is int32 [1].
            Records are bytes: "argmax_partials" [parts, bytes] and "mlp.routing" [k, bytes] without the logits behind
            them; see `routing`. Tagged activations are every second item of their memory (`abi.TAGGED_BF16`).

        Raises:
            KeyError: the graph has no such tensor.
        """
        if name not in self.graph.tensors:
            raise KeyError(f"no tensor {name!r} in this graph")
        tensor = self.graph.tensors[name]
        arenas = {"matrix": "weights", "vector": "weights", "cache": "cache", "activation": "work"}
        arena = getattr(self, arenas[tensor.kind])
        start = getattr(self.place, arenas[tensor.kind])[name]
        short = short_name(tensor)
        dtype, shape = torch.bfloat16, [tensor.rows, tensor.cols]
        if short == "attn_partials":
            heads = self.graph.config.num_attention_heads
            dtype, shape = torch.float32, [tensor.rows, heads, tensor.cols // heads + abi.PARTIAL_STATS]
        elif short in ("mlp.routing", "argmax_partials"):
            record = abi.dtype("Routing" if short == "mlp.routing" else "Partial")
            dtype, shape = torch.uint8, [tensor.rows, record.itemsize]
        else:
            if short in ("mlp.partials", "mlp.router_logits", "logits"):
                dtype = torch.float32
            elif short == "token":
                dtype = torch.int32
            if tensor.kind == "vector" or (tensor.kind == "activation" and tensor.cols == 1):
                shape = shape[:1]
            if tensor.count > 1:
                shape = [tensor.count, *shape]
        items, size = torch.Size(shape).numel(), dtype.itemsize
        if not tagged(tensor) or dtype == torch.uint8:
            return arena[start : start + size * items].view(dtype).view(shape)
        # the upper half of each word
        return arena[start : start + 2 * size * items].view(dtype)[1::2].view(shape)

    def routing(self, layer: int) -> Routing:
        """Views of what the router of a layer chose for the last token. Raises KeyError for a layer without experts."""
        name = f"layers.{layer}.mlp.routing"
        chosen = self.tensor(name)
        start = self.place.work[name] + chosen.numel()
        size = abi.TAGGED_FP32 * self.graph.config.n_routed_experts
        logits = self.work[start : start + size].view(torch.float32)[1::2]
        return Routing(chosen.view(torch.int16)[:, 1], chosen.view(torch.float32)[:, 1], logits)

    def named_weights(self) -> dict[str, torch.Tensor]:
        """The weights by Hugging Face name, as `megakernel.weights` has them.

        They are views of the arena; only the two halves of an absorbed kv_b_proj are put together anew.
        """
        c = self.graph.config
        named = {}
        for name, tensor in self.graph.tensors.items():
            if tensor.kind not in ("matrix", "vector"):
                continue
            short = name.removesuffix(".weight")
            prefix = "" if short == "lm_head" else "model."
            if short.endswith(".kv_b_proj.k_transposed"):
                short = short.removesuffix(".k_transposed")
                heads = c.num_attention_heads
                keys = self.tensor(name).view(heads, c.kv_lora_rank, -1).transpose(1, 2)
                values = self.tensor(f"{short}.v").view(heads, -1, c.kv_lora_rank)
                named[f"{prefix}{short}.weight"] = torch.cat((keys, values), 1).flatten(0, 1)
            elif short.endswith(".kv_b_proj.v"):
                continue
            elif ".experts." in short:
                before, matrix = short.rsplit(".", 1)
                for expert, view in enumerate(self.tensor(name).view(tensor.count, tensor.rows, tensor.cols)):
                    named[f"{prefix}{before}.{expert}.{matrix}.weight"] = view
            else:
                named[f"{prefix}{short}.weight"] = self.tensor(name)
        return named

    # ----------------------------------------------------------------------------------------------------------- cache

    def load_cache(self, cache: Cache) -> None:
        """Takes over the positions of a reference's cache, from 0 on; those behind them are forgotten.

        Raises:
            ValueError: there are more positions than the cache has room for, they are not bf16, or layers are missing.
        """
        c = self.graph.config
        if len(cache) != c.num_hidden_layers:
            raise ValueError(f"cache: expected {c.num_hidden_layers} layers, got {len(cache)}")
        length = len(cache[0].latent)
        if length > self.capacity:
            raise ValueError(f"cache: expected at most {self.capacity} positions (the knob `tokens`), got {length}")
        if cache[0].latent.dtype != torch.bfloat16:
            raise ValueError(f"cache: expected torch.bfloat16, got {cache[0].latent.dtype}")
        self.cache.fill_(POISON)
        for number, layer in enumerate(cache):
            prefix = f"layers.{number}"
            if self.graph.knobs.mla == "absorbed":
                rows = torch.cat((layer.latent, layer.rotary_key), -1)
                self.tensor(f"{prefix}.latent_cache")[:length] = rows.to(self.cache.device)
            else:
                expanded = torch.cat((layer.keys[..., : c.qk_nope_head_dim], layer.values), -1)
                self.tensor(f"{prefix}.kv_cache")[:length] = expanded.flatten(1).to(self.cache.device)
                self.tensor(f"{prefix}.rope_cache")[:length] = layer.rotary_key.to(self.cache.device)
