"""Figures of the truncation notebook, drawn from the rows of fmms.bench.truncation as records.load reads them back."""

from fmms import plotting
from fmms.bench import cases, kernel_speed
from fmms.bench import kernel_speed_figures as shared

NOTEBOOK = "15_truncation"
DISTRIBUTIONS = {
    "peaked": ("#0173B2", "-"),
    "zipf": ("#029E73", "-"),
    "heavy tail": ("#DE8F05", "-."),
    "two values": ("#CC78BC", "--"),
    "flat": ("#949494", ":"),
}
"""Colour and dash of each distribution."""
CONTROLS = {
    "none": plotting.SYSTEMS["fmms"],
    "k = 50": {"color": "#56B4E9", "marker": "s", "linestyle": "-"},
    "min-p = 0.05": {"color": "#CC78BC", "marker": "v", "linestyle": "-"},
    "k = 50, p = 0.9": plotting.SYSTEMS["fmms-topk-topp"],
    "p = 0.9": {"color": "#DE8F05", "marker": "^", "linestyle": "-"},
    "p = 0.66 of a flat distribution": {"color": "#D55E00", "marker": "P", "linestyle": "-"},
}
"""Looks of `fmms` alone in the panel that compares its controls."""
TORCH = {"color": "#4D4D4D", "marker": "<", "linestyle": "--", "label": "torch-topk-topp"}


def survivors(frame, profile: str):
    """Tokens kept against p and min-p, a line for each distribution; rows of `truncation.survivors`."""
    fig, axes = plotting.figure("page", 2.7, ncols=2, sharey=True)
    for ax, name, label, usual in zip(axes, ("top_p", "min_p"), ("top-p", "min-p"), (0.9, 0.05), strict=True):
        some = frame[frame["filter"] == name]
        for shape, (color, dash) in DISTRIBUTIONS.items():
            points = some[some["distribution"] == shape].sort_values("value")
            ax.plot(points["value"], points["kept"], color=color, linestyle=dash, label=shape)
        ax.axvline(usual, color="black", linewidth=0.8, zorder=1)
        ax.annotate(f"{usual:g}", (usual, 1), (2, 0), textcoords="offset points", xycoords=("data", "axes fraction"))
        ax.set(xlabel=label, yscale="log")
    axes[1].set_xscale("log")
    axes[1].axhline(50, color="black", linewidth=0.8, linestyle=":", zorder=1)
    axes[0].axhline(50, color="black", linewidth=0.8, linestyle=":", zorder=1)
    axes[1].annotate("top-k 50", (1, 50), (0, 2), textcoords="offset points", ha="right")
    axes[0].set_ylabel("tokens kept")
    fig.suptitle("How many tokens do top-p and min-p keep?", x=0.01, ha="left", weight="bold")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, handlelength=2.6)
    caption = (
        f"By the definition, in fp64: V = {int(frame['V'].iloc[0]):,}, n = 1 row of each distribution at "
        f"T = {frame['temperature'].iloc[0]:g}. Lines mark usual settings. No hardware shows in it."
    )
    return plotting.save(fig, f"{NOTEBOOK}_survivors", profile, caption)


def cost(results, profile: str):
    """Time over the matmul alone against H: `fmms` by its controls, and samplers with the same truncation; rows of
    `truncation.measure_cost`."""
    drawn = kernel_speed.relative(results)
    both = drawn[drawn["system"].str.contains("topk-topp")]["controls"]
    same = drawn[drawn["controls"].isin(both)]
    fig, axes = plotting.figure("page", 3.2, ncols=2, sharex=True, sharey=True)
    hollow = False
    for control, style in CONTROLS.items():
        points = drawn[drawn["system"].str.startswith("fmms") & (drawn["controls"] == control)]
        hollow |= _line(axes[0], points, {**style, "label": control})
    for system in shared.kernel_speed_order(same):
        style = plotting.system_style(system) if system in plotting.SYSTEMS else TORCH
        hollow |= _line(axes[1], same[same["system"] == system], style)
    case = cases.get(results["case"].iloc[0])
    titles = "fmms, by its truncation", f"samplers with {both.iloc[0]}" if len(both) else ""
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title, fontsize=8, fontweight="normal")
        ax.axhline(1, color="#444444", linewidth=0.8)
        shared._rows_axis(ax, drawn["H"])
        shared._ratio_axis(ax, drawn["relative"])
        ax.set_xlabel("rows H")
        if ax.get_legend_handles_labels()[0]:
            ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2, handlelength=2.4, columnspacing=1.0)
    axes[0].set_ylabel("time / matmul alone")
    title = "How much longer than the LM-head matmul alone does truncated sampling take?"
    if profile == "cpu":
        title += "\nTimed in Triton's interpreter on a CPU: no speed claim"
    fig.suptitle(title, fontweight="bold", x=0.01, ha="left")
    caption = (
        f"{plotting.hardware_note(profile, NOTEBOOK + '_cost')}. {case.label}, V = {case.V:,}, D = {case.D:,}. "
        f"{shared._how(results)} Line at 1: the matmul alone."
    )
    flat = results[results["controls"].astype(str).str.contains("flat")]["kept"].dropna()
    if len(flat):
        caption += f" The flat distribution keeps {flat.iloc[0]:,.0f} tokens."
    if hollow:
        caption += " Hollow marks: it can't be captured in a CUDA graph and is timed eagerly, like its matmul."
    return plotting.save(fig, f"{NOTEBOOK}_cost", profile, caption)


def _line(ax, points, style) -> bool:
    """Draws a system's ratios with their spread; whether it was timed eagerly beside others that were not."""
    if points.empty:
        return False
    points = points.sort_values("H")
    eager = bool((points["timing"] == "events").all())
    ax.plot(points["H"], points["relative"], **style, markerfacecolor="white" if eager else style["color"])
    ax.vlines(
        points["H"],
        points["p20_us"] / points["matmul_us"],
        points["p80_us"] / points["matmul_us"],
        color=style["color"],
        linewidth=0.8,
    )
    return eager
