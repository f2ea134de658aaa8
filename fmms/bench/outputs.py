"""Is a system's output right, on the very tensors and shapes that are then timed?

Samplers that share the reference's noise must repeat its ids; others are tested by where their draws lie in the
distribution, at full size; a matmul is compared with fp32. A check never raises for a wrong output: it says why.
"""

import math
from dataclasses import dataclass, field

import torch

from fmms import controls, noise, reference, testing
from fmms.backends import Backend
from fmms.bench.cases import Case

FALSE_ALARMS = 1e-6
"""Chance that one statistical test calls an exact sampler wrong."""
TRANSCENDENTAL_NATS = 2e-5
"""What fp32 logarithms and exponentials may add to a decision between two tokens (docs/noise.md)."""
TRUNCATION_MASS = 4e-6
"""Relative error of a sum of fp32 weights, as truncation compares them with a share of the whole."""
BINS = 16
_CHUNK_ELEMENTS = 1 << 23  # of fp64 noise: a few such tensors at a time
_POSITION = 0


@dataclass(frozen=True)
class Problem:
    """Random inputs of one case, and what the reference makes of them; a smaller H uses the first H rows.

    hidden [H, D], weight [V, D], temperature fp32 [H] (0.6 to 1.2, another one in each row), seeds int64 [H];
    logits fp32 [H, V] from IEEE fp32; rounding fp64 [H]: bound in nats
    on what the order of an fp32 summation changes in logits / T; draws {(scheme, top_k, top_p, min_p): (ids [H], margin
    [H])}; kept {(top_k, top_p, min_p): what `kept_tokens` gives}.
    """

    case: Case
    hidden: torch.Tensor
    weight: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    logits: torch.Tensor
    rounding: torch.Tensor
    draws: dict = field(default_factory=dict)
    kept: dict = field(default_factory=dict)

    def inputs(self, rows: int):
        """hidden, weight, temperature, seeds of the first `rows` rows."""
        return self.hidden[:rows], self.weight, self.temperature[:rows], self.seeds[:rows]


@dataclass(frozen=True)
class Verdict:
    """Whether an output is right, and what was checked or what is wrong."""

    correct: bool
    reason: str


def make_problem(case: Case, rows: int, dtype: torch.dtype, device, seed: int = 0) -> Problem:
    """Inputs and reference of a case for up to `rows` rows, made on `device` from `seed`.

    Normal values: zeros would switch fewer transistors and let a GPU clock higher. Logits have a standard deviation
    near 2.
    """
    generator = torch.Generator(device).manual_seed(seed)
    weight = torch.randn(case.V, case.D, dtype=dtype, device=device, generator=generator).mul_(2 / math.sqrt(case.D))
    hidden = torch.randn(rows, case.D, dtype=dtype, device=device, generator=generator)
    temperature = torch.linspace(0.6, 1.2, rows, device=device) if rows > 1 else torch.full((1,), 0.9, device=device)
    seeds = noise.row_seeds(seed + 1, rows, torch.device(device))
    logits = reference.compute_logits(hidden, weight)
    length = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).max().double()
    norms = torch.linalg.vector_norm(hidden, dim=1, dtype=torch.float32).double()
    rounding = 4 * torch.finfo(torch.float32).eps * norms * length / temperature.double()
    return Problem(case, hidden, weight, temperature, seeds, logits, rounding)


def reference_draws(problem: Problem, scheme: str, filters: tuple = (None, None, None)):
    """The reference's ids [H] and how far, in nats, each is from going another way [H]; computed once per scheme and
    truncation (top_k, top_p, min_p). A truncated draw on which `kept_tokens` disagree is no distance away."""
    key = (scheme, *filters)
    if key not in problem.draws:
        ids, margins = [], []
        step = max(1, _CHUNK_ELEMENTS // problem.case.V)
        for start in range(0, len(problem.seeds), step):
            part = slice(start, start + step)
            logits, temperature, seeds = problem.logits[part], problem.temperature[part], problem.seeds[part]
            given = temperature, seeds, torch.full_like(seeds, _POSITION)

            def draw(logits, allowed=None, given=given):
                return reference.sample_from_logits(logits, *given, scheme=scheme, allowed=allowed)[0][:, 0]

            sure = torch.ones_like(seeds, dtype=torch.bool)
            if filters != (None, None, None):
                narrow, exact, wide = (allowed[part] for allowed in kept_tokens(problem, filters))
                sure = draw(logits, narrow) == draw(logits, wide)
                logits = torch.where(exact, logits, -torch.inf)
            ids.append(draw(logits))
            margin = testing.decision_margin(logits, *given, scheme=scheme)[:, 0]
            margins.append(torch.where(sure, margin, 0.0))
        problem.draws[key] = torch.cat(ids), torch.cat(margins)
    return problem.draws[key]


def kept_tokens(problem: Problem, filters: tuple):
    """The fewest tokens that truncation may leave when every logit / T is off by up to `rounding` and every sum of
    weights by TRUNCATION_MASS, those it should leave, and the most: bool [H, V] each; computed once."""
    if filters not in problem.kept:
        step = max(1, _CHUNK_ELEMENTS // problem.case.V)
        parts = [
            kept_sets(logits, temperature, rounding, filters)
            for logits, temperature, rounding in zip(
                *(x.split(step) for x in (problem.logits, problem.temperature, problem.rounding)), strict=True
            )
        ]
        problem.kept[filters] = tuple(torch.cat(masks) for masks in zip(*parts, strict=True))
    return problem.kept[filters]


def kept_sets(logits, temperature, rounding, filters: tuple):
    """`kept_tokens` of logits [H, V], temperature fp32 [H] and rounding fp64 [H]."""
    top_k, top_p, min_p = filters
    narrow, exact, wide = {}, {}, {}
    error = 2 * (rounding + TRUNCATION_MASS)  # of two logits or masses against each other
    if top_k is not None and 0 < top_k < logits.shape[1]:
        edge = logits.topk(top_k + 1, -1).values[:, -2:]
        shift = (error * temperature)[:, None]
        exact["top_k"] = top_k
        narrow["top_k"] = (logits > edge[:, 1:] + shift).sum(-1).clamp(min=1)
        wide["top_k"] = (logits >= edge[:, :1] - shift).sum(-1)
    if top_p is not None:
        exact["top_p"], narrow["top_p"], wide["top_p"] = top_p, top_p * (1 - error), (top_p * (1 + error)).clamp(max=1)
    if min_p is not None:
        exact["min_p"], wide["min_p"], narrow["min_p"] = min_p, min_p * (1 - error), (min_p * (1 + error)).clamp(max=1)
    return tuple(controls.allowed_set(logits, temperature, **given) for given in (narrow, exact, wide))


def check(backend: Backend, problem: Problem, rows: int, draws: int = 512) -> Verdict:
    """Runs a backend on the first `rows` rows of a problem and judges what it returns.

    draws: how many draws a statistical check takes at least, in calls of `rows` each.
    """
    try:
        backend(*problem.inputs(rows))  # compilers must not trace the poisoning
        with testing.poisoned_memory():  # an element that is not written shows
            output = backend(*problem.inputs(rows))
        if backend.returns == "logits":
            return _check_logits(output, problem, rows)
        fault = _shape_fault(output, problem, rows)
        if fault:
            return Verdict(False, fault)
        if backend.scheme:
            verdict = _check_ids(output, problem, rows, backend)
            # of a truncated sampler a few ids say little about what it removes
            if verdict.correct and _filters(backend) != (None, None, None):
                return _check_distribution(backend, problem, rows, draws, output, verdict.reason + "; ")
            return verdict
        return _check_distribution(backend, problem, rows, draws, output)
    except Exception as error:  # whatever a peer raises is a row of the table, not the end of the run
        return Verdict(False, f"raised {describe(error)}")


def describe(error: Exception) -> str:
    """An exception in one line of a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"


def _shape_fault(ids, problem: Problem, rows: int) -> str:
    if not isinstance(ids, torch.Tensor) or ids.shape != (rows,) or ids.is_floating_point():
        shape = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        return f"returned {shape}; expected integer ids [{rows}]"
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= problem.case.V:
        return f"ids from {low} to {high}; expected 0 to {problem.case.V - 1}"
    return ""


def _check_logits(output: torch.Tensor, problem: Problem, rows: int) -> Verdict:
    """Against fp32: one rounding to the output's dtype, partial sums rounded to it too, fp32 accumulation."""
    shape = (rows, problem.case.V)
    if not isinstance(output, torch.Tensor) or output.shape != shape:
        return Verdict(False, f"returned {list(getattr(output, 'shape', []))}; expected logits {list(shape)}")
    worst = 0.0
    for row in range(rows):
        exact = problem.logits[row].double()
        spread = exact.square().mean().sqrt()
        bound = torch.finfo(output.dtype).eps * (exact.abs() + 4 * spread)
        bound = bound + problem.rounding[row] * problem.temperature[row]
        excess = float(((output[row].double() - exact).abs() / bound).max())
        worst = max(worst, excess if excess == excess else math.inf)  # a NaN fails too
    if worst > 1:
        return Verdict(False, f"logits differ from fp32 by {worst:.3g} times the rounding bound")
    return Verdict(True, f"all logits within {worst:.2f} of the rounding bound around fp32")


def _filters(backend: Backend) -> tuple:
    return backend.top_k, backend.top_p, backend.min_p


def _check_ids(ids: torch.Tensor, problem: Problem, rows: int, backend: Backend) -> Verdict:
    wanted, margin = (x[:rows] for x in reference_draws(problem, backend.scheme, _filters(backend)))
    bound = problem.rounding[:rows] + TRANSCENDENTAL_NATS
    differs = ids != wanted
    unexplained = int((differs & (margin > bound)).sum())
    if unexplained:
        worst = float(margin[differs].max())
        return Verdict(
            False, f"{unexplained} of {rows} ids differ from the reference's at margins up to {worst:.2g} nats"
        )
    count = int(differs.sum())
    # a decision lies within x nats of another one with a probability of a few x
    allowed = 2 + 20 * float(bound.sum())
    if count > allowed:
        return Verdict(False, f"{count} of {rows} ids differ from the reference's; rounding explains {allowed:.0f}")
    near = f", but {count} within {float(bound.max()):.1g} nats of a tie" if count else ""
    return Verdict(True, f"{rows} ids equal the reference's{near}")


def _check_distribution(backend: Backend, problem: Problem, rows: int, draws: int, output, also: str = "") -> Verdict:
    """Where draws lie in the cumulative distribution, over ids and over tokens by probability, must be uniform, and
    none may be a token that truncation removes. output: ids of a first call; also: what else was found right."""
    hidden, weight, temperature, seeds = problem.inputs(rows)
    calls = math.ceil(draws / rows)
    if backend.scheme and not hidden.is_cuda:
        calls = 1  # Triton's interpreter takes a tenth of a second for every row that it truncates
    more = [backend(hidden, weight, temperature, seeds + call) for call in range(1, calls)]
    drawn = torch.stack([output, *more], 1).long()
    if int(drawn.min()) < 0 or int(drawn.max()) >= problem.case.V:
        return Verdict(False, f"ids from {int(drawn.min())} to {int(drawn.max())}; expected 0 to {problem.case.V - 1}")
    # what is drawn from, rounding included: fp32 logits, or what the very call of the peers gives
    stored = problem.logits[:rows] if backend.scheme else hidden @ weight.T
    by_id, by_rank, outside = [], [], 0
    generator = torch.Generator(drawn.device).manual_seed(2)
    for row in range(rows):
        if backend.scheme:
            probs, allowed = _exact_target(problem, row, backend)
        else:
            probs, allowed = _target(stored[row], float(temperature[row]), backend)
        outside += int((~allowed[drawn[row]]).sum())
        own = probs[drawn[row]]
        inside = own * torch.rand(own.shape, generator=generator, dtype=own.dtype, device=own.device)
        order = torch.argsort(probs, descending=True, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        by_id.append(probs.cumsum(0)[drawn[row]] - own + inside)
        by_rank.append(probs[order].cumsum(0)[place[drawn[row]]] - own + inside)
    if outside:
        return Verdict(False, f"{outside} of {drawn.numel()} draws are tokens that truncation removes")
    if backend.scheme and calls == 1 and drawn.numel() < 5 * BINS:  # too few for a chi-square
        return Verdict(True, f"{also}{drawn.numel()} draws, none of a token that truncation removes")
    p_id, p_rank = uniformity(torch.cat(by_id)), uniformity(torch.cat(by_rank))
    tests = f"{also}{drawn.numel()} draws against the softmax: p = {p_id:.2g} over ids, {p_rank:.2g} over ranks"
    return Verdict(min(p_id, p_rank) >= FALSE_ALARMS, tests)


def _exact_target(problem: Problem, row: int, backend: Backend) -> tuple[torch.Tensor, torch.Tensor]:
    """What `_target` gives, for a sampler of fp32 logits that truncates as `controls.allowed_set` does."""
    _, exact, wide = (allowed[row] for allowed in kept_tokens(problem, _filters(backend)))
    scaled = problem.logits[row].double() / problem.temperature[row].double()
    return torch.softmax(scaled.where(exact, -torch.inf), -1), wide


def _target(logits: torch.Tensor, temperature: float, backend: Backend) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [V] in fp64 that a backend should draw from, and which tokens it may return (bool [V]).

    Args:
        logits: [V], as the backend stores them. Rounding to bf16 makes ties; those at an edge of a truncation are
            all kept, as a threshold keeps them.
    """
    scaled = logits.double() / temperature
    probs = torch.softmax(scaled, -1)
    allowed = torch.ones_like(probs, dtype=torch.bool)
    if backend.top_k is not None:
        allowed = logits >= logits.topk(min(backend.top_k, len(logits))).values[-1]
        probs = torch.where(allowed, probs, 0.0)
        probs = probs / probs.sum()
    if backend.top_p is not None:
        descending = probs.sort(descending=True).values
        heavier = torch.searchsorted(-descending, -probs)  # how many tokens are strictly more probable
        above = torch.nn.functional.pad(descending.cumsum(0), (1, 0))[heavier]
        # a peer sums in fp32, and some sum in the order of the vocabulary
        allowed &= above < backend.top_p + 1e-3
        probs = torch.where(above < backend.top_p, probs, 0.0)
    return probs / probs.sum(), allowed


def uniformity(u: torch.Tensor, bins: int = BINS) -> float:
    """p-value of a chi-square test that values lie uniformly in [0, 1]: equal bins. Needs no SciPy."""
    counts = torch.bincount((u * bins).long().clamp(0, bins - 1), minlength=bins).double()
    expected = counts.sum() / bins
    statistic = ((counts - expected) ** 2 / expected).sum().cpu()
    return float(torch.special.gammaincc(torch.tensor((bins - 1) / 2, dtype=torch.float64), statistic / 2))
