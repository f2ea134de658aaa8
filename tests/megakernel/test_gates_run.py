"""What notebooks 22 and 23 measure, say and draw, and that they fail when they should."""

import copy
import dataclasses
import weakref

import pytest

pytest.importorskip("pandas")

import pandas as pd

from fmms import paths
from fmms.bench import published, records
from megakernel.bench import gates_run as run
from megakernel.bench import layer_gates, op_gates
from megakernel.config import TINY, V2_LITE

ENGINES = ["h200 static", "h200 dynamic", "mi300x static"]


def loaded(name, rows, columns, **about):
    records.save(name, "cpu", rows, columns, **about)
    return records.load(name, "cpu")


@pytest.fixture(scope="module")
def layer():
    lines = []
    rows = run.measure_layer("tiny", [*ENGINES, "mi300x_chain static"], [0, 1], 20, 24, say=lines.append)
    return rows, lines


@pytest.fixture(scope="module")
def model():
    lines = []
    return run.measure_model("tiny", 4, ENGINES, [0, 2], 20, 2, 24, say=lines.append), lines


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder for results, with the published ones."""
    given = paths.reference_dir()
    monkeypatch.setenv("FMMS_ROOT", str(tmp_path))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "reference").symlink_to(given)


def test_configs():
    assert run.config_of("v2-lite") == V2_LITE
    one = run.config_of("tiny", 1, dense=False)
    assert (one.num_hidden_layers, one.first_k_dense_replace) == (1, 0) and one.hidden_size == TINY.hidden_size
    nine = run.config_of("tiny", 9)
    assert [nine.is_moe(layer) for layer in range(9)] == [False] + [True] * 8
    with pytest.raises(ValueError, match="model is 'small'; expected one of tiny, v2-lite"):
        run.config_of("small")
    with pytest.raises(ValueError, match="layers is -1; expected 0 or more"):
        run.config_of("tiny", -1)


@pytest.mark.parametrize("engine", ["h200", "h100 static", "h200 both", ""])
def test_engines_that_are_none(engine):
    with pytest.raises(ValueError, match=f"engine is '{engine}'; expected one of mi300x, .* such as 'h200 static'"):
        run.parse(engine)


def test_a_layer(layer):
    rows, lines = layer
    assert lines[0] == "h200 static, seed 0, position 19: 22 results, all passed" and len(lines) == 8
    assert all(row.keys() == set(run.OP_COLUMNS) for row in rows)
    assert {row["layer"] for row in rows} == {0, None}
    run.require_ops(rows)
    broken = [dict(rows[3], passed=False), *rows]
    with pytest.raises(AssertionError, match=r"^1 gates failed:\nh200 static, seed 0, position 19, layer 0, .* bound"):
        run.require_ops(broken)
    with pytest.raises(AssertionError, match=r"(?s)^60 gates failed:\n.*\nand 10 more$") as caught:
        run.require_ops(broken[:1] * 60)
    assert str(caught.value).count("\n") == 51


def test_a_layer_in_words_and_as_a_figure(layer, project):
    pytest.importorskip("matplotlib")
    from megakernel.bench import gates_figures

    rows = loaded("22_m2_layer", layer[0], run.OP_COLUMNS, model="tiny", prompt_tokens=20)
    table = run.ops_table(rows)
    assert list(table["result"]) == run.result_order(rows) and table["result"].is_unique
    results = list(table["result"])
    # one order for all presets: what folds an op leaves a gap
    for before, after in (("input norm", "q"), ("kv_a", "attention"), ("attention", "merge"), ("merge", "absorb out"),
                          ("MLP norm", "router logits"), ("combine alone", "final norm")):  # fmt: skip
        assert results.index(before) < results.index(after)
    assert set(table.loc[table["result"] == "q", "passed"]) == {"8 of 8"}
    assert set(table.loc[table["result"] == "merge", "h200"]) == {""}
    assert f"{len(rows)} of {len(rows)} results of 8 tokens passed" in run.layer_reading(rows, "cpu")
    drawn = gates_figures.ops(rows, "cpu")
    assert "n = 2 seeds" in drawn.caption and "on a CPU" in drawn.caption
    broken = rows.assign(share=float("nan"), passed=False)
    gates_figures.ops(broken, "cpu")
    assert set(run.ops_table(broken)["passed"].str[:5]) == {"0 of "}


def test_a_model(model):
    measured, lines = model
    assert len(lines) == len(measured.logits) == 12 and lines[0].endswith("0 gates of layers unexplained")
    for rows, columns in (
        (measured.ops, run.WORST_COLUMNS),
        (measured.layers, run.LAYER_COLUMNS),
        (measured.routing, run.ROUTING_COLUMNS),
        (measured.logits, run.LOGIT_COLUMNS),
    ):
        assert all(row.keys() == set(columns) for row in rows)
    first, second = measured.logits[:2]
    assert (first["position"], second["position"]) == (19, 20) and second["read"] == first["token"]
    run.require_model(measured)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("ops", {"failed": 1}, "EMBEDDING, embedding: 1 of 1 failed"),
        ("layers", {"status": "failed"}, "layer 0, latent: off by 0.00%"),
        ("routing", {"status": "unexplained"}, "layer 1, experts "),
        ("logits", {"status": "failed"}, "logits: cosine 0.99"),
    ],
)
def test_a_model_that_fails(part, change, message, model):
    broken = copy.deepcopy(model[0])
    getattr(broken, part)[0].update(change)
    with pytest.raises(AssertionError, match=f"^1 gates failed:\nh200 static, seed 0, position 19, {message}"):
        run.require_model(broken)


def test_a_model_in_words_and_as_a_figure(model, project):
    pytest.importorskip("matplotlib")
    from megakernel.bench import gates_figures

    measured = model[0]
    about = {"model": "tiny", "layers": 4, "prompt_tokens": 20}
    layers = loaded("23_m3_model", measured.layers, run.LAYER_COLUMNS, **about)
    ops, routing, logits = (
        loaded(name, rows, columns)
        for name, rows, columns in (
            ("ops", measured.ops, run.WORST_COLUMNS),
            ("routing", measured.routing, run.ROUTING_COLUMNS),
            ("logits", measured.logits, run.LOGIT_COLUMNS),
        )
    )
    gates = run.gates_table(ops, layers, routing, logits).set_index("gate")
    assert gates.loc["residual", "n"] == 48 and gates.loc["latent", "n"] == 32 and gates.loc["experts", "n"] == 36
    parts = gates[["passed", "routing", "rounding", "failed"]].replace("", 0).sum(axis=1)
    assert (parts == gates["n"]).all() and (gates["failed"] == 0).all()
    assert gates.loc["ops, own inputs", "passed"] == sum(row["n"] for row in measured.ops)
    assert set(gates.loc[["latent", "keys"], "bound"]) == {"error <= 2%"}

    table = run.layers_table(layers, routing, published.layer_gates())
    assert len(table) == 8 and list(table["layer"]) == list("0123") * 2
    assert table["MI300X cosine"][1] == "0.999989" and table["MI300X values"][1] == "0.40%"
    assert table["latent"][4] == "" != table["values"][4] and "equal" in table["experts"][1]
    assert "MI300X cosine" not in run.layers_table(layers, routing, None)
    text = run.model_reading(layers, routing, logits, "cpu")
    assert "of 12 tokens are the reference's" in text and "nan" not in text

    caption = gates_figures.depth(layers, "cpu").caption
    assert "4 layers in one launch for each of 12 tokens" in caption and "Published" not in caption
    records.save("23_m3_model", "cpu", measured.layers, run.LAYER_COLUMNS, **(about | {"model": "v2-lite"}))
    assert published.GATES in gates_figures.depth(layers, "cpu").caption


def test_published_gates():
    rows = published.layer_gates()
    assert list(rows["layer"]) == list(range(27))
    ratio = rows["max_abs_diff"] / rows["max_abs_ref"]
    assert ((ratio - rows["rel"]).abs() <= 0.01 * rows["rel"]).all()
    assert rows["rel"].max() == 1.56e-2 and rows["cosine"].min() == 0.999912


def test_a_model_without_experts(project):
    """Rows and tables of a model whose layers are all dense."""
    config = dataclasses.replace(TINY, num_hidden_layers=2, first_k_dense_replace=2)
    rows = []

    def look(token):
        assert not [row for row in op_gates.check(*token.where) if not row["passed"]]
        compared = layer_gates.compare(*token.where)
        assert not compared.failed and not compared.routing
        rows.extend(token.about | row for row in compared.layers)

    run.decode(config, ["h200 static"], [0], 12, 1, 16, "cpu", look)
    assert len(run.layers_table(pd.DataFrame(rows), pd.DataFrame(), None)) == 2


def test_an_engine_is_freed_before_the_next_is_made(monkeypatch):
    """At full size two don't fit."""
    alive = []
    made = run.DecodeEngine.random

    def counted(*args, **options):
        assert not [each for each in alive if each() is not None]
        engine = made(*args, **options)
        alive.append(weakref.ref(engine.memory))
        return engine

    monkeypatch.setattr(run.DecodeEngine, "random", counted)
    run.measure_layer("tiny", ENGINES[:2], [0, 1], 4, 8, say=lambda line: None)
    run.measure_model("tiny", 1, ENGINES[:2], [0], 4, 2, 8, say=lambda line: None)
    assert len(alive) == 6
