"""A decode of given tokens, by the megakernel and by the reference, step by step: logits, choices of experts, gates.

Both read the tokens that the reference would choose, so that an error of one step does not make another text. A choice
of experts that rounding turned still moves all that follows it. So the reference is run again along the megakernel's
path, with the experts that it chose (`reference_steps`): what is left there is the error of the arithmetic. And where
that still misses a gate, the reference in fp32 on the same path says whose error it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from megakernel import DecodeEngine, reference
from megakernel.bench import decoding, reference_run, rounding
from megakernel.bench.layer_gates import LOGIT_COSINE
from megakernel.bench.rounding import LOGIT_ERROR, NEAR_TIE, ROUNDING
from megakernel.engine import SCHEDULES
from megakernel.knobs import PRESETS
from megakernel.memory import Routing
from megakernel.native import Native
from megakernel.schedule import static
from megakernel.table import pack

STEP_COLUMNS = (
    "seed", "schedule", "step", "position", "token", "found", "margin", "cosine", "max_abs_diff", "max_abs_ref",
    "swaps", "path_cosine", "path_max_abs_diff", "path_behind", "path_both", "own_cosine", "reference_cosine",
    "own_error", "reference_error", "missed", "explained",
)  # fmt: skip
"""token: of the reference's largest logit, margin: of its two largest; found: of the megakernel's largest. cosine,
max_abs_*: of the logits. swaps: layers of the step with other experts than the reference's. path_*: against the
reference along the megakernel's path; path_behind: how far it holds `found` behind its own token, path_both: the errors
of the logits of these two together. own_cosine, reference_cosine: of the megakernel and of the reference with the
reference in fp32, all along that path; own_error: the larger error of these two logits of the megakernel against it,
reference_error: the largest of any logit of the reference; empty where fp32 was not needed. missed: "cosine", "argmax",
both or neither; explained: by what, see `explain`."""
ROUTING_COLUMNS = (
    "seed", "schedule", "step", "layer", "swapped", "margin", "error", "path_swapped", "path_margin", "path_error",
    "status",
)  # fmt: skip
"""swapped: how many experts differ, margin: the distance of router logits between the dropped and the added ones,
error: the largest of a router logit of the layer at that step; path_*: the same along the megakernel's path. status:
see `routing_rows`."""


@dataclass(frozen=True)
class Case:
    """A model with random weights in an engine, a prompt that the engine has taken, and what the reference decodes."""

    name: str
    """Of `reference_run.MODELS`."""
    seed: int
    prompt: list[int] = field(repr=False)
    engine: DecodeEngine = field(repr=False)
    cache: reference.Cache = field(repr=False)
    """The reference's, of the prompt without its last token."""
    expected: decoding.ReferenceDecode = field(repr=False)
    """n tokens; entry s is of step s, which reads token s of `text`."""

    @property
    def config(self):
        return self.engine.config

    @property
    def text(self) -> list[int]:
        """The n tokens to read: the last one of the prompt, and the reference's but its last."""
        return [self.prompt[-1], *self.expected.tokens[:-1]]


def build(
    name: str,
    seed: int,
    prompt_tokens: int,
    tokens: int,
    device: torch.device | str = "cpu",
    *,
    preset: str = "h200",
    workers: int | None = None,
    schedule: str = "static",
) -> Case:
    """A case; weights and prompt are those of `reference_run.build`. The weights are made on the device, and the
    reference reads those of the engine: they exist once.

    Args:
        name: of `reference_run.MODELS`.
        seed: of weights and prompt.
        prompt_tokens: at least 2.
        tokens: to decode, at least 2.
        preset: of `megakernel.knobs.PRESETS`.
        workers: blocks of a launch; None and 0 are the engine's choice.
        schedule: as for `DecodeEngine`.

    Raises:
        ValueError: an unknown name, preset or schedule, or too few tokens.
        BuildError: as for `DecodeEngine`.
    """
    for what, known, given in (("model", reference_run.MODELS, name), ("preset", PRESETS, preset)):
        if given not in known:
            raise ValueError(f"{what} is {given!r}; expected one of {', '.join(known)}")
    for what, count in (("prompt_tokens", prompt_tokens), ("tokens", tokens)):
        if count < 2:
            raise ValueError(f"{what} is {count}; expected at least 2")
    config = reference_run.MODELS[name]
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(config.vocab_size, (prompt_tokens,), generator=generator).tolist()
    engine = DecodeEngine.random(
        config,
        seed,
        device,
        knobs=PRESETS[preset],
        capacity=prompt_tokens + tokens,
        workers=workers or None,
        schedule=schedule,
    )
    engine.prefill(prompt)
    _, cache = reference.prefill(engine.weights, config, prompt[:-1])
    engine.memory.load_cache(cache)  # these very bits, should a GPU's prefill not be the same twice
    expected = decoding.reference_decode(engine.weights, config, prompt[-1:], tokens - 1, cache)
    return Case(name, seed, prompt, engine, cache, expected)


def rescheduled(engine: DecodeEngine, schedule: str) -> DecodeEngine:
    """The engine with another schedule, on the same memory: launch one of them at a time, each after a `rewind`.

    Raises:
        ValueError: as for `DecodeEngine`.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, not {schedule!r}")
    # an engine refuses to be copied, because copies share a memory; here that is what is wanted
    other, graph = DecodeEngine.__new__(DecodeEngine), engine.graph
    other.__dict__.update(engine.__dict__)
    table = pack(graph, static(graph, graph.knobs.workers)) if schedule == "static" else pack(graph)
    other.launcher = Native(table, engine.memory, engine.launcher.config)
    return other


# ---------------------------------------------------------------------------------------------------------------- steps


@dataclass(frozen=True)
class Steps:
    """What n steps computed."""

    logits: torch.Tensor
    """fp32 [n, V]."""
    routing: dict[int, Routing] = field(repr=False)
    """By layer with experts: ids int64 [n, k], their weights fp32 [n, k], router logits fp32 [n, n_routed_experts]."""


def megakernel_steps(engine: DecodeEngine, text: Sequence[int]) -> Steps:
    """The tokens of a text after the prompt, a launch for each: what the routers chose can be read between launches.

    Raises:
        RuntimeError: a router chose an expert that doesn't exist.
        Deadlock: as for `DecodeEngine.decode`.
    """
    engine.rewind()
    layers = [layer for layer in range(engine.config.num_hidden_layers) if engine.config.is_moe(layer)]
    logits, routing = [], {layer: [] for layer in layers}
    for step, token in enumerate(text):
        found = engine.launcher.run(iterations=1, position=engine.length + step, forced=[int(token)], trace=True)
        logits.append(found.logits[0])
        for layer in layers:
            routing[layer].append([part.clone() for part in engine.memory.routing(layer)])
    stacked = {}
    for layer, rows in routing.items():
        ids, factors, router = (torch.stack(parts) for parts in zip(*rows, strict=True))
        # an id that is none would end a GPU's context in the comparisons
        if ((ids < 0) | (ids >= engine.config.n_routed_experts)).any():
            raise RuntimeError(f"layer {layer}: the megakernel chose an expert that does not exist")
        stacked[layer] = Routing(ids.long(), factors, router)
    return Steps(torch.stack(logits), stacked)


def expected_steps(case: Case) -> Steps:
    """The reference's steps along `case.text` as it chooses by itself: those of `case.expected`."""
    routing = {
        layer: Routing(*reference.route(logits, case.config), logits)
        for layer, logits in case.expected.router_logits.items()
    }
    return Steps(case.expected.logits.float(), routing)


def reference_steps(
    case: Case,
    routing: Mapping[int, Routing] | None = None,
    *,
    with_weights: bool = False,
    wide: bool = False,
) -> Steps:
    """The reference's steps along `case.text`.

    Args:
        routing: of the experts to use, [n, k]; None lets the reference choose.
        with_weights: whether to use their weights as well; otherwise these follow from the reference's router.
        wide: whether to compute in fp32, from the same weights and the same cache of the prompt.

    Returns:
        The routing's ids and weights are those that were used, its logits those of the reference's router.
    """
    weights, cache = case.engine.weights, case.cache
    if wide:
        weights = rounding.Wide(weights)
        cache = tuple(reference.LayerCache(*(part.float() for part in layer)) for layer in cache)
    layers = list(case.expected.router_logits)
    kept, routed = [], {layer: [] for layer in layers}
    for step, token in enumerate(case.text):
        forced = None
        if routing is not None:
            at = slice(step, step + 1)
            forced = {
                layer: (one.ids[at], one.weights[at]) if with_weights else one.ids[at] for layer, one in routing.items()
            }
        trace: dict = {}
        logits, cache = reference.decode_step(
            weights, case.config, token, len(cache[0].latent), cache, forced=forced, trace=trace
        )
        kept.append(logits.float())
        for layer in layers:
            own = trace[layer]
            routed[layer].append((own["expert_ids"][0], own["expert_weights"][0], own["router_logits"][0]))
    stacked = {layer: [torch.stack(parts) for parts in zip(*rows, strict=True)] for layer, rows in routed.items()}
    return Steps(torch.stack(kept), {layer: Routing(*parts) for layer, parts in stacked.items()})


def difference(found: torch.Tensor, expected: torch.Tensor) -> dict[str, list[float]]:
    """Of logits [n, V] each, by step: cosine, largest difference, and the largest of `expected`."""
    found, expected = found.double(), expected.double()
    return {
        "cosine": torch.cosine_similarity(found, expected, dim=-1).tolist(),
        "max_abs_diff": (found - expected).abs().amax(-1).tolist(),
        "max_abs_ref": expected.abs().amax(-1).tolist(),
    }


# ------------------------------------------------------------------------------------------------------------- routing


def routing_rows(
    case: Case, schedule: str, mine: Steps, free: Steps, path: Steps, wide: Steps | None = None
) -> list[dict]:
    """Choices of experts that are not the reference's, rows of `ROUTING_COLUMNS` by step and layer.

    - "near-tie": along the megakernel's path, with its experts before, the reference chooses others, but the router
      logits of the dropped and the added expert are closer than the largest error of a router logit there.
    - "both errors": they are not, but closer than the errors of these two logits together. The rule of a near-tie does
      not pass these; two logits can be wrong by as much in opposite directions all the same.
    - "downstream": the reference by itself chooses others, but along the megakernel's path the same: the difference
      comes from a swap before it.
    - "unexplained": anything else, also where the error is more than rounding: more than ROUTER_ERROR of the largest
      router logit, and further from fp32 than ROUNDING times what the bf16 reference is.

    Args:
        mine: the megakernel's steps; free, path, wide: the reference's, by itself, with the megakernel's experts, and
            with these in fp32.
    """
    count = len(mine.logits)
    exact = {} if wide is None else {layer: one.logits for layer, one in wide.routing.items()}
    pairs = {}
    for layer, theirs in mine.routing.items():
        given = theirs.logits, theirs.ids
        alone = rounding.choices(case.config, free.routing[layer].logits, *given)
        along = rounding.choices(case.config, path.routing[layer].logits, *given, exact.get(layer))
        pairs[layer] = _Shown.of(alone), _Shown.of(along), along.statuses()
    rows, moved = [], False
    for step in range(count):
        for layer, (alone, along, statuses) in pairs.items():
            if not alone.count[step] and not along.count[step]:
                continue
            status = statuses[step]
            if not along.count[step]:
                status = "downstream" if moved else "unexplained"
            moved |= along.count[step] > 0
            rows.append(
                {
                    "seed": case.seed, "schedule": schedule, "step": step, "layer": layer,
                    "swapped": alone.count[step], "margin": alone.margin[step], "error": alone.error[step],
                    "path_swapped": along.count[step], "path_margin": along.margin[step],
                    "path_error": along.error[step], "status": status,
                }
            )  # fmt: skip
    return rows


class _Shown(NamedTuple):
    """Of `rounding.Choices` what rows hold, as lists."""

    count: list[int]
    margin: list[float | None]
    error: list[float]

    @classmethod
    def of(cls, choices: rounding.Choices) -> _Shown:
        counts, margins, errors = (each.tolist() for each in (choices.count, choices.margin, choices.error))
        shown = [_short(margin) if count else None for count, margin in zip(counts, margins, strict=True)]
        return cls(counts, shown, [_short(error) for error in errors])


def _short(value: float) -> float:
    """Six digits: the files are committed."""
    return float(f"{value:.6g}")


# --------------------------------------------------------------------------------------------------------------- steps


@dataclass(frozen=True)
class Compared:
    """A teacher-forced pass of the megakernel beside the reference's."""

    steps: list[dict]
    """Rows of STEP_COLUMNS."""
    routing: list[dict]
    """Rows of ROUTING_COLUMNS."""
    choices: int
    """How many choices of experts there were: steps times layers with experts."""
    path: Steps
    """The reference along the megakernel's path."""
    wide: Steps | None
    """The same in fp32, if it was needed."""


def compare(case: Case, mine: Steps, schedule: str = "static", *, always_wide: bool = False) -> Compared:
    """The gates of each step of a teacher-forced pass along `case.text`, and what explains the steps that miss one.

    Args:
        mine: `megakernel_steps` of it.
        schedule: for the rows.
        always_wide: whether to run the reference in fp32 although nothing asks for it.
    """
    free = expected_steps(case)
    same = all(torch.equal(one.ids.sort(-1)[0], free.routing[layer].ids.sort(-1)[0])
               for layer, one in mine.routing.items())  # fmt: skip
    path = free if same else reference_steps(case, mine.routing)
    routing = routing_rows(case, schedule, mine, free, path)
    rows = _step_rows(case, schedule, mine, free, path, routing)
    wide = None
    bad = [*(row["explained"] for row in rows), *(row["status"] for row in routing)]
    if always_wide or "unexplained" in bad:
        wide = reference_steps(case, mine.routing, wide=True)
        routing = routing_rows(case, schedule, mine, free, path, wide)
        _add_wide(rows, mine, path, wide, routing)
    return Compared(rows, routing, len(rows) * len(mine.routing), path, wide)


def _step_rows(case, schedule, mine: Steps, free: Steps, path: Steps, routing: list[dict]) -> list[dict]:
    plain, along = difference(mine.logits, free.logits), difference(mine.logits, path.logits)
    found = mine.logits.argmax(-1)
    tokens = rounding.tokens(mine.logits, path.logits, found)
    behind, both = tokens.behind.tolist(), tokens.both.tolist()
    rows = []
    for step, token in enumerate(case.expected.tokens):
        row = dict.fromkeys(STEP_COLUMNS) | {
            "seed": case.seed, "schedule": schedule, "step": step, "position": len(case.prompt) - 1 + step,
            "token": token, "found": int(found[step]), "margin": _short(case.expected.margins[step]),
            **{name: digits(name, values[step]) for name, values in plain.items()},
            "swaps": sum(each["step"] == step and each["swapped"] > 0 for each in routing),
            "path_cosine": digits("cosine", along["cosine"][step]),
            "path_max_abs_diff": _short(along["max_abs_diff"][step]), "path_behind": _short(behind[step]),
            "path_both": _short(both[step]),
        }  # fmt: skip
        # written so that a NaN misses
        misses = {"cosine": not row["cosine"] >= LOGIT_COSINE}
        misses["argmax"] = row["found"] != token and not row["margin"] < NEAR_TIE
        row["missed"] = ", ".join(what for what, missed in misses.items() if missed)
        row["explained"] = explain(row, routing)
        rows.append(row)
    return rows


def digits(name: str, value: float) -> float:
    """A cosine says something by its distance from 1."""
    return round(value, 9) if name == "cosine" else _short(value)


def _add_wide(rows: list[dict], mine: Steps, path: Steps, wide: Steps, routing: list[dict]) -> None:
    own, reference_own = (difference(steps.logits, wide.logits)["cosine"] for steps in (mine, path))
    judged = rounding.tokens(mine.logits, path.logits, mine.logits.argmax(-1), wide.logits)
    errors, usual, tokens = (each.tolist() for each in (judged.own, judged.usual, wide.logits.argmax(-1)))
    for step, row in enumerate(rows):
        row["own_cosine"] = digits("cosine", own[step])
        row["reference_cosine"] = digits("cosine", reference_own[step])
        row["own_error"], row["reference_error"] = _short(errors[step]), _short(usual[step])
        row["explained"] = explain(row, routing, tokens[step])


def explain(row: Mapping, routing: Sequence[Mapping], wide_token: int | None = None) -> str:
    """What explains the gates that a step missed; "" if it missed none, "unexplained" if one is not explained.

    A cosine is explained by "routing" if it passes along the megakernel's path, and by "rounding" if there the
    megakernel's logits pass against the reference in fp32, or are no further from it than ROUNDING times what those of
    the reference in bf16 are.
    Another token is explained by "routing" if along that path the reference chooses it too, by "near-tie" if it holds
    it closer to its own than the largest difference of the logits there, by "rounding" if in fp32 it chooses it, and by
    "both errors" if it holds it behind by no more than the errors of these two logits together, and all logits are no
    further from fp32 than ROUNDING times what those of the reference are. A near-tie needs a largest difference of at
    most LOGIT_ERROR of the largest logit, or as both errors do that these two logits are no further from fp32 than
    ROUNDING times the furthest of the reference: of a single wrong logit the distance of all says nothing.
    Nothing is explained after a choice of experts that is not.

    Args:
        row: of STEP_COLUMNS.
        routing: rows of ROUTING_COLUMNS of the same pass.
        wide_token: of the largest logit of the reference in fp32.
    """
    if not row["missed"]:
        return ""
    before = [each for each in routing if each["step"] <= row["step"]]
    if any(each["status"] == "unexplained" for each in before):
        return "unexplained"
    own, theirs = row["own_cosine"], row["reference_cosine"]
    # the distance grows with the square root of 1 - cosine
    near = own is not None and 1 - own <= ROUNDING**2 * (1 - theirs)
    two = own is not None and row["own_error"] <= ROUNDING * row["reference_error"]
    reasons = []
    for what in row["missed"].split(", "):
        reason = "unexplained"
        if what == "cosine":
            if before and row["path_cosine"] >= LOGIT_COSINE:
                reason = "routing"
            elif own is not None and (own >= LOGIT_COSINE or near):
                reason = "rounding"
        elif before and row["path_behind"] == 0:
            reason = "routing"
        elif row["path_behind"] < row["path_max_abs_diff"] and (
            two or row["path_max_abs_diff"] <= LOGIT_ERROR * row["max_abs_ref"]
        ):
            reason = "near-tie"
        elif wide_token == row["found"]:
            reason = "rounding"
        elif near and two and row["path_behind"] <= row["path_both"]:
            reason = "both errors"
        if reason == "unexplained":
            return reason
        reasons.append(reason)
    return ", ".join(dict.fromkeys(reasons))
