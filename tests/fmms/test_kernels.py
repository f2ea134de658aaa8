"""The portable Triton kernels against the reference: on the GPU if there is one, else in Triton's interpreter."""

import checks
import pytest
import torch

import fmms
from fmms import kernels, noise, reference, testing

SHAPES = [(1, 1, 1), (2, 17, 3), (3, 999, 40), (17, 1024, 64), (5, 4097, 33), (33, 130, 7), (2, 32001, 16)]


@pytest.mark.parametrize("scheme", ["group", "token"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_draws_equal_reference_on_exact_logits(device, shape, scheme):
    checks.check_equals_reference(device, *shape, scheme, temperatures=(1.0, 0.0, 0.6, 3.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ["group", "token"])
def test_half_precision_inputs(device, dtype, scheme):
    checks.check_equals_reference(device, 9, 777, 64, scheme, dtype=dtype, temperatures=(1.0, 0.5))


def test_several_samples_equal_reference_and_are_prefix_stable(device):
    checks.check_equals_reference(device, 4, 500, 24, "group", samples=7)
    hidden, weight = testing.integer_problem(4, 500, 24, device=device)
    many = fmms.sample(hidden, weight, seed=5, num_samples=7, impl="triton").ids
    one = fmms.sample(hidden, weight, seed=5, impl="triton").ids
    assert torch.equal(many[:, 0], one), "draw s of a row must not depend on how many draws were asked for"


@pytest.mark.parametrize("scheme", ["group", "token"])
def test_draws_in_several_passes_are_the_same(device, monkeypatch, scheme):
    hidden, weight = testing.integer_problem(4, 300, 16, device=device)
    units = 300 if scheme == "token" else 12
    gumbels = torch.randn(4, 7, units, device=device)
    injected = gumbels if scheme == "token" else (gumbels, torch.rand(4, 7, units, device=device))
    options = dict(seed=1, num_samples=7, noise_scheme=scheme, impl="triton", return_logprobs=True, return_logits=True)
    launch = kernels.launch_module(device)
    for given in (None, injected):
        whole = fmms.sample(hidden, weight, noise=given, **options)
        monkeypatch.setattr(launch, "TILE_RESULTS", 12)
        for a, b in zip(whole, fmms.sample(hidden, weight, noise=given, **options), strict=True):
            assert a is b is None or torch.equal(a, b)
        monkeypatch.undo()


@pytest.mark.parametrize("scheme", ["group", "token"])
def test_ids_do_not_depend_on_tile_sizes(device, scheme):
    checks.check_tile_invariance(device, scheme)


def test_ids_do_not_depend_on_slot_or_batch_size(device):
    hidden, weight = testing.integer_problem(20, 700, 32, device=device)
    seeds, positions = noise.row_seeds(3, 20, device), torch.arange(20, device=device)
    temperature = torch.linspace(0.0, 2.0, 20, device=device)
    together = fmms.sample(hidden, weight, temperature, seed=seeds, position=positions, impl="triton").ids
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0)).to(device)
    shuffled = fmms.sample(
        hidden[order], weight, temperature[order], seed=seeds[order], position=positions[order], impl="triton"
    ).ids
    assert torch.equal(together[order], shuffled)
    for row in (0, 7, 19):
        pick = slice(row, row + 1)
        alone = fmms.sample(
            hidden[pick], weight, temperature[pick], seed=seeds[pick], position=positions[pick], impl="triton"
        ).ids
        assert torch.equal(alone, together[pick])


def test_ragged_tail_tile(device):
    checks.check_ragged_tail(device)


def test_integer_seed_and_scalar_controls_match_tensors(device):
    hidden, weight = testing.integer_problem(6, 300, 16, device=device)
    for seed in (0, 1, -5, 2**63 + 11, 2**64 - 1):
        scalar = fmms.sample(hidden, weight, 0.8, seed=seed, position=2**40, impl="triton").ids
        rows = fmms.sample(
            hidden, weight, torch.full((6,), 0.8, device=device), seed=noise.row_seeds(seed, 6, device),
            position=torch.full((6,), 2**40, device=device), impl="triton",
        ).ids  # fmt: skip
        assert torch.equal(scalar, rows)


@pytest.mark.parametrize("scheme", ["group", "token"])
def test_injected_noise(device, scheme):
    rows, vocab, samples = 5, 333, 3
    hidden, weight = testing.integer_problem(rows, vocab, 20, device=device)
    units = vocab if scheme == "token" else noise.group_count(vocab)
    generator = torch.Generator().manual_seed(1)
    gumbels = -torch.log(-torch.log(torch.rand(rows, samples, units, generator=generator))).to(device)
    uniforms = torch.rand(rows, samples, units, generator=generator, dtype=torch.float64).to(device)
    injected = gumbels if scheme == "token" else (gumbels, uniforms)
    options = dict(noise=injected, num_samples=samples, noise_scheme=scheme, seed=0)
    got = fmms.sample(hidden, weight, impl="triton", **options).ids
    assert torch.equal(got, fmms.sample(hidden, weight, impl="torch", **options).ids)
    if scheme == "token":
        logits = hidden.double() @ weight.double().T
        assert torch.equal(got, (logits[:, None] + gumbels.double()).argmax(-1))


def test_equal_group_keys_go_to_the_lowest_group(device):
    hidden, weight = torch.ones(1, 16, device=device), torch.zeros(128, 16, device=device)
    gumbels = torch.tensor([[[-9.0, 0.0, 0.0, -9.0]]], device=device)
    uniforms = torch.tensor([[[0.5, 0.99, 0.01, 0.5]]], dtype=torch.float64, device=device)
    for impl in ("torch", "triton"):
        drawn = fmms.sample(hidden, weight, seed=0, noise=(gumbels, uniforms), impl=impl).ids.item()
        assert (drawn >> 1) & 3 == 1 and drawn > 100


def test_injected_words_equal_the_generators_own(device):
    """int64 uniforms carry all 64 bits: the generator's words, injected, draw what the generator draws."""
    hidden, weight = testing.integer_problem(4, 300, 16, device=device)
    seeds, zeros = noise.row_seeds(1, 4, device), torch.zeros(4, dtype=torch.int64, device=device)
    units = torch.arange(noise.group_count(300), device=device)
    w = noise.words(seeds, zeros, units, zeros[:1], noise.PURPOSE_GROUP)
    injected = (noise.gumbel(w[0], w[1]), w[2] | w[3] << 32)
    for impl in ("torch", "triton"):
        got = fmms.sample(hidden, weight, seed=0, noise=injected, impl=impl).ids
        assert torch.equal(got, fmms.sample(hidden, weight, seed=seeds, impl=impl).ids)


def test_softcap_scale_and_bias(device):
    hidden, weight = testing.integer_problem(7, 600, 16, device=device)
    bias = torch.linspace(-3, 3, 600, device=device)
    options = dict(seed=2, softcap=5.0, logit_scale=0.5, bias=bias, return_logits=True, return_logprobs=True)
    got = fmms.sample(hidden, weight, impl="triton", **options)
    logits = 5.0 * torch.tanh(hidden.double() @ weight.double().T * 0.5 / 5.0) + bias.double()
    torch.testing.assert_close(got.logits.double(), logits, rtol=0, atol=4e-6)
    want = torch.log_softmax(logits, -1).gather(1, got.ids[:, None])[:, 0]
    torch.testing.assert_close(got.logprobs.double(), want, rtol=0, atol=1e-5)
    assert torch.equal(got.ids, fmms.sample(hidden, weight, impl="torch", **options).ids)


@pytest.mark.parametrize("filters", [{}, {"top_k": 50}], ids=str)
@pytest.mark.parametrize("rows", [3, 40])
def test_options_that_change_no_logit_change_no_draw(device, rows, filters):
    """Kernels with rare options find the maximum of a group in other ways, by the tile's rows."""
    hidden, weight = testing.integer_problem(rows, 999, 40, device=device)
    options = dict(seed=2, num_samples=3, impl="triton", **filters)
    plain = fmms.sample(hidden, weight, **options)
    bias = torch.zeros(999, device=device)
    out = fmms.sample(hidden, weight, bias=bias, return_logits=True, return_raw_logprobs=True, **options)
    assert plain.valid.all() and out.valid.all()
    assert torch.equal(plain.ids, out.ids)


@pytest.mark.parametrize("softcap", [1e-3, 1.0, 30.0, 1e4, 1e7, 1e30])
def test_softcap_of_any_size(device, softcap):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 32, generator=generator).to(device)
    weight = torch.randn(300, 32, generator=generator).to(device)
    got = fmms.sample(hidden, weight, seed=1, softcap=softcap, impl="triton", return_logits=True)
    want = softcap * torch.tanh(hidden.double() @ weight.double().T / softcap)
    torch.testing.assert_close(got.logits.double(), want, rtol=2e-6, atol=1e-5 * min(1.0, softcap))


def test_injected_noise_that_is_nan_draws_nothing(device):
    hidden, weight = testing.integer_problem(3, 200, 16, device=device)
    gumbels = torch.zeros(3, 1, 8, device=device)
    gumbels[1] = float("nan")
    for impl in ("torch", "triton"):
        out = fmms.sample(hidden, weight, seed=0, noise=(gumbels, torch.full_like(gumbels, 0.5)), impl=impl)
        assert out.valid.tolist() == [True, False, True] and out.ids[1] == -1


def test_interpreted_kernels_run_from_several_threads(device):
    from concurrent.futures import ThreadPoolExecutor

    hidden, weight = testing.integer_problem(3, 200, 16, device=device)
    want = fmms.sample(hidden, weight, seed=1, impl="triton").ids
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(fmms.sample, hidden, weight, seed=1, impl="triton") for _ in range(16)]
    assert all(torch.equal(call.result().ids, want) for call in calls)


def test_repeated_calls_are_equal_bit_for_bit(device):
    """Several threads hold one row's sums; whichever stores them, the value must be the same."""
    torch.manual_seed(0)
    rows = 130 if device.type == "cuda" else 3
    hidden, weight = torch.randn(rows, 64, device=device), torch.randn(700, 64, device=device)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    first = fmms.sample(hidden, weight, 0.7, seed=1, return_logprobs=True, impl="triton")
    for _ in range(20 if device.type == "cuda" else 1):
        again = fmms.sample(hidden, weight, 0.7, seed=1, return_logprobs=True, impl="triton")
        for name in ("ids", "logprobs", "lse", "max_logit"):
            assert torch.equal(getattr(again, name), getattr(first, name)), name


def test_vocab_size_hides_padded_rows(device):
    hidden = torch.ones(8, 16, device=device)
    weight = torch.ones(256, 16, device=device)
    weight[200:] = 100.0
    out = fmms.sample(hidden, weight, seed=1, vocab_size=200, impl="triton", return_logits=True)
    assert (out.ids < 200).all() and out.logits.shape == (8, 200)


def test_strided_rows_and_misaligned_pointers(device):
    """Row strides that are no multiple of 16 bytes, bases that are not aligned, D that is no multiple of 8."""
    for width, pad, offset, dtype in [
        (33, 3, 1, torch.bfloat16),
        (64, 1, 3, torch.bfloat16),
        (20, 5, 1, torch.float32),
    ]:
        hidden, weight = testing.integer_problem(6, 257, width, dtype, device)
        strided_weight = testing.strided_copy(weight, pad, offset)
        strided_hidden = testing.strided_copy(hidden, pad, 0)
        with testing.poisoned_memory():
            got = fmms.sample(strided_hidden, strided_weight, seed=4, impl="triton", return_logits=True)
        want = fmms.sample(hidden, weight, seed=4, impl="torch", return_logits=True)
        assert torch.equal(got.logits, want.logits) and torch.equal(got.ids, want.ids)
    transposed = hidden.T.contiguous().T
    assert torch.equal(fmms.sample(transposed, weight, seed=4, impl="triton").ids, want.ids)


def test_fp32_is_ieee(device):
    """1 + 2**-20 needs 21 bits of mantissa; TF32 has 11 and would tie the two tokens."""
    for scale in (1.0, 1024.0):
        weight = torch.zeros(40, 16, device=device)
        weight[5, 0], weight[30, 0] = 1.0, 1.0 + 2.0**-20
        hidden = torch.zeros(2, 16, device=device)
        hidden[:, 0] = scale
        out = fmms.sample(hidden, weight, 0.0, seed=0, impl="triton", return_logits=True)
        assert (out.ids == 30).all()
        assert (out.logits[:, 30] == scale * (1.0 + 2.0**-20)).all()


def test_greedy_takes_the_lowest_id_on_a_tie(device):
    weight = torch.zeros(5000, 16, device=device)
    weight[[4999, 4000, 137, 130]] = 1.0
    hidden = torch.ones(3, 16, device=device)
    assert (fmms.sample(hidden, weight, 0.0, seed=0, impl="triton").ids == 130).all()


def test_broken_rows_are_flagged_and_leave_the_others_alone(device):
    hidden, weight = testing.integer_problem(9, 400, 24, device=device)
    clean = fmms.sample(hidden, weight, seed=6, impl="triton", return_logprobs=True)
    broken = hidden.clone()
    broken[1, 3], broken[4, 0], broken[8, 5] = float("nan"), float("inf"), float("-inf")
    temperature = torch.ones(9, device=device)
    temperature[2], temperature[5] = -1.0, float("nan")
    out = fmms.sample(broken, weight, temperature, seed=6, impl="triton", return_logprobs=True)
    bad = torch.tensor([1, 2, 4, 5, 8], device=device)
    good = torch.tensor([0, 3, 6, 7], device=device)
    assert not out.valid[bad].any() and (out.ids[bad] == -1).all() and out.logprobs[bad].isnan().all()
    assert out.valid[good].all() and torch.equal(out.ids[good], clean.ids[good])
    assert torch.equal(out.logprobs[good], clean.logprobs[good])


def test_minus_infinity_is_probability_zero(device):
    """Masked tokens are never drawn; a row with nothing left is invalid, not random."""
    bias = torch.full((300,), float("-inf"), device=device)
    bias[[7, 140, 299]] = 0.0
    hidden, weight = testing.integer_problem(2000, 300, 16, device=device)
    for temperature in (0.0, 1e-4, 1.0, float("inf")):
        out = fmms.sample(hidden, weight, temperature, seed=1, bias=bias, impl="triton")
        assert out.valid.all() and set(out.ids.tolist()) <= {7, 140, 299}
    none_left = fmms.sample(hidden, weight, seed=1, bias=torch.full_like(bias, float("-inf")), impl="triton")
    assert not none_left.valid.any() and (none_left.ids == -1).all()


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-45, 1e30, float("inf")])
def test_extreme_temperatures_and_logits(device, temperature):
    hidden = torch.full((6, 16), 25.0, device=device)
    weight = torch.full((260, 16), 25.0, device=device)  # logits of 1e4
    weight[::2] = -25.0
    got = fmms.sample(hidden, weight, temperature, seed=8, impl="triton", return_logprobs=True)
    want = fmms.sample(hidden, weight, temperature, seed=8, impl="torch", return_logprobs=True)
    assert got.valid.all() and torch.equal(got.ids, want.ids)
    torch.testing.assert_close(got.logprobs, want.logprobs, rtol=1e-5, atol=1e-5)
    if temperature < 1:
        assert (got.ids % 2 == 1).all()


def test_interval_widths_inside_a_group(device):
    checks.check_interval_widths(device)


@pytest.mark.parametrize("scheme", ["group", "token"])
def test_winning_tail_is_resolved(device, scheme):
    checks.check_winning_tail(device, scheme)


def test_rows_and_steps_are_independent(device):
    checks.check_rows_independent(device)


def test_device_gumbel_within_its_stated_bound(device):
    """Injected words at both ends and across the range, through the device function itself."""
    import triton
    import triton.language as tl

    from fmms.kernels import epilogue

    @triton.jit
    def gumbels(low, high, out, N: tl.constexpr):
        i = tl.arange(0, N)
        words = tl.load(low + i).to(tl.uint32), tl.load(high + i).to(tl.uint32)
        tl.store(out + i, epilogue.gumbel(words[0], words[1]))

    # the interpreter reads a function's globals when it runs it
    gumbels.fn.__globals__.update(triton=triton, tl=tl, epilogue=epilogue)
    n = 4096
    generator = torch.Generator().manual_seed(0)
    high = torch.randint(0, 2**32, (n,), generator=generator) >> torch.randint(0, 33, (n,), generator=generator)
    high = torch.where(torch.arange(n) % 2 == 0, high, high ^ 0xFFFFFFFF)
    low = torch.randint(0, 2**32, (n,), generator=generator)
    high[:6] = torch.tensor([0, 0, 2**31 - 1, 2**31, 2**32 - 1, 2**32 - 1])
    low[:6] = torch.tensor([0, 2**32 - 1, 2**32 - 1, 0, 2**32 - 1, 0])
    out = torch.empty(n, device=device)
    gumbels[(1,)](low.to(device), high.to(device), out, N=n)
    want = noise.gumbel(low, high)
    error = (out.cpu().double() - want).abs() / (1 + want.abs())
    assert error.max() < 2.0**-21


def test_descent_reference_never_reaches_weight_zero():
    weights = torch.zeros(64, 32, dtype=torch.float64)
    weights[torch.arange(64), torch.arange(64) % 32] = 1.0
    for u in (0.0, 0.5, 1.0):
        chosen = reference.descend(weights, *noise.split_uniform(torch.full((64,), u, dtype=torch.float64)))
        assert torch.equal(chosen, torch.arange(64) % 32)
