"""fmms.evaluation.gsm8k: numbers as models write them, and files of lm-eval, of our own runs and of GSM8K itself."""

import json
import subprocess
import sys
import types
from fractions import Fraction

import pytest

from fmms.evaluation import gsm8k


@pytest.mark.parametrize(
    "text, value",
    [
        *[("29", 29), ("29.", 29), ("29.00", 29), ("$29.00", 29), (" 29 ", 29), ("29 €", 29), ("£29", 29)],
        *[("1,000", 1000), ("1,234,567.5", Fraction("1234567.5")), ("1,00,000", 100000), ("007", 7)],
        *[("-3", -3), ("−3", -3), ("-$5", -5), ("$-5", -5), ("+4", 4), ("50%", 50), ("12.5 %", Fraction("12.5"))],
        *[("3/4", Fraction(3, 4)), ("-1/2", Fraction(-1, 2)), ("1 1/2", Fraction(3, 2)), (".5", Fraction(1, 2))],
        *[("**18**", 18), ("\\boxed{18}", 18), ("\\frac{3}{4}", Fraction(3, 4)), ("`7`", 7)],
    ],
)
def test_number(text, value):
    assert gsm8k.number(text) == value
    assert gsm8k.is_correct(f"work\n#### {text}", str(Fraction(value)))


@pytest.mark.parametrize(
    "text", ["", "abc", "3,5", "1,0000", "1.2.3", "1/0", "--5", "-$-5", "29 apples", "9" * 5000, "٣", "nan", "1e3", "."]
)
def test_no_number(text):
    assert gsm8k.number(text) is None


@pytest.mark.parametrize(
    "text, answer",
    [
        ("so 5 + 7 = 12.\n#### 12", "12"),
        ("#### $1,000 in total", "$1,000"),
        ("#### Total: 29 apples", "29"),
        ("#### 12\n\nQuestion: another one?\n#### 99", "12"),
        ("the answer is 12", None),
        ("####12", None),
        ("####\n12", None),
        ("#### none", None),
        ("#### 3,5", None),
    ],
)
def test_final_answer(text, answer):
    assert gsm8k.final_answer(text) == answer


def test_equality_is_exact():
    assert gsm8k.equal("$29.00", "29")
    assert gsm8k.equal("0.75", "3/4")
    assert not gsm8k.equal("28.999999999999999999", "29")
    assert not gsm8k.equal("0.5", "50%"), "a percent sign is a unit"
    assert not gsm8k.equal(None, "29")
    assert not gsm8k.equal("29 apples", "29")
    with pytest.raises(ValueError, match="no number"):
        gsm8k.equal("29", "twenty-nine")


def record(doc_id=0, variant="fmms", response="#### 12", **more):
    return gsm8k.Record(doc_id, f"How many, {doc_id}?", "5 + 7 = 12\n#### 12", response, variant, **more)


def test_records_come_back_as_they_were(tmp_path):
    records = [
        record(0, seed=3, sampling={"temperature": 0.8, "top_k": 50}, dataset=gsm8k.GSM_SYMBOLIC),
        record(1, response="zwölf \u2028 Zeilen\n#### 13", extra={"tokens": 9}),
    ]
    path = gsm8k.write_records(tmp_path / "responses.jsonl", records)
    assert gsm8k.read_records(path) == records
    assert [one.correct for one in records] == [True, False]
    first = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    assert set(first) >= {"doc_id", "question", "reference", "response", "variant", "seed", "sampling"}


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda row: row.pop("response"), "missing"),
        (lambda row: row.update(temprature=1), "unknown"),
        (lambda row: row.update(doc_id="3"), "whole number"),
        (lambda row: row.update(response=None), "texts"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, change, message):
    path = gsm8k.write_records(tmp_path / "r.jsonl", [record(0), record(1)])
    good, bad = path.read_text().splitlines()
    row = json.loads(bad)
    change(row)
    path.write_text(f"{good}\n{json.dumps(row)}\n")
    with pytest.raises(ValueError, match=rf"r\.jsonl:2.*{message}"):
        gsm8k.read_records(path)


def test_cut_and_double_lines_are_named(tmp_path):
    path = gsm8k.write_records(tmp_path / "r.jsonl", [record(0), record(1)])
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match=r"r\.jsonl:2 is no JSON"):
        gsm8k.read_records(path)
    gsm8k.write_records(path, [record(0), record(0)])
    with pytest.raises(ValueError, match="second response"):
        gsm8k.read_records(path)
    with pytest.raises(FileNotFoundError, match="one per line"):
        gsm8k.read_records(tmp_path / "none.jsonl")


def lm_eval_lines(answers):
    rows = []
    for name in ("strict-match", "flexible-extract"):
        for doc_id, answer in answers.items():
            rows.append(
                {
                    "doc_id": doc_id,
                    "doc": {"question": f"How many, {doc_id}?", "answer": "5 + 7 = 12\n#### 12"},
                    "target": "5 + 7 = 12\n#### 12",
                    "arguments": {"gen_args_0": {"arg_0": "prompt", "arg_1": {"do_sample": False, "temperature": 0.0}}},
                    "resps": [[f"work\n#### {answer}"]],
                    "filtered_resps": [answer],
                    "filter": name,
                    "exact_match": float(answer == "12"),
                }
            )
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_lm_eval_has_one_record_for_each_document(tmp_path):
    model = tmp_path / "Qwen__Qwen3-8B"
    model.mkdir()
    (model / "samples_gsm8k_2025-04-30T18-24-41.082644.jsonl").write_text(lm_eval_lines({0: "1"}))
    (model / "samples_gsm8k_2025-05-01T08-00-00.000001.jsonl").write_text(lm_eval_lines({1: "12.0", 0: "13", 2: "12"}))
    records = gsm8k.read_lm_eval(tmp_path, "vllm")
    assert [(one.doc_id, one.correct) for one in records] == [(0, False), (1, True), (2, True)]
    assert records[0].extra["exact_match"] == {"strict-match": 0.0, "flexible-extract": 0.0}
    assert records[0].sampling == {"do_sample": False, "temperature": 0.0}
    assert {one.variant for one in records} == {"vllm"}
    ids, scores = gsm8k.scores(records)
    assert ids == [0, 1, 2]
    assert scores["vllm"].tolist() == [0, 1, 1]


def test_lm_eval_files_that_are_not_clear(tmp_path):
    with pytest.raises(FileNotFoundError, match="log_samples"):
        gsm8k.read_lm_eval(tmp_path, "x")
    for task in ("gsm8k", "gsm8k_cot"):
        (tmp_path / f"samples_{task}_2025-04-30T18-24-41.jsonl").write_text(lm_eval_lines({0: "1"}))
    with pytest.raises(ValueError, match="pass the file"):
        gsm8k.read_lm_eval(tmp_path, "x")
    one = tmp_path / "samples_gsm8k_2025-04-30T18-24-41.jsonl"
    assert len(gsm8k.read_lm_eval(one, "x")) == 1
    one.write_text(lm_eval_lines({0: "1"}) + lm_eval_lines({0: "2"}))
    with pytest.raises(ValueError, match="another response"):
        gsm8k.read_lm_eval(one, "x")
    one.write_text('{"doc_id": 0}\n')
    with pytest.raises(ValueError, match=":1 is no gsm8k sample"):
        gsm8k.read_lm_eval(one, "x")
    one.write_text(lm_eval_lines({0: "1"}).replace('"resps": [["', '"resps": [["again", "'))
    with pytest.raises(ValueError, match="2 responses"):
        gsm8k.read_lm_eval(one, "x")


def test_latest_run_goes_by_the_name(tmp_path):
    for name in ("20260131-235900", "run_2026-02-01T00-00-00", "2025-12-31_10-00-00.5", "notes", "20269931-235900"):
        (tmp_path / name).mkdir()
    (tmp_path / "20270101-000000").write_text("a file")
    assert gsm8k.latest_run(tmp_path).name == "run_2026-02-01T00-00-00"
    moment = gsm8k.timestamp("20260131-235900")
    assert gsm8k.run_name(moment) == "20260131-235900"
    with pytest.raises(FileNotFoundError, match="20260131"):
        gsm8k.latest_run(tmp_path / "notes")


def test_a_folder_of_shards(tmp_path):
    assert gsm8k.read_folder(tmp_path) == []
    gsm8k.write_records(tmp_path / "shard_0.jsonl", [record(2), record(1)])
    gsm8k.write_records(tmp_path / "shard_1.jsonl", [record(0)])
    gsm8k.write_records(tmp_path / "judged" / "other.jsonl", [record(0)])
    assert gsm8k.read_folder(tmp_path) == [record(0), record(1), record(2)]
    gsm8k.write_records(tmp_path / "shard_2.jsonl", [record(0, "transformers")])
    with pytest.raises(ValueError, match=r"shard_2\.jsonl: a second response to doc_id 0"):
        gsm8k.read_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder"):
        gsm8k.read_folder(tmp_path / "none")


def test_scores_need_the_same_questions():
    both = [
        record(0),
        record(1, response="#### 3"),
        record(0, "vllm"),
        record(1, "vllm", seed=1),
        record(1, "vllm", seed=2),
    ]
    with pytest.raises(ValueError, match="more often"):
        gsm8k.scores(both)
    ids, scores = gsm8k.scores([*both, record(0, "vllm", "no answer", seed=2)])
    assert ids == [0, 1]
    assert scores["fmms"].tolist() == [1, 0]
    assert scores["vllm"].tolist() == [0.5, 1]
    with pytest.raises(ValueError, match=r"'vllm' lacks 1 of 2 questions \(doc_id 1\)"):
        gsm8k.scores(both[:3])
    with pytest.raises(ValueError, match="two different questions"):
        gsm8k.scores([record(0), gsm8k.Record(0, "Other?", "1", "#### 1", "vllm")])


def test_gsm_symbolic_is_repeatable_and_labelled():
    pytest.importorskip("reasoning_gym")
    problems = gsm8k.gsm_symbolic(30, seed=4)
    assert problems[:10] == gsm8k.gsm_symbolic(10, seed=4)
    assert {one.dataset for one in problems} == {"gsm_symbolic (reasoning-gym)"}
    assert all(gsm8k.number(one.reference) is not None for one in problems)
    assert not {one.question for one in problems} & {one.question for one in gsm8k.gsm_symbolic(30, seed=5)}
    with pytest.raises(ValueError, match="seed"):
        gsm8k.gsm_symbolic(3, seed=-1)


def test_gsm_symbolic_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"\.\[evaluation\]"):
        gsm8k.gsm_symbolic(3)


def test_gsm8k_from_a_file(tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text('{"question": "How many?", "answer": "5 + 7 = 12\\n#### 1,200"}\n')
    (problem,) = gsm8k.gsm8k(path)
    assert problem.dataset == "GSM8K"
    assert gsm8k.is_correct("#### $1200.00", problem.reference)
    path.write_text('{"question": "How many?", "answer": "12"}\n')
    with pytest.raises(ValueError, match=r"test\.jsonl:1 is no GSM8K problem"):
        gsm8k.gsm8k(path)
    with pytest.raises(FileNotFoundError, match="one JSON object per line"):
        gsm8k.gsm8k(tmp_path / "none.jsonl")


def test_gsm8k_through_datasets(monkeypatch):
    def load(name, config, split):
        assert (name, config) == ("openai/gsm8k", "main")
        if split == "test":
            raise ConnectionError("no route to host")
        return [{"question": "How many?", "answer": "#### 3"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    assert len(gsm8k.gsm8k(split="train")) == 1
    with pytest.raises(FileNotFoundError, match=r"no route to host.*one JSON object per line"):
        gsm8k.gsm8k()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(FileNotFoundError, match=r"pip install datasets.*one JSON object per line"):
        gsm8k.gsm8k()


def test_importing_fmms_imports_none_of_this():
    code = "import sys, fmms; print(any(m.startswith(('fmms.evaluation', 'reasoning_gym')) for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
    code = (
        "import sys; from fmms.evaluation import gsm8k, naming, serving, statistics;"
        "print([m for m in ('scipy', 'pandas', 'matplotlib', 'reasoning_gym', 'datasets') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
