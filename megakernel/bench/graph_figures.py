"""Figures of the task graph, drawn from the rows of graph_report and graph_balance as records.load reads them
back."""

from collections.abc import Sequence

from fmms import plotting
from megakernel.bench.graph_balance import own_workers

NOTEBOOK = "21_m1_graph"
SCHEDULES = {
    "static": {"color": "#0173B2", "linestyle": "-"},
    "dynamic": {"color": "#DE8F05", "linestyle": (0, (3, 1.5))},
}
"""Colour and dash of each way to deal out tasks."""
KINDS = {"gemv": "#CFE3F2", "attention": "#D8A9D0", "small": "#FFFFFF"}
"""Fill of an op's box by what bounds the op."""
KIND_LABELS = {"gemv": "reads weights", "attention": "reads the cache", "small": "a small op"}
FONT = 8
"""Points, of all texts in the drawing of a layer."""
CRITICAL = "#D55E00"
LINE = "#555555"

# ------------------------------------------------------------------------------------------------------------ balance


def workers(by_worker, profile: str):
    """Bytes of each worker over the mean, workers sorted by them: a row of panels for each number of workers, a column
    for each preset; the rows of `graph_balance.balance` for workers."""
    counts, presets = sorted(by_worker["workers"].unique()), list(by_worker["preset"].unique())
    fig, axes = plotting.figure(
        "page", 1.5 * len(counts) + 0.6, ncols=len(presets), nrows=len(counts), sharey=True, sharex="row", squeeze=False
    )
    for row, number in zip(axes, counts, strict=True):
        for ax, preset in zip(row, presets, strict=True):
            one = by_worker[(by_worker["workers"] == number) & (by_worker["preset"] == preset)]
            for schedule, rows in one.groupby("schedule", sort=False):
                rows = rows.sort_values("rank")
                ax.plot(
                    rows["rank"] + 1, rows["mb"] / rows["mean_mb"], **SCHEDULES[schedule], label=f"{schedule} lists"
                )
            ax.axhline(1, color="black", linewidth=0.8, zorder=1)
            ax.set_title(f"{preset}, {number} workers", fontsize=8, fontweight="normal")
            ax.set_xlim(0, number + 1)
        row[0].set_ylabel("bytes / mean")
    axes[0, 0].set_ylim(bottom=0)
    for ax in axes[-1]:
        ax.set_xlabel("workers, sorted by bytes")
    fig.suptitle("Is any worker a straggler?", x=0.01, ha="left", weight="bold")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, handlelength=2.8)
    return plotting.save(
        fig, f"{NOTEBOOK}_workers", profile, f"{_balance_caption(by_worker)} Line at 1: an even share."
    )


def levels(by_level, profile: str, presets: Sequence[str]):
    """Bytes of the busiest worker of each level beside the even share and the largest task: a panel for each preset, on
    its own number of workers; the rows of `graph_balance.balance` for levels. Levels that read nothing, or occur once
    in a token, are left out."""
    pairs = [(preset, own_workers(preset, by_level["workers"])) for preset in presets]
    parts = [by_level[(by_level["preset"] == preset) & (by_level["workers"] == number)] for preset, number in pairs]
    parts = [part[(part["even_mb"] > 0) & (part["levels"] > 1)] for part in parts]
    most = max(part["ops"].nunique() for part in parts)
    fig, axes = plotting.figure("page", 0.85 + 0.34 * most, ncols=len(pairs), sharex=True, squeeze=False)
    marks = {
        "static": {"marker": "o", "markersize": 4, "label": "busiest worker, static lists"},
        "dynamic": {"marker": "x", "markersize": 4, "label": "busiest worker, dynamic lists"},
    }
    task = {"color": "#949494", "marker": "s", "markersize": 7, "markerfacecolor": "none", "linestyle": ""}
    even = {"color": "black", "marker": "|", "markersize": 9, "markeredgewidth": 1.4, "linestyle": ""}
    for ax, (preset, number), part in zip(axes[0], pairs, parts, strict=True):
        ops = list(part["ops"].unique())
        one = {schedule: rows.set_index("ops").loc[ops] for schedule, rows in part.groupby("schedule")}
        fixed, places = one["static"], range(len(ops))
        each = {name: fixed[f"{name}_mb"] / fixed["levels"] for name in ("even", "busiest", "task")}
        ax.hlines(places, each["even"], each["busiest"], color="#bbbbbb", linewidth=1.0, zorder=1)
        ax.plot(each["even"], places, **even, label="even share")
        ax.plot(each["task"], places, **task, label="largest task")
        right = each["task"]
        for schedule, mark in marks.items():
            busiest = one[schedule]["busiest_mb"] / one[schedule]["levels"]
            ax.plot(busiest, places, color=SCHEDULES[schedule]["color"], linestyle="", **mark)
            right = right.combine(busiest, max)
        for at, ratio, x in zip(places, each["busiest"] / each["even"], right, strict=True):
            text = f"{ratio:.2f}×" if ratio < 10 else f"{ratio:.1f}×"
            ax.annotate(text, (x, at), (6, 0), textcoords="offset points", va="center")
        ax.set_yticks(places, [name.replace(" + ", " +\n") for name in ops])
        ax.set(xscale="log", xlabel="MB that a worker reads", ylim=(len(ops) - 0.4, -0.6))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.grid(axis="y", visible=False)
        ax.set_title(f"{preset}, {number} workers", fontsize=8, fontweight="normal")
    low, high = axes[0, 0].get_xlim()
    axes[0, 0].set_xlim(low, high * 4)  # room for the ratios
    title = "How much more than an even share does the busiest worker of a level read?"
    fig.suptitle(title, x=0.01, ha="left", weight="bold")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, columnspacing=1.4)
    caption = (
        f"{_balance_caption(by_level)} A level is what can run at the same time; here the mean over all layers. "
        "Numbers: the busiest worker of the static lists over the even share. Where it lies in the square, its share "
        "is one task, and only smaller tasks would help."
    )
    return plotting.save(fig, f"{NOTEBOOK}_levels", profile, caption)


def _balance_caption(rows) -> str:
    return (
        f"Weights and caches of one token of DeepSeek-V2-Lite, means over n = {int(rows['routings'].iloc[0])} random "
        "routings. Counted, not timed: no hardware shows in it."
    )


# -------------------------------------------------------------------------------------------------------------- layer


def layer(rows, profile: str):
    """One layer of one preset: ops as boxes from left to right by depth, in two bands, events as dots with thresholds;
    the rows of `graph_report.layer_rows`."""
    preset, number = rows["preset"].iloc[0], int(rows["layer"].iloc[0])
    place = _Layout(rows)
    fig, ax = plotting.figure("page", place.height)
    fig.set_layout_engine("none")  # one unit of the axes is an inch, so that what is computed is what is printed
    ax.set_position((0, 0, 1, 1))
    ax.set(xlim=(0, place.width), ylim=(0, place.height))
    ax.axis("off")
    for op in place.ops.values():
        _draw_op(ax, op, place)
    for event in place.events:
        _draw_event(ax, event, place)
    _draw_legend(ax)
    hops = sum(bool(op["critical"]) for op in place.ops.values())
    kind = "MoE" if any(name.startswith("MOE_") for name in place.ops) else "dense"
    title = f"What waits for what in a {kind} layer? {preset}, layer {number}"
    fig.suptitle(title, x=place.margin / place.width, y=1 - 0.06 / place.height, ha="left", va="top", weight="bold")
    caption = (
        "Boxes: ops, with their tasks and the MB (1e6 bytes) of weights and cache that a token reads, of the routed "
        "experts those of the chosen. Dots: events, with their threshold, the number of tasks that count them up. "
        f"Heavy: the longest chain, {hops} of the layer's {len(place.ops)} ops. From the graph of DeepSeek-V2-Lite."
    )
    return plotting.save(fig, f"{NOTEBOOK}_layer_{preset}", profile, caption)


class _Layout:
    """Where ops and events of a layer go, in inches.

    Columns are depths, cut into two bands of equally many that are read like two lines of text. The first lane of a
    band has its part of the longest chain; every other op gets the first lane that is free from its column to the event
    that it counts up, because its line runs there. Events sit in front of the first op that waits for them.
    """

    width, margin = plotting.WIDTHS["page"], 0.08
    left, event_gap = 0.4, 0.19
    box_height, lane, top, legend, gutter = 0.78, 0.9, 0.28, 0.28, 0.22

    def __init__(self, rows):
        found = rows[rows["item"] == "op"].to_dict("records")
        self.ops = {op["name"]: op for op in found}
        self.events = [
            {**event, **{side: _names(event[side]) for side in ("producers", "consumers", "outside")}}
            for event in rows[rows["item"] == "event"].to_dict("records")
        ]
        depth = max(int(op["depth"]) for op in found)
        self.per_band = -(-depth // 2)
        self.pitch = (self.width - self.left - self.margin) / self.per_band
        self.box_width = min(self.pitch - 2 * self.event_gap, 1.1)
        self._lanes()
        lanes = [1 + max(op["lane"] for op in found if op["band"] == band) for band in range(self._band(depth) + 1)]
        above, self.band_top = self.top, []
        for count in lanes:
            self.band_top.append(above)
            above += count * self.lane + self.gutter
        self.height = above - self.gutter + self.legend
        for op in found:
            op["x"] = self.column(int(op["depth"]))
            op["y"] = self.height - self.band_top[op["band"]] - (op["lane"] + 0.5) * self.lane
        for event in self.events:
            first = min((self.ops[name]["depth"] for name in event["consumers"]), default=None)
            after = max((self.ops[name]["depth"] for name in event["producers"]), default=0)
            depth = int(first if first is not None else after + 1)
            event["band"] = self._band(depth) if first is not None else self._band(int(after))
            column = depth - 1 - event["band"] * self.per_band
            event["x"] = self.left + column * self.pitch - self.event_gap
            joined = [self.ops[name] for name in event["consumers"] or event["producers"]]
            joined = [op for op in joined if op["band"] == event["band"]]
            event["y"] = max(op["y"] for op in joined)
            event["critical"] = any(self.ops[name]["critical"] for name in event["producers"] or event["consumers"])

    def _band(self, depth: int) -> int:
        return (depth - 1) // self.per_band

    def column(self, depth: int) -> float:
        """The middle of a column."""
        return self.left + (depth - 1) % self.per_band * self.pitch + self.box_width / 2

    def _lanes(self) -> None:
        taken: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for op in sorted(self.ops.values(), key=lambda op: (not op["critical"], op["depth"])):
            start = end = int(op["depth"])
            op["band"] = self._band(start)
            for event in self.events:
                if op["name"] in event["producers"] and event["consumers"]:
                    end = max(end, int(min(self.ops[name]["depth"] for name in event["consumers"])) - 1)
            lane = 0
            while any(start <= right and left <= end for left, right in taken.get((op["band"], lane), ())):
                lane += 1
            taken.setdefault((op["band"], lane), []).append((start, end))
            op["lane"] = lane


def _names(text) -> list[str]:
    return text.split("; ") if isinstance(text, str) and text else []


def _wrapped(name: str, inches: float) -> str:
    """An op's name in lines that fit into a box of this width, cut behind underscores."""
    most = int((inches - 0.06) * 72 / (0.68 * FONT))  # capitals of the font are 0.68 of its size wide
    lines = [""]
    for part in name.split(" #")[0].replace("_", "_ ").split():
        if lines[-1] and len(lines[-1] + part) > most:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _draw_op(ax, op, place: _Layout) -> None:
    from matplotlib.patches import Rectangle

    wide, high, heavy = place.box_width, place.box_height, bool(op["critical"])
    corner = op["x"] - wide / 2, op["y"] - high / 2
    edge = {"edgecolor": CRITICAL if heavy else LINE, "linewidth": 1.6 if heavy else 0.8}
    ax.add_patch(Rectangle(corner, wide, high, facecolor=KINDS[op["kind"]], zorder=2, **edge))
    tasks = int(op["tasks"])
    size = f"{op['mb']:.{1 if op['mb'] >= 10 else 2}f} MB" if op["mb"] else "no weights"
    text = f"{_wrapped(op['name'], wide)}\n{tasks} task{'s' * (tasks != 1)}\n{size}"
    ax.text(op["x"], op["y"], text, ha="center", va="center", fontsize=FONT, linespacing=1.15, zorder=3, gid="op")


def _draw_event(ax, event, place: _Layout) -> None:
    x, y = event["x"], event["y"]

    def line(points, heavy, arrow=False):
        look = {"color": CRITICAL if heavy else LINE, "linewidth": 1.6 if heavy else 0.8, "zorder": 1.5 if heavy else 1}
        ax.plot(*zip(*points, strict=True), **look, solid_joinstyle="miter", solid_capstyle="butt")
        if arrow:
            (x0, y0), (x1, y1) = points[-2:]
            ax.annotate(
                "", (x1, y1), (x0, y0), arrowprops=dict(arrowstyle="-|>,head_width=0.14,head_length=0.28", shrinkA=0,
                shrinkB=0, color=look["color"], linewidth=look["linewidth"]), zorder=look["zorder"],
            )  # fmt: skip

    for name in event["producers"]:
        op = place.ops[name]
        start, heavy = (op["x"] + place.box_width / 2, op["y"]), bool(op["critical"])
        if op["band"] == event["band"]:
            line([start, (x, op["y"]), (x, y)], heavy)
        else:  # on to the next band, as a line of text goes on
            right = place.width - place.margin
            between = place.height - place.band_top[event["band"]] + place.gutter / 2
            left = place.margin / 2
            line([start, (right, op["y"]), (right, between), (left, between), (left, y), (x, y)], heavy)
    for name in event["consumers"]:
        op = place.ops[name]
        heavy = bool(op["critical"]) and event["critical"]
        line([(x, y), (x, op["y"]), (op["x"] - place.box_width / 2, op["y"])], heavy, arrow=True)
    if "from" in event["outside"]:
        line([(place.margin / 2, y), (x, y)], event["critical"])
    if "to" in event["outside"]:
        line([(x, y), (x + place.event_gap, y)], event["critical"], arrow=True)
    color = CRITICAL if event["critical"] else LINE
    ax.plot([x], [y], "o", color=color, markersize=4.5, zorder=4)
    ax.text(x, y + 0.05, f"{int(event['threshold'])}", ha="center", va="bottom", fontsize=FONT, zorder=5, gid="event")


def _draw_legend(ax) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=KINDS[kind], edgecolor=LINE, label=text) for kind, text in KIND_LABELS.items()]
    handles.append(Line2D([], [], color=CRITICAL, linewidth=1.6, label="longest chain"))
    handles.append(Line2D([], [], color=LINE, linewidth=0.8, marker="o", markersize=4.5, label="event, its threshold"))
    ax.legend(handles=handles, loc="lower center", ncols=5, borderpad=0, borderaxespad=0.2, columnspacing=1.4)
