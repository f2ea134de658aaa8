"""Truncation by top-k, top-p and min-p: which tokens are left, whether only these are drawn, and what it costs.

`fmms.controls.allowed_set` is the definition. Logits are prescribed exactly (rows of the identity as hidden states), so
what an implementation keeps is compared token by token. The weights of tokens are fp32 in the kernels: where the
definition's own decision is closer than ROUNDING_MASS, the set may differ by the tokens there, and those only. The
figures of these rows are in fmms.bench.truncation_figures.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

import fmms
from fmms import backends, controls, noise, testing
from fmms.backends.fused import TOP_K, TOP_P, fused_ids
from fmms.bench import cases, exactness, kernel_speed, outputs, timing
from fmms.request import FILTER_ORDERS

ROUNDING_MASS = outputs.TRUNCATION_MASS
ROUNDING_NATS = outputs.TRANSCENDENTAL_NATS
LOGPROB_BOUND = 1e-5
"""Largest error of a final log-probability in nats; one token too few or too many of 100,000 equal ones is as much."""
MIN_P = 0.05
FLAT_TEMPERATURE, FLAT_TOP_P = 1000.0, 0.66
"""All but equal probabilities, two thirds of the vocabulary kept: the hardest case for a search of the cut."""
COST_COLUMNS = (*kernel_speed.COLUMNS[:6], "controls", "kept", *kernel_speed.COLUMNS[6:])

# ------------------------------------------------------------------------------------------------------- what is tested


@dataclasses.dataclass(frozen=True)
class Control:
    """One setting of the three filters; the defaults are off."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    filter_order: str = "top_k_first"

    @property
    def label(self) -> str:
        """The filters that are on, such as "k = 50, p = 0.9"; the order of filters only where it could matter."""
        parts = [f"k = {self.top_k}"] if self.top_k else []
        parts += [f"p = {self.top_p:.7g}"] if self.top_p < 1 else []
        parts += [f"min-p = {self.min_p:g}"] if self.min_p else []
        several = len(parts) > 1 and self.top_p < 1
        return ", ".join(parts) + (f" ({self.filter_order.replace('_', ' ')})" if several else "")


def grid(vocab_size: int) -> list[Control]:
    """Each filter alone, at its extremes too, and combinations in every order."""
    alone = [Control(top_k=k) for k in (1, 50, 1000, vocab_size - 1) if 0 < k < vocab_size]
    alone += [Control(top_p=p) for p in (0.0, 0.1, 0.9, 0.9999999)]
    alone += [Control(min_p=MIN_P)]
    both, all_three = Control(50, 0.9), Control(min(1000, vocab_size - 1), 0.9, MIN_P)
    alone += [both, dataclasses.replace(both, filter_order="joint")]
    return alone + [dataclasses.replace(all_three, filter_order=order) for order in FILTER_ORDERS]


def distributions(vocab_size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Logits fp32 [V] in random order of ids: "peaked" as a trained model's, a power law of the rank ("zipf"), a "heavy
    tail" (half of the mass on one token, the rest spread out), "two values" (ties everywhere) and "flat" (one tie)."""
    generator = torch.Generator().manual_seed(seed + 1)
    base = exactness.distributions(vocab_size, seed)
    tail = 0.5 * torch.randn(vocab_size, generator=generator)
    tail[vocab_size // 3] = torch.logsumexp(tail, 0)
    return {
        "peaked": 1.35 * base["peaked"],
        "zipf": base["zipf"],
        "heavy tail": tail,
        "two values": (torch.rand(vocab_size, generator=generator) < 0.5).float(),
        "flat": base["flat"],
    }


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows of one filter order, a row for each distribution and setting; what the definition says of them."""

    names: list[tuple[str, Control]]
    hidden: torch.Tensor
    weight: torch.Tensor
    logits: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    arguments: dict
    """Of `fmms.sample`, and of fmms.controls."""
    prefixes: controls.Prefixes
    narrow: torch.Tensor
    """bool [R, V]: what is left however sums are rounded, next what should be, then what may be."""
    kept: torch.Tensor
    wide: torch.Tensor
    margin: torch.Tensor
    """fp64 [R], `testing.filter_margin`."""


def _make_rows(order: str, vocab_size: int, temperature: float, seed: int, device) -> _Rows:
    shapes = distributions(vocab_size)
    chosen = [one for one in grid(vocab_size) if one.filter_order == order]
    names = [(shape, one) for shape in shapes for one in chosen]
    of = torch.arange(len(shapes), device=device).repeat_interleave(len(chosen))
    weight = torch.stack(list(shapes.values()), 1).to(device)
    hidden, logits = torch.eye(len(shapes), device=device)[of], weight.T[of].contiguous()
    t = torch.full((len(names),), temperature, device=device)
    k = torch.tensor([one.top_k for _, one in names], dtype=torch.int32, device=device)
    p, m = (torch.tensor([getattr(one, name) for _, one in names], device=device) for name in ("top_p", "min_p"))

    def kept(shift):
        """The definition with masses off by `shift`, relative; filters that are off stay so."""
        return controls.allowed_set(
            logits, t, k, torch.where(p < 1, (p.double() * (1 + shift)).clamp(max=1), 1.0),
            (m.double() * (1 - shift)).clamp(max=1), order,
        )  # fmt: skip

    return _Rows(
        names, hidden, weight, logits, t, noise.row_seeds(seed, len(names), torch.device(device)),
        {"top_k": k, "top_p": p, "min_p": m, "filter_order": order},
        controls.prefixes(logits, t, k, p, m, order), kept(-2 * ROUNDING_MASS), kept(0.0), kept(2 * ROUNDING_MASS),
        testing.filter_margin(logits, t, k, p, m, order),
    )  # fmt: skip


def measure(
    vocab_size: int, draws: int, impl: str, *, device="cpu", temperature: float = 0.8, probes: int = 16, seed: int = 0,
    rate: float = 1e-6, say: Callable[[str], None] = lambda line: None,
) -> list[dict]:  # fmt: skip
    """A row for each distribution of `distributions` and setting of `grid`: what `fmms.sample` keeps and draws.

    - `n` draws in group noise: `p_value` of a chi-square against the truncated softmax; `forbidden`, draws of tokens
      that no rounding could keep; `differ`, ids other than those of impl "torch" with the same noise, and `explained`,
      those of them that a margin explains; `logprob_error` of the final log-probabilities.
    - `probes`, tokens whose noise is injected so large that they are drawn if and only if they are kept, most of them
      next to the cut: `probes_differ` from the definition, `probes_wrong` by more than rounding.

    Args:
        draws: of each row, at least. rate: false-alarm rate of each p-value.
    """
    found = []
    used = {one.filter_order for one in grid(vocab_size)}
    for order in (order for order in FILTER_ORDERS if order in used):
        rows = _make_rows(order, vocab_size, temperature, exactness.experiment_seed(seed, order, impl), device)
        drawn = _draws(rows, draws, impl, rate)
        probed = _probes(rows, probes, impl)
        say(f"{impl}, {order.replace('_', ' ')}: {len(rows.names)} rows, {drawn[0]['n']:,} draws of each")
        for (shape, control), a, b, kept, margin in zip(
            rows.names, drawn, probed, rows.kept.sum(-1).tolist(), rows.margin.tolist(), strict=True
        ):
            row = {
                "distribution": shape, "control": control.label, **dataclasses.asdict(control), "V": vocab_size,
                "temperature": temperature, "impl": impl, "kept": kept, "filter_margin": margin, **a, **b,
            }  # fmt: skip
            found.append({**row, "passed": not faults(row)})
    return found


def faults(row: dict) -> list[str]:
    """What must not be in a row of `measure` and is, in words."""
    wrong = []
    if row["forbidden"]:
        wrong.append(f"{row['forbidden']} of {row['n']} draws are tokens that truncation removes")
    if row["differ"] > row["explained"]:
        wrong.append(f"{row['differ'] - row['explained']} ids differ from the reference's without a reason")
    if row["probes_wrong"]:
        wrong.append(f"{row['probes_wrong']} of {row['probes']} tokens are kept or removed wrongly")
    if not row["logprob_error"] <= LOGPROB_BOUND:
        wrong.append(f"a final log-probability is off by {row['logprob_error']:.2g} nats")
    if not row["p_value"] >= row["false_alarm_rate"]:
        wrong.append(f"draws do not follow the truncated softmax: p = {row['p_value']:.2g}")
    return wrong


def require(rows) -> None:
    """AssertionError that lists what must not be (`faults`), if there is anything."""
    lines = [
        f"- {row['impl']}, {row['distribution']}, {row['control']}: {'; '.join(faults(row))}"
        for row in rows
        if faults(row)
    ]
    if lines:
        raise AssertionError(f"{len(lines)} of {len(rows)} settings are not what they should be:\n" + "\n".join(lines))


def summary(rows) -> str:
    """How many settings passed, the smallest p-value, and how often an exact sampler would fail one of the tests."""
    family = sum(row["false_alarm_rate"] for row in rows)
    return (
        f"{sum(row['passed'] for row in rows)} of {len(rows)} settings passed: "
        f"{sum(row['n'] for row in rows):,} draws, {sum(row['forbidden'] for row in rows)} of a removed token; "
        f"{sum(row['differ'] for row in rows)} ids unlike the reference's, of which rounding explains "
        f"{sum(row['explained'] for row in rows)}; the smallest of {len(rows)} p-values is "
        f"{min(row['p_value'] for row in rows):.2g}. An exact sampler fails one or more of these tests with a "
        f"probability of at most {family:.1g} (the choice of the seed being the chance)."
    )


def by_control(rows):
    """The rows of `measure` as a table (a pandas DataFrame), pooled over the distributions."""
    import pandas as pd

    frame = pd.DataFrame(rows)
    table = frame.groupby(["impl", "control"], sort=False).agg(
        least=("kept", "min"), most=("kept", "max"), draws=("n", "sum"), forbidden=("forbidden", "sum"),
        differ=("differ", "sum"), explained=("explained", "sum"), probes=("probes", "sum"),
        probes_differ=("probes_differ", "sum"), probes_wrong=("probes_wrong", "sum"), p_value=("p_value", "min"),
        logprob_error=("logprob_error", "max"),
    )  # fmt: skip
    names = {"least": "fewest kept", "most": "most kept", "p_value": "smallest p"}
    return table.reset_index().rename(columns=names).rename(columns=lambda name: name.replace("_", " "))


def _at_once(impl: str, device) -> int:
    """Samples of one call that draw fast and fit in memory."""
    return 1024 if torch.device(device).type == "cuda" else {"torch": 256}.get(impl, 32)


def _draws(rows: _Rows, draws: int, impl: str, rate: float) -> list[dict]:
    height, vocab = rows.logits.shape
    device = rows.logits.device
    samples = min(draws, _at_once(impl, device))
    counts = torch.zeros(height * vocab, dtype=torch.int64, device=device)
    differ, explained = (torch.zeros(height, dtype=torch.int64, device=device) for _ in range(2))
    error = torch.zeros(height, dtype=torch.float64, device=device)
    scaled = rows.logits.double() / rows.temperature.double()[:, None]
    logprobs = torch.log_softmax(scaled.where(rows.kept, -torch.inf), -1)
    slot = torch.arange(height, device=device)[:, None] * vocab
    for step in range(-(-draws // samples)):
        given = dict(seed=rows.seeds, position=step, num_samples=samples, return_final_logprobs=True, **rows.arguments)
        out = fmms.sample(rows.hidden, rows.weight, rows.temperature, impl=impl, **given)
        if not bool(out.valid.all()):
            raise RuntimeError(f"{impl}: rows of finite logits came back as not valid")
        counts += torch.bincount((slot + out.ids).reshape(-1), minlength=height * vocab)
        expected = logprobs.gather(1, out.ids)
        off = (out.final_logprobs - expected).abs().where(expected > -torch.inf, 0.0)
        error = torch.maximum(error, off.amax(-1))
        if impl != "torch":
            unlike = out.ids != fmms.sample(rows.hidden, rows.weight, rows.temperature, impl="torch", **given).ids
            differ += unlike.sum(-1)
            for at in unlike.any(-1).nonzero()[:, 0].tolist():
                explained[at] += (unlike[at] & _near(rows, at, step, samples)).sum()
    # where the set is a matter of rounding, so is the mass that divides
    error = torch.where(rows.margin > ROUNDING_MASS, error, 0.0)
    counts = counts.view(height, vocab)
    forbidden = counts.where(~rows.wide, 0).sum(-1)
    return [
        {
            "n": int(counts[i].sum()), "p_value": _p_value(counts[i].where(rows.kept[i], 0), logprobs[i]),
            "false_alarm_rate": rate, "forbidden": int(forbidden[i]), "differ": int(differ[i]),
            "explained": int(explained[i]), "logprob_error": float(error[i]),
        }
        for i in range(height)
    ]  # fmt: skip


def _near(rows: _Rows, at: int, position: int, samples: int) -> torch.Tensor:
    """bool [S]: draws of one row whose decision, or the row's truncation, is closer than rounding can tell."""
    if rows.margin[at] <= ROUNDING_MASS:
        return torch.ones(samples, dtype=torch.bool, device=rows.logits.device)
    one = slice(at, at + 1)
    left = rows.logits[one].where(rows.kept[one], -torch.inf)
    positions = torch.full_like(rows.seeds[one], position)
    return testing.decision_margin(left, rows.temperature[one], rows.seeds[one], positions, samples)[0] <= ROUNDING_NATS


def _p_value(counts, logprobs) -> float:
    return testing.chi_square(counts.cpu().numpy(), logprobs.exp().cpu().numpy())


def _probes(rows: _Rows, probes: int, impl: str) -> list[dict]:
    """Tokens at and around each cut, the first, the last and random ones, each with noise that no other can beat."""
    height, vocab = rows.logits.shape
    device = rows.logits.device
    near = torch.arange(probes // 2) - probes // 4
    generator = torch.Generator().manual_seed(7)
    far = torch.randint(vocab, (height, probes - len(near)), generator=generator)
    far[:, 0], far[:, -1] = 0, vocab - 1
    ranks = torch.cat([rows.kept.sum(-1, keepdim=True) + near.to(device), far.to(device)], 1).clamp(0, vocab - 1)
    tokens = rows.prefixes.ids.gather(1, ranks)
    gumbels = torch.zeros(height, probes, vocab, device=device)
    gumbels.scatter_(2, tokens[..., None], 1e4)
    ids = fmms.sample(
        rows.hidden, rows.weight, rows.temperature, seed=0, num_samples=probes, noise_scheme="token", noise=gumbels,
        impl=impl, **rows.arguments,
    ).ids  # fmt: skip
    kept = ids == tokens
    narrow, exact, wide = (allowed.gather(1, tokens) for allowed in (rows.narrow, rows.kept, rows.wide))
    differ, wrong = (kept != exact).sum(-1).tolist(), ((kept & ~wide) | (narrow & ~kept)).sum(-1).tolist()
    return [{"probes": probes, "probes_differ": d, "probes_wrong": w} for d, w in zip(differ, wrong, strict=True)]


# --------------------------------------------------------------------------------------------------------- what is kept


def survivors(vocab_size: int, temperature: float = 1.0) -> list[dict]:
    """How many tokens top-p and min-p keep, by the definition, against their value: rows for each distribution."""
    shapes = distributions(vocab_size)
    logits = torch.stack(list(shapes.values()))
    values = {
        "top_p": [*np.linspace(0, 0.96, 25).round(6).tolist(), 0.98, 0.99, 0.999, 0.9999],
        "min_p": np.geomspace(1e-5, 1, 21).tolist(),
    }
    found = []
    for name, settings in values.items():
        for value in settings:
            prefixes = controls.prefixes(logits, temperature, **{name: value})
            for shape, kept in zip(shapes, getattr(prefixes, name).tolist(), strict=True):
                found.append(
                    {"distribution": shape, "filter": name, "value": value, "kept": kept, "V": vocab_size,
                     "temperature": temperature}
                )  # fmt: skip
    return found


# -------------------------------------------------------------------------------------------------------- what it costs


def _single_softmax(hidden, weight, temperature, seeds):
    """The usual way in PyTorch: sort, one softmax, thresholds, scatter back, softmax, multinomial."""
    kept = controls.single_softmax_filter((hidden @ weight.T).float(), temperature, TOP_K, TOP_P)
    return torch.multinomial(torch.softmax(kept / temperature[:, None], -1), 1)[:, 0]


@dataclasses.dataclass(frozen=True)
class System:
    """What is timed: a backend and its controls in words; None for one that is not available here."""

    name: str
    controls: str
    backend: backends.Backend | None
    reason: str = ""
    flat: bool = False
    """Whether it runs at FLAT_TEMPERATURE."""


def cost_systems(device) -> list[System]:
    """The LM head's matmul, `fmms` plain and with every kind of truncation, and truncating peers."""

    def known(name, label):
        status = backends.probe(name, device)
        return System(name, label, backends.make(name, device) if status else None, "" if status else status.reason)

    def fused(label, flat=False, **given):
        status = backends.probe("fmms", device)
        backend = backends.Backend(
            "fmms", functools.partial(fused_ids, **given), exact=False, seeded=True, graph=True, scheme="group", **given
        )  # fmt: skip
        return System("fmms", label, backend if status else None, "" if status else status.reason, flat)

    both = f"k = {TOP_K}, p = {TOP_P:g}"
    torch_filter = backends.Backend(
        "torch-topk-topp", _single_softmax, "logits stored, one sort and softmax, torch.multinomial", exact=False,
        top_k=TOP_K, top_p=TOP_P,
    )  # fmt: skip
    return [
        known(kernel_speed.YARDSTICK, ""),
        known("fmms", "none"),
        fused(f"k = {TOP_K}", top_k=TOP_K),
        fused(f"p = {TOP_P:g}", top_p=TOP_P),
        fused(f"min-p = {MIN_P:g}", min_p=MIN_P),
        fused(f"p = {FLAT_TOP_P:g} of a flat distribution", flat=True, top_p=FLAT_TOP_P),
        known("fmms-topk-topp", both),
        known("flashinfer-topk-topp", both),
        System("torch-topk-topp", both, torch_filter),
    ]


def measure_cost(
    case_name: str, row_counts: Sequence[int], *, device="cuda", dtype=torch.bfloat16, n: int = 40, l2: str = "cold",
    method: str = "cuda_graph", draws: int = 512, seed: int = 0, say: Callable[[str], None] = print,
) -> list[dict]:  # fmt: skip
    """Rows (`COST_COLUMNS`) of every system of `cost_systems` at each number of rows H: checked, then timed
    interleaved; arguments as those of `kernel_speed.measure`. `kept` is the mean number of tokens that truncation
    leaves."""
    device = timing.check_settings(n, l2, method, device)
    case, systems, found = cases.get(case_name), cost_systems(device), []
    problem = outputs.make_problem(case, max(row_counts), dtype, device, seed)
    flat = dataclasses.replace(
        problem, temperature=torch.full_like(problem.temperature, FLAT_TEMPERATURE),
        rounding=problem.rounding * problem.temperature.double() / FLAT_TEMPERATURE, draws={}, kept={},
    )  # fmt: skip
    about = {"case": case.name, "V": case.V, "D": case.D, "dtype": str(dtype).removeprefix("torch."), "l2": l2}
    for count in row_counts:
        rows, calls = [], {}
        for system in systems:
            own = flat if system.flat else problem
            row = about | {"H": count, "system": system.name, "controls": system.controls}
            if system.backend is None:
                rows.append(row | {"reason": system.reason})
                continue
            backend, verdict = system.backend, outputs.check(system.backend, own, count, draws)
            row |= {"correct": verdict.correct, "reason": verdict.reason, "kept": _mean_kept(backend, own, count)}
            ways = {method if backend.graph or method != "cuda_graph" else "events"}
            if backend.returns == "logits":  # a yardstick for every way that a system is timed
                ways |= {"events"} if method == "cuda_graph" else set()
            for way in sorted(ways):
                rows.append(row | {"timing": way})
                if verdict.correct:
                    try:
                        call = functools.partial(backend, *own.inputs(count))
                        warmup = 3 if device.type == "cuda" else 1
                        calls[len(rows) - 1] = timing.prepare(call, way, device, warmup)
                    except Exception as error:  # a peer that breaks is a row
                        rows[-1]["reason"] = f"right ({verdict.reason}), but not timed: {outputs.describe(error)}"
        for index, seconds in timing.time_interleaved(calls, n, l2, method, device, seed=count).items():
            values = timing.quantiles(seconds * 1e6)
            rows[index] |= {"median_us": values["median"], "p20_us": values["p20"], "p80_us": values["p80"], "n": n}
        say(f"{case.name} H = {count}: " + ", ".join(_told(row) for row in rows if row.get("median_us")))
        found += rows
    return [{column: row.get(column) for column in COST_COLUMNS} for row in found]


def _told(row: dict) -> str:
    name = f"{row['system']} ({row['controls']})" if row["controls"] else row["system"]
    return f"{name} {row['median_us']:.0f} us"


def _mean_kept(backend, problem: outputs.Problem, rows: int) -> float | None:
    filters = backend.top_k, backend.top_p, backend.min_p
    if filters == (None, None, None):
        return None
    _, kept, _ = outputs.kept_tokens(problem, filters)
    return float(kept[:rows].sum(-1).double().mean())


def reading(results, profile: str) -> str:
    """What a figure of the costs says, in a sentence of HTML."""
    if profile == "cpu":
        return (
            "<p>The interpreter runs each operation of the kernels in NumPy: these times say nothing about a GPU.</p>"
        )
    ratios = kernel_speed.relative(results)
    parts = []
    for (system, label), points in ratios.groupby(["system", "controls"], sort=False):
        if system != kernel_speed.YARDSTICK:
            low, high = points["relative"].min(), points["relative"].max()
            parts.append(f"{system} ({label}) {low:.2f} to {high:.2f}")
    return f"<p>Over the matmul alone: {'; '.join(parts)}.</p>" if parts else "<p>Nothing was timed here.</p>"


def require_cost(results) -> None:
    """AssertionError that lists the systems whose output failed its check, if any did; `results` a DataFrame."""
    kernel_speed.require(results.assign(system=results["system"] + " (" + results["controls"].fillna("") + ")"))
