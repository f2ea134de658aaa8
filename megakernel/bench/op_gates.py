"""Every op of a token that a launch decoded, against the same op in PyTorch on the very inputs that the launch left.

No activation is overwritten while a token is decoded, so after a launch the memory still holds what went into each op
and what came out of it. An op's error is then its own: not what earlier ops did to its input. Results are in the order
in which they are computed; every knob of the graph has its results.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import silu

from fmms.reference import ieee_matmul
from megakernel import abi
from megakernel.config import KV_NORM_EPS
from megakernel.memory import Memory
from megakernel.reference import rms_norm, rotary_table, rotate, route
from megakernel.tasks import Graph

SHARE, FLOOR = 0.02, 1e-3
"""Largest error of a result: SHARE of the largest entry of PyTorch's, and FLOOR."""
ULPS = 2.0**-21
"""Relative distance of two probabilities that exp and the sum of a softmax can turn around in fp32: four roundings."""

COLUMNS = ("layer", "op", "result", "max_error", "max_reference", "bound", "share", "cosine", "passed")
"""Of the rows of `check`. layer: empty outside the layers. op: the graph's, that computes the result. result: what of
it. max_error: the largest difference from PyTorch's result, max_reference: the largest entry of that; of choices (bound
0) how many are wrong, of how many. share: error over bound. cosine: of the two results, empty for choices."""

ALONE = " alone"
"""End of the name of a result that is added to the residual stream, compared without it."""


def writers(graph: Graph) -> dict[str, str]:
    """The name of the op that writes each tensor of the graph."""
    found: dict[str, str] = {}
    for op in graph.ops:
        for task in op.tasks:
            for part in graph.tasks[task].writes:
                found.setdefault(part.tensor, op.name)
    return found


def check(
    memory: Memory, token: int, position: int, *, weights: Mapping[str, torch.Tensor] | None = None
) -> list[dict]:
    """Compares each op of the last token that a launch decoded with PyTorch: rows of `COLUMNS`.

    Sums are fp32 on the device of the memory, results are rounded where `megakernel.reference` rounds; attention is
    fp32 throughout. A row passed if its error is at most 2 % of the largest entry of PyTorch's result and 1e-3; choices
    and copies have to be equal. What is added to the residual stream has a second row (`ALONE`) which leaves the stream
    out of the bound: a stream of large entries would hide a wrong addition.

    Args:
        memory: after a greedy launch.
        token: the id that was read.
        position: where it stands: how many positions were in the cache before.
        weights: by Hugging Face name; None is what the memory holds.

    Raises:
        ValueError: no launch has decoded a token into this memory.
    """
    if not memory.has_token():
        raise ValueError("memory: expected one into which a launch has decoded a token")
    return _Check(memory, token, position, memory.named_weights() if weights is None else weights).run()


class _Check:
    """The rows of one token, in the order of its ops."""

    def __init__(self, memory: Memory, token: int, position: int, weights: Mapping[str, torch.Tensor]):
        self.memory, self.token, self.position, self.weights = memory, token, position, weights
        self.graph, self.config, self.device = memory.graph, memory.graph.config, memory.work.device
        self.absorbed = self.graph.knobs.mla == "absorbed"
        self.writers = writers(self.graph)
        self.ops = {(op.layer, op.name): op for op in self.graph.ops}
        self.rotation = rotary_table(self.config, torch.tensor([position], device=self.device))
        self.layer: int | None = None
        self.rows: list[dict] = []

    @torch.no_grad()
    def run(self) -> list[dict]:
        self.row("embedding", "embedded", self.weights["model.embed_tokens.weight"][self.token], bound=0.0)
        x = self.tensor("embedded")
        for layer in range(self.config.num_hidden_layers):
            self.layer = layer
            self.attention(x)
            x = self.tensor("attn_residual")
            if self.config.is_moe(layer):
                self.experts(x)
            else:
                self.dense(x)
            x = self.tensor("mlp_residual")
        self.layer = None
        self.head(x)
        return self.rows

    # ------------------------------------------------------------------------------------------------- names and rows

    def name(self, tensor: str) -> str:
        return tensor if self.layer is None else f"layers.{self.layer}.{tensor}"

    def has(self, tensor: str) -> bool:
        return self.name(tensor) in self.graph.tensors

    def tensor(self, tensor: str) -> torch.Tensor:
        """What the launch left, of this layer."""
        return self.memory.tensor(self.name(tensor))

    def weight(self, name: str) -> torch.Tensor:
        """By the end of its Hugging Face name, of this layer."""
        return self.weights[f"model.{self.name(name)}.weight"]

    def row(self, result: str, tensor: str, expected, found=None, bound: float | None = None) -> None:
        """Adds the row of a result that is in `tensor`, or of `found` where that is a part of it or follows from it."""
        found = self.tensor(tensor) if found is None else found
        error = (found.float() - expected.float()).abs().max().item()
        most = expected.float().abs().max().item()
        self.add(
            result, tensor, error, most, SHARE * most + FLOOR if bound is None else bound, _cosine(found, expected)
        )

    def choices(self, result: str, tensor: str, wrong: int, of: int) -> None:
        """Adds the row of choices that have to be right."""
        self.add(result, tensor, float(wrong), float(of), 0.0, None)

    def added(self, result: str, tensor: str, residual: torch.Tensor, part: torch.Tensor) -> None:
        """Adds the rows of residual + part: as it is, and without the stream."""
        expected, found = residual + part, self.tensor(tensor)
        self.row(f"{result} + residual", tensor, expected)
        # where the exact sums differ by a little, rounding may put them one bf16 step apart
        size = torch.maximum(found.float().abs(), expected.float().abs())
        step = torch.exp2(torch.floor(torch.log2(size.clamp_min(2.0**-126))) - 7)
        error = ((found.float() - expected.float()).abs() - step).clamp_min(0).max().item()
        most = part.float().abs().max().item()
        self.add(f"{result}{ALONE}", tensor, error, most, SHARE * most + FLOOR, None)

    def add(self, result: str, tensor: str, error: float, most: float, bound: float, cosine: float | None) -> None:
        if bound:
            share = error / bound
        else:
            share = error if error == 0 else float("nan") if error != error else float("inf")
        self.rows.append(
            dict(
                layer=self.layer,
                op=self.writers[self.name(tensor)],
                result=result,
                max_error=error,
                max_reference=most,
                bound=bound,
                share=share,
                cosine=cosine,
                passed=error <= bound,  # a NaN is no pass
            )
        )

    # -------------------------------------------------------------------------------------------------------------- ops

    def normed(self, result: str, norm: str, x: torch.Tensor) -> torch.Tensor:
        """The normalised state that ops read: of an op of its own, or PyTorch's where readers normalise."""
        expected = rms_norm(x, self.weight(norm), self.config.rms_norm_eps)
        if not self.has(f"{norm}.out"):
            return expected
        self.row(result, f"{norm}.out", expected)
        return self.tensor(f"{norm}.out")

    def attention(self, x: torch.Tensor) -> None:
        c = self.config
        heads, nope = c.num_attention_heads, c.qk_nope_head_dim
        normed = self.normed("input norm", "input_layernorm", x)
        self.row("q", "q", _gemv(self.weight("self_attn.q_proj"), normed))
        self.row("kv_a", "kva", _gemv(self.weight("self_attn.kv_a_proj_with_mqa"), normed))

        q = self.tensor("q").view(heads, c.qk_head_dim)
        plain, rotated = q[:, :nope], rotate(q[:, nope:], *self.rotation)
        if self.has("q_rotated"):
            self.row("rotated q", "q_rotated", rotated.flatten())
            rotated = self.tensor("q_rotated").view(heads, -1)
        latent, key = self.tensor("kva").split([c.kv_lora_rank, c.qk_rope_head_dim])
        latent = rms_norm(latent, self.weight("self_attn.kv_a_layernorm"), KV_NORM_EPS)
        key = rotate(key[None], *self.rotation)[0]
        if self.has("latent"):
            self.row("latent", "latent", latent)
            latent = self.tensor("latent")

        now, weight = self.position, self.weight("self_attn.kv_b_proj")
        if self.absorbed:
            cache = self.tensor("latent_cache")[: now + 1]
            self.row("cache: latent", "latent_cache", latent, cache[now, : c.kv_lora_rank])
            self.row("cache: rotary key", "latent_cache", key, cache[now, c.kv_lora_rank :])
            to_keys, to_values = weight.view(heads, -1, c.kv_lora_rank).split([nope, c.v_head_dim], 1)
            absorbed = ieee_matmul(plain[:, None], to_keys)[:, 0].bfloat16()
            self.row("absorbed q", "q_absorbed", absorbed.flatten())
            latents, keys = cache.split([c.kv_lora_rank, c.qk_rope_head_dim], 1)
            scores = ieee_matmul(self.tensor("q_absorbed").view(heads, -1), latents.T)
            values = latents[None]
        else:
            cache, keys = self.tensor("kv_cache")[: now + 1], self.tensor("rope_cache")[: now + 1]
            self.row("cache: rotary key", "rope_cache", key, keys[now])
            self.row("cache: keys, values", "kv_cache", _gemv(weight, latent), cache[now])
            cache = cache.view(now + 1, heads, -1).transpose(0, 1)
            scores = ieee_matmul(cache[..., :nope], plain[..., None])[..., 0]
            values = cache[..., nope:]
        scores = (scores + ieee_matmul(rotated, keys.T)) * c.softmax_scale
        expected = ieee_matmul(scores.softmax(-1)[:, None], values)[:, 0]
        merged = self.merged()
        self.row("attention", "attn_partials", expected.flatten(), merged)

        merged = merged.bfloat16()
        if self.has("attn_merged"):
            self.row("merge", "attn_merged", merged)
            merged = self.tensor("attn_merged")
        if self.absorbed:
            expected = ieee_matmul(to_values, merged.view(heads, -1, 1))[..., 0].bfloat16()
            self.row("absorb out", "attn_out", expected.flatten())
            merged = self.tensor("attn_out")
        self.added("o_proj", "attn_residual", x, _gemv(self.weight("self_attn.o_proj"), merged))

    def merged(self) -> torch.Tensor:
        """fp32 [heads * width]: what the chunks of attention come to together."""
        parts = self.tensor("attn_partials")
        width = parts.shape[-1] - abi.PARTIAL_STATS
        largest, total = parts[..., width], parts[..., width + 1]
        factors = torch.exp(largest - largest.amax(0))
        return ((factors[..., None] * parts[..., :width]).sum(0) / (factors * total).sum(0)[:, None]).flatten()

    def dense(self, x: torch.Tensor) -> None:
        normed = self.normed("MLP norm", "post_attention_layernorm", x)
        self.row("gate_up", "mlp.hidden", _swiglu(self.weight("mlp.gate_proj"), self.weight("mlp.up_proj"), normed))
        hidden, parts, down = self.tensor("mlp.hidden"), self.tensor("mlp.partials"), self.weight("mlp.down_proj")
        tasks = [self.graph.tasks[task] for task in self.ops[self.layer, "DOWN_SPLITK"].tasks]
        spans = sorted({task.chunk for task in tasks})
        expected = torch.stack([ieee_matmul(down[:, low:high], hidden[low:high]) for low, high in spans])
        self.row("down", "mlp.partials", expected)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        self.added("reduce", "mlp_residual", x, total.bfloat16())

    def experts(self, x: torch.Tensor) -> None:
        c = self.config
        normed = self.normed("MLP norm", "post_attention_layernorm", x)
        routing = self.memory.routing(self.layer)
        logits = "mlp.router_logits" if self.has("mlp.router_logits") else "mlp.routing"
        self.row("router logits", logits, ieee_matmul(self.weight("mlp.gate"), normed), routing.logits)
        scores = routing.logits.softmax(0)
        ids, chosen = route(routing.logits[None], c)[0][0], routing.ids.long()
        within = ((chosen >= 0) & (chosen < c.n_routed_experts)).all().item()
        if within:
            # exactly the ids of the sorted probabilities, but for what rounding in another exp could turn around
            apart = (scores[chosen] - scores[ids]).abs() > ULPS * scores[ids]
            tie = routing.logits[chosen] == routing.logits[ids]
            wrong = int(((chosen != ids) & (apart | tie)).sum()) + len(chosen) - len(chosen.unique())
        else:
            wrong = len(chosen)
        self.choices("top-k ids", "mlp.routing", wrong, len(chosen))
        nothing = torch.full((len(chosen), 1), torch.nan, device=self.device)  # of experts that don't exist
        weights = scores[chosen] * c.routed_scaling_factor if within else nothing[:, 0]
        self.row("top-k weights", "mlp.routing", weights, routing.weights)

        hidden = _swiglu(self.weight("mlp.shared_experts.gate_proj"), self.weight("mlp.shared_experts.up_proj"), normed)
        self.row("shared w13", "mlp.shared_experts.hidden", hidden)
        shared = _gemv(self.weight("mlp.shared_experts.down_proj"), self.tensor("mlp.shared_experts.hidden"))
        self.row("shared w2", "mlp.shared_experts.out", shared)

        # with slots, outputs are in the order of the choices
        places = torch.arange(len(chosen), device=self.device) if self.graph.knobs.experts == "slots" else chosen
        hidden = out = nothing
        found_hidden = found_out = nothing
        if within:
            gate, up, down = (
                torch.stack([self.weight(f"mlp.experts.{expert}.{matrix}_proj") for expert in chosen.tolist()])
                for matrix in ("gate", "up", "down")
            )
            found_hidden = self.tensor("mlp.experts.hidden").view(-1, c.moe_intermediate_size)[places]
            found_out = self.tensor("mlp.experts.out").view(-1, c.hidden_size)[places]
            hidden = _swiglu(gate, up, normed)
            out = ieee_matmul(down, found_hidden[..., None])[..., 0].bfloat16()
        self.worst("routed w13", "mlp.experts.hidden", hidden, found_hidden)
        self.worst("routed w2", "mlp.experts.out", out, found_out)

        total = torch.zeros_like(x)
        for _, slot in sorted(zip(chosen.tolist(), range(len(chosen)), strict=True)):
            total = total + (found_out[slot].float() * routing.weights[slot]).bfloat16()
        self.added("combine", "mlp_residual", x, total + self.tensor("mlp.shared_experts.out"))

    def worst(self, result: str, tensor: str, expected: torch.Tensor, found: torch.Tensor) -> None:
        """Adds the row of the expert with the largest share of its bound, [k, n]: each has matrices of its own."""
        errors = (found.float() - expected.float()).abs().amax(1)
        shares = errors / (SHARE * expected.float().abs().amax(1) + FLOOR)
        slot = shares.nan_to_num(torch.inf).argmax().item()
        self.row(result, tensor, expected[slot], found[slot])

    def head(self, x: torch.Tensor) -> None:
        normed = self.normed("final norm", "norm", x)
        logits = self.tensor("logits")
        self.row("lm_head", "logits", ieee_matmul(self.weights["lm_head.weight"], normed))
        partials = self.tensor("argmax_partials").cpu().numpy().reshape(-1).view(abi.dtype("Partial"))
        found = torch.tensor([partials["largest"].tolist(), partials["argmax"].tolist()], dtype=torch.float64)
        logits, expected = logits.double().cpu(), []
        for task in self.ops[None, "ARGMAX_PARTIAL"].tasks:
            first, end = self.graph.tasks[task].chunk
            at = first + _first_largest(logits[first:end])
            expected.append([logits[at].item(), at])
        wrong = (found != torch.tensor(expected, dtype=torch.float64).T).any(0)
        self.choices("argmax of shares", "argmax_partials", int(wrong.sum()), len(partials))
        best = int(found[1][_first_largest(found[0])])
        self.choices("argmax", "token", int(self.tensor("token").item() != best), 1)


def worst(rows: list[dict]) -> list[dict]:
    """Of each result the row with the largest share of its bound, with `n` rows and `failed` ones among them."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["result"], []).append(row)
    return [
        max(some, key=lambda row: _rank(row["share"]))
        | dict(n=len(some), failed=sum(not row["passed"] for row in some))
        for some in groups.values()
    ]


def _first_largest(values: torch.Tensor) -> int:
    """Where the largest value is, or the first NaN; torch doesn't promise which of equal ones it returns."""
    largest = values.max()
    return int(torch.nonzero(values.isnan() if largest.isnan() else values == largest)[0])


def _rank(share: float) -> float:
    return float("inf") if share != share else share


def _gemv(matrix: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """bf16 [..., rows] of fp32 sums."""
    return ieee_matmul(matrix, x).bfloat16()


def _swiglu(gate: torch.Tensor, up: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return silu(_gemv(gate, x)) * _gemv(up, x)


def _cosine(found: torch.Tensor, expected: torch.Tensor) -> float:
    return torch.cosine_similarity(found.flatten().double(), expected.flatten().double(), 0).item()
