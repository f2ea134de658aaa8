"""Edits, masks, truncation and histories against hand-computed cases, plain Python, and transformers."""

import math

import pytest
import torch

from fmms import controls, noise, reference, testing
from fmms.request import FILTER_ORDERS, FREQUENCY, LOGIT_BIAS, PRESENCE, REPETITION

INF, NAN = math.inf, math.nan
MAX = torch.finfo(torch.float32).max


def edit(logits, *entries):
    """apply_edits of (row, token, value, kind) entries."""
    rows, tokens, values, kinds = zip(*entries, strict=True) if entries else ((), (), (), ())
    columns = (torch.tensor(column, dtype=torch.int64) for column in (rows, tokens, kinds))
    rows, tokens, kinds = columns
    return controls.apply_edits(
        torch.tensor(logits, dtype=torch.float32), rows, tokens, torch.tensor(values, dtype=torch.float32), kinds
    )


def ids_of(allowed):
    """The allowed tokens of each row as sorted lists."""
    return [row.nonzero()[:, 0].tolist() for row in allowed]


def logs(*weights):
    """One row of fp32 logits with these weights."""
    return torch.tensor([weights], dtype=torch.float64).log().float()


# ---------------------------------------------------------------------------------------------------------------- edits


def test_edits_follow_the_formula():
    got, bad = edit(
        [[2.0, -2.0, 0.0, 1.0], [4.0, -1.0, 3.0, -0.5]],
        (0, 0, 2.0, REPETITION),  # 2 / 2
        (0, 1, 2.0, REPETITION),  # -2 * 2
        (0, 2, 2.0, REPETITION),  # 0
        (1, 0, 0.25, PRESENCE),
        (1, 0, 4.0, REPETITION),
        (1, 0, 0.5, FREQUENCY),
        (1, 0, -8.0, LOGIT_BIAS),  # (4 - 8 + 12) / (4 * 0.5) - 0.5 - 1 - 0.25
        (1, 0, 1.0, FREQUENCY),
        (1, 0, 12.0, LOGIT_BIAS),
        (1, 0, 0.5, REPETITION),
        (1, 1, 3.0, LOGIT_BIAS),  # the bias comes first, so the penalty divides: (-1 + 3) / 4
        (1, 1, 4.0, REPETITION),
    )
    assert got.tolist() == [[1.0, -4.0, 0.0, 1.0], [2.25, 0.5, 3.0, -0.5]]
    assert not bad.any()


def test_edits_round_once():
    small = 2.0**-24
    got, _ = edit([[1.0]], (0, 0, small, LOGIT_BIAS), (0, 0, small, LOGIT_BIAS))
    assert got.item() == 1 + 2 * small  # either alone would be lost
    got, _ = edit([[1.0]], (0, 0, 3.0, REPETITION), (0, 0, 1 / 3, REPETITION))
    assert got.item() == 1.0


def test_logits_without_an_edit_keep_their_bits():
    logits = torch.tensor([[-0.0, NAN, -INF, INF, 1e-45, 7.0]])
    for entries in ([], [(0, 5, 1.0, LOGIT_BIAS)], [(0, -1, NAN, REPETITION)], [(-1, 0, 0.0, REPETITION)]):
        got, bad = edit(logits.tolist(), *entries)
        assert torch.equal(got[0, :5].view(torch.int32), logits[0, :5].view(torch.int32)) and not bad.any()


def test_edits_of_minus_infinity():
    got, bad = edit(
        [[-INF, -INF, 1.0]],
        (0, 0, 2.0, REPETITION),
        *[(0, 1, 1e-30, REPETITION)] * 20,  # the product is 0 in fp64
        (0, 2, -INF, LOGIT_BIAS),
        (0, 2, 2.0, REPETITION),
        (0, 2, 1.0, FREQUENCY),
    )
    assert got.tolist() == [[-INF] * 3] and not bad.any()


@pytest.mark.parametrize(
    "entry, wrong",
    [
        ((0, 2, 1.0, LOGIT_BIAS), True),
        ((0, -2, 1.0, PRESENCE), True),
        ((0, -1, 1.0, PRESENCE), False),
        ((-1, 9, 1.0, PRESENCE), False),
        ((2, 9, 1.0, PRESENCE), False),
        ((-5, 0, 1.0, PRESENCE), False),
        ((0, 0, 0.0, REPETITION), True),
        ((0, 0, -1.0, REPETITION), True),
        ((0, 0, NAN, REPETITION), True),
        ((0, 0, INF, REPETITION), True),
        ((0, -1, NAN, REPETITION), False),
        ((0, 0, 1.0, 4), True),
    ],
)
def test_padding_and_bad_edits_change_no_logit(entry, wrong):
    got, bad = edit([[1.0, 2.0], [3.0, 4.0]], entry)
    assert got.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert bad.tolist() == [wrong, False]


def test_edits_equal_a_plain_loop():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(5, 40, generator=generator)
    n = 900
    rows, tokens = torch.randint(0, 5, (n,), generator=generator), torch.randint(0, 40, (n,), generator=generator)
    kinds = torch.randint(0, 4, (n,), generator=generator)
    values = torch.randint(1, 9, (n,), generator=generator) / 4
    got, bad = controls.apply_edits(logits, rows, tokens, values, kinds)
    for row in range(5):
        for token in range(40):
            mine = [(k, v) for r, t, v, k in zip(*map(torch.Tensor.tolist, (rows, tokens, values, kinds)), strict=True)
                    if (r, t) == (row, token)]  # fmt: skip
            sums = [sum(v for k, v in mine if k == kind) for kind in range(4)]
            x = logits[row, token].item() + sums[LOGIT_BIAS]
            r = math.prod(v for k, v in mine if k == REPETITION)
            x = (x / r if x > 0 else x * r) - sums[FREQUENCY] - sums[PRESENCE]
            assert got[row, token].item() == torch.tensor(x).item()
    assert not bad.any()


# ---------------------------------------------------------------------------------------------------------------- masks


def test_masks_by_hand():
    mask = torch.tensor([[0b101, 1], [-(2**31), 0xFFFFFFE]], dtype=torch.int32)
    assert ids_of(controls.allowed_by_mask(mask, 33)) == [[0, 2, 32], [31]]
    assert controls.pack_mask(controls.allowed_by_mask(mask, 33)).tolist() == [[0b101, 1], [-(2**31), 0]]


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100, 257])
def test_masks_round_trip(vocab):
    allowed = torch.rand(7, vocab, generator=torch.Generator().manual_seed(vocab)) < 0.5
    mask = controls.pack_mask(allowed)
    assert mask.shape == (7, -(-vocab // 32)) and mask.dtype == torch.int32
    assert torch.equal(controls.allowed_by_mask(mask, vocab), allowed)
    wide = torch.nn.functional.pad(mask, (0, 3), value=-1)[:, : mask.shape[1] + 2]
    assert torch.equal(controls.allowed_by_mask(wide, vocab), allowed)


def test_mask_logits_hides_whatever_was_there():
    logits = torch.tensor([[NAN, 1.0, INF], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    mask = torch.tensor([[0b010], [0b111], [0b000], [0b011]], dtype=torch.int32)
    got, bad = controls.mask_logits(logits, mask, torch.tensor([-1, 0, 3, -2]))
    assert got.tolist() == [[-INF, 1.0, -INF], [-INF, 2.0, 3.0], [-INF] * 3, [1.0, 2.0, -INF]]
    assert bad.tolist() == [False, False, True, True]
    assert controls.mask_logits(logits[1:])[0].tolist() == logits[1:].tolist()


# ----------------------------------------------------------------------------------------------------------- truncation

# weights 8 6 4 2 1 1 of sum 22, at the ids 3 0 5 1 2 4
WEIGHTS = logs(6, 2, 1, 8, 1, 4)
ORDER = [3, 0, 5, 1, 2, 4]


@pytest.mark.parametrize(
    "options, count",
    [
        (dict(), 6),
        (dict(top_k=1), 1),
        (dict(top_k=3), 3),
        (dict(top_k=5), 5),  # the lower id of the two of weight 1
        (dict(top_k=0), 6),
        (dict(top_k=-1), 6),
        (dict(top_k=6), 6),
        (dict(top_k=10**12), 6),
        (dict(top_k=-2), 0),
        (dict(top_p=0.0), 1),
        (dict(top_p=8 / 22 - 0.01), 1),
        (dict(top_p=8 / 22 + 0.01), 2),
        (dict(top_p=14 / 22 + 0.01), 3),
        (dict(top_p=20.5 / 22), 5),
        (dict(top_p=0.9999999), 6),
        (dict(top_p=1.0), 6),
        (dict(top_p=1.1), 0),
        (dict(top_p=-0.1), 0),
        (dict(top_p=NAN), 0),
        (dict(min_p=0.0), 6),
        (dict(min_p=0.51), 2),
        (dict(min_p=0.49), 3),
        (dict(min_p=0.124), 6),
        (dict(min_p=1.0), 1),
        (dict(min_p=NAN), 0),
        (dict(min_p=2.0), 0),
        (dict(top_k=4, top_p=0.8, min_p=0.6), 2),  # 3 tokens for top-p (20 * 0.8 = 16)
        (dict(top_k=4, top_p=0.8, min_p=0.2), 3),
        (dict(top_k=2, top_p=0.8, min_p=0.2), 2),
    ],
)
def test_allowed_set_by_hand(options, count):
    allowed = controls.allowed_set(WEIGHTS, torch.ones(1), **options)
    assert ids_of(allowed) == [sorted(ORDER[:count])]
    per_row = {k: torch.tensor([v] * 3) for k, v in options.items()}
    assert ids_of(controls.allowed_set(WEIGHTS.expand(3, 6), torch.ones(3), **per_row)) == [sorted(ORDER[:count])] * 3


@pytest.mark.parametrize(
    "options, counts",
    [
        # M = 18, 22, 18 for k = 3: the mass wanted is 13.5, 16.5, 13.5
        (dict(top_k=3, top_p=0.75), dict(top_k_first=2, joint=3, min_p_first=2)),
        # min-p keeps 3 tokens; M = 22, 22, 18
        (dict(min_p=0.45, top_p=0.75), dict(top_k_first=3, joint=3, min_p_first=2)),
        # both: M = 20, 22, 18: 13.4, 14.74, 12.06
        (dict(min_p=0.45, top_k=4, top_p=0.67), dict(top_k_first=2, joint=3, min_p_first=2)),
        # 15, 16.5, 13.5
        (dict(min_p=0.45, top_k=4, top_p=0.75), dict(top_k_first=3, joint=3, min_p_first=2)),
        # k the shorter: M = 14, 22, 14: 7.7, 12.1, 7.7
        (dict(min_p=0.45, top_k=2, top_p=0.55), dict(top_k_first=1, joint=2, min_p_first=1)),
    ],
)
def test_filter_orders_by_hand(options, counts):
    for order in FILTER_ORDERS:
        allowed = controls.allowed_set(WEIGHTS, torch.ones(1), filter_order=order, **options)
        assert ids_of(allowed) == [sorted(ORDER[: counts[order]])], order
    with pytest.raises(ValueError, match="filter_order"):
        controls.allowed_set(WEIGHTS, torch.ones(1), filter_order="top_p_first")


def test_temperature_of_the_weights():
    """Weights squared at T = 1/2 and square roots at T = 2; greedy rows as at T = 1."""
    logits = logs(4, 1).expand(5, 2)
    temperature = torch.tensor([0.5, 1.0, 2.0, 0.0, 1e-40])
    # the first token's share: 16/17, 4/5, 2/3, 4/5, 1
    assert controls.allowed_set(logits, temperature, top_p=0.9).sum(-1).tolist() == [1, 2, 2, 2, 1]
    assert controls.allowed_set(logits, temperature, top_p=0.7).sum(-1).tolist() == [1, 1, 2, 1, 1]
    assert controls.allowed_set(logits, temperature, min_p=0.2).sum(-1).tolist() == [1, 2, 2, 2, 1]
    assert controls.allowed_set(logits, 2.0, min_p=0.2).all() and controls.allowed_set(logits, INF, min_p=0.99).all()


def test_equal_logits_and_ties():
    equal = torch.full((1, 8), 2.5)
    assert ids_of(controls.allowed_set(equal, torch.ones(1), top_k=3)) == [[0, 1, 2]]
    assert ids_of(controls.allowed_set(equal, torch.ones(1), top_p=0.5)) == [[0, 1, 2, 3]]  # 4 >= 4
    assert ids_of(controls.allowed_set(equal, torch.ones(1), top_p=0.0)) == [[0]]
    assert controls.allowed_set(equal, torch.ones(1), min_p=1.0).all()
    zeros = torch.tensor([[-0.0, 0.0, -1.0, 0.0]])  # the two zeros are equal
    assert ids_of(controls.allowed_set(zeros, torch.ones(1), top_k=1)) == [[0]]
    assert ids_of(controls.allowed_set(zeros, torch.ones(1), min_p=1.0)) == [[0, 1, 3]]


def test_masked_tokens_and_broken_rows():
    logits = torch.tensor([[-INF, 1.0, -INF, 1.0]])
    assert ids_of(controls.allowed_set(logits, torch.ones(1), top_p=0.9999)) == [[1, 3]]
    assert ids_of(controls.allowed_set(logits, torch.ones(1), min_p=1e-30)) == [[1, 3]]
    assert ids_of(controls.allowed_set(logits, torch.ones(1), top_k=1)) == [[1]]
    broken = torch.tensor([[NAN, 1.0], [INF, 1.0], [-INF, -INF], [1.0, 2.0], [1.0, 2.0]])
    temperature = torch.tensor([1.0, 1.0, 1.0, -1.0, NAN])
    for order in FILTER_ORDERS:
        controls.allowed_set(broken, temperature, 1, 0.5, 0.5, order)
    controls.single_softmax_filter(broken, temperature, 1, 0.5, 0.5)


def test_top_k_of_one_is_greedy():
    logits = torch.randint(0, 4, (200, 50), generator=torch.Generator().manual_seed(3)).float()
    allowed = controls.allowed_set(logits, torch.ones(200), top_k=1)
    assert torch.equal(allowed.int().argmax(-1), reference.first_argmax(logits)) and (allowed.sum(-1) == 1).all()


def allowed_by_definition(row, t, k, p, m, order):
    """The definition in plain Python for one row of floats."""
    vocab = len(row)
    ranked = sorted(range(vocab), key=lambda i: (-row[i], i))
    top = row[ranked[0]]
    weight = [math.exp((row[i] - top) / t) for i in ranked]
    by_k = vocab if k <= 0 or k >= vocab else k
    by_m = vocab if m == 0 else sum(row[i] >= top + t * math.log(m) for i in ranked)
    base = {"top_k_first": by_k, "joint": vocab, "min_p_first": min(by_k, by_m)}[order]
    mass, total, by_p = [], 0.0, vocab
    for w in weight:
        total += w
        mass.append(total)
    if p < 1:
        by_p = next(n for n in range(1, vocab + 1) if mass[n - 1] >= p * mass[base - 1])
    return sorted(ranked[: min(by_k, by_m, by_p)])


def tiny_rows(count, vocab=12, seed=4):
    """Random rows with ties and -inf, and controls per row: logits, T, k, p, m."""
    generator = torch.Generator().manual_seed(seed)

    def pick(values):
        return torch.tensor(values)[torch.randint(0, len(values), (count,), generator=generator)]

    logits = torch.randint(-6, 7, (count, vocab), generator=generator) / pick([1.0, 2.0, 4.0])[:, None]
    logits = logits.masked_fill(torch.rand(count, vocab, generator=generator) < 0.1, -INF)
    logits[:, 0] = logits[:, 0].clamp(min=-9)
    return (
        logits,
        pick([0.5, 1.0, 1.7]),
        pick([-1, 0, 1, 2, 3, 5, 8, vocab, 99]),
        pick([0.0, 0.1, 0.5, 0.8, 0.95, 0.9999999, 1.0]),
        pick([0.0, 0.01, 0.1, 0.3, 1.0]),
    )


@pytest.mark.parametrize("order", FILTER_ORDERS)
def test_allowed_set_equals_the_definition(order):
    rows = tiny_rows(400)
    got = ids_of(controls.allowed_set(*rows, order))
    margin = testing.filter_margin(*rows, order).tolist()
    near = 0
    for i, values in enumerate(zip(*(x.tolist() for x in rows), strict=True)):
        if margin[i] < 1e-12:  # an exact half of the mass, say: rounding decides
            near += 1
        else:
            assert got[i] == allowed_by_definition(*values, order), values
    assert near < 40


def test_single_softmax_filter_keeps_the_same_set():
    logits, temperature, k, p, m = tiny_rows(400, seed=5)
    same = controls.single_softmax_filter(logits, temperature, k, p, m)
    want = controls.filter_logits(logits, temperature, k, p, m)
    sure = testing.filter_margin(logits, temperature, k, p, m) > 1e-5
    assert torch.equal(same[sure], want[sure]) and sure.float().mean() > 0.7
    assert controls.single_softmax_filter(logits, temperature, -5)[0].tolist() == [-INF] * 12


def test_filter_margin_by_hand():
    one = torch.ones(1)

    def margin(*args):
        return testing.filter_margin(WEIGHTS, one, *args).item()

    def near(x):
        return pytest.approx(x, rel=1e-5)

    assert margin() == margin(3) == margin(None, 1.0, 0.0) == margin(2, 1.0) == INF
    # 15.4 of 22 lie between 14 and 18
    assert margin(None, 0.7) == near(1.4 / 22)
    assert margin(None, 17 / 22) == near(1 / 22)
    # 14.4 of 18, between 14 and 18; only the former can change the two tokens of k = 2 under joint
    assert margin(3, 0.8) == near(0.4 / 18)
    assert margin(2, 20 / 22, 0.0, "joint") == near(12 / 22)  # 8 would have to reach 20
    assert margin(1, 0.8) == INF and margin(None, 0.0) == near(8 / 22)
    # one token needs no decision to stay; the second weighs 0.75, the third 0.5
    assert margin(None, None, 0.51) == near(math.log(0.51 / 0.5))
    assert margin(None, None, 0.74) == near(math.log(0.75 / 0.74))
    assert margin(2, None, 0.51) == near(math.log(0.75 / 0.51))
    assert margin(None, None, 1.0) == near(math.log(1 / 0.75)) and margin(1, None, 0.9) == INF
    assert margin(None, 0.3, 0.51) == near((8 - 6.6) / 22)  # top-p leaves one token, min-p has no say


def test_filter_margin_bounds_what_errors_change():
    """Another temperature moves the weights and keeps the order. No set whose margin is over what it moves changes;
    among those below, some do."""
    generator = torch.Generator().manual_seed(6)
    logits = 2 * torch.randn(300, 60, generator=generator)
    temperature = torch.full((300,), 0.8)
    nats = (logits.amax(-1) - logits.amin(-1)) / 0.8
    for order in FILTER_ORDERS:
        for options in ((0, 0.9, 0.0, order), (0, 1.0, 0.02, order), (12, 0.8, 0.02, order)):
            margin = testing.filter_margin(logits, temperature, *options)
            want = controls.allowed_set(logits, temperature, *options)
            changed = torch.zeros(300, dtype=torch.bool)
            for error in (-1e-3, 1e-3):
                changed |= (controls.allowed_set(logits, temperature * (1 + error), *options) != want).any(-1)
            # a share of the mass moves by the errors of both its parts
            assert changed.any() and (margin[changed] < 2.1e-3 * nats[changed]).all()


def processors():
    return pytest.importorskip("transformers.generation.logits_process")


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_truncation_equals_transformers(temperature):
    """On continuous logits, filter by filter and top-k before top-p; ties apart, transformers keeps all of them."""
    lp = processors()
    logits = 3 * torch.randn(60, 300, generator=torch.Generator().manual_seed(7))
    t = torch.full((60,), temperature)
    scores = logits / temperature
    for k in (1, 5, 50, 300):
        want = lp.TopKLogitsWarper(k)(None, scores) > -INF
        assert torch.equal(controls.allowed_set(logits, t, k), want)
    for p in (0.05, 0.5, 0.9, 0.99):
        sure = testing.filter_margin(logits, t, None, p) > 1e-5
        want = lp.TopPLogitsWarper(p)(None, scores) > -INF
        assert torch.equal(controls.allowed_set(logits, t, None, p)[sure], want[sure])
        sure = testing.filter_margin(logits, t, 20, p) > 1e-5
        want = lp.TopPLogitsWarper(p)(None, lp.TopKLogitsWarper(20)(None, scores)) > -INF
        assert torch.equal(controls.allowed_set(logits, t, 20, p)[sure], want[sure]) and sure.sum() > 50
    for m in (0.01, 0.1, 0.9):
        sure = testing.filter_margin(logits, t, None, None, m) > 1e-5
        want = lp.MinPLogitsWarper(m)(None, scores) > -INF
        assert torch.equal(controls.allowed_set(logits, t, None, None, m)[sure], want[sure]) and sure.sum() > 50


@pytest.mark.parametrize("scheme", ["group", "token"])
def test_draws_follow_the_truncated_distribution(scheme):
    """Chi-square over what is left, 20,000 draws; false-alarm rate 1e-6. Nothing else is drawn."""
    logits = 2 * torch.randn(1, 300, generator=torch.Generator().manual_seed(8))
    t = torch.tensor([0.9])
    allowed = controls.allowed_set(logits, t, 100, 0.95, 0.005)
    results = reference.sample_from_logits(
        logits, t, noise.row_seeds(1, 1), torch.zeros(1, dtype=torch.int64), 20_000, scheme, allowed=allowed
    )
    assert allowed[0, results[0][0]].all() and 10 < allowed.sum() < 100
    probabilities = torch.softmax(controls.filter_logits(logits, t, 100, 0.95, 0.005)[0].double() / 0.9, -1)
    kept = allowed[0]
    histogram = testing.draws_histogram(results[0][0], 300)
    assert testing.chi_square(histogram[kept], probabilities[kept]) > 1e-6


# -------------------------------------------------------------------------------------------------------------- history


def history(rows=6, length=15, vocab=9, seed=9):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (rows, length), generator=generator)
    return ids.masked_fill(torch.rand(rows, length, generator=generator) < 0.3, -1)


def apply_history(logits, edits):
    kinds = {"repetition_penalty": REPETITION, "frequency_penalty": FREQUENCY, "presence_penalty": PRESENCE}
    for name, (rows, tokens, values) in edits.items():
        logits, bad = controls.apply_edits(logits, rows, tokens, values, torch.full_like(rows, kinds[name]))
        assert not bad.any()
    return logits


@pytest.mark.parametrize("prompt_length", [None, 0, 4])
def test_history_edits_equal_a_plain_loop(prompt_length):
    output, prompt = history(), None if prompt_length is None else history(6, prompt_length, seed=10)
    repetition, frequency, presence = 1 + torch.arange(6) / 4, torch.arange(6) / 8 - 0.25, torch.arange(6) / 2
    edits = controls.history_edits(output, prompt, repetition, frequency, presence)
    assert [len(e[0]) for e in edits.values()] == [6 * (15 + (prompt_length or 0)), 90, 90]
    dtypes = (torch.int64, torch.int64, torch.float32)
    assert all(tuple(x.dtype for x in triple) == dtypes for triple in edits.values())
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(11))
    got = apply_history(logits, edits)
    for row in range(6):
        out = [i for i in output[row].tolist() if i >= 0]
        seen = out + ([] if prompt is None else [i for i in prompt[row].tolist() if i >= 0])
        for token in range(9):
            x, r = logits[row, token].item(), repetition[row].item()
            if token in seen:
                x = x / r if x > 0 else x * r
            x -= frequency[row].item() * out.count(token) + presence[row].item() * (token in out)
            assert got[row, token].item() == pytest.approx(x, abs=1e-6)


def test_repetition_equals_transformers():
    ids = history(4, 12, 50).clamp(min=0)
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(12))
    want = processors().RepetitionPenaltyLogitsProcessor(1.3)(ids, logits)
    got = apply_history(logits, controls.history_edits(ids[:, 5:], ids[:, :5], 1.3))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def test_history_edits_leave_out_what_is_neutral():
    ids = history()
    assert controls.history_edits(ids) == {}
    assert controls.history_edits(ids, ids, 1, 0, 0) == {}
    assert set(controls.history_edits(ids, presence_penalty=0.5)) == {"presence_penalty"}
    assert set(controls.history_edits(ids, repetition_penalty=torch.ones(6))) == {"repetition_penalty"}
    nothing = controls.history_edits(ids[:, :0], None, 1.2, 0.1, 0.1)
    assert all(len(x) == 0 for triple in nothing.values() for x in triple) and len(nothing) == 3


@pytest.mark.parametrize(
    "arguments, name",
    [
        (dict(output_ids=[[1]]), "output_ids"),
        (dict(output_ids=torch.zeros(3, dtype=torch.int64)), "output_ids"),
        (dict(output_ids=torch.zeros(6, 3)), "output_ids"),
        (dict(prompt_ids=torch.zeros(5, 3, dtype=torch.int64)), "prompt_ids"),
        (dict(prompt_ids=torch.zeros(6, 3, dtype=torch.int32)), "prompt_ids"),
        (dict(repetition_penalty=0.0), "repetition_penalty"),
        (dict(repetition_penalty=NAN), "repetition_penalty"),
        (dict(repetition_penalty="1"), "repetition_penalty"),
        (dict(repetition_penalty=torch.ones(5)), "repetition_penalty"),
        (dict(frequency_penalty=INF), "frequency_penalty"),
        (dict(frequency_penalty=torch.ones(6, dtype=torch.float64)), "frequency_penalty"),
        (dict(presence_penalty=True), "presence_penalty"),
    ],
)
def test_history_edits_name_the_wrong_argument(arguments, name):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        controls.history_edits(**{"output_ids": history(), **arguments})


@pytest.mark.parametrize("wrong", [torch.ones(40, dtype=torch.bool), torch.full((1, 40), 2), [[True]]])
def test_pack_mask_refuses_what_is_no_boolean_matrix(wrong):
    with pytest.raises(ValueError, match="allowed: expected a bool tensor"):
        controls.pack_mask(wrong)
