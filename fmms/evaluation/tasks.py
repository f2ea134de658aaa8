"""Problems with one right number each, and the prompts that ask a language model for it.

A task's responses are graded by fmms.evaluation.gsm8k; who answers is fmms.evaluation.variants' matter.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fmms.evaluation import gsm8k
from fmms.evaluation.gsm8k import Problem

PRODUCTS = "products of 2 to 12"
"""How the problems of `products` are labelled: made here, a task that a model of 135M parameters gets right in part."""

FACTORS = (2, 12)
EXAMPLES = (("3 * 4", 12), ("7 * 5", 35))
"""Worked examples ahead of every product. Two: with four SmolLM2-135M is right less often."""

INSTRUCTION = "{question}\n\nThink step by step. End with one line: #### and the number, such as #### 42"


@dataclass(frozen=True)
class Task:
    """problems and prompts: one of each per question, in one order. opening: what goes before a continuation to make
    the response that is graded: a prompt that leaves off where the number must follow asks for no `#### ` of its own.
    one_line: whether a line's end ends the response. chat: whether prompts are messages of a user."""

    name: str
    problems: tuple[Problem, ...]
    prompts: tuple[str, ...]
    opening: str = ""
    one_line: bool = False
    chat: bool = False

    def texts(self, tokenizer) -> list[str]:
        """The prompts as the model reads them: through its chat template where they are messages."""
        if not self.chat:
            return list(self.prompts)
        messages = [[{"role": "user", "content": prompt}] for prompt in self.prompts]
        return [tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for m in messages]

    def ends(self, tokenizer) -> list[int]:
        """The tokens that end a response."""
        ends = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        if self.one_line:
            ends += tokenizer("\n", add_special_tokens=False).input_ids[-1:]
        return ends


def load(name: str, n: int, seed: int = 0, path: str | Path | None = None) -> Task:
    """A task of n problems: "products", "gsm_symbolic" (needs reasoning-gym) or "gsm8k" (its first n; path: its file).

    The same problems for a seed. Those of "products" and "gsm_symbolic" are drawn independently, so one may come twice.

    Raises:
        ValueError: another name, or n out of range. What the loaders of fmms.evaluation.gsm8k raise.
    """
    if n < 1:
        raise ValueError(f"n is {n}; expected at least one problem")
    if name == "products":
        problems = products(n, seed)
        shots = "".join(f"{question} = {answer}\n" for question, answer in EXAMPLES)
        prompts = tuple(f"{shots}{problem.question} = " for problem in problems)
        return Task(name, tuple(problems), prompts, opening="#### ", one_line=True)
    if name == "gsm_symbolic":
        problems = gsm8k.gsm_symbolic(n, seed)
    elif name == "gsm8k":
        problems = gsm8k.gsm8k(path)[:n]
    else:
        raise ValueError(f"task is {name!r}; expected products, gsm_symbolic or gsm8k")
    if len(problems) < n:
        raise ValueError(f"n is {n}, but {name} has {len(problems)} problems")
    return Task(name, tuple(problems), _instructions(problems), chat=True)


def products(n: int, seed: int = 0) -> list[Problem]:
    """n products of two numbers from 2 to 12, drawn independently."""
    rng = random.Random(seed)
    drawn = [(rng.randint(*FACTORS), rng.randint(*FACTORS)) for _ in range(n)]
    return [Problem(i, f"{a} * {b}", str(a * b), PRODUCTS) for i, (a, b) in enumerate(drawn)]


def _instructions(problems: Sequence[Problem]) -> tuple[str, ...]:
    # not str.format with the question as template: it may hold braces
    return tuple(INSTRUCTION.replace("{question}", problem.question) for problem in problems)
