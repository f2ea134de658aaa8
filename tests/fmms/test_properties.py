"""Random combinations of all controls: whatever is asked for, the kernels return what the reference returns.

Hypothesis chooses the calls, the same ones every time, and shrinks one that fails to a short dictionary; a control that
it does not hold is not given. A list in it stands for a tensor [H], a list of triples for (rows, tokens, values). The
problems are integer-valued, so logits are equal and ids differ only where rounding may decide (`checks.py` has the
bounds): such draws are counted, and rare. On a GPU every combination is a compilation, so it gets a tenth of them.
"""

import math

import checks
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import fmms
from fmms import kernels, noise, testing
from fmms.request import FILTER_ORDERS

EXAMPLES = {"untruncated": 290, "truncated": 54, "beyond registers": 16}
"""Random calls per test, the last two for each filter order: 500 in all. Where rows are cut they cost more, and most
where registers do not hold them."""
SMALL_GROUPS = 4
"""Groups kept in registers in the last of the tests; 130 tokens make 8 groups."""

# values that do something, and values at the ends of their range
CONTROLS = {
    "temperature": ([1.0, 0.5, 2.0], [0.0, 1e-4, 1e4, math.inf]),
    "top_k": ([50, 5, 20, 100], [1, 2, -1, 0, 10**10]),
    "top_p": ([0.5, 0.2, 0.35, 0.9], [0.0, 1e-9, 0.99, 0.9999999, 1.0]),
    "min_p": ([0.1, 0.05, 0.3], [0.0, 1e-9, 1.0]),
}
FILTERS = ("top_k", "top_p", "min_p")
EDITS = {
    "logit_bias": [1.0, -8.0, -0.5, 0.25, 3.0, -math.inf],
    "repetition_penalty": [2.0, 0.5, 1.0, 1.25, 4.0],
    "frequency_penalty": [0.25, 0.5, -1.0],
    "presence_penalty": [0.5, 2.0, -1.0],
}
INVALID = {
    "temperature": [-1.0, math.nan],
    "top_k": [-2, -(10**10)],
    "top_p": [-0.1, 1.5, math.nan],
    "min_p": [-1e-9, 2.0, math.nan],
    "logit_bias": [math.nan, math.inf],
    "repetition_penalty": [0.0, -1.0, math.nan, math.inf],
    "frequency_penalty": [math.nan, -math.inf],
    "presence_penalty": [math.nan],
}
MASKS = ["all", 1, 2, 3, 4, "odd", "first", "last", "none"]
"""Tokens that a row's mask allows; a number stands for a random half of them."""


@st.composite
def calls(draw, vocabs, most_rows: int, order: str | None):
    """Arguments of one call as a dictionary of plain values; `build` makes tensors of them. Filters in `order`, if it
    is one."""
    rows, vocab = draw(st.integers(1, most_rows)), draw(st.sampled_from(vocabs))
    given_size = draw(st.integers(1, vocab)) if draw(_rarely()) else None
    broken = draw(_rarely())
    call = {"rows": rows, "vocab": vocab, "width": draw(st.sampled_from([8, 1, 24, 33]))}
    call["dtype"] = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    call["problem"], call["seed"] = draw(st.integers(0, 9)), draw(st.integers(0, 2**64 - 1))
    call["noise_scheme"] = draw(st.sampled_from(["group", "token"]))

    def per_row(values):
        return draw(st.lists(values, min_size=rows, max_size=rows))

    def control(name):
        usual, extreme = CONTROLS[name]
        values = st.sampled_from(usual * 4 + extreme)
        if broken and draw(st.booleans()):
            return per_row(values | st.sampled_from(INVALID[name]))
        return per_row(values) if draw(st.booleans()) else draw(values)

    call["temperature"] = control("temperature")
    if order:
        chosen = [name for name in FILTERS if not draw(_sometimes())] or [draw(st.sampled_from(FILTERS))]
        call |= {"filter_order": order} | {name: control(name) for name in chosen}
    size = given_size or vocab
    ids = st.one_of(st.sampled_from([0, size - 1, -1]), st.integers(0, size - 1))
    if broken:
        ids = st.one_of(ids, st.sampled_from([size, size + 40, -2, 2**40]))
    for name, values in EDITS.items():
        if draw(_sometimes()):
            values = values + INVALID[name] if broken else values
            entry = st.tuples(st.integers(-1, rows), ids, st.sampled_from(values))
            call[name] = draw(st.lists(entry, max_size=12))
    if draw(_sometimes()):
        call["allowed_mask"] = per_row(st.sampled_from(MASKS))
    if draw(_sometimes()):
        call["banned_ids"] = per_row(ids)
    optional = {
        "bias": st.integers(0, 9),
        "softcap": st.sampled_from([5.0, 30.0]),
        "logit_scale": st.sampled_from([0.5, -1.0, 1.5]),
        "num_samples": st.sampled_from([1, 2]),
        "position": st.sampled_from([7, 2**40, -1]),
        "row_seeds": st.just(True),
        "results": st.just(False),
    }
    rare = ("softcap", "num_samples", "results")  # one more call, one more draw, less to compare
    call |= {name: draw(v) for name, v in optional.items() if draw(_rarely() if name in rare else _sometimes())}
    if given_size is not None:
        call["vocab_size"] = given_size
    return call


def _sometimes():
    return st.sampled_from([False, False, True])


def _rarely():
    return st.sampled_from([False] * 5 + [True])


def build(call: dict, device):
    """hidden, weight, temperature and the other arguments of a call."""
    call = dict(call)
    rows, vocab, width, dtype, problem = (call.pop(name) for name in ("rows", "vocab", "width", "dtype", "problem"))
    hidden, weight = testing.integer_problem(rows, vocab, width, getattr(torch, dtype), device, problem)
    size = call.get("vocab_size", vocab)
    for name in ("temperature", *FILTERS, "banned_ids"):
        if isinstance(call.get(name), list):
            dtype = torch.int64 if name in ("top_k", "banned_ids") else torch.float32
            call[name] = torch.tensor(call[name], dtype=dtype, device=device)
    for name in EDITS:
        if name in call:
            columns = zip(*call[name], strict=True) if call[name] else ((), (), ())
            dtypes = torch.int64, torch.int64, torch.float32
            call[name] = tuple(torch.tensor(c, dtype=t, device=device) for c, t in zip(columns, dtypes, strict=True))
    if "allowed_mask" in call:
        call["allowed_mask"] = fmms.pack_mask(torch.stack([_allowed(what, size) for what in call["allowed_mask"]]))
        call["allowed_mask"] = call["allowed_mask"].to(device)
    if "bias" in call:
        generator = torch.Generator().manual_seed(call["bias"])
        call["bias"] = (torch.randint(-4, 5, (vocab,), generator=generator) / 4).to(device)
    if call.pop("row_seeds", False):
        call["seed"] = noise.row_seeds(call["seed"], rows, device)
    if call.pop("results", True):
        call |= checks.EVERYTHING | {"top_logprobs": min(3, size)}
    return hidden, weight, call.pop("temperature"), call


def _allowed(what, vocab: int) -> torch.Tensor:
    token = torch.arange(vocab)
    if isinstance(what, int):
        return torch.rand(vocab, generator=torch.Generator().manual_seed(what)) < 0.5
    return {"all": token >= 0, "odd": token % 2 == 1, "first": token == 0, "last": token == vocab - 1}.get(
        what, token < 0
    )


def run(name: str, strategy, device, number: int = 0) -> None:
    """All calls of a kind, the `number`-th sequence of them; the draws that rounding decided must be as few as its
    bound says."""
    counted = {"calls": 0, "draws": 0, "differ": 0}

    @seed(number)
    @settings(
        max_examples=EXAMPLES[name] if device.type == "cpu" else EXAMPLES[name] // 10,
        deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(call=strategy)
    def compare(call):
        hidden, weight, temperature, options = build(call, device)
        draws, differ = checks.compare_with_reference(hidden, weight, temperature, **options)
        counted["calls"] += 1
        counted["draws"] += draws
        counted["differ"] += differ

    with checks.quick_interpreter():
        compare()
    assert counted["differ"] <= checks.explained_at_most(counted["draws"]), counted


def test_random_calls_without_truncation(device):
    run("untruncated", calls([1, 17, 130, 257, 999, 1024], 5, order=None), device)


@pytest.mark.parametrize("order", FILTER_ORDERS)
def test_random_calls_with_truncation(device, order):
    run("truncated", calls([17, 130, 257, 999, 1024, 1], 2, order), device, FILTER_ORDERS.index(order))


@pytest.mark.parametrize("order", FILTER_ORDERS)
def test_random_calls_with_more_candidates_than_registers_hold(device, monkeypatch, order):
    monkeypatch.setattr(kernels.launch_module(device), "CANDIDATE_GROUPS", SMALL_GROUPS)
    run("beyond registers", calls([130, 257], 1, order), device, FILTER_ORDERS.index(order))
