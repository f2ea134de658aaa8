"""Arguments of a launch, and what the error of one that was given up says."""

import pytest
import torch

from megakernel.config import TINY
from megakernel.graph import build
from megakernel.knobs import Knobs
from megakernel.launch import Deadlock, Launch, Worker
from megakernel.schedule import label


def checked(**changes):
    usual = dict(iterations=4, position=2, forced=[5, -1], temperature=0.5, seed=3, noise_position=-7, has_token=False)
    return Launch.of(TINY, 10, **{**usual, **changes})


def test_what_is_left_out_is_sampled():
    launch = checked()
    assert launch.forced.dtype == torch.int32 and launch.forced.tolist() == [5, -1, -1, -1]
    assert launch[:2] + launch[3:] == (4, 2, 0.5, 3, -7)
    assert checked(forced=None, has_token=True).forced.tolist() == [-1] * 4
    assert checked(forced=[], has_token=True).forced.tolist() == [-1] * 4
    assert checked(position=6).position == 6  # up to the last one


def test_a_launch_has_as_many_tokens_as_there_are_tags():
    settings = dict(position=0, forced=[5], temperature=0.0, seed=0, noise_position=0, has_token=False)
    assert Launch.of(TINY, 70_000, iterations=65_534, **settings).iterations == 65_534
    with pytest.raises(ValueError, match="iterations: expected at most 65534 in one launch, got 65535"):
        Launch.of(TINY, 70_000, iterations=65_535, **settings)


def test_temperature_is_what_fp32_holds():
    assert checked(temperature=0.1).temperature == torch.tensor(0.1).item()
    assert checked(temperature=1e-60).temperature == 0.0
    assert checked(temperature=float("inf")).temperature == float("inf")
    assert checked(temperature=-0.0).temperature == 0.0


def test_message_of_a_deadlock():
    graph = build(TINY, Knobs())
    states = [
        Worker("done", 3),
        Worker("waiting", 2, 9, 4, 1, 6, "streaming", 11),
        Worker("streaming", 2, 10),
        Worker("idle", 0),
        Worker("queue", 1),
    ]
    error = Deadlock(graph, iter(states), [Worker("waiting", 1, task, 2, 0, 1) for task in range(20, 30)])
    assert error.workers == states and len(error.tasks) == 10 and isinstance(error, RuntimeError)
    assert str(error).splitlines() == [
        "deadlock: 4 of 5 workers wait forever, and 10 tasks have not become ready",
        f"  worker 1: {label(graph, 9)} of token 2 waits for event 4 ({graph.events[4].name}) with value 1, "
        f"threshold 6; its producer is streaming at {label(graph, 11)}",
        f"  worker 2: {label(graph, 10)} of token 2, streaming",
        "  worker 3: no task, idle",
        "  worker 4: waits for a task that is ready",
        *(
            f"  {label(graph, task)} of token 1 waits for event 2 ({graph.events[2].name}) with value 0, threshold 1"
            for task in range(20, 28)
        ),
        "  and 2 more tasks",
    ]


@pytest.mark.parametrize("forced", [[600], [-2], [True], ["1"], torch.ones(1), torch.ones(1, dtype=torch.bool)])
def test_bad_ids(forced):
    with pytest.raises(ValueError, match=r"^forced: expected at most 4 token ids from 0 to 599"):
        checked(forced=forced)
