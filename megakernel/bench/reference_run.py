"""The first milestone: the reference is the model of transformers, how close its choices are, how long a token takes.

Four parts: the reference against transformers, layer by layer and token by token (`compare`); the margins of its
choices (`step_rows`); the least time that the bytes of a token allow (`floors`); and the time and the launches of a
token in transformers (`time_systems`, `count_launches`). The figures of these rows are in
megakernel.bench.reference_figures.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fmms.bench import ceilings, outputs
from megakernel import reference
from megakernel import weights as weights_module
from megakernel.bench import decoding, rounding, transformers_decode
from megakernel.config import TINY, V2_LITE, ModelConfig

MODELS = {"tiny": TINY, "v2-lite": V2_LITE}

LAYER_ERROR = {torch.float32: 1e-5, torch.bfloat16: 0.05}
"""Largest error of a result over its largest entry; only the order of sums may differ."""
LAYER_COSINE, LOGIT_COSINE = 0.999, 0.9995
"""Least cosine of any position's result."""
RESULTS = {"router": "router_logits", "layer": "out"}
"""Parts of a layer that are compared, by their names in a trace."""
ERROR_COLUMNS = ("seed", "dtype", "part", "layer", "max_abs_diff", "max_abs_ref", "rel", "cosine")
CHECK_COLUMNS = ("seed", "dtype", "check", "value", "bound", "passed", "explained", "reason")
"""explained: whether what did not pass is rounding, see `compare`."""
STEP_COLUMNS = ("seed", "step", "position", "quantity", "layer", "token", "margin")
LAUNCH_COLUMNS = ("system", "config", "batch", "T", "counted", "per_token", "n", "reason")
LAUNCH_CALLS = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "hipLaunch", "hipExtLaunch", "hipModuleLaunch")
"""Beginnings of the names of calls that put kernels on a GPU's queue."""


@dataclass
class Problem:
    """A model with random weights, in this package's form and as transformers has it, and a prompt."""

    name: str
    config: ModelConfig
    dtype: torch.dtype
    seed: int
    device: torch.device
    weights: dict[str, torch.Tensor] = field(repr=False)
    model: Any = field(repr=False)
    prompt: list[int] = field(repr=False)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def build(name: str, dtype: torch.dtype, seed: int, prompt_tokens: int, device: torch.device | str = "cpu") -> Problem:
    """A model of `MODELS` with `weights.random(config, seed)`, made on the device, and a prompt of random ids.

    Raises:
        ValueError: an unknown model or dtype, or prompt_tokens < 1.
        ImportError: transformers is not installed.
    """
    if name not in MODELS:
        raise ValueError(f"model is {name!r}; expected one of {', '.join(MODELS)}")
    if dtype not in LAYER_ERROR:
        raise ValueError(f"dtype is {dtype}; expected one of {', '.join(map(str, LAYER_ERROR))}")
    if prompt_tokens < 1:
        raise ValueError(f"prompt_tokens is {prompt_tokens}; expected at least 1")
    config, device = MODELS[name], torch.device(device)
    drawn = weights_module.random(config, seed, dtype, device)
    model = transformers_decode.share(drawn, config)
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(config.vocab_size, (prompt_tokens,), generator=generator).tolist()
    return Problem(name, config, dtype, seed, device, drawn, model, prompt)


# ------------------------------------------------------------------------------------------ the reference and its model


def compare(problem: Problem, expected: decoding.ReferenceDecode) -> tuple[list[dict], list[dict]]:
    """The reference against transformers, both with eager attention and experts: rows of errors, rows of checks.

    Errors (`ERROR_COLUMNS`) are of a prefill of the prompt, at all positions: what the router of a layer says
    ("router"), what leaves a layer ("layer"), the final norm, the logits. The reference is given the experts that
    transformers chose there: a near-tie that rounding decides another way moves all later layers, and would hide
    whether these are right.

    Checks (`CHECK_COLUMNS`): these errors; choices of experts that would have been others on the same path
    (`decoding.routing_differences`); the tokens of the free-running decode (`decoding.check_tokens`), and, without a
    bound, the errors of its logits.

    A check in bf16 that does not pass is explained if the reference in fp32 says that it is rounding. It computes the
    prefill with the same experts. Neither the reference nor transformers may be further from it than ROUNDING times the
    other, at every position that misses a bound and at all positions of what leaves the layers, the norm and the head
    (a router has few logits, so single positions of it scatter). The fp32 run has the meaning of the reference: one
    that means something else makes transformers look far, so the rule has to hold both ways. Experts and tokens are
    judged by the functions that compare them. In fp32 nothing is explained.

    Args:
        expected: `decoding.reference_decode` of the same prompt.
    """
    with rounding.full_precision():
        errors, checks = _compare_prefill(problem)
        return errors, checks + _compare_decode(problem, expected)


def _check(problem: Problem, what: str, value, bound: str, passed, explained=False, reason: str = "") -> dict:
    """A row of CHECK_COLUMNS."""
    about = {"seed": problem.seed, "dtype": problem.dtype_name, "check": what, "value": value, "bound": bound}
    return about | {"passed": bool(passed), "explained": bool(explained) and not passed, "reason": reason}


def _compare_prefill(problem: Problem) -> tuple[list[dict], list[dict]]:
    theirs, routing, their_logits = _their_prefill(problem)
    depth, narrow = problem.config.num_hidden_layers, decoding.narrow(problem.weights)
    forced = {layer: one.experts for layer, one in routing.items()}

    def prefill(weights):
        """The reference's results by part and layer, as `found`."""
        trace: dict = {}
        logits, _ = reference.prefill(weights, problem.config, problem.prompt, forced=forced, trace=trace)
        named = {(part, layer): trace[layer][name] for part, layer in found if (name := RESULTS.get(part))}
        return named | {("norm", None): trace["norm"], ("logits", None): logits}

    wide: dict = {}

    def exact(place):
        """Of the reference in fp32, which is run when something asks for it."""
        if not wide:
            wide.update(prefill(rounding.Wide(problem.weights)))
        return wide[place]

    found = {}
    for layer in range(depth):
        if layer in routing:
            found["router", layer] = routing[layer].logits
        found["layer", layer] = theirs[layer]
    found |= {("norm", None): theirs["norm"], ("logits", None): their_logits}
    mine = prefill(problem.weights)
    about = {"seed": problem.seed, "dtype": problem.dtype_name}
    errors = []
    for (part, layer), other in found.items():
        where = about | {"part": part} | ({} if layer is None else {"layer": layer})
        errors.append(where | _error(mine[part, layer], other))

    def apart(place, at=slice(None)):
        """How many times as far from fp32 as the other the further of the two is, at some positions."""
        rows = mine[place][at], found[place][at], exact(place)[at]
        return torch.maximum(rounding.times_as_far(*rows), rounding.times_as_far(rows[1], rows[0], rows[2]))

    def far(ratio):
        return int((~(ratio <= rounding.ROUNDING)).sum())  # a NaN is

    def by_rounding(part, misses):
        """Whether rounding explains a part that misses a bound, and a sentence about it."""
        places = {place: misses(mine[place].float(), found[place].float()) for place in found if place[0] == part}
        ratio = torch.cat([apart(place, at) for place, at in places.items()])
        left = far(ratio)
        text = (
            f"rounding explains {len(ratio) - left} of {len(ratio)} positions that miss it: one of the two is there up "
        )
        text += f"to {float(ratio.max()):.3g} times as far from fp32 as the other"
        if not elsewhere:
            elsewhere.append(torch.cat([apart(place) for place in found if place[0] != "router"]))
        if others := far(elsewhere[0]):
            text += f"; so is it at {others} of all {len(elsewhere[0])} results of layers, norm and head"
            text += f", up to {float(elsewhere[0].max()):.3g} times"
        return not left and not others, text

    elsewhere: list[torch.Tensor] = []
    checks, largest = [], LAYER_ERROR[problem.dtype]
    for part, least in (("router", LAYER_COSINE), ("layer", LAYER_COSINE), ("logits", LOGIT_COSINE)):
        rows = [row for row in errors if row["part"] == part]
        if not rows:  # a model may have no router
            continue
        # NumPy's: Python's may pass over a NaN
        rel, cosine = float(np.max([row["rel"] for row in rows])), float(np.min([row["cosine"] for row in rows]))

        # written so that a NaN misses
        def off(own, other):
            return ~((own - other).abs() <= largest * other.abs().max()).all(-1)

        def turned(own, other, least=least):
            return ~(torch.cosine_similarity(own, other, dim=-1) >= least)

        for what, value, bound, passed, misses in (
            ("largest error", rel, f"<= {largest:g}", rel <= largest, off),
            ("least cosine", cosine, f">= {least:g}", cosine >= least, turned),
        ):
            judged = by_rounding(part, misses) if narrow and not passed else ()
            checks.append(_check(problem, f"{part}: {what}", value, bound, passed, *judged))

    def routed(exact=None):
        total = decoding.RoutingDifferences(0, 0, 0, 0.0)
        for layer, one in routing.items():
            place = "router", layer
            total += decoding.routing_differences(problem.config, mine[place], one, exact and exact(place))
        return total

    choices, explained, reason = routed(), False, ""
    if choices.unexplained and narrow:
        left = routed(exact).unexplained
        explained, reason = not left, f"; against fp32 rounding explains {choices.unexplained - left} more of them"
    checks.append(
        _check(
            problem, "routing: unexplained choices", choices.unexplained, "0", not choices.unexplained, explained,
            f"{choices}{reason}",
        )
    )  # fmt: skip
    return errors, checks


def _compare_decode(problem: Problem, expected: decoding.ReferenceDecode) -> list[dict]:
    decoder = transformers_decode.EagerDecoder(problem.model, problem.prompt)
    decode = decoding.run(decoder, len(expected.tokens) - 1)
    verdict, checks = judge(problem, decode, expected), []
    if decode.tokens[0] == expected.tokens[0]:
        same = slice(verdict.matched + 1)  # what follows another token is another text
        found = _error(expected.logits[same], decode.logits[same])
        checks = [
            _check(problem, "decode: largest error of logits", found["rel"], "", True),
            _check(problem, "decode: least cosine of logits", found["cosine"], "", True),
        ]
    judged = verdict.passed, verdict.explained, verdict.reason
    return [*checks, _check(problem, "decode: tokens", verdict.tokens_match, "all, or a near-tie", *judged)]


def judge(problem: Problem, decode: decoding.Decode, expected: decoding.ReferenceDecode) -> decoding.Verdict:
    """`decoding.check_tokens` of a decode of the problem's prompt."""
    return decoding.check_tokens(decode, expected, problem.weights, problem.config, problem.prompt)


def _error(mine: torch.Tensor, theirs: torch.Tensor) -> dict:
    """Largest difference of [N, ...] from theirs, over their largest entry; least cosine of a row."""
    mine, theirs = mine.float(), theirs.float()
    diff, most = float((mine - theirs).abs().max()), float(theirs.abs().max())
    cosine = float(torch.cosine_similarity(mine, theirs, dim=-1).min())
    return {"max_abs_diff": diff, "max_abs_ref": most, "rel": diff / max(most, 1e-30), "cosine": cosine}


@torch.no_grad()
def _their_prefill(problem: Problem):
    """What transformers computes in a prefill: what leaves each layer and the norm, routing by layer, logits [N, V]."""
    results, handles = {}, []

    def keep(key):
        def hook(module, inputs, output):
            results[key] = (output if isinstance(output, torch.Tensor) else output[0])[0]

        return hook

    model = problem.model
    model.set_experts_implementation("eager")
    model.set_attn_implementation("eager")
    try:
        for number, layer in enumerate(model.model.layers):
            handles.append(layer.register_forward_hook(keep(number)))
        handles.append(model.model.norm.register_forward_hook(keep("norm")))
        with transformers_decode.watching(model) as routing:
            logits = model(torch.tensor([problem.prompt], device=problem.device), use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    return results, routing, logits


# -------------------------------------------------------------------------------------------------------------- margins


def step_rows(problem: Problem, decode: decoding.ReferenceDecode) -> list[dict]:
    """How close each choice of a decode was, rows of `STEP_COLUMNS`.

    quantity "token": the distance of the two largest logits, with the token that was chosen. quantity "router": at each
    layer with experts, the distance of the last chosen and the next router logit. Step 0 is the last position of the
    prefill; position: of the token that was read.
    """
    routers = decode.router_margins(problem.config.num_experts_per_tok)
    rows = []
    for step, token in enumerate(decode.tokens):
        about = {"seed": problem.seed, "step": step, "position": len(problem.prompt) - 1 + step}
        rows.append(about | {"quantity": "token", "token": token, "margin": _short(decode.margins[step])})
        rows += [
            about | {"quantity": "router", "layer": layer, "margin": _short(margins[step])}
            for layer, margins in routers.items()
        ]
    return rows


def _short(value: float) -> float:
    """Six digits: the file is committed."""
    return float(f"{value:.6g}")


def measure(
    name: str,
    dtypes: Sequence[torch.dtype],
    seeds: Sequence[int],
    prompt_tokens: int,
    steps: int,
    device: torch.device | str = "cpu",
    say: Callable[[str], None] = print,
    *,
    others_seeds: Sequence[int] | None = None,
) -> tuple[list[dict], list[dict], list[dict]]:
    """`compare` at every seed and dtype, and `step_rows` at every seed in the first dtype: errors, checks, steps.

    Args:
        name: of `MODELS`.
        others_seeds: of `seeds`, those at which the dtypes after the first are compared, too; None is all.
        prompt_tokens, steps: length of the prompt, decode steps after it.
        say: is told about progress, a line for each model that was built.

    Raises:
        ValueError: as `build` and `decoding.reference_decode`.
    """
    errors, checks, rows = [], [], []
    for seed in seeds:
        for dtype in dtypes:
            if dtype != dtypes[0] and others_seeds is not None and seed not in others_seeds:
                continue
            problem = build(name, dtype, seed, prompt_tokens, device)
            with rounding.full_precision():
                decode = decoding.reference_decode(problem.weights, problem.config, problem.prompt, steps)
            more, judged = compare(problem, decode)
            errors, checks = errors + more, checks + judged
            if dtype == dtypes[0]:
                rows += step_rows(problem, decode)
            missed = [check for check in judged if not check["passed"]]
            bad = [check["check"] for check in missed if not check["explained"]]
            how = "passed" if not missed else f"{len(missed)} missed"
            how += f", not explained: {', '.join(bad)}" if bad else ", explained" if missed else ""
            say(f"{name} {problem.dtype_name}, seed {seed}: {how}")
            del problem, decode
            release(device)
    return errors, checks, rows


def release(device: torch.device | str) -> None:
    """Give memory of dropped models back: two of full size should not be held at once."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


# --------------------------------------------------------------------------------------------------------------- floors


def bytes_per_token(config: ModelConfig, length: int, itemsize: int, *, latent: bool = True) -> int:
    """Bytes of weights and cache that a token of batch 1 needs; `length` positions are attended over."""
    return config.weight_bytes(itemsize) + config.cache_bytes(length, latent=latent, itemsize=itemsize)


def floors(
    name: str, dtype: torch.dtype, length: int, device: torch.device | str, buffer_bytes: int, n: int = 20
) -> list[dict]:
    """The measured read bandwidth, and the milliseconds per token that no decode can be below where every byte comes
    from memory: with a latent cache, and with one of all heads' keys and values.

    Returns:
        Rows with quantity, unit, median, p20, p80, n, gb_per_token, size, times_cache, method, device; p20 of a floor
        belongs to p80 of the bandwidth.

    Raises:
        ValueError, AssertionError: as `fmms.bench.ceilings.read_bandwidth`.
    """
    read = ceilings.read_bandwidth(device, buffer_bytes, n)
    rows = [read]
    for cache in ("latent", "decompressed"):
        size = bytes_per_token(MODELS[name], length, dtype.itemsize, latent=cache == "latent")
        rates = {"median": read["median"], "p20": read["p80"], "p80": read["p20"]}
        rows.append(
            {"quantity": f"floor, {cache} cache", "unit": "ms/token", "n": read["n"], "gb_per_token": size / 1e9,
             "size": f"{name}, T = {length}", "method": "bytes / read bandwidth", "device": read["device"],
             **{column: size / rate / 1e6 for column, rate in rates.items()}}
        )  # fmt: skip
    return rows


# ---------------------------------------------------------------------------------------------------------------- speed


def decoders(problem: Problem, steps: int, eager: Sequence[str], graph: Sequence[str]) -> list:
    """The decodes that are timed, from pairs of experts and attention such as "batched_mm, sdpa".

    Raises:
        ValueError: a text that is no such pair.
    """
    made = []
    for kind, pairs in (("eager", eager), ("graph", graph)):
        for pair in pairs:
            parts = [part.strip() for part in pair.split(",")]
            if len(parts) != 2 or not all(parts):
                raise ValueError(f"{kind}: expected pairs such as 'batched_mm, sdpa', found {pair!r}")
            if kind == "eager":
                made.append(transformers_decode.EagerDecoder(problem.model, problem.prompt, *parts))
            else:
                made.append(transformers_decode.StaticDecoder(problem.model, problem.prompt, steps, *parts))
    return made


def time_systems(
    problem: Problem,
    expected: decoding.ReferenceDecode,
    made: Sequence,
    repeats: int = 5,
    say: Callable[[str], None] = print,
) -> list[dict]:
    """Decode rows (`decoding.COLUMNS`) of transformers: checked, then timed in rounds, a decode of each in turn.

    `transformers-graph` replays a captured step. Where it can't be captured, the row has the reason and no time. Its
    tokens are checked as they come from replays, those of every timed decode must be the same again.

    Args:
        expected: `decoding.reference_decode` of the same prompt; its steps are those that are timed.
        made: of `decoders`.
        repeats: timed decodes of each system; a row's n is repeats times steps.
    """
    steps, about, device = len(expected.tokens) - 1, f"{problem.name} {problem.dtype_name}", problem.device
    length = len(problem.prompt) + steps
    needed = bytes_per_token(problem.config, length, problem.dtype.itemsize)
    rows, ready = [], {}
    for number, decoder in enumerate(made):
        row = decoding.row(decoder.system, f"{about}, {decoder.config}", length, steps, needed)
        rows.append(row)
        tokens = _prepare(problem, decoder, expected, row)
        if tokens is not None:
            ready[number] = tokens
    seconds: dict[int, list] = {number: [] for number in ready}
    for _ in range(repeats):
        for number, tokens in list(ready.items()):
            try:
                took, again = decoding.time_steps(made[number], steps, device)
            except Exception as error:  # a peer that breaks is a row
                rows[number]["reason"] += f"; not timed: {outputs.describe(error)}"
                del ready[number]
                continue
            if again != tokens:
                rows[number]["reason"] += "; not timed: a repetition decoded other tokens"
                del ready[number]
                continue
            seconds[number].append(took)
    for number in ready:
        rows[number] |= decoding.latencies(np.concatenate(seconds[number]), needed)
        say(f"{rows[number]['system']} ({rows[number]['config']}): {rows[number]['p50_ms']:.3f} ms/token")
    return rows


def _prepare(problem: Problem, decoder, expected, row: dict) -> list[int] | None:
    """Capture and check a decoder; its tokens if it may be timed, else None with the reason in the row."""
    captured, on_gpu = isinstance(decoder, transformers_decode.StaticDecoder), problem.device.type == "cuda"
    try:
        if captured and on_gpu:
            decoder.capture()
        decode = decoding.run(decoder, len(expected.tokens) - 1)
        verdict = judge(problem, decode, expected)
    except Exception as error:  # a peer that breaks is a row
        row["reason"] = f"unavailable: {outputs.describe(error)}"
        return None
    row |= {"tokens_match": verdict.tokens_match, "reason": verdict.reason}
    if captured and not on_gpu:
        row["reason"] = f"unavailable: CUDA graphs need a GPU; its step, run eagerly: {verdict.reason}"
        return None
    return decode.tokens if verdict.passed or verdict.explained else None


def count_launches(problem: Problem, made: Sequence, steps: int) -> list[dict]:
    """What a decode step asks of the device, on average over `steps`, rows of `LAUNCH_COLUMNS`.

    On a GPU "CUDA kernels" (no copies, no fills) and "launch calls" of the host, as torch.profiler sees them; on a CPU
    "ATen ops" that PyTorch dispatches, views included.
    """
    rows = []
    for decoder in made:
        about = {"system": decoder.system, "config": f"{problem.name} {problem.dtype_name}, {decoder.config}"}
        about |= {"batch": 1, "T": len(problem.prompt) + steps, "n": steps}
        try:
            counts = _profile(decoder, steps, problem.device)
        except Exception as error:  # profilers need rights that not every host gives
            counts = {what: f"unavailable: {outputs.describe(error)}" for what in _counted(problem.device)}
        for what, count in counts.items():
            known = isinstance(count, int) and count > 0
            reason = "" if known else count if isinstance(count, str) else "unavailable: the profiler saw none"
            rows.append(about | {"counted": what, "per_token": count / steps if known else None, "reason": reason})
    return [{column: row.get(column) for column in LAUNCH_COLUMNS} for row in rows]


def _counted(device: torch.device) -> tuple[str, ...]:
    return ("CUDA kernels", "launch calls") if device.type == "cuda" else ("ATen ops",)


class _Counter(TorchDispatchMode):
    """Counts operations that reach a backend of PyTorch."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def _profile(decoder, steps: int, device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        decoder.start()
        with _Counter() as counter:
            for _ in range(steps):
                decoder.step()
        return {"ATen ops": counter.count}

    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities):  # the first use starts the driver's side of it, which takes seconds
        pass
    decoder.start()
    torch.cuda.synchronize(device)
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            decoder.step()
        torch.cuda.synchronize(device)
    kernels, calls = 0, 0
    for event in profiler.events():
        if event.device_type == DeviceType.CPU:
            calls += event.name.startswith(LAUNCH_CALLS)
        elif not event.name.startswith(("Memcpy", "Memset")) and not getattr(event, "is_user_annotation", False):
            kernels += 1
    return dict(zip(_counted(device), (kernels, calls), strict=True))


# ------------------------------------------------------------------------------------------------------------- verdicts


def summary(checks) -> Any:
    """One line for each dtype and check, the worst over the seeds: a DataFrame of the rows of `compare`."""
    import pandas

    frame = pandas.DataFrame(checks)
    rows = []
    for (dtype, check), some in frame.groupby(["dtype", "check"], sort=False):
        numbers = pandas.to_numeric(some["value"], errors="coerce")
        if numbers.isna().any():  # texts
            value = ", ".join(some["value"].unique())
        else:
            value = numbers.min() if "least" in check else numbers.max()
        bound = some["bound"].iloc[0]
        count, passed = len(some), int(some["passed"].sum())
        about = "; ".join(dict.fromkeys(filter(None, some["reason"])))
        judged = {"passed": f"{passed} of {count} seeds" if bound else ""}
        judged["explained"] = f"{int(some['explained'].sum())} of {count - passed}" if passed < count else ""
        rows.append({"dtype": dtype, "check": check, "worst": value, "bound": bound, **judged, "about": about})
    return pandas.DataFrame(rows)


def margins_reading(steps) -> str:
    """What the margins say, in sentences of HTML; a DataFrame of `step_rows`."""
    tokens, routers = (steps[steps["quantity"] == name]["margin"] for name in ("token", "router"))
    near = int((tokens < rounding.NEAR_TIE).sum())
    return (
        f"<p>{near} of {len(tokens)} tokens are near-ties, closer than {rounding.NEAR_TIE:g}; the least margin is "
        f"{tokens.min():.3g}, the median {tokens.median():.3g}. Experts are chosen by less: the median margin of "
        f"{len(routers)} choices is {routers.median():.3g}, the least {routers.min():.2g}, so that rounding alone may "
        f"turn some, and with them all that follows.</p>"
    )


def reading(decode, floor_rows, profile: str) -> str:
    """What the times say beside the floor, in a sentence of HTML; DataFrames of `time_systems` and `floors`."""
    timed = decode.dropna(subset=["p50_ms"])
    if timed.empty:
        return "<p>Nothing was timed here; the last column says why.</p>"
    floor = floor_rows[floor_rows["quantity"] == "floor, latent cache"]["median"].iloc[0]
    parts = [
        f"{row.system} ({row.config.split(', ', 1)[1]}) {row.p50_ms:.3g} ms, {row.p50_ms / floor:.3g} times the floor"
        for row in timed.itertuples()
    ]
    claim = " A CPU and a tiny model: no speed claim." if profile == "cpu" else ""
    return f"<p>Floor {floor:.3g} ms per token. {'; '.join(parts)}.{claim}</p>"


def require(checks, decode) -> str:
    """AssertionError that lists checks that failed without an explanation, and systems that decoded other tokens; else
    a sentence that counts the checks. Lists of rows, as measured."""
    missed = [row for row in checks if not row["passed"]]
    lines = [
        f"{row['dtype']}, seed {row['seed']}, {row['check']} {row['value']} ({row['bound']}); {row['reason']}"
        for row in missed
        if not row["explained"]
    ]
    wrong = [row for row in decode if "does not explain" in row["reason"]]
    lines += [f"{row['system']} ({row['config']}): {row['reason']}" for row in wrong]
    if lines:
        raise AssertionError(f"{len(lines)} checks failed without an explanation:\n" + "\n".join(lines))
    passed = len(checks) - len(missed)
    text = f"{passed} of {len(checks)} checks of the reference passed"
    return text + (f", {len(missed)} missed and explained" if missed else "")
