"""What a user relies on, as functions that raise AssertionError: the tests run them on the kernels as they are, and
`test_faults.py` runs them on kernels with a planted fault, where each must fail."""

import contextlib
import inspect
import math
from unittest import mock

import torch

import fmms
from fmms import controls, kernels, noise, reference, testing
from fmms.request import Request

ROUNDING_NATS = 2e-5
"""Stated bound on what fp32 transcendentals add to a decision, for exact logits of size up to about 30."""
ROUNDING_MASS = 1e-5
"""Stated bound on the relative error of what top-p and min-p compare: sums of fp32 weights, and thresholds."""


class _Members:
    """The module `inspect` as Triton's interpreter sees it, with the builtins of a namespace looked up once."""

    def __init__(self):
        self.names = {}

    def __getattr__(self, name):
        return getattr(inspect, name)

    def getmembers(self, namespace, predicate=None):
        from triton.language import core

        if predicate is not None:
            return inspect.getmembers(namespace, predicate)
        if namespace not in self.names:
            self.names[namespace] = [name for name, value in inspect.getmembers(namespace) if core.is_builtin(value)]
        return [(name, getattr(namespace, name)) for name in self.names[namespace]]


@contextlib.contextmanager
def quick_interpreter():
    """Triton's interpreter searches triton.language for builtins at every call of a device function, which takes most
    of its time; inside this context it searches once. Nothing else changes, and nothing at all for compiled kernels."""
    from triton.runtime import interpreter

    with mock.patch.object(interpreter, "inspect", _Members()):
        yield


def run_tiles(hidden, weight, temperature, seeds, positions, tiles=None, samples=1, scheme="group"):
    """Portable kernel with tile sizes of the caller's choice; returns ids [H, S]."""
    request = Request(
        hidden, weight, temperature=temperature, seeds=seeds, positions=positions, samples=samples, scheme=scheme
    )
    return kernels.launch_module(hidden.device).sample(request, tiles).ids


def tiles_of(block_h, block_v, block_d, vocab_on_m=False):
    from fmms.kernels.launch import Tiles

    return Tiles(block_h, block_v, block_d, vocab_on_m, num_warps=4, num_stages=2)


def check_equals_reference(device, rows, vocab, width, scheme, samples=1, dtype=torch.float32, temperatures=(1.0,)):
    """Ids equal the reference's on exact logits, but for draws whose margin lies under the rounding bound; those are
    as rare as the bound says."""
    hidden, weight = testing.integer_problem(rows, vocab, width, dtype, device, generator_seed=rows + vocab)
    temperature = torch.tensor([temperatures[r % len(temperatures)] for r in range(rows)], device=device)
    seeds = noise.row_seeds(vocab, rows, device)
    positions = torch.arange(rows, device=device) * 3 + (1 << 33)
    options = dict(seed=seeds, position=positions, num_samples=samples, noise_scheme=scheme, return_logprobs=True)
    with testing.poisoned_memory():
        got = fmms.sample(hidden, weight, temperature, impl="triton", return_logits=True, **options)
    want = fmms.sample(hidden, weight, temperature, impl="torch", return_logits=True, **options)
    assert torch.equal(got.logits, want.logits)
    assert got.valid.all()
    assert ((got.ids >= 0) & (got.ids < vocab)).all()
    differs = got.ids != want.ids
    margin = testing.decision_margin(want.logits, temperature, seeds, positions, samples, scheme)
    scale = torch.where(temperature == 0, 1.0, temperature)[:, None]
    bound = ROUNDING_NATS * torch.ones_like(scale)
    assert not (differs & (margin > bound)).any(), f"unexplained draws at margins {margin[differs].tolist()}"
    assert differs.sum() <= 2 + 20 * ROUNDING_NATS * differs.numel()
    same = ~differs
    torch.testing.assert_close(got.logprobs[same], want.logprobs[same], rtol=2e-6, atol=5e-6)
    torch.testing.assert_close(got.lse, want.lse, rtol=2e-6, atol=5e-6)
    assert torch.equal(got.max_logit, want.max_logit)


def check_tile_invariance(device, scheme="group"):
    """The same ids for every tile size and either operand order."""
    rows, vocab, width = 5, 900, 32
    hidden, weight = testing.integer_problem(rows, vocab, width, device=device)
    temperature = torch.tensor([1.0, 0.3, 0.0, 2.0, 1.0], device=device)
    seeds, positions = noise.row_seeds(1, rows, device), torch.full((rows,), 9, device=device)
    shapes = [(16, 128, 16, False), (16, 256, 32, True), (32, 512, 32, False)]
    results = [run_tiles(hidden, weight, temperature, seeds, positions, tiles_of(*s), 4, scheme) for s in shapes]
    for other in results[1:]:
        assert torch.equal(results[0], other)


def check_ragged_tail(device):
    """A vocabulary that ends inside a tile: ids past it are never drawn, though every real logit is far below 0."""
    for vocab in (1, 17, 130, 999):
        hidden = torch.ones(64, 16, device=device)
        weight = torch.full((vocab, 16), -4.0, device=device)
        ids = fmms.sample(hidden, weight, seed=3, impl="triton").ids
        assert ((ids >= 0) & (ids < vocab)).all()
        assert (fmms.sample(hidden, weight, 0.0, seed=3, impl="triton").ids == 0).all()


# (seed, scheme): at position 0 the Gumbel of unit 1 lies above 17.4, the largest that a 24-bit uniform can give
EXTREME_SEEDS = {"group": (45018184, 80195911), "token": (28125412, 93126281)}


def check_winning_tail(device, scheme="group"):
    """A token far below the peak wins where the noise says so: the tail of the Gumbel is resolved past 17.4 nats."""
    for seed in EXTREME_SEEDS[scheme]:
        seeds, positions = torch.tensor([seed], device=device), torch.zeros(1, dtype=torch.int64, device=device)
        vocab = 128 if scheme == "group" else 2
        gumbels, _ = reference.make_noise(scheme, seeds, positions, 1, vocab)
        peak, tail = gumbels[0, 0, 0].item(), gumbels[0, 0, 1].item()
        assert tail > 17.6
        # the tail token is ahead of the peak by 0.1, and behind it if its Gumbel is cut off at 17.4
        weight = torch.full((vocab, 1), -math.inf, device=device)
        weight[0], weight[2 if scheme == "group" else 1] = 0.0, -(tail - peak - 0.1)
        hidden = torch.ones(1, 1, device=device)
        assert fmms.sample(hidden, weight, seed=seeds, noise_scheme=scheme, impl="triton").ids.item() in (1, 2)
        weight[2 if scheme == "group" else 1] -= 0.2
        assert fmms.sample(hidden, weight, seed=seeds, noise_scheme=scheme, impl="triton").ids.item() == 0


def check_interval_widths(device):
    """Every token's interval inside its group has the width of its probability within 1e-3, down to 30 nats."""
    found, wanted = testing.interval_widths(testing.hard_groups(), impl="triton", device=device)
    error = (found / wanted - 1).abs().max().item()
    assert error < 1e-3, f"an interval's width is off by {error:.2e}"


def check_rows_independent(device):
    """Rows and steps of one call do not repeat each other's noise."""

    def sampler(hidden, weight, temperature, seeds, positions):
        # the integer form of the seed: rows get theirs on the device
        return fmms.sample(hidden, weight, temperature, seed=11, position=positions, impl="triton").ids

    testing.check_independence(sampler, pairs=2048, device=device)


# ------------------------------------------------------------------------------------------- every control and result


def explained_at_most(draws: int) -> float:
    """How many of so many draws may differ because a decision of theirs lies under the rounding bounds: two, and 20
    times what a density of one decision per nat gives."""
    return 2 + 20 * ROUNDING_NATS * draws


def compare_with_reference(hidden, weight, temperature=1.0, **options) -> tuple[int, int]:
    """Every result that `options` ask for is the reference's, on a problem whose logits are exact.

    Ids may differ only where the decision (`testing.decision_margin` of what truncation left) or the cut
    (`testing.filter_margin`) lies under the rounding bounds above. Both implementations are given the kernels' tanh.

    Returns:
        How many draws there were and how many of them differ for that reason; `explained_at_most` bounds them.
    """
    rows = hidden.shape[0]
    with testing.poisoned_memory():
        got = fmms.sample(hidden, weight, temperature, impl="triton", **options)
    every = ("logprobs", "raw_logprobs", "final_logprobs", "entropy", "logits")
    with _kernels_tanh(hidden, weight, options):
        want = fmms.sample(
            hidden, weight, temperature, impl="torch", **(options | {f"return_{name}": True for name in every})
        )
    _assert_same("valid", got.valid, want.valid)
    _assert_same("max_logit", got.max_logit, want.max_logit)
    if got.top_ids is not None:
        _assert_same("top_ids", got.top_ids, want.top_ids)
    if got.logits is not None:  # those of rows that are not valid are nothing to rely on
        _assert_same("logits", *(torch.where(want.valid[:, None], out.logits, 0.0) for out in (got, want)))

    t = temperature if isinstance(temperature, torch.Tensor) else torch.full((rows,), temperature, device=hidden.device)
    filters = [options.get(name) for name in ("top_k", "top_p", "min_p")]
    order = options.get("filter_order", "top_k_first")
    # rows without a distribution have no margins; any will do
    safe, safe_t = torch.where(want.valid[:, None], want.logits, 0.0), torch.where(t >= 0, t, 1.0).clamp(max=1e30)
    by_cut = testing.filter_margin(safe, safe_t, *filters, order)
    ids, wanted = (out.ids.view(rows, -1) for out in (got, want))
    differs = ids != wanted
    if differs.any():
        left = controls.filter_logits(safe, safe_t, *filters, order)
        left = torch.where(want.valid[:, None], left, 0.0)
        seeds = options["seed"]
        seeds = seeds if isinstance(seeds, torch.Tensor) else noise.row_seeds(seeds, rows, hidden.device)
        positions = torch.as_tensor(options.get("position", 0), device=hidden.device).expand(rows)
        scheme = options.get("noise_scheme", "group")
        margin = testing.decision_margin(left, safe_t, seeds, positions, ids.shape[1], scheme)
        wrong = differs & (margin > ROUNDING_NATS) & (by_cut > ROUNDING_MASS)[:, None]
        for row, draw in wrong.nonzero().tolist():
            raise AssertionError(
                f"row {row}, draw {draw}: the kernels draw {ids[row, draw]}, the reference {wanted[row, draw]}, which"
                f" no rounding explains: margins {margin[row, draw]:.2g} nats, {by_cut[row]:.2g} of the mass"
            )
    for name in ("logprobs", "raw_logprobs", "final_logprobs"):
        if getattr(got, name) is not None:
            compared = ~differs & (by_cut > ROUNDING_MASS)[:, None] if name == "final_logprobs" else ~differs
            values = (getattr(out, name).view(rows, -1) for out in (got, want))
            _assert_same(name, *(torch.where(compared, value, 0.0) for value in values), rtol=2e-6, atol=5e-6)
    for name in ("lse", "entropy", "top_logprobs"):
        if getattr(got, name) is not None:
            _assert_same(name, getattr(got, name), getattr(want, name), rtol=2e-6, atol=5e-6)
    return differs.numel(), int(differs.sum())


@contextlib.contextmanager
def _kernels_tanh(hidden, weight, options):
    """The reference computes with the kernels' softcapped logits, which lie within rounding of its own."""
    if options.get("softcap") is None:
        yield
        return
    given = {name: options.get(name) for name in ("softcap", "logit_scale", "vocab_size")}
    raw = fmms.sample(hidden, weight, 0.0, seed=0, impl="triton", return_logits=True, **given).logits
    scale = 1.0 if given["logit_scale"] is None else given["logit_scale"]
    own = reference.compute_logits(hidden, weight[: raw.shape[1]], scale, given["softcap"])
    _assert_same("softcapped logits", raw, own, rtol=2e-6, atol=2e-6)
    with mock.patch.object(reference, "compute_logits", lambda *_: raw):
        yield


def _assert_same(name: str, got: torch.Tensor, want: torch.Tensor, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Equal, NaN to NaN, or within a tolerance; else the message shows the first difference."""
    assert got.shape == want.shape and got.dtype == want.dtype, f"{name}: {got.dtype} {list(got.shape)}"
    if got.is_floating_point():
        same = torch.isclose(got, want, rtol=rtol, atol=atol, equal_nan=True)
    else:
        same = got == want
    if not same.all():
        at = tuple((~same).nonzero()[0].tolist())
        message = f"{name}{list(at)}: the kernels give {got[at].item()!r}, the reference {want[at].item()!r}"
        raise AssertionError(f"{message}; {int((~same).sum())} of {same.numel()} differ")


EVERYTHING = dict(
    return_logprobs=True, return_raw_logprobs=True, return_final_logprobs=True, return_entropy=True,
    return_logits=True, top_logprobs=3,
)  # fmt: skip


def forced_draws(vocab: int, device, rows: int = 1) -> torch.Tensor:
    """Noise of the `token` scheme, [H, V, V], with which draw s takes token s if the token may be drawn at all."""
    return 1e6 * torch.eye(vocab, device=device).expand(rows, vocab, vocab).contiguous()


def check_ties(device):
    """Among equal logits truncation keeps the lowest ids: top-k k of them, top-p as many as make up its share."""
    hidden, weight = torch.ones(3, 1, device=device), torch.zeros(150, 1, device=device)
    weight[140] = 1.0
    noise_rising = torch.arange(150.0, device=device).repeat(3, 1, 1)  # the highest id that is left wins
    banned = torch.full((3,), 140, device=device)
    for options, last in (
        (dict(top_k=torch.tensor([1, 8, 0], device=device)), [140, 140, 149]),
        (dict(top_k=torch.tensor([1, 8, 149], device=device), banned_ids=banned), [0, 7, 149]),
        (dict(top_p=torch.tensor([0.0, 0.5, 1.0], device=device), banned_ids=banned), [0, 74, 149]),
    ):
        got = fmms.sample(hidden, weight, seed=0, noise=noise_rising, noise_scheme="token", impl="triton", **options)
        assert got.ids.tolist() == last, f"{options}: the last ids left are {got.ids.tolist()}, expected {last}"


def check_filter_orders(device):
    """Each order takes top-p's share of the mass that it names: tokens of 0.4, 0.3, 0.2 and 0.1, by hand."""
    probabilities = torch.tensor([0.2, 0.4, 0.1, 0.3], device=device)
    hidden, weight = torch.ones(1, 1, device=device), probabilities.log()[:, None]
    cases = [
        ("top_k_first", dict(top_k=2, top_p=0.5), 0.4),  # 0.5 of 0.7 is less than the first
        ("joint", dict(top_k=2, top_p=0.5), 0.7),
        ("joint", dict(top_k=2, top_p=0.95), 0.7),
        ("top_k_first", dict(min_p=0.4, top_p=0.44), 0.7),  # min-p keeps 0.9, but top-p counts all
        ("min_p_first", dict(min_p=0.4, top_p=0.44), 0.4),  # 0.44 of 0.9 is less than the first
        ("min_p_first", dict(min_p=0.4, top_k=2, top_p=0.55), 0.4),
        ("min_p_first", dict(top_p=0.44), 0.7),
    ]
    for order, options, left in cases:
        out = fmms.sample(
            hidden, weight, 0.0, seed=0, filter_order=order, return_final_logprobs=True, impl="triton", **options
        )
        found = 0.4 / out.final_logprobs.exp().item()
        assert abs(found - left) < 1e-5, f"{order}, {options}: a mass of {found:.3f} is left, expected {left}"


def check_candidate_groups(device):
    """How many groups truncation keeps in registers changes nothing: the same ids as the reference for a flat row, of
    which every group is a candidate, and for a peaked one."""
    launch = kernels.launch_module(device)
    hidden, weight = testing.integer_problem(2, 130, 8, device=device, generator_seed=2)
    hidden[0] = 0.0
    options = dict(
        seed=3, num_samples=2, filter_order="min_p_first", top_k=torch.tensor([100, 30], device=device),
        top_p=torch.tensor([0.6, 0.9], device=device), min_p=torch.tensor([0.0, 1e-3], device=device),
    )  # fmt: skip
    for groups in (4, launch.CANDIDATE_GROUPS):
        with mock.patch.object(launch, "CANDIDATE_GROUPS", groups):
            draws, differ = compare_with_reference(hidden, weight, 2.0, **options, **EVERYTHING)
        assert differ == 0, f"{groups} groups in registers: {differ} of {draws} draws differ"


def check_mask(device):
    """Bit i % 32 of word i // 32 allows token i and hides whatever else was there: a logit, an edit, a NaN; a row with
    nothing left is invalid and leaves its neighbours alone."""
    rows, vocab = 3, 75
    hidden, weight = torch.zeros(rows, 1, device=device), torch.zeros(vocab, 1, device=device)
    allowed = torch.zeros(rows, vocab, dtype=torch.bool, device=device)
    allowed[0, [0, 5, 33, 74]] = allowed[2, [1, 31, 64]] = True
    edited = torch.tensor([0, 2, 2], device=device), torch.tensor([7, 7, 31], device=device)
    edit_values = torch.tensor([math.nan, math.inf, 1.0], device=device)
    for options in ({}, dict(top_k=70), dict(logit_bias=(*edited, edit_values))):
        out = fmms.sample(
            hidden, weight, seed=0, noise=forced_draws(vocab, device, rows), noise_scheme="token", num_samples=vocab,
            allowed_mask=fmms.pack_mask(allowed), return_logits=True, impl="triton", **options,
        )  # fmt: skip
        assert out.valid.tolist() == [True, False, True]
        want = torch.zeros(rows, vocab, device=device)
        if "logit_bias" in options:
            want[2, 31] = 1.0
        assert torch.equal(out.logits, torch.where(allowed, want, -math.inf))
        assert (out.ids[1] == -1).all()
        for row in (0, 2):
            assert torch.equal(out.ids[row].unique(), allowed[row].nonzero()[:, 0]), f"row {row} with {list(options)}"


def check_edits(device):
    """Bias, then penalties: entries for the same logit add up, repetition factors multiply, and positive logits are
    divided by them, others multiplied."""
    hidden, weight = torch.ones(2, 1, device=device), torch.tensor([[2.0], [-2.0], [0.5], [1.0]], device=device)

    def triple(*entries):
        rows, tokens, values = zip(*entries, strict=True)
        index = (torch.tensor(x, device=device) for x in (rows, tokens))
        return *index, torch.tensor(values, dtype=torch.float32, device=device)

    out = fmms.sample(
        hidden, weight, 0.0, seed=0, return_logits=True, impl="triton",
        logit_bias=triple((0, 2, 1.0), (0, 1, -3.0), (0, 2, 2.5), (-1, 0, 9.0), (1, -1, 9.0)),
        repetition_penalty=triple((0, 2, 2.0), (0, 0, 4.0), (0, 1, 2.0), (0, 2, 2.0)),
        frequency_penalty=triple((1, 3, 0.5), (1, 3, 0.5), (1, 3, 0.5)),
        presence_penalty=triple((1, 3, 2.0), (0, 2, 0.5)),
    )  # fmt: skip
    want = [[0.5, -10.0, 0.5, 1.0], [2.0, -2.0, 0.5, -2.5]]
    assert out.logits.tolist() == want, f"{out.logits.tolist()}, expected {want}"
    assert out.ids.tolist() == [3, 0]
