"""The device code in its host build: against the interpreter and the reference, under random interleavings, under
sanitizers, and when it can't go on."""

import dataclasses
import itertools
import os
import subprocess

import numpy as np
import pytest
import torch
from faulty import idle
from variants import SMALL, VARIANTS

from fmms.reference import sample_from_logits
from megakernel import abi, build, graph, native, reference, vm
from megakernel import weights as weights_of
from megakernel.config import TINY, V2_LITE
from megakernel.knobs import PRESETS, Knobs
from megakernel.launch import Deadlock
from megakernel.memory import Memory
from megakernel.schedule import dynamic, static
from megakernel.table import pack
from megakernel.tagged import Order, tagged

SHAPES = {
    "rows in pieces": dict(consumer_waves=4, teams=2, stages=4, stage_bytes=128),
    "one team": dict(consumer_waves=2, teams=1, stages=3, in_flight=1, stage_bytes=256),
    "waves of 64": dict(consumer_waves=2, teams=2, stages=4, stage_bytes=1024, wave=64),
    "every thread": dict(consumer_waves=4, teams=2, stages=4, stage_bytes=1024, every_thread=True),
}
"""Blocks of other shapes than the host's own: rows larger than a stage, several pieces for each team, AMD's waves."""
FORCED = [5, 17, 200]
GATE = "model.layers.1.mlp.gate.weight"


@pytest.fixture(scope="module")
def weights():
    return weights_of.random(TINY, 3)  # its routing and its decode have no near-tie


def table_of(knobs, queue=False, workers=3):
    tasks = graph.build(TINY, knobs)
    return pack(tasks, workers=workers) if queue else pack(tasks, static(tasks, workers))


def launched(table, weights, cache=None, **launch):
    """A launch's results, and the memory that it leaves."""
    memory = Memory.of(table, weights)
    if cache is not None:
        memory.load_cache(cache)
    settings = dict(iterations=len(FORCED), position=0, forced=FORCED, trace=True)
    return native.run(table, memory, **settings | launch), memory


def assert_close(found, expected, share=0.02):
    found, expected = found.double().flatten(), expected.double().flatten()
    assert found.isfinite().all()
    assert (found - expected).abs().max() <= share * expected.abs().max() + 1e-3
    assert torch.cosine_similarity(found, expected, 0) >= 0.9995


def follows(found, expected):
    """Logits of each step against the reference's, which rounds to bf16 where the device code doesn't."""
    for ours, theirs in zip(found.double(), expected.double(), strict=True):
        assert torch.cosine_similarity(ours, theirs, 0) >= 0.9995
        first, second = theirs.topk(2).values.tolist()
        assert ours.argmax() == theirs.argmax() or first - second < 0.1


def same(one, other):
    """Whether two launches left the same bits: logits, tokens, and every position of the cache."""
    (a, memory_a), (b, memory_b) = one, other
    pairs = (a.logits, b.logits), (a.tokens, b.tokens), (memory_a.cache, memory_b.cache)
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)


# ------------------------------------------------------------------------------------------------------------------ ABI


def test_header_is_what_the_abi_says():
    assert abi.HEADER.read_text() == abi.header(), "run python -m megakernel.abi"


def test_build_with_another_layout_is_refused(monkeypatch):
    config = build.configure(table_of(Knobs(**SMALL)))
    build.load(config)
    moved = list(abi.layout())
    moved[-1] += 8
    monkeypatch.setattr(abi, "layout", lambda: moved)
    with pytest.raises(RuntimeError, match="disagree about their records"):
        build.load(config)


# ------------------------------------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_every_knob_in_every_shape(changes, weights):
    knobs = Knobs(**SMALL | changes)
    table = table_of(knobs)
    count = min(len(FORCED), knobs.tokens)
    memory = Memory.of(table, weights)
    settings = dict(iterations=count, position=0, forced=FORCED[:count])
    expected = vm.run(table, memory, trace=True, **settings)
    logits, _ = reference.prefill(weights, TINY, FORCED[:count])
    for shape in ({}, *SHAPES.values()):
        found, own = launched(table, weights, config=build.configure(table, **shape), **settings)
        assert_close(found.logits, expected.logits)
        follows(found.logits, logits)
        assert torch.equal(found.tokens, expected.tokens)
        for layer in range(TINY.num_hidden_layers):
            names = [name for name in table.place.cache if name.startswith(f"layers.{layer}.")]
            for name in names:
                assert_close(own.tensor(name)[:count], memory.tensor(name)[:count])
            routed = TINY.is_moe(layer)
            assert not routed or torch.equal(own.routing(layer).ids, memory.routing(layer).ids)


def routed(table, weights, **launch):
    """The bits of what the routers of a launch left: ids, weights and logits of each layer."""
    _, memory = launched(table, weights, **launch)
    layers = [layer for layer in range(TINY.num_hidden_layers) if TINY.is_moe(layer)]
    found = [memory.routing(layer) for layer in layers]
    return [[each.ids.tolist(), *(part.contiguous().view(torch.int32).tolist() for part in each[1:])] for each in found]


def gated(weights, change):
    """The weights with another router in layer 1."""
    return {**weights, GATE: change(weights[GATE].clone())}


@pytest.mark.parametrize("queue", [False, True], ids=["lists", "queue"])
@pytest.mark.parametrize("rows", [1, 3, 4, 7])
def test_a_router_of_several_tasks_leaves_the_same_bits(rows, queue, weights):
    def tied(gate):
        gate[:] = gate[2]
        gate[[3, 6]] = -gate[2]  # so these two are the most likely, or all others are
        return gate

    def broken(gate):
        gate[5, 9] = torch.nan
        return gate

    for changes, shape in (({}, {}), (dict(fold_norm=False), SHAPES["rows in pieces"]), ({}, SHAPES["waves of 64"])):
        one = table_of(Knobs(**SMALL | changes))
        several = table_of(Knobs(**SMALL | changes | dict(router_rows=rows)), queue)
        for drawn in (weights, gated(weights, tied), gated(weights, broken)):
            found = routed(several, drawn, config=build.configure(several, **shape))
            assert found == routed(one, drawn, config=build.configure(one, **shape))
            if drawn is not weights:
                ids, factors, _ = found[0]
                chosen = ([0, 0, 0],) if drawn[GATE].isnan().any() else ([0, 1, 2], [3, 6, 0])
                assert ids in chosen
                assert len(set(factors[:2])) == 1


def test_the_number_of_rows_of_a_task_changes_no_bit():
    """Of rows that are wide for a wave, with teams of two waves."""
    config = dataclasses.replace(TINY, hidden_size=512, num_hidden_layers=2, first_k_dense_replace=1)
    drawn, logits = weights_of.random(config, 3), []
    for rows in (8, 7, 3, 1):
        tasks = graph.build(config, Knobs(tokens=8, router_rows=rows, qkv_rows=64, lm_head_rows=300))
        table = pack(tasks, static(tasks, 2))
        memory = Memory.of(table, drawn)
        shape = build.configure(table, consumer_waves=4, teams=2, stages=4, stage_bytes=2048)
        native.run(table, memory, shape, iterations=1, position=0, forced=[5])
        logits.append(memory.routing(1).logits.contiguous().view(torch.int32))
    assert all(torch.equal(each, logits[0]) for each in logits)


@pytest.mark.parametrize("queue", [False, True], ids=["lists", "queue"])
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_after_a_prompt(preset, queue, weights):
    """At a length where the preset's own tiles of the cache are whole, split and empty."""
    length = 150
    # whose routing has no near-tie in the last two steps
    prompt = torch.randint(TINY.vocab_size, (length + 2,), generator=torch.Generator().manual_seed(23)).tolist()
    _, cache = reference.prefill(weights, TINY, prompt[:length])
    table = table_of(dataclasses.replace(PRESETS[preset], tokens=300), queue, workers=5)
    logits = []
    for token in prompt[length:]:
        step, cache_after = reference.decode_step(weights, TINY, token, len(cache[0].latent), cache)
        logits.append(step)
        if len(logits) == 1:
            before, cache = cache, cache_after
    found, _ = launched(table, weights, before, iterations=2, position=length, forced=prompt[length:])
    follows(found.logits, torch.stack(logits))


@pytest.mark.parametrize("rows", [1, 16, 64, 128, 256])
@pytest.mark.parametrize("mla", ["decompressed", "absorbed"])
def test_chunks_of_attention(rows, mla, weights):
    prompt = torch.randint(TINY.vocab_size, (270,), generator=torch.Generator().manual_seed(6)).tolist()
    _, cache = reference.prefill(weights, TINY, prompt[:-1])
    expected, _ = reference.decode_step(weights, TINY, prompt[-1], 269, cache)
    heads = 4 if mla == "absorbed" else 1
    table = table_of(Knobs(**SMALL | dict(tokens=270, attn_rows=rows, attn_heads=heads, mla=mla)))
    found, _ = launched(table, weights, cache, iterations=1, position=269, forced=prompt[-1:])
    follows(found.logits, expected[None])


@pytest.mark.parametrize("preset", PRESETS)
def test_prompt_and_32_tokens(preset, weights):
    """Greedy tokens are the reference's; sampled ones are those that fmms draws from the same logits."""
    prompt, count = list(range(3, 43)), 32
    tokens, logits = reference.greedy(weights, TINY, prompt, count + 1)
    _, cache = reference.prefill(weights, TINY, prompt)
    table = table_of(dataclasses.replace(PRESETS[preset], tokens=len(prompt) + count), workers=4)
    settings = dict(iterations=count, position=len(prompt), forced=tokens[:1])
    greedy, _ = launched(table, weights, cache, **settings)
    top = logits[1:].float().topk(2).values
    steps = zip(greedy.tokens.tolist(), tokens[1:], (top[:, 0] - top[:, 1]).tolist(), strict=True)
    for found, expected, margin in steps:
        if found != expected:  # after a near-tie another text follows
            assert margin < 0.1
            break

    sampled, _ = launched(table, weights, cache, temperature=0.8, seed=-7, noise_position=2**33, **settings)
    expected = sample_from_logits(
        sampled.logits,
        torch.full((count,), 0.8),
        torch.full((count,), -7),
        torch.arange(2**33, 2**33 + count),
    )[0][:, 0]
    assert torch.equal(sampled.tokens.long(), expected)
    assert len(sampled.tokens.unique()) > 5


def test_a_launch_goes_on_where_another_ended(weights):
    table = table_of(Knobs(**SMALL))
    whole, memory = launched(table, weights, iterations=6, forced=FORCED)
    parts = Memory.of(table, weights)
    first = native.run(table, parts, iterations=4, position=0, forced=FORCED, trace=True)
    second = native.run(table, parts, iterations=2, position=4, trace=True)
    assert torch.equal(torch.cat([first.logits, second.logits]), whole.logits)
    assert (torch.cat([first.times, second.times]).diff() > 0).all()
    assert torch.equal(parts.cache, memory.cache)


@pytest.mark.parametrize("queue", [False, True], ids=["lists", "queue"])
def test_the_timeline_has_every_task_in_order(queue, weights):
    table = table_of(Knobs(**SMALL), queue)
    result, _ = launched(table, weights, timeline=True)
    worker, taken, ready, done = result.timeline.numpy().T
    assert (taken > 0).all() and (taken <= ready).all() and (ready <= done).all()
    assert set(worker.tolist()) <= set(range(table.workers))
    for event in table.graph.events:
        producers, consumers = list(event.producers), list(event.consumers)
        if producers and consumers and not event.from_host:
            assert done[producers].max() <= ready[consumers].min()
    assert launched(table, weights)[0].timeline is None


# ----------------------------------------------------------------------------------------------------- interleavings


@pytest.mark.parametrize("mla", ["decompressed", "absorbed"])
def test_200_schedules_leave_the_same_bits(mla, weights):
    """100 for each attention: random interleavings of all threads, random lists, both ways to get tasks."""
    knobs = Knobs(**SMALL | dict(mla=mla, experts="slots", lm_head_rows=64))
    tasks = graph.build(TINY, knobs)
    settings = dict(iterations=2, forced=FORCED[:2], temperature=0.9, seed=3)
    expected = launched(pack(tasks, static(tasks, 1)), weights, **settings)
    for seed in range(100):
        workers = 1 + seed % 5
        schedule = (None, dynamic(tasks, workers, seed), static(tasks, workers))[seed % 3]
        table = pack(tasks, schedule) if schedule else pack(tasks, workers=workers)
        assert same(launched(table, weights, order_seed=seed, **settings), expected), seed


def without_wait(table, name):
    """The table with tasks of an op that no longer wait for anything but the begin of the token."""
    tasks = table.tasks.copy()
    op = next(op for op in table.graph.ops if op.name == name)
    for task in op.tasks:
        tasks[task]["wait_first"] = tasks[1]["wait_first"]
        tasks[task]["wait_count"] = 1
    return dataclasses.replace(table, tasks=tasks)


@pytest.mark.parametrize("name", ["ATTN_CHUNK", "O_PROJ_RESIDUAL", "REDUCE_RESIDUAL", "ARGMAX_PARTIAL"])
def test_random_interleavings_show_a_missing_wait(name, weights):
    """For what is not tagged: rows of the cache, chunks of attention, shares of a sum, logits."""
    # with fewer workers, most of what a task waits for is before it in its own list
    table = table_of(Knobs(**SMALL, router_rows=3), workers=17)
    expected = launched(table, weights)
    faulty = without_wait(table, name)
    assert not all(same(launched(faulty, weights, order_seed=seed), expected) for seed in range(5))


@pytest.mark.parametrize("queue", [False, True], ids=["lists", "queue"])
@pytest.mark.parametrize("name", ["Q_PROJ", "MOE_TOPK", "EXPERT_W2", "MOE_COMBINE_RESIDUAL", "LM_HEAD"])
def test_what_is_tagged_is_right_without_a_wait(name, queue, weights):
    """Stores arrive late and in any order here; who reads looks at the tags."""
    table = table_of(Knobs(**SMALL, router_rows=3, experts="slots"), queue, workers=17)
    faulty, expected = without_wait(table, name), launched(table, weights)
    if queue:  # a queue takes events for what makes a task ready
        faulty = dataclasses.replace(table, tasks=table.tasks.copy())
        faulty.tasks["flags"] |= abi.TAGGED
    assert all(same(launched(faulty, weights, order_seed=seed), expected) for seed in range(3))


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_what_is_not_tagged_is_ordered(changes):
    table = table_of(Knobs(**SMALL | changes))
    tensors, tasks, events = table.graph.tensors, table.graph.tasks, table.graph.events
    plain = {name: {task.index for task in tasks for part in task.writes if part.tensor == name} for name in tensors}
    plain = {name: writers for name, writers in plain.items() if writers and not tagged(tensors[name])}
    loose = [task for task in tasks if table.tasks["flags"][task.index] & abi.TAGGED]
    for task in loose:
        assert not any(part.tensor in plain for part in task.writes)
    for task in tasks:
        reads = {part.tensor for part in task.reads if part.tensor in plain}
        writers = {writer for name in reads for writer in plain[name] if tasks[writer].op != task.op}
        if reads and loose and reads != {"token"}:
            waited = {producer for event in table.graph.waits[task.index] for producer in events[event].producers}
            assert waited & writers or not writers
        if table.tasks["flags"][task.index] & abi.BY_TAGS:
            assert not writers
    # with these, tasks that read do not wait themselves for those that wrote
    assert loose or changes.get("dependencies") == "chain" or not changes.get("fold_mla_prep", True)


def test_nothing_of_a_token_is_read_after_its_end():
    """An expert that is not chosen does nothing; another task behind it keeps the token from its end."""
    tasks = graph.build(TINY, dataclasses.replace(PRESETS["mi300x"], tokens=24, attn_rows=8, lm_head_rows=32))
    for workers in (1, 132):
        schedule = static(tasks, workers)
        last = any(items and tasks.tasks[items[-1]].expert is not None for items in schedule.lists)
        flags = pack(tasks, schedule).tasks["flags"]
        assert bool((flags & abi.BY_TAGS).any()) != last
    assert last


def test_a_wait_that_does_not_happen_orders_nothing():
    """Who writes a row of a cache needs a way to the end of the token through waits that do happen."""
    tasks = graph.build(TINY, Knobs(**SMALL, experts="slots"))
    schedule = static(tasks, 300)
    alone = [items[0] for items in schedule.lists if len(items) == 1]
    # LM_HEAD, which reads the last of these, goes by tags
    combines = [task for task in alone if tasks.ops[tasks.tasks[task].op].name == "MOE_COMBINE_RESIDUAL"]
    assert combines and Order(tasks, schedule, []).free and not Order(tasks, schedule, combines[-1:]).free


def test_an_infinite_value_stays_infinite_in_a_merge():
    """As in the interpreter: it is not multiplied with the zero of a chunk that isn't there."""
    config = dataclasses.replace(TINY, num_hidden_layers=1, first_k_dense_replace=1, vocab_size=64)
    tasks = graph.build(config, Knobs(tokens=40, attn_rows=40, fold_merge=False))
    table = pack(tasks, static(tasks, 2))
    found = []
    for run in (vm.run, native.run):
        memory = Memory.of(table, weights_of.random(config, 3))
        cached = memory.tensor("layers.0.kv_cache")
        cached.copy_(torch.randn(cached.shape, generator=torch.Generator().manual_seed(1)))
        memory.tensor("layers.0.rope_cache").fill_(0.5)
        cached[3, config.qk_nope_head_dim + 5] = torch.inf
        run(table, memory, iterations=1, position=39, forced=[5])
        found.append(memory.tensor("layers.0.attn_merged"))
    assert found[0].isinf().sum() == found[1].isinf().sum() == 1
    assert not any(each.isnan().any() for each in found)


# -------------------------------------------------------------------------------------------------------- sanitizers


def checked(table, weights, config, order_seed=0, **launch):
    settings = dict(temperature=0.7, seed=1, forced=FORCED, iterations=len(FORCED), position=0)
    launcher = native.Native(table, Memory.of(table, weights), config)
    return native.run_program(build.host_program(config), launcher, order_seed, **settings | launch)


@pytest.mark.parametrize("shape", ["the host's own", *SHAPES])
def test_clean_under_address_and_undefined_behaviour_sanitizers(shape, weights):
    variants = [
        {},
        dict(mla="absorbed", experts="slots"),
        dict.fromkeys(["fold_norm", "fold_merge", "fold_mla_prep"], False),
    ]
    for queue, changes in itertools.product([False, True], variants):
        table = table_of(Knobs(**SMALL | changes), queue)
        config = build.configure(table, **SHAPES.get(shape, {}))
        found = checked(table, weights, config)
        assert torch.equal(found.tokens, launched(table, weights, temperature=0.7, seed=1)[0].tokens)


def test_a_merge_reads_no_chunk_that_is_not_there():
    """Nine chunks, which lanes share by powers of two, at the end of the activations."""
    config = dataclasses.replace(
        TINY, vocab_size=8, num_attention_heads=16, v_head_dim=16, intermediate_size=8, num_hidden_layers=1,
        first_k_dense_replace=1, moe_intermediate_size=8, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    sizes = dict(qkv_rows=64, gemv_rows=64, dense_rows=8, splits=1, lm_head_rows=8, argmax_partials=1, workers=1)
    tasks = graph.build(config, Knobs(tokens=36, attn_rows=4, fold_merge=False, **sizes))
    table = pack(tasks, static(tasks, 1))
    launcher = native.Native(table, Memory.of(table, weights_of.random(config, 3)), build.configure(table))
    native.run_program(build.host_program(launcher.config), launcher, 0, iterations=1, position=0, forced=[1])


@pytest.mark.parametrize("array", ["work", "cache", "weights"])
def test_sanitizers_see_a_task_that_leaves_an_array(array, weights):
    table = table_of(Knobs(**SMALL))
    op = next(
        op
        for op in table.graph.ops
        if op.name == dict(work="O_PROJ_RESIDUAL", cache="KV_B_PROJ", weights="LM_HEAD")[array]
    )
    args = table.args.copy()
    record = args[table.tasks[op.tasks[0]]["args"]]
    record["weight" if array == "weights" else "out"] = getattr(table.place, f"{array}_bytes") - 16
    with pytest.raises(RuntimeError, match="AddressSanitizer"):
        checked(dataclasses.replace(table, args=args), weights, build.configure(table))


# ----------------------------------------------------------------------------------------------------------- deadlocks


@pytest.mark.parametrize("experts", ["slots", "superset"])
@pytest.mark.parametrize("queue", [False, True], ids=["lists", "queue"])
def test_a_deadlock_ends_with_the_state_of_every_worker(queue, experts, weights):
    table = table_of(Knobs(**SMALL, experts=experts), queue, workers=4)
    event = next(event for event in table.graph.events if event.name == "1.MOE_GATE_TOPK")
    settings = dict(iterations=2, position=0, forced=FORCED[:2])
    with pytest.raises(Deadlock) as caught:
        native.run(idle(table, event.producers), Memory.of(table, weights), spin_budget=20_000, **settings)
    workers, message = caught.value.workers, str(caught.value)
    assert len(workers) == 4
    if queue:
        assert all(worker.state == "queue" for worker in workers)
        assert "waits for a task that is ready" in message
    else:
        assert any(worker.producer_state == "routing" for worker in workers)
        assert f", for what event {event.index} (1.MOE_GATE_TOPK) stands for" in message
    if not queue and experts == "superset":  # whether an expert is chosen is the producer's to know
        assert any(worker.state == "queue" for worker in workers)
        assert "waits for its producer; its producer is routing at task" in message
    elif not queue:
        waiting = [worker for worker in workers if worker.event == event.index]
        assert waiting and all((worker.value, worker.threshold) == (0, 1) for worker in waiting)
        assert f"event {event.index} (1.MOE_GATE_TOPK) with value 0, threshold 1" in message
    # and the process can launch again
    found = native.run(table, Memory.of(table, weights), trace=True, **settings)
    assert torch.equal(found.logits, launched(table, weights, **settings)[0].logits)


def test_a_task_that_some_of_a_block_could_finish_is_not_done(weights):
    """The first columns of a combine are there, for thread 0, and the last never come."""
    table = table_of(Knobs(**SMALL, experts="slots", combine_rows=64), workers=17)
    graph = table.graph
    combine = next(task for task in graph.tasks if graph.ops[task.op].name == "MOE_COMBINE_RESIDUAL")
    (number,) = graph.waits[combine.index]
    faulty = idle(table, [max(graph.events[number].producers)])
    settings = dict(spin_budget=20_000, iterations=1, position=0, forced=FORCED[:1])
    with pytest.raises(Deadlock) as caught:
        native.run(faulty, Memory.of(table, weights), **settings)
    stuck = [worker.task for worker in caught.value.workers if worker.event == number]
    ops = {graph.ops[graph.tasks[task].op].name for task in stuck}
    assert "MOE_COMBINE_RESIDUAL" in ops


def test_tickets_of_a_queue_are_limited(weights):
    table = table_of(Knobs(**SMALL | dict(tokens=300)), queue=True)
    launcher = native.Native(table, Memory.of(table, weights))
    assert launcher.check(iterations=200, position=0, forced=[1]).iterations == 200
    launcher.table = dataclasses.replace(table, tasks=np.zeros(2**32 // 100, np.int8))
    with pytest.raises(ValueError, match="iterations: expected at most 100 in one launch, got 200"):
        launcher.check(iterations=200, position=0, forced=[1])


def test_a_nan_is_reported_and_ends_nothing(weights):
    broken = dict(weights)
    broken["model.norm.weight"] = weights["model.norm.weight"].clone()
    broken["model.norm.weight"][3] = torch.nan
    for temperature in (0.0, 1.0):
        found, _ = launched(table_of(Knobs(**SMALL)), broken, temperature=temperature)
        assert found.tokens.tolist() == [-1] * len(FORCED)


# --------------------------------------------------------------------------------------------------------------- builds


def test_builds_are_made_once_and_known_by_what_went_into_them(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGAKERNEL_CACHE", str(tmp_path))
    config = build.configure(table_of(Knobs(**SMALL)))
    first = build.host_library(config)
    made = first.stat().st_mtime_ns
    assert build.host_library(config) == first
    assert first.stat().st_mtime_ns == made
    assert [path.name for path in first.parent.iterdir()] == ["library.so"]
    assert build.digest(config, "host") != build.digest(dataclasses.replace(config, stages=8), "host")
    assert build.digest(config, "host") != build.digest(config, "sm_90a")


@pytest.mark.parametrize("source", ["host.cpp", "host_main.cpp"])
def test_host_sources_compile_without_a_warning(source, tmp_path):
    compiler = os.environ.get("CXX") or "g++"
    options = build.compile_options(build.configure(table_of(Knobs(**SMALL))), "host", tmp_path)
    command = [compiler, *options, "-Wall", "-Wextra", "-Werror", "-fsyntax-only", str(build.CSRC / source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGAKERNEL_CACHE", str(tmp_path))
    config = build.configure(table_of(Knobs(**SMALL)))
    with monkeypatch.context() as broken:
        broken.setattr(build.BuildConfig, "header", lambda self: "no C++")
        with pytest.raises(build.BuildError, match="error"):
            build.host_library(config)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler no-such-compiler"):
        build.host_library(config)


def test_a_cached_build_needs_no_compiler_and_a_compiler_may_have_options(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGAKERNEL_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "g++ -g0")
    config = build.configure(table_of(Knobs(**SMALL)))
    made = build.host_library(config)
    monkeypatch.setenv("PATH", "/nowhere")
    assert build.host_library(config) == made


def test_a_damaged_build_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGAKERNEL_CACHE", str(tmp_path))
    config = build.configure(table_of(Knobs(**SMALL)))
    path = build.host_library(config)
    path.write_text("not a library")
    assert build.load(config).mk_shared_bytes() > 0


def test_a_cache_folder_that_cannot_be_used_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGAKERNEL_CACHE", str(tmp_path / "file"))
    with pytest.raises(build.BuildError, match="name another folder in MEGAKERNEL_CACHE"):
        build.host_library(build.configure(table_of(Knobs(**SMALL))))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (dict(stages=0), "stages must be a positive integer, not 0"),
        (dict(teams=True), "teams must be a positive integer, not True"),
        (dict(teams=3), "consumer_waves must be teams = 3 times a power of two, not 2"),
        (dict(consumer_waves=3, teams=1), "consumer_waves must be teams = 1 times a power of two, not 3"),
        (dict(stages=3), "stages must be a multiple of teams = 2, not 3"),
        (dict(in_flight=5), "in_flight must be at most stages = 4, not 5"),
        (dict(stage_bytes=100), "stage_bytes must be a multiple of 128, not 100"),
        (dict(wave=48), "wave must be 32 or 64, not 48"),
        (dict(every_thread=1), "every_thread must be True or False, not 1"),
        (dict(x_items=8.5), "x_items must be a positive integer, not 8.5"),
    ],
)
def test_shapes_that_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        build.configure(table_of(Knobs(**SMALL)), **shape)


@pytest.mark.parametrize(
    "changes", [dict(spin_budget=-5), dict(spin_budget=2.5), dict(order_seed=None), dict(order_seed=-1)]
)
def test_budgets_and_seeds_that_are_refused(changes, weights):
    with pytest.raises(ValueError, match=f"{next(iter(changes))}: expected"):
        launched(table_of(Knobs(**SMALL)), weights, **changes)


def test_what_configure_refuses():
    table = table_of(Knobs(**SMALL))
    with pytest.raises(ValueError, match="target must be one of host, sm_90a, gfx942, not 'sm_80'"):
        build.configure(table, "sm_80")
    with pytest.raises(ValueError, match="ring is no field of a build"):
        build.configure(table, ring=3)


@pytest.mark.parametrize(
    "changes", [{}, dict(mla="absorbed", attn_heads=4, attn_rows=64), dict(fold_merge=False)], ids=str
)
def test_a_build_has_the_room_that_its_table_needs(changes, weights, monkeypatch):
    """Without the extra room of builds that tests share. A launch that writes past its room is refused."""
    monkeypatch.setattr(build, "FLOORS", {})
    table = table_of(Knobs(**SMALL | changes))
    config = build.configure(table)
    _, cache = reference.prefill(weights, TINY, range(70))  # so that some chunks of attention are full
    settings = dict(cache=cache, position=70)
    roomy = dataclasses.replace(config, x_items=4096, slots=4096, scratch=4096)
    assert same(launched(table, weights, config=config, **settings), launched(table, weights, config=roomy, **settings))
    for field in build.ROOM:
        tight = dataclasses.replace(config, **{field: getattr(config, field) - 8})
        with pytest.raises(
            ValueError, match=f"config: {field} must be at least {getattr(config, field)} for this table"
        ):
            launched(table, weights, config=tight, **settings)
        with monkeypatch.context() as unchecked:
            unchecked.setattr(build, "room", lambda *_: {})
            with pytest.raises(RuntimeError, match=f"wrote past the room of {field}"):
                launched(table, weights, config=tight, **settings)


@pytest.mark.parametrize("tokens", [1056, 32_768])
def test_an_h200_has_room_for_long_contexts(tokens):
    knobs = dataclasses.replace(PRESETS["h200"], tokens=tokens, workers=132)
    tasks = graph.build(dataclasses.replace(V2_LITE, num_hidden_layers=2), knobs)
    config = build.configure(pack(tasks), "sm_90a")
    ring, room = config.stages * config.stage_bytes, 2 * config.x_items + 4 * (config.slots + config.scratch)
    # the rest, records of tasks and the like, is below 8 KB; a block has 227
    assert ring + room <= (227 - 8) * 1024


def test_tables_and_results_are_little_endian():
    table = table_of(Knobs(**SMALL))
    assert all(getattr(table, name).dtype.newbyteorder("<") == getattr(table, name).dtype for name in table.ARRAYS)
    assert np.little_endian
