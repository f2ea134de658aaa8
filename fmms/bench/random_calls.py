"""Random calls over all controls, an implementation against the reference: the widest test of exactness there is here.

The problems are integer-valued, so both multiply to the same logits, and both draw with the same noise; ids may differ
only where the reference's own decision is closer than rounding can tell. Such draws are counted, and what is counted as
explained states its margin.
"""

import time
from collections.abc import Callable

import torch

import fmms
from fmms import controls, noise, testing
from fmms.bench import outputs

ROUNDING_NATS = outputs.TRANSCENDENTAL_NATS
ROUNDING_MASS = outputs.TRUNCATION_MASS
VALUE_ERROR = 1e-4
"""Largest difference of log-probabilities, log-sum-exp and entropy that passes, in nats, relative above 1."""
COLUMNS = (
    "V", "D", "dtype", "impl", "calls", "rows", "draws", "invalid_rows", "differ", "explained", "unexplained",
    "expected_at_most", "first_unexplained_call", "largest_value_error",
)  # fmt: skip


def integer_weight(vocab: int, width: int, dtype, device, seed: int) -> torch.Tensor:
    """Weight [V, D] of integers from -2 to 2."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(-2, 3, (vocab, width), generator=generator, device=device, dtype=torch.int8).to(dtype)


def random_arguments(call: int, rows: int, vocab: int, width: int, dtype, device) -> dict:
    """Keyword arguments of `fmms.sample`, weight excepted, that are a function of `call` alone: hidden and a random
    choice of controls. A few hold invalid values or masks that leave nothing."""
    generator = torch.Generator().manual_seed(call)

    def chance(p: float) -> bool:
        return torch.rand((), generator=generator).item() < p

    def below(n: int) -> int:
        return int(torch.randint(0, n, (), generator=generator))

    def pick(values, shape=(rows,)):
        return torch.tensor(values, device=device)[torch.randint(0, len(values), shape, generator=generator).to(device)]

    def triple(values):
        size = 1 + below(64 * rows)
        tokens = torch.randint(0, vocab, (size,), generator=generator)
        tokens[torch.rand(size, generator=generator) < 0.1] = -1
        tokens[: size // 3] = tokens[0]  # equal entries
        if chance(0.05):
            tokens[-1] = vocab + below(9)
        of = torch.randint(0, rows, (size,), generator=generator)
        return of.to(device), tokens.to(device), pick(values, (size,))

    step = 2.0 ** -round(0.5 * torch.tensor(width * 4.0).log2().item())
    hidden = torch.randint(-2, 3, (rows, width), generator=generator) * step
    given = {"hidden": hidden.to(device, dtype)}
    given["temperature"] = pick([0.0, 0.1, 0.3, 0.7, 1.0, 1.0, 2.0])
    if chance(0.5):
        ks = [-1, 0, 1, 2, 20, 50, 1000, vocab // 2, vocab, 2 * vocab]
        given["top_k"] = pick(ks) if chance(0.7) else [1, 7, 50, 500][below(4)]
    if chance(0.5):
        given["top_p"] = pick([0.0, 0.3, 0.8, 0.9, 0.95, 0.9999999, 1.0]) if chance(0.7) else 0.9
    if chance(0.4):
        given["min_p"] = pick([0.0, 0.01, 0.1, 1.0]) if chance(0.7) else 0.05
    given["filter_order"] = ("top_k_first", "joint", "min_p_first")[below(3)]
    if chance(0.3):
        given["logit_bias"] = triple([-3.0, 0.5, 2.0])
    if chance(0.3):
        given["repetition_penalty"] = triple([1.25, 0.8, 2.0])
    if chance(0.3):
        given["frequency_penalty"] = triple([0.25, 0.5])
    if chance(0.3):
        given["presence_penalty"] = triple([0.5, -0.5])
    if chance(0.3):
        words = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), generator=generator)
        words[:, torch.rand(words.shape[1], generator=generator) < 0.5] = 0
        if chance(0.1):
            words[below(rows)] = 0
        given["allowed_mask"] = words.to(torch.int32).to(device)
    if chance(0.3):
        given["banned_ids"] = torch.randint(-1, vocab, (rows,), generator=generator).to(device)
    if chance(0.2):
        given["bias"] = pick([-1.0, 0.0, 0.5], (vocab,)).to(dtype)
    if chance(0.2):
        given["vocab_size"] = vocab - below(min(vocab, 200))
        for name in ("banned_ids", "logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty"):
            given.pop(name, None)
    if chance(0.05):
        name = ("temperature", "top_p", "min_p")[below(3)]
        values = torch.full((rows,), 0.5, device=device)
        values[below(rows)] = (-1.0, float("nan"))[below(2)]
        given[name] = values
    if chance(0.2):
        given["num_samples"] = 1 + below(4)
    given["seed"] = noise.row_seeds(call, rows, device)
    given["position"] = torch.randint(0, 1 << 40, (rows,), generator=generator).to(device)
    given["noise_scheme"] = "token" if chance(0.3) else "group"
    for name in ("raw_logprobs", "final_logprobs", "entropy"):
        given[f"return_{name}"] = chance(0.3)
    given["top_logprobs"] = 5 if chance(0.2) and vocab > 300 else 0
    return given


def compare(weight: torch.Tensor, given: dict, impl: str) -> dict:
    """One call with `impl` and with the reference: numbers of rows, draws, invalid rows, ids that differ and those
    whose margin explains it, and the largest difference of the other results (inf if one is missing or wrong)."""
    given = dict(given)
    hidden = given.pop("hidden")
    got = fmms.sample(hidden, weight, return_logprobs=True, impl=impl, **given)
    want = fmms.sample(hidden, weight, return_logprobs=True, return_logits=True, impl="torch", **given)
    ids, wanted = (out.ids if out.ids.dim() == 2 else out.ids[:, None] for out in (got, want))
    differ = ids != wanted
    explained = torch.zeros_like(differ)
    at = differ.any(1).nonzero()[:, 0]
    if len(at):
        explained[at] = differ[at] & _explained(want.logits[at], given, at, ids.shape[1])
    wrong = 0.0 if torch.equal(got.valid, want.valid) else float("inf")
    same = ~differ if got.ids.dim() == 2 else ~differ[:, 0]
    for name in ("logprobs", "raw_logprobs", "final_logprobs", "lse", "max_logit", "entropy", "top_logprobs"):
        a, b = getattr(got, name), getattr(want, name)
        if a is None:
            continue
        if name.endswith("logprobs") and name != "top_logprobs":
            a, b = a[same], b[same]
        error = ((a - b).abs() / b.abs().clamp(min=1)).nan_to_num(0.0, posinf=0.0)
        agree = (a.isnan() == b.isnan()) & (a.isinf() == b.isinf())
        if name == "final_logprobs" and a.numel() and error.max() > VALUE_ERROR:
            # one token more or less at a cut that rounding cannot tell
            excused = _near_cut(want.logits, given)
            excused = (excused if same.dim() == 1 else excused[:, None].expand_as(same))[same]
            error = torch.where(excused, 0.0, error)
        if a.numel():
            wrong = max(wrong, error.max().item() if agree.all() else float("inf"))
    if got.top_ids is not None and not torch.equal(got.top_ids, want.top_ids):
        wrong = float("inf")
    return {
        "rows": len(ids), "draws": ids.numel(), "invalid_rows": int((~want.valid).sum()), "differ": int(differ.sum()),
        "explained": int(explained.sum()), "value_error": wrong,
    }  # fmt: skip


def _rows_of(given: dict, at) -> dict:
    """The arguments with the per-row ones cut to the rows `at`."""
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    return given | {name: given[name][at] for name in names if isinstance(given.get(name), torch.Tensor)}


def _near_cut(logits, given: dict) -> torch.Tensor:
    """bool [H]: whether a token more or less in what truncation leaves is a matter of rounding."""
    filters = [given.get(name) for name in ("top_k", "top_p", "min_p")]
    return testing.filter_margin(logits, given["temperature"], *filters, given["filter_order"]) <= ROUNDING_MASS


def _explained(logits, given: dict, at, samples: int) -> torch.Tensor:
    """bool [rows, S]: whether the reference's decisions in the rows `at`, of these logits, are closer than rounding can
    tell."""
    given = _rows_of(given, at)
    filters = [given.get(name) for name in ("top_k", "top_p", "min_p")]
    left = controls.filter_logits(logits, given["temperature"], *filters, given["filter_order"])
    margin = testing.decision_margin(
        left, given["temperature"], given["seed"], given["position"], samples, given["noise_scheme"]
    )
    return (margin <= ROUNDING_NATS) | _near_cut(logits, given)[:, None]


def run(
    heads, calls: int, *, impl: str, device, dtype=torch.bfloat16, rows=(1, 2, 4, 8), seed: int = 0,
    say: Callable[[str], None] = print,
) -> list[dict]:  # fmt: skip
    """Rows (`COLUMNS`), one for each (V, D) of `heads`, of `calls` random calls shared out over them.

    `expected_at_most` is the number of explained draws that the stated rounding allows: each draw has a handful of
    decisions, any of which lies within the bound with a probability of some twenty times the bound.
    """
    found, began, done = [], time.monotonic(), 0
    for index, (vocab, width) in enumerate(heads):
        weight = integer_weight(vocab, width, dtype, device, seed + index)
        share = calls // len(heads) + (index < calls % len(heads))
        total = dict.fromkeys(("rows", "draws", "invalid_rows", "differ", "explained"), 0)
        worst, first = 0.0, None
        for number in range(share):
            call = seed + 1_000_000 * index + number
            count = rows[number % len(rows)]
            one = compare(weight, random_arguments(call, count, vocab, width, dtype, device), impl)
            for name in total:
                total[name] += one[name]
            worst = max(worst, one["value_error"])
            if first is None and (one["differ"] > one["explained"] or one["value_error"] > VALUE_ERROR):
                first = call
            done += 1
            if done % 500 == 0:
                say(f"{done} of {calls} calls, {time.monotonic() - began:.0f} s")
        found.append(
            {
                "V": vocab, "D": width, "dtype": str(dtype).removeprefix("torch."), "impl": impl, "calls": share,
                **total, "unexplained": total["differ"] - total["explained"],
                "expected_at_most": 2 + 20 * ROUNDING_NATS * total["draws"], "first_unexplained_call": first,
                "largest_value_error": worst,
            }
        )  # fmt: skip
    return [{column: row[column] for column in COLUMNS} for row in found]


def require(results) -> None:
    """AssertionError unless every call agreed with the reference within the stated rounding; `results` are the rows of
    `run` (a DataFrame)."""
    for row in results.itertuples():
        where = f"V = {row.V}, D = {row.D}, {row.impl}"
        if row.unexplained or row.explained > row.expected_at_most:
            raise AssertionError(
                f"{where}: {row.unexplained} ids differ without a reason, {row.explained} within rounding (at most "
                f"{row.expected_at_most:.1f} expected); first call: {row.first_unexplained_call}"
            )
        if row.largest_value_error > VALUE_ERROR:
            raise AssertionError(
                f"{where}: a log-probability, log-sum-exp, entropy or flag is off by {row.largest_value_error:.2g}; "
                f"first call: {row.first_unexplained_call}"
            )
