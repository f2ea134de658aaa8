"""fmms.evaluation.tasks: the same problems for a seed, prompts that leave off where the number must follow."""

import pytest

from fmms.evaluation import gsm8k, tasks


class Tokenizer:
    eos_token_id = 7

    def __call__(self, text, add_special_tokens):
        return type("Encoded", (), {"input_ids": [5, ord(text[-1])]})

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return f"<user>{messages[0]['content']}<assistant>"


def test_products_are_right_and_repeatable():
    found = tasks.products(500, seed=3)
    assert found == tasks.products(500, seed=3) != tasks.products(500, seed=4)
    assert found[:20] == tasks.products(20, seed=3), "more problems go on with the same list"
    for problem in found:
        a, b = map(int, problem.question.split(" * "))
        assert 2 <= min(a, b) <= max(a, b) <= 12
        assert problem.reference == str(a * b)
    assert len({problem.question for problem in found}) > 100


def test_a_prompt_ends_where_the_number_follows():
    task = tasks.load("products", 3)
    problem = task.problems[0]
    assert task.prompts[0] == f"3 * 4 = 12\n7 * 5 = 35\n{problem.question} = "
    assert task.texts(Tokenizer()) == list(task.prompts)
    assert task.ends(Tokenizer()) == [7, ord("\n")]
    assert gsm8k.is_correct(task.opening + problem.reference + "\n", problem.reference)


def test_worked_problems_are_messages(tmp_path):
    file = tmp_path / "test.jsonl"
    file.write_text('{"question": "{reference} of 5?", "answer": "so\\n#### 5"}\n' * 3)
    task = tasks.load("gsm8k", 2, path=file)
    assert len(task.problems) == 2
    assert task.opening == ""
    text = task.texts(Tokenizer())[0]
    assert text.startswith("<user>{reference} of 5?")
    assert text.endswith("<assistant>")
    assert "####" in text
    assert task.ends(Tokenizer()) == [7]
    with pytest.raises(ValueError, match="has 3 problems"):
        tasks.load("gsm8k", 4, path=file)


def test_generated_problems_keep_their_label():
    pytest.importorskip("reasoning_gym")
    task = tasks.load("gsm_symbolic", 2)
    assert {problem.dataset for problem in task.problems} == {gsm8k.GSM_SYMBOLIC}


def test_bad_tasks_are_refused():
    with pytest.raises(ValueError, match="products, gsm_symbolic or gsm8k"):
        tasks.load("sums", 3)
    with pytest.raises(ValueError, match="at least one"):
        tasks.load("products", 0)
    with pytest.raises(FileNotFoundError, match="no GSM8K file"):
        tasks.load("gsm8k", 3, path="nowhere.jsonl")
