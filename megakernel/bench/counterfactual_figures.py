"""The figure of notebook 29, drawn from the rows of megakernel.bench.routing_counterfactual as they are read back."""

from fmms import plotting
from fmms.bench import published, records
from megakernel.bench import routing_counterfactual, teacher_forced

NOTEBOOK = "29_routing_counterfactual"
GROUPS = {
    "equal": {"color": "#949494", "marker": "x", "markersize": 3, "label": "no other experts yet"},
    "after": {"color": "#029E73", "marker": "^", "markersize": 3, "label": "other experts earlier"},
    "swapped": {"color": "#0173B2", "marker": "o", "markersize": 4, "label": "other experts, passes"},
    "missed": {"color": "#D55E00", "marker": "D", "markersize": 4, "label": "misses a gate"},
}
RUNS = {
    "as it is": {"color": "black", "marker": "o", "label": "against the reference"},
    "with ids": {"color": "#0173B2", "marker": "s", "label": "with the megakernel's experts"},
    "with ids and weights": {
        "color": "#029E73",
        "marker": "^",
        "markerfacecolor": "none",
        "label": "and their weights",
    },
}
MOST = 16
"""Steps that the right panel has room for."""


def errors(rows, verdicts, profile: str):
    """Error of the logits before and after the megakernel's experts are forced: `29_routing_counterfactual_errors`.

    Left every step; right those that miss the cosine, the largest errors first, and the published ones.

    Args:
        rows, verdicts: DataFrames of `routing_counterfactual.COLUMNS` and VERDICT_COLUMNS.
    """
    about = records.metadata(NOTEBOOK, profile)["extra"]
    before, after = (routing_counterfactual.errors(rows, "megakernel", what) for what in ("reference", "ids"))
    groups = rows.drop_duplicates(["seed", "step"]).set_index(["seed", "step"])["group"]
    beside = routing_counterfactual.beside_published(verdicts, published.teacher_forced())
    ours = beside[beside["decoder"] != "MI300X"].sort_values("as it is")
    shown = [*ours.head(MOST).itertuples(index=False), *beside[beside["decoder"] == "MI300X"].itertuples(index=False)]
    gate = 1 - teacher_forced.LOGIT_COSINE

    fig, axes = plotting.figure("page", max(3.2, 1.3 + 0.155 * len(shown)), ncols=2)
    ax = axes[0]
    for group, style in GROUPS.items():
        at = groups.index[groups == group]
        if len(at):
            ax.plot(before.loc[at], after.loc[at], linestyle="", zorder=3, **style)
    ends = [0.7 * min(before.min(), after.min()), 1.4 * max(before.max(), after.max(), gate)]
    ax.plot(ends, ends, color="black", linestyle=":", linewidth=0.9, label="no change")
    for line in (ax.axvline, ax.axhline):
        line(gate, color="black", linestyle="--", linewidth=0.9, label="gate" if line == ax.axhline else None)
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    for axis in (ax.xaxis, ax.yaxis):
        plotting.plain_log_ticks(axis)
    ax.set(xlabel="1 − cosine with the reference", ylabel="1 − cosine, the megakernel's experts forced")
    ax.set_title("every step", fontsize=8, fontweight="normal")

    ax = axes[1]
    for place, row in enumerate(shown):
        values = [1 - row[2 + number] for number in range(3)]
        ax.hlines(place, min(values), max(values), color="#bbbbbb", linewidth=0.9, zorder=1)
        for (name, style), value in zip(RUNS.items(), values, strict=True):
            own = {**style, "label": style["label"] if place == 0 else None}
            if row.decoder == "MI300X":
                own |= {"markerfacecolor": "white"}
            ax.plot(value, place, linestyle="", markersize=4, zorder=3 if name == "as it is" else 2, **own)
    ax.axvline(gate, color="black", linestyle="--", linewidth=0.9)
    ax.set_yticks(range(len(shown)), [f"{row.decoder.removeprefix('ours, ')}, step {row.step}" for row in shown])
    ax.set_ylim(len(shown) - 0.4, -0.6)
    ax.set(xscale="log", xlabel="1 − cosine of the logits")
    plotting.plain_log_ticks(ax.xaxis, (1,))
    ax.grid(False, axis="y")
    ax.set_title("steps that miss the cosine", fontsize=8, fontweight="normal")
    for ax in axes:
        ax.legend(loc="upper center", bbox_to_anchor=(0.45, -0.16), ncols=2, handlelength=1.4, columnspacing=1.0)
    fig.suptitle("Is it another choice of experts that misses the gate?", fontweight="bold", x=0.01, ha="left")
    caption = (
        f"Teacher-forced decode of {about['model']} in bfloat16 with random weights, {about['prompt_tokens']:,} prompt "
        f"tokens, n = {len(groups)} steps. The reference is run again with the megakernel's experts in all steps and "
        f"layers. Dashed: the gate, cosine {teacher_forced.LOGIT_COSINE:g}. Right: "
        + (f"the {MOST} largest of {len(ours)}" if len(ours) > MOST else f"all {len(ours)}")
        + f"; white markers: {published.MI300X}. {_hardware(profile)}."
    )
    return plotting.save(fig, f"{NOTEBOOK}_errors", profile, caption)


def _hardware(profile: str) -> str:
    if profile == "cpu":
        return "The host build on a CPU"
    return plotting.hardware_note(profile, NOTEBOOK)
