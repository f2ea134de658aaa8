"""Would the gate have passed, had the reference chosen the megakernel's experts? Each step that misses one, asked so.

A teacher-forced pass as in megakernel.bench.teacher_forced; then the reference is run again with the megakernel's
experts forced in all steps and layers, first their ids alone, so that their weights follow from its own router, then
ids and weights. The figures of these rows are in megakernel.bench.counterfactual_figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megakernel.bench import decode_run, reference_run, teacher_forced
from megakernel.build import BuildError

COLUMNS = ("seed", "step", "group", "found", "against", "cosine", "max_abs_diff", "max_abs_ref", "same_token")
"""group: see GROUPS. found, against: whose logits are compared, names of RUNS; same_token: whether the largest is of
the same token."""
VERDICT_COLUMNS = (
    "seed", "step", "missed", "swaps", "earlier", "margin", "status", "before", "ids", "ids_weights", "own",
    "reference", "explained",
)  # fmt: skip
"""Of steps that miss a gate. swaps: layers of the step with other experts, earlier: of the steps before; margin: the
widest of the step's own, on the path; status: theirs, see `teacher_forced.routing_rows`. before, ids, ids_weights:
cosine with the reference as it is, with ids forced, with ids and weights. own, reference: cosine of the megakernel and
of the reference with the reference in fp32, ids forced. explained: see `teacher_forced.explain`."""

GROUPS = ("missed", "swapped", "after", "equal")
"""A step that misses a gate; one with other experts in a layer that misses none; one with the reference's experts,
after a step with others, whose rows of the cache it reads; one with the reference's experts so far."""
RUNS = {
    "megakernel": "the megakernel",
    "reference": "the reference",
    "ids": "the reference with the megakernel's experts",
    "ids and weights": "the reference with its experts and their weights",
    "fp32": "the reference in fp32 with its experts",
}
COMPARISONS = (
    ("megakernel", "reference"),
    ("megakernel", "ids"),
    ("megakernel", "ids and weights"),
    ("ids", "reference"),
    ("ids and weights", "reference"),
    ("megakernel", "fp32"),
    ("ids", "fp32"),
)


@dataclass
class Measured:
    """What `measure` found, as rows."""

    rows: list[dict] = field(default_factory=list)
    """COLUMNS."""
    verdicts: list[dict] = field(default_factory=list)
    """VERDICT_COLUMNS."""
    swaps: list[dict] = field(default_factory=list)
    """`teacher_forced.ROUTING_COLUMNS`."""
    checks: list[dict] = field(default_factory=list)
    """`decode_run.CHECK_COLUMNS`."""


def measure(
    name: str,
    seeds: Sequence[int],
    prompt_tokens: int,
    steps: int,
    device: torch.device | str = "cpu",
    *,
    preset: str = "h200",
    workers: int | None = None,
    say: Callable[[str], None] = print,
) -> Measured:
    """The counterfactual of every seed.

    Args:
        name, prompt_tokens, device, preset, workers: as for `teacher_forced.build`.
        seeds: of weights and prompts.
        steps: of each pass, at least 2.
        say: is told about progress, a line for each seed.

    Raises:
        ValueError, BuildError: as for `teacher_forced.build`. A launch that fails is a gate that is missed.
    """
    found = Measured()
    for seed in seeds:
        try:
            case = teacher_forced.build(name, seed, prompt_tokens, steps, device, preset=preset, workers=workers)
            _measure_case(found, case, say)
        except BuildError:
            raise
        except RuntimeError as error:
            say(f"{name}, seed {seed}: {error}")
            found.checks.append(decode_run.broken_check(seed, error))
        case = None  # the next seed's weights need the room
        reference_run.release(device)
    return found


def _measure_case(found: Measured, case: teacher_forced.Case, say: Callable[[str], None]) -> None:
    mine = teacher_forced.megakernel_steps(case.engine, case.text)
    compared = teacher_forced.compare(case, mine, always_wide=True)
    again = teacher_forced.reference_steps(case)
    runs = {
        "megakernel": mine,
        "reference": teacher_forced.expected_steps(case),
        "ids": compared.path,
        "ids and weights": teacher_forced.reference_steps(case, mine.routing, with_weights=True),
        "fp32": compared.wide,
    }
    same, count = (again.logits == runs["reference"].logits).all(-1), len(case.text)
    value = f"{int(same.sum())}/{count}"
    found.checks.append(decode_run.check(case, "static", "reference again", value, "equal bits", same.all()))
    found.checks += step_checks(case, compared)
    found.rows += comparison_rows(compared.steps, compared.routing, runs)
    found.verdicts += verdict_rows(compared.steps, compared.routing, runs)
    found.swaps += compared.routing
    missed = [row["explained"] for row in compared.steps if row["missed"]]
    say(
        f"{case.name}, seed {case.seed}: {len(compared.routing)} swaps of experts, {len(missed)} of {count} steps miss "
        "a gate" + "".join(f", {missed.count(word)} {word}" for word in dict.fromkeys(missed))
    )


def step_checks(case: teacher_forced.Case, compared: teacher_forced.Compared) -> list[dict]:
    """The gates of the pass, as check rows: steps that miss one, and choices of experts."""
    missed = [row for row in compared.steps if row["missed"]]
    explained = all(row["explained"] != "unexplained" for row in missed)
    count = len(compared.steps)
    reason = "; ".join(f"step {row['step']}: {row['missed']}, {row['explained']}" for row in missed)
    step = decode_run.check(
        case, "static", "steps that pass", f"{count - len(missed)}/{count}", "all", not missed, explained, reason
    )
    return [step, decode_run.experts_check(case, "static", compared)]


def group_of(row: dict, routing: Sequence[dict]) -> str:
    """One of GROUPS for a row of `teacher_forced.STEP_COLUMNS`."""
    if row["missed"]:
        return "missed"
    if any(each["step"] == row["step"] for each in routing):
        return "swapped"
    return "after" if any(each["step"] < row["step"] for each in routing) else "equal"


def comparison_rows(steps: Sequence[dict], routing: Sequence[dict], runs: dict) -> list[dict]:
    """Rows of COLUMNS for every step and each of COMPARISONS.

    Args:
        steps, routing: of `teacher_forced.compare`.
        runs: `teacher_forced.Steps` by the names of RUNS.
    """
    rows = []
    for found, against in COMPARISONS:
        one, other = runs[found].logits, runs[against].logits
        apart = teacher_forced.difference(one, other)
        same = (one.argmax(-1) == other.argmax(-1)).tolist()
        for step, row in enumerate(steps):
            rows.append(
                {"seed": row["seed"], "step": step, "group": group_of(row, routing), "found": found, "against": against}
                | {name: teacher_forced.digits(name, values[step]) for name, values in apart.items()}
                | {"same_token": same[step]}
            )
    return sorted(rows, key=lambda row: row["step"])


def verdict_rows(steps: Sequence[dict], routing: Sequence[dict], runs: dict) -> list[dict]:
    """Rows of VERDICT_COLUMNS; arguments as for `comparison_rows`."""
    forced = teacher_forced.difference(runs["megakernel"].logits, runs["ids and weights"].logits)["cosine"]
    rows = []
    for step, row in enumerate(steps):
        if not row["missed"]:
            continue
        here = [each for each in routing if each["step"] == step]
        margins = [each["path_margin"] for each in here if each["path_margin"] is not None]
        rows.append(
            {
                "seed": row["seed"], "step": step, "missed": row["missed"], "swaps": len(here),
                "earlier": sum(each["step"] < step for each in routing), "margin": max(margins, default=None),
                "status": ", ".join(dict.fromkeys(each["status"] for each in here)), "before": row["cosine"],
                "ids": row["path_cosine"], "ids_weights": teacher_forced.digits("cosine", forced[step]),
                "own": row["own_cosine"], "reference": row["reference_cosine"], "explained": row["explained"],
            }
        )  # fmt: skip
    return rows


# ------------------------------------------------------------------------------------------------------------- verdicts


def errors(rows, found: str, against: str) -> Any:
    """1 - cosine of one comparison by seed and step: a Series over the DataFrame of COLUMNS."""
    some = rows[(rows["found"] == found) & (rows["against"] == against)]
    return 1 - some.set_index(["seed", "step"])["cosine"]


def by_group(rows) -> Any:
    """How the errors of each group move with the experts forced: a DataFrame, of the DataFrame of COLUMNS.

    Errors are 1 - cosine of the megakernel's logits; median over the steps of a group.
    """
    import pandas

    groups = rows.drop_duplicates(["seed", "step"]).set_index(["seed", "step"])["group"]
    columns = {what: errors(rows, "megakernel", what) for what in ("reference", "ids", "ids and weights", "fp32")}
    table = []
    for group in GROUPS:
        at = groups.index[groups == group]
        if len(at):
            medians = {f"against {RUNS[what]}": series.loc[at].median() for what, series in columns.items()}
            smaller = int((columns["ids"].loc[at] < columns["reference"].loc[at]).sum())
            table.append(
                {"steps": group, "n": len(at), **medians, "smaller with its experts": f"{smaller} of {len(at)}"}
            )
    return pandas.DataFrame(table)


def beside_published(verdicts, published) -> Any:
    """Our steps that miss the cosine beside the published decoder's: a DataFrame with the cosines of both.

    Args:
        verdicts: DataFrame of VERDICT_COLUMNS.
        published: `fmms.bench.published.teacher_forced()`.
    """
    import pandas

    rows = [
        {
            "decoder": f"ours, seed {row.seed}",
            "step": row.step,
            "as it is": row.before,
            "with ids": row.ids,
            "with ids and weights": row.ids_weights,
            "explained": row.explained,
        }
        for row in verdicts.itertuples()
        if "cosine" in row.missed
    ]
    for step, some in published.dropna(subset=["step"]).groupby("step"):
        gate = some[(some["section"] == "gate") & (some["metric"] == "logit cosine") & (some["result"] == "fail")]
        table = some[some["section"] == "counterfactual table"].set_index("metric")["value"]
        if len(gate) and len(table):
            rows.append(
                {
                    "decoder": "MI300X",
                    "step": int(step),
                    "as it is": float(gate["value"].iloc[0]),
                    "with ids": float(table["megakernel vs HF with forced ids"]),
                    "with ids and weights": float(table["megakernel vs HF with forced ids and weights"]),
                    "explained": "",
                }
            )
    return pandas.DataFrame(rows)


def reading(verdicts, rows) -> str:
    """What the counterfactual says, in sentences of HTML; DataFrames of VERDICT_COLUMNS and COLUMNS."""
    groups = rows.drop_duplicates(["seed", "step"])["group"]
    parts = [f"{len(verdicts)} of {len(groups)} steps miss a gate"]
    if len(verdicts):
        by = verdicts["explained"].value_counts()
        parts[0] += ", explained by " + ", ".join(f"{word} ({count})" for word, count in by.items())
    before, after = errors(rows, "megakernel", "reference"), errors(rows, "megakernel", "ids")
    at = rows[rows["group"] == "swapped"].drop_duplicates(["seed", "step"]).set_index(["seed", "step"]).index
    if len(at):
        factor = float(np.median(before.loc[at] / after.loc[at].clip(lower=1e-9)))
        parts.append(
            f"{len(at)} more have other experts in a layer and pass all the same; forcing these makes their error "
            f"{factor:.2g} times smaller in the median"
        )
    return f"<p>{'. '.join(parts)}.</p>"
