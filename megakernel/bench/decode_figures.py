"""Figures of notebook 24, drawn from the rows of megakernel.bench.decode_run as records.load reads them back."""

from fmms import paths, plotting
from fmms.bench import published, records
from megakernel.bench import reference_figures, teacher_forced

NOTEBOOK = "24_m4_decode"
SEED_MARKERS = "os^Dv"
EXPLAINED = {"routing": "another expert", "near-tie": "near-tie", "rounding": "rounding of the reference"}
"""What explains a miss, in words for a legend; several are joined by commas."""
MISS = {"color": "#D55E00", "marker": "o", "markerfacecolor": "none", "markersize": 7, "linestyle": ""}
"""A ring around a point that misses a gate."""


def agreement(steps, profile: str):
    """How far the logits are from the reference's, and whether a token could change: `24_m4_decode_agreement`.

    Args:
        steps: DataFrame of `teacher_forced.STEP_COLUMNS`.
    """
    about = records.metadata(f"{NOTEBOOK}_steps", profile)["extra"]
    fig, axes = plotting.figure("page", 2.9, ncols=2)
    missed = steps[steps["missed"].notna()]
    for number, (seed, points) in enumerate(steps.groupby("seed")):
        style = {"color": plotting.PALETTE[(0, 1, 2, 4, 9)[number % 5]], "marker": SEED_MARKERS[number % 5]}
        style |= {"markersize": 3, "linestyle": ""}
        axes[0].plot(points["step"], 1 - points["cosine"], label=f"seed {seed}", **style)
        axes[1].plot(points["margin"], points["max_abs_diff"], **style)
    cosine, argmax = (missed[missed["missed"].astype(str).str.contains(what)] for what in ("cosine", "argmax"))
    theirs = _published_cosines()

    ax, gate = axes[0], 1 - teacher_forced.LOGIT_COSINE
    ax.plot(
        theirs["step"], 1 - theirs["value"], marker="*", linestyle="", color="#949494", markersize=5, label="MI300X"
    )
    ax.plot(cosine["step"], 1 - cosine["cosine"], label="misses a gate", **MISS)
    ax.axhline(gate, color="black", linestyle="--", linewidth=0.9, label="gate")
    ax.set(yscale="log", xlabel="step", ylabel="1 − cosine of the logits")
    ax.set_title("logits of each step", fontsize=8, fontweight="normal")

    ax = axes[1]
    ax.plot(argmax["margin"], argmax["max_abs_diff"], **MISS)
    # a tie in bf16 is exactly 0, which a logarithm has no place for
    ax.set_xscale("symlog", linthresh=teacher_forced.NEAR_TIE, linscale=0.5)
    ax.set_yscale("log")
    ax.set_xlim(-0.02, steps["margin"].max() * 1.5)
    for axis, values in ((ax.xaxis, steps["margin"]), (ax.yaxis, steps["max_abs_diff"])):
        reference_figures.plain_ticks(axis, values.max())
    low, high = teacher_forced.NEAR_TIE, steps["margin"].max()
    ax.plot([low, high], [low, high], color="black", linewidth=0.9, linestyle=":", label="error = margin")
    ax.axvspan(-0.02, teacher_forced.NEAR_TIE, color="#dddddd", zorder=0, linewidth=0, label="near-tie")
    ax.set_ylim(steps["max_abs_diff"].min() * 0.7, max(steps["max_abs_diff"].max(), teacher_forced.NEAR_TIE) * 1.5)
    ax.set(xlabel="margin of the reference's two largest logits", ylabel="largest error of a logit")
    ax.set_title("could it be another token?", fontsize=8, fontweight="normal")
    for ax, columns in zip(axes, (4, 2), strict=True):
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=columns, handlelength=1.4, columnspacing=1.0)
    fig.suptitle("Does each step compute what the reference does?", fontweight="bold", x=0.01, ha="left")
    count = len(steps) // steps["seed"].nunique()
    caption = (
        f"Teacher-forced decode of {about['model']} in bfloat16 with random weights, {about['prompt_tokens']:,} prompt "
        f"tokens, n = {count} steps of each seed. Ringed: misses a gate (cosine {teacher_forced.LOGIT_COSINE:g}; "
        f"another token at a margin of {teacher_forced.NEAR_TIE:g} or more); {_reasons(missed)}. Stars: the steps "
        f"whose cosine is {published.MI300X}. {_hardware(profile, '_steps')}."
    )
    return plotting.save(fig, f"{NOTEBOOK}_agreement", profile, caption)


def _reasons(missed) -> str:
    """How many misses have which explanation."""
    if missed.empty:
        return "none does"
    counts = missed["explained"].value_counts()
    words = {name: " and ".join(EXPLAINED.get(part, part) for part in name.split(", ")) for name in counts.index}
    return "of these, " + ", ".join(f"{count} by {words[name]}" for name, count in counts.items())


def _published_cosines():
    """The steps whose cosine the published decoder states."""
    table = published.teacher_forced()
    table = table[(table["section"] == "gate") & (table["metric"] == "logit cosine")].dropna(subset=["step"])
    return table.assign(value=table["value"].astype(float))


def speed(decode, profile: str):
    """Milliseconds per token beside other decoders: `24_m4_decode_speed`; a DataFrame of `decode_run.decode_rows`.

    Those are the rows of notebook 20 of this profile, if it has run, and published ones.
    """
    theirs = published.decode_baselines()
    theirs = theirs[theirs["batch"] == 1].sort_values("ms_per_token", ascending=False)
    name, length = decode["config"].iloc[0].split(" ")[0], int(decode["T"].iloc[0])
    floor = decode["gb_per_token"].iloc[0] * 1e12 / published.read_ceiling()
    entries = [(f"This run: {name}{' on a CPU' if profile == 'cpu' else ''}", None, None)]
    entries += [(f"megakernel ({_kind(row.config)})", "megakernel", row) for row in decode.itertuples()]
    entries += [
        (reference_figures.decoder_label(row.system, row.config), row.system, row)
        for row in _notebook_20(profile, name)
    ]
    split = len(entries)
    entries += [("Published: V2-Lite, one H200", None, None)]
    entries += [
        (reference_figures.decoder_label(row.system, row.config), row.system, row) for row in theirs.itertuples()
    ]

    fig, ax = plotting.figure("page", 0.75 + 0.17 * len(entries))
    absent = []
    for place, (_, system, row) in enumerate(entries):
        if row is None:
            continue
        style = {key: value for key, value in plotting.system_style(system).items() if key in ("color", "marker")}
        if place > split:
            ax.plot(row.ms_per_token, place, linestyle="", markerfacecolor="white", **style)
            reference_figures.write_value(ax, row.ms_per_token, place, row.ms_per_token)
        elif row.p50_ms != row.p50_ms:
            absent.append(place)
        else:
            ax.hlines(place, row.min_ms, row.p95_ms, color=style["color"], linewidth=1.2)
            ax.plot(row.p50_ms, place, linestyle="", **style)
            reference_figures.write_value(ax, max(row.p50_ms, row.p95_ms), place, row.p50_ms)
    if profile != "cpu":
        ax.axvline(floor, color="black", linewidth=0.9, label="floor, latent cache")
        fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", handlelength=1.6)
    ax.set_xscale("log")
    for place in absent:
        ax.annotate("not timed", (ax.get_xlim()[0], place), (4, 0), textcoords="offset points", va="center")
    reference_figures.finish_rows(ax, entries)
    title = "How long does a token of a launch take?"
    if profile == "cpu":
        title += " (host build on a CPU: no speed claim)"
    fig.suptitle(title, fontweight="bold", x=0.01, ha="left")
    timed = decode.dropna(subset=["p50_ms"])
    n = ", ".join(f"n = {int(row.n)} ({_kind(row.config)})" for row in timed.itertuples()) or "nothing timed"
    caption = (
        f"Batch 1, {name} in bfloat16, T = {length:,} positions; median of {n}, bar from the least to p95; "
        f"{_hardware(profile, '')}. Rows of transformers are notebook 20's. Hollow: {published.DECODES}."
    )
    if profile != "cpu":
        caption += f" Floor: bytes of weights and cache over {published.read_ceiling() / 1e12:.2f} TB/s."
    return plotting.save(fig, f"{NOTEBOOK}_speed", profile, caption)


def _kind(config: str) -> str:
    """What sets rows of the megakernel apart: "static, a token of a launch"."""
    return ", ".join(config.split(", ")[2:])


def _notebook_20(profile: str, name: str) -> list:
    """The decode rows of notebook 20 for the same model, timed in the same profile."""
    if not (paths.data_dir(profile) / f"{reference_figures.NOTEBOOK}.csv").is_file():
        return []
    rows = records.load(reference_figures.NOTEBOOK, profile).dropna(subset=["p50_ms"])
    return [row for row in rows.itertuples() if row.config.startswith(f"{name} ")]


def _hardware(profile: str, suffix: str) -> str:
    if profile == "cpu":
        return "The host build on a CPU, fibres for threads: no speed claim"
    return plotting.hardware_note(profile, NOTEBOOK + suffix)
