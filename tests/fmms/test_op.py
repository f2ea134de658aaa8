"""The operator under PyTorch's compiler and in CUDA graphs."""

from dataclasses import fields, replace

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


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_operator_obeys_the_contract_of_torch_library(device, impl):
    hidden, weight, temperature, seeds, position = inputs(device)
    plain = Request(hidden, weight, temperature=temperature, seeds=seeds, positions=position, samples=2)
    results = {field.name: True for field in fields(Request) if field.name.startswith("want_")}
    edit = dict(
        edit_rows=torch.tensor([0, 3], device=device),
        edit_tokens=torch.tensor([5, -1], device=device),
        edit_values=torch.tensor([2.0, 1.0], device=device),
        edit_kinds=torch.tensor([0, 1], device=device),
    )
    for request in (plain, replace(plain, top_k_value=3, top_logprobs=2, **results, **edit)):
        arguments = (getattr(request, field.name) for field in fields(Request))
        torch.library.opcheck(torch.ops.fmms.sample.default, (*arguments, impl))


def test_compiled_decode_step_equals_eager():
    compiled = torch.compile(decode_step, fullgraph=True, backend="aot_eager")
    hidden, weight, temperature, seeds, position = inputs("cpu")
    for step in range(3):
        got = compiled(hidden, weight, temperature, seeds, position + step)
        for a, b in zip(got, decode_step(hidden, weight, temperature, seeds, position + step), strict=True):
            assert torch.equal(a, b)


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
