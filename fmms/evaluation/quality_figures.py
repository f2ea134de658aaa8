"""Figures of 18_quality, drawn from the rows of fmms.evaluation.quality as records.load reads them back."""

import numpy as np

from fmms import plotting
from fmms.bench import records
from fmms.evaluation import naming, quality, variants

NOTEBOOK = "18_quality"
LINE = {"color": "#444444", "linewidth": 0.8, "zorder": 1}


def accuracy(profile: str):
    """Right answers of every sampler with its interval, a panel for each setting."""
    frame = records.load(NOTEBOOK, profile)
    fig, axes = _panels(frame, 2.0)
    for ax, (setting, rows) in zip(axes, _settings(frame), strict=True):
        _points(ax, rows, "correct")
        ax.axvspan(*quality.RANGE, color="#dddddd", alpha=0.35, linewidth=0)
        ax.set(xlim=(0, 100), xlabel=naming.paper("correct"), title=naming.paper(setting))
    _title(fig, "Are samplers that should be one distribution right equally often?")
    caption = (
        f"{_model(profile)}; {frame['dataset'].iloc[0]}: the same {frame['n'].iloc[0]:,} for each sampler. "
        f"{_sampling(profile)} Bars: 95 % intervals ({_methods(frame)}). Shaded: where a difference could show. "
        f"{_machine(profile)}."
    )
    return plotting.save(fig, f"{NOTEBOOK}_accuracy", profile, caption)


def differences(profile: str):
    """Difference in right answers of every pair with its interval and corrected p-value, a panel for each setting."""
    frame = records.load(f"{NOTEBOOK}_pairs", profile)
    count = len(frame) // frame["setting"].nunique()
    fig, axes = _panels(frame, 0.9 + 0.24 * count)
    reach = 1.08 * float(frame[["low", "high"]].abs().to_numpy().max())
    for ax, (setting, rows) in zip(axes, _settings(frame), strict=True):
        y = np.arange(len(rows))[::-1]
        for at, row in zip(y, rows.itertuples(), strict=True):
            look = naming.style("control" if row.control else "fmms")
            bars = [[row.difference - row.low], [row.high - row.difference]]
            ax.errorbar(row.difference, at, xerr=bars, color=look["color"], marker=look["marker"], elinewidth=1.0)
            shown = "p < 0.001" if row.p_holm < 0.001 else f"p = {row.p_holm:.2g}"
            ax.annotate(shown, (1.01, at), xycoords=("axes fraction", "data"), va="center")
        ax.axvline(0, **LINE)
        ax.set_yticks(y, [f"{_short(row.a)} − {_short(row.b)}" for row in rows.itertuples()])
        ax.set(xlim=(-reach, reach), ylim=(-0.6, len(rows) - 0.4), title=naming.paper(setting))
        ax.grid(axis="y", visible=False)
    fig.supxlabel(naming.paper("difference"), fontsize=8)
    _title(fig, "Which samplers can be told apart by their right answers?")
    caption = (
        f"{_model(profile)}; n = {frame['n'].iloc[0]:,} problems, both answers of each paired. Bars: 95 % intervals of "
        f"each pair by itself ({_methods(frame)}); p: two-sided, Holm-corrected over all {len(frame)} tests. Crosses: "
        f"against the control, whose noise is {_parameters(profile)['bias']:g} times too wide. {_machine(profile)}."
    )
    return plotting.save(fig, f"{NOTEBOOK}_differences", profile, caption)


def tokens(profile: str):
    """Total variation distance beside what exact draws give, and perplexity; rows are settings."""
    distance = records.load(f"{NOTEBOOK}_distance", profile)
    perplexity = records.load(f"{NOTEBOOK}_perplexity", profile)
    names = list(dict.fromkeys(distance["setting"]))
    fig, axes = plotting.figure("page", 3.6, nrows=len(names), ncols=2, sharey=True, squeeze=False)
    for (left, right), setting in zip(axes, names, strict=True):
        rows = distance[distance["setting"] == setting]
        left.axvspan(rows["low"].iloc[0], rows["high"].iloc[0], color="#bbbbbb", alpha=0.6, linewidth=0)
        _points(left, rows, "distance", bars=False)
        left.set_xlim(0, 100)
        left.set_title(naming.paper(setting))
        _points(right, perplexity[perplexity["setting"] == setting], "perplexity")
        right.set_xscale("log")
        plotting.plain_log_ticks(right.xaxis)
        right.set_title(naming.paper(setting))
    axes[-1, 0].set_xlabel(naming.paper("distance"))
    axes[-1, 1].set_xlabel(f"{naming.paper('perplexity')} of the sampler's own answers")
    _title(fig, "Is each token drawn from the model's distribution?")
    first, least, most = distance.iloc[0], perplexity["n"].min(), perplexity["n"].max()
    answers = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    caption = (
        f"{_model(profile)}. Left: {first.draws:,} draws in each of {first.contexts} contexts of a text against the "
        f"reference distribution; the grey band holds 95 % of what so many exact draws give. Right: {answers} answers "
        f"of each sampler, under the model at temperature 1; bars: 95 % intervals. {_machine(profile)}."
    )
    return plotting.save(fig, f"{NOTEBOOK}_tokens", profile, caption)


def power(profile: str):
    """Chance of a pairwise test to find a difference, against that difference, and the control's differences."""
    frame = records.load(f"{NOTEBOOK}_power", profile)
    pairs = records.load(f"{NOTEBOOK}_pairs", profile)
    fig, ax = plotting.figure("column", 2.6)
    look = naming.style("fmms")
    ax.plot(frame["difference"], 100 * frame["power"], color=look["color"], marker=look["marker"], label="simulated")
    ax.vlines(frame["difference"], 100 * frame["low"], 100 * frame["high"], color=look["color"], linewidth=1.0)
    ax.axhline(80, color="#444444", linewidth=0.8, linestyle=":")
    found = pairs[pairs["control"]]["difference"].abs()
    mark = naming.style("control")
    ax.plot(found, np.full(len(found), 103.0), linestyle="none", color=mark["color"], marker="x", clip_on=False,
            label="control, as measured")  # fmt: skip
    ax.set(ylim=(0, 106), xlim=(0, None), xlabel=naming.paper("difference"), ylabel=f"{naming.paper('power')} (%)")
    ax.legend(loc="lower right")
    _title(fig, "How small a difference would be found?")
    row = frame.iloc[-1]
    caption = (
        f"n = {int(row.n):,} problems, {row.accuracy:.0f} % right for the better one; two-sided paired test at "
        f"{row.alpha:.2g} ({quality.ALPHA:g} over {len(pairs)} tests: a lower bound under Holm's correction), "
        f"{int(row.simulations):,} simulated experiments behind each point with exact 95 % intervals. Dotted: 80 %."
    )
    return plotting.save(fig, f"{NOTEBOOK}_power", profile, caption)


def _panels(frame, height: float):
    fig, axes = plotting.figure("page", height, ncols=frame["setting"].nunique(), sharey=True, squeeze=False)
    return fig, axes[0]


def _settings(frame):
    return [(setting, frame[frame["setting"] == setting]) for setting in dict.fromkeys(frame["setting"])]


def _points(ax, rows, column: str, bars: bool = True) -> None:
    """One sampler on each line, the first on top."""
    y = np.arange(len(rows))[::-1]
    for at, row in zip(y, rows.to_dict("records"), strict=True):
        look = naming.style(row["system"])
        value = row[column]
        ends = [[value - row["low"]], [row["high"] - value]] if bars else None
        ax.errorbar(value, at, xerr=ends, color=look["color"], marker=look["marker"], linestyle="none", elinewidth=1.0)
    ax.set_yticks(y, [naming.paper(name) for name in rows["system"]])
    ax.set_ylim(-0.6, len(rows) - 0.4)
    ax.grid(axis="y", visible=False)


def _short(name: str) -> str:
    """What comes before a comma or colon of the paper's name, if that alone tells the samplers apart."""
    known = {sampler: naming.paper(sampler) for sampler in variants.SAMPLERS}
    heads = {sampler: paper.partition(":")[0] for sampler, paper in known.items()}
    return heads[name] if list(heads.values()).count(heads[name]) == 1 else known[name]


def _title(fig, question: str) -> None:
    fig.suptitle(question, x=0.01, ha="left", weight="bold")


def _methods(frame) -> str:
    return " or ".join(dict.fromkeys(frame["method"]))


def _parameters(profile: str) -> dict:
    return records.metadata(NOTEBOOK, profile)["extra"]


def _model(profile: str) -> str:
    name = _parameters(profile)["model"]
    return naming.NAMES.get(name, name)


def _sampling(profile: str) -> str:
    kept = _parameters(profile)
    return f"Temperature {kept['temperature']:g}; truncation: top-k {kept['top_k']}, top-p {kept['top_p']:g}."


def _machine(profile: str) -> str:
    # the CPU profile's note speaks of Triton's interpreter, which drew nothing here
    return "PyTorch on a CPU" if profile == "cpu" else plotting.hardware_note(profile, NOTEBOOK)
