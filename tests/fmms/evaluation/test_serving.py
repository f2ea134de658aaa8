"""fmms.evaluation.serving: vLLM's logs as they are, broken ones included, and ratios within a trial only."""

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("scipy")

from fmms import notebooks, paths
from fmms.evaluation import naming, sample_logs, serving

DATA = Path(__file__).parent / "data"
SAMPLES = Path(__file__).resolve().parents[3] / "data" / "samples" / "serving"


def test_a_log_with_everything_that_logs_have():
    """data/interleaved.log (made up): start-up, a test request, three runs; engine lines before, in and after them, one
    in the middle of a progress bar; the second run stopped, the third with failures."""
    first, second, third = serving.parse((DATA / "interleaved.log").read_text())
    assert first.reason == ""
    assert first.result["median_tpot_ms"] == 10.11
    assert first.result["output_tok_s"] == 1422.22
    assert first.result["concurrency"] == 16
    assert first.arguments["model"] == "made-up/model, with a comma"
    assert first.arguments["num_prompts"] == "128"
    assert "temperature" not in first.arguments, "None is no value"
    assert [line["generation"] for line in first.engine] == [1500.0, 1600.5]
    assert first.engine[0] == {"prompt": 800.0, "generation": 1500.0, "running": 16, "waiting": 2, "kv": 12.5}
    assert second.reason == "the log has no result of this run: it was stopped or failed"
    assert len(second.engine) == 1
    assert third.reason == "3 requests failed"
    assert third.arguments["max_concurrency"] == "32"


def test_a_log_of_an_older_vllm():
    """data/older.log (made up): another spelling of total throughput, no failures or concurrency in the block."""
    (run,) = serving.parse((DATA / "older.log").read_text())
    assert run.reason == "3 requests failed", "told by the number asked for"
    assert run.result["total_tok_s"] == 5000.0
    row = serving._row(Path("trial_01/vllm.log"), 0, run)
    assert row["concurrency"] == 8
    assert row["engine_running"] is None


def test_a_log_that_ends_early():
    text = (DATA / "interleaved.log").read_text()
    cut = text[: text.index("Median TPOT")]
    (run,) = serving.parse(cut)
    assert run.reason == "the log ends before the result of this run"
    assert serving.parse("") == []


def test_implausible_results_do_not_count():
    text = (DATA / "interleaved.log").read_text()
    assert serving.parse(text.replace("10.11 ", "0.00 "))[0].reason == "its result has median_tpot_ms = 0"
    without = "\n".join(line for line in text.splitlines() if "TPOT" not in line)
    assert serving.parse(without)[0].reason == "its result has no time per output token"


def test_rows_of_a_folder(tmp_path):
    rows = serving.read(sample_logs.write(tmp_path, trials=2))
    assert len(rows) == 2 * len(sample_logs.SYSTEMS) * len(sample_logs.CONCURRENCIES)
    assert all(tuple(row) == serving.COLUMNS for row in rows)
    assert {row["trial"] for row in rows} == {"trial_01", "trial_02"}
    assert all(row["engine_lines"] and row["reason"] == "" for row in rows)
    assert all(row["engine_generation_tok_s"] == pytest.approx(row["output_tok_s"], rel=0.1) for row in rows)
    assert serving.about(tmp_path)["made_up"] is True
    assert serving.read(tmp_path / "none") == []
    assert serving.about(tmp_path / "none") == {}


def test_a_log_without_runs_is_named(tmp_path):
    (tmp_path / "trial_01").mkdir()
    (tmp_path / "trial_01" / "vllm.log").write_text("INFO starting\n")
    with pytest.raises(ValueError, match=r"trial_01/vllm\.log holds no benchmark run"):
        serving.read(tmp_path)
    (tmp_path / "run.json").write_text("[1]")
    with pytest.raises(ValueError, match="object"):
        serving.about(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match="no JSON"):
        serving.about(tmp_path)


def test_the_known_speedup_is_found(tmp_path):
    """The sample logs' rule is known. With 12 trials all four 95 % intervals hold it at this seed (false-alarm rate for
    another seed: at most 4 x 7 %), and machine states three times the noise don't widen them."""
    rows = serving.read(sample_logs.write(tmp_path, trials=12, noise=0.01, seed=1))
    found = serving.speedups(serving.ratios(rows, "sample-a"))
    assert len(found) == len(sample_logs.CONCURRENCIES)
    for row in found:
        true = sample_logs.tpot("sample-a", row["concurrency"]) / sample_logs.tpot("sample-b", row["concurrency"])
        assert row["low"] <= true <= row["high"]
        assert row["high"] - row["low"] < 0.03
        assert (row["n"], row["system"]) == (12, "sample-b")
    back = serving.speedups(serving.ratios(rows, "sample-b"))
    assert [1 / row["speedup"] for row in back] == pytest.approx([row["speedup"] for row in found])
    rates = serving.speedups(serving.ratios(rows, "sample-a", "output_tok_s"))
    assert rates[0]["speedup"] == pytest.approx(found[0]["speedup"], rel=0.01), "faster is above 1 for a rate too"


def row(trial, system, tpot, concurrency=8.0, reason="", **more):
    return {**dict.fromkeys(serving.COLUMNS), "trial": trial, "system": system, "concurrency": concurrency} | {
        "median_tpot_ms": tpot,
        "reason": reason,
        **more,
    }


def test_ratios_never_cross_trials():
    rows = [row("t1", "a", 10), row("t1", "b", 5), row("t2", "a", 30), row("t3", "b", 1), row("t4", "a", 8)]
    rows += [row("t4", "b", 2, reason="3 requests failed"), row("t5", "a", 6), row("t5", "b", 3, concurrency=16.0)]
    assert [(one["trial"], one["ratio"]) for one in serving.ratios(rows, "a")] == [("t1", 2.0)]
    (found,) = serving.speedups(serving.ratios(rows, "a"))
    assert (found["n"], found["speedup"]) == (1, pytest.approx(2))
    assert math.isnan(found["low"]), "one trial has no interval"


def test_runs_of_a_trial_are_no_trials():
    rows = [row("t1", "a", 10), row("t1", "a", 12), row("t1", "b", 5), row("t1", "b", 6)]
    (found,) = serving.speedups(serving.ratios(rows, "a"))
    assert (found["n"], found["speedup"]) == (1, pytest.approx(2))
    assert {one["n"] for one in serving.summary(rows, ["median_tpot_ms"])} == {1}


def test_unequal_work_is_refused():
    rows = [row("t1", "a", 10, random_output_len="128"), row("t1", "b", 5, random_output_len="64")]
    with pytest.raises(ValueError, match="random_output_len = 128 and b with 64"):
        serving.ratios(rows, "a")
    rows[1]["random_output_len"] = 128.0  # as a CSV gives it back
    assert serving.ratios(rows, "a")
    with pytest.raises(ValueError, match="systems with finished runs: a, b"):
        serving.ratios(rows, "c")
    with pytest.raises(ValueError, match="metric"):
        serving.ratios(rows, "a", "p99_ttft_ms")
    assert serving.ratios([], "a") == []


def test_faults_are_listed():
    rows = [row("t1", "a", 10), row("t1", "b", 5, reason="3 requests failed")]
    assert serving.faults(rows) == [{"trial": "t1", "system": "b", "concurrency": 8.0, "reason": "3 requests failed"}]


def test_the_samples_are_marked_as_made_up():
    assert json.loads((SAMPLES / "run.json").read_text())["made_up"] is True
    assert "Made up" in (SAMPLES / "README.md").read_text()
    for path in SAMPLES.glob("*/*.log"):
        assert "made up" in naming.paper(path.stem)
        assert all(not run.reason for run in serving.parse(path.read_text()))


def test_the_notebooks_folders_and_baselines(monkeypatch):
    root = Path(__file__).resolve().parents[3]
    monkeypatch.setenv("FMMS_ROOT", str(root))
    pytest.importorskip("papermill")
    (path,) = notebooks.find(["19"])
    given = notebooks.job(path, "cpu").parameters
    assert serving.folder(given["logs"]) == SAMPLES == paths.project_root() / given["logs"]
    assert given["baseline"] in sample_logs.SYSTEMS
    assert notebooks.job(path, "h200").parameters["baseline"] in naming.LOOKS


def test_figures(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    pytest.importorskip("pandas")
    from fmms.bench import records
    from fmms.evaluation import serving_figures

    monkeypatch.setenv("FMMS_ROOT", str(tmp_path))
    rows = serving.read(sample_logs.write(tmp_path / "logs", trials=3))
    ratios = serving.ratios(rows, "sample-a")
    about = {"gpu": "NVIDIA H200", "vllm": "0.20.2"}
    for profile, said in (("cpu", {"made_up": True}), ("h200", about), ("other", {})):
        records.save("19_serving", profile, rows, serving.COLUMNS, about=said)
        records.save("19_serving_summary", profile, serving.summary(rows))
        records.save("19_serving_ratios", profile, ratios)
        records.save("19_serving_speedups", profile, serving.speedups(ratios))
        for draw in (serving_figures.load, serving_figures.speedup):
            figure = draw(profile)
            assert figure.svg.is_file()
            assert ("made up" in figure.title) == (profile == "cpu")
            assert "n = 3 trials" in figure.caption
            expected = {"cpu": "Sample logs, made up", "h200": "NVIDIA H200, vllm 0.20.2.", "other": "not stated"}
            assert expected[profile] in figure.caption


def test_what_to_run_without_logs():
    pytest.importorskip("IPython")
    from fmms.evaluation import serving_figures

    shown = serving_figures.how("data/logs/x & y", "h200").data
    assert "LOGS=data/logs/x &amp; y;" in shown
    assert "vllm bench serve" in shown
    assert "fmms run 19 --profile h200 --force" in shown
    assert "{{" not in serving.how("x"), "doubled braces are Python's, not the shell's"
