"""Writes made-up logs in vLLM's format, to test and show fmms.evaluation.serving without a GPU.

The two servers don't exist and every number is invented, by the rule in `tpot`: it says nothing about any software.
`python -m fmms.evaluation.sample_logs` rewrites `data/samples/serving`.
"""

import datetime
import json
import math
import random
import sys
from pathlib import Path

from fmms import atomic, paths

SYSTEMS = ("sample-a", "sample-b")
CONCURRENCIES = (1, 4, 16, 64)
TRIALS = 5
INPUT_LEN, OUTPUT_LEN = 256, 128
ABOUT = {
    "made_up": True,
    "note": "Sample logs in vLLM's format with invented numbers of servers that don't exist: no measurement.",
    "gpu": "none",
}


def tpot(system: str, concurrency: int) -> float:
    """The invented true time per output token in ms: a floor and a share that grows with the concurrency; sample-b has
    6 % less at one request and the same at 64."""
    base = 5.0 + 0.055 * concurrency
    return base if system == "sample-a" else base * (0.94 + 0.01 * math.log2(concurrency))


def write(folder: str | Path, trials: int = TRIALS, noise: float = 0.01, seed: int = 19) -> Path:
    """Writes `<folder>/trial_NN/<system>.log` and `<folder>/run.json`; returns the folder. Deterministic by seed.

    noise: relative standard deviation of a run. A trial's machine state, shared by its systems, has three times that.
    """
    folder, rng = Path(folder), random.Random(seed)
    for trial in range(1, trials + 1):
        state = math.exp(rng.gauss(0, 3 * noise))
        clock = datetime.datetime(2026, 1, trial, 9, 0, 0)
        order = SYSTEMS if trial % 2 else SYSTEMS[::-1]
        for system in order:
            lines = [_server(clock, 0.0, 0.0, 0, 0, 0.0)]
            for concurrency in CONCURRENCIES:
                value = tpot(system, concurrency) * state * math.exp(rng.gauss(0, noise))
                block, clock = _run(concurrency, value, clock, rng)
                lines += block
            atomic.write_text(folder / f"trial_{trial:02d}" / f"{system}.log", "\n".join(lines) + "\n")
    atomic.write_text(folder / "run.json", json.dumps(ABOUT, indent=2) + "\n")
    return folder


def _run(concurrency: int, value: float, clock: datetime.datetime, rng: random.Random):
    """Lines of one run with a median time per output token of `value` ms, and the clock after it."""
    prompts = 8 * concurrency + 24
    first = 12 + 1.5 * concurrency
    latency = (first + (OUTPUT_LEN - 1) * value) / 1000
    duration = latency * math.ceil(prompts / concurrency) * 1.01
    produced, asked = prompts * OUTPUT_LEN, prompts * INPUT_LEN
    rate = produced / duration
    shown = dict(
        subparser="bench",
        bench_type="serve",
        seed=1,
        num_prompts=prompts,
        dataset_name="random",
        random_input_len=INPUT_LEN,
        random_output_len=OUTPUT_LEN,
        max_concurrency=concurrency,
        model="made-up/sample-model",
        request_rate=math.inf,
        ignore_eos=True,
        top_p=None,
        top_k=None,
        min_p=None,
        temperature=1.0,
    )
    lines = [
        f"Namespace({', '.join(f'{name}={one!r}' for name, one in shown.items())})",
        "Starting initial single prompt test run...",
        "Initial test run completed.",
        "Starting main benchmark run...",
        "Traffic request rate: inf",
        "Burstiness factor: 1.0 (Poisson process)",
        f"Maximum request concurrency: {concurrency}",
    ]
    bar = f"\r  0%|          | 0/{prompts} [00:00<?, ?it/s]"
    for _ in range(max(1, int(duration // 10))):
        clock += datetime.timedelta(seconds=10)
        speed = rate * math.exp(rng.gauss(0, 0.02))
        # as in real logs, the server's line may follow an unfinished progress bar
        lines.append(bar + _server(clock, speed * INPUT_LEN / OUTPUT_LEN, speed, concurrency, 0, 0.2 * concurrency))
        bar = ""
    clock += datetime.timedelta(seconds=5)
    lines += [
        f"100%|██████████| {prompts}/{prompts} [{int(duration) // 60:02d}:{int(duration) % 60:02d}<00:00]",
        "tip: install termplotlib and gnuplot to plot the metrics",
        "============ Serving Benchmark Result ============",
        _count("Successful requests:", prompts),
        _count("Failed requests:", 0),
        _count("Maximum request concurrency:", concurrency),
        _real("Benchmark duration (s):", duration),
        _count("Total input tokens:", asked),
        _count("Total generated tokens:", produced),
        _real("Request throughput (req/s):", prompts / duration),
        _real("Output token throughput (tok/s):", rate),
        _real("Peak output token throughput (tok/s):", float(math.ceil(rate * 1.1))),
        _real("Peak concurrent requests:", float(concurrency + 1)),
        _real("Total token throughput (tok/s):", (asked + produced) / duration),
        "---------------Time to First Token----------------",
        *_times("TTFT", first),
        "-----Time per Output Token (excl. 1st token)------",
        *_times("TPOT", value),
        "---------------Inter-token Latency----------------",
        *_times("ITL", value),
        "==================================================",
        _server(clock, 0.0, rate / 3, 0, 0, 0.0),
    ]
    return lines, clock


def _server(clock: datetime.datetime, prompt: float, generation: float, running: int, waiting: int, kv: float) -> str:
    return (
        f"(APIServer pid=1) INFO {clock:%m-%d %H:%M:%S} [loggers.py:259] Engine 000: Avg prompt throughput: "
        f"{prompt:.1f} tokens/s, Avg generation throughput: {generation:.1f} tokens/s, Running: {running} reqs, "
        f"Waiting: {waiting} reqs, GPU KV cache usage: {kv:.1f}%, Prefix cache hit rate: 0.0%"
    )


def _times(name: str, value: float) -> list[str]:
    named = (("Mean", 1.01), ("Median", 1.0), ("P99", 1.3))
    return [_real(f"{shown} {name} (ms):", factor * value) for shown, factor in named]


def _count(label: str, value: int) -> str:
    return f"{label:<40} {value:<10}"


def _real(label: str, value: float) -> str:
    return f"{label:<40} {value:<10.2f}"


if __name__ == "__main__":
    print(write(sys.argv[1] if len(sys.argv) > 1 else paths.project_root() / "data" / "samples" / "serving").name)
