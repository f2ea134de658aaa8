"""Figures of the task graph: everything is drawn, inside the page, and no text lies on another text, box or line."""

import dataclasses
import io
import itertools

import pytest

pytest.importorskip("pandas")
pytest.importorskip("matplotlib")

import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Rectangle
from matplotlib.transforms import Bbox

from fmms import plotting
from megakernel.bench import graph_balance, graph_figures, graph_report
from megakernel.config import TINY, V2_LITE
from megakernel.graph import build
from megakernel.knobs import PRESETS, Knobs

TILES = dict(qkv_rows=16, gemv_rows=16, lm_head_rows=32, attn_rows=32, tokens=100, workers=9)


def loaded(rows):
    """Rows as they come back from a CSV."""
    return pd.read_csv(io.StringIO(pd.DataFrame(rows).to_csv(index=False)), keep_default_na=False, na_values=[""])


@pytest.fixture
def saved(monkeypatch):
    """The figures that are saved, with their captions."""
    found = []
    monkeypatch.setattr(plotting, "save", lambda fig, name, profile, caption: found.append((name, fig, caption)))
    return found


def drawn_layer(saved, graph, name, layer):
    graph_figures.layer(loaded(graph_report.layer_rows(graph, name, layer)), "cpu")
    _, fig, _ = saved.pop()
    renderer = FigureCanvasAgg(fig).get_renderer()
    fig.draw(renderer)
    return fig, renderer


def box(artist, renderer):
    return artist.get_window_extent(renderer)


def check_texts(fig, renderer):
    """Texts apart from one another, inside the figure, those of ops inside a box, and none crossed by a line."""
    (ax,) = fig.axes
    extents = [
        box(text, renderer) for text in (*ax.texts, *ax.get_legend().get_texts(), fig._suptitle) if text.get_text()
    ]
    for first, second in itertools.combinations(extents, 2):
        assert not first.overlaps(second)
    page = fig.bbox
    for extent in extents:
        assert page.x0 <= extent.x0 and extent.x1 <= page.x1 and page.y0 <= extent.y0 and extent.y1 <= page.y1
    boxes = [box(patch, renderer) for patch in ax.patches if isinstance(patch, Rectangle)]
    for first, second in itertools.combinations(boxes, 2):
        assert not first.overlaps(second)
    for text in ax.texts:
        extent = box(text, renderer)
        inside = [one for one in boxes if one.overlaps(extent)]
        if text.get_gid() == "op":
            (own,) = inside
            assert own.x0 < extent.x0 and extent.x1 < own.x1 and own.y0 < extent.y0 and extent.y1 < own.y1
        elif text.get_gid() == "event":
            assert not inside
    for line in ax.lines:
        points = ax.transData.transform(line.get_xydata())
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            low, high = (min(x0, x1) - 0.5, min(y0, y1) - 0.5), (max(x0, x1) + 0.5, max(y0, y1) + 0.5)
            for text in ax.texts:
                assert not text.get_text() or not Bbox([low, high]).overlaps(box(text, renderer)), text.get_text()
            for one in boxes:  # a line may end at a box's edge, not run through it
                assert not Bbox([low, high]).overlaps(one.padded(-3))


@pytest.fixture(scope="module", params=PRESETS)
def real(request):
    """A preset and its graph, with the real layers, but two of them only: a dense one and a MoE layer."""
    return request.param, build(dataclasses.replace(V2_LITE, num_hidden_layers=2), PRESETS[request.param])


@pytest.mark.parametrize("layer", [0, 1])
def test_layer_is_readable(saved, real, layer):
    name, graph = real
    fig, renderer = drawn_layer(saved, graph, name, layer)
    check_texts(fig, renderer)
    assert fig.get_size_inches()[0] == plotting.WIDTHS["page"]
    assert ("MoE" if graph.config.is_moe(layer) else "dense") in fig.get_suptitle()


def test_layer_shows_every_op_and_event(saved, real):
    name, graph = real
    fig, _ = drawn_layer(saved, graph, name, 1)
    (ax,) = fig.axes
    texts = {gid: [text.get_text() for text in ax.texts if text.get_gid() == gid] for gid in ("op", "event")}
    ops = [op for op in graph.ops if op.layer == 1]
    named = sorted(text.replace("\n", "")[: len(op.name)] for text, op in zip(texts["op"], ops, strict=True))
    assert named == sorted(op.name for op in ops)
    assert all(f"{len(op.tasks)} task" in text for text, op in zip(texts["op"], ops, strict=True))
    events = {event for op in ops for task in op.tasks for event in (*graph.waits[task], *graph.triggers[task])}
    assert sorted(texts["event"]) == sorted(str(graph.events[event].threshold) for event in events)
    heavy = [patch for patch in ax.patches if patch.get_linewidth() > 1]
    assert len(heavy) == sum(op.layer == 1 for op in graph.critical_path())


def test_layer_with_every_fold_undone(saved):
    folds = {field.name: False for field in dataclasses.fields(Knobs) if field.type is bool}
    for words in (dict(), dict(mla="absorbed"), dict(dependencies="chain")):
        graph = build(TINY, Knobs(**folds, **words, **TILES))
        fig, _ = drawn_layer(saved, graph, "mi300x", 2)
        assert sum(text.get_gid() == "op" for text in fig.axes[0].texts) == sum(op.layer == 2 for op in graph.ops)


@pytest.fixture(scope="module")
def rows():
    found = [], []
    for preset in PRESETS:
        graph = build(TINY, dataclasses.replace(PRESETS[preset], **TILES))
        for workers in (4, PRESETS[preset].workers):
            for part, more in zip(found, graph_balance.balance(graph, preset, workers, 2, 0), strict=True):
                part += more
    return [loaded(part) for part in found]


def test_workers_are_drawn_over_their_mean(saved, rows):
    by_worker, _ = rows
    graph_figures.workers(by_worker[by_worker["workers"] == 4], "cpu")
    _, fig, caption = saved.pop()
    assert [ax.get_title(loc="left") for ax in fig.axes] == [f"{preset}, 4 workers" for preset in PRESETS]
    for ax in fig.axes:
        static, dynamic = (line.get_ydata() for line in ax.lines[:2])
        assert sum(static) == pytest.approx(4) and sum(dynamic) == pytest.approx(4)
        assert [*static] == sorted(static) and ax.get_ylim()[0] == 0 and ax.get_ylim()[1] >= max(dynamic)
    assert "n = 2 random routings" in caption


def test_levels_are_drawn_with_their_ratios(saved, rows):
    _, by_level = rows
    graph_figures.levels(by_level, "cpu", ["mi300x", "h200"])
    _, fig, caption = saved.pop()
    assert [ax.get_title(loc="left") for ax in fig.axes] == ["mi300x, 296 workers", "h200, 132 workers"]
    for ax, preset in zip(fig.axes, ("mi300x", "h200"), strict=True):
        some = by_level[(by_level["preset"] == preset) & (by_level["workers"] == PRESETS[preset].workers)]
        some = some[(some["schedule"] == "static") & (some["levels"] > 1) & (some["even_mb"] > 0)]
        names = [text.get_text().replace("\n", " ") for text in ax.get_yticklabels()]
        assert names == list(some["ops"])
        for text, row in zip(ax.texts, some.itertuples(), strict=True):
            assert float(text.get_text()[:-1]) == pytest.approx(row.busiest_mb / row.even_mb, rel=0.01)
    assert "no hardware" in caption


def test_a_text_on_a_text_would_be_found(saved, real):
    name, graph = real
    fig, renderer = drawn_layer(saved, graph, name, 1)
    text = next(text for text in fig.axes[0].texts if text.get_gid() == "event")
    x, y = text.get_position()
    for place in ((x + 0.4, y), (x, y - 0.1)):  # into a box, onto the line
        text.set_position(place)
        with pytest.raises(AssertionError):
            check_texts(fig, renderer)


def test_figures_are_files_with_the_same_bytes(tmp_path, monkeypatch):
    graph = build(TINY, dataclasses.replace(PRESETS["h200"], **TILES))
    rows = loaded(graph_report.layer_rows(graph, "h200", 1))
    written = []
    for name in "ab":
        monkeypatch.setenv("FMMS_ROOT", str(tmp_path / name))
        (tmp_path / name).mkdir()
        figure = graph_figures.layer(rows, "cpu")
        written.append(figure.svg.read_bytes())
        assert figure.title == "What waits for what in a MoE layer? h200, layer 1" and "longest chain" in figure.caption
    assert written[0] == written[1]
