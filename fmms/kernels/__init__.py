"""The Triton kernels: `epilogue` (the draw in registers), `stage1` (matmul and draw), `stage2` (reduction), `launch`.

Importing this package does not import Triton. `launch_module()` does, and decides between the GPU and Triton's
interpreter, a choice that Triton makes once per process, when it is first imported.
"""

import importlib
import os
import re
import sys
from functools import cache

import torch

INTERPRETER_HELP = (
    "start Python with TRITON_INTERPRET=1 in the environment, or use impl='torch', to sample from CPU tensors here"
)


def launch_module(device: torch.device):
    """`fmms.kernels.launch`, ready for tensors on `device`.

    On a machine without a GPU the first call switches Triton to its interpreter. Where there is a GPU that would make
    later GPU calls slow without a word, so the caller has to ask for it.

    Raises:
        ValueError: Triton is missing; or `device` is a CPU and Triton compiles for a GPU in this process, or its
            interpreter does not work with the NumPy that is installed.
    """
    if "triton" not in sys.modules:
        if importlib.util.find_spec("triton") is None:
            raise ValueError(
                "impl: 'triton' needs the triton package (Linux: pip install triton); impl='torch' does not"
            )
        if device.type == "cpu" and not torch.cuda.is_available():
            os.environ.setdefault("TRITON_INTERPRET", "1")
    launch = importlib.import_module("fmms.kernels.launch")
    if device.type == "cpu" and not launch.INTERPRETED:
        raise ValueError(f"impl: 'triton' runs CPU tensors in Triton's interpreter only; {INTERPRETER_HELP}")
    if launch.INTERPRETED and _interpreter_too_old():
        raise ValueError(
            f"impl: the interpreter of Triton {_version('triton')} does not work with NumPy {_version('numpy')};"
            " pip install 'triton>=3.7' or 'numpy<2.4', or use impl='torch'"
        )
    return launch


@cache
def _interpreter_too_old() -> bool:
    """Before 3.7 it takes int() of one-element arrays, which NumPy refuses since 2.4."""
    return _release("triton") < (3, 7) and _release("numpy") >= (2, 4)


def _release(package: str) -> tuple[int, int]:
    major, minor = re.match(r"(\d+)\.(\d+)", _version(package)).groups()
    return int(major), int(minor)


def _version(package: str) -> str:
    return sys.modules[package].__version__
