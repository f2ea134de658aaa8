"""The one style sheet of all figures, and how a figure is saved and shown.

A figure is drawn from result records (fmms.bench.records) by the notebook that needs it; this file decides its size,
fonts, colours and files. The same input gives the same bytes: fixed hash salt, no dates.
"""

import base64
import html
import re
from pathlib import Path

from fmms import atomic, paths

WIDTHS = {"column": 3.3, "page": 6.9}  # inches: one column and the text width of a two-column paper
DPI = 220
CPU_NOTE = "Triton's interpreter on a CPU: no speed claim"

# Seaborn's colour-blind palette, one colour, marker and dash per system in every figure; markers and dashes keep the
# systems apart in grey. Ours are solid, peers dashed.
SYSTEMS = {
    "matmul": {"color": "#949494", "marker": "x", "linestyle": ":"},
    "fmms": {"color": "#0173B2", "marker": "o", "linestyle": "-"},
    "fmms-token": {"color": "#56B4E9", "marker": "s", "linestyle": "-"},
    "fmms-topk-topp": {"color": "#029E73", "marker": "D", "linestyle": "-"},
    "torch-multinomial": {"color": "#DE8F05", "marker": "^", "linestyle": "--"},
    "torch-gumbel": {"color": "#CA9161", "marker": "v", "linestyle": "--"},
    "flashinfer-logits": {"color": "#D55E00", "marker": "P", "linestyle": "-."},
    "flashinfer-topk-topp": {"color": "#CC78BC", "marker": "X", "linestyle": "-."},
    "vllm-topk-topp": {"color": "#FBAFE4", "marker": "*", "linestyle": "--"},
}

# Whole decoders, which no figure shows together with samplers.
DECODERS = {
    "megakernel": {"color": "#0173B2", "marker": "o", "linestyle": "-"},
    "transformers-eager": {"color": "#DE8F05", "marker": "^", "linestyle": "--"},
    "transformers-graph": {"color": "#D55E00", "marker": "v", "linestyle": "--"},
    "transformers-compile": {"color": "#CA9161", "marker": "P", "linestyle": "--"},
    "vllm": {"color": "#029E73", "marker": "s", "linestyle": "-."},
}

PALETTE = ("#0173B2", "#DE8F05", "#029E73", "#D55E00", "#CC78BC", "#CA9161", "#FBAFE4", "#949494", "#ECE133", "#56B4E9")

STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib: the same glyphs on every machine
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "figure.titlesize": 9,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "patch.linewidth": 0.5,
    "savefig.dpi": DPI,
    "svg.hashsalt": "fmms",
    "svg.fonttype": "path",
    "path.simplify": True,
}


def figure(width: str = "column", height: float | None = None, ncols: int = 1, nrows: int = 1, **subplots):
    """A figure in the project's style; returns (figure, axes), the axes as `matplotlib.figure.Figure.subplots` does.

    width: "column" (3.3 inches) or "page" (6.9). height: inches; by default 0.7 of one panel's width for each row.
    subplots: passed on, for instance sharey=True. Raises ValueError for another width, ImportError without matplotlib.
    """
    if width not in WIDTHS:
        raise ValueError(f"width is {width!r}; expected 'column' (3.3 inches) or 'page' (6.9 inches)")
    matplotlib = _matplotlib()
    # For the whole process: what the caller adds later (legends, texts, seaborn's marks) reads these settings too.
    matplotlib.rcParams.update(STYLE)
    matplotlib.rcParams["axes.prop_cycle"] = matplotlib.cycler(color=PALETTE)
    inches = WIDTHS[width]
    height = height or max(1.6, 0.7 * inches / ncols) * nrows
    # Not through pyplot: a notebook would show the figure a second time, and pyplot keeps figures alive.
    drawing = matplotlib.figure.Figure(figsize=(inches, height), layout="constrained")
    return drawing, drawing.subplots(nrows=nrows, ncols=ncols, **subplots)


def plain_log_ticks(axis, digits: tuple[float, ...] | None = None) -> None:
    """Ticks of a logarithmic axis, such as `ax.xaxis`, at values that start with one of these digits, as plain numbers.

    digits: by default 1, 2 and 5; more if what is shown does not span a factor of five, so call it after drawing.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axis.get_view_interval()
    digits = digits or ((1, 2, 5) if high / low >= 5 else (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8))
    axis.set_major_locator(LogLocator(subs=digits))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def system_style(name: str) -> dict:
    """Colour, marker, dash and label of one system, as keywords for `Axes.plot`. ValueError for an unknown name."""
    known = SYSTEMS | DECODERS
    if name not in known:
        raise ValueError(f"system is {name!r}; expected one of {', '.join(known)}")
    return {**known[name], "label": name}


def hardware_note(profile: str, name: str | None = None) -> str:
    """The words a caption needs about the hardware.

    For the cpu profile: that no speed is claimed. For others the GPU that the metadata of result `name` names (rows may
    be drawn on another machine than they were measured on), or this machine's GPU without a `name`.
    """
    if paths.check_profile(profile) == "cpu":
        return CPU_NOTE
    from fmms.bench import records

    found = records.metadata(name, profile)["gpus"] if name else records.gpus()
    if not found:
        return "No GPU: no speed claim"
    names = [gpu["name"] for gpu in found]
    counted = [f"{names.count(gpu)} x {gpu}" if names.count(gpu) > 1 else gpu for gpu in dict.fromkeys(names)]
    return f"{', '.join(counted)}, driver {found[0]['driver']}"


def save(fig, name: str, profile: str, caption: str = "") -> "SavedFigure":
    """Writes `figures/<profile>/<name>.svg` and `.png`, each in one step; returns what a notebook shows.

    name: begins with the notebook's name, such as "10_exactness_pvalues"; the report groups figures by it. caption: the
    sentence under the figure: hardware, the n behind each point.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ValueError(f"name is {name!r}; expected letters, digits, _, - and ., such as '10_exactness_pvalues'")
    matplotlib = _matplotlib()
    title = figure_title(fig)
    folder = paths.figures_dir(profile)
    svg, png = folder / f"{name}.svg", folder / f"{name}.png"
    with matplotlib.rc_context(STYLE):
        if fig.get_layout_engine() is not None:
            # Laid out once: every further pass moves things by fractions of a point, so two saves would differ.
            fig.draw_without_rendering()
            fig.set_layout_engine("none")
        with atomic.replacing(svg) as path:
            about = {"Date": None, "Creator": None, "Title": title or name, "Description": caption}
            fig.savefig(path, format="svg", metadata=about)
        with atomic.replacing(png) as path:
            fig.savefig(path, format="png", dpi=DPI, metadata={"Software": None})
    return SavedFigure(svg, png, title or name, caption)


class SavedFigure:
    """A saved figure: `svg` and `png` are its paths; a notebook shows the SVG with its caption."""

    def __init__(self, svg: Path, png: Path, title: str, caption: str):
        self.svg, self.png, self.title, self.caption = svg, png, title, caption

    def _repr_html_(self) -> str:
        return figure_html(self.svg.read_bytes(), self.title, self.caption)

    def __repr__(self) -> str:
        return f"figures/{self.svg.parent.name}/{self.svg.name}: {self.title}"


def figure_html(svg: bytes, title: str, caption: str) -> str:
    """An HTML <figure> with the SVG embedded, so that the page needs no other file."""
    alternative = html.escape(f"{title} {caption}".strip(), quote=True)
    data = base64.b64encode(svg).decode("ascii")
    below = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
    return (
        f'<figure class="saved"><img alt="{alternative}" style="max-width:100%" '
        f'src="data:image/svg+xml;base64,{data}">{below}</figure>'
    )


def figure_title(fig) -> str:
    """The figure's own title, else the title of its first titled panel, on one line; "" without one."""
    above = fig.get_suptitle()
    titles = [axes.get_title(loc=side) for axes in fig.axes for side in ("left", "center", "right")]
    return " ".join((above or next((title for title in titles if title), "")).split())


def _matplotlib():
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install -e '.[notebooks]'") from error
    return matplotlib
