"""Figures of 19_serving, drawn from its result rows; the caption's hardware is what the logs' run.json says."""

import html

from fmms import plotting
from fmms.bench import records
from fmms.evaluation import naming, serving

NOTEBOOK = "19_serving"
MADE_UP = "Sample logs, made up: no measurement"


def how(folder: str, profile: str):
    """What a notebook shows where there are no logs: the commands that write them."""
    from IPython.display import HTML

    again = f"fmms run 19 --profile {profile} --force"
    return HTML(
        f"<p>No logs in <code>{html.escape(folder)}</code>, so there is nothing to show. On a GPU machine with vLLM "
        f"these commands write them; then run the notebook again: <code>{html.escape(again)}</code>.</p>"
        f"<pre>{html.escape(serving.how(folder))}</pre>"
    )


def load(profile: str):
    """Time per output token and output throughput against concurrency, a line per system: rows of `serving.summary`."""
    from matplotlib import ticker

    frame = records.load(f"{NOTEBOOK}_summary", profile)
    metrics = list(dict.fromkeys(frame["metric"]))
    fig, axes = plotting.figure("page", 3.3, ncols=len(metrics), sharex=True, squeeze=False)
    for ax, metric in zip(axes[0], metrics, strict=True):
        rows = frame[frame["metric"] == metric]
        for system in dict.fromkeys(rows["system"]):
            points = rows[rows["system"] == system].sort_values("concurrency")
            _line(ax, points, "estimate", system)
        _concurrency_axis(ax, rows["concurrency"])
        ax.set_ylabel(_label(metric))
        if serving.METRICS[metric] == "rate":
            ax.set_yscale("log")
            ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            ax.yaxis.set_minor_formatter(ticker.NullFormatter())
        else:
            ax.set_ylim(bottom=0)
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, handlelength=2.6)
    fig.suptitle(
        _title("How fast do tokens come as more requests are served at once?", profile),
        x=0.01,
        ha="left",
        weight="bold",
    )
    return plotting.save(fig, f"{NOTEBOOK}_load", profile, _caption(frame, profile, "Mean over trials"))


def speedup(profile: str):
    """Speed-up over the baseline against concurrency, each trial as a small mark: rows of `serving.speedups`."""
    frame = records.load(f"{NOTEBOOK}_speedups", profile)
    trials = records.load(f"{NOTEBOOK}_ratios", profile)
    baseline, metric = naming.paper(frame["baseline"].iloc[0]), frame["metric"].iloc[0]
    fig, ax = plotting.figure("column", 3.1)
    ax.axhline(1, color="#444444", linewidth=0.8)
    for index, system in enumerate(dict.fromkeys(frame["system"]), 1):
        points = frame[frame["system"] == system].sort_values("concurrency")
        each = trials[trials["system"] == system]
        beside = each["concurrency"] * 1.12**index
        ax.plot(beside, each["ratio"], ".", color=naming.style(system)["color"], markersize=2.5)
        _line(ax, points, "speedup", system)
    _concurrency_axis(ax, frame["concurrency"])
    ax.set_ylabel(f"speed-up over {baseline}")
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2, handlelength=2.6)
    fig.suptitle(_title("How much faster, in the same trial?", profile), x=0.01, ha="left", weight="bold")
    what = f"Geometric mean of trials' ratios ({_label(metric).split(' (')[0]}), small dots: trials"
    return plotting.save(fig, f"{NOTEBOOK}_speedup", profile, _caption(frame, profile, what))


def _line(ax, points, column: str, system: str) -> None:
    style = naming.style(system)
    ax.plot(points["concurrency"], points[column], **style)
    ax.vlines(points["concurrency"], points["low"], points["high"], color=style["color"], linewidth=1.0)


def _concurrency_axis(ax, values) -> None:
    ticks = sorted(set(values))
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.set_xlabel(naming.paper("concurrency"))


def _label(metric: str) -> str:
    return naming.paper(metric)


def _title(question: str, profile: str) -> str:
    return f"{question}\n{MADE_UP}" if _about(profile).get("made_up") else question


def _about(profile: str) -> dict:
    return records.metadata(NOTEBOOK, profile)["extra"]["about"]


def _caption(frame, profile: str, what: str) -> str:
    about = _about(profile)
    if about.get("made_up"):
        where = MADE_UP
    else:
        known = [about.get("gpu") or "hardware not stated beside the logs"]
        known += [f"{name} {about[name]}" for name in ("driver", "vllm", "torch") if about.get(name)]
        where = ", ".join(known)
    least, most = frame["n"].min(), frame["n"].max()
    count = f"n = {least}" if least == most else f"n = {least} to {most}"
    methods = " or ".join(dict.fromkeys(frame["method"]))
    return f"{where}. {what}; {count} trials behind each point. Bars: 95 % interval ({methods})."
