"""fmms.text: batches of chat prompts, what each token adds, HTML that can't be broken, checks against transformers."""

import pytest
import tiny_models
import torch

from fmms import text

transformers = pytest.importorskip("transformers")


class Tokenizer:
    """One id per byte, below 97; pads on the left."""

    padding_side = "left"

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return f"<{messages[0]['content']}>"

    def __call__(self, texts, return_tensors, padding, add_special_tokens):
        width = max(map(len, texts))
        ids = [[0] * (width - len(t)) + [ord(c) % 97 for c in t] for t in texts]
        mask = [[0] * (width - len(t)) + [1] * len(t) for t in texts]
        return transformers.BatchEncoding({"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)})

    def decode(self, ids, clean_up_tokenization_spaces=False):
        return bytes(ids).decode("utf-8", errors="replace")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return tiny_models.llama(transformers).eval()


@pytest.fixture
def batch():
    return text.chat_batch(Tokenizer(), ["abc", "longer"], [0.0, 0.5, 1.0], seed=7)


def test_a_row_per_prompt_and_temperature(batch):
    assert batch.input_ids.shape == batch.attention_mask.shape == (6, 8)
    assert batch.temperature.tolist() == [0.0, 0.5, 1.0] * 2
    assert batch.seed.tolist() == [7, 7, 7, 8, 8, 8]
    assert torch.equal(batch.input_ids[0], batch.input_ids[2])
    assert batch.attention_mask.sum(-1).tolist() == [5, 5, 5, 8, 8, 8]


def test_bad_batches_are_refused():
    with pytest.raises(ValueError, match="0 prompts"):
        text.chat_batch(Tokenizer(), [], [1.0], 0)
    tokenizer = Tokenizer()
    tokenizer.padding_side = "right"
    with pytest.raises(ValueError, match="pads on the right"):
        text.chat_batch(tokenizer, ["a"], [1.0], 0)


def test_rows_agree_with_the_models_own_logits(model, batch):
    output, rows = text.continuations(model, Tokenizer(), batch, 6)
    assert len(rows) == int(output.lengths.sum())
    assert {(row["prompt"], row["temperature"]) for row in rows} == {(p, t) for p in (0, 1) for t in (0.0, 0.5, 1.0)}
    for row in rows:
        assert row["logprob"] == pytest.approx(row["hf_logprob"], abs=1e-4)
        if row["temperature"] in (0.0, 1.0):
            assert row["hf_logprob"] == row["hf_logprob_t1"]


def test_hidden_state_and_logits_belong_together(model):
    prompt = torch.tensor([5, 6, 7])
    hidden, logits = text.first_token_distribution(model, prompt)
    assert hidden.shape == (1, 32)
    torch.testing.assert_close(model.lm_head(hidden)[0].detach(), logits)
    drawn = text.head_draws(model, hidden, 50, seed=3)
    assert drawn.ids.shape == (1, 50)
    torch.testing.assert_close(drawn.logits[0] - drawn.lse[0], logits.log_softmax(-1), atol=1e-4, rtol=0)


def test_bfloat16_logits_are_not_rounded():
    torch.manual_seed(0)
    half = tiny_models.llama(transformers).eval().bfloat16()
    hidden, logits = text.first_token_distribution(half, torch.tensor([5, 6, 7]))
    assert hidden.dtype == torch.bfloat16
    exact = hidden.double() @ half.lm_head.weight.double().T
    torch.testing.assert_close(logits.double(), exact[0], atol=1e-4, rtol=1e-5)


def test_greedy_texts_are_compared_up_to_the_first_difference(model):
    prompt = torch.tensor([5, 6, 7])
    ours = torch.tensor([4, 5, 6])
    assert text.greedy_difference(model, prompt, ours, ours) == {"tokens": 3, "equal": 3, "gap": None, "tie": None}
    found = text.greedy_difference(model, prompt, ours, torch.tensor([4, 9, 6]))
    logits = model(torch.tensor([[5, 6, 7, 4]])).logits[0, -1].detach()
    assert (found["tokens"], found["equal"]) == (3, 1)
    assert found["gap"] == pytest.approx(float((logits[5] - logits[9]).abs()), abs=1e-5)
    assert found["gap"] > found["tie"] > 0
    shorter = text.greedy_difference(model, prompt, ours, ours[:2])
    assert (shorter["tokens"], shorter["equal"], shorter["gap"]) == (3, 2, float("inf"))


def test_a_character_of_several_tokens_comes_whole():
    ids = list("a é€".encode())
    texts = text.token_texts(Tokenizer(), ids)
    assert texts == ["a", " ", "", "é", "", "", "€"]
    assert text.token_texts(Tokenizer(), list("é".encode())[:1]) == ["�"]
    assert text.token_texts(Tokenizer(), []) == []


def test_html_is_escaped_and_shaded():
    row = {"prompt": 0, "temperature": 1.0, "step": 0, "token_id": 3}
    rows = [row | {"text": "<b>&\n", "logprob": -0.05}, row | {"step": 1, "text": float("nan"), "logprob": -9.0}]
    page = text.continuations_html(["<i>?"], rows)
    assert "&lt;i&gt;?" in page
    assert "&lt;b&gt;&amp;↵<br>" in page
    assert "<b>" not in page
    assert "nan" not in page
    assert text.SHADES[0][1] in page
    assert text.SHADES[-1][1] in page
    assert "3: -9.00 nats" in page
