"""Published times, speedups and errors of samplers and decoders (`data/reference/`), in our own results' names."""

import re

from fmms import paths

BASELINES = "one H200, torch 2.11.0+cu130, Triton 3.6.0, FlashInfer 0.6.8.post1, cold L2, n = 40"
PAPER = "FlashSampling, arXiv 2603.15854 v2"
MI300X = "published for a megakernel of DeepSeek-V2-Lite on one MI300X, 32 steps; its weights and prompt are not ours"
DECODES = "one H200, vLLM 0.20.2 and transformers 5.17.0, random or dummy weights, 1,024 prompt tokens"
GATES = "a megakernel on one MI300X, 27 layers of DeepSeek-V2-Lite in one launch, other weights, one token"

_CASES = {"qwen3_8b": "qwen3-8b", "dsv2_lite": "deepseek-v2-lite", "llama3_70b": "llama3-70b"}
_SYSTEMS = {
    "matmul": "matmul",
    "torch_gumbel": "torch-gumbel",
    "torch_multinomial": "torch-multinomial",
    "fi_from_logits": "flashinfer-logits",
    "fi_topk_topp": "flashinfer-topk-topp",
    "flashsampling": "flashsampling",
}
_PAPER_CASES = {(151936, 4096): "qwen3-8b", (128256, 8192): "llama3-70b"}
_DECODERS = {
    "vLLM [^,]+, ": "vllm",
    "HF transformers [^,]+ eager, ": "transformers-eager",
    "HF transformers [^,]+ CUDA graph, ": "transformers-graph",
    "HF transformers [^,]+ torch.compile [^,]+, ": "transformers-compile",
}
_PAPER_PEERS = {
    "FlashSampling vs Multinomial Sampling": "torch-multinomial",
    "FlashSampling vs FI2 (Gumbel-Max)": "flashinfer-logits",
}


def baselines():
    """Sampler times on an H200 as a DataFrame: case, V, D, H, system, timing, median_us, relative.

    relative: over the matmul of the same run, timed alike. Where a system was timed both ways, CUDA-graph replay is
    kept. Raises FileNotFoundError without the file.
    """
    table = _read("h200_sampler_baselines.csv")
    keys = ["case", "H", "timing"]
    own_run = table["system"] == "matmul_flashsampling_run"
    yardsticks = {
        True: table[own_run].set_index(keys)["median_us"],
        False: table[table["system"] == "matmul"].set_index(keys)["median_us"],
    }
    table = table[table["system"].isin(_SYSTEMS)].copy()
    table["relative"] = [
        row.median_us / yardsticks[row.system == "flashsampling"].get((row.case, row.H, row.timing), float("nan"))
        for row in table.itertuples()
    ]
    table = table.replace({"case": _CASES, "system": _SYSTEMS}).dropna(subset=["relative"])
    # "cuda_graph" sorts before "events"
    return table.sort_values("timing", kind="stable").drop_duplicates(["case", "H", "system"]).sort_index()


def paper_speedups():
    """FlashSampling's published speedups on one GPU as a DataFrame: case, V, D, H, gpu, over, speedup, table.

    over: the system that it is compared with. Raises FileNotFoundError without the file.
    """
    table = _read("flashsampling_tables.csv")
    table = table[(table["metric"] == "speedup") & (table["tp"] == 1) & table["system"].isin(_PAPER_PEERS)]
    table = table[table["table"].isin(["Table 4", "Table 5"])].copy()
    table["case"] = [_PAPER_CASES.get((int(row.V), int(row.D))) for row in table.itertuples()]
    table["over"] = table["system"].map(_PAPER_PEERS)
    table = table.rename(columns={"value": "speedup"}).dropna(subset=["case"])
    table["speedup"] = table["speedup"].astype(float)
    return table[["case", "V", "D", "H", "gpu", "over", "speedup", "table"]].astype({"H": int})


def decode_baselines():
    """Times of a decode step of DeepSeek-V2-Lite on an H200 as a DataFrame: system, config, batch, ms_per_token, note.

    config: what sets it apart from other rows of the system. Raises FileNotFoundError without the file.
    """
    table = _read("h200_decode_baselines.csv")
    named = [
        next((name, text[found.end() :]) for start, name in _DECODERS.items() if (found := re.match(start, text)))
        for text in table["system"]
    ]
    table["system"], table["config"] = zip(*named, strict=True)
    return table[["system", "config", "batch", "ms_per_token", "note"]]


def layer_gates():
    """Errors of each layer that a decode of DeepSeek-V2-Lite on an MI300X published, as a DataFrame: layer,
    max_abs_diff, max_abs_ref, rel (their ratio), cosine, k_row_rel, v_row_rel, routing_ids.

    k_row_rel, v_row_rel: of the token's keys and values in the cache. Raises FileNotFoundError without the file.
    """
    return _read("mi300x_layer_gates.csv")


def teacher_forced():
    """Gates of a megakernel for DeepSeek-V2-Lite on one MI300X as a DataFrame: section, step, layer, metric, value,
    threshold, result, note.

    section: "gate", or what was run again with routing forced; value: text, a number or a fraction such as "28/32".
    Raises FileNotFoundError without the file.
    """
    return _read("mi300x_teacher_forced.csv", value=str)


def read_ceiling() -> float:
    """The best read bandwidth of an H200 that is published here, in bytes per second.

    Raises FileNotFoundError without the file.
    """
    table = _read("h200_ceilings.csv")
    best = table[table["quantity"].str.startswith("best stream read") & (table["unit"] == "TB/s")]
    return float(best["value"].max()) * 1e12


def _read(name: str, **types):
    try:
        import pandas
    except ImportError as error:
        raise ImportError("published numbers are read with pandas: pip install -e '.[notebooks]'") from error
    path = paths.reference_dir() / name
    if not path.is_file():
        raise FileNotFoundError(f"data/reference/{name} is missing; it is part of the project's repository")
    return pandas.read_csv(path, dtype=types)
