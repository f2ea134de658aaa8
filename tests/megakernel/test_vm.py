"""The interpreter of the task table against the reference, for every knob; order, deadlocks and sampling."""

import dataclasses
import itertools
import re

import numpy as np
import pytest
import torch
from variants import SMALL, VARIANTS

import fmms
from fmms.reference import sample_from_logits
from megakernel import abi, reference, vm
from megakernel.config import KV_NORM_EPS, TINY
from megakernel.graph import build
from megakernel.knobs import PRESETS, Knobs
from megakernel.launch import Deadlock, Launch
from megakernel.memory import Memory
from megakernel.schedule import label, static
from megakernel.table import pack
from megakernel.weights import random as random_weights

LENGTH = 130
"""Positions that the longest cache here has room for."""
SLOT_PRESETS = [name for name, knobs in PRESETS.items() if knobs.experts == "slots"]


@pytest.fixture(scope="module")
def weights():
    return random_weights(TINY, 3)  # its routing and its decode have no near-tie


@pytest.fixture(scope="module")
def prompt():
    return torch.randint(TINY.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(11)).tolist()


@pytest.fixture(scope="module")
def prefilled(weights, prompt):
    """The reference's cache of the prompt."""
    return reference.prefill(weights, TINY, prompt)[1]


def shortened(cache, length):
    return tuple(reference.LayerCache(*(part[:length] for part in layer)) for layer in cache)


def machine(weights, knobs, dynamic=False, workers=7):
    graph = build(TINY, knobs)
    table = pack(graph, workers=workers) if dynamic else pack(graph, static(graph, workers))
    return vm.Machine(table, Memory.of(table, weights))


def assert_close(found, expected, what, share=0.02, cosine=0.9995):
    found, expected = found.flatten().float(), expected.flatten().float()
    assert found.isfinite().all(), what
    worst = (found - expected).abs().max().item()
    assert worst <= share * expected.abs().max().item() + 1e-3, f"{what}: off by {worst}"
    assert torch.cosine_similarity(found, expected, 0) >= cosine, what


def rows(memory, layer, first, end):
    """What the cache holds of some positions: keys and values, or latents; and rotated keys."""
    prefix = f"layers.{layer}"
    if absorbed(memory):
        return memory.tensor(f"{prefix}.latent_cache")[first:end].split([TINY.kv_lora_rank, TINY.qk_rope_head_dim], -1)
    expanded = memory.tensor(f"{prefix}.kv_cache")[first:end].unflatten(-1, (TINY.num_attention_heads, -1))
    plain, values = expanded.split([TINY.qk_nope_head_dim, TINY.v_head_dim], -1)
    return plain, values, memory.tensor(f"{prefix}.rope_cache")[first:end]


def absorbed(memory):
    return memory.graph.knobs.mla == "absorbed"


def expected_rows(memory, layer, first, end):
    """The same of one layer of a reference's cache."""
    if absorbed(memory):
        return layer.latent[first:end], layer.rotary_key[first:end]
    plain = layer.keys[first:end, :, : TINY.qk_nope_head_dim]
    return plain, layer.values[first:end], layer.rotary_key[first:end]


def own_cache(memory, weights, layer, length):
    """The first positions of a layer's cache as the reference takes them."""
    if absorbed(memory):
        latent, key = rows(memory, layer, 0, length)
        matrix = weights[f"model.layers.{layer}.self_attn.kv_b_proj.weight"]
        return reference.LayerCache(latent, key, *reference.kv_b_proj(latent, key, matrix, TINY))
    plain, values, key = rows(memory, layer, 0, length)
    keys = torch.cat((plain, key[:, None].expand(-1, TINY.num_attention_heads, -1)), -1)
    unused = torch.zeros(length, TINY.kv_lora_rank, dtype=torch.bfloat16)
    return reference.LayerCache(unused, key, keys, values)


def attended(memory, prefix):
    """The output of attention, bf16 [heads * v_head_dim]."""
    name = "attn_out" if absorbed(memory) else "attn_merged"
    if f"{prefix}.{name}" in memory.graph.tensors:
        return memory.tensor(f"{prefix}.{name}")
    parts = memory.tensor(f"{prefix}.attn_partials").double()
    out, largest, total = parts[..., : TINY.v_head_dim], parts[..., TINY.v_head_dim], parts[..., TINY.v_head_dim + 1]
    scale = torch.exp(largest - largest.amax(0))
    return ((scale[..., None] * out).sum(0) / (scale * total).sum(0)[:, None]).to(torch.bfloat16).flatten()


def check_layers(memory, weights, position):
    """Every layer of the last token against the reference's, which gets the same input and the same cache."""
    cos, sin = reference.rotary_table(TINY, torch.tensor([position]))
    x = memory.tensor("embedded")
    names = memory.graph.tensors
    for layer in range(TINY.num_hidden_layers):
        prefix, trace = f"layers.{layer}", {}
        cache = own_cache(memory, weights, layer, position)
        _, grown = reference.layer_step(weights, TINY, layer, x[None], cos, sin, cache, trace=trace)

        def close(found, expected, what, prefix=prefix):
            assert_close(found, expected, f"{prefix} {what} at position {position}")

        q = memory.tensor(f"{prefix}.q").view(TINY.num_attention_heads, -1)
        close(q[:, : TINY.qk_nope_head_dim], trace["q"][0, :, : TINY.qk_nope_head_dim], "q")
        if f"{prefix}.q_rotated" in names:
            close(memory.tensor(f"{prefix}.q_rotated"), trace["q"][0, :, TINY.qk_nope_head_dim :], "rotated q")
        pairs = zip(
            rows(memory, layer, position, position + 1),
            expected_rows(memory, grown, position, position + 1),
            strict=True,
        )
        for number, (found, expected) in enumerate(pairs):
            close(found, expected, f"cache {number}")
        close(attended(memory, prefix), trace["attention"], "attention")
        empty = memory.tensor(f"{prefix}.attn_partials")[position // memory.graph.knobs.attn_rows + 1 :]
        width = empty.shape[-1] - abi.PARTIAL_STATS
        assert (empty[..., :width] == 0).all() and (empty[..., width + 1] == 0).all()
        assert (empty[..., width] == -torch.inf).all()
        close(memory.tensor(f"{prefix}.attn_residual"), trace["o"], "state after attention")
        for norm, name in (("attention_norm", "input_layernorm.out"), ("mlp_norm", "post_attention_layernorm.out")):
            if f"{prefix}.{name}" in names:
                close(memory.tensor(f"{prefix}.{name}"), trace[norm], name)
        if TINY.is_moe(layer):
            routing = memory.routing(layer)
            assert routing.ids.tolist() == trace["expert_ids"][0].tolist()
            close(routing.weights, trace["expert_weights"], "weights of experts")
            close(routing.logits, trace["router_logits"], "router logits")
            close(memory.tensor(f"{prefix}.mlp.shared_experts.out"), trace["shared"], "shared experts")
        x = memory.tensor(f"{prefix}.mlp_residual")
        close(x, trace["out"], "state")
    return x


def check_steps(machine, weights, prompt, cache, start, count):
    """Some teacher-forced tokens after `start` positions of the reference's cache, one launch each."""
    memory = machine.memory
    memory.reset()
    memory.load_cache(shortened(cache, start))
    expected = shortened(cache, start)
    for position in range(start, start + count):
        result = machine.run(iterations=1, position=position, forced=prompt[position : position + 1], trace=True)
        logits, expected = reference.decode_step(weights, TINY, prompt[position], position, expected)
        assert_close(result.logits, logits, f"logits at position {position}", share=0.05)
        assert torch.equal(result.logits[0], memory.tensor("logits"))
        assert result.tokens.tolist() == [result.logits[0].argmax().item()] == memory.tensor("token").tolist()
        top = logits.float().topk(2).values
        assert result.tokens[0] == logits.argmax() or top[0] - top[1] < 0.1
        x = check_layers(memory, weights, position)
        normed = reference.rms_norm(x, weights["model.norm.weight"], TINY.rms_norm_eps)
        own = normed.float() @ weights["lm_head.weight"].float().T
        assert_close(result.logits, own, "LM head", 1e-5)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_every_knob(changes, weights, prompt, prefilled):
    knobs = Knobs(**{**SMALL, **changes})
    runner = machine(weights, knobs, workers=min(knobs.workers, 40))
    check_steps(runner, weights, prompt, prefilled, 0, min(2, knobs.tokens))
    if knobs.tokens > 4:
        check_steps(runner, weights, prompt, prefilled, knobs.tokens - 2, 2)


@pytest.mark.parametrize("dynamic", [False, True], ids=["lists", "queue"])
@pytest.mark.parametrize("preset", PRESETS)
def test_presets(preset, dynamic, weights, prompt, prefilled):
    runner = machine(weights, dataclasses.replace(PRESETS[preset], tokens=LENGTH), dynamic, PRESETS[preset].workers)
    check_steps(runner, weights, prompt, prefilled, 0, 2)
    check_steps(runner, weights, prompt, prefilled, 31, 3)
    check_steps(runner, weights, prompt, prefilled, LENGTH - 1, 1)


@pytest.mark.parametrize("dense", [0, 3])
def test_layers_of_one_kind(dense, prompt):
    config = dataclasses.replace(TINY, first_k_dense_replace=dense, num_hidden_layers=3)
    drawn = random_weights(config, 0)
    graph = build(config, Knobs(**SMALL))
    table = pack(graph, static(graph, 5))
    result = vm.run(table, Memory.of(table, drawn), iterations=4, forced=prompt[:4], trace=True)
    expected = reference.prefill(drawn, config, prompt[:4])[0]
    for found, logits in zip(result.logits, expected, strict=True):
        assert_close(found, logits, "logits", share=0.05, cosine=0.999)


# ---------------------------------------------------------------------------------------------- launches of many tokens


def decode(runner, prompt, count):
    """The tokens read, the logits after each, and the experts chosen in each layer: greedy after a prompt."""
    tokens, logits, chosen = [], [], {layer: [] for layer in range(TINY.num_hidden_layers) if TINY.is_moe(layer)}
    for position in range(count):
        tokens.append(prompt[position] if position < len(prompt) else logits[-1].argmax().item())
        result = runner.run(iterations=1, position=position, forced=tokens[-1:], trace=True)
        assert result.tokens[0] == result.logits[0].argmax()
        logits.append(result.logits[0])
        for layer, ids in chosen.items():
            ids.append(runner.memory.routing(layer).ids.long())
    return tokens, torch.stack(logits), {layer: torch.stack(ids) for layer, ids in chosen.items()}


@pytest.mark.parametrize("preset", PRESETS)
def test_decode_after_a_prompt(preset, weights, prompt):
    """40 tokens on the interpreter's own path, against a prefill of them that is routed alike."""
    count = 40
    runner = machine(weights, dataclasses.replace(PRESETS[preset], tokens=count + 1))
    tokens, logits, chosen = decode(runner, prompt[:20], count)
    trace = {}
    expected, cache = reference.prefill(weights, TINY, tokens, forced=chosen, trace=trace)
    for number in range(count):
        assert_close(logits[number], expected[number], f"logits {number}", share=0.08, cosine=0.998)
    for layer, kept in enumerate(cache):
        pairs = zip(rows(runner.memory, layer, 0, count), expected_rows(runner.memory, kept, 0, count), strict=True)
        for part, (found, of_prefill) in enumerate(pairs):
            assert_close(found, of_prefill, f"layer {layer} cache {part}", share=0.05, cosine=0.999)
            assert rows(runner.memory, layer, count, count + 1)[part].isnan().all()  # nothing else was touched

    # the same token and experts, but where the reference's own choice is a near-tie
    margins = expected.float().amax(-1) - expected.float().gather(-1, logits.argmax(-1, keepdim=True))[:, 0]
    assert margins.max() <= 2 * (logits - expected.float()).abs().max()
    assert (margins == 0).float().mean() >= 0.9
    for layer, ids in chosen.items():
        routers = trace[layer]["router_logits"]
        usual = reference.route(routers, TINY)[0]
        lost = routers.gather(-1, usual).amin(-1) - routers.gather(-1, ids).amin(-1)
        assert lost.max() < 0.1 and (usual == ids).float().mean() >= 0.9

    # rounding costs no more than it costs the reference
    exact = reference.prefill({name: tensor.float() for name, tensor in weights.items()}, TINY, tokens, forced=chosen)
    exact = exact[0]
    error, usual = ((each.float() - exact).norm(dim=-1).median() for each in (logits, expected))
    assert error <= 1.15 * usual, (error, usual)


@pytest.mark.parametrize("preset", PRESETS)
def test_greedy_decode_is_that_of_the_reference(preset, weights):
    """After a prompt whose decode has no near-tie in the reference: bf16 logits tell these apart."""
    given = torch.randint(TINY.vocab_size, (9,), generator=torch.Generator().manual_seed(8)).tolist()
    count = 16
    ids, logits = reference.greedy(weights, TINY, given, count)
    top = logits.float().topk(2).values
    assert (top[:, 0] - top[:, 1]).min() > 1 and len(set(ids)) > 8
    runner = machine(weights, dataclasses.replace(PRESETS[preset], tokens=len(given) + count), workers=20)
    result = runner.run(iterations=len(given) + count - 1, forced=given)
    assert result.tokens[len(given) - 1 :].tolist() == ids


@pytest.mark.parametrize("preset", PRESETS)
def test_launches_of_one_token_and_of_many_agree(preset, weights, prompt):
    knobs = dataclasses.replace(PRESETS[preset], tokens=40)
    sampling = dict(temperature=0.8, seed=-5)
    many = machine(weights, knobs)
    together = many.run(iterations=6, forced=prompt[:2], noise_position=100, trace=True, **sampling)
    one = machine(weights, knobs)
    for number in range(6):
        forced = prompt[number : number + 1] if number < 2 else None
        result = one.run(
            iterations=1, position=number, forced=forced, noise_position=100 + number, trace=True, **sampling
        )
        assert result.tokens[0] == together.tokens[number]
        assert torch.equal(result.logits[0], together.logits[number])
    assert torch.equal(one.memory.cache, many.memory.cache) and torch.equal(one.memory.work, many.memory.work)


@pytest.mark.parametrize("preset", PRESETS)
def test_order_changes_nothing(preset, weights, prompt):
    knobs = dataclasses.replace(PRESETS[preset], tokens=20, attn_rows=8)
    arguments = dict(iterations=3, forced=prompt[:2], temperature=0.9, seed=3, trace=True)
    first = machine(weights, knobs)
    expected = first.run(**arguments)
    for dynamic, (order, seed) in itertools.product((False, True), [("list", 0), ("random", 1), ("random", 2)]):
        other = machine(weights, knobs, dynamic, workers=33)
        result = other.run(order=order, order_seed=seed, **arguments)
        assert torch.equal(result.tokens, expected.tokens) and torch.equal(result.logits, expected.logits)
        assert torch.equal(other.memory.cache, first.memory.cache)
        assert torch.equal(other.memory.work, first.memory.work)


@pytest.mark.parametrize("changes", [{}, dict(split_shared=False, fold_norm=False)], ids=str)
def test_slots_compute_what_experts_compute(changes, weights, prompt):
    found = []
    for experts in ("superset", "slots"):
        runner = machine(weights, Knobs(**{**SMALL, **changes, "experts": experts}))
        result = runner.run(iterations=4, forced=prompt[:2], temperature=1.0, trace=True)
        states = [runner.memory.tensor(f"layers.{layer}.mlp_residual") for layer in range(3)]
        found.append((result.tokens, result.logits, runner.memory.cache, *states))
    for one, other in zip(*found, strict=True):
        bits = [part.contiguous().view(torch.uint8) for part in (one, other)]
        assert one.shape == other.shape and torch.equal(*bits)


@pytest.mark.parametrize("preset", SLOT_PRESETS)
def test_every_activation_is_written(preset, weights, prompt):
    """Activations are NaN before a launch; with slots there is no expert that is not chosen."""
    runner = machine(weights, dataclasses.replace(PRESETS[preset], tokens=20, attn_rows=8))
    runner.run(iterations=1, forced=prompt[:1])
    for name, tensor in runner.memory.graph.tensors.items():
        view = runner.memory.tensor(name)
        if tensor.kind == "activation" and view.is_floating_point():
            if name.endswith("attn_partials"):
                view = view[..., : -(abi.PARTIAL_STATS - 2)]
            assert not view.isnan().any(), name


# ------------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 5.0, 1e-45, 1e30])
def test_samples_are_those_of_fmms(temperature, weights, prompt):
    runner = machine(weights, PRESETS["h200"])
    seed = -(2**40) - 17
    for number in range(12):
        forced = prompt[:1] if number == 0 else None
        result = runner.run(
            iterations=1, position=number, forced=forced, temperature=temperature, seed=seed, noise_position=2**33
        )
        state = runner.memory.tensor(f"layers.{TINY.num_hidden_layers - 1}.mlp_residual")
        normed = reference.rms_norm(state[None], weights["model.norm.weight"], TINY.rms_norm_eps)
        expected = fmms.sample(
            normed,
            weights["lm_head.weight"],
            temperature,
            seed=torch.tensor([seed]),
            position=torch.tensor([2**33]),
            impl="torch",
        )
        assert result.tokens.tolist() == expected.ids.tolist()


def argmax(runner, logits, temperature, position=0):
    """The token that the last tasks of a table choose from logits."""
    runner.launch = Launch(1, 0, torch.tensor([0]), temperature, 77, position)
    runner.tokens = torch.full((1,), -2, dtype=torch.int32)
    runner.memory.tensor("logits").copy_(logits)
    for name in ("argmax_partial", "argmax_reduce"):
        for task in runner.tasks:
            if task.code == abi.code(name):
                runner.codes[task.code](task, task.args, 0)
    assert runner.memory.tensor("token").item() == max(runner.tokens.item(), 0)
    return runner.tokens.item()


@pytest.fixture(scope="module", params=[1, 2, 9])
def sampler(request, weights):
    return machine(weights, Knobs(**{**SMALL, "argmax_partials": request.param}))


def expected_token(logits, temperature, position=0):
    seed, at = torch.tensor([77]), torch.tensor([position])
    return sample_from_logits(logits[None].float(), torch.tensor([temperature]), seed, at)[0].item()


@pytest.mark.parametrize("temperature", [0.0, 0.05, 1.0, 2.0**-140, 1e-4, float("inf")])
def test_argmax_over_shares_is_one_over_all(sampler, temperature):
    generator = torch.Generator().manual_seed(5)
    for position in (0, 1, 2, 3, -1, 2**62):
        logits = 8 * torch.randn(TINY.vocab_size, generator=generator)
        assert argmax(sampler, logits, temperature, position) == expected_token(logits, temperature, position)
        tied = logits.round()  # several largest ones, and groups that are alike
        assert argmax(sampler, tied, temperature, position) == expected_token(tied, temperature, position)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("place", [0, 127, 128, 599])
def test_unusual_logits(sampler, temperature, place):
    inf = torch.inf
    for value, usual in ((torch.nan, 1.0), (inf, 1.0), (torch.nan, -inf), (inf, -inf), (-inf, -inf), (torch.nan, inf)):
        logits = torch.full((TINY.vocab_size,), usual)
        logits[place] = value
        assert argmax(sampler, logits, temperature) == -1 == expected_token(logits, temperature)
    masked = torch.full((TINY.vocab_size,), -inf)
    masked[place] = -3.0
    assert argmax(sampler, masked, temperature) == place
    almost = torch.zeros(TINY.vocab_size)
    almost[place] = -inf
    assert argmax(sampler, almost, temperature) == expected_token(almost, temperature) != place


def test_a_nan_is_reported_and_ends_nothing(weights, prompt):
    broken = dict(weights)
    broken["lm_head.weight"] = weights["lm_head.weight"].clone()
    broken["lm_head.weight"][77, 3] = torch.nan
    result = machine(broken, Knobs(**SMALL)).run(iterations=3, forced=prompt[:1], trace=True)
    assert result.tokens.tolist() == [-1, -1, -1]
    again = machine(weights, Knobs(**SMALL)).run(iterations=3, forced=[prompt[0], 0, 0], trace=True)
    assert torch.equal(result.logits[:, :77], again.logits[:, :77])  # token 0 was read next


# ------------------------------------------------------------------------------------------------------------ deadlocks


def test_deadlock_of_lists_names_every_worker(weights):
    runner = machine(weights, Knobs(**SMALL), workers=3)
    graph = runner.table.graph
    event = next(each for each in graph.events if each.name == "1.ATTN_CHUNK")
    thresholds = runner.table.thresholds.copy()
    thresholds[event.index] += 1
    broken = vm.Machine(dataclasses.replace(runner.table, thresholds=thresholds), runner.memory)
    with pytest.raises(Deadlock, match=r"^deadlock: 3 of 3 workers wait forever\n") as caught:
        broken.run(iterations=2, forced=[1])
    assert isinstance(caught.value, RuntimeError) and len(caught.value.workers) == 3
    lines = str(caught.value).splitlines()[1:]
    found = 0
    for number, (line, worker) in enumerate(zip(lines, caught.value.workers, strict=True)):
        assert (worker.state, worker.iteration) == ("waiting", 0)
        assert line.startswith(f"  worker {number}: {label(graph, worker.task)} of token 0 waits for event ")
        assert line.endswith(f"with value {worker.value}, threshold {worker.threshold}")
        assert worker.event in graph.waits[worker.task] and worker.value < worker.threshold
        if worker.event == event.index:
            found += 1
            assert worker.value == event.threshold and f"event {event.index} (1.ATTN_CHUNK)" in line
    assert found


def test_deadlock_of_a_list_in_the_wrong_order(weights):
    runner = machine(weights, Knobs(**SMALL), workers=2)
    table = runner.table
    first, lists = table.list_first, table.lists.copy()
    lists[first[1] : first[2]] = lists[first[1] : first[2]][::-1]
    with pytest.raises(Deadlock) as caught:
        vm.run(dataclasses.replace(table, lists=lists), runner.memory, iterations=1, forced=[1])
    assert caught.value.workers[1].task == lists[first[1]]


def test_deadlock_in_a_later_token(weights):
    """Once the first token is done, the task that ends tokens counts up no launch event any more."""
    runner = machine(weights, Knobs(**SMALL), workers=2)
    table = runner.table
    tasks = table.tasks.copy()
    tasks["code"][tasks["code"] == abi.code("terminate")] = abi.code("nothing")
    with pytest.raises(Deadlock) as caught:
        vm.run(dataclasses.replace(table, tasks=tasks), runner.memory, iterations=3, forced=[1])
    message = rf"task 0 \(BEGIN_TASK_GRAPH\) of token 1 waits for event {table.launch_event} \(LAUNCH\) with value 1"
    assert re.search(message + ", threshold 2$", str(caught.value), re.MULTILINE)
    assert {worker.iteration for worker in caught.value.workers} == {1}


def test_deadlock_leaves_out_workers_that_are_done(weights):
    graph = build(TINY, Knobs(**SMALL))
    lists = static(graph, 2).lists
    last = lists[0][-1] if lists[0][-1] != len(graph.tasks) - 1 else lists[1][-1]
    assert last != len(graph.tasks) - 1
    moved = [tuple(task for task in tasks if task != last) for tasks in lists]
    schedule = dataclasses.replace(static(graph, 3), lists=(*moved, (last,)))
    table = pack(graph, schedule)
    thresholds = table.thresholds.copy()
    waited = graph.waits[-1][0]  # by the task that ends the token
    thresholds[waited] += 1
    table = dataclasses.replace(table, thresholds=thresholds)
    with pytest.raises(Deadlock, match=r"^deadlock: 1 of 3 workers wait forever\n") as caught:
        vm.run(table, Memory.of(table, weights), iterations=1, forced=[1])
    assert sorted(worker.state for worker in caught.value.workers) == ["done", "done", "waiting"]
    assert len(str(caught.value).splitlines()) == 2


def test_deadlock_of_a_queue_names_tasks(weights):
    runner = machine(weights, Knobs(**SMALL), dynamic=True, workers=4)
    event = next(each for each in runner.table.graph.events if "0.KVA_PROJ" in each.name)
    thresholds = runner.table.thresholds.copy()
    thresholds[event.index] += 1
    broken = vm.Machine(dataclasses.replace(runner.table, thresholds=thresholds), runner.memory)
    with pytest.raises(Deadlock) as caught:
        broken.run(iterations=1, forced=[1])
    lines = str(caught.value).splitlines()
    assert re.fullmatch(r"deadlock: 4 of 4 workers wait forever, and \d+ tasks have not become ready", lines[0])
    assert lines[1:5] == [f"  worker {number}: waits for a task that is ready" for number in range(4)]
    task = caught.value.tasks[0]
    assert task.event == event.index and task.threshold == event.threshold + 1 and task.value == event.threshold
    assert lines[5].startswith(f"  {label(runner.table.graph, task.task)} of token 0 waits for event {event.index} ")
    assert lines[-1] == f"  and {len(caught.value.tasks) - Deadlock.MAX_TASKS} more tasks"
    assert [worker.state for worker in caught.value.workers] == ["queue"] * 4


# ------------------------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(iterations=0), "iterations: expected a positive integer, got int 0"),
        (dict(iterations=True), "iterations: expected a positive integer"),
        (dict(iterations=101), "iterations: expected at most 100, because 0 positions of the 100"),
        (dict(position=98, iterations=3), "iterations: expected at most 2, because 98 positions of the 100"),
        (dict(position=1000), "iterations: expected at most 0, because 1000"),
        (dict(position=-1), "position: expected an integer, 0 or more, got int -1"),
        (dict(forced=None), "forced: expected an id for the first token"),
        (dict(forced=[-1, 3]), "forced: expected an id for the first token"),
        (dict(forced=[600]), "forced: expected at most 2 token ids from 0 to 599, or -1 .*, got int 600"),
        (dict(forced=torch.tensor([3, -2])), "forced: expected .*, got int -2"),
        (dict(forced=[1, 2, 3]), "forced: expected at most 2 token ids"),
        (dict(forced=[1.0]), "forced: expected .*, got float 1.0"),
        (dict(forced=torch.tensor([1.0])), "forced: expected .*float32 tensor"),
        (dict(forced=torch.tensor([[1]])), "forced: expected .*shape \\[1, 1\\]"),
        (dict(temperature=-1), "temperature: expected a number, 0 or more, got float -1"),
        (dict(temperature=float("nan")), "temperature: expected a number, 0 or more, got float nan"),
        (dict(temperature="1"), "temperature: expected a number"),
        (dict(seed=2**63), "seed: expected an int64"),
        (dict(noise_position=1.5), "noise_position: expected an int64"),
        (dict(order="any"), "order: expected one of list, random, got 'any'"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(changes, message, weights):
    runner = machine(weights, Knobs(**SMALL), workers=1)
    before = runner.memory.work.clone()
    with pytest.raises(ValueError, match=f"^{message}"):
        runner.run(**{**dict(iterations=2, position=0, forced=[1]), **changes})
    assert torch.equal(runner.memory.work, before)


def test_memory_of_another_graph(weights):
    runner = machine(weights, Knobs(**SMALL))
    other = machine(weights, Knobs(**{**SMALL, "attn_rows": 7}))
    with pytest.raises(ValueError, match=r"^memory: expected one made for this table"):
        vm.Machine(runner.table, other.memory)


def test_forced_ids_of_numpy_and_of_any_integer_type(weights):
    runner = machine(weights, Knobs(**SMALL))
    expected = runner.run(iterations=3, forced=[5, 6]).tokens
    for forced in (np.array([5, 6]), torch.tensor([5, 6, -1], dtype=torch.int16), (5, np.int64(6))):
        assert torch.equal(runner.run(iterations=3, forced=forced).tokens, expected)


def test_numbers_that_tiny_leaves_alike(weights, prompt):
    """The norm of the latent has an epsilon of its own, the same as the others' in published models; factors of 1."""
    config = dataclasses.replace(TINY, rms_norm_eps=0.3, routed_scaling_factor=2.5, rope_mscale=0.2)
    assert config.rms_norm_eps != KV_NORM_EPS and config.rotary_scale != 1
    expected = reference.prefill(weights, config, prompt[:3])[0]
    for changes in ({}, dict(fold_mla_prep=False), dict(mla="absorbed"), dict(mla="absorbed", fold_mla_prep=False)):
        graph = build(config, Knobs(**{**SMALL, **changes}))
        table = pack(graph)
        result = vm.run(table, Memory.of(table, weights), iterations=3, forced=prompt[:3], trace=True)
        for found, logits in zip(result.logits, expected, strict=True):
            assert_close(found, logits, str(changes))


def test_values_are_rounded_where_the_reference_rounds(weights, prompt):
    """Each op on the interpreter's own inputs: equal to the bit, but where a sum in another order falls to the other
    side of a rounding boundary."""
    knobs = {**SMALL, "fold_norm": False, "fold_merge": False, "fold_mla_prep": False, "splits": 3}
    runner = machine(weights, Knobs(**knobs))
    position = 5
    runner.run(iterations=position + 1, forced=prompt[: position + 1])
    tensor = runner.memory.tensor
    cos, sin = reference.rotary_table(TINY, torch.tensor([position]))
    linear = torch.nn.functional.linear
    x = tensor("embedded")
    assert torch.equal(x, weights["model.embed_tokens.weight"][prompt[position]])

    for layer in range(TINY.num_hidden_layers):

        def w(name, layer=layer):
            return weights[f"model.layers.{layer}.{name}.weight"]

        def t(name, layer=layer):
            return tensor(f"layers.{layer}.{name}")

        def same(found, expected, share=1.0):
            assert found.shape == expected.shape and (found == expected).float().mean() >= share

        same(t("input_layernorm.out"), reference.rms_norm(x, w("input_layernorm"), TINY.rms_norm_eps))
        same(t("q"), linear(t("input_layernorm.out"), w("self_attn.q_proj")), 0.97)
        same(t("kva"), linear(t("input_layernorm.out"), w("self_attn.kv_a_proj_with_mqa")), 0.97)
        latent, key = t("kva").split([TINY.kv_lora_rank, TINY.qk_rope_head_dim])
        same(t("latent"), reference.rms_norm(latent, w("self_attn.kv_a_layernorm"), KV_NORM_EPS))
        same(t("rope_cache")[position], reference.rotate(key[None], cos, sin)[0])
        rotary = t("q").view(TINY.num_attention_heads, -1)[:, TINY.qk_nope_head_dim :]
        same(t("q_rotated"), reference.rotate(rotary, cos, sin).flatten())
        same(t("kv_cache")[position], linear(t("latent"), w("self_attn.kv_b_proj")), 0.97)
        same(t("attn_merged"), attended(runner.memory, f"layers.{layer}"))
        same(t("attn_residual"), x + linear(t("attn_merged"), w("self_attn.o_proj")), 0.97)
        x = t("attn_residual")
        normed = t("post_attention_layernorm.out")
        same(normed, reference.rms_norm(x, w("post_attention_layernorm"), TINY.rms_norm_eps))
        if not TINY.is_moe(layer):
            gate, up = linear(normed, w("mlp.gate_proj")), linear(normed, w("mlp.up_proj"))
            same(t("mlp.hidden"), torch.nn.functional.silu(gate) * up, 0.97)
            parts = t("mlp.partials")
            assert len(parts) == 3
            same(t("mlp_residual"), x + (parts[0] + parts[1] + parts[2]).to(torch.bfloat16))
            same(t("mlp_residual"), x + linear(t("mlp.hidden"), w("mlp.down_proj")), 0.97)
        else:
            routing = runner.memory.routing(layer)
            logits = reference.router_logits(normed[None], w("mlp.gate"))
            assert_close(routing.logits, logits, "router logits", 1e-6, 0.999999)
            ids, factors = reference.route(routing.logits[None], TINY)
            same(routing.ids, ids[0])
            same(routing.weights, factors[0])
            for expert in ids[0].tolist():
                down = w(f"mlp.experts.{expert}.down_proj")
                same(t("mlp.experts.out")[expert], linear(t("mlp.experts.hidden")[expert], down), 0.97)
            out = torch.zeros_like(x)
            for expert, factor in sorted(zip(ids[0].tolist(), factors[0], strict=True)):
                out = out + (t("mlp.experts.out")[expert].float() * factor).to(torch.bfloat16)
            same(t("mlp_residual"), reference.combine(out, t("mlp.shared_experts.out"), x))
        x = t("mlp_residual")
    same(tensor("norm.out"), reference.rms_norm(x, weights["model.norm.weight"], TINY.rms_norm_eps))
