"""Figures of notebook 20, drawn from the rows of megakernel.bench.reference_run as records.load reads them back."""

import re

from fmms import plotting
from fmms.bench import published, records
from megakernel.bench import reference_run, rounding

NOTEBOOK = "20_m0_reference"
SEED_MARKERS = "os^Dv"
FLOORS = {"latent": {"color": "black", "linestyle": "-"}, "decompressed": {"color": "black", "linestyle": ":"}}


def margins(steps, profile: str):
    """How close the choices of tokens and of experts are: `20_m0_reference_margins`; rows of `step_rows`."""
    about = records.metadata(f"{NOTEBOOK}_steps", profile)["extra"]
    fig, axes = plotting.figure("page", 2.9, ncols=2)
    tokens, routers = (steps[steps["quantity"] == name] for name in ("token", "router"))
    ax = axes[0]
    for number, (seed, points) in enumerate(tokens.groupby("seed")):
        style = {"color": plotting.PALETTE[number % 10], "marker": SEED_MARKERS[number % 5], "markersize": 3}
        ax.plot(points["step"], points["margin"], linewidth=0.6, label=f"seed {seed}", **style)
    # a tie in bf16 is exactly 0, which a logarithm has no place for
    ax.set_yscale("symlog", linthresh=rounding.NEAR_TIE, linscale=0.5)
    ax.set_ylim(-0.02, tokens["margin"].max() * 1.5)
    plain_ticks(ax.yaxis, tokens["margin"].max())
    ax.axhspan(-0.02, rounding.NEAR_TIE, color="#dddddd", zorder=0, linewidth=0, label="near-tie")
    ax.set(xlabel="decode step (0: prefill)", ylabel="margin of the two largest logits")
    ax.set_title("tokens", fontsize=8, fontweight="normal")

    ax = axes[1]
    shown = routers.groupby("layer")["margin"].quantile([0, 0.05, 0.5, 0.95]).unstack()
    layers = shown.index.astype(int)
    ax.vlines(layers, shown[0.05], shown[0.95], color="#0173B2", linewidth=1.5, label="5 % to 95 %")
    ax.plot(layers, shown[0.5], color="#0173B2", marker="o", linestyle="", label="median")
    ax.plot(layers, shown[0], color="#D55E00", marker="x", linestyle="", label="least")
    ax.set(yscale="log", xlabel="layer", ylabel=f"margin of router logits {about['k']} and {about['k'] + 1}")
    ax.set_xticks(layers if len(layers) < 8 else layers[::5])
    ax.margins(x=0.25 if len(layers) < 8 else 0.05)
    ax.set_title("experts", fontsize=8, fontweight="normal")
    for ax in axes:
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, handlelength=1.4, columnspacing=1.0)
    fig.suptitle("How close are the choices of tokens and of experts?", fontweight="bold", x=0.01, ha="left")
    count = tokens.groupby("seed").size().iloc[0]
    caption = (
        f"Greedy decode of the reference, {about['model']} in {about['dtype']} with random weights, "
        f"{about['prompt_tokens']:,} prompt tokens. Left: n = {count} choices of each seed; shaded: below "
        f"{rounding.NEAR_TIE:g}. Right: n = {count * tokens['seed'].nunique()} choices of each layer with experts, "
        f"all seeds. {_hardware(profile, '_steps')}."
    )
    return plotting.save(fig, f"{NOTEBOOK}_margins", profile, caption)


def plain_ticks(axis, most: float) -> None:
    """Ticks at 0 and at 0.1, 0.3, 1 and so on up to `most`, for an axis of logits."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis.set_major_locator(FixedLocator([0] + [t for t in (0.1, 0.3, 1, 3, 10, 30, 100) if t <= most * 1.5]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def speed(decode, floor_rows, profile: str):
    """Milliseconds per token beside the floor and published decoders: `20_m0_reference_speed`; rows of `time_systems`
    and `floors`."""
    own = {
        cache: float(floor_rows[floor_rows["quantity"] == f"floor, {cache} cache"]["median"].iloc[0])
        for cache in FLOORS
    }
    theirs = published.decode_baselines()
    theirs = theirs[theirs["batch"] == 1].sort_values("ms_per_token", ascending=False)
    name, dtype = decode["config"].iloc[0].split(", ")[0].split(" ")
    length = int(decode["T"].iloc[0])
    other = {  # of the published model, at its positions
        cache: reference_run.bytes_per_token(reference_run.MODELS["v2-lite"], 1056, 2, latent=cache == "latent")
        / published.read_ceiling()
        * 1e3
        for cache in FLOORS
    }

    entries = [(f"This run: {name}{' on a CPU' if profile == 'cpu' else ''}", None, None)]
    entries += [(decoder_label(row.system, row.config), row.system, row) for row in decode.itertuples()]
    split = len(entries)
    entries += [("Published: V2-Lite, one H200", None, None)]
    entries += [(decoder_label(row.system, row.config), row.system, row) for row in theirs.itertuples()]

    fig, ax = plotting.figure("page", 0.75 + 0.17 * len(entries))
    for place, (_, system, row) in enumerate(entries):
        if row is None:
            continue
        style = {key: value for key, value in plotting.system_style(system).items() if key in ("color", "marker")}
        if hasattr(row, "p50_ms"):
            if row.p50_ms != row.p50_ms:
                continue
            ax.hlines(place, row.min_ms, row.p95_ms, color=style["color"], linewidth=1.2)
            ax.plot(row.p50_ms, place, linestyle="", **style)
            write_value(ax, max(row.p50_ms, row.p95_ms), place, row.p50_ms)
        else:
            ax.plot(row.ms_per_token, place, linestyle="", markerfacecolor="white", **style)
            write_value(ax, row.ms_per_token, place, row.ms_per_token)
    for (top, bottom), values in (((0, split - 1), own), ((split, len(entries) - 1), other)):
        for cache, style in FLOORS.items():
            label = f"floor, {cache} cache" if top == 0 else None
            ax.vlines(values[cache], top - 0.3, bottom + 0.4, linewidth=0.9, label=label, **style)
    for place, (_, _, row) in enumerate(entries):
        if row is not None and hasattr(row, "p50_ms") and row.p50_ms != row.p50_ms:
            ax.annotate("not timed here", (own["decompressed"], place), (8, 0), textcoords="offset points", va="center")
    ax.set_xscale("log")
    finish_rows(ax, entries)
    title = "How long does a token take, and how long must it?"
    if profile == "cpu":
        title += " (a tiny model on a CPU: no speed claim)"
    fig.suptitle(title, fontweight="bold", x=0.01, ha="left")
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2, handlelength=1.6)
    timed = decode.dropna(subset=["p50_ms"])
    n = f"n = {int(timed['n'].iloc[0])} steps" if len(timed) else "nothing timed"
    caption = (
        f"Batch 1; in brackets the implementations of experts and attention. This run: {name} in {dtype}, T = "
        f"{length:,} positions, median of {n}, bar from the least to p95; {_hardware(profile, '')}. Hollow: "
        f"{published.DECODES}. Floors: bytes of weights and cache over the measured read bandwidth, of the published "
        f"ones {published.read_ceiling() / 1e12:.2f} TB/s."
    )
    return plotting.save(fig, f"{NOTEBOOK}_speed", profile, caption)


def decoder_label(system: str, config: str) -> str:
    """A decode in few words: "vllm (greedy)", "transformers-eager (batched_mm, sdpa)"."""
    found = re.search(r"experts (\w+), attention (\w+)", config)
    return f"{system} ({', '.join(found.groups()) if found else config.split(', ')[-1]})"


def finish_rows(ax, entries: list) -> None:
    """The axes of a figure of times, one row for each decode.

    Args:
        ax: with a logarithmic x axis, in ms.
        entries: of each row its label, its style and what was measured; None there makes the label a heading.
    """
    from matplotlib.ticker import FuncFormatter, NullFormatter

    ax.set_ylim(len(entries) - 0.4, -0.6)
    ax.set_yticks(range(len(entries)), [label for label, _, _ in entries])
    for tick, (_, _, row) in zip(ax.get_yticklabels(), entries, strict=True):
        tick.set_fontweight("bold" if row is None else "normal")
    ax.tick_params(axis="y", length=0)
    ax.grid(False, axis="y")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("ms per token")
    ax.margins(x=0.1)


def write_value(ax, x: float, place: int, value: float) -> None:
    """Write a value beside its point."""
    ax.annotate(f"{value:.3g}", (x, place), (5, 0), textcoords="offset points", va="center")


def _hardware(profile: str, suffix: str) -> str:
    if profile == "cpu":
        return "PyTorch on a CPU: no speed claim"
    return plotting.hardware_note(profile, NOTEBOOK + suffix)
