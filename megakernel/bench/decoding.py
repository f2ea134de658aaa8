"""A decode as it is measured: the reference's tokens and margins, the check of a system's tokens, the time of a step.

A latency is written only beside a passed check of the tokens. Which systems there are is left to others
(`megakernel.bench.transformers_decode` has those of transformers).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch

from megakernel import reference
from megakernel.bench import rounding
from megakernel.config import ModelConfig

COLUMNS = (
    "system", "config", "batch", "T", "tokens", "p50_ms", "p95_ms", "min_ms", "n", "gb_per_token", "tbps",
    "tokens_match", "reason",
)  # fmt: skip
"""Of decode rows. T: positions that the last step attends over; tokens: decode steps; n: timed steps; gb_per_token:
1e9 bytes of weights and cache that a token needs at T, however often a system moves them; tbps: 1e12 bytes per second,
those over p50; tokens_match: leading tokens equal to the reference's, such as "32/32"."""

METHODS = {
    "cuda": "CUDA events at the boundaries of the steps of a running decode, so waits for the host count",
    "cpu": "perf_counter at the boundaries of the steps of a running decode",
}


class Routing(NamedTuple):
    """What a layer's router said of N positions."""

    logits: torch.Tensor
    """fp32 [N, n_routed_experts]."""
    experts: torch.Tensor
    """int64 [N, k], in any order."""


@dataclass(frozen=True)
class Decode:
    """Greedy tokens of a system; entry 0 is of the prefill, entry s of decode step s."""

    tokens: list[int]
    """S + 1 ids: the one that follows the prompt, then one of each of S decode steps."""
    logits: torch.Tensor
    """[S + 1, V]: entry s is what token s is the largest of."""
    routing: list[dict[int, Routing]] = field(repr=False)
    """By layer with experts: entry 0 of all positions of the prompt, the others of one."""


@dataclass(frozen=True)
class ReferenceDecode:
    """Greedy tokens of `megakernel.reference`, and how close each choice was; entry 0 is of the prefill."""

    tokens: list[int]
    """S + 1 ids: the one that follows the prompt, then one of each of S decode steps."""
    logits: torch.Tensor
    """[S + 1, V] in the dtype of the weights: entry s is what token s is the largest of."""
    margins: list[float]
    """S + 1 distances of the two largest logits."""
    router_logits: dict[int, torch.Tensor] = field(repr=False)
    """By layer with experts, fp32 [S + 1, n_routed_experts]; of the prefill that of its last position."""

    def router_margins(self, k: int) -> dict[int, list[float]]:
        """By layer, S + 1 distances of the k-th and the next router logit: how close another expert was."""
        return {layer: top_margins(logits, k) for layer, logits in self.router_logits.items()}


def top_margins(logits: torch.Tensor, k: int = 1) -> list[float]:
    """Distance of the k-th and the next largest entry of each row of logits [N, V], in fp32; ties are 0."""
    top = logits.float().topk(k + 1, dim=-1).values
    return (top[:, k - 1] - top[:, k]).tolist()


def reference_decode(
    weights,
    config: ModelConfig,
    prompt: Sequence[int] | torch.Tensor,
    steps: int,
    cache: reference.Cache | None = None,
) -> ReferenceDecode:
    """Prefill a prompt with `megakernel.reference`, then decode `steps` tokens, each the one of the largest logit.

    Args:
        weights, config: as `reference.prefill` takes them.
        prompt: at least one id.
        cache: of what comes before the prompt; None is nothing.

    Raises:
        ValueError: as `reference.prefill`, or steps < 1.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}; expected at least 1")
    layers = [layer for layer in range(config.num_hidden_layers) if config.is_moe(layer)]
    trace: dict = {}
    logits, cache = reference.prefill(weights, config, prompt, cache, trace=trace)
    kept, routed = [logits[-1].clone()], [[trace[layer]["router_logits"][-1] for layer in layers]]
    tokens = [int(kept[0].argmax())]
    del logits
    for _ in range(steps):
        trace = {}
        step, cache = reference.decode_step(weights, config, tokens[-1], len(cache[0].latent), cache, trace=trace)
        tokens.append(int(step.argmax()))
        kept.append(step)
        routed.append([trace[layer]["router_logits"][0] for layer in layers])
    stacked = torch.stack(kept)
    router = {layer: torch.stack([row[n] for row in routed]) for n, layer in enumerate(layers)}
    return ReferenceDecode(tokens, stacked, top_margins(stacked), router)


# ------------------------------------------------------------------------------------------------------------- decoders


class Decoder(Protocol):
    """A system that decodes greedily, one step a call, without waiting for the device."""

    logits: torch.Tensor
    """[V], of the last step; a later step may overwrite it."""
    routing: dict[int, Routing]
    """Of the last step, likewise, if `watch` is set."""
    watch: bool

    def start(self) -> None:
        """Prefill the prompt and choose the token that follows it; what was decoded before is dropped."""

    def step(self) -> None:
        """One decode step: embed the last token, choose the next."""

    def tokens(self) -> list[int]:
        """The token of the prefill and of each step since `start`; waits for the device."""


def run(decoder: Decoder, steps: int) -> Decode:
    """One untimed decode of `steps` steps that keeps logits and routing."""

    def keep():
        logits.append(decoder.logits.clone())
        routing.append({layer: Routing(*(t.clone() for t in one)) for layer, one in decoder.routing.items()})

    logits, routing = [], []
    decoder.watch = True
    try:
        decoder.start()
        keep()
        for _ in range(steps):
            decoder.step()
            keep()
    finally:
        decoder.watch = False
    return Decode(decoder.tokens(), torch.stack(logits), routing)


def time_steps(decoder: Decoder, steps: int, device: torch.device | str) -> tuple[np.ndarray, list[int]]:
    """One timed decode: seconds of each step, fp64 [steps], by METHODS; and its tokens. The prefill isn't timed."""
    decoder.start()
    if torch.device(device).type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(steps):
            decoder.step()
            marks.append(time.perf_counter())
        return np.diff(marks), decoder.tokens()
    with torch.cuda.device(device):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        torch.cuda.synchronize()
        events[0].record()
        for event in events[1:]:
            decoder.step()
            event.record()
        torch.cuda.synchronize()
        times = [start.elapsed_time(end) for start, end in itertools.pairwise(events)]
        return np.array(times) / 1e3, decoder.tokens()


# --------------------------------------------------------------------------------------------------------------- checks


@dataclass(frozen=True)
class Verdict:
    """Whether a system's tokens are the reference's, as far as rounding lets them be."""

    matched: int
    """Leading decode steps with the reference's token."""
    steps: int
    passed: bool
    reason: str
    explained: bool = False
    """Whether fp32 says that what did not pass is rounding."""

    @property
    def tokens_match(self) -> str:
        return f"{self.matched}/{self.steps}"


class RoutingDifferences(NamedTuple):
    """Choices of experts of a layer that aren't the reference's on the same path."""

    choices: int
    differ: int
    unexplained: int
    """Those that rounding does not explain."""
    widest: float
    """The largest distance of router logits that a differing choice had to bridge."""

    def __add__(self, other):
        return RoutingDifferences(*(a + b for a, b in zip(self[:3], other[:3], strict=True)), max(self[3], other[3]))

    def __str__(self):
        if not self.differ:
            return f"{self.choices} choices of experts are equal"
        return f"{self.differ} of {self.choices} choices of experts differ, at margins up to {self.widest:.2g}"


def routing_differences(
    config: ModelConfig, mine: torch.Tensor, theirs: Routing, wide: torch.Tensor | None = None
) -> RoutingDifferences:
    """Compare the experts that another implementation chose with those of the reference, computed on the same path.

    A choice may differ as `rounding.Choices.statuses` says, if besides no router logit of any of these positions is off
    by more than ROUTER_ERROR of the largest one of them all, unless fp32 says that its position is rounding.

    Args:
        mine: the reference's router logits, fp32 [N, n_routed_experts].
        theirs: of the same N positions.
        wide: as `mine`, of the reference in fp32; None if it was not asked.
    """
    found = rounding.choices(config, mine, theirs.logits, theirs.experts, wide)
    sound = found.error <= rounding.ROUTER_ERROR * mine.abs().max()  # a NaN is not
    if wide is not None:
        sound |= rounding.is_rounding(theirs.logits, mine, wide)
    differ = found.count > 0
    bad = differ.tolist() if not sound.all() else [status == "unexplained" for status in found.statuses()]
    return RoutingDifferences(len(mine), int(differ.sum()), sum(bad), max([0.0, *found.margin[differ].tolist()]))


class _Path(NamedTuple):
    """The reference along a system's tokens, with the experts that it chose."""

    logits: torch.Tensor
    """fp32 [S + 1, V]."""
    routers: list[dict[int, torch.Tensor]]
    """Router logits as `Decode.routing` has them."""


def _along(decode: Decode, weights: Mapping[str, torch.Tensor], config: ModelConfig, prompt) -> _Path:
    cache, logits, routers = None, [], []
    for number in range(len(decode.tokens)):
        given = prompt if number == 0 else decode.tokens[number - 1 : number]
        forced, trace = {layer: routing.experts for layer, routing in decode.routing[number].items()}, {}
        out, cache = reference.prefill(weights, config, given, cache, forced=forced, trace=trace)
        logits.append(out[-1].float().clone())
        routers.append({layer: trace[layer]["router_logits"] for layer in forced})
    return _Path(torch.stack(logits), routers)


def check_tokens(
    decode: Decode, expected: ReferenceDecode, weights: Mapping[str, torch.Tensor], config: ModelConfig, prompt
) -> Verdict:
    """Compare a free-running greedy decode with the reference's.

    Other tokens than the reference's pass only from a near-tie on. Then the reference is run again along the system's
    tokens and with the experts that it chose, so that a near-tie of a router, which moves all that follows, is seen for
    itself (`routing_differences`). At every step of that text the reference must choose the system's token, or hold it
    closer to its own than the largest difference of the logits there; and that difference must be at most LOGIT_ERROR
    of the largest logit.

    What does not pass is explained if the weights are narrower than fp32, and the reference in fp32, along the same
    path, says that it is rounding: at every step that is past these bounds by `rounding.Tokens.explained`, and of
    experts by `rounding.choices`. The fp32 run computes a cache of its own: both implementations have rounded theirs,
    and with the reference's the judge would share the errors of one of the two.

    Args:
        decode: of the system.
        expected: of the same prompt and number of steps.
        weights, config, prompt: as `reference_decode` takes them.

    Raises:
        ValueError: another number of tokens or another vocabulary than expected.
    """
    count, shape = len(expected.tokens), tuple(expected.logits.shape)
    if len(decode.tokens) != count or tuple(decode.logits.shape) != shape:
        found = f"{len(decode.tokens)} with {tuple(decode.logits.shape)}"
        raise ValueError(f"tokens: expected {count} with logits {shape}, found {found}")
    pairs = enumerate(zip(decode.tokens, expected.tokens, strict=True))
    first = next((n for n, (theirs, mine) in pairs if theirs != mine), None)
    if first is None:
        return Verdict(count - 1, count - 1, True, "tokens equal the reference's")

    def routed(wide=None):
        total = RoutingDifferences(0, 0, 0, 0.0)
        for number, theirs in enumerate(decode.routing):
            for layer, routing in theirs.items():
                exact = None if wide is None else wide.routers[number][layer]
                total += routing_differences(config, path.routers[number][layer], routing, exact)
        return total

    chosen = torch.tensor(decode.tokens, device=decode.logits.device)
    path = _along(decode, weights, config, prompt)
    tokens, experts = rounding.tokens(decode.logits, path.logits, chosen), routed()
    # written so that a NaN fails
    right = (tokens.behind == 0) | (tokens.behind < tokens.error)
    right &= tokens.error <= rounding.LOGIT_ERROR * tokens.largest
    wrong = (~right).nonzero()[:, 0].tolist()
    passed, explained, judged = not wrong and not experts.unexplained, False, ""
    if not passed and narrow(weights):
        with rounding.full_precision():
            wide = _along(decode, rounding.Wide(weights), config, prompt)
        tokens = rounding.tokens(decode.logits, path.logits, chosen, wide.logits)
        by_rounding, left = tokens.explained()[wrong], routed(wide).unexplained
        explained = bool(by_rounding.all()) and not left
        judged = f"; against fp32 rounding explains {int(by_rounding.sum())} of {len(wrong)} steps past the bounds"
        if wrong:
            judged += f", logits there are up to {float(tokens.times[wrong].max()):.3g} times as far as the reference's"
        if experts.unexplained:
            judged += f", and {experts.unexplained - left} of {experts.unexplained} choices of experts"
    how = ", explained" if passed else ", explained by rounding" if explained else ", which rounding does not explain"
    same, worst = int((tokens.behind == 0).sum()), float((tokens.error / tokens.largest.clamp_min(1e-30)).max())
    reason = (
        f"another token from {f'step {first}' if first else 'the prefill'} on, margin {expected.margins[first]:.3g}"
        f"{how}: along its text, with its experts, the reference chooses {same} of {count} tokens likewise, the others "
        f"are at most {float(tokens.behind.max()):.2g} behind; logits differ by up to {worst:.2%} of the largest; "
        f"{experts}"
    )
    if wrong:
        behind, error, most = (float(each[wrong[0]]) for each in (tokens.behind, tokens.error, tokens.largest))
        reason += (
            f"; past the bounds at step {wrong[0]} ({behind:.3g} behind, logits differ by {error:.3g} of {most:.3g})"
        )
        reason += f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return Verdict(max(0, first - 1), count - 1, passed, reason + judged, explained)


def narrow(weights: Mapping[str, torch.Tensor]) -> bool:
    """Whether the reference computes in less than fp32, so that there is a rounding for fp32 to judge."""
    return weights["lm_head.weight"].dtype.itemsize < 4


def row(system: str, config: str, length: int, steps: int, bytes_per_token: float, **given) -> dict:
    """A decode row of batch 1 (`COLUMNS`) without times; `bytes_per_token`: bytes that a token needs."""
    about = {"system": system, "config": config, "batch": 1, "T": length, "tokens": steps}
    return dict.fromkeys(COLUMNS) | about | {"gb_per_token": bytes_per_token / 1e9} | given


def latencies(seconds: np.ndarray, bytes_per_token: float) -> dict:
    """The fields of a decode row that follow from the seconds of its steps, [n]."""
    p50, p95 = np.quantile(seconds, (0.5, 0.95))
    times = {"p50_ms": p50 * 1e3, "p95_ms": p95 * 1e3, "min_ms": seconds.min() * 1e3}
    return times | {"n": len(seconds), "tbps": bytes_per_token / p50 / 1e12}
