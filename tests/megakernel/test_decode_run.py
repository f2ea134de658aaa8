"""Notebook 24's gates: right decodes pass, wrong ones don't, and no time is written beside them."""

import dataclasses
import math

import numpy as np
import pytest
import torch

pytest.importorskip("pandas")

from fmms import paths
from fmms.bench import published, records
from megakernel.bench import decode_run as run
from megakernel.bench import decoding, teacher_forced
from megakernel.config import TINY
from megakernel.engine import Decoded

TOKENS = 4
SETTINGS = dict(prompt_tokens=12, tokens=TOKENS, workers=2, repeats=2, repeated_tokens=2, say=lambda line: None)


@pytest.fixture(scope="module")
def measured():
    return run.measure("tiny", [1, 2], repeated_seeds=[1], timed_launches=2, **SETTINGS)


@pytest.fixture(scope="module")
def case():
    return teacher_forced.build("tiny", 1, 12, TOKENS, workers=2)


@pytest.fixture(scope="module")
def decoded(case):
    case.engine.rewind()
    return case.engine.decode(TOKENS, return_logits=True)


# ------------------------------------------------------------------------------------------------------------- measured


def test_every_gate_of_every_seed_is_a_row(measured):
    gates = [
        "teacher-forced cosine", "teacher-forced argmax", "experts", run.ALIKE, run.FREE, run.FREE, "logits of static",
        "sampled in launches of one token", "fmms.sample, torch",
    ]  # fmt: skip
    found = [row["gate"] for row in measured.checks if row["seed"] == 2]
    assert found == gates
    again = [row for row in measured.checks if row["gate"].startswith("same ")]
    assert [(row["seed"], row["schedule"], row["gate"], row["value"]) for row in again] == [
        (1, schedule, f"same {kind} tokens", "2/2")
        for schedule in ("static", "dynamic")
        for kind in ("greedy", "sampled")
    ]
    assert all(tuple(row) == run.CHECK_COLUMNS for row in measured.checks)
    assert all(row["passed"] or row["explained"] for row in measured.checks), measured.checks
    assert not any(row["passed"] and row["explained"] for row in measured.checks)
    assert len(measured.steps) == 2 * TOKENS and all(
        tuple(row) == teacher_forced.STEP_COLUMNS for row in measured.steps
    )
    assert "gates passed" in run.require(measured.checks, measured.decode)


def test_times_stand_beside_the_check_of_their_tokens(measured):
    assert [row["config"] for row in measured.decode] == [
        f"tiny bfloat16, 2 workers, {schedule}, {what}"
        for schedule in ("static", "dynamic")
        for what in ("a token of a launch", "a launch / tokens")
    ]
    for row, n in zip(measured.decode, (2 * (TOKENS - 1), 2) * 2, strict=True):
        assert tuple(row) == decoding.COLUMNS
        assert (row["system"], row["T"], row["tokens"], row["n"]) == ("megakernel", 12 + TOKENS - 1, TOKENS, n)
        assert 0 < row["min_ms"] <= row["p50_ms"] <= row["p95_ms"]
        assert row["tokens_match"] == f"{TOKENS}/{TOKENS}"
        assert row["reason"].startswith("tokens equal the reference's at")
        assert row["gb_per_token"] == (TINY.weight_bytes() + TINY.cache_bytes(15, latent=True)) / 1e9
    assert "no speed of anything" in run.speed_reading(frame(measured.decode), "cpu")


def test_a_launch_that_fails_is_a_missed_gate_and_what_was_found_is_kept(monkeypatch):
    real = run.repeat_check

    def broken(case, schedule, *given):
        if schedule == "dynamic":
            raise RuntimeError("launch of the megakernel failed: an illegal memory access was encountered")
        return real(case, schedule, *given)

    monkeypatch.setattr(run, "repeat_check", broken)
    found = run.measure("tiny", [1, 3], repeated_seeds=[1], **SETTINGS)
    (row,) = (row for row in found.checks if row["gate"] == "launches")
    assert (row["seed"], row["value"], row["passed"], row["explained"]) == (1, "RuntimeError", False, False)
    assert "an illegal memory access" in row["reason"]
    assert {row["seed"] for row in found.steps} == {1, 3}
    assert not found.decode, "nothing was timed"
    with pytest.raises(AssertionError, match="seed 1, all: launches RuntimeError"):
        run.require(found.checks)


def test_no_schedule_is_refused():
    with pytest.raises(ValueError, match="schedules: expected at least one"):
        run.measure("tiny", [0], schedules=[], **SETTINGS)


# ------------------------------------------------------------------------------------------------------ tokens compared


def changed(decoded: Decoded, step: int, token: int, logits=None) -> Decoded:
    tokens = decoded.tokens.clone()
    tokens[step:] = token
    return decoded._replace(tokens=tokens, logits=decoded.logits if logits is None else logits)


def test_another_token_is_explained_by_a_margin_below_the_error_only(case, decoded):
    assert run.free_check(case, "static", decoded)["passed"]
    other = (case.expected.tokens[2] + 1) % TINY.vocab_size
    row = run.free_check(case, "static", changed(decoded, 2, other))
    assert (row["value"], row["passed"], row["explained"]) == (f"2/{TOKENS}", False, False)
    assert row["reason"].startswith(
        f"token 2 is {other}, the reference's {case.expected.tokens[2]}; its margin there is"
    )
    for error, explained in ((0.9, False), (1.1, True), (math.nan, False)):
        logits = case.expected.logits.float().clone()
        logits[2, other] += error * case.expected.margins[2]
        row = run.free_check(case, "static", changed(decoded, 2, other, logits))
        assert row["explained"] == explained, (error, row)
        assert not row["passed"]


def test_what_a_launch_for_each_token_computes_otherwise_is_seen(case):
    mine = teacher_forced.megakernel_steps(case.engine, case.text)
    compared = teacher_forced.compare(case, mine)
    *_, alike = run.forced_checks(case, "static", mine, compared)
    assert alike["gate"] == run.ALIKE and alike["passed"]
    logits = mine.logits.clone()
    logits[3, 5] = torch.nextafter(logits[3, 5], torch.tensor(math.inf))
    *_, alike = run.forced_checks(case, "static", dataclasses.replace(mine, logits=logits), compared)
    assert not alike["passed"] and not alike["explained"]


def test_missed_steps_and_experts_are_counted_with_their_reasons(case):
    mine = teacher_forced.megakernel_steps(case.engine, case.text)
    compared = teacher_forced.compare(case, mine)
    steps = [dict(row, missed="", explained="") for row in compared.steps]
    steps[1] |= dict(missed="cosine", explained="rounding", cosine=0.99)
    steps[2] |= dict(missed="cosine, argmax", explained="unexplained", cosine=0.98)
    swaps = [dict(step=1, swapped=1, status="near-tie"), dict(step=2, swapped=0, status="both errors")]
    given = dataclasses.replace(compared, steps=steps, routing=swaps)
    cosine, argmax, experts, _ = run.forced_checks(case, "static", mine, given)
    assert (cosine["value"], cosine["passed"], cosine["explained"]) == ("2/4", False, False)
    assert cosine["reason"] == "least 0.980000; step 1: rounding; step 2: unexplained"
    assert (argmax["value"], argmax["reason"]) == ("3/4", "step 2: unexplained")
    assert (experts["value"], experts["passed"], experts["explained"]) == ("7/8", False, True)
    assert experts["reason"] == "1 near-tie, 1 both errors"
    experts = run.experts_check(case, "static", dataclasses.replace(compared, routing=swaps[:1]))
    assert experts["passed"] and experts["value"] == "7/8"
    swaps[1]["status"] = "unexplained"
    experts = run.experts_check(case, "static", dataclasses.replace(compared, routing=swaps))
    assert not experts["passed"] and not experts["explained"]


def test_a_schedule_that_computes_otherwise_is_seen(case, decoded):
    free = {"static": decoded, "dynamic": decoded}
    assert run.same_check(case, "dynamic", "static", free)["passed"]
    logits = decoded.logits.clone()
    logits[2, 0] += 0.5
    row = run.same_check(case, "dynamic", "static", free | {"dynamic": decoded._replace(logits=logits)})
    assert (row["value"], row["passed"], row["explained"]) == (f"{TOKENS - 1}/{TOKENS}", False, False)
    assert row["reason"] == "from token 2 on, by up to 0.5"


class Forgetful:
    """An engine that decodes other tokens in some launches."""

    def __init__(self, case, runs):
        self.engine, self.runs = case.engine, list(runs)

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def decode(self, n, **options):
        found = self.engine.decode(n, **options)
        add = self.runs.pop(0)
        return found._replace(tokens=torch.full_like(found.tokens, -1) if add is None else found.tokens + add)


def test_launches_that_decode_other_tokens_are_seen(case, decoded):
    def repeated(runs):
        return run.repeat_check(case, "static", Forgetful(case, runs), "greedy", 2, len(runs), {})

    assert repeated([0, 0, 0])["passed"]
    row = repeated([0, 1, 0])
    assert (row["value"], row["passed"], row["explained"]) == ("2/3", False, False)
    assert not repeated([None, None])["passed"]

    free = {"static": decoded}
    for runs, other in (([0, 0], 0), ([0, 1], 1)):
        (timed,) = run.time_launches(case, {"static": Forgetful(case, runs)}, free, 2)
        assert timed.other == other
        assert len(timed.iterations) == 2 * (TOKENS - 1) and len(timed.launches) == 2
        checks = [run.check(case, "static", run.FREE, f"{TOKENS}/{TOKENS}", "all", True)]
        rows = run.decode_rows([timed], checks)
        assert all((row["p50_ms"] is None) == (other > 0) for row in rows)
    with pytest.raises(AssertionError, match="1 timed launches decoded other tokens"):
        run.require(checks, rows)


def test_draws_are_those_of_fmms(case):
    checks, samples = run.sample_checks(case, "static", 3, 0.8, 7, ["torch"])
    assert [row["value"] for row in checks] == ["3/3", "3/3"] and all(row["passed"] for row in checks)
    assert not samples


def test_a_draw_of_another_position_is_not_explained(case, monkeypatch):
    real = run.fmms.sample

    def shifted(*given, position, **options):
        return real(*given, position=position + 1, **options)

    monkeypatch.setattr(run.fmms, "sample", shifted)
    checks, samples = run.sample_checks(case, "static", 4, 1.5, 7, ["torch"])
    assert samples and all(tuple(row) == run.SAMPLE_COLUMNS for row in samples)
    assert not checks[-1]["passed"]
    assert not checks[-1]["explained"]
    assert f"token {samples[0]['step']} is {samples[0]['token']}, not {samples[0]['expected']}" in checks[-1]["reason"]


# ------------------------------------------------------------------------------------------------------------- verdicts


def timed(**changes):
    about = dict(system="megakernel", length=15, steps=4, bytes_per_token=1000)
    given = dict(
        schedule="static", about=about, config="tiny", tokens=4, iterations=np.array([1e-3, 3e-3, 2e-3]),
        launches=np.array([8e-3]), other=0,
    )  # fmt: skip
    return run.Timed(**given | changes)


def row_of(gate=run.FREE, schedule="static", passed=True, explained=False, value="4/4", seed=0, reason=""):
    row = dict(seed=seed, schedule=schedule, gate=gate, value=value, bound="all", passed=passed)
    return row | dict(explained=explained, reason=reason)


def frame(rows):
    import pandas

    return pandas.DataFrame(rows)


def test_latencies_by_hand():
    token, launch = run.decode_rows([timed()], [row_of()])
    assert (token["p50_ms"], token["min_ms"], token["n"]) == (2, 1, 3)
    assert token["p95_ms"] == pytest.approx(2.9)
    assert (launch["p50_ms"], launch["n"]) == (2, 1)
    assert token["tbps"] == pytest.approx(1000 / 2e-3 / 1e12)


@pytest.mark.parametrize(
    ("checks", "written"),
    [
        ([row_of()], True),
        ([row_of(), row_of(passed=False, explained=True, seed=1, reason="a tie")], True),
        ([row_of(), row_of(passed=False, seed=1)], False),
        ([row_of(), row_of(gate=run.ALIKE, passed=False)], False),
        ([row_of(), row_of(schedule="dynamic", passed=False)], True),  # of the other schedule
        ([row_of(), row_of(gate="experts", passed=False)], True),  # no gate of tokens
    ],
)
def test_no_time_is_written_beside_tokens_that_nothing_explains(checks, written):
    for row in run.decode_rows([timed()], checks):
        assert (row["p50_ms"] is not None) == written
        assert ("not timed" in row["reason"]) != written
        if any(check["reason"] for check in checks):
            assert "tokens equal the reference's at 1 of 2 seeds; seed 1: a tie" in row["reason"]


def test_the_last_cell_fails_for_what_nothing_explains():
    missed = row_of(gate="experts", passed=False, explained=True)
    assert run.require([row_of(), missed]) == "1 of 2 gates passed, 1 missed and explained"
    with pytest.raises(
        AssertionError, match=r"1 gates failed without an explanation:\nseed 3, static: experts 9/9 \(all\)"
    ):
        run.require([row_of(), row_of(gate="experts", passed=False, seed=3, value="9/9")])


def test_summary_adds_the_seeds_up():
    rows = [
        row_of(),
        row_of(seed=1, value="3/4", passed=False, explained=True, reason="a tie"),
        row_of(gate=run.ALIKE, value="equal"),
    ]
    table = run.summary(rows).set_index("gate")
    free = table.loc[run.FREE]
    assert (free["found"], free["seeds passed"], free["explained"], free["about"]) == (
        "7/8",
        "1 of 2",
        "1 of 1",
        "seed 1: a tie",
    )
    assert table.loc[run.ALIKE, "found"] == "equal" and table.loc[run.ALIKE, "explained"] == ""
    assert run.total(["equal", "other", "equal"]) == "equal, other"
    assert run.total([]) == ""


def test_the_published_gates_stand_beside_ours(measured):
    columns = list(teacher_forced.ROUTING_COLUMNS)
    routing = [
        dict.fromkeys(columns) | dict(swapped=swapped, status=status)
        for swapped, status in ((1, "near-tie"), (1, "downstream"), (0, "near-tie"), (1, "both errors"))
    ]
    table = run.beside_published(frame(measured.checks), frame(routing), published.teacher_forced())
    assert list(table["MI300X"]) == ["32/32", "5/5", "32/32", "28/32", "755/832", "76", "1"]
    ours = dict(zip(table["quantity"], table["ours"], strict=True))
    assert ours["determinism: identical launches"] == "2/2"
    assert ours["MoE layer-steps with exact routing"].endswith(f"/{2 * 2 * TOKENS}")
    assert (ours["near-tie routing escapes"], ours["rejected routing mismatches"]) == ("2", "1")


def test_figures_are_drawn_from_saved_rows(measured, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from megakernel.bench import decode_figures

    reference_rows = paths.reference_dir()
    monkeypatch.setenv("FMMS_ROOT", str(tmp_path))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "reference").symlink_to(reference_rows)
    steps = [dict(row, missed="", explained="") for row in measured.steps]
    steps[0] |= dict(missed="cosine, argmax", explained="routing, near-tie", cosine=0.99)
    steps[5] |= dict(missed="argmax", explained="unexplained", margin=0.0)
    about = {"model": "tiny", "prompt_tokens": 12}
    records.save("24_m4_decode_steps", "cpu", steps, teacher_forced.STEP_COLUMNS, **about)
    records.save("24_m4_decode", "cpu", measured.decode, decoding.COLUMNS)
    drawn = decode_figures.agreement(records.load("24_m4_decode_steps", "cpu"), "cpu")
    assert f"n = {TOKENS} steps of each seed" in drawn.caption
    assert "1 by another expert and near-tie, 1 by unexplained" in drawn.caption
    assert "no speed claim" in drawn.caption and "MI300X" in drawn.caption
    times = records.load("24_m4_decode", "cpu")
    drawn = decode_figures.speed(times, "cpu")
    assert "no speed claim" in drawn.title and "one H200" in drawn.caption
    # with notebook 20's rows beside them, and where nothing was timed
    theirs = decoding.row("transformers-eager", "tiny bfloat16, experts eager, attention eager", 80, 32, 1e6)
    slower = dict(theirs, p50_ms=3.0, p95_ms=4.0, min_ms=2.0, n=9)
    records.save("20_m0_reference", "cpu", [slower, dict(theirs, reason="unavailable")], decoding.COLUMNS)
    decode_figures.speed(times.assign(p50_ms=math.nan), "cpu")
    assert "Nothing was timed" in run.speed_reading(times.assign(p50_ms=math.nan), "cpu")
    names = {path.stem for path in paths.figures_dir("cpu").glob("*.png")}
    assert names == {"24_m4_decode_agreement", "24_m4_decode_speed"}
    # nothing missed
    clean = [dict(row, missed="", explained="") for row in measured.steps]
    records.save("24_m4_decode_steps", "cpu", clean, teacher_forced.STEP_COLUMNS, **about)
    assert "none does" in decode_figures.agreement(records.load("24_m4_decode_steps", "cpu"), "cpu").caption
