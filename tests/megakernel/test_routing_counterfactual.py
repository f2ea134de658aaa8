"""Notebook 29's counterfactual: swaps of experts that explain a miss, and errors that they don't explain."""

import math

import pytest
import torch

pytest.importorskip("pandas")

import pandas as pd

from fmms import paths
from fmms.bench import published, records
from megakernel.bench import decode_run, teacher_forced
from megakernel.bench import routing_counterfactual as run

STEPS = 4


@pytest.fixture(scope="module")
def measured():
    """Seed 2, whose first and fourth step have a swap of experts each and miss a gate by it."""
    return run.measure("tiny", [2], 48, STEPS, workers=2, say=lambda line: None)


def test_swaps_explain_the_steps_that_miss(measured):
    assert [(row["step"], row["missed"], row["swaps"], row["earlier"]) for row in measured.verdicts] == [
        (0, "cosine", 1, 0),
        (3, "cosine", 1, 1),
    ]
    for row in measured.verdicts:
        assert tuple(row) == run.VERDICT_COLUMNS
        assert row["before"] < teacher_forced.LOGIT_COSINE < min(row["ids"], row["ids_weights"], row["own"])
        assert (row["explained"], row["status"]) == ("routing", "near-tie")
        assert 0 < row["margin"] < 0.02
    assert all(tuple(row) == teacher_forced.ROUTING_COLUMNS for row in measured.swaps)


def test_every_step_has_every_comparison(measured):
    assert len(measured.rows) == STEPS * len(run.COMPARISONS)
    assert all(tuple(row) == run.COLUMNS for row in measured.rows)
    assert [row["group"] for row in measured.rows[:: len(run.COMPARISONS)]] == ["missed", "after", "after", "missed"]
    frame = pd.DataFrame(measured.rows)
    # where nothing was swapped yet, forcing ids changes nothing; here a swap came first, and moved what follows
    assert (run.errors(frame, "ids", "reference") > 0).all()
    assert (run.errors(frame, "megakernel", "ids").loc[(2, 0)] * 3) < run.errors(frame, "megakernel", "reference").loc[
        (2, 0)
    ]
    table = run.by_group(frame).set_index("steps")
    assert list(table["n"]) == [2, 2] and list(table.index) == ["missed", "after"]
    assert table.loc["missed", "smaller with its experts"] == "2 of 2"
    text = run.reading(pd.DataFrame(measured.verdicts), frame)
    assert text == "<p>2 of 4 steps miss a gate, explained by routing (2).</p>"


def test_checks(measured):
    assert [(row["gate"], row["value"], row["passed"], row["explained"]) for row in measured.checks] == [
        ("reference again", f"{STEPS}/{STEPS}", True, False),
        ("steps that pass", f"{STEPS - 2}/{STEPS}", False, True),
        ("experts", f"{2 * STEPS - 2}/{2 * STEPS}", True, False),
    ]
    assert "1 missed and explained" in decode_run.require(measured.checks)


def test_a_megakernel_that_is_wrong_is_not_explained(monkeypatch):
    real = teacher_forced.megakernel_steps

    def wrong(engine, text):
        steps = real(engine, text)
        generator = torch.Generator().manual_seed(0)
        scale = 0.1 * steps.logits[1].abs().max()
        steps.logits[1] += scale * torch.randn(steps.logits.shape[1], generator=generator)
        return steps

    monkeypatch.setattr(teacher_forced, "megakernel_steps", wrong)
    found = run.measure("tiny", [2], 48, 2, workers=2, say=lambda line: None)
    assert [row["explained"] for row in found.verdicts] == ["routing", "unexplained"]
    with pytest.raises(AssertionError, match="steps that pass 0/2"):
        decode_run.require(found.checks)


def test_groups_by_hand():
    steps = [dict(step=step, missed="cosine" if step == 3 else "") for step in range(5)]
    routing = [dict(step=1), dict(step=3)]
    assert [run.group_of(row, routing) for row in steps] == ["equal", "swapped", "after", "missed", "after"]


def row_of(step, group, before, after):
    pairs = zip(run.COMPARISONS, (before, after, after, 0.0, 0.0, after, after), strict=True)
    return [
        dict(seed=0, step=step, group=group, found=found, against=against, cosine=1 - value)
        for (found, against), value in pairs
    ]


def test_readings_by_hand():
    frame = pd.DataFrame(
        [*row_of(0, "swapped", 4e-4, 1e-4), *row_of(1, "swapped", 8e-4, 1e-4), *row_of(2, "equal", 1e-4, 1e-4)]
    )
    nothing = pd.DataFrame(columns=run.VERDICT_COLUMNS)
    text = run.reading(nothing, frame)
    assert text == (
        "<p>0 of 3 steps miss a gate. 2 more have other experts in a layer and pass all the same; forcing these makes "
        "their error 6 times smaller in the median.</p>"
    )
    assert list(run.by_group(frame)["smaller with its experts"]) == ["2 of 2", "0 of 1"]


def test_the_published_steps_stand_beside_ours(measured):
    table = run.beside_published(pd.DataFrame(measured.verdicts), published.teacher_forced())
    theirs = table[table["decoder"] == "MI300X"].set_index("step")
    assert list(theirs.index) == [12, 14, 22, 23]
    assert theirs.loc[22, ["as it is", "with ids", "with ids and weights"]].tolist() == [0.997707, 0.999047, 0.999607]
    assert list(table["decoder"].iloc[:2]) == ["ours, seed 2"] * 2


@pytest.mark.parametrize("missed", ["some", "none", "many"])
def test_figures_are_drawn_from_saved_rows(missed, measured, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from megakernel.bench import counterfactual_figures as figures

    reference_rows = paths.reference_dir()
    monkeypatch.setenv("FMMS_ROOT", str(tmp_path))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "reference").symlink_to(reference_rows)
    rows, verdicts = measured.rows, measured.verdicts
    if missed == "none":
        rows, verdicts = [dict(row, group="swapped") for row in rows], []
    if missed == "many":
        verdicts = [dict(verdicts[0], step=step, before=0.999 - step / 1e5) for step in range(figures.MOST + 3)]
    name = "29_routing_counterfactual"
    records.save(name, "cpu", rows, run.COLUMNS, model="tiny", prompt_tokens=48)
    records.save(f"{name}_verdicts", "cpu", verdicts, run.VERDICT_COLUMNS)
    drawn = figures.errors(records.load(name, "cpu"), records.load(f"{name}_verdicts", "cpu"), "cpu")
    assert f"n = {STEPS} steps" in drawn.caption and "MI300X" in drawn.caption
    shown = {"some": "all 2", "none": "all 0", "many": f"the {figures.MOST} largest of {figures.MOST + 3}"}[missed]
    assert shown in drawn.caption
    assert {path.stem for path in paths.figures_dir("cpu").glob("*.png")} == {f"{name}_errors"}
    assert math.isfinite(run.errors(pd.DataFrame(rows), "megakernel", "fp32").sum())
