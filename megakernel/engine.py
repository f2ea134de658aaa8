"""Decodes a DeepSeek-V2-Lite: a prompt goes in, and each launch of the megakernel adds tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from fmms import noise
from fmms.arguments import check_integer, check_seed, fail
from megakernel import reference, weights
from megakernel.build import BuildConfig
from megakernel.config import ModelConfig
from megakernel.graph import build
from megakernel.knobs import PRESETS, Knobs
from megakernel.memory import Memory
from megakernel.native import Native
from megakernel.schedule import static
from megakernel.table import pack

SCHEDULES = ("static", "dynamic")
CPU_WORKERS = 4


class Decoded(NamedTuple):
    """Tokens that a launch decoded."""

    tokens: torch.Tensor
    """int64 [n]; -1 where a logit was NaN or +inf, or none was finite."""
    logits: torch.Tensor | None
    """fp32 [n, vocab_size] that they were sampled from, if asked for."""
    times: torch.Tensor
    """int64 [n]: nanoseconds of the device's clock when each was sampled."""


class DecodeEngine:
    """One sequence, decoded from its embedding to the sampled token in a single launch for any number of tokens.

        engine = DecodeEngine.random(V2_LITE, seed=0, device="cuda")
        engine.prefill(prompt)
        engine.decode(32, temperature=0.8, seed=7).tokens

    On a GPU the megakernel runs; on a CPU the same task code does, with a fibre for each GPU thread: for tests and for
    reading along, at the size of `TINY`.

    Args:
        config: of the model.
        weights: by Hugging Face name, bf16 (`megakernel.weights`); they are copied.
        device: where to decode; None is where the weights are.
        knobs: of the graph; None is the preset "h200". `tokens` and `workers` are set by the next two.
        capacity: positions that the cache has room for, prompt and decoded tokens together.
        workers: blocks of the launch; None is one for each multiprocessor of the GPU.
        schedule: "static" deals the tasks out before the launch, "dynamic" lets workers take what is ready.
        build_config: of the device code; None is what the graph needs.

    Raises:
        ValueError: an argument is wrong, or the model can't be decoded; the message names it.
        BuildError: the device code can't be compiled here.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        device: torch.device | str | None = None,
        *,
        knobs: Knobs | None = None,
        capacity: int = 1056,
        workers: int | None = None,
        schedule: str = "static",
        build_config: BuildConfig | None = None,
    ):
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, not {schedule!r}")
        device = torch.device(weights["lm_head.weight"].device if device is None else device)
        if workers is None:
            workers = CPU_WORKERS
            if device.type == "cuda":
                workers = torch.cuda.get_device_properties(device).multi_processor_count
        knobs = dataclasses.replace(knobs or PRESETS["h200"], tokens=capacity, workers=workers)
        self.config, self.device = config, device
        self.graph = build(config, knobs)
        table = pack(self.graph, static(self.graph, workers)) if schedule == "static" else pack(self.graph)
        self.memory = Memory.of(table, weights, device)
        self.launcher = Native(table, self.memory, build_config)
        self._named: dict[str, torch.Tensor] | None = None
        self.reset()

    @classmethod
    def from_pretrained(cls, folder: str | Path, device: torch.device | str | None = None, **options) -> DecodeEngine:
        """An engine with the config and the safetensors weights of a Hugging Face folder, converted to bf16.

        Args:
            options: as for the class.

        Raises:
            OSError, ValueError: as for `ModelConfig.from_file` and `megakernel.weights.load`.
        """
        config = ModelConfig.from_file(folder)
        loaded = weights.load(folder, config, dtype=torch.bfloat16, device=device or "cpu")
        return cls(config, loaded, device, **options)

    @classmethod
    def random(
        cls, config: ModelConfig, seed: int = 0, device: torch.device | str | None = None, **options
    ) -> DecodeEngine:
        """An engine with the weights of `megakernel.weights.random`. `options`: as for the class."""
        return cls(config, weights.random(config, seed, device=device or "cpu"), device, **options)

    # ------------------------------------------------------------------------------------------------------------ state

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The weights by Hugging Face name: views of what the launches read, but for kv_b_proj if it is absorbed."""
        if self._named is None:
            self._named = self.memory.named_weights()
        return self._named

    def reset(self) -> None:
        """Forgets the sequence."""
        self.memory.reset()
        self.length = 0
        """Positions in the cache."""
        self.step = 0
        """Tokens decoded since the prompt; the position of the noise of the next one."""
        self._next: int | None = None
        self._prompt: tuple[int, int] | None = None

    def prefill(self, ids: Sequence[int] | torch.Tensor) -> None:
        """Takes a prompt in place of what was there before.

        All tokens but the last go through `megakernel.reference.prefill`, whose cache is copied into the engine's; the
        last one is what the next launch reads first.

        Args:
            ids: at least one.

        Raises:
            ValueError: there is none, one is outside the vocabulary, or there are more than the cache has room for.
        """
        ids = torch.as_tensor(ids, dtype=torch.int64, device="cpu")
        if ids.dim() != 1 or not len(ids):
            fail("ids", "one or more token ids", ids)
        wrong = ids[(ids < 0) | (ids >= self.config.vocab_size)]
        if len(wrong):
            fail("ids", f"token ids from 0 to {self.config.vocab_size - 1}", wrong[0].item())
        if len(ids) > self.memory.capacity:
            raise ValueError(f"ids: expected at most {self.memory.capacity} (the capacity), got {len(ids)}")
        self.reset()
        if len(ids) > 1:
            _, cache = reference.prefill(self.weights, self.config, ids[:-1].to(self.device))
            self.memory.load_cache(cache)
        self._prompt = len(ids) - 1, int(ids[-1])
        self.rewind()

    def rewind(self) -> None:
        """Forgets what was decoded since the prompt, which can then be continued in another way: without a prefill.

        Raises:
            ValueError: there is no prompt.
        """
        if self._prompt is None:
            raise ValueError("there is no prompt to go back to: call prefill(ids) first")
        self.length, self._next = self._prompt
        self.step = 0

    def decode(
        self,
        n: int,
        *,
        temperature: float = 0.0,
        seed: int | torch.Tensor | None = None,
        forced: Sequence[int] | torch.Tensor | None = None,
        return_logits: bool = False,
        order_seed: int = 0,
        spin_budget: int | None = None,
    ) -> Decoded:
        """Decodes n tokens in one launch.

        Args:
            temperature: 0 takes the largest logit.
            seed: of the sampling noise, as in `fmms.sample` for one row: an int, an int64 tensor [1], or None for a
                fresh one. Token k since the prompt draws what `fmms.sample` draws at position k.
            forced: up to n - 1 ids to read, from the second step on, in place of what the step before sampled
                (teacher forcing); -1 for what it sampled.
            return_logits: whether to return what the tokens were sampled from.
            order_seed, spin_budget: as for `Native.run`.

        Raises:
            ValueError: an argument is wrong, there was no prompt, or the cache has no room for n more.
            Deadlock: the launch was given up; the engine has to be `reset`.
        """
        n = check_integer("n", n, 1, 2**31 - 1, "a positive integer")
        if self._next is None and not self.length:
            raise ValueError("there is nothing to decode from: call prefill(ids) first")
        first = -1 if self._next is None else self._next
        more = [] if forced is None else [int(token) for token in forced]
        result = self.launcher.run(
            iterations=n,
            position=self.length,
            forced=[first, *more],
            temperature=temperature,
            seed=self._seed(seed),
            noise_position=self.step,
            trace=return_logits,
            order_seed=order_seed,
            spin_budget=spin_budget,
        )
        self._next = None  # what the launch sampled last is in its memory
        self.length += n
        self.step += n
        return Decoded(result.tokens.long(), result.logits, result.times)

    def _seed(self, seed: int | torch.Tensor | None) -> int:
        """The 64-bit seed of the one row."""
        where = seed.device if isinstance(seed, torch.Tensor) else "cpu"
        given, number = check_seed(seed, 1, where)
        return int(noise.row_seeds(number, 1) if given is None else given)
