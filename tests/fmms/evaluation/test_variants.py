"""fmms.evaluation.variants: equal parameters for all, independent noise, and runs that resume where they stopped."""

import itertools
import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

from fmms.evaluation import gsm8k, tasks, variants  # noqa: E402

VOCAB = 61
CHOICES = variants.settings(0.9, 5, 0.8)


class Tokenizer:
    """Characters as tokens, padded on the left."""

    eos_token_id = 2

    def __call__(self, texts, return_tensors=None, padding=False, add_special_tokens=False):
        one = isinstance(texts, str)
        ids = [[3 + ord(c) % (VOCAB - 3) for c in text] for text in ([texts] if one else texts)]
        if return_tensors is None:
            return transformers.BatchEncoding({"input_ids": ids[0] if one else ids})
        longest = max(map(len, ids))
        mask = [[0] * (longest - len(row)) + [1] * len(row) for row in ids]
        padded = [[0] * (longest - len(row)) + row for row in ids]
        return transformers.BatchEncoding({"input_ids": padded, "attention_mask": mask}, tensor_type="pt")

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, eos_token_id=2, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def run(folder, model, n=10, **options):
    task = tasks.load("products", n, seed=1)
    given = dict(choices=CHOICES, max_new_tokens=3, batch=4, seed=5) | options
    return variants.answer_all(folder, model, Tokenizer(), task, **given)


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*.jsonl"))}


def without_times(found):
    return {
        setting: [(r.variant, r.doc_id, r.response, r.sampling) for r in records] for setting, records in found.items()
    }


def test_every_sampler_answers_every_problem_under_equal_parameters(model, tmp_path):
    found = run(tmp_path, model)
    assert list(found) == ["plain", "truncated"]
    for setting, records in found.items():
        assert [(r.variant, r.doc_id) for r in records] == list(itertools.product(variants.SAMPLERS, range(10)))
        assert all(r.sampling == {**CHOICES[setting], "max_new_tokens": 3} for r in records)
        assert all(r.response.startswith("#### ") and 1 <= len(r.extra["ids"]) <= 3 for r in records)
    assert len(files(tmp_path)) == 2 * len(variants.SAMPLERS) * 3
    assert gsm8k.scores(found["plain"])[0] == list(range(10))


def test_a_run_is_repeatable_and_variants_share_no_noise(model, tmp_path):
    one = without_times(run(tmp_path / "a", model))
    assert without_times(run(tmp_path / "b", model)) == one
    assert without_times(run(tmp_path / "c", model, seed=6)) != one
    answers = [[row[2] for row in one["plain"] if row[0] == sampler] for sampler in variants.SAMPLERS]
    assert all(a != b for a, b in itertools.combinations(answers, 2))
    fmms = [[row[2] for row in one[setting] if row[0] == "fmms"] for setting in CHOICES]
    assert fmms[0] != fmms[1]


def test_an_answer_of_fmms_does_not_depend_on_the_batch(model, tmp_path):
    four, one = (without_times(run(tmp_path / str(batch), model, batch=batch)) for batch in (4, 1))
    for setting in CHOICES:
        assert [r for r in four[setting] if r[0] in variants.SCHEMES] == [
            r for r in one[setting] if r[0] in variants.SCHEMES
        ]


def test_a_stopped_run_resumes(model, tmp_path, monkeypatch):
    whole = without_times(run(tmp_path / "whole", model))
    made, real = [], variants.continuations

    def stops(*arguments, **options):
        if len(made) == 5:
            raise KeyboardInterrupt
        made.append(1)
        return real(*arguments, **options)

    monkeypatch.setattr(variants, "continuations", stops)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "part", model)
    kept = files(tmp_path / "part")
    assert len(kept) == 5
    monkeypatch.setattr(variants, "continuations", lambda *a, **o: made.append(1) or real(*a, **o))
    assert without_times(run(tmp_path / "part", model)) == whole
    assert len(made) == 24
    assert files(tmp_path / "part").items() >= kept.items(), "what was there is not made again"
    run(tmp_path / "part", model)
    assert len(made) == 24


def test_answers_of_another_run_are_refused(model, tmp_path):
    run(tmp_path, model)
    with pytest.raises(ValueError, match="other answers"):
        run(tmp_path, model, choices=variants.settings(0.5, 5, 0.8))
    with pytest.raises(ValueError, match="other answers"):
        run(tmp_path, model, n=9)


def test_the_folder_belongs_to_what_decides_an_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("FMMS_ROOT", str(tmp_path))
    one = variants.run_folder("cpu", {"n": 3, "seed": 1})
    assert one == variants.run_folder("cpu", {"seed": 1, "n": 3}) != variants.run_folder("cpu", {"n": 3, "seed": 2})
    about = json.loads((one / "about.json").read_text())
    assert about["n"] == 3
    assert {"torch", "transformers", "code"} <= set(about)
    assert str(tmp_path) not in (one / "about.json").read_text()


@pytest.mark.parametrize("sampler", variants.SAMPLERS)
@pytest.mark.parametrize("setting", CHOICES)
def test_first_tokens_follow_their_distribution(model, sampler, setting):
    """20,000 first tokens of one prompt: the exact samplers' pass a chi-square test, the control's don't."""
    from fmms import controls, testing

    n = 20_000 if sampler != "fmms-token" else 4_000
    ids = torch.tensor([[5, 9, 30]]).expand(n, -1)
    choice = CHOICES[setting]
    seeds = torch.arange(n) * 7919 + 1
    new = variants.continuations(model, ids, torch.ones_like(ids), sampler, choice, seeds, 1, [], bias=2.0)
    logits = model(ids[:1]).logits[:, -1].detach().float()
    kept = controls.allowed_set(logits, choice["temperature"], choice["top_k"], choice["top_p"])
    wanted = torch.softmax((logits.double() / choice["temperature"]).masked_fill(~kept, -torch.inf), -1)[0]
    seen = testing.draws_histogram(torch.tensor([row[0] for row in new]), VOCAB)
    outside = int(seen[wanted == 0].sum())
    p = testing.chi_square(seen, wanted) if not outside else 0.0
    assert (p > 1e-5) == (sampler != variants.CONTROL)


def test_tokens_after_the_end_are_cut():
    assert variants._until([5, 2, 9], [2, 3]) == [5, 2]
    assert variants._until([5, 9], [2]) == [5, 9]
    assert variants._until([], [2]) == []
