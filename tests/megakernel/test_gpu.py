"""The device code on a GPU: against the interpreter, the same in every way that it can be launched, and when it can't
go on. Elsewhere only the calls for compute-sanitizer are run, by the host build."""

import dataclasses
import functools
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sanitizer_calls_megakernel
import torch
from faulty import idle
from sanitizer_calls_megakernel import shared_build, target
from variants import SMALL, VARIANTS

from fmms.reference import sample_from_logits
from megakernel import DecodeEngine, graph, reference, vm
from megakernel import weights as weights_of
from megakernel.config import TINY
from megakernel.knobs import PRESETS, Knobs
from megakernel.launch import Deadlock
from megakernel.memory import Memory
from megakernel.native import Native
from megakernel.schedule import static
from megakernel.table import pack

CALLS = Path(__file__).with_name("sanitizer_calls_megakernel.py")
FORCED = [5, 17, 200]
LENGTH = 269
"""Positions before the one that the tests of attention decode: several tiles of each size, the last of them partial."""
ATTENTION = [
    dict(tokens=LENGTH + 1, attn_rows=rows, attn_heads=4 if mla == "absorbed" else 1, mla=mla)
    for mla in ("decompressed", "absorbed")
    for rows in (1, 16, 64, 128, 256)
]
FINE = dict(
    qkv_rows=1, gemv_rows=1, lm_head_rows=2, dense_rows=1, shared_rows=1, expert_w13_tiles=1000, expert_w2_tiles=1000,
    attn_rows=1, absorb_rows=1, splits=8, argmax_partials=100, tokens=16,
)  # fmt: skip
"""Tiles of a row each: as many events and as little work between them as there can be."""
FINE_VARIANTS = (FINE, FINE | dict(mla="absorbed", experts="slots", attn_heads=1))
DRIVER_SLACK = 64 << 20
"""Bytes of device memory that the driver may take between two looks at it. PyTorch's own count, which has to stay the
same, sees every tensor; this is for what a launch or a build might take from the driver itself."""
ALONE = "PYTEST_XDIST_WORKER" not in os.environ
"""Whether no other process of these tests takes and frees device memory."""


def _why_not() -> str:
    if not torch.cuda.is_available():
        return "needs a GPU"
    if torch.version.hip:
        return ""
    from torch.utils.cpp_extension import CUDA_HOME

    if torch.cuda.get_device_capability() != (9, 0):
        return "needs a GPU of compute capability 9.0"
    return "" if CUDA_HOME else "needs nvcc, part of NVIDIA's CUDA toolkit"


on_gpu = [pytest.mark.gpu, pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "runs")]


def gpu(test):
    """A test that needs a GPU that the device code is built for."""
    return functools.reduce(lambda marked, mark: mark(marked), on_gpu, test)


def all_workers() -> int:
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count


DEVICE = torch.device("cuda")


def table_of(knobs, queue=False, workers=None):
    tasks = graph.build(TINY, knobs)
    workers = workers or all_workers()
    return pack(tasks, workers=workers) if queue else pack(tasks, static(tasks, workers))


@functools.cache
def config():
    """The one build of all these tests but the sanitizers'."""
    chosen = [*(Knobs(**SMALL | changes) for changes in (*VARIANTS, *ATTENTION, *FINE_VARIANTS)), *PRESETS.values()]
    made = [table_of(dataclasses.replace(one, tokens=max(one.tokens, 300)), workers=1) for one in chosen]
    return shared_build(made, "host" if DEVICE.type == "cpu" else target())


@pytest.fixture(scope="module")
def weights():
    return weights_of.random(TINY, 3)  # its routing and its decode have no near-tie


@pytest.fixture(scope="module")
def on_device(weights):
    return {name: tensor.to(DEVICE) for name, tensor in weights.items()}


@pytest.fixture(scope="module")
def prompt(weights):
    """A text of LENGTH + 1 tokens, and the reference's cache of all but its last.

    In what is decoded from there, the router's margins are 0.12 or more: far from a near-tie.
    """
    ids = torch.randint(TINY.vocab_size, (LENGTH + 1,), generator=torch.Generator().manual_seed(6)).tolist()
    return ids, reference.prefill(weights, TINY, ids[:-1])[1]


def launcher_of(table, on_device, cache=None) -> Native:
    memory = Memory.of(table, on_device)
    if cache is not None:
        memory.load_cache(cache)
    return Native(table, memory, config())


def assert_close(found, expected, share=0.02):
    found, expected = found.double().cpu().flatten(), expected.double().cpu().flatten()
    assert found.isfinite().all()
    assert (found - expected).abs().max() <= share * expected.abs().max() + 1e-3
    assert torch.cosine_similarity(found, expected, 0) >= 0.9995


def assert_same(one, other):
    """Bit for bit: logits and tokens of two results."""
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.logits.view(torch.int32), other.logits.view(torch.int32))


def assert_follows_vm(table, weights, on_device, cache=None, **launch):
    """A launch against the interpreter's: logits and tokens, rows of the cache, experts."""
    memory = Memory.of(table, weights)
    if cache is not None:
        memory.load_cache(cache)
    expected = vm.run(table, memory, trace=True, **launch)
    launcher = launcher_of(table, on_device, cache)
    found = launcher.run(trace=True, **launch)
    assert_close(found.logits, expected.logits)
    top = expected.logits.topk(2).values
    near = (top[:, 0] - top[:, 1]) < 0.1
    assert ((found.tokens.cpu() == expected.tokens) | near).all()
    end = launch["position"] + launch["iterations"]
    for layer in range(TINY.num_hidden_layers):
        for name in table.place.cache:
            if name.startswith(f"layers.{layer}."):
                assert_close(launcher.memory.tensor(name)[:end], memory.tensor(name)[:end])
        if TINY.is_moe(layer):
            assert torch.equal(launcher.memory.routing(layer).ids.cpu(), memory.routing(layer).ids)


# ------------------------------------------------------------------------------------------------- what is computed


@gpu
@pytest.mark.parametrize("queue", [False, True], ids=["lists", "queue"])
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_follow_the_interpreter(preset, queue, weights, on_device, prompt):
    ids, cache = prompt
    table = table_of(dataclasses.replace(PRESETS[preset], tokens=LENGTH + 3), queue)
    assert_follows_vm(
        table, weights, on_device, cache, iterations=3, position=LENGTH, forced=[ids[-1], *FORCED[:2]]
    )  # fmt: skip


@gpu
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_every_knob_follows_the_interpreter(changes, weights, on_device):
    knobs = Knobs(**SMALL | changes)
    count = min(len(FORCED), knobs.tokens)
    for queue in (False, True):
        assert_follows_vm(
            table_of(knobs, queue), weights, on_device, iterations=count, position=0, forced=FORCED[:count]
        )


@gpu
@pytest.mark.parametrize("changes", ATTENTION, ids=str)
def test_tiles_of_attention_follow_the_interpreter(changes, weights, on_device, prompt):
    ids, cache = prompt
    for queue in (False, True):
        table = table_of(Knobs(**SMALL | changes), queue)
        assert_follows_vm(table, weights, on_device, cache, iterations=1, position=LENGTH, forced=ids[-1:])


@gpu
@pytest.mark.parametrize("queue", [False, True], ids=["lists", "queue"])
def test_sampled_tokens_are_those_that_fmms_draws_from_the_same_logits(queue, on_device):
    table = table_of(dataclasses.replace(PRESETS["h200"], tokens=72), queue)
    count, seed = 64, 11
    settings = dict(iterations=count, position=0, forced=FORCED, temperature=6.0, seed=seed, noise_position=4)
    found = launcher_of(table, on_device).run(trace=True, **settings)
    heat, seeds = torch.full((count,), 6.0), torch.full((count,), seed)
    drawn, _ = sample_from_logits(found.logits.cpu(), heat, seeds, torch.arange(4, 4 + count))[:2]
    assert torch.equal(found.tokens.cpu().long(), drawn[:, 0])
    assert len(set(found.tokens.tolist())) > count / 2, "a decode that repeats itself would prove little"


# ------------------------------------------------------------------------------------------------ the same every time


@gpu
@pytest.mark.parametrize("queue", [False, True], ids=["lists", "queue"])
def test_200_launches_are_the_same_bit_for_bit(queue, on_device):
    table = table_of(dataclasses.replace(PRESETS["h200"], tokens=16), queue)
    launcher = launcher_of(table, on_device)
    settings = dict(iterations=4, position=0, forced=FORCED, temperature=0.7, seed=1, trace=True)
    first = launcher.run(**settings)
    cache = launcher.memory.cache.clone()
    for _ in range(199):
        launcher.memory.reset()
        assert_same(launcher.run(**settings), first)
        assert torch.equal(launcher.memory.cache, cache)


@gpu
@pytest.mark.parametrize("queue", [False, True], ids=["lists", "queue"])
@pytest.mark.parametrize("preset", PRESETS)
def test_the_number_of_workers_changes_nothing(preset, queue, on_device):
    knobs = dataclasses.replace(PRESETS[preset], tokens=16)
    settings = dict(iterations=6, position=0, forced=FORCED, trace=True)
    results = [
        launcher_of(table_of(knobs, queue, workers), on_device).run(**settings) for workers in (1, 7, all_workers())
    ]
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@gpu
@pytest.mark.parametrize("queue", [False, True], ids=["lists", "queue"])
@pytest.mark.parametrize("changes", FINE_VARIANTS, ids=["decompressed", "absorbed"])
def test_what_a_task_writes_is_what_its_readers_read(changes, queue, on_device):
    """2,000 launches of tasks of a row each on all multiprocessors, against one worker, which needs no other's writes.

    A write that a reader misses now and then changes bits: the activations that it would read instead are those of the
    launch before, which read another token.
    """
    knobs = Knobs(**SMALL | changes)
    texts = [[5], [200]]
    alone = launcher_of(table_of(knobs, workers=1), on_device)
    expected = [alone.run(iterations=1, position=0, forced=text, trace=True) for text in texts]
    assert not torch.equal(expected[0].logits, expected[1].logits)
    launcher = launcher_of(table_of(knobs, queue), on_device)
    for number in range(2000):
        found = launcher.run(iterations=1, position=0, forced=texts[number % 2], trace=True)
        assert torch.equal(found.logits, expected[number % 2].logits), f"launch {number}"
    # and without the end of a launch between tokens
    settings = dict(iterations=12, position=0, forced=FORCED, trace=True)
    expected = alone.run(**settings)
    for _ in range(100):
        assert_same(launcher.run(**settings), expected)


@gpu
def test_launches_from_another_thread_and_on_another_stream(on_device):
    launcher = launcher_of(table_of(dataclasses.replace(PRESETS["h200"], tokens=16)), on_device)
    settings = dict(iterations=4, position=0, forced=FORCED, trace=True)
    expected = launcher.run(**settings)
    found = []

    def launch(stream):
        with torch.cuda.stream(stream):
            found.append(launcher.run(**settings))

    for stream in (torch.cuda.default_stream(DEVICE), torch.cuda.Stream(DEVICE)):
        launch(stream)
        thread = threading.Thread(target=launch, args=(stream,))
        thread.start()
        thread.join()
    assert len(found) == 4
    for result in found:
        assert_same(result, expected)


# ------------------------------------------------------------------------------------------------------------- failures


@gpu
@pytest.mark.parametrize("queue", [False, True], ids=["lists", "queue"])
@pytest.mark.parametrize("workers", [4, None], ids=["4 workers", "all"])
@pytest.mark.parametrize("experts", ["slots", "superset"])
def test_a_deadlock_ends_with_the_state_of_every_worker(experts, queue, workers, on_device):
    table = table_of(Knobs(**SMALL, experts=experts), queue, workers)
    event = next(event for event in table.graph.events if event.name == "1.MOE_GATE_TOPK")
    settings = dict(iterations=2, position=0, forced=FORCED[:2])
    broken = launcher_of(idle(table, event.producers), on_device)
    with pytest.raises(Deadlock) as caught:
        broken.run(spin_budget=100_000, **settings)
    states = caught.value.workers
    assert len(states) == table.workers
    assert all(worker.state in ("queue", "waiting", "streaming", "done") for worker in states)
    if queue:
        assert any(worker.state == "queue" for worker in states)
    elif experts == "superset":  # whether an expert is chosen is the producer's to know
        assert any(worker.producer_state == "routing" for worker in states)
    else:
        waiting = [worker for worker in states if worker.event == event.index]
        assert waiting
        assert all((worker.value, worker.threshold) == (0, 1) for worker in waiting)
        assert f"event {event.index} (1.MOE_GATE_TOPK) with value 0, threshold 1" in str(caught.value)
    # the same launcher gives up again, and the process can launch what is right
    with pytest.raises(Deadlock):
        broken.run(spin_budget=100_000, **settings)
    one = launcher_of(table, on_device).run(trace=True, **settings)
    assert_same(launcher_of(table_of(Knobs(**SMALL), workers=1), on_device).run(trace=True, **settings), one)


@gpu
def test_an_engine_goes_on_after_a_launch_that_was_given_up(on_device):
    engine = DecodeEngine(TINY, on_device, capacity=60, build_config=config())
    engine.prefill(FORCED)
    expected = engine.decode(8).tokens
    engine.prefill(FORCED)
    with pytest.raises(Deadlock, match="workers wait forever"):
        engine.decode(4, spin_budget=0)
    engine.prefill(FORCED)
    assert torch.equal(engine.decode(8).tokens, expected)


@gpu
def test_more_workers_than_fit_are_refused(on_device):
    table = table_of(Knobs(**SMALL), workers=33 * all_workers())  # no GPU has more than 32 blocks on a multiprocessor
    with pytest.raises(ValueError, match=r"workers: at most \d+ blocks fit .* would wait for itself"):
        Native(table, Memory.of(table, on_device), config())


def memory_in_use() -> tuple[int, int]:
    """Bytes that PyTorch's tensors take, and bytes of the device that nobody has."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(DEVICE), torch.cuda.mem_get_info(DEVICE)[0]


@gpu
def test_1000_launches_leave_no_memory_behind(on_device):
    launcher = launcher_of(table_of(dataclasses.replace(PRESETS["h200"], tokens=16)), on_device)

    def launches(count):
        for number in range(count):
            launcher.run(iterations=2, position=0, forced=FORCED[:2], trace=number % 2 > 0)

    launches(3)
    allocated, free = memory_in_use()
    launches(1000)
    now, left = memory_in_use()
    assert now == allocated
    assert free - left <= DRIVER_SLACK or not ALONE


@gpu
def test_50_engines_one_after_another_leave_no_memory_behind(on_device):
    def decode():
        engine = DecodeEngine(TINY, on_device, capacity=60, build_config=config())
        engine.prefill(FORCED)
        return engine.decode(4).tokens.cpu()

    expected = decode()
    allocated, free = memory_in_use()
    for _ in range(50):
        assert torch.equal(decode(), expected)
    now, left = memory_in_use()
    assert now == allocated
    assert free - left <= DRIVER_SLACK or not ALONE


# ----------------------------------------------------------------------------------------------------------- sanitizers


def test_the_calls_for_the_sanitizers():
    """They decode valid tokens without one; on a CPU, by the host build, those of one preset are enough."""
    if _why_not():
        assert sanitizer_calls_megakernel.main("dynamic", "cpu", 1) == 3
    else:
        assert sanitizer_calls_megakernel.main("dynamic", DEVICE) == 3 * len(sanitizer_calls_megakernel.knobs())


@gpu
@pytest.mark.parametrize("schedule", ["static", "dynamic"])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_clean(tool, schedule):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer, part of NVIDIA's CUDA toolkit")
    # the build is made before, so that no compiler runs under the sanitizer
    every_thread = tool == "racecheck"
    sanitizer_calls_megakernel.main(schedule, DEVICE, 1, every_thread)
    program = [sys.executable, str(CALLS), schedule, str(int(every_thread))]
    command = [sanitizer, "--tool", tool, "--print-level", "info", *program]
    # each tensor an allocation of its own: inside PyTorch's pool an access past the end would go unseen
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(CALLS.parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    said = done.stdout + done.stderr
    assert "launches decoded valid tokens" in said and re.search(r"SUMMARY: 0 (errors|hazards)", said), said[-4000:]


@gpu
def test_what_racecheck_does_not_know(tmp_path):
    """Why it gets a build of its own: of each pair of right programs it reports the first."""
    sanitizer, compiler = shutil.which("compute-sanitizer"), shutil.which("nvcc")
    if sanitizer is None or compiler is None:
        pytest.skip("needs compute-sanitizer and nvcc, parts of NVIDIA's CUDA toolkit")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    program = tmp_path / "limits"
    source = Path(__file__).with_name("racecheck_limits.cu")
    subprocess.run([compiler, "-arch=sm_90a", "-o", program, source], check=True)
    for case in range(6):
        command = [sanitizer, "--tool", "racecheck", program, str(case)]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
        assert "right" in said, said
        assert ("SUMMARY: 0 hazards" in said) == bool(case % 2), said
