"""fmms.evaluation.quality_figures: drawn from CSVs alone, with the paper's names and what a caption must say."""

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("pandas")

from fmms.bench import records
from fmms.evaluation import naming, quality, quality_figures, variants

PARAMETERS = {"model": "smollm2", "temperature": 1.0, "top_k": 50, "top_p": 0.9, "bias": 3.0}
FIGURES = ("accuracy", "differences", "tokens", "power")


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Rows of every result, made up."""
    monkeypatch.setenv("FMMS_ROOT", str(tmp_path))
    systems = [(setting, system) for setting in ("plain", "truncated") for system in variants.SAMPLERS]
    ends = {"low": 40.0, "high": 60.0, "n": 96, "method": "bootstrap"}
    accuracy = [
        {"setting": setting, "system": system, "correct": 50.0, **ends, "dataset": "made up"}
        for setting, system in systems
    ]
    pairs = [
        {"setting": setting, "a": "fmms", "b": b, "difference": 50.0, **ends, "p_holm": 0.0, "control": b == "control"}
        for setting in ("plain", "truncated")
        for b in ("transformers", "control")
    ]
    distance = [
        {"setting": setting, "system": system, "distance": 50.0, **ends, "contexts": 8, "draws": 64}
        for setting, system in systems
    ]
    perplexity = [
        {"setting": setting, "system": system, "perplexity": 50.0, **ends, "tokens": 3} for setting, system in systems
    ]
    curve = [
        {"difference": d, "power": d / 30, "low": d / 30, "high": d / 30, "accuracy": 70.0, "alpha": 0.05, "n": 4096}
        | {"simulations": 1000}
        for d in (0, 7.5, 15, 30)
    ]
    tables = {"": accuracy, "_pairs": pairs, "_distance": distance, "_perplexity": perplexity, "_power": curve}
    for suffix, rows in tables.items():
        records.save(f"18_quality{suffix}", "cpu", rows, **PARAMETERS)


@pytest.mark.usefixtures("results")
@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_drawn_and_says_what_is_behind_it(name):
    saved = getattr(quality_figures, name)("cpu")
    before = saved.svg.read_bytes()
    assert saved.title.endswith("?")
    assert any(count in saved.caption for count in ("96", "4,096"))
    assert "SmolLM2-135M-Instruct" in saved.caption or name == "power"
    assert getattr(quality_figures, name)("cpu").svg.read_bytes() == before


def test_every_sampler_and_column_has_a_paper_name():
    for name in (*variants.SAMPLERS, "plain", "truncated", "correct", "difference", "perplexity", "distance", "power"):
        assert naming.paper(name)
    looks = [(look["color"], look["marker"]) for look in map(naming.style, variants.SAMPLERS)]
    assert len(set(looks)) == len(variants.SAMPLERS)


def test_an_unknown_sampler_is_no_figure(results):
    row = {"setting": "plain", "system": "somebody", "correct": 5.0, "low": 4.0, "high": 6.0, "n": 9}
    rows = [{**row, "method": "bootstrap", "dataset": "made up"}]
    records.save("18_quality", "cpu", rows, quality.ACCURACY_COLUMNS, **PARAMETERS)
    with pytest.raises(ValueError, match="somebody"):
        quality_figures.accuracy("cpu")
