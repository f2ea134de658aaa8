"""Time of samplers against the LM head's matmul: for each case and H, check every system's output, then time them all
in one interleaved run.

Inputs and checks are in fmms.bench.outputs, timing in fmms.bench.timing, systems in fmms.backends.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fmms import atomic, backends
from fmms.bench import cases, outputs, records, timing

COLUMNS = (
    "case", "V", "D", "H", "dtype", "system", "timing", "l2", "median_us", "p20_us", "p80_us", "n", "correct", "reason",
)  # fmt: skip
HOST_COLUMNS = ("case", "V", "D", "H", "dtype", "system", "median_us", "p20_us", "p80_us", "n", "reason")
YARDSTICK = "matmul"
SYSTEMS = (
    YARDSTICK, "fmms", "fmms-token", "fmms-topk-topp", "torch-multinomial", "torch-gumbel", "flashinfer-logits",
    "flashinfer-topk-topp",
)  # fmt: skip


def measure(
    case_names: Sequence[str],
    rows: Sequence[int] = cases.ROWS,
    systems: Sequence[str] = SYSTEMS,
    *,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    n: int = 40,
    l2: str = "cold",
    method: str = "cuda_graph",
    draws: int = 512,
    seed: int = 0,
    budget_s: float = math.inf,
    partial: Path | None = None,
    say: Callable[[str], None] = print,
) -> list[dict]:
    """Result rows (`COLUMNS`) of every case, number of rows H and system; times are device microseconds.

    A system is timed only after its output at this case and H passed its check in this process; `reason` says what
    was checked, what is wrong, or why the system isn't available. A system that no CUDA graph can hold is timed with
    events, and the matmul then both ways, so that each has a yardstick of its own kind.

    Args:
        systems: names of fmms.backends.
        n, l2, method: as `timing.time_interleaved` takes them.
        draws: least number of draws in a statistical check.
        budget_s: once so many seconds have passed, what is left gets rows without times.
        partial: file that finished (case, H) are kept in; a run with the same settings, code and device goes on from
            there. It is removed once all is measured.
        say: is told about progress, a line per (case, H).

    Raises:
        ValueError: an unknown case, system, method or l2, or H < 1.
    """
    device = timing.check_settings(n, l2, method, device)
    chosen = [cases.get(name) for name in case_names]
    if not rows or min(rows) < 1:
        raise ValueError(f"rows is {list(rows)}; expected numbers of at least 1")
    statuses = {name: backends.probe(name, device) for name in systems}
    made = {name: backends.make(name, device) for name, status in statuses.items() if status}
    methods = {name: method if backend.graph or method != "cuda_graph" else "events" for name, backend in made.items()}
    settings = [list(case_names), list(systems), str(device), str(dtype), n, l2, method, draws, seed]
    done = _Partial(partial, settings, device)
    start, total, number = time.monotonic(), len(chosen) * len(rows), 0
    for case in chosen:
        problem = None
        for count in rows:
            number += 1
            where = f"[{number}/{total}] {case.name} H = {count}"
            if done.has(case, count):
                say(f"{where}: kept from an earlier run")
                continue
            about = {**_about(case, count, dtype), "l2": l2}
            missing = [
                {**about, "system": name, "reason": status.reason} for name, status in statuses.items() if not status
            ]
            if time.monotonic() - start > budget_s:
                late = {"reason": f"not measured: the budget of {budget_s:g} s was spent"}
                done.add(case, count, [*missing, *({**about, "system": name, **late} for name in made)], final=False)
                continue
            began = time.monotonic()
            if problem is None:
                problem = outputs.make_problem(case, max(rows), dtype, device, seed)
            found = _compare(problem, count, made, methods, n=n, l2=l2, device=device, draws=draws)
            done.add(case, count, [*missing, *({**about, **row} for row in found)])
            now = time.monotonic()
            say(f"{where}: {_progress(found)}  ({now - began:.1f} s, {now - start:.0f} s in all)")
        del problem
    order = {name: index for index, name in enumerate(systems)}
    found = [
        row
        for case in chosen
        for count in rows
        for row in sorted(done.rows(case, count), key=lambda row: order[row["system"]])
    ]
    done.finish()
    return [{column: row.get(column) for column in COLUMNS} for row in found]


def host_costs(
    case_name: str,
    rows: Sequence[int] = (1, 64),
    systems: Sequence[str] = SYSTEMS,
    *,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    calls: int = 100,
    seed: int = 0,
) -> list[dict]:
    """Rows (`HOST_COLUMNS`) of the host time of one eager call in microseconds, see `timing.host_cost`."""
    case = cases.get(case_name)
    problem, found = outputs.make_problem(case, max(rows), dtype, device, seed), []
    for count in rows:
        for name in systems:
            row = {**_about(case, count, dtype), "system": name}
            status = backends.probe(name, device)
            if status:
                call, inputs = backends.make(name, device), problem.inputs(count)
                try:
                    row |= _microseconds(timing.host_cost(lambda f=call, x=inputs: f(*x), device, calls))
                except Exception as error:  # a peer that breaks is a row
                    row["reason"] = outputs.describe(error)
            else:
                row["reason"] = status.reason
            found.append({column: row.get(column) for column in HOST_COLUMNS})
    return found


def relative(results):
    """`results` (a DataFrame of `COLUMNS`) with `relative`: median over the matmul's at the same case, H and timing.

    Rows without a time, or without a matmul timed alike, are left out.
    """
    keys = ["case", "H", "timing", "l2"]
    timed = results.dropna(subset=["median_us"])
    yardstick = timed[timed["system"] == YARDSTICK].set_index(keys)["median_us"].rename("matmul_us")
    joined = timed.join(yardstick, on=keys, how="inner")
    return joined.assign(relative=joined["median_us"] / joined["matmul_us"])


def reading(results, profile: str) -> str:
    """What a figure of `relative(results)` says, in a sentence or two of HTML."""
    ours = relative(results)
    ours = ours[ours["system"] == "fmms"]
    if ours.empty:
        return "<p>fmms was not timed here.</p>"
    if profile == "cpu":
        return (
            "<p>The interpreter runs each operation of the kernels in NumPy: these times say nothing about a GPU.</p>"
        )
    sentences = []
    for case, points in ours.groupby("case", sort=False):
        small, large = points[points["H"] <= 16]["relative"], points[points["H"] > 16]["relative"]
        parts = [
            f"{part.min():.2f} to {part.max():.2f} {where}"
            for part, where in ((small, "for H up to 16"), (large, "above"))
            if len(part)
        ]
        sentences.append(f"{case}: {', '.join(parts)}")
    return f"<p>fmms over the matmul alone, log-probabilities included: {'; '.join(sentences)}.</p>"


def require(results) -> None:
    """AssertionError that lists the systems whose output failed its check, if any did."""
    wrong = results[results["correct"].map(str) == "False"]
    lines = [f"{row.system} at {row.case}, H = {row.H}: {row.reason}" for row in wrong.itertuples()]
    if lines:
        raise AssertionError(f"{len(lines)} checks failed, those systems were not timed there:\n" + "\n".join(lines))


def _compare(problem, rows, made, methods, n, l2, device, draws) -> list[dict]:
    """One (case, H): check each system, time those that are right."""
    found, calls, warmup = [], {}, 3 if device.type == "cuda" else 1
    for name, backend in made.items():
        verdict = outputs.check(backend, problem, rows, draws)
        wanted = [methods[name]]
        if name == YARDSTICK:  # once for every way that a system is timed
            wanted = sorted(set(methods.values()) | set(wanted))
        for method in wanted:
            row = {"system": name, "timing": method, "correct": verdict.correct, "reason": verdict.reason}
            found.append(row)
            if not verdict.correct:
                continue
            try:
                inputs = problem.inputs(rows)
                call = timing.prepare(lambda f=backend, x=inputs: f(*x), method, device, warmup)
            except Exception as error:
                row["reason"] = f"right ({verdict.reason}), but not timed: {outputs.describe(error)}"
            else:
                calls[len(found) - 1] = call
    if calls:
        method = next(iter(calls.values())).method
        seconds = timing.time_interleaved(calls, n, l2, method, device, seed=rows)
        for index, values in seconds.items():
            found[index] |= _microseconds(values)
    return found


def _about(case: cases.Case, rows: int, dtype: torch.dtype) -> dict:
    return {"case": case.name, "V": case.V, "D": case.D, "H": rows, "dtype": str(dtype).removeprefix("torch.")}


def _microseconds(seconds) -> dict:
    found = timing.quantiles(seconds * 1e6)
    return {"median_us": found["median"], "p20_us": found["p20"], "p80_us": found["p80"], "n": found["n"]}


def _progress(found: list[dict]) -> str:
    wrong = [row["system"] for row in found if not row["correct"]]
    times = [f"{row['system']} {row['median_us']:.0f} us" for row in found if "median_us" in row]
    return ", ".join(times) + (f"; WRONG: {', '.join(wrong)}" if wrong else "")


class _Partial:
    """Finished (case, H), in memory and in a file that another run may continue from."""

    def __init__(self, path: Path | None, settings: list, device: torch.device):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else records.cpu_model()
        sources = sorted(Path(__file__).resolve().parents[1].rglob("*.py"))
        code = hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in sources)).hexdigest()
        self._path, self._stamp, self._rows, self._complete = path, [settings, name, torch.__version__, code], {}, True
        if path is not None and path.is_file():
            try:
                stored = json.loads(path.read_text(encoding="utf-8"))
                if stored["stamp"] == json.loads(json.dumps(self._stamp)):
                    self._rows = stored["rows"]
            except (ValueError, KeyError, TypeError):
                pass  # an unreadable file is a run from the start

    def has(self, case, rows: int) -> bool:
        return self._key(case, rows) in self._rows

    def add(self, case, rows: int, found: list[dict], final: bool = True) -> None:
        self._rows[self._key(case, rows)] = found
        self._complete &= final
        if self._path is not None and final:
            atomic.write_text(self._path, records.strict_json({"stamp": self._stamp, "rows": self._rows}))

    def rows(self, case, rows: int) -> list[dict]:
        return self._rows[self._key(case, rows)]

    def finish(self) -> None:
        if self._path is not None and self._complete:
            self._path.unlink(missing_ok=True)

    @staticmethod
    def _key(case, rows: int) -> str:
        return f"{case.name}/{rows}"
