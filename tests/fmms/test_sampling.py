"""The public call: what it refuses, what it returns, where its seeds come from."""

import pytest
import torch

import fmms
from fmms import noise

H, V, D = 3, 50, 8


def problem(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(H, D, generator=generator).to(dtype), torch.randn(V, D, generator=generator).to(dtype)


EDITS = ("logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty")
ROWS = torch.zeros(2, dtype=torch.int64)

BAD = {
    "hidden": [
        dict(hidden=torch.zeros(D)),
        dict(hidden=torch.zeros(1, H, D)),
        dict(hidden=torch.zeros(H, D + 1)),
        dict(hidden=torch.zeros(H, D, dtype=torch.bfloat16)),
        dict(hidden=torch.zeros(H, D, dtype=torch.float64)),
        dict(hidden=torch.zeros(H, D, device="meta")),
        dict(hidden=[[1.0]]),
    ],
    "weight": [
        dict(weight=torch.zeros(V)),
        dict(weight=torch.zeros(V, D).to_sparse()),
        dict(weight=torch.zeros(0, D)),
        dict(weight=torch.zeros(V, D, dtype=torch.int8)),
        dict(weight=torch.zeros(D, V).T),
        dict(weight=torch.zeros(V, 0), hidden=torch.zeros(H, 0)),
    ],
    "temperature": [
        dict(temperature=-0.1),
        dict(temperature=float("nan")),
        dict(temperature="hot"),
        dict(temperature=True),
        dict(temperature=10**400),
        dict(temperature=torch.ones(H + 1)),
        dict(temperature=torch.ones(H, 1)),
        dict(temperature=torch.ones(H, dtype=torch.int64)),
        dict(temperature=torch.ones(H, device="meta")),
    ],
    "seed": [
        dict(seed=torch.zeros(H, dtype=torch.int32)),
        dict(seed=torch.zeros(H)),
        dict(seed=torch.zeros((), dtype=torch.int64)),
        dict(seed=torch.zeros(H + 1, dtype=torch.int64)),
        dict(seed=1.5),
        dict(seed=2**64),
        dict(seed=True),
    ],
    "position": [
        dict(position=0.5),
        dict(position=2**63),
        dict(position=torch.zeros(H)),
        dict(position=torch.zeros(H + 2, dtype=torch.int64)),
    ],
    "num_samples": [dict(num_samples=0), dict(num_samples=2.0), dict(num_samples=2**24 + 1)],
    "bias": [
        dict(bias=torch.zeros(V + 1)),
        dict(bias=torch.zeros(V, dtype=torch.int64)),
        dict(bias=1.0),
        dict(bias=[0.0] * V, vocab_size=V),
    ],
    "return_entropy": [dict(return_entropy="no"), dict(return_entropy=1)],
    "softcap": [
        dict(softcap=1e39),
        dict(softcap=1e-40),
        dict(softcap=0.0),
        dict(softcap=-1.0),
        dict(softcap=float("inf")),
        dict(softcap=torch.ones(())),
    ],
    "logit_scale": [dict(logit_scale=float("nan")), dict(logit_scale=1e39), dict(logit_scale="x")],
    "vocab_size": [dict(vocab_size=0), dict(vocab_size=V + 1), dict(vocab_size=1.0)],
    "noise_scheme": [dict(noise_scheme="gumbel"), dict(noise_scheme=None)],
    "top_k": [
        dict(top_k=-2),
        dict(top_k=5.0),
        dict(top_k=True),
        dict(top_k="5"),
        dict(top_k=2**64),
        dict(top_k=[5, 5, 5]),
        dict(top_k=torch.ones(H)),
        dict(top_k=torch.ones(H, dtype=torch.int16)),
        dict(top_k=torch.ones(H + 1, dtype=torch.int64)),
        dict(top_k=torch.ones(H, 1, dtype=torch.int64)),
        dict(top_k=torch.ones(H, dtype=torch.int64, device="meta")),
    ],
    "top_p": [
        dict(top_p=torch.ones(H).to_sparse()),
        dict(top_p=-0.1),
        dict(top_p=1.01),
        dict(top_p=float("nan")),
        dict(top_p=float("inf")),
        dict(top_p=10**400),
        dict(top_p=True),
        dict(top_p="most"),
        dict(top_p=torch.ones(H + 1)),
        dict(top_p=torch.ones(H, 1)),
        dict(top_p=torch.ones(H, dtype=torch.int64)),
        dict(top_p=torch.ones(H, device="meta")),
    ],
    "min_p": [
        dict(min_p=-1e-9),
        dict(min_p=2),
        dict(min_p=float("nan")),
        dict(min_p=False),
        dict(min_p=[0.1]),
        dict(min_p=torch.zeros(H - 1)),
        dict(min_p=torch.zeros(H, dtype=torch.bool)),
        dict(min_p=torch.zeros(H, device="meta")),
    ],
    "filter_order": [dict(filter_order="top_p_first"), dict(filter_order=None), dict(filter_order=0)],
    **{
        name: [
            {name: torch.zeros(3)},
            {name: 1.1},
            {name: (ROWS, ROWS)},
            {name: (ROWS, [0, 0], torch.ones(2))},
        ]
        for name in EDITS
    },
    "allowed_mask": [
        dict(allowed_mask=torch.ones(H, V, dtype=torch.bool)),
        dict(allowed_mask=torch.ones(H, 2)),
        dict(allowed_mask=torch.ones(H, 2, dtype=torch.int64)),
        dict(allowed_mask=torch.ones(H, 1, dtype=torch.int32)),
        dict(allowed_mask=torch.ones(H + 1, 2, dtype=torch.int32)),
        dict(allowed_mask=torch.ones(2, dtype=torch.int32)),
        dict(allowed_mask=torch.ones(H, 2, dtype=torch.int32, device="meta")),
        dict(allowed_mask=[[-1, -1]] * H),
    ],
    "banned_ids": [
        dict(banned_ids=5),
        dict(banned_ids=[5, 5, 5]),
        dict(banned_ids=torch.zeros(H)),
        dict(banned_ids=torch.zeros((), dtype=torch.int64)),
        dict(banned_ids=torch.zeros(H, 2, dtype=torch.int64)),
        dict(banned_ids=torch.zeros(H, dtype=torch.int64, device="meta")),
    ],
    "top_logprobs": [dict(top_logprobs=n) for n in (-1, V + 1, 2.0, True, None, torch.ones(()))],
    "impl": [dict(impl="cuda")],
    "noise": [
        dict(noise=torch.zeros(H, 1, V)),
        dict(noise=torch.zeros(H, V), noise_scheme="token"),
        dict(noise=(torch.zeros(H, 1, 4), torch.zeros(H, 1, 3))),
        dict(noise=torch.zeros(H, 1, V, dtype=torch.int64), noise_scheme="token"),
    ],
}


@pytest.mark.parametrize("name, change", [(n, c) for n, cases in BAD.items() for c in cases], ids=lambda x: str(x)[:60])
def test_bad_input_is_a_value_error_that_names_the_argument(name, change):
    hidden, weight = problem()
    arguments = dict(hidden=hidden, weight=weight, seed=0) | change
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=f"^{name}: expected .+, got "):
        fmms.sample(**arguments)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize(
    "part, triple",
    [
        ("rows", (ROWS.float(), ROWS, torch.ones(2))),
        ("rows", (ROWS[None], ROWS[None], torch.ones(1, 2))),
        ("rows", (ROWS[0], ROWS[0], torch.ones(()))),
        ("rows", (ROWS.to("meta"), ROWS, torch.ones(2))),
        ("tokens", (ROWS, ROWS.bool(), torch.ones(2))),
        ("tokens", (ROWS, ROWS[:1], torch.ones(2))),
        ("values", (ROWS, ROWS, torch.ones(3))),
        ("values", (ROWS, ROWS, ROWS)),
        ("values", (ROWS, ROWS, torch.ones(2, device="meta"))),
    ],
    ids=lambda x: str(x)[:40],
)
def test_a_bad_part_of_a_triple_is_named(name, part, triple):
    hidden, weight = problem()
    with pytest.raises(ValueError, match=rf"^{name} \({part}\): expected .+, got "):
        fmms.sample(hidden, weight, **{name: triple})


@pytest.mark.gpu
def test_mixed_devices_are_refused():
    hidden, weight = problem()
    for change in (dict(hidden=hidden.cuda()), dict(weight=weight.cuda())):
        with pytest.raises(ValueError, match=r"^hidden: expected the device of weight"):
            fmms.sample(**(dict(hidden=hidden, weight=weight) | change))


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_no_rows_give_empty_results(device, impl):
    out = fmms.sample(
        torch.zeros(0, D, device=device), torch.zeros(V, D, device=device),
        num_samples=2, return_logprobs=True, return_logits=True, impl=impl,
    )  # fmt: skip
    assert out.ids.shape == (0, 2) and out.ids.dtype == torch.int64 and out.logprobs.shape == (0, 2)
    assert out.lse.shape == out.max_logit.shape == out.valid.shape == (0,) and out.logits.shape == (0, V)


def test_shapes_and_dtypes():
    hidden, weight = problem()
    out = fmms.sample(hidden, weight, seed=0)
    assert out.ids.shape == (H,) and out.ids.dtype == torch.int64
    assert out.logprobs is None and out.logits is None
    assert out.lse.dtype == out.max_logit.dtype == torch.float32 and out.valid.dtype == torch.bool
    out = fmms.sample(hidden, weight, seed=0, num_samples=1, return_logprobs=True)
    assert out.ids.shape == out.logprobs.shape == (H, 1)


def test_default_seed_follows_torch_manual_seed():
    hidden, weight = problem()
    torch.manual_seed(3)
    a, b = fmms.sample(hidden, weight, num_samples=20).ids, fmms.sample(hidden, weight, num_samples=20).ids
    torch.manual_seed(3)
    assert torch.equal(fmms.sample(hidden, weight, num_samples=20).ids, a)
    assert not torch.equal(a, b), "two calls must not repeat the noise"


def test_one_seed_gives_every_row_its_own_noise_and_every_position_new_noise():
    hidden, weight = torch.ones(64, D), torch.zeros(V, D)
    ids = fmms.sample(hidden, weight, seed=1).ids
    assert ids.unique().numel() > 20
    assert not torch.equal(ids, fmms.sample(hidden, weight, seed=1, position=1).ids)
    assert torch.equal(ids, fmms.sample(hidden, weight, seed=noise.row_seeds(1, 64)).ids)


def test_scalar_tensors_hold_for_every_row():
    hidden, weight = problem()
    want = fmms.sample(hidden, weight, 0.5, seed=1, position=7).ids
    got = fmms.sample(hidden, weight, torch.tensor(0.5), seed=1, position=torch.tensor(7))
    assert torch.equal(got.ids, want)


def test_temperature_per_row():
    hidden, weight = problem()
    mixed = fmms.sample(hidden, weight, torch.tensor([0.0, 1.0, 5.0]), seed=4, num_samples=50)
    assert (mixed.ids[0] == (hidden[0] @ weight.T).argmax()).all()
    for row, t in ((1, 1.0), (2, 5.0)):
        assert torch.equal(mixed.ids[row], fmms.sample(hidden, weight, t, seed=4, num_samples=50).ids[row])


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_any_temperature_that_a_python_float_can_hold(device, impl):
    weight = torch.linspace(0, 3, 50, device=device)[:, None]
    hidden = torch.ones(400, 1, device=device)
    for cold in (1e-300, 1e-46):
        assert (fmms.sample(hidden, weight, cold, seed=0, impl=impl).ids == 49).all()
    for hot in (1e39, 1e300, float("inf")):
        assert fmms.sample(hidden, weight, hot, seed=0, impl=impl).ids.unique().numel() > 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_and_default_dtype_change_nothing(dtype):
    hidden, weight = torch.randn(200, 64).to(dtype), torch.randn(300, 64).to(dtype)
    want = fmms.sample(hidden, weight, 0.7, seed=0, impl="torch")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = fmms.sample(hidden, weight, 0.7, seed=0, impl="torch")
    try:
        torch.set_default_dtype(torch.bfloat16)
        other = fmms.sample(hidden, weight, 0.7, seed=0, impl="torch")
    finally:
        torch.set_default_dtype(torch.float32)
    for got in (cast, other):
        assert torch.equal(got.ids, want.ids) and torch.equal(got.lse, want.lse)


def test_numpy_numbers_are_numbers():
    import numpy as np

    hidden, weight = problem()
    want = fmms.sample(hidden, weight, 0.5, seed=3, position=2, num_samples=2, softcap=4.0).ids
    got = fmms.sample(
        hidden, weight, np.float32(0.5), seed=np.int64(3), position=np.int32(2), num_samples=np.int64(2),
        softcap=np.float64(4.0), vocab_size=np.int64(V),
    ).ids  # fmt: skip
    assert torch.equal(got, want)


def test_outputs_carry_no_gradient():
    hidden, weight = problem()
    out = fmms.sample(hidden.requires_grad_(), weight.requires_grad_(), seed=0, return_logprobs=True)
    assert not any(x.requires_grad for x in out if x is not None)


def test_bias_of_padded_vocabulary_is_cut_with_it():
    hidden, weight = problem()
    bias = torch.zeros(V)
    bias[40:] = 1000.0
    assert (fmms.sample(hidden, weight, seed=0, bias=bias, vocab_size=40).ids < 40).all()
    assert (fmms.sample(hidden, weight, seed=0, bias=bias[:40], vocab_size=40).ids < 40).all()
