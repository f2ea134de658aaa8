"""How a call is timed, and the quantiles that are reported.

What is timed and on what data is the callers' matter (fmms.bench.ceilings, fmms.bench.kernel_speed). `time_call` times
one call; `time_interleaved` compares several in one run; `host_cost` is what a call costs before the device has work.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from fmms import device as device_facts

METHODS = {
    "cuda": "CUDA events around each call, one synchronisation after the last",
    "cpu": "perf_counter around each call",
}

INTERLEAVED_METHODS = {
    "cuda_graph": "events around the replay of a CUDA graph of the call",
    "events": "events around the eager call, enqueued while the device is still busy with what precedes it",
    "perf_counter": "perf_counter around the eager call on a CPU",
}
L2 = {
    "cold": "a buffer larger than the L2 cache is overwritten before each timed call, outside the time",
    "warm": "each timed call follows an untimed one of the same function",
}
EVICTED_BYTES = 1 << 28
"""Least size of the buffer that evicts L2; always at least twice the cache."""
_COVERING_FILLS = 4  # fills ahead of an eager call, a fraction of a millisecond in which its launches queue up


def method(device: torch.device | str) -> str:
    """How `time_call` times on this device, in words for a result row. ValueError for another kind of device."""
    kind = torch.device(device).type
    if kind not in METHODS:
        raise ValueError(f"device is {str(device)!r}; expected one of {', '.join(METHODS)}")
    threads = torch.get_num_threads()
    return METHODS[kind] + (f", {threads} thread{'s' if threads > 1 else ''}" if kind == "cpu" else "")


def time_call(
    fn: Callable[[], object],
    device: torch.device | str,
    n: int = 20,
    warmup: int = 3,
    before: Callable[[], object] | None = None,
) -> np.ndarray:
    """Seconds that each of `n` calls of `fn` took on `device`: float64 [n], in the order of the calls.

    before: runs ahead of every call, outside the time taken, for instance to evict caches. Raises ValueError for
    n < 1, warmup < 0 or a device that is neither a CPU nor a CUDA (or ROCm) GPU.
    """
    if n < 1 or warmup < 0:
        raise ValueError(f"n is {n} and warmup {warmup}; expected n >= 1 and warmup >= 0")
    method(device)
    device = torch.device(device)
    before = before or (lambda: None)
    for _ in range(warmup):
        before()
        fn()
    return _time_cuda(fn, device, n, before) if device.type == "cuda" else _time_cpu(fn, n, before)


def quantiles(values) -> dict[str, float | int]:
    """median, p20, p80 and n of repeated measurements, as result rows name them."""
    p20, median, p80 = np.quantile(np.asarray(values, dtype=np.float64), (0.2, 0.5, 0.8))
    return {"median": float(median), "p20": float(p20), "p80": float(p80), "n": len(values)}


def _time_cpu(fn, n: int, before) -> np.ndarray:
    seconds = np.empty(n)
    for index in range(n):
        before()
        start = time.perf_counter()
        fn()
        seconds[index] = time.perf_counter() - start
    return seconds


def _time_cuda(fn, device: torch.device, n: int, before) -> np.ndarray:
    with torch.cuda.device(device):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(n)]
        torch.cuda.synchronize()
        for start, end in events:
            before()
            start.record()
            fn()
            end.record()
        torch.cuda.synchronize()
        return np.array([start.elapsed_time(end) for start, end in events]) / 1e3


@dataclass(frozen=True)
class Prepared:
    """A call that is warmed up and, with method "cuda_graph", captured."""

    run: Callable[[], object]
    method: str
    keep: object = None
    """Results of the captured call: a graph writes into their memory."""


def prepare(fn: Callable[[], object], method: str, device: torch.device | str = "cuda", warmup: int = 3) -> Prepared:
    """Warms `fn` up and, for "cuda_graph", captures it; what `time_interleaved` does with a plain function.

    Raises ValueError for a method that the device doesn't have, and whatever `fn` or its capture raises.
    """
    device = _check_method(method, device)
    if device.type != "cuda":
        for _ in range(warmup):
            fn()
        return Prepared(fn, method)
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        # PyTorch asks for a warm-up on a side stream before a capture
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(max(1, warmup)):
                fn()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        if method == "events":
            return Prepared(fn, method)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            keep = fn()
        graph.replay()  # the first replay uploads the graph
        torch.cuda.synchronize()
        return Prepared(graph.replay, method, (graph, keep))


def time_interleaved(
    calls: Mapping[str, Callable[[], object] | Prepared],
    n: int = 20,
    l2: str = "cold",
    method: str = "cuda_graph",
    device: torch.device | str = "cuda",
    warmup: int = 3,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Seconds of `n` calls of each function, taken in rounds so that drifts of the clocks meet all alike.

    Every round calls each function once, in an order drawn anew from `seed`.

    Args:
        calls: {name: function without arguments, or a `Prepared` one with a method of its own}.
        n: rounds. l2: "cold" or "warm", see `L2`; a CPU knows "warm" only.
        method: of the plain functions: "cuda_graph" or "events" on a GPU, "perf_counter" on a CPU.
        warmup: untimed calls of each plain function before the first round.

    Returns:
        {name: float64 [n]}, in the order of the rounds.

    Raises:
        ValueError: n < 1, an unknown l2, or a method that the device doesn't have.
    """
    device = check_settings(n, l2, method, device)
    prepared = {
        name: call if isinstance(call, Prepared) else prepare(call, method, device, warmup)
        for name, call in calls.items()
    }
    for call in prepared.values():
        _check_method(call.method, device)
    order, names = np.random.default_rng(seed), list(prepared)
    rounds = [[names[i] for i in order.permutation(len(names))] for _ in range(n)]
    if device.type == "cuda":
        return _interleaved_cuda(prepared, rounds, l2, device)
    seconds = {name: [] for name in prepared}
    for names in rounds:
        for name in names:
            prepared[name].run()
            start = time.perf_counter()
            prepared[name].run()
            seconds[name].append(time.perf_counter() - start)
    return {name: np.array(values) for name, values in seconds.items()}


def check_settings(n: int, l2: str, method: str, device: torch.device | str) -> torch.device:
    """The device, if `time_interleaved` can time this way on it; its ValueError if not."""
    device = _check_method(method, device)
    if n < 1:
        raise ValueError(f"n is {n}; expected at least 1")
    if l2 not in L2:
        raise ValueError(f"l2 is {l2!r}; expected one of {', '.join(L2)}")
    if l2 == "cold" and device.type != "cuda":
        raise ValueError("l2 is 'cold', but caches are evicted on a GPU only; use 'warm' on a CPU")
    return device


def host_cost(fn: Callable[[], object], device: torch.device | str, calls: int = 100, warmup: int = 10) -> np.ndarray:
    """Host seconds of eager calls that nobody waits for: float64 [calls], in the order of the calls.

    On a GPU this is the time to check arguments, allocate and launch, unless the function itself waits for the device.
    Keep `calls` times the launches of one call under 1000 or so: a full launch queue makes the host wait. On a CPU it
    is the time of the whole call. Raises ValueError for calls < 1.
    """
    if calls < 1:
        raise ValueError(f"calls is {calls}; expected at least 1")
    device = torch.device(device)
    for _ in range(warmup):
        fn()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    marks = np.empty(calls + 1)
    marks[0] = time.perf_counter()
    for index in range(1, calls + 1):
        fn()
        marks[index] = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return np.diff(marks)


def _check_method(method: str, device: torch.device | str) -> torch.device:
    device = torch.device(device)
    possible = ("perf_counter",) if device.type == "cpu" else ("cuda_graph", "events")
    if method not in possible:
        raise ValueError(f"method is {method!r}; expected {' or '.join(possible)} on device {str(device)!r}")
    return device


def _interleaved_cuda(prepared, rounds, l2, device) -> dict[str, np.ndarray]:
    with torch.cuda.device(device):
        evicting = None
        if l2 == "cold":
            size = max(EVICTED_BYTES, 2 * (device_facts.facts(device).l2_bytes or 0))
            evicting = torch.empty(size, dtype=torch.uint8, device=device)
        events = {name: [] for name in prepared}
        torch.cuda.synchronize()
        for number, names in enumerate(rounds):
            for name in names:
                call = prepared[name]
                if evicting is None:
                    call.run()
                else:
                    for fill in range(_COVERING_FILLS if call.method == "events" else 1):
                        evicting.fill_((number + fill) % 251)
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call.run()
                end.record()
                events[name].append((start, end))
            # bounds the work in flight: a full launch queue would stall the host between two events
            torch.cuda.synchronize()
        return {
            name: np.array([start.elapsed_time(end) for start, end in pairs]) / 1e3 for name, pairs in events.items()
        }
