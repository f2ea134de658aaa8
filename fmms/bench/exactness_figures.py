"""Figures of the exactness notebook, drawn from the rows of fmms.bench.exactness as records.load reads them back."""

import numpy as np

from fmms import plotting, testing
from fmms.bench.exactness import CONTROLS, WIDTH_BOUND

NOTEBOOK = "10_exactness"
STYLES = {
    scheme: {key: plotting.SYSTEMS[system][key] for key in ("color", "marker")}
    for scheme, system in (("group", "fmms"), ("token", "fmms-token"))
}
BAND = {"color": "#bbbbbb", "alpha": 0.5, "linewidth": 0}
_CASES = {"16 tokens": "plain", "all controls": "all controls"}
LINE = {"color": "black", "linewidth": 0.8, "zorder": 1}


def _panels(impls, height, **subplots):
    """One panel for each implementation; a single one takes one column of a paper."""
    fig, axes = plotting.figure("page" if len(impls) > 1 else "column", height, ncols=len(impls), **subplots)
    return fig, np.atleast_1d(axes)


def _bars(axes, x, rows, **style):
    """Points with their intervals; `low` and `high` are ends, not lengths."""
    lengths = [(rows.value - rows.low).clip(lower=0), (rows.high - rows.value).clip(lower=0)]
    axes.errorbar(x, rows.value, yerr=lengths, linestyle="none", elinewidth=0.8, markersize=3.5, **style)


def frequencies(frame, profile: str, impl: str):
    """Observed and expected frequency against rank, and their ratio; rows of `whole_vocabulary`."""
    frame = frame[frame.impl == impl]
    cases = list(dict.fromkeys(frame.case))
    fig, axes = plotting.figure("page", 4.0, nrows=2, ncols=len(cases), sharex="col", sharey="row", squeeze=False)
    for column, case in enumerate(cases):
        top, bottom = axes[:, column]
        for shift, (scheme, style) in zip((1.05, 1 / 1.05), STYLES.items(), strict=True):
            rows = frame[(frame.case == case) & (frame.scheme == scheme)].sort_values("rank")
            if scheme == "group":
                top.plot(rows["rank"], rows.expected / rows.n, **LINE, label="expected")
            seen = rows.assign(value=rows.observed, low=rows.low, high=rows.high)
            for axis, divisor in ((top, rows.n), (bottom, rows.expected)):
                scaled = seen.assign(**{name: seen[name] / divisor for name in ("value", "low", "high")})
                _bars(axis, rows["rank"] * shift, scaled, label=f"{scheme} noise", **style)
        bottom.axhline(1, **LINE)
        top.set(xscale="log", yscale="log", title=case)
        bottom.set(xscale="log", xlabel="rank")
    # so that a few long bars at the rarest ranks do not squeeze the rest
    reach = float(np.quantile(np.abs(frame[["low", "high"]].div(frame.expected, axis=0) - 1), 0.98))
    axes[1, 0].set_ylim(1 - min(1.0, 1.2 * reach), 1 + 1.2 * reach)
    axes[0, 0].set_ylabel("probability of a token")
    axes[1, 0].set_ylabel("observed / expected")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=3)
    fig.suptitle("Are tokens drawn as often as the softmax says, at every rank?", x=0.01, ha="left", weight="bold")
    controlled = frame.case.isin(CONTROLS)
    n = " and ".join(
        f"V = {_span(rows.vocab_size)}, "
        + ", ".join(f"{scheme} {_span(some.n)}" for scheme, some in rows.groupby("scheme"))
        + " draws"
        + (" (the last three)" if chosen else "")
        for chosen, rows in frame.groupby(controlled)
    )
    # the CPU profile's note speaks of Triton's interpreter, which drew nothing here
    plain = profile == "cpu" and impl == "torch"
    note = "PyTorch on a CPU: no speed claim" if plain else plotting.hardware_note(profile, f"{NOTEBOOK}_frequencies")
    caption = (
        f"{impl}; each panel: {n}. From rank 10 or so on, tokens are pooled. "
        f"Bars: exact 95 % intervals, each by itself; "
        f"a few leave the panel. {note}."
    )
    return plotting.save(fig, f"{NOTEBOOK}_frequencies", profile, caption)


def rare_tokens(checks, profile: str):
    """Draws of tokens far below the peak over their expectation; check rows of `heavy_tail` and `beside_the_peak`."""
    rows = checks[checks.depth_nats.notna() & (checks.expected >= 1)]
    rows = rows.sort_values(["experiment", "impl", "scheme", "depth_nats"], ascending=[False, True, True, True])
    fig, axes = plotting.figure("page", 0.9 + 0.19 * len(rows))
    y = np.arange(len(rows))[::-1]
    for scheme, style in STYLES.items():
        chosen = (rows.scheme == scheme).to_numpy()
        some = rows[chosen]
        ratio = some.observed / some.expected
        lengths = [ratio - some.low / some.expected, some.high / some.expected - ratio]
        axes.errorbar(
            ratio,
            y[chosen],
            xerr=lengths,
            linestyle="none",
            elinewidth=0.8,
            label=f"{scheme} noise",
            clip_on=False,
            **style,
        )
    capped = rows.capped.notna().to_numpy()
    axes.plot(
        rows.capped[capped] / rows.expected[capped], y[capped], "x", color="black", markersize=5, zorder=5,
        label="expected of token noise from 24-bit uniforms",
    )  # fmt: skip
    right = min(4.0, 1.05 * float((rows.high / rows.expected).max()))
    axes.set_xlim(0, right)
    axes.axvline(1, **LINE)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    names = [f"{r.experiment}, {r.depth_nats:.3g} nats, {r.scheme}, {r.impl}" for r in rows.itertuples()]
    axes.set_yticks(y, names)
    axes.grid(axis="y", visible=False)
    for at, row in zip(y, rows.itertuples(), strict=True):
        axes.annotate(
            f"{int(row.observed):,} ({row.expected:,.1f})", (1.01, at), xycoords=("axes fraction", "data"), va="center"
        )
    axes.annotate("drawn (expected)", (1.01, len(rows) - 0.2), xycoords=("axes fraction", "data"), va="bottom")
    axes.set_xlabel("drawn / expected")
    fig.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    fig.suptitle("Do tokens far below the peak appear as often as they should?", x=0.01, ha="left", weight="bold")
    caption = (
        f"Depth below the peak in nats; heavy tail: {int(rows.vocab_size.max()) - 1:,} tokens together, beside "
        f"the peak: one token in the peak's group of 32. Draws: {_span(rows.n)}. Bars: exact 95 % intervals. "
        f"{plotting.hardware_note(profile, NOTEBOOK + '_rare_tokens')}."
    )
    return plotting.save(fig, f"{NOTEBOOK}_rare_tokens", profile, caption)


def narrow(frame, profile: str):
    """Frequency over probability of each of 16 tokens with simultaneous intervals; rows of `narrow_vocabulary`."""
    impls, cases = (list(dict.fromkeys(frame[name])) for name in ("impl", "case"))
    fig, panels = plotting.figure(
        "page", 0.7 + 1.5 * len(impls), nrows=len(impls), ncols=len(cases), sharex=True, squeeze=False
    )
    for impl, line in zip(impls, panels, strict=True):
        for case, axes in zip(cases, line, strict=True):
            some = frame[(frame.impl == impl) & (frame.case == case)]
            for shift, (scheme, style) in zip((-0.15, 0.15), STYLES.items(), strict=True):
                rows = some[some.scheme == scheme]
                percent = 100 * (rows[["ratio", "low", "high"]].rename(columns={"ratio": "value"}) - 1)
                _bars(axes, rows.token + shift, percent, label=f"{scheme} noise", **style)
            axes.axhline(0, **LINE)
            title = f"{_CASES[case]}, n = {_span(some.n)}"
            axes.set_title(f"{impl}, {title}" if len(impls) > 1 else title, fontsize=8, fontweight="normal")
            axes.set_xticks(range(0, 16, 3))
        line[0].set_ylabel("frequency against\nprobability (%)")
    for axes in panels[-1]:
        axes.set_xlabel("token")
    fig.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    fig.suptitle("Is any of 16 tokens favoured?", x=0.01, ha="left", weight="bold")
    caption = (
        f"n draws for each noise scheme; all controls: truncated, masked and penalised at once, which leaves "
        f"{frame[frame.case != cases[0]].token.nunique()} tokens. Bars: intervals that hold for all tokens together "
        f"with 95 % confidence. {plotting.hardware_note(profile, NOTEBOOK + '_narrow')}."
    )
    return plotting.save(fig, f"{NOTEBOOK}_narrow", profile, caption)


def interval_widths(frame, profile: str):
    """Relative error of each token's interval against its depth in the group; rows of `interval_widths`."""
    fig, axes = plotting.figure("column", 2.6)
    styles = {"triton": {**STYLES["group"]}, "torch": {"color": "#DE8F05", "marker": "^"}}
    for impl, rows in frame.groupby("impl"):
        error = rows.relative_error.clip(lower=1e-17)
        axes.plot(rows.nats_below, error, linestyle="none", markersize=3, fillstyle="none", label=impl, **styles[impl])
    axes.axhline(WIDTH_BOUND, **LINE, linestyle="--")
    axes.annotate("stated bound", (0, WIDTH_BOUND * 1.5), va="bottom")
    axes.set(yscale="log", xlabel="nats below the group's maximum", ylabel="|width / probability − 1|")
    axes.set_ylim(3e-18, 0.2)
    fig.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    fig.suptitle("Does each token keep its share?", x=0.01, ha="left", weight="bold")
    caption = (
        f"Widths found by bisection over injected uniforms; {frame.groupby('impl').size().iloc[0]} tokens of "
        f"{frame.group.nunique()} groups; an error of 0 is drawn at 1e-17. "
        f"{plotting.hardware_note(profile, NOTEBOOK + '_interval_widths')}."
    )
    return plotting.save(fig, f"{NOTEBOOK}_interval_widths", profile, caption)


def p_values(frame, profile: str):
    """Empirical distribution of p-values against the diagonal with its band; rows of `repeated_p_values`."""
    impls = list(dict.fromkeys(frame.impl))
    fig, panels = _panels(impls, 2.5, sharey=True)
    for axes, impl in zip(panels, impls, strict=True):
        some = frame[frame.impl == impl]
        count = int(some.groupby("scheme").size().min())
        half = testing.ecdf_band(count)
        axes.fill_between([0, 1], [-half, 1 - half], [half, 1 + half], **BAND, label="95 % band")
        axes.plot([0, 1], [0, 1], **LINE)
        for (scheme, rows), dash in zip(some.groupby("scheme"), ("-", "--"), strict=True):
            x = np.concatenate([[0], np.sort(rows.p_value), [1]])
            y = np.concatenate([[0], np.arange(1, len(rows) + 1) / len(rows), [1]])
            axes.step(x, y, where="post", color=STYLES[scheme]["color"], linestyle=dash, label=f"{scheme} noise")
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="p-value")
        axes.set_title(f"{impl}, {count:,} repetitions" if len(impls) > 1 else "")
    panels[0].set_ylabel("share of p-values below")
    fig.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    fig.suptitle("Are p-values uniform over seeds?", x=0.01, ha="left", weight="bold")
    by_impl = list(frame.groupby("impl", sort=False))
    repetitions = ", ".join(f"{impl} {len(rows) // rows.scheme.nunique():,}" for impl, rows in by_impl)
    draws = ", ".join(f"{impl} {rows.n.max():,}" for impl, rows in by_impl)
    caption = (
        f"Chi-square p-values of independent repetitions ({repetitions}) of so many draws each: {draws}. Band: "
        f"Dvoretzky-Kiefer-Wolfowitz. {plotting.hardware_note(profile, NOTEBOOK + '_p_values')}."
    )
    return plotting.save(fig, f"{NOTEBOOK}_p_values", profile, caption)


def _span(n) -> str:
    return f"{int(n.min()):,}" if n.min() == n.max() else f"{int(n.min()):,} to {int(n.max()):,}"
