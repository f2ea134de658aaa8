"""`DeepseekV2ForCausalLM` of transformers over the weights of this package, and its greedy decode: eager, and captured
in a CUDA graph.

The model shares the memory of the weights: at full size they are 31 GB and exist once. Works with the releases of
transformers that call the cache `past_key_values` and those that call it `cache`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megakernel.bench.decoding import Routing
from megakernel.config import ModelConfig

CACHE_MULTIPLE = 64
"""A static cache has a multiple of so many rows: the alignment that fast kernels of attention ask of a mask."""
PREFILL = "eager", "eager"
"""Experts and attention of the prefill, which isn't timed. "batched_mm" copies the experts of each token: over 100 GB
for 1,024 tokens of DeepSeek-V2-Lite."""
WARM_UP = 3
"""Steps before a capture: PyTorch asks for some, so that libraries make their workspaces outside the graph."""


def share(weights: dict[str, torch.Tensor], config: ModelConfig) -> Any:
    """A `DeepseekV2ForCausalLM`, eager in attention and experts, whose parameters are the tensors of `weights`.

    transformers keeps the experts of a layer in two stacks. They are built layer by layer, and the entries of `weights`
    become views of them, so that both hold the same memory: no more than one layer exists twice at any time.

    Args:
        weights: by Hugging Face name, see `megakernel.weights`; its matrices of experts are replaced.
        config: of the model.

    Raises:
        ImportError: transformers is not installed.
        KeyError, RuntimeError: a tensor is missing, unexpected or has another shape than the model's.
    """
    import transformers

    with torch.device("meta"):
        model = transformers.DeepseekV2ForCausalLM(config.to_hf())
    state = {}
    for layer in range(config.num_hidden_layers):
        if config.is_moe(layer):
            state.update(_stack(weights, f"model.layers.{layer}.mlp.experts", config))
    routed = ".mlp.experts."
    state.update({name: tensor for name, tensor in weights.items() if routed not in name})
    model.load_state_dict(state, strict=True, assign=True)
    # frequencies are no part of a checkpoint; on the CPU first, since powers may round otherwise on a GPU
    rotary = type(model.model.rotary_emb)(config=model.config)
    model.model.rotary_emb = rotary.to(weights["lm_head.weight"].device)
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if left:
        raise RuntimeError(f"transformers has tensors that nothing was loaded into: {', '.join(left)}")
    return model.eval().requires_grad_(False)


def _stack(weights, prefix: str, config: ModelConfig) -> dict[str, torch.Tensor]:
    """The two stacks of a layer's experts, [E, 2 I, D] with gate above up and [E, D, I]."""
    count, width, hidden = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
    like = weights[f"{prefix}.0.gate_proj.weight"]
    gate_up, down = like.new_empty(count, 2 * width, hidden), like.new_empty(count, hidden, width)
    for expert in range(count):
        places = {
            "gate_proj": gate_up[expert, :width],
            "up_proj": gate_up[expert, width:],
            "down_proj": down[expert],
        }
        for name, place in places.items():
            key = f"{prefix}.{expert}.{name}.weight"
            weights[key] = place.copy_(weights[key])
    return {f"{prefix}.gate_up_proj": gate_up, f"{prefix}.down_proj": down}


@contextlib.contextmanager
def watching(model, watch: bool = True) -> Iterator[dict[int, Routing]]:
    """A dictionary that forward passes of the model fill: by layer with experts, what its router said last."""
    routing, handles = {}, []

    def keep(layer):
        def hook(module, inputs, output):
            logits, _, experts = output
            routing[layer] = Routing(logits, experts)

        return hook

    try:
        for number, layer in enumerate(model.model.layers):
            if watch and hasattr(layer.mlp, "gate"):
                handles.append(layer.mlp.gate.register_forward_hook(keep(number)))
        yield routing
    finally:
        for handle in handles:
            handle.remove()


class EagerDecoder:
    """A decode as users write it: the cache grows, the next token is the argmax of the last logits.

    `start` sets the implementations in the model, so decoders that share one take turns: no step after another's start.

    Args:
        model: of `share`.
        prompt: ids.
        experts, attention: implementations of the decode steps, by the names of transformers; the prefill is eager.
    """

    system = "transformers-eager"

    def __init__(self, model, prompt: Sequence[int], experts: str = "eager", attention: str = "eager"):
        self.model, self.experts, self.attention = model, experts, attention
        self.watch, self.routing = False, {}
        self.device = model.lm_head.weight.device
        self.prompt = torch.as_tensor(prompt, dtype=torch.int64, device=self.device)[None]
        names = inspect.signature(type(model).forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    @property
    def config(self) -> str:
        """What sets this decode apart, in words."""
        return f"experts {self.experts}, attention {self.attention}"

    def start(self) -> None:
        """See `decoding.Decoder`. ValueError for an implementation that transformers doesn't have."""
        from transformers import DynamicCache

        self._use(*PREFILL)
        self._cache = DynamicCache(config=self.model.config)
        self._chosen = []
        self._advance(self.prompt)
        self._use(self.experts, self.attention)

    def step(self) -> None:
        self._advance(self._chosen[-1].view(1, 1))

    def tokens(self) -> list[int]:
        return torch.stack(self._chosen).tolist()

    def _advance(self, ids) -> None:
        self.logits = self._forward(ids)
        self._chosen.append(self.logits.argmax())

    def _use(self, experts: str, attention: str) -> None:
        self.model.set_experts_implementation(experts)
        self.model.set_attn_implementation(attention)

    @torch.no_grad()
    def _forward(self, ids, **given) -> torch.Tensor:
        """Logits [V] after ids [1, N]."""
        given[self._cache_name] = self._cache
        with watching(self.model, self.watch) as self.routing:
            return self.model(ids, use_cache=True, logits_to_keep=1, **given).logits[0, -1]


class StaticDecoder(EagerDecoder):
    """A decode that a CUDA graph can hold: nothing of a step depends on values that the host would have to know.

    The cache has a fixed number of rows, later ones masked; the mask, the position and the token that was chosen live
    on the device. Experts must not be "eager": those loop over the experts that are used.

    Args:
        steps: most decode steps after a `start`.
    """

    system = "transformers-graph"

    def __init__(self, model, prompt, steps: int, experts: str = "batched_mm", attention: str = "sdpa"):
        from transformers import StaticCache

        super().__init__(model, prompt, experts, attention)
        length = self.prompt.shape[1]
        self.rows = -(-(length + steps) // CACHE_MULTIPLE) * CACHE_MULTIPLE
        self._cache = StaticCache(config=model.config, max_cache_len=self.rows)
        self._columns = torch.arange(self.rows, device=self.device)
        self._first = self._columns[:length]
        self._position = torch.zeros(1, dtype=torch.int64, device=self.device)  # where the next token goes
        self._token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        self._history = torch.zeros(self.rows + 1, dtype=torch.int64, device=self.device)  # by position
        self._replay = None
        self._taken = 0

    @property
    def config(self) -> str:
        return f"{super().config}, static cache of {self.rows} rows"

    def start(self) -> None:
        self._use(*PREFILL)
        for layer in self._cache.layers:
            layer.cumulative_length.zero_()  # in place: a captured step reads it
        self.logits = self._forward(self.prompt, self._first)
        self._position.fill_(self.prompt.shape[1])
        self._record()
        self._taken = 0
        self._use(self.experts, self.attention)

    def step(self) -> None:
        """See `decoding.Decoder`. IndexError after more steps than the cache has room for."""
        if self.prompt.shape[1] + self._taken >= self.rows:
            raise IndexError(f"the static cache has {self.rows} rows, all of them taken")
        self._taken += 1
        if self._replay is None:
            self._step()
        else:
            self._replay()
            self.logits, self.routing = self._captured

    def tokens(self) -> list[int]:
        first = self.prompt.shape[1]
        return self._history[first : first + self._taken + 1].tolist()

    def capture(self) -> None:
        """Capture a step in a CUDA graph; later steps replay it.

        Raises:
            RuntimeError, AssertionError: of torch, where there is no GPU or a step can't be captured.
        """
        with torch.cuda.device(self.device):
            self.start()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(min(WARM_UP, self.rows - self.prompt.shape[1])):
                    self._step()
            torch.cuda.current_stream().wait_stream(side)
            self.start()
            torch.cuda.synchronize()
            graph, self.watch = torch.cuda.CUDAGraph(), True  # which costs a replay nothing
            try:
                with torch.cuda.graph(graph):
                    self._step()
            finally:
                self.watch = False
            torch.cuda.synchronize()
        # a replay writes into the memory of these
        self._captured, self._replay = (self.logits, self.routing), graph.replay

    def _step(self) -> None:
        self.logits = self._forward(self._token, self._position)
        self._position.add_(1)
        self._record()

    def _record(self) -> None:
        """Choose the token at the present position and note it."""
        self._token.copy_(self.logits.argmax())
        self._history.index_copy_(0, self._position, self._token[0])

    def _forward(self, ids, positions) -> torch.Tensor:
        """Logits [V] after ids [1, N] at positions [N].

        The mask is given: the one that transformers makes for eager attention copies a number from the host in some
        releases, which no capture allows.
        """
        seen = (self._columns <= positions[:, None])[None, None]
        if self.model.config._attn_implementation == "eager":
            dtype = self.model.lm_head.weight.dtype
            seen = torch.zeros(seen.shape, dtype=dtype, device=self.device).masked_fill(~seen, torch.finfo(dtype).min)
        return super()._forward(ids, attention_mask=seen, position_ids=positions[None])
