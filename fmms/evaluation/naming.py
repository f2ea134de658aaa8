"""The one table from internal names to the names that the paper uses, for the figures and tables of evaluation.

Rows, files and code keep the internal names; a figure asks here for every word that it shows. Colours are
fmms.plotting's.
"""

from fmms import plotting
from fmms.evaluation import gsm8k, tasks

NAMES = {
    # samplers
    "matmul": "LM-head matmul alone",
    "fmms": "FMMS",
    "fmms-token": "FMMS, noise per token",
    "fmms-topk-topp": "FMMS, top-k and top-p",
    "torch-multinomial": "PyTorch multinomial",
    "torch-gumbel": "PyTorch Gumbel-max",
    "flashinfer-logits": "FlashInfer, from logits",
    "flashinfer-topk-topp": "FlashInfer, top-k and top-p",
    "vllm-topk-topp": "vLLM, top-k and top-p",
    "transformers": "Hugging Face transformers",
    "control": "control: noise too wide",
    # settings of samplers
    "plain": "no truncation",
    "truncated": "top-k and top-p",
    # servers
    "vllm": "vLLM",
    "vllm-fmms": "vLLM with FMMS",
    "vllm-flashinfer": "vLLM with FlashInfer",
    "sample-a": "server A (made up)",
    "sample-b": "server B (made up)",
    # models and problems
    "smollm2": "SmolLM2-135M-Instruct",
    "gsm8k": gsm8k.GSM8K,
    "gsm_symbolic": gsm8k.GSM_SYMBOLIC,
    "products": tasks.PRODUCTS,
    # columns
    "system": "system",
    "variant": "variant",
    "trial": "trial",
    "concurrency": "concurrent requests",
    "correct": "right answers (%)",
    "difference": "difference (percentage points)",
    "p_value": "p",
    "p_holm": "p, Holm-corrected",
    "mcnemar_p": "p, exact McNemar",
    "setting": "setting",
    "power": "chance to be found",
    "perplexity": "perplexity",
    "distance": "total variation distance (%)",
    "speedup": "speed-up",
    "mean_tpot_ms": "time per output token, mean (ms)",
    "median_tpot_ms": "time per output token, median (ms)",
    "p99_tpot_ms": "time per output token, 99th percentile (ms)",
    "mean_itl_ms": "time between tokens, mean (ms)",
    "median_itl_ms": "time between tokens, median (ms)",
    "mean_ttft_ms": "time to first token, mean (ms)",
    "median_ttft_ms": "time to first token, median (ms)",
    "p99_ttft_ms": "time to first token, 99th percentile (ms)",
    "mean_e2el_ms": "time to last token, mean (ms)",
    "median_e2el_ms": "time to last token, median (ms)",
    "output_tok_s": "output throughput (tokens/s)",
    "total_tok_s": "total throughput (tokens/s)",
    "request_s": "request throughput (requests/s)",
    "engine_generation_tok_s": "engine's generation throughput (tokens/s)",
    "engine_running": "requests running",
    "engine_waiting": "requests waiting",
    "engine_kv_percent": "KV cache in use (%)",
    "n": "n",
    "low": "95 % interval, low",
    "high": "95 % interval, high",
    "estimate": "mean",
}

LOOKS = {
    "transformers": {"color": "#DE8F05", "marker": "^", "linestyle": "--"},
    "control": {"color": "#949494", "marker": "x", "linestyle": ":"},
    "vllm": plotting.DECODERS["vllm"],
    "vllm-fmms": plotting.SYSTEMS["fmms"],
    "vllm-flashinfer": plotting.SYSTEMS["flashinfer-topk-topp"],
    "sample-a": {"color": "#949494", "marker": "s", "linestyle": "--"},
    "sample-b": {"color": "#CA9161", "marker": "o", "linestyle": "-"},
}
"""Colour, marker and dash of servers and of samplers that fmms.plotting doesn't know."""


def paper(name: str) -> str:
    """The paper's name of a system, variant, problem set or column; ValueError for a name that the table lacks."""
    try:
        return NAMES[name]
    except KeyError:
        raise ValueError(
            f"no name for the paper is known for {name!r}; add it to NAMES in fmms/evaluation/naming.py "
            f"(known: {', '.join(NAMES)})"
        ) from None


def style(name: str) -> dict:
    """Colour, marker, dash and the paper's label of one system, as keywords for `Axes.plot`."""
    look = LOOKS.get(name) or plotting.system_style(name)
    return {**look, "label": paper(name)}


def columns(frame):
    """A DataFrame with the paper's names as its columns' names; columns that the table lacks keep theirs."""
    return frame.rename(columns={column: NAMES[column] for column in frame.columns if column in NAMES})
