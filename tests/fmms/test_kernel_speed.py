"""fmms.bench.kernel_speed and .outputs: a result is timed only after it was found right; every system gets its row."""

import math

import pytest
import torch

from fmms import backends
from fmms.backends import registry
from fmms.bench import cases, kernel_speed, outputs, published, timing

DESIGN_COLUMNS = [
    "case",
    "V",
    "D",
    "H",
    "dtype",
    "system",
    "timing",
    "l2",
    "median_us",
    "p20_us",
    "p80_us",
    "n",
    "correct",
    "reason",
]
CPU = {"device": "cpu", "l2": "warm", "method": "perf_counter", "n": 2}
SILENT = {"say": lambda line: None}


@pytest.fixture(scope="module")
def problem():
    return outputs.make_problem(cases.get("tiny-ragged"), 16, torch.bfloat16, "cpu", seed=3)


@pytest.fixture
def plant(monkeypatch):
    """Registers a backend for the length of a test and returns it made."""
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))

    def register(name, function, **facts):
        backends.register(name, function, **facts)
        return backends.make(name, "cpu")

    return register


def logits_of(hidden, weight, temperature):
    return (hidden @ weight.T).float() / temperature[:, None]


def gumbel_of(scaled, vocab=None):
    return (scaled - torch.empty_like(scaled).exponential_().log())[:, :vocab].argmax(-1)


FAULTS = {
    "a constant id": lambda h, w, t, s: torch.full((len(h),), 7),
    "ids out of range": lambda h, w, t, s: torch.randint(len(w), 2 * len(w), (len(h),)),
    "-1": lambda h, w, t, s: torch.full((len(h),), -1),
    "uniform ids": lambda h, w, t, s: torch.randint(0, len(w), (len(h),)),
    "greedy": lambda h, w, t, s: logits_of(h, w, t).argmax(-1),
    "one temperature for all rows": lambda h, w, t, s: gumbel_of(logits_of(h, w, torch.full_like(t, 0.3))),
    "half of the vocabulary": lambda h, w, t, s: gumbel_of(logits_of(h, w, t), len(w) // 2),
    "another row's logits": lambda h, w, t, s: gumbel_of(logits_of(h, w, t).roll(1, 0)),
    "float ids": lambda h, w, t, s: torch.zeros(len(h)),
    "a wrong shape": lambda h, w, t, s: torch.zeros(len(h), 1, dtype=torch.int64),
    "not a tensor": lambda h, w, t, s: [0] * len(h),
    "an exception": lambda h, w, t, s: 1 // 0,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_sampler_is_found(fault, problem, plant):
    torch.manual_seed(0)
    verdict = outputs.check(plant("bad", FAULTS[fault]), problem, 16, draws=2048)
    assert not verdict.correct
    assert verdict.reason


@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("name", ["matmul", "fmms", "fmms-token", "torch-multinomial", "torch-gumbel"])
def test_the_systems_pass(name, rows, problem):
    torch.manual_seed(1)
    verdict = outputs.check(backends.make(name, "cpu"), problem, rows)
    assert verdict.correct, verdict.reason


def test_a_wrong_seed_or_an_unwritten_element_is_found(problem, plant):
    fmms = backends.make("fmms", "cpu")
    other = plant("other", lambda h, w, t, s: fmms(h, w, t, s + 1), scheme="group", seeded=True)
    verdict = outputs.check(other, problem, 16)
    assert not verdict.correct
    assert "differ from the reference's" in verdict.reason
    lazy = plant("lazy", lambda h, w, t, s: torch.empty(len(h), len(w), dtype=w.dtype), returns="logits")
    assert "logits differ from fp32" in outputs.check(lazy, problem, 4).reason

    def off(h, w, t, s):
        out = h @ w.T
        out[-1, -1] += 1
        return out

    assert not outputs.check(plant("off", off, returns="logits"), problem, 4).correct


def test_a_truncated_sampler_is_held_to_its_truncation(problem, plant):
    def truncated(k, p):
        def draw(h, w, t, s):
            top = logits_of(h, w, t).topk(k)
            probs = top.values.softmax(-1)
            kept = torch.where(probs.cumsum(-1) - probs < p, probs, 0.0)
            return top.indices.gather(-1, torch.multinomial(kept, 1))[:, 0]

        return draw

    torch.manual_seed(2)
    facts = {"exact": False, "top_k": 50, "top_p": 0.9}
    assert outputs.check(plant("right", truncated(50, 0.9), **facts), problem, 16).correct
    wide = outputs.check(plant("wide", truncated(500, 1.0), **facts), problem, 16)
    assert "tokens that truncation removes" in wide.reason
    assert not outputs.check(plant("narrow", truncated(5, 1.0), **facts), problem, 16, draws=2048).correct


def test_uniformity_agrees_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    u = torch.rand(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    counts = torch.histc(u, 16, 0, 1)
    assert outputs.uniformity(u) == pytest.approx(stats.chisquare(counts.numpy()).pvalue)
    assert outputs.uniformity(u**1.5) < 1e-9


def test_a_tiny_case_from_end_to_end(plant):
    plant("constant", FAULTS["a constant id"])
    systems = [*kernel_speed.SYSTEMS, "constant"]
    lines = []
    rows = kernel_speed.measure(["tiny"], [1, 3], systems, **CPU, say=lines.append)
    assert [list(row) for row in rows] == [DESIGN_COLUMNS] * len(rows)
    assert [(row["H"], row["system"]) for row in rows] == [(count, name) for count in (1, 3) for name in systems]
    assert len(lines) == 2
    assert "WRONG: constant" in lines[1]
    for row in rows:
        assert (row["case"], row["V"], row["D"], row["dtype"], row["l2"]) == ("tiny", 2048, 64, "bfloat16", "warm")
        if row["system"].startswith("flashinfer"):
            assert (row["timing"], row["median_us"], row["n"], row["correct"]) == (None, None, None, None)
            assert "flashinfer" in row["reason"] or "not on cpu" in row["reason"]
        elif row["system"] == "constant":
            assert row["correct"] is False
            assert row["median_us"] is None
        else:
            assert row["correct"] is True
            assert 0 < row["p20_us"] <= row["median_us"] <= row["p80_us"]
            assert (row["n"], row["timing"]) == (2, "perf_counter")
            assert row["reason"]
    pandas = pytest.importorskip("pandas")
    relative = kernel_speed.relative(pandas.DataFrame(rows))
    assert (relative[relative["system"] == "matmul"]["relative"] == 1).all()
    with pytest.raises(AssertionError, match="constant at tiny, H = 1"):
        kernel_speed.require(pandas.DataFrame(rows))


def test_a_wrong_output_is_never_timed(plant, monkeypatch):
    plant("constant", FAULTS["a constant id"])

    def never(*args, **kwargs):
        pytest.fail("timed a wrong result")

    monkeypatch.setattr(timing, "prepare", never)
    monkeypatch.setattr(timing, "time_interleaved", never)
    (row,) = kernel_speed.measure(["tiny"], [2], ["constant"], **CPU, **SILENT)
    assert row["correct"] is False


def test_a_system_that_cannot_be_captured_is_timed_by_events_beside_its_own_matmul(problem, monkeypatch):
    """The bookkeeping of a GPU run, with the timing replaced."""
    asked = []

    def prepare(fn, method, device, warmup):
        asked.append(method)
        return timing.Prepared(fn, method)

    monkeypatch.setattr(timing, "prepare", prepare)
    monkeypatch.setattr(timing, "time_interleaved", lambda calls, n, *rest, **more: dict.fromkeys(calls, torch.ones(n)))
    made = {name: backends.make(name, "cpu") for name in ("matmul", "torch-gumbel", "torch-multinomial")}
    methods = {name: "cuda_graph" if backend.graph else "events" for name, backend in made.items()}
    found = kernel_speed._compare(problem, 4, made, methods, n=3, l2="cold", device=torch.device("cpu"), draws=64)
    assert [(row["system"], row["timing"]) for row in found] == [
        ("matmul", "cuda_graph"), ("matmul", "events"), ("torch-gumbel", "cuda_graph"), ("torch-multinomial", "events"),
    ]  # fmt: skip
    assert all(row["median_us"] == 1e6 and row["correct"] for row in found)


class Stop(Exception):
    """Ends a run from inside, after its first line of progress."""


def stop(line):
    raise Stop


def test_a_stopped_run_goes_on_where_it_was(tmp_path):
    partial = tmp_path / "partial.json"
    with pytest.raises(Stop):
        kernel_speed.measure(["tiny"], [1, 2], ["matmul"], **CPU, partial=partial, say=stop)
    assert partial.is_file()
    lines = []
    rows = kernel_speed.measure(["tiny"], [1, 2], ["matmul"], **CPU, partial=partial, say=lines.append)
    assert "kept from an earlier run" in lines[0]
    assert [row["H"] for row in rows] == [1, 2]
    assert all(row["median_us"] for row in rows)
    assert not partial.exists()
    # other settings, or a file that is no JSON: from the start
    partial.write_text("{")
    lines.clear()
    kernel_speed.measure(["tiny"], [1], ["matmul"], **CPU, partial=partial, say=lines.append)
    assert "kept" not in lines[0]


def test_a_spent_budget_leaves_rows_that_say_so():
    rows = kernel_speed.measure(["tiny"], [1], ["matmul"], **CPU, budget_s=-1, **SILENT)
    assert "budget" in rows[0]["reason"]
    assert rows[0]["median_us"] is None


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="case is 'big'"):
        kernel_speed.measure(["big"], [1], **CPU)
    with pytest.raises(ValueError, match="rows is \\[0\\]"):
        kernel_speed.measure(["tiny"], [0], **CPU)
    with pytest.raises(ValueError, match="backend is 'nosuch'"):
        kernel_speed.measure(["tiny"], [1], ["nosuch"], **CPU)
    with pytest.raises(ValueError, match="method is 'cuda_graph'"):
        kernel_speed.measure(["tiny"], [1], **(CPU | {"method": "cuda_graph"}))


def test_host_costs_have_a_row_for_every_system():
    rows = kernel_speed.host_costs("tiny", [1], ["matmul", "flashinfer-logits"], device="cpu", calls=3)
    assert [list(row) for row in rows] == [list(kernel_speed.HOST_COLUMNS)] * 2
    assert rows[0]["median_us"] > 0
    assert rows[1]["median_us"] is None
    assert rows[1]["reason"]


def test_published_numbers_are_over_the_matmul_of_their_own_run():
    pytest.importorskip("pandas")
    table = published.baselines().set_index(["case", "H", "system"])
    assert table.loc[("qwen3-8b", 64, "flashsampling"), "relative"] == pytest.approx(335.6 / 306.5)
    assert table.loc[("qwen3-8b", 64, "torch-gumbel"), "relative"] == pytest.approx(463.2 / 318.7)
    assert table.loc[("qwen3-8b", 64, "torch-multinomial"), "relative"] == pytest.approx(556.2 / 330.9)
    assert table.index.is_unique
    assert (table.xs("matmul", level="system")["relative"] == 1).all()
    for name, case in cases.CASES.items():
        if name in table.index:
            assert (table.loc[name]["V"] == case.V).all()
    paper = published.paper_speedups().set_index(["case", "H", "gpu", "over"])["speedup"]
    assert paper[("qwen3-8b", 64, "H200", "torch-multinomial")] == 1.67
    assert paper[("llama3-70b", 256, "H200", "flashinfer-logits")] == 0.65
    assert not paper.map(math.isnan).any()
