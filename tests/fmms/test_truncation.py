"""Truncation by top-k, top-p and min-p inside the sampler: what is left, how it is drawn, and what rows owe each other.

Statistical tests use fixed seeds and a false-alarm rate of 1e-6 each.
"""

import math

import checks
import pytest
import torch

import fmms
from fmms import controls, kernels, noise, testing
from fmms.request import FILTER_ORDERS, Request

RATE = 1e-6
MIXED = dict(
    temperature=[1.0, 0.0, 0.5, 1.0, 2.0, 1.0],
    top_k=[0, 40, 7, -1, 100, 10**10],
    top_p=[1.0, 0.8, 0.9, 0.6, 0.9999999, 1.0],
    min_p=[0.0, 0.01, 0.0, 0.0, 0.02, 0.3],
)
"""Rows of every sort: untruncated, greedy, by each filter alone and together."""


def mixed(device, **more):
    """The per-row controls as tensors."""
    return {name: torch.tensor(values, device=device) for name, values in (MIXED | more).items()}


@pytest.fixture(autouse=True)
def quick():
    with checks.quick_interpreter():
        yield


@pytest.fixture
def rows_alike(device, monkeypatch):
    """For many rows that are all the same: the interpreter takes a tenth of a second to cut a row, so there the first
    row's cut holds for all, and tiles hold more rows. On a GPU nothing is changed."""
    launch = kernels.launch_module(device)
    if not launch.INTERPRETED:
        return
    cut_rows = launch.select.cut_rows

    class FirstRow:
        def __getitem__(self, grid):
            def run(*args, **options):
                cut_rows[(1,)](*args, **options)
                for name in ("threshold", "last_tie"):
                    cut = args[cut_rows.arg_names.index(name)]
                    cut[1:] = cut[0].clone()

            return run

    monkeypatch.setattr(launch.select, "cut_rows", FirstRow())
    monkeypatch.setattr(launch._Launch, "_stored_blocks", lambda self: (4096, 128))


def draw_alike(logits, draws: int, device, seed=0, samples=1, batch=4096, **options) -> torch.Tensor:
    """Ids [draws, samples] from one row of logits [V], every draw a row of its own with its own seed."""
    weight = torch.as_tensor(logits, dtype=torch.float32)[:, None].to(device)
    parts = []
    for start in range(0, draws, batch):
        rows = min(batch, draws - start)
        seeds = noise.row_seeds(seed, start + rows, device)[start:]
        ones = torch.ones(rows, 1, device=device)
        out = fmms.sample(ones, weight, seed=seeds, num_samples=samples, impl="triton", **options)
        assert out.valid.all()
        parts.append(out.ids.cpu())
    return torch.cat(parts)


# --------------------------------------------------------------------------------------------- equal to the reference


@pytest.mark.parametrize("order", FILTER_ORDERS)
@pytest.mark.parametrize("scheme", ["group", "token"])
def test_ids_equal_the_reference_under_injected_noise(device, scheme, order):
    rows, vocab, samples = 6, 300, 2
    hidden, weight = testing.integer_problem(rows, vocab, 16, device=device)
    units = vocab if scheme == "token" else noise.group_count(vocab)
    generator = torch.Generator().manual_seed(3)
    gumbels = -torch.log(-torch.log(torch.rand(rows, samples, units, generator=generator))).to(device)
    uniforms = torch.rand(rows, samples, units, generator=generator, dtype=torch.float64).to(device)
    options = dict(
        seed=0, num_samples=samples, noise_scheme=scheme, filter_order=order,
        noise=gumbels if scheme == "token" else (gumbels, uniforms), **mixed(device),
    )  # fmt: skip
    with testing.poisoned_memory():
        got = fmms.sample(hidden, weight, impl="triton", **options)
    want = fmms.sample(hidden, weight, impl="torch", **options)
    assert got.valid.all() and torch.equal(got.ids, want.ids)


def test_tile_sizes_change_no_id(device, monkeypatch):
    """Those of the matmul, those of the stored logits, and how many groups the cut keeps in registers."""
    rows, vocab = 3, 400
    hidden, weight = testing.integer_problem(rows, vocab, 32, device=device)
    seeds, positions = noise.row_seeds(1, rows, device), torch.full((rows,), 9, device=device)
    controls_of_rows = {name: value[3:] for name, value in mixed(device).items()}
    controls_of_rows["top_k"] = controls_of_rows["top_k"].clamp(max=vocab).to(torch.int32)
    launch = kernels.launch_module(device)

    def ids(tiles=None):
        request = Request(hidden, weight, seeds=seeds, positions=positions, samples=2, **controls_of_rows)
        return launch.sample(request, tiles).ids

    want = ids()
    for shape in ((16, 128, 16, False), (16, 256, 32, True), (32, 512, 32, False)):
        assert torch.equal(ids(checks.tiles_of(*shape)), want), shape
    for size in (128, 256):
        with monkeypatch.context() as patch:
            patch.setattr(launch, "STORED_IDS", size)
            assert torch.equal(ids(), want), f"{size} ids in a tile of stored logits"
    with monkeypatch.context() as patch:
        patch.setattr(launch, "CANDIDATE_GROUPS", 8)
        assert torch.equal(ids(), want), "8 groups in registers"


def test_more_candidates_than_registers_hold(device):
    checks.check_candidate_groups(device)


def test_draws_in_several_passes_are_the_same(device, monkeypatch):
    hidden, weight = testing.integer_problem(2, 300, 16, device=device)
    options = dict(seed=1, num_samples=5, top_p=0.8, impl="triton", return_logprobs=True, return_final_logprobs=True)
    whole = fmms.sample(hidden, weight, **options)
    monkeypatch.setattr(kernels.launch_module(device), "TILE_RESULTS", 4)
    for name, a, b in zip(whole._fields, whole, fmms.sample(hidden, weight, **options), strict=True):
        assert a is b is None or torch.equal(a, b), name
    assert torch.equal(fmms.sample(hidden, weight, **(options | {"num_samples": None})).ids, whole.ids[:, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(device, dtype):
    hidden, weight = testing.integer_problem(6, 333, 64, dtype, device)
    _, differ = checks.compare_with_reference(hidden, weight, seed=5, **mixed(device), **checks.EVERYTHING)
    assert differ == 0


# -------------------------------------------------------------------------------------------------- what may be drawn

CASES = {
    "top-k": dict(top_k=9),
    "top-p": dict(top_p=0.7),
    "min-p": dict(min_p=0.2),
    **{order: dict(top_k=12, top_p=0.8, min_p=0.1, filter_order=order) for order in FILTER_ORDERS},
}


def bell(vocab=40, device="cpu"):
    """Logits with ties, no order among the ids, and one cut of each filter within."""
    return (torch.arange(vocab, device=device) * 7 % vocab // 3).float() / 4


@pytest.mark.parametrize("scheme", ["group", "token"])
@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_truncated_softmax(device, rows_alike, case, scheme):
    """Chi-square over the whole vocabulary; a token that was cut off fails it by being drawn once."""
    logits, temperature = bell(), 1.5
    left = controls.filter_logits(logits[None], temperature, **CASES[case])[0]
    assert 2 < torch.isfinite(left).sum() < 30
    ids = draw_alike(logits, 1 << 13, device, temperature=temperature, noise_scheme=scheme, **CASES[case])
    p = testing.chi_square(testing.draws_histogram(ids, 40), torch.softmax(left.double() / temperature, -1))
    assert p > RATE, f"p = {p:.2g}"


@pytest.mark.parametrize("case", CASES)
def test_no_noise_draws_what_was_cut_off(device, case):
    """Whichever token the noise insists on: it is drawn if it was left, and nothing that was cut off ever is."""
    logits, vocab = bell(device=device), 40
    allowed = controls.allowed_set(logits[None], 1.5, **CASES[case])[0]
    out = fmms.sample(
        torch.ones(1, 1, device=device), logits[:, None], 1.5, seed=0, noise=checks.forced_draws(vocab, device),
        noise_scheme="token", num_samples=vocab, return_final_logprobs=True, impl="triton", **CASES[case],
    )  # fmt: skip
    assert torch.equal(out.ids[0] == torch.arange(vocab, device=device), allowed)
    assert torch.equal(out.ids[0].unique(), allowed.nonzero()[:, 0])
    # and the probabilities of what is left sum to 1
    left = out.final_logprobs[0][allowed]
    assert abs(left.double().logsumexp(0).item()) < 1e-6
    want = torch.log_softmax(logits[allowed].double() / 1.5, 0)
    torch.testing.assert_close(left.double(), want, rtol=0, atol=2e-6)


def check_a_forbidden_token_is_never_drawn(device, draws):
    """Eleven tokens tie, and the twelfth is next to them: top-k and top-p leave the lowest id alone, min-p the ties."""
    logits = torch.zeros(12)
    logits[11] = -1e-6
    for options in (dict(top_k=1), dict(top_p=0.05)):
        ids = draw_alike(logits, draws, device, batch=min(draws, 1 << 16), **options)
        assert (ids == 0).all(), options
    ids = draw_alike(logits, draws, device, batch=min(draws, 1 << 16), min_p=1.0)
    assert (ids != 11).all() and ids.unique().numel() == 11


def test_a_forbidden_token_is_never_drawn(device, rows_alike):
    check_a_forbidden_token_is_never_drawn(device, 1 << 13)


@pytest.mark.gpu
def test_a_forbidden_token_is_never_drawn_in_a_million_draws():
    check_a_forbidden_token_is_never_drawn(torch.device("cuda"), 1 << 20)


def test_samples_of_a_row_are_independent(device, rows_alike):
    """Pairs of draws of a row (chi-square of the contingency table), of the four tokens that are left, equally likely;
    so are draws of neighbouring rows."""
    ids = draw_alike(torch.zeros(30), 1 << 12, device, samples=2, top_k=4)
    assert ids.max() == 3
    for a, b in ((ids[:, 0], ids[:, 1]), (ids[::2, 0], ids[1::2, 0])):
        p = testing.independence(a, b, 4)
        assert p > RATE, f"p = {p:.2g}"
    p = testing.chi_square(testing.draws_histogram(ids[:, 1], 4), [0.25] * 4)
    assert p > RATE, f"p = {p:.2g}"


# -------------------------------------------------------------------------------------------------------- by definition


def test_ties_go_to_the_lowest_ids(device):
    checks.check_ties(device)


def test_filter_orders_by_hand(device):
    checks.check_filter_orders(device)


def test_top_k_of_one_is_greedy(device):
    hidden, weight = testing.integer_problem(5, 300, 4, device=device)  # many ties
    logits = hidden @ weight.T
    assert ((logits == logits.amax(1, keepdim=True)).sum(1) > 1).any()
    got = fmms.sample(hidden, weight, 1e4, seed=1, top_k=1, impl="triton", return_final_logprobs=True)
    assert torch.equal(got.ids, fmms.sample(hidden, weight, 0.0, seed=1, impl="triton").ids)
    assert (got.final_logprobs == 0).all()


def test_top_p_of_zero_takes_the_largest_logit(device):
    hidden, weight = testing.integer_problem(4, 200, 4, device=device)
    greedy = fmms.sample(hidden, weight, 0.0, seed=0, impl="triton").ids
    for order in FILTER_ORDERS:
        got = fmms.sample(hidden, weight, 1e4, seed=0, top_p=0.0, min_p=1e-9, filter_order=order, impl="triton")
        assert torch.equal(got.ids, greedy), order


def check_flat(device, vocab):
    """All tokens equal: every group is a candidate, and the lowest ids are left. As their probabilities are equal,
    final_logprobs tell how many."""
    hidden, weight = torch.ones(1, 8, device=device), torch.ones(vocab, 8, device=device)
    share = torch.tensor(0.9).double().item()
    for options, left in (
        (dict(top_k=1000), 1000),
        (dict(top_p=0.9), math.ceil(share * vocab)),
        (dict(top_k=1000, top_p=0.9), 900),
        (dict(top_k=1000, top_p=0.9, filter_order="joint"), 1000),
        (dict(top_p=0.9999999), math.ceil(torch.tensor(0.9999999).double().item() * vocab)),
        (dict(min_p=1.0), vocab),
    ):
        out = fmms.sample(hidden, weight, seed=2, return_final_logprobs=True, impl="triton", **options)
        assert out.valid.all() and 0 <= out.ids.item() < left
        found = math.exp(-out.final_logprobs.double().item())
        assert abs(found - left) < 0.4, f"{options}: {found:.1f} tokens are left, expected {left}"


def test_flat_distribution(device):
    check_flat(device, 200_000)


@pytest.mark.parametrize(
    "options", [dict(top_k=50), dict(top_p=0.9), dict(min_p=0.5), dict(top_k=9, top_p=0.5)], ids=str
)
@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-45, 1e30, math.inf])
def test_extreme_temperatures(device, temperature, options):
    hidden, weight = testing.integer_problem(2, 260, 4, device=device)
    _, differ = checks.compare_with_reference(hidden, weight, temperature, seed=8, **options, **checks.EVERYTHING)
    assert differ == 0


def test_logits_of_ten_thousand(device):
    hidden = torch.tensor([[25.0], [-25.0]], device=device)
    weight = torch.full((200, 1), -400.0, device=device)
    weight[::3], weight[1::3] = 400.0, 399.96875
    for options in (dict(top_k=80), dict(top_p=0.9), dict(min_p=0.4), dict(top_k=90, top_p=0.5, min_p=0.4)):
        _, differ = checks.compare_with_reference(hidden, weight, seed=8, **options, **checks.EVERYTHING)
        assert differ == 0


def test_fewer_tokens_than_k(device):
    """k above V, and above what a mask leaves, removes nothing more; nor does any filter bring a masked token back."""
    hidden, weight = torch.ones(3, 1, device=device), torch.zeros(140, 1, device=device)
    allowed = torch.zeros(3, 140, dtype=torch.bool, device=device)
    allowed[0], allowed[1, [5, 77, 139]] = True, True
    for options in (dict(top_k=500), dict(top_k=100), dict(top_p=0.9999999), dict(min_p=1e-9, top_k=10)):
        options |= dict(seed=3, allowed_mask=fmms.pack_mask(allowed), num_samples=3)
        _, differ = checks.compare_with_reference(hidden, weight, **options, **checks.EVERYTHING)
        assert differ == 0
        out = fmms.sample(hidden, weight, impl="triton", **options)
        assert out.valid.tolist() == [True, True, False]
        assert set(out.ids[1].tolist()) <= {5, 77, 139}


def test_a_share_next_to_one_keeps_all_but_a_negligible_tail(device):
    p = 0.9999999
    weight = torch.tensor([0.0, math.log(1e-6), math.log(1e-9), math.log(1e-12)], device=device)[:, None]
    out = fmms.sample(
        torch.ones(1, 1, device=device), weight, seed=0, noise=checks.forced_draws(4, device), noise_scheme="token",
        num_samples=4, top_p=p, impl="triton",
    )  # fmt: skip
    assert out.ids[0].tolist() == [0, 1, 0, 0]


def test_broken_rows_leave_the_others_alone(device):
    hidden, weight = testing.integer_problem(9, 150, 24, device=device)
    hidden[1, 3], hidden[5, 0] = math.nan, math.inf
    options = dict(
        top_k=torch.tensor([5, 5, -2, 5, 5, 5, 0, 5, 5], device=device),
        top_p=torch.tensor([0.9, 0.9, 0.9, 1.5, 0.9, 0.9, 0.9, math.nan, 0.9], device=device),
        min_p=torch.tensor([0.1, 0.1, 0.1, 0.1, -0.1, 0.1, 0.0, 0.1, 0.1], device=device),
    )
    seeds = noise.row_seeds(4, 9, device)
    out = fmms.sample(hidden, weight, seed=seeds, return_final_logprobs=True, impl="triton", **options)
    good = torch.tensor([0, 6, 8], device=device)
    assert out.valid.nonzero()[:, 0].tolist() == good.tolist()
    assert (out.ids[~out.valid] == -1).all() and out.final_logprobs[~out.valid].isnan().all()
    alone = fmms.sample(
        hidden[good], weight, seed=seeds[good], return_final_logprobs=True, impl="triton",
        **{name: value[good] for name, value in options.items()},
    )  # fmt: skip
    assert torch.equal(out.ids[good], alone.ids) and torch.equal(out.final_logprobs[good], alone.final_logprobs)


# ----------------------------------------------------------------------------------------------------------- mixed rows


@pytest.mark.parametrize("order", FILTER_ORDERS)
def test_every_row_gets_what_it_gets_alone(device, order):
    """Greedy, sampled, truncated and untruncated rows in one call: the same ids as in calls of one row each, where an
    untruncated row is given no filter at all, and log-probabilities within rounding."""
    rows, vocab = 6, 500
    hidden, weight = testing.integer_problem(rows, vocab, 32, device=device)
    seeds, positions = noise.row_seeds(3, rows, device), torch.arange(rows, device=device)
    every = dict(num_samples=2, filter_order=order, impl="triton", **checks.EVERYTHING)
    options = mixed(device)
    together = fmms.sample(hidden, weight, seed=seeds, position=positions, **options, **every)
    for row in range(rows):
        own = {name: values[row] for name, values in MIXED.items()}
        for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            if own[name] == off or (name == "top_k" and not 0 < own[name] < vocab):
                own[name] = None
        at = slice(row, row + 1)
        alone = fmms.sample(hidden[at], weight, seed=seeds[at], position=positions[at], **own, **every)
        for name, whole, part in zip(together._fields, together, alone, strict=True):
            if part.is_floating_point():
                torch.testing.assert_close(whole[at], part, rtol=2e-6, atol=5e-6, msg=lambda m, n=name: f"{n}: {m}")
            else:
                assert torch.equal(whole[at], part), f"{name} of row {row}"


def test_scalars_hold_for_every_row(device):
    hidden, weight = testing.integer_problem(3, 200, 16, device=device)
    scalars = dict(top_k=20, top_p=0.9, min_p=0.01)
    want = fmms.sample(hidden, weight, seed=1, num_samples=2, impl="triton", **scalars).ids
    for shape in ((), (3,)):
        tensors = {name: torch.full(shape, value, device=device) for name, value in scalars.items()}
        assert torch.equal(fmms.sample(hidden, weight, seed=1, num_samples=2, impl="triton", **tensors).ids, want)


def test_filters_that_are_off_change_nothing(device):
    hidden, weight = testing.integer_problem(3, 200, 16, device=device)
    want = fmms.sample(hidden, weight, seed=1, impl="triton").ids
    off = dict(top_k=torch.tensor([0, -1, 200], device=device), top_p=torch.ones(3, device=device))
    for options in (dict(top_k=0, top_p=1, min_p=0), dict(top_k=200), off, dict(min_p=torch.zeros(3, device=device))):
        assert torch.equal(fmms.sample(hidden, weight, seed=1, impl="triton", **options).ids, want)
