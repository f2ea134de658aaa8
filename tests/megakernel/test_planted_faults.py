"""Planted faults of each kind: the validator names every one, in every preset, and the sound graph stays as it was."""

import dataclasses

import pytest

from megakernel.config import TINY
from megakernel.faults import FAULTS, event_after, find_op, find_task, moved_count, moved_wait, rewired, shifted_read
from megakernel.graph import build
from megakernel.knobs import PRESETS
from megakernel.validate import InvalidGraph, validate

TILES = dict(qkv_rows=16, gemv_rows=16, lm_head_rows=32, attn_rows=32, tokens=100, expert_w2_tiles=3, workers=9)


@pytest.fixture(scope="module", params=PRESETS)
def graph(request):
    return build(TINY, dataclasses.replace(PRESETS[request.param], **TILES))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_named(graph, fault):
    for layer in range(TINY.first_k_dense_replace, TINY.num_hidden_layers):
        wrong = fault.plant(graph, layer)
        assert wrong != graph
        with pytest.raises(InvalidGraph) as caught:
            validate(wrong, routings=0)
        assert all(words in str(caught.value) for words in fault.named), str(caught.value)
    validate(graph, routings=0)


def test_faults_have_names_of_their_own():
    assert len({fault.name for fault in FAULTS}) == len({fault.planted for fault in FAULTS}) == len(FAULTS)


def test_rewiring_without_a_change_changes_nothing(graph):
    assert rewired(graph, {}) == graph


def test_moved_edges(graph):
    task, other = find_task(graph, "O_PROJ_RESIDUAL", 1), event_after(graph, "ATTN_CHUNK", 2)
    waiting = moved_wait(graph, task.index, other.index)
    assert waiting.waits[task.index] == (other.index,)
    assert waiting.events[other.index].consumers == (*other.consumers, task.index)
    assert moved_wait(graph, task.index, None).waits[task.index] == ()
    assert moved_wait(waiting, task.index, other.index) == waiting
    counting = moved_count(graph, task.index, other.index)
    assert counting.triggers[task.index] == (other.index,)
    assert counting.events[other.index].threshold == other.threshold + 1
    assert counting.waits == graph.waits


def test_shares_of_columns_shift_by_columns(graph):
    task = find_task(graph, "DOWN_SPLITK", 0)
    moved = shifted_read(graph, task.index, 1).tasks[task.index]
    assert [part.rows for part in moved.reads] == [part.rows for part in task.reads]
    assert moved.reads[1].cols == (task.reads[1].cols[0] + 1, task.reads[1].cols[1])


def test_places_that_do_not_exist(graph):
    with pytest.raises(KeyError, match="no op GATE_UP_SILU in layer 1"):
        find_op(graph, "GATE_UP_SILU", 1)
    with pytest.raises(KeyError, match="no op NOTHING"):
        find_task(graph, "NOTHING")
    with pytest.raises(IndexError):
        find_task(graph, graph.router(1).name, 1, 1)
