"""fmms.evaluation.naming: one paper name for each internal name, and for whatever the figures draw."""

import pytest

from fmms import plotting
from fmms.evaluation import naming, sample_logs, serving


def test_every_name_in_figures_is_known():
    for name in (*plotting.SYSTEMS, "vllm", *sample_logs.SYSTEMS, *serving.METRICS, *serving.ENGINE):
        assert naming.paper(name)
    assert len(set(naming.NAMES.values())) == len(naming.NAMES), "two things share a name in the paper"


def test_the_label_of_generated_problems():
    assert naming.paper("gsm_symbolic") == "gsm_symbolic (reasoning-gym)"


def test_an_unknown_name_says_where_to_add_it():
    with pytest.raises(ValueError, match=r"naming\.py"):
        naming.paper("nobody")


def test_style_has_the_papers_label():
    assert naming.style("fmms") == {**plotting.SYSTEMS["fmms"], "label": "FMMS"}
    looks = [tuple(sorted(look.items())) for look in naming.LOOKS.values()]
    assert len(set(looks)) == len(looks)


def test_columns():
    pandas = pytest.importorskip("pandas")
    frame = naming.columns(pandas.DataFrame({"concurrency": [1], "other": [2]}))
    assert list(frame.columns) == ["concurrent requests", "other"]
