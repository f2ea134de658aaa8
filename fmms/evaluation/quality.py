"""Whether samplers that should be one distribution are: rows of accuracy, pairwise tests, perplexity, total variation
distance and power, from the answers of fmms.evaluation.variants.

Figures of these rows are fmms.evaluation.quality_figures'; intervals and tests fmms.evaluation.statistics'.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from fmms import controls, sampling
from fmms.evaluation import gsm8k, statistics
from fmms.evaluation.gsm8k import Record
from fmms.evaluation.tasks import Task
from fmms.evaluation.variants import CONTROL, EXACT, SAMPLERS, SCHEMES
from fmms.lm_head import Backbone, find_lm_head

ALPHA = 0.05
"""Chance of any false alarm among all tests of one kind (Holm's correction)."""

RANGE = (20.0, 80.0)
"""Percent of right answers within which a difference between samplers could show."""

REPLICATES = 999  # of an exact sampler, simulated beside each total variation distance
TOKENS_AT_ONCE = 1024  # whose logits are in memory while continuations are scored

PASSAGE = (
    "The harbour lay quiet in the early morning. Two fishing boats had come in before sunrise, and their crews were "
    "sorting the catch into wooden boxes while gulls waited on the wall. A woman with a notebook walked along the "
    "pier, asked each captain about the weather, and wrote down what he said. By noon she had filled eleven pages."
)
"""Prose whose every place is a context for `total_variation`: next tokens from nearly certain to wide open."""

ACCURACY_COLUMNS = ("setting", "system", "correct", "low", "high", "n", "method", "dataset")
PERPLEXITY_COLUMNS = ("setting", "system", "perplexity", "low", "high", "n", "tokens", "method")
PAIR_COLUMNS = (
    *("setting", "a", "b", "difference", "low", "high", "p_value", "p_holm", "mcnemar_p", "a_only", "b_only", "n"),
    *("method", "control"),
)
DISTANCE_COLUMNS = ("setting", "system", "distance", "low", "high", "p_value", "p_holm", "contexts", "draws")
POWER_COLUMNS = ("difference", "power", "low", "high", "accuracy", "disagreement", "alpha", "n", "simulations")


def accuracy(answers: Mapping[str, Sequence[Record]], seed: int = 0) -> list[dict]:
    """Percent right of every sampler under every setting, with 95 % interval: rows of ACCURACY_COLUMNS.

    answers: setting -> records, as `variants.answer_all` returns them.
    """
    rows = []
    for setting, records in answers.items():
        dataset = records[0].dataset
        for system, right in gsm8k.scores(records)[1].items():
            found = statistics.mean_interval(right, seed=seed)
            row = {"setting": setting, "system": system, **found._asdict(), "dataset": dataset}
            rows.append({**row, "correct": found.estimate})
    return [{column: row[column] for column in ACCURACY_COLUMNS} for row in rows]


def comparisons(answers: Mapping[str, Sequence[Record]], seed: int = 0) -> list[dict]:
    """Every pair of samplers under each setting, tested on the same problems: rows of PAIR_COLUMNS.

    Samplers are compared under equal sampling parameters only. p_holm is corrected over the pairs of all settings
    together. control: whether one of the two is the negative control.
    """
    rows = []
    for setting, records in answers.items():
        scores = gsm8k.scores(records)[1]
        for pair in statistics.pairwise(scores, seed=seed):
            rows.append({"setting": setting, **pair, "control": CONTROL in (pair["a"], pair["b"])})
    for row, p in zip(rows, statistics.holm([row["p_value"] for row in rows]), strict=True):
        row["p_holm"] = float(p)
    return [{column: row[column] for column in PAIR_COLUMNS} for row in rows]


@torch.no_grad()
def perplexity(
    model, tokenizer, task: Task, answers: Mapping[str, Sequence[Record]], scored: int, seed: int = 0
) -> list[dict]:
    """Perplexity of the samplers' own continuations under the model: rows of PERPLEXITY_COLUMNS.

    exp of the mean negative log-probability per token, end token included, by transformers' logits at temperature 1
    without truncation, whatever sampled. Interval: answers are resampled, each with its tokens; the ratio of sums is
    linearised (Cochran, Sampling Techniques, section 6.4) so that `statistics.trial_interval` applies.

    scored: of the first so many problems.
    """
    prompts, rows = task.texts(tokenizer)[:scored], []
    place = {problem.doc_id: index for index, problem in enumerate(task.problems)}
    for setting, records in answers.items():
        for system in SAMPLERS:
            own = [
                (prompts[place[record.doc_id]], record.extra["ids"])
                for record in records
                if record.variant == system and place[record.doc_id] < scored and record.extra["ids"]
            ]
            loss = np.array(_losses(model, tokenizer, task, own))
            length = np.array([len(ids) for _, ids in own], dtype=float)
            ratio = loss.sum() / length.sum()
            found = statistics.trial_interval(ratio + (loss - ratio * length) / length.mean(), seed=seed)
            row = {"setting": setting, "system": system, "perplexity": math.exp(ratio), "low": math.exp(found.low)}
            row |= {"high": math.exp(found.high), "n": found.n, "tokens": int(length.sum()), "method": found.method}
            rows.append(row)
    return rows


@torch.no_grad()
def total_variation(
    model,
    tokenizer,
    choices: Mapping[str, Mapping],
    contexts: int,
    draws: int,
    bias: float = 2.0,
    seed: int = 0,
    impl: str = "auto",
) -> list[dict]:
    """Distance of each sampler's draws of one token from the reference distribution: rows of DISTANCE_COLUMNS.

    distance: the total variation distance sum |share drawn - probability| / 2 in percent, mean over the last
    `contexts` places of PASSAGE, each with `draws` draws. The probabilities are a softmax in fp64 over
    `controls.allowed_set`. So few draws of so many tokens never match them exactly: low and high hold 95 % of what the
    same number of exact draws gives (REPLICATES simulated ones), p_value is the chance that those lie at least as far
    off, p_holm corrects it over all rows.

    transformers' draws are those of its own warpers and torch.multinomial on the logits, as in its `generate`.

    choices: as `variants.settings` makes them. bias: of the control.
    """
    ids = tokenizer(PASSAGE, return_tensors="pt", add_special_tokens=False).input_ids.to(model.device)
    if not 1 <= contexts <= ids.shape[1]:
        raise ValueError(f"contexts is {contexts}; the passage has {ids.shape[1]} places")
    places = torch.arange(ids.shape[1], device=ids.device)[None]
    hidden = Backbone(model)(ids, None, places)[0][0, -contexts:]
    head = find_lm_head(model)
    logits = head.logits(hidden)
    rows = []
    for number, (setting, choice) in enumerate(choices.items()):
        wanted = _reference(logits, choice)
        exact = _exact_distances(wanted, draws, seed + number)
        low, high = np.quantile(exact, [0.025, 0.975])
        for system in SAMPLERS:
            own = seed + 1_000_003 * (1 + SAMPLERS.index(system)) + number
            if system == "transformers":
                drawn = _transformers_draws(logits, choice, draws, own)
            else:
                scale = bias if system == CONTROL else 1.0
                drawn = sampling.sample(
                    hidden, head.weight, choice["temperature"] * scale, top_k=choice["top_k"], top_p=choice["top_p"],
                    seed=own, num_samples=draws, noise_scheme=SCHEMES.get(system, "group"), impl=impl,
                    **head.sample_arguments(),
                ).ids  # fmt: skip
            pairs = zip(drawn.cpu().numpy(), wanted, strict=True)
            seen = 100 * float(np.mean([_distance(one, probabilities) for one, probabilities in pairs]))
            p = (1 + int((exact >= seen - 1e-9).sum())) / (1 + len(exact))
            row = {"setting": setting, "system": system, "distance": seen, "low": float(low), "high": float(high)}
            rows.append({**row, "p_value": p, "contexts": contexts, "draws": draws})
    for row, p in zip(rows, statistics.holm([row["p_value"] for row in rows]), strict=True):
        row["p_holm"] = float(p)
    return [{column: row[column] for column in DISTANCE_COLUMNS} for row in rows]


def power_curve(
    pairs: Sequence[Mapping], percent_right: float, differences: Sequence[float], simulations: int = 1000, seed: int = 0
) -> list[dict]:
    """How often a pairwise test on as many problems finds a difference: rows of POWER_COLUMNS.

    The level is ALPHA over the number of tests, what Holm's correction asks of its first: a lower bound. The share of
    problems that only one of two gets right is the mean of the pairs of exact samplers, or the difference where that is
    larger.

    Args:
        pairs: of `comparisons`. percent_right: accuracy of the better one, percent. differences: percentage points.
    """
    exact = [pair for pair in pairs if not pair["control"]]
    n, alpha = exact[0]["n"], ALPHA / len(pairs)
    common = float(np.mean([(pair["a_only"] + pair["b_only"]) / pair["n"] for pair in exact]))
    better, rows = percent_right / 100, []
    for difference in differences:
        worse = better - difference / 100
        if worse < 0:
            continue
        most = min(better + worse, 2 - better - worse)
        disagreement = min(max(common, difference / 100), most)
        found = statistics.power(n, better, worse, disagreement, alpha, simulations=simulations, seed=seed)
        row = {"difference": difference, **found._asdict(), "accuracy": percent_right, "n": n}
        rows.append({**row, "disagreement": 100 * disagreement, "alpha": alpha})
    return [{column: row[column] for column in POWER_COLUMNS} for row in rows]


def smallest_found(curve: Sequence[Mapping], share: float = 0.8) -> float | None:
    """The smallest difference of a power curve, percentage points, that is found with at least this chance; None where
    the curve doesn't reach it."""
    return next((row["difference"] for row in curve if row["power"] >= share), None)


def require(accuracies: Sequence[Mapping], pairs: Sequence[Mapping], distances: Sequence[Mapping]) -> str:
    """A sentence that says what was found; AssertionError when samplers that are one distribution differ, when the
    negative control passes for one of them, or when the task is so easy or hard that no difference could show."""
    for row in accuracies:
        if row["system"] in EXACT and not RANGE[0] <= row["correct"] <= RANGE[1]:
            raise AssertionError(
                f"{row['system']} is right {row['correct']:.1f} % of the time ({row['setting']}); outside "
                f"{RANGE[0]:g} to {RANGE[1]:g} % a difference would hardly show: choose another task"
            )
    found = [(row["control"], row["p_holm"], f"{row['a']} and {row['b']}", "right answers", row) for row in pairs]
    found += [
        (row["system"] == CONTROL, row["p_holm"], row["system"], "total variation distance", row) for row in distances
    ]
    for control, p, who, what, row in found:
        if control and p > ALPHA:
            raise AssertionError(f"the control passes: {who}, {what}, {row['setting']}: p = {p:.3g}; take more of them")
        if not control and p <= ALPHA:
            raise AssertionError(
                f"{who} differ from what they should be: {what}, {row['setting']}: p = {p:.3g} after correction. With "
                f"another seed such a test fails by chance in {ALPHA:.0%} of runs; with several seeds it must not"
            )
    same, caught = (sum(control is wanted for control, *_ in found) for wanted in (False, True))
    return (
        f"{same} tests of exact samplers find no difference at {ALPHA:.0%} after correction; "
        f"{caught} tests against the control all find it."
    )


@torch.no_grad()
def _losses(model, tokenizer, task: Task, texts: Sequence[tuple[str, list[int]]]) -> list[float]:
    """Negative log-probability of each continuation (ids) of a prompt, in nats.

    Texts of the same lengths go through the model together, so that none is padded.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    encoded = [
        tokenizer([prompt], return_tensors="pt", add_special_tokens=not task.chat).input_ids[0].tolist()
        for prompt, _ in texts
    ]
    for number, (start, (_, ids)) in enumerate(zip(encoded, texts, strict=True)):
        alike.setdefault((len(start), len(ids)), []).append(number)
    losses = [0.0] * len(texts)
    for (_, length), numbers in alike.items():
        step = max(1, TOKENS_AT_ONCE // (length + 1))
        for first in range(0, len(numbers), step):
            some = numbers[first : first + step]
            ids = torch.tensor([encoded[number] + texts[number][1] for number in some], device=model.device)
            logits = model(ids, logits_to_keep=length + 1).logits[:, :-1].float()
            scores = logits.log_softmax(-1).gather(-1, ids[:, -length:, None])[..., 0]
            for number, loss in zip(some, (-scores.double().sum(-1)).tolist(), strict=True):
                losses[number] = loss
    return losses


def _reference(logits: torch.Tensor, choice: Mapping) -> np.ndarray:
    """Probabilities of each row of logits [C, V] under a setting: fp64 [C, V]."""
    kept = controls.allowed_set(logits, choice["temperature"], choice["top_k"], choice["top_p"])
    scaled = (logits.double() / choice["temperature"]).masked_fill(~kept, -torch.inf)
    return torch.softmax(scaled, -1).cpu().numpy()


def _transformers_draws(logits: torch.Tensor, choice: Mapping, draws: int, seed: int) -> torch.Tensor:
    """int64 [C, draws] by the warpers of transformers, in the order in which its `generate` applies them."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = TemperatureLogitsWarper(choice["temperature"])(None, logits)
    if choice["top_k"]:
        scores = TopKLogitsWarper(choice["top_k"])(None, scores)
    if choice["top_p"] is not None and choice["top_p"] < 1:
        scores = TopPLogitsWarper(choice["top_p"])(None, scores)
    generator = torch.Generator(logits.device).manual_seed(seed)
    return torch.multinomial(torch.softmax(scores, -1), draws, replacement=True, generator=generator)


def _distance(ids: np.ndarray, probabilities: np.ndarray) -> float:
    """Total variation distance of the shares of ids [N] from probabilities [V]; only drawn tokens are visited."""
    drawn, counts = np.unique(ids, return_counts=True)
    share, wanted = counts / len(ids), probabilities[drawn]
    return float(0.5 * (1 + (np.abs(share - wanted) - wanted).sum()))


def _exact_distances(probabilities: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """Mean over rows of `_distance` of exact draws, in percent: float64 [REPLICATES]."""
    rng, total = np.random.default_rng(seed), np.zeros(REPLICATES)
    for row in probabilities:
        edges = np.cumsum(row)
        ids = np.searchsorted(edges, rng.random((REPLICATES, draws)) * edges[-1], side="right")
        total += [_distance(one, row) for one in ids]
    return 100 * total / len(probabilities)
