"""The distribution of the drawn ids against the distribution asked for: experiments behind the exactness notebook.

Each experiment draws with one implementation ("impl") and one noise scheme and returns long-form rows for
fmms.bench.records. A check is a row of `check_row`: it failed if its p-value lies below the false-alarm rate, the
chance that it fails though the sampler is exact. Logits are prescribed exactly (hidden states of ones, the logits as a
weight of width 1), so that the probabilities compared with are the true ones. The figures of these rows are in
fmms.bench.exactness_figures; experiments on invariance and independence in fmms.bench.invariance.
"""

import importlib.util
import math
import zlib

import numpy as np
import torch

import fmms
from fmms import controls, noise, testing
from fmms.request import FREQUENCY, LOGIT_BIAS, PRESENCE, REPETITION

SCHEMES = ("group", "token")
CONTROLS = ("truncated", "masked", "penalised")
"""Kinds of control that the experiments can draw with, see `control_arguments`."""
WIDTH_BOUND = 1e-3
"""Stated bound on the relative error of a token's interval inside its group, down to 30 nats below the maximum."""


def usable(impls) -> list[str]:
    """Those of the implementations that this machine can run; Triton exists for Linux only."""
    missing = [impl for impl in impls if impl == "triton" and importlib.util.find_spec("triton") is None]
    if missing:
        print("not run: triton (not installed; on Linux: pip install triton)")
    return [impl for impl in impls if impl not in missing]


def check_row(experiment, case, scheme, impl, n, p_value, rate, **more) -> dict:
    """One check: `n` draws (or comparisons), its p-value, the false-alarm rate it is held to, whether it passed."""
    passed = bool(p_value >= rate)
    return {
        "experiment": experiment, "case": case, "scheme": scheme, "impl": impl, "n": n,
        "p_value": p_value, "false_alarm_rate": rate, "passed": passed, **more,
    }  # fmt: skip


def require(checks) -> None:
    """Raises AssertionError that lists the checks that failed, in words; `checks` are rows of `check_row`."""
    failed = [row for row in checks if not row["passed"]]
    if failed:
        lines = [f"- {r['experiment']}, {r['case']}, {r['scheme']} noise, {r['impl']}: {_why(r)}" for r in failed]
        raise AssertionError(
            f"{len(failed)} of {len(checks)} checks say that the sampler is not exact:\n" + "\n".join(lines)
        )


def _why(row) -> str:
    if row["false_alarm_rate"] == 0.0:
        return f"{row['observed']:.3g} where at most {row['expected']:.3g} is allowed"
    return f"p = {row['p_value']:.2g} over n = {row['n']}, below the false-alarm rate {row['false_alarm_rate']:g}"


def table(checks, *experiments):
    """The checks of these experiments as a table to look at in a notebook, without the columns that none of them
    fills."""
    import pandas as pd
    from IPython.display import HTML

    frame = pd.DataFrame([row for row in checks if row["experiment"] in experiments])
    hidden = ["false_alarm_rate"] + (["experiment"] if len(experiments) == 1 else [])
    frame = frame.drop(columns=hidden).dropna(axis="columns", how="all").rename(columns=lambda c: c.replace("_", " "))
    return HTML(frame.to_html(index=False, border=0, na_rep="", float_format=_number))


def _number(value: float) -> str:
    """Three digits; counts, which a column with gaps holds as floats, in full."""
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.3g}"


def summary(checks) -> str:
    """How many checks passed, the smallest p-value, and the rate at which an exact sampler would fail one of them."""
    random = [row for row in checks if row["false_alarm_rate"]]
    family = sum(row["false_alarm_rate"] for row in random)
    smallest = min((row["p_value"] for row in random), default=math.nan)
    passed = sum(row["passed"] for row in checks)
    return (
        f"{passed} of {len(checks)} checks passed. {len(random)} of them are statistical; their smallest p-value is "
        f"{smallest:.2g}. An exact sampler fails one or more of these with a probability of at most {family:.1g} "
        "(the choice of the seed being the chance)."
    )


def exact_row(experiment, case, scheme, impl, n, observed, allowed) -> dict:
    """A check without chance in it, so without a p-value: `observed` must not pass `allowed`."""
    row = check_row(experiment, case, scheme, impl, n, math.nan, 0.0, observed=observed, expected=allowed)
    return {**row, "passed": bool(observed <= allowed)}


def softmax(logits) -> np.ndarray:
    """Probabilities of fp32 logits [V], in fp64."""
    return torch.softmax(torch.as_tensor(logits).double(), -1).numpy()


def distributions(vocab_size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Logits fp32 [V] of the shapes that samplers meet, in random order of ids: flat, a power law of the rank
    ("zipf"), and "peaked" as after training (a few candidates ahead of a wide bell)."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(vocab_size, generator=generator)
    rank = torch.empty(vocab_size, dtype=torch.int64)
    rank[order] = torch.arange(vocab_size)
    bell = 2.2 * torch.randn(vocab_size, generator=generator)
    ahead = min(12, vocab_size)
    peaked = bell.clone()
    peaked[order[:ahead]] = bell.max() + 4.0 - 0.6 * torch.arange(ahead)
    return {
        "flat": torch.zeros(vocab_size),
        "zipf": -1.1 * torch.log(rank + 1.0),
        "peaked": peaked,
    }


def control_arguments(kinds, vocab_size: int, rows: int = 1, device="cpu") -> dict:
    """Arguments of `fmms.sample` for `rows` rows alike: "truncated" by top-k, top-p and min-p, "masked" to three
    quarters of the tokens without their first, "penalised" for a history in all three ways and with a logit bias."""
    generator = torch.Generator().manual_seed(vocab_size)
    mask = torch.rand(1, vocab_size, generator=generator) < 0.75
    history = torch.randint(vocab_size, (1, min(256, vocab_size // 2)), generator=generator)
    biased = torch.randint(vocab_size, (4,), generator=generator)
    arguments = {}
    if "truncated" in kinds:
        arguments |= {"top_k": max(2 * vocab_size // 3, 2), "top_p": 0.96, "min_p": 1e-4}
    if "masked" in kinds:
        first = int(mask[0].int().argmax())
        arguments["allowed_mask"] = controls.pack_mask(mask).expand(rows, -1).to(device)
        arguments["banned_ids"] = torch.full((rows,), first, device=device)
    if "penalised" in kinds:
        arguments |= controls.history_edits(history.expand(rows, -1).to(device), None, 1.2, 0.1, 0.15)
        every = torch.arange(rows, device=device).repeat_interleave(len(biased))
        arguments["logit_bias"] = every, biased.repeat(rows).to(device), torch.full((len(every),), 1.5, device=device)
    return arguments


def controlled_softmax(logits, kinds=()) -> np.ndarray:
    """Probabilities fp64 [V] of logits fp32 [V] under `control_arguments`, by the definitions in fmms.controls."""
    arguments = control_arguments(kinds, len(logits))
    x = torch.as_tensor(logits, dtype=torch.float32)[None]
    names = {
        "logit_bias": LOGIT_BIAS, "repetition_penalty": REPETITION,
        "frequency_penalty": FREQUENCY, "presence_penalty": PRESENCE,
    }  # fmt: skip
    edits = [
        (*arguments[name], torch.full_like(arguments[name][0], kind))
        for name, kind in names.items()
        if name in arguments
    ]
    if edits:
        x, _ = controls.apply_edits(x, *(torch.cat(column) for column in zip(*edits, strict=True)))
    x, _ = controls.mask_logits(x, arguments.get("allowed_mask"), arguments.get("banned_ids"))
    filters = {name: arguments[name] for name in ("top_k", "top_p", "min_p") if name in arguments}
    return softmax(controls.filter_logits(x, 1.0, **filters)[0])


def experiment_seed(seed: int, *names) -> int:
    """A seed of its own for each experiment, so that no two checks share noise and their p-values are independent."""
    return (seed << 32) + zlib.crc32(" ".join(map(str, names)).encode())


def call_shape(impl: str, device: str, scheme: str, vocab_size: int, kinds=()) -> tuple[int, int]:
    """Rows and samples of one call that draws fast and fits in memory."""
    if impl == "torch":
        units = vocab_size if scheme == "token" else noise.group_count(vocab_size)
        elements = 1 << (18 if device == "cpu" else 26)
        return 8, max(1, elements // (8 * max(units, noise.GROUP_SIZE)))
    if device == "cpu":
        # the interpreter pays per operation, so many rows at once and few samples; truncation takes them row by row
        if "truncated" in kinds:
            return 16, 64
        return max(16, min(512, (1 << 20) >> max(7, (vocab_size - 1).bit_length()))), 1
    draws = min(1 << 22, max(1 << 12, (1 << 31) // max(vocab_size, 128)))
    rows = max(64, min(8192, draws // 64))
    return rows, draws // rows


def histogram(logits, draws: int, scheme: str, impl: str, device: str = "cpu", seed: int = 0, kinds=()) -> np.ndarray:
    """Counts int64 [V] of at least `draws` ids drawn from softmax(logits): over rows, samples and steps.

    Args:
        logits: fp32 [V]; -inf is probability 0. kinds: of CONTROLS, what the draws are made with.

    Raises:
        RuntimeError: a row came back as not valid.
    """
    logits = torch.as_tensor(logits, dtype=torch.float32)
    vocab_size = len(logits)
    rows, samples = call_shape(impl, device, scheme, vocab_size, kinds)
    rows = min(rows, draws)
    samples = min(samples, -(-draws // rows))
    weight = logits[:, None].to(device)
    hidden = torch.ones(rows, 1, device=device)
    seeds = noise.row_seeds(seed, rows, device)
    counts = torch.zeros(vocab_size, dtype=torch.int64, device=device)
    given = control_arguments(kinds, vocab_size, rows, device)
    for step in range(-(-draws // (rows * samples))):
        out = fmms.sample(
            hidden, weight, seed=seeds, position=step, num_samples=samples, noise_scheme=scheme, impl=impl, **given
        )
        if not bool(out.valid.all()):
            raise RuntimeError(f"{impl}, {scheme}: rows of finite logits came back as not valid")
        counts += torch.bincount(out.ids.reshape(-1), minlength=vocab_size)
    return counts.cpu().numpy()


def whole_vocabulary(logits, case, draws, scheme, impl, device="cpu", seed=0, rate=1e-6, kinds=()):
    """Chi-square over every token (the rarest merged until a cell expects ten draws), and frequencies by rank.

    `kinds`: of CONTROLS, what the draws are made with. The check's `kept` is the number of tokens of a probability
    above 0, `outside` that of draws of others, with which the check fails.

    Returns:
        A check row, and rows of frequencies: tokens ranked by probability, one by one at the head, then in bins that
        grow with the rank; `expected` and `observed` are mean draws per token, `low` and `high` the exact 95 %
        interval of `observed`.
    """
    probability = controlled_softmax(logits, kinds)
    own_seed = experiment_seed(seed, "whole", case, scheme, impl)
    counts = histogram(logits, draws, scheme, impl, device, own_seed, kinds)
    n = int(counts.sum())
    p_value = testing.chi_square(counts, probability, min_expected=10.0)
    kept = int((probability > 0).sum())
    about = {"kept": kept, "outside": int(counts[probability == 0].sum())} if kinds else {}
    check = check_row("whole vocabulary", case, scheme, impl, n, p_value, rate, vocab_size=len(probability), **about)
    order = np.argsort(-probability, kind="stable")[:kept]
    edges = np.unique(np.concatenate([[0], np.round(np.geomspace(1, len(order), 25)).astype(int)]))
    first, size = edges[:-1], np.diff(edges)
    observed = np.add.reduceat(counts[order], first)
    expected = n * np.add.reduceat(probability[order], first)
    low, high = testing.binomial_interval(observed, n)
    bins = [
        {
            "case": case, "scheme": scheme, "impl": impl, "n": n, "vocab_size": len(probability),
            "rank": math.sqrt((first[i] + 1) * (first[i] + size[i])), "tokens": int(size[i]),
            "expected": expected[i] / size[i], "observed": observed[i] / size[i],
            "low": n * low[i] / size[i], "high": n * high[i] / size[i],
        }
        for i in range(len(first))
    ]  # fmt: skip
    return check, bins


def tail_row(experiment, case, scheme, impl, hits, n, probability, rate, **more) -> dict:
    """Check that `hits` of `n` draws fell where the probability is this: exact binomial test, exact 95 % interval."""
    low, high = testing.binomial_interval(hits, n)
    p_value = testing.binomial_tail(hits, n, probability)
    return check_row(
        experiment, case, scheme, impl, n, p_value, rate, expected=n * probability, observed=int(hits),
        low=n * float(low), high=n * float(high), **more,
    )  # fmt: skip


def capped_noise_probability(tail_tokens: int, depth: float, bits: int = 24) -> float:
    """Probability that the peak loses against `tail_tokens` tokens `depth` nats below it when each token's Gumbel is
    made from a uniform of so few bits, u = (k + 1/2) * 2**-bits: what a sampler with capped noise does.

    The peak's exponential E = -log1p(-u) is exp(-Gumbel). A tail token beats it if its own is below E * exp(-depth);
    of the 2**bits equally likely values, so many lie there.
    """
    values, chunk, total = 2**bits, 1 << 20, 0.0
    for start in range(0, values, chunk):
        k = np.arange(start, min(start + chunk, values))
        needed = -np.expm1(np.log1p(-(k + 0.5) / values) * math.exp(-depth))
        below = np.ceil(values * needed - 0.5)
        total += -np.expm1(tail_tokens * np.log1p(-below / values)).sum()
    return float(total / values)


def heavy_tail(tail_tokens, draws, scheme, impl, device="cpu", seed=0, rate=1e-6, deepest=18.0, hits=40) -> dict:
    """Draws from many tokens far below one peak: noise that is capped never reaches them.

    They lie `deepest` nats below the peak, or less deep where that would give fewer than `hits` expected draws. The
    row's `capped` is the number of hits that a per-token sampler with 24-bit uniforms would expect.
    """
    depth = min(deepest, math.log(tail_tokens * draws / hits))
    logits = torch.full((tail_tokens + 1,), -depth)
    logits[tail_tokens // 2] = 0.0
    probability = softmax(logits)
    counts = histogram(logits, draws, scheme, impl, device, experiment_seed(seed, "tail", scheme, impl))
    peak = tail_tokens // 2
    n, tail = int(counts.sum()), float(probability.sum() - probability[peak])
    return tail_row(
        "heavy tail", f"{tail_tokens} tokens", scheme, impl, n - int(counts[peak]), n, tail, rate,
        depth_nats=depth, vocab_size=tail_tokens + 1, capped=n * capped_noise_probability(tail_tokens, depth),
    )  # fmt: skip


NARROW_LOGITS = tuple(-0.1 * i for i in range(16))


def narrow_vocabulary(draws, scheme, impl, device="cpu", seed=0, rate=1e-6, kinds=()):
    """Many draws from 16 tokens: sees noise that is correlated between tokens or groups, and biases too small to show
    in a few draws per token.

    Returns:
        A check row and a row per token that may be drawn: its frequency over its probability, with intervals that hold
        for all of them together with 95 % confidence. The check's `observed` is the largest relative deviation, its
        `high` what the largest one can be by those intervals; `kept` and `outside` as in `whole_vocabulary`.
    """
    logits = torch.tensor(NARROW_LOGITS)
    probability = controlled_softmax(logits, kinds)
    case = "all controls" if kinds else "16 tokens"
    own_seed = experiment_seed(seed, "narrow", scheme, impl, *kinds)
    counts = histogram(logits, draws, scheme, impl, device, own_seed, kinds)
    n, kept = int(counts.sum()), np.flatnonzero(probability)
    chances = probability[kept]
    low, high = testing.binomial_interval(counts[kept], n, 1 - 0.05 / len(kept))
    ratio, low, high = counts[kept] / n / chances, low / chances, high / chances
    about = {"kept": len(kept), "outside": n - int(counts[kept].sum())} if kinds else {}
    check = check_row(
        "narrow vocabulary", case, scheme, impl, n, testing.chi_square(counts, probability), rate,
        observed=float(np.abs(ratio - 1).max()), high=float(np.maximum(high - 1, 1 - low).max()), vocab_size=16,
        **about,
    )  # fmt: skip
    tokens = [
        {"case": case, "scheme": scheme, "impl": impl, "n": n, "token": int(token), "probability": chances[i],
         "ratio": ratio[i], "low": low[i], "high": high[i]}
        for i, token in enumerate(kept)
    ]  # fmt: skip
    return check, tokens


def beside_the_peak(depths, draws, scheme, impl, device="cpu", seed=0, rate=1e-6) -> list[dict]:
    """Draws of single tokens far below the peak of their own group of 32, the rest of which lies 3 nats below it.

    The first depth goes to the peak's neighbour in the group, the others further away. All other groups are empty, so
    that every draw is a choice inside this group. A running sum in fp32 gives such tokens no or a wrong width.
    """
    members = noise.group_token_ids(noise.BLOCK_SIZE)[0]
    logits = torch.full((noise.BLOCK_SIZE,), -math.inf)
    logits[members] = -3.0
    logits[members[12]] = 0.0
    places = [int(members[i]) for i in (13, 15, 3, 31, 20)][: len(depths)]
    for place, depth in zip(places, depths, strict=True):
        logits[place] = -float(depth)
    probability = softmax(logits)
    counts = histogram(logits, draws, scheme, impl, device, experiment_seed(seed, "beside", scheme, impl))
    n = int(counts.sum())
    outside = np.delete(counts, members.numpy()).sum()
    rows = [exact_row("beside the peak", "tokens of probability 0 drawn", scheme, impl, n, int(outside), 0)]
    for place, depth in zip(places, depths, strict=True):
        rows.append(
            tail_row(
                "beside the peak", f"{depth:g} nats below", scheme, impl, int(counts[place]), n,
                float(probability[place]), rate, depth_nats=float(depth), vocab_size=len(logits),
            )
        )  # fmt: skip
    return rows


def interval_widths(impl, device="cpu", depth: float = 30.0):
    """The width of every token's interval inside its group, by bisection over injected uniforms, against its
    probability.

    Returns:
        A check row without chance in it (largest relative error against WIDTH_BOUND) and a row per token.
    """
    groups = testing.hard_groups(depth)
    width, wanted = testing.interval_widths(groups, impl, device)
    error = (width / wanted - 1).abs()
    below = groups.amax(-1, keepdim=True) - groups
    check = exact_row(
        "interval widths", f"down to {depth:g} nats", "group", impl, error.numel(), float(error.max()), WIDTH_BOUND
    )
    tokens = [
        {"impl": impl, "group": g, "member": m, "nats_below": float(below[g, m]),
         "probability": float(wanted[g, m]), "width": float(width[g, m]), "relative_error": float(error[g, m])}
        for g in range(error.shape[0]) for m in range(error.shape[1])
    ]  # fmt: skip
    return check, tokens


def repeated_p_values(repetitions, draws, scheme, impl, device="cpu", seed=0, rate=1e-6, vocab_size=32):
    """Chi-square p-values of many independent repetitions, each with seeds of its own, against the uniform law.

    Returns:
        A check row (Kolmogorov-Smirnov) and a row per repetition. The smallest cell expects 20 draws or more, so that
        the chi-square law itself is accurate enough for thousands of repetitions.
    """
    logits = distributions(vocab_size)["zipf"]
    probability = softmax(logits)
    weight = logits[:, None].to(device)
    rows, samples = call_shape(impl, device, scheme, vocab_size)
    together = rows * samples if samples > 1 else 1 << 14
    samples = min(draws, 512 if samples > 1 else 1)
    rows = -(-draws // samples)  # of one repetition
    draws = rows * samples
    first = experiment_seed(seed, "repeated", scheme, impl)
    seeds = noise.row_seeds(first, repetitions * rows, device).reshape(repetitions, rows)
    p_values = []
    for part in seeds.split(max(1, together // draws)):
        hidden = torch.ones(part.numel(), 1, device=device)
        ids = fmms.sample(
            hidden, weight, seed=part.reshape(-1), num_samples=samples, noise_scheme=scheme, impl=impl
        ).ids.reshape(len(part), draws)  # fmt: skip
        ids += torch.arange(len(part), device=device)[:, None] * vocab_size
        counts = torch.bincount(ids.reshape(-1), minlength=len(part) * vocab_size)
        for row in counts.reshape(-1, vocab_size).cpu().numpy():
            p_values.append(testing.chi_square(row, probability, min_expected=20.0))
    check = check_row(
        "p-value uniformity", f"{repetitions} repetitions", scheme, impl, repetitions * draws,
        testing.uniform_p_values(p_values), rate, vocab_size=vocab_size,
    )  # fmt: skip
    return check, [
        {"scheme": scheme, "impl": impl, "repetition": i, "n": draws, "p_value": p} for i, p in enumerate(p_values)
    ]
