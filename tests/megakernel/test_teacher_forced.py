"""Passes along given tokens: what they compute, and which differences count as explained."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from megakernel import reference
from megakernel.bench import decoding, reference_run
from megakernel.bench import teacher_forced as forced
from megakernel.config import TINY
from megakernel.memory import Routing

PROMPT, TOKENS = 48, 4


@pytest.fixture(scope="module")
def case():
    """Seed 2, whose first step has a swap of experts at a margin of 0.007, and then none."""
    return forced.build("tiny", 2, PROMPT, TOKENS - 1, workers=2)


@pytest.fixture(scope="module")
def mine(case):
    return forced.megakernel_steps(case.engine, case.text)


# --------------------------------------------------------------------------------------------------------------- passes


def test_a_case_is_that_of_the_reference(case):
    problem_prompt = torch.randint(TINY.vocab_size, (PROMPT,), generator=torch.Generator().manual_seed(2)).tolist()
    assert case.prompt == problem_prompt
    assert case.text == [case.prompt[-1], *case.expected.tokens[:-1]]
    logits, _ = reference.prefill(case.engine.weights, TINY, [*case.prompt, *case.text[1:]])
    tail = logits[-len(case.text) :].float()
    assert (tail - case.expected.logits.float()).abs().max() <= 0.05 * tail.abs().max()
    assert (
        case.expected.tokens
        == decoding.reference_decode(case.engine.weights, TINY, case.prompt[-1:], TOKENS - 2, case.cache).tokens
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(name="v3"), "model is 'v3'; expected one of tiny, v2-lite"),
        (dict(preset="b200"), "preset is 'b200'; expected one of mi300x"),
        (dict(prompt_tokens=1), "prompt_tokens is 1; expected at least 2"),
        (dict(tokens=1), "tokens is 1; expected at least 2"),
        (dict(schedule="both"), "schedule must be one of static, dynamic"),
    ],
)
def test_what_a_case_refuses(changes, message):
    settings = dict(name="tiny", seed=0, prompt_tokens=4, tokens=2) | changes
    with pytest.raises(ValueError, match=message):
        forced.build(**settings)


def test_launches_of_one_token_compute_what_one_launch_does(case, mine):
    case.engine.rewind()
    together = case.engine.decode(len(case.text), forced=case.text[1:], return_logits=True)
    assert torch.equal(together.logits, mine.logits)
    last = {layer: case.engine.memory.routing(layer) for layer in (1, 2)}
    for layer, routing in mine.routing.items():
        assert routing.ids.dtype == torch.int64 and routing.weights.dtype == routing.logits.dtype == torch.float32
        assert [tuple(part.shape) for part in routing] == [(3, 3), (3, 3), (3, 8)]
        assert all(torch.equal(part[-1], own) for part, own in zip(routing, last[layer], strict=True))


def test_another_schedule_on_the_same_memory(case, mine):
    other = forced.rescheduled(case.engine, "dynamic")
    assert other.memory is case.engine.memory and other.launcher.table.dynamic
    assert not case.engine.launcher.table.dynamic
    assert torch.equal(forced.megakernel_steps(other, case.text).logits, mine.logits)
    with pytest.raises(ValueError, match="schedule must be one of static, dynamic, not 'both'"):
        forced.rescheduled(case.engine, "both")


def test_an_expert_that_does_not_exist_is_refused(case, monkeypatch):
    class Broken:
        def run(self, **launch):
            result = case.engine.launcher.run(**launch)
            case.engine.memory.routing(2).ids[1] = 8
            return result

    engine = forced.rescheduled(case.engine, "static")
    engine.launcher = Broken()
    with pytest.raises(RuntimeError, match="layer 2: the megakernel chose an expert that does not exist"):
        forced.megakernel_steps(engine, case.text)


def test_passes_of_the_reference(case, mine):
    free = forced.expected_steps(case)
    again = forced.reference_steps(case)
    assert torch.equal(again.logits, free.logits)
    for layer, routing in free.routing.items():
        assert all(torch.equal(*pair) for pair in zip(routing, again.routing[layer], strict=True))
    same = forced.reference_steps(case, free.routing, with_weights=True)
    assert torch.equal(same.logits, free.logits)
    ids = forced.reference_steps(case, mine.routing)
    both = forced.reference_steps(case, mine.routing, with_weights=True)
    for layer, routing in mine.routing.items():
        assert torch.equal(ids.routing[layer].ids, routing.ids)
        assert torch.equal(both.routing[layer].weights, routing.weights)
        assert not torch.equal(ids.routing[layer].weights, routing.weights)
    wide = forced.reference_steps(case, mine.routing, wide=True)
    assert wide.logits.dtype == torch.float32
    assert not torch.equal(wide.logits, wide.logits.bfloat16().float()), "logits of bf16 would be"
    assert forced.difference(ids.logits, wide.logits)["cosine"][1] > 0.999


def test_differences_by_hand():
    found = forced.difference(torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
    assert found == {"cosine": pytest.approx([1, 0]), "max_abs_diff": [0, 2], "max_abs_ref": [4, 2]}


# ------------------------------------------------------------------------------------------------------------- routing

SMALL = dataclasses.replace(TINY, n_routed_experts=4, num_experts_per_tok=2)


@dataclasses.dataclass
class Fake:
    """As much of a case as rows need."""

    config = SMALL
    seed = 0


def steps_of(*logits, ids=None):
    """Steps of one layer whose router says so, or chooses otherwise."""
    logits = torch.tensor(logits)
    chosen, factors = reference.route(logits, SMALL)
    chosen = chosen if ids is None else torch.tensor(ids)
    return forced.Steps(torch.zeros(len(logits), 5), {1: Routing(chosen, factors, logits)})


def statuses(*steps):
    return [row["status"] for row in forced.routing_rows(Fake(), "static", *steps)]


def test_choices_of_experts_by_hand():
    plain = [9.0, 5.0, 4.9, 0.0]
    turned = [9.0, 4.94, 4.96, 0.0]  # error 0.06, margin 0.1: wider than the error, within those of both logits
    apart = [9.0, 4.8, 5.0, 0.0]  # error 0.2
    same = steps_of(plain)
    assert statuses(same, same, same) == []
    assert statuses(steps_of(apart), same, same) == ["near-tie"]
    assert statuses(steps_of(turned), same, same) == ["both errors"]
    # chosen otherwise than its own logits say
    assert statuses(steps_of(plain, ids=[[0, 2]]), same, same) == ["unexplained"]
    assert statuses(steps_of(plain, ids=[[0, 0]]), same, same) == ["unexplained"]
    # an error that is no rounding: 5 % of 9 is 0.45
    assert statuses(steps_of([9.0, 4.5, 5.0, 0.0]), same, same) == ["unexplained"]
    assert statuses(steps_of([9.0, math.nan, 5.0, 0.0], ids=[[0, 2]]), same, same) == ["unexplained"]
    # unless the reference in bf16 is as far from fp32
    far, fp32 = steps_of([9.0, 4.4, 5.0, 0.0]), steps_of([9.0, 4.5, 4.6, 0.0])
    assert statuses(far, same, same) == ["unexplained"]
    assert statuses(far, same, same, fp32) == ["near-tie"]
    assert statuses(far, same, same, same) == ["unexplained"]
    # the same experts in another order are the same
    assert statuses(steps_of(plain, ids=[[1, 0]]), same, same) == []


def test_what_follows_a_swap_is_downstream():
    free = steps_of([9.0, 5.0, 4.9, 0.0], [9.0, 5.0, 1.0, 0.0])
    path = steps_of([9.0, 5.0, 4.9, 0.0], [9.0, 1.0, 5.0, 0.0])
    mine = steps_of([9.0, 4.85, 5.05, 0.0], [9.0, 1.0, 5.0, 0.0])
    rows = forced.routing_rows(Fake(), "static", mine, free, path)
    assert [row["status"] for row in rows] == ["near-tie", "downstream"]
    assert rows[0]["margin"] == pytest.approx(0.1, rel=1e-5) and rows[0]["swapped"] == rows[0]["path_swapped"] == 1
    assert rows[1]["path_swapped"] == 0 and rows[1]["path_margin"] is None and rows[1]["margin"] == 4
    # nothing was swapped before: the reference itself is not the same twice
    late = [
        forced.Steps(one.logits[1:], {1: Routing(*(part[1:] for part in one.routing[1]))}) for one in (mine, free, path)
    ]
    assert statuses(*late) == ["unexplained"]
    # a swap along the path that the reference's own path does not show
    hidden = steps_of([9.0, 4.85, 5.05, 0.0], [9.0, 4.85, 5.05, 0.0])
    free, path = steps_of([9.0, 5.0, 4.9, 0.0], [9.0, 4.85, 5.05, 0.0]), steps_of(*[[9.0, 5.0, 4.9, 0.0]] * 2)
    rows = forced.routing_rows(Fake(), "static", hidden, free, path)
    assert [(row["swapped"], row["path_swapped"], row["status"]) for row in rows] == [
        (1, 1, "near-tie"),
        (0, 1, "near-tie"),
    ]


# ---------------------------------------------------------------------------------------------------------------- gates


def test_a_swap_is_found_and_explains_its_step(case, mine):
    compared = forced.compare(case, mine)
    assert compared.choices == 2 * len(case.text)
    assert [(row["step"], row["layer"], row["status"]) for row in compared.routing] == [(0, 1, "near-tie")]
    first, *others = compared.steps
    assert all(set(row) == set(forced.STEP_COLUMNS) for row in compared.steps)
    assert (first["missed"], first["explained"], first["swaps"]) == ("cosine", "routing", 1)
    assert first["cosine"] < forced.LOGIT_COSINE < first["path_cosine"]
    assert [(row["missed"], row["explained"], row["swaps"]) for row in others] == [("", "", 0)] * 2
    assert compared.wide is None and first["own_cosine"] is None
    always = forced.compare(case, mine, always_wide=True)
    assert always.steps[0]["own_cosine"] > 0.9995 and always.steps[0]["explained"] == "routing"


@pytest.mark.parametrize("step", [0, 1])
def test_a_wrong_step_is_not_explained(step, case, mine):
    logits = mine.logits.clone()
    logits[step] += (
        0.1 * logits[step].abs().max() * torch.randn(TINY.vocab_size, generator=torch.Generator().manual_seed(0))
    )
    compared = forced.compare(case, dataclasses.replace(mine, logits=logits))
    assert compared.steps[step]["missed"].startswith("cosine")
    assert compared.steps[step]["explained"] == "unexplained"
    assert compared.wide is not None, "the reference in fp32 was asked"
    assert all(row["explained"] != "unexplained" for row in compared.steps if row["step"] != step)


def test_a_nan_misses_and_is_not_explained(case, mine):
    logits = mine.logits.clone()
    logits[1, 5] = math.nan
    row = forced.compare(case, dataclasses.replace(mine, logits=logits)).steps[1]
    assert row["missed"].startswith("cosine") and row["explained"] == "unexplained"


def test_wrong_experts_explain_nothing(case, mine):
    """Others than the router's own, taken on the way; the logits are what the reference computes with them."""
    ids = mine.routing[2].ids.clone()
    ids[1] = mine.routing[2].logits[1].argsort()[:3]
    routing = mine.routing | {2: mine.routing[2]._replace(ids=ids)}
    logits = forced.reference_steps(case, routing).logits
    compared = forced.compare(case, forced.Steps(logits, routing))
    assert [row["status"] for row in compared.routing if row["step"] == 1] == ["unexplained"]
    assert compared.steps[1]["missed"].startswith("cosine")
    assert compared.steps[1]["explained"] == "unexplained"
    assert compared.steps[1]["path_cosine"] == pytest.approx(1)


ROW = dict(
    step=3, missed="cosine", found=7, max_abs_ref=20.0, path_cosine=0.9, path_max_abs_diff=0.5, path_behind=0.0,
    path_both=0.8, own_cosine=None, reference_cosine=None, own_error=None, reference_error=None,
)  # fmt: skip
FP32 = dict(own_cosine=0.98, reference_cosine=0.994, own_error=0.4, reference_error=0.3)
"""The megakernel is 1.8 times as far from fp32 as the reference, its two logits at most 1.3 times."""
NEAR, LATE = dict(step=2, status="near-tie"), dict(step=4, status="unexplained")


@pytest.mark.parametrize(
    ("changes", "routing", "token", "expected"),
    [
        (dict(missed=""), [dict(step=0, status="unexplained")], None, ""),
        ({}, [], None, "unexplained"),
        (dict(path_cosine=0.9996), [NEAR], None, "routing"),
        (dict(path_cosine=0.9996), [], None, "unexplained"),  # without a swap there is no other path
        (dict(path_cosine=0.9996), [NEAR, LATE], None, "routing"),
        (dict(path_cosine=0.9996), [NEAR, dict(step=3, status="unexplained")], None, "unexplained"),
        (FP32 | dict(own_cosine=0.9996, reference_cosine=0.9999), [], None, "rounding"),
        (FP32, [], None, "rounding"),
        (FP32 | dict(reference_cosine=0.996), [], None, "unexplained"),
        (FP32 | dict(own_cosine=math.nan), [], None, "unexplained"),
        (dict(missed="argmax"), [NEAR], None, "routing"),
        (dict(missed="argmax", path_behind=0.4), [], None, "near-tie"),
        (dict(missed="argmax", path_behind=0.6), [], None, "unexplained"),
        (dict(missed="argmax", path_behind=0.6), [], 8, "unexplained"),
        (dict(missed="argmax", path_behind=0.6), [], 7, "rounding"),
        (dict(missed="argmax", path_behind=math.nan), [NEAR], None, "unexplained"),
        # a difference above 5 % of the largest logit makes no near-tie, unless fp32 says that it is rounding
        (dict(missed="argmax", path_behind=0.4, max_abs_ref=9.0), [], None, "unexplained"),
        (FP32 | dict(missed="argmax", path_behind=0.4, max_abs_ref=9.0), [], None, "near-tie"),
        (FP32 | dict(missed="argmax", path_behind=0.4, max_abs_ref=9.0, own_error=0.7), [], None, "unexplained"),
        # wider than the largest difference, but not than those of the two logits
        (FP32 | dict(missed="argmax", path_behind=0.6), [], None, "both errors"),
        (FP32 | dict(missed="cosine, argmax", path_behind=0.6), [], None, "rounding, both errors"),
        (FP32 | dict(missed="argmax", path_behind=0.9), [], None, "unexplained"),
        (FP32 | dict(missed="argmax", path_behind=0.6, own_error=0.7), [], None, "unexplained"),
        (FP32 | dict(missed="argmax", path_behind=0.6, own_error=math.nan), [], None, "unexplained"),
        (FP32 | dict(missed="argmax", path_behind=0.6, reference_cosine=0.996), [], None, "unexplained"),
        (FP32 | dict(missed="argmax", path_behind=0.6), [dict(step=3, status="unexplained")], None, "unexplained"),
        (dict(missed="cosine, argmax", path_cosine=0.9996), [NEAR], None, "routing"),
        (dict(missed="cosine, argmax", path_cosine=0.9996, path_behind=0.4), [NEAR], None, "routing, near-tie"),
        (dict(missed="cosine, argmax", path_cosine=0.9996, path_behind=0.6), [NEAR], None, "unexplained"),
    ],
)
def test_explanations_by_hand(changes, routing, token, expected):
    assert forced.explain(ROW | changes, routing, token) == expected


def constructed(largest, other, seed):
    """Logits of one step: two large ones, and noise that differs by the seed."""
    noise = torch.randn(500, generator=torch.Generator().manual_seed(seed))
    base = 10 * torch.randn(500, generator=torch.Generator().manual_seed(0)).clamp(-3, 3) + noise
    base[:2] = torch.tensor([largest, other])
    return forced.Steps(base[None], {})


@pytest.mark.parametrize(
    ("largest", "other", "expected"),
    [
        (47.5, 48.5, "rounding, both errors"),  # 7 behind, no logit differs by as much
        (38.0, 48.5, "unexplained"),  # one of the two is more than twice as far from fp32 as any of the reference
        (47.5, 300.0, "unexplained"),  # a wrong logit hardly moves the cosine of all
    ],
)
def test_two_logits_that_err_in_opposite_directions(largest, other, expected):
    path, wide, mine = constructed(52.0, 45.0, 2), constructed(50.0, 47.0, 1), constructed(largest, other, 3)
    case = SimpleNamespace(
        seed=0, prompt=[0, 1], expected=SimpleNamespace(tokens=[0], margins=forced.decoding.top_margins(path.logits))
    )
    (row,) = rows = forced._step_rows(case, "static", mine, path, path, [])
    assert row["missed"] == "cosine, argmax" and row["explained"] == "unexplained"
    assert row["path_behind"] == 7 and row["path_both"] >= 7
    forced._add_wide(rows, mine, path, wide, [])
    assert row["explained"] == expected
    assert set(row) == set(forced.STEP_COLUMNS)


def test_prompts_are_those_of_the_reference_notebook(case):
    pytest.importorskip("transformers")
    problem = reference_run.build("tiny", torch.bfloat16, 2, PROMPT)
    assert problem.prompt == case.prompt
    weights = case.engine.weights
    assert all(torch.equal(weights[name], tensor) for name, tensor in problem.weights.items())
