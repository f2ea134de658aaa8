"""fmms.plotting: sizes, one look per system, the same bytes each time, files that keep their caption."""

import builtins
import re

import pytest

from fmms import plotting
from fmms.bench import records

pytest.importorskip("matplotlib")
SYSTEMS = [
    "matmul",
    "fmms",
    "fmms-token",
    "fmms-topk-topp",
    "torch-multinomial",
    "torch-gumbel",
    "flashinfer-logits",
    "flashinfer-topk-topp",
    "vllm-topk-topp",
]


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("FMMS_ROOT", str(tmp_path))
    return tmp_path


def draw(caption="n = 3"):
    fig, axes = plotting.figure("page", ncols=2)
    for offset, system in enumerate(SYSTEMS):
        axes[0].plot([1, 2, 4], [offset, offset + 1, offset], **plotting.system_style(system))
    axes[0].set_title("Is it exact?")
    axes[0].legend()
    axes[1].bar([1, 2], [3, 4])
    return plotting.save(fig, "10_exactness_a", "cpu", caption)


@pytest.mark.parametrize(("width", "inches"), [("column", 3.3), ("page", 6.9)])
def test_width(width, inches):
    fig, _ = plotting.figure(width, height=2)
    assert tuple(fig.get_size_inches()) == (inches, 2)


def test_every_system_has_a_look_of_its_own():
    assert list(plotting.SYSTEMS) == SYSTEMS
    for key in ("color", "marker"):
        assert len({style[key] for style in plotting.SYSTEMS.values()}) == len(SYSTEMS)
    seaborn = pytest.importorskip("seaborn")
    palette = [colour.upper() for colour in seaborn.color_palette("colorblind").as_hex()]
    assert list(plotting.PALETTE) == palette
    assert {style["color"] for style in plotting.SYSTEMS.values()} <= set(palette)
    with pytest.raises(ValueError, match="expected one of matmul"):
        plotting.system_style("fms")


def test_the_same_figure_is_the_same_bytes(root):
    first = draw()
    before = first.svg.read_bytes(), first.png.read_bytes()
    second = draw()
    assert (second.svg.read_bytes(), second.png.read_bytes()) == before
    assert b"dc:date" not in before[0]
    width = int.from_bytes(before[1][16:20], "big")  # the PNG header's
    assert width >= 200 * 6.9 - 1


def test_saved_figure_shows_itself_with_its_caption():
    saved = draw(caption='n = 3 <5> & "more"')
    page = saved._repr_html_()
    assert "data:image/svg+xml;base64," in page
    assert "<figcaption>n = 3 &lt;5&gt; &amp; &quot;more&quot;</figcaption>" in page
    assert 'alt="Is it exact? n = 3' in page
    assert not re.search(r'src="(?!data:)', page)
    assert repr(saved) == "figures/cpu/10_exactness_a.svg: Is it exact?"


@pytest.mark.parametrize(
    ("values", "shown"), [((1.3, 2.7), ["1.5", "2", "2.5"]), ((0.0004, 0.003), ["0.0005", "0.001", "0.002"])]
)
def test_ticks_of_a_logarithmic_axis_are_plain_numbers(values, shown):
    fig, ax = plotting.figure()
    ax.set(xscale="log", xlim=values)
    plotting.plain_log_ticks(ax.xaxis)
    fig.draw_without_rendering()
    labels = {tick.get_position()[0]: tick.get_text() for tick in ax.get_xticklabels(which="both")}
    assert [text for place, text in sorted(labels.items()) if values[0] <= place <= values[1]] == shown


def test_bad_calls_are_named():
    with pytest.raises(ValueError, match="width is 'wide'"):
        plotting.figure("wide")
    fig, _ = plotting.figure()
    with pytest.raises(ValueError, match="name is"):
        plotting.save(fig, "a/b", "cpu")


def test_hardware_comes_from_where_rows_were_measured(monkeypatch):
    assert plotting.hardware_note("cpu") == "Triton's interpreter on a CPU: no speed claim"
    gpu = {"name": "H200", "driver": "570.1", "total_mib": 1, "free_mib": 1}
    monkeypatch.setattr(records, "gpus", lambda: [gpu, gpu])
    records.save("20_speed", "h200", [{"a": 1}])
    monkeypatch.setattr(records, "gpus", list)
    assert plotting.hardware_note("h200", "20_speed") == "2 x H200, driver 570.1"
    assert plotting.hardware_note("h200") == "No GPU: no speed claim"


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **more):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[notebooks\]'"):
        plotting.figure()
