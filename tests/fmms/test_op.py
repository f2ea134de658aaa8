"""The operator under PyTorch's compiler and in CUDA graphs."""

import pytest
import torch

import fmms
from fmms import noise, testing
from fmms.request import Request


def decode_step(hidden, weight, temperature, seeds, position):
    out = fmms.sample(
        torch.relu(hidden), weight, temperature, seed=seeds, position=position, return_logprobs=True, num_samples=2
    )
    return out.ids + 0, out.logprobs * 1.0, out.valid


def inputs(device):
    hidden, weight = testing.integer_problem(4, 300, 16, device=device)
    temperature = torch.tensor([1.0, 0.0, 0.5, 2.0], device=device)
    return hidden, weight, temperature, noise.row_seeds(1, 4, device), torch.zeros(4, dtype=torch.int64, device=device)


def controlled_step(hidden, weight, given, position):
    """A decode step with every control that can change from step to step, all of them tensors."""
    edits = fmms.history_edits(given["output"], given["prompt"], given["repetition"], given["frequency"], 0.25)
    out = fmms.sample(
        torch.relu(hidden), weight, given["temperature"], seed=given["seeds"], position=position,
        top_k=given["top_k"], top_p=given["top_p"], min_p=given["min_p"], banned_ids=given["banned"],
        allowed_mask=given["mask"], logit_bias=(given["rows"], given["tokens"], given["values"]), num_samples=2,
        return_logprobs=True, return_raw_logprobs=True, return_final_logprobs=True, return_entropy=True,
        return_logits=True, top_logprobs=3, **edits,
    )  # fmt: skip
    return tuple(out)


def step_controls(device, step, rows=4, vocab=300):
    """Controls of one step, a function of `step`: rows that are greedy, sampled, cut or not, a ban, a masked row."""
    g = torch.Generator().manual_seed(step)

    def pick(values, *shape):
        return torch.tensor(values)[torch.randint(0, len(values), shape or (rows,), generator=g)]

    allowed = torch.rand(rows, vocab, generator=g) < 0.7
    allowed[step % rows] = step % 3 > 0
    tokens = torch.randint(-1, vocab, (10,), generator=g)
    given = {
        "temperature": pick([0.0, 0.5, 1.0, 2.0]),
        "seeds": noise.row_seeds(step // 2, rows),
        "top_k": pick([0, 5, 40, vocab]),
        "top_p": pick([0.5, 0.9, 1.0]),
        "min_p": pick([0.0, 0.05]),
        "banned": torch.randint(-1, vocab, (rows,), generator=g),
        "mask": fmms.pack_mask(allowed),
        "rows": torch.randint(-1, rows, (10,), generator=g),
        "tokens": tokens,
        "values": pick([-4.0, 0.5, 3.0], 10),
        "prompt": torch.randint(-1, vocab, (rows, 6), generator=g),
        "output": torch.randint(-1, vocab, (rows, 5), generator=g),
        "repetition": pick([1.0, 1.25, 2.0]),
        "frequency": pick([0.0, 0.5]),
    }
    return {name: value.to(device) for name, value in given.items()}


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_operator_obeys_the_contract_of_torch_library(device, impl):
    hidden, weight, temperature, seeds, position = inputs(device)
    plain = Request(hidden, weight, temperature=temperature, seeds=seeds, positions=position, samples=2)
    results = {name: True for name in Request._fields if name.startswith("want_")}
    edit = dict(
        edit_rows=torch.tensor([0, 3], device=device),
        edit_tokens=torch.tensor([5, -1], device=device),
        edit_values=torch.tensor([2.0, 1.0], device=device),
        edit_kinds=torch.tensor([0, 1], device=device),
    )
    controls = dict(
        top_k=torch.tensor([3, 0, -1, 300], dtype=torch.int32, device=device),
        top_p=torch.tensor([0.5, 1.0, 0.9, 0.0], device=device),
        min_p=torch.zeros(4, device=device),
        allowed_mask=torch.full((4, 10), -2, dtype=torch.int32, device=device),
        banned_ids=torch.tensor([-1, 5, 6, 299], device=device),
        filter_order="min_p_first",
    )
    for request in (
        plain,
        plain._replace(top_k_value=3, top_logprobs=2, **results, **edit),
        plain._replace(scheme="token", **controls),
    ):
        torch.library.opcheck(torch.ops.fmms.sample.default, (*request, impl))


def test_compiled_decode_step_equals_eager():
    compiled = torch.compile(decode_step, fullgraph=True, backend="aot_eager")
    hidden, weight, temperature, seeds, position = inputs("cpu")
    for step in range(3):
        got = compiled(hidden, weight, temperature, seeds, position + step)
        for a, b in zip(got, decode_step(hidden, weight, temperature, seeds, position + step), strict=True):
            assert torch.equal(a, b)


def test_compiled_decode_step_with_every_control_equals_eager():
    """One compilation serves all steps: the controls are tensors."""
    torch.compiler.reset()
    compiled = torch.compile(controlled_step, fullgraph=True, backend="aot_eager")
    hidden, weight, *_, position = inputs("cpu")
    seen = []
    for step in range(4):
        given = step_controls("cpu", step)
        with torch.compiler.set_stance("default" if step == 0 else "fail_on_recompile"):
            got = compiled(hidden, weight, given, position + step)
        want = controlled_step(hidden, weight, given, position + step)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        seen.append(want[0])
    assert not torch.equal(seen[0], seen[1]) and any((ids == -1).any() for ids in seen)


def test_compiled_call_with_default_seed_draws_fresh_noise():
    compiled = torch.compile(lambda h, w: fmms.sample(h, w, num_samples=30).ids, fullgraph=True, backend="aot_eager")
    hidden, weight = torch.ones(2, 8), torch.zeros(100, 8)
    assert not torch.equal(compiled(hidden, weight), compiled(hidden, weight))


def test_compiled_call_with_python_numbers():
    """Scalars are constants of the compiled code: right, at the price of a compilation for each value."""
    hidden, weight, *_ = inputs("cpu")
    for dynamic in (None, True):
        torch.compiler.reset()
        compiled = torch.compile(
            lambda h, t, s, p: fmms.sample(h, weight, t, seed=s, position=p).ids, fullgraph=True,
            backend="aot_eager", dynamic=dynamic,
        )  # fmt: skip
        for t, s, p in ((0.5, 1, 0), (0.7, 2, 1), (1.0, 3, 2)):
            assert torch.equal(compiled(hidden, t, s, p), fmms.sample(hidden, weight, t, seed=s, position=p).ids)


@pytest.mark.gpu
def test_cuda_graph_replays_with_new_position_and_seeds():
    device = torch.device("cuda")
    hidden, weight, temperature, seeds, position = inputs(device)
    decode_step(hidden, weight, temperature, seeds, position)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode_step(hidden, weight, temperature, seeds, position)
    seen = []
    for step in range(4):
        position.fill_(step)
        seeds.copy_(noise.row_seeds(step // 2, 4, device))
        graph.replay()
        want = decode_step(hidden, weight, temperature, seeds, position)
        for a, b in zip(captured, want, strict=True):
            assert torch.equal(a, b)
        seen.append(captured[0].clone())
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["group", "token"])
@pytest.mark.parametrize("order", ["top_k_first", "joint", "min_p_first"])
def test_cuda_graph_replays_with_every_control_changed_in_place(monkeypatch, order, scheme):
    """Captured once, also the penalties that come from the history; each replay equals an eager call, bit for bit."""
    call = fmms.sample
    monkeypatch.setattr(fmms, "sample", lambda *a, **k: call(*a, filter_order=order, noise_scheme=scheme, **k))
    device = torch.device("cuda")
    hidden, weight, *_, position = inputs(device)
    given = step_controls(device, 0)
    controlled_step(hidden, weight, given, position)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = controlled_step(hidden, weight, given, position)
    seen = []
    for step in range(1, 8):
        position.fill_(step)
        hidden.copy_(hidden.flip(0))
        for name, value in step_controls(device, step).items():
            given[name].copy_(value)
        graph.replay()
        seen.append(captured[0].clone())
        for a, b in zip(captured, controlled_step(hidden, weight, given, position), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(seen[0], seen[1]) and any((ids == -1).any() for ids in seen)


@pytest.mark.gpu
def test_cuda_graph_with_default_seed_draws_fresh_noise():
    hidden, weight = torch.ones(4, 16, device="cuda"), torch.zeros(500, 16, device="cuda")
    fmms.sample(hidden, weight, num_samples=8)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = fmms.sample(hidden, weight, num_samples=8).ids
    graph.replay()
    first = ids.clone()
    graph.replay()
    assert not torch.equal(first, ids)


@pytest.mark.gpu
def test_compiled_decode_step_on_the_gpu():
    compiled = torch.compile(decode_step, fullgraph=True)
    arguments = inputs(torch.device("cuda"))
    for a, b in zip(compiled(*arguments), decode_step(*arguments), strict=True):
        assert torch.equal(a, b)
