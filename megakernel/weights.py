"""Weights of the model under their Hugging Face names: from a safetensors checkpoint, or random.

A checkpoint is read with safetensors alone: nothing is unpickled and none of its code runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch

from megakernel.config import ModelConfig

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""Types of tensor that are read, by their names in a safetensors file."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ROUTER = "mlp.gate.weight"
"""End of a router's name. Routers are applied in fp32, and transformers saves them so whatever the others' type."""


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint, in the order of the model. Matrices are [out, in]."""
    hidden, heads = config.hidden_size, config.num_attention_heads

    def swiglu(prefix, width):
        yield f"{prefix}.gate_proj.weight", (width, hidden)
        yield f"{prefix}.up_proj.weight", (width, hidden)
        yield f"{prefix}.down_proj.weight", (hidden, width)

    shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        expanded = heads * (config.qk_nope_head_dim + config.v_head_dim)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{attention}.q_proj.weight"] = (heads * config.qk_head_dim, hidden)
        shapes[f"{attention}.kv_a_proj_with_mqa.weight"] = (config.kv_lora_rank + config.qk_rope_head_dim, hidden)
        shapes[f"{attention}.kv_a_layernorm.weight"] = (config.kv_lora_rank,)
        shapes[f"{attention}.kv_b_proj.weight"] = (expanded, config.kv_lora_rank)
        shapes[f"{attention}.o_proj.weight"] = (hidden, heads * config.v_head_dim)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        if not config.is_moe(layer):
            shapes.update(swiglu(f"{prefix}.mlp", config.intermediate_size))
            continue
        shapes[f"{prefix}.{ROUTER}"] = (config.n_routed_experts, hidden)
        for expert in range(config.n_routed_experts):
            shapes.update(swiglu(f"{prefix}.mlp.experts.{expert}", config.moe_intermediate_size))
        shapes.update(swiglu(f"{prefix}.mlp.shared_experts", config.shared_width))
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check(weights: dict[str, torch.Tensor], config: ModelConfig) -> None:
    """Raise ValueError, as `load` does, unless `weights` holds exactly the tensors that `config` asks for."""
    _check_shapes({name: tuple(tensor.shape) for name, tensor in weights.items()}, config)
    _check_dtypes({name: tensor.dtype for name, tensor in weights.items()})


def load(
    folder: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:
    """Read a Hugging Face checkpoint: `model.safetensors`, or the shards of `model.safetensors.index.json`.

    All names, shapes and types are checked before the first tensor is read.

    Args:
        folder: what holds the checkpoint.
        config: of the model, see `ModelConfig.from_file`.
        dtype: what the tensors are converted to; None keeps theirs.
        device: where they go.

    Returns:
        Tensors by name: those of `expected_shapes`, in its order. All have one dtype (bf16, fp16 or fp32) but for
        routers (`mlp.gate.weight`), which may be fp32 if `dtype` is None.

    Raises:
        FileNotFoundError: there is no such folder, no safetensors checkpoint in it, or a shard is missing.
        ValueError: a tensor is missing, unexpected, stored twice, or has another shape or type than expected; or the
            index or a file is damaged. The message names the tensor or file, what was expected and what was found.
        ImportError: safetensors is not installed; the extra `models` holds it.
    """
    from safetensors import SafetensorError, safe_open

    where: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for path in _files(Path(folder)):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dictionary
                    if name in where:
                        raise ValueError(f"tensor {name}: expected once, found in {where[name].name} and {path.name}")
                    part = file.get_slice(name)
                    kind = part.get_dtype()
                    if kind not in DTYPES:
                        raise ValueError(f"tensor {name}: expected one of {', '.join(DTYPES)}, found {kind}")
                    where[name], shapes[name], dtypes[name] = path, tuple(part.get_shape()), DTYPES[kind]
        except SafetensorError as error:
            raise ValueError(f"{path}: expected a safetensors file, found one that can't be read: {error}") from error
    _check_shapes(shapes, config)
    _check_dtypes(dtypes)

    weights = dict.fromkeys(expected_shapes(config))
    for path in dict.fromkeys(where.values()):
        with safe_open(path, framework="pt", device=str(device)) as file:
            for name in file.keys():  # noqa: SIM118
                weights[name] = file.get_tensor(name).to(dtype=dtype)
    return weights


def random(
    config: ModelConfig, seed: int, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Random weights of full size, the same for the same seed, dtype and type of device.

    Matrices are N(0, initializer_range^2). Each row of lm_head is scaled by exp(N(0, 1)), so that margins between the
    largest logits resemble a trained model's; plain Gaussian rows tie in bf16 at several per cent of the steps. Norm
    weights are N(1, 0.1^2), so that leaving one out shows. Each tensor has a generator of its own, keyed by the seed
    and its name, and doesn't depend on the others.

    Args:
        config: of the model.
        seed: any integer.
        dtype: of all tensors; they are drawn in fp32 and rounded.
        device: where they are made.

    Returns:
        Tensors by name, those of `expected_shapes`.
    """
    device = torch.device(device)
    weights = {}
    for name, shape in expected_shapes(config).items():
        generator = torch.Generator(device)
        generator.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "little"))
        values = torch.randn(shape, generator=generator, device=device)
        if len(shape) == 1:
            values = values.mul_(0.1).add_(1.0)
        else:
            values = values.mul_(config.initializer_range)
        if name == "lm_head.weight":
            values *= torch.randn((shape[0], 1), generator=generator, device=device).exp()
        weights[name] = values.to(dtype)
    return weights


def _files(folder: Path) -> Iterator[Path]:
    """The safetensors files of a checkpoint."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    if (folder / SINGLE).is_file():
        yield folder / SINGLE
        return
    index = folder / INDEX
    if not index.is_file():
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        also = f", and pickled files such as {pickled[0]} are never read" if pickled else ""
        raise FileNotFoundError(f"{folder}: expected {SINGLE} or {INDEX}, found neither{also}")
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: expected a JSON object with a weight_map of names, found {error!r}") from error
    for shard in shards:
        # an index must not lead out of its folder
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ValueError(f"{index}: expected the name of a safetensors file in its folder, found {shard!r}")
        if not (folder / shard).is_file():
            raise FileNotFoundError(f"{folder / shard}: expected by {INDEX}, found no such file")
        yield folder / shard


def _check_shapes(found: dict[str, tuple[int, ...]], config: ModelConfig) -> None:
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name not in found:
            more = sum(other not in found for other in expected) - 1
            also = f" ({more} others are missing too)" if more else ""
            raise ValueError(f"tensor {name}: expected shape {shape}, found no such tensor{also}")
        if found[name] != shape:
            raise ValueError(f"tensor {name}: expected shape {shape}, found {found[name]}")
    for name, shape in found.items():
        if name not in expected:
            raise ValueError(f"tensor {name}: expected no such tensor, found shape {shape}")


def _check_dtypes(found: dict[str, torch.dtype]) -> None:
    """Raise unless all tensors have one type, but for routers, which may be fp32."""
    first = found["model.embed_tokens.weight"]
    if first not in DTYPES.values():
        raise ValueError(f"tensor model.embed_tokens.weight: expected bf16, fp16 or fp32, found {first}")
    for name, dtype in found.items():
        if dtype != first and not (name.endswith(ROUTER) and dtype == torch.float32):
            raise ValueError(f"tensor {name}: expected {first}, as model.embed_tokens.weight has, found {dtype}")
