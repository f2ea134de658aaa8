"""fmms.bench.ceilings and .timing: rows are complete, work is counted right, a wrong result is not timed."""

import math
import time

import numpy as np
import pytest
import torch

from fmms.bench import ceilings, timing

COLUMNS = {"quantity", "unit", "median", "p20", "p80", "n", "dtype", "size", "times_cache", "method", "device"}


def test_rows_of_a_device():
    rows = ceilings.measure("cpu", torch.float32, 1 << 20, 64, n=5)
    assert [(row["quantity"], row["unit"]) for row in rows] == [
        ("copy bandwidth", "GB/s"),
        ("read bandwidth", "GB/s"),
        ("matmul rate", "TFLOP/s"),
    ]
    for row in rows:
        assert set(row) == COLUMNS
        assert row["n"] == 5
        assert 0 < row["p20"] <= row["median"] <= row["p80"]
        assert "perf_counter" in row["method"]
    assert [row["size"] for row in rows] == ["1 MiB", "1 MiB", "64 x 64 x 64"]


def test_work_is_counted_right(monkeypatch):
    """With a call that takes a second, a rate is the work of one call."""
    monkeypatch.setattr(timing, "time_call", lambda fn, device, n, **rest: np.ones(n))
    copy, read, matmul = ceilings.measure("cpu", torch.float32, 1 << 20, 64, n=3)
    assert copy["median"] == pytest.approx(2 * 2**20 / 1e9)
    assert read["median"] == pytest.approx(2**20 / 1e9)
    assert matmul["median"] == pytest.approx(2 * 64**3 / 1e12)
    assert ceilings.head_matmul("cpu", torch.float32, 100, 16, n=3)["median"] == pytest.approx(1e6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1, 37, 256])
def test_a_right_matmul_passes(dtype, size):
    a, b = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    ceilings.check_matmul(a @ b, a, b)


def test_a_matmul_in_tf32_or_with_a_nan_fails():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))

    def tf32(x):
        return (x.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)

    with pytest.raises(AssertionError, match="matmul in float32 is off"):
        ceilings.check_matmul(tf32(a) @ tf32(b), a, b)
    with pytest.raises(AssertionError, match="not timed"):
        ceilings.check_matmul(torch.full_like(a, torch.nan), a, b)


def test_a_wrong_result_is_not_timed(monkeypatch):
    def never(*args, **kwargs):
        pytest.fail("timed a wrong result")

    monkeypatch.setattr(timing, "time_call", never)
    monkeypatch.setattr(torch, "mm", lambda a, b, out: out.zero_())
    with pytest.raises(AssertionError, match="not timed"):
        ceilings.matmul_rate("cpu", torch.float32, 64)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source: self)
    with pytest.raises(AssertionError, match="copy of a buffer differs"):
        ceilings.copy_bandwidth("cpu", 1 << 16)


def test_bad_calls_are_named(monkeypatch):
    with pytest.raises(ValueError, match="buffer_bytes is 3"):
        ceilings.read_bandwidth("cpu", 3)
    with pytest.raises(ValueError, match="device is 'meta'"):
        ceilings.copy_bandwidth("meta", 1 << 20)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch finds no GPU here"):
        ceilings.matmul_rate("cuda", torch.float32, 64)
    with pytest.raises(ValueError, match="n is 0"):
        timing.time_call(lambda: None, "cpu", n=0)


def test_floors_follow_bytes_and_bandwidth():
    floors = ceilings.read_floors({"median": 100.0, "p20": 50.0, "p80": 200.0}, torch.bfloat16, {"one": (1000, 500)})
    assert floors == [
        {
            "head": "one", "V": 1000, "D": 500, "dtype": "bfloat16", "weight_mb": 1.0,
            "floor_us": pytest.approx(10.0), "floor_p20_us": pytest.approx(5.0), "floor_p80_us": pytest.approx(20.0),
        }
    ]  # fmt: skip


def test_cache_size_is_plausible_or_unknown():
    size = ceilings.cache_bytes("cpu")
    assert size is None or 1 << 14 < size < 1 << 34


def test_calls_are_timed_one_by_one_without_what_runs_before():
    order = []
    seconds = timing.time_call(
        lambda: order.append("call"),
        "cpu",
        n=3,
        warmup=1,
        before=lambda: (order.append("before"), time.sleep(0.02)),
    )
    assert order == ["before", "call"] * 4
    assert seconds.shape == (3,)
    assert np.median(seconds) < 0.01


def test_quantiles():
    found = timing.quantiles(range(11))
    assert found == {"median": 5.0, "p20": 2.0, "p80": 8.0, "n": 11}
    assert all(math.isfinite(value) for value in found.values())


@pytest.mark.gpu
def test_gpu_buffers_exceed_the_cache():
    with pytest.raises(ValueError, match="L2 cache"):
        ceilings.copy_bandwidth("cuda", 1 << 20)
    rows = ceilings.measure("cuda", torch.float32, 1 << 30, 1024, n=5)
    assert all(row["times_cache"] is None or row["times_cache"] >= 4 for row in rows)
    assert all("CUDA events" in row["method"] for row in rows)
