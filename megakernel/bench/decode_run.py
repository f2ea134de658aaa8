"""Decoding in one launch: the reference's tokens, the same every time, those that fmms draws, and how long it takes.

Every seed is a model, a prompt and an engine of its own, one after the other (`measure`). A gate is a row that says
whether it passed, and if not, whether that is explained: nothing is rounded up to a pass. Times are withheld unless the
tokens of the same build passed or are explained. The figures of these rows are in megakernel.bench.decode_figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import fmms
from fmms import noise, testing
from fmms.bench import outputs
from megakernel import DecodeEngine, reference
from megakernel.bench import decoding, reference_run, teacher_forced
from megakernel.bench.teacher_forced import Case
from megakernel.build import BuildError
from megakernel.engine import Decoded

CHECK_COLUMNS = ("seed", "schedule", "gate", "value", "bound", "passed", "explained", "reason")
"""value: what was counted or measured, such as "31/32"; explained: whether a gate that failed has its reason."""
SAMPLE_COLUMNS = ("seed", "impl", "step", "token", "expected", "margin", "error", "explained")
"""A draw that is not fmms's. margin: the error of every logit / T, in nats, that fmms's draw would bear; error: that
of the logits / T of the two."""
FREE, ALIKE = "free-running tokens", "launches of one token"
"""Gates without which no time is written."""
METHODS = {
    "cuda": "from each token of a launch to the next by the GPU's clock, so from the second token on; whole launches "
    "by CUDA events around the call, so what the host does counts",
    "cpu": "the same by the host's clock, of the host build, where fibres stand for GPU threads: no speed of anything; "
    "whole launches by perf_counter",
}


@dataclass
class Measured:
    """What `measure` found, as rows."""

    checks: list[dict] = field(default_factory=list)
    """CHECK_COLUMNS."""
    steps: list[dict] = field(default_factory=list)
    """`teacher_forced.STEP_COLUMNS`."""
    routing: list[dict] = field(default_factory=list)
    """`teacher_forced.ROUTING_COLUMNS`."""
    samples: list[dict] = field(default_factory=list)
    """SAMPLE_COLUMNS."""
    decode: list[dict] = field(default_factory=list)
    """`decoding.COLUMNS`."""


def measure(
    name: str,
    seeds: Sequence[int],
    prompt_tokens: int,
    tokens: int,
    device: torch.device | str = "cpu",
    *,
    schedules: Sequence[str] = ("static", "dynamic"),
    preset: str = "h200",
    workers: int | None = None,
    repeated_seeds: Sequence[int] = (0,),
    repeats: int = 5,
    repeated_tokens: int | None = None,
    temperature: float = 0.8,
    sample_seed: int = 7,
    impls: Sequence[str] = ("torch",),
    timed_launches: int = 1,
    say: Callable[[str], None] = print,
) -> Measured:
    """All gates at every seed; the first seed is timed.

    Args:
        name, prompt_tokens, tokens, device, preset, workers: as for `teacher_forced.build`.
        seeds: of weights and prompts.
        schedules: whose tokens are checked and timed; the teacher-forced pass is that of the first, and logits of the
            others have to be equal to its logits bit for bit.
        repeated_seeds: of `seeds`, those whose launches are repeated to see that they are the same.
        repeats: launches of `repeated_tokens` (None: `tokens`), greedy and sampled.
        temperature, sample_seed, impls: of the sampling that is compared with `fmms.sample`.
        timed_launches: of `tokens` each, for each schedule.
        say: is told about progress, a line for each seed.

    Raises:
        ValueError: as for `teacher_forced.build`, or there is no schedule.
        BuildError: the device code can't be compiled here. A launch that fails is a gate that is missed.
    """
    if not schedules:
        raise ValueError("schedules: expected at least one")
    found, timed = Measured(), []
    several = repeated_tokens or tokens
    for seed in seeds:
        before = len(found.checks)
        try:
            case = teacher_forced.build(
                name, seed, prompt_tokens, tokens, device, preset=preset, workers=workers, schedule=schedules[0]
            )
            engines = {schedules[0]: case.engine}
            engines |= {schedule: teacher_forced.rescheduled(case.engine, schedule) for schedule in schedules[1:]}
            free = _compare_with_reference(found, case, engines)
            if seed in repeated_seeds:
                options = {"greedy": {}, "sampled": dict(temperature=temperature, seed=sample_seed)}
                found.checks += [
                    repeat_check(case, schedule, engine, kind, several, repeats, given)
                    for schedule, engine in engines.items()
                    for kind, given in options.items()
                ]
            checks, samples = sample_checks(case, schedules[0], several, temperature, sample_seed, impls)
            found.checks, found.samples = found.checks + checks, found.samples + samples
            if seed == seeds[0]:
                timed = time_launches(case, engines, free, timed_launches)
        except BuildError:
            raise
        except RuntimeError as error:
            say(f"{name}, seed {seed}: {error}")  # of a deadlock, the state of every worker
            found.checks.append(broken_check(seed, error))
        case = engines = free = None  # the next seed's weights need the room
        reference_run.release(device)
        bad = [row["gate"] for row in found.checks[before:] if not (row["passed"] or row["explained"])]
        missed = sum(not row["passed"] for row in found.checks[before:])
        how = f", not explained: {', '.join(bad)}" if bad else ", explained" if missed else ""
        say(f"{name}, seed {seed}: {len(found.checks) - before} gates, {missed} missed{how}")
    found.decode = decode_rows(timed, found.checks)
    return found


def _compare_with_reference(found: Measured, case: Case, engines: dict[str, DecodeEngine]) -> dict[str, Decoded]:
    """The teacher-forced pass of the first engine and the free decodes of all, which are returned by schedule."""
    first, *others = engines
    mine = teacher_forced.megakernel_steps(case.engine, case.text)
    compared = teacher_forced.compare(case, mine, first)
    found.steps += compared.steps
    found.routing += compared.routing
    found.checks += forced_checks(case, first, mine, compared)
    free = {}
    for schedule, engine in engines.items():
        engine.rewind()
        free[schedule] = engine.decode(len(case.text), return_logits=True)
        found.checks.append(free_check(case, schedule, free[schedule]))
    found.checks += [same_check(case, schedule, first, free) for schedule in others]
    return free


def broken_check(seed: int, error: Exception) -> dict:
    """The gate that launches end, missed by one that was given up or failed: what was found before is kept."""
    about = {"seed": seed, "schedule": "all", "gate": "launches", "value": type(error).__name__, "bound": "none fails"}
    return about | {"passed": False, "explained": False, "reason": outputs.describe(error)}


def check(case: Case, schedule: str, gate: str, value, bound, passed, explained=False, reason: str = "") -> dict:
    """A row of CHECK_COLUMNS."""
    about = {"seed": case.seed, "schedule": schedule, "gate": gate, "value": value, "bound": bound}
    return about | {"passed": bool(passed), "explained": bool(explained) and not passed, "reason": reason}


# ----------------------------------------------------------------------------------------------- against the reference


def free_check(case: Case, schedule: str, decoded: Decoded) -> dict:
    """The gate of a free-running greedy decode in one launch: every token the reference's.

    The first other token is explained only if the distance of the reference's two largest logits there is below the
    largest difference of the logits; what follows it is another text.
    """
    tokens, expected = decoded.tokens.tolist(), case.expected
    count = len(expected.tokens)
    pairs = enumerate(zip(tokens, expected.tokens, strict=True))
    first = next((step for step, (theirs, mine) in pairs if theirs != mine), None)
    if first is None:
        return check(case, schedule, FREE, f"{count}/{count}", "all", True)
    error = float((decoded.logits[first] - expected.logits[first].float()).abs().max())
    margin = expected.margins[first]
    reason = (
        f"token {first} is {tokens[first]}, the reference's {expected.tokens[first]}; its margin there is "
        f"{margin:.3g}, the logits differ by up to {error:.3g}"
    )
    return check(
        case, schedule, FREE, f"{first}/{count}", "all", False, 0 <= margin < error, reason
    )  # a NaN explains nothing


def forced_checks(
    case: Case, schedule: str, mine: teacher_forced.Steps, compared: teacher_forced.Compared
) -> list[dict]:
    """The gates of a teacher-forced pass: cosine and argmax of each step, experts of each layer, and that one launch
    that reads all tokens computes what a launch for each did, bit for bit."""
    rows, checks = compared.steps, []
    count = len(rows)
    for gate, what, bound in (
        ("teacher-forced cosine", "cosine", f">= {teacher_forced.LOGIT_COSINE:g}"),
        ("teacher-forced argmax", "argmax", f"equal where the margin is >= {teacher_forced.NEAR_TIE:g}"),
    ):
        missed = [row for row in rows if what in row["missed"]]
        explained = all(row["explained"] != "unexplained" for row in missed)
        reason = "; ".join(f"step {row['step']}: {row['explained']}" for row in missed)
        if what == "cosine":
            least = f"least {np.min([row['cosine'] for row in rows]):.6f}"  # NumPy's: Python's may pass over a NaN
            reason = f"{least}; {reason}" if reason else least
        checks.append(
            check(case, schedule, gate, f"{count - len(missed)}/{count}", bound, not missed, explained, reason)
        )
    checks.append(experts_check(case, schedule, compared))

    engine = case.engine
    engine.rewind()
    together = engine.decode(count, forced=case.text[1:], return_logits=True)
    same = torch.equal(together.logits.view(torch.int32), mine.logits.view(torch.int32))
    checks.append(check(case, schedule, ALIKE, "equal" if same else "other", "equal bits", same))
    return checks


def experts_check(case: Case, schedule: str, compared: teacher_forced.Compared) -> dict:
    """The gate of the choices of experts in a teacher-forced pass: the reference's, or near-ties and what follows them.

    Other choices are explained if the errors of the two router logits can bridge their margin; see
    `teacher_forced.routing_rows`.
    """
    differ = sum(row["swapped"] > 0 for row in compared.routing)
    by = {status: sum(row["status"] == status for row in compared.routing) for status in STATUSES}
    reason = ", ".join(f"{number} {status}" for status, number in by.items() if number)
    passed = not by["both errors"] and not by["unexplained"]
    value = f"{compared.choices - differ}/{compared.choices}"
    return check(case, schedule, "experts", value, "all, or near-ties", passed, not by["unexplained"], reason)


STATUSES = ("near-tie", "downstream", "both errors", "unexplained")
"""Of `teacher_forced.routing_rows`."""


def same_check(case: Case, schedule: str, first: str, free: dict[str, Decoded]) -> dict:
    """The gate that another schedule computes the same logits, bit for bit."""
    one, other = free[first].logits, free[schedule].logits
    same = torch.equal(one.view(torch.int32), other.view(torch.int32))
    steps = (one.view(torch.int32) == other.view(torch.int32)).all(-1)
    reason = "" if same else f"from token {int((~steps).int().argmax())} on, by up to {(one - other).abs().max():.3g}"
    value = f"{int(steps.sum())}/{len(steps)}"
    return check(case, schedule, f"logits of {first}", value, "equal bits", same, 0, reason)


# --------------------------------------------------------------------------------------------------- again, and sampled


def repeat_check(
    case: Case, schedule: str, engine: DecodeEngine, kind: str, tokens: int, repeats: int, options: dict
) -> dict:
    """The gate that launches decode the same tokens every time.

    Args:
        kind: of the tokens, for the row.
        options: of `DecodeEngine.decode`.
    """
    runs = []
    for _ in range(repeats):
        engine.rewind()
        runs.append(engine.decode(tokens, **options).tokens.tolist())
    same = sum(run == runs[0] for run in runs)
    valid = min(runs[0]) >= 0
    reason = f"{tokens} tokens each" + ("" if valid else ", one of them not a number")
    return check(
        case, schedule, f"same {kind} tokens", f"{same}/{repeats}", "all", same == repeats and valid, 0, reason
    )


def sample_checks(
    case: Case, schedule: str, tokens: int, temperature: float, seed: int, impls: Sequence[str]
) -> tuple[list[dict], list[dict]]:
    """The gates that sampled tokens are what `fmms.sample` draws from the same hidden states: checks, SAMPLE_COLUMNS.

    The hidden states are those that launches of one token leave behind the last layer; the norm before the head is the
    reference's. Where fmms draws another token, it has to be a matter of rounding: its draw would have changed with an
    error of the logits no larger than theirs.
    """
    engine, config = case.engine, case.config
    engine.rewind()
    together = engine.decode(tokens, temperature=temperature, seed=seed).tokens
    engine.rewind()
    states, drawn, logits = [], [], []
    for _ in range(tokens):
        one = engine.decode(1, temperature=temperature, seed=seed, return_logits=True)
        states.append(engine.memory.tensor(f"layers.{config.num_hidden_layers - 1}.mlp_residual").clone())
        drawn.append(one.tokens[0])
        logits.append(one.logits[0])
    drawn, logits = torch.stack(drawn), torch.stack(logits)
    same = int((drawn == together).sum())
    gate = "sampled in launches of one token"
    checks = [check(case, schedule, gate, f"{same}/{tokens}", "all", same == tokens)]

    weights = engine.weights
    hidden = reference.rms_norm(torch.stack(states), weights["model.norm.weight"], config.rms_norm_eps)
    head, device = weights["lm_head.weight"], hidden.device
    seeds = noise.row_seeds(seed, 1, device).expand(tokens).contiguous()
    positions = torch.arange(tokens, device=device)
    settings = dict(seed=seeds, position=positions)
    plain = fmms.sample(hidden, head, temperature, impl="torch", return_logits=True, **settings).logits
    heat = torch.full((tokens,), float(temperature), device=device)
    samples = []
    for impl in impls:
        ids = fmms.sample(hidden, head, temperature, impl=impl, **settings).ids
        wrong = (ids != drawn).nonzero()[:, 0]
        rows = []
        if len(wrong):
            margins = testing.decision_margin(plain[wrong], heat[wrong], seeds[wrong], positions[wrong])[:, 0]
            theirs = fmms.sample(hidden, head, temperature, impl=impl, return_logits=True, **settings).logits[wrong]
            apart = torch.stack([(each - plain[wrong]).abs().amax(-1) for each in (logits[wrong], theirs)]).sum(0)
            errors = apart / max(temperature, 1e-30) + outputs.TRANSCENDENTAL_NATS
            for at, margin, error in zip(wrong.tolist(), margins.tolist(), errors.tolist(), strict=True):
                rows.append(
                    {
                        "seed": case.seed, "impl": impl, "step": at, "token": int(drawn[at]),
                        "expected": int(ids[at]), "margin": margin, "error": error, "explained": margin <= error,
                    }
                )  # fmt: skip
        reason = "; ".join(
            f"token {row['step']} is {row['token']}, not {row['expected']}: a margin of {row['margin']:.2g} nats, "
            f"logits off by {row['error']:.2g}"
            for row in rows
        )
        checks.append(
            check(
                case, schedule, f"fmms.sample, {impl}", f"{tokens - len(rows)}/{tokens}", "all", not rows,
                all(row["explained"] for row in rows), reason,
            )
        )  # fmt: skip
        samples += rows
    return checks, samples


# ---------------------------------------------------------------------------------------------------------------- speed


@dataclass(frozen=True)
class Timed:
    """The launches of one schedule."""

    schedule: str
    about: dict
    """`decoding.row` without config, as keywords."""
    config: str
    tokens: int
    iterations: np.ndarray
    """Seconds, fp64 [launches * (tokens - 1)]: from each token of a launch to the next."""
    launches: np.ndarray
    """Seconds, fp64 [launches]: of whole calls."""
    other: int
    """Launches that decoded other tokens than those that were checked."""


def time_launches(case: Case, engines: dict[str, DecodeEngine], free: dict[str, Decoded], launches: int) -> list[Timed]:
    """Greedy launches of as many tokens as `case.expected` has, of each schedule in turn; see METHODS.

    Args:
        free: the decode of each schedule that was checked.
    """
    count, device = len(case.expected.tokens), case.engine.device
    length = len(case.prompt) + count - 1
    needed = reference_run.bytes_per_token(case.config, length, 2)
    steps: dict[str, list] = {schedule: [] for schedule in engines}
    wholes: dict[str, list] = {schedule: [] for schedule in engines}
    other = dict.fromkeys(engines, 0)
    for _ in range(launches):
        for schedule, engine in engines.items():
            engine.rewind()
            seconds, decoded = _timed(lambda engine=engine: engine.decode(count), device)
            wholes[schedule].append(seconds)
            steps[schedule].append(np.diff(decoded.times.cpu().numpy()) / 1e9)
            other[schedule] += not torch.equal(decoded.tokens, free[schedule].tokens)
    dims = f"{case.name} bfloat16, {case.engine.graph.knobs.workers} workers"
    about = dict(system="megakernel", length=length, steps=count, bytes_per_token=needed)
    return [
        Timed(
            schedule, about, f"{dims}, {schedule}", count,
            np.concatenate([*steps[schedule], []]), np.array(wholes[schedule]), other[schedule],
        )
        for schedule in engines
    ]  # fmt: skip


def _timed(call: Callable[[], Decoded], device: torch.device) -> tuple[float, Decoded]:
    """Seconds of a call, and what it returned."""
    if device.type != "cuda":
        start = time.perf_counter()
        result = call()
        return time.perf_counter() - start, result
    with torch.cuda.device(device):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize()
        events[0].record()
        result = call()
        events[1].record()
        torch.cuda.synchronize()
        return events[0].elapsed_time(events[1]) / 1e3, result


def decode_rows(timed: Iterable[Timed], checks: Sequence[dict]) -> list[dict]:
    """Decode rows (`decoding.COLUMNS`) of each schedule: a token of a launch, and a launch over its tokens.

    Both are without times where a check of this build's tokens (FREE, ALIKE), at any seed, neither passed nor is
    explained, or where a timed launch decoded other tokens.
    """
    rows = []
    alike = [row for row in checks if row["gate"] == ALIKE]
    for one in timed:
        free = [row for row in checks if row["gate"] == FREE and row["schedule"] == one.schedule]
        bad = [row for row in (*free, *alike) if not (row["passed"] or row["explained"])]
        reason = f"tokens equal the reference's at {sum(row['passed'] for row in free)} of {len(free)} seeds"
        reason += "".join(f"; seed {row['seed']}: {row['reason']}" for row in free if not row["passed"])
        if bad:
            reason += f"; not timed: {bad[0]['gate']} of seed {bad[0]['seed']} is not explained"
        elif one.other:
            reason += f"; not timed: {one.other} timed launches decoded other tokens"
        for seconds, what in (
            (one.iterations, "a token of a launch"),
            (one.launches / one.tokens, "a launch / tokens"),
        ):
            times = {}
            if not bad and not one.other and len(seconds):
                times = decoding.latencies(seconds, one.about["bytes_per_token"])
            row = decoding.row(config=f"{one.config}, {what}", **one.about)
            rows.append(row | times | {"tokens_match": free[0]["value"] if free else "", "reason": reason})
    return rows


# ------------------------------------------------------------------------------------------------------------- verdicts


def summary(checks) -> Any:
    """One line for each gate and schedule over the seeds: a DataFrame of the rows of CHECK_COLUMNS."""
    import pandas

    frame = pandas.DataFrame(checks)
    rows = []
    for (gate, schedule), some in frame.groupby(["gate", "schedule"], sort=False):
        passed, explained = int(some["passed"].sum()), int(some["explained"].sum())
        reasons = [
            f"seed {row.seed}: {row.reason}" for row in some.itertuples() if isinstance(row.reason, str) and row.reason
        ]
        rows.append(
            {
                "gate": gate,
                "schedule": schedule,
                "found": total(some["value"]),
                "bound": some["bound"].iloc[0],
                "seeds passed": f"{passed} of {len(some)}",
                "explained": f"{explained} of {len(some) - passed}" if passed < len(some) else "",
                "about": "; ".join(reasons),
            }
        )
    return pandas.DataFrame(rows)


def total(values: Iterable[str]) -> str:
    """Fractions such as "31/32" added up; other texts once each."""
    values = [str(value) for value in values]
    parts = [value.split("/") for value in values]
    if values and all(len(part) == 2 and all(number.isdigit() for number in part) for part in parts):
        return "/".join(str(sum(int(part[place]) for part in parts)) for place in (0, 1))
    return ", ".join(dict.fromkeys(values))


PUBLISHED = {
    "free-running greedy tokens equal to HF": (FREE, None),
    "determinism: identical launches": ("same greedy tokens", None),
    "teacher-forced argmax equal to HF": ("teacher-forced argmax", None),
    "steps with logit cosine at or above threshold": ("teacher-forced cosine", None),
    "MoE layer-steps with exact routing": ("experts", None),
    "near-tie routing escapes": ("experts", ("near-tie", "downstream")),
    "rejected routing mismatches": ("experts", ("both errors", "unexplained")),
}
"""Gates of the published decoder on an MI300X, ours of the same quantity, the statuses of experts that are counted."""


def beside_published(checks, routing, published) -> Any:
    """Our gates of the first schedule beside those published for a megakernel on an MI300X: a DataFrame.

    Args:
        checks, routing: DataFrames of CHECK_COLUMNS and `teacher_forced.ROUTING_COLUMNS`.
        published: `fmms.bench.published.teacher_forced()`.
    """
    import pandas

    rows, first = [], checks["schedule"].iloc[0]
    theirs = published[published["section"] == "gate"].set_index("metric")
    for metric, (gate, statuses) in PUBLISHED.items():
        some = checks[(checks["gate"] == gate) & (checks["schedule"] == first)]
        if statuses:
            mine = str(int((routing["status"].isin(statuses) & (routing["swapped"] > 0)).sum()))
        else:
            mine = total(some["value"]) if len(some) else ""
        rows.append(
            {"quantity": metric.replace("HF", "the reference"), "ours": mine, "MI300X": theirs["value"][metric]}
        )
    return pandas.DataFrame(rows)


def speed_reading(decode, profile: str) -> str:
    """What the times say, in sentences of HTML; a DataFrame of `decode_rows`."""
    timed = decode.dropna(subset=["p50_ms"])
    if timed.empty:
        return "<p>Nothing was timed here; the last column says why.</p>"
    parts = [f"{row.config.split(', ', 1)[1]} {row.p50_ms:.4g} ms" for row in timed.itertuples()]
    claim = " The host build on a CPU, with fibres for threads, and a tiny model: no speed of anything."
    return f"<p>Median: {'; '.join(parts)}.{claim if profile == 'cpu' else ''}</p>"


def require(checks: Sequence[dict], decode: Sequence[dict] = ()) -> str:
    """AssertionError that lists gates that failed without an explanation; else a sentence that counts them.

    Args:
        checks: rows as measured.
        decode: decode rows; a launch that was timed and decoded other tokens fails, too.
    """
    lines = [
        f"seed {row['seed']}, {row['schedule']}: {row['gate']} {row['value']} ({row['bound']}); {row['reason']}"
        for row in checks
        if not (row["passed"] or row["explained"])
    ]
    lines += [f"{row['config']}: {row['reason']}" for row in decode if "decoded other tokens" in (row["reason"] or "")]
    if lines:
        raise AssertionError(f"{len(lines)} gates failed without an explanation:\n" + "\n".join(lines))
    missed = [row for row in checks if not row["passed"]]
    return f"{len(checks) - len(missed)} of {len(checks)} gates passed, {len(missed)} missed and explained"
