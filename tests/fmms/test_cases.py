"""fmms.bench.cases: the heads that are measured."""

import pytest

from fmms.bench import cases


def test_the_six_heads():
    assert {name: (cases.get(name).V, cases.get(name).D) for name in cases.MODELS} == {
        "qwen3-1.7b": (151936, 2048),
        "qwen3-8b": (151936, 4096),
        "llama3-70b": (128256, 8192),
        "gpt-oss-120b": (201088, 2880),
        "kimi-k2.5": (163840, 7168),
        "deepseek-v2-lite": (102400, 2048),
    }
    assert set(cases.CASES) == {*cases.MODELS, *cases.TINY}
    assert cases.ROWS == (1, 2, 4, 8, 16, 32, 64, 128, 256)


def test_the_tiny_ones_suit_a_cpu_and_one_is_ragged():
    tiny = [cases.get(name) for name in cases.TINY]
    assert all(case.V * case.D < 1 << 18 for case in tiny)
    assert any(case.V % 128 and case.D % 16 for case in tiny)


def test_an_unknown_case_is_named():
    with pytest.raises(ValueError, match=r"case is 'gpt-2'; expected one of qwen3-1\.7b"):
        cases.get("gpt-2")
