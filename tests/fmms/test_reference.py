"""The reference, checked in fp64 against what it does not use: softmax, exact probabilities, closed forms."""

import pytest
import torch

from fmms import controls, noise, reference, testing
from fmms.request import Request


def exact_group_draw_probabilities(logits):
    """Probability of each token under the group scheme by its own factorisation, P(group) * P(token | group), fp64."""
    ids = noise.group_token_ids(len(logits))
    padded = torch.cat([logits, torch.full((ids.numel() - len(logits),), -torch.inf, dtype=torch.float64)])
    members = padded[ids]
    group = torch.softmax(torch.logsumexp(members, -1), -1)
    inside = torch.softmax(members, -1).nan_to_num()
    return torch.zeros(ids.numel(), dtype=torch.float64).index_add_(
        0, ids.flatten(), (group[:, None] * inside).flatten()
    )


def test_group_scheme_factorises_softmax():
    logits = 3 * torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = exact_group_draw_probabilities(logits)[:1000]
    torch.testing.assert_close(got, torch.softmax(logits, -1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("scheme", ["group", "token"])
def test_draws_follow_softmax(scheme):
    """Chi-square over the whole vocabulary, 20,000 draws at a temperature; false-alarm rate 1e-6."""
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(1, 300, generator=generator)
    temperature = torch.tensor([0.7])
    ids = reference.sample_from_logits(
        logits, temperature, torch.tensor([5]), torch.tensor([0]), samples=20_000, scheme=scheme
    )[0]
    probabilities = torch.softmax(logits[0].double() / 0.7, -1)
    assert testing.chi_square(testing.draws_histogram(ids, 300), probabilities) > 1e-6


@pytest.mark.parametrize("scheme, vocab, depth, draws", [("group", 50_000, 14.0, 3_000), ("token", 5_000, 11.0, 1_500)])
def test_heavy_tail(scheme, vocab, depth, draws):
    """Tokens far below one peak, together a few percent, are drawn as often as they should be (false alarms 1e-6)."""
    logits = torch.full((1, vocab), -depth)
    logits[0, 1234] = 0.0
    tail = 1 - torch.softmax(logits[0].double(), -1)[1234].item()
    hits = 0
    for position in range(draws // 100):
        ids = reference.sample_from_logits(
            logits, torch.ones(1), torch.tensor([9]), torch.tensor([position]), samples=100, scheme=scheme
        )[0]
        hits += int((ids != 1234).sum())
    assert testing.binomial_tail(hits, draws, tail) > 1e-6


def test_logprobs_lse_and_max_logit_in_closed_form():
    generator = torch.Generator().manual_seed(2)
    logits = 4 * torch.randn(6, 500, generator=generator)
    temperature = torch.tensor([0.0, 0.5, 1.0, 2.0, 1e-3, 1.0])
    ids, logprobs, lse, max_logit, valid = reference.sample_from_logits(
        logits, temperature, noise.row_seeds(0, 6), torch.zeros(6, dtype=torch.int64)
    )
    t = torch.where(temperature == 0, 1.0, temperature).double()[:, None]
    want = torch.log_softmax(logits.double() / t, -1).gather(1, ids)
    torch.testing.assert_close(logprobs.double(), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), torch.logsumexp(logits.double() / t, -1), rtol=1e-6, atol=1e-6)
    assert torch.equal(max_logit, logits.amax(-1)) and valid.all()
    assert ids[0, 0] == logits[0].argmax()


def test_descent_is_inversion_of_a_uniform():
    """Averaged over a fine grid of uniforms, each member is chosen as often as its weight says."""
    weights = torch.rand(20, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) ** 4
    grid = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    parts = (part.expand(20, len(grid)) for part in noise.split_uniform(grid))
    chosen = reference.descend(weights[:, None, :].expand(20, len(grid), 32), *parts)
    share = torch.nn.functional.one_hot(chosen, 32).double().mean(1)
    assert (share - weights / weights.sum(-1, keepdim=True)).abs().max() < 32 / 20_000


def test_first_argmax_takes_the_lowest_index():
    x = torch.tensor([[1.0, 3.0, 3.0], [-torch.inf] * 3, [2.0, 2.0, 2.0]])
    assert reference.first_argmax(x).tolist() == [1, 0, 0]


def test_fp32_product_ignores_reduced_precision_switches():
    a, b = torch.full((1, 2), 1.0 + 2.0**-20), torch.ones(2, 1)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert reference.ieee_matmul(a, b).item() == 2 * (1.0 + 2.0**-20)
    finally:
        torch.set_float32_matmul_precision(before)


def assert_same(got, want):
    """Two Results, bit for bit."""
    for name, a, b in zip(got._fields, got, want, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=name)


EVERYTHING = dict(
    want_logprobs=True, want_raw_logprobs=True, want_final_logprobs=True, want_entropy=True, want_logits=True
)


@pytest.mark.parametrize("scheme", ["group", "token"])
def test_chunks_of_rows_and_draws_do_not_change_the_result(monkeypatch, scheme):
    hidden, weight = testing.integer_problem(7, 100, 8)
    units = 100 if scheme == "token" else 4
    gumbels, uniforms = torch.randn(7, 9, units), torch.rand(7, 9, units) if scheme == "group" else None
    gumbels[3, 8, 2] = torch.nan
    for injected in ({}, dict(gumbels=gumbels, uniforms=uniforms)):
        request = Request(
            hidden, weight, seed_value=1, positions=torch.arange(7), samples=9, scheme=scheme, filter_order="joint",
            top_k=torch.arange(7, dtype=torch.int32) * 5, top_p_value=0.9, top_logprobs=3, **EVERYTHING, **injected,
        )  # fmt: skip
        whole = reference.sample(request)
        assert whole.valid.tolist() == [row != 3 or not injected for row in range(7)]
        for size in (300, 30, 1):
            monkeypatch.setattr(reference, "CHUNK_ELEMENTS", size)
            assert_same(reference.sample(request), whole)
        monkeypatch.undo()


def known_request(logits, **options):
    """A request whose raw logits are those given, fp32 [H, V]."""
    return Request(torch.eye(len(logits)), logits.T.contiguous(), **options)


def controlled_request(scheme="group", rows=6, vocab=200):
    """Everything at once: bias, edits, mask, banned ids, filters, a greedy row; and the fp64 logits it should make."""
    generator = torch.Generator().manual_seed(4)
    hidden, weight = testing.integer_problem(rows, vocab, 16)
    bias = torch.randn(vocab, generator=generator)
    allowed = torch.rand(rows, vocab, generator=generator) < 0.8
    banned = torch.tensor([-1, 5, 6, -1, 8, 9])
    at = torch.arange(rows).repeat_interleave(4), torch.randint(0, vocab, (4 * rows,), generator=generator)
    values, kinds = torch.rand(4 * rows, generator=generator) + 0.5, torch.arange(4 * rows) % 4
    request = Request(
        hidden, weight, logit_scale=0.5, softcap=20.0, bias=bias, seed_value=3, position_value=7, samples=5,
        temperature=torch.tensor([1.0, 0.5, 0.0, 2.0, 0.8, 1.2]), top_k_value=40, scheme=scheme,
        top_p=torch.tensor([0.9, 0.5, 0.9, 1.0, 0.99, 0.8]), min_p_value=0.01, top_logprobs=4,
        edit_rows=at[0], edit_tokens=at[1], edit_values=values, edit_kinds=kinds,
        allowed_mask=controls.pack_mask(allowed), banned_ids=banned, **EVERYTHING,
    )  # fmt: skip
    raw = 20 * torch.tanh(hidden @ weight.T * 0.5 / 20)
    processed = raw + bias
    for row, token, value, kind in zip(*at, values, kinds, strict=True):
        if kind == 0:
            processed[row, token] += value
        elif kind == 1:
            processed[row, token] *= value if processed[row, token] <= 0 else 1 / value
        else:
            processed[row, token] -= value
    processed[~allowed] = -torch.inf
    processed[banned >= 0, banned[banned >= 0]] = -torch.inf
    return request, raw, processed


@pytest.mark.parametrize("scheme", ["group", "token"])
def test_every_result_follows_its_definition(scheme):
    request, raw, processed = controlled_request(scheme)
    got = reference.sample(request)
    torch.testing.assert_close(got.logits, processed, rtol=1e-6, atol=1e-6)
    assert got.valid.all()
    t = torch.where(request.temperature == 0, 1.0, request.temperature).double()[:, None]
    distribution = torch.log_softmax(processed.double() / t, -1)
    left = controls.filter_logits(got.logits, request.temperature, 40, request.top_p, 0.01)
    assert (left > -torch.inf).sum(-1).max() <= 40
    exact = dict(rtol=1e-5, atol=2e-6)
    for name, want in (
        ("logprobs", distribution.gather(1, got.ids)),
        ("raw_logprobs", torch.log_softmax(raw.double(), -1).gather(1, got.ids)),
        ("final_logprobs", torch.log_softmax(left.double() / t, -1).gather(1, got.ids)),
        ("lse", torch.logsumexp(processed.double() / t, -1)),
        ("max_logit", processed.amax(-1).double()),
        ("entropy", torch.distributions.Categorical(logits=processed.double() / t).entropy()),
        ("top_logprobs", distribution.topk(4).values),
    ):
        assert getattr(got, name).dtype == torch.float32
        torch.testing.assert_close(getattr(got, name).double(), want, **exact, msg=name)
    assert torch.equal(got.top_ids, processed.topk(4).indices)
    assert (got.ids[2] == processed[2].argmax()).all()
    # the draws are those of the filtered logits with the same noise
    drawn = reference.sample_from_logits(
        left, request.temperature, noise.row_seeds(3, 6), torch.full((6,), 7), 5, scheme
    )
    assert torch.equal(got.ids, drawn[0])


def test_nothing_is_returned_unasked():
    request = known_request(torch.zeros(2, 3))
    got = reference.sample(request)
    assert [name for name, value in got._asdict().items() if value is not None] == ["ids", "lse", "max_logit", "valid"]
    assert got.ids.dtype == torch.int64 and got.ids.shape == (2, 1)
    assert reference.sample(known_request(torch.zeros(2, 3), top_p_value=0.5)).ids.shape == (2, 1)
    nothing = Request(torch.zeros(0, 4), torch.zeros(3, 4), top_k_value=2, top_logprobs=2, **EVERYTHING)
    assert all(len(value) == 0 for value in reference.sample(nothing))


def test_entropy_and_top_tokens_by_hand():
    logits = torch.tensor([[0.0, 0.0, 9.0, 0.0, 0.0], [0.0, 50.0, 50.0, 50.0, -50.0], [1.0, 3.0, 2.0, 3.0, 0.0]])
    banned = torch.tensor([2, -1, -1])
    got = reference.sample(known_request(logits, want_entropy=True, top_logprobs=5, banned_ids=banned))
    torch.testing.assert_close(got.entropy[:2], torch.tensor([4.0, 3.0]).log())
    assert got.top_ids.tolist() == [[0, 1, 3, 4, 2], [1, 2, 3, 0, 4], [1, 3, 2, 0, 4]]
    assert got.top_logprobs[0].tolist() == pytest.approx([-torch.tensor(4.0).log().item()] * 4 + [-torch.inf])


def test_truncation_to_one_token():
    logits = torch.randn(4, 150, generator=torch.Generator().manual_seed(6))
    for options in (dict(top_k_value=1), dict(top_p_value=0.0), dict(min_p_value=1.0)):
        got = reference.sample(known_request(logits, samples=3, want_final_logprobs=True, **options))
        assert torch.equal(got.ids, logits.argmax(-1, keepdim=True).expand(4, 3))
        assert (got.final_logprobs == 0).all() and got.valid.all()


def test_a_mask_hides_broken_logits():
    """A NaN or +inf that must not be drawn leaves the row valid; its raw distribution is none."""
    logits = torch.tensor([[torch.nan, 1.0, 2.0], [1.0, torch.inf, 2.0], [1.0, 3.0, 2.0]])
    request = Request(
        torch.ones(3, 1), torch.zeros(3, 1), allowed_mask=torch.tensor([[6], [7], [0]], dtype=torch.int32),
        banned_ids=torch.tensor([-1, 1, -1]), edit_rows=torch.arange(3).repeat_interleave(3),
        edit_tokens=torch.arange(3).repeat(3), edit_values=logits.flatten(), edit_kinds=torch.zeros(9).long(),
        want_logits=True,
    )  # fmt: skip
    got = reference.sample(request)
    assert got.logits.tolist() == [[-torch.inf, 1.0, 2.0], [1.0, -torch.inf, 2.0], [-torch.inf] * 3]
    assert got.valid.tolist() == [True, True, False]
    weight = torch.tensor([[torch.nan], [1.0], [2.0]])
    hidden_nan = Request(torch.ones(1, 1), weight, banned_ids=torch.tensor([0]), want_raw_logprobs=True)
    assert reference.sample(hidden_nan).valid.item() and reference.sample(hidden_nan).raw_logprobs.isnan().all()


BROKEN = dict(
    nan_logit=dict(edit=(0, torch.nan, 0)),
    infinite_logit=dict(edit=(0, torch.inf, 0)),
    token_past_the_end=dict(edit=(3, 1.0, 0)),
    penalty_of_zero=dict(edit=(1, 0.0, 1)),
    negative_temperature=dict(temperature=torch.tensor([1.0, -1.0, 1.0])),
    nan_temperature=dict(temperature=torch.tensor([0.0, torch.nan, 1.0])),
    banned_past_the_end=dict(banned_ids=torch.tensor([0, 3, -1])),
    nothing_allowed=dict(allowed_mask=torch.tensor([[1], [8], [7]], dtype=torch.int32)),
    top_k=dict(top_k=torch.tensor([-1, -2, 0], dtype=torch.int32)),
    top_p=dict(top_p=torch.tensor([1.0, 1.5, 0.0])),
    nan_top_p=dict(top_p=torch.tensor([1.0, torch.nan, 0.0])),
    min_p=dict(min_p=torch.tensor([0.0, -0.5, 1.0])),
    greedy_with_min_p=dict(min_p=torch.tensor([0.0, -0.5, 1.0]), temperature=torch.zeros(3)),
    noise=dict(
        gumbels=torch.tensor([0.0, torch.nan, 0.0])[:, None, None].expand(3, 2, 4), uniforms=torch.rand(3, 2, 4)
    ),
)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_row_is_flagged_and_blank(name):
    options = dict(BROKEN[name])
    if "edit" in options:
        token, value, kind = options.pop("edit")
        options.update(
            edit_rows=torch.tensor([1, -1, 7]), edit_tokens=torch.tensor([token, 9, 9]),
            edit_values=torch.full((3,), value), edit_kinds=torch.full((3,), kind),
        )  # fmt: skip
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    got = reference.sample(known_request(logits, samples=2, top_logprobs=2, **EVERYTHING, **options))
    assert got.valid.tolist() == [True, False, True]
    assert (got.ids[1] == -1).all() and (got.top_ids[1] == -1).all()
    for field in ("logprobs", "raw_logprobs", "final_logprobs", "lse", "max_logit", "entropy", "top_logprobs"):
        value = getattr(got, field)
        assert value[1].isnan().all() and not value[[0, 2]].isnan().any(), field
    assert (got.ids[[0, 2]] >= 0).all()
