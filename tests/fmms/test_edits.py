"""Logit bias, penalties, masks and banned tokens inside the sampler, against formulas written out in each test."""

import math

import checks
import pytest
import torch

import fmms
from fmms import noise, testing

H, V = 4, 300
INF, NAN = math.inf, math.nan


def problem(device):
    hidden, weight = testing.integer_problem(H, V, 16, device=device)
    return hidden, weight, hidden @ weight.T


def logits_of(hidden, weight, **options):
    with testing.poisoned_memory():
        return fmms.sample(hidden, weight, seed=0, impl="triton", return_logits=True, **options).logits


def triple(device, *entries):
    """(rows, tokens, values) of (row, token, value) entries."""
    rows, tokens, values = zip(*entries, strict=True) if entries else ((), (), ())
    index = (torch.tensor(x, dtype=torch.int64, device=device) for x in (rows, tokens))
    return *index, torch.tensor(values, dtype=torch.float32, device=device)


def random_triple(device, count, seed=0, low=1, rows=H, vocab=V):
    """Entries with repetitions and padding; values in quarters from `low`."""
    g = torch.Generator().manual_seed(seed)
    row, token = torch.randint(-1, rows, (count,), generator=g), torch.randint(-1, vocab, (count,), generator=g)
    values = torch.randint(low, 9, (count,), generator=g) / 4
    return row.to(device), token.to(device), values.to(device)


def counted(edit):
    """The entries that are no padding."""
    rows, tokens, values = edit
    real = (rows >= 0) & (tokens >= 0)
    return rows[real], tokens[real], values[real]


WAYS = ["fused", "top_k", "top_p", "edited"]
"""The ways that a call takes: all in one kernel; stored logits, to cut or to edit them."""


def way(name, device):
    """Arguments that send a call that way and leave at least four tokens of each row."""
    edit = triple(device, (0, 2, 1.0), (2, 9, 0.5))
    return {"fused": {}, "top_k": dict(top_k=4), "top_p": dict(top_p=0.99), "edited": dict(presence_penalty=edit)}[name]


# -------------------------------------------------------------------------------------------------------- the formulas


def test_logit_bias(device):
    hidden, weight, logits = problem(device)
    edit = random_triple(device, 500, low=-8)
    rows, tokens, values = counted(edit)
    want = logits.index_put((rows, tokens), values, accumulate=True)
    assert torch.equal(logits_of(hidden, weight, logit_bias=edit), want)


def test_repetition_penalty(device):
    hidden, weight, logits = problem(device)
    edit = random_triple(device, 500)
    want = logits.double()
    for row, token, value in zip(*(part.tolist() for part in counted(edit)), strict=True):
        want[row, token] = want[row, token] / value if want[row, token] > 0 else want[row, token] * value
    torch.testing.assert_close(logits_of(hidden, weight, repetition_penalty=edit), want.float(), rtol=2e-7, atol=0)


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
def test_frequency_and_presence_penalty(device, name):
    hidden, weight, logits = problem(device)
    edit = random_triple(device, 500, low=-8)
    rows, tokens, values = counted(edit)
    want = logits.index_put((rows, tokens), -values, accumulate=True)
    assert torch.equal(logits_of(hidden, weight, **{name: edit}), want)


def test_all_edits_in_their_order(device):
    """Bias, repetition, frequency, presence, and only then the mask; softcap, scale and the bias of all rows before."""
    hidden, weight, logits = problem(device)
    bias, allowed = torch.arange(V, device=device) / 64, torch.arange(H * V, device=device).view(H, V) % 3 > 0
    edits = [counted(random_triple(device, 200, seed)) for seed in range(4)]
    x = (0.5 * logits + bias).double().index_put(edits[0][:2], edits[0][2].double(), accumulate=True)
    r = torch.ones(H, V, dtype=torch.float64, device=device)
    for row, token, value in zip(*(part.tolist() for part in edits[1]), strict=True):
        r[row, token] *= value
    x = torch.where(x > 0, x / r, x * r)
    for rows, tokens, values in edits[2:]:
        x = x.index_put((rows, tokens), -values.double(), accumulate=True)
    names = ("logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty")
    got = logits_of(
        hidden, weight, logit_scale=0.5, bias=bias, allowed_mask=fmms.pack_mask(allowed),
        **dict(zip(names, edits, strict=True)),
    )  # fmt: skip
    torch.testing.assert_close(got, torch.where(allowed, x, -INF).float(), rtol=2e-7, atol=1e-7)


def test_edits_by_hand(device):
    checks.check_edits(device)


@pytest.mark.parametrize("scheme", ["group", "token"])
def test_every_result_follows_the_edits(device, scheme):
    hidden, weight, _ = problem(device)
    options = dict(seed=2, num_samples=2, noise_scheme=scheme, logit_bias=random_triple(device, 300, low=-8))
    options["repetition_penalty"] = random_triple(device, 300, 1)
    temperature = torch.tensor([1.0, 0.0, 0.5, 2.0], device=device)
    for filters in ({}, dict(top_k=torch.tensor([5, 0, 40, 1], device=device), top_p=0.9)):
        _, differ = checks.compare_with_reference(
            hidden, weight, temperature, **options, **filters, **checks.EVERYTHING
        )
        assert differ == 0


def test_history_of_a_generation(device):
    """Penalties from token ids: what was drawn counts from the next step on."""
    hidden, weight, logits = problem(device)
    prompt = torch.tensor([[1, 2, 2, -1], [5, 5, 5, 5], [-1, -1, -1, -1], [299, 0, 7, 7]], device=device)
    output = torch.full((H, 3), -1, dtype=torch.int64, device=device)
    for step in range(3):
        edits = fmms.history_edits(output, prompt, 1.5, 0.25, 0.5)
        out = fmms.sample(hidden, weight, 0.0, seed=0, impl="triton", return_logits=True, **edits)
        for row in range(H):
            drawn = [token for token in output[row].tolist() if token >= 0]
            seen = {*drawn, *prompt[row].tolist()} - {-1}
            for token in range(V):
                x = logits[row, token].item()
                if token in seen:
                    x = x / 1.5 if x > 0 else x * 1.5
                x -= 0.25 * drawn.count(token) + 0.5 * (token in drawn)
                assert abs(out.logits[row, token].item() - x) < 1e-6
        output[:, step] = out.ids


# ------------------------------------------------------------------------------------------------- entries of any sort


def test_entries_for_the_same_logit_add_up_in_any_order(device):
    hidden, weight, logits = problem(device)
    entries = [(1, 7, 0.5)] * 40 + [(1, 8, -0.25)] * 3 + [(0, 7, 1.0)]
    want = logits.clone()
    want[1, 7], want[1, 8], want[0, 7] = want[1, 7] + 20, want[1, 8] - 0.75, want[0, 7] + 1
    for order in (entries, entries[::-1], entries[20:] + entries[:20]):
        assert torch.equal(logits_of(hidden, weight, logit_bias=triple(device, *order)), want)


def test_no_entries_and_padding_change_nothing(device):
    hidden, weight, logits = problem(device)
    want = fmms.sample(hidden, weight, seed=0, impl="triton").ids
    padding = [(-1, 5, NAN), (0, -1, NAN), (H, 5, 9.0), (-7, 5, 9.0), (2**40, 5, 9.0), (-1, -1, 0.0)]
    for entries in ([], padding):
        edits = {name: triple(device, *entries) for name in ("logit_bias", "repetition_penalty", "presence_penalty")}
        out = fmms.sample(hidden, weight, seed=0, impl="triton", return_logits=True, **edits)
        assert out.valid.all() and torch.equal(out.logits, logits) and torch.equal(out.ids, want)


@pytest.mark.parametrize(
    "name, entry",
    [
        ("logit_bias", (2, V, 1.0)),
        ("presence_penalty", (2, -2, 1.0)),
        ("frequency_penalty", (2, 2**40, 0.0)),
        ("logit_bias", (2, 5, NAN)),
        ("logit_bias", (2, 5, INF)),
        ("presence_penalty", (2, 5, -INF)),
        ("repetition_penalty", (2, 5, 0.0)),
        ("repetition_penalty", (2, 5, -1.0)),
        ("repetition_penalty", (2, 5, NAN)),
        ("repetition_penalty", (2, 5, INF)),
    ],
)
def test_a_bad_entry_makes_exactly_its_row_invalid(device, name, entry):
    hidden, weight, _ = problem(device)
    clean = fmms.sample(hidden, weight, seed=0, impl="triton", return_logprobs=True)
    for filters in ({}, dict(top_k=torch.zeros(H, dtype=torch.int64, device=device))):
        edit = triple(device, (0, -1, 1.0), entry, (-1, 3, 1.0))
        out = fmms.sample(
            hidden, weight, seed=0, impl="triton", return_logprobs=True, return_entropy=True, top_logprobs=2,
            **{name: edit}, **filters,
        )  # fmt: skip
        assert out.valid.tolist() == [True, True, False, True]
        assert out.ids[2] == -1 and (out.top_ids[2] == -1).all()
        for value in (out.logprobs, out.lse, out.max_logit, out.entropy, out.top_logprobs):
            assert value[2].isnan().all()
        for row in (0, 1, 3):
            assert out.ids[row] == clean.ids[row]
            torch.testing.assert_close(out.logprobs[row], clean.logprobs[row], rtol=2e-6, atol=2e-6)


def test_bias_of_minus_infinity_forbids(device):
    """Whichever token the noise insists on; so does one beside a penalty on the same token."""
    vocab = 20
    hidden, weight = torch.ones(2, 1, device=device), torch.linspace(-1, 1, vocab, device=device)[:, None]
    edit = triple(device, (0, 19, -INF), (0, 3, -INF), (0, 3, 5.0), (1, 0, -INF))
    for others in ({}, dict(repetition_penalty=triple(device, (0, 3, 0.5), (1, 0, 2.0))), dict(top_k=18)):
        out = fmms.sample(
            hidden, weight, seed=0, noise=checks.forced_draws(vocab, device, 2), noise_scheme="token",
            num_samples=vocab, logit_bias=edit, impl="triton", **others,
        )  # fmt: skip
        assert out.valid.all()
        assert not torch.isin(out.ids[0], torch.tensor([3, 19], device=device)).any() and (out.ids[1] != 0).all()
    assert not fmms.sample(
        hidden, weight, seed=0, impl="triton", logit_bias=triple(device, *((1, v, -INF) for v in range(vocab)))
    ).valid[1]


def test_many_entries(device):
    """As many as prompts of a thousand tokens make, one logit with thousands of them among others."""
    count = 20_000
    hidden, weight, logits = problem(device)
    g = torch.Generator().manual_seed(1)
    rows = torch.randint(0, H, (count,), generator=g).to(device)
    tokens = torch.randint(0, V, (count,), generator=g).to(device)
    tokens[: count // 10], rows[: count // 10] = 17, 2
    values = (torch.randint(-4, 5, (count,), generator=g) / 8).to(device)
    want = logits.double().index_put((rows, tokens), values.double(), accumulate=True).float()
    assert torch.equal(logits_of(hidden, weight, logit_bias=(rows, tokens, values)), want)


@pytest.mark.gpu
def test_a_million_entries():
    device = torch.device("cuda")
    hidden, weight = testing.integer_problem(256, 128_000, 64, torch.bfloat16, device)
    edit = random_triple(device, 1_000_000, rows=256, vocab=128_000)
    rows, tokens, values = counted(edit)
    want = logits_of(hidden, weight).index_put((rows, tokens), -values, accumulate=True)
    assert torch.equal(logits_of(hidden, weight, frequency_penalty=edit), want)


def test_values_and_ids_of_other_dtypes(device):
    hidden, weight, logits = problem(device)
    rows, tokens, values = triple(device, (0, 3, 1.5), (1, 299, -2.0))
    want = logits.index_put((rows, tokens), values, accumulate=True)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        edit = rows.int(), tokens.int(), values.to(dtype)
        assert torch.equal(logits_of(hidden, weight, logit_bias=edit), want)


def test_edits_beyond_vocab_size(device):
    """Rows of weight past vocab_size are no tokens: an edit there is out of range, a mask or a bias there ignored."""
    hidden, weight, logits = problem(device)
    size = 290
    edit = triple(device, (1, size - 1, 3.0), (3, size, 3.0), (0, -1, 1.0))
    allowed = torch.ones(H, V, dtype=torch.bool, device=device)
    allowed[2, :size] = False  # what is left of row 2 lies beyond
    out = fmms.sample(
        hidden, weight, seed=0, vocab_size=size, logit_bias=edit, allowed_mask=fmms.pack_mask(allowed),
        bias=torch.zeros(V, device=device), return_logits=True, impl="triton",
    )  # fmt: skip
    assert out.valid.tolist() == [True, True, False, False]
    want = logits[:, :size].clone()
    want[1, size - 1] += 3.0
    assert torch.equal(out.logits[:2], want[:2])
    banned = torch.tensor([-1, size - 1, size, 5], device=device)
    assert fmms.sample(hidden, weight, seed=0, vocab_size=size, banned_ids=banned, impl="triton").valid.tolist() == [
        True, True, False, True,
    ]  # fmt: skip


# --------------------------------------------------------------------------------------------------- masks, banned ids


def test_masks(device):
    checks.check_mask(device)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 300, 1025])
def test_mask_of_any_length(device, vocab):
    """Bits past the vocabulary and words past the last are ignored, also those of a view into a larger buffer."""
    g = torch.Generator().manual_seed(vocab)
    allowed = torch.rand(3, vocab, generator=g) < 0.5
    allowed[:, 0] = True
    packed = fmms.pack_mask(allowed)
    buffer = torch.full((3, packed.shape[1] + 5), -1, dtype=torch.int32)
    buffer[:, : packed.shape[1]] = packed
    if vocab % 32:
        buffer[:, packed.shape[1] - 1] |= -1 << (vocab % 32)
    buffer = buffer.to(device)
    hidden, weight = testing.integer_problem(3, vocab, 8, device=device)
    want = torch.where(allowed.to(device), hidden @ weight.T, -INF)
    for mask in (packed.to(device), buffer, buffer[:, : packed.shape[1]]):
        assert torch.equal(logits_of(hidden, weight, allowed_mask=mask), want)
        assert torch.equal(logits_of(hidden, weight, allowed_mask=mask, top_k=3), want)


@pytest.mark.parametrize("name", WAYS)
def test_a_fully_masked_row_is_invalid_and_leaves_its_neighbours_alone(device, name):
    hidden, weight, _ = problem(device)
    allowed = torch.rand(H, V, generator=torch.Generator().manual_seed(0)).to(device) < 0.5
    options = dict(seed=0, impl="triton", return_logprobs=True, return_final_logprobs=True, **way(name, device))
    clean = fmms.sample(hidden, weight, allowed_mask=fmms.pack_mask(allowed), **options)
    allowed[1] = False
    out = fmms.sample(hidden, weight, allowed_mask=fmms.pack_mask(allowed), **options)
    assert out.valid.tolist() == [True, False, True, True] and out.ids[1] == -1 and out.lse[1].isnan()
    for row in (0, 2, 3):
        assert out.ids[row] == clean.ids[row] and out.final_logprobs[row] == clean.final_logprobs[row]


@pytest.mark.parametrize("name", WAYS)
def test_a_broken_logit_under_the_mask_is_harmless(device, name):
    """NaN and infinities from the weight: the row is valid if the mask, or the banned id, hides them all."""
    hidden, weight, _ = problem(device)
    hidden = hidden.abs() + 1
    weight[7], weight[8], weight[200] = NAN, INF, -INF
    allowed = torch.ones(H, V, dtype=torch.bool, device=device)
    allowed[:, [7, 8]] = False
    allowed[1, 7] = True
    options = dict(seed=0, impl="triton", **way(name, device))
    if name == "edited":
        options["frequency_penalty"] = triple(device, (0, 7, 1.0), (2, 8, NAN))
    out = fmms.sample(hidden, weight, allowed_mask=fmms.pack_mask(allowed), return_raw_logprobs=True, **options)
    assert out.valid.tolist() == [True, False, True, True] and (out.ids[[0, 2, 3]] >= 0).all()
    assert out.raw_logprobs.isnan().all()  # the model's own logits are no distribution
    weight[8] = 0.0
    options.pop("frequency_penalty", None)
    out = fmms.sample(hidden, weight, banned_ids=torch.tensor([7, 7, -1, 8], device=device), **options)
    assert out.valid.tolist() == [True, True, False, False]


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_banned_token_is_never_drawn(device, temperature, name):
    """Neither if it is the likeliest, or edited to be, nor if the noise insists on it; -1 bans none."""
    vocab = 20
    hidden, weight = torch.ones(3, 1, device=device), torch.zeros(vocab, 1, device=device)
    weight[5] = 10.0
    options = way(name, device)
    if name == "edited":
        options["logit_bias"] = triple(device, (0, 5, 100.0), (1, 6, 1.0))
    out = fmms.sample(
        hidden, weight, temperature, seed=0, noise=checks.forced_draws(vocab, device, 3), noise_scheme="token",
        num_samples=vocab, banned_ids=torch.tensor([5, -1, 0], device=device), impl="triton", **options,
    )  # fmt: skip
    assert out.valid.all()
    assert (out.ids[0] != 5).all() and (out.ids[1] == 5).any() and (out.ids[2] != 0).all()


def test_a_banned_id_out_of_range_makes_exactly_its_row_invalid(device):
    hidden, weight, _ = problem(device)
    clean = fmms.sample(hidden, weight, seed=0, impl="triton").ids
    for filters in ({}, dict(top_p=torch.ones(H, device=device))):
        for dtype in (torch.int64, torch.int32):
            banned = torch.tensor([-1, V, -2, -1], dtype=dtype, device=device)
            out = fmms.sample(hidden, weight, seed=0, banned_ids=banned, impl="triton", **filters)
            assert out.valid.tolist() == [True, False, False, True]
            assert out.ids.tolist() == [clean[0].item(), -1, -1, clean[3].item()]


def test_rows_with_and_without_edits_get_what_they_get_alone(device):
    """Edits send the whole batch another way; rows they don't touch draw what they draw without them."""
    hidden, weight, _ = problem(device)
    seeds = noise.row_seeds(9, H, device)
    temperature = torch.tensor([1.0, 0.0, 0.7, 1.3], device=device)
    edit = triple(device, (0, 3, 2.0), (3, 5, -1.0), (3, 6, 4.0))
    options = dict(num_samples=2, impl="triton", return_logprobs=True, return_entropy=True)
    together = fmms.sample(hidden, weight, temperature, seed=seeds, logit_bias=edit, **options)
    for row in range(H):
        at = slice(row, row + 1)
        own = [(0, token, value) for r, token, value in zip(*(x.tolist() for x in edit), strict=True) if r == row]
        alone = fmms.sample(
            hidden[at], weight, temperature[at], seed=seeds[at], logit_bias=triple(device, *own) if own else None,
            **options,
        )  # fmt: skip
        assert torch.equal(together.ids[at], alone.ids)
        for name in ("logprobs", "entropy", "lse"):
            a, b = getattr(together, name)[at], getattr(alone, name)
            torch.testing.assert_close(a, b, rtol=2e-6, atol=5e-6)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_factor_that_underflows_leaves_minus_infinity(device, impl):
    """-inf times a product of factors that has become 0 would be NaN and spoil the row."""
    many = torch.zeros(20, dtype=torch.int64, device=device)
    tiny = torch.full((20,), 1e-30, device=device)
    bias = torch.tensor([-torch.inf, 0.0, 0.0], device=device)
    weight = torch.tensor([[0.0], [1.0], [2.0]], device=device)
    out = fmms.sample(
        torch.ones(1, 1, device=device), weight, seed=1, bias=bias, repetition_penalty=(many, many, tiny),
        return_logits=True, impl=impl,
    )  # fmt: skip
    assert out.valid.all() and out.logits.tolist() == [[-torch.inf, 1.0, 2.0]]


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_an_invalid_edit_changes_no_logit(device, impl):
    edit = torch.tensor([0], device=device), torch.tensor([1], device=device), torch.tensor([-1.0], device=device)
    weight = torch.tensor([[1.0], [2.0]], device=device)
    out = fmms.sample(
        torch.ones(1, 1, device=device), weight, seed=0, repetition_penalty=edit, return_logits=True, impl=impl
    )
    assert not out.valid.any() and out.logits.tolist() == [[1.0, 2.0]]
