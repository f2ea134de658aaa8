"""fmms.bench.records: rows come back as they were saved; metadata is strict JSON, complete and says nothing private."""

import json
import re

import numpy as np
import pytest

from fmms.bench import records

pandas = pytest.importorskip("pandas")


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("FMMS_ROOT", str(tmp_path))
    monkeypatch.delenv("FMMS_COMMAND", raising=False)
    return tmp_path


ROWS = [
    {"system": "fmms", "n": 3, "p": 0.1 + 0.2, "correct": True, "reason": ""},
    {"system": "NA", "n": 2**60 + 1, "p": float("nan"), "correct": False, "reason": 'a "b", c\nd'},
]


def test_rows_come_back(root):
    path = records.save("10_exactness_pvalues", "cpu", ROWS)
    assert path == root.resolve() / "data" / "cpu" / "10_exactness_pvalues.csv"
    back = records.load("10_exactness_pvalues", "cpu")
    assert list(back.columns) == ["system", "n", "p", "correct", "reason"]
    assert back["p"][0] == 0.1 + 0.2
    assert np.isnan(back["p"][1])
    assert list(back["n"]) == [3, 2**60 + 1]
    assert list(back["system"]) == ["fmms", "NA"]
    assert list(back["correct"]) == [True, False]
    assert back["reason"][1] == 'a "b", c\nd'


def test_text_of_any_kind_comes_back(root):
    """Tokens are such text: line ends, quotes, commas, words that mean "missing" elsewhere."""
    texts = ["\r\n", "\r", "\n\n", "NA", "nan", "None", "null", ' "', ",", "é\u200b", "1e5x", "#", "\\n"]
    records.save("01_text", "cpu", [{"i": i, "text": text} for i, text in enumerate(texts)])
    assert records.load("01_text", "cpu")["text"].tolist() == texts


def test_a_frame_saves_the_same_bytes_as_its_rows(root):
    rows = [{"a": 1, "b": 0.5, "c": "x"}, {"a": 2, "b": float("nan"), "c": None}]
    first = records.save("a", "cpu", rows).read_bytes()
    assert records.save("a", "cpu", pandas.DataFrame(rows)).read_bytes() == first
    assert first == b"a,b,c\n1,0.5,x\n2,,\n"


def test_columns_order_select_and_allow_an_empty_table():
    records.save("a", "cpu", ROWS, columns=["n", "missing", "system"])
    assert list(records.load("a", "cpu").columns) == ["n", "missing", "system"]
    records.save("b", "cpu", [], columns=["x"])
    assert len(records.load("b", "cpu")) == 0


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [("../a", ROWS, "name is"), ("a", [], "no rows"), ("a", [1], r"rows\[0\] is a int")],
)
def test_bad_calls_are_named(name, rows, message):
    with pytest.raises(ValueError, match=message):
        records.save(name, "cpu", rows)


def test_metadata_is_strict_complete_and_without_private_paths(root):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    extra = {"nan": float("nan"), "array": np.arange(2), "one": np.float32(0.5), "path": root / "x"}
    extra["deep"] = {"i": np.inf}
    records.save("a", "cpu", ROWS, **extra)
    text = (root / "data" / "cpu" / "a.json").read_text()
    found = json.loads(text, parse_constant=refuse)
    assert {"command", "git", "utc", "cpu", "gpus", "versions", "rows", "columns", "extra"} <= set(found)
    assert set(found["git"]) == {"commit", "dirty"}
    assert found["rows"] == 2
    assert found["extra"] == {"nan": None, "array": [0, 1], "one": 0.5, "path": "x", "deep": {"i": None}}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["utc"])
    assert {"python", "torch", "numpy"} <= set(found["versions"])
    assert str(root) not in text
    assert not re.search(r'"/|\s/\w+/', text)
    assert records.metadata("a", "cpu") == found


def test_command_names_no_folder(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/some/where/tool.py", "--out=/some/where/else.csv", "-n", "3"])
    monkeypatch.delitem(__import__("sys").modules, "ipykernel", raising=False)
    assert records.run_metadata()["command"] == "tool.py --out=else.csv -n 3"
    monkeypatch.setenv("FMMS_COMMAND", "fmms run 00_a --profile cpu")
    assert records.run_metadata()["command"] == "fmms run 00_a --profile cpu"


def test_results_are_not_a_change_of_the_source(root):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["git", "init", "-q"], [*git, "commit", "-q", "--allow-empty", "-m", "x"]):
        __import__("subprocess").run(command, cwd=root, check=True)
    records.save("a", "cpu", ROWS)
    state = records.run_metadata()["git"]
    assert re.fullmatch(r"[0-9a-f]{40}", state["commit"])
    assert state["dirty"] is False
    (root / "source.py").write_text("")
    assert records.run_metadata()["git"]["dirty"] is True


def test_missing_or_mixed_results_say_what_to_do(root):
    with pytest.raises(FileNotFoundError, match="fmms run 10 --profile cpu"):
        records.load("10_exactness", "cpu")
    path = records.save("10_exactness", "cpu", ROWS)
    path.write_text("a\n1\n")
    with pytest.raises(ValueError, match="does not belong to"):
        records.load("10_exactness", "cpu")


def test_a_failed_save_changes_neither_file(root, monkeypatch):
    records.save("a", "cpu", ROWS)
    folder = root / "data" / "cpu"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(value):
        raise OSError("no space left on device")

    monkeypatch.setattr(records, "strict_json", fail)
    with pytest.raises(OSError, match="no space"):
        records.save("a", "cpu", ROWS[:1])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
