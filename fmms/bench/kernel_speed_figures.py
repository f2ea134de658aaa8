"""Figures of 11_kernel_speed, drawn from its result rows and from published ones."""

from fmms import plotting
from fmms.bench import cases, kernel_speed, published

_PAPER_STYLE = {
    "H100": {"marker": "v", "color": "#bbbbbb"},
    "H200": {"marker": "d", "color": "#000000"},
    "B200": {"marker": "s", "color": "#888888"},
    "B300": {"marker": "^", "color": "#666666"},
}
_FLASHSAMPLING = {"color": "#000000", "marker": "d", "linestyle": (0, (1, 1.2)), "label": "flashsampling"}


def relative_time(results, profile: str):
    """Time over the matmul alone against H, a panel per case: `11_kernel_speed_relative`."""
    drawn = kernel_speed.relative(results)
    names = [name for name in results["case"].unique() if name in set(drawn["case"])]
    rows = 2 if len(names) > 3 else 1
    fig, axes = plotting.figure(
        "page",
        height=0.9 + 1.7 * rows,
        ncols=-(-len(names) // rows) or 1,
        nrows=rows,
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    legend, hollow = {}, False
    for index, (ax, name) in enumerate(zip(axes.flat, names, strict=False)):
        case = cases.get(name)
        ax.set_title(f"{case.label}  ({case.V}, {case.D})", fontsize=8, fontweight="normal")
        ax.axhline(1, color="#444444", linewidth=0.8)
        for system in kernel_speed_order(drawn):
            if system == kernel_speed.YARDSTICK:
                continue
            points = drawn[(drawn["case"] == name) & (drawn["system"] == system)].sort_values("H")
            if points.empty:
                continue
            style = _style(system)
            (line,) = ax.plot(points["H"], points["relative"], **style)
            legend.setdefault(system, line)
            low, high = (points[column] / points["matmul_us"] for column in ("p20_us", "p80_us"))
            ax.vlines(points["H"], low, high, color=style["color"], linewidth=0.8)
            eager = points[points["timing"] == "events"]
            if not eager.empty:
                hollow = True
                marks = {**style, "linestyle": "", "markerfacecolor": "white", "label": None, "zorder": 3}
                ax.plot(eager["H"], eager["relative"], **marks)
        _rows_axis(ax, drawn["H"])
        _ratio_axis(ax, drawn["relative"])
        if index % axes.shape[1] == 0:
            ax.set_ylabel("time / matmul alone")
    for ax in axes.flat[len(names) :]:
        ax.set_visible(False)
    for ax in axes[-1]:
        ax.set_xlabel("rows H")
    title = "How much longer than the LM-head matmul alone does sampling take?"
    if profile == "cpu":
        title += "\nTimed in Triton's interpreter on a CPU: no speed claim"
    _finish(fig, title, legend.values(), 3)
    caption = f"{plotting.hardware_note(profile, '11_kernel_speed')}. {_how(results)} Line at 1: the matmul alone."
    if hollow:
        caption += " Hollow marks: the system can't be captured in a CUDA graph and is timed eagerly, like its matmul."
    return plotting.save(fig, "11_kernel_speed_relative", profile, caption)


def beside_published(results, profile: str):
    """The same ratio beside published measurements of other samplers on an H200: `11_kernel_speed_published`."""
    theirs = published.baselines()
    ours = kernel_speed.relative(results)
    ours = ours[ours["system"] == "fmms"]
    names = [name for name in cases.MODELS if name in set(theirs["case"])]
    fig, axes = plotting.figure("page", height=2.5, ncols=len(names), sharex=True, sharey=True, squeeze=False)
    legend, measured = {}, False
    for ax, name in zip(axes.flat, names, strict=True):
        case = cases.get(name)
        ax.set_title(f"{case.label}  ({case.V}, {case.D})", fontsize=8, fontweight="normal")
        ax.axhline(1, color="#444444", linewidth=0.8)
        panel = theirs[(theirs["case"] == name) & (theirs["system"] != kernel_speed.YARDSTICK)]
        for system, points in panel.groupby("system", sort=False):
            points = points.sort_values("H")
            (line,) = ax.plot(points["H"], points["relative"], **_style(system) | {"markerfacecolor": "white"})
            legend.setdefault(f"{system}, published", line)
        mine = ours[ours["case"] == name].sort_values("H")
        if not mine.empty:
            measured = True
            (line,) = ax.plot(mine["H"], mine["relative"], **_style("fmms") | {"linewidth": 2.0})
            legend.setdefault("fmms, this run", line)
        _rows_axis(ax, theirs["H"])
        _ratio_axis(ax, theirs["relative"])
        ax.set_xlabel("rows H")
    axes[0, 0].set_ylabel("time / matmul alone")
    title = "How much longer than the matmul alone do published samplers take?"
    title = "Where does fmms stand beside published samplers?" if measured else f"{title}\n{_ONLY_PUBLISHED}"
    _finish(fig, title, legend.values(), 3, list(legend))
    caption = f"Published (hollow): {published.BASELINES}, each over the matmul of its own run."
    if measured:
        caption += f" fmms: {plotting.hardware_note(profile, '11_kernel_speed')}. {_how(results)}"
    return plotting.save(fig, "11_kernel_speed_published", profile, caption)


def beside_paper(results, profile: str):
    """Speedup over torch.multinomial beside FlashSampling's published one: `11_kernel_speed_paper`."""
    theirs = published.paper_speedups()
    theirs = theirs[theirs["over"] == "torch-multinomial"]
    names = [name for name in cases.MODELS if name in set(theirs["case"])]
    fig, axes = plotting.figure("page", height=2.5, ncols=len(names), sharex=True, sharey=True, squeeze=False)
    legend, measured = {}, False
    for ax, name in zip(axes.flat, names, strict=True):
        case = cases.get(name)
        ax.set_title(f"{case.label}  ({case.V}, {case.D})", fontsize=8, fontweight="normal")
        ax.axhline(1, color="#444444", linewidth=0.8)
        for gpu, points in theirs[theirs["case"] == name].groupby("gpu", sort=False):
            style = {**_PAPER_STYLE.get(gpu, {"marker": ".", "color": "#999999"}), "linestyle": ":"}
            points = points.sort_values("H")
            (line,) = ax.plot(points["H"], points["speedup"], markerfacecolor="white", **style)
            legend.setdefault(f"FlashSampling, {gpu}, published", line)
        timed = results[results["case"] == name].dropna(subset=["median_us"]).drop_duplicates(["H", "system"])
        times = timed.pivot(index="H", columns="system", values="median_us")
        if {"fmms", "torch-multinomial"} <= set(times.columns):
            measured = True
            speedup = times["torch-multinomial"] / times["fmms"]
            (line,) = ax.plot(speedup.index, speedup, **_style("fmms") | {"linewidth": 2.0})
            legend.setdefault("fmms, this run", line)
        _rows_axis(ax, theirs["H"])
        ax.set_xlabel("rows H")
    axes[0, 0].set_ylabel("speedup over\nmultinomial sampling")
    title = "How much faster than multinomial sampling?"
    title = title if measured else f"{title}\n{_ONLY_PUBLISHED}"
    _finish(fig, title, legend.values(), 3, list(legend))
    caption = f"Published (hollow): {published.PAPER}, tables 4 and 5, over the paper's own multinomial baseline."
    if measured:
        caption += (
            f" fmms: over torch-multinomial, timed eagerly as it can't be captured in a CUDA graph; "
            f"{plotting.hardware_note(profile, '11_kernel_speed')}. {_how(results)}"
        )
    return plotting.save(fig, "11_kernel_speed_paper", profile, caption)


_ONLY_PUBLISHED = "Published measurements only: this profile measures none of these heads"


def kernel_speed_order(results) -> list[str]:
    """Systems in the order of the style sheet, then others in their own."""
    present = list(dict.fromkeys(results["system"]))
    return [name for name in plotting.SYSTEMS if name in present] + [
        name for name in present if name not in plotting.SYSTEMS
    ]


def _style(system: str) -> dict:
    if system in plotting.SYSTEMS:
        return plotting.system_style(system)
    # a user's own backend
    return _FLASHSAMPLING if system == "flashsampling" else {"color": "#000000", "marker": "p", "label": system}


def _how(results) -> str:
    timed = results.dropna(subset=["median_us"])
    counts = sorted({int(n) for n in timed["n"]})
    methods = {"cuda_graph": "CUDA-graph replay", "events": "eager calls", "perf_counter": "eager calls"}
    main = "cuda_graph" if "cuda_graph" in set(timed["timing"]) else timed["timing"].iloc[0]
    spread = ", bars from p20 to p80" if counts != [1] else ""
    n = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    dtype, l2 = timed["dtype"].iloc[0], timed["l2"].iloc[0]
    return f"{dtype}, medians of n = {n} interleaved calls{spread}, {methods[main]}, {l2} cache."


def _rows_axis(ax, values) -> None:
    from matplotlib.ticker import NullLocator

    ticks = [2**k for k in range(9) if 2**k <= max(values)]
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks if len(ticks) < 6 else ticks[::2], [str(t) for t in (ticks if len(ticks) < 6 else ticks[::2])])
    ax.xaxis.set_minor_locator(NullLocator())


def _ratio_axis(ax, values) -> None:
    """Logarithmic; plain numbers where all lie within a factor of ten or so."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    ax.set_yscale("log")
    low, high = float(values.min()), float(values.max())
    if high / low < 30:
        steps = [0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24]
        ax.yaxis.set_major_locator(FixedLocator([s for s in steps if low / 1.3 <= s <= high * 1.3]))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.yaxis.set_minor_locator(NullLocator())


def _finish(fig, title: str, lines, columns: int, labels=None) -> None:
    fig.suptitle(title, fontweight="bold", x=0.01, ha="left")
    lines = list(lines)
    names = labels or [line.get_label() for line in lines]
    if lines:
        fig.legend(lines, names, loc="outside lower center", ncols=columns, handlelength=2.6, columnspacing=1.4)
