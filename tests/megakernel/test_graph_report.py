"""Rows about the task graph: counts that add up, the published table, planted faults, balance, and one layer."""

import collections
import csv
import dataclasses
import shutil

import pytest

from fmms import paths
from megakernel.bench import graph_balance, graph_report
from megakernel.config import TINY, V2_LITE
from megakernel.graph import build
from megakernel.knobs import PRESETS, Knobs
from megakernel.schedule import static

TILES = dict(qkv_rows=16, gemv_rows=16, lm_head_rows=32, attn_rows=32, tokens=100, expert_w2_tiles=3, workers=9)


def tiny(preset, **changes):
    return build(TINY, dataclasses.replace(PRESETS[preset], **{**TILES, **changes}))


@pytest.fixture(scope="module", params=PRESETS)
def preset(request):
    return request.param


@pytest.fixture(scope="module")
def graph(preset):
    return tiny(preset)


@pytest.fixture(scope="module")
def published():
    """Rows of the real graph that was published."""
    return graph_report.count(build(V2_LITE, PRESETS["mi300x"]), "mi300x")


# -------------------------------------------------------------------------------------------------------------- sizes


def test_counts_add_up(graph, preset):
    *types, control, total = graph_report.count(graph, preset)
    assert total["ops"] == sum(row["ops"] for row in types) == len(graph.ops)
    assert total["tasks"] == sum(row["tasks"] for row in types) + control["tasks"] == len(graph.tasks)
    # an event with producers of two types is in both rows, and in no row more than once
    twice = sum(row["shared_events"] for row in types) - total["shared_events"]
    assert total["events"] == sum(row["events"] for row in (*types, control)) - twice == len(graph.events)
    cache = sum(graph.task_bytes(task, ("cache",)) for task in graph.tasks)
    assert total["read_mb"] * 1e6 == pytest.approx(graph.token_bytes() + cache)
    assert {name: row["tasks"] for row in types for name in [row["task_type"]]} == {
        name: tasks for name, tasks in graph.tasks_by_type().items() if name not in control["graph_ops"]
    }


def test_knobs_are_read_from_words():
    assert graph_report.changed("h200") == PRESETS["h200"]
    knobs = graph_report.changed("mi300x", "tokens 2048, fold_norm False,experts slots")
    assert knobs == Knobs(tokens=2048, fold_norm=False, experts="slots")
    for preset, change, message in (
        ("b200", "", r"^preset must be one of mi300x, .* not 'b200'"),
        ("h200", "token 5", r"^'token 5': there is no knob 'token'"),
        ("h200", "tokens", r"^tokens must be a positive integer, not ''"),
        ("h200", "tokens 0", r"^tokens must be a positive integer, not 0"),
        ("h200", "tokens -1", r"^tokens must be a positive integer, not '-1'"),
        ("h200", "fold_norm 1", r"^fold_norm must be True or False, not '1'"),
        ("h200", "mla none", r"^mla must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            graph_report.changed(preset, change)


def test_changes_name_the_types_that_move(published):
    changes = ["tokens 2048", "lm_head_rows 64"]
    base, longer, smaller = graph_report.by_change(published + graph_report.count_changes(V2_LITE, "mi300x", changes))
    assert (base["ops"], base["events"], base["tasks"], base["more_tasks"]) == (298, 347, 20494, 0)
    assert (longer["more_tasks"], longer["types"]) == (27 * 16 * (16 - 9), "attn_chunk_192_128 +3,024")
    assert (smaller["more_tasks"], smaller["types"]) == (1400, "gemv_bf16 +1,400")
    assert smaller["events"] == 347 and smaller["read_mb"] == pytest.approx(base["read_mb"])


def test_types_that_appear_and_vanish():
    rows = [*graph_report.count(tiny("mi300x"), "mi300x"), *graph_report.count(tiny("h200"), "mi300x", "mla absorbed")]
    _, absorbed = graph_report.by_change(rows)
    moved = dict(part.split() for part in absorbed["types"].split("; "))
    assert {moved["attn_chunk_24_16"][0], moved["attn_chunk_40_32"][0]} == {"-", "+"}
    assert sum(int(by) for by in moved.values()) == absorbed["more_tasks"]


def test_table_of_types(published):
    pytest.importorskip("pandas")
    rows = [*published, *graph_report.count(tiny("h200"), "h200"), *graph_report.count(tiny("h200"), "h200", "changed")]
    frame = graph_report.by_type(rows).set_index("task type")
    assert list(frame.index[-2:]) == [graph_report.CONTROL, graph_report.TOTAL]
    assert frame.loc["total", "mi300x: tasks"] == 20494
    assert frame.loc["total", "h200: tasks"] == rows[-1]["tasks"]
    assert frame.loc["gemv_bf16_silu", "ops of this type"] == "GATE_UP_SILU; EXPERT_W13_SHARED"


# ---------------------------------------------------------------------------------------------------------- published


def test_published_graphs_are_built(published):
    types, sizes = graph_report.published_types(published), graph_report.published_sizes(V2_LITE)
    graph_report.require_published(types, sizes)
    assert [(row["ops"], row["tasks"]) for row in types if row["name"] == "total"] == [(298, 20494)]
    assert [row["events"] for row in sizes] == [347, 403, 430, 350]
    assert sizes[1]["published_tasks"] is None and sizes[1]["tasks"] == 20981


def test_another_graph_is_not_the_published_one(published):
    other = [dict(row) for row in published]
    moved = next(row for row in other if row["task_type"] == "gemv_bf16")
    moved["tasks"] += 1
    other = [row for row in other if row["task_type"] != "moe_gate_topk"]
    other.insert(0, {**other[0], "task_type": "rms_norm"})
    table = graph_report.published_types(other)
    assert {row["name"] for row in table if not row["equal"]} == {"gemv_bf16", "moe_gate_topk", "rms_norm"}
    with pytest.raises(AssertionError, match=r"not the published one:\n- .*gemv_bf16.*4300.*4299"):
        graph_report.require_published(table)


def test_a_changed_published_number_is_noticed(published, tmp_path, monkeypatch):
    """Nothing is read back from the file that it is compared with."""
    (tmp_path / "data").mkdir()
    shutil.copytree(paths.reference_dir(), tmp_path / "data" / "reference")
    file = tmp_path / "data" / "reference" / graph_report.PUBLISHED_TYPES
    file.write_text(file.read_text(encoding="utf-8").replace("298,20494", "299,20494"), encoding="utf-8")
    monkeypatch.setenv("FMMS_ROOT", str(tmp_path))
    (wrong,) = [row for row in graph_report.published_types(published) if not row["equal"]]
    assert (wrong["name"], wrong["ops"], wrong["published_ops"]) == ("total", 298, 299)


def test_the_two_published_files_agree():
    with open(paths.reference_dir() / graph_report.PUBLISHED_TYPES, newline="", encoding="utf-8") as file:
        total = list(csv.DictReader(file))[-1]
    with open(paths.reference_dir() / graph_report.PUBLISHED_SIZES, newline="", encoding="utf-8") as file:
        final = next(csv.DictReader(file))
    assert (total["ops_per_token"], total["tasks_per_token"]) == (final["ops"], final["tasks"])


# -------------------------------------------------------------------------------------------------------------- proof


def test_proof_and_planted_faults(graph, preset):
    proof = graph_report.prove(graph, preset, routings=1)
    assert (proof["tasks"], proof["events"], proof["routings"]) == (len(graph.tasks), len(graph.events), 1)
    assert proof["seconds"] > 0
    rows = graph_report.plant(graph, preset, 1)
    graph_report.require_rejected(rows)
    shows = {row["fault"]: row["a_run_shows"] for row in rows}
    assert shows["cycle"] == shows["threshold too high"] == "it never ends"
    assert shows["threshold too low"] == "a counter past its threshold"
    assert shows["two unordered writers"] == shows["matrix byte read twice"] == "nothing"


def test_accepted_faults_are_listed(graph, preset, monkeypatch):
    monkeypatch.setattr(graph_report, "validate", lambda graph, seed: None)
    rows = graph_report.plant(graph, preset, 2)
    assert not any(row["rejected"] or row["named"] for row in rows)
    with pytest.raises(AssertionError, match=rf"did not find:\n- {preset}, edge missing on one side: accepted\n"):
        graph_report.require_rejected(rows)


# ------------------------------------------------------------------------------------------------------------ balance


@pytest.mark.parametrize("workers", [1, 7, 2000])
def test_balance_adds_up(graph, preset, workers):
    by_worker, by_level = graph_balance.balance(graph, preset, workers, 3, 0)
    read = graph.token_bytes() + sum(graph.task_bytes(task, ("cache",)) for task in graph.tasks)
    for schedule in graph_balance.SCHEDULES:
        each = [row["mb"] for row in by_worker if row["schedule"] == schedule]
        levels = [row for row in by_level if row["schedule"] == schedule]
        assert len(each) == workers and each == sorted(each)
        assert sum(each) * 1e6 == pytest.approx(read)
        assert sum(row["even_mb"] for row in levels) * workers * 1e6 == pytest.approx(read)
        assert sum(row["tasks"] for row in levels) == len(graph.tasks)
        for row in levels:
            lowest = max(row["even_mb"], row["task_mb"])
            assert lowest <= row["busiest_mb"] * (1 + 1e-9) <= row["even_mb"] * workers * (1 + 2e-9)
            assert workers < 2000 or row["busiest_mb"] == pytest.approx(row["task_mb"])
    for row in graph_balance.summary(by_worker, by_level):
        assert row["min_mb"] <= row["mean_mb"] <= row["max_mb"]
        assert 1 - 1e-9 <= row["max_over_mean"] <= row["levels_over_mean"] + 1e-9
        assert workers > 1 or row["levels_over_mean"] == pytest.approx(1)


def test_balance_is_that_of_tokens_not_of_a_mean_token():
    """Two workers, one expert each: a mean token would make them even, a token that chose one expert does not."""
    config = dataclasses.replace(TINY, n_routed_experts=2, num_experts_per_tok=1)
    graph = build(config, Knobs(expert_w13_tiles=1, expert_w2_tiles=1, tokens=1))
    _, by_level = graph_balance.balance(graph, "mi300x", 2, 4, 0)
    expert = next(row for row in by_level if row["ops"] == "EXPERT_W2" and row["schedule"] == "static")
    assert expert["busiest_mb"] == pytest.approx(2 * expert["even_mb"])
    mean = static(graph, 2).balance()
    assert mean.max < 1.2 * mean.mean


def test_routings_are_drawn_from_the_seed(graph, preset):
    first, second = (graph_balance.choices(graph, 3, seed) for seed in (0, 1))
    assert first == graph_balance.choices(graph, 3, 0) != second
    assert [*first[0]] == [1, 2] and {len(experts) for choice in first for experts in choice.values()} == {3}
    assert graph_balance.balance(graph, preset, 5, 2, 0) == graph_balance.balance(graph, preset, 5, 2, 0)
    for routings in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="routings must be a positive integer"):
            graph_balance.balance(graph, preset, 5, routings, 0)


def test_reading_takes_each_presets_own_workers():
    row = dict(schedule="static", min_mb=1, mean_mb=2, max_mb=3, max_over_mean=1.5, levels_over_mean=2.04)
    rows = [{**row, "preset": preset, "workers": n} for preset in ("mi300x", "h200") for n in (132, 296)]
    text = graph_balance.reading(rows)
    assert "mi300x on 296 workers" in text and "h200 on 132 workers" in text and text.count("1.50 times") == 2
    assert "h200 on 7 workers" in graph_balance.reading([{**row, "preset": "h200", "workers": 7}])


# -------------------------------------------------------------------------------------------------------------- layer


def test_layer_has_its_ops_and_events(graph, preset):
    for layer in range(TINY.num_hidden_layers):
        rows = graph_report.layer_rows(graph, preset, layer)
        ops = {row["name"]: row for row in rows if row["item"] == "op"}
        events = [row for row in rows if row["item"] == "event"]
        of_layer = [op for op in graph.ops if op.layer == layer]
        assert collections.Counter(name.split(" #")[0] for name in ops) == collections.Counter(
            op.name for op in of_layer
        )
        assert sum(row["tasks"] for row in ops.values()) == sum(len(op.tasks) for op in of_layer)
        assert {row["depth"] for row in ops.values()} == set(range(1, 1 + max(row["depth"] for row in ops.values())))
        for event in events:
            sides = [event[side].split("; ") if event[side] else [] for side in ("producers", "consumers")]
            for before in sides[0]:
                assert all(ops[before]["depth"] < ops[after]["depth"] for after in sides[1])
            if "from" not in event["outside"]:
                assert event["threshold"] == sum(ops[name]["tasks"] for name in sides[0])
        assert [event["outside"] for event in events if event["outside"]] == ["from", "to"]
        chain = [row["depth"] for row in ops.values() if row["critical"]]
        assert sorted(chain) == list(range(1, 1 + max(row["depth"] for row in ops.values())))


def test_unknown_layer(graph, preset):
    for layer in (-1, TINY.num_hidden_layers):
        with pytest.raises(ValueError, match=rf"^layer must be in \[0, 3\), not {layer}"):
            graph_report.layer_rows(graph, preset, layer)
