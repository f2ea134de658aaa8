"""Decodes a DeepSeek-V2-Lite: a prompt goes in, and each launch of the megakernel adds tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from fmms import noise
from fmms.arguments import check_integer, check_seed, fail
from megakernel import reference
from megakernel.build import BuildConfig
from megakernel.config import ModelConfig
from megakernel.graph import build
from megakernel.knobs import PRESETS, Knobs
from megakernel.memory import Memory
from megakernel.native import Native
from megakernel.schedule import static
from megakernel.table import pack
from megakernel.weights import check as check_weights
from megakernel.weights import load as load_weights
from megakernel.weights import random as random_weights

SCHEDULES = ("static", "dynamic")
CPU_WORKERS = 4
CAPACITY = 1056


def check_device(device: torch.device | str) -> torch.device:
    """The device. Raises ValueError unless it is the CPU or a GPU that this PyTorch can use."""
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: {error}") from error
    if found.type not in ("cpu", "cuda") or (found.type == "cuda" and not torch.cuda.is_available()):
        raise ValueError(
            f"device: expected 'cpu' or a GPU that this PyTorch can use, got {str(device)!r}; see fmms doctor"
        )
    return found


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
        knobs: of the graph, or the name of a preset. Their `tokens` and `workers` are those of the next two.
        capacity: positions that the cache has room for, prompt and decoded tokens together; None is 1,056, or the
            model's max_position_embeddings if that is less.
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
        knobs: Knobs | str = "h200",
        capacity: int | None = None,
        workers: int | None = None,
        schedule: str = "static",
        build_config: BuildConfig | None = None,
    ):
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, not {schedule!r}")
        if isinstance(knobs, str):
            if knobs not in PRESETS:
                raise ValueError(f"knobs must be a Knobs or one of {', '.join(sorted(PRESETS))}, not {knobs!r}")
            knobs = PRESETS[knobs]
        elif not isinstance(knobs, Knobs):
            raise ValueError(f"knobs must be a Knobs or one of {', '.join(sorted(PRESETS))}, not {knobs!r}")
        most = config.max_position_embeddings
        capacity = min(CAPACITY, most) if capacity is None else capacity
        capacity = check_integer("capacity", capacity, 1, most, f"1 to {most} positions (max_position_embeddings)")
        check_weights(weights, config)
        device = check_device(weights["lm_head.weight"].device if device is None else device)
        if workers is None:
            workers = CPU_WORKERS
            if device.type == "cuda":
                workers = torch.cuda.get_device_properties(device).multi_processor_count
        knobs = dataclasses.replace(knobs, tokens=capacity, workers=workers)
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
        if not Path(folder).is_dir():
            raise FileNotFoundError(
                f"no folder {folder}; download the checkpoint first: huggingface-cli download NAME --local-dir {folder}"
            )
        device = check_device(device or "cpu")
        config = ModelConfig.from_file(folder)
        loaded = load_weights(folder, config, dtype=torch.bfloat16, device=device)
        return cls(config, loaded, device, **options)

    @classmethod
    def random(
        cls, config: ModelConfig, seed: int = 0, device: torch.device | str | None = None, **options
    ) -> DecodeEngine:
        """An engine with the weights of `megakernel.weights.random`. `options`: as for the class."""
        device = check_device(device or "cpu")
        return cls(config, random_weights(config, seed, device=device), device, **options)

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
        self._broken = False
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
        if not isinstance(ids, torch.Tensor):
            for token in ids:
                check_integer("ids", token, 0, self.config.vocab_size - 1, self._expected_ids())
            ids = torch.tensor([int(token) for token in ids], dtype=torch.int64)
        if ids.dim() != 1 or not len(ids) or ids.is_floating_point() or ids.dtype == torch.bool:
            fail("ids", "one or more token ids", ids)
        ids = ids.to("cpu", torch.int64)
        wrong = ids[(ids < 0) | (ids >= self.config.vocab_size)]
        if len(wrong):
            fail("ids", self._expected_ids(), wrong[0].item())
        if len(ids) > self.memory.capacity:
            raise ValueError(f"ids: expected at most {self.memory.capacity} (the capacity), got {len(ids)}")
        self.reset()
        if len(ids) > 1:
            _, cache = reference.prefill(self.weights, self.config, ids[:-1].to(self.device))
            self.memory.load_cache(cache)
        self._prompt = len(ids) - 1, int(ids[-1])
        self.rewind()

    def _expected_ids(self) -> str:
        return f"token ids from 0 to {self.config.vocab_size - 1}"

    def rewind(self) -> None:
        """Forgets what was decoded since the prompt, which can then be continued in another way: without a prefill.

        Raises:
            ValueError: there is no prompt.
        """
        if self._prompt is None:
            raise ValueError("there is no prompt to go back to: call prefill(ids) first")
        self.length, self._next = self._prompt
        self.step = 0
        self._broken = False

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
            Deadlock: the launch was given up; after that, or an interrupt, call `rewind`, `prefill` or `reset` first.
        """
        n = check_integer("n", n, 1, 2**31 - 1, "a positive integer")
        room = self.memory.capacity - self.length
        if n > room:
            raise ValueError(
                f"n: expected at most {room}, because {self.length} of the {self.memory.capacity} positions are taken, "
                f"got {n}; make the engine with a larger capacity"
            )
        if self._next is None and not self.length:
            raise ValueError("there is nothing to decode from: call prefill(ids) first")
        if self._broken:
            raise ValueError("the launch before did not end as it should: call rewind(), prefill(ids) or reset() first")
        settings = dict(
            iterations=n,
            position=self.length,
            forced=[-1 if self._next is None else self._next, *self._forced(forced, n)],
            temperature=temperature,
            seed=self._seed(seed),
            noise_position=self.step,
        )
        try:
            result = self.launcher.run(**settings, trace=return_logits, order_seed=order_seed, spin_budget=spin_budget)
        except ValueError:  # an argument: nothing was launched
            raise
        except BaseException:  # a launch may have moved on what is in memory, and nobody knows how far
            self._broken = True
            raise
        self._next = None  # what the launch sampled last is in its memory
        self.length += n
        self.step += n
        return Decoded(result.tokens.long(), result.logits, result.times)

    def _forced(self, forced: Sequence[int] | torch.Tensor | None, n: int) -> list[int]:
        """Checked ids; a tensor's as Python numbers."""
        expected = f"at most n - 1 = {n - 1} {self._expected_ids()}, or -1 for what was sampled"
        if forced is None:
            return []
        if isinstance(forced, str) or not hasattr(forced, "__len__") or len(forced) > n - 1:
            fail("forced", expected, forced)
        tokens = forced.tolist() if isinstance(forced, torch.Tensor) else list(forced)
        return [check_integer("forced", token, -1, self.config.vocab_size - 1, expected) for token in tokens]

    def __reduce__(self):
        raise TypeError("a DecodeEngine can't be copied or pickled; make another one from engine.weights")

    def __copy__(self):
        return self.__reduce__()

    def __deepcopy__(self, memo):
        return self.__reduce__()

    def _seed(self, seed: int | torch.Tensor | None) -> int:
        """The 64-bit seed of the one row."""
        where = seed.device if isinstance(seed, torch.Tensor) else "cpu"
        given, number = check_seed(seed, 1, where)
        return int(noise.row_seeds(number, 1) if given is None else given)
