"""Truncation as notebook 15 tests and times it: what is right passes, planted faults are caught."""

import functools

import pytest
import torch

pytest.importorskip("scipy")
pytest.importorskip("pandas")

import fmms
from fmms import backends, controls, paths, testing
from fmms.backends.fused import fused_ids
from fmms.bench import cases, exactness, kernel_speed, outputs, records, truncation
from fmms.request import FILTER_ORDERS

V = 300


def planted(monkeypatch, **changed):
    """fmms.sample with other arguments than it is given; a function makes the new value of the old one."""
    exact = fmms.sample

    def sample(*positional, **given):
        for name, change in changed.items():
            given[name] = change(given.get(name))
        return exact(*positional, **given)

    monkeypatch.setattr(fmms, "sample", sample)


def assert_caught(rows, words):
    with pytest.raises(AssertionError, match=words):
        truncation.require(rows)


@pytest.fixture
def few(monkeypatch):
    """A grid of four settings, one for each order and one alone."""
    chosen = [truncation.Control(top_k=50), *(truncation.Control(50, 0.9, 0.02, order) for order in FILTER_ORDERS)]
    monkeypatch.setattr(truncation, "grid", lambda vocab_size: chosen)


# --- which tokens are kept and drawn ---


def test_the_reference_keeps_and_draws_what_it_should():
    rows = truncation.measure(V, 300, "torch", probes=8)
    truncation.require(rows)
    assert len(rows) == len(truncation.distributions(V)) * len(truncation.grid(V))
    assert {row["filter_order"] for row in rows} == set(FILTER_ORDERS)
    assert all(row["forbidden"] == row["differ"] == row["probes_differ"] == 0 and row["n"] >= 300 for row in rows)
    kept = {(row["distribution"], row["control"]): row["kept"] for row in rows}
    assert kept["flat", "k = 50"] == 50
    assert kept["flat", "p = 0.9"] == 270
    assert kept["flat", "min-p = 0.05"] == V
    assert kept["zipf", "p = 0"] == kept["heavy tail", "k = 1"] == 1
    table = truncation.by_control(rows)
    assert len(table) == len(truncation.grid(V))
    assert f"{len(rows)} of {len(rows)} settings passed" in truncation.summary(rows)


def test_the_kernels_keep_and_draw_what_they_should(device, few, monkeypatch):
    pytest.importorskip("triton")
    shapes = truncation.distributions(V)
    monkeypatch.setattr(
        truncation, "distributions", lambda vocab_size: {name: shapes[name] for name in ("zipf", "flat")}
    )
    rows = truncation.measure(V, 16, "triton", device=str(device), probes=8)
    truncation.require(rows)
    assert len(rows) == 4 * 2
    assert any(row["kept"] < 50 for row in rows)


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"top_k": lambda k: k + 1}, "kept or removed wrongly"),
        ({"top_p": lambda p: p * 0.99}, "kept or removed wrongly"),
        ({"filter_order": lambda order: "joint"}, "kept or removed wrongly"),
        ({"top_k": lambda k: None, "top_p": lambda p: None}, "tokens that truncation removes"),
        ({"logit_scale": lambda scale: 1.3}, "do not follow|off by"),
    ],
)
def test_a_planted_fault_is_caught(changed, words, few, monkeypatch):
    planted(monkeypatch, **changed)
    assert_caught(truncation.measure(V, 200, "torch"), words)


def test_ids_unlike_the_references_are_caught(few, monkeypatch):
    exact = fmms.sample

    def sample(*positional, impl, **given):
        seed = given.pop("seed")
        return exact(*positional, seed=seed if impl == "torch" else seed + 1, impl="torch", **given)

    monkeypatch.setattr(fmms, "sample", sample)
    assert_caught(truncation.measure(V, 50, "other"), "without a reason")


def test_labels_name_what_is_on():
    labels = [one.label for one in truncation.grid(5000)]
    assert len(set(labels)) == len(labels)
    assert truncation.Control(50).label == "k = 50"
    assert truncation.Control(0, 0.9999999).label == "p = 0.9999999"
    assert truncation.Control(50, 0.9, filter_order="joint").label == "k = 50, p = 0.9 (joint)"
    assert max(one.top_k for one in truncation.grid(100)) == 99


def test_survivors_by_hand():
    found = {(row["distribution"], row["filter"], row["value"]): row["kept"] for row in truncation.survivors(1000)}
    assert found["flat", "top_p", 0.52] == 520
    assert found["flat", "top_p", 0.0] == found["heavy tail", "top_p", 0.48] == 1
    assert found["flat", "min_p", 1.0] == 1000
    assert found["zipf", "min_p", 1.0] == 1
    assert found["zipf", "top_p", 0.92] > found["peaked", "top_p", 0.92]
    assert all(1 <= kept <= 1000 for kept in found.values())


# --- checks ahead of a timing ---


@pytest.fixture(scope="module")
def problem():
    return outputs.make_problem(cases.get("tiny-ragged"), 8, torch.bfloat16, "cpu", seed=3)


def system(function, **facts):
    return backends.Backend("planted", function, scheme="group", seeded=True, exact=False, **facts)


def reference_ids(hidden, weight, temperature, seeds, **filters):
    return fmms.sample(hidden, weight, temperature, seed=seeds, impl="torch", **filters).ids


@pytest.mark.parametrize("filters", [{"top_k": 50, "top_p": 0.9}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}])
def test_truncated_reference_draws_pass(filters, problem):
    verdict = outputs.check(system(functools.partial(reference_ids, **filters), **filters), problem, 8)
    assert verdict.correct, verdict.reason
    assert "none of a token that truncation removes" in verdict.reason


def test_the_truncated_system_passes(problem):
    pytest.importorskip("triton")
    verdict = outputs.check(backends.make("fmms-topk-topp", "cpu"), problem, 4)
    assert verdict.correct, verdict.reason


@pytest.mark.parametrize("drawn", [{}, {"top_k": 50}, {"top_k": 5, "top_p": 0.9}, {"top_k": 50, "top_p": 0.5}])
def test_another_truncation_is_found(drawn, problem):
    verdict = outputs.check(system(functools.partial(reference_ids, **drawn), top_k=50, top_p=0.9), problem, 8)
    assert not verdict.correct


def test_a_token_that_truncation_removes_is_found(problem):
    """Even in a system whose noise repeats nothing and whose ids are not compared."""
    target = system(None, top_k=50, top_p=0.9)
    probs, allowed = outputs._exact_target(problem, 2, target)
    assert probs.sum().item() == pytest.approx(1)
    exact = controls.allowed_set(problem.logits[2:3], problem.temperature[2:3], 50, 0.9)[0]
    assert torch.equal(probs > 0, exact)
    assert (exact <= allowed).all()
    assert allowed.sum() <= exact.sum() + 1
    ids = torch.full((8,), int(problem.logits[0].argmin()))
    assert "removes" in outputs._check_distribution(target, problem, 8, 8, ids).reason


def test_what_rounding_may_keep_holds_what_it_must(problem):
    filters = 50, 0.9, 0.01
    rounding = torch.full((8,), 1e-2, dtype=torch.float64)
    narrow, exact, wide = outputs.kept_sets(problem.logits, problem.temperature, rounding, filters)
    assert (narrow <= exact).all() and (exact <= wide).all()
    assert (narrow.sum(-1) < wide.sum(-1)).any()
    noisy = problem.logits + 1e-2 * problem.temperature[:, None] * (2 * torch.rand_like(problem.logits) - 1)
    moved = controls.allowed_set(noisy, problem.temperature, *filters)
    assert (narrow <= moved).all() and (moved <= wide).all()


def test_per_row_controls_are_kept_and_right():
    hidden, weight = testing.integer_problem(3, 200, 16)
    one = torch.ones(3)
    seeds = torch.arange(3)
    pytest.importorskip("triton")
    ids = fused_ids(hidden, weight, one, seeds, top_k=7)
    assert torch.equal(ids, fmms.sample(hidden, weight, 1.0, top_k=7, seed=seeds, impl="torch").ids)


# --- costs and figures ---


@pytest.fixture(scope="module")
def cost():
    pytest.importorskip("triton")
    return truncation.measure_cost(
        "tiny-ragged", [1], device="cpu", n=1, l2="warm", method="perf_counter", draws=128, say=lambda line: None
    )


def test_costs_have_a_row_for_every_system(cost):
    assert [list(row) for row in cost] == [list(truncation.COST_COLUMNS)] * len(cost)
    assert set(kernel_speed.COLUMNS) < set(truncation.COST_COLUMNS)
    assert [(row["system"], row["controls"]) for row in cost] == [
        (one.name, one.controls) for one in truncation.cost_systems("cpu")
    ]
    for row in cost:
        if row["system"] == "flashinfer-topk-topp":
            assert row["median_us"] is None and row["reason"]
        else:
            assert row["correct"] is True, row["reason"]
            assert row["median_us"] > 0
    kept = {row["controls"]: row["kept"] for row in cost}
    assert kept["k = 50"] == 50
    assert kept["p = 0.66 of a flat distribution"] == pytest.approx(0.66 * 1777, rel=0.01)
    import pandas

    frame = pandas.DataFrame(cost)
    truncation.require_cost(frame)
    frame.loc[1, ["correct", "reason"]] = False, "made wrong"
    with pytest.raises(AssertionError, match=r"fmms \(none\) at tiny-ragged, H = 1: made wrong"):
        truncation.require_cost(frame)
    assert "nothing about a GPU" in truncation.reading(frame, "cpu")
    assert "fmms (k = 50)" in truncation.reading(frame, "h200")


def test_a_wrong_output_is_not_timed(monkeypatch):
    wrong = system(lambda h, w, t, s: torch.zeros(len(h), dtype=torch.int64), top_k=50)
    monkeypatch.setattr(truncation, "cost_systems", lambda device: [truncation.System("fmms", "k = 50", wrong)])
    options = dict(device="cpu", n=1, l2="warm", method="perf_counter", draws=64, say=lambda line: None)
    (row,) = truncation.measure_cost("tiny", [8], **options)
    assert row["correct"] is False
    assert row["median_us"] is None


def test_figures_are_drawn_from_saved_rows(cost, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from fmms.bench import truncation_figures

    monkeypatch.setenv("FMMS_ROOT", str(tmp_path))
    records.save("15_truncation_cost", "cpu", cost, truncation.COST_COLUMNS)
    records.save("15_truncation_survivors", "cpu", truncation.survivors(500))
    drawn = truncation_figures.cost(records.load("15_truncation_cost", "cpu"), "cpu")
    assert "no speed claim" in drawn.caption
    assert "tokens" in drawn.caption
    kept = truncation_figures.survivors(records.load("15_truncation_survivors", "cpu"), "cpu")
    assert kept.title == "How many tokens do top-p and min-p keep?"
    assert {path.stem for path in paths.figures_dir("cpu").glob("*.png")} == {
        "15_truncation_cost",
        "15_truncation_survivors",
    }


def test_truncated_draws_of_the_exactness_notebook_have_a_sure_cut():
    """No rounding decides what the chi-square tests of exactness may see, at any size that a profile uses."""
    for vocab in (1024, 32768):
        logits = exactness.distributions(vocab)["zipf"]
        given = exactness.control_arguments(["truncated"], vocab)
        margin = testing.filter_margin(logits[None], torch.ones(1), *given.values())
        assert margin > 2 * truncation.ROUNDING_MASS
    logits = torch.tensor(exactness.NARROW_LOGITS)
    probability = exactness.controlled_softmax(logits, exactness.CONTROLS)
    assert 5 <= (probability > 0).sum() < 12
