"""fmms.bench.timing: several calls in one run, in turns; what a call costs the host."""

import time

import numpy as np
import pytest
import torch

from fmms.bench import timing

CPU = {"l2": "warm", "method": "perf_counter", "device": "cpu"}


def test_calls_take_turns_in_a_new_order_each_round():
    called = []
    calls = {name: (lambda name=name: called.append(name)) for name in "abcd"}
    seconds = timing.time_interleaved(calls, n=12, warmup=0, seed=1, **CPU)
    assert list(seconds) == list("abcd")
    assert all(values.shape == (12,) and (values > 0).all() for values in seconds.values())
    # warm: an untimed call of the same function precedes each timed one
    assert called[0::2] == called[1::2]
    rounds = [tuple(called[0::2][start : start + 4]) for start in range(0, 48, 4)]
    assert all(sorted(one) == list("abcd") for one in rounds)
    assert len(set(rounds)) > 4
    again = []
    calls = {name: (lambda name=name: again.append(name)) for name in "abcd"}
    timing.time_interleaved(calls, n=12, warmup=0, seed=1, **CPU)
    assert again == called


def test_a_slow_call_is_slow_by_itself():
    seconds = timing.time_interleaved({"fast": lambda: None, "slow": lambda: time.sleep(0.003)}, n=5, **CPU)
    assert np.median(seconds["slow"]) >= 0.003
    assert np.median(seconds["fast"]) < 0.001


def test_warm_up_and_prepared_calls():
    called = []
    timing.time_interleaved({"a": lambda: called.append(1)}, n=2, warmup=5, **CPU)
    assert len(called) == 5 + 2 * 2
    called.clear()
    call = timing.prepare(lambda: called.append(1), "perf_counter", "cpu", warmup=2)
    assert len(called) == 2
    timing.time_interleaved({"a": call}, n=1, **CPU)
    assert len(called) == 2 + 2


def test_what_cannot_be_timed_is_said():
    nothing = {"a": lambda: None}
    with pytest.raises(ValueError, match="method is 'cuda_graph'; expected perf_counter on device 'cpu'"):
        timing.time_interleaved(nothing, device="cpu")
    with pytest.raises(ValueError, match="method is 'cupti'; expected cuda_graph or events"):
        timing.time_interleaved(nothing, method="cupti", device="cuda")
    with pytest.raises(ValueError, match="use 'warm' on a CPU"):
        timing.time_interleaved(nothing, l2="cold", method="perf_counter", device="cpu")
    with pytest.raises(ValueError, match="l2 is 'lukewarm'"):
        timing.time_interleaved(nothing, l2="lukewarm", method="events", device="cuda")
    with pytest.raises(ValueError, match="n is 0"):
        timing.time_interleaved(nothing, n=0, **CPU)
    with pytest.raises(ValueError, match="calls is 0"):
        timing.host_cost(lambda: None, "cpu", calls=0)


def test_host_cost_is_per_call():
    called = []
    seconds = timing.host_cost(lambda: called.append(time.sleep(0.002)), "cpu", calls=4, warmup=1)
    assert seconds.shape == (4,)
    assert (seconds >= 0.002).all()
    assert len(called) == 5


@pytest.mark.gpu
def test_on_a_gpu():
    x = torch.randn(1 << 22, device="cuda")
    calls = {"sum": x.sum, "sqrt": x.sqrt}
    for method in ("cuda_graph", "events"):
        for l2 in timing.L2:
            seconds = timing.time_interleaved(calls, n=5, l2=l2, method=method)
            assert all((values > 1e-6).all() and (values < 1e-2).all() for values in seconds.values())
    replay = timing.prepare(lambda: x.add_(1), "cuda_graph")
    before = x[0].item()
    replay.run()
    assert x[0].item() == pytest.approx(before + 1)
    assert (timing.host_cost(x.sum, "cuda") < 1e-2).all()
