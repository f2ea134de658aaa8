"""LM heads that are measured: vocabulary V, width D, and the numbers of rows H."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One LM head: weight [V, D]."""

    name: str
    V: int
    D: int
    label: str
    """The model it belongs to, for figures."""


ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Hidden rows decoded at once."""

MODELS = ("qwen3-1.7b", "qwen3-8b", "llama3-70b", "gpt-oss-120b", "kimi-k2.5", "deepseek-v2-lite")
TINY = ("tiny", "tiny-ragged")

CASES = {
    case.name: case
    for case in (
        Case("qwen3-1.7b", 151936, 2048, "Qwen3-1.7B"),
        Case("qwen3-8b", 151936, 4096, "Qwen3-8B"),
        Case("llama3-70b", 128256, 8192, "Llama-3-70B"),
        Case("gpt-oss-120b", 201088, 2880, "gpt-oss-120b"),
        Case("kimi-k2.5", 163840, 7168, "Kimi-K2.5"),
        Case("deepseek-v2-lite", 102400, 2048, "DeepSeek-V2-Lite"),
        # for a CPU: one that fills tiles, one that doesn't
        Case("tiny", 2048, 64, "tiny"),
        Case("tiny-ragged", 1777, 40, "tiny, ragged"),
    )
}


def get(name: str) -> Case:
    """The case of this name; ValueError that lists them."""
    if name not in CASES:
        raise ValueError(f"case is {name!r}; expected one of {', '.join(CASES)}")
    return CASES[name]
