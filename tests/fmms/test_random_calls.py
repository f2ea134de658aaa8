"""fmms.bench.random_calls: agreement is found, and so is a sampler that is wrong."""

import pandas as pd
import pytest
import torch

import fmms
from fmms.bench import random_calls


def test_the_reference_agrees_with_itself():
    rows = random_calls.run([(300, 16), (130, 24)], 24, impl="torch", device="cpu", dtype=torch.float32, say=print)
    assert [row["calls"] for row in rows] == [12, 12] and all(row["differ"] == 0 for row in rows)
    random_calls.require(pd.DataFrame(rows))


def test_a_call_is_a_function_of_its_number():
    first, again = (random_calls.random_arguments(5, 4, 300, 16, torch.float32, "cpu") for _ in range(2))
    assert first.keys() == again.keys()
    assert torch.equal(first["hidden"], again["hidden"]) and torch.equal(first["seed"], again["seed"])


@pytest.mark.parametrize("fault", ["ids", "logprobs", "valid"])
def test_a_wrong_sampler_is_found(monkeypatch, fault):
    right = fmms.sample

    def wrong(*args, impl, **given):
        out = right(*args, impl="torch", **given)
        if impl == "torch":
            return out
        if fault == "ids":
            return out._replace(ids=torch.where(out.ids > 0, out.ids - 1, out.ids))
        if fault == "logprobs":
            return out._replace(logprobs=out.logprobs + 0.01)
        return out._replace(valid=torch.ones_like(out.valid))

    monkeypatch.setattr(fmms, "sample", wrong)
    rows = random_calls.run([(300, 16)], 40, impl="triton", device="cpu", dtype=torch.float32, say=print)
    with pytest.raises(AssertionError, match="first call"):
        random_calls.require(pd.DataFrame(rows))
