"""Checkpoints are read whole or refused with a name and two shapes; random weights follow their rule."""

import dataclasses
import json
import pickle

import pytest
import torch

from megakernel import weights
from megakernel.config import TINY, V2_LITE

safetensors_torch = pytest.importorskip("safetensors.torch")
save_file = safetensors_torch.save_file

ROUTER = "model.layers.1.mlp.gate.weight"
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def tensors():
    return weights.random(TINY, 0)


def single(folder, tensors):
    save_file(tensors, folder / weights.SINGLE)


def sharded(folder, tensors, count=3):
    """Write shards and the index; returns the index, for tests to damage."""
    names = list(tensors)
    where = {name: f"model-{n % count + 1:05}-of-{count:05}.safetensors" for n, name in enumerate(names)}
    for shard in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == shard}, folder / shard)
    index = {"metadata": {}, "weight_map": where}
    (folder / weights.INDEX).write_text(json.dumps(index))
    return index


@pytest.mark.parametrize("write", [single, sharded])
def test_checkpoints_come_back(write, tensors, tmp_path):
    write(tmp_path, tensors)
    got = weights.load(tmp_path, TINY)
    assert list(got) == list(weights.expected_shapes(TINY))
    assert all(torch.equal(got[name], tensors[name]) and got[name].dtype == torch.bfloat16 for name in tensors)


def test_dtype_converts_everything(tensors, tmp_path):
    single(tmp_path, {name: tensor.float() if name == ROUTER else tensor for name, tensor in tensors.items()})
    got = weights.load(tmp_path, TINY)
    assert {name for name in got if got[name].dtype != torch.bfloat16} == {ROUTER}
    got = weights.load(str(tmp_path), TINY, dtype=torch.float32)
    assert {tensor.dtype for tensor in got.values()} == {torch.float32}
    assert torch.equal(got[Q], tensors[Q].float())


def test_v2_lite_has_all_its_parameters():
    shapes = weights.expected_shapes(V2_LITE)
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert total / 1e9 == pytest.approx(15.706, abs=5e-4)  # the size that its model card rounds to 16B
    assert shapes["model.layers.26.mlp.experts.63.down_proj.weight"] == (2048, 1408)
    assert shapes["model.layers.0.mlp.gate_proj.weight"] == (10944, 2048)
    assert "model.layers.27.input_layernorm.weight" not in shapes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({Q: None}, f"tensor {Q}: expected shape (96, 64), found no such tensor"),
        ({Q: None, ROUTER: None}, f"tensor {Q}: expected shape (96, 64), found no such tensor (1 others"),
        ({Q: torch.zeros(64, 96).bfloat16()}, f"tensor {Q}: expected shape (96, 64), found (64, 96)"),
        ({"more": torch.zeros(3).bfloat16()}, "tensor more: expected no such tensor, found shape (3,)"),
        ({Q: torch.zeros(96, 64)}, f"tensor {Q}: expected torch.bfloat16, as model.embed_tokens.weight has, found"),
        ({Q: torch.zeros(96, 64, dtype=torch.int8)}, f"tensor {Q}: expected one of BF16, F16, F32, found I8"),
        ({Q: torch.zeros(96, 64).to(torch.float8_e4m3fn)}, f"tensor {Q}: expected one of BF16, F16, F32, found F8"),
    ],
    ids=["missing", "two missing", "misshaped", "unexpected", "other dtype", "int8", "fp8"],
)
@pytest.mark.parametrize("write", [single, sharded])
def test_wrong_tensors_are_named(write, change, message, tensors, tmp_path):
    write(tmp_path, {name: tensor for name, tensor in {**tensors, **change}.items() if tensor is not None})
    with pytest.raises(ValueError) as error:
        weights.load(tmp_path, TINY)
    assert message in str(error.value)


def test_another_config_is_told_apart(tensors, tmp_path):
    single(tmp_path, tensors)
    with pytest.raises(ValueError, match=r"layers\.3\.input_layernorm\.weight: expected shape \(64,\), found no such"):
        weights.load(tmp_path, dataclasses.replace(TINY, num_hidden_layers=4))


def test_damaged_folders(tensors, tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        weights.load(tmp_path / "none", TINY)
    with pytest.raises(FileNotFoundError, match=r"found neither$"):
        weights.load(tmp_path, TINY)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(1))
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin are never read"):
        weights.load(tmp_path, TINY)
    (tmp_path / weights.SINGLE).write_bytes(pickle.dumps(1))
    with pytest.raises(ValueError, match=r"model\.safetensors: expected a safetensors file"):
        weights.load(tmp_path, TINY)


def test_damaged_indices(tensors, tmp_path):
    index = sharded(tmp_path, tensors)
    path = tmp_path / weights.INDEX
    for text in ("{", "{}", "[]", '{"weight_map": 3}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="expected a JSON object with a weight_map"):
            weights.load(tmp_path, TINY)
    for shard in ("../model-00001-of-00003.safetensors", "pytorch_model.bin"):
        path.write_text(json.dumps({"weight_map": {**index["weight_map"], Q: shard}}))
        with pytest.raises(ValueError, match="expected the name of a safetensors file in its folder"):
            weights.load(tmp_path, TINY)
    path.write_text(json.dumps({"weight_map": {**index["weight_map"], Q: "model-4.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"model-4\.safetensors: expected by"):
        weights.load(tmp_path, TINY)
    save_file({Q: tensors[Q]}, tmp_path / "model-4.safetensors")
    with pytest.raises(ValueError, match=rf"tensor {Q}: expected once, found in .* and model-4\.safetensors"):
        weights.load(tmp_path, TINY)


def test_random_is_deterministic(tensors):
    again, other = weights.random(TINY, 0), weights.random(TINY, 1)
    assert {name: tuple(tensor.shape) for name, tensor in again.items()} == weights.expected_shapes(TINY)
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    assert not any(torch.equal(other[name], tensors[name]) for name in tensors)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    wide = weights.random(TINY, 0, torch.float32)
    assert all(torch.equal(wide[name].bfloat16(), tensors[name]) for name in tensors)
    weights.check(tensors, TINY)
    with pytest.raises(ValueError, match="found no such tensor"):
        weights.check({}, TINY)


def test_random_tensors_dont_depend_on_each_other(tensors):
    deeper = weights.random(dataclasses.replace(TINY, num_hidden_layers=4), 0)
    assert all(torch.equal(deeper[name], tensors[name]) for name in tensors)


def test_random_scales():
    drawn = weights.random(dataclasses.replace(TINY, vocab_size=4096), 3, torch.float32)
    assert drawn["model.embed_tokens.weight"].std() == pytest.approx(0.125, rel=0.01)
    assert drawn[Q].std() == pytest.approx(0.125, rel=0.05)
    norm = drawn["model.norm.weight"]
    assert norm.mean() == pytest.approx(1, abs=0.05)
    assert norm.std() == pytest.approx(0.1, rel=0.4)
    # log of the row norm, less that of a row of unit scale, is N(0, 1)
    scales = drawn["lm_head.weight"].norm(dim=1).log() - (0.125 * 8 * torch.ones(())).log()
    assert scales.mean() == pytest.approx(0, abs=0.06)
    assert scales.std() == pytest.approx(1, rel=0.05)
