"""fmms.evaluation.quality: rows of made-up answers, distances of known samplers, and what lets the notebook fail."""

import dataclasses
import math

import numpy as np
import pytest
import torch

pytest.importorskip("scipy")
transformers = pytest.importorskip("transformers")

from fmms.evaluation import gsm8k, quality, tasks, variants  # noqa: E402


def answers(n=200, right=0.6, control=0.2, seed=0):
    rng = np.random.default_rng(seed)
    found = {}
    for setting in ("plain", "truncated"):
        found[setting] = [
            gsm8k.Record(i, f"{i} * 2", "12", f"#### {12 if hit else 13}", sampler, 1, {}, "made up", {"ids": [4, 2]})
            for sampler in variants.SAMPLERS
            for i, hit in enumerate(rng.random(n) < (control if sampler == "control" else right))
        ]
    return found


DISTANCES = [
    {"setting": "plain", "system": system, "p_holm": 0.001 if system == "control" else 0.7}
    for system in variants.SAMPLERS
]


def test_rows_of_accuracy():
    rows = quality.accuracy(answers())
    assert len(rows) == 8
    assert set(rows[0]) == set(quality.ACCURACY_COLUMNS)
    assert all(row["low"] < row["correct"] < row["high"] and row["n"] == 200 for row in rows)
    assert rows[0]["dataset"] == "made up"
    assert rows == quality.accuracy(answers())


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_all_right_and_all_wrong_have_intervals(right):
    rows = quality.accuracy(answers(30, right, right))
    assert all(row["high"] - row["low"] > 5 for row in rows)
    assert all(row["p_holm"] == 1 for row in quality.comparisons(answers(30, right, right)))


def test_pairs_are_within_a_setting_and_corrected_together():
    rows = quality.comparisons(answers())
    assert len(rows) == 12
    assert [row["control"] for row in rows[:6]] == [False, False, True, False, True, True]
    smallest = min(rows, key=lambda row: row["p_value"])
    assert smallest["p_holm"] == pytest.approx(12 * smallest["p_value"])
    assert quality.comparisons(answers()) == rows


def test_exact_samplers_pass_and_the_control_is_found():
    found = answers()
    words = quality.require(quality.accuracy(found), quality.comparisons(found), DISTANCES)
    assert "9 tests of exact samplers find no difference" in words
    assert "7 tests against the control" in words


def test_a_sampler_that_stands_out_fails():
    found = answers()
    for records in found.values():
        ours, worse = ([i for i, r in enumerate(records) if r.variant == name] for name in ("fmms", "control"))
        for i, j in zip(ours, worse, strict=True):
            records[i] = dataclasses.replace(records[j], variant="fmms")
    accuracies = [{**row, "correct": 50.0} for row in quality.accuracy(found)]
    with pytest.raises(AssertionError, match=r"transformers and fmms differ .* right answers, plain"):
        quality.require(accuracies, quality.comparisons(found), DISTANCES)


def test_a_control_that_passes_fails():
    found = answers(control=0.6)
    with pytest.raises(AssertionError, match="control passes"):
        quality.require(quality.accuracy(found), quality.comparisons(found), DISTANCES)
    distances = [{**row, "p_holm": 0.5} for row in DISTANCES]
    found = answers()
    with pytest.raises(AssertionError, match="total variation distance"):
        quality.require(quality.accuracy(found), quality.comparisons(found), distances)


def test_too_easy_a_task_fails():
    found = answers(right=0.95)
    with pytest.raises(AssertionError, match="choose another task"):
        quality.require(quality.accuracy(found), quality.comparisons(found), DISTANCES)


def test_power_grows_with_the_difference():
    pairs = quality.comparisons(answers())
    curve = quality.power_curve(pairs, 60.0, (0, 10, 20, 40, 70), simulations=200)
    assert [row["difference"] for row in curve] == [0, 10, 20, 40], "no accuracy lies below 0"
    assert curve[0]["power"] < 0.05 < 0.95 < curve[-1]["power"]
    assert curve[0]["alpha"] == pytest.approx(0.05 / 12)
    assert quality.smallest_found(curve) in (20, 40)
    assert quality.smallest_found(curve[:1]) is None


def test_distance():
    wanted = np.array([0.5, 0.25, 0.25, 0.0])
    assert quality._distance(np.array([0, 0, 1, 2]), wanted) == pytest.approx(0)
    assert quality._distance(np.array([3, 3]), wanted) == pytest.approx(1)
    assert quality._distance(np.array([0, 0, 0, 0]), wanted) == pytest.approx(0.5)
    exact = quality._exact_distances(wanted[None], 4, seed=0)
    assert len(exact) == quality.REPLICATES
    assert 10 < exact.mean() < 40


class Tokenizer:
    """Characters as tokens."""

    eos_token_id = 2

    def __call__(self, texts, return_tensors=None, padding=False, add_special_tokens=False):
        ids = [[3 + ord(c) % 40 for c in text] for text in ([texts] if isinstance(texts, str) else texts)]
        mask = [[1] * len(row) for row in ids]
        return transformers.BatchEncoding({"input_ids": ids, "attention_mask": mask}, tensor_type=return_tensors)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.4,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def test_distances_of_exact_samplers_lie_where_exact_draws_do(model):
    choices = variants.settings(1.0, 20, 0.9)
    rows = quality.total_variation(model, Tokenizer(), choices, contexts=6, draws=300, bias=2.0, seed=1)
    assert [(row["setting"], row["system"]) for row in rows] == [(s, v) for s in choices for v in variants.SAMPLERS]
    for row in rows:
        if row["system"] == variants.CONTROL:
            assert row["p_holm"] <= 0.05
            assert row["distance"] > row["high"]
        else:
            assert row["p_holm"] > 0.05
    assert rows == quality.total_variation(model, Tokenizer(), choices, contexts=6, draws=300, bias=2.0, seed=1)
    with pytest.raises(ValueError, match="places"):
        quality.total_variation(model, Tokenizer(), choices, contexts=10_000, draws=10)


@pytest.mark.parametrize("at_once", [1, 5, 1024])
def test_perplexity_is_that_of_the_models_own_logits(at_once, model, monkeypatch):
    monkeypatch.setattr(quality, "TOKENS_AT_ONCE", at_once)
    task = tasks.load("products", 4, seed=2)
    ids = [[5, 9, 2], [7, 2], [11, 4, 6], [8]]
    records = [
        gsm8k.Record(i, p.question, p.reference, "", sampler, 1, {}, p.dataset, {"ids": ids[i]})
        for sampler in variants.SAMPLERS
        for i, p in enumerate(task.problems)
    ]
    rows = quality.perplexity(model, Tokenizer(), task, {"plain": records}, scored=3)
    losses = []
    for prompt, new in zip(task.prompts, ids[:3], strict=False):
        whole = Tokenizer()([prompt], return_tensors="pt").input_ids[0].tolist() + new
        logits = model(torch.tensor([whole])).logits[0].detach().double().log_softmax(-1)
        losses += [-float(logits[len(whole) - len(new) + i - 1, token]) for i, token in enumerate(new)]
    assert rows[0]["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
    assert (rows[0]["n"], rows[0]["tokens"]) == (3, 8)
    assert rows[0]["low"] < rows[0]["perplexity"] < rows[0]["high"]
