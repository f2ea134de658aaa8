"""Figures of notebooks 22 and 23, drawn from the rows of megakernel.bench.gates_run as records.load reads them back."""

from fmms import plotting
from fmms.bench import published, records
from megakernel.bench import gates_run, layer_gates

LAYER, MODEL = "22_m2_layer", "23_m3_model"
PRESETS = {
    "h200": {"color": "#0173B2", "linestyle": "-"},
    "mi300x": {"color": "#DE8F05", "linestyle": (0, (4, 1.5))},
    "mi300x_chain": {"color": "#029E73", "linestyle": (0, (2, 1, 0.6, 1))},
}
SCHEDULES = {
    "static": {"marker": "o", "markersize": 3.2, "color": "#0173B2"},
    "dynamic": {"marker": "s", "markersize": 6, "color": "#D55E00", "markerfacecolor": "none", "markeredgewidth": 0.8},
}
PUBLISHED = {"color": "#555555", "marker": "d", "markersize": 3, "markerfacecolor": "white", "linestyle": ":"}
LEAST = 1e-7
"""Shares below it are drawn at 0."""


def ops(rows, profile: str):
    """The error of every op as a share of its bound: `22_m2_layer_ops`; a panel for each preset, a mark for each seed
    and schedule."""
    about = records.metadata(LAYER, profile)["extra"]
    presets, order = list(rows["preset"].unique()), gates_run.result_order(rows)
    fig, axes = plotting.figure("page", 0.9 + 0.155 * len(order), ncols=len(presets), sharey=True, squeeze=False)
    places = {result: place for place, result in enumerate(order)}
    for ax, preset in zip(axes[0], presets, strict=True):
        one = rows[rows["preset"] == preset]
        for schedule, some in one.groupby("schedule", sort=False):
            shares = some["share"].fillna(float("inf")).clip(upper=30)
            ax.plot(shares, some["result"].map(places), linestyle="", clip_on=False, zorder=3, **SCHEDULES[schedule])
        ax.axvline(1, color="black", linewidth=0.9)
        absent = [place for result, place in places.items() if result not in set(one["result"])]
        for place in absent:
            ax.annotate("no such op", (LEAST, place), fontsize=7, color="#777777", va="center", xytext=(3, 0),
                        textcoords="offset points")  # fmt: skip
        ax.set_xscale("symlog", linthresh=LEAST, linscale=0.3)
        ax.set_xlim(-LEAST / 4, 30)
        ax.set_xticks([0, 1e-6, 1e-4, 1e-2, 1], ["0", "1e-6", "1e-4", "0.01", "1"])
        ax.minorticks_off()
        ax.set_title(preset, fontsize=8, fontweight="normal")
        ax.set_xlabel("error / bound")
    axes[0, 0].set_ylim(len(order) - 0.4, -0.6)
    axes[0, 0].set_yticks(range(len(order)), order)
    for ax in axes[0]:
        ax.tick_params(axis="y", length=0)
    fig.suptitle("Is every op of a layer right on its own inputs?", fontweight="bold", x=0.01, ha="left")
    handles = [
        axes[0, 0].plot([], [], linestyle="", label=f"{schedule} schedule", **SCHEDULES[schedule])[0]
        for schedule in rows["schedule"].unique()
    ]
    handles.append(axes[0, 0].plot([], [], color="black", linewidth=0.9, label="bound")[0])
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles), handlelength=1.6)
    seeds = rows["seed"].nunique()
    caption = (
        f"One layer of model {about['model']} with random weights in one launch, after {about['prompt_tokens']:,} "
        f"random tokens; n = {seeds} seeds for each result and schedule. Error: the largest difference from PyTorch on "
        "the launch's own inputs; bound: 2 % of PyTorch's largest entry, and 1e-3. At 0: equal to the bit, or the "
        f"right choice. {_hardware(profile, LAYER)}."
    )
    return plotting.save(fig, f"{LAYER}_ops", profile, caption)


def depth(layers, profile: str):
    """How errors grow with depth: `23_m3_model_depth`; four panels over the layers."""
    about = records.metadata(MODEL, profile)["extra"]
    # the same work only at full size
    theirs = published.layer_gates() if about["model"] == "v2-lite" else None
    state, cache = layers[layers["result"] == "residual"], layers[layers["result"] != "residual"]
    tokens = list(gates_run.TOKEN)
    cache = cache.groupby([*tokens, "layer"], sort=False, as_index=False)["path_rel"].max()
    cache = cache[cache["layer"] > 0]  # what the first layer caches depends on the embedding alone
    fig, axes = plotting.figure("page", 4.6, ncols=2, nrows=2, sharex=True)

    ax = axes[0, 0]
    _bands(ax, state, state["path_rel"])
    if theirs is not None:
        ax.plot(theirs["layer"], theirs["rel"], label="MI300X, published", **PUBLISHED)
    _bound(ax, layer_gates.LAYER_ERROR)
    ax.set(yscale="log", ylabel="largest error\nover largest entry")
    ax.set_title("residual stream: error", fontsize=8, fontweight="normal")

    ax = axes[0, 1]
    _bands(ax, state, (1 - state["path_cosine"]).clip(lower=1e-9))
    if theirs is not None:
        ax.plot(theirs["layer"], 1 - theirs["cosine"], **PUBLISHED)
    _bound(ax, 1 - layer_gates.LAYER_COSINE)
    ax.set(yscale="log", ylabel="1 − cosine")
    ax.set_title("residual stream: direction", fontsize=8, fontweight="normal")

    ax = axes[1, 0]
    _bands(ax, cache, cache["path_rel"].clip(lower=1e-5))
    if theirs is not None:
        later = theirs[theirs["layer"] > 0]
        ax.plot(later["layer"], later[["k_row_rel", "v_row_rel"]].max(axis=1), **PUBLISHED)
    _bound(ax, layer_gates.ROW_ERROR)
    ax.set(yscale="log", ylabel="largest error\nover largest entry", xlabel="layer")
    ax.set_title("row of the cache: error", fontsize=8, fontweight="normal")

    ax = axes[1, 1]
    _bands(ax, state, state["own_rms"])
    usual = state.groupby("layer")["reference_rms"].median()
    style = {"color": "black", "linestyle": "-", "linewidth": 0.9, "marker": "x", "markersize": 3}
    ax.plot(usual.index, usual, label="reference in bf16", **style)
    ax.set(yscale="log", ylabel="rms difference over rms", xlabel="layer")
    ax.set_title("residual stream: distance from fp32", fontsize=8, fontweight="normal")
    for ax in axes.flat:
        _plain(ax, (1,) if ax is axes[0, 1] else (1, 2, 5))

    fig.suptitle("How do errors grow with depth, and are they rounding?", fontweight="bold", x=0.01, ha="left")
    labels: dict = {}
    for ax in (axes[0, 0], axes[1, 1]):
        labels |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    fig.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=len(labels), handlelength=2.4)
    count = len(state[state["layer"] == 0])
    caption = (
        f"Model {about['model']} with random weights, {about['layers']} layers in one launch for each of {count} "
        f"tokens after {about['prompt_tokens']:,} random ones, against the bf16 reference with the launch's experts. "
        "Lines: medians, bands: from the least to the largest; of the cache the worse of latent and rotary key, or of "
        f"keys and values. {_hardware(profile, MODEL)}."
    )
    if theirs is not None:
        caption += f" Published: {published.GATES}; of the cache the worse of keys and values."
    return plotting.save(fig, f"{MODEL}_depth", profile, caption)


def _bands(ax, rows, values) -> None:
    """For each preset the median of a layer's values, and what lies between the least and the largest."""
    for preset in rows["preset"].unique():
        mine = rows["preset"] == preset
        grouped = values[mine].groupby(rows["layer"][mine])
        middle, low, high = grouped.median(), grouped.min(), grouped.max()
        style = PRESETS[preset]
        ax.fill_between(middle.index, low, high, color=style["color"], alpha=0.16, linewidth=0)
        ax.plot(middle.index, middle, label=preset, marker="o", markersize=2, **style)


def _bound(ax, value: float) -> None:
    ax.axhline(value, color="#D55E00", linewidth=0.9, linestyle="--", zorder=1, label="bound")


def _plain(ax, digits: tuple[int, ...]) -> None:
    """Whole layers, and values that start with one of these digits, as plain numbers."""
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    plotting.plain_log_ticks(ax.yaxis, digits)


def _hardware(profile: str, name: str) -> str:
    if profile == "cpu":
        return "The device code on a CPU, a fibre for each GPU thread"
    return plotting.hardware_note(profile, name)
