"""One call of the sampler after its checks: what every implementation is given, and what it gives back.

`fmms/sampling.py` makes a `Request` of its arguments, `fmms/reference.py` and `fmms/kernels/launch.py` serve it.
Controls that hold for all rows stay Python scalars (`*_value`), so that the common call makes no tensors; a per-row
control is a tensor and then its scalar is ignored.
"""

from typing import NamedTuple

import torch

FILTER_ORDERS = ("top_k_first", "joint", "min_p_first")

LOGIT_BIAS, REPETITION, FREQUENCY, PRESENCE = range(4)
"""Kinds of sparse edits, in the order in which they are applied."""


class Request(NamedTuple):
    """H rows, a vocabulary of V tokens, S draws per row."""

    hidden: torch.Tensor
    """[H, D], bf16, fp16 or fp32."""
    weight: torch.Tensor
    """[V, D], same dtype and device."""
    temperature: torch.Tensor | None = None
    """fp32 [H]; 0 = greedy."""
    temperature_value: float = 1.0
    seeds: torch.Tensor | None = None
    """int64 [H], one key per row; with the scalar, row r has key SplitMix64(seed_value, r)."""
    seed_value: int = 0
    positions: torch.Tensor | None = None
    """int64 [H]."""
    position_value: int = 0
    top_k: torch.Tensor | None = None
    """int32 [H]; 0, -1 and everything from V on are off, smaller numbers make the row invalid."""
    top_k_value: int = 0
    top_p: torch.Tensor | None = None
    """fp32 [H] in [0, 1]; 1 is off, anything outside makes the row invalid."""
    top_p_value: float = 1.0
    min_p: torch.Tensor | None = None
    """fp32 [H] in [0, 1]; 0 is off, anything outside makes the row invalid."""
    min_p_value: float = 0.0
    filter_order: str = "top_k_first"
    samples: int = 1
    scheme: str = "group"
    gumbels: torch.Tensor | None = None
    """Injected noise, [H, S, V] or [H, S, G]."""
    uniforms: torch.Tensor | None = None
    logit_scale: float = 1.0
    softcap: float = 0.0
    """0 = none."""
    bias: torch.Tensor | None = None
    """[V], added to every row."""
    edit_rows: torch.Tensor | None = None
    """int64 [N]: sparse edits of single logits, in any order. A row or token of -1 is padding; a row outside [0, H) is
    ignored, any other token outside [0, V) makes its row invalid."""
    edit_tokens: torch.Tensor | None = None
    """int64 [N]."""
    edit_values: torch.Tensor | None = None
    """fp32 [N]."""
    edit_kinds: torch.Tensor | None = None
    """int64 [N]: LOGIT_BIAS, REPETITION, FREQUENCY or PRESENCE. Values for the same logit and kind add up; those of
    REPETITION multiply, and one that is not a positive number makes its row invalid."""
    allowed_mask: torch.Tensor | None = None
    """int32 [H, at least ceil(V / 32)], contiguous along the words: bit i % 32 of word i // 32 allows token i."""
    banned_ids: torch.Tensor | None = None
    """int64 [H]: one token per row that must not be drawn, -1 for none; other numbers outside [0, V) make the row
    invalid."""
    want_logprobs: bool = False
    want_raw_logprobs: bool = False
    want_final_logprobs: bool = False
    want_entropy: bool = False
    want_logits: bool = False
    top_logprobs: int = 0
    """How many of the most likely tokens to return with their log-probabilities."""

    @property
    def rows(self) -> int:
        return self.hidden.shape[0]

    @property
    def vocab(self) -> int:
        return self.weight.shape[0]

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def filters(self) -> bool:
        """Whether a row may be truncated by top-k, top-p or min-p."""
        per_row = any(control is not None for control in (self.top_k, self.top_p, self.min_p))
        return per_row or 0 < self.top_k_value < self.vocab or self.top_p_value < 1 or self.min_p_value > 0

    @property
    def edits(self) -> bool:
        return self.edit_rows is not None

    def per_row(self, name: str) -> torch.Tensor:
        """The control `name` ("temperature", "top_k", "top_p", "min_p" or "positions") as a tensor [H]."""
        tensor = getattr(self, name)
        if tensor is not None:
            return tensor
        dtype = {"top_k": torch.int32, "positions": torch.int64}.get(name, torch.float32)
        value = self.position_value if name == "positions" else getattr(self, f"{name}_value")
        return torch.full((self.rows,), value, dtype=dtype, device=self.device)


class Results(NamedTuple):
    """What an implementation returns; None where a result was not asked for."""

    ids: torch.Tensor
    """int64 [H, S], -1 in invalid rows."""
    logprobs: torch.Tensor | None
    """fp32 [H, S]: log-softmax at the ids of (processed logits / T), before truncation."""
    raw_logprobs: torch.Tensor | None
    """fp32 [H, S]: log-softmax at the ids of the scaled and softcapped logits at T = 1."""
    final_logprobs: torch.Tensor | None
    """fp32 [H, S]: log-softmax at the ids of what truncation left."""
    lse: torch.Tensor
    """fp32 [H], log-sum-exp that belongs to logprobs."""
    max_logit: torch.Tensor
    """fp32 [H], largest processed logit, before temperature."""
    valid: torch.Tensor
    """bool [H]."""
    entropy: torch.Tensor | None
    """fp32 [H], nats, of the distribution of logprobs."""
    top_ids: torch.Tensor | None
    """int64 [H, n], most likely first, the lowest id first on a tie; -1 in invalid rows."""
    top_logprobs: torch.Tensor | None
    """fp32 [H, n], their logprobs."""
    logits: torch.Tensor | None
    """fp32 [H, V], processed: after scale, softcap, bias, edits and masks (-inf), before temperature."""
