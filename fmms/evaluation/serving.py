"""Serving speed from vLLM's own logs: every benchmark run with what the engine reported during it, and ratios of runs.

A trial is one folder; in it each system has one log, `<folder>/<trial>/<system>.log`, to which `vllm serve` and `vllm
bench serve` both append (`HOW` has the commands). `<folder>/run.json` says what machine and which versions; `made_up`
in it marks sample logs. Nothing here starts a server.
"""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from fmms import paths
from fmms.evaluation import statistics

HOW = """# once for each trial, the systems in another order each time, so that neither always has the warm machine
LOGS={folder}; TRIAL=trial_01; SYSTEM=vllm; MODEL=Qwen/Qwen3-8B   # SYSTEM: a name of fmms/evaluation/naming.py
mkdir -p $LOGS/$TRIAL; LOG=$LOGS/$TRIAL/$SYSTEM.log
vllm serve $MODEL --port 8000 >> $LOG 2>&1 &                      # with that system's sampler
until curl -sf localhost:8000/health > /dev/null; do sleep 2; done
for C in 1 8 32 128; do
  vllm bench serve --model $MODEL --port 8000 --dataset-name random --random-input-len 256 --random-output-len 256 \\
    --ignore-eos --num-prompts $((8 * C + 24)) --max-concurrency $C --temperature 1.0 --seed 1 >> $LOG 2>&1
done
kill %1; wait
# once: what the caption says of the machine
python -c 'import json, torch, vllm; from fmms.bench import records; gpu = records.gpus()[0]
about = {{"gpu": gpu["name"], "driver": gpu["driver"], "vllm": vllm.__version__, "torch": torch.__version__}}
print(json.dumps(about))' > $LOGS/run.json"""
"""Shell commands that write the logs; `folder` is to be filled in."""

START, END = "Starting main benchmark run...", "Serving Benchmark Result"

FIELDS = {
    "Successful requests": "completed",
    "Failed requests": "failed",
    "Maximum request concurrency": "concurrency",
    "Request rate configured (RPS)": "request_rate",
    "Benchmark duration (s)": "duration_s",
    "Total input tokens": "input_tokens",
    "Total generated tokens": "output_tokens",
    "Request throughput (req/s)": "request_s",
    "Output token throughput (tok/s)": "output_tok_s",
    "Total Token throughput (tok/s)": "total_tok_s",  # until vLLM 0.11
    "Total token throughput (tok/s)": "total_tok_s",
    **{
        f"{shown} {name.upper()} (ms)": f"{shown.lower()}_{name}_ms"
        for name in ("ttft", "tpot", "itl", "e2el")
        for shown in ("Mean", "Median", "P99")
    },
}
"""Lines of vLLM's result block and the columns that hold them; others are ignored."""

WORKLOAD = (
    *("model", "dataset_name", "random_input_len", "random_output_len", "num_prompts", "request_rate", "ignore_eos"),
    *("temperature", "top_k", "top_p", "min_p", "seed"),
)
"""Arguments of `vllm bench serve` that say what was asked; systems are compared where these are equal."""

METRICS = {
    **{f"{shown}_{name}_ms": "time" for name in ("tpot", "itl", "ttft", "e2el") for shown in ("median", "mean")},
    **dict.fromkeys(("output_tok_s", "total_tok_s", "request_s"), "rate"),
}
"""Columns that can be compared: a time is better when it is small, a rate when it is large."""

ENGINE = ("engine_generation_tok_s", "engine_running", "engine_waiting", "engine_kv_percent")
COLUMNS = tuple(
    dict.fromkeys(
        ("trial", "system", "run", "concurrency", *FIELDS.values(), "engine_lines", *ENGINE, *WORKLOAD, "reason")
    )
)

_ENGINE_LINE = re.compile(
    r"Engine (?P<engine>\d+): Avg prompt throughput: (?P<prompt>[\d.]+) tokens/s, "
    r"Avg generation throughput: (?P<generation>[\d.]+) tokens/s, Running: (?P<running>\d+) reqs, "
    r"Waiting: (?P<waiting>\d+) reqs,.*?KV cache usage: (?P<kv>[\d.]+)%"
)
_RESULT_LINE = re.compile(r"^(?P<name>[A-Za-z0-9][^:]*?):\s+(?P<value>[-+\d.eE]+|nan|inf)\s*$")
_HEADER_LINE = re.compile(r"^(Traffic request rate|Maximum request concurrency): (\S+)\s*$")


@dataclass
class Run:
    """One benchmark run of a log. result: columns of FIELDS (ms, s, tokens); arguments: of WORKLOAD, as texts; engine:
    one dict per engine line between the run's start and its result (tokens/s, requests, percent); reason: why the run
    doesn't count, "" if it does."""

    arguments: dict = field(default_factory=dict)
    result: dict = field(default_factory=dict)
    engine: list[dict] = field(default_factory=list)
    reason: str = ""


def parse(text: str) -> list[Run]:
    """The benchmark runs of a log, in order. Engine lines outside runs (start-up, idle, the test request) are dropped.

    A run that was started and has no whole result, or in which requests failed, is kept with its reason. Server lines
    may stand within the client's progress bar; they are found there. A log without runs gives [].
    """
    runs, arguments, run, block = [], {}, None, False
    for line in re.split(r"[\r\n]+", text):
        # the server's line may begin anywhere in a progress bar that has no line end yet
        if engine := _ENGINE_LINE.search(line):
            if run is not None and not block:
                run.engine.append({key: float(value) for key, value in engine.groupdict().items() if key != "engine"})
            line = re.split(r"\((?:APIServer|EngineCore)|\bINFO \d", line[: engine.start()])[0]
        if "Namespace(" in line and "subparser='serve'" not in line:  # older servers print theirs too
            arguments = _arguments(line)
        if START in line:
            if run is not None:
                run.reason = "the log has no result of this run: it was stopped or failed"
            run, block = Run(arguments), False
            runs.append(run)
        elif run is not None and END in line:
            block = True
        elif run is not None and block and re.fullmatch(r"={20,}\s*", line):
            run.reason, run, block, arguments = _fault(run), None, False, {}
        elif run is not None and block and (found := _RESULT_LINE.match(line)):
            if found["name"] in FIELDS:
                run.result[FIELDS[found["name"]]] = float(found["value"])
        elif run is not None and not block and (found := _HEADER_LINE.match(line)):
            key = "request_rate" if "rate" in found[1] else "max_concurrency"
            run.arguments = {key: found[2], **run.arguments}
    if run is not None:
        run.reason = "the log ends before the result of this run"
    return runs


def read(folder: str | Path) -> list[dict]:
    """One row (COLUMNS) for each run in `<folder>/<trial>/<system>.log`; [] where there are no logs.

    Engine columns are medians over the run's engine lines; where several engines report, over all of them. A run
    without a limit on concurrency has None there.

    Raises:
        ValueError: a log without any run, with its name.
    """
    rows = []
    for path in sorted(Path(folder).glob("*/*.log")):
        # a kill may leave half a character; no number is lost by replacing it
        runs = parse(path.read_text(encoding="utf-8", errors="replace"))
        if not runs:
            raise ValueError(
                f"{path.parent.name}/{path.name} holds no benchmark run: no line {START!r}. Append the output of `vllm "
                "bench serve` to it, or move it elsewhere"
            )
        rows += [_row(path, number, run) for number, run in enumerate(runs)]
    return rows


def about(folder: str | Path) -> dict:
    """What `<folder>/run.json` says of machine and versions, {} without one. ValueError when it is no JSON object."""
    path = Path(folder) / "run.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} beside the logs is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} beside the logs holds no JSON object")
    return found


def folder(name: str) -> Path:
    """A folder of logs as a notebook names it: absolute, or relative to the checkout."""
    return paths.project_root() / Path(name).expanduser()


def how(name: str) -> str:
    """The shell commands that write logs to this folder."""
    return HOW.format(folder=name)


def faults(rows) -> list[dict]:
    """The runs that don't count: trial, system, concurrency and the reason."""
    keys = ("trial", "system", "concurrency", "reason")
    return [{key: row[key] for key in keys} for row in _as_rows(rows) if row["reason"]]


def summary(rows, metrics: Iterable[str] = ("median_tpot_ms", "output_tok_s"), seed: int = 0) -> list[dict]:
    """Mean over trials with 95 % interval, for every system, concurrency and metric: system, concurrency, metric,
    estimate, low, high, n (trials), method. Unit: the metric's.

    Runs of one trial at the same concurrency are averaged first: they share a server, so they are no trials of their
    own.
    """
    found = []
    for metric in metrics:
        _known(metric)
        for (system, concurrency), trials in _by_trial(rows, metric).items():
            interval = statistics.trial_interval(list(trials.values()), seed=seed)
            found.append({"system": system, "concurrency": concurrency, "metric": metric, **interval._asdict()})
    return found


def ratios(rows, baseline: str, metric: str = "median_tpot_ms") -> list[dict]:
    """How many times faster each other system is than `baseline` in each trial folder: system, baseline, concurrency,
    metric, trial, ratio.

    A trial that lacks one of the two at a concurrency has no row there; runs of different trials are never divided.

    Args:
        rows: of `read`. metric: a key of METRICS; for a rate the ratio is system / baseline, for a time its inverse.

    Raises:
        ValueError: the baseline has no finished run; two systems of a trial were asked for different work.
    """
    _known(metric)
    rows = _as_rows(rows)
    _same_work(rows)
    values = _by_trial(rows, metric)
    if rows and baseline not in {system for system, _ in values}:
        known = ", ".join(dict.fromkeys(system for system, _ in values)) or "none"
        raise ValueError(f"the baseline {baseline!r} has no finished run; systems with finished runs: {known}")
    found = []
    for (system, concurrency), trials in values.items():
        other = values.get((baseline, concurrency), {})
        for trial in trials if system != baseline else ():
            if trial in other:
                ratio = trials[trial] / other[trial]
                ratio = 1 / ratio if METRICS[metric] == "time" else ratio
                row = {"system": system, "baseline": baseline, "concurrency": concurrency, "metric": metric}
                found.append({**row, "trial": trial, "ratio": ratio})
    return found


def speedups(ratios, seed: int = 0) -> list[dict]:
    """Geometric mean over trials of the rows of `ratios`, with 95 % interval: system, baseline, concurrency, metric,
    speedup, low, high, n (trials), method."""
    keys = ("system", "baseline", "concurrency", "metric")
    grouped: dict[tuple, list[float]] = {}
    for row in _as_rows(ratios):
        grouped.setdefault(tuple(row[key] for key in keys), []).append(row["ratio"])
    found = []
    for key, values in grouped.items():
        interval = statistics.speedup_interval(values, [1.0] * len(values), seed=seed)
        ends = {"speedup": interval.estimate, "low": interval.low, "high": interval.high}
        found.append({**dict(zip(keys, key, strict=True)), **ends, "n": interval.n, "method": interval.method})
    return found


def _arguments(line: str) -> dict:
    """The arguments of WORKLOAD and max_concurrency in the line in which vLLM prints its own."""
    found = {}
    for name in (*WORKLOAD, "max_concurrency"):
        match = re.search(rf"[(, ]{name}=('[^']*'|[^,)]*)", line)
        if match and match[1] != "None":
            found[name] = match[1].strip("'")
    return found


def _fault(run: Run) -> str:
    if "median_tpot_ms" not in run.result and "mean_tpot_ms" not in run.result:
        return "its result has no time per output token"
    bad = [name for name in METRICS if name in run.result and not (0 < run.result[name] < math.inf)]
    failed = int(run.result.get("failed", 0))
    asked = run.arguments.get("num_prompts", "")
    # vLLM before 0.11 doesn't print failures, only how many succeeded
    if not failed and asked.isdigit() and "completed" in run.result:
        failed = int(asked) - int(run.result["completed"])
    if failed > 0:
        return f"{failed} requests failed"
    return f"its result has {bad[0]} = {run.result[bad[0]]:g}" if bad else ""


def _row(path: Path, number: int, run: Run) -> dict:
    import numpy as np

    row = {"trial": path.parent.name, "system": path.stem, "run": number, **run.result, **run.arguments}
    limit = row.pop("max_concurrency", None)
    if row.get("concurrency") is None and str(limit).isdigit():
        row["concurrency"] = float(limit)
    keys = dict(zip(ENGINE, ("generation", "running", "waiting", "kv"), strict=True))
    if run.engine:
        row |= {column: float(np.median([line[key] for line in run.engine])) for column, key in keys.items()}
    row |= {"engine_lines": len(run.engine), "reason": run.reason}
    return {column: row.get(column) for column in COLUMNS}


def _known(metric: str) -> None:
    if metric not in METRICS:
        raise ValueError(f"metric is {metric!r}; expected one of {', '.join(METRICS)}")


def _as_rows(rows) -> list[dict]:
    """Dicts with None for what is missing, of dicts or of a DataFrame."""
    if hasattr(rows, "to_dict"):
        rows = rows.to_dict("records")
    return [{key: None if value != value else value for key, value in row.items()} for row in rows]


def _by_trial(rows, metric: str) -> dict[tuple[str, int], dict[str, float]]:
    """(system, concurrency) -> trial -> the metric's mean over that trial's runs; only runs that count."""
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    for row in _as_rows(rows):
        if not row["reason"] and row["concurrency"] is not None and row[metric] is not None:
            trials = found.setdefault((row["system"], int(row["concurrency"])), {})
            trials.setdefault(row["trial"], []).append(float(row[metric]))
    return {
        key: {trial: sum(values) / len(values) for trial, values in trials.items()}
        for key, trials in sorted(found.items(), key=lambda item: item[0])
    }


def _same_work(rows: list[dict]) -> None:
    """ValueError where logs say that systems of one trial were asked for different work at one concurrency."""
    first: dict[tuple, dict] = {}
    for row in rows:
        if row["reason"]:
            continue
        other = first.setdefault((row["trial"], row["concurrency"]), row)
        for name in WORKLOAD:
            a, b = other[name], row[name]
            # as read back from a CSV, a column of texts may have become one of numbers
            if a is not None and b is not None and str(a) != str(b) and not _same_number(a, b):
                raise ValueError(
                    f"{row['trial']}: {other['system']} ran with {name} = {a} and {row['system']} with {b} at "
                    f"concurrency {row['concurrency']}; only equal work gives a speed-up"
                )


def _same_number(a, b) -> bool:
    try:
        return float(a) == float(b)
    except (TypeError, ValueError):
        return False
